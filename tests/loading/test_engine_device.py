"""Copies to a GPU overlap with training and never race with it, on a simulated GPU."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from fake_nvjpeg import FakeNvjpeg
from pictures import photo, saved
from PIL import Image
from simulated_gpu import DEVICE, Event, Host, SimulatedGpu, Stream

from colabkit.errors import LoaderFailed
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.loading.engine import thread_engine
from colabkit.loading.engine.batch_builder import BatchBuilder
from colabkit.loading.engine.batches import BatchGroup, BatchPlan
from colabkit.loading.engine.device_decoder import idle_stream
from colabkit.packs import FileDataset

SAMPLES, BATCH_SIZE, ROW_BYTES = 640, 16, 1024
COPY_S = 0.002


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    simulated = SimulatedGpu(copy_bytes_per_s=BATCH_SIZE * ROW_BYTES / COPY_S)
    simulated.install(monkeypatch)
    with simulated:
        yield simulated


class VirtualPool:
    """A `ThreadPool` with one thread in the virtual time of a simulated GPU; each group takes `build_s` seconds."""

    def __init__(
        self,
        gpu: SimulatedGpu,
        build_s: float,
        plans: Iterator[BatchPlan],
        builder: BatchBuilder,
        threads: int,
        groups_ahead: int,
        on_wait: Any,
    ) -> None:
        self.gpu, self.build_s, self.plans, self.builder, self.room = gpu, build_s, plans, builder, groups_ahead
        self.worker = Host()
        # Finished groups, each with the virtual time and the known operations of the worker at that moment.
        self.done: deque[tuple[Host, BatchGroup | None]] = deque()

    def start(self) -> None:
        self.worker.wait_for(self.gpu.host)

    def ready(self) -> int:
        self.catch_up()
        return sum(done.now <= self.gpu.host.now for done, _ in self.done)

    def take(self, timeout: float) -> BatchGroup | None:
        self.catch_up()
        if not self.done:
            self.build()
        done, group = self.done.popleft()
        self.gpu.host.wait_for(done)
        return group

    def make_room(self) -> None:
        self.catch_up()
        if not self.room:
            self.worker.wait_for(self.gpu.host)
        self.room += 1

    def catch_up(self) -> None:
        """Build the groups that the worker begins before the current time of the host."""
        while self.room and self.worker.now <= self.gpu.host.now:
            self.build()

    def build(self) -> None:
        assert self.room
        self.room -= 1
        plan = next(self.plans, None)
        if plan is None:
            self.room = 0
            self.finish(None)
            return
        with self.gpu.acting_as(self.worker):
            group = self.builder.begin(plan)
            self.gpu.write_on_host(group.buffer)
            for piece in group.pieces:
                self.builder.fill(group, *piece)
            group.batches = list(self.builder.finish(group, len(plan.indices)))
        self.worker.now += self.build_s
        self.finish(group)

    def finish(self, group: BatchGroup | None) -> None:
        done = Host()
        done.wait_for(self.worker)
        self.done.append((done, group))

    def close(self) -> None:
        pass


def arrays() -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(SAMPLES * ROW_BYTES, dtype=np.uint32).astype(np.uint8).reshape(SAMPLES, ROW_BYTES)
    return rows, np.arange(SAMPLES)


STEPS = {
    # Columns, in seconds: building a batch, its step on the GPU, its step on the host; whether the host waits for each
    # step; the slowest part.
    "the GPU, and the host is far ahead of it": (0.001, 0.010, 0.0005, False, 0.010),
    "the GPU, by little more than the copy": (0.001, 0.0025, 0.0005, False, 0.0025),
    "the GPU, and the host waits for each step": (0.001, 0.010, 0.0005, True, 0.010),
    "the worker": (0.010, 0.002, 0.0005, False, 0.010),
    "the worker, by little more than the GPU": (0.010, 0.009, 0.0005, False, 0.010),
    "the worker, and the host waits for each step": (0.010, 0.002, 0.0005, True, 0.010),
    "the host": (0.001, 0.002, 0.010, False, 0.010),
}


@pytest.mark.every_case
@pytest.mark.parametrize("limit", STEPS)
def test_copies_are_hidden_whatever_limits_the_speed(gpu, monkeypatch, limit):
    build_s, compute_s, launch_s, waits, slowest_s = STEPS[limit]
    monkeypatch.setattr(thread_engine, "ThreadPool", partial(VirtualPool, gpu, build_s))
    loader = Loader(arrays(), BATCH_SIZE, device="cuda", keep="ram", prefetch_batches=2)
    ends: list[float] = []
    for batch in loader:
        gpu.compute(compute_s, *batch)
        gpu.host.now += launch_s
        if waits:
            gpu.current.record_event().synchronize()
        ends.append(gpu.default.ends)
    # The first copies cannot overlap with compute.
    first = 5
    assert (ends[-1] - ends[first]) / (len(ends) - 1 - first) < 1.01 * slowest_s


def use(gpu: SimulatedGpu, batch: Any) -> None:
    gpu.compute(0.010, *batch)


def new_memory(size: int = BATCH_SIZE * ROW_BYTES) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1)


@pytest.fixture
def prompt_worker(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build batches as soon as there is room, so that copies are always in progress."""
    monkeypatch.setattr(thread_engine, "ThreadPool", partial(VirtualPool, gpu, 0.0))


