"""The template runs in a kernel like hosted Colab's, with a slow FUSE mount as Drive at /content/drive."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from far_mounts import has_fuse, mounted_at
from far_side import Colab
from notebook_runs import NotebookRun, colab_kernel, with_parameters
from slow_drive import detach
from trees import needs

from colabkit.storage import sample_archive

CONTENT = Path("/content")
POINT = CONTENT / "drive"
LATENCY_S = 0.01


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Colab]:
    """Yield a fake Colab whose Drive holds a folder of images and is not mounted yet; remove it after the test."""
    needs("FUSE", has_fuse())
    if os.geteuid() != 0:
        pytest.skip(f"only root can make {CONTENT}")
    if CONTENT.exists() and (mounted_at(POINT) or {*CONTENT.iterdir()} - {POINT}):
        pytest.skip(f"{CONTENT} already exists")
    colab = Colab(tmp_path / "colab")
    colab.plan(point=str(POINT), drive={"latency_s": LATENCY_S})
    with zipfile.ZipFile(sample_archive("digits")) as archive:
        chosen = [name for name in archive.namelist() if name.endswith("0.png")]
        archive.extractall(colab.root / "MyDrive", chosen)
    try:
        POINT.mkdir(parents=True, exist_ok=True)
        yield colab
    finally:
        detach(POINT)
        POINT.rmdir()
        CONTENT.rmdir()


def run_on_drive(colab: Colab, folder: Path) -> NotebookRun:
    """Run the template in a new kernel without local copies, as on a new machine."""
    notebook = with_parameters("colabkit_template", SOURCE="drive:digits", EPOCHS="2")
    with colab_kernel(folder, COLAB_DOUBLE=str(colab._file), HOME=str(colab.home)) as started:
        return started.run(notebook)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_template_trains_from_drive_and_saves_there_and_resumes_in_the_next_session(
    drive: Colab, tmp_path: Path
) -> None:
    first = run_on_drive(drive, tmp_path / "first")
    assert "are classified correctly: small network" in first.text("train")
    saved = drive.root / "MyDrive" / "colabkit"
    assert len([*saved.rglob("model.pt")]) == 1
    assert len([*saved.rglob("*.h5")]) == 1
    assert mounted_at(POINT) == []

    second = run_on_drive(drive, tmp_path / "second")
    assert "complete since an earlier call, so nothing was trained" in second.text("train")
    assert drive.count("consent") == 2
