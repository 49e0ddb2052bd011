"""`train()` trains bit for bit like a hand-written loop, even if resumed, and reports errors, events and results."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from contract import make_pack
from sampling import sampled
from torch import Tensor, nn
from trainings import SmallTraining, history, nothing, same, train

from colabkit.augment import Normalize
from colabkit.errors import Corrupt, FileFailed, InvalidOption, LoaderFailed, TargetExists, TrainingDiverged
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.packs import open_pack
from colabkit.training.report import EpochRecord, TrainReport
from colabkit.training.step_factory import supervised_step

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def no_loader_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("colabkit-loader")] == []


def test_train_equals_a_hand_written_loop_bit_for_bit(data):
    ours, hand = SmallTraining(data), SmallTraining(data)
    report = ours.train(3)
    ours_next = random.random(), np.random.rand(), torch.rand(1).item()
    hand = SmallTraining(data)
    expected = []
    for _ in range(3):
        losses = []
        for images, labels in hand.loader:
            noise = random.random() + np.random.rand()
            hand.model.train()
            hand.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(hand.model(images + 0.01 * noise), labels)
            loss.backward()
            hand.optimizer.step()
            hand.scheduler.step()
            losses.append((loss.item(), len(labels)))
        expected.append(sum(loss * size for loss, size in losses) / 22)
        hand.validate()
    assert same(ours.weights(), hand.weights())
    assert [record.values["loss"] for record in report.epochs] == pytest.approx(expected, rel=1e-5)
    assert ours_next == (random.random(), np.random.rand(), torch.rand(1).item())


@pytest.mark.parametrize("options", sampled([{}, {"shuffle": False}, {"drop_last": True}, {"prefetch_batches": 1}], 2))
@pytest.mark.parametrize("stops", sampled([[1], [2], [3], [1, 2, 3, 4]], 2))
def test_stopped_after_any_epoch_and_resumed_equals_uninterrupted(tmp_path, data, options, stops):
    whole = SmallTraining(data, **options)
    expected = whole.train(4)
    for stop in stops:
        SmallTraining(data, **options).train(stop, to=tmp_path / "run")
    resumed = SmallTraining(data, **options)
    report = resumed.train(4, to=tmp_path / "run")
    assert history(report) == history(expected)
    assert same(resumed.weights(), whole.weights())
    assert str(resumed.optimizer.state_dict()) == str(whole.optimizer.state_dict())
    assert resumed.scheduler.state_dict() == whole.scheduler.state_dict()
    assert report.resumed_from == tmp_path / "run" / f"checkpoint-{stops[-1] * len(whole.loader):08d}.pt"


def test_a_damaged_checkpoint_is_skipped_and_reported(tmp_path, data):
    whole = SmallTraining(data)
    expected = whole.train(3)
    newest = SmallTraining(data).train(2, to=tmp_path).checkpoint
    assert newest is not None
    newest.write_bytes(b"damaged")
    resumed = SmallTraining(data)
    report = resumed.train(3, to=tmp_path)
    assert history(report) == history(expected)
    assert same(resumed.weights(), whole.weights())
    ((name, reason),) = report.skipped_checkpoints
    assert name == newest.name
    assert reason.startswith("the file has 7 bytes instead of ")
    assert f"Skipped {newest.name!r}" in repr(report)


def test_only_damaged_checkpoints_raise_corrupt_and_change_nothing(tmp_path, data):
    SmallTraining(data).train(2, to=tmp_path)
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(b"damaged")
    setup = SmallTraining(data)
    before = setup.weights()
    with pytest.raises(Corrupt):
        setup.train(3, to=tmp_path)
    assert same(setup.weights(), before)


def test_a_complete_training_returns_its_history(tmp_path, data):
    first = SmallTraining(data).train(2, to=tmp_path)
    setup = SmallTraining(data)
    again = setup.train(2, to=tmp_path)
    fewer = SmallTraining(data).train(1, to=tmp_path)
    assert history(again) == history(fewer) == history(first)
    assert (again.samples_per_s, again.wait_share) == (0.0, 0.0)
    assert "nothing was left to do" in repr(again)


def test_resume_false_requires_a_folder_without_checkpoints(tmp_path, data):
    SmallTraining(data).train(1, to=tmp_path, resume=False)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    setup = SmallTraining(data)
    before, state = setup.weights(), torch.get_rng_state()
    with pytest.raises(TargetExists, match="resume=True or another folder"):
        setup.train(2, to=tmp_path, resume=False)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert same(setup.weights(), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_names_in_state_are_refused(tmp_path, data):
    SmallTraining(data).train(1, to=tmp_path)
    setup = SmallTraining(data)
    setup.state = {"model": setup.model}
    with pytest.raises(InvalidOption, match="contains model, optimizer, scheduler, but this run has model"):
        setup.train(2, to=tmp_path)


def test_checkpoints_of_another_data_set_are_refused(tmp_path, data):
    SmallTraining(data).train(1, to=tmp_path / "run")
    other = open_pack(make_pack(tmp_path / "other.h5", seed=12, train=22))["train"]
    setup = SmallTraining(other)
    before = setup.weights()
    with pytest.raises(InvalidOption, match="another dataset"):
        setup.train(2, to=tmp_path / "run")
    assert same(setup.weights(), before)


def test_without_a_folder_nothing_is_written(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = train(nothing, Loader(data, 4), epochs=2)
    assert (report.checkpoint, report.resumed_from, list(tmp_path.iterdir())) == (None, None, [])


def test_validate_is_called_after_each_epoch_and_recorded(data):
    calls: list[int] = []
    steps: list[int] = []

    def validate() -> dict[str, object]:
        calls.append(len(steps))
        return {"score": torch.tensor(0.5), "count": len(calls)}

    report = train(lambda batch: steps.append(1), Loader(data, 4), epochs=3, validate=validate)
    assert calls == [6, 12, 18]
    assert [dict(record.validation) for record in report.epochs] == [
        {"score": 0.5, "count": n} for n in (1.0, 2.0, 3.0)
    ]
    assert "score 0.5" in repr(report)


def test_a_validation_that_returns_something_else_is_refused(data):
    for result in (None, 0.5, "text", {"score": "text"}, {"score": torch.ones(2)}):
        with pytest.raises(
            InvalidOption, match=r"validate returned .*(a dict of numbers|a single number for each name)"
        ):
            train(nothing, Loader(data, 4), validate=lambda result=result: result)


def test_on_step_is_called_for_each_step_in_order(data):
    done: list[meters.StepDone] = []
    train(lambda batch: {"size": len(batch[1])}, Loader(data, 4), epochs=2, on_step=done.append)
    assert [(event.epoch, event.step, event.values["size"]) for event in done] == [
        (number // 6, number + 1, 2 if number % 6 == 5 else 4) for number in range(12)
    ]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, {}),
        ({}, {}),
        (2, {"loss": 2.0}),
        (0.5, {"loss": 0.5}),
        (torch.tensor(0.5, requires_grad=True), {"loss": 0.5}),
        (torch.tensor([0.5]), {"loss": 0.5}),
        (np.float32(0.5), {"loss": 0.5}),
        ({"loss": torch.tensor(0.5), "rate": 3, "share": np.float64(0.25)}, {"loss": 0.5, "rate": 3.0, "share": 0.25}),
    ],
)
def test_a_step_may_return_a_loss_a_dict_or_none(data, result, expected):
    report = train(lambda batch: result, Loader(data, 4))
    assert dict(report.epochs[0].values) == expected
    assert all(type(value) is float for value in report.epochs[0].values.values())


def test_values_are_means_over_samples_instead_of_batches(data):
    report = train(lambda batch: {"index": batch[1].float().mean()}, Loader(data, 4))
    assert report.epochs[0].values["index"] == pytest.approx(data.labels.float().mean().item())


@pytest.mark.parametrize("value", [math.nan, math.inf, torch.tensor(math.nan)])
def test_a_value_that_is_not_finite_ends_the_training(data, value):
    losses = iter([torch.tensor(1.0), torch.tensor(2.0), value])
    with pytest.raises(TrainingDiverged, match=r"step 3 returned loss=.*on_nonfinite='continue'"):
        train(lambda batch: next(losses), Loader(data, 4))


def test_a_run_that_diverges_keeps_its_last_good_checkpoint_and_names_it(data, tmp_path):
    named = r"step 7 returned loss=nan; .+ newest good checkpoint, '.*checkpoint-00000006\.pt', start the same"
    with pytest.raises(TrainingDiverged, match=named):
        train(diverging(7), Loader(data, 4), epochs=2, to=tmp_path, state={})
    report = train(lambda batch: 0.5, Loader(data, 4), epochs=2, to=tmp_path, state={})
    assert report.resumed_from is not None
    assert all(math.isfinite(record.values["loss"]) for record in report.epochs)


def test_a_run_that_diverges_at_once_leaves_no_checkpoint_that_a_new_start_would_resume(data, tmp_path):
    with pytest.raises(TrainingDiverged) as caught:
        train(diverging(1), Loader(data, 4), to=tmp_path, state={})
    assert "newest good checkpoint" not in str(caught.value)
    report = train(lambda batch: 0.5, Loader(data, 4), to=tmp_path, state={"model": nn.Linear(2, 2)})
    assert (report.resumed_from, report.skipped_checkpoints) == (None, ())


def test_a_checkpoint_with_nan_weights_is_skipped_while_an_older_one_is_finite(data, tmp_path):
    def run(epochs: int, value: float) -> tuple[TrainReport, nn.Module]:
        model = nn.Linear(2, 2)
        # Add an attention mask, which contains infinities on purpose.
        model.register_buffer("mask", torch.tensor([0.0, -math.inf]))

        def step(batch: object) -> None:
            with torch.no_grad():
                model.weight.fill_(value)

        options = {"state": {"model": model}, "to": tmp_path, "epochs": epochs}
        return train(step, Loader(data, 4), **options), model

    run(1, 1.0)
    run(2, math.nan)
    report, model = run(3, 2.0)
    assert report.skipped_checkpoints == (("checkpoint-00000012.pt", "'weight' of 'model' has NaN or infinite values"),)
    assert (report.resumed_from, len(report.epochs)) == (tmp_path / "checkpoint-00000006.pt", 3)
    assert model.weight.isfinite().all()


def diverging(step: int):
    steps = itertools.count(1)
    return lambda batch: 1.0 if next(steps) < step else math.nan


def test_training_and_validation_values_have_different_labels(data):
    report = train(lambda batch: 1.0, Loader(data, 4), validate=lambda: {"loss": 2.0, "f1": 3.0}, monitor="val_loss")
    assert report.epochs[-1].shown == {"loss": 1.0, "val_loss": 2.0, "f1": 3.0}
    assert "loss 1, val_loss 2, f1 3" in repr(report)
    assert "loss 1, val_loss 2, f1 3" in report._repr_html_()


def test_whole_numbers_of_numpy_are_converted(tmp_path, data):
    names = ("epochs", "keep_last", "patience", "save_every")
    report = train(lambda batch: 1.0, Loader(data, 4), to=tmp_path, **{name: np.int64(2) for name in names})
    assert len(report.epochs) == 2
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["epoch_count"]) == ("finished", 2)


def test_a_misspelled_monitor_is_refused_as_soon_as_the_names_are_known(tmp_path, data):
    loader = Loader((torch.rand(12, 4), torch.arange(12) % 2), 4)
    model = torch.nn.Linear(4, 2)
    step = supervised_step(model, torch.optim.SGD(model.parameters(), 0.1))
    for options in ({}, {"validate": Loader((torch.rand(4, 4), torch.arange(4) % 2), 4)}):
        with pytest.raises(InvalidOption, match=r"monitor='acuracy' is not among .*; expected 'loss' or 'accuracy'"):
            train(step, loader, monitor="acuracy", to=tmp_path / "folder", **options)
        prefix = "val_" if options else ""
        assert train(step, loader, monitor=f"{prefix}accuracy", **options).best_value is not None
    assert (step.updates, (tmp_path / "folder").exists()) == (6, False)
    seen: list[object] = []
    with pytest.raises(InvalidOption, match=r"monitor='los' is not among .*; expected 'loss'"):
        train(lambda batch: seen.append(batch) or 1.0, Loader(data, 4), monitor="los", mode="min")
    assert len(seen) == 1


def test_values_of_a_validation_cannot_be_monitored_without_one(data):
    for monitor in ("val_loss", "val_accuracy"):
        with pytest.raises(InvalidOption, match=rf"monitor='{monitor}' is given without validate=. .* use monitor='"):
            train(lambda batch: {"loss": 1.0, "accuracy": 0.5}, Loader(data, 4), monitor=monitor)
    assert train(lambda batch: {"val_loss": 1.0}, Loader(data, 4), monitor="val_loss").best_value == 1.0


@pytest.mark.parametrize(
    ("monitor", "best"), [("f1", 3.0), ("val_mIoU", 3.0), ("top-1 accuracy", 3.0), ("rmse", 1.0), ("valLoss", 1.0)]
)
def test_the_name_of_a_number_tells_whether_its_lowest_or_highest_value_is_best(data, monitor, best):
    values = iter([2.0, 1.0, 3.0])
    named = monitor.removeprefix("val_")
    report = train(
        lambda batch: 0.5, Loader(data, 12), epochs=3, validate=lambda: {named: next(values)}, monitor=monitor
    )
    assert report.best_value == best


@pytest.mark.parametrize("monitor", ["quality", "error_score"])
def test_a_name_that_does_not_tell_which_value_is_best_needs_a_mode(data, monitor):
    with pytest.raises(InvalidOption, match=r"does not tell whether lower or higher is better\. Use mode='min' or"):
        train(lambda batch: {monitor: 1.0}, Loader(data, 4), monitor=monitor)
    assert train(lambda batch: {monitor: 1.0}, Loader(data, 4), monitor=monitor, mode="max").best_value == 1.0


def test_a_stop_within_an_epoch_keeps_the_curve_without_checkpoints(data):
    def stop(done: meters.StepDone) -> None:
        if done.step == 4:
            raise StopIteration

    report = train(lambda batch: 1.0, Loader(data, 4), epochs=2, on_step=stop)
    assert (report.steps, report.curve["loss"]) == (4, [(step, 1.0) for step in range(1, 5)])


def test_a_nan_loss_is_shown_as_nan(data):
    report = train(lambda batch: float("nan"), Loader(data, 4), on_nonfinite="continue")
    assert math.isnan(report.epochs[0].values["loss"])
    assert "loss nan" in repr(report)


def test_a_log_gets_a_line_of_json_per_epoch_also_of_a_resumed_run(data, tmp_path):
    def run(epochs: int, result: float) -> None:
        train(
            lambda batch: result,
            Loader(data, 4),
            epochs=epochs,
            state={},
            to=tmp_path / "run",
            validate=lambda: {"loss": 2.0},
            log=tmp_path / "logs" / "run.jsonl",
            on_nonfinite="continue",
        )

    run(2, 1.0)
    run(3, math.nan)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "run.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["samples"], line["loss"], line["val_loss"]) for line in lines] == [
        (0, len(data), 1.0, 2.0),
        (1, len(data), 1.0, 2.0),
        (2, len(data), None, 2.0),
    ]
    assert all(0 <= line["wait_s"] <= line["seconds"] for line in lines)


def test_a_log_has_only_the_epochs_of_its_own_run_and_their_counts(data, tmp_path):
    log = tmp_path / "run.jsonl"

    def validate() -> dict[str, float]:
        train(nothing, Loader(data, 11), epochs=2)
        return {"loss": 2.0}

    values = {"loss": 1.0, "epoch": 7.5, "samples": -1}
    report = train(lambda batch: values, Loader(data, 4), epochs=2, validate=validate, log=log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["epoch"], line["samples"]) for line in lines] == [(0, len(data)), (1, len(data))]
    frame = report.to_pandas()
    assert [*frame["epoch"]] == [0, 1]
    assert [*frame["samples"]] == [len(data)] * 2


def test_a_log_that_cannot_be_written_is_refused_at_first_and_later_only_ends_the_log(data, tmp_path, caplog):
    steps = []
    with pytest.raises(InvalidOption, match=f"log= is the folder '{tmp_path}'; expected a file. .*log='/"):
        train(steps.append, Loader(data, 4), log=tmp_path)
    log = tmp_path / "run.jsonl"
    log.touch()
    with pytest.raises(FileFailed, match=f"Cannot train: .*{log}"):
        train(steps.append, Loader(data, 4), log=log / "run.jsonl")
    assert not steps

    def block(done: meters.StepDone) -> None:
        if done.step == 1:
            log.unlink()
            log.mkdir()

    report = train(nothing, Loader(data, 4), epochs=2, log=log, on_step=block)
    assert len(report.epochs) == 2
    warned = [record.getMessage() for record in caplog.records if record.name == "colabkit"]
    assert [text.partition(": ")[0] for text in warned] == [
        f"cannot write the log {str(log)!r}; training continues without it"
    ]


@pytest.mark.parametrize(
    "result",
    ["text", [1.0], object(), torch.ones(2), np.ones(2), {"loss": "text"}, {"loss": torch.ones(2)}, {"loss": None}],
)
def test_a_step_that_returns_something_else_is_refused_at_its_first_batch(data, result, heard):
    calls: list[int] = []
    expected = "a single number for each name" if isinstance(result, dict) else "a loss, a dict of numbers, or None"
    with pytest.raises(InvalidOption, match=f"the step returned .*; expected {expected}") as caught:
        train(lambda batch: calls.append(1) or result, Loader(data, 4))
    assert len(calls) == 1
    has_mean = isinstance(result, dict) and hasattr(result["loss"], "mean")
    assert ("its mean" in str(caught.value)) == has_mean
    assert [type(event) for event in heard][-1] is meters.RunEnded


@pytest.mark.parametrize("error", [ValueError("planned"), KeyboardInterrupt("planned"), SystemExit("planned")])
@pytest.mark.parametrize("at", ["step", "on_step", "validate"])
def test_an_error_is_raised_unchanged_and_the_end_of_the_run_is_published(data, error, at, heard):
    def fail(*args: object) -> None:
        raise error

    with pytest.raises(type(error), match="planned") as caught:
        train(**{"step": nothing, "loader": Loader(data, 4), at: fail})
    assert caught.value is error
    assert [event.error for event in heard if isinstance(event, meters.RunEnded)] == [type(error).__name__]


@pytest.mark.parametrize("model", [nn.Conv2d(3, 4, 3), nn.Sequential(nn.Flatten(), nn.Linear(36, 2))])
def test_a_step_that_gives_a_model_bytes_raises_an_error_that_names_normalize(data, model):
    for options in ({}, {"as_dict": True}):
        loader = Loader(data, 4, **options)
        with pytest.raises(
            InvalidOption, match=r"the images are uint8 .* Pass transform=colabkit\.augment\.Normalize\(\)"
        ):
            train(lambda batch: model(batch["X"] if isinstance(batch, dict) else batch[0]).mean(), loader)


def test_an_error_about_labels_is_not_reported_as_an_error_about_images():
    images = torch.zeros(8, 3, 4, 4, dtype=torch.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    # torch names the dtypes Long and Byte in its error for labels of other integer types.
    with pytest.raises(RuntimeError, match=r"(but got|but found) Int") as caught:
        train(
            lambda batch: nn.functional.cross_entropy(model(batch[0].float()), batch[1]),
            Loader((images, torch.zeros(8, dtype=torch.int32)), 4),
        )
    assert not isinstance(caught.value, InvalidOption)


def test_normalize_and_supervised_step_scale_images_alike(data):
    scores = []
    for transform in (Normalize(), None):
        seen: list[Tensor] = []
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
        model.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].clone()))
        train(supervised_step(model, torch.optim.SGD(model.parameters(), 0.1)), Loader(data, 22, transform=transform))
        scores += seen
    assert torch.equal(*scores)
    assert (scores[0].min() >= 0, scores[0].max() <= 1) == (True, True)


def test_an_error_in_an_epoch_keeps_the_previous_checkpoint(tmp_path, data):
    whole = SmallTraining(data)
    expected = whole.train(3)

    def fail(done: meters.StepDone) -> None:
        if done.step == 9:
            raise ValueError("planned")

    with pytest.raises(ValueError, match="planned"):
        SmallTraining(data).train(3, to=tmp_path, on_step=fail)
    resumed = SmallTraining(data)
    assert history(resumed.train(3, to=tmp_path)) == history(expected)
    assert same(resumed.weights(), whole.weights())


def test_an_error_in_the_loader_raises_loader_failed(data, heard):
    def transform(images: Tensor) -> Tensor:
        raise ValueError("planned")

    with pytest.raises(LoaderFailed, match="planned"):
        train(nothing, Loader(data, 4, transform=transform))
    assert heard[-1] == meters.RunEnded("LoaderFailed")


def test_a_run_publishes_its_events_from_start_to_end(tmp_path, data, heard):
    loader = Loader(data, 4)
    train(nothing, loader, epochs=1, to=tmp_path)
    assert heard[0] == meters.RunStarted(loader.meters, 1, 6)
    assert heard[-1] == meters.RunEnded(None)
    kinds = [type(event).__name__ for event in heard[1:-1] if not isinstance(event, meters.DataWait)]
    assert kinds == ["EpochStarted", *["BatchTaken", "StepDone"] * 6, "EpochDone"]
    heard.clear()
    loader = Loader(data, 4)
    train(nothing, loader, epochs=2, to=tmp_path)
    assert heard[0] == meters.RunStarted(loader.meters, 2, 6)
    assert [event.step for event in heard if isinstance(event, meters.StepDone)] == [7, 8, 9, 10, 11, 12]


def test_each_validation_publishes_an_event(data, heard):
    numbers = iter((0.5, 0.25))
    train(nothing, Loader(data, 4), epochs=2, validate=lambda: {"loss": next(numbers)})
    found = [event for event in heard if isinstance(event, meters.ValidationDone)]
    assert found == [meters.ValidationDone(6, {"loss": 0.5}), meters.ValidationDone(12, {"loss": 0.25})]


def test_zero_epochs_train_nothing(data, heard):
    report = train(nothing, Loader(data, 4), epochs=0)
    assert (report.epochs, report.samples_per_s) == ((), 0.0)
    assert heard == []
    assert repr(report).startswith("Trained 0 epochs")


def test_the_report_is_correct_short_and_escaped(tmp_path, data):
    folder = tmp_path / "<b>run"
    report = SmallTraining(data).train(2, to=folder)
    assert isinstance(report.epochs[0], EpochRecord)
    assert [(record.epoch, record.steps, record.samples) for record in report.epochs] == [(0, 6, 22), (1, 6, 22)]
    assert report.samples_per_s > 0
    assert 0 <= report.wait_share <= 1
    assert set(report.parts) == {"gather", "augment"}
    assert report.checkpoint == folder / "checkpoint-00000012.pt"
    first, last = repr(report).splitlines()
    assert first.startswith("Trained 2 epochs in ")
    assert last == f"Checkpoints in {str(folder)!r}"
    html = report._repr_html_()
    assert "epoch 2" in html
    assert "<b>" not in html
    values = json.loads(json.dumps(report.to_dict()))
    assert values["epochs"][1]["samples"] == 22
    assert values["checkpoint"] == str(report.checkpoint)


def test_supervised_step_takes_uint8_and_float_images_and_returns_the_accuracy(data):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.tensor([0.0, 9.0, 0.0]))
    step = supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    images, labels = next(iter(Loader(data, 22)))
    for given in (images, images.float() / 255):
        values = step((given, labels))
        assert isinstance(values, dict)
        assert values["accuracy"].item() == pytest.approx((labels == 1).float().mean().item())
        assert not values["loss"].requires_grad
    assert images.dtype == torch.uint8


def test_supervised_step_sets_training_mode_after_a_validation(data):
    setup = SmallTraining(data)
    setup.model.eval()
    setup.train(1)
    # The validation after the epoch set evaluation mode.
    assert not setup.model.training
    setup.usual(next(iter(setup.loader)))
    assert setup.model.training


class OddState:
    """An object whose state cannot be loaded safely."""

    def state_dict(self):
        return {"best": np.datetime64("2026-01-01")}

    def load_state_dict(self, state):
        raise AssertionError


def test_a_state_that_cannot_be_loaded_safely_is_refused_before_training(tmp_path, data):
    steps = []
    with pytest.raises(InvalidOption, match="tensors, numbers, text"):
        train(steps.append, Loader(data, 4), state={"odd": OddState()}, to=tmp_path / "run")
    assert steps == []
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, data):
    steps = []
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFailed):
        train(steps.append, Loader(data, 4), to=tmp_path / "file")
    assert steps == []


def test_invalid_arguments_are_refused(data):
    wrong = [
        ({"step": None}, "step=None; expected a callable"),
        ({"step": nn.Linear(1, 1)}, r"step is a Linear, a model; .+ Use colabkit\.supervised_step"),
        ({"loader": [1]}, r"loader is a list; expected a colabkit\.Loader"),
        ({"state": ["model"]}, "state is a list; expected a dict of names and objects"),
        ({"state": nn.Linear(1, 1)}, "state is a Linear; expected a dict of names and objects"),
        ({"state": {"model": 3}}, r"state\['model'\] is an int; expected an object with state_dict\(\)"),
        ({"epochs": "2"}, "epochs='2'; expected a whole number"),
        ({"epochs": -1}, "epochs=-1; expected a whole number"),
        ({"keep_last": 0}, "keep_last=0; expected a whole number"),
        ({"mode": "lowest"}, "mode='lowest'; expected 'auto', 'min' or 'max'"),
        ({"timeout": "soon"}, "timeout='soon'; expected a duration"),
        ({"on_step": 3}, "on_step=3; expected a callable or None"),
        ({"on_checkpoint": 3}, "on_checkpoint=3; expected a callable or None"),
        ({"on_checkpoint": nothing}, "on_checkpoint= is given without to="),
        ({"validate": "often"}, "validate='often'; expected a Loader, a callable or None"),
        ({"validate_every": 0}, "validate_every=0; expected a whole number"),
        ({"validate_every": "x"}, "validate_every='x'; expected a whole number"),
        ({"save_every": 5}, "save_every=5 is given without to"),
        *(({"save_every": every}, "save_every=") for every in (0, -1, "often", "epochs", 2.5, True, None)),
    ]
    for options, message in wrong:
        with pytest.raises(InvalidOption, match=f"^Cannot train: {message}"):
            train(**{"step": nothing, "loader": Loader(data, 4), **options})


def test_a_run_stopped_in_its_first_epoch_can_be_repeated_in_the_same_process(tmp_path, data):
    expected = SmallTraining(data).train(2)
    setup = SmallTraining(data)

    def stop(done: meters.StepDone) -> None:
        if done.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        setup.train(2, to=tmp_path, on_step=stop)
    assert history(setup.train(2, to=tmp_path)) == history(expected)


def test_the_report_distinguishes_the_epochs_of_this_call_from_all(tmp_path, data):
    SmallTraining(data).train(2, to=tmp_path)
    report = SmallTraining(data).train(3, to=tmp_path)
    assert (report.trained, len(report.epochs)) == (1, 3)
    assert repr(report).startswith("Trained 1 epoch (3 in total) in ")


def test_an_address_is_refused_as_the_folder_of_checkpoints(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption, match=r"Cannot train: the target 'gs://bucket/run' is an address"):
        train(lambda batch: None, Loader(data, 4), to="gs://bucket/run")
    assert list(tmp_path.iterdir()) == []