@pytest.mark.usefixtures("prompt_worker")
@pytest.mark.parametrize("keep", ["ram", "gpu"])
def test_batches_may_be_requested_in_alternating_streams(gpu, keep):
    rows, _ = arrays()
    loader = Loader(arrays(), BATCH_SIZE, shuffle=True, device="cuda", keep=keep)
    streams = [gpu.default, torch.cuda.Stream(), torch.cuda.Stream()]
    batches = iter(loader)
    for number in range(len(loader)):
        with gpu.stream(streams[number % 3]):
            images, numbers = next(batches)
            # Do not use `cpu()`, which would make the host wait.
            assert np.array_equal(images.numpy(), rows[numbers.numpy()])
            use(gpu, (images, numbers))
            del images, numbers
        gpu.write_to_free_memory()


@pytest.mark.usefixtures("prompt_worker")
@pytest.mark.parametrize("keep", ["ram", "gpu"])
def test_memory_is_not_used_again_before_the_copies_of_an_abandoned_pass_end(gpu, keep):
    side = torch.cuda.Stream()
    batches = iter(Loader(arrays(), BATCH_SIZE, device="cuda", keep=keep))
    with gpu.stream(side):
        use(gpu, next(batches))
    # The garbage collector may close the iteration in a thread with another current stream.
    batches.close()
    for stream in (side, gpu.default):
        with gpu.stream(stream):
            held = [new_memory() for _ in range(10)]
            del held


@pytest.mark.usefixtures("prompt_worker")
def test_memory_is_not_used_again_before_the_copy_of_an_interrupted_request_ends(gpu, monkeypatch):
    # There is no later copy for which the streams would wait.
    batches = iter(Loader(tuple(rows[:BATCH_SIZE] for rows in arrays()), BATCH_SIZE, device="cuda", keep="ram"))
    wait_event = Stream.wait_event

    def interrupt(stream: Stream, event: Event) -> None:
        if stream is not gpu.default:
            wait_event(stream, event)
            return
        monkeypatch.setattr(Stream, "wait_event", wait_event)
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "wait_event", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    gc.collect()
    held = [new_memory() for _ in range(10)]
    del held


@pytest.mark.usefixtures("prompt_worker")
@pytest.mark.parametrize("keep", ["ram", "gpu"])
def test_deleting_a_loader_frees_its_memory_without_a_collection(gpu, keep):
    gc.disable()
    try:
        loader = Loader(arrays(), BATCH_SIZE, device="cuda", keep=keep)
        for batch in loader:
            use(gpu, batch)
        del batch
        freed = weakref.ref(loader)
        del loader
        assert freed() is None
        assert gpu.allocated == 0
    finally:
        gc.enable()


@pytest.mark.usefixtures("prompt_worker")
def test_rows_are_not_freed_while_another_stream_reads_them(gpu):
    loader = Loader(arrays(), BATCH_SIZE, device="cuda", keep="gpu")
    with gpu.stream(torch.cuda.Stream()):
        gpu.compute(1.0)
        next(iter(loader))
    del loader
    new_memory(SAMPLES * ROW_BYTES)


def test_batches_for_another_gpu_than_the_current_one_create_no_context_on_it(monkeypatch):
    second = torch.device("cuda", 1)
    with SimulatedGpu(device=second) as gpu:
        gpu.install(monkeypatch)
        for images, numbers in Loader(arrays(), BATCH_SIZE, device="cuda:1", keep="ram"):
            assert images.device == numbers.device == second
        with idle_stream(second):
            pass
        readings = meters.StepValues()
        readings.note({"loss": images[0, 0]})
        readings.read()
    assert gpu.contexts == {1}


@pytest.mark.usefixtures("prompt_worker")
def test_every_copy_is_counted_once_it_has_ended(gpu):
    loader = Loader(arrays(), BATCH_SIZE, device="cuda", keep="ram")
    for batch in loader:
        use(gpu, batch)
    transferred = {part.name: part for part in loader.meters.snapshot().parts}["transfer"]
    assert transferred.samples < SAMPLES
    gpu.host.now += 100
    transferred = {part.name: part for part in loader.meters.snapshot().parts}["transfer"]
    assert (transferred.samples, transferred.handled_bytes) == (SAMPLES, SAMPLES * (ROW_BYTES + 8))
    assert transferred.busy_s == pytest.approx(SAMPLES * (ROW_BYTES + 8) / gpu.copy_bytes_per_s)


@pytest.mark.usefixtures("prompt_worker")
def test_the_host_makes_most_calls_once_per_group_of_batches(gpu):
    loader = Loader(arrays(), BATCH_SIZE, device="cuda", keep="ram")
    batches = len(loader)
    gpu.calls.clear()
    for batch in loader:
        del batch
    assert batches == 40
    # The groups have 1, 3, 9 and 27 batches. Each group has two fields; each field is copied once for all batches of
    # the group, and the copies are timed.
    groups = 4
    assert gpu.calls["copy"] == 2 * groups
    assert gpu.calls["stream"] == groups
    # The copy waits for free memory, and the user's stream for the copy.
    assert gpu.calls["wait_event"] == 2 * groups
    # Each batch begins and ends at an event. Each group has further events, for the timing of its copies and waits, and
    # for free memory.
    assert gpu.calls["record"] <= 2 * batches + 5 * groups


@pytest.mark.usefixtures("prompt_worker")
def test_a_batch_that_is_kept_does_not_keep_the_other_fields(gpu):
    loader = Loader(arrays(), BATCH_SIZE, device="cuda", keep="ram")
    labels = [numbers for _, numbers in loader]
    del loader
    assert torch.equal(torch.cat([each.cpu() for each in labels]), torch.arange(SAMPLES))
    assert gpu.allocated < SAMPLES * ROW_BYTES / 4


@pytest.mark.usefixtures("prompt_worker")
@pytest.mark.parametrize("keep", ["ram", "gpu"])
@pytest.mark.parametrize("requests_in", [nullcontext, torch.inference_mode])
def test_a_batch_may_change_in_place_while_autograd_needs_another(gpu, requests_in, keep):
    rows = torch.rand(SAMPLES, 4)
    weight = torch.ones(4, requires_grad=True)
    with requests_in():
        first, second = itertools.islice(Loader(rows, BATCH_SIZE, device="cuda", keep=keep), 4, 6)
    loss = (weight * first).sum()
    second.mul_(2)
    loss.backward()
    assert torch.equal(weight.grad, first.sum(0))
    assert torch.equal(second, 2 * rows[5 * BATCH_SIZE :][:BATCH_SIZE])


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_batches_made_on_the_gpu_are_handed_over_without_a_copy_and_without_a_race(gpu):
    made: list[torch.Tensor] = []

    def collate(_: list[int]) -> torch.Tensor:
        gpu.compute(0.010)
        made.append(new_memory())
        return made[-1]

    loader = Loader(range(20), 4, device="cuda", collate_fn=collate, num_workers=0)
    for batch in loader:
        assert batch is made.pop(0)
        use(gpu, [batch])
        del batch
        new_memory()
    assert gpu.allocated == 0


