"""A folder whose reads are counted and can be held up."""

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
    """A folder that counts its reads; each waits until `may_read` allows it."""

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
        """Let all reads through, also those that wait."""
        with self.changed:
            self.may_read = lambda _: True
            self.changed.notify_all()
