"""`Loader` works inside Lightning, Accelerate and Keras, and a pack inside torch's `DataLoader`."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm_python
from contract import make_pack
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trees import needs

from colabkit.foundation import epoch_order
from colabkit.loading import Loader
from colabkit.packs import PackedDataset, open_pack

COUNT = 22
BATCH = 4
STEPS = 6
DEADLINE_S = 200


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pack(tmp_path_factory.mktemp("packs") / "data.h5", train=COUNT, dev=7)


@pytest.fixture(scope="module")
def data(pack: Path) -> PackedDataset:
    return open_pack(pack)["train"]


def make_loader(data: PackedDataset, **options: Any) -> Loader:
    return Loader(data, BATCH, shuffle=True, seed=3, transform=lambda images: images.float() / 255, **options)


def expected(data: PackedDataset, *epochs: int) -> list[Tensor]:
    """Return the expected image batches of the given epochs, scaled to the range 0 to 1."""
    orders = [epoch_order(COUNT, 3, epoch, 0, COUNT) for epoch in epochs]
    return [data[order[start : start + BATCH]][0].float() / 255 for order in orders for start in range(0, COUNT, BATCH)]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def lightning_parts() -> tuple[Any, type]:
    needs("lightning", importlib.util.find_spec("lightning") is not None)
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(36, 3)
            self.seen: list[Tensor] = []
            self.validated = 0

        def training_step(self, batch: Any, number: int) -> Tensor:
            images, labels = batch
            self.seen.append(images.clone())
            return nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

        def validation_step(self, batch: Any, number: int) -> None:
            self.validated += len(batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return lightning, Module


def trainer_of(lightning: Any, folder: Path, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return lightning.Trainer(default_root_dir=folder, **quiet, **options)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:::lightning")
def test_lightning_trains_on_a_loader_epoch_by_epoch_and_validates_on_another(tmp_path, pack, data):
    lightning, module = lightning_parts()
    model, loader = module(), make_loader(data)
    dev = Loader(open_pack(pack)["dev"], BATCH)
    trainer = trainer_of(lightning, tmp_path, max_epochs=2, num_sanity_val_steps=0, enable_checkpointing=False)
    trainer.fit(model, loader, dev)
    assert trainer.global_step == 2 * STEPS
    assert trainer.num_training_batches == len(loader) == STEPS
    assert same(model.seen, expected(data, 0, 1))
    assert model.validated == 2 * 7


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:::lightning")
@pytest.mark.parametrize("step", [4, 8])
def test_a_checkpoint_of_lightning_inside_an_epoch_holds_the_position_of_the_loader(tmp_path, data, step):
    lightning, module = lightning_parts()
    from lightning.pytorch.callbacks import ModelCheckpoint

    whole = module()
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer_of(lightning, tmp_path, max_epochs=2, callbacks=[saving]).fit(whole, make_loader(data))
    assert same(whole.seen, expected(data, 0, 1))

    resumed = module()
    trainer = trainer_of(lightning, tmp_path, max_epochs=2, enable_checkpointing=False)
    trainer.fit(resumed, make_loader(data), ckpt_path=tmp_path / f"step={step}.ckpt")
    assert trainer.global_step == 2 * STEPS
    assert same(resumed.seen, whole.seen[step:])
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.full
def test_accelerate_prepares_a_loader_and_trains_on_it(data):
    needs("accelerate", importlib.util.find_spec("accelerate") is not None)
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    try:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(36, 3)
        first = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(data))
        seen = []
        for _ in range(2):
            for images, labels in loader:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(images.flatten(1)), labels))
                optimizer.step()
                seen.append(images)
        assert len(loader) == STEPS
        assert same(seen, expected(data, 0, 1))
        assert not torch.equal(accelerator.unwrap_model(model).weight, first)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.full
def test_a_checkpoint_of_accelerate_holds_the_state_of_a_loader(tmp_path, data):
    needs("accelerate", importlib.util.find_spec("accelerate") is not None)
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    try:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(make_loader(data))
        accelerator.register_for_checkpointing(loader)
        seen = [images for _, (images, _) in zip(range(2), loader, strict=False)]
        accelerator.save_state(tmp_path)
        list(loader)
        accelerator.load_state(tmp_path)
        seen += [images for images, _ in loader]
        assert same(seen, expected(data, 0))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


KERAS = """
import json, sys
import keras, numpy as np, torch
from colabkit import Loader, open_pack

assert keras.backend.backend() == "torch"
data = open_pack(sys.argv[1])["train"]
loader = Loader(data, 4, shuffle=True, seed=3, transform=lambda images: images.float() / 255)
seen = []

def batches():
    # Keras requires a generator without end, and the number of batches per epoch.
    while True:
        for images, labels in loader:
            seen.append(images.clone())
            yield images, labels

def held_out():
    for images, labels in Loader(data, 4, transform=lambda images: images.float() / 255):
        yield images, labels

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((3, 4, 3)), keras.layers.Flatten(), keras.layers.Dense(3)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="sgd", loss=loss, metrics=["accuracy"])
before = [np.array(weight) for weight in model.get_weights()]
history = model.fit(batches(), steps_per_epoch=len(loader), epochs=2, verbose=0)
found = model.evaluate(held_out(), verbose=0, return_dict=True)
changed = any((old != new).any() for old, new in zip(before, model.get_weights()))
np.savez(sys.argv[2], *[images.numpy() for images in seen])
print(json.dumps({"losses": history.history["loss"], "changed": bool(changed), "accuracy": found["accuracy"]}))
"""


@pytest.mark.full
def test_keras_on_torch_fits_and_evaluates_on_a_loader_through_a_generator(tmp_path, pack, data):
    needs("keras", importlib.util.find_spec("keras") is not None)
    environ = {**os.environ, "KERAS_BACKEND": "torch", "KERAS_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", KERAS, str(pack), str(tmp_path / "seen.npz")]
    done = warm_python.run(command, env=environ, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["losses"]) == 2
    assert np.isfinite(result["losses"]).all()
    assert result["changed"]
    with np.load(tmp_path / "seen.npz") as saved:
        seen = [torch.from_numpy(saved[name]) for name in saved.files]
    # In each epoch, Keras may request one batch more than it trains on.
    assert same(seen[: 2 * STEPS], expected(data, 0, 1))
    assert len(seen) <= 2 * STEPS + 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pack_works_in_the_data_loader_of_torch(data, num_workers):
    generator = torch.Generator().manual_seed(5)
    theirs = DataLoader(data, BATCH, shuffle=True, num_workers=num_workers, generator=generator)
    for _ in range(2):
        batches = list(theirs)
        assert [len(labels) for _, labels in batches] == [4, 4, 4, 4, 4, 2]
        images = torch.cat([images for images, _ in batches])
        found = sorted(image.numpy().tobytes() for image in images)
        assert found == sorted(image.contiguous().numpy().tobytes() for image in data[:][0])
        for some, labels in batches:
            for image, label in zip(some, labels, strict=True):
                places = (data[:][0] == image).flatten(1).all(1).nonzero().flatten()
                assert data.labels[places].tolist() == [label]


def test_an_order_of_colabkit_works_in_the_data_loader_of_torch(data):
    order = epoch_order(COUNT, 3, 0, 0, COUNT).tolist()
    theirs = DataLoader(data, BATCH, sampler=order)
    for (images, labels), (ours, our_labels) in zip(theirs, Loader(data, BATCH, shuffle=True, seed=3), strict=True):
        assert torch.equal(images, ours)
        assert torch.equal(labels, our_labels)
