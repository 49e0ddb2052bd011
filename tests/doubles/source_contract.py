"""Checks of the contract that every source must keep."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from colabkit.storage.sources.items import Item, Source
from colabkit.storage.sources.reads import Retries, read_item
from colabkit.storage.sources.registry import open_records, open_source

FILES: Mapping[str, bytes] = {
    "cats/1.jpg": b"meow" * 100,
    "cats/deep/er/2.jpg": bytes(range(256)) * 3,
    "cats/empty.txt": b"",
    "dogs/-rf": b"w",
    "dogs/a b.jpg": os.urandom(1 << 10),
    "large.bin": os.urandom((1 << 20) + 12345),
    "zebra.txt": b"stripes" * 1000,
    "猫.png": b"cat",
}
UNDECODABLE = os.fsdecode(b"dogs/caf\xe9.jpg")


def check_source(source: Source, expected: Mapping[str, bytes], is_sorted: bool = True) -> None:
    """Check a source that must contain exactly the given files."""
    listing = source.list()
    paths = [item.path for item in listing.items]
    assert paths == (sorted(expected) if is_sorted else list(expected))
    assert {item.path: item.size for item in listing.items} == {path: len(data) for path, data in expected.items()}
    assert listing.total_bytes == sum(map(len, expected.values()))
    assert source.list() == listing, "a second listing of the same files differs"
    assert isinstance(source.can_hang, bool)
    assert all(read_item(source, item, Retries()) == expected[item.path] for item in listing.items)
    check_threads(source, listing.items, expected)
    for item in listing.items:
        check_seek(source, item, expected[item.path])
    source.close()
    assert all(read_item(source, item, Retries()) == expected[item.path] for item in listing.items), "after close()"
    source.close()
    assert source.list() == listing
    source.close()
    source.close()


def contents(source: Source | str | Path) -> dict[str, bytes]:
    """Return the bytes of all items of a source, or of the source at a path."""
    opened = source if isinstance(source, Source) else open_records(source) or open_source(source)
    return {item.path: read_item(opened, item, Retries()) for item in opened.list().items}


def check_threads(source: Source, items: tuple[Item, ...], expected: Mapping[str, bytes]) -> None:
    """Check that 8 threads that read all items concurrently get the same bytes."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda item: (item.path, read_item(source, item, Retries())), items * 8))
    assert all(data == expected[path] for path, data in found)


def check_seek(source: Source, item: Item, data: bytes) -> None:
    """Check that an open item can be read after seeking forward and backward."""
    with source.open(item) as file:
        assert file.read(10) == data[:10]
        for place in (len(data) // 2, len(data), 0, max(0, len(data) - 7)):
            assert file.seek(place) == place
            assert file.tell() == place
            assert file.read(7) == data[place : place + 7]
            assert file.tell() == min(len(data), place + 7)
        assert file.seek(0, os.SEEK_END) == len(data)
        assert file.read(1) == b""
        file.seek(0)
        assert file.read() == data


def check_untouched(folder: Path, act: Callable[[], object]) -> None:
    """Check that `act` changes no names, bytes or modification times in a folder."""
    before = _state(folder)
    act()
    assert _state(folder) == before


def _state(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def write_tree(folder: Path, files: Mapping[str, bytes]) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder
