"""`mount()` and `unmount()` with a fake of hosted Colab, with real FUSE mounts, and outside Colab."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from far_mounts import FuseMount, RcloneMount, has_rclone, in_child, mounted_at
from far_side import be_at, see_only
from sampling import sampled
from trees import needs

import colabkit
from colabkit.errors import InvalidOption, MountFailed, TimedOut, UnsentWrites
from colabkit.foundation import Place
from colabkit.foundation.mount_table import DRIVEFS_LOG
from colabkit.storage.drive import drivefs
from colabkit.storage.drive.mountpoints import detach, find_mount

pytestmark = pytest.mark.usefixtures("fuse")


@pytest.fixture
def jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process look like a Jupyter kernel without remote mounts except those of this test."""
    be_at(Place("Jupyter", "kernel", False), monkeypatch)
    see_only(tmp_path, monkeypatch)


def refused(**options) -> MountFailed:
    with pytest.raises(MountFailed) as caught:
        colabkit.mount(**options)
    return caught.value


def test_an_existing_mount_is_reused_without_asking_for_consent_again(colab, tmp_path, capfd):
    (colab.root / "MyDrive" / "notes.txt").write_text("hello")
    colab.plan(prints="A word from Google")
    report = colabkit.mount(readonly=True, timeout=77.5)
    assert capfd.readouterr().out == "A word from Google\n"
    assert "timeout_ms=77500 readonly=True" in colab.events()[0]
    assert (report.state, report.kind, str(report.mountpoint)) == ("mounted", "DriveFS", colab.point)
    assert report.readonly is True
    assert (report.path / "notes.txt").read_text() == "hello"
    assert "drive:" in repr(report)
    assert colabkit.mount().state == "was mounted already"
    # Do not remount after listing errors, since that could lose writes.
    colab.served.fail(errno.EIO)
    assert colabkit.mount().state == "was mounted already"
    colab.served.fail(0)
    colab.served.hang("list")
    assert colabkit.mount(timeout=5).state == "was mounted already"
    colab.served.go_on()
    error = refused(path=tmp_path / "elsewhere")
    assert error.cause == "folder"
    assert colab.point in str(error)
    assert [colab.count(event) for event in ("consent", "mount", "flush_and_unmount")] == [1, 1, 0]


def test_the_mode_is_known_for_own_mounts_and_unknown_for_others(colab, monkeypatch):
    for readonly in (False, True):
        colabkit.mount(readonly=readonly, force=readonly)
        report = colabkit.mount(readonly=True)
        assert report.readonly is readonly
        assert ("force=True" in repr(report)) is not readonly
    monkeypatch.setattr(drivefs, "_options", {})
    monkeypatch.setattr(drivefs, "daemons", lambda name: iter(()))
    report = colabkit.mount(readonly=True)
    assert report.readonly is None
    assert "is unknown" in repr(report)


def test_a_dead_mount_is_removed_and_mounted_again(colab):
    colabkit.mount()
    colab.served.kill()
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]
    report = colabkit.mount()
    assert report.state == "repaired"
    assert report.path.is_dir()
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]
    assert "may be lost" in repr(report)


@pytest.mark.full
def test_a_hanging_mount_raises_in_time_and_is_replaced_only_with_force(colab):
    colabkit.mount()
    colab.served.hang()
    began = time.monotonic()
    error = refused(timeout=1.0)
    assert time.monotonic() - began < 10
    assert error.cause == "hung"
    assert "force=True" in str(error)
    assert colab.count("mount") == 1
    report = colabkit.mount(force=True, timeout=5.0)
    assert report.state == "repaired"
    assert in_child("import os, sys; print(os.listdir(sys.argv[1]))", report.path.parent) != "hung"


def test_a_mount_that_returns_errors_is_not_replaced(colab):
    colabkit.mount()
    (colab.root / "MyDrive").rename(colab.root / "Elsewhere")
    for log, cause in (("", "failing"), ("E QUOTA_EXCEEDED\n", "quota")):
        (colab.home / DRIVEFS_LOG).write_text(log)
        error = refused()
        assert error.cause == cause
        assert "Errno 2" in str(error)
    assert colab.count("mount") == 1
    (colab.root / "Elsewhere").rename(colab.root / "MyDrive")
    assert colabkit.mount().state == "was mounted already"


