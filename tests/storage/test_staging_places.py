"""Locations of local copies in tmpfs and on disk, the plans of `stage()`, and `unstage()`."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from local_copies import MemorySource, copy, data_of, state_of, zipped
from strikes import interrupt_at
from trees import leftovers, make_tree

from colabkit.errors import (
    BadSource,
    ColabkitError,
    FileFailed,
    InvalidOption,
    NotEnoughSpace,
    NotSealed,
    SourceMissing,
    TargetExists,
    TimedOut,
)
from colabkit.foundation import DRIVEFS, file_changes
from colabkit.foundation.environment.limits import MemoryReport
from colabkit.foundation.mount_table import Mount
from colabkit.foundation.processes import ProcessResult
from colabkit.storage.sources.items import STAGE_SEAL
from colabkit.storage.staging import places
from colabkit.storage.staging.api import unstage

GIB = 1 << 30


@pytest.fixture
def tmpfs(tmp_path, monkeypatch):
    """Return a folder that replaces tmpfs, with 10 GiB free on a machine with 12 GiB of RAM available."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(places, "TMPFS", folder)
    monkeypatch.setattr(places, "can_mount", lambda: False)
    monkeypatch.setattr(places, "memory_limits", lambda read: MemoryReport(13 * GIB, 12 * GIB, "machine"))
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 10 * GIB)
    return folder


def test_auto_uses_tmpfs_if_training_keeps_enough_ram_and_disk_otherwise(image_tree, tmpfs, near_storage, monkeypatch):
    report = copy(image_tree, "auto")
    assert (report.target, report.path.parent) == ("tmpfs", tmpfs / f"colabkit-{os.getuid()}")
    assert "fit in the 9.0 GiB of tmpfs" in report.why
    assert copy(image_tree, "auto").reused
    assert copy(image_tree, "tmpfs").reused
    unstage(report)
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


def test_without_tmpfs_auto_uses_disk_and_tmpfs_is_refused(image_tree, tmpfs):
    tmpfs.rmdir()
    with pytest.raises(NotEnoughSpace):
        copy(image_tree, "tmpfs")
    assert not tmpfs.exists()
    assert copy(image_tree, "auto").target == "disk"


def test_unstage_frees_the_space(image_tree, tmp_path, near_storage):
    archive = zipped(image_tree, tmp_path / "tree.zip")
    for report in (copy(image_tree), copy(archive)):
        assert unstage(report).freed_bytes == report.staged_bytes
        assert not report.path.exists()
    unstage(copy(archive, extract=False).path)
    unstage(str(copy(image_tree).path))
    copy(archive)
    copy(archive, extract=False)
    unstage(archive)
    assert list(near_storage.iterdir()) == []


def test_unstage_refuses_data_that_stage_did_not_create(image_tree, tmp_path):
    forged = make_tree(tmp_path / "forged", 1)
    (forged / STAGE_SEAL).write_text('{"format": 1}')
    before = state_of(image_tree), state_of(forged)
    with pytest.raises(SourceMissing, match=r"it has no local copy\. Pass the path returned by colabkit\.stage\(\)"):
        unstage(tmp_path / "nowhere")
    for path in (image_tree, image_tree / "ants" / "000.png", forged, forged / "ants"):
        with pytest.raises(
            NotSealed,
            match=r"it is not a local copy, so it stays unchanged\. Pass the path returned by colabkit\.stage\(\)",
        ):
            unstage(path)
    assert (state_of(image_tree), state_of(forged)) == before


def test_unstage_refuses_a_copy_to_which_the_user_has_added_files(image_tree):
    report = copy(image_tree)
    (report.path / "ants" / "notes.txt").write_text("mine")
    before = state_of(report.path)
    moved = re.escape(f"Move '{report.path}/ants/notes.txt' elsewhere, then try again")
    with pytest.raises(TargetExists, match=rf"your file 'ants/notes\.txt' is in the local copy; .*{moved}"):
        unstage(report)
    assert state_of(report.path) == before
    (report.path / "ants" / "notes.txt").unlink()
    assert unstage(report).freed_bytes == report.staged_bytes


