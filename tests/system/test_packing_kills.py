"""After a kill of `pack()` or `prepare()` at any file change, no pack is incomplete and the next call succeeds."""

from __future__ import annotations

import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contract import whole_content
from packed_files import ROW, WORKS, content, identity, packed, photos, photos_for, sharded
from preparations import forget_local, ready
from sampling import sampled
from strikes import kills
from trees import leftovers, make_tree

from colabkit.errors import ColabkitError
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.verification import verify
from colabkit.packs.preparing.api import prepare

every = pytest.mark.parametrize("options", sampled(WORKS.values(), 1), ids=WORKS)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Return a folder of only 3 images, because tests kill packing at every file change."""
    return make_tree(tmp_path / "three", 1)


def check_leftovers(folder: Path, expected: tuple[object, ...]) -> None:
    """Check that each file below a folder that opens as a pack is the complete pack."""
    for path in folder.rglob("*"):
        try:
            found = whole_content(path)
        except ColabkitError:
            continue
        # After a kill between sealing and renaming, the complete pack has a temporary name.
        assert found == expected


@every
def test_a_kill_at_any_operation_leaves_no_partial_pack_and_the_next_run_cleans_up(tmp_path, options, killed_at):
    tree = photos_for(options, tmp_path / "tree")
    out = tmp_path / "made" / "p.h5"
    expected = whole_content(packed(tree, tmp_path / "reference.h5", threads=1, **options))
    for number in kills(killed_at, partial(pack, tree, out, progress=False, threads=1, **options)):
        assert not out.exists()
        check_leftovers(tmp_path / "made", expected)
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
def test_a_kill_while_overwriting_keeps_the_complete_old_pack(tmp_path, options, killed_at):
    tree = photos_for(options, tmp_path / "tree")
    out = packed(photos(tmp_path / "other", per_class=1), tmp_path / "p.h5")
    old = out.read_bytes()
    expected = whole_content(packed(tree, tmp_path / "reference.h5", threads=1, **options))
    for _ in kills(killed_at, partial(pack, tree, out, progress=False, threads=1, overwrite=True, **options)):
        assert out.read_bytes() == old
    assert whole_content(out) == expected
    assert leftovers(tmp_path) == []


def state_of(path: Path, *contents: dict[str, list[tuple[bytes, ...]]]) -> str:
    """Return the index of the expected content that a path holds completely, or "absent" if there is no file."""
    if not path.exists():
        return "absent"
    found = content(path)
    assert found in contents
    assert verify(path, progress=False).is_good
    return str(contents.index(found))


@pytest.mark.full
def test_packing_of_shards_resumes_after_a_kill_at_any_operation(tmp_path, three, killed_at):
    expected = content(packed(three, tmp_path / "whole.h5"))
    number, most, states = 1, 0, set()
    out = tmp_path / "1" / "p.h5"
    while killed_at(number, partial(pack, three, out, shard_bytes=ROW, threads=1, progress=False)):
        states.add(state_of(out, expected))
        whole = {path.name: identity(path) for path in out.parent.rglob("p-*.h5")}
        most = max(most, len(whole))
        if number % 3 == 0 or len(whole) == 3:
            assert sharded(three, out, ROW).reused == (states == {"absent", "0"})
            assert content(out) == expected
            assert {name: identity(out.with_name(name)) for name in whole} == whole
            assert sorted(path.name for path in out.parent.iterdir()) == [*(f"p-0000{n}.h5" for n in range(3)), "p.h5"]
        number += 1
        out = tmp_path / str(number) / "p.h5"
    assert (most, states) == (3, {"absent", "0"})
    assert content(out) == expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new"),
    [(None, 2 * ROW), (ROW, None), (ROW, 3 * ROW - 1), (2 * ROW, ROW), (2 * ROW, 2 * ROW)],
    ids=["one file by shards", "shards by one file", "by fewer shards", "by more shards", "by the same number"],
)
def test_a_kill_while_overwriting_shards_leaves_the_old_or_the_new_pack_or_none(tmp_path, three, killed_at, old, new):
    before = content(sharded(three, tmp_path / "old" / "p.h5", old, channels=1).path)
    expected = content(packed(three, tmp_path / "whole.h5"))
    out, states = tmp_path / "new" / "p.h5", []
    work = partial(pack, three, out, shard_bytes=new, threads=1, progress=False, overwrite=True)
    shutil.copytree(tmp_path / "old", out.parent)
    while killed_at(len(states) + 1, work):
        states.append(state_of(out, before, expected))
        if len(states) % 9 == 0 or (states[-1] == "absent" and len(states) % 2):
            # Packing again, even with other options, removes all leftovers.
            options: dict[str, Any] = {"size": 4} if len(states) % 3 else {}
            last = sharded(three, out, 2 * ROW, overwrite=states[-1] != "absent", **options)
            assert verify(out, progress=False).is_good
            names = [f"p-{number:05d}.h5" for number in range(last.shards)]
            assert sorted(path.name for path in out.parent.iterdir()) == [*names, "p.h5"]
        shutil.rmtree(out.parent)
        shutil.copytree(tmp_path / "old", out.parent)
    order = [state for number, state in enumerate(states) if not number or states[number - 1] != state]
    assert order == ["0", "absent", "1"] if old and new else ["0", "1"]
    assert state_of(out, expected) == "0"
    names = [f"p-{number:05d}.h5" for number in range(len(read_pack(out).shards))]
    assert sorted(path.name for path in out.parent.iterdir()) == [*names, "p.h5"]


@pytest.mark.full
@pytest.mark.parametrize("is_saved", [False, True])
def test_prepare_succeeds_after_a_kill_at_any_operation(
    tmp_path, image_tree, near_storage, killed_at, monkeypatch, is_saved
):
    drive = tmp_path / "drive"
    drive.mkdir()
    monkeypatch.setenv("COLABKIT_DRIVE", str(drive))
    shutil.rmtree(image_tree / "bees")
    saved = ready(image_tree).report.saved_path.read_bytes()
    for number in itertools.count(1):
        forget_local(near_storage)
        if not is_saved:
            shutil.rmtree(drive / "colabkit")
        is_killed = killed_at(number, partial(prepare, image_tree, progress=False))
        prepared = ready(image_tree)
        assert prepared.path.read_bytes() == saved, f"after a kill at operation {number}"
        assert prepared.report.saved_path.read_bytes() == saved
        ready(image_tree, refresh=True)
        assert leftovers(near_storage) + leftovers(drive) == []
        if not is_killed:
            break
    assert number > (20 if is_saved else 30)
