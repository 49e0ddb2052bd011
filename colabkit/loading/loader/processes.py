"""What can only be asked sample by sample, in Python, is asked in worker processes, by torch's own `DataLoader`.

Every sample is made with the generators of Python, NumPy and torch seeded by its position, so it comes out the same
with any number of workers, and after a resume.
"""

from __future__ import annotations

import functools
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from colabkit.foundation import ColabkitError
from colabkit.loading.augment.draws import Draws
from colabkit.loading.loader.failing import failed, name_of
from colabkit.loading.loader.portions import Numbers, Portion
from colabkit.loading.loader.seeding import generators_kept, seed_generators, seeds_of
from colabkit.loading.loader.slots import warn_unpinned
from colabkit.loading.loader.structures import fields_of, mapped

_TICK_S = 0.25  # how often a waiting user is told of

Key = tuple[int, int, int, int]  # seed, epoch, position, number


@dataclass(frozen=True)
class Failure:
    """What other people's code raised, as it goes from a worker to the user.

    Attributes:
        text: where it happened, and what it says.
        next_step: how to see it happen.
        error: itself; pickled where it comes from another process.
        told: its traceback there, as a text.
    """

    text: str
    next_step: str
    error: Exception | bytes
    told: str = ""

    def cause(self) -> Exception:
        """Return the error, with the worker's traceback as a note."""
        if isinstance(self.error, Exception):
            return self.error
        error: Exception = pickle.loads(self.error)  # noqa: S301 - of our own process
        error.add_note(f"In a worker process:\n{self.told}")
        return error


@dataclass
class WorkerBatch:
    """A batch from a worker, or why there is none.

    Attributes:
        batch: what `collate_fn` made of the samples.
        samples: how many.
        busy_s: seconds it took the worker.
        cpu_s: seconds of a CPU that the worker took for it, with handing over the batch before.
        error: what went wrong: an error of this package, or of other people's code.
        wait_s: seconds that the worker had nothing to do before.
        made_at: when it was done, by `time.perf_counter()`, which all processes share.

    One that goes to another process is pickled in a thread of the queue between them, where an error would be lost with
    the batch, which would be waited for without end: so the batch is pickled apart, and its error goes in its place.
    """

    batch: Any
    samples: int
    busy_s: float
    error: ColabkitError | Failure | None = None
    cpu_s: float = 0.0
    wait_s: float = 0.0
    made_at: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "batch": None}
        try:
            state["batch"] = bytes(ForkingPickler.dumps(self.batch))
        except Exception as error:
            next_step = "Return tensors, arrays and plain values from dataset[i] and collate_fn, or use num_workers=0"
            state["error"] = _failure(error, "a batch that a worker process cannot hand over: ", next_step)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.batch is not None:
            self.batch = pickle.loads(self.batch)  # noqa: S301 - of our own process

    def pin_memory(self) -> WorkerBatch:
        """Put the batch in page-locked memory; `DataLoader` asks for it."""
        try:
            self.batch = mapped(self.batch, lambda tensor: tensor.pin_memory())
        except RuntimeError as error:
            warn_unpinned(error)
        return self


