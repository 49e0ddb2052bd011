"""Faults 37 to 40: kills while checkpoints are saved or models are trained, and damaged or hostile checkpoints."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import random
import resource
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoint_folders import content, seal_for
from contract import make_pack
from forks import in_fork
from torch import nn
from trainings import SmallTraining, history, same
from trees import leftovers

from colabkit.errors import ColabkitError
from colabkit.foundation import file_changes
from colabkit.packs import open_pack
from colabkit.training.checkpoints.folder import CheckpointFolder

from .board import COLABKIT, Outcome, Result, attempts, fault, spread
from .mutations import cuts, flips, overwrites

_Cases = list[tuple[str, Callable[[], Outcome | None]]]


@dataclass(frozen=True)
class Saver:
    """A tool that saves checkpoints.

    Args:
        save: called with the folder and a step.
        load: returns the newest good checkpoint: its step, its content, and the names of the skipped files.
        refusals: the exceptions by which the tool refuses work.
    """

    save: Callable[[Path, int], object]
    load: Callable[[Path], tuple[int, Any, list[str]]]
    refusals: type[Exception] = Exception


def _save(folder: Path, step: int) -> None:
    with CheckpointFolder(folder, keep_last=3) as checkpoints:
        checkpoints.save(step, content(step), score=1 / step, wait=True)


def _load(folder: Path) -> tuple[int, Any, list[str]]:
    checkpoints = CheckpointFolder(folder)
    newest = checkpoints.newest()
    assert newest is not None, "no checkpoint is found"
    return newest.step, newest.content, [path.name for path, _ in newest.skipped_checkpoints]


def _torch_save(folder: Path, step: int) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(content(step), folder / f"checkpoint-{step:08d}.pt")


def _torch_load(folder: Path, weights_only: bool = True) -> tuple[int, Any, list[str]]:
    path = max(folder.glob("*.pt"))
    return int(path.stem.split("-")[1]), torch.load(path, weights_only=weights_only), []


SAVERS = {COLABKIT: Saver(_save, _load, ColabkitError), "torch.save": Saver(_torch_save, _torch_load)}


def _is_intact(folder: Path, saver: Saver) -> Outcome:
    """Check the newest checkpoint, and return the outcome."""
    step, found, skipped = saver.load(folder)
    expected = content(step)
    assert torch.equal(found["state"]["weights"], expected["state"]["weights"]), "the weights differ"
    assert found["history"] == expected["history"], "the history differs"
    return Outcome.DEGRADED if skipped else Outcome.SURVIVED


def _killed_at_change(number: int, work: Callable[[], object]) -> None:
    changes = itertools.count(1)

    def kill(operation: str, path: Path) -> None:
        if next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    file_changes.hook = kill
    work()


def _killed_at_byte(number: int, work: Callable[[], object]) -> None:
    """Make the system kill the process when it writes the given byte of any file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
    work()


@fault(37, "the process is killed at any point of saving a checkpoint", SAVERS)
def killed_saves(saver: Saver, folder: Path, limit: int) -> Iterator[Result]:
    numbers = itertools.count()

    def work(kill: Callable[[int, Callable[[], object]], None], number: int, earlier: int, step: int) -> None:
        place = folder / f"run{next(numbers)}"
        for before in range(earlier):
            saver.save(place, 10 * (before + 1))
        in_fork(partial(kill, number, partial(saver.save, place, step)))
        if earlier or list(place.glob("checkpoint-*.json")):
            try:
                _is_intact(place, saver)
            except Exception as error:
                raise AssertionError(f"the earlier checkpoints no longer count: {error}") from error
        # The next save must succeed despite the leftovers of the killed process, and must remove them.
        saver.save(place, step)
        assert saver.load(place)[0] == max(step, 10 * earlier)
        assert not leftovers(place), "unfinished files are left"
        shutil.rmtree(place)

    points = [
        *((f"change {number}", _killed_at_change, number) for number in range(1, 19)),
        *((f"byte {number}", _killed_at_byte, number) for number in range(0, 2600, 80)),
    ]
    # Test a first save, a second one, and one that replaces the newest checkpoint.
    runs = [(0, 10), (3, 40), (2, 20)]
    cases: _Cases = [
        (f"{earlier} checkpoints, step {step}, {name}", partial(work, kill, number, earlier, step))
        for name, kill, number in points
        for earlier, step in runs
    ]
    yield from attempts(spread(cases, limit), refusals=())


