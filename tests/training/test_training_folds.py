"""`k_fold()` holds out every sample of one pack once, and reports the mean and spread of the returned numbers."""

from __future__ import annotations

import math
import time

import pytest
import torch
from contract import make_pack

import colabkit
from colabkit.errors import InvalidOption
from colabkit.packs import PackedDataset, open_pack


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    return open_pack(make_pack(tmp_path_factory.mktemp("packs") / "data.h5", train=30))["train"]


def test_every_sample_is_held_out_once_and_all_folds_share_one_pack(data):
    held: list[bytes] = []
    paths = set()

    def run(train, held_out, fold):
        assert len(train) + len(held_out) == 30
        assert isinstance(train, PackedDataset)
        paths.update((train.info.path, held_out.info.path))
        held.extend(image.numpy().tobytes() for image in held_out[:][0])
        return {"fold": float(fold)}

    report = colabkit.k_fold(run, data, folds=3)
    assert sorted(held) == sorted(image.numpy().tobytes() for image in data[:][0])
    assert len(set(held)) == 30
    assert len(paths) == 1
    assert report.mean == {"fold": 1.0}
    assert report.spread == {"fold": 1.0}
    assert repr(report) == "3 folds: fold 1 ± 1"


def test_reports_of_train_are_averaged_over_their_last_epochs(tmp_path, data):
    def run(train, held_out, fold):
        torch.manual_seed(fold)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
        step = colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        validate = colabkit.Loader(held_out, 4)
        folder = tmp_path / str(fold)
        return colabkit.train(step, colabkit.Loader(train, 4), validate=validate, to=folder)

    report = colabkit.k_fold(run, data, folds=3, seed=1)
    assert [fold.trained for fold in report.folds] == [1, 1, 1]
    assert list(report.mean) == ["loss", "accuracy", "val_loss", "val_accuracy"]
    for name in ("loss", "accuracy"):
        expected = [getattr(fold.epochs[-1], part)[name] for part in ("values", "validation") for fold in report.folds]
        assert report.mean[name] == pytest.approx(sum(expected[:3]) / 3)
        assert report.mean[f"val_{name}"] == pytest.approx(sum(expected[3:]) / 3)
    assert "val_loss" in repr(report)
    assert "val_accuracy" in report._repr_html_()
    again = colabkit.k_fold(run, data, folds=3, seed=1)
    assert [fold.trained for fold in again.folds] == [0, 0, 0]
    assert again.mean == report.mean


@pytest.mark.parametrize(
    ("options", "message"), [({"folds": 1}, "folds=1"), ({"folds": 99}, "99"), ({"folds": "3"}, "folds='3'")]
)
def test_invalid_numbers_of_folds_are_refused(data, options, message):
    with pytest.raises(InvalidOption, match=message):
        colabkit.k_fold(lambda train, held_out, fold: {}, data, **options)


def test_a_function_without_numbers_and_other_data_are_refused(data):
    with pytest.raises(InvalidOption, match="run returned a str"):
        colabkit.k_fold(lambda train, held_out, fold: "text", data)
    with pytest.raises(InvalidOption, match="a split of a pack"):
        colabkit.k_fold(lambda train, held_out, fold: {}, [1, 2, 3])


def test_k_fold_ends_at_a_stopped_training_and_reports_it(data):
    def waits(batch):
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            time.sleep(0)

    def slow(train, held_out, fold):
        step = waits if fold == 1 else (lambda batch: 1.0)
        return colabkit.train(step, colabkit.Loader(train, 4), deadline="6s" if fold == 1 else None)

    report = colabkit.k_fold(slow, data, folds=3)
    assert (len(report.folds), report.stopped, report.is_good) == (1, "deadline", False)
    assert repr(report) == "1 fold: loss 1 ± 0; stopped by deadline; make the same call again to continue"


@pytest.mark.parametrize("last", [3, 8])
def test_a_fold_that_ends_within_an_epoch_reports_its_last_validation(data, last):
    def run(train, held_out, fold):
        losses = iter([4.0, 3.0, 2.0, 1.0])

        def stop(done):
            if done.step == last:
                raise StopIteration

        options = {"validate": lambda: {"loss": next(losses), "f1": 0.5}, "validate_every": 2, "on_step": stop}
        return colabkit.train(lambda batch: 9.0, colabkit.Loader(train, 4), epochs=2, **options)

    report = colabkit.k_fold(run, data, folds=3)
    assert report.mean == {3: {"val_loss": 4.0, "f1": 0.5}, 8: {"loss": 9.0, "val_loss": 1.0, "f1": 0.5}}[last]


def test_a_number_that_is_not_finite_affects_no_other_number(data):
    values = {"nan": (1.0, math.nan, 2.0), "inf": (1.0, 2.0, math.inf), "loss": (1.0, 2.0, 3.0)}
    report = colabkit.k_fold(lambda train, held_out, fold: {name: values[name][fold] for name in values}, data, folds=3)
    assert len(report.folds) == 3
    assert [math.isnan(report.spread[name]) for name in values] == [True, True, False]
    assert (report.mean["loss"], report.spread["loss"]) == (2.0, 1.0)
    assert "nan nan" in repr(report)


def test_a_value_that_is_not_callable_is_refused_before_the_first_fold(data):
    with pytest.raises(InvalidOption, match="run=3; expected a callable"):
        colabkit.k_fold(3, data)
