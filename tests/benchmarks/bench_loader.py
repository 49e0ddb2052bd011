"""Measure images per second of `Loader` without a model, compared with plain loops and other loaders.

    python tests/benchmarks/bench_loader.py --data cifar10-images.zip --photos photos-400.zip --peers-python PATH

Every system runs in a new process, in interleaved rounds: a warm-up epoch, then complete shuffled epochs for at least
three seconds, or turns of a few epochs that alternate with another system. The consumer ignores the batches. All data
is in the page cache. `--peers` runs the other loaders in this Python, `--peers-python` in a separate environment, which
`tests/benchmarks/install_peers.sh` creates.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from loader_systems import ORDER_SAMPLES, PACE
from rounds import HERE, Bench, Found, child, extract, extract_photos, table, take_turns, warm
from tables import FEWEST_PAIRS, spread

import colabkit

DEADLINE_S = 600
FEW = 10_000
"""Samples per epoch for systems with less than 20,000 images per second."""

PHOTO_TIMES, ROW_TIMES = 4, 10
"""Number of repetitions of the photos in epochs of crops and of rows, so that an epoch has enough batches."""

TURNS, TURN_EPOCHS = 40, 5
"""Turns per round and epochs per turn of a process that alternates with another."""

FIRST_RUNS = 5
PEERS = {"FFCV", "FFCV crops", "WebDataset", "Streaming", "litdata", "HF datasets", "SPDL", "SPDL crops", "DALI"}
PEERS |= {"DALI crops"}
OURS = "colabkit.Loader"
BARE = "plain index_select loop"
DECODED = "colabkit.Loader, size=256, decoded rows cached"
JPEG_PEERS = ("FFCV jpg", "DALI")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="zip archive of small JPEGs, with train/CLASS/; by default generated")
    parser.add_argument("--photos", help="zip archive of photos; by default generated")
    parser.add_argument("--peers", action="store_true", help="also run the other loaders, in this Python")
    parser.add_argument("--peers-python", help="also run the other loaders, with this interpreter")
    LoaderBench.main(parser, RUNS, rounds=FEWEST_PAIRS)


@dataclass(frozen=True)
class Row:
    """A row of a table: a system, its data, and the number of samples."""

    system: str
    source: Path
    samples: int


@dataclass
class LoaderBench(Bench):
    """The benchmark's data, created on first use; `broken` has the reasons why other packages' writers failed."""

    broken: dict[Path, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.options.quick:
            os.environ["BENCH_LEAST_S"] = "0.2"

    @property
    def peers_python(self) -> str | None:
        return self.options.peers_python or (sys.executable if self.options.peers else None)

    def files(self) -> Path:
        """Return the folder of the small images, which has one folder for each class."""
        return extract(self.archive, self.folder / "files") / "train"

    def few_files(self) -> Path:
        """Return a folder with the first small images of each class."""
        target = self.folder / "few"
        if not target.is_dir():
            classes = sorted(self.files().iterdir())
            for folder in classes:
                link(islice(sorted(folder.iterdir()), FEW // len(classes)), target / folder.name, 1)
        return target

    def photo_files(self, times: int) -> Path:
        """Return a folder that contains each photo the given number of times."""
        plain, target = extract_photos(self.photo_archive, self.folder / "photos"), self.folder / f"photos-{times}"
        if not target.is_dir():
            for folder in sorted(plain.iterdir()):
                link(sorted(folder.iterdir()), target / folder.name, times)
        return target

    def pack(self, source: Path, size: int | None = None, encoding: str = "raw") -> Path:
        """Return the path of a pack of images, after reading it into the page cache."""
        target = self.folder / f"{source.name}-{encoding}-{size}.h5"
        if not target.exists():
            colabkit.pack(source, target, size=size, encoding=encoding, labels="auto", progress=False)
        target.read_bytes()
        return target

    def written(self, writer: str, source: Path) -> Path:
        """Return the path of a source in another package's format; if its writer fails, `broken` has the reason."""
        target = self.folder / f"{source.stem}-{writer.replace(' ', '-').replace(',', '')}" / "data"
        if self.peers_python is None or target.exists() or target in self.broken:
            return target
        target.parent.mkdir()
        found = child([self.peers_python, HERE / "packing_systems.py", writer, source, target], DEADLINE_S)
        if "missing" in found:
            self.broken[target] = found["missing"]
        elif target.is_dir():
            warm(target)
        else:
            target.read_bytes()
        return target

    def run(self, action: str, row: Row, batch_size: int, number: int = 1) -> Found:
        """Run a system in a new process and return its output, or the reason why there is none."""
        is_peer = row.system in PEERS
        python = self.peers_python if is_peer else sys.executable
        if python is None:
            return {"missing": "not run: pass --peers or --peers-python"}
        if row.source in self.broken:
            return {"missing": self.broken[row.source]}
        words = [python, HERE / "loader_systems.py", action, row.system, row.source, str(batch_size)]
        found = child(words, DEADLINE_S)
        if "missing" in found and not is_peer:
            self.failed.append(f"{action}, {row.system}: {found['missing']}")
        # Allow a difference of 2%, since some systems repeat or omit a few samples.
        if "epochs" in found:
            assert abs(found["samples"] / found["epochs"] / row.samples - 1) < 0.02, (row, found)
        return found

    def run_often(self, action: str, rows: Mapping[str, Row], batch_size: int) -> dict[str, list[Found]]:
        """Run systems in interleaved rounds, each time in a new process; stop those that fail."""
        found: dict[str, list[Found]] = {name: [] for name in rows}
        for _ in range(1 if self.options.quick else FIRST_RUNS):
            for name, row in rows.items():
                if not (found[name] and "missing" in found[name][-1]):
                    found[name].append(self.run(action, row, batch_size))
        return found

    def compare_rows(
        self,
        title: str,
        rows: Mapping[str, Row],
        batch_size: int,
        base: Sequence[str],
        note: str = "",
        often: Sequence[str] = (),
    ) -> dict[str, float]:
        systems = {name: partial(self.run, "epochs", row, batch_size) for name, row in rows.items()}
        return self.compare(f"{title}, batch {batch_size}, shuffled", systems, base, often=often, note=note)


