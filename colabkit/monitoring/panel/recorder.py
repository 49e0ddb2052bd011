"""Record a run: combine meter events, host snapshots and the doctor's diagnosis into the state that the panel shows."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from colabkit.foundation import HostSnapshot, LoaderMeters, MetersSnapshot, Progress, Sampler, meters
from colabkit.monitoring.diagnosing.diagnosis import Diagnosis
from colabkit.monitoring.diagnosing.machine_profile import SNAPSHOT_S
from colabkit.monitoring.diagnosing.verdict import Doctor
from colabkit.monitoring.panel.content import PanelState, Phase

_NOW_S = 5.0
# Window for rates of batches, which loaders make in groups: long enough to average over several groups.
_LATELY_S = 15.0
_MINUTE_S = 60.0
# A remaining time is shown once predictions of the end have agreed for this long, to within this share of that time.
_STEADY_S, _STEADY_SHARE = 5.0, 0.1
_PACED_STEPS = 10
# Maximum number of epochs that are kept; beyond this, every other older epoch is dropped.
_MOST_EPOCHS = 600
# Time between two diagnoses, which cost more than the rest of the panel; users also need time to read a verdict.
_LOOK_S = 2.0


class RunRecorder:
    """Turns the events of one run, or of a plain loop over a loader, into `PanelState`s.

    Recording a step takes about half a microsecond and reads nothing from the device.

    Args:
        doctor: the doctor that diagnoses the run.
        clock: returns the current time in seconds, on the scale of `HostSnapshot.at_s`.
    """

    def __init__(self, doctor: Doctor, clock: Callable[[], float] = time.monotonic) -> None:
        self._doctor = doctor
        self._clock = clock
        self._started_s = clock()
        self._ended_s: float | None = None
        self._ended_at_s: float | None = None
        # The start of a loop over another loader; None once the loop over this one continues.
        self._left_s: float | None = None
        self._stopped_by: str | None = None
        self._meters: LoaderMeters | None = None
        self._begin: MetersSnapshot | None = None
        self._in_run = False
        self._phase: Phase = "starting"
        self._epoch: int | None = None
        self._epochs: int | None = None
        self._steps_per_epoch: int | None = None
        self._step = 0
        self._left, self._is_left_of_run = SteadyEstimate(), False
        self._pace = EpochPace(clock)
        self._waiting_s = 0.0
        self._window: deque[tuple[float, MetersSnapshot]] = deque()
        self._values = meters.StepValues()
        self._validation: Mapping[str, float] = {}
        self._next_point_s = 0.0
        self._next_look_s = 0.0
        self._diagnosis: Diagnosis | None = None
        self._speed, self._data, self._loss, self._worked = (meters.TimeSeries() for _ in range(4))
        self._epochs_done: list[tuple[int, Mapping[str, float]]] = []
        self._work: Progress | None = None
        self._done: deque[tuple[float, int]] = deque()
        self._noters: dict[type, Callable[[Any], None]] = {
            meters.BatchTaken: self._batch_taken,
            meters.StepDone: self._step_done,
            meters.ValidationDone: self._validated,
            meters.EpochDone: self._epoch_done,
            meters.DataWait: self._waits,
            meters.EpochStarted: self._epoch_started,
            meters.RunStarted: self._run_started,
            meters.RunEnded: lambda event: self.end(event.error),
        }

    @property
    def has_loop(self) -> bool:
        """Whether a run or loop has begun."""
        return self._meters is not None

    def is_replaced_by(self, event: meters.Event) -> bool:
        """Return whether a loop that trains begins after loops that only validate, as at the start of Lightning."""
        former = self._meters
        if type(event) is not meters.EpochStarted or former is None or event.meters is former or self._in_run:
            return False
        return meters.has_gradients() and not former.has_trained

    def note(self, event: meters.Event) -> None:
        """Record an event; events after the end of the run are ignored."""
        if self._ended_s is None and (note := self._noters.get(type(event))) is not None:
            note(event)

    def note_work(self, work: Progress) -> None:
        """Record the progress of an operation such as staging, unless a run or loop has begun."""
        if self._ended_s is None and not self.has_loop:
            if self._work is None or (work.action, work.total) != (self._work.action, self._work.total):
                self._worked, self._left = meters.TimeSeries(), SteadyEstimate()
                self._done.clear()
            self._phase, self._work = "running", work

    def end(self, error: str | None) -> None:
        """Record the end of the run and the name of the error that stopped it; later calls are ignored."""
        if self._ended_s is None:
            self._phase = "stopped" if error else "finished"
            self._stopped_by = error
            self._ended_s, self._ended_at_s = self._left_s or self._clock(), time.time()

    def _batch_taken(self, event: meters.BatchTaken) -> None:
        if event.meters is not self._meters:
            return
        self._phase, self._waiting_s, self._left_s = "running", 0.0, None
        if not self._in_run:
            self._step += 1
            self._pace.step()

    def _step_done(self, event: meters.StepDone) -> None:
        self._values.note(event.values)
        if self._epoch != event.epoch + 1:
            self._pace.begin_epoch(event.step_in_epoch == 1)
        self._epoch, self._step = event.epoch + 1, event.step_in_epoch
        self._pace.step()

    def _validated(self, event: meters.ValidationDone) -> None:
        self._validation = event.values

    def _epoch_done(self, event: meters.EpochDone) -> None:
        self._epochs_done.append((event.epoch + 1, event.values))
        if len(self._epochs_done) > _MOST_EPOCHS:
            best = min(self._epochs_done, key=lambda epoch: epoch[1].get("val_loss", epoch[1].get("loss", 0.0)))
            kept = self._epochs_done[::2]
            self._epochs_done = kept if best in kept else sorted([*kept, best], key=lambda epoch: epoch[0])

    def _waits(self, event: meters.DataWait) -> None:
        if event.meters is self._meters:
            self._phase, self._waiting_s = "waiting", event.wait_s

    def _epoch_started(self, event: meters.EpochStarted) -> None:
        """Follow the first loader; of others, such as a validation loader, record only when their loops begin."""
        if self._meters is None or (event.meters is self._meters and not self._in_run):
            self._watch(event.meters)
            self._epoch, self._step, self._steps_per_epoch = event.epoch + 1, 0, event.batches
            self._left_s = None
            self._pace.begin_epoch(True)
        elif event.meters is not self._meters and not self._in_run:
            self._left_s = self._clock() if self._left_s is None else self._left_s

    def _run_started(self, event: meters.RunStarted) -> None:
        self._watch(event.meters)
        self._doctor.precision = event.precision
        self._in_run = True
        self._epochs, self._steps_per_epoch = event.epochs, event.steps_per_epoch

    def _watch(self, counts: LoaderMeters) -> None:
        if self._meters is not counts:
            self._meters, self._begin = counts, counts.snapshot()
            self._phase, self._work = "starting", None
            self._started_s = self._clock()

    def state(self, machine: Sampler, cost_share: float | None) -> PanelState:
        """Return the current state.

        Args:
            machine: sampler of the machine's state.
            cost_share: share of the time that the panel takes, in [0, 1]; None if unknown.
        """
        is_over = self._ended_s is not None
        now_s = self._clock() if self._ended_s is None else self._ended_s
        elapsed_s = (self._left_s or now_s) - self._started_s
        counts, facts = self._meters, self._meters.facts if self._meters else None
        spent = counts.snapshot() - self._begin if counts and self._begin else MetersSnapshot()
        work_per_s = self._work_per_s(now_s)
        lately_s, lately = self._lately(now_s, spent)
        speed, data = self._samples_per_s(spent), _bytes_per_s(spent, lately, lately_s)
        self._read(is_over)
        if not is_over and now_s >= self._next_point_s:
            self._next_point_s = now_s + 1.0
            for series, value in ((self._speed, speed), (self._data, data), (self._worked, work_per_s)):
                series.add(value)
        recent = machine.recent(_MINUTE_S)
        if counts and (is_over or now_s >= self._next_look_s):
            self._doctor.epochs, self._doctor.values = self._epochs_done, self._values.values
            self._diagnosis = self._doctor.look(spent, facts, self._of_run(recent, now_s), cost_share, is_over)
            # Before the first verdict, the doctor only counts steps.
            self._next_look_s = now_s + (0.0 if self._diagnosis.verdict == "unknown" else _LOOK_S)
        run_s, epoch_s = (None, None) if is_over else self._remaining_s(now_s, work_per_s)
        return PanelState(
            phase=self._phase,
            stopped_by=self._stopped_by,
            epoch=self._epoch,
            epochs=self._epochs,
            step=self._step,
            steps_per_epoch=self._steps_per_epoch,
            elapsed_s=elapsed_s,
            remaining_s=run_s,
            epoch_remaining_s=epoch_s,
            waiting_s=self._waiting_s,
            diagnosis=self._diagnosis,
            samples_per_s=speed,
            data_bytes_per_s=data,
            is_remote=bool(facts and facts.is_remote),
            queue_rate=lately.queue_rate if lately.queue_room else None,
            values=self._values.values,
            validation=meters.label_validation(self._validation, self._values.values),
            epoch_values=tuple(self._epochs_done),
            work=self._work,
            work_per_s=work_per_s,
            work_curve=self._worked.whole if is_over else self._worked.newest,
            host=machine.latest,
            hosts=tuple(host for host in machine.curve() if host.at_s >= self._started_s) if is_over else recent,
            gpu_number=_gpu_number(facts.device if facts else ""),
            speed_curve=self._speed.whole if is_over else self._speed.newest,
            data_curve=self._data.whole if is_over else self._data.newest,
            loss_curve=self._loss.whole,
            cost_share=cost_share,
            at_s=self._ended_at_s or time.time(),
        )

    def _of_run(self, hosts: tuple[HostSnapshot, ...], now_s: float) -> tuple[HostSnapshot, ...]:
        """Return the snapshots of the run; each covers the second before it."""
        first_s, last_s = self._started_s + SNAPSHOT_S, now_s + SNAPSHOT_S
        return tuple(host for host in hosts if first_s <= host.at_s <= last_s) or hosts[-1:]

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

    def _work_per_s(self, now_s: float) -> float | None:
        """Return the operation's units per second over the last seconds; over its whole duration once it has ended."""
        work = self._work
        if work is None or work.unit == " s":
            return None
        if self._ended_s is not None:
            return work.done / work.seconds if work.seconds else None
        self._done.append((now_s, work.done))
        while len(self._done) > 2 and now_s - self._done[1][0] >= _NOW_S:
            self._done.popleft()
        then_s, then = self._done[0]
        return (work.done - then) / (now_s - then_s) if now_s > then_s else None

    def _remaining_s(self, now_s: float, work_per_s: float | None) -> tuple[float | None, float | None]:
        """Return the seconds to the end of the run or operation, or else to that of the epoch; None until stable."""
        if self._work is not None:
            left = (self._work.total or 0) - self._work.done
            return self._left.of(now_s, left / work_per_s if work_per_s and left > 0 else None), None
        if not self._steps_per_epoch or self._epoch is None:
            return None, None
        steps = max(0, self._steps_per_epoch - self._step)
        epochs = self._epochs - self._epoch if self._epochs else None
        run_s, epoch_s = self._pace.remaining_s(now_s, steps, epochs)
        is_run = run_s is not None
        if is_run != self._is_left_of_run:
            self._left, self._is_left_of_run = SteadyEstimate(), is_run
        steady_s = self._left.of(now_s, run_s if is_run else epoch_s)
        return (steady_s, None) if is_run else (None, steady_s)


