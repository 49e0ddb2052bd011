"""`CheckpointFolder` finds the newest undamaged checkpoint, keeps the newest and the best, and executes no code."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import pickle
import random
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_folders import HeldDisk, HostileObject, content, found, save, seal_for, steps_at
from far_mounts import wait_for

from colabkit.errors import Corrupt, FileFailed, InvalidOption
from colabkit.training.checkpoints.folder import CheckpointFolder
from colabkit.training.checkpoints.snapshots import random_state, restore_random_state

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def draws() -> tuple[object, ...]:
    return (
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(),
        torch.rand(3).tolist(),
    )


def test_saved_content_is_loaded_unchanged(tmp_path):
    saved = {
        "state": {"model": torch.nn.Linear(3, 2).state_dict(), "nested": {"a": [1, 2.5, "ü", None, True, (b"x", 1j)]}},
        "history": [],
    }
    folder = tmp_path / "made" / "here"
    with CheckpointFolder(folder) as checkpoints:
        checkpoints.save(120, saved)
        checkpoints.finish()
        assert checkpoints.latest == folder / "checkpoint-00000120.pt"
        assert (checkpoints.best, checkpoints.failures, checkpoints.is_free) == (None, (), True)
        assert checkpoints.save_s > 0
    newest = CheckpointFolder(folder).newest()
    assert newest is not None
    assert (newest.path, newest.step, newest.skipped_checkpoints) == (folder / "checkpoint-00000120.pt", 120, ())
    assert newest.content["state"]["nested"] == saved["state"]["nested"]
    for name, value in saved["state"]["model"].items():
        assert torch.equal(newest.content["state"]["model"][name], value)


def test_the_file_is_a_torch_file_and_the_seal_is_json(tmp_path):
    path = save(tmp_path, 3)
    assert torch.equal(torch.load(path, weights_only=True)["content"]["state"]["weights"], torch.full((5,), 3.0))
    seal = json.loads(path.with_suffix(".json").read_text())
    assert seal["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (seal["format"], seal["file"], seal["step"], seal["bytes"]) == (2, path.name, 3, path.stat().st_size)


def test_the_crc_option_of_torch_is_restored(tmp_path):
    before = torch.serialization.get_crc32_options()
    save(tmp_path, 1)
    assert torch.serialization.get_crc32_options() == before


def test_a_folder_without_checkpoints_returns_none(tmp_path):
    (tmp_path / "checkpoint-00000001.pt").write_bytes(b"no seal")
    (tmp_path / "checkpoint-x.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "none"):
        checkpoints = CheckpointFolder(folder)
        assert (checkpoints.newest(), checkpoints.newest_step(), checkpoints.latest, checkpoints.best) == (
            None,
            None,
            None,
            None,
        )
    assert not (tmp_path / "none").exists()


def seed_all() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def test_all_random_generators_are_restored(tmp_path):
    seed_all()
    # Make Python and NumPy cache a second normal value, which is part of the generators' state.
    draws()
    with CheckpointFolder(tmp_path) as checkpoints:
        checkpoints.save(1, {"random": random_state()}, wait=True)
        expected = draws()
        draws()
        restore_random_state(checkpoints.newest().content["random"])
    assert draws() == expected


def test_saving_changes_no_random_generator(tmp_path):
    seed_all()
    expected = draws()
    seed_all()
    save(tmp_path, 1)
    assert draws() == expected


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_newest_checkpoints_are_kept(tmp_path, keep_last):
    steps = [5, 10, 20, 100_000_000, 200_000_000]
    for count, step in enumerate(steps, 1):
        save(tmp_path, step, keep_last=keep_last)
        assert found(tmp_path) == (step, [])
        assert steps_at(tmp_path) == steps[max(0, count - keep_last) : count]


@pytest.mark.parametrize(("mode", "best"), [("min", 20), ("max", 40)])
def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path, mode, best):
    scores = {10: 0.5, 20: 0.1, 30: float("nan"), 40: 0.9, 50: None, 60: 0.5, 70: 0.5, 80: float("inf")}
    with CheckpointFolder(tmp_path, mode=mode) as checkpoints:
        for step, score in scores.items():
            checkpoints.save(step, content(step), score=score, wait=True)
        assert checkpoints.best == tmp_path / f"checkpoint-{best:08d}.pt"
    assert steps_at(tmp_path) == sorted({best, 70, 80})
    # A new `CheckpointFolder` reads the scores from disk.
    with CheckpointFolder(tmp_path, mode=mode) as resumed:
        assert resumed.newest().step == 80
        assert resumed.best == tmp_path / f"checkpoint-{best:08d}.pt"
        resumed.save(90, content(90), score=0.5, wait=True)
    assert steps_at(tmp_path) == sorted({best, 80, 90})


def test_the_earliest_of_equal_scores_is_best_and_a_score_may_be_a_tensor(tmp_path):
    with CheckpointFolder(tmp_path) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, content(step), score=torch.tensor(0.25), wait=True)
        assert checkpoints.best == tmp_path / "checkpoint-00000001.pt"


def test_newest_step_does_not_read_the_file(tmp_path):
    save(tmp_path, 5, 10).write_bytes(b"damaged")
    assert CheckpointFolder(tmp_path).newest_step() == 10


def test_other_files_in_the_folder_are_unchanged(tmp_path):
    others = ("checkpoint-best.pt", "notes.json", "checkpoint-00000001.txt", "checkpoint-00000100.pt")
    for name in others:
        (tmp_path / name).write_text("kept")
    save(tmp_path, 2, 3, 4, 100)
    assert {path.name for path in tmp_path.iterdir() if path.read_bytes() == b"kept"} == set(others)
    assert found(tmp_path) == (100, [])


def test_saving_the_same_step_again_replaces_the_checkpoint(tmp_path):
    save(tmp_path, 10, 20)
    for number in range(3):
        with CheckpointFolder(tmp_path) as checkpoints:
            checkpoints.save(20, {**content(20), "number": number}, wait=True)
            assert checkpoints.newest().content["number"] == number
        assert steps_at(tmp_path) == [10, 20]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def sealed_by(content: str | bytes | dict[str, Any]) -> Callable[[Path], None]:
    """Return a function that replaces a checkpoint's seal, or some of its values."""

    def change(path: Path) -> None:
        seal = path.with_suffix(".json")
        values = json.dumps({**json.loads(seal.read_text()), **content}) if isinstance(content, dict) else content
        seal.write_bytes(values if isinstance(values, bytes) else values.encode())

    return change


