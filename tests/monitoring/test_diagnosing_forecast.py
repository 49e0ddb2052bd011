"""A predicted speed is that of the slowest remaining part, and never exceeds that of the step alone."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from doctor_cases import (
    DECODED,
    DRIVE,
    FOREIGN,
    FULL,
    GATHERED,
    ON_GPU,
    PROCESSES,
    QUIET,
    made,
    part,
    spent_of,
    steps_of,
    with_gpu,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from colabkit.foundation import HostSnapshot, LoaderFacts, StepTimes
from colabkit.monitoring.diagnosing import forecast as forecast_module
from colabkit.monitoring.diagnosing import machine_profile
from colabkit.monitoring.diagnosing.data_rules import remote_files
from colabkit.monitoring.diagnosing.forecast import Forecast, forecast_run, predict_speed
from colabkit.monitoring.diagnosing.run_profile import RunProfile, profile_run
from colabkit.monitoring.diagnosing.verdict import judge

UNHURRIED = settings(deadline=None)
SECONDS = st.floats(1e-6, 10)
FORECASTS = st.builds(
    Forecast,
    samples=st.integers(1, 512),
    step_s=SECONDS,
    held_s=st.floats(0, 10),
    cpu_s=st.one_of(st.just(0.0), st.floats(1e-6, 0.1)),
    wall_s=st.one_of(st.just(0.0), st.floats(1e-6, 1)),
    workers=st.integers(1, 16),
    cpus=st.sampled_from([0.5, 1.0, 2.0, 8.0]),
    are_threads=st.booleans(),
)
USUAL = Forecast(samples=64, step_s=0.1, held_s=0.02, cpu_s=0.004, wall_s=0.005, workers=2, cpus=4.0)


@st.composite
def cases(draw: st.DrawFn) -> RunProfile:
    facts = draw(st.sampled_from([GATHERED, DECODED, FOREIGN, ON_GPU]))
    host = draw(st.sampled_from([None, QUIET, FULL, with_gpu()]))
    if host is not None:
        host = replace(host, cpus=draw(st.sampled_from([0.5, 1.0, 2.0, 8.0])))
        host = replace(host, own_cpu_rate=draw(st.one_of(st.none(), st.floats(0, 1))))
    busy = draw(st.floats(1e-6, 0.1))
    parts = () if facts is FOREIGN else (part("decode", busy, busy * draw(st.sampled_from([0.0, 0.5, 1.0]))),)
    wait, copy, compute, other = (draw(st.floats(0, 1)) for _ in range(4))
    return made(wait=wait, copy=copy, compute=compute + 1e-6, other=other, facts=facts, parts=parts, host=host)


@UNHURRIED
@given(FORECASTS)
def test_no_predicted_fix_of_the_input_is_faster_than_the_step_alone(forecast: Forecast) -> None:
    alone = forecast.samples / forecast.step_s
    for speed in (
        forecast.without_loader(),
        forecast.from_rows(150_000.0),
        forecast.from_local_files(),
        forecast.samples_per_s(workers=64),
    ):
        assert 0 < speed <= alone * (1 + 1e-9)


@UNHURRIED
@given(FORECASTS)
def test_removing_a_cost_never_predicts_a_lower_speed(forecast: Forecast) -> None:
    now = forecast.samples_per_s()
    assert forecast.without_loader() >= now
    assert forecast.samples_per_s(workers=forecast.workers + 1) >= now
    assert forecast.samples_per_s(cpu_s=forecast.cpu_s / 2, wall_s=forecast.wall_s / 2) >= now
    assert forecast.samples_per_s(saved_s=forecast.step_s / 2) >= now
    assert forecast.without_loader() >= forecast.from_rows(150_000.0) >= forecast.from_rows(1e9)


@UNHURRIED
@given(cases())
def test_a_measured_run_is_predicted_not_to_be_slower_without_its_loader(case: RunProfile) -> None:
    forecast = forecast_run(case)
    assert forecast.without_loader() >= case.samples_per_s * (1 - 1e-9)
    assert forecast.samples_per_s(cpu_s=0.0, wall_s=0.0, saved_s=case.step.copy_s) >= forecast.without_loader()


@UNHURRIED
@given(cases())
def test_a_step_alone_is_predicted_to_take_at_most_its_measured_time(case: RunProfile) -> None:
    forecast = forecast_run(case)
    assert 0 <= forecast.step_s <= case.step.seconds - case.step.wait_s + 1e-9
    assert 0 <= forecast.held_s <= forecast.step_s
    assert forecast.wall_s >= forecast.cpu_s >= 0


def test_the_predicted_speed_is_the_speed_of_the_slowest_part() -> None:
    # Two workers need 0.16 s for 64 samples of 5 ms.
    assert USUAL.samples_per_s() == pytest.approx(64 / 0.16)
    # With more workers, the step is slower than the loader.
    assert USUAL.samples_per_s(workers=8) == pytest.approx(64 / 0.1)
    # Step and workers compete for the CPUs, so their times add up.
    assert USUAL.samples_per_s(workers=8, cpu_s=0.01) == pytest.approx(64 / (0.02 + 0.64 / 3.8))
    assert USUAL.samples_per_s(workers=8, here_s=0.05) == pytest.approx(64 / 0.15)
    assert USUAL.samples_per_s(workers=8, saved_s=0.02) == pytest.approx(64 / 0.08)


def test_a_faster_source_does_not_help_a_loader_that_decodes_too_slowly() -> None:
    decoding = replace(USUAL, cpu_s=0.01, wall_s=0.05)
    near = decoding.from_local_files()
    assert near == pytest.approx(64 / (0.02 + 0.64 / 2))
    assert near < decoding.without_loader()
    # The CPUs limit the speed of any number of workers.
    assert decoding.samples_per_s(workers=64) == pytest.approx(64 / (0.02 + 0.64 / 3.8))


@pytest.mark.parametrize(("facts", "is_told"), [(FOREIGN, True), (PROCESSES, True), (DRIVE, False)])
def test_the_cpu_time_of_waiting_workers_is_used_for_predictions_and_the_check_says_so(
    facts: LoaderFacts, is_told: bool
) -> None:
    host = replace(QUIET, children_cpu_rate=0.1)
    parts = () if facts is FOREIGN else (part("samples" if facts is PROCESSES else "read", 0.05, 0.001),)
    run = made(wait=1.9, facts=replace(facts, is_remote=True, workers=2, path="/far"), parts=parts, host=host)
    forecast = forecast_run(run)
    assert forecast.from_local_files() == forecast.samples_per_s(
        cpu_s=forecast.cpu_s + forecast.local_read_s, wall_s=forecast.cpu_s + forecast.local_read_s
    )
    advice = remote_files(run)
    assert advice is not None
    assert ("the run may be even faster" in advice.check) == is_told
    if is_told:
        warm = replace(forecast, cpu_s=forecast.cpu_s / 2.5).from_local_files()
        assert advice.high_samples_per_s >= warm > advice.samples_per_s


def test_the_cpu_time_of_starting_workers_is_not_that_of_samples() -> None:
    """The first step waits 10 s for workers that import libraries; then 20 steps take 1 s each, in two passes."""
    waits = [10.0, *[0.9] * 9, 10.0, *[0.9] * 9]
    steps = [StepTimes(wait, 0.0, 0.1, 0.0, 64, wait > 1) for wait in waits]
    begun_s = 100.0 - sum(step.seconds for step in steps)
    starts = [(begun_s, begun_s + 10.1), (begun_s + 19.1, begun_s + 29.2)]

    def host_at(at_s: float, startup: float) -> HostSnapshot:
        is_start = any(began < at_s < ended + 1 for began, ended in starts)
        return replace(QUIET, at_s=at_s, cpus=2.0, children_cpu_rate=startup if is_start else 0.032)

    for startup in (0.9, 0.032):
        hosts = [host_at(begun_s + second, startup) for second in range(1, round(100.0 - begun_s) + 1)]
        run = profile_run(spent_of(steps, passes=2), replace(FOREIGN, workers=2), hosts)
        assert run.cpu_s == pytest.approx(0.001, rel=0.01)
    # If all snapshots are of a start, they are all that is known.
    hosts = [host_at(begun_s + second, 0.9) for second in (1, 2)]
    assert profile_run(spent_of(steps[:1]), FOREIGN, hosts).machine.children_cpu_rate == pytest.approx(0.9)


@pytest.mark.parametrize("are_threads", [True, False], ids=["threads", "processes"])
def test_workers_and_a_step_on_the_cpu_take_turns(are_threads: bool) -> None:
    computing = Forecast(64, 0.1, 0.1, 0.01, 0.01, workers=2, cpus=2.0, are_threads=are_threads)
    assert computing.samples_per_s() == pytest.approx(64 / (0.1 + 0.64))
    on_four = replace(computing, cpus=4.0).samples_per_s()
    # Threads wait for the GIL; processes do not.
    assert on_four == pytest.approx(64 / (0.1 + (0.64 if are_threads else 0.32)))
    # A step on a GPU holds neither the GIL nor a CPU, so no worker waits for it.
    assert replace(computing, held_s=0.0).samples_per_s() == pytest.approx(64 / 0.32)


@pytest.mark.parametrize("facts", [FOREIGN, ON_GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("measured_s", [0.01, 0.5])
def test_the_time_of_a_step_alone_is_the_measured_time_unless_gpu_events_are_shorter(facts, measured_s) -> None:
    case = made(wait=0.2, compute=0.1, facts=facts)
    case = replace(case, measured_alone_s=measured_s / case.step.samples)
    expected = min(measured_s, 0.1) if facts is ON_GPU else measured_s
    assert case.alone_s == pytest.approx(expected)
    assert forecast_run(case).without_loader() == pytest.approx(case.step.samples / expected)


def test_gathering_rows_costs_time_in_the_thread_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_module, "gather_bytes_per_s", lambda row_bytes: 4e9)
    assert USUAL.from_rows(None) == USUAL.without_loader()
    assert USUAL.from_rows(1e6) == pytest.approx(64 / (0.1 + 64e6 / 4e9))


def forget_measurements() -> None:
    forecast_module._gathered_bytes_per_s.cache_clear()
    forecast_module.file_read_s.cache_clear()


@pytest.fixture
def _measures_again() -> Iterator[None]:
    yield
    forget_measurements()


@pytest.mark.usefixtures("_measures_again")
@pytest.mark.parametrize("row_bytes", [1, 1000, 150_000, 1e9])
def test_a_ten_times_slower_machine_gets_a_slower_prediction(monkeypatch: pytest.MonkeyPatch, row_bytes: float) -> None:
    bound = Forecast(samples=64, step_s=1e-9, held_s=0.0, cpu_s=1e-9, wall_s=1e-9, workers=1, cpus=1.0)
    run = made(wait=0.1, compute=0.01, facts=DRIVE, parts=(part("decode", 0.002, 0.002),), host=QUIET)

    def measured(tick_s: float) -> tuple[float, float]:
        ticks = itertools.count()
        for name in ("perf_counter", "thread_time"):
            monkeypatch.setattr(time, name, lambda: tick_s * next(ticks))
        forget_measurements()
        return bound.from_rows(row_bytes), forecast_run(run).local_read_s

    rows_per_s, read_s = measured(1e-3)
    usual_rows_per_s, usual_read_s = measured(1e-4)
    assert rows_per_s < 0.6 * usual_rows_per_s
    assert read_s > 2 * usual_read_s > 0


@UNHURRIED
@given(cases())
def test_the_limits_of_a_prediction_hold_the_expected_speed(case: RunProfile) -> None:
    for fix in (Forecast.without_loader, Forecast.from_local_files, lambda costs: costs.from_rows(150_000.0)):
        expected, low, high = predict_speed(case, fix)
        assert 0 < low <= expected <= high
        assert expected == fix(forecast_run(case))


def test_the_limits_are_wider_if_steps_vary_and_narrower_if_the_step_was_measured() -> None:
    def width(run: RunProfile) -> float:
        _, low, high = predict_speed(run, Forecast.without_loader)
        return high / low

    even = made(wait=0.2, steps=steps_of(wait=0.2, count=320), facts=FOREIGN)
    steps = steps_of(wait=0.2, count=320)
    uneven = [*steps[:160], *(step._replace(compute_s=0.2) for step in steps[160:])]
    varied = made(steps=uneven, facts=FOREIGN)
    # Other processes use 2% of the CPUs, and the step waits two thirds of the time, which leaves caches cold.
    assert width(even) == pytest.approx(1.12**2 * (1 + 2 / 3))
    assert width(made(steps=steps_of(wait=0.02, count=320), facts=FOREIGN)) == pytest.approx(1.12**2)
    assert width(varied) > 2
    assert width(replace(varied, measured_alone_s=0.1 / 64)) < width(varied)


def test_a_prediction_is_shown_with_its_limits() -> None:
    found = judge(made(wait=0.2, facts=FOREIGN))
    assert re.search(r"\(\d+\.\d–\d+\.\d times as fast", repr(found))
    for advice in found.advice:
        assert advice.low_samples_per_s <= advice.samples_per_s <= advice.high_samples_per_s


def test_cpu_time_saved_in_the_loader_speeds_up_the_step_on_a_full_cpu() -> None:
    steps = [
        step._replace(compute_s=0.1 if number % 10 == 0 else 0.2)
        for number, step in enumerate(steps_of(wait=0.02, count=200))
    ]
    parts = (part("decode", 0.006, 0.005, samples=200 * 64),)
    crowded = made(steps=steps, facts=DECODED, parts=parts, host=replace(FULL, cpus=2.0))
    idle = made(steps=steps, facts=DECODED, parts=parts, host=replace(QUIET, cpus=2.0))
    assert forecast_run(crowded).step_s == pytest.approx(0.1, rel=0.02)
    assert forecast_run(idle).step_s == pytest.approx(0.19, rel=0.02)
    assert forecast_run(crowded).without_loader() > 1.5 * forecast_run(idle).without_loader()


def test_idle_cpus_or_an_unknown_machine_do_not_shorten_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu = made(wait=0.1, facts=replace(DECODED, device="cuda:0"), parts=(part("decode", 0.01, 0.01),), host=FULL)
    assert forecast_run(on_gpu).step_s == pytest.approx(0.1)
    monkeypatch.setattr(machine_profile, "usable_cpus", lambda: 6.0)
    unseen = forecast_run(made(wait=0.1, facts=None, host=None))
    assert unseen.cpus == 6.0
    assert unseen.without_loader() == pytest.approx(640)
    assert forecast_run(made(steps=[], facts=None, host=None)).without_loader() == 0


def test_local_files_cost_the_workers_one_read_each() -> None:
    far = replace(DECODED, is_remote=True)
    busy = part("decode", 0.002, 0.002)
    case = made(wait=0.1, compute=0.01, facts=far, parts=(busy, part("read", 0.2, 0.0)), host=QUIET)
    forecast = forecast_run(case)
    assert forecast.local_read_s > 0
    assert forecast.from_local_files() < replace(forecast, local_read_s=0.0).from_local_files()
    assert forecast_run(replace(case, facts=DECODED)).local_read_s == 0