def test_a_mount_point_is_refused_before_anything_is_copied(image_tree, tmp_path, monkeypatch):
    (point := tmp_path / "ramdisk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == point)
    with pytest.raises(TargetExists, match=f"'{point}' is a mount point, .* For example, use '{point}/data'"):
        copy(image_tree, point)
    assert list(tmp_path.glob(".*")) == []
    assert copy(image_tree, point / "data").path == point / "data"


def test_unstage_refuses_a_file_inside_a_copy(tmp_path):
    report = copy(MemorySource({"readme.png": b"x", "cats/1.png": b"y"}), tmp_path / "local")
    for inside in ("readme.png", "cats", "cats/1.png", STAGE_SEAL):
        with pytest.raises(NotSealed):
            unstage(report.path / inside)
    assert copy(MemorySource({}), report.path).reused


def test_a_failed_unstage_leaves_no_incomplete_copy(image_tree, monkeypatch):
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


def test_a_folder_with_a_damaged_seal_is_not_a_local_copy(image_tree):
    report = copy(image_tree)
    for seal in ("", "[]", "{}", '{"format": 2}', '{"format": 1, "skipped": 3}', "\xff"):
        (report.path / STAGE_SEAL).write_text(seal, encoding="latin-1")
        with pytest.raises(NotSealed):
            unstage(report)
        with pytest.raises(TargetExists):
            copy(image_tree)


@pytest.fixture
def spare(monkeypatch):
    """Return a function that sets the available RAM and the free space of tmpfs, in bytes."""

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
        assert (plan.target, plan.why, plan.path.parent) == ("disk", "as requested", near_storage)
        assert repr(report).startswith("Would stage ")
        assert "peak space" in report._repr_html_()
    assert copy(archive, extract=False, dry_run=True).plan.kind == "file"
    file_hook(None)
    assert copy(image_tree).path == copy(image_tree, dry_run=True).path


@pytest.mark.parametrize("kind", ["folder", "archive", "file", "table"])
def test_the_plan_counts_what_drivefs_caches_of_any_source_on_it(image_tree, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "mounts", lambda: [Mount(str(image_tree), DRIVEFS, "drive", ())])
    zipped(image_tree, image_tree / "a.zip")
    # The files of a table, but not the table itself, are on Drive.
    Path("table.csv").write_text("path\ntree/ants/000.png\n")
    name = {"folder": "tree", "archive": "tree/a.zip", "file": "tree/ants/000.png", "table": "table.csv"}[kind]
    plan = copy(name, dry_run=True).plan
    assert plan.kind == kind
    assert plan.cache_bytes == plan.read_bytes > 0
    monkeypatch.chdir(image_tree)
    assert copy(MemorySource({"a": b"1"}), dry_run=True).plan.cache_bytes == 0


def test_an_interrupted_run_appears_in_the_plan_and_resumes_at_its_place(image_tree, spare, file_hook, near_storage):
    spare(0, 0)
    file_hook(interrupt_at("005.png"))
    with pytest.raises(KeyboardInterrupt):
        copy(image_tree, "auto")
    file_hook(None)
    spare(64 * GIB, 64 * GIB)
    plan = copy(image_tree, "auto", dry_run=True).plan
    assert plan.present_bytes > 0
    assert plan.why == "the data of an interrupted run is there"
    assert "already local" in repr(plan)
    report = copy(image_tree, "auto")
    assert report.target == "disk"
    assert report.resumed_bytes
    assert leftovers(near_storage) == []


def test_a_failed_tmpfs_mount_is_one_error_and_disk_is_used_without_mount_rights(spare, monkeypatch, near_storage):
    spare(64 * GIB, 1000)
    monkeypatch.setattr(places, "can_mount", lambda: True)
    monkeypatch.setattr(places, "run", lambda command, act, timeout: ProcessResult(32, "mount: denied"))
    with pytest.raises(NotEnoughSpace, match=r"mount: denied.*to='disk'"):
        copy(MemorySource({"a": bytes(3000)}), "tmpfs")
    assert list(near_storage.iterdir()) == []
    monkeypatch.setattr(places, "can_mount", lambda: False)
    report = copy(MemorySource({"a": bytes(3000)}), "auto")
    assert (report.target, report.path.parent) == ("disk", near_storage)


@pytest.mark.parametrize("error", [FileNotFoundError(2, "no program", "mount"), TimedOut("Cannot stage: no response.")])
def test_auto_uses_the_disk_if_the_program_mount_is_missing_or_hangs(spare, monkeypatch, near_storage, error):
    def fail(command: list[str], act: str, timeout: float) -> ProcessResult:
        raise error

    spare(64 * GIB, 1000)
    monkeypatch.setattr(places, "can_mount", lambda: True)
    monkeypatch.setattr(places, "run", fail)
    report = copy(MemorySource({"a": bytes(3000)}), "auto")
    assert (report.target, report.path.parent) == ("disk", near_storage)
    assert os.listdir(near_storage) == [report.path.name]


def test_auto_uses_the_disk_if_tmpfs_is_not_writable(image_tree, tmpfs, file_hook):
    def refuse(operation: str, path: Path) -> None:
        if path.is_relative_to(tmpfs):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    file_hook(refuse)
    report = copy(image_tree, "auto")
    assert (report.target, report.why) == ("disk", "tmpfs is not writable")
    assert data_of(report.path) == data_of(image_tree)


def test_a_refresh_moves_a_copy_to_disk_if_tmpfs_has_become_too_small(image_tree, tmpfs, near_storage, monkeypatch):
    first = copy(image_tree, "auto")
    assert first.target == "tmpfs"
    monkeypatch.setattr(places, "memory_limits", lambda read: MemoryReport(4 * GIB, 2 * GIB, "machine"))
    (image_tree / "ants" / "new.png").write_bytes(b"new")
    report = copy(image_tree, "auto", refresh=True)
    assert (report.target, report.path.parent) == ("disk", near_storage)
    assert report.plan.peak_bytes >= report.staged_bytes
    assert data_of(report.path) == data_of(image_tree)
    assert not first.path.exists()


def test_the_plan_for_a_changed_archive_has_room_for_its_unchanged_members(image_tree, tmp_path):
    archive = zipped(image_tree, tmp_path / "a.zip")
    copy(archive)
    (image_tree / "ants" / "new.png").write_bytes(b"new")
    plan = copy(zipped(image_tree, archive), dry_run=True).plan
    assert plan.present_bytes == 0
    assert plan.peak_bytes >= plan.staged_bytes


def test_an_address_is_refused_as_a_target_before_the_source_is_accessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption, match=r"target 'gs://bucket/birds' is an address.*bucket.s own tool"):
        copy("missing", "gs://bucket/birds")
    assert os.listdir(tmp_path) == []