def link(files: Iterable[Path], folder: Path, times: int) -> None:
    """Create the given number of hard links to each file."""
    folder.mkdir(parents=True)
    for path in files:
        for number in range(times):
            os.link(path, folder / f"{number}-{path.name}")


def cifar(bench: LoaderBench) -> None:
    """Compare loaders on small raw rows, and on the same images in the formats of other packages."""
    files, few = bench.files(), bench.few_files()
    many, some = warm(files), warm(few)
    packed, few_packed = bench.pack(files), bench.pack(few)
    rows = {
        OURS: Row("colabkit", packed, many),
        BARE: Row("bare", packed, many),
        "FFCV": Row("FFCV", bench.written("FFCV rows", packed), many),
        "TensorDataset + DataLoader": Row("tensors", packed, many),
        "SPDL, 2 threads, rows of the pack": Row("SPDL", packed, many),
        "DALI (CPU)": Row("DALI", files, many),
        "HF datasets, arrays": Row("HF datasets", bench.written("arrow", few_packed), some),
        "ImageFolder + DataLoader": Row("ImageFolder", few, some),
        "MosaicML Streaming": Row("Streaming", bench.written("MDS jpeg", few), some),
        "litdata": Row("litdata", bench.written("litdata jpeg", few), some),
        "WebDataset": Row("WebDataset", bench.written("WebDataset jpeg, shuffled", few), some),
        "h5py by sample + DataLoader": Row("h5py", few_packed, some),
    }
    title = f"{many:,} images 32x32x3"
    note = f"2 workers if available; systems from HF datasets on have epochs of {some:,} samples; files are JPEGs"
    often = (OURS, BARE, "FFCV")
    middle = bench.compare_rows(title, rows, 512, (OURS, "FFCV"), note, often)
    for other, needed in (
        ("FFCV", 2),
        ("TensorDataset + DataLoader", 10),
        ("ImageFolder + DataLoader", 100),
        ("WebDataset", 100),
        ("MosaicML Streaming", 100),
        ("litdata", 100),
    ):
        bench.need_ratio("cifar", middle, OURS, other, needed)


