"""Fixtures for the storage tests: quick retries without proxies, and a fake Drive for gdown."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from fake_drive import authority, drive, gdown
from waiting import wait_until

from colabkit.storage.fetching import transfer
from colabkit.storage.sources import reads

# Re-export these fixtures for the tests in this folder.
__all__ = ["authority", "drive", "gdown"]


@pytest.fixture
def plain_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make retries quick, ignore proxies, and check that no thread remains."""
    monkeypatch.setattr(transfer, "_BACK_OFF_S", 0.001)
    monkeypatch.setattr(reads, "_BACK_OFF_S", 0.001)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    yield
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("colabkit-")])
