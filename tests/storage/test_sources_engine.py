"""`ConcurrentReader`: exact, concurrent reads of items and blocks, with retries, and no open files at the end."""

from __future__ import annotations

import errno
import io
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from local_copies import MemorySource, WalkedSource
from reader_threads import no_reader_threads, reader_threads
from waiting import LONG_S, comes_true

from colabkit.errors import FileFailed, SourceChanged
from colabkit.storage.sources import concurrency, engine, reads
from colabkit.storage.sources.engine import Block, ConcurrentReader, ReadRequest, block_offsets
from colabkit.storage.sources.folder import FolderSource
from colabkit.storage.sources.items import Item, Source
from colabkit.storage.sources.reads import Retries, SharedFile

BLOCK = 1000
CHUNK = 300
DATA = {"empty": b"", "small": b"abc", "a block": os.urandom(BLOCK), "more": os.urandom(BLOCK + 1)} | {
    f"large{number}": os.urandom(5 * BLOCK + number) for number in range(4)
}
FAILS = [errno.EIO, errno.ENOTCONN, errno.ESTALE]
Preadv = Callable[[int, list[memoryview], int], int]


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(reads, "_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(reads, "_BACK_OFF_S", 0)
    monkeypatch.setattr(concurrency, "_TICK_S", 0.005)
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.05)
    before = os.listdir("/dev/fd")
    yield
    assert comes_true(no_reader_threads)
    assert len(os.listdir("/dev/fd")) == len(before)


class Drive(FolderSource):
    """A folder that records which items are opened."""

    def __init__(self, path: Path, can_hang: bool = True) -> None:
        super().__init__(path)
        self.can_hang = can_hang
        self.opened: list[str] = []

    def open(self, item: Item) -> BinaryIO:
        self.opened.append(item.path)
        return super().open(item)

    def read_at_once(self, item: Item) -> bytes | None:
        self.opened.append(item.path)
        return super().read_at_once(item)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "files"
    place.mkdir()
    for name, data in DATA.items():
        (place / name).write_bytes(data)
    return place


def wanted(source: Source, items: Iterable[Item]) -> Iterator[ReadRequest]:
    for item in items:
        if item.size <= BLOCK:
            yield ReadRequest(item, 0, item.size)
            continue
        file = SharedFile(source, item, block_offsets(item.size))
        for offset in block_offsets(item.size):
            yield ReadRequest(item, offset, min(BLOCK, item.size - offset), file)


def put_together(blocks: Iterable[Block]) -> dict[str, bytes]:
    """Join the blocks of all items; check that each block has the right CRC and is returned once."""
    found: dict[str, dict[int, bytes]] = {}
    for block in blocks:
        assert block.data is not None
        data = bytes(block.data)
        assert (len(data), zlib.crc32(data)) == (block.size, block.crc)
        assert block.offset not in found.setdefault(block.item.path, {})
        found[block.item.path][block.offset] = data
    return {path: b"".join(data for _, data in sorted(parts.items())) for path, parts in found.items()}


def read(source: Source, items: Iterable[Item] | None = None, threads: int | str = "auto") -> dict[str, bytes]:
    with ConcurrentReader(source, threads, retries := Retries()) as reader:  # type: ignore[arg-type]
        found = put_together(reader.blocks(wanted(source, source.list().items if items is None else items)))
    assert retries.on_retry is None
    return found


def only(source: Source, name: str) -> list[Item]:
    return [item for item in source.list().items if item.path == name]


