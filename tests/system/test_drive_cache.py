"""`clear_cache()`, `flush()` and `unmount()` for DriveFS, google-drive-ocamlfuse and a real rclone."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from far_mounts import FuseMount, RcloneMount, mounted_at, wait_for
from far_side import Colab, Ocamlfuse
from forks import is_killed_at
from sampling import sampled
from strikes import ChangeHook, interrupt

import colabkit
from colabkit.errors import FileFailed, MountFailed, NotMounted, TimedOut, UnsentWrites
from colabkit.foundation.mount_table import DRIVEFS_FOLDER
from colabkit.storage.drive import drivefs
from colabkit.storage.drive import ocamlfuse as drive
from colabkit.storage.drive.mountpoints import daemons, serving

pytestmark = pytest.mark.usefixtures("fuse")

Remote = Callable[..., RcloneMount]


def fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def cached(colab: Colab) -> Path:
    folder = colab.home / DRIVEFS_FOLDER
    for name in ("123/content_cache/d0", "123/metadata.db", "Logs/drive_fs.txt", "tmp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(100_000))
    colabkit.mount()
    return folder


@pytest.fixture
def remote(tmp_path: Path, rclone: None) -> Remote:
    (tmp_path / "root").mkdir()
    return partial(RcloneMount, tmp_path / "point", tmp_path / "root", tmp_path / "cache")


@pytest.fixture
def ocamlfuse(tmp_path: Path) -> Iterator[Ocamlfuse]:
    with Ocamlfuse(tmp_path / "gd") as mounted:
        for name in ("remote_id_1", "remote_id_2"):
            (mounted.cache / name).write_bytes(bytes(50_000))
        yield mounted


def test_clear_cache_flushes_drivefs_removes_its_cache_and_mounts_it_again(colab, cached):
    report = colabkit.clear_cache()
    assert [path.name for path in cached.iterdir()] == ["Logs"]
    assert report.freed_bytes >= 200_000
    assert (report.loss, report.unsent, report.kind) == ("", None, "DriveFS")
    events = [event.split()[0] for event in colab.events()]
    assert events == ["mount", "consent", "flush_and_unmount", "mount", "consent"]
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]


def test_a_dry_run_with_drivefs_changes_nothing(colab, cached):
    before = sorted(colab.home.rglob("*"))
    report = colabkit.clear_cache(dry_run=True)
    assert sorted(colab.home.rglob("*")) == before
    assert (report.freed_bytes, report.dry_run) == (report.cached_bytes, True)
    assert "Would clear" in repr(report)
    assert "Would lose: nothing" in repr(report)
    assert "writes that cannot be sent" in repr(colabkit.clear_cache(dry_run=True, force=True))
    assert colab.count("flush_and_unmount") == 0


@pytest.mark.parametrize("push", sampled(["fails", "hangs"], 1))
def test_drivefs_keeps_its_cache_if_writes_are_not_sent_except_with_force(colab, cached, push, monkeypatch):
    monkeypatch.setattr(drivefs, "_GRACE_S", 0.5)
    colab.plan(push=push)
    with pytest.raises((UnsentWrites, TimedOut)):
        colabkit.clear_cache(timeout=1.5)
    assert (cached / "123").is_dir()
    report = colabkit.clear_cache(timeout=1.5, force=True)
    assert report.loss == "writes that DriveFS had not sent"
    assert not (cached / "123").exists()
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]


@pytest.mark.full
def test_after_a_removal_that_fails_or_is_killed_drive_is_usable_and_the_next_call_clears_the_cache(
    colab, cached, file_hook
):
    content = {path: path.read_bytes() for path in cached.rglob("*") if path.is_file()}
    for number, act, error in ((2, fail, FileFailed), (1, interrupt, KeyboardInterrupt), (2, None, None)):
        for path, data in content.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if act is None:
            assert is_killed_at(number, colabkit.clear_cache)
            colabkit.mount()
        else:
            file_hook(ChangeHook(number, act))
            with pytest.raises(error):
                colabkit.clear_cache()
            file_hook(None)
        assert mounted_at(Path(colab.point)) == ["fuse.drive"]
        colabkit.clear_cache()
        assert [path.name for path in cached.iterdir()] == ["Logs"]
        assert mounted_at(Path(colab.point)) == ["fuse.drive"]


def test_drivefs_is_not_cleared_if_it_could_not_be_mounted_again(colab, cached):
    with ThreadPoolExecutor(1) as pool, pytest.raises(MountFailed) as caught:
        pool.submit(colabkit.clear_cache).result()
    assert caught.value.cause == "thread"
    assert (cached / "123").is_dir()
    assert colab.count("flush_and_unmount") == 0


def test_drivefs_is_mounted_again_with_the_same_options_or_the_error_reports_what_is_done(colab):
    colabkit.mount(readonly=True, timeout=300)
    report = colabkit.flush(timeout=20)
    assert report.remounted
    assert "cannot be checked from here" in repr(report)
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]
    colabkit.clear_cache(timeout=20)
    mounted = [event for event in colab.events() if event.startswith("mount ")]
    assert len(mounted) == 3
    assert all("timeout_ms=300000 readonly=True" in event for event in mounted)
    colab.plan(mount="fails")
    with pytest.raises(MountFailed, match=r"all writes were sent, but Drive could not be mounted again"):
        colabkit.flush()
    assert colab.count("mount") == 5


# Tests with google-drive-ocamlfuse.


@pytest.mark.full
def test_ocamlfuse_is_unmounted_cleared_and_mounted_again_with_the_same_arguments(tmp_path):
    with Ocamlfuse(tmp_path / "gd", "work", ("-headless",)) as mounted:
        (mounted.cache / "remote_id_1").write_bytes(bytes(50_000))
        (mounted.root / "birds.txt").write_text("birds")
        (first,) = mounted.pids()
        report = colabkit.clear_cache(mounted.point / "birds.txt")
        start, clear, again = mounted.calls()
        assert clear == "-cc -headless -label work"
        assert again == start
        assert mounted.pids() != [first]
        assert (mounted.point / "birds.txt").read_text() == "birds"
        assert [path.name for path in mounted.cache.iterdir()] == ["cache.db"]
        assert report.freed_bytes >= 50_000
        assert (report.loss, report.unsent, report.folder) == ("", 0, mounted.cache)


def test_a_dry_run_with_ocamlfuse_reports_bytes_and_unsent_files(ocamlfuse):
    ocamlfuse.queue("ToUpload", "Uploading", "ToUpload")
    report = colabkit.clear_cache(ocamlfuse.point, dry_run=True)
    assert report.unsent == 3
    assert "3 files to send first" in repr(report)
    assert "Would lose: nothing" in repr(report)
    assert "up to 3 files" in colabkit.clear_cache(ocamlfuse.point, dry_run=True, force=True).loss
    assert report.freed_bytes >= 100_000
    assert len(ocamlfuse.calls()) == 1
    assert (ocamlfuse.cache / "remote_id_1").exists()


@pytest.mark.full
def test_ocamlfuse_waits_for_uploads_before_clearing(ocamlfuse, monkeypatch):
    ocamlfuse.queue("ToUpload")
    calls: list[int] = []
    unsent = drive.Ocamlfuse.unsent

    def upload_after_the_first_look(self: drive.Ocamlfuse) -> int | None:
        found = unsent(self)
        if not calls:
            ocamlfuse.queue()
        calls.append(len(ocamlfuse.calls()))
        return found

    monkeypatch.setattr(drive.Ocamlfuse, "unsent", upload_after_the_first_look)
    assert colabkit.clear_cache(ocamlfuse.point).loss == ""
    assert calls[0] == 1
    assert len(ocamlfuse.calls()) == 3


@pytest.mark.full
def test_ocamlfuse_keeps_its_cache_if_uploads_do_not_finish_in_time(ocamlfuse):
    ocamlfuse.queue("ToUpload", "Uploading")
    with pytest.raises(TimedOut, match="the upload of 2 files did not finish"):
        colabkit.clear_cache(ocamlfuse.point, timeout=0.5)
    assert len(ocamlfuse.calls()) == 1
    assert mounted_at(ocamlfuse.point) == ["fuse.google-drive-ocamlfuse"]
    report = colabkit.clear_cache(ocamlfuse.point, timeout=5, force=True)
    assert report.loss == "2 files not uploaded"


@pytest.mark.full
def test_uploads_found_only_after_unmounting_are_kept_and_counted(tmp_path):
    mounted = Ocamlfuse(tmp_path / "gd")
    mounted.environ["OCAMLFUSE_UNSENT"] = "2"
    with mounted:
        (mounted.cache / "remote_id_1").write_bytes(b"unsent")
        with pytest.raises(UnsentWrites, match="the cache holds unsent writes to 2 files"):
            colabkit.clear_cache(mounted.point)
        assert [call for call in mounted.calls() if "-cc" in call] == []
        assert mounted_at(mounted.point) == ["fuse.google-drive-ocamlfuse"]
        assert (mounted.cache / "remote_id_1").read_bytes() == b"unsent"
        mounted.queue()
        assert "its queue still holds 2 files" in colabkit.unmount(mounted.point).sent


@pytest.mark.full
@pytest.mark.parametrize("is_there", [True, False])
def test_a_damaged_or_missing_queue_counts_as_unknown(ocamlfuse, is_there):
    database = ocamlfuse.cache / "cache.db"
    database.write_bytes(b"no database at all" * 100) if is_there else database.unlink()
    assert colabkit.clear_cache(ocamlfuse.point, dry_run=True).unsent is None
    with pytest.raises(TimedOut, match="unknown number"):
        colabkit.clear_cache(ocamlfuse.point, timeout=0.5)
    assert len(ocamlfuse.calls()) == 1


@pytest.mark.full
def test_secrets_in_a_programs_arguments_are_not_shown(tmp_path, monkeypatch):
    with Ocamlfuse(tmp_path / "gd", options=("-id", "me", "-secret", "TOPSECRET")) as mounted:
        monkeypatch.setattr(
            "colabkit.storage.drive.ocamlfuse.liveness", lambda folders, timeout: ("dead", "as planned")
        )
        with pytest.raises(
            MountFailed, match=r"with the same arguments: google-drive-ocamlfuse -id \.\.\. -secret \.\.\."
        ) as caught:
            colabkit.clear_cache(mounted.point)
        assert f"'{mounted.point}'" in str(caught.value)
        assert "TOPSECRET" not in str(caught.value)
        (daemon,) = daemons("google-drive-ocamlfuse")
        assert "TOPSECRET" in daemon.arguments
        assert "TOPSECRET" not in repr(daemon)


@pytest.mark.full
def test_ocamlfuse_without_stored_consent_is_cleared_too(ocamlfuse):
    (ocamlfuse.config.parent / "state").unlink()
    assert colabkit.clear_cache(ocamlfuse.point).freed_bytes >= 100_000
    assert mounted_at(ocamlfuse.point) == ["fuse.google-drive-ocamlfuse"]


def test_a_mount_in_use_is_not_cleared(ocamlfuse):
    (ocamlfuse.root / "open.txt").write_text("x")
    with (ocamlfuse.point / "open.txt").open(), pytest.raises(MountFailed, match="Close the files"):
        colabkit.clear_cache(ocamlfuse.point)
    assert len(ocamlfuse.calls()) == 1
    assert (ocamlfuse.cache / "remote_id_1").exists()


@pytest.mark.full
def test_flush_and_unmount_wait_for_uploads_of_ocamlfuse(ocamlfuse):
    assert "in memory are unknown" in repr(colabkit.flush(ocamlfuse.point))
    ocamlfuse.queue("ToUpload")
    for call in (colabkit.flush, colabkit.unmount):
        with pytest.raises(TimedOut, match="the upload of 1 file did not finish"):
            call(ocamlfuse.point, timeout=0.5)
    ocamlfuse.queue()
    (pid,) = ocamlfuse.pids()
    colabkit.unmount(ocamlfuse.point)
    assert mounted_at(ocamlfuse.point) == []
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("call", sampled([colabkit.clear_cache, colabkit.flush, colabkit.unmount], 1))
def test_a_dead_ocamlfuse_raises(ocamlfuse, call):
    ocamlfuse.kill()
    with pytest.raises(MountFailed, match="the mount is dead"):
        call(ocamlfuse.point)


def test_a_mount_whose_program_is_not_found_is_left_unchanged(tmp_path):
    with FuseMount(tmp_path / "point", tmp_path, "fuse.google-drive-ocamlfuse"):
        with pytest.raises(NotMounted, match="no google-drive-ocamlfuse process of this user"):
            colabkit.clear_cache(tmp_path / "point")
        assert mounted_at(tmp_path / "point") == ["fuse.google-drive-ocamlfuse"]


@pytest.mark.parametrize("access", [{}, {"user": "me", "password": "secret"}])
def test_rclone_forgets_its_listings_through_its_remote_control(tmp_path, remote, access):
    root, point = tmp_path / "root", tmp_path / "point"
    (root / "old.txt").write_text("old")
    with remote(rc=True, **access):
        assert os.listdir(point) == ["old.txt"]
        (point / "old.txt").read_text()
        (root / "new.txt").write_text("new")
        assert os.listdir(point) == ["old.txt"]
        report = colabkit.clear_cache(point)
        assert sorted(os.listdir(point)) == ["new.txt", "old.txt"]
        assert (report.unsent, report.loss, report.freed_bytes) == (0, "", 0)
        assert str(report.folder).startswith(str(tmp_path / "cache"))
        assert "secret" not in repr(report) + report._repr_html_()


def test_rclone_without_a_remote_control_gets_a_signal_that_no_other_rclone_gets(tmp_path, remote):
    point = tmp_path / "point"
    with remote():
        assert os.listdir(point) == []
        command = ["rclone", "rcd", "--rc-no-auth", "--rc-addr", "127.0.0.1:0", "--rc-files", str(point)]
        other = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: len(list(serving("rclone", str(point)))) == 2, "the other rclone")
            (tmp_path / "root" / "new.txt").write_text("new")
            assert os.listdir(point) == []
            assert colabkit.clear_cache(point).unsent is None
            wait_for(lambda: os.listdir(point) == ["new.txt"], "the new file")
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()


@pytest.mark.full
def test_flush_waits_until_rclone_has_uploaded_all_files(tmp_path, remote):
    with remote(rc=True, options=["--vfs-write-back", "2s"]):
        (tmp_path / "point" / "written.txt").write_text("written")
        report = colabkit.flush(tmp_path / "point")
        assert (tmp_path / "root" / "written.txt").read_text() == "written"
        assert "no pending uploads" in repr(report)
        assert not report.remounted


def test_writes_that_rclone_does_not_send_in_time_are_counted(tmp_path, remote):
    point = tmp_path / "point"
    with remote(rc=True, options=["--vfs-write-back", "1h"]):
        (point / "written.txt").write_text("written")
        assert colabkit.clear_cache(point, dry_run=True).unsent == 1
        with pytest.raises(TimedOut, match="the upload of 1 file did not finish"):
            colabkit.unmount(point, timeout=0.5)
        assert mounted_at(point) == ["fuse.rclone"]


def test_rclone_without_a_remote_control_is_unmounted_only_with_force(tmp_path, remote):
    point = tmp_path / "point"
    with remote():
        for call in (colabkit.flush, colabkit.unmount):
            with pytest.raises(UnsentWrites, match="its pending uploads are unknown"):
                call(point)
        assert mounted_at(point) == ["fuse.rclone"]
        assert "may be lost" in repr(colabkit.unmount(point, force=True))
        assert mounted_at(point) == []


def test_a_dead_rclone_mount_raises_and_is_removed_with_force(tmp_path, remote):
    with remote(rc=True) as mounted:
        mounted.kill()
        with pytest.raises(MountFailed, match="the mount is dead"):
            colabkit.clear_cache(tmp_path / "point")
        colabkit.unmount(tmp_path / "point", force=True)
        assert mounted_at(tmp_path / "point") == []
