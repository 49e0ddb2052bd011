"""`Loader.as_keras()` in Keras 3, mostly with the torch backend."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from contract import make_pack
from trees import needs
from warm_python import Program

COUNT = 22

COMMON = """
import json, sys
import keras, torch
from colabkit import Loader, augment, errors, open_pack

pack = open_pack(sys.argv[1])
data = pack["train"]
seen = []

def noted(images):
    seen.append(images.clone())
    return images.float() / 255

def make_loader(**options):
    return Loader(data, 4, num_workers=0, transform=noted, **options)

def make_model(loss, *first):
    layers = keras.layers
    model = keras.Sequential([*first, layers.Conv2D(4, 2, activation="relu"), layers.Flatten(), layers.Dense(3)])
    model.compile(optimizer="sgd", loss=loss(from_logits=True), metrics=["accuracy"])
    return model

SPARSE, ONE_HOT = keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy
"""


SERVE = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    scope = {"__name__": "__main__"}
    exec(json.loads(line), scope)
    print(json.dumps(scope["result"]), file=answers, flush=True)
"""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pack(tmp_path_factory.mktemp("packs") / "data.h5", train=COUNT, dev=7)


@pytest.fixture(scope="module")
def run(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Return a function that runs code in a process with Keras on torch, and returns the code's variable `result`.

    All code runs in one process, because importing Keras takes seconds, and each has its own variables.
    """
    needs("keras", importlib.util.find_spec("keras") is not None)
    environ = {**os.environ, "KERAS_BACKEND": "torch", "KERAS_HOME": str(pack.parent), "CUDA_VISIBLE_DEVICES": ""}
    errors = tmp_path_factory.mktemp("errors") / "errors"
    with errors.open("w") as file:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file}
        with Program([sys.executable, "-c", SERVE, str(pack)], env=environ, text=True, **pipes) as process:

            def result_of(code: str) -> Any:
                process.stdin.write(json.dumps(f"{COMMON}\n{code}") + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
                assert line, errors.read_text()
                return json.loads(line)

            yield result_of


@pytest.mark.full
def test_fit_takes_each_epoch_of_the_loader_in_its_order_also_if_it_builds_the_model_first(run):
    result = run(
        """
loader = make_loader(shuffle=True, seed=3)
held_out = Loader(data, 4, transform=lambda images: images.float() / 255)
history = make_model(SPARSE).fit(loader.as_keras(), epochs=2, verbose=0, validation_data=held_out.as_keras())
reference = Loader(data, 4, shuffle=True, seed=3)
expected = [images for _ in range(2) for images, _ in reference]
# Keras builds the model with the first batch, and then trains on it.
start = 1 if torch.equal(seen[0], seen[1]) else 0
same = [torch.equal(one, other) for one, other in zip(seen[start:], expected, strict=True)]
result = [same, loader.next_epoch, sorted(history.history)]
""",
    )
    assert result == [[True] * 12, 2, ["accuracy", "loss", "val_accuracy", "val_loss"]]


@pytest.mark.full
def test_the_first_pass_after_a_resume_takes_the_rest_of_the_epoch(run):
    result = run(
        """
reference = Loader(data, 4, shuffle=True, seed=3)
expected = [images for _ in range(2) for images, _ in reference]
result = []
for skipped in (2, 5):
    before, loader = make_loader(shuffle=True, seed=3), make_loader(shuffle=True, seed=3)
    for _ in zip(range(skipped), before): pass
    state = {**before.state_dict(), "epoch": 0, "samples": 4 * skipped}
    loader.load_state_dict(state)
    seen.clear()
    make_model(SPARSE).fit(loader.as_keras(), epochs=2, verbose=0)
    # Keras builds the model with the first batch, and then trains on it.
    same = [torch.equal(one, other) for one, other in zip(seen[1:], expected[skipped:], strict=True)]
    result.append([all(same), loader.next_epoch, loader.state_dict()["samples"]])
""",
    )
    assert result == [[True, 2, 0], [True, 2, 0]]


@pytest.mark.full
def test_images_are_channels_last_and_labels_one_hot_if_requested(run):
    result = run(
        """
batches = {
    "default": make_loader().as_keras(),
    "options": make_loader().as_keras(data_format="channels_first", label_mode="categorical"),
    "arrays": Loader((torch.zeros(5, 2, 3, 4), torch.arange(5)), 4).as_keras(),
    "dict": make_loader(as_dict=True).as_keras(),
}
images, labels = batches["options"][0]
mixing = Loader(data, 4, num_workers=0, transform=augment.CutMix(num_classes=3))
mixed = mixing.as_keras(label_mode="categorical")[0][1]
native, numbers = make_loader().peek()[0]
is_same = torch.equal(batches["default"][0][0], native.permute(0, 2, 3, 1)) and torch.equal(images, native)
shapes = {name: [list(one.shape) for one in (each.values() if name == "dict" else each)]
          for name, batch in batches.items() for each in [batch[0]]}
history = make_model(ONE_HOT).fit(make_loader().as_keras(label_mode="categorical"), verbose=0).history
is_mixed = list(mixed.shape) == [4, 3] and torch.allclose(mixed.sum(1), torch.ones(4))
result = [shapes, is_same, is_mixed, torch.equal(labels.argmax(1), numbers), str(labels.dtype), len(history["loss"])]
""",
    )
    image, last = [3, 4, 3], [4, 3, 3]
    shapes = {
        "default": [[4, *last], [4]],
        "options": [[4, *image], [4, 3]],
        "arrays": [[4, 2, 3, 4], [4]],
        "dict": [[4, *last], [4]],
    }
    assert result == [shapes, True, True, True, "torch.float32", 1]


@pytest.mark.full
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_on_back_ends_other_than_torch_batches_are_numpy_arrays_of_the_same_values(run, backend):
    result = run(
        f"""
from unittest import mock
with mock.patch.object(keras.backend, "backend", return_value={backend!r}):
    images, labels = make_loader().as_keras()[0]
    first, one_hot = make_loader().as_keras(data_format="channels_first", label_mode="categorical")[0]
    named = make_loader(as_dict=True).as_keras()[0]
native, numbers = make_loader().peek()[0]
result = [
    [[type(one).__module__, one.dtype.name, list(one.shape)] for one in (images, labels, first, one_hot)],
    (images == native.permute(0, 2, 3, 1).numpy()).all().item() and (first == native.numpy()).all().item(),
    [labels.tolist(), one_hot.argmax(1).tolist()] == [numbers.tolist()] * 2,
    [[name, type(one).__module__] for name, one in named.items()],
]
""",
    )
    arrays = [["float32", [4, 4, 3, 3]], ["int64", [4]], ["float32", [4, 3, 4, 3]], ["float32", [4, 3]]]
    assert result == [[["numpy", *one] for one in arrays], True, True, [["X", "numpy"], ["Y", "numpy"]]]


@pytest.mark.full
def test_only_images_with_the_channels_first_are_moved(run, tmp_path):
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file.create_dataset("images", data=np.zeros((5, 6, 5, 3), "|u1"), compression="gzip")
        file.create_dataset("arrays", data=np.zeros((5, 2, 6, 5), "<f4"), compression="gzip")
    result = run(
        f"""
class Samples(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.zeros(6, 5, 3)
theirs = [open_pack({str(tmp_path / "theirs.h5")!r}, x=name)["train"] for name in ("images", "arrays")]
result = [list(Loader(one, 4, num_workers=0).as_keras()[0][0].shape) for one in (*theirs, Samples())]
""",
    )
    assert result == [[4, 6, 5, 3], [4, 2, 6, 5], [4, 6, 5, 3]]


@pytest.mark.full
def test_evaluate_and_predict_see_every_sample_once_in_order(run):
    result = run(
        """
model = make_model(SPARSE)
view = make_loader().as_keras()
accuracy = model.evaluate(view, verbose=0, return_dict=True)["accuracy"]
predicted = model.predict(view, verbose=0).argmax(1)
result = [len(predicted), bool(abs(accuracy - (predicted == data.labels.numpy()).mean()) < 1e-6)]
""",
    )
    assert result == [COUNT, True]


@pytest.mark.full
def test_invalid_options_name_the_valid_ones(run):
    result = run(
        """
arrays = torch.zeros(5, 2), torch.arange(5)
result = []
for dataset, options in [(data, {"data_format": "NHWC"}), (arrays, {"label_mode": "categorical"})]:
    try:
        Loader(dataset, 4).as_keras(**options)
    except errors.InvalidOption as error:
        result.append(str(error))
""",
    )
    assert "'channels_last' or 'channels_first'" in result[0]
    assert "keras.utils.to_categorical" in result[1]


@pytest.mark.full
def test_images_and_labels_are_converted_in_any_order_of_the_fields(run):
    result = run(
        """
loader = make_loader(fields=["Y", "X"])
labels, images = loader.as_keras(label_mode="categorical")[0]
numbers, native = make_loader(fields=["Y", "X"]).peek()[0]
result = [torch.equal(images, native.permute(0, 2, 3, 1)), list(labels.shape), torch.equal(labels.argmax(1), numbers)]
""",
    )
    assert result == [True, [4, 3], True]


@pytest.mark.full
def test_labels_that_are_no_class_numbers_cannot_become_one_hot(run):
    result = run(
        """
class Samples(torch.utils.data.Dataset):
    classes = ["a", "b", "c"]
    def __init__(self, label): self.label = label
    def __len__(self): return 4
    def __getitem__(self, index): return torch.zeros(3, 2, 2), self.label
result = []
for label in (0.5, torch.tensor([0, 1, 1]), "a"):
    try:
        Loader(Samples(label), 4, num_workers=0).as_keras(label_mode="categorical")[0]
        result.append("")
    except errors.InvalidOption as error:
        result.append(str(error))
""",
    )
    for message, found in zip(
        result, ["torch.float64 and shape [4]", "torch.int64 and shape [4, 3]", "a tuple"], strict=True
    ):
        assert f"{found}; expected one class number per sample" in message
