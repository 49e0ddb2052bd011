"""`evaluate()` and `predict()` agree with a hand-written loop and have no side effects."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_files import photos
from sampling import sampled
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from colabkit import Mixture, evaluate, open_pack, pack, predict, supervised_step, train
from colabkit.errors import Corrupt, InvalidOption, SourceMissing
from colabkit.loading import Loader, SequentialOrder
from colabkit.packs import FileDataset, PackedDataset
from colabkit.training import state_loading, steps
from colabkit.training.checkpoints import files
from colabkit.training.checkpoints.folder import CheckpointFolder


def network() -> nn.Module:
    """Return a model whose outputs differ between training and evaluation mode."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model[2].eval()
    return model


def outputs_by_hand(model: nn.Module, data: PackedDataset) -> torch.Tensor:
    images, _ = next(iter(Loader(data, len(data))))
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        found = model.eval()(images.float() / 255)
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return found


@pytest.mark.parametrize("wrapped", [lambda model: model, lambda model: supervised_step(model, sgd(model))])
def test_evaluate_returns_the_means_over_all_samples_and_changes_nothing(data, wrapped):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    scores = outputs_by_hand(model, data)
    report = evaluate(wrapped(model), Loader(data, 5, shuffle=True))
    assert report.values["loss"] == pytest.approx(nn.functional.cross_entropy(scores, data.labels).item(), rel=1e-5)
    assert report.values["accuracy"] == pytest.approx((scores.argmax(1) == data.labels).float().mean().item())
    assert report.samples == len(data)
    assert repr(report).startswith("Evaluated 22 samples in ")
    assert "accuracy" in report._repr_html_()
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("batch_size", [3, 10, 22])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 50.0])),
        partial(nn.functional.cross_entropy, weight=torch.tensor([1.0, 5.0, 50.0]), ignore_index=0),
        nn.CrossEntropyLoss(),
    ],
)
def test_the_mean_cross_entropy_depends_on_class_weights_and_ignored_labels_but_not_on_the_batch_size(
    loss: Any, batch_size: int
) -> None:
    samples, labels = torch.randn(22, 6), torch.arange(22) // 8
    # All labels of a batch may be ignored.
    labels[:5] = loss.keywords["ignore_index"] if isinstance(loss, partial) else -100
    model = nn.Linear(6, 3)
    scores = model(samples).detach()
    values = evaluate(model, Loader((samples, labels), batch_size), loss).values
    assert values["loss"] == pytest.approx(loss(scores, labels).item(), rel=1e-5)
    counted = labels != labels[0]
    assert values["accuracy"] == pytest.approx((scores.argmax(1) == labels)[counted].float().mean().item())


def test_a_validation_may_return_the_report_of_an_evaluation(data):
    model, loader = network(), Loader(data, 5)
    step = supervised_step(model, sgd(model))
    report = train(step, loader, validate=lambda: evaluate(model, loader))
    assert report.epochs[0].validation == evaluate(model, loader).values


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.full
def test_the_weights_of_a_checkpoint_are_evaluated(tmp_path, data):
    trained, loader = network(), Loader(data, 5)
    step = supervised_step(trained, sgd(trained))
    path = train(step, loader, epochs=2, to=tmp_path / "run").checkpoint
    expected = evaluate(trained, loader).values
    assert evaluate(network(), loader).values != expected
    for wrapped in (network(), supervised_step(model := network(), sgd(model))):
        assert evaluate(wrapped, loader, checkpoint=path).values == expected
    assert torch.equal(predict(network(), loader, checkpoint=path), predict(trained, loader))
    with pytest.raises(
        InvalidOption, match=r"Cannot evaluate the model: the checkpoint belongs to another architecture: '1\."
    ):
        evaluate(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), loader, checkpoint=path)
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    for wrong in (tmp_path / "none.pt", tmp_path / "none" / "none.pt", tmp_path / "weights.pt"):
        with pytest.raises(SourceMissing, match=r"is not the file of a checkpoint\. Pass the path of a file such as"):
            evaluate(network(), loader, checkpoint=wrong)
    with pytest.raises(SourceMissing, match=rf"'{tmp_path}/run' is a folder\. Pass a checkpoint in it, .*'{path}'"):
        evaluate(network(), loader, checkpoint=tmp_path / "run")
    other = train(lambda batch: None, loader, state={"net": trained}, to=tmp_path / "other").checkpoint
    with pytest.raises(InvalidOption, match=r"the checkpoint contains 'net'; expected an object named 'model'"):
        evaluate(network(), loader, checkpoint=other)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corrupt, match=r"the file has [\d,]+ bytes instead of"):
        evaluate(network(), loader, checkpoint=path)


