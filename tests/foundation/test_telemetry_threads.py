"""The threads of this process: which one has the CPU, waits for it, or holds the GIL, and which line the loop is at."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from waiting import wait_until

import colabkit
from colabkit.foundation.mount_table import read_file
from colabkit.foundation.telemetry.stacks import LoopSpot, StackSampler, module_of, prompt_gil
from colabkit.foundation.telemetry.threads import (
    ProcessThreads,
    ThreadsSnapshot,
    TrainingThread,
    train_in_this_thread,
    training_thread,
)

TASKS = "/proc/self/task"


class Process:
    """A process with three threads: 1 trains, 2 runs Python code, and 3 belongs to torch."""

    def __init__(self, has_schedstat: bool = True) -> None:
        self.now = 0.0
        self.probe = 0.0
        self.release_s = 1e-5
        self.without_cpu_s = self.own_held_s = 0.0
        self.cpu = {1: 0.0, 2: 0.0, 3: 0.0}
        self.held = {1: 0.0, 2: 0.0, 3: 0.0}
        self.has_schedstat = has_schedstat
        self.threads = ProcessThreads(
            read=self.read,
            clock=lambda: self.now,
            training=lambda: TrainingThread(101, 1),
            names=lambda: {1: "MainThread", 2: "refresher"},
            task_ids=lambda: self.cpu,
            release=self.release,
            probe_clock=lambda: self.probe,
        )
        assert self.threads.snapshot() is None

    def read(self, path: str) -> str:
        task, file = path.removeprefix(f"{TASKS}/").split("/")
        if file == "schedstat" and self.has_schedstat:
            # The thread that takes the snapshots has another number.
            cpu_s, held_s = self.cpu.get(int(task), 0.0), self.held.get(int(task), self.own_held_s)
            return f"{cpu_s * 1e9:.0f} {held_s * 1e9:.0f} 7\n"
        if file == "stat":
            return f"{task} (a (b) c) R {' '.join(['0'] * 10)} {self.cpu.get(int(task), 0.0) * 100:.0f} 0 0\n"
        raise FileNotFoundError(path)

    def release(self) -> None:
        # The thread sleeps for half a millisecond, and then waits for the GIL and for a CPU.
        self.probe += 5e-4 + self.release_s + self.without_cpu_s
        self.own_held_s += self.without_cpu_s

    def after(self, seconds: float, cpu: dict[int, float], held: dict[int, float] | None = None) -> ThreadsSnapshot:
        self.now += seconds
        for totals, spent in ((self.cpu, cpu), (self.held, held or {})):
            for task, spent_s in spent.items():
                totals[task] += spent_s
        found = self.threads.snapshot()
        assert found is not None
        return found


def test_times_of_threads_are_shares_since_the_last_snapshot():
    process = Process()
    found = process.after(2.0, {1: 1.0, 2: 0.2, 3: 1.6}, {1: 0.5, 3: 0.2})
    assert found.training_cpu_rate == pytest.approx(0.5)
    assert found.training_held_rate == pytest.approx(0.25)
    assert found.held_rate == pytest.approx(0.7 / 3.5)
    assert found.compute_cpus == pytest.approx(0.8)
    assert (found.busiest_thread, found.busiest_thread_rate) == ("refresher", pytest.approx(0.1))
    assert process.after(1.0, {1: 1.0}).training_cpu_rate == pytest.approx(1.0)


def test_the_threads_of_torch_are_those_of_the_thread_that_trains():
    train_in_this_thread()
    assert training_thread() == (threading.get_ident(), threading.get_native_id(), torch.get_num_threads())
    process = Process()
    process.threads.training = lambda: TrainingThread(101, 1, 16)
    assert process.after(1.0, {1: 0.5}).torch_threads == 16


def test_without_counters_of_waits_only_the_cpu_time_is_known():
    found = Process(has_schedstat=False).after(1.0, {1: 0.5, 3: 0.25})
    assert (found.training_cpu_rate, found.compute_cpus) == (pytest.approx(0.5), pytest.approx(0.25))
    assert (found.training_held_rate, found.held_rate) == (None, None)


def test_without_a_list_of_threads_only_the_gil_is_known():
    process = Process()
    process.threads.task_ids = dict
    found = process.after(1.0, {})
    assert found == ThreadsSnapshot(gil_wait_s=found.gil_wait_s)


def test_a_thread_that_starts_or_ends_counts_from_its_first_snapshot():
    process = Process()
    process.cpu[4], process.held[4] = 50.0, 50.0
    assert process.after(1.0, {1: 1.0}).compute_cpus == 0
    del process.cpu[3]
    assert process.after(1.0, {1: 1.0, 4: 0.5}).compute_cpus == pytest.approx(0.5)


def test_waits_for_the_gil_are_measured():
    process = Process()
    assert process.after(1.0, {}).gil_wait_s == pytest.approx(1e-5)
    process.release_s = 0.005
    assert process.after(1.0, {}).gil_wait_s == pytest.approx(0.005)


def test_the_time_without_a_cpu_is_no_wait_for_the_gil():
    process = Process()
    process.without_cpu_s = 0.01
    assert process.after(1.0, {}).gil_wait_s == pytest.approx(1e-5)
    unknown = Process(has_schedstat=False)
    assert unknown.after(1.0, {}).gil_wait_s == pytest.approx(1e-5)


@contextmanager
def running(work: Callable[[threading.Event], Any]) -> Iterator[threading.Thread]:
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(20)


def spots_of(thread: threading.Thread, is_enough: Callable[[LoopSpot], bool]) -> tuple[LoopSpot, ...]:
    """Sample a thread until a line has been found a given number of times."""
    sampler, found = StackSampler(read_file), []

    def sampled() -> bool:
        sampler.sample(thread.ident or 0, thread.native_id or 0)
        found[:] = sampler.take() + tuple(found)
        return any(map(is_enough, found))

    wait_until(sampled)
    return tuple(found)


def test_the_gil_is_given_up_soon_only_within_the_block_and_never_later_than_usual():
    usual_s = sys.getswitchinterval()
    with contextlib.suppress(ValueError), prompt_gil():
        assert sys.getswitchinterval() == pytest.approx(5e-4, rel=0.01)
        raise ValueError
    assert sys.getswitchinterval() == usual_s
    sys.setswitchinterval(1e-5)
    try:
        with prompt_gil():
            assert sys.getswitchinterval() == pytest.approx(1e-5, rel=0.1)
    finally:
        sys.setswitchinterval(usual_s)


def test_the_usual_interval_of_the_gil_returns_once_all_blocks_have_ended():
    usual_s = sys.getswitchinterval()
    first, second = prompt_gil(), prompt_gil()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() < usual_s
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual_s
    try:
        with prompt_gil():
            sys.setswitchinterval(0.002)
        assert sys.getswitchinterval() == pytest.approx(0.002), "a setting of the user stays"
    finally:
        sys.setswitchinterval(usual_s)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_has_the_usual_interval_of_the_gil():
    usual_s = sys.getswitchinterval()
    with prompt_gil():
        pid = os.fork()
        if not pid:
            os._exit(int(sys.getswitchinterval() != usual_s))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def sleeps_in_a_step(stop: threading.Event) -> None:
    while not stop.is_set():
        time.sleep(0.02)


def logs(stop: threading.Event) -> None:
    import json

    while not stop.is_set():
        json.dumps({str(number): [number] for number in range(2000)}, indent=1)


def computes(stop: threading.Event) -> None:
    layer = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(9)))
    while not stop.is_set():
        layer(torch.zeros(64, 64))


def works_in_python(stop: threading.Event) -> None:
    total = 0
    while not stop.is_set():
        for number in range(50_000):
            total += number


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a thread is in /proc")
def test_a_sample_names_the_line_that_sleeps():
    with running(sleeps_in_a_step) as thread:
        found = spots_of(thread, lambda spot: bool(spot.asleep) and "sleep(" in spot.text)
    spot = next(spot for spot in found if "sleep(" in spot.text)
    assert spot.place.startswith("test_telemetry_threads.py:")
    assert spot.place.endswith(" in sleeps_in_a_step")
    assert spot.kind == "call"


@pytest.mark.parametrize(("work", "kind"), [(logs, "aside"), (computes, "compute"), (works_in_python, "python")])
def test_a_sample_tells_torch_from_other_libraries_and_python(work, kind):
    def is_found(spot: LoopSpot) -> bool:
        return spot.kind == kind and spot.place.endswith(f" in {work.__name__}")

    with running(work) as thread:
        assert any(map(is_found, spots_of(thread, is_found)))


def holds_and_releases_the_gil(stop: threading.Event) -> None:
    content = bytes(1 << 20)
    while not stop.is_set():
        for _ in range(20):
            sum(range(10_000))
        hashlib.sha256(content).digest()


def test_a_line_that_never_releases_the_gil_is_found_as_often_as_others():
    # Without care, nearly all samples would find the line that releases the GIL.
    with running(holds_and_releases_the_gil) as thread:
        sampler = StackSampler(read_file)
        for _ in range(60):
            sampler.sample(thread.ident or 0, thread.native_id or 0)
    held = sum(spot.samples for spot in sampler.take() if "sha256" not in spot.text)
    assert held >= 15


class PythonDataset(torch.utils.data.Dataset):
    """A dataset whose samples are made by the user's Python code."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> int:
        return sum(range(100_000))