DAMAGES = [
    (truncate, r"the file has [\d,]+ bytes instead of [\d,]+"),
    (lambda path: path.write_bytes(b""), r"the file has 0 bytes instead of [\d,]+"),
    (lambda path: path.write_bytes(path.read_bytes() + b"\0"), r"the file has [\d,]+ bytes instead of [\d,]+"),
    (zero, "does not match its SHA-256"),
    (flip, "does not match its SHA-256"),
    (os.remove, "No such file"),
    (sealed_by(b"\xff{"), "seal cannot be read"),
    (sealed_by("[1, 2]"), "seal cannot be read"),
    (sealed_by("5"), "seal cannot be read"),
    (sealed_by('{"bytes": 5}'), "seal cannot be read"),
    (sealed_by("[" * 100_000), "seal cannot be read"),
    (sealed_by({"file": "../../checkpoint-00000020.pt"}), "seal cannot be read"),
    (sealed_by({"format": 99}), "its format is 99, not 2"),
]


def test_damaged_checkpoints_are_skipped_with_the_reason_and_only_damaged_ones_raise_corrupt(tmp_path):
    for number, (damage, reason) in enumerate(DAMAGES):
        folder = tmp_path / str(number)
        first, newest = save(folder, 10), save(folder, 20)
        damage(newest)
        assert found(folder) == (10, ["checkpoint-00000020.pt"])
        loaded = CheckpointFolder(folder).newest()
        assert loaded is not None
        assert re.search(reason, loaded.skipped_checkpoints[0][1])
        damage(first)
        with pytest.raises(Corrupt, match=reason) as caught:
            CheckpointFolder(folder).newest()
        assert first.name in str(caught.value)
        assert newest.name in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [truncate, zero, os.remove])
