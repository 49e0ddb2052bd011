"""What ends a training before its time: Ctrl-C, SIGTERM, SIGHUP, and a deadline; never in the middle of a step."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Literal, Self, TypeAlias

from colabkit.foundation import meters

Reason: TypeAlias = Literal["Ctrl-C", "SIGHUP", "SIGTERM", "deadline"]

_REASONS: tuple[Reason, ...] = ("deadline", "Ctrl-C", "SIGHUP", "SIGTERM")

RESERVE_S = 5.0
"""Seconds kept before a deadline, beside those that a checkpoint takes."""

BOUNCE_S = 0.3
"""Seconds in which a second Ctrl-C is taken for the first: keys bounce."""

logger = logging.getLogger("colabkit")


class StopNow(KeyboardInterrupt):
    """Ends a wait between two steps."""


class StopRequests:
    """Notes what would end a training, and lets a step come to its end first.

    While a step runs, Ctrl-C, SIGTERM and SIGHUP are noted, and a second Ctrl-C is a `KeyboardInterrupt`, as without
    this. Between steps, where training waits for data or validates, they end the wait. Only the main thread hears
    signals, and a handler of the user's own stays where it is.

    Args:
        deadline: by `time.monotonic`, or None.
        waits_for_others: whether other processes train too: then no wait is ended, since they have to be told first.
        saves: whether a last checkpoint follows, which is told.

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
        """What was noted as a number: the larger one counts where several processes noted something; 0 is nothing."""
        return self._strength

    @property
    def reason(self) -> Reason | None:
        """What was noted; of several the strongest, which is SIGTERM."""
        return _REASONS[self._strength - 1] if self._strength else None

    def note(self, strength: int) -> None:
        """Note what another process has noted."""
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
        """Give signals back to who had them, all if none is named."""
        for number in numbers or tuple(self._former):
            if number in self._former:
                signal.signal(number, self._former.pop(number))

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Let what comes end the block."""
        self.begin_wait(may_end=True)
        try:
            yield
        finally:
            self.end_wait()

    def begin_wait(self, may_end: bool) -> None:
        """Let what comes end the wait that follows, up to `end_wait()`; raise `StopNow` if it has come already."""
        if not may_end or self._waits_for_others:
            return
        self._waiting_thread = threading.get_ident()
        self._may_end = True
        if self.look():
            self._may_end = False
            raise StopNow

    def end_wait(self) -> None:
        """Let what comes wait again."""
        self._may_end = False

    def look(self) -> int:
        """Return the strength of what would end the training now, 0 if nothing would."""
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
            raise StopNow

    def _listen(self, event: meters.Event) -> None:
        is_ours = self._may_end and threading.get_ident() == self._waiting_thread
        if isinstance(event, meters.Waiting) and is_ours and self.look():
            self._may_end = False
            raise StopNow


def _strength_of(reason: Reason) -> int:
    return _REASONS.index(reason) + 1
