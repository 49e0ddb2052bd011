"""Images a second of `Loader` alone, without a model, beside bare loops and other loaders, over the same samples.

    python tests/benchmarks/bench_loader.py --data cifar10-images.zip --photos photos-400.zip --peers-python PATH

Every system runs in a fresh process, in interleaved rounds: an epoch to warm up, then whole shuffled epochs for three
seconds at least, or in turns of a few epochs with another. The consumer only takes batches. Everything is warm in the
page cache. `--peers` runs the other loaders in this Python, `--peers-python` in an environment of their own, made so on
Debian or Ubuntu:

    apt-get update && apt-get install -y g++ pkg-config libopencv-dev libturbojpeg0-dev
    uv venv --python 3.11 peers
    uv pip install --python peers/bin/python torch==2.15.0 torchvision numpy numba opencv-python-headless setuptools \\
        wheel ninja simplejpeg psutil h5py pillow litdata mosaicml-streaming webdataset spdl nvidia-dali-cuda120 \\
        'datasets<5' 'huggingface-hub<1'
    uv pip install --python peers/bin/python --no-build-isolation ffcv==1.0.2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from bench_packing import extract, one_class, table, warm
from loader_systems import ORDER_SAMPLES, PACE
from rounds import machine, verdict

import colabkit

HERE = Path(__file__).parent
DEADLINE_S = 600
FEW = 10_000
"""Samples of an epoch of the systems that make less than 20,000 images a second."""

PHOTO_TIMES, ROW_TIMES = 4, 10
"""How often the photos are repeated, so that an epoch has batches enough."""

TURNS, TURN_EPOCHS = 40, 5
"""Of each process that takes turns with another, in a round."""

FIRST_RUNS = 5
PEERS = {"FFCV", "FFCV crops", "WebDataset", "Streaming", "litdata", "HF datasets", "SPDL", "SPDL crops", "DALI"}
PEERS |= {"DALI crops"}
OURS = "colabkit.Loader"
BARE = "bare index_select loop"
DECODED = "colabkit.Loader, size=256, decoded rows kept"
JPEG_PEERS = ("FFCV jpg", "DALI")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="zip archive of small JPEGs, with train/CLASS/")
    parser.add_argument("--photos", required=True, help="zip archive of photos")
    parser.add_argument("--peers", action="store_true", help="run the other loaders, too, in this Python")
    parser.add_argument("--peers-python", help="run the other loaders, too, in this interpreter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--json", help="file for all figures")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(RUNS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: not of {', '.join(RUNS)}")
    peers_python = options.peers_python or (sys.executable if options.peers else None)
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as name:
        bench = Bench(Path(name), options.data, options.photos, peers_python, options.rounds)
        for part in chosen:
            started = time.perf_counter()
            RUNS[part](bench)
            print(f"\n({part}: {time.perf_counter() - started:.0f} s)", flush=True)
        table("What is needed", ("", "found", "needed", "holds"), bench.verdicts)
    if options.json:
        content = {"machine": machine(), "figures": bench.figures, "needed": bench.verdicts}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
    if bench.failed:
        sys.exit("\n".join(["These must not fail:", *bench.failed]))


@dataclass(frozen=True)
class Row:
    """A row of a table: a system, the data it reads, and how many samples these are."""

    system: str
    source: Path
    samples: int


@dataclass
class Bench:
    """The folder of the benchmark, the data in it, made when first asked for, and what was found and what failed."""

    folder: Path
    data: str
    photos: str
    peers_python: str | None
    rounds: int
    figures: dict[str, Any] = field(default_factory=dict)
    verdicts: list[tuple[str, str, str, str]] = field(default_factory=list)
    broken: dict[Path, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def files(self) -> Path:
        """Return the small images, one folder a class."""
        target = self.folder / "files"
        if not target.is_dir():
            extract(self.data, target)
        return target / "train"

    def few_files(self) -> Path:
        """Return the first of the small images of each class."""
        target = self.folder / "few"
        if not target.is_dir():
            classes = sorted(self.files().iterdir())
            for folder in classes:
                link(islice(sorted(folder.iterdir()), FEW // len(classes)), target / folder.name, 1)
        return target

    def photo_files(self, times: int) -> Path:
        """Return the photos, each as many times as told."""
        plain, target = self.folder / "photos", self.folder / f"photos-{times}"
        if not plain.is_dir():
            one_class(self.photos, plain)
        if not target.is_dir():
            for folder in sorted(plain.iterdir()):
                link(sorted(folder.iterdir()), target / folder.name, times)
        return target

    def pack(self, source: Path, size: int | None = None, encoding: str = "raw") -> Path:
        """Return a pack of images."""
        target = self.folder / f"{source.name}-{encoding}-{size}.h5"
        if not target.exists():
            colabkit.pack(source, target, size=size, encoding=encoding, labels="auto", progress=False)
        target.read_bytes()
        return target

    def written(self, writer: str, source: Path, script: str = "loader_systems.py") -> Path:
        """Return what a peer's writer makes of a source; if it fails, `broken` has the reason."""
        target = self.folder / f"{source.stem}-{writer.replace(' ', '-')}" / "data"
        if self.peers_python is None or target.exists() or target in self.broken:
            return target
        target.parent.mkdir()
        action = ["write"] if script == "loader_systems.py" else []
        found = child(self.peers_python, script, *action, writer, str(source), str(target))
        if "missing" in found:
            self.broken[target] = found["missing"]
        elif target.is_dir():
            warm(target)
        else:
            target.read_bytes()
        return target

    def run(self, action: str, row: Row, *more: str) -> dict[str, Any]:
        """Run a system in a fresh process and return what it printed, or why there is nothing."""
        is_peer = row.system in PEERS
        python = self.peers_python if is_peer else sys.executable
        if python is None:
            return {"missing": "not run: no --peers"}
        if row.source in self.broken:
            return {"missing": self.broken[row.source]}
        found = child(python, "loader_systems.py", action, row.system, str(row.source), *more)
        if "missing" in found and not is_peer:
            self.failed.append(f"{action}, {row.system}: {found['missing']}")
        return found

    def run_all(self, action: str, row: Row, batch_size: int) -> list[dict[str, Any]]:
        """Run a system in several processes, up to the first that fails."""
        found: list[dict[str, Any]] = []
        while len(found) < FIRST_RUNS and not (found and "missing" in found[-1]):
            found.append(self.run(action, row, str(batch_size)))
        return found

    def need(self, what: str, found: float | None, needed: float, form: str, at_most: bool = False) -> None:
        """Note something that is needed, and whether it holds; None is not measured."""
        self.verdicts.append(verdict(what, found, needed, form, at_most))

    def need_ratio(self, title: str, middle: Mapping[str, float], name: str, other: str | None, needed: float) -> None:
        """Note how many times as fast as another a row has to be."""
        ratio = middle[name] / middle[other] if name in middle and other in middle else None
        self.need(f"{title}: {name}, times {other or 'the better of FFCV jpg and DALI'}", ratio, needed, "{:.2f}")


