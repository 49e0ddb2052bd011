"""Small packs of shards behind a web server, and the disk usage of their caches."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from contract import make_shards
from http_servers import Handler, WebServer, running

from colabkit.foundation import local_root

COUNTS = ({"train": 9, "test": 2}, {"train": 4}, {"train": 7}, {"train": 8, "test": 1}, {"train": 5}, {"train": 6})
SHAPE = (16, 16, 3)


class PackServer(WebServer):
    """A server of the files in a folder; `damage` maps file names to functions that change the bytes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(b"")
        self.folder = folder
        self.damage: dict[str, Callable[[bytes], bytes]] = {}
        self.plans = [self._serve]
        self.fetched: Counter[str] = Counter()
        self.is_cut = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/packs/birds.h5"

    def _serve(self, handler: Handler) -> None:
        name = handler.path.rpartition("/")[2]
        if self.is_cut:
            return
        with self.lock:
            self.fetched[name] += 1
        data = self.damage.get(name, bytes)((self.folder / name).read_bytes())
        handler.answer(200, {"ETag": f'"{name}"'}, data)


@contextmanager
def pack_server(folder: Path, scale: int = 1) -> Iterator[PackServer]:
    """Make a pack of six shards, with `scale` times as many samples as in `COUNTS`, and serve it."""
    folder.mkdir()
    counts = [{split: scale * count for split, count in one.items()} for one in COUNTS]
    make_shards(folder / "birds.h5", *counts, shape=SHAPE)
    with running(PackServer(folder)) as server:
        yield server


def shard_bytes(folder: Path, *numbers: int) -> int:
    """Return the bytes on disk of some shards, by default the largest."""
    sizes = [-(-path.stat().st_size // 4096) * 4096 for path in sorted(folder.glob("birds-*.h5"))]
    return sum(sizes[number] for number in numbers) if numbers else max(sizes)


def cached(folder: Path | None = None) -> set[str]:
    """Return the names of the shards in all caches."""
    return {path.name for path in cache_root(folder).rglob("birds-*.h5") if path.is_file()}


def cache_root(folder: Path | None = None) -> Path:
    return (folder or local_root(os.environ)) / "shards"


def disk_usage(folder: Path) -> int:
    """Return the bytes on disk of all files below a folder."""
    return sum(_disk_bytes(folder).values())


def _disk_bytes(folder: Path) -> dict[int, int]:
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            # Ignore files that disappear meanwhile.
            with suppress(OSError):
                stats = os.lstat(os.path.join(place, name))
                found[stats.st_ino] = stats.st_blocks * 512
    return found


@contextmanager
def largest_usage(folder: Path, every_s: float = 0.002) -> Iterator[list[int]]:
    """Measure the disk usage of a folder repeatedly within the block; the yielded list holds the maximum."""
    largest, is_over = [0], threading.Event()

    def measure() -> None:
        while not is_over.wait(every_s):
            before, after = _disk_bytes(folder), _disk_bytes(folder)
            # Ignore a measurement during which files came or went, because these may never have existed together.
            if before.keys() == after.keys():
                largest[0] = max(largest[0], sum(before.values()))

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield largest
    finally:
        is_over.set()
        thread.join()
