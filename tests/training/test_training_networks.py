"""The small network: any size, channels and classes, the same weights each time, and nothing of torch's disturbed."""

from __future__ import annotations

import pytest
import torch

import colabkit
from colabkit.errors import InvalidOption


@pytest.mark.parametrize("shape", [(8, 8, 3), (1, 1, 1), (28, 28, 1), (64, 48, 3), (224, 224, 3)])
@pytest.mark.parametrize("classes", [1, 10])
def test_it_gives_a_score_for_each_class_of_images_of_any_shape(shape: tuple[int, int, int], classes: int) -> None:
    model = colabkit.small_network(classes, shape)
    images = torch.rand(2, shape[2], *shape[:2])
    assert model.eval()(images).shape == (2, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_the_seed_decides_the_weights_and_torchs_generator_stays_as_it_is() -> None:
    before = torch.random.get_rng_state()
    first, same, other = (colabkit.small_network(3, (8, 8, 3), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first[0].weight, same[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)


@pytest.mark.parametrize(
    ("classes", "shape", "said"),
    [(0, (8, 8, 3), "classes=0"), (3, (), r"shape=\(\)"), (3, (8, 8), r"shape=\(8, 8\)"), (3, (0, 8, 3), "shape")],
)
def test_what_is_no_image_or_no_class_is_refused(classes: int, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        colabkit.small_network(classes, shape)
