"""Packing with an executor gives the same pack as without one, and handles dead workers and interrupts."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import psutil
import pytest
from joblib.externals.loky import get_reusable_executor
from packed_files import ROW, assert_same, content, identity, kept_shards, shards_beside
from packing_tasks import Squares, die_beside, die_once, die_while, fail, hold
from picture_sets import archive_of, class_folders, database, path_table, tf_records, web_shards
from repeating import RepeatingExecutor
from trees import leftovers
from waiting import wait_until

from colabkit.errors import BadImage, InvalidOption, PackingFailed
from colabkit.packs.format.layout import Field
from colabkit.packs.packing import sample_writer, shard_tasks, shards
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.executors import as_executor, is_without_workers
from colabkit.packs.packing.file_samples import FileSampleMaker
from colabkit.packs.packing.pack_plan import FieldTable, PackPlan
from colabkit.packs.packing.pack_report import PackReport
from colabkit.packs.packing.shard_tasks import ShardTask
from colabkit.storage.sources.folder import FolderSource, SlowSource
from colabkit.storage.sources.items import Item


def packed(source: Any, out: Path, executor: Executor | None, **options: Any) -> PackReport:
    return pack(source, out, **{"shard_bytes": 4 * ROW, "executor": executor, "progress": False, **options})


def processes(kind: str = "fork", count: int = 2, folder: str | None = None) -> ProcessPoolExecutor:
    context = multiprocessing.get_context(kind)
    return ProcessPoolExecutor(count, context, os.chdir if folder else None, (folder,) if folder else ())


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    with processes("spawn", 1, os.fspath(tmp_path_factory.mktemp("elsewhere"))) as executor:
        yield executor


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("info", "is_alone"),
    [
        ({"workers": {"tcp://a": {}}}, False),
        ({"workers": {}}, True),
        ({"workers": {}, "n_workers": 0}, True),
        # Distributed stores this every two seconds.
        ({"workers": {}, "n_workers": 2}, False),
        # The scheduler is lost.
        ({}, False),
        (RuntimeError("the client is closed"), False),
    ],
)
def test_only_a_cluster_that_reports_no_workers_is_without_workers(monkeypatch, info, is_alone):
    class ClientExecutor(ThreadPoolExecutor):
        _client = Mock(**{"scheduler_info.side_effect": [info]})

    monkeypatch.setitem(sys.modules, "distributed.cfexecutor", SimpleNamespace(ClientExecutor=ClientExecutor))
    assert is_without_workers(ClientExecutor()) is is_alone


def test_a_module_of_the_user_named_distributed_changes_nothing(monkeypatch):
    for module in (ModuleType("distributed"), SimpleNamespace(Client=print)):
        monkeypatch.setitem(sys.modules, "distributed", module)
        monkeypatch.delitem(sys.modules, "distributed.cfexecutor", raising=False)
        executor = ThreadPoolExecutor()
        assert as_executor("pack", executor) is executor
        assert not is_without_workers(executor)


@pytest.mark.parametrize("make", [partial(ThreadPoolExecutor, 3), processes, partial(get_reusable_executor, 2)])
@pytest.mark.parametrize("options", [{}, {"encoding": "jpeg"}, {"encoding": "source", "fields": ["path"]}])
def test_any_executor_gives_the_same_pack(tmp_path, image_tree, make, options):
    with make() as executor:
        report = packed(image_tree, tmp_path / "p.h5", executor, **options)
        assert packed(image_tree, tmp_path / "p.h5", executor, **options).reused
    assert (report.made_by, report.splits) == ("tasks of an executor", {"train": 24})
    assert report.shards > 3
    assert_same(report.path, packed(image_tree, tmp_path / "whole.h5", None, shard_bytes=None, **options).path)
    assert leftovers(tmp_path) == []


def csv_source(folder: Path) -> Path:
    path_table(folder).to_csv(folder / "t.csv")
    return folder / "t.csv"


def memmap_source(folder: Path) -> dict[str, Any]:
    np.save(folder / "x.npy", np.random.default_rng(1).integers(0, 256, (40, 6, 5, 3), dtype=np.uint8))
    return {"X": np.load(folder / "x.npy", mmap_mode="r"), "Y": np.arange(40), "name": [f"ä{n}" for n in range(40)]}


def hdf5_source(folder: Path) -> dict[str, Any]:
    file = h5py.File(folder / "x.h5", "w")
    return {"X": file.create_dataset("x", data=np.random.default_rng(1).normal(size=(40, 6, 5)))}


def tree_of(folder: Path) -> Path:
    return class_folders(folder / "tree")


SOURCES: dict[str, Callable[[Path], Any]] = {
    "folder": tree_of,
    "relative": lambda folder: os.path.relpath(tree_of(folder)),
    "drive": lambda folder: tree_of(folder) and "drive:tree",
    "zip": lambda folder: archive_of(tree_of(folder), folder / "a.zip"),
    "relative zip": lambda folder: os.path.relpath(archive_of(tree_of(folder), folder / "a.zip")),
    "tar": lambda folder: archive_of(tree_of(folder), folder / "a.tar"),
    "tgz": lambda folder: archive_of(tree_of(folder), folder / "a.tgz"),
    "DataFrame": lambda folder: path_table(folder, f"{os.path.relpath(folder)}/"),
    "list": lambda folder: path_table(folder, f"{folder}/")["path"].tolist(),
    "csv": csv_source,
    "source": lambda folder: FolderSource(Path(os.path.relpath(tree_of(folder)))),
    "slow": lambda folder: SlowSource(FolderSource(tree_of(folder)), 0.001),
    "LMDB": lambda folder: database(folder / "base"),
    "WebDataset": lambda folder: f"{os.path.relpath(web_shards(folder / 'wds'))}/train-{{000000..000002}}.tar",
    "TFRecord": lambda folder: os.path.relpath(tf_records(folder / "records")),
    "samples": lambda folder: "samples:digits",
    "arrays": lambda folder: {"X": np.arange(400).reshape(40, 10), "Y": np.arange(40.0)},
    "text": lambda folder: {"X": [f"text {number}" * number for number in range(40)]},
    "memmap": memmap_source,
    "HDF5": hdf5_source,
    "dataset": lambda folder: Squares(),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_worker_in_another_folder_reads_every_kind_of_source(tmp_path, spawned, monkeypatch, kind):
    # Workers that have already started do not see this environment variable.
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path))
    source = SOURCES[kind](tmp_path)
    options = {"encoding": "jpeg", "size": 6} if kind in ("WebDataset", "TFRecord", "LMDB", "folder", "drive") else {}
    whole = packed(source, tmp_path / "whole.h5", None, shard_bytes=None, **options)
    size = max(400, (whole.pack_bytes - 12_000) // 4)
    report = packed(source, Path(os.path.relpath(tmp_path / "p.h5")), spawned, shard_bytes=size, **options)
    assert report.shards > 1
    assert_same(report.path, whole.path)


def test_threads_pack_a_dataset_that_one_thread_at_a_time_may_read(tmp_path):
    with ThreadPoolExecutor(4) as executor:
        report = packed(Squares(), tmp_path / "p.h5", executor, shard_bytes=300)
    assert_same(report.path, packed(Squares(), tmp_path / "whole.h5", None, shard_bytes=None).path)


def test_tasks_do_not_fork_processes(tmp_path, image_tree, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise OSError("forked")

    monkeypatch.setattr(sample_writer, "_FORKING_S", 0)
    monkeypatch.setattr(sample_writer, "_TINY_S", 100.0)
    monkeypatch.setattr(sample_writer, "usable_cpus", lambda: 2)
    monkeypatch.setattr(sample_writer, "_MEASURED_S", 1e-9)
    monkeypatch.setattr(sample_writer.ForkedWorkers, "__enter__", refuse)
    with pytest.raises(Exception, match="forked"):
        packed(image_tree, tmp_path / "p.h5", None)
    with ThreadPoolExecutor(2) as executor:
        assert packed(image_tree, tmp_path / "p.h5", executor).shards > 3


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_a_broken_process_pool_is_replaced_and_only_unfinished_shards_are_packed_again(tmp_path, image_tree, kind):
    fields = {"Z": partial(die_once, tmp_path / "died")}
    with processes(kind, 1) as executor:
        report = packed(image_tree, tmp_path / "p.h5", executor, fields=fields)
        with pytest.raises(BrokenProcessPool):
            executor.submit(os.getpid)
        assert packed(image_tree, tmp_path / "q.h5", executor).made_by.endswith("of a new process pool")
    assert (report.attempts, report.lost, report.duplicates) == (report.shards + 1, 1, 0)
    assert "1 lost attempt" in str(report)
    assert_same(report.path, packed(image_tree, tmp_path / "whole.h5", None, fields=fields, shard_bytes=None).path)
    assert leftovers(tmp_path) == []


@pytest.fixture
def exiting_on_sigterm() -> Iterator[None]:
    """Install a handler that forked workers inherit; a pool would take its error for the result of a task."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("exiting_on_sigterm")
