"""`prepare()` when packs are damaged, the drive refuses or hangs, others prepare too, and after any kill."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from far_mounts import FuseMount, has_fuse, wait_for
from reader_threads import reader_threads
from test_preparing import begin_anew, left_near, ready, samples
from trees import leftovers, needs

from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.packing.verification import verify
from colabkit.packs.preparing import api as preparing
from colabkit.packs.preparing.api import prepare
from colabkit.packs.preparing.prepared_pack import PreparedPack


@pytest.fixture(autouse=True)
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that `drive:` stands for."""
    folder = tmp_path / "drive"
    folder.mkdir()
    monkeypatch.setenv("COLABKIT_DRIVE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, near_storage: Path) -> Iterator[None]:
    """Look after each test for threads and half-done files that stayed."""
    yield
    assert left_near(near_storage) + leftovers(tmp_path) == []


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def unseal(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(4096))


def garble(path: Path) -> None:
    path.write_bytes(b"<html>quota</html>" * 1000)


def flip_a_sample(path: Path) -> None:
    field = open_pack(path).info.data_sets["X_train"]
    with path.open("r+b") as file:
        file.seek(field.offset)
        byte = file.read(1)
        file.seek(field.offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("damage", [cut, empty, unseal, garble])
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_damaged_near_pack_is_not_used_but_made_anew(image_tree, damage, is_saved):
    save_to = "drive:colabkit" if is_saved else None
    damage(ready(image_tree, save_to=save_to).path)
    again = ready(image_tree, save_to=save_to)
    assert again.report.way == ("saved" if is_saved else "packed")
    assert samples(again) == 24


@pytest.mark.parametrize("damage", [cut, empty, unseal, garble, flip_a_sample])
def test_a_damaged_saved_pack_is_not_used_but_replaced(image_tree, near_storage, damage):
    damage(ready(image_tree).report.saved_path)
    begin_anew(near_storage)
    again = ready(image_tree).report
    assert again.way == "packed"
    assert "it is damaged" in again.unused
    assert "The saved pack was not used: Cannot use " in repr(again)
    begin_anew(near_storage)
    assert ready(image_tree).report.way == "saved"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_a_drive_that_is_full_or_read_only_is_named_in_the_report_and_tried_again(
    image_tree, drive, file_hook, number, operation
):
    def refuse(at: str, path: Path) -> None:
        if at == operation and path.is_relative_to(drive):
            raise OSError(number, os.strerror(number), str(path))

    file_hook(refuse)
    report = ready(image_tree).report
    assert report.way == "packed"
    assert os.strerror(number) in report.unsaved
    assert "not saved: Cannot publish " in repr(report)
    file_hook(None)
    again = ready(image_tree).report
    assert again.way == "near"
    assert again.saved_path is not None


def test_a_drive_that_hangs_is_named_in_the_report(image_tree, tmp_path, monkeypatch):
    needs("FUSE", has_fuse())
    monkeypatch.setattr("colabkit.storage.sources.concurrency.STALLED_S", 0.3)
    monkeypatch.setattr("colabkit.storage.sources.concurrency._GRACE_S", 0.1)
    (tmp_path / "root").mkdir()
    with FuseMount(tmp_path / "far", tmp_path / "root") as mount:
        mount.hang()
        report = ready(image_tree, save_to=mount.point / "packs").report
        assert report.way == "packed"
        assert "does not answer" in report.unsaved
        mount.go_on()
        wait_for(lambda: not reader_threads(), "the end of the threads")


def test_the_second_of_two_at_once_waits_and_uses_the_pack_of_the_first(image_tree, file_hook, monkeypatch):
    has_begun, is_waiting, may_go_on = threading.Event(), threading.Event(), threading.Event()
    found: list[PreparedPack] = []
    monkeypatch.setattr(preparing, "ProgressBar", lambda *_: is_waiting.set() or contextlib.nullcontext(Mock()))

    def hold(operation: str, path: Path) -> None:
        if operation == "sync":
            file_hook(None)
            has_begun.set()
            assert may_go_on.wait(20)

    file_hook(hold)
    calls = [threading.Thread(target=lambda: found.append(ready(image_tree))) for _ in range(2)]
    for call, event in zip(calls, (has_begun, is_waiting), strict=True):
        call.start()
        assert event.wait(20)
    may_go_on.set()
    for call in calls:
        call.join(20)
    assert sorted(one.report.way for one in found) == ["near", "packed"]


def test_another_process_that_stands_still_is_not_waited_for(image_tree, near_storage, monkeypatch):
    path = ready(image_tree).path
    path.unlink()
    with (path.parent / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr("colabkit.foundation.locks.STALLED_S", 0.05)
        assert ready(image_tree).report.way == "saved"


def test_a_disk_without_locks_will_do(image_tree, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert ready(image_tree).report.way == "packed"
    assert ready(image_tree).report.way == "near"


@pytest.mark.parametrize("is_saved", [False, True])
def test_processes_at_once_all_end_right(image_tree, drive, near_storage, is_saved):
    if is_saved:
        ready(image_tree)
        begin_anew(near_storage)
    children = []
    for _ in range(4):
        if (pid := os.fork()) == 0:
            try:
                prepared = prepare(image_tree, progress=False)
                is_right = samples(prepared) == 24 and verify(prepared.path, progress=False).is_good
                os._exit(0 if is_right else 1)
            except BaseException:
                os._exit(2)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    report = ready(image_tree).report
    assert report.way == "near"
    assert [report.saved_path] == list(drive.glob("colabkit/*.h5"))


@pytest.mark.full
@pytest.mark.parametrize("is_saved", [False, True])
def test_killed_at_any_operation_the_next_run_ends_right(image_tree, near_storage, drive, killed_at, is_saved):
    shutil.rmtree(image_tree / "bees")
    kept = ready(image_tree).report.saved_path.read_bytes()
    for number in itertools.count(1):
        begin_anew(near_storage)
        if not is_saved:
            shutil.rmtree(drive / "colabkit")
        is_killed = killed_at(number, partial(prepare, image_tree, progress=False))
        prepared = ready(image_tree)
        assert prepared.path.read_bytes() == kept, f"after a kill at operation {number}"
        assert prepared.report.saved_path.read_bytes() == kept
        ready(image_tree, refresh=True)
        assert leftovers(near_storage) + leftovers(drive) == []
        if not is_killed:
            break
    assert number > (20 if is_saved else 30)
