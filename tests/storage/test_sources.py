"""A source that waits before each call, as a drive does."""

from __future__ import annotations

import time

from colabkit.storage.sources.folder import FolderSource
from colabkit.storage.sources.reads import Retries, read_item
from colabkit.storage.sources.registry import SlowSource


def test_every_call_waits_once_and_gives_what_the_inner_source_gives(image_tree, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    slow = SlowSource(FolderSource(image_tree), 0.25)
    assert {item.path: read_item(slow, item, Retries()) for item in slow.list().items} == {
        path.relative_to(image_tree).as_posix(): path.read_bytes() for path in image_tree.rglob("*.png")
    }
    assert slow.name == str(image_tree)
    assert pauses == [0.25] * 25
