"""`train()`: the loop around a loader, with a checkpoint after each epoch and resume.

The loop publishes what happens to `meters` and knows nothing of who listens. It reads no value from the device while it
runs, so it never makes the host wait for the GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor, nn

from colabkit import meters
from colabkit._reports import Report
from colabkit._units import format_rate, format_seconds, format_share
from colabkit.checkpoint import newest_checkpoint, newest_step, save_checkpoint
from colabkit.errors import InvalidOption, TargetExists, cannot, check_whole_number
from colabkit.loader import Loader
from colabkit.mounts import user_path

__all__ = ["EpochRecord", "TrainReport", "supervised_step", "train"]

Batch: TypeAlias = tuple[Tensor, Tensor]
Values: TypeAlias = Mapping[str, object]
Step: TypeAlias = Callable[[Batch], object]


@runtime_checkable
class Stateful(Protocol):
    """A model, optimizer or scheduler: anything whose state can be taken and set."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Set the state."""


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch of training.

    Attributes:
        epoch: its number, from 0.
        steps: optimizer updates, or calls of the step.
        samples: samples seen.
        seconds: its duration without validation.
        wait_s: seconds of it spent waiting for data.
        values: means of what the step returned.
        validation: what `validate` returned.
    """

    epoch: int
    steps: int
    samples: int
    seconds: float
    wait_s: float
    values: Mapping[str, float]
    validation: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class TrainReport(Report):
    """What `train()` did.

    Attributes:
        epochs: one record an epoch, also of those trained before a resume.
        trained: epochs that this call trained.
        seconds: duration of this call.
        samples_per_s: samples a second of this call, validation apart; 0 when nothing was left to do.
        wait_share: share of that time spent waiting for data, in [0, 1].
        parts: busy seconds of each part of the loader in this call.
        checkpoint: the newest checkpoint, None without `save_to`.
        resumed_from: the checkpoint this call went on from, None if it began anew.
        passed_over: damaged checkpoints that were passed over, with the reason.
    """

    epochs: tuple[EpochRecord, ...]
    trained: int
    seconds: float
    samples_per_s: float
    wait_share: float
    parts: Mapping[str, float]
    checkpoint: Path | None
    resumed_from: Path | None
    passed_over: tuple[tuple[str, str], ...]

    def _summary(self) -> str:
        count = f"{self.trained} epoch{'s' * (self.trained != 1)}"
        in_all = f" ({len(self.epochs)} in all)" if self.trained != len(self.epochs) else ""
        lines = [f"Trained {count}{in_all}"]
        if self.trained:
            rate = format_rate(self.samples_per_s, "images")
            lines[0] += f" in {format_seconds(self.seconds)}: {rate}, {format_share(self.wait_share)} waiting for data"
        else:
            lines[0] += "; nothing was left to do"
        if self.epochs and (values := {**self.epochs[-1].values, **self.epochs[-1].validation}):
            lines[0] += "; " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self.resumed_from:
            lines.append(f"Resumed from {str(self.resumed_from)!r}")
        lines += [f"Passed over {name!r}: {reason}" for name, reason in self.passed_over]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for record in self.epochs:
            values = {**record.values, **record.validation}
            rate = format_rate(record.samples / max(record.seconds, 1e-9), "images")
            rows.append(
                (
                    f"epoch {record.epoch + 1}",
                    format_seconds(record.seconds),
                    rate,
                    f"{format_share(record.wait_s / max(record.seconds, 1e-9))} waiting",
                    ", ".join(f"{name} {value:.4g}" for name, value in values.items()),
                )
            )
        if self.checkpoint:
            rows.append(("checkpoint", "", "", "", str(self.checkpoint)))
        return rows


def train(
    step: Step,
    loader: Loader,
    *,
    epochs: int = 1,
    state: Mapping[str, Stateful] | None = None,
    save_to: str | os.PathLike[str] | None = None,
    resume: bool = True,
    validate: Callable[[], Values] | None = None,
    on_step: Callable[[meters.StepDone], None] | None = None,
) -> TrainReport:
    """Call `step` on every batch of some epochs and return what came of it.

    With `save_to`, a checkpoint of `state`, loader, random generators and history is written at the start and after
    each epoch, and the same call goes on after the newest good one when it is made again.

    Args:
        step: takes a batch `(images, labels)`; returns a loss, a dict of numbers, or None.
        loader: gives the batches.
        epochs: how many in all, those of earlier calls included.
        state: what a checkpoint holds, by name, as in `{"model": model, "optimizer": optimizer}`.
        save_to: folder of the checkpoints.
        resume: false insists on beginning anew, in a folder without checkpoints.
        validate: called after each epoch; returns a dict of numbers.
        on_step: called after each step with its record.

    Raises:
        InvalidOption: if `epochs` is negative, or the checkpoints are of other data or another `state`.
        TargetExists: if `resume` is false and there are checkpoints.
        Corrupt: if all checkpoints are damaged.
        NotEnoughSpace, FileFailed: if a checkpoint cannot be written.
    """
    act = "train"
    check_whole_number(act, "epochs", epochs, 0)
    if not callable(step) or not isinstance(loader, Loader):
        found = f"a {type(step).__name__} and a {type(loader).__name__}"
        raise InvalidOption(cannot(act, found, "a callable step and a colabkit.Loader", "Pass train(step, loader)"))
    if isinstance(step, nn.Module):
        needed, hint = "a function of a batch that also updates it", "Use supervised_step(model, optimizer)"
        raise InvalidOption(cannot(act, "the step is a model", needed, hint))
    if state is not None and not isinstance(state, Mapping):
        found = f"state is a {type(state).__name__}"
        raise InvalidOption(cannot(act, found, "a dict of names and objects", "Use state={'model': model}"))
    for name, part in (state or {}).items():
        if not isinstance(part, Stateful):
            found = f"state has {name!r}, a {type(part).__name__}"
            raise InvalidOption(cannot(act, found, "objects with state_dict and load_state_dict", "Leave it out"))
    run = _Run(loader, dict(state or {}), None if save_to is None else user_path(save_to, "train").absolute(), resume)
    trained_before = len(run.history)
    started = time.monotonic()
    before = loader.meters.snapshot()
    trained_s = 0.0
    error: BaseException | None = None
    is_left = len(run.history) < epochs
    if is_left:
        meters.publish(meters.RunStarted(loader.meters, epochs, len(loader)))
    try:
        for epoch in range(len(run.history), epochs):
            record = run.epoch(epoch, step, on_step)
            trained_s += record.seconds
            if validate is not None:
                validation = _numbers(validate(), "validate", "a dict of numbers")
                record = replace(record, validation={name: float(cast(Any, v)) for name, v in validation.items()})
            run.history.append(record)
            run.save()
    except BaseException as raised:
        error = raised
        raise
    finally:
        if is_left:
            meters.publish(meters.RunEnded(type(error).__name__ if error else None))
    done = loader.meters.snapshot() - before
    return TrainReport(
        epochs=tuple(run.history),
        trained=len(run.history) - trained_before,
        seconds=time.monotonic() - started,
        samples_per_s=done.samples / trained_s if trained_s else 0.0,
        wait_share=done.wait_s / trained_s if trained_s else 0.0,
        parts={part.name: part.busy_s for part in done.parts},
        checkpoint=run.checkpoint,
        resumed_from=run.resumed_from,
        passed_over=run.passed_over,
    )


def supervised_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    *,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Step:
    """Return the usual step for `train()`: forward, loss, backward, update; it gives loss and accuracy.

    Images that are still `uint8` are brought to [0, 1] first.

    Args:
        model: takes images, returns one score a class.
        optimizer: of the model's parameters.
        loss: of scores and labels.
        scheduler: moved on after each step, or None.
    """

    def step(batch: Batch) -> Values:
        images, labels = batch
        if not images.is_floating_point():
            images = images.float().div_(255)
        if not model.training:
            model.train()
        optimizer.zero_grad(set_to_none=True)
        scores = model(images)
        value = loss(scores, labels)
        value.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return {"loss": value.detach(), "accuracy": (scores.detach().argmax(1) == labels).float().mean()}

    return step


class _Run:
    """What changes while `train()` goes on: history, steps, checkpoints."""

    def __init__(self, loader: Loader, state: dict[str, Stateful], folder: Path | None, resume: bool) -> None:
        self.history: list[EpochRecord] = []
        self.steps = 0
        self.checkpoint: Path | None = None
        self.resumed_from: Path | None = None
        self.passed_over: tuple[tuple[str, str], ...] = ()
        self._loader = loader
        self._state = state
        self._folder = folder
        if folder is not None:
            self._resume(folder, resume)

    def _resume(self, folder: Path, resume: bool) -> None:
        if not resume and (step := newest_step(folder)) is not None:
            act = f"begin anew in {str(folder)!r}"
            raise TargetExists(
                cannot(act, f"a checkpoint of step {step}", "no checkpoints", "Use resume=True or another folder")
            )
        found = newest_checkpoint(folder)  # on the CPU: loading copies the values to where the objects are
        if found is None:
            self.save()  # the start: shows that saving works before hours are spent, and where to begin again
            return
        saved = found.content["state"]
        if set(saved) != set(self._state):
            names = ", ".join(saved) or "nothing"
            given = ", ".join(self._state) or "nothing"
            act = f"resume from {str(found.path)!r}"
            raise InvalidOption(cannot(act, f"it holds {names}", f"state= of {given}", "Pass the same names as before"))
        self._loader.load_state_dict(found.content["loader"])
        for name, part in self._state.items():
            try:
                part.load_state_dict(saved[name])
            except Exception as error:  # each kind of object says in its own way that a state is not its own
                act = f"resume {name!r} from {str(found.path)!r}"
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip(':')}"
                needed = "the state of an object like this one"
                raise InvalidOption(
                    cannot(act, reason, needed, "Build it as before or save to another folder")
                ) from error
        found.restore_random_state()
        self.history = [EpochRecord(**record) for record in found.content["history"]]
        self.steps = found.step
        self.checkpoint = self.resumed_from = found.path
        self.passed_over = tuple((path.name, reason) for path, reason in found.passed_over)

    def epoch(self, epoch: int, step: Step, on_step: Callable[[meters.StepDone], None] | None) -> EpochRecord:
        """Train one epoch and return its record."""
        before = self._loader.meters.snapshot()
        steps_before = self.steps
        means = _Means()
        started = time.perf_counter()
        with closing(cast(Any, iter(self._loader))) as batches:
            for batch in batches:
                values = _values(step(batch))
                means.add(values, len(batch[1]))
                self.steps += 1
                done = meters.StepDone(epoch, self.steps, self.steps - steps_before, values)
                meters.publish(done)
                if on_step is not None:
                    on_step(done)
                del batch
        seconds = time.perf_counter() - started
        spent = self._loader.meters.snapshot() - before
        return EpochRecord(epoch, self.steps - steps_before, spent.samples, seconds, spent.wait_s, means.read())

    def save(self) -> None:
        """Write a checkpoint, if there is a folder for it."""
        if self._folder is None:
            return
        content = {
            "state": {name: part.state_dict() for name, part in self._state.items()},
            "loader": self._loader.state_dict(),
            "history": [asdict(record) for record in self.history],
        }
        self.checkpoint = save_checkpoint(self._folder, self.steps, content)


class _Means:
    """Means over samples of what a step returns, summed where the values are, read once at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def add(self, values: Values, samples: int) -> None:
        for name, value in values.items():
            share = value.detach().float() * samples if isinstance(value, Tensor) else float(cast(Any, value)) * samples
            self._sums[name] = self._sums[name] + share if name in self._sums else share
            self._counts[name] = self._counts.get(name, 0) + samples

    def read(self) -> dict[str, float]:
        return {name: float(total) / self._counts[name] for name, total in self._sums.items()}


def _values(result: object) -> Values:
    """Return what a step gave, by name."""
    if result is None:
        return {}
    if _is_number(result):
        return {"loss": result.detach() if isinstance(result, Tensor) else result}
    return _numbers(result, "the step", "a loss, a dict of numbers, or None")


def _numbers(result: object, giver: str, needed: str) -> Values:
    """Return `result` if it is a dict of numbers."""
    if not isinstance(result, Mapping):
        found = f"{giver} returned a {type(result).__name__}"
        raise InvalidOption(cannot("train", found, needed, "Return one of these"))
    for name, value in result.items():
        if not _is_number(value):
            found = f"{giver} returned {name!r} as a {type(value).__name__}"
            raise InvalidOption(cannot("train", found, f"{needed}, each a single one", "Return its mean, say"))
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in result.items()}


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, SupportsFloat) and not getattr(value, "shape", ())
