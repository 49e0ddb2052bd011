"""A network to begin with: small, convolutional, for images of any size and any number of classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from colabkit.foundation import InvalidOption, cannot, check_whole_number

_GRID = 8  # what the first layer brings the shorter side to, about


def small_network(classes: int, shape: Sequence[int], *, seed: int = 0) -> nn.Module:
    """Return a small convolutional network for images of one shape, to begin with and to compare with.

    Three convolutions with batch normalisation, a maximum over a grid of 2x2, and a linear layer: some 100,000
    parameters, in channels-last memory, on the CPU. Its first layer brings images of any size to about 8x8, so it costs
    little, and sees little of large ones.

    Args:
        classes: how many scores it gives.
        shape: height, width and channels of the images, as `PackReport.sample_shape`.
        seed: of the weights; torch's own generators stay as they are.

    Raises:
        InvalidOption: if there is no class, or the shape is none of an image.
    """
    act = "make a small network"
    check_whole_number(act, "classes", classes, 1)
    if len(shape) != 3 or min(shape) < 1:
        found, needed = f"shape={tuple(shape)}", "height, width and channels of images"
        raise InvalidOption(cannot(act, found, needed, "Pack images, all brought to one size"))
    height, width, channels = shape
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        layers: list[nn.Module] = []
        for features, stride in ((32, max(1, min(height, width) // _GRID)), (64, 1), (128, 2)):
            convolution = nn.Conv2d(channels, features, 2 * stride + 1, stride, stride, bias=False)
            layers += [convolution, nn.BatchNorm2d(features), nn.ReLU()]
            channels = features
        head = [nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4 * channels, classes)]
        return nn.Sequential(*layers, *head).to(memory_format=torch.channels_last)
