"""Fixtures of tests that mount: hosted Colab, and skips where there is no FUSE or rclone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from far_mounts import has_fuse, has_rclone
from far_side import Colab, hosted_colab
from trees import needs


@pytest.fixture
def fuse() -> None:
    """Skip where nothing can be mounted."""
    needs("FUSE", has_fuse())


@pytest.fixture
def rclone() -> None:
    """Skip where rclone cannot mount."""
    needs("rclone", has_rclone())


@pytest.fixture
def colab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Colab]:
    """Be in hosted Colab, whose Drive is a real mount of a folder."""
    with hosted_colab(tmp_path, monkeypatch) as colab:
        yield colab
