"""`Loader` yields batches on the device at memory speed, in an order that can be resumed."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from colabkit import meters
from colabkit.dataset import PackedDataset
from colabkit.errors import ColabkitError, InvalidOption, LoaderFailed, cannot, check_whole_number
from colabkit.loader.gather import GatherThread, Group, Plan, RowGather, Transform, group_bytes, label_row_bytes
from colabkit.loader.slots import PinnedSlots, RecycledSlots
from colabkit.loader.transfer import DeviceTransfer
from colabkit.pack_format import SAMPLES
from colabkit.sampler import epoch_order

__all__ = ["Loader"]

_Taken: TypeAlias = tuple[Tensor, Tensor, float, bool]  # images, labels, seconds waited, whether they were ready

_STATE_VERSION = 1
_GROUP_BYTES = 16 << 20  # gathered per hand-over; the next buffer is filled while this one is used
_GROUP_BATCHES = 32
_LEAST_PREFETCH = 4
_TICK_S = 0.25  # how often a waiting user is told of


class Loader:
    """Yields `(images, labels)` batches of a packed data set, gathered in the background.

    `images` is `uint8 [B, C, H, W]` in channels-last memory, or what `transform` makes of it; samples that are no
    images keep their stored shape and dtype, `[B, ...]`. `labels` is `int64 [B]` for classes; for several labels and
    regression it is as stored. Both are on `device`; further fields are left out. Samples are not checked against their
    CRCs, which would take as long as gathering them: `verify()` does that.

    A batch stays valid as long as it is held. Each iteration is one epoch; with `shuffle` each has an order of its own,
    which depends on `seed` and the epoch's number alone.

    Args:
        dataset: a split of a pack of rows, or a view of one, with labels.
        batch_size: samples of a batch.
        shuffle: mix the samples anew in every epoch.
        seed: of the orders.
        drop_last: leave out a last batch that is not full.
        device: where batches go; None leaves them on the CPU.
        transform: applied to each batch's images: in the background on the CPU, on the device with a GPU.
        prefetch_batches: how many batches are made ahead; None chooses by their size.

    Raises:
        InvalidOption: if an argument cannot be meant, or samples would have to be decoded.

    Attributes:
        meters: counts and seconds of each part, and of the user's waiting.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: str | torch.device | None = None,
        transform: Transform | None = None,
        prefetch_batches: int | None = None,
    ) -> None:
        act = "make a Loader"
        if not isinstance(dataset, PackedDataset):
            found = f"a {type(dataset).__name__}"
            raise InvalidOption(cannot(act, found, "a split of a pack", "Pass open_pack(path)['train']"))
        check_whole_number(act, "batch_size", batch_size, 1)
        check_whole_number(act, "seed", seed, 0)
        if prefetch_batches is not None:
            check_whole_number(act, "prefetch_batches", prefetch_batches, 1)
        if transform is not None and not callable(transform):
            found = f"transform={transform!r}"
            raise InvalidOption(cannot(act, found, "a callable or None", "Pass a function of a batch of images"))
        if drop_last and batch_size > len(dataset):
            found = f"batch_size={batch_size} with drop_last, and {len(dataset)} samples"
            raise InvalidOption(cannot(act, found, "at least one full batch", "Use a smaller batch_size"))
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.device = _usable_device(act, device)
        self.transform = transform
        self.meters = meters.LoaderMeters()
        self._gather, self._labels = _gathered(act, dataset)
        batch_bytes = max(1, batch_size * self._gather.row_bytes)
        fitting = max(1, min(_GROUP_BATCHES, _GROUP_BYTES // batch_bytes))
        ahead = prefetch_batches or max(_LEAST_PREFETCH, 2 * fitting)
        self._group_batches = max(1, min(fitting, ahead // 2))
        self._groups_ahead = max(1, ahead // self._group_batches)
        samples = self._group_batches * batch_size
        slot_bytes = sum(group_bytes(self._gather.row_bytes, label_row_bytes(self._labels), samples))
        self._slots: RecycledSlots | PinnedSlots = (
            PinnedSlots(slot_bytes, self.device)
            if self.device.type == "cuda"
            else RecycledSlots(slot_bytes, keep=self._groups_ahead + 2)
        )
        self._next_epoch = 0
        self._next_start = 0
        self._reached = (0, 0)

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + bool(rest and not self.drop_last)

    def __repr__(self) -> str:
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in order"
        return f"Loader of {self.dataset!r}: {len(self)} batches of {self.batch_size}, {order}, on {self.device}"

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the epoch of this number; a position loaded for this epoch is kept."""
        if epoch != self._next_epoch:
            self._next_epoch, self._next_start = epoch, 0
            self._reached = (epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return where the user is: what `load_state_dict` needs to go on after the last batch received."""
        epoch, samples = self._reached
        return {
            "version": _STATE_VERSION,
            "fingerprint": self.dataset.fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": epoch,
            "samples": samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on where `state` was taken, in the same order.

        Batch size, device, transform and prefetching may differ; seed and shuffle are taken from the state.

        Raises:
            InvalidOption: if the state is of other data, of an unknown version, or not whole.
        """
        act = "resume the Loader"
        if state.get("version") != _STATE_VERSION:
            found = f"a state of version {state.get('version')!r}"
            raise InvalidOption(cannot(act, found, f"version {_STATE_VERSION}", "Start the epoch anew"))
        if missing := [name for name in self.state_dict() if name not in state]:
            found = f"a state without {', '.join(missing)}"
            raise InvalidOption(cannot(act, found, "all that state_dict() gives", "Start the epoch anew"))
        if state["fingerprint"] != self.dataset.fingerprint:
            raise InvalidOption(
                cannot(act, "a state of another data set", "the state of this one", "Open the pack it was taken with")
            )
        self.shuffle, self.seed = state["shuffle"], state["seed"]
        self._next_epoch, self._next_start = self._reached = self._normalised(state["epoch"], state["samples"])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of the next epoch."""
        epoch, start = self._next_epoch, self._next_start
        self._next_epoch, self._next_start = epoch + 1, 0
        self._reached = (epoch, start)
        return self._batches(epoch, start)

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        stop = self._stop(start)
        n, seed, shuffle = len(self.dataset), self.seed, self.shuffle

        def order(first: int, last: int) -> Tensor:
            return torch.from_numpy(epoch_order(n, seed, epoch, first, last)) if shuffle else torch.arange(first, last)

        plan = Plan(order, start, stop, self.batch_size, self._group_batches, self._groups_ahead)
        meters.publish(meters.EpochStarted(self.meters, epoch, -(-(stop - start) // self.batch_size), stop - start))
        on_cpu = isinstance(self._slots, RecycledSlots)
        thread = GatherThread(
            self._labels, self._gather, plan, self._slots, self.transform if on_cpu else None, self.meters
        )
        ready = self._host_batches(thread) if on_cpu else self._device_batches(thread)
        try:
            position = start
            for images, labels, wait_s, was_ready in ready:
                position += len(labels)
                self._reached = self._normalised(epoch, position)
                counts = self.meters
                counts.batches += 1
                counts.samples += len(labels)
                counts.wait_s += wait_s
                counts.ready += was_ready
                meters.publish(meters.BatchTaken(counts))
                left = time.perf_counter()
                yield images, labels
                del images, labels
                counts.user_s += time.perf_counter() - left
        finally:
            ready.close()
            thread.close()

    def _host_batches(self, thread: GatherThread) -> Generator[_Taken, None, None]:
        while True:
            group, wait_s, was_ready = self._take(thread)
            if group is None:
                return
            batches = deque(group.batches)
            del group  # or a buffer could not be used again while its last batch is out
            while batches:
                batch = batches.popleft()
                if not batches:
                    thread.make_room()
                yield *batch, wait_s, was_ready
                wait_s, was_ready = 0.0, True

    def _device_batches(self, thread: GatherThread) -> Generator[_Taken, None, None]:
        assert isinstance(self._slots, PinnedSlots)
        transfer = DeviceTransfer(self.device, self._slots, self.transform, self.meters)
        is_over = False
        try:
            while True:
                wait_s, was_ready = 0.0, True
                while not is_over and len(transfer) <= self._group_batches and (thread.is_ready() or not len(transfer)):
                    group, waited_s, at_once = self._take(thread)
                    wait_s, was_ready = wait_s + waited_s, was_ready and at_once
                    if group is None:
                        is_over = True
                    else:
                        transfer.submit(group)
                        thread.make_room()
                if not len(transfer):
                    return
                yield *transfer.take(), wait_s, was_ready
        finally:
            transfer.close()

    def _take(self, thread: GatherThread) -> tuple[Group | None, float, bool]:
        """Return the next group, the seconds waited for it, and whether it was ready; tell listeners while waiting."""
        was_ready = thread.is_ready()
        started = time.perf_counter()
        while True:
            try:
                return thread.take(_TICK_S), time.perf_counter() - started, was_ready
            except queue.Empty:
                meters.publish(meters.Waiting(self.meters, time.perf_counter() - started))
            except (ColabkitError, KeyboardInterrupt):
                raise
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
                raise LoaderFailed(
                    cannot("make a batch", found, "a transform and a pack without errors", "Check both")
                ) from error

    def _stop(self, start: int) -> int:
        """Return the position at which an epoch entered at `start` ends."""
        n = len(self.dataset)
        return n - (n - start) % self.batch_size if self.drop_last else n

    def _normalised(self, epoch: int, samples: int) -> tuple[int, int]:
        """Return epoch and samples received; a whole epoch is the next one's start."""
        return (epoch, samples) if samples < self._stop(samples) else (epoch + 1, 0)


def _gathered(act: str, dataset: PackedDataset) -> tuple[RowGather, Tensor]:
    """Return what gathers the samples' rows, and their labels."""
    maps = dataset.maps()
    if not maps:
        found = f"samples that are stored as {dataset.info.meta['encoding']!r} and have to be decoded"
        if dataset.info.meta.get("is_foreign"):
            found = "samples that have to be read through HDF5"
        elif maps is not None:
            found = "a split without samples"
        next_step = "Pack them with encoding='raw' and a size, or use torch's DataLoader(dataset, ...)"
        raise InvalidOption(cannot(act, found, "rows that are ready to use", next_step))
    if dataset.labels is None:
        next_step = "Pack them with labels, or use torch's DataLoader(dataset, ...)"
        raise InvalidOption(cannot(act, "samples without labels", "a label for each sample", next_step))
    are_images = dataset.info.fields[SAMPLES].content == "image"
    return RowGather(maps, dataset.numbers, are_images), dataset.labels


def _usable_device(act: str, device: str | torch.device | None) -> torch.device:
    try:
        chosen = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InvalidOption(cannot(act, f"device={device!r}", "'cpu' or 'cuda'", "Use one of these")) from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count() or 'no'} usable GPUs here"
        raise InvalidOption(cannot(act, found, f"one for device={device!r}", "Choose a GPU runtime or device='cpu'"))
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidOption(cannot(act, f"device={device!r}", "'cpu' or 'cuda'", "Move batches yourself"))
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen
