"""Rows are gathered into pinned or pageable buffers. A buffer is reused only after all references to it are gone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from contract import make_pack
from sampling import sampled
from torch import Tensor

from colabkit.foundation import LoaderMeters
from colabkit.foundation.permutation import epoch_order
from colabkit.loading import Loader
from colabkit.loading.engine import batch_builder, gather, thread_engine
from colabkit.loading.engine.batch_builder import InlineGather
from colabkit.loading.engine.batches import BatchPlan, OrderPlanner
from colabkit.loading.engine.columns import columns_of
from colabkit.loading.engine.gather import GatherSlots, PinnedSlots, RowGather
from colabkit.loading.engine.process_engine import WorkerBatch
from colabkit.loading.engine.share import Share
from colabkit.packs import open_pack
from colabkit.sampler import SequentialOrder


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make pinning memory fail, and return a list that records the attempts."""
    tried: list[str] = []
    empty = torch.empty

    def without(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            tried.append("slot")
            raise RuntimeError("CUDA error: planned\nCompile with more flags")
        return empty(*args, **options)

    def fails(tensor: torch.Tensor) -> torch.Tensor:
        tried.append("batch")
        raise RuntimeError("CUDA error: planned\nCompile with more flags")

    monkeypatch.setattr(gather, "_is_warned", threading.Event())
    monkeypatch.setattr(torch, "empty", without)
    monkeypatch.setattr(torch.Tensor, "pin_memory", fails)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return tried


def lends() -> None:
    lender = PinnedSlots(64, torch.device("cuda"))
    for size in (64, 10, 100):
        buffer = lender.lend(size)
        assert buffer.nbytes >= size
        buffer.fill_(size)


def pins() -> None:
    """Pin several batches, as torch does for batches from worker processes."""
    for _ in range(3):
        batch = [torch.arange(3), {"name": torch.ones(2)}]
        made = WorkerBatch(batch, 3, 0.0).pin_memory()
        assert torch.equal(made.batch[0], torch.arange(3))
        assert torch.equal(made.batch[1]["name"], torch.ones(2))


@pytest.mark.usefixtures("unlocked")
@pytest.mark.parametrize("uses", [(lends,), (pins,), (lends, lends), (pins, pins), (lends, pins), (pins, lends)])
def test_unpinnable_memory_is_logged_once_and_batches_still_arrive(uses, caplog):
    for use in uses:
        use()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "memory cannot be pinned (CUDA error: planned), so copies to the GPU are slower" in record.getMessage()


def test_memory_lent_in_inference_mode_can_be_filled_outside_of_it(unlocked):
    lender = PinnedSlots(64, torch.device("cuda"))
    with torch.inference_mode():
        lent = lender.lend(64)
    assert not lent.is_inference()


def test_a_lender_that_cannot_pin_tries_only_once(unlocked):
    lends()
    assert unlocked == ["slot"]


@pytest.fixture
def pinned_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Allocate pageable instead of pinned memory, and return a list of the sizes that torch would pin."""
    sizes, empty = [], torch.empty

    def rounded(size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            sizes.append(1 << (size - 1).bit_length())
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", rounded)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return sizes


def test_pinned_buffers_take_little_more_memory_than_their_size_although_torch_rounds_up(pinned_bytes):
    # Bytes of batches of CIFAR-10 images, of 224x224 and of 256x256 images, and a power of two.
    for size in (8_280_064, 19_268_608, 25_166_848, 1 << 20):
        pinned_bytes.clear()
        lender = PinnedSlots(size, torch.device("cuda"), 6)
        buffers = [lender.lend(size) for _ in range(6)]
        assert sum(pinned_bytes) <= 1.2 * 6 * size
        assert [buffer.nbytes for buffer in buffers] == [size] * 6
        starts = sorted(buffer.data_ptr() for buffer in buffers)
        assert all(start % 64 == 0 for start in starts)
        assert all(later - start >= size for start, later in itertools.pairwise(starts))


def test_more_pinned_buffers_than_expected_and_single_large_ones_are_lent(pinned_bytes):
    lender = PinnedSlots(96, torch.device("cuda"), 2)
    buffers = [lender.lend(96) for _ in range(5)]
    assert len({buffer.data_ptr() for buffer in buffers}) == 5
    assert pinned_bytes == [128] * 5
    assert lender.lend(1000).nbytes == 1000


def test_a_pinned_buffer_whose_copy_has_not_ended_is_lent_again_only_if_there_is_no_other(pinned_bytes):
    lender, under_way, ended = PinnedSlots(320, torch.device("cuda"), 3), Mock(), Mock()
    under_way.query.return_value = False
    first = lender.lend(320)
    # Torch would pin 512 bytes for one buffer, and 1,024 for three.
    assert pinned_bytes == [1024]
    lender.give_back(first, under_way)
    others = [lender.lend(10) for _ in range(2)]
    assert len({buffer.data_ptr() for buffer in (first, *others)}) == 3
    under_way.synchronize.assert_not_called()
    assert lender.lend(10) is first
    under_way.synchronize.assert_called_once()
    lender.give_back(others[0], ended)
    assert lender.lend(10) is others[0]
    assert pinned_bytes == [1024]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4096, (2 << 20) - 1])
def test_small_buffers_begin_with_a_cache_line(size):
    found = gather.empty_bytes(size)
    assert (found.nbytes, found.dtype, found.ctypes.data % 64) == (size, np.uint8, 0)


@pytest.mark.parametrize("size", [2 << 20, (2 << 20) + 1, 6 << 20, 40_000_000])
def test_large_buffers_begin_with_a_huge_page_and_end_within_one(size):
    found = gather.empty_bytes(size)
    assert (found.nbytes, found.ctypes.data % (2 << 20)) == (size, 0)
    whole = found.base
    assert isinstance(whole, np.ndarray)
    assert found.ctypes.data + -(-size // (2 << 20)) * (2 << 20) <= whole.ctypes.data + whole.nbytes


@pytest.mark.parametrize("batch_size", [4, 3000])
def test_rows_are_gathered_to_addresses_aligned_to_cache_lines(batch_size):
    loader = Loader(np.zeros((6000, 640), np.uint8), batch_size)
    assert all(batch.data_ptr() % 64 == 0 for batch in loader)


WAYS_TO_HOLD: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda images: images,
    "a view": lambda images: images[3:],
    "a view of a view": lambda images: images[3:].flatten(1)[:, 5:].t(),
    "another type": lambda images: images.permute(0, 2, 3, 1).view(torch.int8),
    "NumPy": lambda images: images.numpy()[2:],
    "storage": lambda images: images.untyped_storage(),
    "a graph": lambda images: images.float().requires_grad_().mul(images),
}


def content(held: Any) -> bytes:
    """Return the bytes of a tensor, array or storage. For a tensor with a graph, check that its backward pass runs."""
    if isinstance(held, torch.UntypedStorage):
        held = torch.empty(0, dtype=torch.uint8).set_(held)
    if isinstance(held, Tensor) and held.grad_fn is not None:
        (held.sum()).backward(retain_graph=True)
        held = held.detach()
    return np.asarray(held).tobytes()


def plans_of(count: int) -> Iterator[BatchPlan]:
    return OrderPlanner(SequentialOrder(count), 32, False, Share()).plans(0, 0, 8)


@pytest.fixture
def small_gathers(monkeypatch):
    """Set the gather size to two batches of 32 images."""
    monkeypatch.setattr(batch_builder, "_GATHERED_BYTES", 2 * 32 * 16 * 16 * 3)


@pytest.fixture
def images(tmp_path):
    return open_pack(make_pack(tmp_path / "p.h5", (16, 16, 3), train=1000))["train"]


@pytest.mark.parametrize("way", WAYS_TO_HOLD)
def test_tensors_that_the_user_holds_never_change(images, small_gathers, way):
    snapshots = []
    for number, (batch, _) in enumerate(Loader(images, 32, shuffle=True)):
        if number % 3 == 0:
            held = WAYS_TO_HOLD[way](batch)
            snapshots.append((held, content(held)))
    assert len(snapshots) > 5
    for held, before in snapshots:
        assert content(held) == before


def test_two_buffers_alternate_when_batches_are_released(images, small_gathers):
    loader = Loader(images, 32, shuffle=True)
    for _ in range(3):
        places = {batch.untyped_storage().data_ptr() for batch, _ in loader}
        assert len(places) == 2


@pytest.mark.parametrize("count", sampled([1, 2, 31, 32, 33, 63, 64, 65, 700], 4))
@pytest.mark.parametrize("batch_size", sampled([1, 16, 32, 64, 1000], 3))
def test_every_sample_comes_once_for_any_gather_size(images, small_gathers, count, batch_size):
    loader = Loader(images.subset(range(count)), batch_size, shuffle=True)
    for epoch in range(2):
        found = [(batch.clone(), labels) for batch, labels in loader]
        order = torch.from_numpy(epoch_order(count, 0, epoch, 0, count))
        assert torch.equal(torch.cat([batch for batch, _ in found]), images.rows[order].permute(0, 3, 1, 2))
        assert torch.equal(torch.cat([labels for _, labels in found]), images.labels[:count][order])
        assert {len(batch) for batch, _ in found[:-1]} <= {batch_size}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64, torch.int16])
@pytest.mark.parametrize("shape", [(300,), (10, 40), (12, 12, 3)])
def test_rows_of_any_dtype_and_shape_are_unchanged(dtype, shape):
    rows = torch.randn(50, *shape).to(dtype)
    found = torch.cat([batch.clone() for batch in Loader(rows, 8)])
    assert found.dtype == dtype
    expected = rows if rows.ndim < 4 or dtype != torch.uint8 else rows.permute(0, 3, 1, 2)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.uint64, torch.complex128, torch.bits8]
)
@pytest.mark.parametrize("shape", [(), (3,), (5, 2)])
def test_small_rows_are_unchanged_even_for_dtypes_that_torch_cannot_index(dtype, shape):
    content = torch.randint(0, 256, (20, *shape, dtype.itemsize), dtype=torch.uint8)
    rows = content.view(-1).view(dtype).view(20, *shape)
    found = [batch.reshape(-1) for batch in Loader(rows, 8)]
    assert {batch.dtype for batch in found} == {dtype}
    assert torch.equal(torch.cat([batch.view(torch.uint8) for batch in found]), content.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(600,), (20, 40), (12, 12, 3), (20, 20, 1)])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_buffer_of_any_dtype_is_reused_as_soon_as_it_is_released(dtype, shape, is_contiguous):
    rows = torch.randint(0, 2, (64, *shape)).to(dtype)
    slots = GatherSlots(RowGather([rows], None, are_images=len(shape) == 3), 32, is_contiguous)

    def gathered(start: int) -> Tensor:
        return slots.gather(torch.arange(start, start + 32), (32,))[0]

    first = gathered(0)
    images = rows[:32].movedim(-1, 1) if len(shape) == 3 else rows[:32]
    assert torch.equal(first.contiguous().view(torch.uint8), images.contiguous().view(torch.uint8))
    assert first.is_contiguous() or not is_contiguous
    place, part = first.untyped_storage().data_ptr(), first[3:5]
    del first
    assert gathered(0).untyped_storage().data_ptr() != place
    assert torch.equal(part.contiguous().view(torch.uint8), gathered(0)[3:5].contiguous().view(torch.uint8))
    del part
    assert gathered(32).untyped_storage().data_ptr() == place


def test_few_buffers_are_cached_when_the_user_holds_all_batches(images, small_gathers):
    loader = Loader(images, 32)
    held = [batch for batch, _ in loader]
    rows = loader._pipeline.engine._inline
    assert isinstance(rows, InlineGather)
    assert len(rows._slots[0]._slots) <= gather._KEPT_SLOTS
    assert len({batch.untyped_storage().data_ptr() for batch in held}) > gather._KEPT_SLOTS


def test_a_loader_started_in_inference_mode_works_outside_of_it(images, small_gathers):
    loader = Loader(images, 32)
    with torch.inference_mode():
        before = [batch.clone() for batch, _ in loader]
    for (batch, _), expected in zip(loader, before, strict=True):
        assert not batch.is_inference()
        assert torch.equal(batch, expected)


def test_two_iterations_at_once_do_not_share_a_buffer(images, small_gathers):
    loader = Loader(images, 32)
    for (one, _), (other, _) in zip(loader, loader, strict=True):
        assert torch.equal(one, other)
        assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_a_sampler_may_yield_batches_larger_than_the_buffers(images, small_gathers):
    lists = [[*range(32)], [*range(32, 132)], [*range(132, 164)], [*range(164, 1000)]]
    loader = Loader(images, 32, sampler=lists)
    for _ in range(2):
        found = [batch.clone() for batch, _ in loader]
        assert [len(batch) for batch in found] == [32, 100, 32, 836]
        assert torch.equal(torch.cat(found), images.rows.permute(0, 3, 1, 2))


def test_threads_that_gather_at_the_same_time_do_not_share_a_buffer(images, small_gathers):
    columns = columns_of("test", images, None, as_dict=False)
    assert columns is not None
    rows, plans = InlineGather(columns, 32, LoaderMeters(), is_contiguous=False), [*plans_of(1000)]
    expected, wrong = images.rows.permute(0, 3, 1, 2), list[int]()

    def gather() -> None:
        for plan in plans * 20:
            for _, batches in rows.batches(plan):
                while batches:
                    batch = batches.pop()
                    if not torch.equal(batch.values[0], expected[batch.positions]):
                        wrong.append(batch.end)

    threads = [threading.Thread(target=gather) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_thread_takes_over_in_the_middle_of_a_plan_without_losing_a_batch(images, small_gathers, monkeypatch):
    # Make every gather and every step count as slow.
    monkeypatch.setattr(thread_engine, "_HAND_OVER_S", -1.0)
    loader = Loader(images, 32)
    assert loader._pipeline.engine.plan_batches == 128
    found, begun = list[Tensor](), list[int]()
    workers = thread_engine.ThreadPool
    monkeypatch.setattr(thread_engine, "ThreadPool", lambda *given: begun.append(len(found)) or workers(*given))
    for batch, _ in loader:
        found.append(batch.clone())
    assert torch.equal(torch.cat(found), images.rows.permute(0, 3, 1, 2))
    # The thread starts after five batches: one alone, then two gathers of two batches each.
    assert begun == [5]
    (gather,) = loader.meters.snapshot().parts
    assert gather.samples == 1000


def test_only_consecutive_slow_gathers_start_a_thread(images, monkeypatch):
    monkeypatch.setattr(thread_engine, "_HAND_OVER_S", 0.0)
    reported_s = iter([1.0, 1.0, 0.0, 1.0, 0.0, *[1.0] * 20])

    class TimedGather(InlineGather):
        def batches(self, plan):
            for _, batches in super().batches(plan):
                yield next(reported_s), batches

    loader = Loader(images, 32)
    engine = loader._pipeline.engine
    rows, plans = TimedGather(engine.columns, 32, loader.meters, is_contiguous=True), plans_of(1000)
    rows._batches_at_once = 1
    batches = engine._gather_inline(rows, plans)
    given = 0
    while True:
        try:
            next(batches)
        except StopIteration as end:
            left = end.value
            break
        given += 1
    # Three slow gathers in a row come only after the first five gathers.
    assert given == 8
    assert sum(len(plan.sizes) for plan in left) == 32 - 8


@pytest.mark.parametrize("taken", [1, 2, 4, 30])
def test_an_abandoned_iteration_counts_the_gathered_samples(images, small_gathers, taken):
    loader = Loader(images, 32)
    passing = iter(loader)
    for _ in range(taken):
        next(passing)
    passing.close()
    (gather,) = loader.meters.snapshot().parts
    assert gather.samples == 32 * (1 + 2 * (taken // 2))
