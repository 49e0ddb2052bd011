"""Packing on real clusters of Dask, Ray and ipyparallel; the tasks of a killed worker of Dask or Ray are repeated."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import packing_tasks
import psutil
import pytest
from packed_files import ROW, assert_same, identity, kept_shards, shards_beside
from packing_tasks import die_once, process_of
from trees import leftovers

from colabkit.errors import BadImage, InvalidOption
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.packing import shard_tasks
from colabkit.packs.packing.api import pack


def packed(source: Path, out: Path, executor: Any, **options: Any) -> Any:
    return pack(source, out, **{"shard_bytes": 2 * ROW, "executor": executor, "progress": False, **options})


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Yield a Dask client with two worker processes; afterwards, check that no process, port or thread remains."""
    distributed = pytest.importorskip("distributed")
    threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
    ports = listening()
    quiet = {"silence_logs": logging.CRITICAL, "dashboard_address": None}
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, **quiet) as cluster:
        with distributed.Client(cluster) as found:
            yield found
        own = set(psutil.Process().children(recursive=True)) - children
    _, alive = psutil.wait_procs([one for one in own if not is_tracker(one)], timeout=10)
    assert alive == []
    assert listening() == ports
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon:
            thread.join(10)
            assert not thread.is_alive()


def is_tracker(process: psutil.Process) -> bool:
    """Return whether this is the resource tracker, which Python starts with the first spawned process and keeps."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def listening() -> set[int]:
    return {one.laddr.port for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}


@pytest.mark.full
def test_both_workers_pack_and_the_tasks_of_a_killed_worker_are_repeated(tmp_path, image_tree, client):
    before = set(client.run(os.getpid).values())
    flag = tmp_path / "died"
    fields = {"Z": partial(die_once, flag), "made_by": process_of}
    report = packed(image_tree, tmp_path / "p.h5", client, fields=fields)
    assert (report.lost, report.attempts) == (1, report.shards + 1)
    assert int(flag.read_text()) in before
    assert (report.shards, report.made_by) == (len(shards_beside(report.path)), "tasks of an executor")
    data = open_pack(report.path)["train"]
    makers = {int(sample[-1]) for sample in data}
    assert os.getpid() not in makers
    assert makers & before
    fields.pop("made_by")
    packed(image_tree, tmp_path / "q.h5", client, fields=fields)
    assert_same(
        tmp_path / "q.h5", packed(image_tree, tmp_path / "whole.h5", None, fields=fields, shard_bytes=None).path
    )
    assert leftovers(tmp_path) == []


@pytest.mark.full
def test_an_error_cancels_the_tasks_and_the_next_call_resumes(tmp_path, image_tree, client):
    good = (image_tree / "cats" / "003.png").read_bytes()
    (image_tree / "cats" / "003.png").write_bytes(b"no image" * (len(good) // 8) + b"x" * (len(good) % 8))
    times = (image_tree / "cats" / "002.png").stat()
    os.utime(image_tree / "cats" / "003.png", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(BadImage, match=r"Cannot pack 'cats/003.png' of"):
        packed(image_tree, tmp_path / "p.h5", client, encoding="raw")
    assert not (tmp_path / "p.h5").exists()
    (image_tree / "cats" / "003.png").write_bytes(good)
    os.utime(image_tree / "cats" / "003.png", ns=(times.st_atime_ns, times.st_mtime_ns))
    saved = kept_shards(tmp_path)
    assert saved
    packed(image_tree, tmp_path / "p.h5", client.get_executor(), encoding="raw")
    assert {name: identity(tmp_path / name) for name in saved} == saved
    whole = packed(image_tree, tmp_path / "whole.h5", None, encoding="raw", shard_bytes=None)
    assert_same(tmp_path / "p.h5", whole.path)
    assert leftovers(tmp_path) == []


@pytest.mark.full
def test_dask_runs_a_failed_task_again(tmp_path, image_tree, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(packing_tasks, "CALLS", [])
    quiet = {"silence_logs": logging.CRITICAL, "dashboard_address": None}
    with distributed.Client(processes=False, **quiet) as client:
        report = packed(image_tree, tmp_path / "p.h5", client, fields={"Z": packing_tasks.fail_once})
    assert (report.splits, report.attempts) == ({"train": 24}, report.shards + 1)
    assert leftovers(tmp_path) == []


@pytest.mark.full
def test_while_a_dask_cluster_has_no_workers_this_process_packs(tmp_path, image_tree, monkeypatch, caplog):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(shard_tasks, "_ALONE_S", 0.0)
    monkeypatch.setattr(shard_tasks, "_CHECK_S", 0.0)
    monkeypatch.setattr(packing_tasks, "MAKERS", makers := [])
    quiet = {"silence_logs": logging.CRITICAL, "dashboard_address": None}
    with (
        distributed.LocalCluster(n_workers=0, processes=False, **quiet) as cluster,
        distributed.Client(cluster) as client,
    ):

        def add_worker() -> None:
            cluster.scale(1)
            client.wait_for_workers(1, timeout=30)

        monkeypatch.setattr(packing_tasks, "add_worker", add_worker)
        report = packed(image_tree, tmp_path / "p.h5", client, fields={"Z": packing_tasks.thread_of})
    assert report.made_by == "tasks of an executor and a thread of this process"
    assert any(name.startswith("colabkit-pack") for name in makers)
    assert any("Dask" in name for name in makers)
    assert [one.message for one in caplog.records if "this process packs until one joins" in one.message]
    assert leftovers(tmp_path) == []


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = pytest.importorskip("ray")
    with pytest.raises(InvalidOption, match=r"Ray is not connected.*ray.init\(\)"):
        pack("samples:digits", tmp_path_factory.mktemp("p") / "p.h5", executor=found)
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    # Workers of Ray import only from the path in this variable.
    quiet["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    found.init(address="local", num_cpus=2, object_store_memory=100 << 20, **quiet)
    yield found
    found.shutdown()


@pytest.mark.full
def test_workers_of_ray_pack_and_the_task_of_a_killed_worker_is_repeated(tmp_path, image_tree, ray):
    fields = {"Z": partial(die_once, tmp_path / "died")}
    report = packed(image_tree, tmp_path / "p.h5", ray, fields=fields)
    assert int((tmp_path / "died").read_text()) != os.getpid()
    assert (report.lost, report.attempts, report.made_by) == (1, report.shards + 1, "tasks of an executor")
    assert_same(report.path, packed(image_tree, tmp_path / "whole.h5", None, fields=fields, shard_bytes=None).path)
    assert leftovers(tmp_path) == []
    (image_tree / "cats" / "003.png").write_bytes(b"no image")
    with pytest.raises(BadImage, match=r"Cannot pack 'cats/003.png' of"):
        packed(image_tree, tmp_path / "q.h5", ray, encoding="raw")


@pytest.mark.full
def test_engines_of_ipyparallel_pack(tmp_path, image_tree):
    ipyparallel = pytest.importorskip("ipyparallel")
    with ipyparallel.Cluster(n=2, log_level=logging.ERROR) as client:
        report = packed(image_tree, tmp_path / "p.h5", client.executor())
    assert (report.made_by, report.attempts) == ("tasks of an executor", report.shards)
    assert_same(report.path, packed(image_tree, tmp_path / "whole.h5", None, shard_bytes=None).path)
    assert leftovers(tmp_path) == []
