"""`TrainReport.plot()` draws epoch times, throughput, machine utilization and every value."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from colabkit.errors import InvalidOption, MissingPackage
from colabkit.foundation import GpuSnapshot, HostSnapshot
from colabkit.loading import Loader
from colabkit.training.report import EpochRecord, TrainReport, Validation
from colabkit.training.trainer import train

RUN = TrainReport((), 0, 0, 1.0, 10.0, 0.2, {}, {}, (), None, None, None, None, None, (), (), ())


def epoch(number: int, **changes: float) -> EpochRecord:
    parts = {"seconds": 10.0, "wait_s": 2.0, "copy_s": 1.0, "compute_s": 6.0, "other_s": 1.0, **changes}
    return EpochRecord(epoch=number, steps=5, samples=100, values={"loss": 1.0}, **parts)


def run(epochs: int = 3, **changes: Any) -> TrainReport:
    curve = {"loss": [(step, 1 / step) for step in range(1, 5 * epochs + 1)]}
    return replace(RUN, epochs=tuple(map(epoch, range(epochs))), trained=epochs, **{"curve": curve, **changes})


def machine(count: int, gpus: int, **changes: Any) -> tuple[HostSnapshot, ...]:
    """Return `count` host snapshots, one per second; the first has no CPU rates."""
    cards = [GpuSnapshot(f"GPU-{place}", utilization_rate=0.1 * (place + 1)) for place in range(gpus)]
    rates = {"cpu_rate": 0.6, "own_cpu_rate": 0.5, **changes}
    known = {"ram_used_bytes": 1, "ram_total_bytes": 4, "gpus": tuple(cards)}
    return tuple(HostSnapshot(at_s=50.0 + at, **(rates if at else {}), **known) for at in range(count))


def axes_of(report: TrainReport) -> dict[str, Any]:
    figure = report.plot()
    figure.canvas.draw()
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def legend_of(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.full
def test_a_figure_is_written_atomically_to_the_requested_path(tmp_path):
    path = tmp_path / "run.png"
    path.write_text("the one before")
    assert run().plot(str(path)).axes
    assert path.read_bytes().startswith(b"\x89PNG")
    run().plot(tmp_path / "run.PDF")
    assert (tmp_path / "run.PDF").read_bytes().startswith(b"%PDF")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.PDF", "run.png"]


def test_a_figure_is_displayed_in_a_notebook_without_a_magic():
    formatted, _ = InteractiveShell().display_formatter.format(run().plot())
    assert formatted["image/png"].startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "message"), [("run.odt", "'.odt' is not an image format"), ("run", "its name has no extension")]
)
def test_a_figure_name_without_an_image_format_is_refused(tmp_path, name, message):
    with pytest.raises(
        InvalidOption, match=rf"Cannot save the figure as '.*': {message}.*; expected one of .*png, .*\. .*run\.png"
    ):
        run().plot(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_every_value_has_axes_with_training_and_validation(tmp_path, data):
    report = train(
        lambda batch: {"loss": torch.tensor(0.5), "rate": 3},
        Loader(data, 4),
        epochs=3,
        validate=lambda: {"loss": 0.4, "score": 0.9},
    )
    axes = axes_of(replace(report, hosts=()))
    assert list(axes) == ["Time per epoch", "Throughput", "Loss", "Rate", "Score"]
    assert [one.get_xlabel() for one in axes.values()] == ["epoch", "epoch", "step", "step", "step"]
    assert legend_of(axes["Loss"]) == ["training", "validation"]
    assert list(axes["Loss"].lines[-1].get_xdata()) == [6, 12, 18]
    assert list(axes["Loss"].lines[-1].get_ydata()) == [0.4, 0.4, 0.4]
    report.plot().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_parts_of_an_epoch_are_stacked_and_distinguishable_without_color():
    axes = axes_of(run())["Time per epoch"]
    assert legend_of(axes) == ["waiting for data 20%", "copy 10%", "step 60%", "other 10%"]
    first = [container[0] for container in axes.containers]
    assert [(bar.get_y(), bar.get_height()) for bar in first] == [(0, 2), (2, 1), (3, 6), (9, 1)]
    assert len({bar.get_hatch() for bar in first}) == 4
    assert [text.get_text() for text in axes.texts][:3] == ["20%", "20%", "20%"]
    assert axes.get_ylabel() == "seconds"


def test_parts_without_time_are_omitted_and_untimed_time_is_shown():
    epochs = (epoch(0, copy_s=0.0, compute_s=0.0, other_s=0.0),)
    assert legend_of(axes_of(replace(run(1), epochs=epochs))["Time per epoch"]) == [
        "waiting for data 20%",
        "not timed 80%",
    ]


@pytest.mark.parametrize(("seconds", "unit"), [(10.0, "seconds"), (600.0, "minutes"), (20_000.0, "hours")])
def test_long_epochs_use_longer_units(seconds, unit):
    epochs = (epoch(0, seconds=seconds, compute_s=seconds - 4),)
    assert axes_of(replace(run(1), epochs=epochs))["Time per epoch"].get_ylabel() == unit


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 3, 12, 30, 41, 200])
def test_any_number_of_epochs_is_drawn_with_the_details_that_fit(count):
    axes = axes_of(run(count, hosts=machine(20, 1)))
    time, speed = axes["Time per epoch"], axes["Throughput"]
    assert len(time.containers) == (4 if count <= 40 else 0)
    assert len(time.collections) == (4 if count > 40 else 0)
    assert bool(time.texts) == bool(speed.texts) == (count <= 6)
    assert speed.get_xlim()[0] < 1 <= count < speed.get_xlim()[1]


def test_throughput_is_written_on_the_bars():
    assert [text.get_text() for text in axes_of(run(2))["Throughput"].texts] == ["10", "10"]


@pytest.mark.full
def test_machine_utilization_is_drawn_over_time():
    axes = axes_of(run(hosts=machine(11, 1)))["Machine utilization"]
    assert legend_of(axes) == ["GPU", "CPU", "CPU of this process", "RAM"]
    gpu, cpu, own, ram = axes.lines
    assert list(gpu.get_xdata()) == list(range(11))
    assert list(gpu.get_ydata()) == pytest.approx([10] * 11)
    assert math.isnan(cpu.get_ydata()[0])
    assert [line.get_ydata()[-1] for line in (cpu, own, ram)] == pytest.approx([60, 50, 25])
    assert len({line.get_linestyle() for line in (cpu, own, ram)}) == 3


def test_several_gpus_are_drawn_as_mean_and_range():
    axes = axes_of(run(hosts=machine(11, 3)))["Machine utilization"]
    assert legend_of(axes)[0] == "GPUs, mean of 3 and range"
    assert axes.lines[0].get_ydata()[5] == pytest.approx(20)
    assert len(axes.collections) == 1


@pytest.mark.full
def test_unknown_values_of_a_machine_are_omitted():
    hosts = machine(11, 0, cpu_rate=None)
    assert legend_of(axes_of(run(hosts=hosts))["Machine utilization"]) == ["CPU of this process", "RAM"]
    lost = replace(hosts[4], gpus=(GpuSnapshot(is_lost=True),))
    assert legend_of(axes_of(run(hosts=(lost, *hosts)))["Machine utilization"]) == ["CPU of this process", "RAM"]


def test_many_snapshots_are_averaged_to_few_points():
    axes = axes_of(run(hosts=machine(600, 1)))["Machine utilization"]
    assert len(axes.lines[0].get_xdata()) == 150
    # The first point is the mean of the first four snapshots.
    assert axes.lines[0].get_xdata()[0] == pytest.approx(1.5 / 60)


@pytest.mark.parametrize("hosts", [(), machine(1, 1)])
def test_a_run_without_snapshots_is_drawn_without_the_machine(hosts):
    assert list(axes_of(run(hosts=hosts))) == ["Time per epoch", "Throughput", "Loss"]


def test_a_loss_that_becomes_nan_is_drawn_until_then_with_its_step():
    curve = {"loss": [(step, 1 / step if step < 40 else math.nan) for step in range(1, 101)]}
    axes = axes_of(run(20, curve=curve))["Loss"]
    assert legend_of(axes) == ["training", "not finite at step 40"]
    smoothed = axes.lines[1].get_ydata()
    assert [math.isfinite(value) for value in smoothed] == [True] * 39 + [False] * 61


def test_a_loss_that_is_finite_again_is_drawn_again():
    curve = {"loss": [(step, math.inf if step == 50 else 1.0) for step in range(1, 101)]}
    smoothed = axes_of(run(20, curve=curve))["Loss"].lines[1].get_ydata()
    assert [math.isfinite(value) for value in smoothed].count(False) == 1
    assert smoothed[-1] == pytest.approx(1)


def test_the_smoothed_curve_follows_a_trend_without_delay():
    curve = {"loss": [(step, 100.0 - step) for step in range(1, 101)]}
    raw, smoothed = axes_of(run(20, curve=curve))["Loss"].lines[:2]
    assert smoothed.get_ydata() == pytest.approx(raw.get_ydata(), abs=0.5)


@pytest.mark.full
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_values_that_are_not_finite_are_omitted(tmp_path, data, value):
    report = train(lambda batch: value, Loader(data, 4), on_nonfinite="continue")
    report.plot().savefig(tmp_path / "figure.png")
    if value is not None:
        assert legend_of(axes_of(report)["Loss"]) == ["not finite at step 1"]


@pytest.mark.parametrize("steps", [1, 4])
def test_the_axis_of_few_steps_has_whole_numbers_once_each(steps):
    axes = axes_of(run(1, curve={"loss": [(step, 1.0) for step in range(1, steps + 1)]}))["Loss"]
    # Matplotlib also returns labels outside of the limits.
    texts = [label.get_text() for label in axes.get_xticklabels()]
    assert texts[: steps + 1] == [str(step) for step in range(steps + 1)]


def test_a_long_name_does_not_cover_the_title_of_the_next_axes():
    figure = run(curve={"a_name_of_a_value_" * 6: [(1, 1.0)], "other": [(1, 1.0)]}).plot()
    figure.canvas.draw()
    *_, long, other = (axes.get_tightbbox() for axes in figure.axes)
    assert long.x1 < other.x0


def test_a_run_stopped_in_its_first_epoch_shows_its_values():
    report = replace(run(1), epochs=(), validations=(Validation(3, {"score": 1.0}),))
    assert list(axes_of(report)) == ["Loss", "Score"]


def test_the_headline_is_that_of_the_report():
    assert run().plot().get_suptitle() == "Trained 3 epochs in 1.0 s: 10 images/s, 20% waiting for data"


def test_a_report_without_steps_and_a_missing_matplotlib_are_errors(data, monkeypatch):
    with pytest.raises(InvalidOption, match="the report has no steps"):
        train(lambda batch: None, Loader(data, 4), epochs=0).plot()
    report = train(lambda batch: 1.0, Loader(data, 4))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match="pip install matplotlib"):
        report.plot()
