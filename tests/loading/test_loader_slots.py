"""Host buffers begin where copies are fast; where pages cannot be locked, batches come and the user is told once."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import colabkit
from colabkit.loading.engine import gather
from colabkit.loading.engine.gather import PinnedSlots
from colabkit.loading.engine.process_engine import WorkerBatch


@pytest.fixture(autouse=True)
def unlocked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let no page be locked, and return a list that fills with what was tried."""
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
    """Lend several buffers, as the threads do."""
    lender = PinnedSlots(64, torch.device("cuda"))
    for size in (64, 10, 100):
        buffer = lender.lend(size)
        assert buffer.nbytes >= size
        buffer.fill_(size)


def pins() -> None:
    """Pin several batches, as torch does for worker processes."""
    for _ in range(3):
        batch = [torch.arange(3), {"name": torch.ones(2)}]
        made = WorkerBatch(batch, 3, 0.0).pin_memory()
        assert torch.equal(made.batch[0], torch.arange(3))
        assert torch.equal(made.batch[1]["name"], torch.ones(2))


@pytest.mark.parametrize("uses", [(lends,), (pins,), (lends, lends), (pins, pins), (lends, pins), (pins, lends)])
def test_the_user_is_told_once_that_memory_cannot_be_pinned_and_batches_come_all_the_same(uses, caplog):
    for use in uses:
        use()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "cannot be pinned (CUDA error: planned); they will be slower" in record.getMessage()


def test_memory_that_was_lent_in_inference_mode_can_be_filled_outside_it(unlocked):
    lender = PinnedSlots(64, torch.device("cuda"))
    with torch.inference_mode():
        lent = lender.lend(64)
    assert not lent.is_inference()


def test_a_lender_that_cannot_pin_tries_only_once(unlocked):
    lends()
    assert unlocked == ["slot"]


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
def test_rows_are_gathered_to_where_a_cache_line_begins(batch_size):
    loader = colabkit.Loader(np.zeros((6000, 640), np.uint8), batch_size)
    assert all(batch.data_ptr() % 64 == 0 for batch in loader)
