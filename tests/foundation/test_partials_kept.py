"""Kept partials survive their process, and each is used by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path

import pytest
from forks import in_fork, is_killed_at, make_pair, pair_text
from trees import leftovers

from colabkit.errors import TargetExists
from colabkit.foundation import file_changes, locks
from colabkit.foundation.partials import KeptPartial, Partial, kept_for


def die_with(folder: Path, text: str, identity: str = "ab") -> None:
    """Write into a kept partial in a process that ends without leaving the block."""

    def child() -> None:
        with KeptPartial(folder, identity) as kept:
            kept.note(version=1)
            file_changes.write_file(kept.data, text.encode())
            os._exit(0)

    in_fork(child)


def test_the_next_process_finds_data_and_record(tmp_path):
    die_with(tmp_path, "half")
    with KeptPartial(tmp_path, "ab") as kept:
        assert (kept.data.read_text(), kept.record) == ("half", {"version": 1})
        assert kept.folder.parent == tmp_path
        kept.publish_as(kept.data, tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (tmp_path / "final").read_text() == "half"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_the_data_is_kept_for_the_same_identity(tmp_path, error):
    def fail() -> None:
        with KeptPartial(tmp_path, "ab") as kept:
            kept.note(version=1)
            file_changes.write_file(kept.data, b"half")
            raise error

    with pytest.raises(error):
        fail()
    with KeptPartial(tmp_path, "ab") as kept, KeptPartial(tmp_path, "cd") as other:
        assert kept.data.read_text() == "half"
        assert (other.data.exists(), other.record) == (False, {})


def test_a_partial_without_data_is_not_kept(tmp_path):
    with KeptPartial(tmp_path, "ab") as kept:
        kept.note(version=1)
        file_changes.write_file(kept.data, b"")
    assert list(tmp_path.iterdir()) == []


def test_starting_over_removes_data_and_record(tmp_path):
    die_with(tmp_path, "half")
    with KeptPartial(tmp_path, "ab") as kept:
        kept.start_over()
        assert (kept.data.exists(), kept.record) == (False, {})
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_gets_a_separate_partial_that_is_not_kept(tmp_path):
    with KeptPartial(tmp_path, "ab") as first:
        first.note(version=1)
        file_changes.write_file(first.data, b"first")
        with KeptPartial(tmp_path, "ab") as second:
            assert second.folder != first.folder
            assert second.record == {}
            second.note(version=2)
            file_changes.write_file(second.data, b"second")
        assert leftovers(second.folder.parent)
        assert not second.folder.exists()
        assert first.data.read_text() == "first"


def test_the_second_process_may_publish_first(tmp_path):
    with KeptPartial(tmp_path, "ab") as first:
        first.note(version=1)
        file_changes.write_file(first.data, b"first")
        with KeptPartial(tmp_path, "ab") as second:
            file_changes.write_file(second.data, b"second")
            second.publish_as(second.data, tmp_path / "final")
        with pytest.raises(TargetExists):
            first.publish_as(first.data, tmp_path / "final")
    assert (tmp_path / "final").read_text() == "second"


def test_without_locks_nothing_is_kept(tmp_path, monkeypatch):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with KeptPartial(tmp_path, "ab") as kept:
        kept.note(version=1)
        file_changes.write_file(kept.data, b"half")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_where_every_process_gets_the_lock_only_one_uses_the_kept_partial_while_it_lives(
    tmp_path, monkeypatch, is_killed
):
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    if is_killed:
        die_with(tmp_path, "half")
        with KeptPartial(tmp_path, "ab") as kept:
            assert (kept.data.read_text(), kept.record) == ("half", {"version": 1})
        kept = KeptPartial(tmp_path, "ab")
        assert not kept.is_busy()
        return
    with KeptPartial(tmp_path, "ab") as kept:
        file_changes.write_file(kept.data, b"first")

        def child() -> None:
            waited = []
            with KeptPartial(tmp_path, "ab") as other:
                assert other.is_busy()
                assert other.folder != kept.folder
            # The first process counts as stalled as soon as another one waits for it.
            monkeypatch.setattr(locks, "is_changing", lambda folder: not waited)
            with KeptPartial(tmp_path, "ab", lambda: waited.append(1)) as other:
                assert waited
                assert other.folder != kept.folder

        assert in_fork(child) == 0
        assert kept.data.read_text() == "first"


def test_two_processes_that_replace_a_folder_at_the_same_time_leave_one_of_the_new_ones(tmp_path, monkeypatch):
    final = tmp_path / "final"
    make_pair(final, "old")
    rename = file_changes.rename

    def meanwhile(path: Path, to: Path) -> None:
        monkeypatch.setattr(file_changes, "rename", rename)
        rename(path, to)
        with Partial(final) as second:
            make_pair(second.path, "second")
            second.publish(replace=True)

    with Partial(final) as first:
        make_pair(first.path, "first")
        monkeypatch.setattr(file_changes, "rename", meanwhile)
        first.publish(replace=True)
    assert pair_text(final) == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize("text", ["a restart of the machine", "", "{", "[]", "7", '{"start": 1}'])
def test_after_a_restart_or_with_a_broken_record_the_work_starts_over(tmp_path, text):
    die_with(tmp_path, "half")
    (record,) = tmp_path.glob(".colabkit-*/record")
    restarted = json.dumps({**json.loads(record.read_text()), "start": "another"})
    record.write_text(restarted if text.startswith("a restart") else text)
    with KeptPartial(tmp_path, "ab") as kept:
        assert (kept.data.exists(), kept.record) == (False, {})


def test_a_folder_replaces_the_old_one(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "old").touch()
    with KeptPartial(tmp_path, "ab") as kept:
        file_changes.make_folder(kept.data / "inner")
        kept.publish_as(kept.data / "inner", tmp_path / "final", replace=True)
    assert list((tmp_path / "final").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_kill_at_any_operation_leaves_the_old_or_new_version_and_the_next_run_finishes(tmp_path):
    final = tmp_path / "final"

    def replace() -> None:
        with KeptPartial(tmp_path, "ab") as kept:
            if not kept.record:
                kept.note(version=1)
            if not kept.data.exists():
                file_changes.write_file(kept.data, b"new")
            # The process was killed between creating the file and writing it.
            if kept.data.read_bytes() != b"new":
                kept.start_over()
                file_changes.write_file(kept.data, b"new")
            kept.publish_as(kept.data, final, replace=True)

    number = 1
    while True:
        final.write_text("old")
        if not is_killed_at(number, replace):
            break
        assert final.read_text() in ("old", "new")
        replace()
        assert final.read_text() == "new"
        assert leftovers(tmp_path) == [], f"not reclaimed after a kill at operation {number}"
        number += 1
    assert number > 8


def test_a_kill_at_any_operation_that_replaces_a_folder_loses_nothing_and_leaves_no_other_folder(tmp_path):
    final = tmp_path / "final"

    def replace() -> None:
        with KeptPartial(tmp_path, "ab") as kept:
            file_changes.remove(kept.data)
            make_pair(kept.data, "new")
            kept.publish_as(kept.data, final, replace=True)

    number = 1
    while True:
        file_changes.remove(final)
        make_pair(final, "old")
        if not is_killed_at(number, replace):
            break
        was_there = pair_text(final)
        with Partial(final), KeptPartial(tmp_path, "ab"):
            assert pair_text(final) == (was_there or "old"), f"lost at operation {number}"
        replace()
        assert pair_text(final) == "new"
        assert [path.name for path in tmp_path.iterdir()] == ["final"], f"after a kill at operation {number}"
        number += 1
    assert number > 8


def test_a_forked_process_that_outlives_its_parent_does_not_hold_the_lock(tmp_path):
    may_end, end = os.pipe()
    is_there, there = os.pipe()

    def parent() -> None:
        with KeptPartial(tmp_path, "ab") as kept:
            file_changes.write_file(kept.data, b"half")
            kept.note(version=1)
            if os.fork() == 0:
                os.close(end)
                os.write(there, b"x")
                os.read(may_end, 1)
            os._exit(0)

    try:
        in_fork(parent)
        assert os.read(is_there, 1)
        assert not KeptPartial(tmp_path, "ab").is_busy()
        with KeptPartial(tmp_path, "ab") as kept:
            assert kept.record == {"version": 1}
            kept.start_over()
    finally:
        for fd in (may_end, end, is_there, there):
            os.close(fd)


def test_interrupted_work_is_found_by_any_spelling_of_its_final_path(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    with KeptPartial(tmp_path / "folder", "ab") as kept:
        kept.note(path=str(tmp_path / "link" / ".." / "folder" / "final"), identity="ab")
        kept.data.write_bytes(b"half")
    for folder in ("folder", "link", "folder/../folder"):
        assert kept_for(tmp_path / folder / "final") == "ab"
    assert kept_for(tmp_path / "folder" / "other") == ""


def age(folder: Path, seconds: float) -> None:
    for path in (*folder.rglob("*"), folder):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


@pytest.mark.parametrize(("age_s", "is_resumed"), [(2 * 3600, True), (1800, False)])
def test_a_partial_of_another_container_that_no_longer_changes_is_resumed(tmp_path, age_s, is_resumed):
    die_with(tmp_path, "half")
    kept_folder = next(tmp_path.glob(".colabkit-*-kept.partial"))
    mark = next(path for path in kept_folder.iterdir() if path.name.startswith(".colabkit-"))
    key, _, rest = mark.name.removeprefix(".colabkit-").split("-", 2)
    mark.rename(kept_folder / f".colabkit-{key}-0123abcd-{rest}")
    age(kept_folder, age_s)
    with KeptPartial(tmp_path, "ab") as kept:
        assert (kept.folder == kept_folder) == is_resumed
        assert kept.data.exists() == is_resumed


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not list open descriptors")
def test_a_kept_folder_is_removed_only_after_its_lock_is_closed(tmp_path, file_hook):
    """On NFS, an open file that is removed stays in its folder under another name."""
    held = []

    def look(operation: str, path: Path) -> None:
        if operation == "remove" and path.parent == tmp_path:
            for fd in os.listdir("/proc/self/fd"):
                with contextlib.suppress(FileNotFoundError):
                    held.extend(name for name in [os.readlink(f"/proc/self/fd/{fd}")] if name.startswith(str(path)))

    with KeptPartial(tmp_path, "ab") as kept:
        file_changes.write_file(kept.data, b"whole")
        kept.publish_as(kept.data, tmp_path / "final")
        file_hook(look)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert not held


def test_a_kept_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    def refuse(path: Path) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(file_changes, "open_lock", refuse)
    with KeptPartial(tmp_path, "ab") as kept:
        assert kept.folder != kept.kept_folder
        file_changes.write_file(kept.data, b"whole")
        kept.publish_as(kept.data, tmp_path / "final")
    assert (tmp_path / "final").read_bytes() == b"whole"
