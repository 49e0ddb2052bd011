"""Load samples one at a time in worker processes, with torch's `DataLoader`.

The generators of Python, NumPy and torch are seeded from the loader's seed, the epoch and each sample's position, so a
sample is the same with any number of workers, and after a resume.
"""

from __future__ import annotations

import errno
import functools
import os
import pickle
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from colabkit.foundation import ColabkitError, InvalidOption, LoaderFailed, cannot, file_changes, format_bytes, meters
from colabkit.loading.augment.transform import Draws
from colabkit.loading.engine.batches import Batch, BatchPlan, DeferredErrors, fields_of, map_tensors
from colabkit.loading.engine.columns import is_channels_last
from colabkit.loading.engine.device import DeviceTransfer, send
from colabkit.loading.engine.gather import PinnedSlots, pinned
from colabkit.loading.engine.options import LoaderOptions
from colabkit.loading.engine.user_code import (
    loader_failed,
    reporting_loading_errors,
    restored_generators,
    seed_generators,
    seeds_of,
)
from colabkit.loading.inspection import bytes_in, name_of
from colabkit.packs import Indices

# Interval in seconds of the events that report how long the user has been waiting for a batch.
_TICK_S = 0.25
_SENT_AHEAD = 2
# Worker processes send the tensors of a batch through files in this folder.
_SHM = Path("/dev/shm")
_MORE_SHM = "Remove data that is staged there, use a smaller batch_size= or num_workers=, or use num_workers=0"
# Transforms of torchvision that also take NumPy arrays.
_TAKE_ARRAYS = frozenset({"Lambda", "ToImage", "ToPILImage", "ToTensor"})

# The loader's seed, the epoch, and the position and the index of a sample.
SampleKey: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True)
class WorkerFailure:
    """An error while a batch was made or sent, on its way from a worker to the user.

    Attributes:
        text: the operation that raised the error and the error's own text, or the cause if it is known.
        next_step: how to reproduce or fix the error.
        error: the error, pickled if it comes from a worker process.
        traceback: traceback in the worker process, as text.
    """

    text: str
    next_step: str
    error: Exception | bytes
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception, operation: str, next_step: str) -> WorkerFailure:
        """Return the failure for an error; an error that cannot be pickled becomes a `RuntimeError` with its text."""
        text = f"{type(error).__name__}: {error}"
        found = f"{operation} raised {text}"
        if "shared memory" in text and os.strerror(errno.ENOSPC) in text:
            free = format_bytes(file_changes.free_bytes(_SHM))
            found, next_step = f"{_SHM} has {free} free, too little for the batches of the worker processes", _MORE_SHM
        if get_worker_info() is None:
            return cls(found, next_step, error)
        try:
            pickled = pickle.dumps(error)
            # Unpickling fails for errors whose constructor arguments differ from `args`.
            pickle.loads(pickled)  # noqa: S301 - from our own processes
        except Exception:
            pickled = pickle.dumps(RuntimeError(text))
        return cls(found, next_step, pickled, "".join(traceback.format_exception(error)))

    def cause(self) -> Exception:
        """Return the error, with the worker's traceback as a note."""
        if isinstance(self.error, Exception):
            return self.error
        error: Exception = pickle.loads(self.error)  # noqa: S301 - from our own processes
        error.add_note(f"In a worker process:\n{self.traceback}")
        return error


@dataclass
class WorkerBatch:
    """A batch from a worker, or the error that replaces it.

    The queue between processes pickles its items in a separate thread. An error there would lose the batch, and the
    user would wait forever. The batch is therefore pickled beforehand; if this fails, the error replaces it.

    Attributes:
        batch: result of `collate_fn`.
        samples: number of samples passed to `collate_fn`.
        busy_s: seconds that the worker took to make the batch.
        error: error that replaces the batch.
        cpu_s: CPU seconds that the worker took to make this batch and to send the previous one.
        wait_s: seconds that the worker was idle before it made the batch.
        made_at: time of completion from `time.perf_counter()`, whose reference point is the same in all processes.
    """

    batch: Any
    samples: int
    busy_s: float
    error: ColabkitError | WorkerFailure | None = None
    cpu_s: float = 0.0
    wait_s: float = 0.0
    made_at: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "batch": None}
        try:
            state["batch"] = bytes(ForkingPickler.dumps(self.batch))
        except Exception as error:
            next_step = "Return tensors, arrays and plain values from dataset[i] and collate_fn, or use num_workers=0"
            state["error"] = WorkerFailure.of(error, "sending a batch from a worker process", next_step)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.batch is not None:
            self.batch = pickle.loads(self.batch)  # noqa: S301 - from our own processes

    def pin_memory(self) -> WorkerBatch:
        """Put the batch in page-locked memory; `DataLoader` calls this."""
        self.batch = map_tensors(self.batch, pinned)
        return self


