"""Models that tests train: a ViT, a ResNet and a small CNN in plain torch, with reproducible weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colabkit.training.step_factory import supervised_step
from colabkit.training.steps import SupervisedStep

Batches = list[tuple[Tensor, Tensor]]


def small_vit(classes: int = 10, seed: int = 0) -> nn.Module:
    """Return a vision transformer for 28x28 images of one channel: 16 patches of 7x7, width 64, 4 layers of 4 heads."""
    torch.manual_seed(seed)
    return _Transformer(side=28, patch=7, width=64, depth=4, heads=4, classes=classes)


def resnet18(classes: int = 10, width: int = 64, seed: int = 0) -> nn.Module:
    """Return a residual network of 18 layers for color images; its first stage has `width` channels.

    With `width=64`, it has the sizes in table 1 of He et al. 2015, "Deep Residual Learning for Image Recognition".
    With channels-last tensors, the backward pass of 1x1 convolutions writes out of bounds if `width` is below 16 on a
    CPU with AVX-512, or below 8 on another (https://github.com/uxlfoundation/oneDNN/issues/6035).
    """
    torch.manual_seed(seed)
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = width
    for stage in range(4):
        stride = 1 if stage == 0 else 2
        layers += [_Residual(channels, width << stage, stride), _Residual(width << stage, width << stage, 1)]
        channels = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def small_cnn(classes: int = 10, width: int = 16, seed: int = 0) -> nn.Module:
    """Return a network with 3 convolutional layers for color images."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


def batches(count: int = 4, size: int = 8, side: int = 8) -> Batches:
    random = torch.Generator().manual_seed(5)
    images = torch.rand(count, size, 3, side, side, generator=random)
    return list(zip(images, torch.randint(0, 10, (count, size), generator=random), strict=True))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_step(model: nn.Module | None = None, *arguments: Any, **options: Any) -> tuple[nn.Module, SupervisedStep]:
    model = small_cnn(width=8) if model is None else model
    return model, supervised_step(model, sgd(model), *arguments, **options)


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, weights(one), weights(other)))


def close(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(weights(one), weights(other), strict=True))


class _Transformer(nn.Module):
    def __init__(self, side: int, patch: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.layers = nn.ModuleList([_Layer(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(self.norm(tokens.mean(1)))


class _Layer(nn.Module):
    """Attention and a perceptron, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        batch, count, width = tokens.shape
        parts = self.queries_keys_values(self.norms[0](tokens)).view(batch, count, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values)
        tokens = tokens + self.joined(seen.transpose(1, 2).reshape(batch, count, width))
        return tokens + self.perceptron(self.norms[1](tokens))


class _Residual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.straight = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.around = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.relu(self.straight(images) + self.around(images))
