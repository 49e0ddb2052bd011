"""What steps return, read from the device without making anything wait for it; and series of figures."""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

_MINUTE = 60
_ROOM = 120


class _Mark(Protocol):
    def query(self) -> bool: ...


class Readings:
    """The values of the newest steps that have arrived from the device.

    A value on a GPU is there when the stream has come by, so reading it would make the loop wait. Here its copy to
    the host is put into the stream, and read the next time it is asked for, if it has arrived.

    Args:
        mark: sets a mark in the stream that the value belongs to.
    """

    def __init__(self, mark: Callable[[Any], _Mark] | None = None) -> None:
        self._mark = mark or _mark
        self._newest: Mapping[str, object] | None = None
        self._coming: dict[str, object] | None = None
        self._marks: list[_Mark] = []
        self.values: dict[str, float] = {}

    def note(self, values: Mapping[str, object]) -> None:
        """These are what the newest step returned; nothing is read yet."""
        self._newest = values

    def read(self) -> bool:
        """Take over what has arrived, and send for what is newer; return whether `values` is new."""
        is_new = self._take()
        if self._coming is None and self._newest is not None:
            self._coming, self._newest = {name: self._sent(value) for name, value in self._newest.items()}, None
            is_new |= self._take()
        return is_new

    def read_all(self) -> bool:
        """Wait for the newest values, and return whether `values` is new."""
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


class Series:
    """A figure over time: its newest minute, and all of it in at most 240 points."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=_MINUTE)
        self._whole: list[float] = []
        self._span = 1
        self._sum = 0.0
        self._count = 0

    def add(self, value: float | None) -> None:
        """Add a point; one that is no number is left out."""
        if value is None or not math.isfinite(value):
            return
        self._newest.append(value)
        self._sum += value
        self._count += 1
        if self._count < self._span:
            return
        self._whole.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._whole) == 2 * _ROOM:
            self._whole = [(a + b) / 2 for a, b in zip(self._whole[::2], self._whole[1::2], strict=True)]
            self._span *= 2

    @property
    def newest(self) -> tuple[float, ...]:
        """The newest 60 points, oldest first."""
        return tuple(self._newest)

    @property
    def whole(self) -> tuple[float, ...]:
        """All of it, oldest first; in a long series each point is the mean of some."""
        rest = (self._sum / self._count,) if self._count else ()
        return (*self._whole, *rest)


def _floats(values: Mapping[str, object]) -> dict[str, float]:
    return {name: float(cast(Any, value)) for name, value in values.items()}


def _mark(value: Any) -> _Mark:
    cuda = importlib.import_module("torch").cuda
    event = cuda.Event()
    event.record(cuda.current_stream(value.device))
    return cast(_Mark, event)
