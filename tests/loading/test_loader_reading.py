"""`FileReadAhead`: what is announced is read, what is cached is not, and nobody waits for what does not come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from packed_files import photos
from reader_threads import comes_true
from test_loader_files import Far

from colabkit.foundation import LoaderMeters
from colabkit.loading.engine.batches import BatchPlan
from colabkit.loading.engine.read_ahead import FileReadAhead
from colabkit.packs import FileDataset
from colabkit.storage.sources import concurrency


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    """Return photos whose reads can be held up."""
    monkeypatch.setattr(concurrency, "_TICK_S", 0.01)
    found = Far(photos(tmp_path / "tree", 8))
    yield found
    found.go_on()


def plan_of(start: int, stop: int) -> BatchPlan:
    indices = np.arange(start, stop)
    return BatchPlan(indices, indices, (stop - start,), (stop,))


def test_what_is_noted_while_all_reads_hang_is_asked_for_too(far):
    far.may_read = lambda _: False
    with closing(FileReadAhead(FileDataset(far), lambda _: False, LoaderMeters())) as ahead:
        ahead.announce(plan_of(0, 3))
        assert comes_true(lambda: sum(far.reads.values()) == 3)
        ahead.announce(plan_of(3, 8))
        assert comes_true(lambda: sum(far.reads.values()) == 8)
        far.go_on()
        assert [ahead.fetch(number) for number in range(8)] == [FileDataset(far).encoded(number) for number in range(8)]


def test_files_that_turn_out_to_be_kept_are_let_go_of_whether_they_came_or_not(far):
    kept: set[int] = set()
    with closing(FileReadAhead(FileDataset(far), kept.__contains__, LoaderMeters())) as ahead:
        kept.add(2)
        ahead.announce(plan_of(0, 4))
        assert comes_true(lambda: len(ahead._found) == 3)
        assert far.reads["ants/002.jpg"] == 0
        for number in range(4):
            ahead.forget(number)
        assert (ahead._found, ahead._held_bytes) == ({}, 0)
        far.may_read = lambda _: False
        ahead.announce(plan_of(4, 6))
        assert comes_true(lambda: far.reads["ants/005.jpg"] == 1)
        ahead.forget(4)
        far.go_on()
        assert ahead.fetch(5)
        assert comes_true(lambda: not ahead._forgotten)
        assert (ahead._found, ahead._held_bytes) == ({}, 0)


def test_a_file_that_another_thread_kept_before_it_was_asked_for_is_not_waited_for(far):
    kept: set[int] = set()
    far.may_read = lambda _: False
    with closing(FileReadAhead(FileDataset(far), kept.__contains__, LoaderMeters())) as ahead:
        ahead.announce(plan_of(0, 3))
        assert comes_true(lambda: sum(far.reads.values()) == 3)
        kept.add(4)
        ahead.announce(plan_of(3, 6))
        assert ahead.fetch(4) is None
        far.go_on()
        assert ahead.fetch(5)
