"""`Sampler`: its thread, its limited cost and memory, its failures, and its cleanup."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from forks import in_fork
from waiting import wait_until

from colabkit.foundation.telemetry import sampler as module
from colabkit.foundation.telemetry.host import HostSnapshot
from colabkit.foundation.telemetry.sampler import Sampler, sampled, seen

NAME = "colabkit-telemetry"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: NAME not in [thread.name for thread in threading.enumerate()])


class FakeTelemetry:
    def __init__(self, failing: set[int] = frozenset(), cost_s: float = 0.0) -> None:
        self.now = self.cpu_s = 0.0
        self.taken = 0
        self.closed = 0
        self.threads: set[str] = set()
        self.failing = failing
        self.cost_s = cost_s
        self.samples_stacks = False

    def snapshot(self) -> HostSnapshot:
        self.threads.add(threading.current_thread().name)
        self.taken += 1
        self.cpu_s += self.cost_s
        self.now += 1
        if self.taken in self.failing:
            raise OSError(5, "it broke")
        return HostSnapshot(at_s=self.now)

    def close(self) -> None:
        self.closed += 1

    def sampler(self, **options: object) -> Sampler:
        options = {"period_s": 0.0, **options}
        return Sampler(self, clock=lambda: self.now, cpu_clock=lambda: self.cpu_s, **options)


def test_snapshots_are_taken_in_a_separate_daemon_thread():
    telemetry = FakeTelemetry()
    with telemetry.sampler() as sampler:
        (thread,) = [thread for thread in threading.enumerate() if thread.name == NAME]
        assert thread.daemon
        wait_until(lambda: telemetry.taken > 3)
    assert telemetry.threads == {NAME}
    assert sampler.latest.at_s == telemetry.taken
    assert not thread.is_alive()


def test_before_the_first_snapshot_nothing_is_known():
    sampler = Sampler(FakeTelemetry())
    assert (sampler.latest, sampler.recent(60), sampler.curve(), sampler.cost_share) == (None, (), (), 0)
    sampler.stop()
    sampler.start()
    sampler.stop()
    sampler.stop()


def test_starting_does_not_wait_for_the_driver(monkeypatch):
    going = threading.Event()

    def slow() -> FakeTelemetry:
        assert going.wait(20)
        return FakeTelemetry()

    monkeypatch.setattr(module, "Telemetry", slow)
    with Sampler(period_s=0.001) as sampler:
        assert sampler.latest is None
        going.set()
        wait_until(lambda: sampler.latest is not None)


def test_the_sampler_closes_only_the_telemetry_that_it_opened(monkeypatch):
    own, given = FakeTelemetry(), FakeTelemetry()
    monkeypatch.setattr(module, "Telemetry", lambda: own)
    for sampler, telemetry in ((Sampler(period_s=0.001), own), (given.sampler(), given)):
        with sampler:
            wait_until(lambda telemetry=telemetry: telemetry.taken > 1)
    assert (own.closed, given.closed) == (1, 0)


def test_recent_returns_the_snapshots_of_the_last_seconds():
    telemetry = FakeTelemetry()
    with telemetry.sampler(points=50) as sampler:
        wait_until(lambda: telemetry.taken > 100)
    last = telemetry.taken
    assert [snapshot.at_s for snapshot in sampler.recent(3)] == [last - 3, last - 2, last - 1, last]
    assert len(sampler.recent(1e9)) == 50


def test_the_curve_covers_the_whole_run_thinned_evenly_and_ends_with_the_newest():
    for points, count in itertools.product((2, 7, 10), (1, 2, 5, 9, 10, 11, 39, 40, 41, 500)):
        telemetry = FakeTelemetry()
        sampler = telemetry.sampler(points=points)
        for _ in range(count):
            sampler._take(telemetry)
        times = [snapshot.at_s for snapshot in sampler.curve()]
        assert (times[0], times[-1]) == (1, count)
        assert len(times) <= points
        assert count < points or len(times) >= points // 2
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert len(set(gaps[:-1])) <= 1
        assert not gaps[:-1] or gaps[-1] <= gaps[0]


def test_the_cost_is_the_threads_share_of_cpu_time():
    telemetry = FakeTelemetry(cost_s=0.002)
    with telemetry.sampler() as sampler:
        wait_until(lambda: telemetry.taken > 2)
    assert sampler.cost_share == pytest.approx(0.002)
    telemetry.now *= 100
    assert sampler.cost_share == pytest.approx(0.002)


def test_cpu_time_between_snapshots_counts_towards_the_cost():
    # For example, a thread that waits for the GIL asks for it every few milliseconds.
    telemetry = FakeTelemetry()

    def clock() -> float:
        telemetry.cpu_s += 1e-6
        return telemetry.now

    with Sampler(telemetry, period_s=0.0, clock=clock, cpu_clock=lambda: telemetry.cpu_s) as sampler:
        wait_until(lambda: telemetry.taken > 50)
    used_s = telemetry.cpu_s
    assert sampler.cost_share * telemetry.now == pytest.approx(used_s, rel=0.1)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list to which samplers append the seconds until each snapshot."""
    found: list[float] = []
    pause_s = Sampler._pause_s
    monkeypatch.setattr(Sampler, "_pause_s", lambda self: found.append(pause_s(self)) or found[-1])
    return found


