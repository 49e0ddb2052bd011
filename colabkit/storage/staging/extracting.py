"""Archives become folders: their members are written by the same journal as other files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO
from zlib import crc32

from colabkit.storage.sources.concurrency import Threads
from colabkit.storage.sources.engine import BLOCK_BYTES, Block, Reading, block_offsets
from colabkit.storage.sources.items import Item
from colabkit.storage.sources.reads import Retries, read_blocks
from colabkit.storage.sources.tar_archive import TarSource
from colabkit.storage.sources.zip_archive import ZipSource
from colabkit.storage.staging.copying import Copy

Archive = ZipSource | TarSource


def extracted(archive: Archive, missing: list[Item], copy: Copy, threads: Threads, retries: Retries) -> Iterator[Item]:
    """Write members of an archive, and yield each when it is whole."""
    if isinstance(archive, TarSource) and archive.is_sequential:
        for item, file in archive.walk({item.path for item in missing}):
            copy.write_whole(item, _blocks_of(file))
            yield item
        return
    with Reading(archive, threads, retries) as reading:
        small = [item for item in missing if item.size <= BLOCK_BYTES]
        for block in reading.blocks(copy.wanted(archive, small)):
            copy.write(block)
            yield block.item
    for item in missing:
        if item.size > BLOCK_BYTES:
            copy.write_whole(item, read_blocks(archive, item, BLOCK_BYTES, retries))
            yield item


def check_extracted(archive: Archive, items: list[Item], copy: Copy, retries: Retries) -> Iterator[Item]:
    """Read all members a second time, compare them with what was written, and yield each.

    Raises:
        Corrupt: if they differ.
    """
    for item, blocks in _all_blocks(archive, items, retries):
        for offset, data in zip(block_offsets(item.size), blocks, strict=False):
            copy.check(Block(item, offset, len(data), crc32(data), data))
        yield item


def _all_blocks(archive: Archive, items: list[Item], retries: Retries) -> Iterator[tuple[Item, Iterator[bytes]]]:
    if isinstance(archive, TarSource) and archive.is_sequential:
        for item, file in archive.walk({item.path for item in items}):
            yield item, _blocks_of(file)
    else:
        for item in items:
            yield item, read_blocks(archive, item, BLOCK_BYTES, retries)


def _blocks_of(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block
