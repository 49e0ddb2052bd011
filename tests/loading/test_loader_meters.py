"""Meters of a loader: GPU steps, and the bytes, CPU time, idle time and ready batches of worker processes."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from clocks import PromptClock
from simulated_gpu import SimulatedGpu
from torch.utils.data import Dataset, default_collate

from colabkit.foundation import LoaderMeters, PartSnapshot, meters
from colabkit.loading import Loader
from colabkit.loading.engine.options import LoaderOptions
from colabkit.loading.engine.process_engine import ProcessEngine, WorkerBatch


class Numbers(Dataset):
    """A dataset of sixteen samples of 12 bytes each: a tensor and a number."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index], dtype=torch.float32), index


def part_of(loader: Loader) -> PartSnapshot:
    (part,) = loader.meters.snapshot().parts
    return part


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "collate",
    [None, lambda samples: {"all": [default_collate(samples), "text"], "about": {"n": 1}}],
    ids=["tuple", "nested"],
)
def test_samples_loaded_one_by_one_count_the_bytes_of_their_tensors(collate, num_workers):
    loader = Loader(Numbers(), 4, num_workers=num_workers, collate_fn=collate)
    list(loader)
    part = part_of(loader)
    assert (part.name, part.samples, part.handled_bytes) == ("samples", 16, 16 * 12)


def test_no_gpu_step_is_lost_in_a_long_epoch(monkeypatch):
    monkeypatch.setattr(meters, "HostClock", PromptClock)
    loader = Loader(torch.zeros(1000), 1)
    list(loader)
    assert loader.meters.snapshot().steps == 1000


class CostlyObject:
    """An object that takes 20 ms of CPU time to pickle."""

    def __reduce__(self) -> Any:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return CostlyObject, ()


def test_the_cpu_time_of_a_worker_includes_sending_the_previous_batches():
    loader = Loader(Numbers(), 4, num_workers=1, prefetch_batches=1, collate_fn=lambda samples: CostlyObject())
    list(loader)
    assert part_of(loader).cpu_s >= 0.02


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("transform", [None, lambda batch: batch * 2], ids=["plain", "transformed"])
def test_tensors_without_a_size_count_as_dense(transform):
    loader = Loader(
        Numbers(), 4, num_workers=0, collate_fn=lambda s: torch.eye(len(s)).to_sparse(), transform=transform
    )
    assert len(list(loader)) == 4
    assert {part.handled_bytes for part in loader.meters.snapshot().parts} == {4 * 64}


class CountedNumbers(Numbers):
    """Numbers that count how many of them all processes have loaded."""

    def __init__(self) -> None:
        self.changed = multiprocessing.Condition()
        self.loaded = multiprocessing.Value("i", 0, lock=False)

    def __getitem__(self, index: int) -> Any:
        with self.changed:
            self.loaded.value += 1
            self.changed.notify_all()
        return super().__getitem__(index)

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.loaded.value >= count, 30)


def test_a_worker_is_idle_while_its_ready_batches_are_not_requested():
    samples, received = CountedNumbers(), []
    loader = Loader(samples, 2, num_workers=1, prefetch_batches=2)
    for number, _ in enumerate(loader, 1):
        received.append(time.perf_counter())
        # The worker makes at most two batches ahead.
        samples.wait_for(min(2 * (number + 2), 16))
    found = loader.meters.snapshot()
    # The last batch was requested after the fifth was received.
    assert part_of(loader).busy_s + part_of(loader).wait_s > 0.5 * (received[4] - received[0])
    assert found.occupancy_rate > 0.5
    assert 0 < found.queue_rate <= 1


def test_without_workers_nothing_waits_and_nothing_is_ready():
    loader = Loader(Numbers(), 2, num_workers=0)
    list(loader)
    found = loader.meters.snapshot()
    assert (part_of(loader).wait_s, found.ready, found.queue_room) == (0.0, 0, 0)


class GatedNumbers(Numbers):
    def __init__(self) -> None:
        self.gate = multiprocessing.Event()

    def __getitem__(self, index: int) -> Any:
        assert self.gate.wait(30)
        return super().__getitem__(index)


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("interrupts", [False, True])
def test_a_wait_for_worker_processes_is_published_and_can_be_interrupted(interrupts, persistent_workers):
    samples, waits = GatedNumbers(), []
    loader = Loader(samples, 4, num_workers=2, persistent_workers=persistent_workers)

    def listen(event: meters.Event) -> None:
        if isinstance(event, meters.DataWait):
            assert event.meters is loader.meters
            waits.append(event.wait_s)
            if len(waits) == 3:
                samples.gate.set()
                if interrupts:
                    signal.raise_signal(signal.SIGINT)

    unsubscribe = meters.subscribe(listen)
    try:
        with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
            assert torch.cat([numbers for _, numbers in loader]).tolist() == list(range(16))
    finally:
        unsubscribe()
    assert len(waits) >= 3
    assert 0 < waits[0] < waits[1] < waits[2] < 30


@contextmanager
def opened_by_waiting(samples: GatedNumbers) -> Iterator[list[float]]:
    """Open the gate at each wait that is published in the block, and list the seconds of these waits."""
    waits: list[float] = []

    def listen(event: meters.Event) -> None:
        if isinstance(event, meters.DataWait):
            waits.append(event.wait_s)
            samples.gate.set()

    unsubscribe = meters.subscribe(listen)
    try:
        yield waits
    finally:
        unsubscribe()


def test_a_wait_for_workers_that_persist_is_published_in_every_epoch():
    samples = GatedNumbers()
    loader = Loader(samples, 4, num_workers=2, persistent_workers=True)
    with opened_by_waiting(samples) as waits:
        for epoch in range(3):
            samples.gate.clear()
            assert torch.cat([numbers for _, numbers in loader]).tolist() == list(range(16))
            assert len(waits) > epoch


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_a_wait_for_worker_processes_is_published_if_batches_go_to_a_gpu(monkeypatch):
    samples, gpu = GatedNumbers(), SimulatedGpu()
    gpu.install(monkeypatch)
    with gpu, opened_by_waiting(samples) as waits:
        loader = Loader(samples, 4, num_workers=2, device="cuda")
        assert torch.cat([numbers.cpu() for _, numbers in loader]).tolist() == list(range(16))
    assert waits


class PlannedEngine(ProcessEngine):
    """An engine that builds the first batch when it is requested, and the three others before their requests.

    Sending a batch takes longer than building it, as between processes.
    """

    def _made_batches(self, *_: Any) -> Iterator[tuple[WorkerBatch, int, Any]]:
        time.sleep(0.001)
        made_at = time.perf_counter()
        for number in range(4):
            time.sleep(0.005)
            yield WorkerBatch(torch.zeros(1), 1, 0.0001, made_at=made_at), number + 1, number


def test_a_batch_built_before_its_request_was_ready_even_if_receiving_it_takes_long():
    counts = LoaderMeters()
    options = LoaderOptions(
        "x", 1, 0, torch.device("cpu"), None, None, None, "auto", "raise", 1, 2, False, None, counts
    )
    engine = PlannedEngine(options, Numbers())
    assert [batch.was_ready for batch in engine.batches(0, 0, iter(()))] == [False, True, True, True]
    assert (counts.queued, counts.queue_room) == (2 + 2 + 1, 4 * 2)
