"""A picture of samples in a grid with their labels beneath, drawn by Pillow alone."""

from __future__ import annotations

import io
import math
import textwrap
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from colabkit.foundation import format_count, format_things, printable
from colabkit.packs.dataset.packed_dataset import PackedDataset
from colabkit.packs.format.layout import Indices

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont


_SCALE = 2  # pixels drawn for one of the notebook's, so that text and edges are sharp on dense screens
_MOST_PNG_BYTES = 1 << 20  # kept in the notebook's file; photographs become JPEG instead
_WIDTH = 920
_LEAST_WIDTH = 280
_MOST_COLUMNS = 8
_SMALL_TILE, _LARGE_TILE = 112, 200
_GAP = 12
_MARGIN = 16
_TEXT = 13
_MOST_CHARS = 1000
_PAPER, _INK, _GREY, _TILE, _EDGE = "#ffffff", "#1f2328", "#656d76", "#f3f4f6", "#d8dee4"


@dataclass(frozen=True, repr=False)
class SampleGrid:
    """A picture that shows itself in a notebook.

    Attributes:
        image: the picture, at twice the size it has on the page.
        indices: the samples shown, row by row.
    """

    image: Image.Image
    indices: tuple[int, ...]

    def __repr__(self) -> str:
        return f"Picture of {format_things(len(self.indices), 'sample')}"

    def _repr_png_(self) -> tuple[bytes, dict[str, int]] | None:
        return None if len(self._png) > _MOST_PNG_BYTES else (self._png, self._size)

    def _repr_jpeg_(self) -> tuple[bytes, dict[str, int]] | None:
        return (
            None
            if len(self._png) <= _MOST_PNG_BYTES
            else (self._encoded("JPEG", quality=90, subsampling=0), self._size)
        )

    @cached_property
    def _png(self) -> bytes:
        return self._encoded("PNG")

    @property
    def _size(self) -> dict[str, int]:
        """Width and height on the page, as notebooks take them."""
        return {"width": self.image.width // _SCALE, "height": self.image.height // _SCALE}

    def _encoded(self, kind: str, **options: int) -> bytes:
        written = io.BytesIO()
        self.image.save(written, kind, **options)
        return written.getvalue()


def draw_samples(data: PackedDataset, chosen: Indices, label_kind: str, title: str) -> SampleGrid:
    """Return samples of a data set in a grid, as square as it can be, their labels beneath.

    Args:
        data: whose samples.
        chosen: which.
        label_kind: what a label is: `class`, `multilabel`, `regression` or `none`.
        title: what they are of.
    """
    from PIL import Image, ImageDraw

    shown = [_shown(_field(data[int(number)])) for number in chosen]
    texts = [printable(_label_text(data, int(number), label_kind)) for number in chosen]
    count = f"{printable(title)}: {format_count(len(shown))} of {format_things(len(data), 'sample')}"
    font = _font(_TEXT * _SCALE, all(text.isascii() for text in [count, *texts]))
    columns, wide, high = _grid([image.size for image in shown])
    below = _TEXT + 10 if label_kind != "none" else 0
    top = _MARGIN + _TEXT + 12
    rows = -(-len(shown) // columns)
    width = max(2 * _MARGIN + columns * wide + (columns - 1) * _GAP, _LEAST_WIDTH)
    height = top + rows * (high + below) + (rows - 1) * _GAP + _MARGIN
    page = Image.new("RGB", (width * _SCALE, height * _SCALE), _PAPER)
    pen = ImageDraw.Draw(page)
    _write(pen, (_MARGIN, _MARGIN), count, font, _GREY, width - 2 * _MARGIN)
    for place, (image, text) in enumerate(zip(shown, texts, strict=True)):
        left = _MARGIN + place % columns * (wide + _GAP)
        upper = top + place // columns * (high + below + _GAP)
        _paste(page, pen, image, (left * _SCALE, upper * _SCALE), (wide * _SCALE, high * _SCALE))
        if below:
            _write(pen, (left, upper + high + 5), text, font, _INK, wide)
    return SampleGrid(page, tuple(int(number) for number in chosen))


def _grid(sizes: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Return how many columns, and width and height of a tile on the page.

    The grid has as few empty places as can be and is somewhat wider than high; tiles have the shape of most images.
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


def _field(sample: Any) -> Any:
    """Return X of a sample."""
    return sample[0] if isinstance(sample, tuple) else sample


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


def _shown(value: Any) -> Image.Image:
    """Return what a sample looks like: an image, an array scaled to grey levels, a curve, a text."""
    from PIL import Image

    if not isinstance(value, Tensor):
        return _written(value if isinstance(value, str) else f"{format_things(len(value), 'byte')}")
    array = value.numpy()
    if array.ndim >= 3 and array.shape[-3] in (1, 3):
        array = np.moveaxis(array, -3, -1)
    while array.ndim > 3 or (array.ndim == 3 and array.shape[2] not in (1, 3)):
        array = array[len(array) // 2]  # the middle of a volume or of a film
    if array.ndim < 2:
        return _curve(array.reshape(-1))
    levels = np.ascontiguousarray(array if array.dtype == np.uint8 else _levels(array))
    return Image.fromarray(levels[:, :, 0] if levels.ndim == 3 and levels.shape[2] == 1 else levels).convert("RGB")


def _written(text: str) -> Image.Image:
    """Return the beginning of a text."""
    from PIL import Image, ImageDraw

    side, pad = _SCALE * _LARGE_TILE, 24
    image = Image.new("RGB", (side, side), _TILE)
    lines = textwrap.wrap(printable(text[:_MOST_CHARS]), 24)[:11]
    font = _font(_TEXT * _SCALE, all(line.isascii() for line in lines))
    ImageDraw.Draw(image).multiline_text((pad, pad), "\n".join(lines), fill=_INK, font=font, spacing=6)
    return image


def _levels(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return any numbers as 0 to 255, from the least to the greatest finite one."""
    values = np.abs(array) if array.dtype.kind == "c" else array
    values = values.astype(np.float64)
    finite = np.isfinite(values)
    low, high = (values[finite].min(), values[finite].max()) if finite.any() else (0.0, 0.0)
    scaled = (np.where(finite, values, low) - low) / ((high - low) or 1.0)
    return np.round(255 * scaled).astype(np.uint8)


def _curve(values: npt.NDArray[Any]) -> Image.Image:
    """Return a series of numbers as a curve."""
    from PIL import Image, ImageDraw

    side, pad = _SCALE * _LARGE_TILE, 24
    image = Image.new("RGB", (side, side), _TILE)
    heights = _levels(values[:: max(1, len(values) // side)]).tolist()
    step = (side - 2 * pad) / max(1, len(heights) - 1)
    points = [(pad + step * at, side - pad - (side - 2 * pad) * height / 255) for at, height in enumerate(heights)]
    if len(points) > 1:
        ImageDraw.Draw(image).line(points, fill=_INK, width=2, joint="curve")
    return image


def _paste(
    page: Image.Image, pen: ImageDraw.ImageDraw, image: Image.Image, at: tuple[int, int], tile: tuple[int, int]
) -> None:
    """Put an image whole into the middle of its tile: small ones enlarged with sharp pixels, large ones smoothly."""
    from PIL import Image

    scale = min(tile[0] / image.width, tile[1] / image.height)
    method = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.LANCZOS
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    right, lower = at[0] + tile[0] - 1, at[1] + tile[1] - 1
    pen.rectangle((*at, right, lower), fill=_TILE)
    page.paste(image.resize(size, method), (at[0] + (tile[0] - size[0]) // 2, at[1] + (tile[1] - size[1]) // 2))
    pen.rectangle((at[0] - 1, at[1] - 1, right + 1, lower + 1), outline=_EDGE)  # white images end somewhere, too


@cache
def _font(size: int, is_ascii: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own font, or for letters that it lacks one that most systems have."""
    from PIL import ImageFont

    if not is_ascii:
        try:
            return ImageFont.truetype("DejaVuSans.ttf", size)
        except OSError:  # not here: letters it lacks are drawn as boxes
            pass
    return ImageFont.load_default(size)


def _write(
    pen: ImageDraw.ImageDraw,
    at: tuple[int, int],
    text: str,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    colour: str,
    width: int,
) -> None:
    """Write one line, cut where it is wider than its place."""
    if font.getlength(text) > width * _SCALE:
        while text and font.getlength(text + "...") > width * _SCALE:
            text = text[:-1]
        text = text.rstrip(" ,.-_") + "..."
    pen.text((at[0] * _SCALE, at[1] * _SCALE), text, fill=colour, font=font)
