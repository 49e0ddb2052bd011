"""After an interruption, complete shards are reused, and no incomplete file has a final path."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packed_files import ROW, assert_same, content, identity, sharded, shards_beside
from packing_tasks import Noise
from record_files import example, framed, image
from strikes import failures, fill_disk
from trees import leftovers

from colabkit.errors import BadImage, NotEnoughSpace, TargetExists
from colabkit.foundation import file_changes
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.packing import shards
from colabkit.packs.packing.pack_plan import PackPlan
from colabkit.packs.packing.sample_writer import SampleWriter
from colabkit.packs.packing.verification import verify


@pytest.fixture
def fillings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of samples in each written file."""
    found: list[int] = []
    begin = SampleWriter.__init__

    def noted(self: SampleWriter, plan: PackPlan, *others: Any) -> None:
        found.append(plan.samples)
        begin(self, plan, *others)

    monkeypatch.setattr(SampleWriter, "__init__", noted)
    return found


def stop_at(name: str) -> Callable[[str, Path], None]:
    """Return a hook that raises `KeyboardInterrupt` at the first sync after the shard of the given name is complete."""

    def hook(operation: str, path: Path) -> None:
        if operation == "sync" and any(one.name == name for one in path.parent.iterdir()):
            raise KeyboardInterrupt

    return hook


def interrupt(source: Any, out: Path, after: str = "p-00001.h5", **options: Any) -> list[Path]:
    """Interrupt packing after the shard `after`, and return the complete shards."""
    file_changes.hook = stop_at(after)
    try:
        with pytest.raises(KeyboardInterrupt):
            sharded(source, out, **options)
    finally:
        file_changes.hook = None
    return sorted(path for path in out.parent.glob(f".colabkit-*-kept.partial/data/{out.stem}-*.h5"))


def test_complete_shards_are_not_packed_again(tmp_path, split_tree, fillings):
    kept = {path.name: identity(path) for path in interrupt(split_tree, tmp_path / "p.h5")}
    assert sorted(kept) == ["p-00000.h5", "p-00001.h5"]
    fillings.clear()
    report = sharded(split_tree, tmp_path / "p.h5")
    assert fillings == [4, 4]
    assert {name: identity(tmp_path / name) for name in kept} == kept
    assert_same(report.path, sharded(split_tree, tmp_path / "whole.h5", None).path)
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
def test_shards_of_a_different_pack_are_never_reused(tmp_path, split_tree, fillings, change, options):
    assert interrupt(split_tree, tmp_path / "p.h5")
    change(split_tree)
    fillings.clear()
    report = sharded(split_tree, tmp_path / "p.h5", **options)
    assert sum(fillings) == 15
    assert_same(report.path, sharded(split_tree, tmp_path / "whole.h5", **options | {"shard_bytes": None}).path)
    assert leftovers(tmp_path) == []


def test_shards_with_other_values_in_a_column_are_not_reused(tmp_path, split_tree, fillings):
    table = {
        "path": [str(path) for path in sorted(split_tree.rglob("*.png"))],
        "age": list(range(15)),
        "label": ["a"] * 15,
    }
    pandas = pytest.importorskip("pandas")
    assert interrupt(pandas.DataFrame(table), tmp_path / "p.h5", fields=["age"])
    fillings.clear()
    sharded(pandas.DataFrame({**table, "age": [7] * 15}), tmp_path / "p.h5", fields=["age"])
    assert sum(fillings) == 15
    data = open_pack(tmp_path / "p.h5")["train"]
    assert [int(sample[-1]) for sample in data] == [7] * len(data)


def test_packing_into_one_file_removes_interrupted_shards(tmp_path, split_tree):
    assert interrupt(split_tree, tmp_path / "p.h5")
    sharded(split_tree, tmp_path / "p.h5", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.h5", "tree"]


def test_too_little_space_for_all_shards_is_an_error_before_anything_is_written(tmp_path, split_tree, monkeypatch):
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 12 * ROW)
    with pytest.raises(NotEnoughSpace):
        sharded(split_tree, tmp_path / "p.h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tree"]


@pytest.mark.full
def test_packing_resumes_after_a_disk_filled_up_at_any_operation(tmp_path, small_tree, file_hook):
    out = tmp_path / "made" / "p.h5"
    expected = content(sharded(small_tree, tmp_path / "whole.h5", None).path)
    work = partial(sharded, small_tree, out, 3 * ROW)
    for _ in failures(file_hook, fill_disk, work):
        assert not out.exists() or content(out) == expected
        work()
        assert content(out) == expected
        assert leftovers(tmp_path) == []
        shutil.rmtree(out.parent)


