"""Helpers for loader tests: batches, threads, and the stream contract for loaders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from contract import Samples, StreamContract
from torch import Tensor

from colabkit.augment import Compose
from colabkit.loading import Loader


def epoch(loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Return the images and the labels of an epoch as one tensor each."""
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def same(some: list[Any], others: list[Any]) -> bool:
    """Return whether batches of several tensors have equal dtypes and values."""
    return len(some) == len(others) and all(
        all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(*pair, strict=True))
        for pair in zip(some, others, strict=True)
    )


def loader_threads(prefix: str = "colabkit-loader") -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def fails_at(number: int) -> Callable[[Tensor], Tensor]:
    """Return a transform that changes nothing and fails at call `number`, counted from 0."""
    calls = iter(range(10**6))

    def transform(images: Tensor) -> Tensor:
        if next(calls) == number:
            raise ValueError("planned")
        return images

    return transform


class LoaderContract(StreamContract):
    """The stream contract for a loader of images and labels from `data`, with `options`."""

    data: Any
    options: Mapping[str, Any]

    def make(self, fail_at: int | None = None) -> Loader:
        steps = [self.options["transform"]] if "transform" in self.options else []
        steps += [] if fail_at is None else [fails_at(fail_at)]
        return Loader(self.data, 4, **{**self.options, "transform": Compose(steps) if steps else None})

    def samples(self, batch: Any) -> Samples:
        images, labels = batch.values() if isinstance(batch, dict) else batch
        return [(image.numpy().tobytes(), int(label)) for image, label in zip(images, labels, strict=True)]

    def everything(self) -> Samples:
        images, labels = self.data.values() if isinstance(self.data, Mapping) else self.data[:]
        transform = self.options.get("transform")
        return self.samples((images if transform is None else transform(images), labels))
