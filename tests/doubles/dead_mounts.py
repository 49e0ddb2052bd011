"""A mount that no longer answers, on any Python version."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def break_mount(point: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder behave like a dead mount point: every access to a path in it fails with ENOTCONN."""
    stat = os.stat

    def fail(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(point)):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", fail)
    # Since Python 3.14, these methods of `Path` do not raise.
    monkeypatch.setattr(Path, "is_dir", os.path.isdir)
    monkeypatch.setattr(Path, "is_file", os.path.isfile)
    monkeypatch.setattr(Path, "exists", os.path.exists)