def takes_tensors(transform: Any) -> bool:
    """Return whether a transform begins with one of torchvision that leaves NumPy arrays unchanged or rejects them."""
    if isinstance(transform, nn.Sequential) and len(transform):
        return takes_tensors(transform[0])
    kind = type(transform)
    if not kind.__module__.startswith("torchvision.transforms"):
        return False
    # Transforms that apply others, such as `Compose` and `RandomApply`, list them.
    steps = getattr(transform, "transforms", None)
    return takes_tensors(steps[0]) if steps else kind.__name__ not in _TAKE_ARRAYS


def apply_to_tensor(transform: Callable[[Any], Any], sample: Any) -> Any:
    """Apply a transform of torchvision to a sample, as a tensor if the sample is an array.

    Raises:
        InvalidOption: if the sample is an array `[H, W, C]`.
    """
    if isinstance(sample, np.ndarray):
        if is_channels_last(sample.shape):
            found = f"the array has shape {[*sample.shape]}, with the channels last"
            next_step = "Start the transform with torchvision.transforms.v2.ToImage()"
            raise InvalidOption(cannot("transform a sample", found, "shape [C, H, W] for this transform", next_step))
        # Tensors hold neither text nor objects.
        with suppress(TypeError):
            # Copy the sample, because a transform may change it in place.
            sample = torch.from_numpy(np.array(sample, sample.dtype.newbyteorder("=")))
    return transform(sample)


class _KeyedDataset(Dataset[Any]):
    """A map-style dataset that makes a batch from a list of keys; each key seeds the random numbers of its sample."""

    def __init__(self, dataset: Any, sample_transform: Callable[[Any], Any] | None, collate: Any) -> None:
        self._dataset = dataset
        self._transform = sample_transform
        self._collate = collate
        self._done_at = self._done_cpu_s = 0.0

    def __getitems__(self, keys: Sequence[SampleKey]) -> WorkerBatch:
        is_alone, began = get_worker_info() is None, time.perf_counter()
        # In a worker process, count the CPU time of all threads, because a second thread sends the batches.
        cpu_s = time.thread_time if is_alone else time.process_time
        cpu_began_s = cpu_s()
        with restored_generators() if is_alone else nullcontext():
            made = self._make(keys)
        if self._done_at and not is_alone:
            made.wait_s = began - self._done_at
            cpu_began_s = self._done_cpu_s
        self._done_at, self._done_cpu_s = time.perf_counter(), cpu_s()
        made.made_at, made.cpu_s = self._done_at, self._done_cpu_s - cpu_began_s
        return made

    def _make(self, keys: Sequence[SampleKey]) -> WorkerBatch:
        began = time.perf_counter()
        index, next_step = -1, ""
        try:
            samples = []
            for (*_, index), seed in zip(keys, _seeds_of(keys), strict=True):
                next_step = f"Run dataset[{index}] to see the error"
                seed_generators(seed)
                sample = self._dataset[index]
                if self._transform is not None:
                    next_step = f"Run transform on the first field of dataset[{index}] to see the error"
                    values, whole = fields_of(sample)
                    values[0] = self._transform(values[0])
                    sample = whole(values)
                samples.append(sample)
            next_step, index = f"Run collate_fn on a list of samples such as dataset[{index}] to see the error", -1
            if self._collate is default_collate:
                next_step = "Resize or crop all samples to one shape in the dataset, or pass collate_fn="
            batch = self._collate(samples)
        except ColabkitError as error:
            return WorkerBatch(None, len(keys), 0.0, error)
        except Exception as error:
            operation = f"sample {index}" if index >= 0 else "collate_fn"
            name = name_of(self._dataset, index) if index >= 0 else ""
            failure = WorkerFailure.of(error, f"{operation} ({name})" if name else operation, next_step)
            if index < 0 and self._collate is default_collate:
                text = _shapes_differ([key[-1] for key in keys], samples)
                failure = replace(failure, text=text or failure.text)
            return WorkerBatch(None, len(keys), 0.0, failure)
        return WorkerBatch(batch, len(keys), time.perf_counter() - began)


