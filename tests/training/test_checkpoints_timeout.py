"""`CheckpointFolder` on a disk that does not respond: no call waits forever, and the folder stays consistent."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from checkpoint_folders import HeldDisk, content, found, save, steps_at, writers
from far_mounts import wait_for
from trainings import train

from colabkit.errors import TimedOut
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.training.checkpoints.folder import CheckpointFolder

TIMEOUT_S = 0.5


pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def disk(file_hook) -> Iterator[HeldDisk]:
    """Return a disk that does not respond from its first write until it is released."""
    held = HeldDisk(file_hook, "write")
    yield held
    held.release()


def test_every_call_abandons_a_write_that_hangs_and_the_next_write_succeeds(tmp_path, file_hook):
    save(tmp_path, 10)
    for step, operation in enumerate(("create", "write", "sync"), 20):
        with CheckpointFolder(tmp_path, timeout_s=TIMEOUT_S) as checkpoints:
            disk = HeldDisk(file_hook, operation)
            for number, call in ((step, checkpoints.save), (step + 1, checkpoints.save)):
                with pytest.raises(
                    TimedOut, match=rf"Cannot save the checkpoint of step {number}: '.+' has not responded for"
                ):
                    call(number, content(number), wait=True)
            with pytest.raises(TimedOut, match=r"Cannot finish .+ has not responded for .+ Check the disk"):
                checkpoints.finish()
            assert checkpoints.is_free
            assert [step for step, _ in checkpoints.failures] == [step, step + 1]
            assert found(tmp_path)[0] == 10
            disk.release()
            assert steps_at(tmp_path) == [10]
            checkpoints.save(30, content(30), wait=True)
            checkpoints.finish()
            assert steps_at(tmp_path) == [10, 30]
            (tmp_path / "checkpoint-00000030.json").unlink()


def test_a_write_that_hangs_after_its_content_is_complete_is_published_late(tmp_path, file_hook):
    with CheckpointFolder(tmp_path, timeout_s=TIMEOUT_S) as checkpoints:
        disk = HeldDisk(file_hook, "rename")
        with pytest.raises(TimedOut):
            checkpoints.save(10, content(10), wait=True)
        assert checkpoints.latest is None
        disk.release()
        assert found(tmp_path) == (10, [])
        assert checkpoints.latest == tmp_path / "checkpoint-00000010.pt"
        checkpoints.finish()


def test_without_waiting_a_write_that_hangs_is_listed_and_logged_once(tmp_path, disk, caplog):
    with CheckpointFolder(tmp_path, timeout_s=TIMEOUT_S) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, content(step))
        assert sorted(step for step, _ in checkpoints.failures) == [10, 20, 30]
        assert all(f"save the checkpoint of step {step}:" in reason for step, reason in checkpoints.failures)
        assert len(caplog.records) == 1
        disk.release()


def test_a_close_that_would_wait_forever_raises_unless_there_is_another_error(tmp_path, file_hook):
    def leave(error: Exception | None) -> None:
        disk = HeldDisk(file_hook, "write")
        checkpoints = CheckpointFolder(tmp_path, timeout_s=TIMEOUT_S)
        try:
            with checkpoints:
                checkpoints.save(10, content(10))
                assert disk.reached.wait(30)
                if error is not None:
                    raise error
        finally:
            assert [step for step, _ in checkpoints.failures] == [10]
            # The `with` block has closed the folder; closing it again must not raise.
            checkpoints.close()
            disk.release()

    with pytest.raises(ValueError, match="planned"):
        leave(ValueError("planned"))
    with pytest.raises(TimedOut, match="Cannot close"):
        leave(None)
    assert list(tmp_path.iterdir()) == []


def test_training_continues_while_its_disk_hangs_and_reports_failed_saves(tmp_path, data, file_hook):
    disks: list[HeldDisk] = []

    def note(done: meters.StepDone) -> None:
        # Step 7 is the first step of the second epoch.
        if done.step == 7:
            wait_for(lambda: not writers(), "the checkpoint of the first epoch")
            disks.append(HeldDisk(file_hook, "create"))
        if done.step == 20:
            disks[0].release()

    report = train(lambda batch: None, Loader(data, 4), epochs=4, to=tmp_path, on_step=note, timeout=TIMEOUT_S)
    assert report.trained == 4
    assert sorted(step for step, _ in report.failed_saves) == [12, 18]
    assert "has not responded for" in repr(report)
    assert steps_at(tmp_path)[-1] == 24


def test_an_error_waits_for_the_checkpoint_that_is_written_to_a_slow_disk(tmp_path, data, file_hook):
    def note(done: meters.StepDone) -> None:
        if done.step == 1:
            wait_for(lambda: not writers(), "the first checkpoint")
            disks.append(HeldDisk(file_hook, "create"))
        if done.step == 8:
            assert disks[0].reached.wait(30)
            threading.Timer(0.3, disks[0].release).start()
            raise ValueError("planned")

    disks: list[HeldDisk] = []
    with pytest.raises(ValueError, match="planned"):
        train(lambda batch: None, Loader(data, 4), epochs=2, to=tmp_path, on_step=note)
    assert steps_at(tmp_path) == [0, 6]


def test_a_training_whose_last_checkpoint_hangs_returns_its_report(tmp_path, data, file_hook):
    disks: list[HeldDisk] = []

    def note(done: meters.StepDone) -> None:
        if done.step == 6:
            disks.append(HeldDisk(file_hook, "create"))

    report = train(lambda batch: None, Loader(data, 4), to=tmp_path, on_step=note, timeout="0.5s")
    assert report.failed_saves[-1][0] == report.steps == 6
    assert "the state after step 6 is not saved" in repr(report)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("colabkit-checkpoint")]
    assert all(thread.daemon for thread in threads)
    disks[0].release()
    wait_for(lambda: "colabkit-status" not in [thread.name for thread in threading.enumerate()], "the last status")
    assert steps_at(tmp_path) == [0]
