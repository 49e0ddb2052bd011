"""How fast, how lean and how safely `pack()` makes packs, beside bare loops and other writers, on real files.

    python tests/benchmarks/bench_packing.py --data cifar10-images.zip --photos photos-400.zip --peers-python PATH

Every system runs in a fresh process, in interleaved rounds, after one untimed run over fewer files; times are from
listing the folder to the finished file, without imports. Files are extracted before and warm in the page cache. The
others need an environment of their own, made so on Debian or Ubuntu:

    apt-get update && apt-get install -y g++ pkg-config libopencv-dev libturbojpeg0-dev
    uv venv --python 3.11 peers
    uv pip install --python peers/bin/python torch==2.15.0 torchvision numpy numba opencv-python-headless setuptools \\
        wheel ninja simplejpeg psutil h5py pillow litdata mosaicml-streaming webdataset
    uv pip install --python peers/bin/python --no-build-isolation ffcv==1.0.2

litdata's `optimize()` deletes the folders `data` and `chunks` of the temporary folder, so each system gets a temporary
folder of its own.
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
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rounds import machine, verdict

import colabkit

PARTS = ("cifar", "zip", "photos", "memory", "open", "flips")
HERE = Path(__file__).parent
DEADLINE_S = 1200
BARE = "bare"
FFCV = "FFCV raw"
RAW = "colabkit raw"
PEERS = (FFCV, "litdata raw", "litdata jpeg", "MDS raw", "MDS jpeg", "WebDataset jpeg")
OPEN = """
import sys, time, colabkit, h5py, torch
open_pack = colabkit.open_pack
started = time.perf_counter()
dataset = open_pack(sys.argv[1])["train"]
print(len(dataset), time.perf_counter() - started)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="zip archive of small JPEGs, with train/CLASS/ and test/CLASS/")
    parser.add_argument("--photos", required=True, help="zip archive of photos")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has the others installed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-packing-") as name:
        place = Place(Path(name), Path(options.data).absolute(), options.peers_python, options.rounds)
        extract(options.data, place.files)
        one_class(options.photos, place.photos)
        for part in options.only.split(","):
            started = time.perf_counter()
            RUNS[part](place)
            print(f"\n({part}: {time.perf_counter() - started:.0f} s)", flush=True)
        table("What is needed", ("", "found", "needed", ""), place.verdicts)
    if options.json:
        content = {"machine": machine(), "figures": place.figures, "needed": place.verdicts}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")


@dataclass
class Place:
    """The folders of the benchmark, and what was found."""

    folder: Path
    archive: Path
    peers_python: str
    rounds: int
    figures: dict[str, Any] = field(default_factory=dict)
    verdicts: list[tuple[str, str, str, str]] = field(default_factory=list)
    targets: int = 0

    @property
    def files(self) -> Path:
        return self.folder / "files"

    @property
    def photos(self) -> Path:
        return self.folder / "photos"

    def target(self) -> Path:
        """Return a new path in a folder of its own, which `clear` removes."""
        self.targets += 1
        folder = self.folder / "targets" / str(self.targets)
        folder.mkdir(parents=True)
        return folder / "out.h5"

    def clear(self) -> None:
        shutil.rmtree(self.folder / "targets", ignore_errors=True)

    def command(self, system: str, source: Path) -> list[str]:
        python = self.peers_python if system in PEERS else sys.executable
        return [python, str(HERE / "packing_systems.py"), system, str(source), str(self.target())]

    def need(self, what: str, found: float, needed: float, form: str, at_most: bool = False) -> None:
        """Note something that is needed, and whether it holds."""
        self.verdicts.append(verdict(what, found, needed, form, at_most))


def extract(archive: str, folder: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)


def one_class(archive: str, folder: Path) -> None:
    """Extract photos as a tree with one folder a class: their own folders, or one for all."""
    with zipfile.ZipFile(archive) as opened:
        is_flat = all("/" not in name for name in opened.namelist())
    extract(archive, folder / "all" if is_flat else folder)


