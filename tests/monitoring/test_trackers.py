"""`log_to()` passes the values of a run and the shares of its step time to each kind of tracker."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainings import train

from colabkit import log_to
from colabkit.errors import InvalidOption
from colabkit.loading import Loader

TIMES = ("data_wait", "copy", "compute", "other")


class Metrics:
    """A stand-in for the module `mlflow`."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, metrics))


class Run:
    """A stand-in for a W&B run, which must get its entries in the order of the steps."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        assert not self.rows or step >= self.rows[-1][0]
        self.rows.append((step, data))

    def finish(self) -> None:
        raise AssertionError("the run belongs to the user")


class Writer:
    """A stand-in for a `SummaryWriter`."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert global_step is not None
        if not self.rows or self.rows[-1][0] != global_step or tag in self.rows[-1][1]:
            self.rows.append((global_step, {}))
        self.rows[-1][1][tag] = scalar_value


def merged(rows: list[tuple[int, dict[str, float]]]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for step, values in rows:
        found.setdefault(step, {}).update(values)
    return found


@pytest.mark.every_case
@pytest.mark.parametrize("kind", [Metrics, Run, Writer])
def test_values_validations_and_shares_of_the_step_time_are_logged(data, kind):
    writer, steps = kind(), iter(range(1, 100))
    with log_to(writer, every=4):
        train(lambda batch: {"loss": next(steps)}, Loader(data, 4), epochs=2, validate=lambda: {"loss": 0.5})
    found = merged(writer.rows)
    # Each epoch has 6 steps, and its last step is logged, too.
    assert [*found] == [4, 6, 8, 12]
    assert [values["train/loss"] for values in found.values()] == [4, 6, 8, 12]
    assert [values.get("val/loss") for values in found.values()] == [None, 0.5, None, 0.5]
    for values in found.values():
        assert sum(values[f"time/{name}"] for name in TIMES) == pytest.approx(1)
        assert values["time/samples_per_s"] > 0


def test_only_runs_inside_the_block_are_logged(data):
    writer = Metrics()
    with log_to(writer):
        train(lambda batch: 1.0, Loader(data, 4))
    train(lambda batch: 2.0, Loader(data, 4))
    assert [(step, values["train/loss"]) for step, values in writer.rows] == [(6, 1.0)]


def test_times_of_a_run_that_continues_after_a_nested_run_are_its_own(data):
    writer, steps = Metrics(), iter(range(1, 100))

    def step(batch: object) -> float:
        if next(steps) == 3:
            train(lambda batch: 9.0, Loader(data, 4))
        return 0.5

    with log_to(writer, every=2):
        train(step, Loader(data, 4))
    assert [(step, values["train/loss"]) for step, values in writer.rows] == [
        *((step, 0.5) for step in (2,)),
        *((step, 9.0) for step in (2, 4, 6)),
        *((step, 0.5) for step in (4, 6)),
    ]
    for _, values in writer.rows:
        assert sum(values[f"time/{name}"] for name in TIMES) == pytest.approx(1)


def test_a_writer_that_fails_does_not_stop_the_training(data, caplog):
    def fail(values: object, step: int) -> None:
        raise ConnectionError("planned")

    with log_to(SimpleNamespace(log_metrics=fail), every=1):
        assert train(lambda batch: 1.0, Loader(data, 4)).steps == 6
    assert [record.getMessage() for record in caplog.records] == [
        "log_to(a SimpleNamespace) failed and was removed; the run continues"
    ]


def test_another_writer_is_refused():
    for writer in (None, print, math, Metrics):
        with pytest.raises(
            InvalidOption, match=r"writer is .+; expected a SummaryWriter, a W&B run, the module mlflow"
        ):
            log_to(writer)
    with pytest.raises(InvalidOption, match="every=0; expected a whole number"):
        log_to(Metrics(), every=0)


def test_tensorboard_reads_what_was_logged(data, tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer, log_to(writer, every=2):
        train(lambda batch: 1.5, Loader(data, 4))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(2, 1.5), (4, 1.5), (6, 1.5)]
    assert {f"time/{name}" for name in TIMES} <= set(events.Tags()["scalars"])


def test_a_call_without_a_with_block_logs_a_warning(caplog):
    log_to(Metrics())
    assert [record.getMessage() for record in caplog.records] == [
        "log_to() logs only inside a with block: with colabkit.log_to(writer): colabkit.train(...)"
    ]
