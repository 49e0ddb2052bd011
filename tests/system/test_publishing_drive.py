"""`publish()` to real mounts that hang, fail or die, and from processes that are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from far_mounts import FuseMount, has_fuse, wait_for
from published_files import NEW, NEW_FOLDER, OLD, OLD_FOLDER, assert_nothing_is_open, bring, content, write
from reader_threads import reader_threads
from sampling import sampled
from strikes import killed_runs
from trees import leftovers, needs

from colabkit.errors import (
    ColabkitError,
    Corrupt,
    TimedOut,
)
from colabkit.foundation import file_changes
from colabkit.storage import publishing


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Look after each test for threads and open files that stayed."""
    yield
    assert_nothing_is_open(tmp_path)


@pytest.fixture
def near(tmp_path: Path) -> Path:
    """Return a file to publish."""
    return write(tmp_path / "near" / "birds.h5", NEW)


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., FuseMount]:
    """Return a function that mounts `tmp_path/root` as a drive."""
    needs("FUSE", has_fuse())
    (tmp_path / "root").mkdir()

    def mounted(*faults: dict[str, Any], **options: Any) -> FuseMount:
        return FuseMount(tmp_path / "drive", tmp_path / "root", plan={"faults": list(faults)}, **options)

    return mounted


def test_a_kill_at_any_operation_shows_the_old_or_the_new_file_and_the_next_run_cleans_up(near, tmp_path, killed_at):
    final = write(tmp_path / "far" / "birds.h5", OLD)
    left = 0
    for number in killed_runs(killed_at, partial(bring, near, final)):
        assert content(final) in (OLD, NEW), f"at operation {number}"
        left += len(leftovers(tmp_path))
        bring(near, final)
        assert content(final) == NEW
        assert leftovers(tmp_path) == []
        write(final, OLD)
    assert number >= 3
    assert left


def test_a_kill_at_any_operation_shows_the_old_or_the_new_folder_except_between_its_two_renames(tmp_path, killed_at):
    source, final = write(tmp_path / "near" / "run", NEW_FOLDER), write(tmp_path / "far" / "run", OLD_FOLDER)
    between = 0
    for number in killed_runs(killed_at, partial(bring, source, final)):
        assert content(final) in (None, OLD_FOLDER, NEW_FOLDER), f"at operation {number}"
        if content(final) is None:
            between += 1
            hidden = [content(Path(path)) for path in leftovers(tmp_path / "far") if path.endswith("-old.partial")]
            assert OLD_FOLDER in hidden
        bring(source, final)
        assert content(final) == NEW_FOLDER
        assert leftovers(tmp_path) == []
        file_changes.remove(final)
        write(final, OLD_FOLDER)
    assert number >= 13
    assert between == 1


def test_bytes_that_are_read_back_differently_are_found_out_and_the_old_stays(near, drive, tmp_path):
    write(tmp_path / "root" / "birds.h5", OLD)
    fault = {"on": "read", "path": "/.colabkit-*.partial", "do": "change"}
    with drive(fault) as mount:
        with pytest.raises(Corrupt, match=r"other bytes of 'birds\.h5' were read back"):
            bring(near, mount.point)
        assert mount.faults
        assert content(mount.point / "birds.h5") == OLD
        assert leftovers(mount.point) == []
        assert bring(near, mount.point, verify="size").replaced
    assert content(tmp_path / "root" / "birds.h5") == NEW


def test_a_size_that_differs_is_found_out_without_reading_back(near, drive):
    with drive({"on": "open", "path": "/.colabkit-*.partial", "do": "change", "count": 1}) as mount:
        with pytest.raises(Corrupt, match=r"15001 bytes of 'birds\.h5' arrived, all 15000"):
            bring(near, mount.point, verify="size")
        assert mount.read_bytes == 0
        assert leftovers(mount.point) == []


def test_a_drive_without_locks_is_published_to_and_sends_later(near, drive, tmp_path):
    source = write(tmp_path / "near" / "run", NEW_FOLDER)
    with drive(locks=False) as mount:
        assert not bring(near, mount.point).is_sent
        assert "flush()" in repr(bring(source, mount.point))
    assert content(tmp_path / "root" / "birds.h5") == NEW
    assert content(tmp_path / "root" / "run") == NEW_FOLDER
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("operation", sampled(["create", "write", "sync", "rename"], 2))
def test_a_drive_that_hangs_is_one_error_in_time_and_what_was_begun_is_taken_back_when_it_answers(
    near, drive, tmp_path, file_hook, monkeypatch, operation
):
    monkeypatch.setattr(publishing, "STALLED_S", 0.5)
    monkeypatch.setattr("colabkit.storage.sources.concurrency._GRACE_S", 0.1)
    with drive() as mount:
        file_hook(lambda at, path: mount.hang() if at == operation else None)
        started = time.monotonic()
        with pytest.raises(TimedOut, match="answered nothing for 1 s"):
            bring(near, mount.point)
        assert time.monotonic() - started < 5
        file_hook(None)
        mount.go_on()
        wait_for(lambda: not reader_threads(), "the end of the thread")
        assert content(mount.point / "birds.h5") in ((None, NEW) if operation == "rename" else (None,))
        assert leftovers(mount.point) == []
        bring(near, mount.point)
    assert content(tmp_path / "root" / "birds.h5") == NEW


def test_a_drive_that_hangs_and_is_taken_away_leaves_what_the_next_run_removes(near, drive, file_hook, monkeypatch):
    monkeypatch.setattr(publishing, "STALLED_S", 0.5)
    with drive() as mount:
        file_hook(lambda at, path: mount.hang() if at == "write" else None)
        with pytest.raises(TimedOut):
            bring(near, mount.point)
        file_hook(None)
    wait_for(lambda: not reader_threads(), "the end of the thread")
    with drive() as mount:
        assert leftovers(mount.point)
        bring(near, mount.point)
        assert content(mount.point / "birds.h5") == NEW
        assert leftovers(mount.point) == []


def test_a_drive_that_dies_is_one_typed_line(near, drive, file_hook):
    with drive() as mount:
        file_hook(lambda at, path: mount.kill() if at == "sync" else None)
        with pytest.raises(ColabkitError, match=r"dead|input/output error|timed out"):
            bring(near, mount.point)


def test_an_interrupt_while_the_drive_hangs_comes_through_at_once(near, drive, file_hook):
    pressed: list[float] = []

    def hang(at: str, path: Path) -> None:
        if at == "write":
            mount.hang()
            pressed.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    with drive() as mount:
        file_hook(hang)
        with pytest.raises(KeyboardInterrupt):
            bring(near, mount.point)
        assert time.monotonic() - pressed[0] < 2
        mount.go_on()
        wait_for(lambda: not reader_threads(), "the end of the thread")
        assert os.listdir(mount.point) == []