@fault(38, "the newest checkpoint is cut, damaged, missing or unreadable", SAVERS)
def damaged_checkpoints(saver: Saver, folder: Path, limit: int) -> Iterator[Result]:
    original = folder / "original"
    for step in (10, 20, 30):
        saver.save(original, step)
    numbers = itertools.count()

    def work(name: str, data: bytes | None, has_older: bool) -> Outcome:
        place = folder / f"run{next(numbers)}"
        place.mkdir()
        for path in original.iterdir():
            if has_older or "30" in path.name:
                shutil.copy(path, place)
        (place / name).unlink()
        if data is not None:
            (place / name).write_bytes(data)
        try:
            outcome = _is_intact(place, saver)
            assert outcome == Outcome.DEGRADED or saver.load(place)[0] == 30 or data is None, "silently an older one"
            return outcome
        finally:
            shutil.rmtree(place)

    cases: _Cases = []
    for path in sorted(original.glob("*30*")):
        data = path.read_bytes()
        damaged = [
            *flips(data, limit // 2, 1),
            *overwrites(data, limit // 4, 2),
            *spread([*cuts(data, 16)], limit // 4 + 1),
            ("zeros", bytes(len(data))),
            ("nested", b"[" * 100_000),
        ]
        kind = path.suffix[1:]
        cases += [(f"{kind}, {name}", partial(work, path.name, changed, True)) for name, changed in damaged]
        cases += [
            (f"only one, {kind}, {name}", partial(work, path.name, changed, False)) for name, changed in damaged[::5]
        ]
        cases.append((f"{kind} is missing", partial(work, path.name, None, True)))
    yield from attempts(cases, refusals=saver.refusals)


class PlainTraining:
    """A training run like that of `SmallTraining`, with a `DataLoader`, and with `torch.save` after each epoch."""

    def __init__(self, data: Any) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        images, labels = data[:]
        self.data = torch.utils.data.TensorDataset(images.float() / 255, torch.as_tensor(labels))
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def train(self, epochs: int, to: Path | None = None, on_step: Callable[[Any], object] | None = None) -> list[Any]:
        path, first, steps = to and to / "checkpoint.pt", 0, 0
        if path and path.exists():
            saved = torch.load(path, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            first, steps = saved["epoch"], saved["steps"]
        for epoch in range(first, epochs):
            for images, labels in torch.utils.data.DataLoader(self.data, 4, shuffle=True):
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(images), labels).backward()
                self.optimizer.step()
                steps += 1
                if on_step:
                    on_step(steps)
            if path:
                path.parent.mkdir(exist_ok=True)
                parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save({**parts, "epoch": epoch + 1, "steps": steps}, path)
        return []

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]


@fault(39, "training is killed in any step and resumed", {COLABKIT: SmallTraining, "torch.save": PlainTraining})
def resumed_training(kind: Any, folder: Path, limit: int) -> Iterator[Result]:
    pack = make_pack(folder / "data.h5", train=22)
    numbers = itertools.count()

    @cache
    def whole() -> tuple[Any, Any, Any]:
        training = kind(open_pack(pack)["train"])
        report = training.train(4)
        return report and history(report), training.weights(), [random.random(), torch.rand(1).item()]

    def killed(place: Path, kill_at: int, change: int) -> None:
        def kill(done: Any) -> None:
            if getattr(done, "step", done) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        run = partial(kind(open_pack(pack)["train"]).train, 4, to=place, on_step=kill)
        if change:
            _killed_at_change(change, run)
        else:
            run()

    def work(kills: list[tuple[int, int]]) -> None:
        expected, weights, draws = whole()
        place = folder / f"run{next(numbers)}"
        for kill_at, change in kills:
            in_fork(partial(killed, place, kill_at, change))
        training = kind(open_pack(pack)["train"])
        report = training.train(4, to=place)
        assert same(training.weights(), weights), "the weights differ"
        assert not report or history(report) == expected, "the history differs"
        assert [random.random(), torch.rand(1).item()] == draws, "the random generators differ"
        assert not leftovers(place), "unfinished files are left"
        shutil.rmtree(place)

    generator = random.Random(11)
    plans: list[tuple[str, list[tuple[int, int]]]] = [
        (f"step {step}", [(step, 0)]) for step in spread(list(range(1, 25)), limit)
    ]
    plans += [(f"change {change}", [(0, change)]) for change in spread(list(range(1, 90, 2)), limit // 2)]
    for _ in range(limit // 5):
        steps = sorted(generator.sample(range(1, 25), 3))
        plans.append((f"steps {steps}", [(step, 0) for step in steps]))
    yield from attempts([(name, partial(work, kills)) for name, kills in plans])


class Payload:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def _hostile_pickles(canary: Path) -> dict[str, bytes]:
    """Return pickles, plain or inside a torch file, that create the canary if their code is executed."""
    code = f"__import__('os').mkdir({str(canary)!r})"
    shell = f"mkdir {canary}"
    payloads: dict[str, Any] = {
        "os.mkdir": Payload(os.mkdir, str(canary)),
        "os.system": Payload(os.system, shell),
        "eval": Payload(eval, code),
        "exec": Payload(exec, code),
        "open": Payload(open, str(canary), "w"),
        "partial": Payload(partial, os.mkdir, str(canary)),
        "map": Payload(map, os.mkdir, [str(canary)]),
        "Path.touch": Payload(Path.touch, canary),
        "np.save": Payload(np.save, str(canary), 1),
        "torch.save": Payload(torch.save, 1, str(canary)),
        "nested torch.load": Payload(torch.load, str(canary)),
        "rmtree": Payload(shutil.rmtree, str(canary.parent / "checkpoint-00000010.pt")),
        "module": nn.Linear(2, 2),
        "function": partial(os.mkdir, str(canary)),
    }
    found = {}
    for name, payload in payloads.items():
        value = {"made_by": "colabkit checkpoint 00000000-1-1", "content": {"state": payload}}
        for protocol in (0, 2, 4):
            with contextlib.suppress(Exception):
                found[f"{name}, protocol {protocol}"] = pickle.dumps(value, protocol)
        for legacy in (False, True):
            buffer = io.BytesIO()
            torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
            found[f"{name}, torch file{' (legacy)' * legacy}"] = buffer.getvalue()
    path = str(canary).encode()
    raw = {
        "GLOBAL and REDUCE": b"cos\nmkdir\n(V" + path + b"\ntR.",
        "INST": b"(V" + path + b"\nios\nmkdir\n.",
        "OBJ": b"(cos\nmkdir\nV" + path + b"\no.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c" + bytes([len(path)]) + path + b"\x85R.",
        "BUILD": b"ccollections\nOrderedDict\n)R}V__setstate__\ncos\nmkdir\nsbV" + path + b"\nb.",
        "endless memo": b"\x80\x02" + b"]q\x00h\x00a" * 1000 + b".",
        "deeply nested": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        "huge string": b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x.",
        "huge frame": b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little") + b"N.",
    }
    found |= raw
    for name, data in raw.items():
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/version", "3\n")
            archive.writestr("archive/byteorder", "little")
        found[f"{name}, in a torch file"] = buffer.getvalue()
    return found


def _pickle_load(folder: Path) -> tuple[int, Any, list[str]]:
    path = max(folder.glob("*.pt"))
    return 20, pickle.loads(path.read_bytes()), []


LOADERS = {
    COLABKIT: SAVERS[COLABKIT],
    "torch.load": SAVERS["torch.save"],
    "torch.load(weights_only=False)": Saver(_torch_save, partial(_torch_load, weights_only=False)),
    "pickle.load": Saver(_torch_save, _pickle_load),
}


@fault(40, "checkpoints with hostile pickles", LOADERS)
def hostile_checkpoints(saver: Saver, folder: Path, limit: int) -> Iterator[Result]:
    good = folder / "good"
    saver.save(good, 10)
    canary = folder / "canary"
    numbers = itertools.count()

    def work(data: bytes, has_older: bool) -> Outcome:
        place = folder / f"run{next(numbers)}"
        if has_older:
            shutil.copytree(good, place)
        else:
            place.mkdir()
        seal_for(place / "checkpoint-00000020.pt", data)
        try:
            step, _, skipped = saver.load(place)
            assert step == 20 or skipped, "silently an older one"
            return Outcome.DEGRADED if skipped else Outcome.SURVIVED
        except ColabkitError as error:
            if "weights_only" in str(error):
                raise AssertionError(f"the message advises to execute code: {error}") from error
            raise
        finally:
            assert not canary.exists(), "code of the file was executed"
            shutil.rmtree(place)

    pickles = spread(list(_hostile_pickles(canary).items()), limit)
    cases: _Cases = [
        (f"{name}{'' if has_older else ', only one'}", partial(work, data, has_older))
        for name, data in pickles
        for has_older in (True, False)
    ]
    buffer = io.BytesIO()
    torch.save({"made_by": "colabkit checkpoint 00000000-1-1", "content": content(20)}, buffer)
    fuzzed = [*overwrites(buffer.getvalue(), limit // 2, 4), *flips(buffer.getvalue(), limit // 2, 5)]
    cases += [(f"{name}, sealed", partial(work, data, True)) for name, data in fuzzed]
    yield from attempts(cases, refusals=saver.refusals)
