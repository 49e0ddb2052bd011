"""A checkpoint folder keeps a valid checkpoint after SIGKILL or a full disk at any file change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from checkpoint_folders import content, found, near_of, pretend_far, save, save_again, steps_at, with_far
from strikes import ChangeHook, fill_disk, kills
from trees import leftovers

from colabkit.errors import ColabkitError, NotEnoughSpace
from colabkit.training.checkpoints.folder import CheckpointFolder


def restored(folder: Path, before: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(before, folder)


def test_a_kill_at_any_operation_of_a_save_keeps_the_newest_valid_checkpoint(tmp_path, killed_at):
    folder, before = tmp_path / "run", tmp_path / "before"
    save(folder, 10, 20)
    shutil.copytree(folder, before)
    seen = set()
    for number in kills(killed_at, partial(save, folder, 30)):
        step, skipped_checkpoints = found(folder)
        assert skipped_checkpoints == []
        seen.add(step)
        # Save the same step again, or a step of another run.
        following = 30 if number % 2 else 25
        if step < 30 or following == 30:
            save(folder, following)
            assert found(folder) == (following, [])
            # That save also removes leftovers of the kill.
            assert len(steps_at(folder)) == 2
        restored(folder, before)
    assert seen == {20, 30}


def test_a_kill_at_the_first_save_leaves_no_checkpoint_or_a_valid_one(tmp_path, killed_at):
    folder = tmp_path / "run"
    for _ in kills(killed_at, partial(save, folder, 1)):
        newest = CheckpointFolder(folder).newest()
        assert newest is None or newest.step == 1
        save(folder, 1)
        assert steps_at(folder) == [1]
        shutil.rmtree(folder)


def test_a_kill_while_the_only_checkpoint_is_replaced_keeps_the_old_or_the_new_one(tmp_path, killed_at):
    folder, before = tmp_path / "run", tmp_path / "before"
    save_again(folder, 0)
    shutil.copytree(folder, before)
    seen = set()
    for _ in kills(killed_at, partial(save_again, folder, 1)):
        newest = CheckpointFolder(folder).newest()
        assert newest is not None
        assert newest.skipped_checkpoints == ()
        seen.add(newest.content["number"])
        save_again(folder, 2)
        assert steps_at(folder) == [20]
        restored(folder, before)
    assert seen == {0, 1}


@pytest.mark.full
def test_a_kill_at_any_operation_of_publishing_keeps_valid_local_and_remote_checkpoints(
    tmp_path, near_storage, monkeypatch, killed_at
):
    remote = pretend_far(monkeypatch, tmp_path / "far")
    save(remote, 10, 20)
    local = near_of(near_storage)
    for folder, name in ((local, "near"), (remote, "remote")):
        shutil.copytree(folder, tmp_path / name)
    seen = set()
    for number in kills(killed_at, partial(with_far, save, remote, 30)):
        step, skipped_checkpoints = found(remote)
        assert skipped_checkpoints == []
        # Another machine has only the published checkpoints.
        with pytest.MonkeyPatch.context() as elsewhere:
            elsewhere.setenv("COLABKIT_LOCAL", str(tmp_path / "elsewhere"))
            published, skipped_checkpoints = found(remote)
            assert skipped_checkpoints == []
        seen.add((step, published))
        if number % 2:
            save(remote, 40)
            assert found(remote) == (40, [])
            assert len(steps_at(local)) == len(steps_at(remote)) == 2
        for folder, name in ((local, "near"), (remote, "remote"), (tmp_path / "elsewhere", "")):
            shutil.rmtree(folder, ignore_errors=True)
            if name:
                shutil.copytree(tmp_path / name, folder)
    assert seen == {(20, 20), (30, 20), (30, 30)}


def test_a_kill_while_a_remote_checkpoint_is_fetched_lets_it_be_fetched_again(
    tmp_path, near_storage, monkeypatch, killed_at
):
    remote = pretend_far(monkeypatch, tmp_path / "far")
    save(remote, 10, 20)
    local = near_of(near_storage)
    shutil.rmtree(local)
    for _ in kills(killed_at, partial(with_far, found, remote)):
        assert found(remote) == (20, [])
        assert steps_at(local) == [20]
        assert steps_at(remote) == [10, 20]
        shutil.rmtree(local)


def every_full_disk(
    work: Callable[[], object], set_hook: Callable[..., None], lasting: bool
) -> Iterator[ColabkitError | None]:
    """Fill the disk at the 1st, 2nd, … file change of `work`, and yield the error of each run, or None.

    Stop when `work` has fewer file changes.
    """
    number = 1
    while True:
        hook = ChangeHook(number, fill_disk, lasting)
        set_hook(hook)
        error: ColabkitError | None = None
        try:
            work()
        except ColabkitError as raised:
            error = raised
        set_hook(None)
        if not hook.was_reached:
            return
        yield error
        number += 1


@pytest.mark.full
@pytest.mark.parametrize("lasting", [False, True])
def test_a_disk_that_fills_up_during_a_save_keeps_the_older_checkpoints(tmp_path, file_hook, lasting):
    folder, before = tmp_path / "run", tmp_path / "before"
    save(folder, 10, 20)
    shutil.copytree(folder, before)
    failures = 0
    for error in every_full_disk(lambda: save(folder, 30), file_hook, lasting):
        failures += isinstance(error, NotEnoughSpace)
        assert found(folder)[0] in (20, 30)
        assert leftovers(folder) == []
        save(folder, 40)
        assert len(steps_at(folder)) == 2
        restored(folder, before)
    # If removing an older checkpoint has freed space, the save is repeated.
    assert failures >= 8 if lasting else failures <= 2


@pytest.mark.full
@pytest.mark.parametrize("lasting", [False, True])
def test_a_disk_that_fills_up_during_publishing_does_not_stop_training(
    tmp_path, near_storage, monkeypatch, file_hook, lasting
):
    remote = pretend_far(monkeypatch, tmp_path / "far")
    save(remote, 10, 20)
    local = near_of(near_storage)
    for folder, name in ((local, "near"), (remote, "remote")):
        shutil.copytree(folder, tmp_path / name)
    failures = 0
    with CheckpointFolder(remote) as checkpoints:

        def work() -> None:
            checkpoints.save(30, content(30), wait=True)
            checkpoints.finish()

        def far_only(hook: Callable[[str, Path], None] | None) -> None:
            file_hook(hook and (lambda operation, path: hook(operation, path) if remote in path.parents else None))

        for error in every_full_disk(work, far_only, lasting):
            assert error is None
            assert found(remote) == (30, [])
            assert leftovers(remote) == []
            failures += 1
            assert all(
                "Cannot publish" in reason and "The checkpoint remains at" in reason
                for _, reason in checkpoints.failures
            )
            for folder, name in ((local, "near"), (remote, "remote")):
                restored(folder, tmp_path / name)
            checkpoints._remote_sealed = []
        assert failures >= 8
        assert len(checkpoints.failures) == failures