def link(files: Iterable[Path], folder: Path, times: int) -> None:
    """Make hard links to files, as many to each as told."""
    folder.mkdir(parents=True)
    for path in files:
        for number in range(times):
            os.link(path, folder / f"{number}-{path.name}")


def child(python: str, script: str, *words: str) -> dict[str, Any]:
    """Run a script in a fresh process and return the JSON of its last line, or why there is none."""
    os.sync()  # what is written back of earlier runs is none of this one's work
    command = [python, str(HERE / script), *words]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return {"missing": f"failed: no end within {DEADLINE_S} s"}
    lines = done.stdout.strip().splitlines()
    if not done.returncode and lines and lines[-1].startswith("{"):
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return {"missing": f"failed with {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"}


def compare(
    bench: Bench,
    title: str,
    rows: Mapping[str, Row],
    batch_size: int,
    base: Sequence[str],
    note: str = "",
    often: Sequence[str] = (),
) -> dict[str, float]:
    """Run systems in interleaved rounds, print a table and return the medians of their images a second.

    Those in `often` run three times in each round: gathers of small rows differ by half from process to process.
    """
    missing: dict[str, str] = {}
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(bench.rounds):
        for name in (*rows, *often, *often):
            row = rows[name]
            if name in missing:
                continue
            found = bench.run("epochs", row, str(batch_size))
            if "missing" in found:
                missing[name] = found["missing"]
                continue
            served = found["samples"] / found["epochs"]
            assert abs(served / row.samples - 1) < 0.02, (name, served, row.samples)  # some repeat or leave out a few
            rates[name].append(found["samples"] / found["seconds"])
    middle = {name: statistics.median(values) for name, values in rates.items() if values and name not in missing}
    lines = []
    for name, values in rates.items():
        if name in missing:
            lines.append((name, missing[name], "", "", *[""] * len(base)))
            continue
        ratios = [f"{middle[name] / middle[other]:.3g}" if other in middle else "" for other in base]
        lines.append((name, *(f"{value:,.0f}" for value in (middle[name], min(values), max(values))), *ratios))
    head = ("", "images/s, median", "min", "max", *(f"times {other}" for other in base))
    table(f"{title}, batch {batch_size}, shuffled; {bench.rounds} rounds", head, lines)
    if note:
        print(f"({note})", flush=True)
    bench.figures[title] = {"rates": rates, "missing": missing}
    return middle