@pytest.mark.parametrize("kind", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_the_other_workers_of_a_broken_process_pool_finish_their_shards(tmp_path, image_tree, kind):
    fields = {"Z": partial(die_beside, tmp_path)}
    with processes(kind, 2) as executor:
        report = packed(image_tree, tmp_path / "p.h5", executor, fields=fields)
    assert (tmp_path / "died").exists()
    assert (report.attempts, report.lost, report.duplicates) == (report.shards + 1, 1, 0)
    assert_same(report.path, packed(image_tree, tmp_path / "whole.h5", None, fields=fields, shard_bytes=None).path)
    assert leftovers(tmp_path) == []


def test_a_shard_that_kills_every_worker_is_a_one_line_error_and_complete_shards_are_reused(tmp_path, image_tree):
    out, fields = tmp_path / "p.h5", {"Z": partial(die_while, tmp_path / "deadly")}
    (tmp_path / "deadly").touch()
    with processes(count=1) as executor:
        with pytest.raises(PackingFailed, match=r"BrokenProcessPool.*complete shards are reused") as caught:
            packed(image_tree, out, executor, fields=fields, retries=1)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "deadly").read_text() == "xx"
    assert not out.exists()
    kept = kept_shards(tmp_path)
    assert len(kept) >= 2
    (tmp_path / "deadly").unlink()
    with ThreadPoolExecutor(2) as threads:
        report = packed(image_tree, out, threads, fields=fields)
    assert {name: identity(tmp_path / name) for name in kept} == kept
    assert report.attempts == report.shards - len(kept)
    assert leftovers(tmp_path) == []


