"""Record a run: combine meter events, host snapshots and the doctor's diagnosis into the state that the panel shows."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from colabkit.foundation import HostSnapshot, LoaderMeters, MetersSnapshot, Sampler, meters
from colabkit.monitoring.diagnosing.diagnosis import Diagnosis
from colabkit.monitoring.diagnosing.verdict import Doctor
from colabkit.monitoring.panel.content import PanelState, Phase

_NOW_S = 5.0
# Long enough to average over bursts, since loaders make batches in groups.
_LATELY_S = 15.0
_MINUTE_S = 60.0
# The doctor takes more time than the rest of the panel, and users need time to read a verdict.
_LOOK_S = 2.0


class RunRecorder:
    """Turns the events of one run, or of a plain loop over a loader, into `PanelState`s.

    Recording a step takes about half a microsecond and reads nothing from the device.

    Args:
        doctor: diagnoses the run.
        clock: returns the current time in seconds, on the scale of `HostSnapshot.at_s`.
    """

    def __init__(self, doctor: Doctor, clock: Callable[[], float] = time.monotonic) -> None:
        self._doctor = doctor
        self._clock = clock
        self._started_s = clock()
        self._ended_s: float | None = None
        self._stopped_by: str | None = None
        self._meters: LoaderMeters | None = None
        self._begin: MetersSnapshot | None = None
        self._in_run = False
        self._phase: Phase = "starting"
        self._epoch: int | None = None
        self._epochs: int | None = None
        self._steps_per_epoch: int | None = None
        self._step = 0
        self._noted_steps = 0
        self._waiting_s = 0.0
        self._window: deque[tuple[float, MetersSnapshot]] = deque()
        self._values = meters.StepValues()
        self._validation: Mapping[str, float] = {}
        self._next_point_s = 0.0
        self._next_look_s = 0.0
        self._diagnosis: Diagnosis | None = None
        self._speed, self._data, self._queue, self._loss = (meters.TimeSeries() for _ in range(4))
        self._noters: dict[type, Callable[[Any], None]] = {
            meters.BatchTaken: self._batch_taken,
            meters.StepDone: self._step_done,
            meters.ValidationDone: self._validated,
            meters.Waiting: self._waits,
            meters.EpochStarted: self._epoch_started,
            meters.RunStarted: self._run_started,
            meters.RunEnded: lambda event: self.end(event.error),
        }

    def note(self, event: meters.Event) -> None:
        """Record an event; events after the end of the run are ignored."""
        if self._ended_s is None and (note := self._noters.get(type(event))) is not None:
            note(event)

    def end(self, error: str | None) -> None:
        """Record the end of the run and the name of the error that stopped it; later calls are ignored."""
        if self._ended_s is None:
            self._phase = "stopped" if error else "finished"
            self._stopped_by = error
            self._ended_s = self._clock()

    def _batch_taken(self, event: meters.BatchTaken) -> None:
        if event.meters is not self._meters:
            return
        self._phase, self._waiting_s = "running", 0.0
        if not self._in_run:
            self._step += 1
            self._noted_steps += 1

    def _step_done(self, event: meters.StepDone) -> None:
        self._values.note(event.values)
        self._epoch, self._step = event.epoch + 1, event.step_in_epoch
        self._noted_steps += 1

    def _validated(self, event: meters.ValidationDone) -> None:
        self._validation = event.values

    def _waits(self, event: meters.Waiting) -> None:
        if event.meters is self._meters:
            self._phase, self._waiting_s = "waiting", event.wait_s

    def _epoch_started(self, event: meters.EpochStarted) -> None:
        """Follow the first loader and ignore others, such as a validation loader."""
        if self._meters is None or (event.meters is self._meters and not self._in_run):
            self._watch(event.meters)
            self._epoch, self._step, self._steps_per_epoch = event.epoch + 1, 0, event.batches

    def _run_started(self, event: meters.RunStarted) -> None:
        self._watch(event.meters)
        self._doctor.precision = event.precision
        self._in_run = True
        self._epochs, self._steps_per_epoch = event.epochs, event.steps_per_epoch

    def _watch(self, counts: LoaderMeters) -> None:
        if self._meters is not counts:
            self._meters, self._begin = counts, counts.snapshot()
            self._started_s = self._clock()

    def state(self, machine: Sampler, cost_share: float | None) -> PanelState:
        """Return the current state.

        Args:
            machine: sampler of the machine's state.
            cost_share: share of the time that the panel takes, in [0, 1]; None if unknown.
        """
        is_over = self._ended_s is not None
        now_s = self._clock() if self._ended_s is None else self._ended_s
        elapsed_s = now_s - self._started_s
        counts, facts = self._meters, self._meters.facts if self._meters else None
        spent = counts.snapshot() - self._begin if counts and self._begin else MetersSnapshot()
        lately_s, lately = self._lately(now_s, spent)
        speed, data = self._samples_per_s(spent), _bytes_per_s(spent, lately, lately_s)
        queue = lately.queue_rate if lately.queue_room else None
        self._read(is_over)
        if not is_over and now_s >= self._next_point_s:
            self._next_point_s = now_s + 1.0
            for series, value in ((self._speed, speed), (self._data, data), (self._queue, queue)):
                series.add(value)
        recent = machine.recent(_MINUTE_S)
        seen = [host for host in machine.curve() if host.at_s >= self._started_s] if is_over else recent
        number = _gpu_number(facts.device if facts else "")
        if counts and (is_over or now_s >= self._next_look_s):
            self._next_look_s = now_s + _LOOK_S
            self._diagnosis = self._doctor.look(spent, facts, recent, cost_share, is_over)
        return PanelState(
            phase=self._phase,
            stopped_by=self._stopped_by,
            epoch=self._epoch,
            epochs=self._epochs,
            step=self._step,
            steps_per_epoch=self._steps_per_epoch,
            elapsed_s=elapsed_s,
            remaining_s=None if is_over else self._remaining_s(elapsed_s),
            waiting_s=self._waiting_s,
            diagnosis=self._diagnosis,
            samples_per_s=speed,
            data_bytes_per_s=data,
            queue_rate=queue,
            values=self._values.values,
            validation=meters.label_validation(self._validation, self._values.values),
            host=machine.latest,
            gpu_number=number,
            load_curve=_loads(seen, number),
            speed_curve=self._speed.whole if is_over else self._speed.newest,
            data_curve=self._data.whole if is_over else self._data.newest,
            queue_curve=self._queue.whole if is_over else self._queue.newest,
            loss_curve=self._loss.whole,
            cost_share=cost_share,
            at_s=time.time() - self._clock() + now_s,
        )

    def _read(self, is_over: bool) -> None:
        """Read the step values; wait for values on the device only at the end of the run."""
        is_new = False
        with contextlib.suppress(Exception):
            # If the device has failed, the training loop raises the error.
            is_new = self._values.read_all() if is_over else self._values.read()
        if is_new:
            self._loss.add(self._values.values.get("loss"))

    def _lately(self, now_s: float, spent: MetersSnapshot) -> tuple[float, MetersSnapshot]:
        if self._ended_s is not None:
            return now_s - self._started_s, spent
        self._window.append((now_s, spent))
        while len(self._window) > 2 and now_s - self._window[1][0] >= _LATELY_S:
            self._window.popleft()
        then_s, then = self._window[0]
        return now_s - then_s, spent - then

    def _samples_per_s(self, spent: MetersSnapshot) -> float | None:
        """Return the samples per second over the newest steps and the current wait, or over a whole finished run."""
        if self._ended_s is not None:
            return spent.samples / spent.seconds if spent.seconds else None
        samples, seconds = 0, self._waiting_s
        for step in reversed(spent.recent):
            samples += step.samples
            seconds += step.seconds
            if seconds >= _NOW_S:
                break
        return samples / seconds if spent.recent and seconds else None

    def _remaining_s(self, elapsed_s: float) -> float | None:
        if not self._steps_per_epoch or self._epoch is None or not self._noted_steps:
            return None
        epochs = self._epochs - self._epoch + 1 if self._epochs else 1
        return max(0, self._steps_per_epoch * epochs - self._step) * elapsed_s / self._noted_steps


def _bytes_per_s(spent: MetersSnapshot, lately: MetersSnapshot, seconds: float) -> float | None:
    if not seconds:
        return None
    whole = {part.name: part.handled_bytes for part in spent.parts}
    parts = {part.name: part.handled_bytes for part in lately.parts}
    return next((parts[name] / seconds for name in ("read", "gather") if whole.get(name)), None)


def _gpu_number(device: str) -> int:
    number = device.partition(":")[2]
    return int(number) if number.isdecimal() else 0


def _loads(hosts: Sequence[HostSnapshot], gpu_number: int) -> tuple[float, ...]:
    found = []
    for host in hosts:
        gpus = host.gpus[gpu_number:] or host.gpus
        rate = gpus[0].utilization_rate if gpus else host.cpu_rate
        if rate is not None:
            found.append(rate)
    return tuple(found)
