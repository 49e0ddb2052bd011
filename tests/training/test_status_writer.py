"""`train(to=)` writes `status.json` next to its checkpoints, and training never depends on it."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import near_of
from far_mounts import FuseMount, has_fuse, wait_for
from trainings import SmallTraining, nothing, stop_after, train
from trees import needs

import colabkit
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.training import status_writer
from colabkit.training.report import TrainingInterrupted

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the status every few milliseconds."""
    monkeypatch.setattr(status_writer, "LOCAL_S", 0.02)
    monkeypatch.setattr(status_writer, "REMOTE_S", 0.03)
    monkeypatch.setattr(status_writer, "_VALUES_S", 0.01)


def status_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_bytes())
    return found


def train_until(data: Any, folder: Path, condition: Callable[[], bool], **options: Any) -> None:
    """Train for short epochs until a condition holds."""

    def check(done: meters.StepDone) -> None:
        if condition():
            raise StopIteration

    train(lambda batch: {"loss": 0.5}, Loader(data, 4), epochs=5_000, to=folder, on_step=check, **options)


@pytest.mark.full
def test_the_status_shows_how_a_run_ended_without_secrets(tmp_path, data):
    SmallTraining(data).train(2, to=tmp_path / "a")
    done = status_of(tmp_path / "a")
    assert (done["state"], done["reason"], done["step"], len(done["epochs"])) == ("finished", None, 12, 2)
    assert done["checkpoint"] == "checkpoint-00000012.pt"
    with pytest.raises(TrainingInterrupted):
        SmallTraining(data).train(2, to=tmp_path / "b", on_step=stop_after(3))
    assert (status_of(tmp_path / "b")["state"], status_of(tmp_path / "b")["reason"]) == ("stopped", "Ctrl-C")

    def fail(_: object) -> None:
        raise OSError("GET https://me:pw@example.org/x?X-Signature=abc failed, api_key=abc, Bearer abc.def\nmore abc")

    with pytest.raises(OSError, match="GET"):
        train(fail, Loader(data, 4), to=tmp_path / "c")
    text = (tmp_path / "c" / "status.json").read_text()
    assert status_of(tmp_path / "c")["reason"].startswith("OSError: GET https://...example.org/x... failed")
    assert not [secret for secret in ("me:pw", "abc") if secret in text]
    assert colabkit.doctor(tmp_path / "a" / "status.json").verdict == "unknown", "it can be read like a saved report"


def test_a_run_that_was_killed_at_its_end_is_shown_as_finished_after_the_next_call(tmp_path, data):
    SmallTraining(data).train(2, to=tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({**status_of(tmp_path), "state": "training"}))
    assert SmallTraining(data).train(2, to=tmp_path).trained == 0
    done = status_of(tmp_path)
    assert (done["state"], done["step"], len(done["epochs"])) == ("finished", 12, 2)
    assert SmallTraining(data).train(2, to=tmp_path).trained == 0
    assert status_of(tmp_path) == done


def test_a_running_run_updates_its_status_from_its_steps(tmp_path, data, often):
    found: list[dict[str, Any]] = []

    def read() -> bool:
        found.append(status_of(tmp_path))
        return len(found[-1]["loss_curve"]) > 3

    train_until(data, tmp_path, read)
    last = found[-1]
    assert (last["state"], last["pid"], last["values"], last["epoch_count"]) == (
        "training",
        os.getpid(),
        {"loss": 0.5},
        5_000,
    )
    assert last["step"] > last["spent"]["batches"] - 10 > 0
    assert [one["beat"] for one in found] == sorted(one["beat"] for one in found)
    assert status_of(tmp_path)["state"] == "finished"


def test_training_continues_without_a_status_and_says_so_once(tmp_path, data, often, file_hook, caplog):
    refused = 0

    def refuse(operation: str, path: Path) -> None:
        nonlocal refused
        if operation == "create" and threading.current_thread().name == "colabkit-status":
            refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    file_hook(refuse)
    train_until(data, tmp_path, lambda: refused > 2)
    (record,) = caplog.records
    assert "the status of the run cannot be written; training continues: [Errno 28] No space" in record.getMessage()
    assert not (tmp_path / "status.json").exists()


def test_the_status_of_a_run_that_began_later_in_the_same_folder_stays(tmp_path, data, often, caplog):
    train(nothing, Loader(data, 4), to=tmp_path / "later")
    later = (tmp_path / "later" / "status.json").read_bytes()
    run = tmp_path / "run"

    def replace() -> bool:
        if status_of(run)["beat"] > 1 and (run / "status.json").read_bytes() != later:
            (run / "new.json").write_bytes(later)
            (run / "new.json").replace(run / "status.json")
        return bool(caplog.records)

    train_until(data, run, replace)
    (record,) = caplog.records
    assert "another training writes to" in record.getMessage()
    assert (run / "status.json").read_bytes() == later


def test_a_resumed_run_replaces_the_status_of_the_previous_one_even_if_its_first_write_fails(
    tmp_path, data, often, file_hook, caplog
):
    SmallTraining(data).train(1, to=tmp_path)
    is_refused = False

    def refuse_once(operation: str, path: Path) -> None:
        nonlocal is_refused
        if operation == "create" and threading.current_thread().name == "colabkit-status" and not is_refused:
            is_refused = True
            raise OSError(errno.ENOSPC, "No space left on device")

    file_hook(refuse_once)
    SmallTraining(data).train(2, to=tmp_path)
    assert is_refused
    assert (status_of(tmp_path)["state"], status_of(tmp_path)["step"]) == ("finished", 12)
    (record,) = caplog.records
    assert "the status of the run cannot be written" in record.getMessage()


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[FuseMount]:
    needs("FUSE", has_fuse())
    (tmp_path / "root").mkdir()
    with FuseMount(tmp_path / "drive", tmp_path / "root", latency_s=0.005) as mounted:
        yield mounted
    wait_for(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("colabkit")],
        "the end of the threads that hung",
    )


@pytest.mark.full
def test_on_drive_the_status_is_also_written_locally_and_a_hang_does_not_stop_it(
    tmp_path, data, often, drive, near_storage
):
    folder = tmp_path / "drive" / "run"
    beats: list[int] = []

    def read() -> bool:
        near = near_of(near_storage) / "status.json"
        remote = tmp_path / "root" / "run" / "status.json"
        if not beats and remote.exists():
            drive.hang()
            beats.append(status_of(near.parent)["beat"])
        if is_alive := bool(beats) and status_of(near.parent)["beat"] > beats[0] + 3:
            drive.go_on()
        return is_alive

    train_until(data, folder, read)
    assert status_of(near_of(near_storage))["state"] == status_of(tmp_path / "root" / "run")["state"] == "finished"