def test_attempts_at_one_shard_at_the_same_time_do_not_damage_each_other(tmp_path, image_tree, monkeypatch):
    together = threading.Barrier(2, timeout=30)
    write = shard_tasks.write_pack

    def written(*arguments: Any) -> Any:
        result = write(*arguments)
        together.wait()
        return result

    monkeypatch.setattr(shard_tasks, "write_pack", written)
    with RepeatingExecutor(2) as executor:
        report = packed(image_tree, tmp_path / "p.h5", executor)
    assert report.attempts == 2 * report.shards
    assert report.duplicates + report.lost == report.shards
    assert report.duplicates >= report.shards - 1
    assert_same(report.path, packed(image_tree, tmp_path / "whole.h5", None, shard_bytes=None).path)
    assert leftovers(tmp_path) == []


def test_workers_that_outlive_a_killed_call_do_not_block_the_next_call(tmp_path, image_tree):
    out, fields = tmp_path / "p.h5", {"Z": partial(hold, tmp_path)}
    child = os.fork()
    if child == 0:
        packed(image_tree, out, processes(count=1), fields=fields)
        os._exit(1)
    workers: list[psutil.Process] = []
    try:
        wait_until((tmp_path / "held").exists)
        workers = psutil.Process(child).children(recursive=True)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kept = kept_shards(tmp_path)
        packed(image_tree, out, None, fields=fields)
        assert len(kept) >= 2
        assert {name: identity(tmp_path / name) for name in kept} == kept
        assert any(worker.is_running() for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
    assert_same(out, packed(image_tree, tmp_path / "whole.h5", None, fields=fields, shard_bytes=None).path)
    assert leftovers(tmp_path) == []


class CountingExecutor(ThreadPoolExecutor):
    """A thread pool that records the number of submitted tasks, and the largest number of unfinished tasks."""

    given = most = 0

    def submit(self, *arguments: Any, **named: Any) -> Any:
        self.given += 1
        future = super().submit(*arguments, **named)
        self.futures = [one for one in getattr(self, "futures", []) if not one.done()] + [future]
        self.most = max(self.most, len(self.futures))
        return future


def test_an_error_in_a_task_stops_the_others_and_is_raised_unchanged(tmp_path, image_tree):
    (image_tree / "ants" / "005.png").write_text("no image")
    with CountingExecutor(1) as executor:
        with pytest.raises(BadImage, match=r"Cannot pack 'ants/005.png' of .*on_bad='skip'"):
            packed(image_tree, tmp_path / "p.h5", executor, encoding="raw", shard_bytes=ROW)
        assert executor.given == 24
        kept = sorted(kept_shards(tmp_path))
        assert kept[:5] == [f"p-0000{number}.h5" for number in range(5)]
        assert "p-00005.h5" not in kept
        assert len(kept) < 20
        assert not (tmp_path / "p.h5").exists()
        report = packed(image_tree, tmp_path / "p.h5", executor, on_bad="skip", encoding="raw")
    assert [path for path, _ in report.bad] == ["ants/005.png"]
    assert leftovers(tmp_path) == []


def test_an_error_in_user_code_is_retried_and_then_raised_with_its_traceback(tmp_path, image_tree):
    failures = iter(range(3))

    def fail_thrice(path: str) -> int:
        if path == "bees/004.png" and next(failures, None) is not None:
            fail(path)
        return len(path)

    with ThreadPoolExecutor(2) as executor:
        with pytest.raises(RuntimeError, match=r"ZeroDivisionError.*of mine[^$]*in fail"):
            packed(image_tree, tmp_path / "p.h5", executor, fields={"Z": fail_thrice}, retries=1)
        assert not (tmp_path / "p.h5").exists()
        report = packed(image_tree, tmp_path / "p.h5", executor, fields={"Z": fail_thrice}, retries=1, resume=False)
    assert report.attempts == report.shards + 1
    assert report.lost == report.duplicates == 0


def test_ctrl_c_cancels_pending_tasks_and_the_executor_stays_usable(tmp_path, image_tree):
    has_begun, may_go_on = threading.Event(), threading.Event()

    def interrupted(path: str) -> int:
        if path == "ants/005.png":
            has_begun.set()
            assert may_go_on.wait(30)
        return len(path)

    with CountingExecutor(1) as executor:

        def interrupt() -> None:
            assert has_begun.wait(30)
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(executor.futures[-1].cancelled)
            may_go_on.set()

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            packed(image_tree, tmp_path / "p.h5", executor, fields={"Z": interrupted})
        thread.join()
        assert not (tmp_path / "p.h5").exists()
        assert len(kept_shards(tmp_path)) < 3
        packed(image_tree, tmp_path / "p.h5", executor, fields={"Z": interrupted})
    assert len(content(tmp_path / "p.h5")["train"]) == 24
    assert leftovers(tmp_path) == []


def test_an_invalid_executor_or_unpicklable_task_is_a_one_line_error(tmp_path, image_tree):
    for wrong in (4, "threads", ThreadPoolExecutor, multiprocessing):
        with pytest.raises(InvalidOption, match=r"executor is .*a Dask client or the module ray.*executor=client"):
            packed(image_tree, tmp_path / "p.h5", wrong)  # type: ignore[arg-type]
    with (
        processes() as executor,
        pytest.raises(InvalidOption, match=r"cannot be pickled .*at the top level of a module"),
    ):
        packed(image_tree, tmp_path / "p.h5", executor, fields={"Z": lambda path: 3})
    with pytest.raises(PackingFailed, match="new executor"):
        packed(image_tree, tmp_path / "p.h5", executor)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tree"]


def test_an_abandoned_task_writes_nothing(tmp_path, image_tree):
    plans: list[ShardTask] = []

    class RecordingExecutor(ThreadPoolExecutor):
        def submit(self, function: Any, *arguments: Any) -> Any:
            plans.append(function.__self__)
            return super().submit(function, *arguments)

    with RecordingExecutor(1) as executor:
        packed(image_tree, tmp_path / "p.h5", executor)
    (tmp_path / "p.h5").unlink()
    for shard in shards_beside(tmp_path / "p.h5"):
        shard.unlink()
    with pytest.raises(PackingFailed, match="a folder that all workers share"):
        plans[0].run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tree"]


def test_an_abandoned_task_reads_no_more_samples_of_a_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_tasks, "_LOOKED_S", 0.0)
    read: list[int] = []

    class AbandonedSquares(Squares):
        def __getitem__(self, number: int) -> Any:
            read.append(number)
            if number == 5:
                next(tmp_path.rglob("wanted-*")).unlink()
            return super().__getitem__(number)

    with ThreadPoolExecutor(1) as executor, pytest.raises(PackingFailed, match="has ended"):
        packed(AbandonedSquares(), tmp_path / "p.h5", executor, shard_bytes="1MiB", retries=0)
    assert max(read) == 5


