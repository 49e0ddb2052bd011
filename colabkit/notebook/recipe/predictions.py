"""Compares the predictions of a classifier with the labels: accuracy, confusion matrix, and samples with pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from colabkit.packs import PackedDataset

_SHOWN = 8
_PICTURE_PX = 96
_QUALITY = 82


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage; 0% and 100% are shown only for shares of exactly 0 and 1."""
    shown = f"{100 * share:.{digits}f}"
    least = 10.0**-digits
    if share > 0 and float(shown) == 0:
        return f"<{least:g}%"
    return f">{100 - least:g}%" if share < 1 and float(shown) == 100 else f"{float(shown):g}%"


@dataclass(frozen=True, slots=True)
class SamplePrediction:
    """The prediction for one held-out image.

    Attributes:
        index: index of the image in its split.
        label: name of its class.
        predicted: name of the predicted class.
        probability: probability of the predicted class according to the model, in [0, 1].
        picture: a small version of the image, as a data URL.
    """

    index: int
    label: str
    predicted: str
    probability: float
    picture: str

    @property
    def is_right(self) -> bool:
        """Whether the predicted class is the label."""
        return self.label == self.predicted


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare()`; the fields are those of `TrainOnReport`."""

    accuracy: float
    baseline: float
    confusion: tuple[tuple[int, ...], ...]
    predictions: tuple[SamplePrediction, ...]
    mistakes: tuple[SamplePrediction, ...]


def compare(data: PackedDataset, scores: Tensor) -> Comparison:
    """Compare probabilities `[N, classes]` with the labels of all samples, in order."""
    assert data.labels is not None
    labels: npt.NDArray[np.int64] = data.labels.numpy()
    values, predicted = (one.numpy() for one in scores.max(1))
    count = len(data.classes)
    confusion = np.bincount(labels * count + predicted, minlength=count * count).reshape(count, count)
    wrong = np.flatnonzero(labels != predicted)
    surest = wrong[np.argsort(-values[wrong], kind="stable")][:_SHOWN]
    random = np.random.default_rng(0).choice(len(labels), min(_SHOWN, len(labels)), replace=False)

    def pictured(chosen: npt.NDArray[np.int64]) -> tuple[SamplePrediction, ...]:
        names = data.classes
        return tuple(
            SamplePrediction(at, names[labels[at]], names[predicted[at]], float(values[at]), _picture(data, at))
            for at in chosen.tolist()
        )

    return Comparison(
        accuracy=float((labels == predicted).mean()),
        baseline=float(np.bincount(labels).max() / len(labels)),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
        predictions=pictured(np.sort(random)),
        mistakes=pictured(surest),
    )


def _picture(data: PackedDataset, index: int) -> str:
    from PIL import Image

    image = data[index][0].permute(1, 2, 0).numpy()
    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    is_small = max(picture.size) <= _PICTURE_PX
    picture.thumbnail((_PICTURE_PX, _PICTURE_PX))
    written = io.BytesIO()
    if is_small:
        picture.save(written, "PNG")
    else:
        picture.save(written, "JPEG", quality=_QUALITY)
    return f"data:image/{'png' if is_small else 'jpeg'};base64,{base64.b64encode(written.getvalue()).decode()}"


def confused_pairs(
    confusion: Sequence[Sequence[int]], classes: Sequence[str], most: int
) -> list[tuple[str, str, int, int]]:
    """Return the most frequent mistakes: label, predicted class, and numbers of mistakes and of images of the label."""
    pairs = [
        (count, label, predicted)
        for label, row in enumerate(confusion)
        for predicted, count in enumerate(row)
        if count and label != predicted
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    return [(classes[label], classes[one], count, sum(confusion[label])) for count, label, one in pairs[:most]]