def warm(folder: Path) -> int:
    """Read all files, so that they are in the page cache, and return how many there are."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        path.read_bytes()
    return len(paths)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = "|-" + "-|-".join("-" * width for width in widths) + "-|"
    print(f"\n{title}\n", *(f"{line} |" for line in shown[:1]), rule, *(f"{line} |" for line in shown[1:]), sep="\n")
    sys.stdout.flush()


def run(place: Place, system: str, source: Path) -> dict[str, Any]:
    """Run a system in a fresh process and return what it printed; its output is removed."""
    os.sync()  # what is written back of earlier runs is none of this one's work
    done = subprocess.run(
        place.command(system, source), check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    place.clear()
    return result(system, done.returncode, done.stdout, done.stderr)


def result(system: str, code: int, out: str, err: str) -> dict[str, Any]:
    """Return what a system printed; of another writer that fails or is not installed the reason."""
    lines = out.strip().splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if not code and lines else {}
    if not found:
        found["missing"] = f"failed with {code}: {(err.strip().splitlines() or ['no message'])[-1]}"
    if "missing" in found and system not in PEERS:
        raise RuntimeError(f"{system}: {found['missing']}\n{err}")
    return found


def compare(
    place: Place,
    title: str,
    sources: Mapping[str, tuple[str, Path]],
    count: int,
    warm_up: Path | None,
    base: Sequence[str],
) -> dict[str, float]:
    """Run systems in interleaved rounds, print a table and return the medians of their samples a second.

    Args:
        place: of the benchmark.
        title: of the table.
        sources: system and source by the name of a row.
        count: the samples that each has to make.
        warm_up: what each is run on before; None for its own source.
        base: rows that the others are compared with.
    """
    missing: dict[str, str] = {}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sources}
    for number in range(place.rounds + 1):
        for name, (system, source) in sources.items():
            if name in missing:
                continue
            found = run(place, system, source if number or warm_up is None else warm_up)
            if "missing" in found:
                missing[name] = found["missing"]
            elif number:
                assert found["samples"] == count, (name, found, count)
                runs[name].append(found)
    rates = {name: [one["samples"] / one["seconds"] for one in some] for name, some in runs.items() if some}
    middle = {name: statistics.median(values) for name, values in rates.items()}
    rows = []
    for name in sources:
        if name in missing:
            rows.append((name, missing[name], "", "", "", *[""] * len(base)))
            continue
        cpu = statistics.median(one["cpu_seconds"] / one["samples"] * 1e6 for one in runs[name])
        ratios = [f"{middle[name] / middle[other]:.2f}" if other in middle else "" for other in base]
        values = rates[name]
        rows.append(
            (name, f"{middle[name]:,.0f}", f"{min(values):,.0f}", f"{max(values):,.0f}", f"{cpu:,.0f}", *ratios)
        )
    head = ("", "images/s, median", "min", "max", "CPU us an image", *(f"times {other}" for other in base))
    table(f"{title}; {place.rounds} rounds", head, rows)
    place.figures[title] = {"rates": rates, "missing": missing}
    return middle


def cifar(place: Place) -> None:
    """The training files, extracted, to a raw pack."""
    source = place.files / "train"
    count = warm(source)
    systems = (RAW, "colabkit source", BARE, *PEERS)
    middle = compare(
        place,
        f"{count:,} extracted files",
        {system: (system, source) for system in systems},
        count,
        place.files / "test",
        (FFCV, BARE),
    )
    for other in PEERS:
        if other in middle:
            needed = 4.0 if other == FFCV else 1.0
            place.need(f"{RAW}, times {other}", middle[RAW] / middle[other], needed, "{:.2f}")
        else:
            place.verdicts.append((f"{RAW}, times {other}", "not measured", "", ""))
    place.need(f"{RAW}, share of the bare loop", middle[RAW] / middle[BARE], 0.8, "{:.2f}")


def from_zip(place: Place) -> None:
    """All files, extracted and straight out of the archive."""
    count = warm(place.files)
    place.archive.read_bytes()
    sources = {"extracted": (RAW, place.files), "out of the zip": (RAW, place.archive)}
    middle = compare(place, f"{count:,} files, {RAW}", sources, count, None, ("extracted",))
    share = middle["out of the zip"] / middle["extracted"]
    place.need("out of the zip, share of extracted", share, 0.8, "{:.2f}")


def photos(place: Place) -> None:
    """The photos to raw 256."""
    count = warm(place.photos)
    systems = ("colabkit raw 256", "bare 256, threads", "bare 256, processes")
    sources = {system: (system, place.photos) for system in systems}
    middle = compare(place, f"{count:,} photos to 256 x 256", sources, count, None, systems[1:])
    best = max(middle[system] for system in systems[1:])
    place.need("photos, share of the best bare loop", middle[systems[0]] / best, 0.9, "{:.2f}")


def memory(place: Place) -> None:
    """Peak memory of packing: the process and its children, watched from outside."""
    test, train = place.files / "test", place.files / "train"
    rows = []
    for name, system, source in (
        ("imports alone", "imports alone", test),
        (f"{warm(test):,} files", RAW, test),
        (f"{warm(train):,} files", RAW, train),
        (f"{warm(place.files):,} files out of the zip", RAW, place.archive),
        (f"{warm(train):,} files, source", "colabkit source", train),
        (f"{warm(place.photos):,} photos", "colabkit raw 256", place.photos),
    ):
        peaks = watched(place, system, source)
        rows.append((name, *(f"{peaks[kind] / 1e6:,.0f}" for kind in ("rss", "pss", "own"))))
        place.figures[f"memory, {name}"] = peaks
        if system != "imports alone":
            place.need(f"peak MB (RSS of all processes), {name}", peaks["rss"] / 1e6, 500, "{:,.0f}", at_most=True)
    few, many = (place.figures[f"memory, {warm(folder):,} files"]["rss"] for folder in (test, train))
    growth = (many - few) / (warm(train) - warm(test))
    place.need("peak bytes a further file (a sample has 3,072)", growth, 1536, "{:,.0f}", at_most=True)
    head = ("", "RSS of all processes", "PSS of all (shared pages once)", "VmHWM of the parent")
    table("Peak memory of packing, MB", head, rows)


def watched(place: Place, system: str, source: Path) -> dict[str, int]:
    """Run a system and return the peaks of its memory in bytes, looked at every few milliseconds."""
    peaks = {"rss": 0, "pss": 0, "own": 0}
    with tempfile.TemporaryFile("w+", dir=place.folder) as out, tempfile.TemporaryFile("w+", dir=place.folder) as err:
        child = psutil.Popen(place.command(system, source), stdout=out, stderr=err)
        try:
            while child.poll() is None:
                rss, pss = tree_memory(child)
                peaks["rss"], peaks["pss"] = max(peaks["rss"], rss), max(peaks["pss"], pss)
                time.sleep(0.005)
        finally:
            for process in living(child):
                process.kill()
        out.seek(0)
        err.seek(0)
        found = result(system, child.returncode, out.read(), err.read())
    place.clear()
    return peaks | {"own": found["peak_bytes"]}


def living(child: psutil.Process) -> Iterator[psutil.Process]:
    try:
        yield from [*child.children(recursive=True), child] if child.is_running() else []
    except psutil.NoSuchProcess:
        return


def tree_memory(child: psutil.Process) -> tuple[int, int]:
    """Return RSS and PSS of a process and its descendants, in bytes."""
    rss = pss = 0
    for process in living(child):
        try:
            found = process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        rss += found.rss
        pss += found.pss
    return rss, pss


def opening(place: Place) -> None:
    """The first open of a big pack in a process."""
    path = place.folder / "big.h5"
    report = colabkit.pack(place.archive, path, encoding="raw", progress=False)
    seconds = []
    for _ in range(20):
        words = [sys.executable, "-c", OPEN, str(path)]
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
        seconds.append(float(done.stdout.split()[1]))
    samples = sum(report.splits.values())
    shown = [f"{value * 1e3:.1f}" for value in (statistics.median(seconds), min(seconds), max(seconds))]
    table(f"First open in a fresh process, pack of {samples:,} samples", ("ms, median of 20", "min", "max"), [shown])
    place.figures["open"] = seconds
    place.need(f"ms to open {samples:,} samples", statistics.median(seconds) * 1e3, 20, "{:.1f}", at_most=True)
    path.unlink()


def flips(place: Place) -> None:
    """Single bits, truncations and mutations of small packs, raw and of the files' own bytes."""
    few = place.folder / "few"
    chance = random.Random(0)
    for split in ("train", "test"):
        for folder in sorted((place.files / split).iterdir()):
            (few / split / folder.name).mkdir(parents=True)
            for path in chance.sample(sorted(folder.iterdir()), 20):
                shutil.copy(path, few / split / folder.name)
    for encoding in ("raw", "source"):
        path = place.folder / f"{encoding}.h5"
        colabkit.pack(few, path, encoding=encoding, progress=False)
        for kind, count in (("flips", 500), ("mutations", 1000)):
            found = damages(path, kind, count)
            outcomes = Counter((what, how.split(":")[0]) for _, what, how in found)
            rows = [(what, how, str(times)) for (what, how), times in sorted(outcomes.items())]
            table(f"{count:,} {kind}, {encoding}", ("where" if kind == "flips" else "what", "found by", "times"), rows)
            for number, what, how in found:
                if how.startswith(("SILENT", "UNTYPED", "CRASH")):
                    print(f"{kind} {number} ({what}): {how}")
            missed = sum(how.startswith(("SILENT", "UNTYPED", "CRASH")) for _, _, how in found)
            if kind == "flips":
                missed += sum(how == "equal" for _, _, how in found)
            place.figures[f"{kind}, {encoding}"] = found
            place.need(f"{count:,} {kind}, {encoding}: not found", missed, 0, "{:.0f}", at_most=True)


def damages(path: Path, kind: str, count: int) -> list[tuple[int, str, str]]:
    """Run all damages in child processes; a child that dies is followed by one that goes on behind what killed it."""
    found: list[tuple[int, str, str]] = []
    while len(found) < count:
        first = len(found)
        last = min(count, first + 250)
        words = [sys.executable, str(HERE / "packing_damage.py"), kind, str(path), str(first), str(last)]
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
        found += [tuple(json.loads(line)) for line in done.stdout.splitlines()]
        if done.returncode > 0:
            raise RuntimeError(f"{kind} of {path.name}: {done.stderr}")
        if done.returncode < 0:  # a signal
            found.append((len(found), "a child", f"CRASH with signal {-done.returncode}"))
    return found


RUNS = {"cifar": cifar, "zip": from_zip, "photos": photos, "memory": memory, "open": opening, "flips": flips}

if __name__ == "__main__":
    main()
