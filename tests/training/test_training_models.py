"""`small_network()`, and models that learn: a transformer on digits, and a residual network on larger images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from models import resnet18, small_vit
from sampling import sampled
from torch import nn

import colabkit
from colabkit.errors import InvalidOption

Arrays = dict[str, dict[str, np.ndarray]]


@pytest.mark.parametrize("shape", [(8, 8, 3), (1, 1, 1), (28, 28, 1), (64, 48, 3), (224, 224, 3)])
@pytest.mark.parametrize("classes", [1, 10])
def test_small_network_returns_a_score_for_each_class_for_images_of_any_shape(
    shape: tuple[int, int, int], classes: int
) -> None:
    model = colabkit.small_network(classes, shape)
    images = torch.rand(2, shape[2], *shape[:2])
    assert model.eval()(images).shape == (2, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_the_seed_determines_the_weights_and_torchs_generator_is_unchanged() -> None:
    before = torch.random.get_rng_state()
    first, same, other = (colabkit.small_network(3, (8, 8, 3), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first[0].weight, same[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)


@pytest.mark.parametrize(
    ("classes", "shape", "message"),
    [(0, (8, 8, 3), "classes=0"), (3, (), r"shape=\(\)"), (3, (8, 8), r"shape=\(8, 8\)"), (3, (0, 8, 3), "shape")],
)
def test_invalid_shapes_and_numbers_of_classes_are_refused(classes: int, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        colabkit.small_network(classes, shape)


def drawn(shape: tuple[int, int, int], classes: int, train: int, dev: int, spread: float, seed: int = 3) -> Arrays:
    """Return images, `uint8 [N, H, W, C]`, and labels for each split.

    Each image shows the coarse picture of its class, with noise.
    """
    random = np.random.default_rng(seed)
    height, width, channels = shape
    coarse = random.uniform(40, 215, (classes, 7, 7, channels))
    pictures = coarse.repeat(height // 7, axis=1).repeat(width // 7, axis=2)
    arrays: Arrays = {}
    for split, count in (("train", train), ("dev", dev)):
        labels = np.arange(count) % classes
        noisy = pictures[labels] + random.normal(0, spread, (count, *shape))
        arrays[split] = {"X": noisy.clip(0, 255).astype(np.uint8), "Y": labels}
    return arrays


def learned(
    model: nn.Module, arrays: Arrays, out: Path, batch_size: int, epochs: int, rate: float
) -> tuple[float, float, colabkit.TrainReport]:
    data = colabkit.open_pack(colabkit.pack(arrays, out, progress=False).path)
    normalize = colabkit.augment.Normalize(mean=(0.5,), std=(0.5,))
    loader = colabkit.Loader(data["train"], batch_size, shuffle=True, transform=normalize)
    dev_loader = colabkit.Loader(data["dev"], batch_size, transform=normalize)
    step = colabkit.supervised_step(model, torch.optim.AdamW(model.parameters(), lr=rate))
    before = step.evaluate(dev_loader)
    return before["loss"], before["accuracy"], colabkit.train(step, loader, epochs=epochs, validate=dev_loader)


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("model", "arrays", "batch_size", "epochs", "rate"),
    sampled(
        [
            (small_vit, ((28, 28, 1), 10, 640, 160, 70.0), 32, 3, 1e-3),
            # Enough steps for the running means of the batch normalization, which validation uses.
            (lambda: resnet18(4, width=16), ((224, 224, 3), 4, 64, 16, 40.0), 8, 6, 1e-3),
        ],
        1,
    ),
    ids=["ViT on digits", "ResNet on leaves"],
)
def test_a_model_learns_to_classify_the_images(tmp_path, model, arrays, batch_size, epochs, rate):
    made = drawn(*arrays)
    loss, accuracy, report = learned(model(), made, tmp_path / "data.h5", batch_size, epochs, rate)
    chance = 1 / arrays[1]
    last = report.epochs[-1]
    assert accuracy < 3 * chance
    assert last.values["loss"] < 0.5 * loss
    assert last.values["accuracy"] > 0.8
    assert last.validation["loss"] < 0.5 * loss
    assert last.validation["accuracy"] > 0.8
    assert report.steps == epochs * -(-len(made["train"]["Y"]) // batch_size)