def test_costly_snapshots_are_taken_less_often(pauses):
    # Snapshots may use a thousandth of a CPU, so after this one, which costs 1 s, none may follow for minutes.
    telemetry = FakeTelemetry(cost_s=1.0)
    with telemetry.sampler():
        wait_until(lambda: len(pauses) == 2)
        assert pauses[1] > 600
        assert telemetry.taken == 1


def test_a_run_of_some_seconds_is_observed_closely_even_if_snapshots_are_costly(pauses):
    telemetry = FakeTelemetry(cost_s=0.02)
    with telemetry.sampler():
        wait_until(lambda: len(pauses) == 4)
        assert pauses[:3] == [0, 0, 0]
        assert pauses[3] > 10
        assert telemetry.taken == 3


def test_a_failing_snapshot_is_logged_once_and_sampling_continues(caplog):
    telemetry = FakeTelemetry(failing={2, 4})
    with caplog.at_level(logging.WARNING, "colabkit"), telemetry.sampler(points=10**6) as sampler:
        wait_until(lambda: telemetry.taken > 5)
    (record,) = caplog.records
    assert "it broke" in str(record.exc_info[1])
    assert [snapshot.at_s for snapshot in sampler.recent(1e9)][:3] == [1, 3, 5]


def test_a_failure_to_open_the_telemetry_is_logged_and_harmless(monkeypatch, caplog):
    def broken() -> None:
        raise RuntimeError("no such machine")

    monkeypatch.setattr(module, "Telemetry", broken)
    with caplog.at_level(logging.WARNING, "colabkit"), Sampler() as sampler:
        sampler._thread.join(20)
    assert len(caplog.records) == 1
    assert sampler.curve() == ()


def test_a_hung_driver_blocks_nothing():
    answers, asked = threading.Event(), threading.Event()

    class StuckTelemetry(FakeTelemetry):
        def snapshot(self) -> HostSnapshot:
            asked.set()
            assert answers.wait(60)
            return HostSnapshot()

    began = time.monotonic()
    with Sampler(StuckTelemetry()):
        assert asked.wait(20)
        stopped = time.monotonic()
    try:
        assert time.monotonic() - stopped < 5
        assert stopped - began < 20
    finally:
        answers.set()


def test_the_shared_sampler_is_started_by_the_first_user_and_stopped_by_the_last(monkeypatch):
    monkeypatch.setattr(module, "Telemetry", FakeTelemetry)
    with sampled() as first:
        with sampled() as second:
            assert first is second
        assert first._thread is not None
        wait_until(lambda: first.latest is not None)
    assert first._thread is None
    with pytest.raises(ZeroDivisionError), sampled() as third:
        raise ZeroDivisionError
    assert third is not first
    assert third._thread is None


def test_users_in_many_threads_share_one_sampler(monkeypatch):
    monkeypatch.setattr(module, "Telemetry", FakeTelemetry)
    found: list[Sampler] = []
    together = threading.Barrier(8)

    def use() -> None:
        together.wait(20)
        with sampled() as sampler:
            found.append(sampler)
            together.wait(20)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert found[0]._thread is None


def test_a_user_ended_by_the_garbage_collector_while_another_begins_is_harmless(monkeypatch):
    monkeypatch.setattr(module, "Telemetry", FakeTelemetry)
    forgotten = [sampled()]
    first = forgotten[0].__enter__()
    lock = module._shared.lock

    class CollectingLock:
        """A lock that frees an abandoned `sampled()` while a thread holds the lock, as a garbage collection may."""

        def __enter__(self) -> None:
            lock.acquire()
            if forgotten:
                forgotten.clear()

        def __exit__(self, *error: object) -> None:
            lock.release()

    monkeypatch.setattr(module._shared, "lock", CollectingLock())
    found: list[Sampler] = []

    def use() -> None:
        with sampled() as sampler:
            wait_until(lambda: sampler.latest is not None)
            found.append(sampler)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(20)
    assert len(found) == 1, "it waits for itself"
    assert found[0]._thread is None
    assert first._thread is None
    assert module._shared.users == 0


