"""`stage()` with a full disk, a kill or an interrupt at every file change, and in concurrent processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
from local_copies import data_of, kept_partials
from reader_threads import reader_threads
from sampling import sampled
from strikes import ChangeHook, failures, fill_disk, interrupt, kills
from trees import leftovers, make_tree

from colabkit.errors import ColabkitError, NotEnoughSpace
from colabkit.storage.sources.items import STAGE_SEAL
from colabkit.storage.staging.api import stage, unstage

FILES = {"a/1.png": b"one", "a/2.png": b"two" * 900, "b/3.png": b"", "b/deep/4.png": b"four", "5.txt": b"five"}
KINDS = ("folder", "archive", "kept archive")


@pytest.fixture
def source(tmp_path):
    def make(kind: str) -> Path:
        folder = tmp_path / "far" / "tree"
        for name, data in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        if kind == "folder":
            return folder
        archive = folder.with_suffix(".zip")
        with zipfile.ZipFile(archive, "w") as file:
            for name, data in FILES.items():
                file.writestr(name, data)
        return archive

    return make


def copy(source: Path, local: Path, kind: str, threads: int = 1, refresh: bool = False) -> Path:
    options = {"threads": threads, "refresh": refresh, "extract": kind != "kept archive"}
    report = stage(source, local, progress=False, **options)
    return report.path.parent if kind == "kept archive" else report.path


def content(local: Path) -> dict[str, bytes] | None:
    """Return the bytes of a local copy's files by path; None if nothing exists at its path."""
    if not os.path.lexists(local):
        return None
    files = [path for path in local.rglob("*") if path.is_file()]
    assert local / STAGE_SEAL in files, "unsealed, but at its final path"
    return {path.relative_to(local).as_posix(): path.read_bytes() for path in files if path.name != STAGE_SEAL}


def whole(source: Path, kind: str) -> dict[str, bytes]:
    return {source.name: source.read_bytes()} if kind == "kept archive" else FILES


def inside_kept(folder: Path) -> list[str]:
    """Return the partial folders that are kept for the next run, with their entries."""
    return [str(path) for saved in kept_partials(folder) for path in (saved, *saved.rglob("*"))]


