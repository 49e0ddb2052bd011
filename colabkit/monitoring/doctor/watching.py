"""Any loader is watched: what it gives is timed and told of, as a `Loader` does it by itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any, Generic, TypeVar

import torch

from colabkit.foundation import InvalidOption, cannot, meters
from colabkit.loading import files_of, is_far, marked, path_of
from colabkit.training import bytes_in, may_be_loader, samples_in

T_co = TypeVar("T_co", covariant=True)

_SETTLED_EVERY = 16


def watch(loader: Iterable[T_co]) -> Watched[T_co]:
    """Return a loader that gives what `loader` gives, and can be diagnosed and shown by `dashboard()`.

    For torch's `DataLoader` and whatever else gives batches. Its attributes are those of `loader`.

    Args:
        loader: gives batches each time that it is iterated.

    Raises:
        InvalidOption: if it gives no batches, as a model or a tensor does not.
    """
    if isinstance(loader, Watched):
        return loader
    if not may_be_loader(loader):
        found = f"{type(loader).__name__!r} is no loader"
        raise InvalidOption(cannot("watch", found, "something that gives batches", "Pass a DataLoader"))
    return Watched(loader)


class Watched(Generic[T_co]):
    """A loader whose batches are timed.

    While it waits inside `loader`, nothing else can run in this thread, so a panel stands still.

    Args:
        loader: gives the batches.

    Attributes:
        watched: the loader itself.
        meters: counts, and where each step's time goes; there are no parts, since nothing is known of the inside.
    """

    def __init__(self, loader: Iterable[T_co]) -> None:
        self.watched = loader
        self._passes = count()
        self.meters = meters.LoaderMeters()
        self._facts = self.meters.facts = _facts_of(loader)

    def anew(self) -> Watched[T_co]:
        """Return the same loader, watched by meters that have counted nothing."""
        return Watched(self.watched)

    def __len__(self) -> int:
        return len(self.watched)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "watched":
            raise AttributeError(name)
        return getattr(self.watched, name)

    def __repr__(self) -> str:
        return f"watch({self.watched!r})"

    def __iter__(self) -> Iterator[T_co]:
        """Yield the batches of one pass."""
        counts, now = self.meters, time.perf_counter
        clock = _clock(counts.spent)
        counts.begin_pass(clock)
        self._facts = counts.facts = replace(self._facts, device=_device())
        meters.used(counts)
        meters.publish(meters.EpochStarted(counts, next(self._passes), _length(self.watched), self._facts.samples))
        asked = now()
        try:
            for batch in self.watched:
                samples = samples_in(batch, self._facts.batch_size or 1)
                if not counts.batches and samples and (size := bytes_in(batch)):
                    self._facts = counts.facts = replace(self._facts, sample_bytes=size / samples)
                counts.batches += 1
                counts.samples += samples
                clock.given(None)
                given = now()
                if meters.is_heard():
                    meters.publish(meters.BatchTaken(counts))
                yield batch
                del batch
                left = now()
                clock.stepped(asked, given, left, samples)
                asked = left
                if not counts.batches % _SETTLED_EVERY:
                    counts.settle(clock)
        finally:
            counts.settle(clock)


def _clock(totals: meters.StepTotals) -> meters.Clock:
    """Return a clock of the GPU if this process uses one, else of the host, which counts its steps in `totals`."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        return meters.DeviceClock(lambda: marked(device))
    return meters.HostClock(totals)


def _device() -> str:
    """Return the GPU that holds tensors of this process, else the CPU."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return "cpu"
    number = torch.cuda.current_device()
    return f"cuda:{number}" if torch.cuda.memory_allocated(number) else "cpu"


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except Exception:  # torch's raises several, for data sets and samplers without a length
        return None


def _facts_of(loader: Any) -> meters.LoaderFacts:
    """Return what a loader tells of itself, as torch's does."""
    dataset = getattr(loader, "dataset", None)
    batch_size, workers = getattr(loader, "batch_size", None), getattr(loader, "num_workers", None)
    pins, keeps = getattr(loader, "pin_memory", None), getattr(loader, "persistent_workers", None)
    path = path_of(dataset)
    return meters.LoaderFacts(
        kind="foreign",
        samples=_length(dataset) if dataset is not None else None,
        batch_size=batch_size if isinstance(batch_size, int) else None,
        workers=workers if isinstance(workers, int) else None,
        path=path,
        source=files_of(dataset),
        is_far=is_far(path),
        encoding="python",
        is_pinned=pins if isinstance(pins, bool) else None,
        keeps_workers=True if workers == 0 else keeps if isinstance(keeps, bool) else None,
    )
