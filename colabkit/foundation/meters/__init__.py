"""Counts and seconds of each part of the work, where each step's time goes, the events that tell of it, what was last.

Loader and training publish here and know nothing of who listens; panels and other listeners subscribe.
"""

from __future__ import annotations

from colabkit.foundation.meters.counts import LoaderFacts, LoaderMeters, MetersSnapshot, PartSnapshot
from colabkit.foundation.meters.events import (
    BatchTaken,
    EpochStarted,
    Event,
    RunEnded,
    RunStarted,
    StepDone,
    ValidationDone,
    Waiting,
    finished,
    is_heard,
    label_validation,
    latest,
    logger,
    publish,
    subscribe,
    used,
)
from colabkit.foundation.meters.steps import Clock, DeviceClock, HostClock, Mark, StepTimes, StepTotals

__all__ = [
    "BatchTaken",
    "Clock",
    "DeviceClock",
    "EpochStarted",
    "Event",
    "HostClock",
    "LoaderFacts",
    "LoaderMeters",
    "Mark",
    "MetersSnapshot",
    "PartSnapshot",
    "RunEnded",
    "RunStarted",
    "StepDone",
    "StepTimes",
    "StepTotals",
    "ValidationDone",
    "Waiting",
    "finished",
    "is_heard",
    "label_validation",
    "latest",
    "logger",
    "publish",
    "subscribe",
    "used",
]