def cifar(bench: Bench) -> None:
    """Small raw rows, and the same images as the others keep them."""
    files, few = bench.files(), bench.few_files()
    many, some = warm(files), warm(few)
    packed, few_packed = bench.pack(files), bench.pack(few)
    packing = "packing_systems.py"
    rows = {
        OURS: Row("colabkit", packed, many),
        BARE: Row("bare", packed, many),
        "FFCV": Row("FFCV", bench.written("beton rows", packed), many),
        "TensorDataset + DataLoader": Row("tensors", packed, many),
        "SPDL, 2 threads, rows of the pack": Row("SPDL", packed, many),
        "DALI (CPU)": Row("DALI", files, many),
        "HF datasets, arrays": Row("HF datasets", bench.written("arrow", few_packed), some),
        "ImageFolder + DataLoader": Row("ImageFolder", few, some),
        "MosaicML Streaming": Row("Streaming", bench.written("MDS jpeg", few, packing), some),
        "litdata": Row("litdata", bench.written("litdata jpeg", few, packing), some),
        "WebDataset": Row("WebDataset", bench.written("shards", few), some),
        "h5py a sample + DataLoader": Row("h5py", few_packed, some),
    }
    title = f"{many:,} images 32x32x3"
    note = f"2 workers where there are any; from HF datasets on epochs have {some:,} samples; those of files hold JPEGs"
    often = (OURS, BARE, "FFCV")
    middle = compare(bench, title, rows, 512, (OURS, "FFCV"), note, often)
    for other, needed in (
        ("FFCV", 2),
        ("TensorDataset + DataLoader", 10),
        ("ImageFolder + DataLoader", 100),
        ("WebDataset", 100),
        ("MosaicML Streaming", 100),
        ("litdata", 100),
    ):
        bench.need_ratio("cifar", middle, OURS, other, needed)


def bare(bench: Bench) -> None:
    """Small raw rows beside a bare loop: processes of both live side by side and take turns of some 50 ms.

    The two are too near each other to be told apart over minutes, in which a shared machine's speed changes by half.
    """
    files = bench.files()
    packed, count = bench.pack(files), warm(files)
    rates: dict[str, list[float]] = {OURS: [], BARE: []}
    for _ in range(bench.rounds):
        for name, seconds in in_turns({OURS: "colabkit", BARE: "bare"}, packed, 512).items():
            rates[name] += [TURN_EPOCHS * count / each for each in seconds]
    middle = {name: statistics.median(values) for name, values in rates.items()}
    lines = [
        (name, *(f"{value:,.0f}" for value in (middle[name], min(values), max(values))))
        for name, values in rates.items()
    ]
    about = f"{bench.rounds} starts of both, {TURNS} turns of {TURN_EPOCHS} epochs each"
    table(f"{count:,} images 32x32x3, batch 512, shuffled; {about}", ("", "images/s, median", "min", "max"), lines)
    bench.figures["bare"] = rates
    bench.need_ratio("bare", middle, OURS, BARE, 0.85)


