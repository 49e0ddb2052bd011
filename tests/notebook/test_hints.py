"""Below a cell that misspells a public name, or in which a model gets unscaled images, a hint names the remedy."""

from __future__ import annotations

import numpy as np
import pytest
from magic_shells import loaded_shell, run, shown_by

import colabkit

CELL = """import colabkit, torch
for images, labels in colabkit.Loader(data, 4, transform={transform}):
    torch.nn.{layer}(images)"""


@pytest.fixture
def data(tmp_path):
    path = colabkit.pack((np.zeros((8, 6, 5, 3), np.uint8), np.arange(8) % 2), tmp_path / "p.h5", progress=False).path
    return colabkit.open_pack(path)["train"]


@pytest.mark.parametrize(
    ("layer", "transform", "is_explained"),
    [
        ("Conv2d(3, 4, 3)", "None", True),
        ("Conv2d(3, 4, 3)", "colabkit.augment.Normalize()", False),
        ("Conv2d(1, 4, 3)", "colabkit.augment.Normalize()", False),
        ("Linear(5, 2)", "None", True),
    ],
)
def test_a_layer_that_gets_unscaled_images_is_explained(capsys, data, layer, transform, is_explained):
    with loaded_shell() as shell:
        shell.push({"data": data})
        run(shell, CELL.format(layer=layer, transform=transform))
        text = " ".join(shown_by(capsys))
        assert ("transform=colabkit.augment.Normalize() to the Loader" in text.rpartition("Error")[2]) == is_explained
        shell.extension_manager.unload_extension("colabkit")
        run(shell, CELL.format(layer=layer, transform=transform))
        assert "colabkit: Images" not in " ".join(shown_by(capsys))


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("colabkit.Loadr", "colabkit: Did you mean colabkit.Loader?"),
        ("colabkit.augment.RandomCropp", "colabkit: Did you mean colabkit.augment.RandomCrop?"),
        ("colabkit.quux", None),
        ("math.sqr", None),
    ],
)
def test_the_most_similar_public_name_is_suggested(capsys, wrong, hint):
    with loaded_shell() as shell:
        run(shell, f"import colabkit, math\n{wrong}")
        lines = [line for line in shown_by(capsys) if line.startswith("colabkit: ")]
        assert lines == ([hint] if hint else [])
