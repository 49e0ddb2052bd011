"""Step time: its four parts add up, measured by the host's clock on the CPU and by the stream on a GPU."""

from __future__ import annotations

import random
import sys
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from clocks import PromptClock
from simulated_gpu import Event, SimulatedGpu

from colabkit.foundation.meters.counts import LoaderMeters
from colabkit.foundation.meters.steps import DeviceClock, HostClock, StepTimes


@dataclass
class Stream:
    """A GPU stream: work starts once the host has queued it and all earlier work has ended."""

    host_s: float = 0.0
    ends_s: float = 0.0

    def work(self, seconds: float) -> None:
        self.ends_s = max(self.ends_s, self.host_s) + seconds

    def wait_until(self, at_s: float) -> None:
        self.ends_s = max(self.ends_s, self.host_s, at_s)

    def mark(self) -> Mark:
        return Mark(self, max(self.ends_s, self.host_s))


@dataclass
class Mark:
    stream: Stream
    at_s: float

    def query(self) -> bool:
        return self.stream.host_s >= self.at_s

    def elapsed_time(self, later: Mark) -> float:
        return 1000 * (later.at_s - self.at_s)


@dataclass
class Loop:
    """A training loop on a simulated GPU, defined by the seconds that the parts of a step take."""

    wait_s: float = 0.0
    copy_ends_after_s: float = 0.0
    step_s: float = 0.0
    other_s: float = 0.0
    apart_s: float = 0.0
    launch_s: float = 0.001

    def run(self, steps: int, *, waits_for_the_step: bool = True) -> list[StepTimes]:
        stream = Stream()
        clock = DeviceClock(stream.mark)
        for _ in range(steps):
            asked = stream.host_s
            stream.host_s += self.wait_s
            before = stream.mark()
            stream.wait_until(stream.host_s + self.copy_ends_after_s)
            clock.given((before, stream.mark()))
            given = stream.host_s
            stream.host_s += self.launch_s
            stream.work(self.step_s)
            clock.worked(self.launch_s)
            if waits_for_the_step:
                stream.host_s = max(stream.host_s, stream.ends_s)
            stream.host_s += self.apart_s
            clock.apart(self.apart_s)
            stream.host_s += self.other_s
            clock.stepped(asked, given, stream.host_s, 32)
        stream.host_s += 1000
        return clock.settled()


def mean(steps: list[StepTimes]) -> tuple[float, float, float, float]:
    rest = steps[1:]
    return tuple(round(sum(getattr(step, name) for step in rest) / len(rest), 6) for name in StepTimes._fields[:4])


def test_on_the_cpu_the_parts_are_exact():
    counts = LoaderMeters()
    clock = HostClock(counts.spent)
    clock.stepped(0.0, 1.0, 5.0, 8)
    clock.worked(2.0)
    clock.stepped(5.0, 5.5, 9.5, 8)
    clock.worked(2.0)
    clock.apart(1.0)
    clock.stepped(9.5, 9.5, 13.5, 4)
    found = counts.snapshot()
    assert found.recent == (
        # The test did not call `worked()` for this step.
        StepTimes(1.0, 0.0, 4.0, 0.0, 8, is_first=True),
        StepTimes(0.5, 0.0, 2.0, 2.0, 8),
        StepTimes(0.0, 0.0, 2.0, 1.0, 4),
    )
    assert (found.wait_s, found.compute_s, found.other_s, found.first_s, found.steps) == (1.5, 8.0, 3.0, 1.0, 3)
    counts.settle(clock)
    assert counts.snapshot() == found
    clock.worked(10.0)
    clock.apart(3.0)
    clock.stepped(13.5, 14.5, 15.5, 1)
    assert min(counts.snapshot().recent[-1][:4]) >= 0


def test_waiting_copying_and_computing_gpus_are_distinguished():
    # Compute includes the launch, which takes 1 ms, unless the GPU is still waiting for a copy.
    assert mean(Loop(wait_s=0.05, step_s=0.01).run(20)) == (0.05, 0.0, 0.011, 0.0)
    assert mean(Loop(copy_ends_after_s=0.03, step_s=0.01).run(20)) == (0.0, 0.03, 0.01, 0.0)
    assert mean(Loop(step_s=0.02).run(20)) == (0.0, 0.0, 0.021, 0.0)
    assert mean(Loop(step_s=0.02, other_s=0.01).run(20)) == (0.0, 0.0, 0.021, 0.01)


