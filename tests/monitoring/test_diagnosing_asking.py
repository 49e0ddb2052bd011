"""`doctor()` of a report, of a used loader, and of an unused loader, whose state does not change."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import make_pack
from doctor_cases import QUIET, check_advice, with_gpu
from torch.utils.data import DataLoader, Dataset, TensorDataset
from trainings import train
from trees import make_tree

import colabkit
from colabkit import errors
from colabkit.foundation.telemetry.gpus import Gpus
from colabkit.loading import Loader
from colabkit.monitoring.diagnosing import api
from colabkit.monitoring.diagnosing.api import doctor
from colabkit.monitoring.diagnosing.diagnosis import Diagnosis
from colabkit.packs import FileDataset, PackedDataset

BRIEF = 0.05
RUBBISH = [
    5,
    b"photos",
    {"train": []},
    {1, 2},
    range(3),
    [1, 2, 3],
    [["a", "b"]],
    torch.nn.Sequential(torch.nn.Flatten()),
    torch.zeros(4, 3),
    TensorDataset(torch.zeros(4, 3)),
    Loader,
]


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # These tests train on the CPU, which the doctor would criticize on a machine with a GPU.
    monkeypatch.setattr(Gpus, "snapshot", lambda self: ())
    yield
    assert "colabkit-telemetry" not in [thread.name for thread in threading.enumerate()]


class SlowDataset(Dataset[Any]):
    def __init__(self, count: int = 400) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        threading.Event().wait(0.002)
        return torch.zeros(3, 4, 4), index


def headspace_of(step_s: float) -> colabkit.HeadspaceReport:
    return colabkit.HeadspaceReport(4 / step_s, step_s, 100, 4, 4, 1000.0)


def check(found: Diagnosis) -> None:
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["verdict"] == found.verdict
    assert found._repr_html_()
    assert found.text_table()
    for advice in found.advice:
        check_advice(advice)


def test_the_verdict_of_a_report_is_the_verdict_of_its_run(data: PackedDataset) -> None:
    report = train(lambda batch: threading.Event().wait(0.002), Loader(data, 2, shuffle=True), epochs=8)
    found = doctor(report)
    # Of the 88 steps, those of the first epoch and the first one of each other epoch are ignored. Steps only wait.
    assert (found.verdict, found.steps) == ("host", 70)
    check(found)


def test_the_diagnosis_of_a_report_uses_the_machine_of_that_run(data: PackedDataset) -> None:
    report = train(lambda batch: threading.Event().wait(0.006), Loader(data, 2), epochs=5)
    hot = replace(report, hosts=(with_gpu(slowed_by=("heat",)),) * 3, precision="fp32")
    # There are too few steps for advice.
    assert [advice.rule for advice in doctor(hot).advice] == []
    longer = replace(hot, spent=replace(hot.spent, recent=hot.spent.recent * 2, steps=2 * hot.spent.steps))
    assert "slowed_gpu" in [advice.rule for advice in doctor(longer).advice]


def test_a_report_without_steps_has_too_few_for_a_verdict(data: PackedDataset) -> None:
    found = doctor(train(lambda batch: None, Loader(data, 4), epochs=0))
    assert found.sentence == "Too few steps for a diagnosis: 0 of 50"
    check(found)


def test_the_verdict_of_a_used_loader_is_the_verdict_of_its_loop() -> None:
    loader = Loader(SlowDataset(), 4, num_workers=1)
    for _ in loader:
        pass
    state, spent = loader.state_dict(), loader.meters.snapshot()
    found = doctor(loader, seconds=0)
    assert found.verdict == "data"
    # The worker sleeps while a CPU is free.
    assert found.bottleneck == "read"
    advice = {advice.rule: advice for advice in found.advice}
    assert {*advice} == {"slow_transform", "more_workers"}
    assert advice["slow_transform"].found.endswith("most of it waiting for storage")
    assert loader.state_dict() == state
    assert loader.meters.snapshot() == spent
    assert doctor(colabkit.watch(loader)).bottleneck == "read"
    check(found)


def test_the_machine_is_sampled_once_for_a_used_loader_without_a_sampler(
    data: PackedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDiskTelemetry:
        def snapshot(self) -> Any:
            return replace(QUIET, disk_free_bytes=1 << 20)

        def close(self) -> None:
            closed.append(self)

    closed: list[FullDiskTelemetry] = []
    monkeypatch.setattr(api, "Telemetry", FullDiskTelemetry)
    # The sampler of an earlier test may have taken a snapshot in this second.
    monkeypatch.setattr(api, "seen", lambda since_s, until_s: ())
    loader = Loader(data, 2)
    for _ in itertools.chain.from_iterable(itertools.repeat(loader, 8)):
        pass
    assert [advice.rule for advice in doctor(loader).advice if advice.rule == "full_disk"]
    assert len(closed) == 1


def test_a_used_watched_loader_is_diagnosed_by_its_loop() -> None:
    watched = colabkit.watch(DataLoader(SlowDataset(100), 1))
    for _ in watched:
        pass
    found = doctor(watched)
    assert found.verdict == "data"
    assert "slow_foreign" in [advice.rule for advice in found.advice]
    check(found)


def test_an_unused_loader_is_timed_alone_and_its_state_does_not_change(data: PackedDataset) -> None:
    loader = Loader(data, 4, shuffle=True, seed=3)
    expected = [batch[1].tolist() for batch in Loader(data, 4, shuffle=True, seed=3)]
    state = loader.state_dict()
    found = doctor(loader, seconds=BRIEF)
    assert found.sentence.startswith("The loader alone: ")
    assert " per batch of 4 on average; " in found.sentence
    assert (found.verdict, found.ceiling_samples_per_s) == ("unknown", None)
    assert found.samples_per_s > 0
    assert loader.state_dict() == state
    batches = iter(loader)
    first = next(batches)[1].tolist()
    assert doctor(loader, seconds=BRIEF).sentence.startswith("The loader alone: "), "in the middle of an epoch"
    assert [first, *(batch[1].tolist() for batch in batches)] == expected
    check(found)


def test_the_speed_of_an_unused_data_loader_is_reported() -> None:
    found = doctor(DataLoader(SlowDataset(40), 4), seconds=BRIEF)
    # A sample takes 2 ms.
    assert 0 < found.samples_per_s < 500
    assert "slow_foreign" in [advice.rule for advice in found.advice]
    assert all(advice.samples_per_s is None and advice.saved_s is None for advice in found.advice)
    assert all(advice.low_samples_per_s is None and advice.high_samples_per_s is None for advice in found.advice)
    rows = dict(row[:2] for row in found._rows())
    # The loader was iterated without a step.
    assert "waiting for data" not in rows
    check(found)


def test_timing_a_data_loader_leaves_the_random_generators_unchanged() -> None:
    before = torch.get_rng_state()
    doctor(DataLoader(SlowDataset(40), 4, shuffle=True), seconds=BRIEF)
    assert torch.equal(torch.get_rng_state(), before)


def test_decoding_is_reported_for_an_unused_loader_of_image_files(tmp_path: Path) -> None:
    found = doctor(Loader(FileDataset(make_tree(tmp_path / "tree", 8)), 4, size=4, keep="auto"), seconds=BRIEF)
    assert found.samples_per_s > 0
    check(found)


def test_advice_about_a_pack_names_its_source_or_dots(tmp_path: Path) -> None:
    packed = colabkit.pack(make_tree(tmp_path / "tree", 4), tmp_path / "a.h5", progress=False).path
    loader = Loader(colabkit.open_pack(packed)["train"], 4)
    assert loader.meters.facts is not None
    assert (loader.meters.facts.path, loader.meters.facts.source) == (str(packed), str(tmp_path / "tree"))
    other = Loader(colabkit.open_pack(make_pack(tmp_path / "b.h5", train=8))["train"], 4)
    assert other.meters.facts is not None
    assert other.meters.facts.source is None


def test_one_batch_per_pass_or_one_pass_is_enough_and_an_endless_loader_is_stopped() -> None:
    for loader in ([torch.zeros(5, 2)], DataLoader(TensorDataset(torch.zeros(5, 2)), 8)):
        found = doctor(loader, seconds=BRIEF)
        assert found.samples_per_s > 0
        assert " per batch of 5 on average; " in found.sentence
        check(found)
    found = doctor(iter([torch.zeros(5, 2)] * 9), seconds=BRIEF)
    assert (found.steps, found.samples_per_s > 0) == (8, True)
    assert doctor((torch.zeros(5) for _ in itertools.count()), seconds=BRIEF).samples_per_s > 0


def test_an_unused_gpu_is_not_reported_for_a_loader_without_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = with_gpu(utilization_rate=0.0, torch_bytes=None, torch_reserved_bytes=None)
    real = api._profile
    monkeypatch.setattr(api, "_profile", lambda spent, facts, hosts: real(spent, facts, [idle] * 3))
    assert "wrong_device" not in [advice.rule for advice in doctor(Loader(SlowDataset(), 4), seconds=BRIEF).advice]


def test_predictions_use_the_measured_time_of_the_step_alone() -> None:
    loader = colabkit.watch(DataLoader(SlowDataset(320), 4))
    for _ in loader:
        pass
    by_itself = doctor(loader)
    alone = headspace_of(step_s=0.01)
    found = doctor(loader, headspace=alone)
    assert found.ceiling_samples_per_s == pytest.approx(alone.samples_per_s, rel=0.05)
    assert by_itself.ceiling_samples_per_s > 2 * found.ceiling_samples_per_s
    assert (found.verdict, found.shares, found.samples_per_s) == (
        by_itself.verdict,
        by_itself.shares,
        by_itself.samples_per_s,
    )
    assert "headspace" in by_itself.advice[0].check
    assert not any("headspace" in advice.check for advice in found.advice)
    check(found)


def test_a_saved_report_accepts_a_headspace(data: PackedDataset, tmp_path: Path) -> None:
    report = train(lambda batch: threading.Event().wait(0.002), Loader(data, 2, shuffle=True), epochs=8)
    alone = headspace_of(step_s=0.05)
    found = doctor(report, headspace=alone)
    assert found.ceiling_samples_per_s < doctor(report).ceiling_samples_per_s
    from_file = doctor(report.save(tmp_path / "run.json"), headspace=alone)
    assert from_file.ceiling_samples_per_s == pytest.approx(found.ceiling_samples_per_s, rel=1e-3)


def test_an_invalid_headspace_or_one_without_steps_is_a_one_line_error() -> None:
    for headspace, message in (
        (0.5, r"headspace is a float; expected a HeadspaceReport or None\. Use headspace=colabkit\.headspace\("),
        (headspace_of(0.01), r"headspace= is given, but the loader has not been used .*, or omit headspace=\."),
    ):
        with pytest.raises(errors.InvalidOption, match=f"^Cannot diagnose: {message}"):
            doctor(DataLoader(SlowDataset(8), 4), headspace=headspace)


@pytest.mark.parametrize("empty", [[], iter(()), DataLoader(TensorDataset(torch.zeros(0, 2)), 4)])
def test_a_loader_without_batches_is_a_one_line_error(empty: Any) -> None:
    with pytest.raises(errors.InvalidOption, match=r"^Cannot diagnose the loader: it yields no batches\. Check "):
        doctor(empty, seconds=BRIEF)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0, "1", None, True])
def test_an_invalid_time_is_a_one_line_error(seconds: Any) -> None:
    message = rf"^Cannot diagnose the loader: seconds={seconds!r}; expected a duration above 0 .* seconds=5\.$"
    with pytest.raises(errors.InvalidOption, match=message):
        doctor(DataLoader(SlowDataset(8), 4), seconds=seconds)


def test_an_argument_that_is_not_a_loader_is_a_one_line_error() -> None:
    message = r"^Cannot diagnose: the argument is (an?|the class) \w+; expected a TrainReport or an iterable"
    for rubbish in RUBBISH:
        with pytest.raises(errors.InvalidOption, match=message):
            doctor(rubbish)


def test_an_error_of_the_loader_passes_unchanged() -> None:
    def batches() -> Iterator[int]:
        yield from range(3)
        raise OSError(5, "it broke")

    with pytest.raises(OSError, match="it broke"):
        doctor(batches(), seconds=10)


def test_the_doctor_sees_the_validation_of_a_report_and_of_a_saved_one(tmp_path: Path) -> None:
    training, validation = iter([0.9, 0.8, 0.6, 0.5, 0.4]), iter([1.0, 2.0, 3.0, 4.0, 5.0])
    loader = Loader((torch.zeros(4, 2), torch.zeros(4)), 4)
    validate = lambda: {"loss": next(validation), "auc": float("nan")}  # noqa: E731
    report = train(lambda batch: next(training), loader, epochs=5, validate=validate)
    for found in (doctor(report), doctor(report.save(tmp_path / "run.json"))):
        assert (found.advice[0].rule, found.sentence.split(".")[0]) == ("overfitting", "The model overfits")
