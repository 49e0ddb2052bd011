"""Helpers for the benchmarks: options, processes, interleaved rounds, results and requirements."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from PIL import Image
from tables import cells_of, lines_of, measured_ratio, text_of_ratio

PACKAGES = ("torch", "torchvision", "numpy", "h5py", "pillow", "simplejpeg")
PEER_PACKAGES = (
    "ffcv",
    "litdata",
    "mosaicml-streaming",
    "webdataset",
    "spdl",
    "nvidia-dali-cuda120",
    "datasets",
    "torch",
)
VERSIONS = """
import importlib.metadata, json
print(json.dumps({found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}))
"""
HERE = Path(__file__).parent
FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/'\"]+/)+")
"""The folders of an absolute path."""

Found: TypeAlias = dict[str, Any]
"""The measurements of a process, or under `missing` the reason why there are none."""


class Medians(dict[str, float]):
    """The medians of systems by name; `rounds` holds the value of each round."""

    def __init__(self, rounds: Mapping[str, Sequence[float]]) -> None:
        super().__init__({name: statistics.median(values) for name, values in rounds.items()})
        self.rounds = rounds


@dataclass
class Bench:
    """A benchmark in several parts: its folder, measurements, requirements and failures.

    `main()` takes the parts by name, as functions of the benchmark. `show()` records comparisons, which `tables.py`
    shows in the documentation; `figures` holds all other measurements.
    """

    folder: Path
    options: argparse.Namespace
    part: str = ""
    comparisons: list[Found] = field(default_factory=list)
    figures: Found = field(default_factory=dict)
    verdicts: list[tuple[str, str, str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return self.options.rounds

    @cached_property
    def archive(self) -> Path:
        """The zip archive of small images in train/CLASS/ and test/CLASS/."""
        if self.options.data:
            return Path(self.options.data).absolute()
        train, test = (400, 100) if self.options.quick else (50_000, 10_000)
        made = write_images(self.folder / "made" / "train", train, (32, 32), 10)
        write_images(self.folder / "made" / "test", test, (32, 32), 10)
        return Path(shutil.make_archive(str(self.folder / "images"), "zip", made.parent))

    @cached_property
    def photo_archive(self) -> Path:
        """The zip archive of photos."""
        if self.options.photos:
            return Path(self.options.photos).absolute()
        made = write_images(self.folder / "made-photos", 40 if self.options.quick else 400, (500, 375), 4)
        return Path(shutil.make_archive(str(self.folder / "made-photos"), "zip", made))

    @classmethod
    def main(
        cls,
        parser: argparse.ArgumentParser,
        runs: Mapping[str, Callable[[Self], object]],
        rounds: int,
        quick: Mapping[str, Any] = {},
    ) -> None:
        """Run the parts named on the command line, print the requirements, and optionally write everything as JSON.

        A part that fails does not stop the others; the benchmark then ends with status 1.

        Args:
            parser: parser with the benchmark's own options.
            runs: the parts by name.
            rounds: default number of rounds.
            quick: with `--quick`, defaults of the benchmark's options; the number of rounds is then 1.
        """
        parser.add_argument("--rounds", type=int, default=rounds)
        parser.add_argument("--quick", action="store_true", help="run one round with little data, to check the script")
        parser.add_argument("--only", default=",".join(runs), help=f"parts to run, of {', '.join(runs)}")
        parser.add_argument("--json", type=Path, help="JSON file for all figures")
        if parser.parse_known_args()[0].quick:
            parser.set_defaults(**{"rounds": 1, **quick})
        options = parser.parse_args()
        chosen = options.only.split(",")
        if unknown := set(chosen) - set(runs):
            parser.error(f"--only: {', '.join(sorted(unknown))}: unknown parts; expected some of {', '.join(runs)}")
        print(machine(), flush=True)
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            bench = cls(Path(name), options)
            for part in chosen:
                bench.part = part
                print(f"\n({part}: {timed(partial(bench.run_part, runs[part])):.0f} s)", flush=True)
        needs_table(bench.verdicts)
        if options.json:
            bench.write(options.json, load)
        if bench.failed:
            sys.exit("\n".join(["These systems must not fail:", *bench.failed]))

    def run_part(self, run: Callable[[Self], object]) -> None:
        try:
            run(self)
        except Exception as error:
            traceback.print_exc()
            self.failed.append(f"{self.part}: {type(error).__name__}: {error}")

    def write(self, path: Path, load: float) -> None:
        """Write all figures, the machine, its load before the start, and the versions of other software, as JSON."""
        peers = getattr(self.options, "peers_python", None)
        content = {
            "machine": machine(),
            "load": load,
            "revision": revision(),
            "peers": versions_of(peers) if peers else {},
            "programs": programs(),
            "options": {name: file_name(value) for name, value in vars(self.options).items() if name != "json"},
            "comparisons": self.comparisons,
            "figures": self.figures,
            "needed": self.verdicts,
            "failed": self.failed,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(cleaned(content), indent=1, default=str) + "\n")

    def need(self, what: str, found: float | None, needed: float, form: str, at_most: bool = False) -> None:
        """Record a requirement, and whether it is met; a figure of None was not measured."""
        self.verdicts.append(verdict(what, found, needed, form, at_most))

    def need_paired(
        self,
        what: str,
        ours: Sequence[float],
        others: Sequence[float],
        needed: float,
        form: str = "{:.2f}",
        at_most: bool = False,
    ) -> None:
        """Record a requirement for the ratio of the medians of two systems, from the values of the same rounds.

        If the ratio misses the requirement, but its confidence interval includes the required value, noise can be the
        reason; the requirement is then met "within the interval".
        """
        ratio, *limits = measured_ratio(ours, others) if ours and others else (None,)
        self.verdicts.append(verdict(what, ratio, needed, form, at_most, limits))

    def need_ratio(self, title: str, medians: Mapping[str, float], name: str, other: str, needed: float) -> None:
        """Record a requirement as `need_paired` does; medians that are not those of `show` give no interval."""
        rounds = medians.rounds if isinstance(medians, Medians) else {key: [value] for key, value in medians.items()}
        what = f"{title}: {name} relative to {other}"
        self.need_paired(what, rounds.get(name, ()), rounds.get(other, ()), needed)

    def show(
        self,
        title: str,
        unit: str,
        values: Mapping[str, Sequence[float]],
        base: Sequence[str] = (),
        missing: Mapping[str, str] = {},
    ) -> Medians:
        """Record the values of several systems, one for each round, print them as a table and return the medians.

        Args:
            title: title of the table.
            unit: unit of the values.
            values: values by name of the system.
            base: names of the systems that the others are compared with.
            missing: the reasons why systems have no values, by name.
        """
        comparison = self.record(title, unit, values, base)
        comparison["missing"] = dict(missing)
        table(f"{title}; {self.rounds} rounds", *cells_of(comparison))
        return Medians({name: some for name, some in values.items() if some and name not in missing})

    def record(self, title: str, unit: str, values: Mapping[str, Sequence[float]], base: Sequence[str]) -> Found:
        """Record a comparison as `show` does, without printing it, and return it."""
        comparison: Found = {"part": self.part, "title": title, "unit": unit, "values": dict(values), "base": base}
        comparison["missing"] = {}
        self.comparisons.append(comparison)
        return comparison

    def compare(
        self,
        title: str,
        systems: Mapping[str, Callable[[int], Found]],
        base: Sequence[str],
        *,
        first: int = 1,
        often: Sequence[str] = (),
        note: str = "",
    ) -> Medians:
        """Run systems in interleaved rounds, show their samples per second and return the medians.

        Args:
            title: title of the table.
            systems: functions by name, each called with the number of the round.
            base: names of the systems that the others are compared with.
            first: number of the first round; round 0 is a warm-up, whose results are ignored.
            often: names of the systems that run three times in each round, because they vary most between processes.
            note: text below the table.
        """
        missing: dict[str, str] = {}
        runs: dict[str, list[Found]] = {name: [] for name in systems}
        for number in range(first, self.rounds + 1):
            for name in (*systems, *often, *often):
                if name in missing:
                    continue
                found = systems[name](number)
                if "missing" in found:
                    missing[name] = found["missing"]
                elif number:
                    runs[name].append(found)
        rates = {name: [one["samples"] / one["seconds"] for one in some] for name, some in runs.items()}
        medians = self.show(title, "images/s", rates, base, missing)
        cpu = {
            name: [one["cpu_seconds"] / one["samples"] * 1e6 for one in some if "cpu_seconds" in one]
            for name, some in runs.items()
        }
        if any(cpu.values()):
            self.show(f"{title}, CPU time", "us per image", cpu, base)
        if note:
            print(f"({note})", flush=True)
        return medians


def interval(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the median of values, and its 95% confidence interval from the order statistics."""
    ordered = sorted(values)
    margin = 0.98 * math.sqrt(len(ordered))
    low, high = math.floor(len(ordered) / 2 - margin), math.ceil(len(ordered) / 2 + margin)
    return statistics.median(ordered), ordered[max(0, low)], ordered[min(len(ordered) - 1, high)]