@pytest.mark.full
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["text", "pack", "shard of another index"])
def test_other_files_at_the_path_of_a_shard_are_never_replaced(tmp_path, small_tree, fillings, overwrite, kind):
    if overwrite:
        sharded(small_tree, tmp_path / "p.h5", ROW, channels=1)
    way = tmp_path / ("p-00007.h5" if overwrite else "p-00001.h5")
    shard_bytes = ROW // 2 if overwrite else 3 * ROW
    if kind == "text":
        way.write_text("mine")
    elif kind == "pack":
        sharded(small_tree, way, None, size=3)
    else:
        sharded(small_tree, tmp_path / "q" / "p.h5", ROW, size=3)
        shards_beside(tmp_path / "q" / "p.h5")[1].rename(way)
    before = {path: identity(path) for path in tmp_path.glob("*.h5")}
    # The `Noise` dataset needs more shards than the folder.
    source = Noise() if overwrite else small_tree
    with pytest.raises(TargetExists, match=rf"{way.name}', the path of a shard, already exists"):
        sharded(source, tmp_path / "p.h5", 3600 if overwrite else shard_bytes, overwrite=overwrite)
    assert {path: identity(path) for path in tmp_path.glob("*.h5")} == before
    way.unlink()
    fillings.clear()
    sharded(source, tmp_path / "p.h5", 3600 if overwrite else shard_bytes, overwrite=overwrite)
    assert verify(tmp_path / "p.h5", progress=False).is_good
    # Samples of a dataset cannot be compared with those of an earlier call, so no shard is reused.
    assert bool(fillings) == overwrite
    assert leftovers(tmp_path) == []


def test_shards_of_a_renamed_index_are_not_replaced(tmp_path, small_tree):
    other = sharded(small_tree, tmp_path / "p.h5", size=3).path.rename(tmp_path / "other.h5")
    with pytest.raises(TargetExists, match=r"p-00000\.h5', the path of a shard, already exists"):
        sharded(small_tree, tmp_path / "p.h5")
    assert verify(other, progress=False).is_good


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process and return its PID.

    The exit code is 0 for a true result, 3 for a false one, 4 for `TargetExists` and 5 for other exceptions.
    """
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
    first_has_started, second_has_started = context.Event(), context.Event()
    out = tmp_path / "p.h5"

    def first() -> bool:
        def hook(operation: str, path: Path) -> None:
            if operation == "reserve":
                first_has_started.set()
                assert second_has_started.wait(30)

        file_changes.hook = hook
        return not sharded(small_tree, out).reused

    def second() -> bool:
        def hook(operation: str, path: Path) -> None:
            if path.name == "lock":
                second_has_started.set()

        assert first_has_started.wait(30)
        file_changes.hook = hook
        return sharded(small_tree, out, **options).reused

    children = [in_child(first), in_child(second)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, code]
    assert content(out) == content(sharded(small_tree, tmp_path / "whole.h5", None).path)
    assert leftovers(tmp_path) == []


def test_a_stalled_process_is_not_waited_for(tmp_path, small_tree, monkeypatch):
    monkeypatch.setattr("colabkit.foundation.locks.FOLDER_STALLED_S", -1)
    with shards.ShardFolder(tmp_path / "p.h5") as kept:
        kept.note(path="", work="")
        report = sharded(small_tree, tmp_path / "p.h5")
    assert_same(report.path, sharded(small_tree, tmp_path / "whole.h5", None).path)
    assert leftovers(tmp_path) == []


def test_an_error_while_one_file_replaces_shards_leaves_the_old_pack_unchanged(tmp_path, small_tree):
    before = content(sharded(small_tree, tmp_path / "p.h5").path)
    (small_tree / "bees" / "001.png").write_bytes(b"no image")
    with pytest.raises(BadImage, match="bees/001"):
        sharded(small_tree, tmp_path / "p.h5", None, overwrite=True)
    assert content(tmp_path / "p.h5") == before
    assert leftovers(tmp_path) == []


def test_shards_of_changed_records_are_not_reused(tmp_path, fillings):
    file = tmp_path / "a.tfrecord"
    file.write_bytes(framed(*(example(image__encoded=[image(4)], image__class__label=[n % 3]) for n in range(6))))
    assert interrupt(file, tmp_path / "p.h5", size=4, shard_bytes=60)
    os.utime(file)
    fillings.clear()
    sharded(file, tmp_path / "p.h5", size=4, shard_bytes=60)
    assert sum(fillings) == 6
