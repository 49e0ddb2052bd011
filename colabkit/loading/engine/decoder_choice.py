"""Choose where JPEG files are decoded: by the option `decode`, or by a measurement on a few files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from colabkit.foundation import BadImage, ColabkitError, InvalidOption, LoaderMeters, cannot, omit
from colabkit.loading.augment.geometry import Geometry
from colabkit.loading.augment.transform import Draws
from colabkit.loading.engine.batches import BatchGroup, BatchPlan
from colabkit.loading.engine.device_decoder import decode_jpegs, device_decoder, idle_stream
from colabkit.loading.engine.image_decoders import BadSamples, ImageDecoder, ImageOptions
from colabkit.loading.engine.options import LoaderOptions
from colabkit.loading.engine.thread_pool import limit_torch_to_one_thread
from colabkit.loading.engine.tiers import RowCache, Tier
from colabkit.packs import encode_jpeg

_DEVICE_TYPE = "cuda"
_SAMPLED = 24
# Decoding on the GPU also slows down training, so it has to be this much faster than on the CPU.
_FASTER = 1.5
_TRIAL_VALUE = 100


@dataclass(frozen=True)
class DecoderChoice:
    """The decoder of JPEG files, and the reason for the choice.

    Attributes:
        name: `"cpu"` or `"gpu"`.
        reason: reason for the choice, as text.
    """

    name: Literal["cpu", "gpu"]
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_decoder(
    options: LoaderOptions, images: ImageOptions | None, geometry: Geometry | None, tier: Tier
) -> DecoderChoice:
    """Choose where to decode JPEG files.

    Args:
        options: options of the loader.
        images: options for decoding on the CPU; None if the samples are not image files.
        geometry: crop to apply to each image.
        tier: tier of the samples if they are decoded on the CPU.

    Raises:
        InvalidOption: if `decode` is `"gpu"` and this is impossible.
    """
    if options.decode == "cpu":
        return DecoderChoice("cpu", "the default")
    found, next_step = ("the samples need no decoding", "") if images is None else _obstacle(options.device)
    if options.decode == "gpu":
        if not found and options.keep != "auto":
            found, next_step = f"keep={options.keep!r} caches samples that are decoded on the CPU", "Omit keep="
        if found:
            advice = (next_step, ", or ", omit("decode")) if next_step else "Omit decode="
            raise InvalidOption(cannot(options.act, f"decode='gpu', but {found}", "", advice))
        return DecoderChoice("gpu", "requested with decode='gpu'")
    if not found and images is not None and tier.rows == len(images.dataset):
        found = f"each sample is decoded once, and cached in {tier.name}"
    if found or images is None:
        return DecoderChoice("cpu", found)
    try:
        # Limit torch to one thread, as in the loader's worker threads.
        with ThreadPoolExecutor(1, initializer=limit_torch_to_one_thread) as executor:
            cpu, gpu = executor.submit(_rates, options, images, geometry).result()
    except (ColabkitError, RuntimeError) as error:
        return DecoderChoice("cpu", f"the speed on the GPU cannot be measured: {error}")
    reason = f"{gpu:,.0f} images/s on the GPU, {cpu:,.0f} on the CPU"
    return DecoderChoice("gpu" if gpu > _FASTER * cpu else "cpu", reason)


def _obstacle(device: torch.device) -> tuple[str, str]:
    """Return the reason why JPEG files cannot be decoded on a device, and advice; two empty strings if they can."""
    if device.type != _DEVICE_TYPE:
        if not torch.cuda.device_count():
            return "PyTorch finds no usable GPU", "Choose a GPU runtime and pass device='cuda'"
        return "the batches are on the CPU", "Pass device='cuda' as well"
    file = encode_jpeg(np.full((64, 64, 3), _TRIAL_VALUE, np.uint8), 90)
    try:
        with idle_stream(device):
            (image,) = decode_jpegs([file], 3, device)
            if image.shape == (3, 64, 64) and abs(image.float().mean().item() - _TRIAL_VALUE) <= 2:
                return "", ""
        reason = "a test image was decoded incorrectly"
    except ImportError:
        return "torchvision is not installed", "Run pip install torchvision"
    except Exception as error:
        # A torchvision without nvJPEG, or a broken one, may raise any error.
        reason = str(error).partition("\n")[0]
    return f"torchvision cannot decode JPEG files on {device} ({reason})", "Install torchvision with CUDA support"


def _rates(options: LoaderOptions, images: ImageOptions, geometry: Geometry | None) -> tuple[float, float]:
    """Measure the images per second of the CPU with all threads, and of the GPU, on a few files."""
    indices = np.linspace(0, len(images.dataset) - 1, min(_SAMPLED, len(images.dataset))).astype(np.int64)
    empty = RowCache(len(images.dataset), images.cache.shape, 0, "ram", Path())
    # The trial has only images, without labels.
    trial = replace(images, bad=_IgnoredSamples("blank"), cache=empty, moves_boxes=False)
    size = (geometry and geometry.size) or (images.row_shape or (0, 0))[:2]
    rates = []
    # The first run on the GPU loads its libraries.
    for is_on_device in (False, True, True):
        counts = LoaderMeters()
        decoder: ImageDecoder = trial.decoder(geometry, None, counts)
        if is_on_device:
            decoder = device_decoder(trial, geometry, None, counts, options)
        group = BatchGroup(BatchPlan(indices, indices, (len(indices),), (len(indices),)))
        group.draws = Draws(options.seed, 0, indices)
        pixels = torch.empty(len(indices), *size, images.files.channels, dtype=torch.uint8, device="cpu")
        group.values = [[None] * len(indices) if is_on_device else pixels.permute(0, 3, 1, 2)]
        decoder.fill(group, 0, len(indices), group.draws)
        decoder.finish(group)
        busy_s = sum(part.busy_s for part in counts.snapshot().parts if part.name != "read")
        rates.append(len(indices) / max(busy_s, 1e-9))
    return rates[0] * max(1, options.threads), rates[-1]


class _IgnoredSamples(BadSamples):
    """A `BadSamples` that ignores bad samples, for measurements."""

    def add(self, name: str, error: BadImage) -> None:
        """Ignore the sample."""