class _Sampled(Dataset[Any]):
    """A map-style data set that is asked for a whole batch by keys, each with a seed of its own."""

    def __init__(self, dataset: Any, sample_transform: Callable[[Any], Any] | None, collate: Any) -> None:
        self._dataset = dataset
        self._transform = sample_transform
        self._collate = collate
        self._done_at = self._done_cpu_s = 0.0

    def __getitems__(self, keys: Sequence[Key]) -> WorkerBatch:
        is_alone, began = get_worker_info() is None, time.perf_counter()
        cpu_s = time.thread_time if is_alone else time.process_time  # a worker's other thread hands batches over
        cpu_began_s = cpu_s()
        with generators_kept() if is_alone else nullcontext():
            made = self._made(keys)
        if self._done_at and not is_alone:
            made.wait_s = began - self._done_at
            cpu_began_s = self._done_cpu_s
        self._done_at, self._done_cpu_s = time.perf_counter(), cpu_s()
        made.made_at, made.cpu_s = self._done_at, self._done_cpu_s - cpu_began_s
        return made

    def _made(self, keys: Sequence[Key]) -> WorkerBatch:
        began = time.perf_counter()
        number, next_step = -1, ""
        try:
            samples = []
            for (*_, number), seed in zip(keys, _seeds_of(keys), strict=True):
                next_step = f"Run dataset[{number}] to see it"
                seed_generators(seed)
                sample = self._dataset[number]
                if self._transform is not None:
                    next_step = f"Run transform on the first field of dataset[{number}] to see it"
                    values, whole = fields_of(sample)
                    values[0] = self._transform(values[0])
                    sample = whole(values)
                samples.append(sample)
            next_step, number = f"Run collate_fn on a list of dataset[{number}] and others to see it", -1
            if self._collate is default_collate:
                next_step = "Give samples one shape, in a transform of the data set, or pass collate_fn="
            batch = self._collate(samples)
        except ColabkitError as error:
            return WorkerBatch(None, len(keys), 0.0, error)
        except Exception as error:
            where = f"sample {number}: " if number >= 0 else "collate_fn: "
            name = name_of(self._dataset, number) if number >= 0 else ""
            return WorkerBatch(None, len(keys), 0.0, _failure(error, f"{name}, {where}" if name else where, next_step))
        return WorkerBatch(batch, len(keys), time.perf_counter() - began)


