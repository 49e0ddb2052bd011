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
    check_one_of,
    check_whole_number,
    kind_of,
    meters,
    sampled,
    user_path,
)
from colabkit.loading import Loader, may_be_loader
from colabkit.training.models import Stateful
from colabkit.training.ranks import Ranks
from colabkit.training.records import Values
from colabkit.training.report import TrainingInterrupted, TrainReport
from colabkit.training.run import OnStep, Step, TrainingRun
from colabkit.training.run_checkpoints import RunCheckpoints
from colabkit.training.schedule import Moment, SaveSchedule, moment
from colabkit.training.steps import SupervisedStep
from colabkit.training.stop_requests import RESERVE_S, StopRequests
from colabkit.training.validation import Validator

_ACT = "train"
_JUDGES = "a function that returns a dict of numbers"


def check_step(act: str, call: str, step: Any, loader: Any, is_any_loader: bool = False) -> None:
    """Raise `InvalidOption` unless a step can be called and a loader is one.

    Args:
        act: what is done with them.
        call: the function that takes them.
        step: to check.
        loader: to check.
        is_any_loader: whether a loader of others does.
    """
    if not callable(step) or not (isinstance(loader, Loader) or (is_any_loader and may_be_loader(loader))):
        found = f"step is {kind_of(step)} and loader is {kind_of(loader)}"
        needed = f"they have to be a function and {'what gives batches' if is_any_loader else 'a colabkit.Loader'}"
        raise InvalidOption(cannot(act, found, needed, f"Pass {call}(step, loader)"))
    if isinstance(step, nn.Module):
        needed, hint = (
            "it has to be a function of a batch that updates the model",
            "Use supervised_step(model, optimizer)",
        )
        raise InvalidOption(cannot(act, "the step is a model", needed, hint))


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
    if not isinstance(state, Mapping):
        found = f"state is {kind_of(state)}"
        raise InvalidOption(
            cannot(act, found, "it has to be a dict of names and objects", "Use state={'model': model}")
        )
    for name, part in state.items():
        if not isinstance(part, Stateful):
            found = f"state has {name!r}, {kind_of(part)}"
            raise InvalidOption(cannot(act, found, "without state_dict and load_state_dict", "Leave it out"))
    return dict(state)


def validate_of(validate: Any, step: Any, loader: Loader) -> Any:
    """Return what to call with the number of a validation; None for no validation.

    It calls a function, or has the usual step evaluate the pass of that number over a loader: after a resume, too.
    """
    if validate is loader:
        found = "validate is the training's Loader"
        raise InvalidOption(cannot(_ACT, found, "it has to be another one", "Make one of held-out samples"))
    if isinstance(validate, Loader):
        if not isinstance(step, SupervisedStep):
            found = "validate is a Loader beside a step of your own"
            raise InvalidOption(cannot(_ACT, found, f"it has to be {_JUDGES}", "Evaluate the model in a function"))

        def evaluated(number: int) -> dict[str, float]:
            validate.load_state_dict({**validate.state_dict(), "epoch": number, "samples": 0})
            return step.evaluate(validate)

        return evaluated
    if validate is None:
        return None
    if not callable(validate):
        found = f"validate is {kind_of(validate)}"
        raise InvalidOption(cannot(_ACT, found, f"it has to be a Loader or {_JUDGES}", "Pass one of these"))
    return lambda _: validate()


def validation_steps(validate_every: Any) -> int | None:
    """Return after how many steps a validation is due; None for the ends of epochs."""
    if validate_every == "epoch":
        return None
    check_whole_number(_ACT, "validate_every", validate_every, 1)
    return int(validate_every)


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
    on_step: OnStep | None = None,
    timeout: float | str | None = None,
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
        on_step: called after each step with its record.
        timeout: how long the file system of `save_to` may leave one operation of a checkpoint unanswered, in seconds or
            as text such as `"5min"`; each 10 MB add a second. Then that checkpoint counts as failed. None for two
            minutes.

    Raises:
        TrainingInterrupted: a `KeyboardInterrupt`, after Ctrl-C and a last checkpoint, if any; it holds the report.
        InvalidOption: if an argument cannot be meant, or the checkpoints are of other data or another `state`.
        TargetExists: if `resume` is false and there are checkpoints.
        Corrupt: if all checkpoints are damaged.
        NotEnoughSpace, FileFailed, TimedOut: if the first or the last checkpoint cannot be written.
    """
    act = "train"
    check_whole_number(act, "epochs", epochs, 0)
    check_whole_number(act, "keep_last", keep_last, 1)
    check_step(act, "train", step, loader)
    check_one_of(act, "mode", mode, ("min", "max"))
    check_one_of(act, "on_nonfinite", on_nonfinite, ("raise", "continue"))
    parts = state_of(act, state, step, save_to is not None)
    folder = None if save_to is None else user_path(save_to, "train").absolute()
    schedule = SaveSchedule(save_every)
    if save_to is None and save_every != "epoch":
        next_step = "Name the folder of the checkpoints by save_to="
        raise InvalidOption(cannot(act, f"save_every={save_every!r} without save_to=", "both or none", next_step))
    judged_by = validate_of(validate, step, loader), validation_steps(validate_every), monitor, mode
    ends_at = None if deadline is None else moment(act, "deadline", deadline)
    started = time.monotonic()
    if ends_at is not None and ends_at - started <= RESERVE_S:
        found = f"deadline={deadline!r} with {RESERVE_S:g} s kept for the last checkpoint"
        raise InvalidOption(cannot(act, found, "time for a step before it", "Give a later one"))
    with ExitStack() as stack:
        processes = stack.enter_context(Ranks())
        judge = Validator(*judged_by, processes)
        saving = RunCheckpoints(folder, keep_last, judge.rule, parts, step, loader, processes, timeout)
        stack.enter_context(saving)
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
