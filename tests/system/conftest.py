"""Fixtures for tests with mounts and browsers: a fake hosted Colab, JupyterLab, and skips for missing tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from far_mounts import has_fuse, has_rclone
from far_side import Colab, hosted_colab
from jupyter_lab import Lab, chromium, lab_server, opened_browser
from trees import needs
from warm_python import warm_launches


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


@pytest.fixture
def warm_ranks() -> Iterator[None]:
    """Start the processes of `notebook_launch()` without waiting for imports."""
    with warm_launches():
        yield


@pytest.fixture(scope="module")
def lab_environ() -> dict[str, str]:
    """Return environment variables for JupyterLab and its kernels; modules may override this fixture."""
    return {}


@pytest.fixture(scope="module")
def open_lab(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, lab_environ: dict[str, str]
) -> Iterator[Callable[[], Lab]]:
    """Return a function that opens a new page of JupyterLab; server and browser run once per module."""
    path = chromium()
    pictures = pytestconfig.getoption("--pictures")
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    with lab_server(tmp_path_factory.mktemp("lab"), lab_environ) as server, opened_browser(path) as browser:
        yield lambda: Lab.new(browser, server, pictures)


@pytest.fixture
def lab(open_lab: Callable[[], Lab]) -> Iterator[Lab]:
    """Return a page of JupyterLab, whose kernels are shut down after the test."""
    lab = open_lab()
    yield lab
    lab.close()
