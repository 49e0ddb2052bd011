"""`CheckpointFolder` on a mount writes locally first and publishes in the background, even if the mount fails."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_folders import content, found, near_of, pretend_far, save, steps_at
from far_mounts import FuseMount, has_fuse, wait_for
from sampling import sampled
from trees import needs

from colabkit.errors import Corrupt, FileFailed, NotMounted, TimedOut
from colabkit.storage.sources import concurrency
from colabkit.training.checkpoints import files
from colabkit.training.checkpoints.folder import CheckpointFolder

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FuseMount]]:
    needs("FUSE", has_fuse())
    # Do not wait long for calls that hang.
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.01)
    mounted: list[FuseMount] = []
    (tmp_path / "root").mkdir()

    def mount(**options: Any) -> FuseMount:
        mounted.append(FuseMount(tmp_path / "drive", tmp_path / "root", **options).__enter__())
        return mounted[-1]

    yield mount
    for one in mounted:
        one.__exit__(None, None, None)
    wait_for(
        lambda: not [t for t in threading.enumerate() if t.name == "colabkit-read"], "the end of the hanging threads"
    )


def elsewhere(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Pretend to be another machine, without local checkpoints."""
    patch.setenv("COLABKIT_LOCAL", str(folder))


def test_a_checkpoint_on_drive_is_written_locally_and_published(tmp_path, near_storage, drive, monkeypatch):
    drive()
    folder = tmp_path / "drive" / "my" / "run"
    with CheckpointFolder(folder) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, content(step), score=-step, wait=True)
            assert checkpoints.latest.name == f"checkpoint-{step:08d}.pt"
            checkpoints.finish()
            assert checkpoints.latest == checkpoints.best == folder / f"checkpoint-{step:08d}.pt"
        assert checkpoints.failures == ()
        assert 0 < checkpoints.save_s < 30
    assert steps_at(tmp_path / "root" / "my" / "run") == steps_at(near_of(near_storage)) == [20, 30]
    assert found(folder) == (30, [])
    elsewhere(monkeypatch, tmp_path / "other")
    with CheckpointFolder(folder) as resumed:
        assert resumed.newest_step() == 30
        newest = resumed.newest()
        assert (newest.path, newest.step) == (folder / "checkpoint-00000030.pt", 30)
        assert resumed.latest == newest.path
        assert steps_at(near_of(tmp_path / "other")) == [30]
        resumed.save(40, content(40), wait=True)
        resumed.finish()
    assert steps_at(tmp_path / "root" / "my" / "run") == [30, 40]


@pytest.mark.full
def test_a_drive_that_hangs_does_not_fail_the_training_and_gets_the_next_checkpoint(
    tmp_path, near_storage, drive, monkeypatch, caplog, file_hook
):
    mount = drive()
    monkeypatch.setattr(files, "CHECKPOINT_STALLED_S", 0.5)
    folder = tmp_path / "drive" / "run"
    save(folder, 10)
    with CheckpointFolder(folder) as checkpoints, caplog.at_level(logging.WARNING, logger="colabkit"):
        assert checkpoints.newest().step == 10
        file_hook(lambda at, path: mount.hang() if at == "write" and folder in path.parents else None)
        checkpoints.save(20, content(20), score=0.1)
        checkpoints.finish()
        file_hook(None)
        checkpoints.save(30, content(30), score=0.2)
        checkpoints.finish()
        # finish() tries once more to publish the best checkpoint, that of step 20.
        assert [step for step, _ in checkpoints.failures] == [20, 30, 20]
        assert "has not responded for" in checkpoints.failures[0][1]
        assert (
            f"The checkpoint remains at {str(near_of(near_storage) / 'checkpoint-00000020.pt')!r}"
            in checkpoints.failures[0][1]
        )
        assert checkpoints.latest == near_of(near_storage) / "checkpoint-00000030.pt"
        assert len(caplog.records) == 1
        mount.go_on()
        wait_for(
            lambda: not [t for t in threading.enumerate() if t.name == "colabkit-read"],
            "the end of the hanging threads",
        )
        monkeypatch.setattr(files, "CHECKPOINT_STALLED_S", 60.0)
        checkpoints.save(40, content(40), score=0.3)
        checkpoints.finish()
        assert len(checkpoints.failures) == 3
        assert checkpoints.latest == folder / "checkpoint-00000040.pt"
        assert checkpoints.best == folder / "checkpoint-00000020.pt"
    assert steps_at(tmp_path / "root" / "run") == [20, 40]


