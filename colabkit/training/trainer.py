"""`train()`: a training loop with validation, checkpoints, resuming and a clean shutdown."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal

from torch import nn

from colabkit.foundation import (
    Code,
    InvalidOption,
    StepDone,
    call,
    cannot,
    check_callable,
    check_duration,
    check_number,
    check_one_of,
    check_type,
    check_whole_number,
    checked_call,
    in_python,
    kind_of,
    meters,
    option,
    sampled,
)
from colabkit.loading import Loader, check_loader, may_be_loader
from colabkit.storage import local_target
from colabkit.training.checkpoints.folder import CheckpointFolder
from colabkit.training.models import Stateful
from colabkit.training.ranks import Ranks
from colabkit.training.records import EpochLog, SavedCheckpoint, Values
from colabkit.training.report import TrainingInterrupted, TrainReport
from colabkit.training.run import TrainingRun
from colabkit.training.run_checkpoints import RunCheckpoints
from colabkit.training.schedule import RESERVE_S, SaveSchedule, StopRequests, Validator, check_time_left, moment
from colabkit.training.shards import check_no_fsdp1
from colabkit.training.steps import SupervisedStep

_ACT = "train"
_USE_STEP = ("Pass ", call("supervised_step", Code("model"), Code("optimizer")), " as the step")


def check_step(act: str, function: str, step: Any, loader: Any, is_any_loader: bool = False) -> None:
    """Raise `InvalidOption` unless `step` is a function and `loader` a `Loader` (with `is_any_loader`: any loader)."""
    usage = ("Use ", call(function, Code("step"), Code("loader")))
    if isinstance(step, nn.Module):
        found, expected = f"step is {kind_of(step)}, a model", "a function of a batch that updates the model"
        next_step = ("Use ", call("supervised_step", Code("model"), Code("optimizer")))
        raise InvalidOption(cannot(act, found, expected, next_step))
    check_callable(act, "step", step, usage, optional=False)
    check_callable(act, "step", step, "For example, begin it with def step(batch): x, y = batch", takes="the batch")
    if not (is_any_loader and may_be_loader(loader)):
        kind = "an iterable of batches" if is_any_loader else "a colabkit.Loader"
        check_loader(act, loader, kind, usage)


def state_of(act: str, state: Any, step: Any, is_saved: bool) -> dict[str, Stateful]:
    """Return the objects to save, by name: `state` if given, otherwise the model and optimizer of a supervised step.

    Raises:
        InvalidOption: if `state` is invalid, or if `is_saved` is set and `state` is missing for a step without
            `state_dict()`.
    """
    if state is None:
        if is_saved and not isinstance(step, Stateful):
            found = ("step is custom, and ", option("state"), " is missing")
            objects = option("state", {"model": Code("model"), "optimizer": Code("optimizer")})
            rest = in_python(
                "; add a supervised step if the step calls one, or pass an empty dict if it changes nothing"
            )
            next_step = ("For example, use ", objects, rest)
            raise InvalidOption(cannot(act, found, "the objects that the step changes", next_step))
        return dict(step.parts) if isinstance(step, SupervisedStep) else {}
    example = option("state", {"model": Code("model")})
    check_type(act, "state", state, Mapping, "a dict of names and objects", ("For example, use ", example))
    for name, part in state.items():
        kind = "an object with state_dict() and load_state_dict()"
        check_type(act, f"state[{name!r}]", part, Stateful, kind, ("Remove it from ", option("state")))
    return dict(state)


def _validation_of(
    validate: Any, step: Any, loader: Loader
) -> tuple[Callable[[int], Values] | None, tuple[str, ...] | None]:
    """Return a function that runs the validation with a given number, and the names of the numbers to monitor.

    The function is None for no validation; the names are None if they are not known yet. A validation loader first
    moves to the epoch with the given number, so a resumed run gets the same batches.
    """
    names = ("loss", "accuracy") if isinstance(step, SupervisedStep) else None
    if validate is None:
        return None, names
    if not isinstance(validate, Loader):
        advice = "Pass a Loader, or a function that returns a dict of numbers"
        check_callable(_ACT, "validate", validate, advice, takes="", or_else="a Loader, ")
        return lambda _: validate(), None
    if validate is loader:
        same = "validate is the training Loader"
        raise InvalidOption(cannot(_ACT, same, "a separate Loader", "Create a Loader of held-out samples"))
    if not isinstance(step, SupervisedStep):
        found = "validate is a Loader, but step is custom: only a supervised_step can evaluate a Loader"
        expected, next_step = "a function that returns a dict of numbers", "Pass a function that evaluates the model"
        raise InvalidOption(cannot(_ACT, found, expected, next_step))

    def evaluated(number: int) -> dict[str, float]:
        validate.load_state_dict({**validate.state_dict(), "epoch": number, "samples": 0})
        return step.evaluate(validate)

    return evaluated, names


def _check_patience(patience: int | None, min_delta: float) -> int | None:
    """Return `patience` as a whole number; raise `InvalidOption` if it or `min_delta` is invalid."""
    if patience is not None:
        patience = check_whole_number(_ACT, "patience", patience, 1)
    check_number(_ACT, "min_delta", min_delta, 0, example=0.001)
    if min_delta and patience is None:
        found = (option("min_delta", min_delta), " is given without ", option("patience"))
        raise InvalidOption(cannot(_ACT, found, "", ("For example, use ", option("patience", 3))))
    return patience


def _check_unsaved(save_every: int | str, on_checkpoint: object) -> None:
    """Raise `InvalidOption` if an option of checkpoints is given for a run that saves none."""
    if save_every == "epoch" and on_checkpoint is None:
        return
    given = option("save_every", save_every) if save_every != "epoch" else option("on_checkpoint")
    found = (given, " is given without ", option("to"))
    raise InvalidOption(cannot(_ACT, found, "", ("Name a folder for the checkpoints with ", option("to"))))


@checked_call(
    model=_USE_STEP,
    optimizer=_USE_STEP,
    callbacks=("Use ", option("on_step"), ", or colabkit.log_to() for a tracker"),
    screen="Open the panel with colabkit.dashboard(screen=...) before training",
    num_epochs=("Use ", option("epochs")),
    n_epochs=("Use ", option("epochs")),
    max_epochs=("Use ", option("epochs")),
    val_loader=("Use ", option("validate")),
    early_stopping=("Use ", option("patience"), ", the number of validations without improvement"),
    device="Pass device='cuda' to the Loader, and move the model with model.to('cuda')",
    batch_size="Pass it to the Loader",
    clip="Pass it to colabkit.supervised_step()",
    seed="Pass it to the Loader, and call torch.manual_seed() before you create the model",
)
def train(
    step: Callable[[Any], object],
    loader: Loader,
    *,
    epochs: int = 1,
    state: Mapping[str, Stateful] | None = None,
    to: str | os.PathLike[str] | None = None,
    save_every: int | str = "epoch",
    keep_last: int = 2,
    resume: bool = True,
    validate: Callable[[], Mapping[str, object]] | Loader | None = None,
    validate_every: int | Literal["epoch"] = "epoch",
    monitor: str | None = None,
    mode: Literal["auto", "min", "max"] = "auto",
    patience: int | None = None,
    min_delta: float = 0.0,
    deadline: str | timedelta | datetime | None = None,
    on_nonfinite: Literal["raise", "continue"] = "raise",
    timeout: float | str | None = None,
    log: str | os.PathLike[str] | None = None,
    on_step: Callable[[StepDone], None] | None = None,
    on_checkpoint: Callable[[SavedCheckpoint], object] | None = None,
) -> TrainReport:
    """Train for a number of epochs by calling `step` on every batch, and return a report.

    With `to`, the run saves checkpoints. They hold `state`, the state of the step, the loader's position, the random
    generators of each process and the training history. If you make the same call again, training resumes from the
    newest good checkpoint, even in the middle of an epoch. Next to the checkpoints, `status.json` holds the content of
    the live panel, for `status()` and `dashboard(attach=)` in other processes; it is written every 4 seconds, and every
    30 seconds to a mount such as Drive. The state is copied between two steps and written in the background.
    Checkpoints due by steps or time are postponed while an earlier one is being written; checkpoints at the end of an
    epoch and of the best state are not. Without `to`, nothing is saved. The first checkpoint is written before the
    first step, and removed if that step, or loading its batch, fails.

    Ctrl-C, SIGTERM and SIGHUP end training after the current step, with a final checkpoint. SIGTERM and SIGHUP are
    then raised again.

    Under `torch.distributed`, call this in every process. Rank 0 writes the checkpoints, and its `validate` results
    are used. Every process calls the `state_dict()` of each object in `state`, so it may gather tensors from all
    processes. For models and optimizers with sharded parameters (FSDP2, `DTensor`), checkpoints hold the complete
    tensors, which rank 0 gathers in its RAM; a run may resume with another number of processes, or without sharding.
    FSDP1 is refused.

    Args:
        step: function that takes a batch and returns a loss, a dict of numbers, or None. A step with `state_dict` and
            `load_state_dict` is also saved. A step that accumulates gradients must have an attribute `is_whole`, true
            while no gradients are pending (checkpoints are only taken then), and a method `flush()` that applies them,
            which is called at the end of an epoch.
        loader: `Loader` that supplies the batches.
        epochs: total number of epochs, including those of earlier calls.
        state: objects to save, by name, such as `{"model": model, "optimizer": optimizer}`. None saves the model and
            optimizer of `supervised_step`. If `step` is a function that calls a supervised step, add that step, as in
            `{"model": model, "optimizer": optimizer, "step": inner}`; it holds the states of scheduler and scaler.
        to: folder for the checkpoints; it may be on Drive.
        save_every: steps between two checkpoints, a duration such as `"5min"`, or `"epoch"`.
        keep_last: number of the newest checkpoints to keep, besides the best one.
        resume: whether to resume from the newest checkpoint; if False, `to` must not contain checkpoints.
        validate: function that returns a dict of numbers, or a `Loader` of held-out samples that `supervised_step`
            evaluates. The first validation uses epoch 0 of that loader, the next one epoch 1, and so on. A dict that
            is empty or lacks the loss does not affect which checkpoint is best; with `monitor` or `patience`, a dict
            without the monitored number is refused.
        validate_every: steps between two validations, or `"epoch"`.
        monitor: name of the number that selects the best checkpoint, taken from `validate` if given, otherwise from
            the step. None uses the loss, if there is one.
        mode: whether the lowest (`"min"`) or the highest (`"max"`) value of `monitor` is best. `"auto"` decides by the
            words in the name: lowest for `"loss"`, `"rmse"` or `"error"`, highest for `"accuracy"`, `"f1"` or `"iou"`;
            names without such a word need the mode.
        patience: number of consecutive validations (epochs if `monitor` is a number of the step) without improvement
            of `monitor` after which training stops; None means that training does not stop for this reason.
        min_delta: `monitor` must improve by more than this value to count as an improvement for `patience`.
        deadline: when the runtime ends: a duration from now with its unit, such as `"11h 30min"` or a `timedelta`, or
            a `datetime`. Training stops early enough to save a final checkpoint by then.
        on_nonfinite: whether a NaN or infinity returned by the step stops training (`"raise"`) or not
            (`"continue"`). Numbers on a GPU are checked when the run reads them, not after each step.
        timeout: how long one checkpoint operation may wait for the file system of `to`, in seconds or as text
            such as `"5min"`, plus one second for every 10 MB. After that, the checkpoint counts as failed. None means
            two minutes.
        log: file to which a line of JSON is appended at the end of each epoch, such as `"run.jsonl"`, with the number
            of the epoch from 0, `samples`, `seconds`, `wait_s`, and the values as in `to_pandas()`; NaN and infinity
            become null. An epoch that is repeated after a crash has another line. The file should be on a local disk,
            since training waits until the line is written. If that fails, a warning is logged, and training continues
            without the log.
        on_step: function called with a record of each step after that step. If it raises `StopIteration`, training
            ends normally, with a final checkpoint.
        on_checkpoint: function called with a `SavedCheckpoint` for each checkpoint except the untrained first one, once
            it has been written and sealed; on a mount such as Drive, before it is copied there. All processes call it
            between two steps, for example to upload the files or for `ray.train.report()`. A resumed run first calls
            it for the checkpoint that it resumes from. If it raises `StopIteration`, training ends normally, with a
            final checkpoint.

    Returns:
        A `TrainReport` with the records of all epochs, the curves, the checkpoints and the timings.

    Raises:
        TrainingInterrupted: after Ctrl-C and the final checkpoint, if any. It is a `KeyboardInterrupt` and holds the
            report.
        InvalidOption: if an argument is invalid, or the checkpoints belong to different data or a different `state`.
        TargetExists: if `resume` is False and `to` contains checkpoints.
        Corrupt: if all checkpoints are damaged.
        NotEnoughSpace, FileFailed, TimedOut: if the first checkpoint cannot be written. If a later one cannot be
            written, even the last one, `failed_saves` of the report lists the reason, and a warning is logged.
        NotMounted: if `to` is on Drive and Drive is not mounted.
        TrainingDiverged: if the step returns NaN or infinity and `on_nonfinite` is `"raise"`.
        BadImage, Corrupt, LoaderFailed: as in `Loader`.
        LaunchFailed: if another process of `torch.distributed` fails while it validates, saves or calls
            `on_checkpoint`.

    Example:
        >>> import colabkit, torch
        >>> data = colabkit.prepare("samples:digits", to=None)["train"]
        >>> loader = colabkit.Loader(data, batch_size=64, shuffle=True)
        >>> model = colabkit.small_network(10, (8, 8, 3))
        >>> step = colabkit.supervised_step(model, torch.optim.Adam(model.parameters()))
        >>> report = colabkit.train(step, loader, epochs=2, to="checkpoints")
        >>> report.steps, report.stopped
        (58, None)
    """
    check_step(_ACT, "train", step, loader)
    epochs = check_whole_number(_ACT, "epochs", epochs, 0)
    keep_last = check_whole_number(_ACT, "keep_last", keep_last, 1)
    check_one_of(_ACT, "mode", mode, ("auto", "min", "max"))
    check_one_of(_ACT, "on_nonfinite", on_nonfinite, ("raise", "continue"))
    patience = _check_patience(patience, min_delta)
    check_callable(_ACT, "on_step", on_step, "Pass a function that takes the record of a step", takes="the record")
    check_callable(
        _ACT, "on_checkpoint", on_checkpoint, "Pass a function that takes a checkpoint", takes="the checkpoint"
    )
    validate_steps = None
    if validate_every != "epoch":
        validate_steps = check_whole_number(_ACT, "validate_every", validate_every, 1)
    timeout_s = None if timeout is None else check_duration(_ACT, "timeout", timeout)
    parts = state_of(_ACT, state, step, to is not None)
    for part in parts.values() if to is not None else ():
        check_no_fsdp1(_ACT, part)
    validation, known = _validation_of(validate, step, loader)
    folder = None if to is None else local_target(to, _ACT).absolute()
    log_path = None if log is None else local_target(log, _ACT).absolute()
    schedule = SaveSchedule(save_every)
    if to is None:
        _check_unsaved(save_every, on_checkpoint)
    ends_at = None if deadline is None else moment(_ACT, deadline)
    started = time.monotonic()
    if ends_at is not None:
        check_time_left(ends_at - started, RESERVE_S)
    with ExitStack() as stack:
        processes = stack.enter_context(Ranks())
        judge = Validator(validation, validate_steps, monitor, mode, patience, min_delta, processes, known)
        checkpoints = None
        if folder is not None and processes.is_first:
            checkpoints = stack.enter_context(CheckpointFolder(folder, keep_last, *judge.rule, timeout_s))
        epoch_log = EpochLog(_ACT, log_path) if log_path is not None and processes.is_first else None
        stops = stack.enter_context(StopRequests(ends_at, processes.count > 1, folder is not None))
        hook = None if on_checkpoint is None else partial(stops.call, "on_checkpoint", on_checkpoint)
        saving = RunCheckpoints(folder, checkpoints, parts, step, loader, processes, hook)
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
            log=epoch_log,
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
