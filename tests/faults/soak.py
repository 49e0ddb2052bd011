"""Kill processes at random for minutes, and check results and leaks: `python -m tests.faults.soak --minutes 10`.

Eight processes at a time stage, pack, publish, load and train in shared folders, and are killed at random times. After
each round, every task runs without kills, once per folder that it uses: its results must equal those of an undisturbed
run, and no unfinished files may remain. Meanwhile one process reads a pack; its memory, threads and open files must not
grow.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from zlib import crc32

from .__main__ import _DOUBLES  # noqa: F401 - sets the environment, and the path of the modules imported next

# isort: split
import psutil
import torch
from contract import make_pack
from trainings import SmallTraining
from trees import files_of, leftovers, make_tree

import colabkit
from colabkit.errors import TargetExists
from colabkit.storage.sources.items import STAGE_SEAL

PROCESSES, ROUND_S, DEADLINE_S = 8, 20.0, 60.0
LONGEST_LIFE_S = 1.2
"""A process is killed after a random time up to this, if it has not finished before."""
QUIET = {"progress": False}
MIB = 1 << 20
# Allowed growth of the reader's memory, since the allocator keeps some freed memory.
ALLOWED_GROWTH_BYTES = 48 * MIB
SHM_ROUNDS = 4
"""Number of rounds after which a new entry of /dev/shm counts as left behind; other programs create some, too."""
SHM_NAME = re.compile(r"torch_|psm_|sem\.|colabkit")
_SUBREAPER = 36


def _digest(values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def _repeated(work: Callable[[], Any]) -> Any:
    """Repeat `work`, as the error advises, as long as another process creates the same output."""
    while True:
        try:
            return work()
        except TargetExists:
            continue


def _samples(path: Path) -> str:
    """Return a digest of the samples of a pack, which a loader returns in random order."""
    found = []
    for images, labels in colabkit.Loader(colabkit.open_pack(path)["train"], 8, shuffle=True):
        found += [(int(label), crc32(image.numpy().tobytes())) for image, label in zip(images, labels, strict=True)]
    return _digest(sorted(found))


def _packed(home: Path, place: Path, name: str, **options: Any) -> Path:
    source = home / "tree"
    return Path(_repeated(lambda: colabkit.pack(source, place / name, **options, **QUIET)).path)


def stage(home: Path, place: Path, slot: int) -> str:
    """Stage a folder, which all processes share; half of the processes look for changes to the source."""
    staged = _repeated(lambda: colabkit.stage(home / "tree", place / "staged", refresh=slot % 2 == 0, **QUIET))
    return _digest(sorted((name, data) for name, data in files_of(staged.path).items() if name != STAGE_SEAL))


def extract(home: Path, place: Path, slot: int) -> str:
    """Stage an archive, into a separate folder for each process, after removing an earlier copy."""
    to = place / f"extracted-{slot}"
    if to.exists():
        colabkit.unstage(to)
    files = files_of(colabkit.stage("samples:digits", to, **QUIET).path)
    return _digest(sorted((name, data) for name, data in files.items() if name != STAGE_SEAL))


def pack(home: Path, place: Path, slot: int) -> str:
    """Write a pack, and publish it."""
    path = _packed(home, place, "pack.h5")
    published = colabkit.publish(path, place / f"published-{slot}.h5", **QUIET)
    return _digest(published.path.read_bytes())


def shards(home: Path, place: Path, slot: int) -> str:
    """Write shards, and load them."""
    return _samples(_packed(home, place, "shards.h5", shard_bytes=20_000))


def load(home: Path, place: Path, slot: int) -> str:
    """Load a pack with re-encoded images in worker processes."""
    return _samples(_packed(home, place, "small.h5", size=16))


def train(home: Path, place: Path, slot: int) -> str:
    """Train with checkpoints, or resume the training of a process that was killed."""
    torch.set_num_threads(1)
    training = SmallTraining(colabkit.open_pack(home / "data.h5")["train"])
    training.train(6, to=place / f"run-{slot}", save_every=5)
    return _digest([value.tolist() for value in training.weights()])


TASKS = (stage, extract, pack, shards, load, train)


def _run(task: Callable[[Path, Path, int], str], home: Path, place: Path, slot: int, result: Path) -> None:
    try:
        found = {"digest": task(home, place, slot)}
    except BaseException:
        found = {"error": traceback.format_exc()}
    new = result.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.rename(result)


def _read(home: Path, epochs: Any) -> None:
    """Read a pack until the process is killed."""
    loader = colabkit.Loader(colabkit.open_pack(home / "data.h5")["train"], 8, shuffle=True)
    while True:
        for _ in loader:
            # Pause, so that the reader leaves the CPU to the other processes.
            time.sleep(0.005)
        epochs.value += 1


@dataclass
class Attempt:
    """A process that runs a task, and the time at which it is killed."""

    process: Any
    task: str
    result: Path
    ends_at: float


class Soak:
    """A soak test: it starts and kills processes, compares their results, and counts leftovers."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home = home
        self.draws = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        # Fork, because this process has no threads and forks start quickly.
        self._context = multiprocessing.get_context("fork")
        self._started = 0
        (home / "results").mkdir()
        make_tree(home / "tree", 20, (32, 32))
        make_pack(home / "data.h5", train=50)
        # This also imports everything that the forks need.
        self.expected = {task.__name__: task(home, home / "expected", 0) for task in TASKS}
        assert threading.active_count() == 1
        self._epochs = self._context.Value("q", 0)
        self._reader = self._context.Process(target=_read, args=(home, self._epochs), daemon=True)
        self._reader.start()
        self.reader = psutil.Process(self._reader.pid)
        self._shm = [set(os.listdir("/dev/shm"))] * SHM_ROUNDS

    def _start(self, task: Callable[[Path, Path, int], str], place: Path, slot: int, life_s: float) -> Attempt:
        self._started += 1
        result = self.home / "results" / f"{self._started}.json"
        process = self._context.Process(target=_run, args=(task, self.home, place, slot, result))
        process.start()
        return Attempt(process, task.__name__, result, time.monotonic() + life_s)

    def _finish(self, attempt: Attempt) -> str | None:
        """Kill a process unless it has finished; return the digest of its result, if there is one."""
        attempt.process.kill()
        attempt.process.join()
        if not attempt.result.exists():
            self.counts["killed"] += 1
            return None
        found = json.loads(attempt.result.read_text())
        attempt.result.unlink()
        self.counts["finished"] += 1
        if "error" in found:
            self.violate(f"{attempt.task}: {found['error']}")
        return found.get("digest")

    def violate(self, text: str) -> None:
        self.violations.append(text)
        print(f"VIOLATION {text}", flush=True)

    def _alone(self, task: Callable[[Path, Path, int], str], place: Path, slot: int) -> str | None:
        attempt = self._start(task, place, slot, DEADLINE_S)
        attempt.process.join(DEADLINE_S)
        if attempt.process.is_alive():
            self.violate(f"{attempt.task} has not finished within {DEADLINE_S:g} s")
        return self._finish(attempt)

    def _check(self, task: str, digest: str | None) -> None:
        if digest is not None and digest != self.expected[task]:
            self.violate(f"{task} has a wrong result")

    def round(self) -> None:
        """Run and kill tasks for a while, then compare the results of runs without kills, one per task and folder."""
        place = self.home / f"round-{self.counts['rounds']}"
        place.mkdir()
        ends_at = time.monotonic() + ROUND_S
        running: dict[int, Attempt] = {}
        while time.monotonic() < ends_at:
            for slot in set(range(PROCESSES)) - set(running):
                task = self.draws.choice(TASKS)
                running[slot] = self._start(task, place, slot, self.draws.uniform(0, LONGEST_LIFE_S))
            wait([attempt.process.sentinel for attempt in running.values()], 0.02)
            for slot, attempt in list(running.items()):
                if attempt.ends_at < time.monotonic() or not attempt.process.is_alive():
                    self._check(attempt.task, self._finish(running.pop(slot)))
        for attempt in running.values():
            self._check(attempt.task, self._finish(attempt))
        for task in TASKS:
            slots = range(PROCESSES) if task in (extract, pack, train) else (0,)
            for slot in slots:
                self._check(task.__name__, self._alone(task, place, slot))
        if left := leftovers(place):
            self.violate(f"unfinished files remain: {left[:5]}")
        shutil.rmtree(place)
        if not self._reader.is_alive():
            self.violate("the reader has ended")
        self.counts["rounds"] += 1

    def held(self) -> dict[str, int]:
        """Return the reader's memory, files and threads, and the leftover shared memory and processes."""
        self._shm = [*self._shm, {name for name in os.listdir("/dev/shm") if SHM_NAME.match(name)}]
        return {
            "RSS": self.reader.memory_info().rss,
            "files": self.reader.num_fds(),
            "threads": self.reader.num_threads(),
            "shm": len(set.intersection(*self._shm[-SHM_ROUNDS:]) - self._shm[0]),
            "processes": len(psutil.Process().children(recursive=True)),
        }

    def row(self, minutes: float, held: dict[str, int]) -> str:
        values = [f"{minutes:.1f}", *(self.counts[name] for name in ("rounds", "killed", "finished"))]
        values += [len(self.violations), self._epochs.value, f"{held['RSS'] / MIB:.1f}", *list(held.values())[1:]]
        return " ".join(f"{value:>10}" for value in values)

    def end(self) -> None:
        self._reader.kill()
        self._reader.join()