def test_waits_hidden_by_queued_work_and_validations_do_not_count():
    hidden = mean(Loop(wait_s=0.005, step_s=0.02).run(50, waits_for_the_step=False))
    assert hidden == (0.0, 0.0, 0.02, 0.0)
    assert mean(Loop(wait_s=0.01, step_s=0.02, apart_s=5.0).run(10)) == (0.01, 0.0, 0.021, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_add_up_to_the_time_between_the_steps_of_the_stream(seed):
    draw = random.Random(seed)
    loop = Loop(*(draw.choice([0.0, draw.uniform(0, 0.05)]) for _ in range(4)))
    steps = loop.run(100, waits_for_the_step=draw.random() < 0.5)
    stream = Stream()
    clock = DeviceClock(stream.mark)
    assert len(steps) == 100
    assert clock.settled() == []
    period_s = sum(step.seconds for step in steps[1:]) / 99
    longest = max(loop.step_s, loop.launch_s + loop.wait_s + loop.other_s)
    assert period_s >= 0.99 * min(longest, loop.step_s + loop.copy_ends_after_s)
    assert min(min(step[:4]) for step in steps) >= -1e-9


def test_steps_are_read_after_the_stream_has_passed_them_without_waiting():
    stream = Stream()
    clock = DeviceClock(stream.mark)
    clock.given(None)
    stream.work(10.0)
    clock.stepped(0.0, 0.0, 0.0, 1)
    assert clock.settled() == []
    stream.host_s = 10.0
    (step,) = clock.settled()
    assert (step.compute_s, step.is_first) == (10.0, True)


def test_a_step_that_ends_in_another_stream_is_read_once_the_streams_have_passed_all_its_marks(monkeypatch):
    gpu = SimulatedGpu()
    gpu.install(monkeypatch)

    def mark() -> Event:
        return gpu.current.record_event()

    clock = DeviceClock(mark)
    for _ in range(2):
        gpu.compute(10.0)
        clock.given(None)
        with gpu.stream(torch.cuda.Stream()):
            gpu.compute(1.0)
            clock.worked(0.0)
        clock.stepped(0.0, 0.0, 0.0, 1)
    gpu.host.now = 1.0
    assert clock.settled() == []
    gpu.host.now = 20.0
    assert min(min(step[:4]) for step in clock.settled()) >= 0.0
    assert not clock.is_behind


class MarkOfAnotherGpu(Mark):
    def elapsed_time(self, later: Mark) -> float:
        raise RuntimeError("CUDA error: invalid resource handle")


def test_a_step_whose_duration_is_undefined_is_left_out_without_an_error():
    stream, kinds = Stream(), iter([Mark, Mark, MarkOfAnotherGpu, Mark, Mark, Mark])
    clock = DeviceClock(lambda: next(kinds)(stream, stream.host_s))
    for _ in range(3):
        clock.given(None)
        clock.stepped(0.0, 0.0, 0.0, 1)
    assert len(clock.settled()) == 2


def test_a_stream_that_is_far_behind_drops_the_oldest_steps_to_bound_memory():
    stream = Stream()
    clock = DeviceClock(stream.mark)
    for _ in range(1000):
        clock.given(None)
        stream.work(1.0)
        clock.stepped(0.0, 0.0, 0.0, 1)
    assert len(clock._noted) == 256


@pytest.mark.parametrize("kind", [HostClock, PromptClock])
def test_steps_may_be_counted_from_another_thread_and_each_only_once(kind):
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    counts = LoaderMeters()
    counts.clock = clock = kind(counts.spent)
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            counts.snapshot()

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(20_000):
            clock.stepped(number, number + 0.25, number + 1.0, 1)
            if not number % 64:
                counts.settle(clock)
    finally:
        sys.setswitchinterval(switch_s)
        is_over.set()
        for thread in threads:
            thread.join()
    found = counts.snapshot()
    assert (found.steps, found.wait_s, found.compute_s) == (20_000, 5_000.0, 15_000.0)


def test_pending_steps_of_a_stream_are_counted_even_after_the_pass():
    stream, counts = Stream(), LoaderMeters()
    for _ in range(3):
        clock = DeviceClock(stream.mark)
        counts.begin_pass(clock)
        for _ in range(20):
            clock.given(None)
            stream.work(1.0)
            clock.stepped(0.0, 0.0, 0.0, 1)
        stream.host_s += 15.0
        counts.settle(clock)
    assert counts.snapshot().steps == 45
    stream.host_s += 15.0
    found = counts.snapshot()
    assert (found.steps, found.compute_s, found.passes) == (60, 60.0, 3)
    assert not counts._earlier


def test_steps_have_the_time_at_which_they_ran_however_late_they_are_read():
    stream, counts = Stream(), LoaderMeters()
    clock = DeviceClock(stream.mark)
    counts.begin_pass(clock)
    taken_s = time.perf_counter() - 60.0
    for number in range(3):
        clock.given(None)
        stream.work(1.0)
        clock.stepped(taken_s, taken_s, taken_s + number, 1)
    counts.settle(clock)
    stream.host_s += 60.0
    assert counts.snapshot().steps == 3
    assert counts.timed_s == pytest.approx(time.monotonic() - 58.0, abs=20.0)


def test_the_cpu_time_of_the_thread_is_measured_in_long_steps_and_in_some_short_ones() -> None:
    counts = LoaderMeters()
    clock = HostClock(counts.spent)
    for number in range(48):
        clock.given(None)
        clock.stepped(float(number), float(number), number + 1e-4, 8)
    measured = [step.cpu_s is not None for step in counts.snapshot().recent]
    assert sum(measured) in (3, 4)
    for number in range(48, 60):
        clock.given(None)
        clock.stepped(float(number), float(number), number + 0.5, 8)
    later = [step.cpu_s for step in counts.snapshot().recent[-8:]]
    assert all(cpu_s is not None and 0 <= cpu_s < 1 for cpu_s in later)


def test_time_apart_from_a_step_does_not_count_as_its_cpu_time() -> None:
    counts = LoaderMeters()
    clock = HostClock(counts.spent)
    clock.given(None)
    clock.apart(1.0)
    clock.stepped(0.0, 0.0, 2.0, 8)
    assert counts.snapshot().recent[0].cpu_s is None


def test_a_run_is_divided_into_few_stretches_that_add_up_to_it() -> None:
    counts = LoaderMeters()
    clock = HostClock(counts.spent)
    now = 0.0
    for number in range(5000):
        step_s = 0.25 if number < 2500 else 0.5
        clock.stepped(now, now + 0.05, now + step_s, 8)
        now += step_s
    found = counts.snapshot().stretches
    assert 50 < len(found) < 120
    assert sum(one.steps for one in found) == pytest.approx(5000, abs=100)
    assert found[0].samples / found[0].seconds == pytest.approx(8 / 0.25, rel=0.01)
    assert found[-1].samples / found[-1].seconds == pytest.approx(8 / 0.5)
    assert found[0].wait_s / found[0].seconds == pytest.approx(0.05 / 0.25, rel=0.05)


def test_time_between_passes_is_in_no_stretch() -> None:
    counts = LoaderMeters()
    now = 0.0
    for _ in range(4):
        clock = HostClock(counts.spent)
        counts.begin_pass(clock)
        for _ in range(20):
            clock.stepped(now, now, now + 0.1, 8)
            now += 0.1
        now += 1000.0
    assert all(one.seconds / one.steps == pytest.approx(0.1) for one in counts.snapshot().stretches)


def test_a_difference_of_snapshots_has_the_stretches_after_the_earlier_one() -> None:
    counts = LoaderMeters()
    clock = HostClock(counts.spent)
    now, before = 0.0, counts.snapshot()
    for number in range(200):
        clock.stepped(now, now, now + 0.1, 8)
        now += 0.1
        if number == 99:
            before = counts.snapshot()
    whole = counts.snapshot()
    # The stretch during which the earlier snapshot was taken is excluded.
    assert (whole - before).stretches == whole.stretches[len(before.stretches) + 1 :]
    assert (whole - LoaderMeters().snapshot()).stretches == whole.stretches
