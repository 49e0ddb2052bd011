"""`doctor()` without an argument diagnoses the latest run; with a path, a saved report."""

from __future__ import annotations

import gc
import itertools
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from doctor_cases import QUIET, with_gpu
from torch.utils.data import DataLoader, TensorDataset
from trainings import train

import colabkit
from colabkit.errors import BadSource, InvalidOption, SourceMissing
from colabkit.foundation import HostSnapshot, sampled
from colabkit.foundation.meters.events import latest
from colabkit.foundation.telemetry import sampler
from colabkit.monitoring.diagnosing.api import doctor

MOST_BYTES = 300_000


@pytest.fixture(autouse=True)
def nothing_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in ("_reports", "_loaders", "_leader"):
        monkeypatch.setattr(sys.modules["colabkit.foundation.meters.events"], kept, [])


def loader(samples: int = 600) -> colabkit.Loader:
    return colabkit.Loader((np.zeros((samples, 2), np.float32), np.zeros(samples, np.int64)), 4)


def test_without_a_run_the_error_names_the_next_step() -> None:
    with pytest.raises(InvalidOption, match=r"^Cannot diagnose: neither training nor a loop .* Train first, or pass"):
        doctor()


def test_a_training_is_diagnosed_by_its_report_even_after_its_loader_is_deleted() -> None:
    report = train(lambda batch: 0.5, loader())
    gc.collect()
    assert latest() is report
    assert doctor() == doctor(report)
    assert "recent" not in report.to_dict()["spent"], "the report is unchanged"
    for _ in itertools.chain.from_iterable(itertools.repeat(loader(), 8)):
        pass
    gc.collect()
    assert latest() is report


def test_a_loop_after_a_training_is_the_latest_run_even_over_a_watched_loader() -> None:
    train(lambda batch: 0.5, loader())
    used = loader(1000)
    for _ in used:
        pass
    assert latest() is used.meters
    assert doctor().steps == doctor(used).steps
    watched = colabkit.watch(DataLoader(TensorDataset(torch.zeros(400, 2)), batch_size=4))
    for _ in watched:
        pass
    assert latest() is watched.meters


def test_the_first_of_alternating_loaders_is_diagnosed() -> None:
    training, validation, test = loader(), loader(), loader()
    used: list[colabkit.Loader] = [training, validation, training, validation, test, validation, training, validation]
    judged = []
    for one in used:
        next(iter(one))
        judged.append([known.meters for known in (training, validation, test)].index(latest()))
    assert judged == [0, 1, 0, 0, 2, 1, 0, 0]
    del training, used[:], one
    gc.collect()
    assert latest() is test.meters


def test_loops_without_gradients_count_only_beside_others_without() -> None:
    validation, inference, training = loader(), loader(), loader()
    used = [validation, inference, training, validation, training, inference, validation]
    for one, expected in zip(used, [validation, inference, *[training] * 5], strict=True):
        with torch.set_grad_enabled(one is training):
            next(iter(one))
        assert latest() is expected.meters


def test_a_loop_is_diagnosed_with_the_machine_of_that_time_even_after_sampling_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class HotTelemetry:
        samples_stacks = False

        def snapshot(self) -> HostSnapshot:
            return replace(with_gpu(slowed_by=("heat",)), at_s=time.monotonic())

        def close(self) -> None:
            pass

    monkeypatch.setattr(sampler, "Telemetry", HotTelemetry)
    used, deadline_s = loader(), time.monotonic() + 30
    with sampled() as watching:
        for _ in used:
            while watching.latest is None:
                assert time.monotonic() < deadline_s, "no snapshot was taken"
                time.sleep(0.001)
    assert "slowed_gpu" in [advice.rule for advice in doctor().advice]
    later = loader()
    for _ in later:
        pass
    later.meters.spent.left_s += 60.0
    assert "slowed_gpu" not in [advice.rule for advice in doctor(later).advice]


def test_peeking_at_a_loader_and_runs_without_steps_do_not_count(tmp_path: Path) -> None:
    one, two = loader(), loader()
    report = train(lambda batch: 0.5, one)
    two.peek()
    doctor(two, seconds=0.05)
    train(lambda batch: 0.5, one, epochs=0)
    assert latest() is report


def test_an_interrupted_training_is_diagnosed() -> None:
    def interrupted(batch: object) -> float:
        signal.raise_signal(signal.SIGINT)
        return 0.5

    with pytest.raises(KeyboardInterrupt) as caught:
        train(interrupted, loader())
    assert latest() is caught.value.report


def test_a_saved_report_gets_the_same_verdict(tmp_path: Path) -> None:
    report = train(lambda batch: 0.5, loader(), epochs=2)
    hot = replace(report, hosts=(with_gpu(slowed_by=("heat",)), QUIET) * 2, precision="fp32")
    found, again = doctor(hot), doctor(hot.save(tmp_path / "run.json"))
    assert (again.verdict, again.steps) == (found.verdict, found.steps)
    assert [advice.rule for advice in again.advice] == [advice.rule for advice in found.advice]
    assert again.step_s == pytest.approx(found.step_s, rel=1e-3)
    assert doctor(str(tmp_path / "run.json")) == again


def test_a_saved_report_stays_small(tmp_path: Path) -> None:
    report = train(lambda batch: {f"value {n}": 0.1 * n for n in range(4)}, loader(6000), epochs=3)
    assert len(report.spent.recent) == 512
    hosts = tuple(replace(with_gpu(), at_s=1e6 / 7 + n) for n in range(600))
    saved = replace(report, hosts=hosts, epochs=report.epochs * 200).save(tmp_path / "run.json")
    assert saved.stat().st_size < MOST_BYTES
    assert doctor(saved).steps > 100


def test_a_file_that_is_not_a_saved_report_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing, match=r"^Cannot read .*none\.json"):
        doctor(tmp_path / "none.json")
    good = train(lambda batch: 0.5, loader()).save(tmp_path / "run.json")
    record = json.loads(good.read_text())
    wrong = [
        {**record, "spent": {"batches": 1}},
        {**record, "facts": {**record["facts"], "workers": "two"}},
        {**record, "facts": {**record["facts"], "kind": "none"}},
        {**record, "spent": {**record["spent"], "recent": [["a", 0, 0, 0, 4]]}},
        {**record, "spent": {**record["spent"], "wait_s": None}},
    ]
    for text in ("", "[]", "{}", "nonsense \0", '{"spent": null}', "[" * 100_000, *map(json.dumps, wrong)):
        good.write_text(text)
        with pytest.raises(BadSource, match=r"a file that TrainReport\.save"):
            doctor(good)