def test_a_mount_that_holds_the_working_folder_is_not_unmounted(colab, monkeypatch):
    colabkit.mount()
    monkeypatch.chdir(colab.point)
    for call in (colabkit.flush, colabkit.unmount, colabkit.clear_cache, lambda: colabkit.mount(force=True)):
        with pytest.raises(MountFailed, match="%cd /content") as caught:
            call()
        assert caught.value.cause == "in use"
    assert colab.count("flush_and_unmount") == 0


def test_a_mount_with_a_file_that_this_process_writes_is_unmounted_only_by_force(colab):
    point = colabkit.mount().path
    with (point / "log.txt").open("w") as file:
        file.write("not yet sent")
        for call in (colabkit.flush, colabkit.unmount, colabkit.clear_cache, lambda: colabkit.mount(force=True)):
            with pytest.raises(MountFailed, match=r"log\.txt' open for writing\. Close the file first") as caught:
                call()
            assert caught.value.cause == "in use"
    with (point / "log.txt").open() as file:
        assert file.read() == "not yet sent"
        colabkit.unmount(force=True)


def test_a_mountpoint_on_another_remote_mount_raises_without_access_to_it(colab, tmp_path):
    with FuseMount(tmp_path / "other", tmp_path, "fuse.sshfs") as other:
        other.hang()
        began = time.monotonic()
        error = refused(path=tmp_path / "other" / "drive")
        assert time.monotonic() - began < 5
        assert error.cause == "folder"
        assert colab.events() == []


def test_mounting_again_sends_the_writes_first_and_stops_if_that_fails(colab):
    colabkit.mount()
    colabkit.mount(force=True)
    events = [event.split()[0] for event in colab.events()]
    assert events == ["mount", "consent", "flush_and_unmount", "mount", "consent"]
    colab.plan(push="fails")
    with pytest.raises(UnsentWrites, match="did not send all writes"):
        colabkit.mount(force=True)
    with pytest.raises(UnsentWrites, match="flush_and_unmount failed"):
        colabkit.unmount()
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]


FAILURES: list[tuple[dict[str, Any], str, str]] = [
    ({"consent": "refused"}, "consent", "account that this notebook runs under"),
    ({"consent": "never comes"}, "unknown", "dialog in the browser"),
    ({"hosted": False}, "place", "fetch"),
    ({"mount": "policy"}, "policy", "administrator"),
    ({"mount": "root folder"}, "root folder", "empty the Trash"),
    ({"mount": "fails", "log": "E QueryManager timed out\n"}, "root folder", "timeout=600"),
    ({"mount": "fails", "log": "E QUOTA_EXCEEDED\n"}, "quota", "one archive"),
    ({"mount": "fails"}, "unknown", "Disconnect and delete runtime"),
    ({"mount": "pexpect"}, "timeout", "the consent dialog or DriveFS did not answer"),
    ({"mount": "nothing"}, "unknown", "mounted nothing"),
]


def test_every_failure_of_google_colab_raises_one_error_with_its_cause(colab):
    log = colab.home / DRIVEFS_LOG
    log.parent.mkdir(parents=True)
    for plan, cause, words in FAILURES:
        # An old line in the log must not be reported as the cause.
        log.write_text("E QUOTA_EXCEEDED yesterday\n")
        colab.plan(**plan)
        error = refused()
        assert (error.cause, plan) == (cause, plan)
        assert words in str(error)
        assert str(error).startswith("Cannot mount Drive: ")
        assert "\n" not in str(error)


def test_an_unusable_mountpoint_raises_folder(colab, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "x").touch()
    (tmp_path / "file").touch()
    for name in ("with space", "link", "files", "file", "missing/point", "config"):
        if name == "config":
            (colab.home / ".config").mkdir()
            (colab.home / ".config" / "Google").touch()
        error = refused(path=tmp_path / name)
        assert (error.cause, name) == ("folder", name)
        assert "Choose another path" in str(error)


@pytest.mark.parametrize("plan", sampled([{"consent": "hangs"}, {"mount": "hangs"}], 1))
def test_a_hang_of_google_colab_ends_at_the_deadline(colab, plan, monkeypatch):
    monkeypatch.setattr(drivefs, "_GRACE_S", 0.5)
    colab.plan(**plan)
    former, was_set = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    began = time.monotonic()
    assert refused(timeout=0.25).cause == "timeout"
    assert time.monotonic() - began < 15
    assert signal.getsignal(signal.SIGALRM) is former
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) is was_set


