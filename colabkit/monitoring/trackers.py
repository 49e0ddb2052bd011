"""`log_to()`: log a training run to TensorBoard, Weights & Biases or MLflow, with the shares of its step time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from colabkit.foundation import InvalidOption, LoaderMeters, cannot, check_whole_number, checked_call, kind_of, meters

logger = logging.getLogger("colabkit")

_ACT = "log the run"
_SHARES = {"data_wait": "wait_s", "copy": "copy_s", "compute": "compute_s", "other": "other_s"}


@checked_call()
def log_to(writer: Any, *, every: int = 50) -> AbstractContextManager[None]:
    """Log each `train()` call inside a `with` block to your TensorBoard writer, W&B run or MLflow.

    This logs step values under `train/`, such as `train/loss`, validation values under `val/`, the shares of the time
    since the previous entry as `time/data_wait`, `time/copy`, `time/compute` and `time/other`, in [0, 1], and
    `time/samples_per_s`. Under `torch.distributed`, use it only on rank 0. If the writer raises an error, a warning is
    logged once, and training continues without it.

    Args:
        writer: a `SummaryWriter`, the run that `wandb.init()` returns, the module `mlflow` with an active run, or any
            object with `log_metrics(values, step=)`. It stays open.
        every: steps between two entries; the last step of each epoch is logged, too. Values on a GPU are read only
            at these steps, since reading waits for the GPU.

    Returns:
        A context manager.

    Raises:
        InvalidOption: if `writer` is none of these, or `every` is not a whole number of 1 or more.

    Example:
        >>> import colabkit
        >>> class Printer:
        ...     def log_metrics(self, values, step):
        ...         print(step, sorted(values))
        >>> with colabkit.log_to(Printer()):
        ...     report = colabkit.train(lambda batch: 0.5, colabkit.Loader([[1.0], [2.0]], 1))
        2 ['time/compute', 'time/copy', 'time/data_wait', 'time/other', 'time/samples_per_s', 'train/loss']
    """
    check_whole_number(_ACT, "every", every, 1)
    return _LogContext(_RunLog(_log_function(writer), every, f"log_to({kind_of(writer)})"))


def _log_function(writer: Any) -> Callable[[Mapping[str, float], int], object]:
    # A class also has the methods, but only its instances can log.
    if not isinstance(writer, type):
        if callable(log_metrics := getattr(writer, "log_metrics", None)):
            return lambda values, step: log_metrics(dict(values), step=step)
        if callable(add_scalar := getattr(writer, "add_scalar", None)):

            def add_scalars(values: Mapping[str, float], step: int) -> None:
                for name, value in values.items():
                    add_scalar(name, value, step)

            return add_scalars
        if callable(log := getattr(writer, "log", None)) and callable(getattr(writer, "finish", None)):
            return lambda values, step: log(dict(values), step=step)
    expected = "a SummaryWriter, a W&B run, the module mlflow, or an object with log_metrics(values, step=)"
    next_step = "For example, pass torch.utils.tensorboard.SummaryWriter() or wandb.init()"
    raise InvalidOption(cannot(_ACT, f"writer is {kind_of(writer)}", expected, next_step))


class _LogContext(AbstractContextManager[None]):
    """The context manager that `log_to()` returns; it warns if it was never entered."""

    def __init__(self, run: _RunLog) -> None:
        self._run = run
        self._was_entered = False

    def __enter__(self) -> None:
        self._was_entered = True
        self._unsubscribe = meters.subscribe(self._run.listen)

    def __exit__(self, *_: object) -> None:
        self._unsubscribe()

    def __del__(self) -> None:
        if not self._was_entered:
            logger.warning("log_to() logs only inside a with block: with colabkit.log_to(writer): colabkit.train(...)")


class _ActiveRun:
    """The meters of a run, their snapshot at the last entry, and the newest step if it is not logged yet."""

    def __init__(self, counts: LoaderMeters) -> None:
        self.counts = counts
        self.before = counts.snapshot()
        self.newest: meters.StepDone | None = None


class _RunLog:
    """Collects the events of a run and logs the newest values every few steps."""

    def __init__(self, log: Callable[[Mapping[str, float], int], object], every: int, name: str) -> None:
        self._name = name
        self._log = log
        self._every = every
        # One entry per active run; runs are nested if a step itself trains something.
        self._runs: list[_ActiveRun] = []

    def __repr__(self) -> str:
        return self._name

    def listen(self, event: meters.Event) -> None:
        if isinstance(event, meters.StepDone):
            if self._runs:
                self._runs[-1].newest = event
            if not event.step % self._every:
                self._log_newest()
        elif isinstance(event, meters.RunStarted):
            self._runs.append(_ActiveRun(event.meters))
        elif isinstance(event, meters.ValidationDone):
            # Log the last step before its validation, since W&B ignores entries for earlier steps.
            self._log_newest()
            self._log({f"val/{name}": value for name, value in event.values.items()}, event.step)
        elif isinstance(event, meters.RunEnded):
            self._log_newest()
            del self._runs[-1:]
        elif isinstance(event, meters.EpochStarted) and self._runs and event.meters is self._runs[-1].counts:
            self._log_newest()

    def _log_newest(self) -> None:
        run = self._runs[-1] if self._runs else None
        if run is None or run.newest is None:
            return
        done, run.newest = run.newest, None
        values = {f"train/{name}": float(value) for name, value in done.values.items()}  # type: ignore[arg-type]
        now = run.counts.snapshot()
        spent = now - run.before
        if spent.seconds > 0:
            values |= {f"time/{name}": getattr(spent, share) / spent.seconds for name, share in _SHARES.items()}
            values["time/samples_per_s"] = spent.samples / spent.seconds
            run.before = now
        self._log(values, done.step)