def in_turns(systems: Mapping[str, str], source: Path, batch_size: int) -> dict[str, list[float]]:
    """Return the seconds of each system's turns; each has a process of its own, and sleeps when it is not its turn."""
    os.sync()
    with ExitStack() as living:
        running = {}
        for name, system in systems.items():
            command = [sys.executable, str(HERE / "loader_systems.py"), "turns", system, str(source), str(batch_size)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            running[name] = living.enter_context(process)
            living.callback(process.communicate)
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(1 + TURNS):  # in the first one the processes may still be starting
            for name, process in running.items():
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(f"{TURN_EPOCHS}\n")
                process.stdin.flush()
                seconds[name].append(float(process.stdout.readline()))
        return {name: values[1:] for name, values in seconds.items()}


def rows_224(bench: Bench) -> None:
    """Rows of 150,528 bytes, beside a copy of blocks into one buffer, and into two, as batches that users hold need."""
    packed = bench.pack(bench.photo_files(ROW_TIMES), 224)
    count = len(colabkit.open_pack(packed)["train"])
    rows = {
        OURS: Row("colabkit", packed, count),
        "plain copy, in order": Row("copy", packed, count),
        "the same, two buffers in turns": Row("copy in turns", packed, count),
    }
    middle = compare(bench, f"{count:,} rows 224x224x3", rows, 256, [*rows][1:])
    bench.need_ratio("rows", middle, OURS, "plain copy, in order", 0.9)


def photos(bench: Bench) -> None:
    """RandomResizedCrop and flip from raw rows."""
    packed = bench.pack(bench.photo_files(PHOTO_TIMES), 256)
    count = len(colabkit.open_pack(packed)["train"])
    rows = {
        OURS: Row("colabkit crops", packed, count),
        "FFCV raw": Row("FFCV crops", bench.written("beton rows", packed), count),
    }
    title = f"{count:,} photos, RandomResizedCrop 224 + flip from raw 256"
    middle = compare(bench, title, rows, 128, ("FFCV raw",))
    bench.need_ratio("photos", middle, OURS, "FFCV raw", 1.4)


def jpeg(bench: Bench) -> None:
    """The same from JPEG files."""
    files = bench.photo_files(PHOTO_TIMES)
    rows = jpeg_rows(bench, OURS, "colabkit crops")
    count = rows[OURS].samples
    rows |= {
        "SPDL, 2 threads, simplejpeg": Row("SPDL crops", files, count),
        "ImageFolder + DataLoader": Row("ImageFolder crops", files, count),
    }
    beton = rows["FFCV jpg"].source
    sizes = [sum(path.stat().st_size for path in files.rglob("*.*")) / 1e6]
    sizes += [beton.stat().st_size / 1e6] if beton.exists() else []
    sizes_mb = " and ".join(f"{size:,.0f}" for size in sizes)
    note = f"FFCV encodes anew, by its default of quality 90; MB of the files and of FFCV's: {sizes_mb}"
    title = f"{count:,} photos, RandomResizedCrop 224 + flip from JPEG"
    middle = compare(bench, title, rows, 128, JPEG_PEERS, note)
    bench.need_ratio("jpeg", middle, OURS, best(middle), 1.15)


def decoded(bench: Bench) -> None:
    """The same from the second epoch on, when the decoded rows are kept."""
    rows = jpeg_rows(bench, DECODED, "colabkit decoded")
    title = f"{rows[DECODED].samples:,} photos, RandomResizedCrop 224 + flip, second epoch on"
    middle = compare(bench, title, rows, 128, JPEG_PEERS)
    bench.need_ratio("decoded", middle, DECODED, best(middle), 4)


def jpeg_rows(bench: Bench, ours: str, system: str) -> dict[str, Row]:
    files = bench.photo_files(PHOTO_TIMES)
    count = warm(files)
    return {
        ours: Row(system, bench.pack(files, encoding="source"), count),
        "FFCV jpg": Row("FFCV crops", bench.written("beton jpg", files), count),
        "DALI": Row("DALI crops", files, count),
    }


def best(middle: Mapping[str, float]) -> str | None:
    """Return the faster of the peers that read JPEG; None unless both ran."""
    return max(JPEG_PEERS, key=middle.__getitem__) if all(name in middle for name in JPEG_PEERS) else None


def first(bench: Bench) -> None:
    """Seconds to the first batch of small raw rows."""
    files = bench.files()
    count = warm(files)
    packed = bench.pack(files)
    rows = {
        OURS: Row("colabkit", packed, count),
        "FFCV": Row("FFCV", bench.written("beton rows", packed), count),
    }
    middle, lines = {}, []
    for name, row in rows.items():
        found = bench.run_all("first", row, 512)
        if "missing" in found[-1]:
            lines.append((name, found[-1]["missing"], "", ""))
            continue
        values = [one["seconds"] * 1e3 for one in found]
        bench.figures[f"first, {name}"] = values
        middle[name] = statistics.median(values)
        lines.append((name, *(f"{value:,.1f}" for value in (middle[name], min(values), max(values)))))
    head = ("", f"ms, median of {FIRST_RUNS} processes", "min", "max")
    table(f"From making the loader to its first batch, {count:,} images 32x32x3", head, lines)
    bench.need("first: ms to the first batch", middle.get(OURS), 50, "{:,.1f}", at_most=True)
    sooner = middle["FFCV"] / middle[OURS] if len(middle) == 2 else None
    bench.need("first: times sooner than FFCV", sooner, 20, "{:,.1f}")


def worker(bench: Bench) -> None:
    """CPU of the loader's threads at a slow consumer's pace."""
    packed = bench.pack(bench.photo_files(ROW_TIMES), 224)
    title = f"CPU of the loader's threads at {PACE:,} images/s of 224x224x3, share of a core"
    middle = repeated(bench, "worker", title, packed, 128, {"cpu_share": 100, "own_share": 100}, "%")
    bench.need("worker: % of a core", middle.get("cpu_share"), 5, "{:.2f}", at_most=True)


def order(bench: Bench) -> None:
    """The first batch of 10^9 samples, and the first after resuming in the middle."""
    title = f"A shuffled order of {ORDER_SAMPLES:,} samples, to the first batch"
    middle = repeated(bench, "order", title, bench.folder / "none", 512, {"first_s": 1e3, "middle_s": 1e3}, "ms")
    bench.need("order: ms to the first batch", middle.get("first_s"), 100, "{:.1f}", at_most=True)
    bench.need("order: ms to resume in the middle", middle.get("middle_s"), 50, "{:.1f}", at_most=True)


def meters(bench: Bench) -> None:
    """What the loader's meters take of an epoch of small raw rows."""
    packed = bench.pack(bench.files())
    title = "Share of an epoch of small rows that the meters take: calls times the cost of one"
    middle = repeated(bench, "meters", title, packed, 512, {"share": 100}, "%")
    bench.need("meters: % of an epoch", middle.get("share"), 1, "{:.2f}", at_most=True)


def repeated(
    bench: Bench, action: str, title: str, source: Path, batch_size: int, scales: Mapping[str, float], unit: str
) -> dict[str, float]:
    """Run an action of colabkit alone in several processes, print a table and return the medians."""
    found = bench.run_all(action, Row("colabkit", source, 0), batch_size)
    bench.figures[action] = found
    if "missing" in found[-1]:
        table(title, ("", unit), [("colabkit", found[-1]["missing"])])
        return {}
    values = {name: [one[name] * scale for one in found] for name, scale in scales.items()}
    middle = {name: statistics.median(some) for name, some in values.items()}
    lines = [
        (name, *(f"{value:,.2f}" for value in (middle[name], min(some), max(some)))) for name, some in values.items()
    ]
    table(title, ("", f"{unit}, median of {FIRST_RUNS} processes", "min", "max"), lines)
    return middle


RUNS = {
    "cifar": cifar,
    "bare": bare,
    "rows": rows_224,
    "photos": photos,
    "jpeg": jpeg,
    "decoded": decoded,
    "first": first,
    "worker": worker,
    "order": order,
    "meters": meters,
}

if __name__ == "__main__":
    main()
