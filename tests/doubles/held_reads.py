"""A folder source that counts the opens of its files, and can delay opens."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from waiting import LONG_S

from colabkit.storage.sources.folder import FolderSource
from colabkit.storage.sources.items import Item


class HeldReads(FolderSource):
    """A folder source that counts the opens of each file in `reads`; each open waits until `may_read` allows it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.can_hang = True
        self.reads: Counter[str] = Counter()
        self.most = 0
        self.may_read: Callable[[str], bool] = lambda _: True
        self.changed = threading.Condition()
        self._in_flight = 0

    def open(self, item: Item) -> BinaryIO:
        with self.changed:
            self.reads[item.path] += 1
            self._in_flight += 1
            self.most = max(self.most, self._in_flight)
            self.changed.notify_all()
            try:
                assert self.changed.wait_for(lambda: self.may_read(item.path), LONG_S)
            finally:
                self._in_flight -= 1
        return super().open(item)

    def go_on(self) -> None:
        """Let all opens proceed, including waiting ones."""
        with self.changed:
            self.may_read = lambda _: True
            self.changed.notify_all()
