"""Cut boxes out of images and resize them: `uint8` images on the CPU one at a time, other tensors as a batch.

`cut` calls the kernel behind `torch.nn.functional.interpolate` directly, without the overhead of that function. The
kernel copies strided input slowly, so it receives a contiguous crop. It writes to the given array to save an allocation
and a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.loading.augment.transform import sent
from colabkit.packs import Pixels

Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Boxes:
    """One box per image, in pixels from the image's upper left corner; a box may extend beyond the image.

    Attributes:
        top: first row, `int64 [B]`.
        left: first column, `int64 [B]`.
        height: number of rows, `int64 [B]`.
        width: number of columns, `int64 [B]`.
        mirrored: whether the box is flipped horizontally after the cut, `bool [B]`.
        upside_down: whether the box is flipped vertically after the cut, `bool [B]`; False by default.

    Example:
        >>> import numpy as np
        >>> from colabkit import augment
        >>> boxes = augment.Boxes.of_size(np.array([0, 4]), np.array([2, 4]), (8, 8))
        >>> list(boxes.rows())
        [(0, 2, 8, 8, False, False), (4, 4, 8, 8, False, False)]
    """

    top: npt.NDArray[np.int64]
    left: npt.NDArray[np.int64]
    height: npt.NDArray[np.int64]
    width: npt.NDArray[np.int64]
    mirrored: npt.NDArray[np.bool_]
    upside_down: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros((), np.bool_))

    def __post_init__(self) -> None:
        if self.upside_down.shape != self.mirrored.shape:
            object.__setattr__(self, "upside_down", np.broadcast_to(self.upside_down, self.mirrored.shape))

    @classmethod
    def whole(cls, sizes: npt.NDArray[np.int64]) -> Boxes:
        """Return boxes that cover the complete images; `sizes` holds their height and width, `int64 [B, 2]`."""
        corner = np.zeros(len(sizes), np.int64)
        return cls(corner, corner, sizes[:, 0], sizes[:, 1], np.zeros(len(sizes), np.bool_))

    @classmethod
    def of_size(cls, top: npt.NDArray[np.int64], left: npt.NDArray[np.int64], size: tuple[int, int]) -> Boxes:
        """Return boxes of one size (height, width) from their first rows and columns."""
        count = len(top)
        return cls(top, left, np.full(count, size[0]), np.full(count, size[1]), np.zeros(count, np.bool_))

    def rows(self) -> Iterator[tuple[int, int, int, int, bool, bool]]:
        """Iterate over the boxes as plain numbers: top, left, height, width, mirrored and upside down."""
        columns = self.top, self.left, self.height, self.width, self.mirrored, self.upside_down
        return zip(*(column.tolist() for column in columns), strict=True)

    def reach_beyond(self, height: int, width: int) -> bool:
        """Return whether any box extends beyond images of the given size."""
        inside = self.top.min(initial=0) >= 0 and self.left.min(initial=0) >= 0
        last_row, last_column = (self.top + self.height).max(initial=0), (self.left + self.width).max(initial=0)
        return not (inside and last_row <= height and last_column <= width)


_SMALL = 64 * 64
"""Largest number of pixels that NumPy mirrors faster than torch, which costs more per call but less per pixel."""

_resample: Callable[..., torch.Tensor] = torch._C._nn._upsample_bilinear2d_aa  # noqa: SLF001


def cut(
    pixels: Pixels,
    top: int,
    left: int,
    height: float,
    width: float,
    mirrored: bool,
    upside_down: bool,
    out: Pixels,
    fill: int = 0,
) -> None:
    """Fill `out` with a box of an image, resized to the size of `out` and optionally flipped.

    Resizing is bilinear with antialiasing, byte-identical to `torch.nn.functional.interpolate(antialias=True)`. This
    function is thread-safe. The part of a box outside the image gets the value `fill`. Height and width may be
    fractional if the box is inside the image.

    Args:
        pixels: `uint8 [H, W, C]`, contiguous within each row; may be read-only.
        top, left, height, width: the box, in pixels.
        mirrored: whether to flip the box horizontally.
        upside_down: whether to flip the box vertically.
        out: `uint8 [h, w, C]`, C-contiguous.
        fill: pixel value outside the image.
    """
    resized = (height, width) != out.shape[:2]
    scales: tuple[float, float] | tuple[()] = ()
    if height % 1 or width % 1:
        scales = out.shape[0] / height, out.shape[1] / width
    height, width = math.ceil(height), math.ceil(width)
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
    if resized:
        _resize(box, scales, mirrored, out)
    elif mirrored:
        out[...] = _mirrored(box)
    else:
        out[...] = box
    if upside_down:
        out[...] = out[::-1]


def crop_rows(pixels: Pixels, boxes: Boxes, size: tuple[int, int], fill: int) -> Pixels:
    """Cut boxes of one size, `uint8 [B, h, w, C]`, out of a C-contiguous batch `uint8 [B, H, W, C]`.

    Each box has the size of the result. The part of a box outside its image gets the value `fill`.
    """
    count, rows, columns, channels = pixels.shape
    height, width = size
    # Return early for an empty batch, which has no boxes from which to compute the padding.
    if not count:
        return np.empty((0, height, width, channels), np.uint8)
    top, left = boxes.top, boxes.left
    if boxes.reach_beyond(rows, columns):
        above, before = max(0, -int(top.min())), max(0, -int(left.min()))
        padded_rows = above + max(rows, int(top.max()) + height)
        padded_columns = before + max(columns, int(left.max()) + width)
        padded = np.full((count, padded_rows, padded_columns, channels), fill, np.uint8)
        padded[:, above : above + rows, before : before + columns] = pixels
        pixels, top, left = padded, top + above, left + before
    # View every run of `width` pixels as one value, so that a box is `height` values and each is copied in one step.
    places = pixels.shape[2] - width + 1
    stretches: npt.NDArray[np.void] = np.ndarray(
        (count, pixels.shape[1], places), f"V{width * channels}", pixels, 0, pixels.strides[:3]
    )
    row = np.arange(height)
    row = np.where(boxes.upside_down[:, None], row[::-1], row)
    chosen = stretches[np.arange(count)[:, None], top[:, None] + row, left[:, None]]
    out: Pixels = chosen.view(np.uint8).reshape(count, height, width, channels)
    turned = np.flatnonzero(boxes.mirrored)
    if height * width <= _SMALL:
        whole = _whole_pixels(out)
        whole[turned] = whole[turned][..., ::-1, :]
    else:
        for index in turned:
            out[index] = _mirrored(out[index])
    return out


def _resize(box: Pixels, scales: tuple[float, float] | tuple[()], mirrored: bool, out: Pixels) -> None:
    # Each operation of torch, even a view, releases the GIL. With many threads, acquiring it again takes longer than
    # the operation, so make the views in NumPy, which keeps it.
    # Copy the box: the kernel is slow on strided pixels, and torch warns about read-only memory.
    image = _as_images(_mirrored(box) if mirrored and not scales else box.copy())
    _resample(image, out.shape[:2], False, *scales, out=_as_images(out))
    if mirrored and scales:
        # The kernel aligns a box of fractional width at the left, so mirror the result instead of the image.
        out[...] = _mirrored(out)


def _as_images(pixels: Pixels) -> Tensor:
    """View pixels `uint8 [H, W, C]` as a batch of one image, `[1, C, H, W]`."""
    return torch.from_numpy(pixels.transpose(2, 0, 1)[None])


def _mirrored(pixels: Pixels) -> Pixels:
    if pixels.shape[0] * pixels.shape[1] <= _SMALL:
        turned: Pixels = _whole_pixels(pixels)[:, ::-1].copy().view(np.uint8)
        return turned
    # Copy read-only memory, because torch would warn about it.
    flipped = _as_images(pixels if pixels.flags.writeable else pixels.copy()).flip(3)
    mirrored: Pixels = flipped.numpy()[0].transpose(1, 2, 0)
    return mirrored


def _whole_pixels(pixels: Pixels) -> npt.NDArray[np.void]:
    return pixels.view(f"V{pixels.shape[-1]}")


def crop_batch(images: Tensor, boxes: Boxes, size: tuple[int, int], fill: float) -> Tensor:
    """Cut boxes out of images `[B, C, H, W]` as `crop_rows` does; return `[B, C, h, w]` in channels-last memory."""
    height, width = images.shape[2:]
    down = _first_and_step(boxes.top, size[0], boxes.upside_down)
    across = _first_and_step(boxes.left, size[1], boxes.mirrored)
    # Send all numbers in one copy: starting a copy or a kernel takes longer than running it.
    first_row, row_step, first_column, column_step = _send(np.stack([*down, *across]), images.device)
    rows = torch.addcmul(first_row, row_step, torch.arange(size[0], device=images.device))
    columns = torch.addcmul(first_column, column_step, torch.arange(size[1], device=images.device))
    beyond = None
    if boxes.reach_beyond(height, width):
        beyond = ((rows < 0) | (rows >= height))[:, :, None] | ((columns < 0) | (columns >= width))[:, None]
        rows, columns = rows.clamp_(0, height - 1), columns.clamp_(0, width - 1)
    samples = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    result = images.permute(0, 2, 3, 1)[samples, rows[:, :, None], columns[:, None]]
    if beyond is not None:
        result.masked_fill_(beyond[..., None], fill)
    return result.permute(0, 3, 1, 2)


def _first_and_step(first: Sizes, length: int, is_flipped: npt.NDArray[np.bool_]) -> tuple[Sizes, Sizes]:
    """Return the pixel that each result starts with, and the step to the next one: 1, or -1 in reverse."""
    return np.where(is_flipped, first + length - 1, first), np.where(is_flipped, -1, 1)


def resize_batch(images: Tensor, boxes: Boxes, size: tuple[int, int], fill: float = 0) -> Tensor:
    """Cut one box out of each image and resize it; return `[B, C, h, w]` in channels-last memory and the images' dtype.

    The result matches bilinear `torch.nn.functional.interpolate` with antialiasing. It is computed without a loop over
    samples, as two products with dense weight matrices, one per direction. `uint8` and float16 images on CUDA are
    computed in float16, which changes a byte by at most 1; float64 images in float64, all others in float32. The part
    of a box outside its image gets the value `fill`.
    """
    if boxes.reach_beyond(*images.shape[2:]):
        images, boxes = _pad_batch(images, boxes, fill)
    count, channels, height, width = images.shape
    if not count:
        return images.new_empty((0, *size, channels)).permute(0, 3, 1, 2)
    dtype = torch.float64 if images.dtype == torch.float64 else torch.float32
    if images.device.type == "cuda" and images.dtype in (torch.uint8, torch.float16):
        dtype = torch.float16
    # Compute both directions together: on a GPU, a kernel for half as many numbers takes just as long.
    start, length = np.concatenate((boxes.top, boxes.left)), np.concatenate((boxes.height, boxes.width))
    is_flipped = np.concatenate((boxes.upside_down, boxes.mirrored))
    both = _Axis(start, length, is_flipped, np.repeat((height, width), count), np.repeat(size, count))
    weights = _weights(both, dtype, images.device)
    down, across = weights[:count, : size[0], :height], weights[count:, : size[1], :width]
    pixels = images.permute(0, 2, 3, 1).to(dtype).reshape(count, height, width * channels)
    # Multiply transposed matrices, so that no result has to be transposed before the next product.
    narrowed = torch.bmm(pixels.transpose(1, 2), down.transpose(1, 2)).view(count, width, channels * size[0])
    result = torch.bmm(narrowed.transpose(1, 2), across.transpose(1, 2)).view(count, channels, *size)
    if not images.is_floating_point():
        # The weights of a pixel sum to 1 within 0.1%, so no value is rounded to more than 255.
        result.round_()
    return result.to(images.dtype, memory_format=torch.channels_last)


def _pad_batch(images: Tensor, boxes: Boxes, fill: float) -> tuple[Tensor, Boxes]:
    """Pad images `[B, C, H, W]` so that they contain all boxes; return them, and the boxes in the padded images.

    One box that reaches far beyond its image enlarges all images.
    """
    height, width = images.shape[2:]
    above, before = max(0, -int(boxes.top.min())), max(0, -int(boxes.left.min()))
    below = max(0, int((boxes.top + boxes.height).max()) - height)
    after = max(0, int((boxes.left + boxes.width).max()) - width)
    padded = torch.nn.functional.pad(images, (before, after, above, below), value=fill)
    return padded, replace(boxes, top=boxes.top + above, left=boxes.left + before)


def resize_each(
    images: Sequence[Tensor], boxes: Boxes, size: tuple[int, int], *, fill: float, is_isolated: bool
) -> Tensor:
    """Cut one box out of each image `uint8 [C, H, W]` and resize it; return `uint8 [B, C, h, w]`.

    The images may differ in size, and the boxes may have fractional corners and sides.

    Args:
        images: the images, all on one device.
        boxes: the box of each image.
        size: height and width of the result.
        fill: value of the part of a box outside its image.
        is_isolated: whether only pixels inside the box contribute, as in `resize_batch`; if not, pixels around the box
            contribute too, as in Pillow.
    """
    device, dtype = images[0].device, torch.float16 if images[0].is_cuda else torch.float32
    images = [_pad_image(image, box[:4], fill) for image, box in zip(images, boxes.rows(), strict=True)]
    boxes = replace(boxes, top=np.maximum(boxes.top, 0), left=np.maximum(boxes.left, 0))
    axes = _axes(boxes, np.array([image.shape[1:] for image in images]), size)
    down, across = (_weights(axis, dtype, device, is_isolated=is_isolated) for axis in axes)
    result = torch.empty((len(images), len(images[0]), *size), dtype=dtype, device=device)
    margins = (0, 0) if is_isolated else tuple(axis.taps for axis in axes)
    for number, (image, (y, x, tall, wide, *_)) in enumerate(zip(images, boxes.rows(), strict=True)):
        inside, between = (
            slice(max(0, math.floor(start) - margin), min(math.ceil(start + length) + margin, end))
            for start, length, margin, end in zip((y, x), (tall, wide), margins, image.shape[1:], strict=True)
        )
        pixels = image[:, inside, between].to(dtype)
        narrowed = torch.bmm(down[number, :, inside].expand(len(image), -1, -1), pixels)
        torch.matmul(narrowed, across[number, :, between].T, out=result[number])
    return result.round_().clamp_(0, 255).to(torch.uint8)


def _pad_image(image: Tensor, box: tuple[float, ...], fill: float) -> Tensor:
    """Pad an image where a box extends beyond it."""
    top, left, height, width = box
    beyond = [-left, left + width - image.shape[2], -top, top + height - image.shape[1]]
    # Round the sums of fractions, because they may exceed the image by rounding errors.
    pads = [max(0, round(pixels)) for pixels in beyond]
    return torch.nn.functional.pad(image, pads, value=fill) if any(pads) else image


class _Axis(NamedTuple):
    """The boxes of a batch along one axis, one number per image, `[B]` each.

    Attributes:
        start: first pixel of the box.
        length: pixels of the box.
        is_flipped: whether the result is reversed.
        inputs: pixels of the image.
        outputs: pixels of the result.
    """

    start: npt.NDArray[Any]
    length: npt.NDArray[Any]
    is_flipped: npt.NDArray[np.bool_]
    inputs: Sizes
    outputs: Sizes

    @property
    def taps(self) -> int:
        """The largest number of input pixels that contribute to one output pixel."""
        scales = self.length / self.outputs
        return min(math.ceil(2 * max(1.0, float(scales.max()))) + 1, int(self.inputs.max()))


def _axes(boxes: Boxes, inputs: Sizes, size: tuple[int, int]) -> tuple[_Axis, _Axis]:
    """Return the boxes along both axes: down, and across; `inputs` holds the sizes of the images, `[B, 2]`."""
    outputs = np.broadcast_to(size, inputs.shape)
    down = _Axis(boxes.top, boxes.height, boxes.upside_down, inputs[:, 0], outputs[:, 0])
    return down, _Axis(boxes.left, boxes.width, boxes.mirrored, inputs[:, 1], outputs[:, 1])


def _weights(axis: _Axis, dtype: torch.dtype, device: torch.device, *, is_isolated: bool = True) -> Tensor:
    """Return the weight of each input pixel in each output pixel along one axis.

    Only the pixels around the center of each output pixel are computed, in float64; the other weights are 0. If
    `is_isolated` is false, pixels of the image outside the box have weights, too.

    Returns:
        Weights `[B, largest number of outputs, largest number of inputs]`, undefined beyond an image's own outputs.
    """
    start, length, is_flipped, inputs, outputs = axis
    taps, scale = axis.taps, length / outputs
    support = np.maximum(scale, 1)
    step = np.where(is_flipped, -scale, scale)
    # The center of pixel n is at n.
    first_center = np.where(is_flipped, start + length, start) + step / 2 - 0.5
    low, high = (np.ceil(start), np.ceil(start + length)) if is_isolated else (np.zeros(len(inputs)), inputs)
    # An output pixel reads a window of `taps` consecutive input pixels around its center. Windows are moved into the
    # image, so that no pixel is listed twice, and into the box if that has at least `taps` pixels.
    last_window = np.minimum(np.maximum(high - taps, low), np.maximum(inputs - taps, 0))
    on_host = _Spans(first_center, step, support, support - 1, np.minimum(low, last_window), last_window, low, high)
    # Compute as much as possible for each image rather than each pixel, in as few kernels as possible: starting a
    # kernel takes longer than running it.
    spans = _Spans(*_send(np.stack(on_host), device))
    outputs_at = torch.arange(int(outputs.max()), dtype=torch.float64, device=device)
    center = torch.addcmul(spans.first_center, spans.step, outputs_at)
    window = (center - spans.reach).floor_().clamp_(spans.first_window, spans.last_window)
    at = window[:, :, None] + torch.arange(taps, dtype=torch.float64, device=device)
    weights = spans.support[:, :, None].sub((at - center[:, :, None]).abs_()).clamp_(min=0)
    if (high - low < taps).any():
        # Ignore the pixels of a window that are outside a short box.
        weights *= (at >= spans.low[:, :, None]) & (at < spans.high[:, :, None])
    weights /= weights.sum(2, keepdim=True)
    dense = torch.zeros((*center.shape, int(inputs.max())), dtype=dtype, device=device)
    return dense.scatter_(2, at.long(), weights.to(dtype))


class _Spans(NamedTuple):
    """Positions along one axis, in input pixels: one number per image, `[B]` on the host or `[B, 1]` on a device.

    Attributes:
        first_center: center of the first output pixel.
        step: distance between the centers of consecutive output pixels; negative if the result is reversed.
        support: distance from a center at which the weight of an input pixel becomes 0.
        reach: distance from a center to the first pixel of its window, before rounding.
        first_window: smallest first pixel of a window.
        last_window: largest first pixel of a window.
        low: first pixel that may have a weight.
        high: end of the pixels that may have weights.
    """

    first_center: Any
    step: Any
    support: Any
    reach: Any
    first_window: Any
    last_window: Any
    low: Any
    high: Any


def _send(table: npt.NDArray[Any], device: torch.device) -> tuple[Tensor, ...]:
    """Copy a table `[N, B]` to a device at once, and return its rows, `[B, 1]` each."""
    return sent(torch.from_numpy(table), device)[:, :, None].unbind()