def interleaved(systems: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every system once as a warm-up, then once in each round; return the figures of each system."""
    for run in systems.values():
        run()
    figures: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            figures[name].append(run())
    return figures


def paired(figures: Mapping[str, list[float]], name: str, other: str) -> float:
    """Return the median of the rounds' ratios, which temporary slowdowns of the machine hardly affect."""
    return statistics.median(one / two for one, two in zip(figures[name], figures[other], strict=True))


def verdict(
    what: str, found: float | None, needed: float, form: str, at_most: bool, limits: Sequence[float] = ()
) -> tuple[str, str, str, str]:
    """Return a row with a requirement and whether it is met; a figure of None was not measured.

    `limits` are those of the confidence interval of a ratio.
    """
    bound = f"{'at most' if at_most else 'at least'} {form.format(needed)}"
    if found is None:
        return what, "not measured", bound, ""
    met = "FALLS SHORT"
    if found <= needed if at_most else found >= needed:
        met = "holds"
    elif limits and limits[0] <= needed <= limits[1]:
        met = "within the interval"
    return what, text_of_ratio(found, *limits, form=form), bound, met


def needs_table(verdicts: Iterable[tuple[str, str, str, str]]) -> None:
    table("Requirements", ("", "found", "required", "met"), verdicts)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table; rows may have fewer cells than the header."""
    print(f"\n{title}\n", *lines_of(head, rows), sep="\n", flush=True)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def child(command: Sequence[str | Path], deadline_s: float) -> Found:
    """Run a program and return the JSON of its last line, or the reason why there is none."""
    # Write back the data of earlier runs first, so that this run does not wait for it.
    os.sync()
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return {"missing": f"failed: not finished within {deadline_s:g} s"}
    return last_line(done.returncode, done.stdout, done.stderr)


def take_turns(
    commands: Mapping[str, Sequence[str | Path]],
    turns: int,
    line: str = "",
    environments: Mapping[str, Mapping[str, str]] = {},
) -> dict[str, list[float]]:
    """Return the seconds of each process's turns; processes run at the same time, and sleep when it is not their turn.

    Each process runs its work once for each line on stdin, and prints the seconds. The first turn is a warm-up, which
    counts only if `turns` is 0.
    """
    os.sync()
    with ExitStack() as living:
        running = {}
        for name, command in commands.items():
            environment = {**os.environ, **environments.get(name, {})}
            words = [str(word) for word in command]
            process = subprocess.Popen(words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            running[name] = living.enter_context(process)
            living.callback(process.communicate)
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(1 + turns):
            for name in list(running)[:: -1 if number % 2 else 1]:
                process = running[name]
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
                seconds[name].append(float(process.stdout.readline()))
    return {name: values[1:] or values for name, values in seconds.items()}


def last_line(status: int, out: str, err: str) -> Found:
    """Return the JSON of a program's last line, or the reason why there is none."""
    lines = out.strip().splitlines()
    if not status and lines and lines[-1].startswith("{"):
        found: Found = json.loads(lines[-1])
        return found
    return {"missing": f"failed with {status}: {(err.strip().splitlines() or ['no message'])[-1]}"}


def extract(archive: str | Path, folder: Path) -> Path:
    """Extract a zip archive unless its folder exists, and return the folder."""
    if not folder.is_dir():
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder)
    return folder


