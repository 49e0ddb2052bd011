"""Draws samples in a grid with their labels."""

from __future__ import annotations

import base64
import io
import math
import textwrap
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from colabkit.foundation import escape, format_count, format_things, plotting, printable
from colabkit.packs.dataset.datasets import PackedDataset
from colabkit.packs.format.layout import Indices

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL import Image


# Image pixels per CSS pixel; 2 keeps text and edges sharp on high-density screens.
_SCALE = 2
# Maximum size of a PNG in the notebook; larger pictures, usually photographs, are embedded as JPEG instead.
_MOST_PNG_BYTES = 1 << 20
# Lengths in CSS pixels.
_WIDTH, _LEAST_WIDTH, _MARGIN, _GAP, _HEADER, _LABEL = 920, 280, 16, 12, 25, 23
_SMALL_TILE, _LARGE_TILE = 112, 200
_TEXT_PT = 9.4
_MOST_COLUMNS = 8
_MOST_CHARS = 1000
_TILE, _EDGE = "#f3f4f6", "#d8dee4"


@dataclass(frozen=True, repr=False)
class SampleGrid:
    """A picture of samples that notebooks display.

    Attributes:
        image: the picture, at twice its display size.
        indices: indices of the samples shown, row by row.
    """

    image: Image.Image
    indices: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Picture of {format_things(len(self.indices), 'sample')}"

    def _repr_png_(self) -> tuple[bytes, dict[str, int]] | None:
        return None if len(self._png) > _MOST_PNG_BYTES else (self._png, self._size)

    def _repr_jpeg_(self) -> tuple[bytes, dict[str, int]] | None:
        is_png = len(self._png) <= _MOST_PNG_BYTES
        return None if is_png else (self._encoded("JPEG", quality=90, subsampling=0), self._size)

    def _mime_(self) -> tuple[str, str]:
        # marimo does not read the sizes that the methods above return.
        kind, found = ("png", self._repr_png_()) if self._repr_png_() else ("jpeg", self._repr_jpeg_())
        assert found is not None
        data = base64.b64encode(found[0]).decode()
        size = " ".join(f'{name}="{value}"' for name, value in self._size.items())
        return "text/html", f'<img src="data:image/{kind};base64,{data}" {size} alt="{escape(self)}">'

    @cached_property
    def _png(self) -> bytes:
        return self._encoded("PNG")

    @property
    def _size(self) -> dict[str, int]:
        return {"width": self.image.width // _SCALE, "height": self.image.height // _SCALE}

    def _encoded(self, kind: str, **options: int) -> bytes:
        written = io.BytesIO()
        self.image.save(written, kind, **options)
        return written.getvalue()


def draw_samples(data: PackedDataset, chosen: Indices, label_kind: str, title: str) -> SampleGrid:
    """Draw samples of a dataset in a roughly square grid with their labels below.

    Args:
        data: the dataset.
        chosen: indices of the samples to draw.
        label_kind: kind of the labels: `class`, `multilabel`, `regression` or `none`.
        title: name of the dataset, for the caption.

    Raises:
        MissingPackage: if matplotlib is not installed.
    """
    from PIL import Image

    shown = [_shown(sample[0] if isinstance(sample := data[int(number)], tuple) else sample) for number in chosen]
    columns, wide, high = _grid([_size_of(value) for value in shown])
    below = _LABEL if label_kind != "none" else 0
    rows = -(-len(shown) // columns)
    width = max(2 * _MARGIN + columns * wide + (columns - 1) * _GAP, _LEAST_WIDTH)
    height = _MARGIN + _HEADER + rows * (high + below) + (rows - 1) * _GAP + _MARGIN
    figure = plotting.new_figure("draw the samples", width / 100, height / 100, is_arranged=False)
    figure.set_facecolor("white")
    count = f"{printable(title)}: {format_count(len(shown))} of {format_things(len(data), 'sample')}"
    style: dict[str, Any] = {"fontsize": _TEXT_PT, "parse_math": False}
    header = figure.text(_MARGIN / width, 1 - _MARGIN / height, count, va="top", color=plotting.GREY, **style)
    plotting.shorten_text(header, width - 2 * _MARGIN)
    for place, (value, number) in enumerate(zip(shown, chosen, strict=True)):
        left = _MARGIN + place % columns * (wide + _GAP)
        lower = height - _MARGIN - _HEADER - place // columns * (high + below + _GAP) - high
        axes = figure.add_axes((left / width, lower / height, wide / width, high / height))
        axes.set(xticks=[], yticks=[], facecolor=_TILE)
        axes.spines[:].set(color=_EDGE, linewidth=0.72)
        _draw_sample(axes, value)
        if below:
            text = printable(_label_text(data, int(number), label_kind))
            label = axes.text(0, -4 / high, text, va="top", color=plotting.DARK, transform=axes.transAxes, **style)
            plotting.shorten_text(label, wide)
    image = Image.open(io.BytesIO(plotting.encode_figure(figure, "png", dpi=100 * _SCALE))).convert("RGB")
    return SampleGrid(image, tuple(int(number) for number in chosen))


def _draw_sample(axes: Axes, value: npt.NDArray[Any] | str) -> None:
    if isinstance(value, str):
        lines = textwrap.wrap(printable(value[:_MOST_CHARS]), 24)[:11]
        axes.text(0.06, 0.94, "\n".join(lines), va="top", fontsize=_TEXT_PT, parse_math=False, transform=axes.transAxes)
    elif value.ndim == 1:
        axes.plot(value[:: max(1, len(value) // (_SCALE * _LARGE_TILE))], color=plotting.DARK, linewidth=1)
        axes.margins(0.06)
    else:
        axes.imshow(value, cmap="gray", vmin=0, vmax=255)
        axes.set_adjustable("datalim")


def _grid(sizes: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Return the number of columns, and the width and height of a tile in CSS pixels.

    The number of columns is at most 8 and about 1 to 2 times the square root of the number of samples; among these, the
    one that leaves the fewest cells empty is chosen. Tiles have the samples' median height-to-width ratio, limited to
    the range from 0.6 to 1.4.
    """
    count = len(sizes)
    least, most = math.ceil(math.sqrt(count)), math.ceil(2 * math.sqrt(count))
    columns = min(
        range(max(1, min(least, _MOST_COLUMNS)), min(most, _MOST_COLUMNS) + 1),
        key=lambda columns: (-count % columns, abs(columns - math.sqrt(1.6 * count))),
        default=1,
    )
    fitting = (_WIDTH - 2 * _MARGIN - (columns - 1) * _GAP) // columns
    largest = max((max(size) for size in sizes), default=1)
    wide = min(fitting, _SMALL_TILE if largest <= 64 else _LARGE_TILE)
    shape = float(np.median([height / width for width, height in sizes])) if sizes else 1.0
    return columns, wide, round(wide * min(max(shape, 0.6), 1.4))


def _label_text(data: PackedDataset, number: int, label_kind: str) -> str:
    if data.labels is None:
        return ""
    label = data.labels[number]
    names = data.classes
    if label_kind == "class":
        value = int(label)
        return names[value] if 0 <= value < len(names) else str(value)
    if label_kind == "multilabel":
        present = label.nonzero().flatten().tolist()
        return ", ".join(names[place] if place < len(names) else str(place) for place in present) or "none"
    return ", ".join(f"{value:.4g}" for value in label.flatten().tolist())


def _shown(value: Any) -> npt.NDArray[Any] | str:
    if not isinstance(value, Tensor):
        return value if isinstance(value, str) else format_things(len(value), "byte")
    array = value.numpy()
    if array.ndim >= 3 and array.shape[-3] in (1, 3):
        array = np.moveaxis(array, -3, -1)
    while array.ndim > 3 or (array.ndim == 3 and array.shape[2] not in (1, 3)):
        # Show the middle slice of a volume or the middle frame of a video.
        array = array[len(array) // 2]
    if array.ndim < 2:
        return _levels(array.reshape(-1))
    levels = array if array.dtype == np.uint8 else _levels(array)
    return levels[:, :, 0] if levels.ndim == 3 and levels.shape[2] == 1 else levels


def _size_of(value: npt.NDArray[Any] | str) -> tuple[int, int]:
    if isinstance(value, str) or value.ndim < 2:
        return _LARGE_TILE, _LARGE_TILE
    return value.shape[1], value.shape[0]


def _levels(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    values = np.abs(array) if array.dtype.kind == "c" else array
    values = values.astype(np.float64)
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 0.0)
    scaled = (np.where(finite, values, low) - low) / ((high - low) or 1.0)
    return np.round(255 * scaled).astype(np.uint8)
