"""Fixtures for tests with mounts: a fake hosted Colab, and skips without FUSE or rclone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from far_mounts import has_fuse, has_rclone
from far_side import Colab, hosted_colab
from trees import needs


@pytest.fixture
def fuse() -> None:
    needs("FUSE", has_fuse())


@pytest.fixture
def rclone() -> None:
    needs("rclone", has_rclone())


@pytest.fixture
def colab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Colab]:
    """Make this process look like hosted Colab, with a real mount of a folder as Drive."""
    with hosted_colab(tmp_path, monkeypatch) as colab:
        yield colab
