"""Compose transforms, and split off the steps that a loader can apply while it gathers a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
from torch import Tensor

from colabkit.foundation import InvalidOption, cannot, check_callable, kind_of, shown
from colabkit.loading.augment.cutting import Boxes
from colabkit.loading.augment.geometry import Geometry
from colabkit.loading.augment.transform import Draws, Transform, is_per_sample

TransformStep = tuple[int, Callable[..., Any]]


class _Steps(Transform):
    """Transforms applied in sequence, each with the random stream of its step number.

    A crop and the flips next to it are folded into one box per sample, so together they copy each image only once.
    """

    def __init__(self, steps: tuple[TransformStep, ...]) -> None:
        self.steps = steps
        # A custom callable may depend on the whole batch.
        self.whole_batch = any(getattr(transform, "whole_batch", True) for _, transform in steps)
        self.changes_labels = any(getattr(transform, "changes_labels", False) for _, transform in steps)

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        for transform, own_draws in folded_steps(self, draws):
            if isinstance(transform, Transform):
                images, labels = transform.apply(images, labels, own_draws)
            else:
                images = transform(images)
        return images, labels

    def __repr__(self) -> str:
        return f"_Steps({self.steps})"


class Compose(_Steps):
    """Apply several transforms in sequence, each with its own random stream.

    A nested `Compose` is flattened. A callable that is not a `Transform` receives only the images of the batch and
    returns the new images. If the callable draws random numbers, it has to seed them itself.

    Args:
        transforms: list of transforms, in the order in which they are applied.
        others: not supported; pass one list instead of several arguments.

    Raises:
        InvalidOption: if the list is empty, an item is not callable, or an item transforms single samples.

    Example:
        >>> import torch
        >>> from colabkit import augment
        >>> images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
        >>> transform = augment.Compose([augment.RandomHorizontalFlip(), augment.Normalize()])
        >>> transform(images).dtype
        torch.float32
    """

    def __init__(self, transforms: Iterable[Callable[..., Any]], *others: Any) -> None:
        act = "compose transforms"
        if others or not isinstance(transforms, Iterable):
            given = f"Compose got {1 + len(others)} arguments" if others else f"transforms is {kind_of(transforms)}"
            brackets = "Put the transforms in brackets: Compose([...])"
            raise InvalidOption(cannot(act, given, "one list of transforms", brackets))
        flat: list[Callable[..., Any]] = []
        for transform in transforms:
            flat += transform.transforms if isinstance(transform, Compose) else [transform]
        for transform in flat:
            check_callable(act, "transform", transform, "Pass a list of callables", optional=False)
            if is_per_sample(transform):
                found = f"{shown(transform)} transforms single samples"
                next_step = (
                    "Put all transforms into one PerSample or torchvision's v2.Compose, "
                    "or wrap those without randomness in PerBatch"
                )
                raise InvalidOption(cannot(act, found, "transforms of batches", next_step))
        if not flat:
            remedy = "Add a transform, or leave out the Compose"
            raise InvalidOption(cannot(act, "the list is empty", "at least one transform", remedy))
        super().__init__(tuple(enumerate(flat)))

    @property
    def transforms(self) -> tuple[Callable[..., Any], ...]:
        """The transforms, in the order in which they are applied."""
        return steps_of(self)

    def __repr__(self) -> str:
        return f"Compose([{', '.join(map(repr, self.transforms))}])"


class _CombinedGeometry(Geometry):
    """Consecutive crops and flips, combined: at most one crop, with the flips before and after it."""

    def __init__(self, steps: tuple[tuple[int, Geometry], ...]) -> None:
        self.steps = steps
        for _, step in steps:
            if step.size is not None:
                self.size, self.resizes, self.fill = step.size, step.resizes, step.fill

    def boxes(self, sizes: npt.NDArray[np.int64], draws: Draws) -> Boxes:
        found = Boxes.whole(sizes)
        for number, step in self.steps:
            new = step.boxes(sizes, draws.of(number))
            if step.size is None:
                top, left, around = found.top, found.left, found
            else:
                # In a flipped image, the distance from one edge becomes the distance from the opposite one.
                top = np.where(found.upside_down, sizes[:, 0] - new.top - new.height, new.top)
                left = np.where(found.mirrored, sizes[:, 1] - new.left - new.width, new.left)
                around = new
            mirrored, upside_down = found.mirrored ^ new.mirrored, found.upside_down ^ new.upside_down
            found = step.aligned(Boxes(top, left, around.height, around.width, mirrored, upside_down), sizes)
        return found

    def __repr__(self) -> str:
        return f"_CombinedGeometry({self.steps})"


def folded_steps(transform: Transform, draws: Draws) -> Iterator[tuple[Callable[..., Any], Draws]]:
    """Iterate over the steps of a transform, each with its draws; a crop and the flips next to it are one step."""
    if not isinstance(transform, _Steps):
        yield transform, draws
        return
    steps = transform.steps
    while steps:
        leading = _leading_geometry(steps)
        number, step = steps[0]
        # A folded step selects the random stream of each of its crops and flips.
        yield (_CombinedGeometry(leading), draws) if leading else (step, draws.of(number))
        steps = steps[max(1, len(leading)) :]


def geometry_of(transform: Transform) -> tuple[Geometry | None, Transform | None]:
    """Split a transform into its leading flips and at most one crop, combined into one step, and the remaining steps.

    A part without steps is None. Applying the two parts in sequence with the same draws is bit-identical to applying
    the transform.
    """
    if not isinstance(transform, _Steps):
        return (transform, None) if _is_foldable(transform) else (None, transform)
    leading = _leading_geometry(transform.steps)
    rest = transform.steps[len(leading) :]
    return (_CombinedGeometry(leading) if leading else None), (_Steps(rest) if rest else None)


def split_steps(
    transform: Transform, goes_first: Callable[[Callable[..., Any]], bool]
) -> tuple[Transform | None, Callable[..., Any] | None]:
    """Split a transform in two: its leading steps for which `goes_first` returns True, and the remaining steps.

    Each step keeps its random stream, so applying the two in sequence is equivalent to applying the transform.
    """
    if not isinstance(transform, _Steps):
        return (transform, None) if goes_first(transform) else (None, transform)
    steps = transform.steps
    count = next((place for place, (_, step) in enumerate(steps) if not goes_first(step)), len(steps))
    first, rest = steps[:count], steps[count:]
    return (_Steps(first) if first else None), (_Steps(rest) if rest else None)


def steps_of(transform: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Return the steps of a `Compose` or of a part of one; any other transform is returned as the only step."""
    return tuple(step for _, step in transform.steps) if isinstance(transform, _Steps) else (transform,)


def _is_foldable(step: object) -> TypeGuard[Geometry]:
    """Return whether a step is a flip or a crop; a resize to a size that depends on the image is neither."""
    return isinstance(step, Geometry) and (step.size is not None or not step.resizes)


def _leading_geometry(steps: tuple[TransformStep, ...]) -> tuple[tuple[int, Geometry], ...]:
    leading: list[tuple[int, Geometry]] = []
    for number, step in steps:
        if not _is_foldable(step) or (step.size is not None and any(part.size for _, part in leading)):
            break
        leading.append((number, step))
    return tuple(leading)
