"""Any loader is watched: what it gives is timed and told of, as a `Loader` does it by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from colabkit import meters
from colabkit.errors import InvalidOption, cannot
from colabkit.loader import Loader
from colabkit.loader.facts import files_of, is_far, path_of
from colabkit.loader.transfer import marked

__all__ = ["Watched", "gives_batches", "samples_in", "watch"]

T_co = TypeVar("T_co", covariant=True)

_HOLDERS = (Mapping, tuple, list)
_NO_BATCHES = (str, bytes, int, float, type(None), os.PathLike, type, torch.nn.Module, Dataset, DataLoader, Loader)

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
    if not gives_batches(loader):
        found = f"{type(loader).__name__!r} is no loader"
        raise InvalidOption(cannot("watch", found, "something that gives batches", "Pass a DataLoader"))
    return Watched(loader)


def gives_batches(of: Any) -> bool:
    """Return whether something may be a loader: it can be iterated, and is not known to give anything but batches.

    Models, arrays and tables can be iterated as well, and a list is a loader if it may hold batches.
    """
    if isinstance(of, str | bytes | Mapping | set | range | torch.nn.Module) or hasattr(of, "shape"):
        return False
    if isinstance(of, list | tuple):
        return not of or _may_be_batch(of[0])
    return isinstance(of, Iterable)


def _may_be_batch(one: Any) -> bool:
    """Return whether something holds arrays, or is an object of which nothing is known, as batches of graphs are."""
    if isinstance(one, _HOLDERS):
        return any(map(_may_be_batch, one.values() if isinstance(one, Mapping) else one))
    return not isinstance(one, (*_NO_BATCHES, Watched))


class Watched(Generic[T_co]):
    """A loader whose batches are timed.

    While it waits inside `loader`, nothing else can run in this thread, so a panel stands still.

    Args:
        loader: gives the batches.

    Attributes:
        meters: counts, and where each step's time goes; there are no parts, since nothing is known of the inside.
    """

    def __init__(self, loader: Iterable[T_co]) -> None:
        self._loader = loader
        self._passes = count()
        self.meters = meters.LoaderMeters()
        self._facts = self.meters.facts = _facts_of(loader)

    def anew(self) -> Watched[T_co]:
        """Return the same loader, watched by meters that have counted nothing."""
        return Watched(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        return f"watch({self._loader!r})"

    def __iter__(self) -> Iterator[T_co]:
        """Yield the batches of one pass."""
        counts, now, clock = self.meters, time.perf_counter, _clock()
        counts.begin_pass(clock)
        self._facts = counts.facts = replace(self._facts, device=_device())
        meters.used(counts)
        meters.publish(meters.EpochStarted(counts, next(self._passes), _length(self._loader), self._facts.samples))
        asked = now()
        try:
            for batch in self._loader:
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


def samples_in(batch: Any, unknown: int = 1) -> int:
    """Return how many samples a batch holds: by its last field, as labels are, whose length cannot be mistaken.

    Args:
        batch: as a loader gives it.
        unknown: how many are in an object that does not tell.
    """
    shape = _told(batch, "shape")
    if shape is not None:
        try:
            return int(shape[0]) if len(shape) else 1
        except Exception:  # what others call so may be anything
            return 1
    if isinstance(batch, Mapping):
        return samples_in(_fields(batch.values())[0]) if batch else 0
    if not isinstance(batch, tuple | list):
        return unknown
    if not batch:
        return 0
    fields = _fields(batch)
    first, last = fields[0], fields[-1]
    if _told(last, "shape") is not None:
        return samples_in(last)
    is_stacked = _told(first, "shape") is not None
    if isinstance(last, tuple | list):
        samples = samples_in(first)
        if is_stacked and all(_told(one, "shape") is not None and samples_in(one) == samples for one in last):
            return samples  # several targets
        return len(last)  # things that differ in size, one for each sample
    return samples_in(first) if is_stacked or isinstance(first, Mapping) else len(batch)


def bytes_in(batch: Any) -> int:
    """Return the bytes of all tensors and arrays of a batch."""
    if isinstance(batch, Mapping):
        return sum(map(bytes_in, batch.values()))
    if isinstance(batch, tuple | list):
        return sum(map(bytes_in, batch))
    size = _told(batch, "nbytes")
    return size if isinstance(size, int) else 0


def _fields(values: Iterable[Any]) -> list[Any]:
    """Return what has a place for each sample, without weights, counters and the like; all where nothing has."""
    every = [*values]
    return [value for value in every if _told(value, "shape") or (isinstance(value, _HOLDERS) and value)] or every


def _told(of: Any, name: str) -> Any:
    """Return an attribute, None where there is none: sparse and nested tensors raise errors of their own."""
    try:
        return getattr(of, name, None)
    except Exception:
        return None


def _clock() -> meters.Clock:
    """Return a clock of the GPU if this process uses one, else of the host."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        return meters.DeviceClock(lambda: marked(device))
    return meters.HostClock()


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
