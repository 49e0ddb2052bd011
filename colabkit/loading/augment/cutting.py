"""Boxes of `uint8` images on the CPU: copied by the row, mirrored by the pixel, resized by torch's kernel.

The kernel is called as `torch.nn.functional.interpolate` calls it, but on a crop made contiguous before, which it would
else copy slowly, and with the result's place given, which saves an allocation and a copy: 4 times as fast.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from colabkit.loading.augment.boxes import Boxes

_SMALL = 64 * 64
"""Pixels up to which NumPy mirrors an image sooner than torch, whose call takes longer and whose pixels go faster."""

_resample: Callable[..., torch.Tensor] = torch._C._nn._upsample_bilinear2d_aa  # noqa: SLF001

Pixels = npt.NDArray[np.uint8]


def cut(
    pixels: Pixels, top: int, left: int, height: int, width: int, mirrored: bool, out: Pixels, fill: int = 0
) -> None:
    """Fill `out` with a box of an image, resized if it has another size, mirrored if so asked.

    Resizing is bilinear with antialiasing, byte for byte as `torch.nn.functional.interpolate(antialias=True)`. Any
    number of threads may call this at once.

    Args:
        pixels: `uint8 [H, W, C]`, the pixels of a row side by side; may be read-only.
        top: first row of the box, which may reach beyond the image.
        left: first column of the box.
        height: rows of the box.
        width: columns of the box.
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
    """Return boxes of one size, `uint8 [B, h, w, C]`, of a batch `uint8 [B, H, W, C]`.

    Args:
        pixels: the images, C-contiguous.
        boxes: of the samples; each has the size of the result and may reach beyond its image.
        size: height and width of the result.
        fill: value of what lies beyond an image.
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
