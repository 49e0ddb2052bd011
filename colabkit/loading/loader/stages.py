"""A transform, parted by where and when its steps can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colabkit.loading.augment.compose import geometry_of, parted, steps_of
from colabkit.loading.augment.geometry import Geometry
from colabkit.loading.augment.transform import Transform


@dataclass(frozen=True)
class Stages:
    """The steps of a transform in order; each is None where there is nothing to do.

    Attributes:
        geometry: crops and flips that are done while samples are gathered or decoded, in worker threads.
        by_slice: what may be done to any slice of a batch without its labels, in worker threads.
        by_batch: what needs the batch complete, or its labels, and is ours: it runs in a worker thread too.
        at_last: what runs where the batch is handed over: on the device, and what other people wrote.
    """

    geometry: Geometry | None = None
    by_slice: Transform | None = None
    by_batch: Transform | None = None
    at_last: Callable[..., Any] | None = None

    @property
    def draws_globally(self) -> bool:
        """Whether what is done at last may draw from the global generators."""
        return self.at_last is not None and not all(map(is_ours, steps_of(self.at_last)))

    @property
    def works_in_threads(self) -> bool:
        """Whether worker threads have more to do than to gather."""
        return bool(self.geometry or self.by_slice or self.by_batch)


def stages_of(transform: Callable[..., Any] | None, *, on_device: bool, by_sample: bool, resized: bool) -> Stages:
    """Return a transform parted.

    Args:
        transform: ours, or any callable on a batch of images.
        on_device: whether batches go to a GPU, which then does all that can be done to a batch.
        by_sample: whether the geometry has to be done sample by sample, since samples differ in size.
        resized: whether a geometry that resizes is done sample by sample, from the rows as they lie.
    """
    if transform is None:
        return Stages()
    if not isinstance(transform, Transform):
        return Stages(at_last=transform)
    geometry, rest = geometry_of(transform)
    if geometry is None or not (by_sample or (resized and geometry.resizes and not on_device)):
        geometry, rest = None, transform
    if rest is None or on_device:
        return Stages(geometry, at_last=rest)
    by_slice, others = parted(rest, _takes_any_slice)
    by_batch, at_last = (None, None) if others is None else parted(others, is_ours)  # type: ignore[arg-type]
    return Stages(geometry, by_slice, by_batch, at_last)


def _takes_any_slice(step: object) -> bool:
    return isinstance(step, Transform) and not step.whole_batch and not step.changes_labels


def is_ours(step: object) -> bool:
    """Return whether a transform takes its random numbers from the sample's position."""
    return isinstance(step, Transform)
