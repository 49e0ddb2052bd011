"""What the panel shows at one instant, and how it is gathered from the meters' events."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from colabkit.meters import (
    BatchTaken,
    EpochStarted,
    Event,
    LoaderMeters,
    MetersSnapshot,
    RunEnded,
    RunStarted,
    StepDone,
    Waiting,
)
from colabkit.telemetry import HostSnapshot

__all__ = ["PanelState", "Recorder"]

_WINDOW_S = 5.0
_CURVE_POINTS = 60
_MIN_BATCHES = 5  # below these a share of time says nothing


@dataclass(frozen=True, slots=True)
class PanelState:
    """Everything that `render` draws; unknown values are None.

    Attributes:
        phase: `"starting"`, `"running"`, `"waiting"`, `"finished"` or `"stopped"`.
        stopped_by: name of the error that stopped the run.
        epoch: number of the epoch, from 1.
        epochs: how many there will be.
        step: steps done in this epoch.
        steps_per_epoch: steps of an epoch.
        elapsed_s: seconds since the start.
        remaining_s: seconds that are left at the present pace.
        waiting_s: for how long the loop has been waiting for a batch.
        wait_share: share of the time spent waiting for data, in [0, 1]; the last seconds while running, else all.
        images_per_s: images a second, likewise.
        gathered_bytes_per_s: bytes a second that the loader delivered, likewise.
        occupancy_rate: share of batches that were ready when asked for.
        values: what the last step returned, read from the device.
        speed_curve: images a second, oldest first.
        loss_curve: the losses, oldest first.
        gpu_curve: utilisation of the first GPU, oldest first.
        host: the machine.
        cost_share: share of the time that the panel itself took.
    """

    phase: str
    stopped_by: str | None = None
    epoch: int | None = None
    epochs: int | None = None
    step: int = 0
    steps_per_epoch: int | None = None
    elapsed_s: float = 0.0
    remaining_s: float | None = None
    waiting_s: float = 0.0
    wait_share: float | None = None
    images_per_s: float | None = None
    gathered_bytes_per_s: float | None = None
    occupancy_rate: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    speed_curve: tuple[float, ...] = ()
    loss_curve: tuple[float, ...] = ()
    gpu_curve: tuple[float, ...] = ()
    host: HostSnapshot | None = None
    cost_share: float | None = None


class Recorder:
    """Gathers events of one run, or of a plain loop over a loader, into `PanelState`s.

    Noting an event takes about a microsecond and reads nothing from the device.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._ended: float | None = None
        self._meters: LoaderMeters | None = None
        self._begin: MetersSnapshot | None = None
        self._in_run = False
        self._phase = "starting"
        self._stopped_by: str | None = None
        self._epoch: int | None = None
        self._epochs: int | None = None
        self._steps_per_epoch: int | None = None
        self._noted_steps = 0
        self._step = 0
        self._waiting_s = 0.0
        self._values: Mapping[str, object] = {}
        self._window: deque[tuple[float, MetersSnapshot]] = deque()
        self._speed: list[float] = []
        self._loss: list[float] = []
        self._gpu: list[float] = []

    def note(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case BatchTaken(meters) if meters is self._meters:
                self._phase = "running"
                self._waiting_s = 0.0
                if not self._in_run:
                    self._step += 1
                    self._noted_steps += 1
            case StepDone():
                self._values = event.values
                self._epoch = event.epoch + 1
                self._step = event.step_in_epoch
                self._noted_steps += 1
            case Waiting(meters, wait_s) if meters is self._meters:
                self._phase = "waiting"
                self._waiting_s = wait_s
            case EpochStarted() if self._meters is None or (event.meters is self._meters and not self._in_run):
                self._watch(event.meters)
                self._epoch, self._step, self._steps_per_epoch = event.epoch + 1, 0, event.batches
            case RunStarted():
                self._watch(event.meters)
                self._in_run = True
                self._epochs, self._steps_per_epoch = event.epochs, event.steps_per_epoch
            case RunEnded():
                self.end(event.error)

    def end(self, error: str | None) -> None:
        """The run is over; `error` names what stopped it."""
        if self._ended is None:
            self._phase = "stopped" if error else "finished"
            self._stopped_by = error
            self._ended = time.monotonic()

    def _watch(self, meters: LoaderMeters) -> None:
        if self._meters is not meters:
            self._meters = meters
            self._begin = meters.snapshot()
            self._started = time.monotonic()

    def state(self, host: HostSnapshot | None, cost_s: float) -> PanelState:
        """Return the state of this instant; reads the last step's values from the device.

        Args:
            host: the machine at this instant.
            cost_s: seconds that the panel took so far.
        """
        now = self._ended or time.monotonic()
        elapsed_s = now - self._started
        values = {name: float(cast(Any, value)) for name, value in self._values.items()}
        spent = self._spent(now)
        passed_s = spent.wait_s + spent.user_s if spent else 0.0
        enough = spent is not None and spent.batches >= _MIN_BATCHES and passed_s > 0
        images_per_s = spent.samples / passed_s if spent and enough else None
        gathered = sum(part.handled_bytes for part in spent.parts if part.name == "gather") if spent else 0
        if self._ended is None:
            _append(self._speed, images_per_s)
            _append(self._loss, values.get("loss"))
            _append(self._gpu, host.gpus[0].utilization_rate if host and host.gpus else None)
        return PanelState(
            phase=self._phase,
            stopped_by=self._stopped_by,
            epoch=self._epoch,
            epochs=self._epochs,
            step=self._step,
            steps_per_epoch=self._steps_per_epoch,
            elapsed_s=elapsed_s,
            remaining_s=self._remaining_s(elapsed_s),
            waiting_s=self._waiting_s,
            wait_share=spent.wait_share if spent and enough else None,
            images_per_s=images_per_s,
            gathered_bytes_per_s=gathered / passed_s if enough else None,
            occupancy_rate=spent.occupancy_rate if spent and enough else None,
            values=values,
            speed_curve=_thinned(self._speed),
            loss_curve=_thinned(self._loss),
            gpu_curve=_thinned(self._gpu),
            host=host,
            cost_share=cost_s / elapsed_s if elapsed_s > 0 else None,
        )

    def _spent(self, now: float) -> MetersSnapshot | None:
        """Return what the meters counted: of the last seconds while running, of all when it is over."""
        if self._meters is None or self._begin is None:
            return None
        current = self._meters.snapshot()
        if self._ended is not None:
            return current - self._begin
        self._window.append((now, current))
        while len(self._window) > 2 and now - self._window[1][0] > _WINDOW_S:
            self._window.popleft()
        oldest = self._window[0][1] if len(self._window) > 1 else self._begin
        return current - oldest

    def _remaining_s(self, elapsed_s: float) -> float | None:
        if not self._steps_per_epoch or self._epoch is None or self._ended is not None:
            return None
        left = self._steps_per_epoch * (self._epochs - self._epoch + 1 if self._epochs else 1) - self._step
        return left * elapsed_s / self._noted_steps if self._noted_steps else None


def _append(curve: list[float], value: float | None) -> None:
    if value is not None and math.isfinite(value):
        curve.append(value)


def _thinned(curve: list[float]) -> tuple[float, ...]:
    """Return at most 60 points of a curve, evenly spread, the newest among them."""
    if len(curve) <= _CURVE_POINTS:
        return tuple(curve)
    step = (len(curve) - 1) / (_CURVE_POINTS - 1)
    return tuple(curve[round(number * step)] for number in range(_CURVE_POINTS))