def test_a_removed_working_folder_raises_one_line(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for work in (copy, unstage):
        with pytest.raises(FileFailed, match=r"^Cannot read the source: .*\.$"):
            work("birds")


def test_the_plan_names_the_disk_and_the_reason_if_a_separate_tmpfs_cannot_be_mounted(spare, monkeypatch, near_storage):
    spare(64 * GIB, 1000)
    monkeypatch.setattr(places, "can_mount", lambda: True)
    monkeypatch.setattr(places, "run", lambda command, act, timeout: ProcessResult(32, "mount: denied"))
    report = copy(MemorySource({"a": bytes(3000)}), "auto")
    assert (report.target, report.why) == ("disk", "a separate tmpfs cannot be mounted")
    assert (report.plan.target, report.plan.why, report.plan.path) == (report.target, report.why, report.path)


def test_invalid_options_are_refused(image_tree):
    for options in ({"verify": "md5"}, {"verify": None}, {"to": 3}, {"threads": 0}, {"threads": -1}):
        with pytest.raises(InvalidOption, match=r"[Uu]se "):
            copy(image_tree, **options)


def test_names_that_the_target_cannot_distinguish_are_refused(tmp_path, monkeypatch):
    create = file_changes.create

    def folding(path: Path) -> int:
        return create(path.with_name(path.name.lower()))

    monkeypatch.setattr(file_changes, "create", folding)
    with pytest.raises(BadSource, match="another file"):
        copy(MemorySource({"A.png": b"1", "a.png": b"2"}), tmp_path / "local")
    assert not (tmp_path / "local").exists()
