"""Checkpoints: written whole or not at all, and the newest good one is always found."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import leftovers
from contract import AtChange, fill_disk, kills

from colabkit.checkpoint import newest_checkpoint, newest_step, save_checkpoint
from colabkit.errors import Corrupt, FileFailed, NotEnoughSpace


def content(step: int) -> dict[str, Any]:
    return {"state": {"weights": torch.full((5,), float(step))}, "history": [{"epoch": step, "values": {"loss": 0.5}}]}


def steps_found(folder: Path) -> tuple[int, list[str]]:
    """Return the step of the newest good checkpoint after checking its content, and the names passed over."""
    found = newest_checkpoint(folder)
    assert found is not None
    assert torch.equal(found.content["state"]["weights"], content(found.step)["state"]["weights"])
    assert found.content["history"] == content(found.step)["history"]
    return found.step, [path.name for path, _ in found.passed_over]


def draws() -> tuple[object, ...]:
    """Return what each of the random generators gives next."""
    return (
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.randn(),
        torch.rand(3).tolist(),
    )


def test_what_was_saved_is_loaded(tmp_path):
    saved = {
        "state": {"model": torch.nn.Linear(3, 2).state_dict(), "nested": {"a": [1, 2.5, "ü", None, True]}},
        "history": [],
    }
    path = save_checkpoint(tmp_path / "made" / "here", 120, saved)
    found = newest_checkpoint(tmp_path / "made" / "here")
    assert found is not None
    assert (found.path, found.step, found.passed_over) == (path, 120, ())
    assert path.name == "checkpoint-00000120.pt"
    assert found.content["state"]["nested"] == saved["state"]["nested"]
    for name, value in saved["state"]["model"].items():
        assert torch.equal(found.content["state"]["model"][name], value)


def test_a_folder_without_checkpoints_gives_none(tmp_path):
    (tmp_path / "checkpoint-00000001.pt").write_bytes(b"no seal")
    (tmp_path / "checkpoint-x.json").write_text("{}")
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "none") is None


def test_all_random_generators_go_on_where_they_were(tmp_path):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draws()  # leaves a cached normal value in each
    save_checkpoint(tmp_path, 1, content(1))
    expected = draws()
    draws()
    found = newest_checkpoint(tmp_path)
    found.restore_random_state()
    assert draws() == expected


def test_saving_moves_no_random_generator(tmp_path):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    expected = draws()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    save_checkpoint(tmp_path, 1, content(1))
    assert draws() == expected


def test_the_newest_two_are_kept(tmp_path):
    for step in (5, 10, 100_000_000, 200_000_000):
        save_checkpoint(tmp_path, step, content(step))
        assert steps_found(tmp_path) == (step, [])
    names = {f"checkpoint-{step}{suffix}" for step in (100_000_000, 200_000_000) for suffix in (".pt", ".json")}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_the_newest_step_is_told_without_reading(tmp_path):
    assert newest_step(tmp_path / "none") is None
    assert newest_step(tmp_path) is None
    for step in (5, 10):
        save_checkpoint(tmp_path, step, content(step)).write_bytes(b"damaged")
    assert newest_step(tmp_path) == 10


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    for name in ("checkpoint-best.pt", "notes.json", "checkpoint-00000001.txt"):
        (tmp_path / name).write_text("kept")
    for step in range(1, 5):
        save_checkpoint(tmp_path, step, content(step))
    assert {path.name for path in tmp_path.iterdir() if path.read_bytes() == b"kept"} == {
        "checkpoint-best.pt",
        "notes.json",
        "checkpoint-00000001.txt",
    }


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def garble_seal(path: Path) -> None:
    path.with_suffix(".json").write_bytes(b"\xff{")


def list_seal(path: Path) -> None:
    path.with_suffix(".json").write_text("[1, 2]")


def number_seal(path: Path) -> None:
    path.with_suffix(".json").write_text("5")


def lack_seal(path: Path) -> None:
    path.with_suffix(".json").write_text('{"bytes": 5}')


def other_version(path: Path) -> None:
    seal = path.with_suffix(".json")
    seal.write_text(json.dumps({**json.loads(seal.read_text()), "format": 99}))


DAMAGES = [
    (truncate, r"\d+ of \d+ bytes"),
    (empty, r"0 of \d+ bytes"),
    (lengthen, r"\d+ of \d+ bytes"),
    (zero, "not the sealed ones"),
    (flip, "not the sealed ones"),
    (os.remove, "No such file"),
    (garble_seal, "seal cannot be read"),
    (list_seal, "seal cannot be read"),
    (number_seal, "seal cannot be read"),
    (lack_seal, "seal cannot be read"),
    (other_version, "checkpoint format 99"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_damaged_newest_is_passed_over_with_the_reason(tmp_path, damage: Callable[[Path], None], reason):
    save_checkpoint(tmp_path, 10, content(10))
    path = save_checkpoint(tmp_path, 20, content(20))
    damage(path)
    assert steps_found(tmp_path) == (10, ["checkpoint-00000020.pt"])
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert re.search(reason, found.passed_over[0][1])


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_all_damaged_is_corrupt_and_names_each(tmp_path, damage, reason):
    for step in (10, 20):
        damage(save_checkpoint(tmp_path, step, content(step)))
    with pytest.raises(Corrupt, match=reason) as caught:
        newest_checkpoint(tmp_path)
    for name in ("checkpoint-00000010.pt", "checkpoint-00000020.pt"):
        assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_its_seal_counts_as_absent(tmp_path):
    save_checkpoint(tmp_path, 10, content(10))
    save_checkpoint(tmp_path, 20, content(20)).with_suffix(".json").unlink()
    assert steps_found(tmp_path) == (10, [])


def test_a_damaged_checkpoint_never_drives_out_a_good_one(tmp_path):
    for step in (30, 40):
        save_checkpoint(tmp_path, step, content(step))
        flip(tmp_path / f"checkpoint-{step:08d}.pt")
    for step in (10, 15, 20):  # another run of the same folder, with larger batches
        save_checkpoint(tmp_path, step, content(step))
        assert steps_found(tmp_path)[0] == step


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def seal_for(path: Path, data: bytes) -> None:
    """Write a checkpoint that somebody else made, with a seal that matches."""
    path.write_bytes(data)
    seal = {"format": 1, "step": 20, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.with_suffix(".json").write_text(json.dumps(seal))


@pytest.mark.parametrize("dump", [functools.partial(pickle.dump, protocol=2), torch.save])
def test_a_hostile_pickle_is_not_executed(tmp_path, dump):
    save_checkpoint(tmp_path, 10, content(10))
    with (tmp_path / "hostile").open("wb") as file:
        dump({"state": Hostile(tmp_path / "executed")}, file)
    seal_for(tmp_path / "checkpoint-00000020.pt", (tmp_path / "hostile").read_bytes())
    assert steps_found(tmp_path) == (10, ["checkpoint-00000020.pt"])
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Hostile(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()  # it would have been


@pytest.mark.parametrize("made", [5, [1], {}, {"state": {}}, {"state": {}, "random": {}}, {"random": 5}])
def test_a_sealed_file_of_something_else_is_passed_over(tmp_path, made):
    save_checkpoint(tmp_path, 10, content(10))
    torch.save(made, tmp_path / "other")
    seal_for(tmp_path / "checkpoint-00000020.pt", (tmp_path / "other").read_bytes())
    assert steps_found(tmp_path) == (10, ["checkpoint-00000020.pt"])


def test_a_kill_at_any_operation_of_a_save_keeps_the_newest_good_one(tmp_path):
    folder = tmp_path / "run"
    for step in (10, 20):
        save_checkpoint(folder, step, content(step))
    shutil.copytree(folder, tmp_path / "before")
    seen = set()
    for number in kills(lambda: save_checkpoint(folder, 30, content(30))):
        step, passed_over = steps_found(folder)
        assert passed_over == []
        seen.add(step)
        if number % 2:  # the next save succeeds and tidies up
            save_checkpoint(folder, 30, content(30))
            assert steps_found(folder) == (30, [])
            assert leftovers(folder) == []
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "before", folder)
    assert seen == {20, 30}


def test_a_kill_while_the_same_step_is_saved_again_keeps_a_good_one(tmp_path):
    for step in (10, 20):
        save_checkpoint(tmp_path, step, content(step))
    for _ in kills(lambda: save_checkpoint(tmp_path, 20, {**content(20), "more": 1})):
        assert steps_found(tmp_path)[0] in (10, 20)
    assert steps_found(tmp_path) == (20, [])


@pytest.mark.parametrize("lasting", [False, True])
def test_a_disk_that_fills_up_during_a_save_keeps_the_older_ones(tmp_path, file_hook, lasting):
    folder = tmp_path / "run"
    for step in (10, 20):
        save_checkpoint(folder, step, content(step))
    failures, number = 0, 1
    while True:
        hook = AtChange(number, fill_disk, lasting)
        file_hook(hook)
        try:
            save_checkpoint(folder, 30, content(30))
        except NotEnoughSpace:
            failures += 1
        if not hook.was_reached:
            break
        assert steps_found(folder)[0] in (20, 30)
        assert leftovers(folder) == []
        number += 1
    assert failures >= 8
    file_hook(None)
    save_checkpoint(folder, 40, content(40))
    assert steps_found(folder) == (40, [])


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileFailed, match="Cannot save"):
        save_checkpoint(tmp_path / "file" / "folder", 1, content(1))


def test_a_foreign_file_with_a_checkpoints_name_is_left_alone(tmp_path):
    (tmp_path / "checkpoint-00000100.pt").write_bytes(b"theirs")
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, content(step))
    assert (tmp_path / "checkpoint-00000100.pt").read_bytes() == b"theirs"