@pytest.mark.full
def test_the_checkpoint_of_an_evaluation_is_read_from_a_mount_only_in_a_thread_that_can_be_abandoned(
    tmp_path, data, monkeypatch
):
    trained, loader = network(), Loader(data, 5)
    with CheckpointFolder(tmp_path / "run") as folder:
        content = {"state": {"model": trained.state_dict()}}
        folder.save(1, content, wait=True)
        path = folder.latest
    expected = evaluate(trained, loader).values
    for module in (state_loading, files):
        monkeypatch.setattr(module, "can_hang", lambda *_: True)
    threads: set[threading.Thread] = set()
    stat = Path.stat

    def recorded(file: Path, **options: bool) -> os.stat_result:
        if file.is_relative_to(tmp_path):
            threads.add(threading.current_thread())
        return stat(file, **options)

    monkeypatch.setattr(Path, "stat", recorded)
    assert evaluate(network(), loader, checkpoint=path).values == expected
    for missing in (tmp_path / "run" / "none.pt", tmp_path / "none" / "none.pt"):
        with pytest.raises(SourceMissing, match="is not the file of a checkpoint"):
            evaluate(network(), loader, checkpoint=missing)
    assert threads
    assert threading.main_thread() not in threads


def test_evaluate_takes_another_loss_and_another_loader(data):
    images, labels = next(iter(Loader(data, len(data))))
    loader = DataLoader(TensorDataset(images, labels), batch_size=5)
    report = evaluate(network(), loader, lambda scores, labels: scores.sum() * 0 + 2.0)
    assert report.values["loss"] == pytest.approx(2.0)


@pytest.mark.parametrize("shuffle", sampled([True, False, "block"], 2))
def test_predict_returns_the_outputs_in_the_order_of_the_data_set(data, shuffle):
    model = network()
    modes = [module.training for module in model.modules()]
    found = predict(model, Loader(data, 5, shuffle=shuffle))
    assert torch.allclose(found, outputs_by_hand(model, data), atol=1e-6)
    assert not found.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(predict(supervised_step(model, sgd(model)), Loader(data, 22)), predict(model, Loader(data, 22)))


def test_predict_takes_a_pack_of_shards_that_is_shuffled_through_a_cache(data, tmp_path, monkeypatch):
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    pack(data, tmp_path / "shards.h5", shard_bytes=5 * data[0][0].nbytes, progress=False)
    cached = open_pack(tmp_path / "shards.h5", cache="1MiB")["train"]
    found = predict(network(), Loader(cached, 5, shuffle="block"))
    assert torch.allclose(found, outputs_by_hand(network(), data), atol=1e-6)