def test_several_damaged_checkpoints_are_skipped_in_order(tmp_path, damage):
    save(tmp_path, 10, 20, 30, 40, keep_last=4)
    names = []
    for step in (40, 30, 20):
        names.append(f"checkpoint-{step:08d}.pt")
        damage(tmp_path / names[-1])
        assert found(tmp_path) == (step - 10, names)


@pytest.mark.parametrize("damage", [truncate, flip, sealed_by(b"\xff{"), os.remove])
def test_a_damaged_checkpoint_never_replaces_a_good_one(tmp_path, damage):
    save(tmp_path, 10, 20, 30, 40, keep_last=4)
    for step in (30, 40):
        damage(tmp_path / f"checkpoint-{step:08d}.pt")
    with CheckpointFolder(tmp_path) as checkpoints:
        assert checkpoints.newest().step == 20
        assert checkpoints.latest == tmp_path / "checkpoint-00000020.pt"
        # Save at steps before, at and after those of the damaged checkpoints.
        for step in (25, 30, 35, 45):
            checkpoints.save(step, content(step), wait=True)
            assert checkpoints.latest.name.startswith(f"checkpoint-{step:08d}")
            seal = tmp_path / f"checkpoint-{step:08d}.json"
            seal.rename(tmp_path / "hidden")
            # Without the newest checkpoint, an older one is found.
            assert found(tmp_path)[0] < step
            (tmp_path / "hidden").rename(seal)
    assert found(tmp_path) == (45, [])
    assert steps_at(tmp_path) == [35, 45]


def test_nothing_is_removed_while_the_newest_checkpoints_are_incomplete(tmp_path):
    save(tmp_path, 10, 20)
    truncate(tmp_path / "checkpoint-00000020.pt")
    save(tmp_path, 30)
    truncate(tmp_path / "checkpoint-00000030.pt")
    assert found(tmp_path)[0] == 10


@pytest.mark.parametrize("suffix", [".json", ".pt"])
def test_a_best_checkpoint_that_cannot_be_read_at_the_moment_is_kept(tmp_path, monkeypatch, suffix):
    broken = (tmp_path / "checkpoint-00000010").with_suffix(suffix)
    functions = {name: getattr(Path, name) for name in ("read_bytes", "stat")}

    def failing(name: str) -> Callable[..., Any]:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            if path == broken and is_broken:
                raise OSError(errno.EIO, "Input/output error")
            return functions[name](path, *arguments, **options)

        return call

    is_broken = False
    for name in functions:
        monkeypatch.setattr(Path, name, failing(name))
    with CheckpointFolder(tmp_path) as checkpoints:
        checkpoints.save(10, content(10), score=0.1, wait=True)
    # A later process reads the folder again.
    with CheckpointFolder(tmp_path) as checkpoints:
        for step in (20, 30, 40):
            is_broken = step == 30
            checkpoints.save(step, content(step), score=0.5, wait=True)
        assert checkpoints.newest().step == 40
    assert steps_at(tmp_path) == [10, 30, 40]
    with CheckpointFolder(tmp_path) as checkpoints:
        checkpoints.save(50, content(50), score=0.5, wait=True)
        assert checkpoints.best == tmp_path / "checkpoint-00000010.pt"


def test_a_checkpoint_without_a_seal_is_ignored_and_removed_by_the_next_save(tmp_path):
    save(tmp_path, 10, 20).with_suffix(".json").unlink()
    assert found(tmp_path) == (10, [])
    save(tmp_path, 30)
    # `steps_at` also checks that no file of step 20 is left.
    assert steps_at(tmp_path) == [10, 30]


