"""Measure the speed and safety of `stage()` and `prepare()` with a slow drive, compared with cp and other programs.

    python tests/benchmarks/bench_staging.py --data cifar10-images.zip

The slow drive is a real FUSE mount (tests/doubles/slow_drive.py) with a latency for each open and listing, one
bandwidth for all reads, and a maximum number of concurrent requests. The drive is mounted again for every timed run, so
that nothing is cached. The part `small` compares small sets of files with plain thread pools of the best size from 1 to
128, which write nothing. One pool first lists the folders, as `stage()` does; the other one knows all paths beforehand,
so it saves two latencies. Latencies and maximum numbers of requests are drawn at random; `--seed` repeats a draw. The
part `programs` compares other programs. The benchmark needs root or `fusermount3`, and `mfusepy`. `rsync` and `rclone`
are compared if available. `--only` selects parts.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

from far_mounts import FuseMount, wait_for
from rounds import Bench, table, timed
from tables import spread

import colabkit
from colabkit.storage.sources.engine import BLOCK_BYTES
from colabkit.storage.sources.items import STAGE_SEAL

SWEEP = (1, 2, 4, 8, 16, 32, 64, 128)
BANDWIDTH = 100e6
OURS = "colabkit.stage()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="samples:digits", help="zip archive of small files")
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--big-mb", type=int, default=500)
    parser.add_argument("--settings", default="10/16,40/16,100/64", help="latency in ms / requests at once, ...")
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="seed of the settings of `small`")
    parser.add_argument("--drawn", type=int, default=6, help="number of settings of `small`")
    parser.add_argument("--counts", default="500,1500,5000", help="numbers of files of `small`")
    parser.add_argument("--kills", type=int, default=20)
    quick = {"files": 100, "big_mb": 20, "settings": "10/16", "kills": 2, "drawn": 1, "counts": "50"}
    StagingBench.main(parser, RUNS, rounds=5, quick=quick)


@dataclass
class StagingBench(Bench):
    """The benchmark's drive with its content (`root`) and its mount point (`point`), and the folder for copies."""

    targets: int = 0

    def __post_init__(self) -> None:
        self.root, self.point, self.near = (self.folder / name for name in ("root", "drive", "near"))
        self.tmpfs = Path("/dev/shm") / self.folder.name
        os.environ["COLABKIT_LOCAL"] = str(self.near)
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        self.whole = colabkit.stage(self.options.data, self.folder / "whole", progress=False).path
        self.paths = self.fill("small", self.options.files)
        self.fill_big(self.options.big_mb * 10**6)
        self.small_bytes = sum((self.root / path).stat().st_size for path in self.paths)
        print(f"{len(self.paths):,} files, {self.small_bytes:,} bytes; a file of {self.options.big_mb} MB")

    @property
    def settings(self) -> list[tuple[float, ...]]:
        """The tested latencies in ms, each with a maximum number of concurrent requests."""
        return [tuple(map(float, text.split("/"))) for text in self.options.settings.split(",")]

    def fill(self, name: str, files: int) -> list[str]:
        """Write some of the small files to a folder of the drive, in class folders, and return their paths."""
        inner = next((path for path in (self.whole / "train", self.whole / "digits") if path.is_dir()), self.whole)
        folders = sorted(folder for folder in inner.iterdir() if folder.is_dir())
        for folder in folders:
            target = self.root / name / folder.name
            target.mkdir(parents=True)
            for file in sorted(folder.iterdir())[: files // len(folders)]:
                shutil.copy(file, target)
        return sorted(str(path.relative_to(self.root)) for path in (self.root / name).rglob("*") if path.is_file())

    def fill_big(self, size: int) -> None:
        with (self.root / "big.bin").open("wb") as file:
            for _ in range(0, size, 10**7):
                file.write(random.randbytes(min(10**7, size)))

    def drive(self, latency_ms: float, at_once: float, bandwidth: float = BANDWIDTH) -> FuseMount:
        """Return a new mount of the slow drive, without cached data."""
        latency_s = latency_ms / 1e3
        return FuseMount(
            self.point,
            self.root,
            at_once=int(at_once),
            open_s=latency_s,
            list_s=latency_s,
            read_s=0.0,
            bandwidth=bandwidth,
            attr_s=60.0,
            direct_io=False,
        )

    def target(self, parent: Path | None = None) -> Path:
        self.targets += 1
        return (parent or self.folder / "targets") / str(self.targets)

    def tmpfs_target(self) -> Path:
        """Return a new path for a copy in tmpfs, where `stage()` by default copies data that fits."""
        return self.target(self.tmpfs)

    def race(self, title: str, seconds: Mapping[str, list[float]], needed: Mapping[str, float]) -> None:
        """Show the seconds of all systems relative to those of `stage()`, and check the requirements."""
        self.show(title, "s", seconds, [OURS])
        for name, least in needed.items():
            what = f"{title}: speed of stage() relative to {name}"
            self.need_paired(what, seconds.get(name, ()), seconds[OURS], least)


def command(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def bare(point: Path, paths: list[str], threads: int) -> None:
    """Read files with a plain thread pool and discard their content."""
    with ThreadPoolExecutor(threads) as pool:
        sum(pool.map(size_of, [os.path.join(point, path) for path in paths]))


def bare_listing(folder: Path, threads: int) -> None:
    """List a folder and its class folders with a plain thread pool, then read their files."""
    with ThreadPoolExecutor(threads) as pool:
        names = pool.map(os.listdir, classes := [entry.path for entry in os.scandir(folder)])
        paths = [os.path.join(of, name) for of, some in zip(classes, names, strict=True) for name in some]
        sum(pool.map(size_of, paths))


def size_of(path: str) -> int:
    with open(path, "rb", buffering=0) as file:
        return len(file.read())


def bare_ranges(path: Path, threads: int) -> None:
    """Read one file with a thread pool in ranges of 4 MiB."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(threads) as pool:
            offsets = range(0, os.fstat(fd).st_size, BLOCK_BYTES)
            sum(len(block) for block in pool.map(lambda offset: os.pread(fd, BLOCK_BYTES, offset), offsets))
    finally:
        os.close(fd)


def small(bench: StagingBench) -> None:
    """Compare `stage()` with the best plain thread pools for small sets of files, at settings drawn at random."""
    draw = random.Random(bench.options.seed)
    counts = [int(text) for text in bench.options.counts.split(",")]
    paths = {count: bench.fill(f"small-{count}", count) for count in counts}
    print(f"\nThe settings are drawn with --seed {bench.options.seed}")
    try:
        for _ in range(bench.options.drawn):
            latency_ms, at_once = round(10 ** draw.uniform(1, 2)), round(8 * 8 ** draw.random())
            for count in counts:
                small_at(bench, paths[count], latency_ms, at_once)
    finally:
        shutil.rmtree(bench.tmpfs, ignore_errors=True)


def small_at(bench: StagingBench, paths: list[str], latency_ms: float, at_once: int) -> None:
    folder = bench.point / Path(paths[0]).parts[0]
    listing, knowing = "plain pool that lists the folders", "plain pool that knows the paths"
    sweep: dict[int, float] = {}
    # Fewer threads than requests at once are never the best, and more than four times as many only compete.
    for count in (count for count in SWEEP if at_once / 2 < count <= 4 * at_once):
        with bench.drive(latency_ms, at_once):
            sweep[count] = timed(partial(bare, bench.point, paths, count))
    threads = min(sweep, key=lambda count: sweep[count])
    systems = {
        OURS: partial(colabkit.stage, folder, progress=False),
        listing: partial(bare_listing, folder, threads),
        knowing: partial(bare, bench.point, paths, threads),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(bench.rounds + 1):
        for name, run in systems.items():
            with bench.drive(latency_ms, at_once):
                lasted_s = timed(run)
            # Round 0 is a warm-up.
            if number:
                seconds[name].append(lasted_s)
            if name == OURS:
                colabkit.unstage(folder)
    title = f"{len(paths):,} files, {latency_ms:g} ms, {at_once} requests at once, {threads} plain threads"
    bench.race(title, seconds, {listing: 0.92, knowing: 0.92})
    bench.figures[f"{title}, sweep"] = sweep


def programs(bench: StagingBench) -> None:
    """Compare `stage()` with rclone, rsync and cp; rsync and cp run only once."""
    try:
        for latency_ms, at_once in bench.settings:
            programs_at(bench, latency_ms, at_once)
    finally:
        shutil.rmtree(bench.tmpfs, ignore_errors=True)


def programs_at(bench: StagingBench, latency_ms: float, at_once: float) -> None:
    folder, rounds = bench.point / "small", bench.rounds
    systems: dict[str, tuple[int, Callable[[], object]]] = {
        OURS: (rounds, lambda: colabkit.stage(folder, progress=False)),
        "rclone copy --transfers 32": (
            rounds,
            lambda: command("rclone", "copy", "--config", "", "--transfers", 32, folder, bench.tmpfs_target()),
        ),
        "rsync -a": (1, lambda: command("rsync", "-a", "--mkpath", f"{folder}/", bench.tmpfs_target())),
        "cp -r": (1, lambda: command("cp", "-r", folder, made(bench.tmpfs_target()))),
    }
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, (own_rounds, run) in systems.items():
            if number < own_rounds and (name == OURS or shutil.which(name.split()[0])):
                with bench.drive(latency_ms, at_once):
                    seconds.setdefault(name, []).append(timed(run))
            if name == OURS:
                colabkit.unstage(folder)
    title = f"{len(bench.paths):,} small files, {latency_ms:g} ms, {at_once:g} requests at once"
    bench.race(title, seconds, {"rclone copy --transfers 32": 1.0, "rsync -a": 1.0, "cp -r": 8.0})


def made(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def big(bench: StagingBench) -> None:
    file = bench.point / "big.bin"
    for latency_ms, at_once in bench.settings:
        systems: dict[str, Callable[[], object]] = {
            OURS: lambda: colabkit.stage(file, bench.target(), progress=False),
            **{f"plain, {count} threads": partial(bare_ranges, file, count) for count in (1, 4, 16)},
        }
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(bench.rounds):
            for name, run in systems.items():
                with bench.drive(latency_ms, at_once):
                    seconds[name].append(timed(run))
                shutil.rmtree(bench.folder / "targets" / str(bench.targets), ignore_errors=True)
        swift = min((name for name in seconds if "plain" in name), key=lambda name: statistics.median(seconds[name]))
        title = f"a file of {bench.options.big_mb} MB, {latency_ms:g} ms, {at_once:g} requests at once, 100 MB/s"
        shown = {name: values for name, values in seconds.items() if name in (OURS, swift)}
        bench.race(title, shown, {swift: 0.95})
        bench.figures[f"{title}, all"] = seconds


def local(bench: StagingBench) -> None:
    """Compare `stage()` with cp for a big file that is copied from a local disk to the same disk."""
    file = bench.root / "big.bin"
    seconds: dict[str, list[float]] = {OURS: [], "cp": []}
    for _ in range(5 * bench.rounds):
        # Write back the data of earlier runs first, so that this run does not wait for it.
        os.sync()
        seconds[OURS].append(timed(lambda: colabkit.stage(file, bench.target(), progress=False)))
        shutil.rmtree(bench.folder / "targets" / str(bench.targets))
        os.sync()
        seconds["cp"].append(timed(lambda: command("cp", file, made(bench.target()))))
        (bench.folder / "targets" / str(bench.targets)).unlink()
    bench.race(f"a file of {bench.options.big_mb} MB, local to local", seconds, {"cp": 1.0})


def memory(bench: StagingBench) -> None:
    code = (
        "import sys, colabkit; colabkit.stage(sys.argv[1], sys.argv[2], progress=False);"
        "print([int(line.split()[1]) // 1024 for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    with bench.drive(10, 64, 1e9):
        for name, source in {
            "small files": bench.point / "small",
            "a big file": bench.point / "big.bin",
            "all, local": bench.whole,
        }.items():
            words = [sys.executable, "-c", code, str(source), str(bench.target())]
            mib = int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
            bench.need(f"peak memory of stage(), {name}, MiB", mib, 300, "{:.0f}", at_most=True)


def again(bench: StagingBench) -> None:
    target = bench.target()
    first = colabkit.stage(bench.whole, target, progress=False)
    seconds = [timed(lambda: colabkit.stage(bench.whole, target, progress=False)) for _ in range(5)]
    table(f"second stage() of {first.files:,} files", ("median s", "min", "max"), [spread(seconds, "{:.3f}")])
    bench.figures["again"] = seconds
    bench.need("second stage() of all files, s", statistics.median(seconds), 1, "{:.3f}", at_most=True)


def prepare(bench: StagingBench) -> None:
    """Measure `prepare()` with a pack that an earlier session saved on the drive."""

    def run() -> None:
        made.append(colabkit.prepare(bench.point / "small", to=bench.point / "colabkit", progress=False).report)

    made: list[object] = []
    with bench.drive(40, 16):
        run()
    seconds = []
    for _ in range(bench.rounds):
        shutil.rmtree(bench.near)
        with bench.drive(40, 16, 20e6):
            seconds.append(timed(run))
    print(f"\n{made[0]}\n{made[-1]}")
    size = sum(file.stat().st_size for file in (bench.root / "colabkit").glob("*.h5"))
    title = f"prepare() of a saved pack of {size:,} bytes at 20 MB/s, 40 ms"
    table(title, ("median s", "min", "max"), [spread(seconds, "{:.2f}")])
    bench.figures["prepare"] = {"seconds": seconds, "bytes": size}
    bench.need("prepare() of a saved pack, s", statistics.median(seconds), size / 20e6 + 2, "{:.2f}", at_most=True)


def kill(bench: StagingBench) -> None:
    """Kill `stage()` at random times, restart it, compare all bytes, and count what was copied twice."""
    code = "import sys, colabkit; colabkit.stage(sys.argv[1], sys.argv[2], progress=False)"
    twice = []
    for number in range(bench.options.kills):
        name = ("small", "small", "small", "big.bin")[number % 4]
        source, target = bench.point / name, bench.target()
        words = [sys.executable, "-c", code, str(source), str(target)]
        with bench.drive(10, 16, 200e6) as drive:
            child = subprocess.Popen(words)
            wait_for(lambda drive=drive: drive.opened > 0, "the first open")  # type: ignore[misc]
            time.sleep(random.uniform(0.05, 2.0))
            child.send_signal(signal.SIGKILL)
            child.wait()
        whole_files, blocks = kept(bench, target, name)
        with bench.drive(10, 16, 200e6) as drive:
            subprocess.run(words, check=True)
            opened = set(drive.opened_paths)
            again_bytes = drive.read_bytes
        same(bench.root / name, target)
        if name == "small":
            twice.append(len(whole_files & opened))
        else:
            missing = max(0, (bench.root / name).stat().st_size - blocks * BLOCK_BYTES)
            twice.append(max(0, round((again_bytes - missing) / BLOCK_BYTES)) if blocks else 0)
        shutil.rmtree(target)
    print(f"\nkilled at {len(twice)} random times, with correct bytes each time; files or blocks copied twice: {twice}")
    bench.figures["kill"] = twice
    bench.need("files or blocks copied twice after a kill", max(twice), 1, "{:.0f}", at_most=True)


def kept(bench: StagingBench, target: Path, name: str) -> tuple[set[str], int]:
    """Return the drive paths of the complete files in the partial copy, and the number of blocks in its journal.

    If the copy is finished, return the paths of all files and a number that exceeds any number of blocks.
    """
    if target.exists():
        return {f"/{path}" for path in bench.paths}, 10**9
    files, blocks = set(), 0
    for folder in target.parent.glob(".colabkit-*kept.partial"):
        blocks = len((folder / "journal").read_text().splitlines()) if (folder / "journal").exists() else 0
        for path in (folder / "data").rglob("*"):
            remote = bench.root / "small" / path.relative_to(folder / "data")
            if path.is_file() and remote.is_file() and path.stat().st_size == remote.stat().st_size:
                files.add(f"/small/{path.relative_to(folder / 'data')}")
    return files, blocks


def same(remote: Path, near: Path) -> None:
    """Assert that a copy has the same bytes as the drive."""
    pairs = [(remote, near / remote.name)]
    if remote.is_dir():
        pairs = [(path, near / path.relative_to(remote)) for path in remote.rglob("*") if path.is_file()]
        assert sum(path.is_file() and path.name != STAGE_SEAL for path in near.rglob("*")) == len(pairs)
    for one, other in pairs:
        assert one.read_bytes() == other.read_bytes(), other


RUNS = {
    "small": small,
    "programs": programs,
    "big": big,
    "local": local,
    "memory": memory,
    "again": again,
    "prepare": prepare,
    "kill": kill,
}

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    main()