def test_predict_accepts_a_model_that_squeezes_a_last_batch_of_one_sample(data):
    class Mean(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.float().mean((1, 2, 3)).squeeze()

    assert len(data) % 7 == 1
    assert predict(Mean(1, 1), Loader(data, 7)).shape == (len(data),)


@pytest.mark.parametrize("function", [predict, evaluate])
def test_the_order_and_the_position_of_the_loader_are_restored(data, function: Callable[..., Any]):
    def rest(loader: Loader, start: int) -> list[int]:
        batches = iter(loader)
        found = [next(batches)[1].tolist() for _ in range(start)]
        if start:
            function(network(), loader)
        return [label for batch in [*found, *(labels.tolist() for _, labels in batches)] for label in batch]

    expected, loader = Loader(data, 4, shuffle=True), Loader(data, 4, shuffle=True)
    assert [rest(loader, 2), rest(loader, 0)] == [rest(expected, 0), rest(expected, 0)]


def test_predict_keeps_the_structure_of_the_outputs(data):
    class DictModel(nn.Linear):
        def forward(self, images: torch.Tensor) -> dict[str, Any]:
            first = super().forward(images.flatten(1))
            return {"scores": first, "pair": (first.sum(1), [first.half()])}

    found = predict(DictModel(36, 3), Loader(data, 5))
    assert found["scores"].shape == (22, 3)
    assert torch.equal(found["pair"][0], found["scores"].sum(1))
    assert found["pair"][1][0].dtype == torch.float32


def test_predict_takes_samples_without_labels(data):
    images, _ = next(iter(Loader(data, len(data))))
    assert torch.equal(predict(network(), Loader(images, 5)), predict(network(), Loader(data, 5)))


def test_invalid_arguments_are_refused(data, tmp_path):
    files = FileDataset(photos(tmp_path, per_class=1))
    model, loader = network(), Loader(data, 5)
    wrong = [
        (lambda: evaluate(None, loader), "evaluate the model: model is None; expected a torch.nn.Module or a super"),
        (lambda: evaluate(nn.Flatten(), loader), "a Flatten has no parameters"),
        (lambda: evaluate(model, 3), "loader is an int; expected an iterable of batches"),
        (lambda: evaluate(model, loader, loss=3), "loss=3; expected a callable"),
        (lambda: evaluate(supervised_step(model, sgd(model)), loader, loss=sum), "the step has its own loss"),
        (lambda: predict(model, [1]), "loader is a list; expected a colabkit.Loader"),
        (
            lambda: predict(model, Loader(data, 5, drop_last=True)),
            "Loader has drop_last=True; expected all samples",
        ),
        (lambda: predict(model, Loader(files, 5, on_bad="skip")), "Create the Loader with on_bad='blank'"),
        (lambda: predict(model, Loader(data, 5, rank=0, world_size=2)), "the samples of 1 of 2 processes"),
        (
            lambda: predict(model, Loader(data, 5, sampler=range(3))),
            "the Loader has the order 'sampler'.* omit sampler=",
        ),
        (lambda: predict(model, Loader(Mixture({data: 1}), 5)), "the Loader mixes packs.* a Loader for each pack"),
    ]
    for function, message in wrong:
        with pytest.raises(InvalidOption, match=message):
            function()
    assert predict(model, Loader(data, 5, sampler=SequentialOrder(22))).shape == (22, 3)


def test_predict_refuses_outputs_that_are_not_one_row_per_sample(data):
    class Sum(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images.flatten(1)).sum()

    with pytest.raises(InvalidOption, match="returned 5 rows for 22 samples; expected one row per sample"):
        predict(Sum(36, 3), Loader(data, 5))


def test_predict_does_not_wait_for_other_processes_before_the_first_step(monkeypatch):
    model = nn.Linear(4, 2)
    step = supervised_step(model, torch.optim.SGD(model.parameters(), 0.1))
    wrapped: list[nn.Module] = []

    def wrap(module: nn.Module, device_ids: object) -> nn.Module:
        wrapped.append(module)
        return module

    monkeypatch.setattr(steps, "is_one_of_several", lambda: True)
    monkeypatch.setattr(steps, "DistributedDataParallel", wrap)
    samples, labels = torch.rand(6, 4), torch.arange(6) % 2
    assert predict(step, Loader((samples, labels), 3)).shape == (6, 2)
    assert wrapped == []
    step((samples, labels))
    step((samples, labels))
    assert wrapped == [model]