def test_code_of_the_user_that_a_loader_calls_counts_as_data():
    def loads(stop: threading.Event) -> None:
        for _ in torch.utils.data.DataLoader(PythonDataset(), 4):
            if stop.is_set():
                return

    with running(loads) as thread:
        found = spots_of(thread, lambda spot: spot.place.endswith("in __getitem__"))
    assert {spot.kind for spot in found if spot.place.endswith("in __getitem__")} == {"data"}


def test_a_line_of_a_validation_of_train_does_not_count():
    loader = colabkit.Loader(torch.zeros(8, 2), 4)
    samplers = {"step": StackSampler(read_file), "validate": StackSampler(read_file)}

    def sample(name: str) -> None:
        sampled = threading.Thread(
            target=samplers[name].sample, args=(threading.get_ident(), threading.get_native_id())
        )
        sampled.start()
        sampled.join()

    def step(batch: torch.Tensor) -> float:
        sample("step")
        return 0.5

    def validate() -> dict[str, float]:
        sample("validate")
        return {"loss": 0.5}

    colabkit.train(step, loader, epochs=1, validate=validate)
    assert samplers["step"].take()
    assert samplers["validate"].take() == ()


def test_a_thread_that_has_ended_is_not_found():
    sampler = StackSampler(read_file)
    sampler.sample(0, 0)
    assert sampler.take() == ()


def test_files_of_libraries_are_not_code_of_the_user(tmp_path):
    assert module_of(torch.nn.functional.__file__) == "torch.nn.functional"
    assert module_of(threading.__file__) == "threading"
    assert module_of(StackSampler.sample.__code__.co_filename) == "colabkit.foundation.telemetry.stacks"
    for file in (str(tmp_path / "train.py"), "<ipython-input-3-abc>", "/tmp/ipykernel_12/345.py", "<string>"):
        assert module_of(file) == ""
