"""Packs of files whose lengths are learnt late, or that have gaps: killed or short of room, nothing half-done stays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contract import AtChange, fill_disk, kills, whole_content
from packed_files import files_of, packed, photos
from trees import leftovers

from colabkit.errors import BadImage, ColabkitError, NotEnoughSpace
from colabkit.foundation import file_changes
from colabkit.packs.packing.api import pack

WORKS: dict[str, dict[str, Any]] = {
    "source": {"encoding": "source"},
    "jpeg": {"encoding": "jpeg"},
    "raw, one left out": {"encoding": "raw", "on_bad": "skip"},
    "source, one left out": {"encoding": "source", "on_bad": "skip"},
    "jpeg, one black": {"encoding": "jpeg", "on_bad": "blank", "fields": {"name": os.fspath}},
}


@pytest.fixture
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return six photos; the fourth is broken where bad files are no error."""
    folder = photos(tmp_path / "tree", per_class=2)
    if "on_bad" in request.node.callspec.params["options"]:
        files_of(folder)[3].write_bytes(b"no image")
    return folder


def every(test: Any) -> Any:
    return pytest.mark.parametrize("options", WORKS.values(), ids=WORKS)(test)


def but_removals(hook: AtChange) -> Callable[[str, Path], None]:
    """Return a hook that passes over removals, by which all is cleaned up."""
    return lambda operation, path: None if operation == "remove" else hook(operation, path)


def check_leftovers(folder: Path, expected: tuple[object, ...]) -> None:
    """Check that nothing below a folder opens but the whole pack."""
    for path in folder.rglob("*"):
        try:
            found = whole_content(path)
        except ColabkitError:
            continue
        assert found == expected  # killed between seal and rename


@every
def test_a_kill_at_any_operation_leaves_nothing_that_opens_and_the_next_run_cleans_up(
    tmp_path, tree, options, killed_at
):
    out = tmp_path / "made" / "p.h5"
    expected = whole_content(packed(tree, tmp_path / "reference.h5", threads=1, **options))
    for number in kills(killed_at, partial(pack, tree, out, progress=False, threads=1, **options)):
        assert not out.exists()
        if out.parent.exists():
            check_leftovers(out.parent, expected)
        if number % 4 == 0:
            packed(tree, out, **options)
            assert [path.name for path in out.parent.iterdir()] == ["p.h5"]
            assert whole_content(out) == expected
            out.unlink()
    assert number > 10
    assert [path.name for path in out.parent.iterdir()] == ["p.h5"]
    assert whole_content(out) == expected


@pytest.mark.full
@every
def test_a_kill_while_overwriting_keeps_the_old_pack_whole(tmp_path, tree, options, killed_at):
    out = packed(photos(tmp_path / "other", per_class=1), tmp_path / "p.h5")
    old = out.read_bytes()
    expected = whole_content(packed(tree, tmp_path / "reference.h5", threads=1, **options))
    work = partial(pack, tree, out, progress=False, threads=1, overwrite=True, **options)
    for _ in kills(killed_at, work):
        assert out.read_bytes() == old
    assert whole_content(out) == expected
    assert leftovers(tmp_path) == []


@every
@pytest.mark.parametrize("lasting", [False, True])
def test_a_disk_that_fills_up_at_any_operation_leaves_nothing(tmp_path, tree, file_hook, options, lasting):
    out = tmp_path / "made" / "p.h5"
    number = 0
    while True:
        number += 1
        shutil.rmtree(out.parent, ignore_errors=True)
        hook = AtChange(number, fill_disk, lasting)
        file_hook(but_removals(hook))
        try:
            pack(tree, out, threads=1, progress=False, **options)
        except NotEnoughSpace:
            assert hook.was_reached
            assert not out.exists()
            assert leftovers(tmp_path) == []
        else:
            assert not hook.was_reached
            break
    assert number > 10


@every
def test_ctrl_c_at_any_operation_leaves_nothing(tmp_path, tree, file_hook, options):
    def interrupt() -> None:
        raise KeyboardInterrupt

    number = 0
    while True:
        number += 1
        file_hook(but_removals(AtChange(number, interrupt)))
        try:
            pack(tree, tmp_path / "p.h5", threads=2, progress=False, **options)
        except KeyboardInterrupt:
            assert [path.name for path in tmp_path.iterdir()] == ["tree"], number
        else:
            break
    assert number > 10


@pytest.mark.parametrize("options", [WORKS["source"], WORKS["source, one left out"], WORKS["raw, one left out"]])
def test_too_little_room_is_refused_before_anything_is_written(tmp_path, tree, file_hook, monkeypatch, options):
    changes = AtChange(0, fill_disk)
    file_hook(changes)
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 4000)
    with pytest.raises(NotEnoughSpace, match=r"Cannot pack .*3.9 KiB free.*needed"):
        pack(tree, tmp_path / "p.h5", progress=False, **options)
    assert changes.count == 0


@pytest.mark.parametrize("options", [WORKS["jpeg"], WORKS["raw, one left out"], WORKS["jpeg, one black"]])
def test_too_little_room_for_the_copy_without_gaps_is_refused_and_nothing_is_left(tmp_path, tree, monkeypatch, options):
    free = iter([10**9, 100])
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: next(free))
    with pytest.raises(NotEnoughSpace, match=r"100 B free"):
        pack(tree, tmp_path / "p.h5", progress=False, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


@every
def test_too_many_bad_files_leave_nothing(tmp_path, tree, options):
    for path in files_of(tree)[2:5]:
        path.write_bytes(b"")
    with pytest.raises(BadImage, match="Cannot pack"):
        pack(tree, tmp_path / "p.h5", max_bad=2, progress=False, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]