def bare(bench: LoaderBench) -> None:
    """Compare `Loader` with a plain loop on small raw rows, in two processes that take turns of about 50 ms.

    Short turns are needed because the speed of a shared machine can change by half within minutes, which would hide the
    small difference between the two.
    """
    files = bench.files()
    packed, count = bench.pack(files), warm(files)
    rates: dict[str, list[float]] = {OURS: [], BARE: []}
    script = [sys.executable, HERE / "loader_systems.py", "turns"]
    commands = {name: [*script, system, packed, "512"] for name, system in ((OURS, "colabkit"), (BARE, "bare"))}
    for _ in range(bench.rounds):
        for name, seconds in take_turns(commands, TURNS, f"{TURN_EPOCHS}").items():
            rates[name] += [TURN_EPOCHS * count / each for each in seconds]
    about = f"{TURNS} turns of {TURN_EPOCHS} epochs for each start of both"
    middle = bench.show(f"{count:,} images 32x32x3, batch 512, shuffled; {about}", "images/s", rates, [BARE])
    bench.need_ratio("bare", middle, OURS, BARE, 0.85)


def rows_224(bench: LoaderBench) -> None:
    """Compare loading rows of 150,528 bytes with plain copies into one buffer, and into two alternating buffers."""
    packed = bench.pack(bench.photo_files(ROW_TIMES), 224)
    count = len(colabkit.open_pack(packed)["train"])
    rows = {
        OURS: Row("colabkit", packed, count),
        "plain copy, in order": Row("copy", packed, count),
        "plain copy, two alternating buffers": Row("copy, alternating buffers", packed, count),
    }
    middle = bench.compare_rows(f"{count:,} rows 224x224x3", rows, 256, [*rows][1:])
    bench.need_ratio("rows", middle, OURS, "plain copy, in order", 0.9)


def photos(bench: LoaderBench) -> None:
    """Compare loaders with RandomResizedCrop and flip, on raw rows."""
    packed = bench.pack(bench.photo_files(PHOTO_TIMES), 256)
    count = len(colabkit.open_pack(packed)["train"])
    rows = {
        OURS: Row("colabkit crops", packed, count),
        "FFCV raw": Row("FFCV crops", bench.written("FFCV rows", packed), count),
    }
    title = f"{count:,} photos, RandomResizedCrop 224 + flip from raw 256"
    middle = bench.compare_rows(title, rows, 128, ("FFCV raw",))
    bench.need_ratio("photos", middle, OURS, "FFCV raw", 1.4)


def jpeg(bench: LoaderBench) -> None:
    """Compare loaders with RandomResizedCrop and flip, on JPEG files."""
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
    note = f"FFCV re-encodes with its default quality of 90; MB of the files and of FFCV's: {sizes_mb}"
    title = f"{count:,} photos, RandomResizedCrop 224 + flip from JPEG"
    middle = bench.compare_rows(title, rows, 128, JPEG_PEERS, note)
    bench.need_ratio("jpeg", middle, OURS, best(middle), 1.15)


def decoded(bench: LoaderBench) -> None:
    """Compare loaders with RandomResizedCrop and flip on JPEG files, with `Loader` reading cached decoded images."""
    rows = jpeg_rows(bench, DECODED, "colabkit decoded")
    title = f"{rows[DECODED].samples:,} photos, RandomResizedCrop 224 + flip, from the second epoch on"
    middle = bench.compare_rows(title, rows, 128, JPEG_PEERS)
    bench.need_ratio("decoded", middle, DECODED, best(middle), 4)


def jpeg_rows(bench: LoaderBench, ours: str, system: str) -> dict[str, Row]:
    files = bench.photo_files(PHOTO_TIMES)
    count = warm(files)
    return {
        ours: Row(system, bench.pack(files, encoding="source"), count),
        "FFCV jpg": Row("FFCV crops", bench.written("FFCV jpg", files), count),
        "DALI": Row("DALI crops", files, count),
    }


