"""Boxes of images, cut out and resized: `uint8` images on the CPU one at a time, tensors a batch at once.

torch's kernel is called as `torch.nn.functional.interpolate` calls it, but on a contiguous crop, since it copies others
slowly, and with the result's memory given, which saves an allocation and a copy: 4 times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Boxes:
    """One box of each image, in pixels from its upper left corner; it may reach beyond the image.

    Attributes:
        top: first row, `int64 [B]`, as the next three.
        left: first column.
        height: rows.
        width: columns.
        mirrored: whether left and right change places after the cut, `bool [B]`.
    """

    top: Sizes
    left: Sizes
    height: Sizes
    width: Sizes
    mirrored: npt.NDArray[np.bool_]

    @classmethod
    def whole(cls, sizes: Sizes) -> Boxes:
        """Return boxes that are the images themselves; `sizes` is `int64 [B, 2]`, height and width of each."""
        corner = np.zeros(len(sizes), np.int64)
        return cls(corner, corner, sizes[:, 0], sizes[:, 1], np.zeros(len(sizes), np.bool_))

    @classmethod
    def of_size(cls, top: Sizes, left: Sizes, size: tuple[int, int]) -> Boxes:
        """Return boxes of one size whose first rows and columns are given."""
        count = len(top)
        return cls(top, left, np.full(count, size[0]), np.full(count, size[1]), np.zeros(count, np.bool_))

    def rows(self) -> Iterator[tuple[int, int, int, int, bool]]:
        """Return top, left, height, width and mirrored of one box after the other, as plain numbers."""
        columns = self.top, self.left, self.height, self.width, self.mirrored
        return zip(*(column.tolist() for column in columns), strict=True)

    def reach_beyond(self, height: int, width: int) -> bool:
        """Return whether any box lies partly beyond images of this size."""
        inside = self.top.min(initial=0) >= 0 and self.left.min(initial=0) >= 0
        last_row, last_column = (self.top + self.height).max(initial=0), (self.left + self.width).max(initial=0)
        return not (inside and last_row <= height and last_column <= width)


_SMALL = 64 * 64
"""Pixels up to which NumPy mirrors an image sooner than torch, whose call takes longer and whose pixels go faster."""

_resample: Callable[..., torch.Tensor] = torch._C._nn._upsample_bilinear2d_aa  # noqa: SLF001

Pixels = npt.NDArray[np.uint8]


def cut(
    pixels: Pixels, top: int, left: int, height: int, width: int, mirrored: bool, out: Pixels, fill: int = 0
) -> None:
    """Fill `out` with a box of an image, resized if it has another size, mirrored if so asked.

    Resizing is bilinear with antialiasing, byte for byte as `torch.nn.functional.interpolate(antialias=True)`. Any
    number of threads may call this at once. The box may reach beyond the image, where it gets the value `fill`.

    Args:
        pixels: `uint8 [H, W, C]`, the pixels of a row side by side; may be read-only.
        top, left, height, width: the box, in pixels.
        mirrored: whether left and right change places.
        out: `uint8 [h, w, C]`, C-contiguous.
        fill: value of what lies beyond the image.
    """
    resized = (height, width) != out.shape[:2]
    rows, columns = pixels.shape[:2]
    if top >= 0 and left >= 0 and top + height <= rows and left + width <= columns:
        box = pixels[top : top + height, left : left + width]
    else:
        box = np.full((height, width, out.shape[2]), fill, np.uint8)
        first_row, last_row = max(top, 0), min(top + height, rows)
        first_column, last_column = max(left, 0), min(left + width, columns)
        if first_row < last_row and first_column < last_column:
            inner = box[first_row - top : last_row - top, first_column - left : last_column - left]
            inner[...] = pixels[first_row:last_row, first_column:last_column]
    if mirrored:
        box = _mirrored(box)
    if resized:
        # A copy: the kernel takes strided pixels slowly, and torch warns of read-only memory.
        image = torch.from_numpy(box if mirrored else box.copy()).permute(2, 0, 1)[None]
        _resample(image, out.shape[:2], False, out=torch.from_numpy(out).permute(2, 0, 1)[None])
    else:
        out[...] = box


def crop_rows(pixels: Pixels, boxes: Boxes, size: tuple[int, int], fill: int) -> Pixels:
    """Return boxes of one size, `uint8 [B, h, w, C]`, of a C-contiguous batch `uint8 [B, H, W, C]`.

    Each box has the size of the result and may reach beyond its image, where it gets the value `fill`.
    """
    count, rows, columns, channels = pixels.shape
    height, width = size
    if not count:  # which reaches beyond nothing, whatever the size
        return np.empty((0, height, width, channels), np.uint8)
    top, left = boxes.top, boxes.left
    if boxes.reach_beyond(rows, columns):
        above, before = max(0, -int(top.min())), max(0, -int(left.min()))
        padded_rows = above + max(rows, int(top.max()) + height)
        padded_columns = before + max(columns, int(left.max()) + width)
        padded = np.full((count, padded_rows, padded_columns, channels), fill, np.uint8)
        padded[:, above : above + rows, before : before + columns] = pixels
        pixels, top, left = padded, top + above, left + before
    # Every stretch of `width` pixels, as one value: a box is then `height` values, each copied at once.
    places = pixels.shape[2] - width + 1
    stretches: npt.NDArray[np.void] = np.ndarray(
        (count, pixels.shape[1], places), f"V{width * channels}", pixels, 0, pixels.strides[:3]
    )
    chosen = stretches[np.arange(count)[:, None], top[:, None] + np.arange(height), left[:, None]]
    out: Pixels = chosen.view(np.uint8).reshape(count, height, width, channels)
    turned = np.flatnonzero(boxes.mirrored)
    if height * width <= _SMALL:
        whole = _whole_pixels(out)
        whole[turned] = whole[turned][..., ::-1, :]
    else:
        for index in turned:
            out[index] = _mirrored(out[index])
    return out


def _mirrored(pixels: Pixels) -> Pixels:
    """Return a new image `uint8 [H, W, C]` with left and right changed."""
    if pixels.shape[0] * pixels.shape[1] <= _SMALL:
        turned: Pixels = _whole_pixels(pixels)[:, ::-1].copy().view(np.uint8)
        return turned
    image = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy())  # torch warns of read-only memory
    flipped: Pixels = image.permute(2, 0, 1)[None].flip(3)[0].permute(1, 2, 0).numpy()
    return flipped


def _whole_pixels(pixels: Pixels) -> npt.NDArray[np.void]:
    """Return a view `[..., 1]` of pixels `uint8 [..., C]`, each one value."""
    return pixels.view(f"V{pixels.shape[-1]}")


def crop_batch(images: Tensor, boxes: Boxes, size: tuple[int, int], fill: float) -> Tensor:
    """Return boxes of images `[B, C, H, W]` as `crop_rows` does, `[B, C, h, w]` in channels-last memory."""
    top, left, _, _, mirrored = _on_device(boxes, images.device)
    height, width = images.shape[2:]
    rows = top + torch.arange(size[0], device=images.device)
    columns = torch.arange(size[1], device=images.device)
    columns = left + torch.where(mirrored > 0, size[1] - 1 - columns, columns)
    samples = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    at = samples, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None]
    result = images.permute(0, 2, 3, 1)[at]
    if boxes.reach_beyond(height, width):
        beyond_rows = (rows < 0) | (rows >= height)
        beyond_columns = (columns < 0) | (columns >= width)
        result.masked_fill_((beyond_rows[:, :, None] | beyond_columns[:, None])[..., None], fill)
    return result.permute(0, 3, 1, 2)


def resize_batch(images: Tensor, boxes: Boxes, size: tuple[int, int]) -> Tensor:
    """Return the boxes brought to one size, `[B, C, h, w]` in channels-last memory, of the images' dtype.

    Bilinear with antialiasing as `torch.nn.functional.interpolate` does it, as two products with dense matrices of
    weights, one for each direction: no loop over samples. Computed in float16 on CUDA, where this changes a byte by at
    most 1, in float64 for images of float64, in float32 otherwise. The boxes lie inside the images `[B, C, H, W]`.
    """
    count, channels, height, width = images.shape
    top, left, rows, columns, mirrored = _on_device(boxes, images.device)
    dtype = precise = torch.float64 if images.dtype == torch.float64 else torch.float32
    if images.device.type == "cuda" and images.dtype in (torch.uint8, torch.float16):
        dtype = torch.float16
    down = _weights(top, rows, height, size[0], torch.zeros_like(mirrored), precise).to(dtype)
    across = _weights(left, columns, width, size[1], mirrored, precise).to(dtype)
    pixels = images.permute(0, 2, 3, 1).to(dtype).reshape(count, height, width * channels)
    narrowed = torch.bmm(down, pixels).view(count, size[0], width, channels)
    turned = narrowed.transpose(1, 2).reshape(count, width, size[0] * channels)
    result = torch.bmm(across, turned).view(count, size[1], size[0], channels).permute(0, 3, 2, 1)
    if not images.is_floating_point():
        result = result.round().clamp(0, 255)
    return result.to(images.dtype).contiguous(memory_format=torch.channels_last)


def _weights(start: Tensor, length: Tensor, inputs: int, outputs: int, mirrored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what each input adds to each output along one direction, `[B, outputs, inputs]`.

    The box has `length` inputs from `start` on; `mirrored` is 1 where outputs go the other way: `int64 [B, 1]` each.
    """
    scale = (length.double() / outputs)[:, :, None]
    place = torch.arange(outputs, device=start.device)
    place = torch.where(mirrored > 0, outputs - 1 - place, place)
    centre = (place[:, :, None] + 0.5) * scale
    at = (torch.arange(inputs, device=start.device) - start)[:, None]
    weights = (1 - (at + 0.5 - centre).abs() / scale.clamp(min=1)).clamp_(min=0)
    weights *= (at >= 0) & (at < length[:, :, None])
    return (weights / weights.sum(2, keepdim=True)).to(dtype)


def _on_device(boxes: Boxes, device: torch.device) -> tuple[Tensor, ...]:
    """Return top, left, height, width and mirrored as `int64 [B, 1]`, moved in one go."""
    table = np.stack([boxes.top, boxes.left, boxes.height, boxes.width, boxes.mirrored.astype(np.int64)])
    return torch.from_numpy(table).to(device, non_blocking=True)[:, :, None].unbind()
