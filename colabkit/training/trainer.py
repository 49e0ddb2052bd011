"""`train()`: a run over a loader, with validation, checkpoints, resume, and a clean end whatever ends it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

from torch import nn

from colabkit.foundation import (
    InvalidOption,
    cannot,
    check_callable,
    check_duration,
    check_one_of,
    check_type,
    check_whole_number,
    meters,
    sampled,
    user_path,
)
from colabkit.loading import Loader, may_be_loader
from colabkit.training.checkpoints.folder import CheckpointFolder
from colabkit.training.models import Stateful
from colabkit.training.ranks import Ranks
from colabkit.training.records import Values
from colabkit.training.report import TrainingInterrupted, TrainReport
from colabkit.training.run import OnStep, Step, TrainingRun
from colabkit.training.run_checkpoints import RunCheckpoints
from colabkit.training.schedule import RESERVE_S, Moment, SaveSchedule, StopRequests, Validator, moment
from colabkit.training.steps import SupervisedStep

_ACT = "train"


def check_step(act: str, call: str, step: Any, loader: Any, is_any_loader: bool = False) -> None:
    """Raise `InvalidOption` unless a step can be called and a loader is one, for `is_any_loader` of any library."""
    next_step = f"Pass {call}(step, loader)"
    check_callable(act, "step", step, next_step, optional=False)
    if isinstance(step, nn.Module):
        needed = "a function of a batch that updates the model"
        raise InvalidOption(cannot(act, "the step is a model", needed, "Use supervised_step(model, optimizer)"))
    if not (is_any_loader and may_be_loader(loader)):
        needed = "an iterable of batches" if is_any_loader else "a colabkit.Loader"
        check_type(act, "loader", loader, Loader, needed, next_step)


def state_of(act: str, state: Any, step: Any, is_saved: bool) -> dict[str, Stateful]:
    """Return the objects whose state counts, by name: those given, else what the usual step trains.

    Raises:
        InvalidOption: if they are to be saved and it is not known what they are.
    """
    if state is None:
        if is_saved and not isinstance(step, Stateful):
            found, needed = "a step of your own without state=", "which names what it changes"
            next_step = "Pass state={'model': model, 'optimizer': optimizer}, or state={} if it changes nothing"
            raise InvalidOption(cannot(act, found, needed, next_step))
        return dict(step.parts) if isinstance(step, SupervisedStep) else {}
    check_type(act, "state", state, Mapping, "a dict of names and objects", "Use state={'model': model}")
    for name, part in state.items():
        needed = "an object with state_dict and load_state_dict"
        check_type(act, f"state[{name!r}]", part, Stateful, needed, "Leave it out")
    return dict(state)


def _validation_of(validate: Any, step: Any, loader: Loader) -> Callable[[int], Values] | None:
    """Return what to call with the number of a validation; None for no validation.

    It calls a function, or has the usual step evaluate the pass of that number over a loader: after a resume, too.
    """
    if validate is None:
        return None
    if not isinstance(validate, Loader):
        check_callable(_ACT, "validate", validate, "Pass a Loader, or a function that returns a dict of numbers")
        return lambda _: validate()
    if validate is loader:
        found = "validate is the training's Loader"
        raise InvalidOption(cannot(_ACT, found, "another one", "Make one of held-out samples"))
    if not isinstance(step, SupervisedStep):
        found, needed = "validate is a Loader beside a step of your own", "a function that returns a dict of numbers"
        raise InvalidOption(cannot(_ACT, found, needed, "Evaluate the model in a function"))

    def evaluated(number: int) -> dict[str, float]:
        validate.load_state_dict({**validate.state_dict(), "epoch": number, "samples": 0})
        return step.evaluate(validate)

    return evaluated


def train(
    step: Step,
    loader: Loader,
    *,
    epochs: int = 1,
    state: Mapping[str, Stateful] | None = None,
    save_to: str | os.PathLike[str] | None = None,
    save_every: int | str = "epoch",
    keep_last: int = 2,
    resume: bool = True,
    validate: Callable[[], Values] | Loader | None = None,
    validate_every: int | Literal["epoch"] = "epoch",
    monitor: str | None = None,
    mode: Literal["min", "max"] = "min",
    deadline: Moment | None = None,
    on_nonfinite: Literal["raise", "continue"] = "raise",
    timeout: float | str | None = None,
    on_step: OnStep | None = None,
) -> TrainReport:
    """Call `step` on every batch of some epochs and return what came of it.

    With `save_to`, checkpoints hold `state`, the step's own state, the loader's position, the random generators of each
    process, and the history; the same call goes on after the newest good one when it is made again, in the middle of
    an epoch if need be. They are copied between two steps and written in the background; what is due by steps or time
    waits until the one before is written, the end of an epoch and the best so far are saved at once.

    Ctrl-C ends the training after the step that runs, with a last checkpoint; so do SIGTERM and SIGHUP, which are then
    sent on. Without `save_to` nothing is saved.

    Under `torch.distributed` every process calls this; the first one writes, and its numbers of `validate` count.

    Args:
        step: takes a batch; returns a loss, a dict of numbers, or None. With `state_dict` and `load_state_dict`, it is
            saved as well. One that accumulates gradients tells by `is_whole` when none wait to be applied, which
            checkpoints do not hold, and applies them in `flush()`, at the end of an epoch.
        loader: gives the batches.
        epochs: how many in all, those of earlier calls included.
        state: what a checkpoint holds, by name, as in `{"model": model, "optimizer": optimizer}`; None for what
            `supervised_step` trains.
        save_to: folder of the checkpoints, on Drive as well.
        save_every: steps between two checkpoints, a duration such as `"5min"`, or `"epoch"`.
        keep_last: how many of the newest checkpoints stay, beside the best.
        resume: false insists on beginning anew, in a folder without checkpoints.
        validate: called for numbers to judge by, or a loader that `supervised_step` evaluates: in the first validation
            its epoch 0, in the next one epoch 1, and so on, wherever it stands.
        validate_every: steps between two validations, or `"epoch"`.
        monitor: which number says what checkpoint is best: of `validate` where there is one, else of the step; None
            for the loss, if there is one.
        mode: whether the lowest or the highest is best.
        deadline: when the runtime ends: a duration from now, such as `"11h 30min"`, or a `datetime`. The last
            checkpoint is begun early enough to be at its place by then.
        on_nonfinite: what a NaN or an infinity does that a step returns: `"raise"` stops the training, `"continue"`
            lets it go on. Numbers on a GPU are looked at when they are read, not after each step.
        timeout: how long the file system of `save_to` may leave one operation of a checkpoint unanswered, in seconds or
            as text such as `"5min"`; each 10 MB add a second. Then that checkpoint counts as failed. None for two
            minutes.
        on_step: called after each step with its record.

    Raises:
        TrainingInterrupted: a `KeyboardInterrupt`, after Ctrl-C and a last checkpoint, if any; it holds the report.
        InvalidOption: if an argument cannot be meant, or the checkpoints are of other data or another `state`.
        TargetExists: if `resume` is false and there are checkpoints.
        Corrupt: if all checkpoints are damaged.
        NotEnoughSpace, FileFailed, TimedOut: if the first or the last checkpoint cannot be written.
    """
    check_step(_ACT, "train", step, loader)
    check_whole_number(_ACT, "epochs", epochs, 0)
    check_whole_number(_ACT, "keep_last", keep_last, 1)
    check_one_of(_ACT, "mode", mode, ("min", "max"))
    check_one_of(_ACT, "on_nonfinite", on_nonfinite, ("raise", "continue"))
    check_callable(_ACT, "on_step", on_step, "Pass a function of a step's record")
    validate_steps = None
    if validate_every != "epoch":
        validate_steps = check_whole_number(_ACT, "validate_every", validate_every, 1)
    timeout_s = None if timeout is None else check_duration(_ACT, "timeout", timeout)
    parts = state_of(_ACT, state, step, save_to is not None)
    validation = _validation_of(validate, step, loader)
    folder = None if save_to is None else user_path(save_to, _ACT).absolute()
    schedule = SaveSchedule(save_every)
    if save_to is None and save_every != "epoch":
        next_step = "Name the folder of the checkpoints by save_to="
        raise InvalidOption(cannot(_ACT, f"save_every={save_every!r} without save_to=", "both or none", next_step))
    ends_at = None if deadline is None else moment(_ACT, "deadline", deadline)
    started = time.monotonic()
    if ends_at is not None and ends_at - started <= RESERVE_S:
        found = f"deadline={deadline!r} with {RESERVE_S:g} s kept for the last checkpoint"
        raise InvalidOption(cannot(_ACT, found, "time for a step before it", "Give a later one"))
    with ExitStack() as stack:
        processes = stack.enter_context(Ranks())
        judge = Validator(validation, validate_steps, monitor, mode, processes)
        checkpoints = None
        if folder is not None and processes.is_first:
            checkpoints = stack.enter_context(CheckpointFolder(folder, keep_last, *judge.rule, timeout_s))
        saving = RunCheckpoints(folder, checkpoints, parts, step, loader, processes)
        stops = stack.enter_context(StopRequests(ends_at, processes.count > 1, folder is not None))
        run = TrainingRun(
            step,
            loader,
            saving,
            schedule,
            judge,
            processes,
            stops,
            on_step,
            stack.enter_context(sampled()),
            must_be_finite=on_nonfinite == "raise",
        )
        try:
            run.resume(resume)
            report = run.through(epochs, started)
            if report.spent.batches:
                meters.finished(report)
        finally:
            if stops.reason in ("SIGTERM", "SIGHUP"):
                stops.let_go()
                signal.raise_signal(signal.Signals[stops.reason])
    if stops.reason == "Ctrl-C":
        raise TrainingInterrupted(report)
    return report
