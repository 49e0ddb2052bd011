"""A fake GPU clock: the stream has already passed every mark, and each step begins when its batch is received."""

from __future__ import annotations

from typing import NamedTuple

from colabkit.foundation.meters.steps import DeviceClock, StepTotals


class PassedMark(NamedTuple):
    """A mark that the stream has already passed."""

    at_s: float

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: PassedMark) -> float:
        return 1000 * (later.at_s - self.at_s)


class PromptClock(DeviceClock):
    """A `DeviceClock` of a GPU that never lags, constructed like a `HostClock`."""

    def __init__(self, totals: StepTotals) -> None:
        super().__init__(lambda: PassedMark(self.now_s))
        self.now_s = 0.0

    def stepped(self, asked: float, given: float, left: float, samples: int) -> None:
        self.given((PassedMark(given), PassedMark(given)))
        self.now_s = left
        super().stepped(asked, given, left, samples)
