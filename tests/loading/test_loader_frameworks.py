"""Each framework trains for an epoch and evaluates, on `Loader` objects and on a pack in the framework's own loader."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import make_pack
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate
from trees import needs

from colabkit.loading import Loader
from colabkit.packs import PackedDataset, open_pack

BATCH = 4
STEPS = 6
SGD = partial(torch.optim.SGD, lr=0.1)


class Model(nn.Module):
    """A linear classifier that records the images of each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 3)
        self.images: dict[bool, list[Tensor]] = {True: [], False: []}

    def forward(self, images: Tensor) -> Tensor:
        self.images[self.training].append(images.clone())
        return self.layer(images.flatten(1).float() / 255)


@dataclass(frozen=True)
class Run:
    """A model, the splits to train on and to evaluate, and whether to pass them as a `Loader`."""

    model: Model
    train: PackedDataset
    held_out: PackedDataset
    is_loader: bool
    folder: Path

    def loaders(self, **options: Any) -> tuple[Any, Any]:
        if self.is_loader:
            return Loader(self.train, BATCH, shuffle=True, **options), Loader(self.held_out, BATCH, **options)
        return DataLoader(self.train, BATCH, shuffle=True), DataLoader(self.held_out, BATCH)


def module_of(name: str) -> Any:
    """Import a module of a package in the extra `integrations`."""
    needs(name, importlib.util.find_spec(name.partition(".")[0]) is not None)
    return importlib.import_module(name)


def accuracy_of(model: nn.Module, batches: Any) -> float:
    model.eval()
    with torch.no_grad():
        hits = [model(images).argmax(1) == labels for images, labels in batches]
    return torch.cat(hits).float().mean().item()


def train_on(
    model: nn.Module, optimizer: Any, batches: Any, backward: Callable[[Tensor], Any] = Tensor.backward
) -> None:
    for images, labels in batches:
        optimizer.zero_grad()
        backward(cross_entropy(model(images), labels))
        optimizer.step()


