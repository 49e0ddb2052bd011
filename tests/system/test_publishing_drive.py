"""`publish()` to real mounts that hang, fail or die, and from killed processes."""

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
from strikes import kills
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
    yield
    assert_nothing_is_open(tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write(tmp_path / "local" / "birds.h5", NEW)


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., FuseMount]:
    needs("FUSE", has_fuse())
    (tmp_path / "root").mkdir()

    def mounted(*faults: dict[str, Any], **options: Any) -> FuseMount:
        return FuseMount(tmp_path / "drive", tmp_path / "root", plan={"faults": list(faults)}, **options)

    return mounted


def test_a_kill_at_any_operation_leaves_the_old_or_the_new_file_and_the_next_call_cleans_up(local, tmp_path, killed_at):
    final = write(tmp_path / "remote" / "birds.h5", OLD)
    left = 0
    for number in kills(killed_at, partial(bring, local, final)):
        assert content(final) in (OLD, NEW), f"at operation {number}"
        left += len(leftovers(tmp_path))
        bring(local, final)
        assert content(final) == NEW
        assert leftovers(tmp_path) == []
        write(final, OLD)
    assert number >= 3
    assert left


def test_a_kill_at_any_operation_leaves_the_old_or_the_new_folder_except_between_its_two_renames(tmp_path, killed_at):
    source, final = write(tmp_path / "local" / "run", NEW_FOLDER), write(tmp_path / "remote" / "run", OLD_FOLDER)
    between = 0
    for number in kills(killed_at, partial(bring, source, final)):
        assert content(final) in (None, OLD_FOLDER, NEW_FOLDER), f"at operation {number}"
        if content(final) is None:
            between += 1
            hidden = [content(Path(path)) for path in leftovers(tmp_path / "remote") if path.endswith("-old.partial")]
            assert OLD_FOLDER in hidden
        bring(source, final)
        assert content(final) == NEW_FOLDER
        assert leftovers(tmp_path) == []
        file_changes.remove(final)
        write(final, OLD_FOLDER)
    assert number >= 13
    assert between == 1


def test_different_bytes_when_read_back_raise_and_keep_the_old_file(local, drive, tmp_path):
    write(tmp_path / "root" / "birds.h5", OLD)
    fault = {"on": "read", "path": "/.colabkit-*.partial", "do": "change"}
    with drive(fault) as mount:
        with pytest.raises(Corrupt, match=r"bytes of 'birds\.h5' that were read back differ"):
            bring(local, mount.point)
        assert mount.faults
        assert content(mount.point / "birds.h5") == OLD
        assert leftovers(mount.point) == []
        assert bring(local, mount.point, verify="size").replaced
    assert content(tmp_path / "root" / "birds.h5") == NEW


def test_a_different_size_raises_without_reading_back(local, drive):
    with drive({"on": "open", "path": "/.colabkit-*.partial", "do": "change", "count": 1}) as mount:
        with pytest.raises(Corrupt, match=r"copy of 'birds\.h5' has 15,001 bytes; expected 15,000 bytes"):
            bring(local, mount.point, verify="size")
        assert mount.read_bytes == 0
        assert leftovers(mount.point) == []


def test_a_drive_without_locks_works_and_uploads_later(local, drive, tmp_path):
    source = write(tmp_path / "local" / "run", NEW_FOLDER)
    with drive(locks=False) as mount:
        assert not bring(local, mount.point).is_sent
        assert "flush()" in repr(bring(source, mount.point))
    assert content(tmp_path / "root" / "birds.h5") == NEW
    assert content(tmp_path / "root" / "run") == NEW_FOLDER
    assert leftovers(tmp_path) == []


@pytest.mark.full
@pytest.mark.parametrize("operation", sampled(["create", "write", "sync", "rename"], 2))
def test_a_hanging_drive_raises_in_time_and_the_unfinished_copy_is_removed_when_it_responds(
    local, drive, tmp_path, file_hook, monkeypatch, operation
):
    monkeypatch.setattr(publishing, "PUBLISH_STALLED_S", 0.5)
    monkeypatch.setattr("colabkit.storage.sources.concurrency._GRACE_S", 0.1)
    with drive() as mount:
        file_hook(lambda at, path: mount.hang() if at == operation else None)
        started = time.monotonic()
        with pytest.raises(TimedOut, match="not responded for 1 s"):
            bring(local, mount.point)
        assert time.monotonic() - started < 5
        file_hook(None)
        mount.go_on()
        wait_for(lambda: not reader_threads(), "the end of the thread")
        assert content(mount.point / "birds.h5") in ((None, NEW) if operation == "rename" else (None,))
        assert leftovers(mount.point) == []
        bring(local, mount.point)
    assert content(tmp_path / "root" / "birds.h5") == NEW


@pytest.mark.full
def test_the_next_call_removes_what_is_left_on_a_drive_that_hung_and_was_unmounted(
    local, drive, file_hook, monkeypatch
):
    monkeypatch.setattr(publishing, "PUBLISH_STALLED_S", 0.5)
    with drive() as mount:
        file_hook(lambda at, path: mount.hang() if at == "write" else None)
        with pytest.raises(TimedOut):
            bring(local, mount.point)
        file_hook(None)
    wait_for(lambda: not reader_threads(), "the end of the thread")
    with drive() as mount:
        assert leftovers(mount.point)
        bring(local, mount.point)
        assert content(mount.point / "birds.h5") == NEW
        assert leftovers(mount.point) == []


def test_a_drive_that_dies_raises_one_line(local, drive, file_hook):
    with drive() as mount:
        file_hook(lambda at, path: mount.kill() if at == "sync" else None)
        with pytest.raises(ColabkitError, match=r"dead|input/output error|timed out"):
            bring(local, mount.point)


@pytest.mark.full
def test_an_interrupt_works_at_once_while_the_drive_hangs(local, drive, file_hook):
    pressed: list[float] = []

    def hang(at: str, path: Path) -> None:
        if at == "write":
            mount.hang()
            pressed.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    with drive() as mount:
        file_hook(hang)
        with pytest.raises(KeyboardInterrupt):
            bring(local, mount.point)
        assert time.monotonic() - pressed[0] < 2
        mount.go_on()
        wait_for(lambda: not reader_threads(), "the end of the thread")
        assert os.listdir(mount.point) == []
