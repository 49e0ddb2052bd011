"""Fixtures for tests of storage: a network without proxies and pauses, and a Drive that gdown talks to."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from fake_drive import authority, drive, gdown
from waiting import wait_until

from colabkit.storage.fetching import transfer
from colabkit.storage.sources import reads

__all__ = ["authority", "drive", "gdown"]  # fixtures


@pytest.fixture
def plain_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tries follow each other at once, without a proxy, and see that no thread stays."""
    monkeypatch.setattr(transfer, "_BACK_OFF_S", 0.001)
    monkeypatch.setattr(reads, "_BACK_OFF_S", 0.001)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    yield
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("colabkit-")])