@pytest.mark.parametrize("dump", [functools.partial(pickle.dump, protocol=2), torch.save])
def test_a_hostile_pickle_is_not_executed(tmp_path, dump):
    save(tmp_path, 10)
    with (tmp_path / "hostile").open("wb") as file:
        dump({"content": {"state": HostileObject(tmp_path / "executed")}}, file)
    seal_for(tmp_path / "checkpoint-00000020.pt", (tmp_path / "hostile").read_bytes())
    assert found(tmp_path) == (10, ["checkpoint-00000020.pt"])
    assert not (tmp_path / "executed").exists()
    loaded = CheckpointFolder(tmp_path).newest()
    assert loaded is not None
    reason = loaded.skipped_checkpoints[0][1]
    assert (
        reason == "it contains 'posix.mkdir', so loading it could run code; do not load it unless you trust its origin"
    )
    pickle.loads(pickle.dumps(HostileObject(tmp_path / "executed")))
    # Unpickling the object directly does execute its code.
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("made", [5, [1], {}, {"content": {}}, {"content": {}, "made_by": 5}, {"made_by": "x"}])
def test_a_sealed_file_with_other_content_is_skipped(tmp_path, made):
    save(tmp_path, 10)
    torch.save(made, tmp_path / "other")
    seal_for(tmp_path / "checkpoint-00000020.pt", (tmp_path / "other").read_bytes())
    assert found(tmp_path) == (10, ["checkpoint-00000020.pt"])


@pytest.mark.parametrize("wait", [True, False])
def test_a_folder_that_cannot_be_created_raises_file_failed(tmp_path, caplog, wait):
    (tmp_path / "file").write_text("x")
    with CheckpointFolder(tmp_path / "file" / "folder") as checkpoints:
        for step in (1, 2):
            with contextlib.nullcontext() if not wait else pytest.raises(FileFailed, match="Cannot save"):
                checkpoints.save(step, content(step), wait=wait)
            with pytest.raises(FileFailed, match="Cannot save"):
                checkpoints.finish()
        assert [step for step, _ in checkpoints.failures] == [1, 2]
        assert "\n" not in checkpoints.failures[0][1]
    assert len(caplog.records) == (0 if wait else 1)


@pytest.mark.parametrize("function", ["save", "load"])
def test_too_little_memory_for_a_checkpoint_is_not_reported_as_an_unsafe_state(tmp_path, monkeypatch, function):
    def fail(*_: object, **options: object) -> None:
        raise MemoryError if function == "save" else RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, function, fail)
    with (
        CheckpointFolder(tmp_path) as checkpoints,
        pytest.raises(FileFailed, match=r"Cannot save .+: there is not enough memory\. Free some memory"),
    ):
        checkpoints.save(10, content(10), wait=True)


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_system_that_allows_few_threads_gets_its_checkpoints(tmp_path, allow_threads, allowed, file_hook):
    allow_threads(allowed)
    with CheckpointFolder(tmp_path) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, content(step))
        checkpoints.finish()
        assert checkpoints.failures == ()
        file_hook(lambda operation, path: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(30, content(30))
        file_hook(None)
    assert steps_at(tmp_path) == [10, 20]
    assert found(tmp_path) == (20, [])


def test_close_discards_unsealed_checkpoints_and_later_saves_are_refused(tmp_path, file_hook):
    save(tmp_path, 10)
    disk = HeldDisk(file_hook, "sync")
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(20, content(20))
    assert disk.reached.wait(30)
    assert not checkpoints.is_free
    closing = threading.Thread(target=checkpoints.close)
    closing.start()
    wait_for(lambda: checkpoints._is_over, "close()")
    disk.release()
    closing.join()
    assert steps_at(tmp_path) == [10]
    assert checkpoints.failures == ()
    with pytest.raises(InvalidOption, match="closed"):
        checkpoints.save(30, content(30))
