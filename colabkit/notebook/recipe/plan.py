"""The choices of `train_on()`: image size, splits, batch size, epochs and augmentation, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from colabkit.foundation import InvalidOption, cannot, format_count, format_things, option

if TYPE_CHECKING:
    from colabkit.packs import PackedDataset, SourceSummary

HELD_OUT = {"train": 0.8, "val": 0.2}
"""Shares of the splits of a source that is not split."""

# Maximum longer side, in pixels, of images that keep their size if all have the same size.
_LARGEST_KEPT = 96
_SIDES = {"cuda": 224, "cpu": 128}
_MULTIPLE = 8
# Warn if images are shrunk at least by this factor, to fewer than this number of pixels per side.
_SHRUNK, _DETAILED = 3, 96
# Total number of images to train on in all epochs, by network and device.
_BUDGETS = {
    ("small", "cpu"): 60_000,
    ("small", "cuda"): 600_000,
    ("resnet18", "cpu"): 8_000,
    ("resnet18", "cuda"): 120_000,
}
_LEAST_EPOCHS, _MOST_EPOCHS = 3, 30
_FEWEST = 10
"""Minimum number of images of a source that is not split, so that several are held out."""

_PHOTO_SIDE = 64
_LOOKED = 64
# Minimum mean difference between the channels, out of 255, for an image to count as colored.
_COLORED = 6
_SIDED = re.compile(r"(^|[^a-z])(left|right|clockwise|counterclockwise|east|west)([^a-z]|$)", re.IGNORECASE)
_GLYPH = re.compile(r"\d+|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen value, with the reason as text.

    Attributes:
        value: the value.
        text: the value and the reason for it.
        warning: a point that the user should consider; empty if there is none.
    """

    value: Any
    text: str
    warning: str = ""


def choose_size(asked: tuple[int, int] | str, summary: SourceSummary, device: str) -> Choice:
    """Return the height and width of the images to train on."""
    median = summary.median_size
    if not isinstance(asked, str):
        return Choice(asked, _resized(median, asked), _warning(median, asked))
    if median is None:
        side = _SIDES[device]
        return Choice((side, side), f"images of {side}×{side} pixels, since their sizes are unknown")
    if summary.has_one_size and max(median) <= _LARGEST_KEPT:
        return Choice(median, f"all images keep their {_in_pixels(median)[0]}")
    shorter = min(median)
    side = min(_SIDES[device], shorter)
    ratio = max(median) / shorter if summary.has_one_shape else 1.0
    # Enlarge the longer side and reduce the shorter one, so that the number of pixels stays the same.
    scale = 1.0 if side == shorter else ratio**-0.5
    short, long = _rounded(side * scale), _rounded(side * scale * ratio)
    size = (short, long) if median[0] <= median[1] else (long, short)
    return Choice(size, _resized(median, size), _warning(median, size))


def _rounded(side: float) -> int:
    return max(_MULTIPLE, round(side / _MULTIPLE) * _MULTIPLE) if side >= _MULTIPLE else max(1, round(side))


def _in_pixels(*sizes: tuple[int, int]) -> list[str]:
    """Return sizes as text; if one is not square, in the form of the option `size`, with the order of its numbers."""
    is_square = all(height == width for height, width in sizes)
    sign, order = ("×", "") if is_square else ("x", " (height x width)")
    *others, last = (sign.join(map(str, size)) for size in sizes)
    return [*others, f"{last} pixels{order}"]


def _resized(median: tuple[int, int] | None, size: tuple[int, int]) -> str:
    if median is None:
        return f"images are resized to {_in_pixels(size)[0]}"
    if median == size:
        return f"images of {_in_pixels(size)[0]}"
    before, after = _in_pixels(median, size)
    return f"images are resized from a median of {before} to {after}, and cropped to that shape"


def _warning(median: tuple[int, int] | None, size: tuple[int, int]) -> str:
    if median is None or min(size) >= _DETAILED or min(median) < _SHRUNK * min(size):
        return ""
    after, before = _in_pixels(size, median)
    return f"images are shrunk to {after}, far below their median of {before}, so small details are lost"


def choose_splits(act: str, asked: Any, summary: SourceSummary) -> Choice:
    """Return the value for `prepare(splits=)`.

    Raises:
        InvalidOption: if no images remain for training, or none are held out.
    """
    found = summary.splits or {}
    if asked is None and set(found) == {"train"}:
        if found["train"] < _FEWEST:
            few = f"there are only {format_things(found['train'], 'image')}"
            raise InvalidOption(cannot(act, few, f"at least {_FEWEST}", "Add images"))
        return Choice(HELD_OUT, "a fifth of each class is held out as 'val'")
    if "train" not in found or len(found) < 2:
        names = " and ".join(map(repr, found))
        expected = "a split 'train' and another one"
        next_step = ("For example, use ", option("splits", dict(HELD_OUT)))
        raise InvalidOption(cannot(act, f"the only split is {names}", expected, next_step))
    names = ", ".join(f"{name} {format_count(count)}" for name, count in found.items())
    return Choice(asked, f"the source's splits: {names}" if asked is None else f"splits as requested: {names}")


def choose_batch_size(asked: int | str, samples: int, device: str) -> Choice:
    """Return the number of images per batch."""
    if not isinstance(asked, str):
        return Choice(asked, f"batches of {format_things(asked, 'image')}, as requested")
    usual = 128 if samples >= 10_000 else 16 if samples < 640 else 64 if device == "cuda" else 32
    value = min(usual, max(2, samples // 4))
    return Choice(value, f"batches of {value}")


def choose_epochs(asked: int | str, samples: int, network: str, device: str) -> Choice:
    """Return the number of epochs."""
    if not isinstance(asked, str):
        return Choice(asked, f"{format_things(asked, 'epoch', 'epochs')}, as requested")
    value = min(_MOST_EPOCHS, max(_LEAST_EPOCHS, _BUDGETS[network, device] // max(1, samples)))
    return Choice(value, f"{value} epochs for {format_things(samples, 'training image')}")


def choose_augmentation(
    data: PackedDataset, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]
) -> Choice:
    """Return the transform for training: random crops, and flips where they do not change the class."""
    # Import late, because this imports torch, which the choice of the image size does not need.
    from colabkit.loading import Compose, Normalize, RandomCrop, RandomHorizontalFlip, RandomResizedCrop

    looked = data[np.unique(np.linspace(0, len(data) - 1, _LOOKED).astype(np.int64))]
    images = looked[0] if isinstance(looked, tuple) else looked
    pixels = [np.asarray(image, np.float32) for image in images]
    spread = [float((image.max(0) - image.min(0)).mean()) for image in pixels]
    is_colored = float(np.median(spread)) > _COLORED
    steps: list[Any] = []
    if min(size) >= _PHOTO_SIDE:
        steps.append(RandomResizedCrop(size, scale=(0.4, 1.0)))
        text = "random crops, resized"
    else:
        edges = np.concatenate([image[:, [0, -1]].ravel() for image in pixels])
        steps.append(RandomCrop(size, padding=max(1, min(size) // 8), fill=round(float(np.median(edges)))))
        text = "random shifts"
    if not is_colored:
        why = "no flips, since the images are gray"
    elif sided := next((name for name in data.classes if _SIDED.search(name)), None):
        why = f"no flips, since the class {sided!r} has a side"
    elif all(map(_GLYPH.fullmatch, data.classes)):
        why = "no flips, since the classes seem to be numbers or letters"
    else:
        steps.append(RandomHorizontalFlip())
        why = "horizontal flips"
    return Choice(Compose([*steps, Normalize(mean, std)]), f"augmentation: {text}; {why}")
