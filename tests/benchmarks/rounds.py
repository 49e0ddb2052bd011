"""Helpers for the benchmarks: data, processes, interleaved rounds, tables and requirements."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias

PACKAGES = ("torch", "torchvision", "numpy", "h5py", "pillow", "simplejpeg")
HERE = Path(__file__).parent

Found: TypeAlias = dict[str, Any]
"""The measurements of a process, or under `missing` the reason why there are none."""


@dataclass
class Bench:
    """A benchmark in several parts: its folder, measurements, requirements and failures.

    `main()` takes the parts by name, as functions of the benchmark.
    """

    folder: Path
    options: argparse.Namespace
    figures: Found = field(default_factory=dict)
    verdicts: list[tuple[str, str, str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return self.options.rounds

    @classmethod
    def main(cls, parser: argparse.ArgumentParser, runs: Mapping[str, Callable[[Self], object]], rounds: int) -> None:
        """Run the parts named on the command line, print the requirements, and optionally write all figures as JSON."""
        parser.add_argument("--rounds", type=int, default=rounds)
        parser.add_argument("--only", default=",".join(runs), help=f"parts to run, of {', '.join(runs)}")
        parser.add_argument("--json", help="JSON file for all figures")
        options = parser.parse_args()
        chosen = options.only.split(",")
        if unknown := set(chosen) - set(runs):
            parser.error(f"--only: {', '.join(sorted(unknown))}: unknown parts; expected some of {', '.join(runs)}")
        print(machine(), flush=True)
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            bench = cls(Path(name), options)
            for part in chosen:
                print(f"\n({part}: {timed(lambda part=part: runs[part](bench)):.0f} s)", flush=True)  # type: ignore[misc]
        needs_table(bench.verdicts)
        if options.json:
            content = {"machine": machine(), "figures": bench.figures, "needed": bench.verdicts}
            Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
        if bench.failed:
            sys.exit("\n".join(["These systems must not fail:", *bench.failed]))

    def need(self, what: str, found: float | None, needed: float, form: str, at_most: bool = False) -> None:
        """Record a requirement, and whether it is met; a figure of None was not measured."""
        self.verdicts.append(verdict(what, found, needed, form, at_most))

    def need_ratio(self, title: str, medians: Mapping[str, float], name: str, other: str, needed: float) -> None:
        ratio = medians[name] / medians[other] if name in medians and other in medians else None
        self.need(f"{title}: {name} relative to {other}", ratio, needed, "{:.2f}")

    def compare(
        self,
        title: str,
        systems: Mapping[str, Callable[[int], Found]],
        base: Sequence[str],
        *,
        first: int = 1,
        often: Sequence[str] = (),
        note: str = "",
    ) -> dict[str, float]:
        """Run systems in interleaved rounds, print a table of their samples per second and return the medians.

        Args:
            title: title of the table.
            systems: functions by name, each called with the number of the round.
            base: names of the systems that the others are compared with.
            first: number of the first round; round 0 is a warm-up, whose results do not count.
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
        medians = {name: statistics.median(some) for name, some in rates.items() if some and name not in missing}
        has_cpu = any("cpu_seconds" in one for some in runs.values() for one in some)
        rows = []
        for name, values in rates.items():
            if name in missing:
                rows.append((name, missing[name]))
                continue
            cpu = statistics.median(one["cpu_seconds"] / one["samples"] * 1e6 for one in runs[name]) if has_cpu else 0
            ratios = [f"{medians[name] / medians[other]:.3g}" if other in medians else "" for other in base]
            rows.append((name, *spread(values), *([f"{cpu:,.0f}"] if has_cpu else []), *ratios))
        cpu_head = ["CPU µs per image"] if has_cpu else []
        head = ("", "images/s, median", "min", "max", *cpu_head, *(f"times {other}" for other in base))
        table(f"{title}; {self.rounds} rounds", head, rows)
        if note:
            print(f"({note})", flush=True)
        self.figures[title] = {"rates": rates, "missing": missing}
        return medians


def interleaved(systems: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every system once as a warm-up, then once in each round; return the figures of each system."""
    for run in systems.values():
        run()
    figures: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            figures[name].append(run())
    return figures


def report(title: str, unit: str, figures: Mapping[str, list[float]], baseline: str, json_path: str | None) -> None:
    """Print each system's median, spread and ratio to the baseline; write all figures as JSON if requested."""
    base = statistics.median(figures[baseline])
    rows = [(name, *spread(values), f"{statistics.median(values) / base:.2f}") for name, values in figures.items()]
    rounds = len(next(iter(figures.values())))
    table(f"{title}; {rounds} rounds after a warm-up", ("", f"{unit}, median", "min", "max", f"times {baseline}"), rows)
    if json_path:
        content = {"title": title, "unit": unit, "machine": machine(), "figures": dict(figures)}
        Path(json_path).write_text(json.dumps(content, indent=1) + "\n")


def paired(figures: Mapping[str, list[float]], name: str, other: str) -> float:
    """Return the median of the ratios in each round, which hardly depend on temporary slowdowns of the machine."""
    return statistics.median(one / two for one, two in zip(figures[name], figures[other], strict=True))


def compared(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of medians and its 95% interval from 2,000 resamples of the rounds."""
    chance = random.Random(0)
    pairs = list(zip(before, after, strict=True))

    def ratio(rounds: list[tuple[float, float]]) -> float:
        return statistics.median(first for first, _ in rounds) / statistics.median(second for _, second in rounds)

    drawn = sorted(ratio(chance.choices(pairs, k=len(pairs))) for _ in range(2000))
    return ratio(pairs), drawn[50], drawn[-50]


def verdict(what: str, found: float | None, needed: float, form: str, at_most: bool) -> tuple[str, str, str, str]:
    """Return a row with a requirement and whether it is met; a figure of None was not measured."""
    bound = f"{'at most' if at_most else 'at least'} {form.format(needed)}"
    if found is None:
        return what, "not measured", bound, ""
    holds = found <= needed if at_most else found >= needed
    return what, form.format(found), bound, "holds" if holds else "FALLS SHORT"


def needs_table(verdicts: Iterable[tuple[str, str, str, str]]) -> None:
    table("Requirements", ("", "found", "required", "met"), verdicts)


def spread(values: Sequence[float], form: str = "{:,.0f}") -> tuple[str, str, str]:
    """Return the median, minimum and maximum of some values as text."""
    return form.format(statistics.median(values)), form.format(min(values)), form.format(max(values))


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table; rows may have fewer cells than the header."""
    lines = [[*row, *[""] * (len(head) - len(row))] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    rule = "|-" + "-|-".join("-" * width for width in widths) + "-|"
    print(f"\n{title}\n", shown[0], rule, *shown[1:], sep="\n", flush=True)


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


def machine() -> str:
    """Return the CPU architecture, the number of usable cores, and the versions of Python and packages as one line."""
    cores = len(os.sched_getaffinity(0))
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, {', '.join(versions)}"
