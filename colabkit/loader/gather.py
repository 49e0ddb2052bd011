"""The loader's background thread: it gathers shuffled rows of the memory map into host buffers, some batches ahead.

Small batches are gathered several at a time, because handing one over between threads costs more than gathering 512
CIFAR images. The first hand-over is one batch, the next twice as many, so that training starts at once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colabkit.loader.slots import PinnedSlots, RecycledSlots
from colabkit.meters import LoaderMeters

__all__ = ["GatherThread", "Group", "Plan", "RowGather", "Transform", "group_bytes", "label_row_bytes"]

logger = logging.getLogger("colabkit")

_CLOSE_S = 10.0

Order = Callable[[int, int], Tensor]
Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one pass gathers: positions `start` to `stop` of `order`, in batches, at most `group_batches` at a time."""

    order: Order
    start: int
    stop: int
    batch_size: int
    group_batches: int
    groups_ahead: int


@dataclass(frozen=True, slots=True)
class Group:
    """Batches gathered together: (images, labels) pairs, and the buffer that images with no transform lie in."""

    batches: tuple[tuple[Tensor, Tensor], ...]
    buffer: Tensor


def group_bytes(row_bytes: int, label_bytes: int, samples: int) -> tuple[int, int]:
    """Return the bytes that a group's rows take in a pinned buffer, and its labels after them, which start aligned."""
    return -(-samples * row_bytes // 8) * 8, samples * label_bytes


def label_row_bytes(labels: Tensor) -> int:
    """Return the bytes of one sample's label."""
    return labels.shape[1:].numel() * labels.dtype.itemsize


class RowGather:
    """Gathers rows of maps into a buffer by the fastest branch of `torch.index_select`.

    That is a parallel memcpy of rows, taken when a row has fewer than 32,768 elements; so rows are viewed as the widest
    integers that divide them. Source: `index_select_out_cpu_` in ATen's TensorAdvancedIndexing.cpp. Rows that lie in
    several files are gathered file by file, then put in order: two copies instead of one.

    Args:
        maps: rows of each file, `[N, ...]`, of one shape and dtype.
        numbers: the rows, counted through all files, that a view has; None for all.
        are_images: whether rows are `[H, W, C]`.
    """

    def __init__(self, maps: Sequence[Tensor], numbers: Tensor | None, are_images: bool) -> None:
        self._shape = maps[0].shape[1:]
        self._dtype = maps[0].dtype
        self._numbers = numbers
        self._are_images = are_images
        self.row_bytes = self._shape.numel() * self._dtype.itemsize
        as_bytes = [rows.reshape(-1).view(torch.uint8).view(len(rows), self.row_bytes) for rows in maps]
        self._wide = next(
            dtype
            for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
            if self.row_bytes % dtype.itemsize == 0 and all(rows.data_ptr() % dtype.itemsize == 0 for rows in as_bytes)
        )
        self._maps = [rows.view(self._wide) for rows in as_bytes]
        self._stops = torch.tensor([len(rows) for rows in maps]).cumsum(0)

    def gather(self, indices: Tensor, buffer: Tensor) -> Tensor:
        """Copy the rows at `indices` into `buffer` and return them, images as `[B, C, H, W]`, channels last."""
        wide = buffer.view(self._wide).view(len(indices), -1)
        rows = indices if self._numbers is None else self._numbers[indices]
        if len(self._maps) == 1:
            torch.index_select(self._maps[0], 0, rows, out=wide)
        else:
            self._gather_by_file(rows, wide)
        gathered = buffer.view(self._dtype).view(len(indices), *self._shape)
        return gathered.movedim(-1, 1) if self._are_images else gathered

    def _gather_by_file(self, rows: Tensor, wide: Tensor) -> None:
        owner = torch.bucketize(rows, self._stops, right=True)
        for number in owner.unique().tolist():
            places = (owner == number).nonzero().flatten()
            start = int(self._stops[number]) - len(self._maps[number])
            wide.index_copy_(0, places, self._maps[number].index_select(0, rows[places] - start))


class GatherThread:
    """Runs a plan in a daemon thread; `take` gives its groups in order.

    Args:
        labels: of all samples, gathered like the rows.
        plan: what to gather.
        slots: where rows go.
        transform: applied to each batch's images here, or None.
        meters: counts the parts `gather` and `transform`.
    """

    def __init__(
        self,
        labels: Tensor,
        gather: RowGather,
        plan: Plan,
        slots: RecycledSlots | PinnedSlots,
        transform: Transform | None,
        meters: LoaderMeters,
    ) -> None:
        self._labels = labels
        self._gather = gather
        self._plan = plan
        self._slots = slots
        self._transform = transform
        self._meters = meters
        self._ready: queue.SimpleQueue[Group | BaseException | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(plan.groups_ahead)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="colabkit-loader", daemon=True)
        self._thread.start()

    def is_ready(self) -> bool:
        """Return whether `take` would answer at once."""
        return not self._ready.empty()

    def take(self, timeout: float) -> Group | None:
        """Return the next group, or None after the last.

        Args:
            timeout: seconds to wait.

        Raises:
            queue.Empty: if there is none by then.
            BaseException: what the thread failed with.
        """
        group = self._ready.get(timeout=timeout)
        if isinstance(group, BaseException):
            raise group
        return group

    def make_room(self) -> None:
        """Let one more group be made ahead; call it once for each group taken, when its last batch is handed out."""
        self._room.release()

    def close(self) -> None:
        """Stop the thread and wait for it, though not for ever on a transform that hangs; may be called twice."""
        self._stopping.set()
        self._room.release()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the loader's thread still runs a transform after %g s and is left alone", _CLOSE_S)

    def _run(self) -> None:
        try:
            for start, stop in self._groups():
                self._room.acquire()
                if self._stopping.is_set():
                    return
                self._ready.put(self._make(start, stop))
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def _groups(self) -> Iterator[tuple[int, int]]:
        plan = self._plan
        start, batches = plan.start, 1
        while start < plan.stop:
            stop = min(start + batches * plan.batch_size, plan.stop)
            yield start, stop
            start, batches = stop, min(2 * batches, plan.group_batches)

    def _make(self, start: int, stop: int) -> Group:
        indices = self._plan.order(start, stop)
        kind, shape = self._labels.dtype, (len(indices), *self._labels.shape[1:])
        row_bytes, label_bytes = group_bytes(self._gather.row_bytes, label_row_bytes(self._labels), len(indices))
        if isinstance(self._slots, PinnedSlots):
            buffer = self._slots.lend(row_bytes + label_bytes)
            labels = buffer[row_bytes : row_bytes + label_bytes].view(kind).view(shape)
        else:  # labels of their own: users keep them longer than the images, whose buffer they would hold
            buffer = self._slots.lend(row_bytes)
            labels = torch.empty(shape, dtype=kind)
        with self._meters.busy("gather", len(indices), row_bytes):
            images = self._gather.gather(indices, buffer[: len(indices) * self._gather.row_bytes])
            torch.index_select(self._labels, 0, indices, out=labels)
        batches = list(zip(images.split(self._plan.batch_size), labels.split(self._plan.batch_size), strict=True))
        if self._transform is not None:
            for number, (some, their_labels) in enumerate(batches):
                if self._stopping.is_set():
                    break
                try:
                    with self._meters.busy("transform", len(some), some.nbytes):
                        batches[number] = self._transform(some), their_labels
                except BaseException:
                    self._ready.put(Group(tuple(batches[:number]), buffer))  # those before it are good
                    raise
        return Group(tuple(batches), buffer)
