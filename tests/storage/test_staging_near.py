"""Where near copies go, tmpfs or disk, and how their space is given back."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from near_copies import MemorySource, copy, data_of, state_of, zipped
from trees import make_tree

from colabkit.errors import (
    ColabkitError,
    NotEnoughSpace,
    NotSealed,
    SourceMissing,
    TargetExists,
)
from colabkit.foundation import file_changes
from colabkit.foundation.environment.limits import MemoryReport
from colabkit.storage.sources.items import STAGE_SEAL
from colabkit.storage.staging import places
from colabkit.storage.staging.api import unstage

GIB = 1 << 30


@pytest.fixture
def archive(image_tree, tmp_path):
    """Return a zip archive of the image tree."""
    return zipped(image_tree, tmp_path / "tree.zip")


@pytest.fixture
def tmpfs(tmp_path, monkeypatch):
    """Return a folder in the place of tmpfs, with 10 GiB free on a machine with 12 GiB of RAM available."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(places, "TMPFS", folder)
    monkeypatch.setattr(places, "_may_mount", lambda: False)
    monkeypatch.setattr(places, "memory_limits", lambda read: MemoryReport(13 * GIB, 12 * GIB, "machine"))
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 10 * GIB)
    return folder


def test_auto_takes_tmpfs_where_the_bytes_fit(image_tree, tmpfs):
    report = copy(image_tree, "auto")
    assert report.path.parent == tmpfs / f"colabkit-{os.getuid()}"
    assert report.target == "tmpfs"
    assert "fit in the 9.0 GiB of tmpfs" in report.why
    assert copy(image_tree, "auto").reused
    assert copy(image_tree, "tmpfs").reused


def test_auto_takes_disk_where_tmpfs_would_starve_training(image_tree, tmpfs, near_storage, monkeypatch):
    monkeypatch.setattr(places, "memory_limits", lambda read: MemoryReport(4 * GIB, 2 * GIB, "machine"))
    report = copy(image_tree, "auto")
    assert (report.target, report.path.parent) == ("disk", near_storage)
    assert "do not fit" in report.why
    assert copy(image_tree, "auto").reused


@pytest.mark.parametrize(
    ("available", "free", "room"),
    [(12, 10, 9), (12, 1, 1), (4, 10, 2), (2, 10, 0), (1, 10, 0), (40, 100, 30)],
)
def test_tmpfs_leaves_two_gib_or_a_quarter_of_ram_to_training(tmpfs, monkeypatch, available, free, room):
    monkeypatch.setattr(places, "memory_limits", lambda read: MemoryReport(64 * GIB, available * GIB, "machine"))
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: free * GIB)
    assert places.tmpfs_room() == room * GIB


def test_without_tmpfs_auto_is_disk_and_insisting_is_refused(image_tree, tmpfs):
    tmpfs.rmdir()
    with pytest.raises(NotEnoughSpace):
        copy(image_tree, "tmpfs")
    assert not tmpfs.exists()
    assert copy(image_tree, "auto").target == "disk"


def test_unstage_gives_the_space_back(image_tree, archive, near_storage):
    for report in (copy(image_tree), copy(archive)):
        given = unstage(report)
        assert given.freed_bytes == report.staged_bytes
        assert not report.path.exists()
    kept = copy(archive, extract=False)
    unstage(kept.path)
    unstage(str(copy(image_tree).path))
    assert list(near_storage.iterdir()) == []


def test_unstage_refuses_what_stage_did_not_make(image_tree, tmp_path):
    forged = make_tree(tmp_path / "forged", 1)
    (forged / STAGE_SEAL).write_text('{"format": 1}')
    before = state_of(image_tree), state_of(forged)
    with pytest.raises(SourceMissing, match=r"it was not staged, so there is nothing to remove\. Name the path that"):
        unstage(tmp_path / "nowhere")
    for path in (image_tree, image_tree / "ants" / "000.png", forged, forged / "ants"):
        with pytest.raises(NotSealed, match=r"it was not staged and is no local copy, so it was left alone\. Name the"):
            unstage(path)
    assert (state_of(image_tree), state_of(forged)) == before


def test_unstage_takes_no_file_of_a_copy_for_the_copy(tmp_path):
    report = copy(MemorySource({"readme.png": b"x", "cats/1.png": b"y"}), tmp_path / "near")
    for inside in ("readme.png", "cats", "cats/1.png", STAGE_SEAL):
        with pytest.raises(NotSealed):
            unstage(report.path / inside)
    assert copy(MemorySource({}), report.path).reused


def test_half_a_copy_is_never_found_after_a_failing_unstage(image_tree, monkeypatch):
    report = copy(image_tree)

    def remove_half(path: Path) -> None:
        next(Path(path).rglob("*.png")).unlink()
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(file_changes.shutil, "rmtree", remove_half)
        with pytest.raises(ColabkitError):
            unstage(report)
    assert not report.path.exists()
    assert data_of(copy(image_tree).path) == data_of(image_tree)


@pytest.mark.parametrize("seal", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "skipped": 3}', "\xff"])
def test_a_folder_with_a_broken_seal_is_no_near_copy(image_tree, seal):
    report = copy(image_tree)
    (report.path / STAGE_SEAL).write_text(seal, encoding="latin-1")
    with pytest.raises(NotSealed):
        unstage(report)
    with pytest.raises(TargetExists):
        copy(image_tree)
