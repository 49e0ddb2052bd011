"""Reading one item: exactly the listed bytes; transient errors are retried from the offset reached, and counted."""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colabkit.errors import FileFailed, SourceChanged
from colabkit.storage.sources import reads
from colabkit.storage.sources.folder import FolderSource
from colabkit.storage.sources.items import Item
from colabkit.storage.sources.reads import Retries, read_blocks, read_item


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_BACK_OFF_S", 0)


class FlakySource:
    """A source that follows a script: each open raises the next error, or returns a file that follows the next list."""

    name = "flaky"

    def __init__(self, *opens: list[bytes | OSError | None] | OSError) -> None:
        self.opens = list(opens)
        self.offsets: list[int] = []

    def open(self, item: Item) -> FlakyFile:
        script = self.opens.pop(0)
        if isinstance(script, OSError):
            raise script
        return FlakyFile(script, self.offsets)


class FlakyFile:
    """A file whose reads return the next block or raise the next error; None means that a read would block."""

    def __init__(self, script: list[bytes | OSError | None], offsets: list[int]) -> None:
        self.script = list(script)
        self.offsets = offsets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def seek(self, offset: int) -> None:
        self.offsets.append(offset)

    def read(self, size: int) -> bytes | None:
        if not self.script:
            return b""
        if self.script[0] is None:
            return self.script.pop(0)
        if isinstance(self.script[0], OSError):
            raise self.script.pop(0)
        block = self.script.pop(0)
        if len(block) > size:
            self.script.insert(0, block[size:])
        return block[:size]


def eio() -> OSError:
    return OSError(errno.EIO, "Input/output error")


def test_a_read_that_would_block_is_retried() -> None:
    # An unbuffered file returns None when the system call fails with EAGAIN.
    source, retries = FlakySource([b"ab", None], [b"abcd"]), Retries()
    assert read_item(source, Item("a", 4), retries) == b"abcd"
    assert retries.count == 1


def test_errors_that_mounts_recover_from_are_retried_and_counted():
    for code in (errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN):
        error = OSError(code, "flaky")
        source, retries = FlakySource(error, error, error, [b"data"]), Retries()
        assert read_item(source, Item("x", 4), retries) == b"data"
        assert retries.count == 3


