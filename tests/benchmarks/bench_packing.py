"""Measure the speed, memory and safety of `pack()` on real files, compared with plain loops and other writers.

    python tests/benchmarks/bench_packing.py --data cifar10-images.zip --photos photos-400.zip --peers-python PATH

Every system runs in a new process, in interleaved rounds after an untimed one. `cifar` and `cold` measure the entire
process, from its start to its end, with all imports; the other parts, and the second table of `cifar`, measure from
listing the source to the finished file, without imports. All data is in the page cache, except in `cold`: before each
run, root drops the cache with directory entries and inodes (`/proc/sys/vm/drop_caches`), and the packages are imported
once before the time starts. The archive is extracted beforehand, unless it is packed directly.

`install_peers.sh` installs the other packages, whose Python is `--peers-python`.

litdata's `optimize()` deletes the folders `data` and `chunks` of the temporary folder, so each system gets a separate
temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from rounds import HERE, Bench, Found, child, extract, extract_photos, last_line, table, warm
from tables import spread

import colabkit

DEADLINE_S = 1200
BARE = "bare"
FFCV = "FFCV raw"
RAW = "colabkit raw"
PEERS = (FFCV, "litdata raw", "litdata jpeg", "MDS raw", "MDS jpeg", "WebDataset jpeg")
OPEN = """
import sys, time, json, colabkit, h5py, torch
open_pack = colabkit.open_pack
started = time.perf_counter()
dataset = open_pack(sys.argv[1])["train"]
print(json.dumps({"samples": len(dataset), "seconds": time.perf_counter() - started}))
"""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
MISSED = ("SILENT", "UNTYPED", "CRASH")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", help="zip archive of small JPEGs, with train/CLASS/ and test/CLASS/; by default generated"
    )
    parser.add_argument("--photos", help="zip archive of photos; by default generated")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter with the other packages")
    PackingBench.main(parser, RUNS, rounds=5)


@dataclass
class PackingBench(Bench):
    """The benchmark's small files and photos, extracted once, and its packs, each removed after its run.

    Attributes:
        calls: images per second of the calls alone in the current part, by system, one for each run of `run_whole`.
    """

    calls: dict[str, list[float]] = field(default_factory=dict)

    @property
    def files(self) -> Path:
        return extract(self.archive, self.folder / "files")

    @property
    def photos(self) -> Path:
        return extract_photos(self.photo_archive, self.folder / "photos")

    def command(self, system: str, source: Path) -> list[str]:
        """Return the command that packs into a new folder; `clear` removes it."""
        out = Path(tempfile.mkdtemp(dir=self.folder, prefix="out-")) / "out.h5"
        python = self.options.peers_python if system in PEERS else sys.executable
        return [python, str(HERE / "packing_systems.py"), system, str(source), str(out)]

    def clear(self) -> None:
        for folder in self.folder.glob("out-*"):
            shutil.rmtree(folder)

    def run(self, system: str, source: Path, count: int, number: int, warm_up: Path | None = None) -> Found:
        """Pack `source` in a new process, and return its time as `process_s`; round 0 packs `warm_up` if given."""
        packed = warm_up if warm_up and not number else source
        command = self.command(system, packed)
        # `child` does this too, but then it would count as time of the process.
        os.sync()
        began = time.perf_counter()
        found = self.checked(system, child(command, DEADLINE_S))
        found["process_s"] = time.perf_counter() - began
        assert packed == warm_up or found.get("samples", count) == count, (system, found, count)
        self.clear()
        return found

    def run_whole(self, system: str, source: Path, count: int, number: int, warm_up: Path | None = None) -> Found:
        """Pack as `run` does; `seconds` is the time of the entire process, and `calls` gets the speed of the call."""
        found = self.run(system, source, count, number, warm_up)
        if "missing" in found:
            return found
        if number:
            self.calls.setdefault(system, []).append(count / found["seconds"])
        return found | {"seconds": found["process_s"]}

    def run_cold(self, system: str, source: Path, count: int, few: Path, number: int) -> Found:
        """Pack as `run_whole` does, with files that are not in the page cache."""
        if not os.access(DROP_CACHES, os.W_OK):
            return {"missing": "not measured: only root can drop the page cache"}
        os.sync()
        DROP_CACHES.write_text("3")
        self.run(system, few, len(list(few.rglob("*.*"))), 0)
        before = disk_read_bytes()
        found = self.run_whole(system, source, count, number)
        read = disk_read_bytes() - before
        if "missing" not in found and read < sum(path.stat().st_size for path in source.rglob("*.*")):
            return {"missing": "not measured: the source is in memory"}
        return found

    def checked(self, system: str, found: Found) -> Found:
        """Return the results of a system; only other packages may fail."""
        if "missing" in found and system not in PEERS:
            raise RuntimeError(f"{system}: {found['missing']}")
        return found


def disk_read_bytes() -> int:
    """Return the bytes that all programs have read from all disks."""
    counters = psutil.disk_io_counters()
    return counters.read_bytes if counters else 0


def cifar(bench: PackingBench) -> None:
    """Compare packing the extracted training files with colabkit, plain loops and other packages."""
    source, test = bench.files / "train", bench.files / "test"
    count, names = warm(source), (RAW, "colabkit source", BARE, *PEERS)
    bench.calls = {}
    systems = {name: partial(bench.run_whole, name, source, count, warm_up=test) for name in names}
    middle = bench.compare(f"{count:,} extracted files", systems, (FFCV, BARE), first=0)
    bench.show(f"{count:,} extracted files, without imports", "images/s", bench.calls, (FFCV, BARE))
    for other in PEERS:
        bench.need_ratio("cifar", middle, RAW, other, 2.5 if other == FFCV else 1.0)
    bench.need_ratio("cifar", middle, RAW, BARE, 0.8)


def cold(bench: PackingBench) -> None:
    """Compare packing the extracted training files, which are not in the page cache."""
    source, few = bench.files / "train", bench.folder / "warm-up"
    count = warm(source)
    for folder in sorted(source.iterdir()):
        (few / folder.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(min(folder.iterdir()), few / folder.name)
    bench.calls = {}
    systems = {name: partial(bench.run_cold, name, source, count, few) for name in (RAW, BARE, FFCV)}
    middle = bench.compare(f"{count:,} files that are not in memory", systems, (FFCV, BARE))
    bench.figures["cold, without imports, images/s"] = bench.calls
    bench.need_ratio("cold", middle, RAW, FFCV, 2.5)


def from_zip(bench: PackingBench) -> None:
    """Compare packing all files from a folder with packing them directly from the archive."""
    count = warm(bench.files)
    bench.archive.read_bytes()
    sources = {"extracted": bench.files, "from the zip": bench.archive}
    systems = {name: partial(bench.run, RAW, source, count) for name, source in sources.items()}
    middle = bench.compare(f"{count:,} files, {RAW}", systems, ("extracted",), first=0)
    bench.need_ratio("zip", middle, "from the zip", "extracted", 0.8)


def photos(bench: PackingBench) -> None:
    count = warm(bench.photos)
    ours, *bare = "colabkit raw 256", "plain 256, threads", "plain 256, processes"
    systems = {system: partial(bench.run, system, bench.photos, count) for system in (ours, *bare)}
    middle = bench.compare(f"{count:,} photos to 256 x 256", systems, bare, first=0)
    bench.need_ratio("photos", middle, ours, max(bare, key=middle.__getitem__), 0.9)


def memory(bench: PackingBench) -> None:
    """Measure the peak memory of packing, in the process and its children, from another process."""
    test, train = bench.files / "test", bench.files / "train"
    rows = []
    for name, system, source in (
        ("imports alone", "imports alone", test),
        (f"{warm(test):,} files", RAW, test),
        (f"{warm(train):,} files", RAW, train),
        (f"{warm(bench.files):,} files from the zip", RAW, bench.archive),
        (f"{warm(train):,} files, source", "colabkit source", train),
        (f"{warm(bench.photos):,} photos", "colabkit raw 256", bench.photos),
    ):
        peaks = watched(bench, system, source)
        rows.append((name, *(f"{peaks[kind] / 1e6:,.0f}" for kind in ("rss", "pss", "own"))))
        bench.figures[f"memory, {name}"] = peaks
        if system != "imports alone":
            bench.need(f"peak MB (RSS of all processes), {name}", peaks["rss"] / 1e6, 500, "{:,.0f}", at_most=True)
    few, many = (bench.figures[f"memory, {warm(folder):,} files"]["rss"] for folder in (test, train))
    growth = (many - few) / (warm(train) - warm(test))
    bench.need("peak bytes per additional file (a sample has 3,072)", growth, 1536, "{:,.0f}", at_most=True)
    head = ("", "RSS of all processes", "PSS of all (shared pages once)", "VmHWM of the parent")
    table("Peak memory of packing, MB", head, rows)


def watched(bench: PackingBench, system: str, source: Path) -> dict[str, int]:
    """Run a system; return the sampled peaks of RSS and PSS over all processes, and the parent's peak, in bytes."""
    peaks = {"rss": 0, "pss": 0, "own": 0}
    with tempfile.TemporaryFile("w+", dir=bench.folder) as out, tempfile.TemporaryFile("w+", dir=bench.folder) as err:
        process = psutil.Popen(bench.command(system, source), stdout=out, stderr=err)
        try:
            while process.poll() is None:
                rss, pss = tree_memory(process)
                peaks["rss"], peaks["pss"] = max(peaks["rss"], rss), max(peaks["pss"], pss)
                time.sleep(0.005)
        finally:
            for one in living(process):
                one.kill()
        out.seek(0)
        err.seek(0)
        found = bench.checked(system, last_line(process.returncode, out.read(), err.read()))
    bench.clear()
    return peaks | {"own": found["peak_bytes"]}


