"""What comes between two steps of a run: checkpoints and validations that are due, and requests to stop.

Ctrl-C, SIGTERM, SIGHUP and a deadline end a training early, but never in the middle of a step.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import FrameType, TracebackType
from typing import Any, Literal, Self, TypeAlias

from colabkit.foundation import InvalidOption, cannot, check_duration, check_whole_number, meters
from colabkit.training.ranks import Ranks
from colabkit.training.records import Values, numbers_of

Moment: TypeAlias = float | str | timedelta | datetime
Reason: TypeAlias = Literal["Ctrl-C", "SIGHUP", "SIGTERM", "deadline"]

_REASONS: tuple[Reason, ...] = ("deadline", "Ctrl-C", "SIGHUP", "SIGTERM")

RESERVE_S = 5.0
"""Seconds kept before a deadline, beside those that a checkpoint takes."""

BOUNCE_S = 0.3
"""Seconds in which a second Ctrl-C is taken for the first: keys bounce."""

logger = logging.getLogger("colabkit")


def moment(act: str, name: str, value: Moment) -> float:
    """Return a moment by the clock of `time.monotonic`: a `datetime`, or a duration from now.

    Raises:
        InvalidOption: if it is neither, or over, or outside what the clock can tell.
    """
    if not isinstance(value, datetime):
        return time.monotonic() + check_duration(act, name, value)
    try:
        left_s = value.timestamp() - time.time()
    except (ValueError, OverflowError, OSError):  # on the first and the last days that there are
        left_s = math.nan
    if not left_s > 0:
        raise InvalidOption(cannot(act, f"{name}={value}", "a moment in the future", f"Use {name}='11h'"))
    return time.monotonic() + left_s


class SaveSchedule:
    """Says when a checkpoint is due: `every` so many steps, every duration such as `"5min"`, or every `"epoch"`."""

    def __init__(self, every: int | str) -> None:
        self._steps: int | None = None
        self._seconds: float | None = None
        if isinstance(every, str) and every != "epoch":
            self._seconds = check_duration("train", "save_every", every)
        elif not isinstance(every, str):
            check_whole_number("train", "save_every", every, 1)
            self._steps = every
        self.is_by_epoch = every == "epoch"
        self._saved_step = 0
        self._saved_at = time.monotonic()

    def saved(self, step: int) -> None:
        """Note that the state after a step is being saved."""
        self._saved_step, self._saved_at = step, time.monotonic()

    def is_late(self) -> bool:
        """Return whether one is due by the clock, which may differ between processes."""
        return self._seconds is not None and time.monotonic() - self._saved_at >= self._seconds

    def is_due(self, step: int) -> bool:
        """Return whether one is due by the number of the step, which is equal in all processes."""
        return self._steps is not None and step // self._steps > self._saved_step // self._steps


class Validator:
    """Validates, and says which state is the best so far.

    Args:
        function: returns numbers, given how many validations came before; None to judge by what the step returns.
        every: steps between two validations, None for the ends of epochs.
        monitor: the number that judges, None for the loss.
        mode: whether the lowest or the highest is best.
        ranks: those that train together; the first one's numbers count.

    Attributes:
        rule: mode and name of the number: what two scores need in common to be compared.
        can_validate: whether there is anything to call.
        is_by_epoch: whether states are judged at the ends of epochs.
        best: the best number so far, None before the first.
        score: the number of the present state, None if it was not judged.
        is_best: whether the present state is the best so far, and not saved yet.
    """

    def __init__(
        self,
        function: Callable[[int], Values] | None,
        every: int | None,
        monitor: str | None,
        mode: Literal["min", "max"],
        ranks: Ranks,
    ) -> None:
        self.rule: tuple[Literal["min", "max"], str] = mode, monitor or "loss"
        self.can_validate = function is not None
        self.is_by_epoch = function is None or every is None
        self.best: float | None = None
        self.score: float | None = None
        self.is_best = False
        self._function = function
        self._every = every
        self._is_required = monitor is not None
        self._ranks = ranks

    def is_due(self, step: int) -> bool:
        """Return whether a validation follows a step, not counting the end of an epoch."""
        return self._function is not None and self._every is not None and step % self._every == 0

    def moved(self) -> None:
        """Note that the state is another."""
        self.score, self.is_best = None, False

    def validate(self, number: int) -> dict[str, float]:
        """Validate in all processes, after `number` validations, and return what the first one found.

        Raises:
            InvalidOption: if that is no dict of numbers.
            LaunchFailed: if it failed in another process.
        """

        def numbers() -> dict[str, float]:
            assert self._function is not None
            found = self._function(number)
            return numbers_of(found) if self._ranks.is_first else {}

        return self._ranks.from_first(self._ranks.together("validate", numbers))

    def judge(self, values: Mapping[str, float]) -> None:
        """Note how good the state is.

        Raises:
            InvalidOption: if the number that was asked for is not among the values.
        """
        mode, monitor = self.rule
        # Reports label the numbers of a validation so.
        name = monitor if monitor in values else monitor.removeprefix("val_")
        if self._is_required and name not in values:
            found = f"monitor={monitor!r} beside {', '.join(map(repr, values)) or 'no values'}"
            raise InvalidOption(cannot("tell the best checkpoint", found, "one of these", "Correct it and go on"))
        value = values.get(name, math.nan)
        if not math.isfinite(value):
            return
        self.score = value
        if self.best is None or (value < self.best if mode == "min" else value > self.best):
            self.best = value
            self.is_best = True


class WaitInterrupt(KeyboardInterrupt):
    """Ends a wait between two steps."""


class StopRequests:
    """Notes what would end a training, and lets the running step finish first.

    While a step runs, Ctrl-C, SIGTERM and SIGHUP are noted, and a second Ctrl-C is a `KeyboardInterrupt`, as usual.
    Between steps, while training waits for data or validates, they end the wait. Only the main thread receives signals,
    and custom handlers stay in place.

    Args:
        deadline: by `time.monotonic`, or None.
        waits_for_others: whether other processes train too: then no wait ends, since they have to hear of it first.
        saves: whether a last checkpoint follows, for the message.

    Attributes:
        reserve_s: seconds before the deadline at which the training has to end.
    """

    def __init__(self, deadline: float | None, waits_for_others: bool, saves: bool) -> None:
        self.reserve_s = RESERVE_S
        self._strength = 0
        self._deadline = deadline
        self._waits_for_others = waits_for_others
        self._saves = saves
        self._may_end = False
        self._waiting_thread = 0
        self._pressed_at: float | None = None
        self._former: dict[int, Any] = {}

    @property
    def strength(self) -> int:
        """What was noted as a number, 0 for nothing; the largest of all processes counts."""
        return self._strength

    @property
    def reason(self) -> Reason | None:
        """What was noted; the strongest of several, which is SIGTERM."""
        return _REASONS[self._strength - 1] if self._strength else None

    def note(self, strength: int) -> None:
        """Note a strength, as of another process."""
        self._strength = max(self._strength, strength)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                if signal.getsignal(number) == default:
                    self._former[number] = signal.signal(number, self._note)
        if self._deadline is not None:
            self._unsubscribe = meters.subscribe(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._deadline is not None:
            self._unsubscribe()
        self.let_go()

    def let_go(self, *numbers: int) -> None:
        """Restore the former handlers of signals, of all if none is named."""
        for number in numbers or tuple(self._former):
            if number in self._former:
                signal.signal(number, self._former.pop(number))

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Let a signal or the deadline end the block."""
        self.begin_wait(may_end=True)
        try:
            yield
        finally:
            self.end_wait()

    def begin_wait(self, may_end: bool) -> None:
        """Let a signal or the deadline end the wait up to `end_wait()` by a `WaitInterrupt`, at once if it has come."""
        if not may_end or self._waits_for_others:
            return
        self._waiting_thread = threading.get_ident()
        self._may_end = True
        if self.look():
            self._may_end = False
            raise WaitInterrupt

    def end_wait(self) -> None:
        """Let signals and the deadline wait for the end of a step again."""
        self._may_end = False

    def look(self) -> int:
        """Return the strength of what ends the training now, 0 for nothing."""
        if self._is_late():
            self.note(_strength_of("deadline"))
        return self._strength

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline - self.reserve_s

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            self.note(_strength_of("SIGHUP" if number == signal.SIGHUP else "SIGTERM"))
        elif self._pressed_at is None:
            self._pressed_at = time.monotonic()
            last = " with a last checkpoint" if self._saves else "; nothing is saved"
            logger.warning("stopping after this step%s; Ctrl-C again stops at once", last)
            self.note(_strength_of("Ctrl-C"))
        elif time.monotonic() - self._pressed_at >= BOUNCE_S:
            raise KeyboardInterrupt
        else:
            return
        if self._may_end:
            self._may_end = False
            raise WaitInterrupt

    def _listen(self, event: meters.Event) -> None:
        is_ours = self._may_end and threading.get_ident() == self._waiting_thread
        if isinstance(event, meters.Waiting) and is_ours and self.look():
            self._may_end = False
            raise WaitInterrupt


def _strength_of(reason: Reason) -> int:
    return _REASONS.index(reason) + 1
