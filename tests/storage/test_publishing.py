"""`publish()`: the old or the new thing at its place, whatever fails, and nothing beside it."""

from __future__ import annotations

import errno
import itertools
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
from reader_threads import reader_threads
from sampling import sampled
from strikes import Strike, full, interrupt
from trees import leftovers, needs

from colabkit.errors import (
    BadSource,
    ColabkitError,
    Corrupt,
    FileFailed,
    InvalidOption,
    NotEnoughSpace,
    NotMounted,
    SourceChanged,
    SourceMissing,
    TargetExists,
    TimedOut,
)
from colabkit.foundation import file_changes
from colabkit.storage import publishing
from colabkit.storage.publishing import PublishReport, publish
from colabkit.storage.sources.engine import BLOCK_BYTES

OLD, NEW = {"": b"old"}, {"": b"new" * 5000}
OLD_FOLDER = {"a.png": b"old", "deep/b.png": b"old too", "c.txt": b""}
NEW_FOLDER = {"a.png": b"new" * 900, "deep/er/d.png": b"newer", "e.txt": b""}


def write(place: Path, files: dict[str, bytes]) -> Path:
    """Write a file, or a folder of files."""
    for name, data in files.items():
        path = place / name if name else place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return place


def content(place: Path) -> dict[str, bytes] | None:
    """Return what is at a place."""
    if place.is_file():
        return {"": place.read_bytes()}
    if not place.exists():
        return None
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def bring(path: Path, to: object, **options: Any) -> PublishReport:
    """Publish without a progress bar."""
    return publish(path, to, progress=False, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Look after each test for threads and open files that stayed."""
    yield
    assert reader_threads() == []
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    names = [os.readlink(path) for path in descriptors if os.path.lexists(path)]
    assert [name for name in names if name.startswith(str(tmp_path))] == []


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


@pytest.mark.parametrize("verify", ["size", "full"])
@pytest.mark.parametrize("files", [NEW, NEW_FOLDER, {"": b""}, {"": b"x" * (3 * BLOCK_BYTES + 1)}])
def test_a_file_or_folder_comes_to_its_place_whole(tmp_path, files, verify):
    source, final = write(tmp_path / "thing", files), tmp_path / "new" / "folder" / "thing"
    report = bring(source, final, verify=verify)
    assert content(final) == files
    assert (report.path, report.replaced, report.is_sent) == (final, False, True)
    assert report.published_bytes == sum(map(len, files.values()))
    assert ("read back" in repr(report)) == (verify == "full")
    assert leftovers(tmp_path) == []
    assert bring(source, final).replaced


def test_an_empty_folder_comes_to_its_place(tmp_path):
    (tmp_path / "empty").mkdir()
    bring(tmp_path / "empty", tmp_path / "final")
    assert content(tmp_path / "final") == {}


def test_links_in_a_folder_are_left_out(tmp_path):
    source = write(tmp_path / "run", NEW_FOLDER)
    (source / "link").symlink_to("a.png")
    bring(source, tmp_path / "final")
    assert content(tmp_path / "final") == NEW_FOLDER


@pytest.mark.parametrize("to", ["packs", "packs/", "new/", "packs/birds.h5"])
def test_a_file_keeps_its_name_in_a_folder_that_is_there_or_named_with_a_slash(near, tmp_path, monkeypatch, to):
    (tmp_path / "packs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert bring(near, to).path == tmp_path / to.split("/")[0] / "birds.h5"


def test_a_folder_keeps_its_name_in_another_and_takes_the_place_of_its_former_version_only(tmp_path):
    source = write(tmp_path / "run", NEW_FOLDER)
    write(tmp_path / "backups", {"precious.txt": b"mine"})
    write(tmp_path / "backups" / "run", OLD_FOLDER)
    assert bring(source, tmp_path / "backups").path == tmp_path / "backups" / "run"
    assert bring(source, tmp_path / "backups" / "run").replaced
    assert content(tmp_path / "backups" / "run") == NEW_FOLDER
    assert (tmp_path / "backups" / "precious.txt").read_bytes() == b"mine"
    assert bring(source, f"{tmp_path}/backups/run/").path == tmp_path / "backups" / "run" / "run"


def test_drive_is_the_folder_that_the_environment_names_and_never_what_is_replaced(tmp_path, monkeypatch):
    root = write(tmp_path / "drive", {"precious.txt": b"mine"})
    source = write(tmp_path / "near" / "drive", NEW_FOLDER)
    monkeypatch.setenv("COLABKIT_DRIVE", str(root))
    assert bring(source, "drive:").path == root / "drive"
    assert bring(source, "drive:packs/").path == root / "packs" / "drive"
    assert (root / "precious.txt").read_bytes() == b"mine"
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path / "typo"))
    with pytest.raises(NotMounted, match="typo"):
        bring(source, "drive:")


@pytest.mark.parametrize(
    ("path", "to", "kind", "said"),
    [
        ("gone", "final", SourceMissing, "nothing is there"),
        ("pipe", "final", BadSource, "special file"),
        ("run", "file", TargetExists, "is no folder"),
        ("file", "blocked/", TargetExists, "is a folder"),
        ("file", "file/", TargetExists, "in it"),
        ("file", "file", TargetExists, "the same place"),
        ("file", ".", TargetExists, "the same place"),
        ("run", "run", TargetExists, "the same place"),
        ("run", "run/inner/final", TargetExists, "lies in it"),
        ("run/run", "run", TargetExists, "around it"),
        ("file", "file2/final", FileFailed, "file2"),
        ("file", "", InvalidOption, "as path"),
        (7, "final", InvalidOption, "7 as path"),
    ],
)
def test_what_cannot_be_published_is_one_typed_line_and_changes_nothing(tmp_path, monkeypatch, path, to, kind, said):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"file": b"x", "file2": b"y", "run/run/a": b"z", "run/inner/b": b"", "blocked/file/c": b""})
    os.mkfifo("pipe")
    before = content(tmp_path)
    with pytest.raises(kind, match=r"^Cannot publish .*\.$") as caught:
        bring(path, to)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert content(tmp_path) == before
    with pytest.raises(InvalidOption, match="verify"):
        bring(tmp_path / "file", "final", verify="some")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("at", range(1, 6))
def test_a_target_that_refuses_is_one_typed_line_that_names_it(near, tmp_path, file_hook, number, at):
    def refuse() -> None:
        raise OSError(number, os.strerror(number))

    file_hook(Strike(at, refuse))
    with pytest.raises((FileFailed, NotEnoughSpace), match=os.strerror(number)) as caught:
        bring(near, tmp_path / "new" / "final.h5")
    assert at == 1 or "final.h5" in str(caught.value)
    assert leftovers(tmp_path) == []


def test_what_does_not_fit_is_refused_before_anything_is_written(near, tmp_path, monkeypatch):
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 100)
    with pytest.raises(NotEnoughSpace, match=r"14\.6 KiB needed"):
        bring(near, tmp_path / "final.h5")
    assert os.listdir(tmp_path) == ["near"]


@pytest.mark.parametrize(("old", "new"), [(OLD, NEW), (OLD_FOLDER, NEW_FOLDER)], ids=["file", "folder"])
@pytest.mark.parametrize("act", [full, interrupt])
def test_a_failure_at_any_operation_leaves_the_old_or_the_new_and_nothing_beside_it(tmp_path, file_hook, old, new, act):
    source, final = write(tmp_path / "near" / "thing", new), tmp_path / "far" / "thing"
    for number in itertools.count(1):
        write(final, old)
        strike = Strike(number, act)
        file_hook(strike)
        try:
            bring(source, final)
        except (NotEnoughSpace, KeyboardInterrupt):
            assert strike.struck
        else:
            break
        file_hook(None)
        assert content(final) in (old, new), f"at operation {number}, {strike.operation}"
        assert leftovers(tmp_path) == [], f"at operation {number}, {strike.operation}"
        bring(source, tmp_path / "other")
        file_changes.remove(final)
    assert not strike.struck, "the error did not reach the caller"
    assert number > (4 if old is OLD else 13)
    assert content(final) == new


def test_a_kill_at_any_operation_shows_the_old_or_the_new_file_and_the_next_run_cleans_up(near, tmp_path, killed_at):
    final = tmp_path / "far" / "birds.h5"
    left = 0
    for number in itertools.count(1):
        write(final, OLD)
        if not killed_at(number, partial(publish, near, final, progress=False)):
            break
        assert content(final) in (OLD, NEW), f"at operation {number}"
        left += len(leftovers(tmp_path))
        bring(near, final)
        assert content(final) == NEW
        assert leftovers(tmp_path) == []
    assert number > 3
    assert left


def test_a_kill_at_any_operation_shows_the_old_or_the_new_folder_except_between_its_two_renames(tmp_path, killed_at):
    source, final = write(tmp_path / "near" / "run", NEW_FOLDER), tmp_path / "far" / "run"
    between = 0
    for number in itertools.count(1):
        file_changes.remove(final)
        write(final, OLD_FOLDER)
        if not killed_at(number, partial(publish, source, final, progress=False)):
            break
        assert content(final) in (None, OLD_FOLDER, NEW_FOLDER), f"at operation {number}"
        if content(final) is None:
            between += 1
            hidden = [content(Path(path)) for path in leftovers(tmp_path / "far") if path.endswith("-old.partial")]
            assert OLD_FOLDER in hidden
        bring(source, final)
        assert content(final) == NEW_FOLDER
        assert leftovers(tmp_path) == []
    assert number > 13
    assert between == 1


@pytest.mark.parametrize("change", ["append", "touch", "gone"])
@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_source_that_changes_meanwhile_is_found_out(tmp_path, file_hook, change, operation):
    for files, part in ((NEW, ""), (NEW_FOLDER, "e.txt"), (NEW_FOLDER, "added.txt")):
        source, final = write(tmp_path / f"near{part}" / "thing", files), write(tmp_path / f"far{part}", {"": b"old"})
        changing = source / part if part else source
        if part == "added.txt" and change != "append":
            continue
        if part:
            final = tmp_path / f"new{part}"

        def act(at: str, path: Path, changing: Path = changing) -> None:
            if at == operation:
                file_hook(None)
                if change == "append":
                    changing.open("ab").write(b"+")
                elif change == "touch":
                    os.utime(changing, (1, 1))
                else:
                    changing.unlink()

        file_hook(act)
        before = content(final)
        with pytest.raises((SourceChanged, FileFailed), match=r"Cannot (publish|read) "):
            bring(source, final)
        assert content(final) == before
    assert leftovers(tmp_path) == []


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
        with pytest.raises(ColabkitError, match=r"dead|did not deliver"):
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
