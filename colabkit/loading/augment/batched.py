"""Boxes of a whole batch at once, on any device and of any dtype."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from colabkit.loading.augment.boxes import Boxes


def crop_batch(images: Tensor, boxes: Boxes, size: tuple[int, int], fill: float) -> Tensor:
    """Return boxes of one size, `[B, C, h, w]` in channels-last memory.

    Args:
        images: `[B, C, H, W]`.
        boxes: of the samples; each has the size of the result and may reach beyond its image.
        size: height and width of the result.
        fill: value of what lies beyond the image.
    """
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
    most 1, in float64 for images of float64, in float32 otherwise.

    Args:
        images: `[B, C, H, W]`.
        boxes: of the samples, inside the images.
        size: height and width of the result.
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

    Args:
        start: first input of the box, `int64 [B, 1]`.
        length: inputs of the box, `int64 [B, 1]`.
        inputs: of the whole image.
        outputs: of the result.
        mirrored: 1 where the outputs go the other way, `int64 [B, 1]`.
        dtype: of the result.
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
