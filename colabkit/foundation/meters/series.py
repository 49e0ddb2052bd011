"""The newest values of steps, and values over time, read without waiting for the device."""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

from colabkit.foundation.meters.steps import Mark

# Maximum number of points: for the newest part of a series, and for the whole.
_NEWEST, _WHOLE = 60, 240


class StepValues:
    """The newest step values that have arrived from the device.

    Reading a GPU tensor directly would block the loop until the stream has computed it. Instead, an asynchronous copy
    to the host is queued in the stream, and its result is read in a later call, once it has arrived. The copy is queued
    in the stream of the step, because the reading thread may have another current stream, in which the value may not be
    computed yet.
    """

    def __init__(self) -> None:
        # The newest values and, if any are on a GPU, the stream that computes them.
        self._newest: tuple[Mapping[str, object], Any] | None = None
        self._stream: Any = None
        self._coming: dict[str, object] | None = None
        self._marks: list[Mark] = []
        self.values: dict[str, float] = {}

    def note(self, values: Mapping[str, object]) -> None:
        """Remember the values of the newest step without reading them."""
        on_gpu: Any = next(filter(_is_on_gpu, values.values()), None)
        self._newest = values, None if on_gpu is None else _cuda().current_stream(on_gpu.device)

    def read(self) -> bool:
        """Take values that have arrived, and start copying newer ones; return whether `values` changed."""
        is_new = self._take()
        if self._coming is None and self._newest is not None:
            (newest, self._stream), self._newest = self._newest, None
            self._coming = {name: self._sent(value) for name, value in newest.items()}
            is_new |= self._take()
        return is_new

    def read_all(self) -> bool:
        """Wait for the newest values; return whether `values` changed."""
        newest, stream = self._newest or (self._coming, self._stream)
        self._newest, self._coming, self._marks = None, None, []
        if newest is None:
            return False
        # Wait, because an asynchronous copy may not have arrived in host memory yet.
        if stream is not None:
            stream.synchronize()
        self.values = _floats(newest)
        return True

    def _sent(self, value: Any) -> object:
        if not _is_on_gpu(value):
            return value
        # Without `device`, leaving the stream would create a context on the GPU that was current before.
        with _cuda().device(self._stream.device), _cuda().stream(self._stream):
            copy = value.detach().to("cpu", non_blocking=True)
        self._marks.append(self._stream.record_event())
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


def _is_on_gpu(value: Any) -> bool:
    return bool(getattr(value, "is_cuda", False))


def _cuda() -> Any:
    return importlib.import_module("torch").cuda
