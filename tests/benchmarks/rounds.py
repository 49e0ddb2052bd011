"""Interleaved rounds, medians and ratios, shared by the benchmarks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

PACKAGES = ("torch", "torchvision", "numpy", "h5py", "pillow", "simplejpeg")


def interleaved(systems: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every system once to warm up, then once a round in turn; return each system's figures."""
    for run in systems.values():
        run()
    figures: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            figures[name].append(run())
    return figures


def report(title: str, unit: str, figures: Mapping[str, list[float]], baseline: str, json_path: str | None) -> None:
    """Print median, spread and ratio to the baseline of each system; write all figures as JSON if asked."""
    print(f"\n{title}\n{machine()}; {len(next(iter(figures.values())))} interleaved rounds after a warm-up\n")
    base = statistics.median(figures[baseline])
    width = max(map(len, figures))
    print(f"{'':<{width}}  {'median':>12}  {'min':>12}  {'max':>12}  times {baseline}")
    for name, values in figures.items():
        median = statistics.median(values)
        print(f"{name:<{width}}  {median:>12,.0f}  {min(values):>12,.0f}  {max(values):>12,.0f}  {median / base:.2f}")
    print(f"({unit})")
    if json_path:
        content = {"title": title, "unit": unit, "machine": machine(), "figures": dict(figures)}
        Path(json_path).write_text(json.dumps(content, indent=1) + "\n")


def verdict(what: str, found: float | None, needed: float, form: str, at_most: bool) -> tuple[str, str, str, str]:
    """Return a row that tells whether what is needed holds; a figure of None was not measured."""
    bound = f"{'at most' if at_most else 'at least'} {form.format(needed)}"
    if found is None:
        return what, "not measured", bound, ""
    holds = found <= needed if at_most else found >= needed
    return what, form.format(found), bound, "holds" if holds else "FALLS SHORT"


def machine() -> str:
    """Return processor, cores and versions in a line."""
    cores = len(os.sched_getaffinity(0))
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{platform.machine()}, {cores} cores, Python {platform.python_version()}, {', '.join(versions)}"
