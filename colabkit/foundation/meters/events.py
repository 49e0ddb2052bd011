"""The events of loaders and training, their listeners, and the latest training report or loader.

A listener that raises an exception is removed and logged once, so that monitoring never stops a run.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from colabkit.foundation.meters.counts import LoaderMeters

logger = logging.getLogger("colabkit")


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """The start of a pass over a loader.

    Attributes:
        meters: meters of the loader.
        epoch: index of the pass, from 0.
        batches: number of remaining batches; None if unknown.
        samples: number of remaining samples; None if unknown.
    """

    meters: LoaderMeters
    epoch: int
    batches: int | None
    samples: int | None


@dataclass(frozen=True, slots=True)
class BatchTaken:
    """The receipt of a batch by the training loop."""

    meters: LoaderMeters


@dataclass(frozen=True, slots=True)
class DataWait:
    """The training loop has been waiting for a batch for `wait_s` seconds; sent a few times per second."""

    meters: LoaderMeters
    wait_s: float


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The start of `train()`: total epochs, steps per full epoch, and the precision of the step, if known."""

    meters: LoaderMeters
    epochs: int
    steps_per_epoch: int
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class StepDone:
    """The end of a training step.

    Attributes:
        epoch: number of the epoch, from 0.
        step: number of the step in the run, from 1.
        step_in_epoch: number of the step in this epoch, from 1.
        values: values returned by the step, by name; tensors are still on their device, and `float(value)` reads one.
    """

    epoch: int
    step: int
    step_in_epoch: int
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ValidationDone:
    """The end of a validation: the number of steps in the run so far, and the values from `validate`."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EpochDone:
    """The end of an epoch of `train()`.

    Attributes:
        epoch: number of the epoch, from 0.
        samples: samples trained on, in all processes together.
        seconds: duration in seconds, without validation.
        wait_s: seconds spent waiting for data.
        values: means of the step's values and results of the validation, by label.
    """

    epoch: int
    samples: int
    seconds: float
    wait_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The end of `train()`; `error` names the error that stopped it or prevented its last checkpoint, if any."""

    error: str | None


Event: TypeAlias = EpochStarted | BatchTaken | DataWait | RunStarted | StepDone | ValidationDone | EpochDone | RunEnded
Listener: TypeAlias = Callable[[Event], None]

# The latest report, if any.
_reports: list[object] = []
# Loaders used since that report, in the order of their first use.
_loaders: list[weakref.ref[LoaderMeters]] = []
# The first of several loaders that are used alternately, if any.
_leader: list[weakref.ref[LoaderMeters]] = []
listeners: list[Listener] = []
"""The current listeners. Frequent events need not be created while it is empty; only `subscribe` changes it."""
# In a fork, drop the listeners, such as panels, because they belong to the parent process.
os.register_at_fork(after_in_child=listeners.clear)


def label_validation(values: Mapping[str, float], training: Iterable[str]) -> dict[str, float]:
    """Return validation values by label, with the prefix `val_` for `loss`, `accuracy` and names of training values.

    Args:
        values: the validation values by name.
        training: names of the training values.
    """
    shared = {"loss", "accuracy", *training}
    return {f"val_{name}" if name in shared else name: value for name, value in values.items()}


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every event, in the thread that publishes it; return a function that unsubscribes it."""
    listeners.append(listener)

    def unsubscribe() -> None:
        if listener in listeners:
            listeners.remove(listener)

    return unsubscribe


def publish(event: Event) -> None:
    """Call every listener with an event; a listener that raises an `Exception` is removed and logged."""
    for listener in tuple(listeners):
        try:
            listener(event)
        except Exception:
            if listener in listeners:
                listeners.remove(listener)
            name = repr(getattr(listener, "__self__", listener))
            logger.warning("%s failed and was removed; the run continues", name, exc_info=True)


def used(counts: LoaderMeters) -> None:
    """Record that a loop over a loader begins; the meters are not kept alive.

    If loaders alternate, such as those for training and validation, `latest()` returns the one used first. A loop
    without gradients is ignored beside a loader that has trained: frameworks such as Lightning validate before they
    train.
    """
    _loaders[:] = [known for known in _loaders if known() is not None]
    if has_gradients():
        counts.has_trained = True
    elif any((other := known()) is not None and other is not counts and other.has_trained for known in _loaders):
        return
    if all(known() is not counts for known in _loaders):
        _loaders.append(weakref.ref(counts))
        _leader.clear()
        return
    either = (counts, _leader[0]() if _leader else None)
    _leader[:] = [next(known for known in _loaders if any(known() is one for one in either))]


def has_gradients() -> bool:
    """Return whether gradients are enabled in the calling thread; validation loops usually disable them."""
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


def finished(report: object) -> None:
    """Record the report of a training run."""
    _reports[:] = [report]
    _loaders.clear()
    _leader.clear()


def latest() -> object | None:
    """Return the meters of the latest loader used since the latest training report, else that report, else None.

    Loaders that no longer exist are ignored. If several loaders are used alternately, the first one counts as the
    latest.
    """
    for known in (*_leader, *reversed(_loaders)):
        if (counts := known()) is not None:
            return counts
    return _reports[0] if _reports else None
