"""How fast and how safely `stage()` and `prepare()` bring data near, on a slow drive, beside cp and others.

    python tests/benchmarks/bench_staging.py --data cifar10-images.zip

The slow drive is a real FUSE mount (tests/slow_drive.py) that gives each open and listing a latency, all reads one
bandwidth, and works on so many requests at once. It is mounted anew for every run, so that nothing is cached. Bare
threads know all paths beforehand and write nothing; their best number of threads is searched from 1 to 128. Needs root
or `fusermount3`, `mfusepy`, and, to be compared with, `rsync` and `rclone`. `--parts` runs some of the parts only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

from far_mounts import FuseMount, wait_for
from rounds import machine

import colabkit
from colabkit.storage.sources.engine import BLOCK_BYTES
from colabkit.storage.sources.items import STAGE_SEAL

PARTS = ("small", "big", "local", "memory", "again", "prepare", "kill")
SWEEP = (1, 2, 4, 8, 16, 32, 64, 128)
BANDWIDTH = 100e6
FSTYPE = "fuse.drive"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="samples:digits", help="zip archive of small files")
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--big-mb", type=int, default=500)
    parser.add_argument("--settings", default="10/16,40/16,100/64", help="latency in ms / requests at once, ...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    settings = [tuple(map(float, text.split("/"))) for text in options.settings.split(",")]
    parts = options.parts.split(",")
    with tempfile.TemporaryDirectory(prefix="bench-staging-") as name:
        place = Place(Path(name))
        os.environ["COLABKIT_NEAR"] = str(place.near)
        os.environ["XDG_CACHE_HOME"] = str(place.folder / "cache")
        whole = colabkit.stage(options.data, place.folder / "whole", progress=False).path
        place.fill(whole, options.files, options.big_mb * 10**6)
        print(f"{machine()}\n{len(place.paths):,} files, {place.small_bytes:,} bytes; a file of {options.big_mb} MB")
        figures: dict[str, object] = {}
        for part in parts:
            started = time.perf_counter()
            figures[part] = RUNS[part](place, whole, settings, options)
            print(f"({part}: {time.perf_counter() - started:.0f} s)", flush=True)
        shutil.rmtree(place.tmpfs, ignore_errors=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": machine(), "figures": figures}, indent=1) + "\n")


class Place:
    """The folders of the benchmark: what lies on the drive, where it is mounted, and where copies go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.point = folder / "drive"
        self.near = folder / "near"
        self.targets = 0
        self.tmpfs = Path("/dev/shm") / folder.name

    def fill(self, whole: Path, files: int, big_bytes: int) -> None:
        """Put some of the small files, class folder by class folder, and one big file on the drive."""
        inner = next((folder for folder in (whole / "train", whole / "digits") if folder.is_dir()), whole)
        folders = sorted(folder for folder in inner.iterdir() if folder.is_dir())
        for folder in folders:
            target = self.root / "small" / folder.name
            target.mkdir(parents=True)
            for file in sorted(folder.iterdir())[: files // len(folders)]:
                shutil.copy(file, target)
        found = sorted(path for path in (self.root / "small").rglob("*") if path.is_file())
        self.paths = [str(path.relative_to(self.root)) for path in found]
        self.small_bytes = sum(path.stat().st_size for path in found)
        with (self.root / "big.bin").open("wb") as file:
            for _ in range(0, big_bytes, 10**7):
                file.write(random.randbytes(min(10**7, big_bytes)))

    @contextmanager
    def drive(self, latency_ms: float, at_once: float, bandwidth: float = BANDWIDTH) -> Iterator[FuseMount]:
        """Mount the slow drive, with nothing cached."""
        latency_s = latency_ms / 1e3
        with FuseMount(
            self.point,
            self.root,
            FSTYPE,
            at_once=int(at_once),
            open_s=latency_s,
            list_s=latency_s,
            read_s=0.0,
            bandwidth=bandwidth,
            attr_s=60.0,
            direct_io=False,
        ) as mount:
            yield mount

    def target(self) -> Path:
        """Return a new path for a copy on disk."""
        self.targets += 1
        return self.folder / "targets" / str(self.targets)

    def tmpfs_target(self) -> Path:
        """Return a new path for a copy in tmpfs, which is where stage() brings data if it fits."""
        self.targets += 1
        return self.tmpfs / str(self.targets)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def command(*words: object) -> None:
    """Run a program to its end."""
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def bare(point: Path, paths: list[str], threads: int) -> None:
    """Read files by a thread pool, as one would write it by hand; what they hold is dropped."""

    def read(path: str) -> int:
        with open(os.path.join(point, path), "rb", buffering=0) as file:
            return len(file.read())

    with ThreadPoolExecutor(threads) as pool:
        sum(pool.map(read, paths))


def bare_ranges(path: Path, threads: int) -> None:
    """Read one file by a thread pool, each thread a range of 4 MiB at a time."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(threads) as pool:
            offsets = range(0, os.fstat(fd).st_size, BLOCK_BYTES)
            sum(len(block) for block in pool.map(lambda offset: os.pread(fd, BLOCK_BYTES, offset), offsets))
    finally:
        os.close(fd)


def table(title: str, seconds: Mapping[str, list[float]], own: str, notes: Mapping[str, float]) -> dict[str, object]:
    """Print medians and spread, and how our own speed compares with each; return all."""
    print(f"\n{title}\n{'':<28}{'median s':>10}{'min':>9}{'max':>9}  speed of stage()")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        ratio = middle[name] / middle[own]
        needed = f" (needed {notes[name]:g})" if name in notes else ""
        verdict = "" if name not in notes or ratio >= notes[name] else "  FALLS SHORT"
        print(f"{name:<28}{middle[name]:>10.3f}{min(values):>9.3f}{max(values):>9.3f}  {ratio:.3f}{needed}{verdict}")
    return {name: list(values) for name, values in seconds.items()}


def small(place: Place, whole: Path, settings: Iterable[tuple[float, ...]], options: argparse.Namespace) -> object:
    """Small files at each setting."""
    return {
        f"{latency_ms:g}/{at_once:g}": small_at(place, latency_ms, at_once, options.rounds)
        for latency_ms, at_once in settings
    }


def small_at(place: Place, latency_ms: float, at_once: float, rounds: int) -> object:
    """Small files: the best bare threads, stage() without options, rclone, rsync and cp; the slow ones in one round."""
    folder = place.point / "small"

    def on_drive(work: Callable[[], object]) -> float:
        with place.drive(latency_ms, at_once):
            return timed(work)

    def threads(count: int, share: int = 1) -> Callable[[], object]:
        return lambda: bare(place.point, place.paths[::share], count)

    # Few threads take minutes and cannot be the best: they read an eighth of the files, and count eight times.
    shares = {count: 8 if count < at_once / 2 else 1 for count in SWEEP}
    sweep = {count: on_drive(threads(count, share)) * share for count, share in shares.items()}
    shown = ", ".join(f"{count}: {seconds:.2f}" for count, seconds in sweep.items())
    print(f"\nbare threads at {latency_ms:g} ms, {at_once:g} at once, seconds: {shown}")
    best = {f"bare, {count} threads": threads(count) for count in sorted(sweep, key=lambda count: sweep[count])[:3]}
    systems: dict[str, tuple[int, Callable[[], object]]] = {
        "stage()": (rounds, lambda: colabkit.stage(folder, progress=False)),
        **{name: (rounds, run) for name, run in best.items()},
        "rclone copy --transfers 32": (
            rounds,
            lambda: command("rclone", "copy", "--config", "", "--transfers", 32, folder, place.tmpfs_target()),
        ),
        "rsync -a": (1, lambda: command("rsync", "-a", "--mkpath", f"{folder}/", place.tmpfs_target())),
        "cp -r": (1, lambda: command("cp", "-r", folder, made(place.tmpfs_target()))),
    }
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, (own_rounds, run) in systems.items():
            if number < own_rounds and (name.startswith(("stage", "bare")) or shutil.which(name.split()[0])):
                seconds.setdefault(name, []).append(on_drive(run))
            if name == "stage()":
                colabkit.unstage(folder)
    swift = min(best, key=lambda name: statistics.median(seconds[name]))
    shown_seconds = {name: values for name, values in seconds.items() if name not in best or name == swift}
    notes = {swift: 0.9, "rclone copy --transfers 32": 1.0, "rsync -a": 1.0, "cp -r": 8.0}
    title = f"{len(place.paths):,} small files, {latency_ms:g} ms, {at_once:g} requests at once"
    return table(title, shown_seconds, "stage()", notes) | {"sweep": sweep}


def made(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def big(place: Place, whole: Path, settings: Iterable[tuple[float, ...]], options: argparse.Namespace) -> object:
    """One big file at each setting."""
    figures = {}
    file = place.point / "big.bin"
    for latency_ms, at_once in settings:
        systems: dict[str, Callable[[], object]] = {
            "stage()": lambda: colabkit.stage(file, place.target(), progress=False),
            **{f"bare, {count} threads": partial(bare_ranges, file, count) for count in (1, 4, 16)},
        }
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(options.rounds):
            for name, run in systems.items():
                with place.drive(latency_ms, at_once):
                    seconds[name].append(timed(run))
                shutil.rmtree(place.folder / "targets" / str(place.targets), ignore_errors=True)
        swift = min((name for name in seconds if "bare" in name), key=lambda name: statistics.median(seconds[name]))
        title = f"a file of {options.big_mb} MB, {latency_ms:g} ms, {at_once:g} requests at once, 100 MB/s"
        shown = {name: values for name, values in seconds.items() if name in ("stage()", swift)}
        figures[f"{latency_ms:g}/{at_once:g}"] = table(title, shown, "stage()", {swift: 0.95}) | dict(seconds)
    return figures


def local(place: Place, whole: Path, settings: Iterable[tuple[float, ...]], options: argparse.Namespace) -> object:
    """One big file from a local disk to the same disk, beside cp."""
    file = place.root / "big.bin"
    seconds: dict[str, list[float]] = {"stage()": [], "cp": []}
    for _ in range(5 * options.rounds):
        os.sync()  # what is written back of earlier runs is none of this one's work
        seconds["stage()"].append(timed(lambda: colabkit.stage(file, place.target(), progress=False)))
        shutil.rmtree(place.folder / "targets" / str(place.targets))
        os.sync()
        seconds["cp"].append(timed(lambda: command("cp", file, made(place.target()))))
        (place.folder / "targets" / str(place.targets)).unlink()
    return table(f"a file of {options.big_mb} MB, local to local", seconds, "stage()", {"cp": 1.0})


def memory(place: Place, whole: Path, settings: Iterable[tuple[float, ...]], options: argparse.Namespace) -> object:
    """Peak memory of a process that stages small files, one big file, and all files of the data."""
    figures = {}
    code = (
        "import sys, colabkit; colabkit.stage(sys.argv[1], sys.argv[2], progress=False);"
        "print([int(line.split()[1]) // 1024 for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    with place.drive(10, 64, 1e9):
        for name, source in {
            "small files": place.point / "small",
            "a big file": place.point / "big.bin",
            "all, local": whole,
        }.items():
            words = [sys.executable, "-c", code, str(source), str(place.target())]
            figures[name] = int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    print("\npeak memory, MiB (needed: under 300): " + ", ".join(f"{name} {mib}" for name, mib in figures.items()))
    return figures


def again(place: Place, whole: Path, settings: Iterable[tuple[float, ...]], options: argparse.Namespace) -> object:
    """The second stage() of all files."""
    target = place.target()
    first = colabkit.stage(whole, target, progress=False)
    seconds = [timed(lambda: colabkit.stage(whole, target, progress=False)) for _ in range(5)]
    print(
        f"\nsecond stage() of {first.files:,} files: {statistics.median(seconds):.3f} s, {min(seconds):.3f} to "
        f"{max(seconds):.3f} (needed: under 1)"
    )
    return seconds


def prepare(place: Place, whole: Path, settings: Iterable[tuple[float, ...]], options: argparse.Namespace) -> object:
    """prepare() of a pack that an earlier session saved on the drive."""
    saved = place.root / "colabkit"
    with place.drive(40, 16):
        made_here = colabkit.prepare(place.point / "small", save_to=place.point / "colabkit", progress=False)
    print(f"\n{made_here.report}")
    seconds = []
    for _ in range(options.rounds):
        shutil.rmtree(place.near)
        with place.drive(40, 16, 20e6):
            seconds.append(
                timed(lambda: colabkit.prepare(place.point / "small", save_to=place.point / "colabkit", progress=False))
            )
    size = sum(file.stat().st_size for file in saved.glob("*.h5"))
    limit = size / 20e6 + 2
    print(
        f"prepare() of a saved pack of {size:,} bytes at 20 MB/s, 40 ms: {statistics.median(seconds):.2f} s, "
        f"{min(seconds):.2f} to {max(seconds):.2f} (needed: {limit:.2f})"
    )
    return {"seconds": seconds, "bytes": size, "limit": limit}


def kill(place: Place, whole: Path, settings: Iterable[tuple[float, ...]], options: argparse.Namespace) -> object:
    """Kill stage() at random moments, start it again, compare all bytes, and count what was copied twice."""
    code = "import sys, colabkit; colabkit.stage(sys.argv[1], sys.argv[2], progress=False)"
    twice = []
    for number in range(options.kills):
        name = ("small", "small", "small", "big.bin")[number % 4]
        source, target = place.point / name, place.target()
        words = [sys.executable, "-c", code, str(source), str(target)]
        with place.drive(10, 16, 200e6) as drive:
            child = subprocess.Popen(words)
            wait_for(lambda drive=drive: drive.opened > 0, "the first open")  # type: ignore[misc]
            time.sleep(random.uniform(0.05, 2.0))
            child.send_signal(signal.SIGKILL)
            child.wait()
        whole_files, blocks = kept(place, target, name)
        with place.drive(10, 16, 200e6) as drive:
            subprocess.run(words, check=True)
            opened = set(drive.opened_paths)
            again_bytes = drive.read_bytes
        same(place.root / name, target)
        if name == "small":
            twice.append(len(whole_files & opened))
        else:
            missing = (place.root / name).stat().st_size - blocks * BLOCK_BYTES
            twice.append(max(0, round((again_bytes - missing) / BLOCK_BYTES)) if blocks else 0)
        shutil.rmtree(target)
    print(f"\nkilled at {len(twice)} random moments: right bytes each time; files or blocks copied twice: {twice}")
    print(f"at most {max(twice)} (needed: at most 1)")
    return twice


def kept(place: Place, target: Path, name: str) -> tuple[set[str], int]:
    """Return the files that are whole in the partial, as the drive names them, and the blocks noted there."""
    if target.exists():
        return {f"/{path}" for path in place.paths}, 10**9
    files, blocks = set(), 0
    for folder in target.parent.glob(".colabkit-*kept.partial"):
        blocks = len((folder / "journal").read_text().splitlines()) if (folder / "journal").exists() else 0
        for path in (folder / "data").rglob("*"):
            far = place.root / "small" / path.relative_to(folder / "data")
            if path.is_file() and far.is_file() and path.stat().st_size == far.stat().st_size:
                files.add(f"/small/{path.relative_to(folder / 'data')}")
    return files, blocks


def same(far: Path, near: Path) -> None:
    """Compare all bytes."""
    pairs = [(far, near / far.name)]
    if far.is_dir():
        pairs = [(path, near / path.relative_to(far)) for path in far.rglob("*") if path.is_file()]
        assert sum(path.is_file() and path.name != STAGE_SEAL for path in near.rglob("*")) == len(pairs)
    for one, other in pairs:
        assert one.read_bytes() == other.read_bytes(), other


RUNS = {
    "small": small,
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
