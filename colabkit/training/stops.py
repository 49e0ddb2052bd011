"""What ends a training before its time: Ctrl-C, SIGTERM, and a deadline; never in the middle of a step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Literal, Self, TypeAlias

from colabkit import meters

__all__ = ["Reason", "StopNow", "Stops"]

Reason: TypeAlias = Literal["Ctrl-C", "SIGTERM", "deadline"]

REASONS: tuple[Reason, ...] = ("Ctrl-C", "SIGTERM", "deadline")
_RESERVE_S = 5.0


class StopNow(KeyboardInterrupt):
    """Ends a wait between two steps."""


class Stops:
    """Notes what would end a training, and lets a step come to its end first.

    While a step runs, Ctrl-C and SIGTERM are noted and a second Ctrl-C is a `KeyboardInterrupt`, as without this.
    Between steps, where training waits for data or validates, they end the wait. Only the main thread hears signals,
    and a handler of the user's own stays where it is.

    Args:
        deadline: by `time.monotonic`, or None.
        waits_for_others: whether other processes train too: then no wait is ended, since they have to be told first.

    Attributes:
        reason: what was noted.
    """

    def __init__(self, deadline: float | None, waits_for_others: bool) -> None:
        self.reason: Reason | None = None
        self.reserve_s = _RESERVE_S
        self._deadline = deadline
        self._waits_for_others = waits_for_others
        self._may_end = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            defaults = ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL))
            for number, default in defaults:
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
    def wait(self, may_end: bool = True) -> Iterator[None]:
        """Let what comes end the block, unless something is half done."""
        self._may_end = may_end and not self._waits_for_others
        try:
            self.look()
            if self.reason is not None and self._may_end:
                raise StopNow
            yield
        finally:
            self._may_end = False

    def look(self) -> Reason | None:
        """Return what would end the training now."""
        if self.reason is None and self._is_late():
            self.reason = "deadline"
        return self.reason

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline - self.reserve_s

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.reason == "Ctrl-C" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if self._may_end:
            self._may_end = False
            raise StopNow

    def _listen(self, event: meters.Event) -> None:
        if isinstance(event, meters.Waiting) and self._may_end and self.look() is not None:
            self._may_end = False
            raise StopNow