@pytest.fixture
def preadv(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[int, Preadv, int, list[memoryview], int], int]], None]:
    """Return a function that replaces `os.preadv`; the new function also gets the call number and the original."""
    real, lock, count = os.preadv, threading.Lock(), [0]

    def put(other: Callable[[int, Preadv, int, list[memoryview], int], int]) -> None:
        def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
            with lock:
                count[0] += 1
                number = count[0]
            return other(number, real, fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", counted)

    return put


@pytest.mark.parametrize("threads", [1, 3, "auto"])
@pytest.mark.parametrize("can_hang", [False, True])
def test_all_bytes_are_read_once_and_each_file_is_opened_once(folder, can_hang, threads):
    source = Drive(folder, can_hang)
    assert read(source, threads=threads) == DATA
    assert sorted(source.opened) == sorted(DATA)


@pytest.mark.parametrize("threads", [1, 3, "auto"])
@pytest.mark.parametrize("can_hang", [False, True])
def test_sources_without_descriptors_are_read_by_seeking(can_hang, threads):
    source = MemorySource(DATA)
    source.can_hang = can_hang
    assert read(source, threads=threads) == DATA


def test_items_begun_early_are_returned_once(folder):
    source = Drive(folder)
    items = source.list().items
    with ConcurrentReader(source, "auto", Retries()) as reader:
        begun = {item for item in items if reader.begin(item)}
        assert {item.path for item in begun} == {"empty", "small", "a block"}
        rest = [item for item in items if item not in begun]
        assert put_together(reader.blocks(wanted(source, rest))) == DATA
    assert sorted(source.opened) == sorted(DATA)


def test_only_small_items_of_sources_that_can_hang_are_read_ahead_within_the_memory_limit(folder, monkeypatch):
    local = Drive(folder, can_hang=False)
    with ConcurrentReader(local, "auto", Retries()) as reader:
        assert not any(reader.begin(item) for item in local.list().items)
    source = Drive(folder)
    with ConcurrentReader(source, 2, Retries()) as reader:
        for item in source.list().items:
            assert reader.begin(item) == (item.size <= BLOCK)
    monkeypatch.setattr(concurrency, "_HELD_BYTES", 2 * BLOCK)
    (item,) = only(source, "a block")
    with ConcurrentReader(source, "auto", Retries()) as reader:
        assert [reader.begin(item) for _ in range(4)] == [True, True, False, False]


def test_blocks_of_local_sources_are_placed_by_the_threads_that_read_them(folder):
    source, placed, threads = Drive(folder, can_hang=False), [], set()

    def place(block: Block) -> None:
        assert block.data is not None
        placed.append(Block(block.item, block.offset, block.size, block.crc, bytes(block.data)))
        threads.add(threading.current_thread())

    with ConcurrentReader(source, 3, Retries(), place=place) as reader:
        blocks = list(reader.blocks(wanted(source, source.list().items)))
    large = {path for path, data in DATA.items() if len(data) > BLOCK}
    assert {block.item.path for block in blocks if block.data is None} == large
    assert put_together(placed) == {path: DATA[path] for path in large}
    assert put_together(block for block in blocks if block.data is not None).keys() == DATA.keys() - large
    assert {(block.item, block.offset, block.crc) for block in placed} <= {(b.item, b.offset, b.crc) for b in blocks}
    assert threading.current_thread() not in threads


def test_threads_that_may_be_late_never_place_blocks(folder):
    source = Drive(folder)
    with ConcurrentReader(source, 3, Retries(), place=lambda block: pytest.fail("placed")) as reader:
        assert put_together(reader.blocks(wanted(source, source.list().items))) == DATA


@pytest.mark.parametrize("number", FAILS)
def test_a_block_resumes_at_the_offset_reached_in_a_reopened_file(folder, preadv, number):
    offsets = []

    def flaky(count: int, real: Preadv, fd: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        if count in (2, 3):
            raise OSError(number, "flaky")
        return real(fd, buffers, offset)

    preadv(flaky)
    source, retries = Drive(folder), Retries()
    with ConcurrentReader(source, 1, retries) as reader:
        found = put_together(reader.blocks(wanted(source, only(source, "large0"))))
    assert found == {"large0": DATA["large0"]}
    assert offsets[:5] == [0, CHUNK, CHUNK, CHUNK, 2 * CHUNK]
    assert retries.count == 2
    assert source.opened == ["large0"] * 3


@pytest.mark.parametrize("threads", [1, 4])
def test_a_block_that_keeps_failing_raises(folder, preadv, threads):
    def fails(_count: int, _real: Preadv, _fd: int, _buffers: list[memoryview], _offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    preadv(fails)
    source = Drive(folder)
    with pytest.raises(FileFailed, match=r"Cannot read 'large0' of .*Input/output error"):
        read(source, only(source, "large0"), threads)


@pytest.mark.parametrize("times", [1, 1000])
def test_a_file_that_ends_before_its_reported_size_is_retried(folder, preadv, times):
    preadv(lambda count, real, fd, buffers, offset: 0 if 3 <= count < 3 + times else real(fd, buffers, offset))
    source = Drive(folder)
    if times == 1:
        assert read(source, only(source, "large1"), 1) == {"large1": DATA["large1"]}
    else:
        with pytest.raises(FileFailed, match="it ended after"):
            read(source, only(source, "large1"), 1)


@pytest.mark.parametrize("most", [1, 7, 299])
def test_short_reads_are_joined(folder, preadv, most):
    preadv(lambda count, real, fd, buffers, offset: real(fd, [buffers[0][:most]], offset))
    assert read(Drive(folder)) == DATA


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def shrink(path: Path) -> None:
    os.truncate(path, 2500)


def touch(path: Path) -> None:
    os.utime(path, (1, 1))


@pytest.mark.parametrize("can_hang", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("change", [grow, shrink, touch])
def test_a_file_modified_while_its_blocks_are_read_raises_source_changed(folder, preadv, change, threads, can_hang):
    def changing(count: int, real: Preadv, fd: int, buffers: list[memoryview], offset: int) -> int:
        if count == 5:
            change(folder / "large0")
        return real(fd, buffers, offset)

    preadv(changing)
    source = Drive(folder, can_hang)
    with pytest.raises(SourceChanged, match="large0"):
        read(source, only(source, "large0"), threads)


def test_a_shorter_source_without_descriptors_raises_source_changed():
    items = MemorySource(DATA).list().items
    short = MemorySource({path: data[:-1] for path, data in DATA.items()})
    for item in items:
        if item.size:
            with pytest.raises(SourceChanged):
                read(short, [item])


@pytest.mark.parametrize("can_hang", [False, True])
def test_leaving_early_closes_all_files(folder, can_hang):
    source = Drive(folder, can_hang)
    with ConcurrentReader(source, 2, Retries()) as reader:
        blocks = reader.blocks(wanted(source, only(source, "large3")))
        next(blocks)
        blocks.close()


def test_a_late_block_does_not_close_the_file_of_its_second_attempt(folder, preadv, monkeypatch):
    monkeypatch.setattr(engine, "STALLED_S", 0.1)
    late: list[threading.Thread] = []
    go_on = threading.Event()
    last = 5 * BLOCK

    def stalls_once(_count: int, real: Preadv, fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == last and not late:
            late.append(threading.current_thread())
            assert go_on.wait(LONG_S)
        elif offset == last:
            go_on.set()
            late[0].join(LONG_S)
        return real(fd, buffers, offset)

    preadv(stalls_once)
    source = Drive(folder)
    try:
        assert read(source, only(source, "large3"), 3) == {"large3": DATA["large3"]}
    finally:
        go_on.set()
    assert source.opened == ["large3"]


def test_blocks_do_not_wait_forever_for_a_hanging_open_of_their_file(folder, monkeypatch):
    monkeypatch.setattr(reads, "_SHARED_OPEN_S", 0.01)
    source, stuck = Drive(folder), threading.Event()
    opens = source.open

    def open_slowly(item: Item) -> BinaryIO:
        file = opens(item)
        if len(source.opened) == 1:
            assert stuck.wait(LONG_S)
        return file

    source.open = open_slowly  # type: ignore[method-assign]
    with ConcurrentReader(source, 2, Retries()) as reader:
        blocks = []
        for block in reader.blocks(wanted(source, only(source, "large3"))):
            stuck.set()
            blocks.append(block)
        assert put_together(blocks) == {"large3": DATA["large3"]}


def test_a_hanging_close_does_not_delay_the_end(folder, monkeypatch):
    monkeypatch.setattr(engine, "_CLOSE_S", 0.05)
    stuck = threading.Event()

    class SlowFile(io.FileIO):
        def close(self) -> None:
            if not self.closed:
                stuck.wait(LONG_S)
            super().close()

    source = Drive(folder)
    source.open = lambda item: SlowFile(folder / item.path)  # type: ignore[method-assign, assignment, return-value]
    with ConcurrentReader(source, 1, Retries()) as reader:
        blocks = reader.blocks(wanted(source, only(source, "large3")))
        next(blocks)
        blocks.close()
    assert len(reader_threads()) == 1
    stuck.set()


def test_retries_are_reported_to_the_current_reading(folder):
    reported = []
    retries = Retries(lambda: reported.append("outside"))
    with ConcurrentReader(Drive(folder), 1, retries):
        with ConcurrentReader(Drive(folder), 1, retries):
            retries.add()
        retries.add()
    assert reported == []
    retries.add()
    assert reported == ["outside"]
    assert retries.count == 3


def test_a_sequential_source_is_read_in_one_pass_as_items_or_requested_blocks():
    source = WalkedSource(DATA)
    items = [item for item in source.list().items if item.path != "large2"]
    expected = {path: data for path, data in DATA.items() if path != "large2"}
    for some in ([ReadRequest(item, 0, item.size) for item in items], wanted(source, items)):
        with ConcurrentReader(source, "auto", Retries()) as reader:
            assert put_together(reader.blocks(some)) == expected
    assert source.passes == 2
    with ConcurrentReader(source, "auto", Retries()) as reader:
        rest = [one for one in wanted(source, only(source, "large3")) if one.offset not in (0, 3 * BLOCK)]
        assert [block.offset // BLOCK for block in reader.blocks(rest)] == [1, 2, 4, 5]
