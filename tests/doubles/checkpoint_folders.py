"""Checkpoint folders with known content: helpers that create them, read them back and find leftovers."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from far_mounts import wait_for
from trees import leftovers

from colabkit.training.checkpoints import files
from colabkit.training.checkpoints import folder as checkpoint_folder
from colabkit.training.checkpoints.files import THREAD_NAME
from colabkit.training.checkpoints.folder import CheckpointFolder


def content(step: int) -> dict[str, Any]:
    return {"state": {"weights": torch.full((5,), float(step))}, "history": [{"epoch": step, "values": {"loss": 0.5}}]}


def save(folder: Path, *steps: int, **options: Any) -> Path:
    """Save a checkpoint for each step, publish them if the folder is remote, and return the path of the last one."""
    with CheckpointFolder(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, content(step), wait=True)
        checkpoints.finish()
        assert checkpoints.latest is not None
        return checkpoints.latest


def found(folder: Path) -> tuple[int, list[str]]:
    """Return the step of the newest valid checkpoint, after checking its content, and the names of skipped files."""
    newest = CheckpointFolder(folder).newest()
    assert newest is not None
    assert torch.equal(newest.content["state"]["weights"], content(newest.step)["state"]["weights"])
    assert newest.content["history"] == content(newest.step)["history"]
    return newest.step, [path.name for path, _ in newest.skipped_checkpoints]


def steps_at(folder: Path) -> list[int]:
    """Return the steps of a folder's sealed checkpoints, after checking that the folder has no other colabkit files."""
    seals = sorted(path for path in folder.iterdir() if path.suffix == ".json" and path.name != "status.json")
    files = sorted(path for path in folder.iterdir() if path.suffix == ".pt")
    assert len(seals) == len(files), [path.name for path in folder.iterdir()]
    assert leftovers(folder) == []
    return [int(path.stem.split("-")[1]) for path in seals]


class HostileObject:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def seal_for(path: Path, data: bytes) -> None:
    """Write `data` as a checkpoint with a valid seal for step 20."""
    path.write_bytes(data)
    seal = {"format": 2, "file": path.name, "step": 20, "bytes": len(data), "score": None, "judge": "min"}
    path.with_suffix(".json").write_text(json.dumps({**seal, "sha256": hashlib.sha256(data).hexdigest()}))


def near_of(near_storage: Path) -> Path:
    (folder,) = (near_storage / "checkpoints").iterdir()
    return folder


def pretend_far(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Treat a folder on this disk as if it were on a network drive, and return it."""
    for module in (checkpoint_folder, files):
        patch.setattr(module, "can_hang", lambda path, table: path.startswith(str(folder)))
    return folder


def save_again(folder: Path, number: int) -> None:
    """Save step 20 with the given number in its content, as the folder's only checkpoint."""
    with CheckpointFolder(folder, keep_last=1) as checkpoints:
        checkpoints.save(20, {**content(20), "number": number}, wait=True)


def with_far(work: Callable[..., Any], folder: Path, *arguments: Any) -> Any:
    """Call `work` while a folder on this disk is treated as if it were on a network drive."""
    with pytest.MonkeyPatch.context() as patch:
        return work(pretend_far(patch, folder), *arguments)


def assert_nothing_runs(folder: Path) -> None:
    """Check that no colabkit thread is running and no file below a folder is open or memory-mapped."""
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("colabkit")] == []
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    names = [os.readlink(path) for path in descriptors if os.path.lexists(path)]
    assert [name for name in names if name.startswith(str(folder))] == []
    assert str(folder) not in Path("/proc/self/maps").read_text()


class HeldDisk:
    """A disk that stops responding: starting with the first file change of one kind, all changes wait for `release()`.

    Args:
        set_hook: the fixture `file_hook`.
        operation: kind of the first file change that waits, such as `"create"`.
    """

    def __init__(self, set_hook: Callable[[Callable[[str, Path], None] | None], None], operation: str) -> None:
        self.reached = threading.Event()
        self._released = threading.Event()
        self._operation = operation
        self._set_hook = set_hook
        set_hook(self)

    def __call__(self, operation: str, path: Path) -> None:
        if operation == self._operation or self.reached.is_set():
            self.reached.set()
            assert self._released.wait(60)

    @property
    def is_released(self) -> bool:
        return self._released.is_set()

    def release(self) -> None:
        """Let all file changes proceed, and wait until the waiting threads have ended."""
        self._set_hook(None)
        self._released.set()
        wait_for(lambda: not writers(), "the end of the hanging threads")


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
