"""The plan of `stage()`: what will be read and written, where, and why, before anything is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from far_mounts import FuseMount, has_fuse
from near_copies import MemorySource, copy, data_of, zipped
from trees import leftovers, needs

from colabkit.errors import BadSource, InvalidOption, NotEnoughSpace
from colabkit.foundation import file_changes
from colabkit.foundation.environment.limits import MemoryReport
from colabkit.foundation.mount_table import DRIVEFS_FOLDER
from colabkit.foundation.processes import ProcessResult
from colabkit.storage.staging import places
from colabkit.storage.staging.api import unstage

GIB = 1 << 30


@pytest.fixture
def spare(monkeypatch):
    """Return a function that sets the RAM that is available and what is free in tmpfs, in bytes."""

    def set_spare(ram: int, tmpfs: int) -> None:
        monkeypatch.setattr(places, "memory_limits", lambda read: MemoryReport(64 * GIB, ram, "machine"))
        free = file_changes.free_bytes
        monkeypatch.setattr(file_changes, "free_bytes", lambda path: tmpfs if path == places.TMPFS else free(path))

    return set_spare


def test_a_dry_run_writes_nothing_and_shows_the_plan(image_tree, tmp_path, near_storage, file_hook):
    file_hook(lambda operation, path: pytest.fail(f"{operation} {path}"))
    archive = zipped(image_tree, tmp_path / "a.zip")
    size = sum(map(len, data_of(image_tree).values()))
    for source, kind, read in ((image_tree, "folder", size), (archive, "archive", archive.stat().st_size)):
        report = copy(source, dry_run=True)
        plan = report.plan
        assert report.is_dry
        assert (plan.kind, plan.files, plan.read_bytes, plan.staged_bytes) == (kind, 24, read, size)
        assert (plan.target, plan.why, plan.path.parent) == ("disk", "as asked", near_storage)
        assert repr(report).startswith("Would stage ")
        assert "at most meanwhile" in report._repr_html_()
    assert copy(archive, extract=False, dry_run=True).plan.kind == "file"
    file_hook(None)
    assert copy(image_tree).path == copy(image_tree, dry_run=True).path


def test_the_plan_tells_what_an_interrupted_run_left(image_tree, file_hook):
    def stop(operation: str, path: Path) -> None:
        if path.name == "005.png":
            raise KeyboardInterrupt

    file_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        copy(image_tree)
    file_hook(None)
    plan = copy(image_tree, dry_run=True).plan
    assert plan.present_bytes > 0
    assert plan.why == "an interrupted run began there"
    assert "there already" in repr(plan)


def test_a_run_goes_on_where_it_began_whatever_there_is_room_for_now(image_tree, spare, file_hook, near_storage):
    spare(0, 0)

    def stop(operation: str, path: Path) -> None:
        if path.name == "005.png":
            raise KeyboardInterrupt

    file_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        copy(image_tree, "auto")
    file_hook(None)
    spare(64 * GIB, 64 * GIB)
    report = copy(image_tree, "auto")
    assert report.target == "disk"
    assert report.resumed_bytes
    assert leftovers(near_storage) == []


def test_an_archive_on_a_far_mount_needs_room_for_itself_and_its_files(image_tree, tmp_path):
    needs("FUSE", has_fuse())
    archive = zipped(image_tree, tmp_path / "root" / "a.zip" if make(tmp_path / "root") else tmp_path)
    room = copy(archive, dry_run=True).plan.peak_bytes
    assert 24 * 4096 <= room <= 24 * 6000, "files take whole pages"
    with FuseMount(tmp_path / "drive", tmp_path / "root", "fuse.other") as mount:
        plan = copy(mount.point / "a.zip", dry_run=True).plan
    assert plan.peak_bytes == room + archive.stat().st_size
    assert plan.cache_bytes == 0


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_on_drive_room_is_needed_twice_for_its_own_cache_too(image_tree, tmp_path, monkeypatch):
    needs("FUSE", has_fuse())
    monkeypatch.setenv("HOME", str(tmp_path))
    size = sum(map(len, data_of(image_tree).values()))
    with FuseMount(tmp_path / "drive", image_tree, "fuse.drive") as mount:
        plan = copy(mount.point, dry_run=True).plan
        assert plan.cache_bytes == size
        (tmp_path / "way").symlink_to(mount.point)
        assert copy(tmp_path / "way", dry_run=True).plan.cache_bytes == size, "a link to the drive is the drive"
        needed = plan.peak_bytes + size
        monkeypatch.setattr(
            file_changes, "free_bytes", lambda path: size - 1 if str(path).endswith(DRIVEFS_FOLDER) else 9 * needed
        )
        with pytest.raises(NotEnoughSpace, match="DriveFS caches"):
            copy(mount.point)
        monkeypatch.setattr(file_changes, "free_bytes", lambda path: needed - 1)
        with pytest.raises(NotEnoughSpace):
            copy(mount.point)
        monkeypatch.setattr(file_changes, "free_bytes", lambda path: needed)
        assert copy(mount.point).files == 24


def test_a_tmpfs_is_mounted_where_ram_allows_more_than_the_one_there_and_goes_with_unstage(
    tmp_path, spare, near_storage
):
    needs("root", os.geteuid() == 0 and places._may_mount())
    spare(64 * GIB, 1000)
    source = MemorySource({"a": os.urandom(3000), "b/c": os.urandom(50_000)})
    report = copy(source, "auto")
    try:
        assert report.target == "tmpfs"
        assert "in a tmpfs of its own" in report.why
        assert data_of(report.path) == source.files
        assert os.path.ismount(report.path.parent)
        assert copy(source, "auto").reused
    finally:
        unstage(report)
    assert list(near_storage.iterdir()) == []


def test_a_mount_that_is_refused_is_one_error(spare, monkeypatch, near_storage):
    spare(64 * GIB, 1000)
    monkeypatch.setattr(places, "_may_mount", lambda: True)
    monkeypatch.setattr(places, "run", lambda command, act, timeout: ProcessResult(32, "mount: denied"))
    with pytest.raises(NotEnoughSpace, match=r"mount: denied.*to='disk'"):
        copy(MemorySource({"a": bytes(3000)}), "tmpfs")
    assert list(near_storage.iterdir()) == []


def test_without_the_right_to_mount_disk_is_taken(spare, monkeypatch, near_storage):
    spare(64 * GIB, 1000)
    monkeypatch.setattr(places, "_may_mount", lambda: False)
    report = copy(MemorySource({"a": bytes(3000)}), "auto")
    assert (report.target, report.path.parent) == ("disk", near_storage)


def test_a_small_tmpfs_that_fills_is_refused_before_and_survived_meanwhile(tmp_path, monkeypatch):
    needs("root", os.geteuid() == 0 and places._may_mount())
    point = make(tmp_path / "tmpfs")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "test", str(point)], check=True)
    try:
        source = MemorySource({f"{number}": os.urandom(100_000) for number in range(20)})
        with pytest.raises(NotEnoughSpace, match="needed"):
            copy(source, point / "near")
        monkeypatch.setattr(file_changes, "free_bytes", lambda path: GIB)
        with pytest.raises(NotEnoughSpace, match="No space left"):
            copy(source, point / "near")
        assert list(point.iterdir()) == [], "the space was not given back"
    finally:
        subprocess.run(["umount", str(point)], check=True)


@pytest.mark.parametrize("options", [{"verify": "md5"}, {"verify": None}, {"to": 3}, {"threads": -1}])
def test_options_that_cannot_be_meant_are_refused(image_tree, options):
    with pytest.raises(InvalidOption, match="Use "):
        copy(image_tree, **options)


def test_names_that_the_target_takes_for_one_are_refused(tmp_path, monkeypatch):
    create = file_changes.create

    def folding(path: Path) -> int:
        return create(path.with_name(path.name.lower()))

    monkeypatch.setattr(file_changes, "create", folding)
    with pytest.raises(BadSource, match="another file"):
        copy(MemorySource({"A.png": b"1", "a.png": b"2"}), tmp_path / "near")
    assert not (tmp_path / "near").exists()
