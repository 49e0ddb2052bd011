"""`Level`, the adaptive number of concurrent reads, in virtual time with simulated sources."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from colabkit.storage.sources.level import MOST_IN_FLIGHT, Level

LEVELS = [1, 2, 4, 8, 16, 32, 64, 128]
MS = 1e-3


@dataclass
class Simulation:
    """Simulated calls to a source that has a latency and serves a limited number of calls at once.

    Args:
        level: sets the number of concurrent calls.
        latency_s: latency in seconds of a call of weight 1; it is proportional to the weight.
        cap: number of calls that the source serves at once; other calls wait.
        cpu_s: CPU seconds of each call after its answer.
        cores: number of CPU cores.
        weights: weights of consecutive calls.
        jitter: maximum relative deviation from the latency.
        refused: probability that an answer is an error; the call is then repeated after five latencies.
    """

    level: Level
    latency_s: float
    cap: int = 1000
    cpu_s: float = 0.0
    cores: int = 1
    weights: list[float] = field(default_factory=lambda: [1.0])
    jitter: float = 0.0
    refused: float = 0.0

    def __post_init__(self) -> None:
        self.time = 0.0
        self.done = 0.0
        self.random = random.Random(7)
        self._next_weight: Iterator[float] = itertools.cycle(self.weights)
        self._mean_weight = sum(self.weights) / len(self.weights)
        self._servers = [0.0] * self.cap
        self._cores = [0.0] * self.cores
        self._events: list[tuple[float, int, bool, float]] = []
        self._count = itertools.count()
        self._in_flight = 0

    def run(self, seconds: float) -> float:
        """Run for some virtual seconds; return the weight of the finished calls per second."""
        since, before = self.time, self.done
        if not self._in_flight:
            self.level.begin(self.time)
            self._fill()
        while self._events and self._events[0][0] <= since + seconds:
            self.time, _, is_over, weight = heapq.heappop(self._events)
            if not is_over:
                if self.random.random() < self.refused:
                    self.level.refused()
                    self._later(self.time + 5 * self.latency_s, False, weight)
                else:
                    self._later(self._queued(self._cores, self.cpu_s), True, weight)
                continue
            self._in_flight -= 1
            self.done += weight
            self.level.note(self.time, weight, self.cpu_s)
            self._fill()
        self.time = since + seconds
        return (self.done - before) / seconds

    def _fill(self) -> None:
        while self._in_flight < max(1, round(self.level.now / self._mean_weight)):
            self._in_flight += 1
            weight = next(self._next_weight)
            latency = self.latency_s * weight * (1 + self.jitter * self.random.uniform(-1, 1))
            self._later(self._queued(self._servers, latency), False, weight)

    def _queued(self, free_at: list[float], duration: float) -> float:
        """Assign a task to the first free server or core, and return the task's end time."""
        end = max(self.time, heapq.heappop(free_at)) + duration
        heapq.heappush(free_at, end)
        return end

    def _later(self, time: float, is_over: bool, weight: float) -> None:
        heapq.heappush(self._events, (time, next(self._count), is_over, weight))


def best_rate(seconds: float, **source: object) -> float:
    """Return the best rate with a fixed number of concurrent calls."""
    return max(Simulation(Level(now, is_fixed=True), **source).run(seconds) for now in LEVELS)  # type: ignore[arg-type]


@pytest.mark.parametrize("latency_s", [10 * MS, 40 * MS, 100 * MS])
@pytest.mark.parametrize("cap", [1, 4, 16, 64, 128])
def test_the_best_rate_of_a_source_is_reached_in_few_rounds(cap, latency_s):
    simulation = Simulation(Level(), latency_s, cap)
    simulation.run(4 * latency_s)
    assert simulation.run(20 * latency_s) >= 0.95 * cap / latency_s
    assert simulation.run(200 * latency_s) >= 0.95 * cap / latency_s


