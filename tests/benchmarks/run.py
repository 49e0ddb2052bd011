"""Run every benchmark, one after another: `python tests/benchmarks/run.py [--quick] [--only NAME,...]`.

    python tests/benchmarks/run.py --data cifar10-images.zip --photos photos-400.zip --peers-python PATH
    python tests/benchmarks/tables.py --write

Each benchmark runs in a separate process, and writes its individual measurements, the machine and the versions as JSON
to `tests/benchmarks/results/`, from which `tables.py` makes the tables and pictures of the documentation. Without
archives, images are generated. If a benchmark fails, its error is reported and the others continue; the script then
ends with status 1. `install_peers.sh` installs the other packages for `--peers-python`; those that are missing or fail
are listed in the tables with their errors. Ratios that miss a requirement "within the interval" of 95% confidence count
as met. `--quick` takes one round with little data, only to check the scripts, and writes to
`tests/benchmarks/results/quick/`, which git ignores. All benchmarks together take many hours on an otherwise idle
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from rounds import HERE, table
from tables import RESULTS

BENCHMARKS = {
    "change": (),
    "checkpoint": (),
    "click_to_trained": ("data", "peers_python"),
    "complaints": ("photos",),
    "doctor": (),
    "gpu": (),
    "loader": ("data", "photos", "peers_python"),
    "one_click": (),
    "packing": ("data", "photos", "peers_python"),
    "parquet": (),
    "remote": ("peers_python",),
    "scale": (),
    "small_steps": (),
    "staging": ("data",),
    "status": (),
    "training": (),
}
"""The benchmarks by name, each with the options of this script that it takes."""

DEADLINE_S = 4 * 3600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round with little data, to check the scripts")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help=f"some of {', '.join(BENCHMARKS)}")
    parser.add_argument("--results", type=Path, help="folder for the results")
    parser.add_argument("--data", help="zip archive of small JPEG files in train/CLASS/ and test/CLASS/")
    parser.add_argument("--photos", help="zip archive of photos")
    parser.add_argument("--peers-python", help="interpreter with the other packages")
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(BENCHMARKS):
        parser.error(
            f"--only: {', '.join(sorted(unknown))}: unknown benchmarks; expected some of {', '.join(BENCHMARKS)}"
        )
    results = options.results or (RESULTS / "quick" if options.quick else RESULTS)
    rows = [(name, *run(name, results, options)) for name in chosen]
    table("Benchmarks", ("", "seconds", "requirements met", "result"), rows)
    if failed := [name for name, *_, result in rows if result.startswith("failed")]:
        sys.exit(f"These benchmarks failed: {', '.join(failed)}")


def run(name: str, results: Path, options: argparse.Namespace) -> tuple[str, str, str]:
    """Run a benchmark; return its seconds, the number of met requirements, and its result."""
    if name == "gpu" and not has_gpu():
        return "", "", "not run: no usable GPU"
    path = results / f"{name}.json"
    words = [
        sys.executable,
        str(HERE / f"bench_{name}.py"),
        "--json",
        str(path),
        *(["--quick"] if options.quick else []),
    ]
    for option in BENCHMARKS[name]:
        if value := getattr(options, option):
            words += [f"--{option.replace('_', '-')}", value]
    print(f"\n# {name}", flush=True)
    path.unlink(missing_ok=True)
    began = time.monotonic()
    error = run_words(words)
    seconds = f"{time.monotonic() - began:.0f}"
    if not path.exists():
        return seconds, "", f"failed: {error}"
    written = json.loads(path.read_text())
    needed = [met for *_, met in written["needed"] if met]
    met = f"{len(needed) - needed.count('FALLS SHORT')} of {len(needed)}"
    return seconds, met, f"failed: {'; '.join(written['failed']) or error}" if error else "done"


def run_words(words: list[str]) -> str:
    """Run a program in its own process group; return the last line of its stderr if it fails, else an empty string."""
    last = ""
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        timer = threading.Timer(DEADLINE_S, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            for line in process.stderr:
                print(line, end="", file=sys.stderr, flush=True)
                last = line.strip() or last
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            timer.cancel()
    if status == -signal.SIGKILL:
        return f"killed, at the latest after {DEADLINE_S:,} s"
    return (last or f"status {status}") if status else ""


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    # Without this, SIGTERM would end this script and leave its benchmark running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
