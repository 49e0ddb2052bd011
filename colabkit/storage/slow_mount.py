"""Calls on a slow mount that stop waiting if it hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from colabkit.foundation import TimedOut, call, cannot, file_changes, format_things
from colabkit.storage.sources.concurrency import Calls, still_moving
from colabkit.storage.sources.level import Level

T = TypeVar("T")

SLOWEST_BYTES_S = 10e6
"""Slowest expected rate in bytes/s. Some mounts upload a file when it is closed and do not respond meanwhile."""

# Minimum expected rate, in files/s, for removing a replaced folder, which counts as one operation of the mount.
_SLOWEST_FILES_S = 10.0
# Maximum number of abandoned threads for a mount; each holds memory as long as the mount hangs.
_MOST_ABANDONED = 3


class MoveCallback(Protocol):
    """A callable to call each time the mount has answered, with the number of bytes transferred."""

    def __call__(self, size: int = 0) -> None:
        """Record an answer; raise `AbandonedError` if the caller no longer waits for the work."""


class AbandonedError(Exception):
    """The caller no longer waits for this work."""


class SlowMount:
    """A folder on a mount that may hang.

    Args:
        name: the folder's name in messages.
        stalled_s: seconds to wait for each operation; `call()` adds time for large and for many files.
    """

    def __init__(self, name: str, stalled_s: float) -> None:
        self.name = name
        self.stalled_s = stalled_s
        self._abandoned: list[threading.Event] = []

    def call(
        self,
        act: str,
        work: Callable[[MoveCallback], T],
        *,
        largest_bytes: int = 0,
        files: int = 0,
        on_wait: Callable[[], None] | None = None,
    ) -> T:
        """Run `work` in a thread and return its result; give up when the mount stops responding.

        When the mount answers again, `AbandonedError` is raised in the abandoned work, so that the work can clean up.

        Args:
            act: verb and object for messages.
            work: receives a function that it must call each time the mount has answered.
            largest_bytes: size of the largest file that `work` copies; every 10 MB adds a second to the deadline.
            files: number of files that `work` copies; every 10 files add a second to the deadline.
            on_wait: called several times a second while waiting; may raise to abandon the work.

        Raises:
            TimedOut: if the mount does not respond, or has not yet responded to three earlier calls.
        """
        stop, ended = threading.Event(), threading.Event()

        def moved(size: int = 0) -> None:  # noqa: ARG001 - required by MoveCallback
            still_moving()
            if stop.is_set():
                raise AbandonedError

        def run(_: None) -> T:
            try:
                with file_changes.translated(act):
                    return work(moved)
            finally:
                ended.set()

        next_step = ("If it is on Drive, run ", call("mount", force=True), ", otherwise mount it again; then try again")
        self._abandoned = [event for event in self._abandoned if not event.is_set()]
        if len(self._abandoned) >= _MOST_ABANDONED:
            found = f"{self.name!r} has not responded to {format_things(len(self._abandoned), 'earlier operation')}"
            raise TimedOut(cannot(act, found, "", next_step))
        stalled_s = self.stalled_s + largest_bytes / SLOWEST_BYTES_S + files / _SLOWEST_FILES_S
        with Calls(run, Level(1, is_fixed=True), stalled_s, on_wait, tries=1) as calls:
            try:
                calls.make(None)
                return calls.take()
            except TimedOut as error:
                found = f"{self.name!r} has not responded for {stalled_s:.0f} s"
                raise TimedOut(cannot(act, found, "", next_step)) from error
            finally:
                stop.set()
                if not ended.is_set():
                    self._abandoned.append(ended)