def _bytes_per_s(spent: MetersSnapshot, lately: MetersSnapshot, seconds: float) -> float | None:
    if not seconds:
        return None
    whole = {part.name: part.handled_bytes for part in spent.parts}
    parts = {part.name: part.handled_bytes for part in lately.parts}
    return next((parts[name] / seconds for name in ("read", "gather") if whole.get(name)), None)


def _gpu_number(device: str) -> int:
    number = device.partition(":")[2]
    return int(number) if number.isdecimal() else 0


class SteadyEstimate:
    """Estimates of a remaining time, which are returned only once they have agreed for a few seconds."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, float]] = deque()
        self._since_s = 0.0

    def of(self, now_s: float, remaining_s: float | None) -> float | None:
        """Return an estimate in seconds made at `now_s`, or None if earlier estimates are missing or differ from it."""
        if remaining_s is None:
            self._ends.clear()
            return None
        if not self._ends:
            self._since_s = now_s
        self._ends.append((now_s, now_s + remaining_s))
        # An average speed since the start changes ever more slowly, so later estimates must agree for longer.
        compared_s = min(max(_STEADY_S, (now_s - self._since_s) / 4), _MINUTE_S)
        while len(self._ends) > 2 and now_s - self._ends[1][0] >= compared_s:
            self._ends.popleft()
        ends = [end_s for _, end_s in self._ends]
        is_steady = max(ends) - min(ends) <= max(_STEADY_S / 2, _STEADY_SHARE * remaining_s)
        return remaining_s if is_steady and now_s - self._ends[0][0] >= _STEADY_S else None


class EpochPace:
    """Estimates the remaining time of an epoch from its steps, and that of a run from its latest complete epochs.

    Validations and checkpoints between epochs thus count. The first step of an epoch does not, since it may wait for
    the loader to start.

    Args:
        clock: returns the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._epoch_s: deque[float] = deque(maxlen=3)
        self._began_s: float | None = None
        self._is_whole = False
        self._steps = 0

    def begin_epoch(self, is_whole: bool) -> None:
        """Note that an epoch begins; `is_whole` is false if it resumes after its first step."""
        if self._steps and self._began_s is not None and self._is_whole:
            self._epoch_s.append(self._clock() - self._began_s)
        self._began_s, self._is_whole, self._steps = None, is_whole, 0

    def step(self) -> None:
        """Note a step."""
        self._steps += 1
        if self._began_s is None:
            self._began_s = self._clock()

    def remaining_s(self, now_s: float, steps: int, epochs: int | None) -> tuple[float | None, float | None]:
        """Return the remaining seconds of the run and of the epoch; None if unknown.

        Args:
            now_s: current time.
            steps: number of remaining steps in this epoch.
            epochs: number of epochs after this one; None if unknown.
        """
        if self._began_s is None:
            return None, None
        passed_s = now_s - self._began_s
        epoch_s = steps * passed_s / (self._steps - 1) if self._steps > _PACED_STEPS else None
        if epochs is None or not self._epoch_s:
            return None, epoch_s
        whole_s = fmean(self._epoch_s)
        return whole_s * epochs + max(whole_s - passed_s, epoch_s or 0.0), epoch_s
