"""Loaders for trials of advice: copies of the user's loader with other options, or of a pack of some samples."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, Subset

from colabkit.foundation import CallRef, Code, OptionRef, Text, parts_of
from colabkit.loading import Loader, Normalize, Order, file_of
from colabkit.monitoring.diagnosing.diagnosis import Advice
from colabkit.packs import FileDataset, PackedDataset, open_pack, pack

_OWN_OPTIONS = ("device", "keep", "num_workers", "shuffle", "transform")
_TORCHS_OPTIONS = ("num_workers", "pin_memory")
# Options whose effect shows only at the start of an epoch, or in rare long waits.
_OPTIONS_OF_EPOCHS = ("persistent_workers", "prefetch_batches", "prefetch_factor")
_PACKING = ("pack", "prepare")
_DIAGNOSE_AGAIN = "Follow it, train for some steps, and diagnose again to compare the speeds"

References: TypeAlias = "tuple[OptionRef | CallRef, ...]"
"""The options and calls of a piece of advice."""


class NotTriable(Exception):
    """A piece of advice cannot be tried.

    Args:
        reason: the reason, without a period.
        next_step: how to try it without `apply()`, one sentence without a period.
    """

    def __init__(self, reason: str, next_step: Text = _DIAGNOSE_AGAIN) -> None:
        super().__init__(reason)
        self.reason, self.next_step = reason, next_step


def references_of(advice: Advice) -> References:
    """Return the options and calls of a piece of advice.

    Raises:
        NotTriable: if it contains other code, or none.
    """
    if not advice.call:
        raise NotTriable("it changes your code, or the machine")
    parts = [part for part in parts_of(advice.call) if part != "\n"]
    if any(isinstance(part, str) for part in parts):
        raise NotTriable("it changes your code")
    return tuple(part for part in parts if not isinstance(part, str))


def is_packing(references: References) -> bool:
    """Return whether a piece of advice is to pack the samples."""
    return any(isinstance(one, CallRef) and one.name in _PACKING for one in references)


def changes_of(references: References, loader: Any) -> dict[str, Any]:
    """Return the new values of options of the loader, by name.

    Raises:
        NotTriable: if a copy of the loader cannot show their effect in a few seconds.
    """
    known = _OWN_OPTIONS if isinstance(loader, Loader) else _TORCHS_OPTIONS
    changes: dict[str, Any] = {}
    for one in references:
        if isinstance(one, CallRef):
            next_step = "Run it, make a loader of the new path, and pass it to colabkit.doctor(loader)"
            raise NotTriable("it copies all your files", next_step)
        if one.name in _OPTIONS_OF_EPOCHS:
            next_step = "Use it, train for two epochs, and diagnose again to compare the speeds"
            raise NotTriable("its effect shows only over whole epochs", next_step)
        if one.name == "batch_size":
            next_step = "Compare colabkit.headspace(step, loader) of loaders with both batch sizes"
            raise NotTriable("a different batch size also changes the results", next_step)
        if one.name not in known:
            next_step = "Make a step with this option, and compare colabkit.headspace(step, loader) of both steps"
            raise NotTriable("it changes the step or the results", next_step)
        changes[one.name] = Normalize() if one.name == "transform" else one.value
    return changes


def check_is_copyable(loader: Any) -> None:
    """Raise `NotTriable` if a similar loader cannot be made without side effects."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise NotTriable("this process is one of several that train together", "Try it in a single process")
    if isinstance(loader, Loader):
        return
    next_step = "Make a second loader with it, and pass that to colabkit.doctor(loader)"
    if not isinstance(loader, DataLoader):
        raise NotTriable(f"only a Loader or a DataLoader can be made again, not a {type(loader).__name__}", next_step)
    if isinstance(loader.dataset, IterableDataset):
        raise NotTriable("its dataset is a stream, of which each read changes the state", next_step)
    if loader.batch_size is None:
        raise NotTriable("its batches are chosen by your own code", next_step)


def copy_of(loader: Any, **changes: Any) -> Iterable[Any]:
    """Return a new loader of the same samples with some options changed; a custom order becomes a random one."""
    if isinstance(loader, Loader):
        arguments = dict(loader._arguments)  # type: ignore[attr-defined]  # noqa: SLF001 - set by its decorator
        if "shuffle" in changes or not isinstance(arguments.get("sampler"), Order | None):
            arguments |= {"sampler": None, "shuffle": True}
        return Loader(**{**arguments, **changes})
    options: dict[str, Any] = {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory, **changes}
    if options["num_workers"]:
        for name in ("prefetch_factor", "multiprocessing_context", "timeout", "worker_init_fn"):
            options.setdefault(name, getattr(loader, name))
    # Keep the workers, so that rounds do not start new ones.
    options.setdefault("persistent_workers", options["num_workers"] > 0)
    return DataLoader(
        loader.dataset,
        loader.batch_size,
        shuffle=not isinstance(loader.sampler, SequentialSampler),
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


def stop_workers(loader: Any) -> None:
    """Stop the persistent workers of a `DataLoader`, which the traceback of an error would keep alive."""
    stop = getattr(getattr(loader, "_iterator", None), "_shutdown_workers", None)
    if stop is not None:
        stop()


def packed_copy_of(loader: Any, references: References, folder: Path, samples: int) -> Loader:
    """Pack random samples in the way that the advice packs all samples, and return the loader of the pack.

    Args:
        loader: the user's loader.
        references: the calls of the advice: of `pack` or `prepare`, and of `Loader`.
        folder: folder for the pack.
        samples: number of samples to pack.

    Raises:
        NotTriable: if the loader has no dataset whose samples can be selected.
    """
    calls = {one.name: one for one in references if isinstance(one, CallRef)}
    packing, loading = next(calls[name] for name in _PACKING if name in calls), calls["Loader"]
    is_of_dataset = isinstance(packing.arguments[0], Code)
    target = folder / "trial.h5"
    pack(_some_of(loader.dataset, samples, is_of_dataset), target, **packing.options, progress=False)
    options = dict(loading.options)
    if "transform" in options:
        options["transform"] = loader.transform if options["transform"] == "loader.transform" else Normalize()
    return Loader(next(iter(open_pack(target).values())), loading.arguments[1], **options)


def _some_of(dataset: Any, count: int, is_of_dataset: bool) -> Any:
    """Return random samples of a dataset, or the paths of their files."""
    if isinstance(dataset, tuple | list | dict):
        raise NotTriable("the samples are arrays, which are as fast as a pack")
    numbers = random.Random(0).sample(range(len(dataset)), min(count, len(dataset)))
    if isinstance(dataset, PackedDataset | FileDataset):
        return dataset.subset(numbers)
    if is_of_dataset:
        return Subset(dataset, numbers)
    return [file_of(dataset, number) for number in numbers]
