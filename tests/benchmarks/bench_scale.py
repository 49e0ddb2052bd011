"""Measure orders of a billion samples on a thousand processes, and packing on clusters of one machine.

    python tests/benchmarks/bench_scale.py

`order` takes batches of one of 1,024 processes, in the shuffled order of 10^9 samples, and prints the time to the first
batch and the growth of memory; it also checks that the entire order is a permutation, and that the processes together
receive every sample once. `cluster` packs photos with one and with two workers of Dask and of Ray, in interleaved
rounds, and compares the bytes with those of a local call. `kills` kills a random worker with SIGKILL, again and again,
at random moments of packing on Dask, Ray and a process pool. The packages of the extras `cluster` and `ray` are needed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rounds import Bench, interleaved, table, timed, write_images

import colabkit
from colabkit import sampler

SAMPLES, RANKS, BATCH = 10**9, 1024, 256
CHECKED = 10**6
"""Number of samples for which the shares of all processes are compared."""

CHUNK = 1 << 22
WARM_BATCHES, BATCHES = 20, 400
SHARD_BYTES = 4 << 20
SIDE = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos-count", type=int, default=6000, help="number of photos to pack")
    parser.add_argument("--kills", type=int, default=50, help="workers to kill on each cluster")
    parts = {"order": order, "cluster": cluster, "kills": kills}
    Bench.main(parser, parts, rounds=5, quick={"photos_count": 60, "kills": 1})


def order(bench: Bench) -> None:
    samples = CHECKED if bench.options.quick else SAMPLES
    first_ms, grown_mb = [], []
    # Import what loaders import when they are first used.
    list(colabkit.Loader(range(BATCH), BATCH, shuffle=True, num_workers=0))
    for rank in range(0, RANKS, RANKS // 4):
        began = time.perf_counter()
        # This dataset is only read, one index at a time.
        loader = colabkit.Loader(range(samples), BATCH, shuffle=True, num_workers=0, rank=rank, world_size=RANKS)
        batches = iter(loader)
        next(batches)
        first_ms.append(1000 * (time.perf_counter() - began))
        for _ in islice(batches, WARM_BATCHES):
            pass
        before = resident_mb()
        for _ in islice(batches, BATCHES):
            pass
        grown_mb.append(resident_mb() - before)
        batches.close()
    bench.figures["first batch, ms"], bench.figures["growth, MB"] = first_ms, grown_mb
    bench.need(f"ms to the first batch of a rank, {samples:,} samples", max(first_ms), 100, "{:.0f}", at_most=True)
    bench.need(f"growth of memory over {BATCHES} batches, MB", max(grown_mb), 8, "{:.1f}", at_most=True)
    whole, seen = sampler.ShuffledOrder(samples, seed=1), np.zeros(samples, np.bool_)
    began = time.perf_counter()
    for start in range(0, samples, CHUNK):
        seen[whole.indices(0, start, min(start + CHUNK, samples))] = True
    print(f"\nThe order of {samples:,} samples: {samples / (time.perf_counter() - began) / 1e6:.0f} million indices/s")
    bench.need("share of the samples that an epoch contains", float(seen.mean()), 1.0, "{:.9f}")
    del seen
    numbers = torch.arange(50_000 if bench.options.quick else CHECKED)
    received = torch.zeros(len(numbers), dtype=torch.int64)
    for rank in range(RANKS):
        for some in colabkit.Loader(numbers, BATCH, shuffle=True, rank=rank, world_size=RANKS):
            received[some] += 1
    share = float((received == 1).double().mean())
    bench.need(f"share of {len(numbers):,} samples that {RANKS:,} ranks receive once", share, 1.0, "{:.6f}")


def resident_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


def cluster(bench: Bench) -> None:
    """Pack with one and with two workers of Dask and of Ray."""
    photos = write_images(bench.folder / "photos", bench.options.photos_count, (500, 375), 4)
    expected = digests(packed(photos, bench.folder / "local").path)
    for name, needed in (("Dask", 1.7), ("Ray", 1.6)):
        target = bench.folder / name
        with CLUSTERS[name]() as workers:

            def seconds(count: int, target: Path = target, workers: Workers = workers) -> float:
                with workers.executor(count) as executor:
                    return timed(partial(packed, photos, target, executor))

            systems = {"one worker": lambda: seconds(1), "two workers": lambda: seconds(2)}
            figures = interleaved(systems, bench.rounds)
        bench.show(f"Packing {bench.options.photos_count:,} photos on {name}", "s", figures, ["two workers"])
        what = f"{name}: speed of two workers relative to one"
        bench.need_paired(what, figures["one worker"], figures["two workers"], needed)
        same = digests(target / "photos.h5") == expected
        bench.need(f"{name}: 1 if all shards have the bytes of a local call", float(same), 1, "{:.0f}")


def packed(photos: Path, folder: Path, executor: Any = None) -> colabkit.PackReport:
    options = {"size": SIDE, "encoding": "raw", "shard_bytes": SHARD_BYTES, "overwrite": True, "progress": False}
    return colabkit.pack(photos, folder / "photos.h5", executor=executor, **options)


def digests(index: Path) -> list[str]:
    """Return the digests of the shards of a pack."""
    shards = sorted(path for path in index.parent.glob("*.h5") if path != index)
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in shards]


def kills(bench: Bench) -> None:
    """Kill a random worker at a random moment of each call."""
    photos = write_images(bench.folder / "few", 60 if bench.options.quick else 600, (250, 188), 4)
    expected = digests(packed(photos, bench.folder / "few-local").path)
    rows, draw = [], random.Random(0)
    for name, started in CLUSTERS.items():
        target, count = bench.folder / f"{name}-killed", bench.options.kills
        calls = finished = repeated = 0
        hits: list[int] = []
        with started() as workers:
            with workers.executor(2) as executor:
                packed(photos, target, executor)
                usual_s = timed(partial(packed, photos, target, executor))
            while len(hits) < count:
                calls += 1
                with workers.executor(2) as executor:
                    killer = threading.Timer(draw.uniform(0, usual_s), kill_one, (workers, draw, hits))
                    killer.start()
                    report = packed(photos, target, executor)
                    killer.cancel()
                    killer.join()
                finished += digests(report.path) == expected
                repeated = max(repeated, report.attempts - report.shards)
        rows.append((name, f"{calls}", f"{len(hits)}", f"{finished}", f"{repeated}"))
        bench.need(f"{name}: share of calls with all samples, {count} kills", finished / calls, 1, "{:.2f}")
        bench.need(f"{name}: most shards packed again in one call", repeated, 1, "{:.0f}", at_most=True)
    table("Workers killed while they pack", ("", "calls", "killed", "complete", "most shards packed again"), rows)


def kill_one(workers: Workers, draw: random.Random, hits: list[int]) -> None:
    if living := workers.pids():
        chosen = draw.choice(living)
        with suppress(ProcessLookupError):
            os.kill(chosen, signal.SIGKILL)
            hits.append(chosen)


@dataclass(frozen=True)
class Workers:
    """A cluster with two workers.

    Attributes:
        executor: function that returns a context with an executor of one or two of the workers.
        pids: function that returns the process IDs of the workers.
    """

    executor: Callable[[int], AbstractContextManager[Any]]
    pids: Callable[[], list[int]]


@contextmanager
def dask() -> Iterator[Workers]:
    from distributed import Client, LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
    running = LocalCluster(**options)
    try:
        with Client(running) as client:

            def executor(count: int) -> AbstractContextManager[Any]:
                with suppress(TimeoutError):
                    client.wait_for_workers(2, timeout=30)
                if len(client.scheduler_info()["workers"]) < 2:
                    # Dask forgets a killed worker that does not restart within 15 seconds, but still counts it.
                    running.scale(0)
                    running.scale(2)
                client.wait_for_workers(2, timeout=120)
                some = [*client.scheduler_info()["workers"]][:count]
                return nullcontext(client if count == 2 else client.get_executor(workers=some))

            yield Workers(executor, lambda: [*client.run(os.getpid, on_error="ignore").values()])
    finally:
        # A cluster that has lost workers sometimes fails when it closes.
        with suppress(KeyError):
            running.close()


@contextmanager
def ray() -> Iterator[Workers]:
    import ray as module

    module.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def warm_up() -> None:
        import_module("colabkit.packs.packing.shard_tasks")
        # Every worker gets one of these calls, because no call ends immediately.
        time.sleep(1.0)

    class Holder:
        def ping(self) -> None:
            """Wait until this worker holds its CPU."""

    @contextmanager
    def executor(count: int) -> Iterator[Any]:
        # Ray does not let callers choose a worker, so hold the CPU of one of the two.
        holders = [module.remote(Holder).options(num_cpus=1).remote() for _ in range(2 - count)]
        module.get([holder.ping.remote() for holder in holders])
        module.get([module.remote(warm_up).remote() for _ in range(count)])
        yield module
        for holder in holders:
            module.kill(holder)

    def pids() -> list[int]:
        # A machine of Ray does not survive the death of its agents, which are named like workers.
        titles = {one.pid: (one.info["cmdline"] or [""])[0] for one in psutil.process_iter(["cmdline"])}
        return [pid for pid, title in titles.items() if title.startswith("ray::") and not title.endswith("Agent")]

    try:
        yield Workers(executor, pids)
    finally:
        module.shutdown()


@contextmanager
def process_pool() -> Iterator[Workers]:
    @contextmanager
    def executor(count: int) -> Iterator[ProcessPoolExecutor]:
        # `pack` replaces a broken pool only for its own call.
        yield (pool := ProcessPoolExecutor(count))
        # A pool waits forever for its workers if one was killed after its last task, while it held a lock.
        for worker in active_children():
            worker.kill()
        pool.shutdown()

    yield Workers(executor, lambda: [one.pid for one in active_children() if one.pid])


CLUSTERS = {"Dask": dask, "Ray": ray, "process pool": process_pool}

if __name__ == "__main__":
    main()