class SampleWorkers:
    """Makes the batches of one epoch in worker processes, in order.

    Attributes:
        ahead: how many batches may be under way or waiting; 0 if they are made where they are asked for.

    Args:
        dataset: map-style.
        sample_transform: applied to each sample's first field, or None.
        collate_fn: makes a batch of samples; None for torch's.
        num_workers: processes; with 0 samples are made where the batch is asked for.
        prefetch_batches: batches that each process makes ahead; None for torch's default.
        pin_memory: whether a thread puts batches in page-locked memory.
        persistent_workers: whether processes live on between epochs.
    """

    def __init__(
        self,
        dataset: Any,
        sample_transform: Callable[[Any], Any] | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int,
        prefetch_batches: int | None,
        pin_memory: bool,
        persistent_workers: bool = False,
    ) -> None:
        sampled = _Sampled(dataset, sample_transform, collate_fn or default_collate)
        prefetch = max(1, -(-(prefetch_batches or 2 * num_workers) // num_workers)) if num_workers else None
        self._new_pool = functools.partial(_Pool, sampled, num_workers, prefetch, pin_memory, persistent_workers)
        self._is_kept = persistent_workers
        self._idle: dict[int, _Pool] = {}  # which no iteration uses, by their process: a forked child has none
        self.ahead = num_workers * (prefetch or 0)

    def batches(
        self, seed: int, epoch: int, portions: Iterator[Portion], on_wait: Callable[[float], None]
    ) -> Iterator[tuple[WorkerBatch, int, Numbers]]:
        """Yield the batches of an epoch, each with how many samples have been received after it, and its position.

        Args:
            seed: of the samples.
            epoch: its number.
            portions: what to make.
            on_wait: told a few times a second how long a batch has been waited for; not where batches are pinned, and
                not of processes that live on.
        """
        plan = _WorkerPlan(seed, epoch, portions)
        pool = self._kept_pool() or self._new_pool()
        is_sound = False
        try:
            ready = pool.begin(plan)
            while (made := _next_of(ready, on_wait)) is not None:
                yield made, *plan.taken()
            is_sound = True
        except GeneratorExit:  # the user has seen enough
            is_sound = True
            raise
        except (OSError, EOFError) as error:  # of the pipes between processes
            raise RuntimeError(f"a worker process is gone ({type(error).__name__}: {error})") from error
        finally:
            if is_sound and self._is_kept and os.getpid() not in self._idle:
                self._idle[os.getpid()] = pool
            else:
                pool.close()
        if isinstance(plan.error, ColabkitError):
            raise plan.error
        if plan.error is not None:
            raise failed(plan.error) from plan.error

    def _kept_pool(self) -> _Pool | None:
        """Return the processes of an epoch before, if there are some that live and that no other iteration uses."""
        pool = self._idle.pop(os.getpid(), None)
        return pool if pool is not None and pool.is_alive else None


class _Pool:
    """Worker processes, for one epoch or for several in turn."""

    def __init__(
        self, dataset: Dataset[Any], num_workers: int, prefetch: int | None, pin_memory: bool, persistent_workers: bool
    ) -> None:
        self._plans = _Plans()
        self._ready: Iterator[WorkerBatch] | None = None
        self._loader = DataLoader(
            dataset,
            batch_sampler=self._plans,
            num_workers=num_workers,
            collate_fn=_as_made,
            prefetch_factor=prefetch,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            # With a limit torch would not see that its pinning thread is gone, nor wait for processes that begin anew.
            timeout=_TICK_S if num_workers and not (pin_memory or persistent_workers) else 0,
            generator=torch.Generator(),  # or each epoch would draw from the caller's
        )

    def begin(self, plan: _WorkerPlan) -> Iterator[WorkerBatch]:
        """Return the batches of a plan; what is left of the one before it is dropped."""
        self._plans.now = plan
        with torch.device("cpu"):  # where its generator is, whatever the default device
            self._ready = iter(self._loader)
        return self._ready

    @property
    def is_alive(self) -> bool:
        """Whether no process has ended, as an interrupt from the keyboard ends all."""
        return all(worker.is_alive() for worker in getattr(self._ready, "_workers", ()))

    def close(self) -> None:
        """End the processes, which else would live as long as an error whose traceback holds them."""
        shut_down = getattr(self._ready, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


class _Plans:
    """A batch sampler that gives what is planned now: a `DataLoader` takes no other once it is made."""

    now: _WorkerPlan

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.now)


def _next_of(ready: Iterator[WorkerBatch], on_wait: Callable[[float], None]) -> WorkerBatch | None:
    """Return the next batch, None after the last; torch may be asked again after it gave up waiting."""
    began = time.perf_counter()
    while True:
        try:
            return next(ready, None)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
        on_wait(time.perf_counter() - began)


class _WorkerPlan:
    """The keys of an epoch's batches, as a batch sampler; remembers those that are not taken yet.

    Attributes:
        error: at which the batches end, since it shall come after those before it; None if they are whole.
    """

    def __init__(self, seed: int, epoch: int, portions: Iterator[Portion]) -> None:
        self.error: Exception | None = None
        self._epoch = seed, epoch
        self._portions = portions
        self._waiting: list[tuple[int, Numbers]] = []

    def __iter__(self) -> Iterator[list[Key]]:
        try:
            yield from self._keys()
        except Exception as error:
            self.error = error

    def _keys(self) -> Iterator[list[Key]]:
        for portion in self._portions:
            start = 0
            for size, reached in zip(portion.sizes, portion.reached, strict=True):
                stop = start + size
                positions, numbers = portion.positions[start:stop], portion.numbers[start:stop].tolist()
                self._waiting.append((reached, positions))
                yield [(*self._epoch, *key) for key in zip(positions.tolist(), numbers, strict=True)]
                start = stop

    def taken(self) -> tuple[int, Numbers]:
        """Return how many samples have been received after the oldest batch not taken yet, and its positions."""
        return self._waiting.pop(0)


def _failure(error: Exception, where: str, next_step: str) -> Failure:
    """Return what was raised here; one that cannot be pickled in a worker goes as a `RuntimeError` of its text."""
    text = f"{type(error).__name__}: {error}"
    if get_worker_info() is None:
        return Failure(f"{where}{text}", next_step, error)
    told = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301 - which fails for errors whose making takes other arguments than they keep
    except Exception:
        pickled = pickle.dumps(RuntimeError(text))
    return Failure(f"{where}{text}", next_step, pickled, told)


def _seeds_of(keys: Sequence[Key]) -> list[int]:
    """Return a seed for each of the samples of a batch."""
    if not keys:
        return []
    seed, epoch, *_ = keys[0]
    return seeds_of(Draws(seed, epoch, np.array([position for *_, position, _ in keys])))


def _as_made(made: Any) -> Any:
    return made