@pytest.mark.parametrize("start", [1, 16])
@pytest.mark.parametrize("cap", [4, 16, 64, 128])
def test_it_climbs_from_a_low_start_too(cap, start):
    simulation = Simulation(Level(start), 40 * MS, cap, jitter=0.1)
    simulation.run(20 * 40 * MS)
    assert simulation.run(2) >= 0.95 * cap / (40 * MS)


@pytest.mark.parametrize(("start", "cap", "most"), [(64, 4, 64), (64, 16, 64), (8, 8, 16), (16, 16, 32)])
@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_it_exceeds_the_useful_level_only_for_occasional_windows(start, cap, most, jitter):
    simulation = Simulation(Level(start), 40 * MS, cap, jitter=jitter)
    levels = []
    for _ in range(400):
        simulation.run(5 * 40 * MS)
        levels.append(simulation.level.now)
    assert sum(level > most for level in levels) < 0.1 * len(levels)
    assert min(levels) >= cap


def test_it_never_leaves_its_bounds():
    simulation = Simulation(Level(), MS, refused=0.02)
    for _ in range(200):
        simulation.run(50 * MS)
        assert 1 <= simulation.level.now <= MOST_IN_FLIGHT


def test_later_changes_of_the_source_are_detected():
    simulation = Simulation(Level(8), 40 * MS, 8)
    simulation.run(2)
    assert simulation.level.now <= 16
    simulation._servers += [simulation.time] * 120
    simulation.run(10)
    assert simulation.run(2) >= 0.95 * 128 / (40 * MS)


def test_an_error_halves_it_at_most_once_per_window_down_to_one():
    level = Level(64)
    level.begin(0)
    for halved in (32, 16, 8, 4, 2, 1, 1):
        for _ in range(64):
            level.refused()
        assert level.now == halved
        for number in range(64):
            level.note(0.1 * (65 - halved) + number * MS, 1, 0)


def test_after_an_error_it_recovers_later():
    simulation = Simulation(Level(), 40 * MS, 128)
    simulation.run(1)
    simulation.level.refused()
    halved = simulation.level.now
    assert halved == 64
    simulation.run(20 * 40 * MS)
    assert simulation.level.now == halved
    simulation.run(3)
    assert simulation.run(2) >= 0.95 * 128 / (40 * MS)


@pytest.mark.parametrize(("latency_s", "cpu_s", "cores", "most"), [(0.05 * MS, 5 * MS, 1, 4), (MS, 2 * MS, 2, 16)])
def test_it_falls_if_calls_compute(latency_s, cpu_s, cores, most):
    source = {"latency_s": latency_s, "cpu_s": cpu_s, "cores": cores}
    simulation = Simulation(Level(), **source)
    simulation.run(1)
    assert simulation.level.now <= most
    assert simulation.run(1) >= 0.9 * best_rate(1, **source)


def test_it_stays_low_while_calls_compute():
    simulation = Simulation(Level(), 0.05 * MS, cpu_s=5 * MS)
    simulation.run(1)
    levels = []
    for _ in range(200):
        simulation.run(50 * MS)
        levels.append(simulation.level.now)
    assert max(levels) <= 4


def test_a_fixed_one_never_moves():
    simulation = Simulation(Level(7, is_fixed=True), 10 * MS, 128, refused=0.1)
    for _ in range(50):
        simulation.run(20 * MS)
        assert simulation.level.now == 7


def test_nothing_is_measured_before_the_first_call():
    level = Level(2)
    for number in range(100):
        level.note(number, 1, 0)
    assert level.now == 2


@pytest.mark.parametrize("weights", [[1, 9], [9], [1] * 20 + [9] * 20, [1, 2.5, 0.5, 8]])
@pytest.mark.parametrize("cap", [2, 12, 100])
def test_calls_of_any_weight_get_the_best_rate(weights, cap):
    source = {"latency_s": 10 * MS, "cap": cap, "weights": weights}
    simulation = Simulation(Level(), **source)
    simulation.run(2)
    assert simulation.run(5) >= 0.95 * best_rate(7, **source)