def test_the_fourth_failure_is_the_last_and_pauses_grow(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(reads, "_BACK_OFF_S", 1.0)
    monkeypatch.setattr(time, "sleep", pauses.append)
    source, retries = FlakySource(*(eio() for _ in range(5))), Retries()
    with pytest.raises(FileFailed, match="Input/output error"):
        read_item(source, Item("x", 4), retries)
    assert len(source.opens) == 1
    assert retries.count == 3
    assert [2**number / 2 <= pause <= 2**number for number, pause in enumerate(pauses, 1)] == [True] * 3


def test_permanent_errors_are_not_retried():
    for code in (errno.ENOENT, errno.EACCES, errno.EISDIR):
        source, retries = FlakySource(OSError(code, "stays"), [b"data"]), Retries()
        with pytest.raises(FileFailed):
            read_item(source, Item("x", 4), retries)
        assert retries.count == 0


def test_a_retry_resumes_at_the_offset_reached():
    source, retries = FlakySource([b"abcd", eio()], [b"efgh", eio()], [b"ij"]), Retries()
    assert list(read_blocks(source, Item("x", 10), 4, retries)) == [b"abcd", b"efgh", b"ij"]
    assert source.offsets == [4, 8]
    assert retries.count == 2


def test_progress_resets_the_number_of_attempts():
    opens = [[bytes([number]), eio()] for number in range(9)]
    source, retries = FlakySource(*opens, [b"\x09"]), Retries()
    assert b"".join(read_blocks(source, Item("x", 10), 1, retries)) == bytes(range(10))
    assert retries.count == 9


def test_short_reads_are_joined():
    source = FlakySource([b"a", b"bc", b"defg", b"hij"])
    assert list(read_blocks(source, Item("x", 10), 4, Retries())) == [b"abcd", b"efgh", b"ij"]


@given(size=st.integers(0, 70), block=st.integers(1, 80))
@settings(max_examples=60)
def test_joined_blocks_are_the_file_whatever_their_size(size, block):
    data = bytes(range(size))
    blocks = list(read_blocks(FlakySource([data]), Item("x", size), block, Retries()))
    assert b"".join(blocks) == data
    assert all(len(some) == block for some in blocks[:-1])


@pytest.mark.parametrize("block", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("data", [b"", b"abc", b"abcde", b"abcdefgh"])
def test_fewer_or_more_bytes_than_listed_raise_source_changed(data, block):
    with pytest.raises(SourceChanged):
        list(read_blocks(FlakySource([data]), Item("x", 4), block, Retries()))


def test_retries_are_counted_from_any_thread():
    retries = Retries()
    threads = [threading.Thread(target=lambda: [retries.add() for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert retries.count == 4000


Odd = Callable[[int, "OddFile", int], bytes]


class OddFile(io.FileIO):
    """A file whose reads call the folder's `odd` function, with the number of the read."""

    def __init__(self, path: Path, source: OddFolder) -> None:
        super().__init__(path)
        self.source = source

    def read(self, size: int = -1) -> bytes:  # type: ignore[override]
        self.source.reads += 1
        self.source.offsets.append(self.tell())
        return self.source.odd(self.source.reads, self, size)


class OddFolder(FolderSource):
    """A folder whose files are read with a custom function."""

    def __init__(self, path: Path, odd: Odd) -> None:
        super().__init__(path)
        self.odd = odd
        self.reads = 0
        self.offsets: list[int] = []

    def read_at_once(self, item: Item) -> None:
        """Return None, so that `open()` is used."""

    def open(self, item: Item) -> OddFile:  # type: ignore[override]
        return OddFile(self.path / item.path, self)


DATA = os.urandom(1000)


def odd_folder(path: Path, odd: Odd) -> tuple[OddFolder, Item]:
    (path / "file").write_bytes(DATA)
    source = OddFolder(path, odd)
    return source, source.list().items[0]


def real(file: OddFile, size: int) -> bytes:
    return io.FileIO.read(file, size)


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_CHUNK_BYTES", 300)


@pytest.mark.parametrize("code", ["EIO", "ENOTCONN", "ESTALE"])
@pytest.mark.usefixtures("_small_chunks")
def test_a_file_is_read_from_the_offset_reached(tmp_path, code):
    def odd(number: int, file: OddFile, size: int) -> bytes:
        if number in (2, 3):
            raise OSError(getattr(errno, code), "flaky")
        return real(file, size)

    source, item = odd_folder(tmp_path, odd)
    retries = Retries()
    assert read_item(source, item, retries) == DATA
    assert source.offsets == [0, 300, 300, 300, 600, 900]
    assert retries.count == 2


@pytest.mark.parametrize("most", [1, 7, 299])
@pytest.mark.usefixtures("_small_chunks")
def test_short_reads_of_a_file_are_joined(tmp_path, most):
    source, item = odd_folder(tmp_path, lambda number, file, size: real(file, min(size, most)))
    assert read_item(source, item, Retries()) == DATA


@pytest.mark.usefixtures("_small_chunks")
def test_a_file_that_ends_before_its_reported_size_is_retried(tmp_path):
    source, item = odd_folder(tmp_path, lambda number, file, size: b"" if number == 3 else real(file, size))
    retries = Retries()
    assert read_item(source, item, retries) == DATA
    assert retries.count == 1
    source, item = odd_folder(tmp_path, lambda number, file, size: b"" if number > 2 else real(file, size))
    with pytest.raises(FileFailed, match="it ended after 600 of 1,000 bytes"):
        read_item(source, item, Retries())


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    "change",
    [
        grow,
        lambda path: os.truncate(path, 950),
        lambda path: os.truncate(path, 10),
        lambda path: os.utime(path, (1, 1)),
    ],
    ids=["grows", "shrinks", "shrinks below the bytes read", "changes its time"],
)
@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.usefixtures("_small_chunks")
def test_a_file_modified_while_it_is_read_raises_source_changed(tmp_path, change, at):
    def odd(number: int, file: OddFile, size: int) -> bytes:
        data = real(file, size)
        if number == at:
            change(tmp_path / "file")
        return data

    source, item = odd_folder(tmp_path, odd)
    with pytest.raises(SourceChanged, match="file"):
        read_item(source, item, Retries())


@pytest.mark.parametrize("size", [0, 1, 299, 300, 301, 600])
@pytest.mark.usefixtures("_small_chunks")
def test_a_file_is_read_with_one_request_per_chunk(tmp_path, size):
    (tmp_path / "other").write_bytes(DATA[:size])
    source, _ = odd_folder(tmp_path, lambda number, file, size: real(file, size))
    assert read_item(source, Item("other", size), Retries()) == DATA[:size]
    assert source.reads == max(1, -(-size // 300))


def test_a_file_whose_status_cannot_be_read_is_closed(tmp_path, monkeypatch):
    source, item = odd_folder(tmp_path, real)
    before = os.listdir("/dev/fd")
    monkeypatch.setattr(os, "fstat", lambda fd: (_ for _ in ()).throw(OSError(errno.EACCES, "no")))
    with pytest.raises(OSError, match="no"):
        FolderSource.open(source, item)
    monkeypatch.undo()
    assert len(os.listdir("/dev/fd")) == len(before)


def test_a_file_that_always_ends_early_is_not_blamed_on_permissions(tmp_path):
    (tmp_path / "1.bin").write_bytes(b"12345")
    source = OddFolder(tmp_path, lambda number, file, size: b"")
    with pytest.raises(FileFailed, match=r"it ended after 0 of 5 bytes.* Try again") as caught:
        read_item(source, source.list().items[0], Retries())
    assert "permission" not in str(caught.value)


@pytest.mark.parametrize(("ahead_s", "fraction_ns", "tick_s"), [(0, 0, 2.0), (30, 0, 2.0), (30, 1, 0.01)])
@pytest.mark.parametrize("can_hang", [False, True])
def test_a_file_is_not_read_before_a_change_would_show_in_its_time(
    tmp_path, monkeypatch, ahead_s, fraction_ns, tick_s, can_hang
):
    path = tmp_path / "1.bin"
    path.write_bytes(b"old")
    modified_ns = (int(time.time()) + ahead_s) * 10**9 + fraction_ns
    pauses: list[float] = []

    def rewrite(seconds: float) -> None:
        pauses.append(seconds)
        path.write_bytes(b"new")
        os.utime(path, ns=(modified_ns, modified_ns))

    os.utime(path, ns=(modified_ns, modified_ns))
    source = FolderSource(tmp_path)
    source.can_hang = can_hang
    monkeypatch.setattr("colabkit.storage.sources.reads._TICK_NS", 10**7)
    monkeypatch.setattr(time, "sleep", rewrite)
    # If the clock of the file system is ahead, the change time is ahead, too.
    item = replace(source.list().items[0], ctime_ns=modified_ns)
    assert read_item(source, item, Retries()) == b"new"
    assert len(pauses) == 1
    assert 0 < pauses[0] <= tick_s


@pytest.mark.parametrize(("clock", "modified_s"), [(False, 0), (False, 1), (True, 30), (True, 9 * 3600), (False, 4e9)])
def test_a_file_with_an_old_time_or_one_that_a_program_set_is_read_at_once(tmp_path, monkeypatch, clock, modified_s):
    path = tmp_path / "1.bin"
    path.write_bytes(b"data")
    modified_s = int(modified_s) + clock * int(time.time())
    os.utime(path, ns=(modified_s * 10**9, modified_s * 10**9))
    monkeypatch.setattr(time, "sleep", pytest.fail)
    source = FolderSource(tmp_path)
    assert read_item(source, source.list().items[0], Retries()) == b"data"


@pytest.mark.parametrize(("is_in_memory", "requested"), [(False, ["a", "b"]), (True, []), (None, [])])
def test_files_that_are_not_in_memory_are_read_ahead_and_missing_ones_are_skipped(
    tmp_path, monkeypatch, is_in_memory, requested
):
    def answer(*arguments: object) -> int:
        if is_in_memory is None:
            raise OSError(errno.EOPNOTSUPP, "the file system does not tell")
        if not is_in_memory:
            raise BlockingIOError
        return 1

    asked: list[str] = []
    monkeypatch.setattr(os, "preadv", answer)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *_: asked.append(Path(f"/proc/self/fd/{fd}").readlink().name))
    for name in "ab":
        (tmp_path / name).write_bytes(b"data")
    FolderSource(tmp_path).read_ahead([Item("a", 4), Item("missing", 4), Item("b", 4)])
    assert asked == requested