def test_a_call_in_a_background_thread_raises(colab):
    errors: list[MountFailed] = []
    thread = threading.Thread(target=lambda: errors.append(refused()))
    thread.start()
    thread.join()
    assert errors[0].cause == "thread"
    assert colab.events() == []


@pytest.mark.usefixtures("jupyter")
def test_outside_colab_another_mount_is_used_and_a_dead_one_removed(tmp_path):
    with FuseMount(tmp_path / "point", tmp_path, "fuse.google-drive-ocamlfuse") as mounted:
        report = colabkit.mount()
        assert (report.kind, report.path) == ("google-drive-ocamlfuse", tmp_path / "point")
        assert report.state == "was mounted already"
        mounted.kill()
        error = refused()
        assert error.cause == "dead"
        assert f"Run 'google-drive-ocamlfuse {tmp_path / 'point'}' again" in str(error)
        assert mounted_at(tmp_path / "point") == []


@pytest.mark.usefixtures("jupyter")
def test_a_dead_rclone_mount_is_removed_so_that_rclone_can_be_started_again(tmp_path):
    needs("rclone", has_rclone())
    (tmp_path / "root").mkdir()
    with RcloneMount(tmp_path / "point", tmp_path / "root", tmp_path / "cache") as mounted:
        assert colabkit.mount().kind == "rclone"
        mounted.kill()
        assert "rclone mount" in str(refused())
        with RcloneMount(tmp_path / "point", tmp_path / "root", tmp_path / "cache"):
            assert colabkit.mount().state == "was mounted already"


@pytest.mark.usefixtures("jupyter")
@pytest.mark.parametrize("force", sampled([True, False], 1))
def test_a_hanging_mount_of_another_program_is_left_unchanged(tmp_path, force):
    with FuseMount(tmp_path / "point", tmp_path, "fuse.rclone") as mounted:
        mounted.hang()
        assert refused(timeout=1.0, force=force).cause == "hung"
        assert mounted_at(tmp_path / "point") == ["fuse.rclone"]


@pytest.mark.full
def test_unmount_sends_the_writes_and_keeps_the_mount_if_that_fails(colab, monkeypatch):
    colabkit.mount()
    for plan, reason in (({"hosted": False}, "NotImplementedError"), ({}, "ModuleNotFoundError")):
        colab.plan(**plan)
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", os.environ["PYTHONPATH"] if plan else "/nothing")
            with pytest.raises(MountFailed, match=reason) as caught:
                colabkit.unmount()
        assert caught.value.cause == "place"
    colab.plan(push="hangs")
    with monkeypatch.context() as patch:
        patch.setattr(drivefs, "_GRACE_S", 0.5)
        with pytest.raises(TimedOut, match="may still be sending"):
            colabkit.unmount(timeout=1.5)
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]
    colab.plan()
    report = colabkit.unmount(timeout=33)
    assert colab.events()[-1] == "flush_and_unmount timeout_ms=33000"
    assert mounted_at(Path(colab.point)) == []
    assert "cannot be checked from here" in repr(report)


@pytest.mark.parametrize("state", ["dead", "hung"])
def test_a_dead_or_hanging_mount_is_unmounted_only_with_force(colab, state):
    colabkit.mount()
    colab.served.kill() if state == "dead" else colab.served.hang()
    with pytest.raises(MountFailed) as caught:
        colabkit.unmount(timeout=1.0)
    assert caught.value.cause == state
    report = colabkit.unmount(force=True)
    assert "lost" in repr(report)
    assert mounted_at(Path(colab.point)) == []


def test_a_mount_in_use_or_of_another_type_is_left_unchanged(tmp_path):
    (tmp_path / "file").write_text("x")
    with FuseMount(tmp_path / "point", tmp_path, "fuse.rclone") as mount, (mount.point / "file").open():
        with pytest.raises(MountFailed, match="Close the files"):
            detach(find_mount(mount.point, "unmount Drive"), 10)
        assert mounted_at(mount.point) == ["fuse.rclone"]
    with FuseMount(tmp_path / "point", tmp_path, "fuse.sshfs") as mount:
        for call in (colabkit.unmount, colabkit.flush, colabkit.clear_cache):
            with pytest.raises(InvalidOption, match=r"of type fuse\.sshfs"):
                call(mount.point)
        assert mounted_at(mount.point) == ["fuse.sshfs"]