def accelerate(run: Run) -> float:
    accelerator = module_of("accelerate").Accelerator(cpu=True)
    try:
        train, held_out = run.loaders()
        model, optimizer, train, held_out = accelerator.prepare(run.model, SGD(run.model.parameters()), train, held_out)
        train_on(model, optimizer, train, accelerator.backward)
        return accuracy_of(model, held_out)
    finally:
        module_of("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


def fabric(run: Run) -> float:
    fabric = module_of("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(run.model, SGD(run.model.parameters()))
    loaders = [each.as_dataloader() if run.is_loader else each for each in run.loaders()]
    train, held_out = fabric.setup_dataloaders(*loaders)
    train_on(model, optimizer, train, fabric.backward)
    return accuracy_of(model, held_out)


def lightning(run: Run) -> float:
    lightning = module_of("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def training_step(self, batch: Any, number: int) -> Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> None:
            hits = self.model(batch[0]).argmax(1) == batch[1]
            self.log("accuracy", hits.float().mean(), batch_size=len(hits))

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters())

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=1, num_sanity_val_steps=0, enable_checkpointing=False, **quiet)
    trainer.fit(Module(), *run.loaders())
    return trainer.callback_metrics["accuracy"].item()


def transformers(run: Run) -> float:
    needs("accelerate", importlib.util.find_spec("accelerate") is not None)
    transformers = module_of("transformers")
    train, held_out = run.loaders(as_dict=True) if run.is_loader else (None, None)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def forward(self, X: Tensor, Y: Tensor) -> dict[str, Tensor]:  # noqa: N803
            scores = self.model(X)
            return {"loss": cross_entropy(scores, Y), "scores": scores}

    class LoaderTrainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return train.as_dataloader()

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return held_out.as_dataloader()

    arguments = transformers.TrainingArguments(
        str(run.folder),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=0.1,
        label_names=["Y"],
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        use_cpu=True,
    )
    trainer = (LoaderTrainer if run.is_loader else transformers.Trainer)(
        model=Classifier(),
        args=arguments,
        train_dataset=run.train,
        eval_dataset=run.held_out,
        data_collator=lambda samples: dict(zip("XY", default_collate(samples), strict=True)),
        compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
    )
    trainer.train()
    return trainer.evaluate()["eval_accuracy"]


def ignite(run: Run) -> float:
    engine, metrics = module_of("ignite.engine"), module_of("ignite.metrics")
    train, held_out = run.loaders()
    trainer = engine.create_supervised_trainer(run.model, SGD(run.model.parameters()), cross_entropy)
    assert trainer.run(train).iteration == STEPS
    evaluator = engine.create_supervised_evaluator(run.model, {"accuracy": metrics.Accuracy()})
    return evaluator.run(held_out).metrics["accuracy"]


def skorch(run: Run) -> float:
    iterators = {"iterator_train": Loader, "iterator_valid": Loader} if run.is_loader else {}
    net = module_of("skorch").NeuralNetClassifier(
        run.model,
        criterion=nn.CrossEntropyLoss,
        batch_size=BATCH,
        max_epochs=1,
        lr=0.1,
        train_split=None,
        iterator_train__shuffle=True,
        verbose=0,
        **iterators,
    )
    net.fit(run.train, y=None)
    assert len(net.history[-1, "batches"]) == STEPS
    return (net.predict(run.held_out) == run.held_out.labels.numpy()).mean()


def torchmetrics(run: Run) -> float:
    metric = module_of("torchmetrics").Accuracy("multiclass", num_classes=3)
    train, held_out = run.loaders()
    train_on(run.model, SGD(run.model.parameters()), train)
    run.model.eval()
    for images, labels in held_out:
        metric.update(run.model(images), labels)
    return metric.compute().item()


def fastai(run: Run) -> float:
    fastai = pytest.importorskip("fastai.vision.all")
    if run.is_loader:
        loaders = fastai.DataLoaders(*run.loaders())
    else:
        options = {"bs": BATCH, "num_workers": 0, "drop_last": False}
        loaders = fastai.DataLoaders.from_dsets(run.train, run.held_out, **options)
    options = {"loss_func": nn.CrossEntropyLoss(), "metrics": fastai.accuracy, "path": run.folder}
    learner = fastai.Learner(loaders, run.model, **options)
    with learner.no_bar(), learner.no_logging():
        learner.fit(1)
    return learner.recorder.values[-1][-1]


def timm(run: Run) -> float:
    loader, utils = pytest.importorskip("timm.data.loader"), pytest.importorskip("timm.utils")
    # With these values, images keep their values.
    options = {"mean": (0, 0, 0), "std": (1 / 255,) * 3, "device": torch.device("cpu")}
    if run.is_loader:
        train, held_out = (loader.PrefetchLoader(each, **options) for each in run.loaders())
    else:
        train, held_out = (
            loader.create_loader(each, (3, 4, 3), BATCH, num_workers=0, persistent_workers=False, **options)
            for each in (run.train, run.held_out)
        )
    train_on(run.model, SGD(run.model.parameters()), train)
    run.model.eval()
    meter = utils.AverageMeter()
    for images, labels in held_out:
        meter.update(utils.accuracy(run.model(images), labels)[0].item() / 100, len(labels))
    return meter.avg


def composer(run: Run) -> float:
    composer = pytest.importorskip("composer")
    models = pytest.importorskip("composer.models")
    train, held_out = run.loaders()
    trainer = composer.Trainer(
        model=models.ComposerClassifier(run.model, num_classes=3),
        train_dataloader=train,
        eval_dataloader=held_out,
        max_duration="1ep",
        optimizers=SGD(run.model.parameters()),
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return trainer.state.eval_metric_values["MulticlassAccuracy"].item()


FRAMEWORKS = (accelerate, composer, fabric, fastai, ignite, lightning, skorch, timm, torchmetrics, transformers)


def contents(batches: list[Tensor]) -> Counter[bytes]:
    return Counter(
        image.round().to(torch.uint8).contiguous().numpy().tobytes() for images in batches for image in images
    )


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_pack(make_pack(tmp_path_factory.mktemp("packs") / "data.h5", train=22, val=7))


@pytest.mark.full
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.__name__)
@pytest.mark.parametrize("kind", ["loader", "pack"])
def test_a_framework_trains_on_each_sample_once_and_evaluates_correctly(tmp_path, pack, kind, framework):
    logging.getLogger("composer").setLevel(logging.ERROR)
    run = Run(Model(), pack["train"], pack["val"], kind == "loader", tmp_path)
    accuracy = framework(run)
    assert contents(run.model.images[True]) == contents([run.train[:][0]])
    assert contents(run.model.images[False]) == contents([run.held_out[:][0]])
    assert accuracy == pytest.approx(accuracy_of(run.model, [run.held_out[:]]))


@pytest.mark.full
def test_a_model_of_timm_trains_on_batches_that_its_mixup_changes_in_place(pack):
    timm = pytest.importorskip("timm")
    data, loss = pytest.importorskip("timm.data"), pytest.importorskip("timm.loss")
    model = timm.create_model("test_resnet", num_classes=3)
    optimizer, mixup = SGD(model.parameters()), data.Mixup(mixup_alpha=1, num_classes=3, label_smoothing=0)
    images, labels = pack["train"][:]
    images = images / 255
    before = images.clone()
    # Mixup requires even numbers of samples.
    for each, classes in Loader((images, labels), BATCH, drop_last=True):
        mixed, targets = mixup(each, classes)
        assert mixed is each
        assert torch.allclose(targets.sum(1), torch.ones(BATCH))
        optimizer.zero_grad()
        loss.SoftTargetCrossEntropy()(model(nn.functional.interpolate(mixed, 32)), targets).backward()
        optimizer.step()
    assert torch.equal(images, before)