def best(middle: Mapping[str, float]) -> str:
    """Return the name of the faster of the two other packages that read JPEG; both names if one did not run."""
    has_both = all(name in middle for name in JPEG_PEERS)
    return max(JPEG_PEERS, key=middle.__getitem__) if has_both else "the better of FFCV jpg and DALI"


def first(bench: LoaderBench) -> None:
    """Measure the time to the first batch of small raw rows."""
    files = bench.files()
    count = warm(files)
    packed = bench.pack(files)
    rows = {
        OURS: Row("colabkit", packed, count),
        "FFCV": Row("FFCV", bench.written("FFCV rows", packed), count),
    }
    found = bench.run_often("first", rows, 512)
    values = {name: [1e3 * one["seconds"] for one in some if "seconds" in one] for name, some in found.items()}
    missing = {name: some[-1]["missing"] for name, some in found.items() if "missing" in some[-1]}
    title = f"Time from making the loader to its first batch, {count:,} images 32x32x3"
    middle = bench.show(title, "ms", values, [OURS], missing)
    bench.need("first: ms to the first batch", middle.get(OURS), 50, "{:,.1f}", at_most=True)
    bench.need_ratio("first: time to the first batch", middle, "FFCV", OURS, 20)


def checks(bench: LoaderBench) -> None:
    """Measure the cost of the first epoch, which checks each sample against its CRC, without a model."""
    for packed, batch_size in ((bench.pack(bench.files()), 512), (bench.pack(bench.photo_files(ROW_TIMES), 224), 128)):
        title = f"Seconds of an epoch of {packed.name}: the first one, and one whose samples are already checked"
        repeated(bench, "checks", title, packed, batch_size, {"first_s": 1, "later_s": 1}, "s")
        found = [one["more_s"] * 1e6 for one in bench.figures["checks"] if "more_s" in one]
        if found:
            print(f"\nThe checks add {statistics.median(found):.2f} us per sample to the first epoch")
        bench.figures[f"checks, {packed.name}"] = bench.figures.pop("checks")


def worker(bench: LoaderBench) -> None:
    packed = bench.pack(bench.photo_files(ROW_TIMES), 224)
    title = f"CPU use of the loader's threads at {PACE:,} images/s of 224x224x3, share of a core"
    middle = repeated(bench, "worker", title, packed, 128, {"cpu_share": 100, "own_share": 100}, "%")
    bench.need("worker: % of a core", middle.get("cpu_share"), 5, "{:.2f}", at_most=True)


def order(bench: LoaderBench) -> None:
    title = f"Time to the first batch of a shuffled order of {ORDER_SAMPLES:,} samples"
    middle = repeated(bench, "order", title, bench.folder / "none", 512, {"first_s": 1e3, "middle_s": 1e3}, "ms")
    bench.need("order: ms to the first batch", middle.get("first_s"), 100, "{:.1f}", at_most=True)
    bench.need("order: ms to resume in the middle", middle.get("middle_s"), 50, "{:.1f}", at_most=True)


def meters(bench: LoaderBench) -> None:
    packed = bench.pack(bench.files())
    title = "Share of an epoch of small rows that the meters take: number of calls times the cost of one call"
    middle = repeated(bench, "meters", title, packed, 512, {"share": 100}, "%")
    bench.need("meters: % of an epoch", middle.get("share"), 1, "{:.2f}", at_most=True)


def repeated(
    bench: LoaderBench, action: str, title: str, source: Path, batch_size: int, scales: Mapping[str, float], unit: str
) -> dict[str, float]:
    """Run an action of colabkit alone in several processes, print a table and return the medians."""
    found = bench.run_often(action, {"colabkit": Row("colabkit", source, 0)}, batch_size)["colabkit"]
    bench.figures[action] = found
    if "missing" in found[-1]:
        table(title, ("", unit), [("colabkit", found[-1]["missing"])])
        return {}
    values = {name: [one[name] * scale for one in found] for name, scale in scales.items()}
    middle = {name: statistics.median(some) for name, some in values.items()}
    lines = [(name, *spread(some, "{:,.2f}")) for name, some in values.items()]
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
    "checks": checks,
    "worker": worker,
    "order": order,
    "meters": meters,
}

if __name__ == "__main__":
    main()
