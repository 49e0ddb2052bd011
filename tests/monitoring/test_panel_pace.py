"""The cost of the panel is measured, shown and limited to a share of the time."""

from __future__ import annotations

import pytest
from doctor_cases import made
from panel_states import FakeTime, Frames, machine, took

from colabkit.foundation import Frame, LoaderMeters, meters
from colabkit.monitoring.diagnosing.machine_rules import costly_panel
from colabkit.monitoring.panel.api import Dashboard, FramePace


def paced(time: FakeTime, cost_s: float, frames: int, pace: FramePace | None = None) -> FramePace:
    """Return a `FramePace` that has recorded some frames, each when it was due."""
    if pace is None:
        pace = FramePace(0.5, time)
        pace.painted(0.2, 0.2)
    for _ in range(frames):
        assert not pace.is_due
        time.now_s += pace.interval_s
        assert pace.is_due
        time.now_s += cost_s
        pace.painted(cost_s, cost_s)
    return pace


def test_cheap_frames_are_painted_twice_per_second() -> None:
    time = FakeTime()
    pace = paced(time, 0.001, 100)
    assert pace.interval_s == 0.5
    assert pace.cost_share == pytest.approx(0.002, rel=0.01)


def test_the_first_frame_comes_before_the_run_and_does_not_count() -> None:
    pace = FramePace(0.5, FakeTime())
    pace.painted(3.0, 3.0)
    assert pace.cost_share is None
    assert pace.interval_s == 0.5


def test_a_frame_of_more_than_5_ms_doubles_the_interval_and_a_shorter_one_halves_it() -> None:
    time = FakeTime()
    pace = paced(time, 0.0001, 1000)
    intervals = []
    for cost_s in (0.006, 0.006, 0.001, 0.001, 0.001):
        paced(time, cost_s, 1, pace)
        intervals.append(pace.interval_s)
    assert intervals == [1.0, 2.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("cost_s", [0.003, 0.0049])
def test_the_interval_grows_so_that_frames_take_half_a_percent_of_the_time(cost_s: float) -> None:
    time = FakeTime()
    pace = paced(time, cost_s, 1)
    assert pace.interval_s == 1.0
    paced(time, cost_s, 200, pace)
    assert 0.004 < pace.cost_share < 0.0055
    paced(time, 0.0001, 100, pace)
    assert pace.interval_s == 0.5


@pytest.mark.parametrize(("wall_s", "cost_s"), [(0.004, 0.001), (0.009, 0.001), (0.050, 0.040)])
def test_time_slices_of_other_threads_do_not_count_but_waiting_for_the_front_end_does(
    wall_s: float, cost_s: float
) -> None:
    time = FakeTime()
    pace = paced(time, 0.0001, 1)
    time.now_s += 100
    pace.painted(wall_s, 0.001)
    assert pace.cost_share * 100.5 == pytest.approx(cost_s + 0.0001, rel=0.01)
    assert pace.interval_s == (1.0 if cost_s > 0.005 else 0.5)


def test_the_panel_is_painted_every_8_seconds_at_any_cost() -> None:
    time = FakeTime()
    assert paced(time, 1.0, 20).interval_s == 8.0


def test_the_advice_for_a_costly_panel_makes_it_slower_than_its_own_limit() -> None:
    advice = costly_panel(made(cost_share=0.02, compute_s=60.0))
    advised_s = float(advice.call.rpartition("refresh_s=")[2].rstrip(")"))
    time = FakeTime()
    assert advised_s > paced(time, 1.0, 20).interval_s


class SlowFrames(Frames):
    def __init__(self, time: FakeTime, cost_s: float) -> None:
        super().__init__()
        self.time, self.cost_s, self.at_s = time, cost_s, []

    def paint(self, frame: Frame, final: bool) -> None:
        super().paint(frame, final)
        self.at_s.append(self.time.now_s - 1000)
        self.time.now_s += self.cost_s


def run(time: FakeTime, screen: Frames, seconds: float, step_s: float = 0.01) -> None:
    counts = LoaderMeters()
    with Dashboard(screen, machine=machine, clock=time, cpu_clock=time):
        meters.publish(meters.RunStarted(counts, 1, 100_000))
        for step in range(1, round(seconds / step_s) + 1):
            time.now_s += step_s
            took(counts, 1, 0.0, step_s)
            meters.publish(meters.StepDone(0, step, step, {"loss": 1 / step}))


def test_a_run_paints_at_most_twice_per_second() -> None:
    time = FakeTime()
    screen = SlowFrames(time, 0.0)
    run(time, screen, 10)
    assert 18 <= len(screen.frames) <= 22
    assert min(later - earlier for earlier, later in zip(screen.at_s, screen.at_s[1:-1], strict=False)) >= 0.5


def test_a_slow_screen_is_painted_less_often_and_its_cost_is_shown() -> None:
    time = FakeTime()
    screen = SlowFrames(time, 0.008)
    run(time, screen, 60)
    assert len(screen.frames) < 15
    assert "panel: 0.2% of the time" in screen.frames[-1][1], "its 0.1% and those of the sampler"


def test_nothing_is_painted_while_the_text_stays_the_same() -> None:
    time, screen, counts = FakeTime(), Frames(), LoaderMeters()
    with Dashboard(screen, machine=machine, clock=time, cpu_clock=time):
        meters.publish(meters.RunStarted(counts, 1, 10))
        meters.publish(meters.RunEnded(None))
        ended = len(screen.frames)
        for _ in range(100):
            time.now_s += 1
            meters.publish(meters.BatchTaken(counts))
        assert len(screen.frames) == ended
    assert len(screen.frames) == ended + 1, "the final one"


def test_the_panel_sends_less_than_20_kilobytes_per_second_to_the_front_end() -> None:
    time = FakeTime()
    screen = SlowFrames(time, 0.0)
    run(time, screen, 100)
    sent = sum(len(html.encode()) + len(text.encode()) + 650 for html, text, final in screen.frames if not final)
    assert sent / 100 < 20_000