def test_a_drive_that_hangs_for_long_blocks_few_threads(tmp_path, drive, monkeypatch):
    mount = drive()
    monkeypatch.setattr(files, "CHECKPOINT_STALLED_S", 0.1)
    with CheckpointFolder(tmp_path / "drive" / "run") as checkpoints:
        mount.hang()
        for step in range(6):
            checkpoints.save(step, content(step), wait=True)
            checkpoints.finish()
        assert len(checkpoints.failures) == 6
        assert sum(thread.name == "colabkit-read" for thread in threading.enumerate()) == 3
        mount.go_on()


def test_a_drive_that_dies_does_not_fail_the_training(tmp_path, near_storage, drive, file_hook):
    mount = drive()
    folder = tmp_path / "drive" / "run"
    save(folder, 10)
    with CheckpointFolder(folder) as checkpoints:
        file_hook(lambda at, path: mount.kill() if at == "write" and folder in path.parents else None)
        checkpoints.save(20, content(20))
        checkpoints.finish()
        file_hook(None)
        checkpoints.save(30, content(30))
        checkpoints.finish()
        assert [step for step, _ in checkpoints.failures] == [20, 30]
        assert all("is dead" in reason and "\n" not in reason for _, reason in checkpoints.failures)
    assert steps_at(near_of(near_storage)) == [20, 30]
    with pytest.raises(FileFailed, match=r"Cannot resume from .+ is dead"):
        CheckpointFolder(folder).newest()


