"""`StatusWriter` writes `status.json`, the state of a run, next to its checkpoints every few seconds.

A background thread writes the file, so it also shows that the process is alive while a step is slow or data is missing.
The thread never touches the GPU: the training thread hands over the values of a step when it is asked to.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from colabkit.foundation import (
    LoaderMeters,
    OneLineError,
    Partial,
    Sampler,
    file_changes,
    finite,
    meters,
    partials,
    printable,
)
from colabkit.training.checkpoints.files import RemoteFolder
from colabkit.training.checkpoints.folder import CheckpointFolder
from colabkit.training.records import INTENDED_STOPS, EpochRecord, Validation
from colabkit.training.report import short, thinned
from colabkit.training.run_status import ANSWER_S, FORMAT, STATUS_FILE, RunState

logger = logging.getLogger("colabkit")

LOCAL_S, REMOTE_S = 4.0, 30.0
"""Seconds between two writes to a local disk, and to a mount such as Drive."""

# Seconds to wait for the training thread to hand over the values of a step.
_VALUES_S = 0.5
_EPOCHS, _STEPS, _HOSTS, _HOSTS_S = 100, 128, 15, 60.0
_BEATS = 16
_RUN = re.compile(rb'"run": "([0-9a-f]{32})"')
_SECRETS = re.compile(
    r"(?i)(?<=://)[^/\s@]+@|\?\S+|\bbearer\s+\S+|\b\w*(?:token|secret|passw\w*|key|signature|credential)\w*['\"]?\s*[=:]\s*\S+"
    r"|\b[\w-]{32,}"
)

# Paths of the file, each with the mount that it is on, if any.
_StatusPath: TypeAlias = tuple[Path, RemoteFolder | None]


@dataclass(frozen=True, slots=True)
class RunPosition:
    """The position of a run: the current epoch from 0, the steps of this epoch, and all steps."""

    epoch: int
    step_in_epoch: int
    step: int


class StatusWriter:
    """Writes the status of one `train()` call, from `begin()` to `end()`.

    If the file cannot be written, a warning is logged once, and the next write is tried as usual. If another run starts
    in the same folder, its status stays, and this writer stops.

    Args:
        checkpoints: the checkpoint folder; None to write nothing.
        counts: meters of the loader.
        machine: sampler of the machine's state.

    Attributes:
        wants_values: whether the training thread should call `note()` after its next step.
        state: state of the run.
    """

    def __init__(self, checkpoints: CheckpointFolder | None, counts: LoaderMeters, machine: Sampler) -> None:
        self.wants_values = False
        self.state: RunState = "training"
        self._checkpoints = checkpoints
        self._counts = counts
        self._machine = machine
        self._run = uuid.uuid4().hex
        self._pid = os.getpid()
        self._targets: list[_StatusPath] = []
        # Paths that this run has written, so the status of another run there is newer.
        self._owned: set[Path] = set()
        self._limit_s = ANSWER_S
        if checkpoints is not None:
            local, folder = checkpoints.local_folder, checkpoints.folder
            self._limit_s = min(ANSWER_S, checkpoints.timeout_s)
            self._targets = [(local / STATUS_FILE, None)]
            if folder != local:
                self._targets.append((folder / STATUS_FILE, RemoteFolder(folder, self._limit_s)))
        self._thread: threading.Thread | None = None
        self._sender: threading.Thread | None = None
        self._begun, self._noted, self._ending = threading.Event(), threading.Event(), threading.Event()
        self._has_failed = False
        self._beat = 0
        self._cost_s = 0.0
        self._reason: str | None = None

    def is_outdated(self) -> bool:
        """Return whether the status file does not show the end of a run, for example because the process was killed."""
        try:
            return bool(self._targets) and json.loads(self._targets[0][0].read_bytes())["state"] != "finished"
        except (OSError, ValueError, KeyError, TypeError):
            return True

    def begin(
        self,
        position: Callable[[], RunPosition],
        epochs: int,
        steps_per_epoch: int,
        history: tuple[Sequence[EpochRecord], Sequence[Validation]],
        precision: str | None,
    ) -> None:
        """Write the first status and start the thread.

        Args:
            position: returns the position of the run; called from the thread.
            epochs: total number of epochs.
            steps_per_epoch: number of steps of a full epoch.
            history: finished epochs and validations, to which the run appends.
            precision: precision of the step, if known.
        """
        if not self._targets:
            return
        self._position, self._epoch_count, self._steps_per_epoch = position, epochs, steps_per_epoch
        self._history, self._precision = history, precision
        self._values, self._loss = meters.StepValues(), meters.TimeSeries()
        self._started_s = self._moved_s = time.monotonic()
        self._sent_s = -math.inf
        self._first = self._last = position()
        self._before = self._spent = self._counts.snapshot()
        self._beats: list[tuple[float, int, int]] = []
        self._thread = threading.Thread(target=self._work, name="colabkit-status", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            # The process has reached its limit on threads.
            self._say(error)
            self._thread = None
            return
        self._begun.wait(self._limit_s)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Show that the run is validating while the block runs."""
        self.state = "validating"
        try:
            yield
        finally:
            self.state = "training"

    def note(self, values: Mapping[str, object]) -> None:
        """Take the values of a step and the meters; call this from the training thread if `wants_values`."""
        self._values.note(values)
        if self._values.read():
            self.wants_values = False
            self._loss.add(self._values.values.get("loss"))
            self._spent = self._counts.snapshot()
            self._noted.set()

    def end(self, error: BaseException | None, stopped: str | None) -> None:
        """Stop the thread and write the final status, with the error that ended the run or why it stopped early."""
        # A forked process has no thread, and its end is not the end of the run.
        if self._thread is None or self._pid != os.getpid():
            return
        self.wants_values = False
        self.state = "finished" if stopped in INTENDED_STOPS else "stopped"
        self._reason = stopped
        if error is not None:
            self.state, self._reason = "failed", _text_of(error)
            if isinstance(error, KeyboardInterrupt):
                self.state, self._reason = "stopped", "Ctrl-C"
        self._spent = self._counts.snapshot()
        self._ending.set()
        # If the file system hangs, the thread is abandoned.
        self._thread.join(self._limit_s)

    def _work(self) -> None:
        """Write the status immediately, every few seconds, and at the end; runs in the thread."""
        self._update()
        self._begun.set()
        while self._targets and not self._ending.wait(LOCAL_S - _VALUES_S):
            self._noted.clear()
            self.wants_values = True
            self._noted.wait(_VALUES_S)
            self._update()
        self._update()

    def _update(self) -> None:
        began_s, is_last = time.thread_time(), self._ending.is_set()
        try:
            content = self._content()
            self._write(content, self._near)
            if is_last or time.monotonic() - self._sent_s >= REMOTE_S - LOCAL_S:
                self._send(content, is_last)
        except Exception as error:
            self._say(error)
        self._cost_s += time.thread_time() - began_s

    @property
    def _near(self) -> list[_StatusPath]:
        return [target for target in self._targets if target[1] is None]

    def _send(self, content: dict[str, Any], is_last: bool) -> None:
        """Write to the mount in another thread, since a mount may hang, unless the last write is still running."""
        if is_last and self._sender is not None:
            self._sender.join(self._limit_s)
        far = [target for target in self._targets if target[1] is not None]
        if not far or (self._sender is not None and self._sender.is_alive()):
            return
        self._sent_s = time.monotonic()
        arguments = (content | {"every_s": REMOTE_S}, far)
        self._sender = threading.Thread(target=self._write, args=arguments, name="colabkit-status", daemon=True)
        self._sender.start()
        if is_last:
            self._sender.join(self._limit_s)

    def _content(self) -> dict[str, Any]:
        """Return the status as JSON-serializable values."""
        now_s, at = time.monotonic(), self._position()
        if at != self._last:
            self._last, self._moved_s = at, now_s
        is_over = self.state in ("finished", "stopped", "failed")
        spent = self._spent - self._before
        counts, elapsed_s = self._counts, now_s - self._started_s
        handled = {part.name: part.handled_bytes for part in spent.parts}
        size = handled.get("read") or handled.get("gather", 0)
        self._beats = [*self._beats[1 - _BEATS :], (now_s, counts.samples, size)]
        speed, data = _rates(self._beats)
        records, validations = (list(one) for one in self._history)
        hosts = [replace(host, at_s=host.at_s - now_s) for host in self._machine.recent(_HOSTS_S)]
        self._beat += 1
        is_waiting = (
            counts.batches - self._before.batches <= at.step - self._first.step
            and not is_over
            and self.state == "training"
        )
        newest = self._checkpoints.latest if self._checkpoints else None
        values: dict[str, Any] = {
            "format": FORMAT,
            "run": self._run,
            "owner": partials.owner(),
            "host": os.uname().nodename,
            "pid": self._pid,
            "beat": self._beat,
            "every_s": LOCAL_S,
            "written_s": time.time(),
            "state": self.state,
            "reason": self._reason,
            **asdict(at),
            "epoch_count": self._epoch_count,
            "steps_per_epoch": self._steps_per_epoch,
            "elapsed_s": elapsed_s,
            "remaining_s": None if is_over else self._remaining_s(at, elapsed_s),
            "waiting_s": now_s - self._moved_s if is_waiting else 0.0,
            "cost_share": self._cost_s / max(elapsed_s, 1e-9),
            "checkpoint": newest.name if newest else None,
            "values": short(dict(self._values.values)),
            "loss_curve": short(thinned(list(self._loss.whole), 120)),
            "speed_curve": short(speed),
            "data_curve": short(data),
            "epochs": short([asdict(record) for record in thinned(records, _EPOCHS)]),
            "validations": short([asdict(one) for one in thinned(validations, _EPOCHS)]),
            "spent": asdict(replace(spent, recent=())),
            "facts": asdict(counts.facts) if counts.facts else None,
            "hosts": short([asdict(host) for host in thinned(hosts, _HOSTS)]),
            "precision": self._precision,
        }
        values["spent"]["recent"] = short([list(step) for step in spent.recent[-_STEPS:]])
        plain: dict[str, Any] = finite(values)
        return plain

    def _remaining_s(self, at: RunPosition, elapsed_s: float) -> float | None:
        done = at.step - self._first.step
        left = self._steps_per_epoch * (self._epoch_count - at.epoch) - at.step_in_epoch
        return max(0, left) * elapsed_s / done if done and elapsed_s >= LOCAL_S else None

    def _write(self, content: Mapping[str, Any], targets: Sequence[_StatusPath]) -> None:
        text = json.dumps(content, allow_nan=False).encode()

        def put(path: Path, moved: Callable[[], object]) -> bool:
            if path in self._owned and _other_run(path, self._run):
                return False
            moved()
            with Partial(path) as new:
                # Do not flush to the device: the file need not survive a crash of the machine, only the end of this
                # process.
                file_changes.write_file(new.path, text)
                moved()
                new.publish(replace=True)
            self._owned.add(path)
            return True

        for path, remote in tuple(targets):
            try:
                is_ours = (
                    put(path, lambda: None)
                    if remote is None
                    else remote.ask(f"write {str(path)!r}", partial(put, path))
                )
            except Exception as error:
                self._say(error)
                continue
            if not is_ours:
                self._targets = [one for one in self._targets if one != (path, remote)]
                logger.warning("another training writes to %r, too; its status replaces that of this one", str(path))

    def _say(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.warning("the status of the run cannot be written; training continues: %s", reason)


def _rates(beats: Sequence[tuple[float, int, int]]) -> tuple[list[float], list[float]]:
    """Return the samples per second and the bytes per second between consecutive beats."""
    speed, data = [], []
    for before, now in itertools.pairwise(beats):
        seconds, samples, size = (b - a for a, b in zip(before, now, strict=True))
        if seconds > 0:
            speed.append(samples / seconds)
            data.append(size / seconds)
    return speed, data


def _other_run(path: Path, run: str) -> bool:
    """Return whether a file holds the status of another run."""
    try:
        with path.open("rb", buffering=0) as file:
            found = _RUN.search(file.read(256))
    except OSError:
        return False
    return found is not None and found[1].decode() != run


def _text_of(error: BaseException) -> str:
    """Return an error as one line, without text that looks like a secret."""
    line = (str(error).splitlines() or [""])[0]
    name = "" if isinstance(error, OneLineError) else f"{type(error).__name__}: "
    return printable(name + _SECRETS.sub("...", line))[:300].rstrip(": ")
