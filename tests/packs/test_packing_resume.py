"""Interrupted packs of shards: whole shards are taken over, and no path ever holds a half of anything."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contract import AtChange, fill_disk
from record_files import example, framed, image
from test_packing_shards import ROW, Noise, assert_same, content, identity, packed, shards_beside, small_tree, tree
from trees import leftovers, make_tree

from colabkit.errors import BadImage, NotEnoughSpace, TargetExists
from colabkit.foundation import file_changes
from colabkit.foundation.progress import ProgressBar
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing import shards
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.pack_plan import PackPlan
from colabkit.packs.packing.sample_writer import SampleWriter
from colabkit.packs.packing.verification import verify

__all__ = ["small_tree", "tree"]  # fixtures


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Return a folder of 3 images, or kills at every operation would be many."""
    return make_tree(tmp_path / "three", 1)


@pytest.fixture
def fillings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of samples of each file that is filled."""
    found: list[int] = []
    begin = SampleWriter.__init__

    def noted(self: SampleWriter, plan: PackPlan, *others: Any) -> None:
        found.append(plan.samples)
        begin(self, plan, *others)

    monkeypatch.setattr(SampleWriter, "__init__", noted)
    return found


def stop_at(name: str) -> Callable[[str, Path], None]:
    """Return a hook that interrupts when a shard is sealed and moved to its name."""

    def hook(operation: str, path: Path) -> None:
        if operation == "sync" and any(one.name == name for one in path.parent.iterdir()):
            raise KeyboardInterrupt

    return hook


def interrupt(source: Any, out: Path, after: str = "p-00001.h5", **options: Any) -> list[Path]:
    """Stop packing after some shards, and return those that are kept."""
    file_changes.hook = stop_at(after)
    try:
        with pytest.raises(KeyboardInterrupt):
            packed(source, out, **options)
    finally:
        file_changes.hook = None
    return sorted(path for path in out.parent.glob(f".colabkit-*-kept.partial/data/{out.stem}-*.h5"))


def test_whole_shards_are_not_packed_again(tmp_path, tree, fillings):
    kept = {path.name: identity(path) for path in interrupt(tree, tmp_path / "p.h5")}
    assert sorted(kept) == ["p-00000.h5", "p-00001.h5"]
    fillings.clear()
    report = packed(tree, tmp_path / "p.h5")
    assert fillings == [4, 4]
    assert {name: identity(tmp_path / name) for name in kept} == kept
    assert_same(report.path, packed(tree, tmp_path / "whole.h5", None).path)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda tree: None, {"resume": False}),
        (lambda tree: None, {"channels": 1}),
        (lambda tree: None, {"encoding": "source"}),
        (lambda tree: None, {"shard_bytes": 3 * ROW}),
        (lambda tree: (tree / "train" / "ants" / "000.png").rename(tree / "train" / "ants" / "002.png"), {}),
        (lambda tree: os.utime(tree / "test" / "cats" / "000.png"), {}),
    ],
    ids=["resume=False", "channels", "encoding", "shard_bytes", "renamed", "touched"],
)
def test_shards_of_another_call_are_never_taken_over(tmp_path, tree, fillings, change, options):
    assert interrupt(tree, tmp_path / "p.h5")
    change(tree)
    fillings.clear()
    report = packed(tree, tmp_path / "p.h5", **options)
    assert sum(fillings) == 15
    assert_same(report.path, packed(tree, tmp_path / "whole.h5", **options | {"shard_bytes": None}).path)
    assert leftovers(tmp_path) == []


def test_other_columns_are_another_pack(tmp_path, tree, fillings):
    table = {"path": [str(path) for path in sorted(tree.rglob("*.png"))], "age": list(range(15)), "label": ["a"] * 15}
    pandas = pytest.importorskip("pandas")
    assert interrupt(pandas.DataFrame(table), tmp_path / "p.h5", fields=["age"])
    fillings.clear()
    packed(pandas.DataFrame({**table, "age": [7] * 15}), tmp_path / "p.h5", fields=["age"])
    assert sum(fillings) == 15
    data = open_pack(tmp_path / "p.h5")["train"]
    assert [int(sample[-1]) for sample in data] == [7] * len(data)


def test_one_file_instead_of_shards_gives_their_space_back(tmp_path, tree):
    assert interrupt(tree, tmp_path / "p.h5")
    packed(tree, tmp_path / "p.h5", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.h5", "tree"]


def test_too_little_space_for_all_shards_is_refused_before_anything_is_written(tmp_path, tree, monkeypatch):
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 12 * ROW)
    with pytest.raises(NotEnoughSpace):
        packed(tree, tmp_path / "p.h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tree"]


def assert_absent_or_whole(path: Path, *wanted: dict[str, list[tuple[bytes, ...]]]) -> str:
    """Assert that a path is absent or holds one of some contents, whole, and return which."""
    if not path.exists():
        return "absent"
    found = content(path)
    assert found in wanted
    assert verify(path, progress=False).is_good
    return str(wanted.index(found))


def test_a_kill_at_any_operation_is_gone_on_with(tmp_path, three, killed_at):
    expected = content(packed(three, tmp_path / "whole.h5", None).path)
    number, most, states = 1, 0, set()
    out = tmp_path / "1" / "p.h5"
    while killed_at(number, partial(pack, three, out, shard_bytes=ROW, threads=1, progress=False)):
        states.add(assert_absent_or_whole(out, expected))
        whole = {path.name: identity(path) for path in out.parent.rglob("p-*.h5")}
        most = max(most, len(whole))
        if number % 3 == 0 or len(whole) == 3:
            assert packed(three, out, ROW).reused == (states == {"absent", "0"})
            assert content(out) == expected
            assert {name: identity(out.with_name(name)) for name in whole} == whole
            assert sorted(path.name for path in out.parent.iterdir()) == [*(f"p-0000{n}.h5" for n in range(3)), "p.h5"]
        number += 1
        out = tmp_path / str(number) / "p.h5"
    assert (most, states) == (3, {"absent", "0"})
    assert content(out) == expected


def test_a_disk_that_fills_up_at_any_operation_leaves_what_can_be_gone_on_with(tmp_path, small_tree, file_hook):
    out, number = tmp_path / "made" / "p.h5", 1
    expected = content(packed(small_tree, tmp_path / "whole.h5", None).path)
    while True:
        file_hook(AtChange(number, fill_disk))
        try:
            packed(small_tree, out, 3 * ROW)
            break
        except NotEnoughSpace:
            file_hook(None)
            assert_absent_or_whole(out, expected)
            packed(small_tree, out, 3 * ROW)
            assert content(out) == expected
            assert leftovers(tmp_path) == []
            shutil.rmtree(out.parent)
        number += 1
    assert number > 30


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new"),
    [(None, 2 * ROW), (ROW, None), (ROW, 3 * ROW - 1), (2 * ROW, ROW), (2 * ROW, 2 * ROW)],
    ids=["one file by shards", "shards by one file", "by fewer shards", "by more shards", "by as many"],
)
def test_a_kill_while_overwriting_leaves_old_or_new_or_nothing(tmp_path, three, killed_at, old, new):
    before = content(packed(three, tmp_path / "old" / "p.h5", old, channels=1).path)
    expected = content(packed(three, tmp_path / "whole.h5", None).path)
    out, states = tmp_path / "new" / "p.h5", []
    work = partial(pack, three, out, shard_bytes=new, threads=1, progress=False, overwrite=True)
    shutil.copytree(tmp_path / "old", out.parent)
    while killed_at(len(states) + 1, work):
        states.append(assert_absent_or_whole(out, before, expected))
        if len(states) % 9 == 0 or (states[-1] == "absent" and len(states) % 2):
            options = {"size": 4} if len(states) % 3 else {}  # another pack reclaims all, too
            last = packed(three, out, 2 * ROW, overwrite=states[-1] != "absent", **options)
            assert verify(out, progress=False).is_good
            names = [f"p-{number:05d}.h5" for number in range(last.shards)]
            assert sorted(path.name for path in out.parent.iterdir()) == [*names, "p.h5"]
        shutil.rmtree(out.parent)
        shutil.copytree(tmp_path / "old", out.parent)
    order = [state for number, state in enumerate(states) if not number or states[number - 1] != state]
    assert order == ["0", "absent", "1"] if old and new else ["0", "1"]
    assert assert_absent_or_whole(out, expected) == "0"
    names = [f"p-{number:05d}.h5" for number in range(len(read_pack(out).shards))]
    assert sorted(path.name for path in out.parent.iterdir()) == [*names, "p.h5"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["text", "pack", "shard of another index"])
def test_what_is_in_the_way_is_never_replaced(tmp_path, small_tree, fillings, overwrite, kind):
    if overwrite:
        packed(small_tree, tmp_path / "p.h5", ROW, channels=1)
    way = tmp_path / ("p-00007.h5" if overwrite else "p-00001.h5")
    shard_bytes = ROW // 2 if overwrite else 3 * ROW
    if kind == "text":
        way.write_text("mine")
    elif kind == "pack":
        packed(small_tree, way, None, size=3)
    else:
        packed(small_tree, tmp_path / "q" / "p.h5", ROW, size=3)
        shards_beside(tmp_path / "q" / "p.h5")[1].rename(way)
    before = {path: identity(path) for path in tmp_path.glob("*.h5")}
    source = Noise() if overwrite else small_tree  # of more samples
    with pytest.raises(TargetExists, match=rf"{way.name}' is in the way"):
        packed(source, tmp_path / "p.h5", 3600 if overwrite else shard_bytes, overwrite=overwrite)
    assert {path: identity(path) for path in tmp_path.glob("*.h5")} == before
    way.unlink()
    fillings.clear()
    packed(source, tmp_path / "p.h5", 3600 if overwrite else shard_bytes, overwrite=overwrite)
    assert verify(tmp_path / "p.h5", progress=False).is_good
    assert bool(fillings) == overwrite  # what a data set gives has no name by which it is known again
    assert leftovers(tmp_path) == []


def test_shards_of_an_index_that_was_renamed_are_not_replaced(tmp_path, small_tree):
    other = packed(small_tree, tmp_path / "p.h5", size=3).path.rename(tmp_path / "other.h5")
    with pytest.raises(TargetExists, match=r"p-00000\.h5' is in the way"):
        packed(small_tree, tmp_path / "p.h5")
    assert verify(other, progress=False).is_good


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process, and return its number; it exits with 0 if that returned true."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 3)
        except TargetExists:
            os._exit(4)
        except BaseException:
            os._exit(5)
    return pid


@pytest.mark.parametrize(("options", "code"), [({}, 0), ({"channels": 1}, 4), ({"overwrite": True}, 3)])
def test_a_second_process_waits_for_the_first(tmp_path, small_tree, options, code):
    context = multiprocessing.get_context("fork")
    first_is_in, second_has_come = context.Event(), context.Event()
    out = tmp_path / "p.h5"

    def first() -> bool:
        def hook(operation: str, path: Path) -> None:
            if operation == "reserve":
                first_is_in.set()
                assert second_has_come.wait(30)

        file_changes.hook = hook
        return not packed(small_tree, out).reused

    def second() -> bool:
        def hook(operation: str, path: Path) -> None:
            if path.name == "lock":
                second_has_come.set()

        assert first_is_in.wait(30)
        file_changes.hook = hook
        return packed(small_tree, out, **options).reused

    children = [in_child(first), in_child(second)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, code]
    assert content(out) == content(packed(small_tree, tmp_path / "whole.h5", None).path)
    assert leftovers(tmp_path) == []


def test_a_process_that_does_not_move_any_more_is_not_waited_for(tmp_path, small_tree, monkeypatch):
    monkeypatch.setattr("colabkit.foundation.locks.STALLED_S", -1)
    with shards._kept_beside(tmp_path / "p.h5", ProgressBar("pack", None, "", enabled=False)) as kept:
        kept.note(path="", work="")
        report = packed(small_tree, tmp_path / "p.h5")
    assert_same(report.path, packed(small_tree, tmp_path / "whole.h5", None).path)
    assert leftovers(tmp_path) == []


def test_an_error_while_shards_are_overwritten_by_one_file_leaves_the_old_pack_alone(tmp_path, small_tree):
    before = content(packed(small_tree, tmp_path / "p.h5").path)
    (small_tree / "bees" / "001.png").write_bytes(b"no image")
    with pytest.raises(BadImage, match="bees/001"):
        packed(small_tree, tmp_path / "p.h5", None, overwrite=True)
    assert content(tmp_path / "p.h5") == before
    assert leftovers(tmp_path) == []


def test_records_that_were_written_anew_are_packed_anew(tmp_path, fillings):
    file = tmp_path / "a.tfrecord"
    file.write_bytes(framed(*(example(image__encoded=[image(4)], image__class__label=[n % 3]) for n in range(6))))
    assert interrupt(file, tmp_path / "p.h5", size=4, shard_bytes=60)
    os.utime(file)
    fillings.clear()
    packed(file, tmp_path / "p.h5", size=4, shard_bytes=60)
    assert sum(fillings) == 6
