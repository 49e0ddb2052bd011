"""The newest values of steps, and values over time, read without waiting for the device."""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from colabkit.foundation.meters.steps import Mark

# Maximum number of points: for the newest part of a series, and for the whole.
_NEWEST, _WHOLE = 60, 240


class StepValues:
    """The newest step values that have arrived from the device.

    Reading a GPU tensor directly would block the loop until the stream has computed it. Instead, an asynchronous copy
    to the host is queued in the stream, and its result is read in a later call, once it has arrived.

    Args:
        mark: records an event in the stream of a tensor; by default a CUDA event.
    """

    def __init__(self, mark: Callable[[Any], Mark] | None = None) -> None:
        self._mark = mark or _mark
        self._newest: Mapping[str, object] | None = None
        self._coming: dict[str, object] | None = None
        self._marks: list[Mark] = []
        self.values: dict[str, float] = {}

    def note(self, values: Mapping[str, object]) -> None:
        """Remember the values of the newest step without reading them."""
        self._newest = values

    def read(self) -> bool:
        """Take values that have arrived, and start copying newer ones; return whether `values` changed."""
        is_new = self._take()
        if self._coming is None and self._newest is not None:
            self._coming, self._newest = {name: self._sent(value) for name, value in self._newest.items()}, None
            is_new |= self._take()
        return is_new

    def read_all(self) -> bool:
        """Wait for the newest values; return whether `values` changed."""
        newest, self._newest, self._coming, self._marks = self._newest or self._coming, None, None, []
        if newest is None:
            return False
        self.values = _floats(newest)
        return True

    def _sent(self, value: Any) -> object:
        if not getattr(value, "is_cuda", False):
            return value
        copy = value.detach().to("cpu", non_blocking=True)
        self._marks.append(self._mark(value))
        return copy

    def _take(self) -> bool:
        if self._coming is None or not all(mark.query() for mark in self._marks):
            return False
        self.values, self._coming, self._marks = _floats(self._coming), None, []
        return True


class TimeSeries:
    """A value over time: its newest 60 points, and the whole run averaged to at most 240 points."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=_NEWEST)
        self._whole: list[float] = []
        self._span = 1
        self._sum = 0.0
        self._count = 0

    def add(self, value: float | None) -> None:
        """Add a point; ignore None, NaN and infinity."""
        if value is None or not math.isfinite(value):
            return
        self._newest.append(value)
        self._sum += value
        self._count += 1
        if self._count < self._span:
            return
        self._whole.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._whole) == _WHOLE:
            self._whole = [(a + b) / 2 for a, b in zip(self._whole[::2], self._whole[1::2], strict=True)]
            self._span *= 2

    @property
    def newest(self) -> tuple[float, ...]:
        """The newest 60 points, oldest first."""
        return tuple(self._newest)

    @property
    def whole(self) -> tuple[float, ...]:
        """The whole series, oldest first; in a long series, each point is a mean of several values."""
        rest = (self._sum / self._count,) if self._count else ()
        return (*self._whole, *rest)


def _floats(values: Mapping[str, object]) -> dict[str, float]:
    return {name: float(cast(Any, value)) for name, value in values.items()}


def _mark(value: Any) -> Mark:
    cuda = importlib.import_module("torch").cuda
    event = cuda.Event()
    event.record(cuda.current_stream(value.device))
    return cast(Mark, event)
