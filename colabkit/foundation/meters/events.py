"""The events that loader and training publish, who is told of them, and what was trained or looped over last.

A listener that raises is taken off the list and named once in the log: watching never stops a run.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from colabkit.foundation.meters.counts import LoaderMeters

logger = logging.getLogger("colabkit")


@dataclass(frozen=True, slots=True)
class EpochStarted:
    """A pass over a loader begins: its number from 0, and how many batches and samples it has left.

    Both are None where a loader that is watched does not tell.
    """

    meters: LoaderMeters
    epoch: int
    batches: int | None
    samples: int | None


@dataclass(frozen=True, slots=True)
class BatchTaken:
    """The user receives a batch."""

    meters: LoaderMeters


@dataclass(frozen=True, slots=True)
class Waiting:
    """The user is waiting for a batch and has been for `wait_s` seconds; sent a few times a second while it lasts."""

    meters: LoaderMeters
    wait_s: float


@dataclass(frozen=True, slots=True)
class RunStarted:
    """`train()` begins: epochs in all, steps of a whole epoch, and the step's precision, if it tells."""

    meters: LoaderMeters
    epochs: int
    steps_per_epoch: int
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is over: its number in all, its number in this epoch, both from 1.

    `values` are what the step returned, not yet read from the device: `float(value)` reads them.
    """

    epoch: int
    step: int
    step_in_epoch: int
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ValidationDone:
    """A validation is over: after how many steps in all, and the numbers that `validate` returned."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunEnded:
    """`train()` ends; `error` is the exception's name when it did not end by itself."""

    error: str | None


Event: TypeAlias = EpochStarted | BatchTaken | Waiting | RunStarted | StepDone | ValidationDone | RunEnded
Listener: TypeAlias = Callable[[Event], None]

_reports: list[object] = []  # the last one
_loaders: list[weakref.ref[LoaderMeters]] = []  # used since then, by the first use of each
_leader: list[weakref.ref[LoaderMeters]] = []  # the first of those that are used in turn, if any are
_listeners: list[Listener] = []
os.register_at_fork(after_in_child=_listeners.clear)  # a panel is its own process's


def label_validation(values: Mapping[str, float], training: Iterable[str]) -> dict[str, float]:
    """Return the numbers of a validation by label: as `val_loss` where training has a number of that name too.

    Args:
        values: the numbers.
        training: names of the numbers of training.
    """
    shared = {"loss", "accuracy", *training}
    return {f"val_{name}" if name in shared else name: value for name, value in values.items()}


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every event, in the thread that causes it; return the function that ends this."""
    _listeners.append(listener)

    def unsubscribe() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return unsubscribe


def is_heard() -> bool:
    """Return whether anybody listens; where events are many, none need be made else."""
    return bool(_listeners)


def publish(event: Event) -> None:
    """Tell every listener. One that raises an `Exception` is dropped and logged."""
    for listener in tuple(_listeners):
        try:
            listener(event)
        except Exception:
            if listener in _listeners:
                _listeners.remove(listener)
            logger.warning("a listener of the meters failed and was dropped; the run goes on", exc_info=True)


def used(counts: LoaderMeters) -> None:
    """Note that a loop over a loader begins; its meters are forgotten when the loader is gone.

    One that is used again after others leads these, as the loader of a training does those of its validations.
    """
    _loaders[:] = [known for known in _loaders if known() is not None]
    if all(known() is not counts for known in _loaders):
        _loaders.append(weakref.ref(counts))
        _leader.clear()
        return
    either = (counts, _leader[0]() if _leader else None)
    _leader[:] = [next(known for known in _loaders if any(known() is one for one in either))]


def finished(report: object) -> None:
    """Note the report of a training."""
    _reports[:] = [report]
    _loaders.clear()
    _leader.clear()


def latest() -> object | None:
    """Return what was noted last and is still there: a training's report or a loader's meters; None without either.

    Of loaders that are used in turn it is the first.
    """
    for known in (*_leader, *reversed(_loaders)):
        if (counts := known()) is not None:
            return counts
    return _reports[0] if _reports else None