def _shapes_differ(indices: Sequence[int], samples: Sequence[Any]) -> str:
    shapes = [[getattr(value, "shape", None) for value in fields_of(sample)[0]] for sample in samples]
    for index, found in zip(indices, shapes, strict=True):
        for first, other in zip(shapes[0], found, strict=False):
            if first is not None and other is not None and first != other:
                return f"sample {indices[0]} has the shape {tuple(first)}, but sample {index} has {tuple(other)}"
    return ""


def _seeds_of(keys: Sequence[SampleKey]) -> list[int]:
    if not keys:
        return []
    seed, epoch, *_ = keys[0]
    return seeds_of(Draws(seed, epoch, np.array([position for *_, position, _ in keys])))


class ProcessEngine:
    """An engine that makes batches sample by sample, in worker processes or, with 0 workers, in the caller's thread.

    Batches for a GPU are moved to page-locked memory first. `sample_transform` applies to each sample's first field.
    """

    plan_batches = 1

    def __init__(
        self, options: LoaderOptions, dataset: Any, sample_transform: Callable[[Any], Any] | None = None
    ) -> None:
        keyed = _KeyedDataset(dataset, sample_transform, options.collate_fn or default_collate)
        workers, pins, persists = options.workers, options.is_on_gpu, options.persistent_workers
        prefetch = max(1, -(-(options.prefetch_batches or 2 * workers) // workers)) if workers else None
        self._new_pool = functools.partial(_ProcessPool, keyed, workers, prefetch, pins, persists)
        self._is_persistent = persists
        # Idle pools by the process that made them: a forked child must not use those of its parent.
        self._idle: dict[int, _ProcessPool] = {}
        self._most_ahead = workers * (prefetch or 0)
        self._device = options.device
        self._counts = options.counts
        self._slots = PinnedSlots(0, options.device) if pins else None

    def batches(self, seed: int, epoch: int, plans: Iterator[BatchPlan]) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch; closing the generator stops its workers unless they are persistent."""
        batches = self._host_batches(seed, epoch, plans)
        if self._slots is None:
            yield from batches
        else:
            transfer = DeviceTransfer(self._device, self._slots, self._counts)
            # Use `map`: a loop variable would keep each batch, and so its memory, alive until the next one.
            yield from send(transfer, map(_alone, batches), lambda under_way: under_way >= _SENT_AHEAD)

    def _host_batches(self, seed: int, epoch: int, plans: Iterator[BatchPlan]) -> Generator[Batch, None, None]:
        requests = deque([time.perf_counter()], maxlen=max(1, self._most_ahead))
        with reporting_loading_errors():
            for made, end, positions in self._made_batches(seed, epoch, plans):
                if isinstance(made.error, ColabkitError):
                    raise made.error
                if made.error is not None:
                    raise loader_failed(made.error.text, made.error.next_step) from made.error.cause()
                size = bytes_in(made.batch)
                self._counts.add("samples", made.samples, size, made.busy_s, made.wait_s, cpu_s=made.cpu_s)
                if self._most_ahead:
                    # The batch was in the queue during each request that followed its completion.
                    self._counts.queued += sum(made.made_at <= at for at in requests)
                    self._counts.queue_room += self._most_ahead
                yield Batch(made.batch, positions, end, was_ready=made.made_at <= requests[-1])
                requests.append(time.perf_counter())

    def _made_batches(
        self, seed: int, epoch: int, plans: Iterator[BatchPlan]
    ) -> Iterator[tuple[WorkerBatch, int, Indices]]:
        waiting: deque[tuple[int, Indices]] = deque()
        keys = DeferredErrors(_keys_of(seed, epoch, plans, waiting))
        pool = self._idle_pool() or self._new_pool()
        is_sound = False
        try:
            ready = pool.begin(keys)
            while (made := self._next_of(ready)) is not None:
                yield made, *waiting.popleft()
            is_sound = True
        # The user has ended the iteration early.
        except GeneratorExit:
            is_sound = True
            raise
        # The pipes between the processes raise these errors if a worker has died.
        except (OSError, EOFError) as error:
            raise _worker_died(f"a worker process exited unexpectedly ({type(error).__name__}: {error})") from error
        # `DataLoader` raises this error if a worker dies.
        except RuntimeError as error:
            raise _worker_died(str(error).partition("\n")[0].rstrip(" .")) from error
        finally:
            if is_sound and self._is_persistent and os.getpid() not in self._idle:
                self._idle[os.getpid()] = pool
            else:
                pool.close()
        keys.raise_error()

    def _idle_pool(self) -> _ProcessPool | None:
        """Return the live worker processes of an earlier epoch, if no other iteration uses them."""
        pool = self._idle.pop(os.getpid(), None)
        return pool if pool is not None and pool.is_alive else None

    def _next_of(self, ready: Iterator[WorkerBatch]) -> WorkerBatch | None:
        began = time.perf_counter()
        while True:
            try:
                return next(ready, None)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
            # With a timeout, torch does not notice that the thread that pins batches has died.
            pinning = getattr(ready, "_pin_memory_thread", None)
            if pinning is not None and not pinning.is_alive():
                raise RuntimeError("the thread that pins batches exited unexpectedly")
            meters.publish(meters.DataWait(self._counts, time.perf_counter() - began))


def _alone(batch: Batch) -> tuple[list[Batch], None]:
    return [batch], None


def _worker_died(found: str) -> LoaderFailed:
    next_step = "Reduce num_workers= if memory is short, or use num_workers=0 to see the error"
    return LoaderFailed(cannot("make a batch", found, "", next_step))


def _keys_of(
    seed: int, epoch: int, plans: Iterator[BatchPlan], waiting: deque[tuple[int, Indices]]
) -> Iterator[list[SampleKey]]:
    for plan in plans:
        for (start, stop), end in zip(plan.spans, plan.ends, strict=True):
            positions, indices = plan.positions[start:stop], plan.indices[start:stop].tolist()
            waiting.append((end, positions))
            yield [(seed, epoch, *key) for key in zip(positions.tolist(), indices, strict=True)]


class _ProcessPool:
    """Worker processes for one epoch, or for several in sequence."""

    def __init__(
        self, dataset: Dataset[Any], num_workers: int, prefetch: int | None, pins: bool, persistent_workers: bool
    ) -> None:
        self._sampler = _KeySampler()
        self._ready: Any = None
        self._loader = DataLoader(
            dataset,
            batch_sampler=self._sampler,
            num_workers=num_workers,
            collate_fn=_unchanged,
            prefetch_factor=prefetch,
            pin_memory=pins,
            persistent_workers=persistent_workers,
            # Without a separate generator, each epoch would draw from the global one.
            generator=torch.Generator(),
        )

    def begin(self, keys: Iterable[list[SampleKey]]) -> Iterator[WorkerBatch]:
        """Return an iterator over the batches of `keys`; the remaining batches of earlier keys are dropped."""
        self._sampler.keys = keys
        # Have no timeout while persistent workers resume: torch would raise an error instead of waiting for them.
        # `DataLoader(timeout=)` cannot change later, so set the private attribute.
        if self._ready is not None:
            self._ready._timeout = 0  # noqa: SLF001 - see above
        # The generator is on the CPU, whatever the default device is.
        with torch.device("cpu"):
            self._ready = iter(self._loader)
        if self._loader.num_workers:
            self._ready._timeout = _TICK_S  # noqa: SLF001 - see above
        ready: Iterator[WorkerBatch] = self._ready
        return ready

    @property
    def is_alive(self) -> bool:
        """Whether all processes are alive; a keyboard interrupt ends them all."""
        return all(worker.is_alive() for worker in getattr(self._ready, "_workers", ()))

    def close(self) -> None:
        """End the processes, which a traceback that refers to them would otherwise keep alive."""
        shut_down = getattr(self._ready, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


class _KeySampler:
    """A batch sampler that yields the current keys, because a `DataLoader` cannot change its sampler."""

    keys: Iterable[list[SampleKey]] = ()

    def __iter__(self) -> Iterator[list[SampleKey]]:
        return iter(self.keys)


def _unchanged(made: Any) -> Any:
    return made