def main() -> int:
    """Run for the requested time, print a row per minute, and return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=str(__doc__).split(":")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    # Orphans of killed processes become children of this process, and are counted.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    home = Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ["COLABKIT_LOCAL"] = str(home)
    started = time.monotonic()
    soak = Soak(home, arguments.seed)
    names = "minutes rounds killed finished violations epochs RSS/MiB files threads /dev/shm processes"
    print(" ".join(f"{name:>10}" for name in names.split()), flush=True)
    first: dict[str, int] | None = None
    printed = 0.0
    try:
        while (minutes := (time.monotonic() - started) / 60) < arguments.minutes or first is None:
            soak.round()
            held = soak.held()
            # Compare with the end of the first round, which warms up caches and allocators.
            first = first or held
            for name, value in held.items():
                if value > first[name] + (ALLOWED_GROWTH_BYTES if name == "RSS" else 0):
                    soak.violate(f"{name} grew from {first[name]:,} to {value:,}")
            if minutes >= printed:
                print(soak.row((time.monotonic() - started) / 60, held), flush=True)
                printed = minutes + 1
        print(soak.row((time.monotonic() - started) / 60, held), flush=True)
    finally:
        soak.end()
        shutil.rmtree(home, ignore_errors=True)
    return int(bool(soak.violations))


if __name__ == "__main__":
    sys.exit(main())