def test_the_last_user_may_be_ended_in_the_samplers_own_thread(monkeypatch):
    ended: list[BaseException | None] = []
    is_used = threading.Event()

    class EndingTelemetry(FakeTelemetry):
        def snapshot(self) -> HostSnapshot:
            if not ended:
                is_used.wait(20)
                try:
                    user.__exit__(None, None, None)
                    ended.append(None)
                except RuntimeError as error:
                    ended.append(error)
            return super().snapshot()

    sampler = EndingTelemetry().sampler(period_s=0.01)
    monkeypatch.setattr(module, "Sampler", lambda: sampler)
    user = sampled()
    user.__enter__()
    is_used.set()
    wait_until(lambda: bool(ended))
    assert ended == [None]


def test_a_forked_process_starts_its_own_sampler_and_does_not_stop_that_of_its_parent(monkeypatch):
    monkeypatch.setattr(module, "Telemetry", FakeTelemetry)

    def work() -> None:
        assert NAME not in [thread.name for thread in threading.enumerate()]
        with sampled() as own:
            wait_until(lambda: own.latest is not None)
        assert own is not parents
        assert own._thread is None
        parents.stop()

    with sampled() as parents:
        assert in_fork(work) == 0
        taken = parents.latest
        wait_until(lambda: parents.latest is not None and parents.latest is not taken)
        assert parents._thread.is_alive()


def test_snapshots_stay_available_after_the_last_user_and_no_descriptor_is_left():
    before = psutil.Process().num_fds()
    with sampled() as sampler:
        wait_until(lambda: sampler.latest is not None)
    assert psutil.Process().num_fds() <= before
    latest = sampler.latest
    own = sampler.between(latest.at_s - 60, latest.at_s)
    assert seen(latest.at_s - 60, latest.at_s)[-len(own) :] == own
    assert seen(latest.at_s, latest.at_s) == (latest,)
    assert seen(latest.at_s + 1, latest.at_s + 60) == ()
    with sampled() as later:
        wait_until(lambda: later.latest is not None)
    assert {latest, later.latest} <= set(seen(latest.at_s - 60, later.latest.at_s))


def test_stacks_are_sampled_between_snapshots_only_when_asked():
    telemetry = FakeTelemetry()
    telemetry.stacks = 0
    telemetry.sample_stack = lambda: setattr(telemetry, "stacks", telemetry.stacks + 1)
    with telemetry.sampler(period_s=0.5):
        wait_until(lambda: telemetry.taken > 1)
        assert telemetry.stacks == 0
        telemetry.samples_stacks = True
        wait_until(lambda: telemetry.stacks > 1)


def test_stacks_are_sampled_less_often_if_a_sample_takes_much_cpu_time():
    telemetry = FakeTelemetry()
    telemetry.stacks, telemetry.samples_stacks = 0, True

    def sample_stack() -> None:
        telemetry.stacks += 1
        telemetry.cpu_s += 0.1
        # So much time passes that snapshots stay within their limit.
        telemetry.now += 1000

    telemetry.sample_stack = sample_stack
    with telemetry.sampler(period_s=0.5):
        wait_until(lambda: telemetry.stacks == 1)
        taken = telemetry.taken
        wait_until(lambda: telemetry.taken > taken + 2)
    assert telemetry.stacks == 1


def test_a_sampler_that_is_started_again_continues_with_its_snapshots_and_its_limit():
    telemetry = FakeTelemetry(cost_s=0.001)
    sampler = telemetry.sampler(points=1_000_000)
    for _ in range(3):
        taken = telemetry.taken
        with sampler:
            wait_until(lambda taken=taken: telemetry.taken > taken + 3)
        # Each snapshot takes a second. The time between two runs of the thread must not count.
        assert sampler.cost_share == pytest.approx(0.001)
        assert len(sampler.recent(math.inf)) == telemetry.taken
        telemetry.now += 1e6


def test_snapshots_that_fail_are_repeated_only_after_the_period():
    telemetry = FakeTelemetry(failing=set(range(1, 100)))
    with Sampler(telemetry, period_s=1000.0, cpu_clock=lambda: 0.0):
        wait_until(lambda: telemetry.taken > 0)
        wait_until(lambda: NAME in [thread.name for thread in threading.enumerate()])
    assert telemetry.taken == 1