def test_the_arrays_of_few_tasks_are_sent_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_tasks, "_SENT_BYTES", 3 * 800)
    with CountingExecutor(8) as executor:
        packed({"X": np.arange(4000).reshape(400, 10)}, tmp_path / "p.h5", executor, shard_bytes=800)
    assert executor.given == 40
    assert executor.most <= 3


def test_no_more_arrays_are_sent_while_tasks_are_slow(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_tasks, "_SENT_BYTES", 3 * 800)
    monkeypatch.setattr(shard_tasks, "_TICK_S", 0.001)
    waits = itertools.count()
    may_go_on = threading.Event()
    write_pack = shard_tasks.write_pack

    def held(*arguments: Any) -> Any:
        assert may_go_on.wait(30)
        return write_pack(*arguments)

    def waited(_: object) -> None:
        if next(waits) == 20:
            may_go_on.set()

    monkeypatch.setattr(shard_tasks, "write_pack", held)
    monkeypatch.setattr(shards._ShardSet, "_wait", waited)
    with CountingExecutor(8) as executor:
        packed({"X": np.arange(400).reshape(40, 10)}, tmp_path / "p.h5", executor, shard_bytes=160)
    assert next(waits) > 20
    assert executor.most <= 15


def large_plan(count: int) -> PackPlan:
    items = [Item(f"class{number % 10}/{number:07d}.jpg", 1000 + number % 7, number) for number in range(count)]
    maker = FileSampleMaker(FolderSource(Path("/x")), items, "source", channels=3, size=None)
    numbers = np.random.default_rng(1).permutation(count)
    tables = (
        FieldTable(Field("Y", "labels"), np.arange(count) % 10),
        FieldTable(Field("note", "text", is_ragged=True), (b"some words",) * count),
    )
    about = {"plan": "x", "classes": (), "source_bytes": 1, "left_out": [["a", "b"]] * 1000, "encoding": "source"}
    splits = {"train": numbers[: count // 2], "test": numbers[count // 2 :]}
    return PackPlan("x", maker, splits, tables, about, "raise", 0)


@pytest.mark.full
def test_a_million_samples_are_planned_in_seconds_and_a_task_contains_only_its_own_samples(tmp_path):
    plan, count = large_plan(1_000_000), 100
    started = time.perf_counter()
    sizes = shards.estimate_bytes(plan)
    ranges = shards.divide_samples(sizes, int(sizes.sum()) // count)
    shards.digest_shards(plan, ranges)
    parts = [plan.shard(start, stop, plan.about) for start, stop in ranges]
    assert time.perf_counter() - started < 15
    assert len(parts) == count
    assert sum(part.samples for part in parts) == plan.samples
    sent = [len(pickle.dumps(part)) for part in parts[::10]]
    assert max(sent) < 1.2 * min(sent)
    few = [len(pickle.dumps(plan.shard(start, start + 5000, plan.about))) for start in (0, 900_000)]
    assert max(few) < 0.6 * min(sent)