def test_nothing_is_written_below_the_mountpoint_of_a_drive_that_is_gone(tmp_path, near_storage, drive):
    mount = drive()
    folder = tmp_path / "drive" / "run"
    with CheckpointFolder(folder) as checkpoints:
        mount.__exit__(None, None, None)
        mount.__exit__ = lambda *_: None
        checkpoints.save(10, content(10))
        checkpoints.finish()
        assert "is gone" in checkpoints.failures[0][1]
        with pytest.raises(NotMounted, match="Cannot resume"):
            checkpoints.newest()
    assert list((tmp_path / "drive").iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("operation", sampled([None, "list", "open", "read"], 1))
def test_a_drive_that_hangs_on_resume_raises_timed_out(tmp_path, near_storage, drive, monkeypatch, operation):
    mount = drive()
    folder = tmp_path / "drive" / "run"
    save(folder, 10)
    elsewhere(monkeypatch, tmp_path / "other")
    monkeypatch.setattr(files, "CHECKPOINT_STALLED_S", 0.5)
    mount.hang(operation)
    with pytest.raises(TimedOut, match=r"Cannot resume from .+ has not responded"):
        CheckpointFolder(folder).newest()
    mount.go_on()
    wait_for(
        lambda: not [t for t in threading.enumerate() if t.name == "colabkit-read"], "the end of the hanging threads"
    )
    assert found(folder) == (10, [])


def test_an_interrupt_of_finish_is_raised_and_close_ends_the_threads(tmp_path, near_storage, drive, file_hook):
    mount = drive()
    folder = tmp_path / "drive" / "run"
    hangs = threading.Event()

    def hang(at: str, path: Path) -> None:
        if at == "write" and folder in path.parents and not hangs.is_set():
            mount.hang()
            hangs.set()

    def interrupt() -> None:
        assert hangs.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    file_hook(hang)
    interrupting = threading.Thread(target=interrupt)
    with CheckpointFolder(folder) as checkpoints:
        checkpoints.save(10, content(10), wait=True)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            interrupting.start()
            checkpoints.finish()
        interrupting.join()
    # Only the thread that hangs in the mount is left.
    assert [t.name for t in threading.enumerate() if t.name.startswith("colabkit-")] == ["colabkit-read"]
    mount.go_on()
    wait_for(
        lambda: not [t for t in threading.enumerate() if t.name == "colabkit-read"], "the end of the hanging threads"
    )
    assert steps_at(near_of(near_storage)) == [10]
    assert list((tmp_path / "root" / "run").iterdir()) == []


def test_a_publication_that_reads_back_other_bytes_fails(tmp_path, near_storage, drive):
    drive(plan={"faults": [{"on": "read", "path": "/run/.colabkit-*.partial", "do": "change", "count": 1}]})
    with CheckpointFolder(tmp_path / "drive" / "run") as checkpoints:
        checkpoints.save(10, content(10))
        checkpoints.finish()
        assert "read back" in checkpoints.failures[0][1]
        assert list((tmp_path / "root" / "run").iterdir()) == []
        checkpoints.save(20, content(20))
        checkpoints.finish()
        assert len(checkpoints.failures) == 1
    assert steps_at(tmp_path / "root" / "run") == [20]


def test_a_newer_remote_checkpoint_is_loaded_and_a_damaged_one_is_skipped(tmp_path, near_storage, monkeypatch):
    folder = pretend_far(monkeypatch, tmp_path / "far")
    save(folder, 10)
    with pytest.MonkeyPatch.context() as patch:
        elsewhere(patch, tmp_path / "other")
        save(folder, 20, 30)
    assert CheckpointFolder(folder).newest_step() == 30
    (folder / "checkpoint-00000030.pt").write_bytes(b"cut")
    assert found(folder) == (20, ["checkpoint-00000030.pt"])
    local = near_of(near_storage)
    # Damage the local copy of step 20, but not the remote one, which can still be loaded.
    (local / "checkpoint-00000020.pt").write_bytes(b"cut")
    assert found(folder) == (20, ["checkpoint-00000030.pt", "checkpoint-00000020.pt"])
    assert steps_at(local) == [10, 20]
    for path in [*local.iterdir(), *folder.iterdir()]:
        path.write_bytes(b"")
    with pytest.raises(Corrupt, match="seal cannot be read"):
        CheckpointFolder(folder).newest()


def test_a_checkpoint_that_could_not_be_published_can_be_published_later(tmp_path, file_hook, monkeypatch):
    folder = pretend_far(monkeypatch, tmp_path / "far")

    def fail(operation: str, path: Path) -> None:
        if folder in path.parents:
            raise OSError(5, "Input/output error")

    with CheckpointFolder(folder) as checkpoints:
        file_hook(fail)
        checkpoints.save(10, content(10))
        checkpoints.finish()
        file_hook(None)
    assert steps_at(folder) == []
    with CheckpointFolder(folder) as resumed:
        assert resumed.newest().step == 10
        resumed.publish_soon()
        resumed.finish()
    assert steps_at(folder) == [10]


def test_a_checkpoint_that_no_thread_can_publish_stays_local_and_is_listed(
    tmp_path, near_storage, allow_threads, monkeypatch
):
    folder = pretend_far(monkeypatch, tmp_path / "far")
    with CheckpointFolder(folder) as checkpoints:
        allow_threads(0)
        checkpoints.save(10, content(10))
        checkpoints.finish()
        ((step, reason),) = checkpoints.failures
        assert (step, str(near_of(near_storage)) in reason) == (10, True)
    assert steps_at(near_of(near_storage)) == [10]


def test_only_the_newest_and_the_best_of_several_pending_checkpoints_are_published(
    tmp_path, near_storage, monkeypatch, file_hook
):
    folder = pretend_far(monkeypatch, tmp_path / "far")
    reached, go_on = threading.Event(), threading.Event()

    def hold(operation: str, path: Path) -> None:
        if folder in path.parents and not reached.is_set():
            reached.set()
            assert go_on.wait(30)

    file_hook(hold)
    with CheckpointFolder(folder, keep_last=2) as checkpoints:
        checkpoints.save(10, content(10), score=5, wait=True)
        assert reached.wait(30)
        for step, score in ((20, 1), (30, 2), (40, 3), (50, 4)):
            checkpoints.save(step, content(step), score=score, wait=True)
        # Step 10 is being published, 20 is the best, and 40 and 50 are the newest.
        assert steps_at(near_of(near_storage)) == [10, 20, 40, 50]
        go_on.set()
        checkpoints.finish()
        assert checkpoints.failures == ()
    assert steps_at(folder) == [20, 50]
    assert found(folder) == (50, [])


def test_the_time_of_a_save_does_not_include_how_long_a_best_checkpoint_waited_for_a_retry(
    tmp_path, monkeypatch, file_hook
):
    folder = pretend_far(monkeypatch, tmp_path / "far")
    now = [0.0]
    monkeypatch.setattr("colabkit.training.checkpoints.folder.time", SimpleNamespace(monotonic=lambda: now[0]))

    def fail(operation: str, path: Path) -> None:
        if folder in path.parents:
            raise OSError(5, "Input/output error")

    with CheckpointFolder(folder) as checkpoints:
        file_hook(fail)
        checkpoints.save(10, content(10), score=1, wait=True)
        checkpoints.finish()
        file_hook(None)
        now[0] = 3600.0
        checkpoints.save(20, content(20), score=2, wait=True)
        checkpoints.finish()
        assert checkpoints.best == folder / "checkpoint-00000010.pt"
        assert checkpoints.save_s == 0


def test_the_time_of_a_save_includes_the_publication_of_the_newest_checkpoint(tmp_path, monkeypatch, file_hook):
    folder = pretend_far(monkeypatch, tmp_path / "far")
    now = [0.0]
    monkeypatch.setattr("colabkit.training.checkpoints.folder.time", SimpleNamespace(monotonic=lambda: now[0]))

    def take_a_minute(operation: str, path: Path) -> None:
        if folder in path.parents:
            now[0] = 60.0

    file_hook(take_a_minute)
    with CheckpointFolder(folder) as checkpoints:
        checkpoints.save(10, content(10), wait=True)
        checkpoints.finish()
        assert checkpoints.save_s == 60


def test_a_best_local_checkpoint_that_is_worse_than_the_best_remote_one_is_not_published_again(
    tmp_path, monkeypatch, file_hook
):
    folder = pretend_far(monkeypatch, tmp_path / "far")
    with CheckpointFolder(folder) as checkpoints:
        for step, score in ((10, 1), (20, 2)):
            checkpoints.save(step, content(step), score=score, wait=True)
            checkpoints.finish()
    elsewhere(monkeypatch, tmp_path / "other")
    created: list[str] = []

    def note(operation: str, path: Path) -> None:
        if operation == "create" and folder in path.parents:
            created.append(path.name)

    file_hook(note)
    with CheckpointFolder(folder) as resumed:
        assert resumed.newest().step == 20
        for step in (30, 40, 50, 60):
            resumed.save(step, content(step), score=step, wait=True)
            resumed.finish()
    assert steps_at(folder) == [10, 50, 60]
    # Each publication creates a file and its seal.
    assert len(created) == 8, created


@pytest.mark.parametrize("is_on_another_machine", [False, True])
def test_both_copies_of_a_checkpoint_with_a_flaw_are_excluded(tmp_path, monkeypatch, is_on_another_machine):
    folder = pretend_far(monkeypatch, tmp_path / "far")
    with CheckpointFolder(folder) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, content(step), score=-step, wait=True)
            checkpoints.finish()
    if is_on_another_machine:
        elsewhere(monkeypatch, tmp_path / "other")
    with CheckpointFolder(folder) as resumed:
        newest = resumed.newest(lambda found: "NaN" if found["state"]["weights"][0] == 20 else "")
        assert (newest.step, [reason for _, reason in newest.skipped_checkpoints]) == (10, ["NaN"])
        resumed.save(25, content(25), score=0, wait=True)
        assert resumed.best == folder / "checkpoint-00000010.pt"
        resumed.finish()
    assert steps_at(folder) == [10, 25]


def test_the_writer_has_a_lower_priority_unless_the_caller_waits_for_it(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(files.os, "setpriority", lambda which, thread, nice: given.append((thread, nice)))
    with CheckpointFolder(tmp_path) as checkpoints:
        checkpoints.save(1, content(1), wait=True)
        assert given == []
        checkpoints.save(2, content(2))
        checkpoints.finish()
    assert [nice for _, nice in given] == [10]
    assert given[0][0] != threading.get_native_id()
