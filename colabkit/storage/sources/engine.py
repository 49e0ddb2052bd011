"""Read items, and blocks of large items, with many concurrent requests, for staging and packing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Self
from zlib import crc32

from colabkit.foundation import has_started
from colabkit.storage.sources.concurrency import STALLED_S, Calls, Threads, concurrently
from colabkit.storage.sources.items import Item, SequentialSource, Source, changed_item, unknown_item
from colabkit.storage.sources.level import Level
from colabkit.storage.sources.reads import Retries, SharedFile, blocks_passed, read_item

if TYPE_CHECKING:
    from typing_extensions import Buffer


BLOCK_BYTES = 4 << 20
"""Larger items are read in blocks of this many bytes, several at once."""

_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request for an entire item, or for one block of a large item whose blocks share an open file."""

    item: Item
    offset: int
    size: int
    file: SharedFile | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that were read, with their CRC32; `data` is None if the bytes have already been written."""

    item: Item
    offset: int
    size: int
    crc: int
    data: Buffer | None


_SIZE: Callable[[ReadRequest], int] = attrgetter("size")


def block_offsets(size: int) -> range:
    """Return the offsets of the blocks of an item of `size` bytes; an empty item has one empty block."""
    return range(0, max(size, 1), BLOCK_BYTES)


class ConcurrentReader:
    """A reader of a source's items with many concurrent requests, and a context manager that stops its threads.

    With `threads="auto"`, the number of requests to a source that can hang grows while throughput grows, and halves on
    errors (`Level`). For other sources, it depends on how the first reads perform; local files are usually read one at
    a time. Transient errors are retried as in `read_item`. If the source can hang, a stalled read is abandoned and
    repeated once.

    Args:
        source: the source of the items.
        threads: number of concurrent reads, or `"auto"`.
        retries: counts the retries.
        on_wait: called several times a second while `blocks()` waits for reads in other threads.
        place: writes a block of a large item to its destination; not called if the source can hang or is sequential.
            The reading threads call it, and each reuses one buffer, so `blocks()` yields such blocks without data.
        stalled_s: seconds without data after which a read of a source that can hang is abandoned; None for 60 seconds.
    """

    def __init__(
        self,
        source: Source,
        threads: Threads,
        retries: Retries,
        on_wait: Callable[[], None] | None = None,
        place: Callable[[Block], None] | None = None,
        stalled_s: float | None = None,
    ) -> None:
        self._source = source
        self._threads = threads
        self._retries = retries
        self._on_wait = on_wait
        self._place = None if source.can_hang else place
        self._own = threading.local()
        self._level = Level() if threads == "auto" else Level(threads, is_fixed=True)
        self._calls: Calls[ReadRequest, Block] | None = None
        self._shared: set[SharedFile] = set()
        self._before: Callable[[], None] | None = None
        if source.can_hang:
            self._calls = Calls(self._read, self._level, stalled_s or STALLED_S, on_wait)

    def begin(self, item: Item) -> bool:
        """Start reading a small item before all requests are known; return whether it was started.

        `blocks()` also yields these items. Only sources that can hang are read ahead, up to 64 MiB or 4,096 items.
        """
        if self._calls is None or item.size > BLOCK_BYTES or not self._calls.may_begin:
            return False
        self._calls.make(ReadRequest(item, 0, item.size), item.size)
        return True

    def blocks(self, wanted: Iterable[ReadRequest]) -> Generator[Block, None, None]:
        """Yield all started and requested blocks in order of completion, or in stored order for a sequential source.

        Raises:
            TimedOut: if a read stalled twice.
            ColabkitError: the errors of `read_item`, and, after the last block, of the source's `check_unchanged()`.
        """
        if isinstance(self._source, SequentialSource) and self._source.is_sequential:
            yield from self._passed_through(self._source, wanted)
        elif self._calls is None:
            yield from concurrently(
                self._read, wanted, self._threads, size_of=_SIZE, level=self._level, on_wait=self._on_wait
            )
        else:
            yield from self._calls.results(wanted, _SIZE)
            if (check_unchanged := getattr(self._source, "check_unchanged", None)) is not None:
                check_unchanged()

    def _passed_through(self, source: SequentialSource, wanted: Iterable[ReadRequest]) -> Iterator[Block]:
        items: dict[str, Item] = {}
        # Requested offsets by path, for items that are requested in blocks.
        offsets: dict[str, set[int]] = {}
        for one in wanted:
            items[one.item.path] = one.item
            if one.file is not None:
                offsets.setdefault(one.item.path, set()).add(one.offset)
        left = set(items)
        for item, file in source.walk(items):
            if item != items[item.path]:
                raise changed_item(source.name, items[item.path], item.size)
            left.discard(item.path)
            some = offsets.get(item.path)
            offset = 0
            for data in blocks_passed(source.name, item, file, item.size if some is None else BLOCK_BYTES):
                if some is None or offset in some:
                    yield Block(item, offset, len(data), crc32(data), data)
                offset += len(data)
        if left:
            raise unknown_item(source.name, items[min(left)])

    def _read(self, one: ReadRequest) -> Block:
        if one.file is None:
            data = read_item(self._source, one.item, self._retries)
            return Block(one.item, 0, one.size, crc32(data), data)
        self._shared.add(one.file)
        if self._place is not None and not hasattr(self._own, "buffer"):
            self._own.buffer = bytearray(BLOCK_BYTES)
        buffer = memoryview(bytearray(one.size) if self._place is None else self._own.buffer)[: one.size]
        one.file.read_into(buffer, one.offset, self._retries)
        block = Block(one.item, one.offset, one.size, crc32(buffer), buffer)
        if self._place is not None:
            self._place(block)
            block = replace(block, data=None)
        return block

    def __enter__(self) -> Self:
        self._before, self._retries.on_retry = self._retries.on_retry, self._level.refused
        return self

    def __exit__(self, *error: object) -> None:
        self._retries.on_retry = self._before
        if self._calls is not None:
            self._calls.__exit__(*error)
        if any(file.is_open for file in list(self._shared)):
            # On a hanging mount, closing a file can hang too.
            closing = threading.Thread(target=self._close_shared, name="colabkit-read-close", daemon=True)
            # If the system allows no more threads, the garbage collector closes the files.
            if has_started(closing):
                closing.join(_CLOSE_S if self._source.can_hang else None)

    def _close_shared(self) -> None:
        for file in list(self._shared):
            file.close()
