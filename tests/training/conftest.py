"""Fixtures for the training tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_folders import assert_nothing_runs


@pytest.fixture
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert_nothing_runs(tmp_path)
