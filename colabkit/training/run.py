"""One run of `train()`: resume, epochs, steps, validations, checkpoints, report.

A run publishes its events to `meters` and does not know the subscribers. It reads no value from the device between two
steps, and waits for the GPU only at checkpoints, validations and the end of an epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from copy import copy
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, cast

import torch

from colabkit.foundation import InvalidOption, Sampler, TrainingDiverged, cannot, meters
from colabkit.loading import Loader
from colabkit.training.batch_values import unscaled_images
from colabkit.training.checkpoints.snapshots import random_state
from colabkit.training.ranks import Ranks
from colabkit.training.records import (
    EpochLog,
    EpochProgress,
    EpochRecord,
    SampleMeans,
    Validation,
    ValueCurve,
    ValueRecorder,
    listened,
    values_of,
)
from colabkit.training.report import TrainReport
from colabkit.training.run_checkpoints import RunCheckpoints
from colabkit.training.schedule import (
    RESERVE_S,
    SaveSchedule,
    StopRequests,
    Validator,
    WaitInterrupt,
    check_time_left,
)
from colabkit.training.status_writer import RunPosition, StatusWriter
from colabkit.training.steps import SupervisedStep

_RESERVE = 2.0
"""Time reserved before a deadline for a step and a checkpoint, as a multiple of the latest and slowest so far."""


@dataclass(eq=False, repr=False)
class TrainingRun:
    """The state of one `train()` call."""

    step: Callable[[Any], object]
    loader: Loader
    saving: RunCheckpoints
    schedule: SaveSchedule
    judge: Validator
    processes: Ranks
    stops: StopRequests
    on_step: Callable[[meters.StepDone], None] | None
    watched: Sampler
    must_be_finite: bool
    log: EpochLog | None

    def __post_init__(self) -> None:
        self._epochs: list[EpochRecord] = []
        self._validations: list[Validation] = []
        self._curve = ValueCurve()
        self._status = StatusWriter(self.saving.checkpoints, self.loader.meters, self.watched)
        self._begun: EpochProgress | None = None
        self._steps = 0
        self._step_s = self._validate_s = 0.0
        self._is_saved = False
        self._is_stopped = False
        self._trained = self.loader.received
        self._grouped: Callable[[Any], object] | None = None
        self._complete: Callable[[], None] = lambda: None
        if type(self.step) is SupervisedStep:
            self._grouped, self._complete = self.step.grouped, self.step.accuracies.compute
        self._recorder = self._recorder_of(SampleMeans())
        # The numbers that a custom step returns are known after the first step.
        self._checks_monitor = self._grouped is None and not self.judge.can_validate
        is_limited = self.stops.deadline is not None or self.schedule.is_timed
        self._always_decides = self.processes.count > 1 or is_limited or self.saving.on_checkpoint is not None

    def resume(self, resume: bool) -> None:
        """Resume from the newest checkpoint, or write the first checkpoint."""
        saved = self.saving.resume(resume)
        if saved is None:
            # If the Loader is in the middle of an epoch from an earlier iteration, start a new epoch.
            self.loader.set_epoch(self.loader.next_epoch)
            self._trained = self.loader.received
            # Write a first checkpoint, to fail now instead of after hours of training if checkpoints cannot be written.
            self._save(wait=True)
            return
        self._trained = self.loader.received
        self._steps = saved["steps"]
        self._is_saved = True
        self.schedule.saved(self._steps)
        self._epochs = [EpochRecord(**record) for record in saved["epochs"]]
        self._validations = [Validation(**validation) for validation in saved["validations"]]
        self._curve = ValueCurve.of(saved["curve"])
        if changed := self.judge.load_state_dict(saved["judge"]):
            self.saving.changed_settings += (changed,)
        self._begun = None if saved["begun"] is None else EpochProgress(**saved["begun"])
        if self._begun is not None and not self.processes.is_first:
            # The saved count covers all processes, so only rank 0 keeps it; otherwise it would count several times.
            self._begun.samples = 0
        means = SampleMeans.of_rank(saved["means"], self.processes.rank, self.processes.count)
        self._recorder = self._recorder_of(means)

    def _recorder_of(self, means: SampleMeans) -> ValueRecorder:
        return ValueRecorder(self._curve, means, self.must_be_finite, self._complete)

    def through(self, epochs: int, started: float) -> TrainReport:
        """Train until `epochs` epochs are complete or training is stopped, and return the report."""
        before, trained_before, steps_before = self.loader.meters.snapshot(), len(self._epochs), self._steps
        seconds_before = self._seconds
        error: BaseException | None = None
        unsaved: str | None = None
        is_announced = False
        is_left = len(self._epochs) < epochs and not self.judge.is_out_of_patience
        try:
            if is_left:
                self.stops.reserve_s = self._reserve_s
                check_time_left(*self.processes.from_first((self.stops.left_s, self.stops.reserve_s)))
                is_announced = True
                meters.publish(meters.RunStarted(self.loader.meters, epochs, len(self.loader), self._precision))
            if is_announced or self._status.is_outdated():
                history = self._epochs, self._validations
                self._status.begin(self._position, epochs, len(self.loader), history, self._precision)
            while is_left:
                is_left = self._epoch() and len(self._epochs) < epochs and not self.judge.is_out_of_patience
                # Ranks may notice a request at different times.
                is_left = is_left and not max(self.processes.from_all(self.stops.look()))
            if len(self._epochs) < epochs and self.judge.is_out_of_patience:
                self.stops.request("patience")
            self.stops.note(max(self.processes.from_all(self.stops.strength)))
            if not self._is_saved:
                self._save()
            self.stops.is_finishing = True
            unsaved = self.saving.finish()
        except BaseException as raised:
            error = raised
            if isinstance(raised, Exception) and self.saving.checkpoints is not None:
                # Let pending checkpoint writes finish. Other processes may never reach this point, so do not wait for
                # them.
                with suppress(Exception):
                    self.saving.checkpoints.finish()
                    if not self._steps or (self._steps == 1 and isinstance(raised, TrainingDiverged)):
                        # Remove the untrained first checkpoint, since it prevents a run with another model or rate.
                        self.saving.checkpoints.discard_untrained()
                if isinstance(raised, TrainingDiverged):
                    self.saving.add_newest_to(raised)
            raise
        finally:
            if is_announced:
                name = type(error).__name__ if error else unsaved or self.stops.reason
                meters.publish(meters.RunEnded("KeyboardInterrupt" if name == "Ctrl-C" else name))
            self._status.end(error, self.stops.reason)
        done = self.loader.meters.snapshot() - before
        seconds = self._seconds - seconds_before
        samples = sum(self.processes.from_all(done.samples)) if self._steps > steps_before else 0
        kept = self.saving.checkpoints
        return TrainReport(
            epochs=tuple(self._epochs),
            trained=len(self._epochs) - trained_before,
            steps=self._steps,
            seconds=time.monotonic() - started,
            samples_per_s=samples / seconds if seconds > 0 else 0.0,
            wait_share=min(1.0, done.wait_s / seconds) if seconds > 0 else 0.0,
            parts={part.name: part.busy_s for part in done.parts},
            curve=self._curve.points(self._steps),
            validations=tuple(self._validations),
            stopped=self.stops.reason,
            checkpoint=kept.latest if kept else None,
            best=kept.best if kept else None,
            best_value=self.judge.best,
            resumed_from=self.saving.resumed_from,
            skipped_checkpoints=self.saving.skipped_checkpoints,
            changed_settings=self.saving.changed_settings,
            failed_saves=kept.failures if kept else (),
            spent=done,
            facts=self.loader.meters.facts,
            hosts=tuple(host for host in self.watched.curve() if host.at_s >= started),
            precision=self._precision,
        )

    @property
    def _precision(self) -> str | None:
        return str(self.step.amp or "fp32") if isinstance(self.step, SupervisedStep) else None

    @property
    def _seconds(self) -> float:
        return sum(record.seconds for record in self._epochs) + (self._begun.seconds if self._begun else 0.0)

    def _position(self) -> RunPosition:
        begun = self._begun
        epoch, steps = (len(self._epochs), 0) if begun is None else (begun.epoch, begun.steps)
        return RunPosition(epoch, steps, self._steps)

    def _epoch(self) -> bool:
        if self._begun is None:
            self._begun = EpochProgress(len(self._epochs), self._trained[0])
            self._recorder = self._recorder_of(SampleMeans())
        try:
            if self._trained[0] == self._begun.loader_epoch and not self._batches(self._begun):
                return False
            if not self._is_whole:
                cast(Any, self.step).flush()
            is_by_epoch = self.judge.can_validate and self.judge.is_by_epoch
            if is_by_epoch or self._begun.is_validation_due:
                self._validate(self._begun)
        except WaitInterrupt as interrupt:
            # If this run is part of a validation, the run that validates may be the one to stop.
            if interrupt.owner is not self.stops:
                raise
            return False
        self._end(self._begun)
        return not self._is_stopped

    def _batches(self, begun: EpochProgress) -> bool:
        counts = self.loader.meters
        former, before = counts.snapshot(), copy(begun)
        started, apart_s = perf_counter(), 0.0

        def count(waits: bool = True) -> None:
            # Wait for steps that are queued on a GPU, whose time belongs to this epoch.
            if waits and counts.clock is not None:
                counts.clock.finish()
            begun.seconds = before.seconds + perf_counter() - started - apart_s
            begun.spend(before, counts.snapshot() - former)

        def validate() -> None:
            nonlocal apart_s
            count()
            began = perf_counter()
            try:
                self._validate(begun)
            finally:
                validated_s = perf_counter() - began
                apart_s += validated_s
                if counts.clock is not None:
                    counts.clock.apart(validated_s)

        try:
            is_complete = self._steps_on_batches(begun, count, validate)
        except BaseException:
            # After an error, the GPU may wait forever for another rank.
            count(waits=False)
            raise
        count()
        return is_complete

    def _steps_on_batches(self, begun: EpochProgress, count: Callable[[], None], validate: Callable[[], None]) -> bool:
        stops, is_whole, counts = self.stops, self._is_whole, self.loader.meters
        if begun.is_validation_due and is_whole:
            validate()
            if self.judge.is_out_of_patience:
                return False
        with closing(cast(Any, iter(self.loader))) as batches:
            while True:
                stops.begin_wait(is_whole)
                before = counts.samples
                try:
                    batch = next(batches, None)
                finally:
                    stops.may_end = False
                if batch is None:
                    break
                self._train_on(batch, counts.samples - before, begun, counts)
                del batch
                is_whole = getattr(self.step, "is_whole", True)
                if begun.is_validation_due and is_whole:
                    validate()
                    if self.judge.is_out_of_patience and not self._is_last(begun):
                        return False
                # Deciding whether to continue takes several microseconds, and most steps need no decision.
                is_open = self._always_decides or stops.strength or self._steps >= self.schedule.next_step
                if is_open and is_whole and not self._goes_on(begun, count):
                    return False
        # Use the loader's final position, because bad samples after the last batch also move it.
        self._trained = self.loader.received
        return True

    def _train_on(self, batch: Any, samples: int, begun: EpochProgress, counts: meters.LoaderMeters) -> None:
        is_heard = self.on_step is not None or bool(meters.listeners) or self._status.wants_values
        # Listeners get tensors, so accuracies are computed in groups only if nobody listens.
        grouped = None if is_heard else self._grouped
        began = perf_counter()
        try:
            found = self.step(batch) if grouped is None else grouped(batch)
        except torch.OutOfMemoryError as error:
            if self.loader.tier.name == "gpu":
                error.add_note(f"The Loader keeps its samples in the same memory: {self.loader.tier}. Use keep='ram'.")
            raise
        except RuntimeError as error:
            # A supervised step scales the images itself.
            is_custom = not isinstance(self.step, SupervisedStep)
            if is_custom and (clear := unscaled_images(error, batch)) is not None:
                raise clear from error
            raise
        self._step_s = step_s = perf_counter() - began
        counts.clock.worked(step_s)  # type: ignore[union-attr]
        self._steps += 1
        self._is_saved = False
        begun.steps += 1
        begun.samples += samples
        # Remember the position now, because batches that are received later but not trained on must be excluded.
        self._trained = self.loader.received
        judge = self.judge
        if judge.score is not None:
            judge.moved()
        # A supervised step returns new tensors, so they need no copy.
        is_copied = self._grouped is None
        values = values_of(found, is_copied) if grouped is None else cast(Any, found)
        if self._checks_monitor:
            judge.check_monitor(values)
            self._checks_monitor = False
        self._recorder.add(self._steps, samples, values)
        if is_heard:
            given = listened(values, found) if is_copied else cast(Any, found)
            self._announce(meters.StepDone(begun.epoch, self._steps, begun.steps, given))
        if not judge.is_by_epoch and judge.is_due(self._steps):
            begun.is_validation_due = True

    def _announce(self, done: meters.StepDone) -> None:
        meters.publish(done)
        if self._status.wants_values:
            self._status.note(done.values)
        if self.on_step is not None:
            self.stops.call("on_step", self.on_step, done)

    @property
    def _is_whole(self) -> bool:
        """Whether no accumulated gradients are pending; checkpoints do not hold gradients."""
        return bool(getattr(self.step, "is_whole", True))

    def _goes_on(self, begun: EpochProgress, count: Callable[[], None]) -> bool:
        """Report a new checkpoint, save one if due, and return whether to continue; all processes return the same.

        No accumulated gradients may be pending.
        """
        due = self.saving.folder is not None and self.schedule.is_due(self._steps)
        late = self.schedule.is_late()
        if self.stops.deadline is not None:
            self.stops.reserve_s = self._reserve_s
        requests = [self.stops.look(), late, (due or late) and self.saving.is_busy, self.saving.unreported is not None]
        strength, is_late, is_busy, is_new = self.processes.agreed(self._steps, self._step_s, requests, at_once=due)
        if is_new:
            self.saving.report()
        if (is_late or due) and not (is_busy or self._is_saved or self._is_last(begun)):
            count()
            self._save()
        self.stops.note(strength)
        self._is_stopped = bool(strength)
        # If the user's function ends training after the last batch, the epoch is still completed, with its validation.
        return not strength or (self.stops.is_by_callback and self._is_last(begun))

    @property
    def _reserve_s(self) -> float:
        """Seconds to reserve before a deadline for a last step, a last validation and the last checkpoint."""
        return RESERVE_S + _RESERVE * (self.saving.save_s + self._step_s) + self._validate_s

    def _validate(self, begun: EpochProgress) -> None:
        """Validate the current state; after a resume, an interrupted validation is repeated before the next step."""
        begun.is_validation_due = True
        random = random_state() if self.saving.folder is not None else None
        received, began = self.loader.received, time.monotonic()
        try:
            with self.stops.wait(), self._status.validating():
                found = self.judge.validate(len(self._validations))
        except (WaitInterrupt, Exception):
            # The resumed run validates again, so save the random state from before the validation.
            self._save(random=random)
            raise
        validated_s = time.monotonic() - began
        self.loader.meters.validate_s += validated_s
        self._validate_s = max(self._validate_s, validated_s)
        if self.loader.received != received:
            cause, next_step = "validation took batches from the training Loader", "Create a Loader of held-out samples"
            raise InvalidOption(cannot("validate", cause, "a separate Loader", next_step))
        begun.is_validation_due = False
        begun.validation = found
        self._validations.append(Validation(self._steps, found))
        meters.publish(meters.ValidationDone(self._steps, found))
        if not self.judge.is_by_epoch:
            self._judged(found)
            if self.judge.is_best and not self._is_last(begun):
                self._save()

    def _judged(self, values: Mapping[str, float]) -> None:
        try:
            self.judge.judge(values)
        except InvalidOption:
            self._save()
            raise

    def _is_last(self, begun: EpochProgress) -> bool:
        return self._trained[0] > begun.loader_epoch

    def _end(self, begun: EpochProgress) -> None:
        """Finish an epoch: add its record, and save a checkpoint if one is due or the state is the best so far."""
        self._recorder.read()
        means = SampleMeans.of_all(self.processes.from_all(self._recorder.means.sums)).read()
        wait_share = begun.wait_s / max(begun.seconds, 1e-9)
        counts, waits = zip(*self.processes.from_all((begun.samples, wait_share)), strict=True)
        self.loader.meters.rank_waits = waits if len(waits) > 1 else ()
        record = begun.record(sum(counts), means)
        self._epochs.append(record)
        meters.publish(meters.EpochDone(record.epoch, record.samples, record.seconds, record.wait_s, record.shown))
        if self.log is not None:
            self.log.append(record)
        self._begun, self._is_saved = None, False
        if self.judge.is_by_epoch:
            self._judged(begun.validation if self.judge.can_validate else means)
        is_late = any(self.processes.from_all(self.schedule.is_late()))
        if is_late or self.judge.is_best or self.schedule.is_by_epoch or self.schedule.is_due(self._steps):
            self._save()

    def _save(self, *, random: Mapping[str, Any] | None = None, wait: bool = False) -> None:
        self._recorder.read()
        if self.saving.folder is None:
            return
        begun = self._begun
        begun_now = begun and {**asdict(begun), "samples": sum(self.processes.from_all(begun.samples))}
        run = {
            "steps": self._steps,
            "epochs": [asdict(record) for record in self._epochs],
            "validations": [asdict(validation) for validation in self._validations],
            "curve": self._curve.state_dict(),
            "judge": self.judge.state_dict(),
            "begun": begun_now,
            "means": self.processes.from_all(self._recorder.means.sums),
        }
        self.schedule.saved(self._steps)
        self._is_saved, self.judge.is_best = True, False
        position = {**self.loader.state_dict(), "epoch": self._trained[0], "samples": self._trained[1]}
        began = perf_counter()
        self.saving.save(self._steps, position, run, score=self.judge.score, random=random, wait=wait)
        # Do not count the first checkpoint, since it does not delay steps.
        if not wait:
            self.loader.meters.saved(perf_counter() - began, is_apart=begun is None)