def extract_photos(archive: str | Path, folder: Path) -> Path:
    """Extract photos to a tree with one folder for each class; photos without folders get the class folder `all`."""
    with zipfile.ZipFile(archive) as opened:
        is_flat = all("/" not in name for name in opened.namelist())
    extract(archive, folder / "all" if is_flat else folder)
    return folder


def warm(folder: Path) -> int:
    """Read all files into the page cache, and return their number."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        path.read_bytes()
    return len(paths)


def write_images(folder: Path, count: int, size: tuple[int, int], classes: int) -> Path:
    """Write JPEG files of smooth random patterns in class folders, identical in each run."""
    chance = np.random.default_rng(0)
    for number in range(count):
        coarse = chance.integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
        target = folder / f"class{number % classes}" / f"{number:05}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(target, quality=90)
    return folder


def cleaned(content: Any) -> Any:
    """Return data with numbers rounded to six digits, which keeps files small, and without the folders of paths."""
    if isinstance(content, Mapping):
        return {str(name): cleaned(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [cleaned(value) for value in content]
    if isinstance(content, str | Path):
        return FOLDERS.sub("", str(content))
    return float(f"{content:.6g}") if isinstance(content, float) else content


def revision() -> str:
    """Return the revision of this checkout, with `-dirty` if files have changed; empty without git."""
    words = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def versions_of(python: str) -> dict[str, str]:
    """Return the versions of the other packages that an interpreter has installed."""
    found = child([python, "-c", VERSIONS], 60)
    return {name: found[name] for name in PEER_PACKAGES if name in found}


def programs() -> dict[str, str]:
    """Return the version of rclone, with which benchmarks compare, if it is installed."""
    if not shutil.which("rclone"):
        return {}
    shown = subprocess.run(["rclone", "version"], check=False, capture_output=True, text=True).stdout
    return {"rclone": shown.partition("\n")[0].removeprefix("rclone ")}


def file_name(value: Any) -> Any:
    """Return the name of a file or folder for its path, and other values unchanged."""
    is_path = isinstance(value, Path) or (isinstance(value, str) and os.path.exists(value))
    return Path(value).name if is_path else value


def machine() -> str:
    """Return the processor, cores, memory, and the versions of Python and packages as one line."""
    cores = len(os.sched_getaffinity(0))
    facts = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    names = {name.strip(): value.strip() for name, value in facts.items()}
    processor = names.get("model name", platform.machine())
    memory_gib = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    about = f"{processor}, {cores} cores, {memory_gib:.0f} GiB"
    return f"{about}, Python {platform.python_version()}, {', '.join(versions)}"