@pytest.mark.full
@pytest.mark.parametrize("threads", sampled([1, 3], 1))
@pytest.mark.parametrize("kind", sampled(KINDS, 2))
def test_a_disk_that_fills_up_at_any_operation_leaves_nothing_and_the_next_run_succeeds(
    source, tmp_path, file_hook, kind, threads
):
    remote, local = source(kind), tmp_path / "new" / "near"
    stage_it = partial(copy, remote, local, kind, threads)
    for number, strike in failures(file_hook, fill_disk, stage_it, NotEnoughSpace):
        assert content(local) in (None, whole(remote, kind)), f"at operation {number}"
        assert leftovers(tmp_path) == [] or strike.operation in ("rename", "remove"), f"at operation {number}"
        assert reader_threads() == []
        assert content(stage_it()) == whole(remote, kind)
        assert leftovers(tmp_path) == [], f"not reclaimed after operation {number}"
        unstage(local)
        (tmp_path / "new").rmdir()
    assert number >= {"folder": 15, "archive": 18, "kept archive": 7}[kind]
    assert content(local) == whole(remote, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fills_up_at_any_operation_of_a_refresh_leaves_the_old_or_the_new_copy(
    source, tmp_path, file_hook, kind
):
    remote, local = source(kind), tmp_path / "near"
    copy(remote, local, kind)

    def refresh() -> None:
        # A new modification time makes the source count as changed.
        os.utime(remote / "5.txt" if kind == "folder" else remote)
        copy(remote, local, kind, refresh=True)

    for number, strike in failures(file_hook, fill_disk, refresh, NotEnoughSpace):
        assert content(local) == whole(remote, kind), f"at operation {number}"
        assert leftovers(tmp_path) == [] or strike.operation in ("rename", "remove"), f"at operation {number}"
    assert content(local) == whole(remote, kind)
    # The next run removes leftovers that the failed run could not remove.
    copy(remote, local, kind)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("kind", sampled(KINDS, 1))
def test_after_a_kill_at_any_operation_the_copy_is_absent_or_complete_and_the_next_run_completes_it(
    source, tmp_path, killed_at, kind
):
    remote, local = source(kind), tmp_path / "near"
    left_something = False
    for number in kills(killed_at, partial(copy, remote, local, kind)):
        assert content(local) in (None, whole(remote, kind)), f"at operation {number}"
        left_something |= bool(leftovers(tmp_path))
        assert content(copy(remote, local, kind)) == whole(remote, kind)
        assert leftovers(tmp_path) == [], f"not reclaimed after operation {number}"
        unstage(local)
    assert number >= {"folder": 15, "archive": 18, "kept archive": 7}[kind]
    assert left_something


@pytest.mark.full
def test_after_a_kill_at_any_operation_of_a_refresh_the_copy_is_absent_old_or_new(source, tmp_path, killed_at):
    remote, local = source("folder"), tmp_path / "near"
    copy(remote, local, "folder")
    # A new modification time makes the source count as changed.
    os.utime(remote / "5.txt", ns=(0, 0))
    for number in kills(killed_at, partial(copy, remote, local, "folder", refresh=True)):
        assert content(local) in (None, FILES), f"at operation {number}"
        copy(remote, local, "folder", refresh=True)
        assert leftovers(tmp_path) == []
        os.utime(remote / "5.txt", ns=(number, number))
    assert number >= 15


def test_after_a_kill_at_any_operation_of_unstage_the_copy_is_absent_or_complete(source, tmp_path, killed_at):
    remote, local = source("folder"), tmp_path / "near"
    copy(remote, local, "folder")
    for _ in kills(killed_at, partial(unstage, local)):
        assert content(local) in (None, FILES)
        assert content(copy(remote, local, "folder")) == FILES
    assert content(local) is None
    assert content(copy(remote, local, "folder")) == FILES
    assert leftovers(tmp_path) == []


def test_unstage_frees_the_rest_of_an_interrupted_removal(source, tmp_path, file_hook):
    local = copy(source("folder"), tmp_path / "near", "folder")
    file_hook(ChangeHook(2, interrupt))
    with pytest.raises(KeyboardInterrupt):
        unstage(local)
    file_hook(None)
    assert content(local) is None
    assert leftovers(tmp_path)
    assert unstage(local).freed_bytes
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("threads", sampled([1, 3], 1))
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_operation_leaves_no_thread_and_the_next_run_resumes(
    source, tmp_path, file_hook, kind, threads
):
    remote, local = source(kind), tmp_path / "near"
    stage_it = partial(copy, remote, local, kind, threads)
    for number, strike in failures(file_hook, interrupt, stage_it, KeyboardInterrupt, step=2):
        assert content(local) in (None, whole(remote, kind)), f"at operation {number}"
        assert set(leftovers(tmp_path)) <= set(inside_kept(tmp_path)) or strike.operation in ("rename", "remove")
        assert reader_threads() == []
        assert content(stage_it()) == whole(remote, kind)
        assert leftovers(tmp_path) == [], f"not resumed after operation {number}"
        unstage(local)


def test_other_file_system_errors_are_typed_and_leave_nothing(source, tmp_path, file_hook):
    remote, local = source("folder"), tmp_path / "near"

    def refuse() -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for number in (1, 4, 9):
        file_hook(ChangeHook(number, refuse))
        with pytest.raises(ColabkitError, match=r"Cannot stage .*Read-only file system"):
            copy(remote, local, "folder")
        assert content(local) is None
    file_hook(None)
    assert content(copy(remote, local, "folder")) == FILES
    assert leftovers(tmp_path) == []


def test_failed_runs_do_not_change_the_source(source, tmp_path, file_hook):
    remote = source("archive").parent
    before = [(path, path.lstat().st_mtime_ns, path.lstat().st_ino) for path in sorted([remote, *remote.rglob("*")])]
    for number in range(1, 17, 3):
        for name in ("tree", "tree.zip"):
            file_hook(ChangeHook(number, fill_disk))
            with pytest.raises(NotEnoughSpace):
                stage(remote / name, tmp_path / "near", progress=False)
            file_hook(None)
    assert [
        (path, path.lstat().st_mtime_ns, path.lstat().st_ino) for path in sorted([remote, *remote.rglob("*")])
    ] == before


def test_the_next_process_resumes_the_work_of_a_killed_one(source, tmp_path):
    code = (
        "import sys, os, signal; from colabkit import stage; from colabkit.foundation import file_changes\n"
        "def hook(operation, path):\n"
        "    if operation == 'create' and path.name == '3.png': os.kill(os.getpid(), signal.SIGKILL)\n"
        "file_changes.hook = hook; stage(sys.argv[1], sys.argv[2], threads=1, progress=False)"
    )
    remote = source("folder")
    died = subprocess.run([sys.executable, "-c", code, remote, tmp_path / "near"], check=False)
    assert died.returncode == -signal.SIGKILL
    assert stage(remote, tmp_path / "near", threads=1, progress=False).resumed_bytes
    assert content(tmp_path / "near") == FILES


@pytest.mark.full
@pytest.mark.parametrize("locks", ["", "import fcntl; fcntl.flock = lambda fd, operation: None;"])
def test_eight_processes_that_stage_one_source_all_succeed_and_copy_it_once(tmp_path, locks):
    remote = make_tree(tmp_path / "far", 100)
    code = (
        f"import sys, colabkit; colabkit.stage; {locks} sys.stdin.readline();"
        "print(colabkit.stage(sys.argv[1], sys.argv[2], progress=False).reused)"
    )
    words = [sys.executable, "-c", code, remote, tmp_path / "near"]
    children = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    output = [child.communicate(timeout=120)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0] * 8
    # Without locks, processes that start at the same time copy the source several times.
    assert output.count("False") == 1 or locks
    assert data_of(tmp_path / "near") == data_of(remote)
    assert leftovers(tmp_path) == []