class Graph:
    """A custom batch with its own method `to`."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


def collated(samples: list[int]) -> dict[str, Any]:
    numbers = torch.tensor(samples)
    return {"numbers": numbers, "sparse": torch.eye(len(samples)).to_sparse(), "graph": Graph(2 * numbers)}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_sparse_tensors_and_custom_objects_are_moved_in_the_stream_of_the_user(gpu):
    batches = Loader(range(8), 4, device="cuda", collate_fn=collated, num_workers=0)
    with gpu.stream(torch.cuda.Stream()):
        for first, batch in zip((0, 4), batches, strict=True):
            assert batch["numbers"].tolist() == [*range(first, first + 4)]
            assert torch.equal(batch["sparse"].to_dense(), torch.eye(4))
            assert batch["graph"].nodes.device == DEVICE
            use(gpu, [batch["numbers"], batch["graph"].nodes])


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_the_batch_sizes_of_packed_sequences_stay_on_the_cpu(gpu):
    def collate(lengths: list[int]) -> Any:
        return torch.nn.utils.rnn.pack_sequence([torch.arange(1 + length) for length in lengths], enforce_sorted=False)

    for batch in Loader(range(8), 4, device="cuda", collate_fn=collate, num_workers=0):
        assert (batch.data.device, batch.batch_sizes.device.type) == (DEVICE, "cpu")
        use(gpu, [batch.data])


@pytest.mark.usefixtures("prompt_worker")
def test_a_gpu_without_memory_for_the_next_copy_still_gets_its_batches(gpu):
    batches = iter(Loader(arrays(), BATCH_SIZE, device="cuda", keep="ram", prefetch_batches=2))
    held, found = deque([next(batches)], maxlen=2), []
    gpu.total_bytes = gpu.reserved
    for batch in batches:
        held.append(batch)
        found.append(batch[1].numpy().copy())
        del batch
    assert gpu.shortages
    assert np.array_equal(np.concatenate(found), np.arange(BATCH_SIZE, SAMPLES))


class UnmovableBatch(dict[str, torch.Tensor]):
    """A batch that cannot be copied."""

    def update(self, *_: Any, **__: Any) -> None:
        raise ValueError("planned")


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_memory_is_not_used_again_before_the_copies_of_a_batch_end_that_cannot_be_sent(gpu):
    def collate(_: list[int]) -> UnmovableBatch:
        return UnmovableBatch(rows=torch.zeros(BATCH_SIZE, ROW_BYTES, dtype=torch.uint8))

    loader = Loader(range(8), 4, device="cuda", collate_fn=collate, num_workers=0)
    # With a real GPU, pinning the batch fails first, and the loader reports that.
    with pytest.raises((ValueError, LoaderFailed), match="planned"):
        next(iter(loader))
    # Collect garbage, because the traceback keeps the memory alive.
    gc.collect()
    assert gpu.allocated == 0
    new_memory()


@pytest.fixture
def jpegs(tmp_path: Path) -> FileDataset:
    for number in range(9):
        image = Image.fromarray(photo(40 + number, 50, seed=number))
        (tmp_path / f"{number}.jpg").write_bytes(saved(image, "JPEG"))
    return FileDataset(tmp_path, labels=None)


@pytest.mark.usefixtures("prompt_worker")
def test_images_without_labels_are_decoded_on_the_gpu_and_race_with_nothing(gpu, monkeypatch, jpegs):
    monkeypatch.setattr(torchvision.io, "decode_jpeg", FakeNvjpeg())
    loader = Loader(jpegs, 4, size=16, device="cuda", decode="gpu", channels_last=False)
    with gpu.stream(torch.cuda.Stream()):
        batches = [*loader]
        use(gpu, batches)
        assert [len(images) for images in batches] == [4, 4, 1]
        del batches
    for stream in gpu.streams:
        with gpu.stream(stream):
            new_memory()


@pytest.mark.usefixtures("prompt_worker")
def test_memory_is_not_used_again_before_a_decoder_has_ended_that_failed(gpu, monkeypatch, jpegs):
    fake, of_nvjpeg = FakeNvjpeg(), torch.cuda.Stream()

    def decode(files: list[torch.Tensor], mode: Any, device: torch.device) -> list[torch.Tensor]:
        # Like torchvision, write to the memory in a separate stream, and free the memory after an error.
        of_nvjpeg.run(1.0, writes=[torch.empty(40 * 50 * 3, dtype=torch.uint8, device=device)])
        return fake(files, mode, device)

    monkeypatch.setattr(torchvision.io, "decode_jpeg", decode)
    loader = Loader(jpegs, 3, size=16, device="cuda", decode="gpu")
    fake.rejected = {jpegs.encoded(index) for index in range(9)}
    assert [len(images) for images in loader] == [3, 3, 3]
