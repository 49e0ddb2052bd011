"""`mount()` and `unmount()`: against the double of hosted Colab, real FUSE mounts, and places that are not Colab."""

from __future__ import annotations

import contextlib
import errno
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from far_mounts import FuseMount, RcloneMount, has_fuse, has_rclone, in_child, mounted_at, wait_for
from far_side import Colab, be_at, hosted_colab, see_only
from sampling import sampled
from trees import needs

import colabkit
from colabkit.errors import InvalidOption, MountFailed, NotMounted, TimedOut, UnsentWrites
from colabkit.foundation import Place
from colabkit.foundation.mount_table import DRIVEFS_LOG, Mount
from colabkit.storage.drive import drivefs, mountpoints
from colabkit.storage.drive.mountpoints import Daemon, detach, find_mount

pytestmark = pytest.mark.usefixtures("fuse")


@pytest.fixture
def fuse() -> None:
    needs("FUSE", has_fuse())


@pytest.fixture
def colab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Colab]:
    with hosted_colab(tmp_path, monkeypatch) as colab:
        yield colab


@pytest.fixture
def jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a Jupyter kernel, which sees the mounts of this test only."""
    be_at(Place("Jupyter", "kernel", False), monkeypatch)
    see_only(tmp_path, monkeypatch)


def refused(**options) -> MountFailed:
    """Return the error of `mount()`."""
    with pytest.raises(MountFailed) as caught:
        colabkit.mount(**options)
    return caught.value


def test_drive_is_mounted_and_my_drive_is_the_short_name(colab):
    (colab.root / "MyDrive" / "notes.txt").write_text("hello")
    report = colabkit.mount()
    assert (report.state, report.kind, str(report.mountpoint)) == ("mounted", "DriveFS", colab.point)
    assert (report.path / "notes.txt").read_text() == "hello"
    assert "drive:" in repr(report)
    assert colab.count("consent") == 1


def test_nothing_is_printed(colab, capfd):
    colabkit.mount()
    assert capfd.readouterr().out == ""


def test_a_mount_that_is_alive_is_used_without_asking_for_consent(colab):
    colabkit.mount()
    report = colabkit.mount()
    assert report.state == "was mounted already"
    assert (colab.count("consent"), colab.count("mount")) == (1, 1)


def test_options_pass_through(colab):
    report = colabkit.mount(readonly=True, timeout=77.5)
    assert "timeout_ms=77500 readonly=True" in colab.events()[0]
    assert report.readonly is True


@pytest.mark.parametrize("readonly", [True, False])
def test_how_it_was_mounted_is_remembered(colab, readonly):
    colabkit.mount(readonly=readonly)
    report = colabkit.mount(readonly=True)
    assert report.readonly is readonly
    assert ("force=True" in repr(report)) is not readonly


def test_read_only_is_not_claimed_of_a_mount_that_was_there(colab, monkeypatch):
    colabkit.mount(readonly=True)
    monkeypatch.setattr(drivefs, "_options", {})
    monkeypatch.setattr(drivefs, "daemons", lambda name: iter(()))
    report = colabkit.mount(readonly=True)
    assert report.readonly is None
    assert "cannot be told" in repr(report)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--features=opendir_timeout_ms:90000,read_only_mode:true",), (True, 90.0)),
        (("--features=opendir_timeout_ms:90000,read_only_mode:false",), (False, 90.0)),
        (("--features=max_read_qps:1000",), (False, None)),
    ],
)
def test_how_another_process_mounted_it_is_read_from_the_programs_arguments(words, expected, monkeypatch):
    monkeypatch.setattr(drivefs, "_options", {})
    monkeypatch.setattr(drivefs, "daemons", lambda name: iter([Daemon(1, "drive", words, {})]))
    assert drivefs.options_of(Mount("/content/drive", "fuse.drive", "drive", ("rw",))) == expected


def test_a_dead_mount_is_taken_away_and_mounted_again(colab):
    colabkit.mount()
    colab.served.kill()
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]
    report = colabkit.mount()
    assert report.state == "repaired"
    assert report.path.is_dir()
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]
    assert "may be lost" in repr(report)


def test_a_hanging_mount_is_refused_in_time_and_ended_only_when_told(colab):
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


@pytest.mark.parametrize(("log", "cause"), [("", "failing"), ("E QUOTA_EXCEEDED\n", "quota")])
def test_a_mount_that_answers_errors_is_not_taken_for_a_dead_one(colab, log, cause):
    colabkit.mount()
    (colab.root / "MyDrive").rename(colab.root / "Elsewhere")
    (colab.home / DRIVEFS_LOG).write_text(log)
    error = refused()
    assert error.cause == cause
    assert "Errno 2" in str(error)
    assert colab.count("mount") == 1
    (colab.root / "Elsewhere").rename(colab.root / "MyDrive")
    assert colabkit.mount().state == "was mounted already"


def test_a_live_mount_whose_listings_fail_keeps_its_writes(colab):
    colabkit.mount()
    colab.served.fail(errno.EIO)
    assert colabkit.mount().state == "was mounted already"
    assert (colab.count("mount"), colab.count("flush_and_unmount")) == (1, 0)


def test_a_mount_that_lists_slowly_is_not_taken_for_a_hanging_one(colab):
    colabkit.mount()
    colab.served.hang("list")
    assert colabkit.mount(timeout=5).state == "was mounted already"
    colab.served.go_on()


def test_the_working_folder_is_not_taken_away(colab, monkeypatch):
    colabkit.mount()
    monkeypatch.chdir(colab.point)
    for call in (colabkit.flush, colabkit.unmount, colabkit.clear_cache, lambda: colabkit.mount(force=True)):
        with pytest.raises(MountFailed, match="%cd /content first") as caught:
            call()
        assert caught.value.cause == "in use"
    assert colab.count("flush_and_unmount") == 0


def test_a_mountpoint_on_another_remote_mount_is_refused_untouched(colab, tmp_path):
    with FuseMount(tmp_path / "other", tmp_path, "fuse.sshfs") as other:
        other.hang()
        began = time.monotonic()
        error = refused(path=tmp_path / "other" / "drive")
        assert time.monotonic() - began < 5
        assert error.cause == "folder"
        assert colab.events() == []


def test_what_google_colab_prints_besides_is_shown(colab, capsys):
    colab.plan(prints="A word from Google")
    colabkit.mount()
    assert capsys.readouterr().out == "A word from Google\n"


def test_mounting_again_sends_the_writes_first(colab):
    colabkit.mount()
    colabkit.mount(force=True)
    events = [event.split()[0] for event in colab.events()]
    assert events == ["mount", "consent", "flush_and_unmount", "mount", "consent"]


def test_mounting_again_stops_where_writes_cannot_be_sent(colab):
    colabkit.mount()
    colab.plan(push="fails")
    with pytest.raises(UnsentWrites, match="did not send all writes"):
        colabkit.mount(force=True)
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]


def test_another_mountpoint_beside_a_live_mount_is_refused(colab, tmp_path):
    colabkit.mount()
    error = refused(path=tmp_path / "elsewhere")
    assert error.cause == "folder"
    assert colab.point in str(error)
    assert colab.count("mount") == 1


@pytest.mark.parametrize(
    ("plan", "cause", "words"),
    [
        ({"consent": "refused"}, "consent", "account that this notebook runs under"),
        ({"consent": "never comes"}, "unknown", "dialog in the browser"),
        ({"hosted": False}, "place", "fetch"),
        ({"mount": "policy"}, "policy", "administrator"),
        ({"mount": "root folder"}, "top folder", "empty the Trash"),
        ({"mount": "fails", "log": "E QueryManager timed out\n"}, "top folder", "timeout=600"),
        ({"mount": "fails", "log": "E QUOTA_EXCEEDED\n"}, "quota", "one archive"),
        ({"mount": "fails"}, "unknown", "Disconnect and delete runtime"),
        ({"mount": "pexpect"}, "timeout", "no answer in"),
        ({"mount": "nothing"}, "unknown", "mounted nothing"),
    ],
)
def test_every_failure_of_google_colab_is_one_error_with_its_cause(colab, plan, cause, words):
    colab.plan(**plan)
    error = refused()
    assert error.cause == cause
    assert words in str(error)
    assert str(error).startswith("Cannot mount Drive: ")
    assert "\n" not in str(error)


def test_an_old_quota_in_the_log_is_not_blamed(colab):
    log = colab.home / DRIVEFS_LOG
    log.parent.mkdir(parents=True)
    log.write_text("E QUOTA_EXCEEDED yesterday\n")
    colab.plan(mount="fails")
    assert refused().cause == "unknown"


@pytest.mark.parametrize("kind", ["space", "link", "files", "file", "parent", "config"])
def test_a_mountpoint_that_cannot_be_one_is_named(colab, tmp_path, kind):
    point = tmp_path / ("with space" if kind == "space" else "point")
    if kind == "link":
        point.symlink_to(tmp_path)
    elif kind == "files":
        point.mkdir()
        (point / "x").touch()
    elif kind == "file":
        point.touch()
    elif kind == "parent":
        point = tmp_path / "missing" / "point"
    elif kind == "config":
        (colab.home / ".config").mkdir()
        (colab.home / ".config" / "Google").touch()
    error = refused(path=point)
    assert error.cause == "folder"
    assert "Choose another path" in str(error)


@pytest.mark.parametrize("plan", sampled([{"consent": "hangs"}, {"mount": "hangs"}], 1))
def test_google_colab_cannot_hang_past_the_deadline(colab, plan, monkeypatch):
    monkeypatch.setattr(drivefs, "_GRACE_S", 0.5)
    colab.plan(**plan)
    former, was_set = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    began = time.monotonic()
    assert refused(timeout=0.25).cause == "timeout"
    assert time.monotonic() - began < 15
    assert signal.getsignal(signal.SIGALRM) is former
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) is was_set


def test_an_alarm_of_the_users_goes_on(colab):
    rang = threading.Event()
    former = signal.signal(signal.SIGALRM, lambda *_: rang.set())
    others = signal.setitimer(signal.ITIMER_REAL, 5.0)
    try:
        with drivefs.alarm(100.0):
            pass
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        assert 0 < left <= 5.0
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        wait_for(rang.is_set, "the alarm")
    finally:
        signal.setitimer(signal.ITIMER_REAL, *others)
        signal.signal(signal.SIGALRM, former)


def test_a_thread_is_told_to_call_from_a_cell(colab):
    errors: list[MountFailed] = []
    thread = threading.Thread(target=lambda: errors.append(refused()))
    thread.start()
    thread.join()
    assert errors[0].cause == "thread"
    assert colab.events() == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Kaggle", "/kaggle/input"),
        ("Colab Enterprise", "gs://"),
        ("Colab, local runtime", "Drive for desktop"),
        ("Jupyter", "rclone mount"),
        ("Python", "rclone mount"),
        ("Colab", "%mount in a cell"),
    ],
)
def test_elsewhere_it_says_what_works_there(name, words, monkeypatch):
    be_at(Place(name, "script", False), monkeypatch)
    monkeypatch.setattr(mountpoints, "mounts", list)
    error = refused()
    assert error.cause == "place"
    assert words in str(error)


@pytest.mark.usefixtures("jupyter")
def test_elsewhere_a_mount_by_other_means_is_found(tmp_path):
    with FuseMount(tmp_path / "point", tmp_path, "fuse.google-drive-ocamlfuse"):
        report = colabkit.mount()
        assert (report.kind, report.path) == ("google-drive-ocamlfuse", tmp_path / "point")
        assert report.state == "was mounted already"


@pytest.mark.usefixtures("jupyter")
def test_a_dead_mount_that_colab_does_not_own_is_taken_away_and_its_command_named(tmp_path):
    with FuseMount(tmp_path / "point", tmp_path, "fuse.google-drive-ocamlfuse") as mounted:
        mounted.kill()
        error = refused()
        assert error.cause == "dead"
        assert f"Run 'google-drive-ocamlfuse {tmp_path / 'point'}' again" in str(error)
        assert mounted_at(tmp_path / "point") == []


@pytest.mark.usefixtures("jupyter")
def test_a_killed_rclone_is_taken_away_so_that_it_can_be_started_again(tmp_path):
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
def test_a_mount_that_hangs_and_is_not_colabs_is_left_alone(tmp_path, force):
    with FuseMount(tmp_path / "point", tmp_path, "fuse.rclone") as mounted:
        mounted.hang()
        assert refused(timeout=1.0, force=force).cause == "hung"
        assert mounted_at(tmp_path / "point") == ["fuse.rclone"]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "60", True, None])
def test_timeouts_that_cannot_be_meant_are_refused(timeout):
    for call in (colabkit.mount, colabkit.unmount, colabkit.flush, colabkit.clear_cache):
        with pytest.raises(InvalidOption, match="timeout="):
            call(timeout=timeout)


def test_unmount_sends_the_writes_and_claims_no_more_than_it_knows(colab):
    colabkit.mount()
    report = colabkit.unmount(timeout=33)
    assert colab.events()[-1] == "flush_and_unmount timeout_ms=33000"
    assert mounted_at(Path(colab.point)) == []
    assert "cannot be seen from here" in repr(report)


def test_unmount_stops_at_the_deadline_and_leaves_the_mount(colab, monkeypatch):
    monkeypatch.setattr(drivefs, "_GRACE_S", 0.5)
    colabkit.mount()
    colab.plan(push="hangs")
    with pytest.raises(TimedOut, match="may go on sending"):
        colabkit.unmount(timeout=1.5)
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]


@pytest.mark.parametrize("wrong", ["NotImplementedError", "ModuleNotFoundError"])
def test_a_place_without_google_colab_is_not_taken_for_unsent_writes(colab, wrong, monkeypatch):
    colabkit.mount()
    colab.plan(hosted=False) if wrong == "NotImplementedError" else monkeypatch.setenv("PYTHONPATH", "/nothing")
    with pytest.raises(MountFailed, match=wrong) as caught:
        colabkit.unmount()
    assert caught.value.cause == "place"


def test_unmount_says_that_writes_were_not_sent(colab):
    colabkit.mount()
    colab.plan(push="fails")
    with pytest.raises(UnsentWrites, match="flush_and_unmount failed"):
        colabkit.unmount()
    assert mounted_at(Path(colab.point)) == ["fuse.drive"]


@pytest.mark.parametrize("state", ["dead", "hung"])
def test_a_mount_that_does_not_answer_goes_only_when_told(colab, state):
    colabkit.mount()
    colab.served.kill() if state == "dead" else colab.served.hang()
    with pytest.raises(MountFailed) as caught:
        colabkit.unmount(timeout=1.0)
    assert caught.value.cause == state
    report = colabkit.unmount(force=True)
    assert "lost" in repr(report)
    assert mounted_at(Path(colab.point)) == []


def test_a_mount_in_use_is_not_taken_away(tmp_path):
    with FuseMount(tmp_path / "point", tmp_path, "fuse.rclone"), contextlib.ExitStack() as stack:
        (tmp_path / "file").write_text("x")
        stack.enter_context((tmp_path / "point" / "file").open())
        found = find_mount(str(tmp_path / "point"), "unmount Drive", 1)
        with pytest.raises(MountFailed, match="Close the files"):
            detach(found, 10)
        assert mounted_at(tmp_path / "point") == ["fuse.rclone"]


def test_nothing_mounted_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(mountpoints, "mounts", list)
    for call in (colabkit.unmount, colabkit.flush, colabkit.clear_cache):
        with pytest.raises(NotMounted, match=r"colabkit\.mount\(\)"):
            call()
        with pytest.raises(NotMounted, match="no mount is there"):
            call(tmp_path)


def test_mounts_of_other_types_are_left_alone(tmp_path):
    with FuseMount(tmp_path / "point", tmp_path, "fuse.sshfs"):
        for call in (colabkit.unmount, colabkit.flush, colabkit.clear_cache):
            with pytest.raises(InvalidOption, match=r"of type fuse\.sshfs"):
                call(tmp_path / "point")
        assert mounted_at(tmp_path / "point") == ["fuse.sshfs"]


def test_an_error_nobody_foresaw_is_still_one_line():
    error = drivefs.explain(RuntimeError("several\nlines\nof text"), 1.0, frozenset())
    assert error.cause == "unknown"
    assert "several lines of text" in str(error)