def living(process: psutil.Process) -> Iterator[psutil.Process]:
    try:
        yield from [*process.children(recursive=True), process] if process.is_running() else []
    except psutil.NoSuchProcess:
        return


def tree_memory(process: psutil.Process) -> tuple[int, int]:
    """Return the RSS and the PSS of a process and its descendants, in bytes."""
    rss = pss = 0
    for one in living(process):
        try:
            found = one.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        rss += found.rss
        pss += found.pss
    return rss, pss


def opening(bench: PackingBench) -> None:
    path = bench.folder / "big.h5"
    samples = sum(colabkit.pack(bench.archive, path, encoding="raw", progress=False).splits.values())
    ms = [1e3 * child([sys.executable, "-c", OPEN, path], DEADLINE_S)["seconds"] for _ in range(20)]
    title = f"First open in a new process, pack of {samples:,} samples"
    table(title, ("ms, median of 20", "min", "max"), [spread(ms, "{:.1f}")])
    bench.figures["open"] = ms
    bench.need(f"ms to open {samples:,} samples", statistics.median(ms), 20, "{:.1f}", at_most=True)
    path.unlink()


def flips(bench: PackingBench) -> None:
    """Check that flipped bits and other damage are found in small packs of raw images and of file bytes."""
    few = bench.folder / "few"
    chance = random.Random(0)
    for split in ("train", "test"):
        for folder in sorted((bench.files / split).iterdir()):
            (few / split / folder.name).mkdir(parents=True)
            for path in chance.sample(sorted(folder.iterdir()), 20):
                shutil.copy(path, few / split / folder.name)
    for encoding in ("raw", "source"):
        path = bench.folder / f"{encoding}.h5"
        colabkit.pack(few, path, encoding=encoding, progress=False)
        for kind, count in (("flips", 500), ("mutations", 1000)):
            found = damages(path, kind, count)
            outcomes = Counter((what, how.split(":")[0]) for _, what, how in found)
            rows = [(what, how, str(times)) for (what, how), times in sorted(outcomes.items())]
            table(f"{count:,} {kind}, {encoding}", ("where" if kind == "flips" else "what", "found by", "times"), rows)
            for number, what, how in found:
                if how.startswith(MISSED):
                    print(f"{kind} {number} ({what}): {how}")
            missed = sum(how.startswith(MISSED) or (kind == "flips" and how == "equal") for _, _, how in found)
            bench.figures[f"{kind}, {encoding}"] = found
            bench.need(f"{count:,} {kind}, {encoding}: undetected", missed, 0, "{:.0f}", at_most=True)


def damages(path: Path, kind: str, count: int) -> list[tuple[int, str, str]]:
    """Return the outcomes of `count` damaged copies of one kind, opened in child processes.

    After a crash, a new child process continues with the next copy.
    """
    found: list[tuple[int, str, str]] = []
    while len(found) < count:
        first = len(found)
        last = min(count, first + 250)
        words = [sys.executable, str(HERE / "packing_damage.py"), kind, str(path), str(first), str(last)]
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
        found += [tuple(json.loads(line)) for line in done.stdout.splitlines()]
        if done.returncode > 0:
            raise RuntimeError(f"{kind} of {path.name}: {done.stderr}")
        # A negative return code means that a signal killed the child.
        if done.returncode < 0:
            found.append((len(found), "a child", f"CRASH with signal {-done.returncode}"))
    return found


RUNS = {
    "cifar": cifar,
    "cold": cold,
    "zip": from_zip,
    "photos": photos,
    "memory": memory,
    "open": opening,
    "flips": flips,
}

if __name__ == "__main__":
    main()
