"""Meters of loaders and training: counts and times of each part, step times, events, and the latest run or loop.

Loaders and training publish here without depending on any listener; panels and other listeners subscribe.
"""

from __future__ import annotations

from colabkit.foundation.meters.counts import LoaderFacts as LoaderFacts
from colabkit.foundation.meters.counts import LoaderMeters as LoaderMeters
from colabkit.foundation.meters.counts import MetersSnapshot as MetersSnapshot
from colabkit.foundation.meters.counts import PartSnapshot as PartSnapshot
from colabkit.foundation.meters.events import BatchTaken as BatchTaken
from colabkit.foundation.meters.events import DataWait as DataWait
from colabkit.foundation.meters.events import EpochDone as EpochDone
from colabkit.foundation.meters.events import EpochStarted as EpochStarted
from colabkit.foundation.meters.events import Event as Event
from colabkit.foundation.meters.events import RunEnded as RunEnded
from colabkit.foundation.meters.events import RunStarted as RunStarted
from colabkit.foundation.meters.events import StepDone as StepDone
from colabkit.foundation.meters.events import ValidationDone as ValidationDone
from colabkit.foundation.meters.events import finished as finished
from colabkit.foundation.meters.events import has_gradients as has_gradients
from colabkit.foundation.meters.events import label_validation as label_validation
from colabkit.foundation.meters.events import latest as latest
from colabkit.foundation.meters.events import listeners as listeners
from colabkit.foundation.meters.events import logger as logger
from colabkit.foundation.meters.events import publish as publish
from colabkit.foundation.meters.events import subscribe as subscribe
from colabkit.foundation.meters.events import used as used
from colabkit.foundation.meters.series import StepValues as StepValues
from colabkit.foundation.meters.series import TimeSeries as TimeSeries
from colabkit.foundation.meters.steps import Clock as Clock
from colabkit.foundation.meters.steps import DeviceClock as DeviceClock
from colabkit.foundation.meters.steps import HostClock as HostClock
from colabkit.foundation.meters.steps import Mark as Mark
from colabkit.foundation.meters.steps import StepTimes as StepTimes
from colabkit.foundation.meters.steps import StepTotals as StepTotals
from colabkit.foundation.meters.steps import Stretch as Stretch
