"""The module through which all files are changed: its operations, and the hook that is called before each of them."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from forks import in_fork, make_pair

import colabkit
from colabkit.errors import FileFailed, InvalidOption, NotEnoughSpace
from colabkit.foundation import file_changes, partials
from colabkit.foundation.mount_table import Mount

SetHook = Callable[[Callable[[str, Path], None] | None], None]


def operations(set_hook: SetHook) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    set_hook(lambda operation, path: seen.append((operation, path.name)))
    return seen


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_not_enough_space(code):
    with pytest.raises(NotEnoughSpace, match="Cannot copy 'x'"), file_changes.translated("copy 'x'"):
        raise OSError(code, os.strerror(code))


def test_other_errors_name_the_action_the_cause_and_the_file():
    error = OSError(errno.EACCES, "Permission denied", "/some/file")
    with pytest.raises(FileFailed) as caught, file_changes.translated("copy 'x'"):
        raise error
    assert re.fullmatch(r"Cannot copy 'x': permission denied for the file '/some/file'\. Check .+\.", str(caught.value))
    assert caught.value.__cause__ is error


def test_an_error_has_a_cause_only_if_other_code_than_colabkit_raised_it(tmp_path: Path) -> None:
    def label_of(path: str) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", "labels.txt")

    (tmp_path / "file").write_text("")
    with pytest.raises(FileFailed, match="is a file, not a folder") as caught:
        colabkit.pack("samples:digits", tmp_path / "file" / "x.h5")
    assert caught.value.__cause__ is None
    with pytest.raises(FileFailed, match=r"permission denied for the file 'labels\.txt'") as caught:
        colabkit.pack("samples:digits", tmp_path / "x.h5", labels=label_of)
    assert isinstance(caught.value.__cause__, PermissionError)


def test_a_missing_path_gets_its_own_advice_and_an_error_without_text_is_one_line(tmp_path: Path) -> None:
    missing = r"No such file .*gone'\)\. Check the path, and that its disk is mounted\.$"
    with pytest.raises(FileFailed, match=missing), file_changes.translated("read"):
        (tmp_path / "gone").read_bytes()
    refused = r"Is a directory .*\. Check the path and its permissions"
    with pytest.raises(FileFailed, match=refused), file_changes.translated("read"):
        tmp_path.read_bytes()
    with pytest.raises(FileFailed, match="Cannot copy: odd"), file_changes.translated("copy"):
        raise OSError("odd")


@pytest.mark.parametrize("error", [FileFailed("one"), InvalidOption("two"), ValueError("three"), KeyboardInterrupt()])
def test_other_exceptions_than_os_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as caught, file_changes.translated("copy"):
        raise error
    assert caught.value is error


def test_every_change_calls_the_hook_first(tmp_path, file_hook):
    seen = operations(file_hook)
    # The folder exists, so nothing changes.
    file_changes.make_folder(tmp_path)
    file_changes.make_folder(tmp_path / "folder")
    fd = file_changes.create(tmp_path / "file")
    file_changes.reserve(fd, 10, tmp_path / "file")
    file_changes.write_at(fd, b"0123456789", 0, tmp_path / "file")
    file_changes.sync(fd, tmp_path / "file")
    os.close(fd)
    file_changes.remove(tmp_path / "file")
    assert seen == [
        ("mkdir", "folder"),
        *((operation, "file") for operation in ("create", "reserve", "write", "sync", "remove")),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: file_changes.make_folder(folder / "new"),
        lambda folder: file_changes.create(folder / "new"),
        lambda folder: file_changes.write_file(folder / "new", b"data"),
        lambda folder: file_changes.remove(folder / "old"),
        lambda folder: make_pair(folder / "new", "text"),
    ],
)
def test_a_hook_that_raises_stops_the_change(tmp_path, file_hook, change):
    (tmp_path / "old").write_text("kept")

    def refuse(operation: str, path: Path) -> None:
        raise OSError(errno.EROFS, "read-only")

    file_hook(refuse)
    with pytest.raises(OSError, match="read-only"):
        change(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_create_fails_for_existing_files_and_follows_no_symlink(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            file_changes.create(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("can_allocate", [True, False])
def test_reserve_sets_the_length_and_accepts_zero(tmp_path, monkeypatch, can_allocate):
    if not can_allocate:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    for size in (0, 1, 5000):
        fd = file_changes.create(tmp_path / f"{size}")
        file_changes.reserve(fd, size, tmp_path)
        os.close(fd)
        assert (tmp_path / f"{size}").stat().st_size == size


def test_on_a_remote_mount_only_the_length_is_set(tmp_path, monkeypatch):
    """Where a mount cannot reserve space, the C library writes one byte per 4 KiB instead."""
    remote = Mount(str(tmp_path), "nfs4", "server:/", ("rw",))
    monkeypatch.setattr(file_changes, "mounts", lambda: [remote])
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: pytest.fail("it is emulated"))
    with file_changes.descriptor(file_changes.create(tmp_path / "x")) as fd:
        file_changes.reserve(fd, 1 << 20, tmp_path / "x")
        file_changes.reserve(fd, 10, tmp_path / "x")
        assert os.fstat(fd).st_size == 1 << 20


def test_space_for_a_memory_map_is_reserved_on_every_mount(tmp_path, monkeypatch):
    monkeypatch.setattr(file_changes, "mounts", lambda: [Mount(str(tmp_path), "nfs4", "server:/", ("rw",))])
    reserved = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, size: reserved.append(size))
    with file_changes.descriptor(file_changes.create(tmp_path / "x")) as fd:
        file_changes.reserve(fd, 10, tmp_path / "x", is_mapped=True)
    assert reserved == [10]


def test_an_error_in_a_hidden_partial_names_the_folder_that_holds_it():
    hidden = OSError(errno.ENOSPC, "No space left on device", "/data/.colabkit-ab-kept.partial/data/x")
    with pytest.raises(NotEnoughSpace, match=r"\('/data'\)"), file_changes.translated("copy 'x'"):
        raise hidden


def test_a_link_to_a_missing_folder_is_not_called_a_file(tmp_path):
    (tmp_path / "data").symlink_to(tmp_path / "gone")
    with pytest.raises(FileFailed) as caught, file_changes.translated("copy 'x'"):
        file_changes.make_folder(tmp_path / "data" / "birds")
    assert "is a file" not in str(caught.value)


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "data.zip").write_text("")
    with pytest.raises(FileFailed, match=r"data\.zip' is a file, not a folder"), file_changes.translated("copy 'x'"):
        file_changes.make_folder(tmp_path / "data.zip" / "birds")


def test_short_writes_continue_until_everything_is_written(tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, bytes(data[:3]), offset))
    fd = file_changes.create(tmp_path / "file")
    file_changes.write_at(fd, b"0123456789", 2, tmp_path)
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"\0\x000123456789"


@pytest.mark.parametrize("data", [b"", bytearray(b"abc"), np.arange(6, dtype="<i8").reshape(2, 3)])
def test_write_file_accepts_any_buffer(tmp_path, data):
    file_changes.write_file(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == bytes(memoryview(data).tobytes())


def test_only_durable_files_are_flushed_to_the_device(tmp_path, file_hook):
    seen = operations(file_hook)
    file_changes.write_file(tmp_path / "a", b"x")
    file_changes.write_file(tmp_path / "b", b"x", durable=True)
    assert [operation for operation, name in seen if name == "a"] == ["create", "write"]
    assert [operation for operation, name in seen if name == "b"] == ["create", "write", "sync"]


def test_write_file_closes_its_descriptor_when_the_write_fails(tmp_path, file_hook):
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []

    def fail(operation: str, path: Path) -> None:
        if operation == "write":
            raise OSError(errno.ENOSPC, "full")

    file_hook(fail)
    with pytest.raises(OSError, match="full"):
        file_changes.write_file(tmp_path / "file", b"x")
    assert (os.listdir("/proc/self/fd") if before else []) == before


def test_remove_and_discard_remove_files_and_trees_but_only_the_symlink_itself(tmp_path):
    for remove in (file_changes.remove, partials.discard):
        make_pair(tmp_path / "tree", "text")
        file_changes.write_file(tmp_path / "file", b"x")
        remove(tmp_path / "tree")
        remove(tmp_path / "file")
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("link", "missing"):
        file_changes.remove(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "file"]


@pytest.mark.full
@pytest.mark.parametrize("files", [None, 200])
def test_folders_nested_too_deeply_for_recursion_are_made_measured_and_removed(tmp_path, files):
    deep = tmp_path / "x" / "/".join("d" * 1200)

    def work() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        file_changes.make_folder(deep)
        file_changes.write_file(deep / "1.bin", b"data")
        assert file_changes.disk_bytes(tmp_path / "x") > 0
        file_changes.remove(tmp_path / "x")

    assert in_fork(work) == 0
    assert not (tmp_path / "x").exists()


def test_discard_never_leaves_a_part_of_a_tree_at_its_path(tmp_path, monkeypatch):
    final = tmp_path / "tree"
    make_pair(final, "text")
    at_its_path = []

    def remove_half(path: Path) -> None:
        at_its_path.append(final.exists())
        (Path(path) / "one").unlink()
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(file_changes.shutil, "rmtree", remove_half)
        with pytest.raises(OSError, match="broken"):
            partials.discard(final)
    assert at_its_path == [False]
    assert not final.exists()


@pytest.mark.parametrize("size", [0, 1, 100_003])
def test_sha256_is_the_digest_of_the_bytes(tmp_path, size):
    data = np.random.default_rng(1).bytes(size)
    (tmp_path / "file").write_bytes(data)
    assert file_changes.sha256(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_hdf5_data_starts_at_a_page_and_existing_files_are_rejected(tmp_path, file_hook):
    seen = operations(file_hook)
    with file_changes.create_hdf5(tmp_path / "file.h5") as file:
        for number in range(3):
            data = file.create_dataset(f"d{number}", data=np.zeros(number + 5000, dtype="u1"))
            assert data.id.get_offset() % 4096 == 0
    assert (tmp_path / "file.h5").read_bytes()[:4096] == bytes(4096), "the user block is left alone"
    with pytest.raises(FileExistsError), file_changes.create_hdf5(tmp_path / "file.h5"):
        pass
    names = [operation for operation, _ in seen]
    assert names[0] == names[-1] == "create"
    assert set(names[1:-1]) == {"write", "truncate"}


def test_a_failed_write_of_hdf5_metadata_raises_the_error_of_the_system(tmp_path, file_hook):
    def write(name: str) -> None:
        with file_changes.create_hdf5(tmp_path / name) as file:
            file.attrs["long"] = "x" * 40_000
            for number in range(20):
                file.create_dataset(f"d{number}", data=np.zeros(9, dtype="u1"))

    def fail(operation: str, path: Path) -> None:
        if operation == "write" and next(left) == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    seen = operations(file_hook)
    write("whole.h5")
    file_hook(fail)
    for number in range(0, seen.count(("write", "whole.h5")), 7):
        left = itertools.count(-number)
        with pytest.raises(OSError, match="No space left on device"):
            write(f"{number}.h5")


def test_free_bytes_is_about_the_file_system_that_will_hold_the_path(tmp_path, monkeypatch):
    asked = []
    statvfs = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: asked.append(path) or statvfs(path))
    stats = statvfs(tmp_path)
    assert 0 < file_changes.free_bytes(tmp_path / "not" / "yet") <= stats.f_blocks * stats.f_frsize
    assert asked == [tmp_path]


def test_check_space_names_both_sizes_and_uses_the_tighter_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 3 << 20)
    file_changes.check_space("copy 'x'", 3 << 20, tmp_path / "x")
    file_changes.check_space("copy 'x'", 1 << 20, tmp_path / "x", available=1 << 20)
    with pytest.raises(NotEnoughSpace, match=r"Cannot copy 'x': .+ has 3\.0 MiB free; expected at least 4\.0 MiB\."):
        file_changes.check_space("copy 'x'", 4 << 20, tmp_path / "x", available=8 << 20)
    with pytest.raises(NotEnoughSpace, match=r"1\.0 MiB free"):
        file_changes.check_space("copy 'x'", 2 << 20, tmp_path / "x", available=1 << 20)


def test_a_copy_in_a_tmpfs_leaves_memory_for_the_process_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 1 << 30)
    monkeypatch.setattr(file_changes, "is_tmpfs", lambda path: True)
    monkeypatch.setattr(file_changes, "memory_limits", lambda read: SimpleNamespace(available_bytes=200 << 20))
    file_changes.check_space("copy 'x'", 136 << 20, tmp_path / "x")
    with pytest.raises(NotEnoughSpace, match=r"has 136 MiB free"):
        file_changes.check_space("copy 'x'", 137 << 20, tmp_path / "x")


@pytest.mark.parametrize("in_the_kernel", [True, False])
def test_a_range_is_copied_to_its_offset_and_a_truncated_source_is_an_error(tmp_path, monkeypatch, in_the_kernel):
    data = os.urandom(3 << 20)
    (tmp_path / "from").write_bytes(data)
    (tmp_path / "to").write_bytes(b"x" * 10)
    if not in_the_kernel:

        def refuse(*arguments: object) -> int:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    with (tmp_path / "from").open("rb") as source, (tmp_path / "to").open("r+b") as target:
        file_changes.copy_range(source.fileno(), 7, (3 << 20) - 7, target.fileno(), 4, tmp_path / "to")
        assert (tmp_path / "to").read_bytes() == b"xxxx" + data[7:]
        with pytest.raises(OSError, match="became shorter"):
            file_changes.copy_range(source.fileno(), 7, 3 << 20, target.fileno(), 4, tmp_path / "to")


def test_written_data_is_flushed_in_the_background_and_sync_reports_its_errors(tmp_path, monkeypatch):
    sent, may_go_on = [], threading.Event()

    def send(fd: int) -> None:
        may_go_on.wait(10)
        sent.append(os.readlink(f"/proc/self/fd/{fd}"))
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fdatasync", send)
    (tmp_path / "p").write_bytes(b"x")
    before = set(os.listdir("/proc/self/fd"))
    with file_changes.BackgroundSync(tmp_path / "p") as syncing:
        syncing.written(1)
        assert not [thread for thread in threading.enumerate() if thread.name == "colabkit-sync"]
        for _ in range(3):
            syncing.written(16 << 20)
        may_go_on.set()
    assert sent == [str(tmp_path / "p")]
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "colabkit-sync"]
