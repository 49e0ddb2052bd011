"""What every way of fetching shares: the target, tries that are counted with pauses between them, and progress."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from colabkit.foundation import (
    Corrupt,
    FetchFailed,
    InvalidOption,
    ProgressBar,
    TargetExists,
    TimedOut,
    cannot,
    file_changes,
    format_bytes,
    format_seconds,
    user_path,
)
from colabkit.storage.addresses import Address
from colabkit.storage.fetching.earlier import FetchRecord, state_of
from colabkit.storage.fetching.sinks import ExpectedFile, digests_of

TRIES = 5
"""Tries in a row that may bring nothing new, and times that a fetch may have to begin anew."""

HUNG_TRIES = 2
"""Of these tries, those that may hang: a packet can be lost once, and each takes the whole time-out."""

MIN_BYTES = 4096
"""Bytes that have to come within the time-out: fewer, as from a server that drips, are no progress."""

_BACK_OFF_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Again(Exception):
    """A try failed; another may not.

    Args:
        found: for the message, if it was the last one.
        next_step: likewise; whether the next call goes on where this one stopped is added to it.
        hung: whether nothing came in time.
        is_anew: whether what has come cannot be used.
        pause_s: seconds to wait before the next try; by default longer each time.
    """

    def __init__(
        self, found: str, next_step: str, *, hung: bool = False, is_anew: bool = False, pause_s: float | None = None
    ) -> None:
        super().__init__(found)
        self.found, self.next_step = found, next_step
        self.hung, self.is_anew, self.pause_s = hung, is_anew, pause_s


class Unchanged(Exception):
    """The final path has what the source has."""

    def __init__(self, finished: FetchRecord) -> None:
        super().__init__()
        self.finished = finished


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a way of fetching has put into the partial: the path to publish, and facts about it."""

    path: Path
    name: str
    via: str
    validator: str
    files: int
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class FetchTarget:
    """Where it goes: the folder, and the name in it, empty where the source decides."""

    folder: Path
    name: str

    @classmethod
    def chosen(cls, to: str | os.PathLike[str], act: str) -> FetchTarget:
        """Return what a user means by `to`: an existing folder or one with a slash behind it, else the path itself."""
        path = user_path(to, act)
        if os.fspath(to).endswith(os.sep) or path.is_dir() or path.name in ("", ".."):
            return cls(path, "")
        return cls(path.parent, path.name)


class FetchJob:
    """One fetch: what was asked for, what has been counted, and the progress bar.

    Args:
        act: verb and object for messages.
        address: what to fetch.
        target: where it goes.
        wanted: the digest it must have.
        timeout: seconds without progress.
        cookies: whether gdown uses its cookies.
        overwrite: whether what is at the final path is replaced.
        progress: whether the bar shows.
    """

    def __init__(
        self,
        act: str,
        address: Address,
        target: FetchTarget,
        wanted: ExpectedFile | None,
        timeout: float,
        *,
        cookies: bool,
        overwrite: bool,
        progress: bool,
    ) -> None:
        self.act, self.address, self.target, self.wanted, self.timeout = act, address, target, wanted, timeout
        self.cookies, self.overwrite = cookies, overwrite
        self.identity = address.digest(os.path.realpath(target.folder), target.name)
        self.finished = FetchRecord.recalled(self.identity)
        self.fetched_bytes = self.retries = 0
        self.resumed_bytes: int | None = None
        self.is_kept = False  # what has come: not where another process has its place, nor where there are no locks
        self._progress = progress
        self._bar: ProgressBar | None = None
        self._total: int | None = None
        self._done = self._furthest = self._tries = self._hung = self._begun = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.__exit__(kind, error, trace)
            self._bar = None

    def begin(self, done: int, total: int | None) -> None:
        """Say that a try goes on after `done` bytes of `total`."""
        if self.resumed_bytes is None:
            self.resumed_bytes = self._furthest = done
        self.resumed_bytes = min(self.resumed_bytes, done)
        if self._bar is None or total != self._total:
            self.__exit__(None, None, None)
            self._bar, self._total, self._done = ProgressBar("fetch", total, "B", self._progress), total, 0
            self._bar.__enter__()
        self._bar.advance(done - self._done)
        self._done = done

    def advance(self, count: int) -> None:
        """Say that `count` bytes came."""
        assert self._bar is not None
        self._bar.advance(count)
        self._done += count
        self.fetched_bytes += count

    def advice(self, next_step: str, goes_on: bool) -> str:
        """Return a next step, and that the next call goes on with what has come, where it does."""
        return f"{next_step}: it goes on where it stopped" if goes_on and self.is_kept else next_step

    def try_until_done(self, attempt: Callable[[], Fetched], goes_on: Callable[[], bool]) -> Fetched:
        """Return what `attempt` returns, tried again while it raises `Again` and each few tries bring something new.

        Args:
            attempt: one try.
            goes_on: whether another try can use what has come so far.

        Raises:
            TimedOut: if `HUNG_TRIES` since something new came hung, or the last of `TRIES`.
            FetchFailed: if it failed in another way, or the whole began anew as many times.
        """
        while True:
            try:
                return attempt()
            except Again as again:
                if self._done - self._furthest >= MIN_BYTES:
                    self._furthest, self._tries, self._hung = self._done, 0, 0
                self._tries += 1
                self._hung += again.hung
                self._begun += again.is_anew
                if max(self._tries, self._begun) >= TRIES or self._hung >= HUNG_TRIES:
                    found = f"{again.found} in the last try"
                    next_step = self.advice(again.next_step, goes_on())
                    if again.hung:
                        needed = f"at least {format_bytes(MIN_BYTES)} in {format_seconds(self.timeout)}"
                        raise TimedOut(cannot(self.act, found, needed, next_step)) from None
                    needed = f"one try in {TRIES} that brings something new"
                    raise FetchFailed(cannot(self.act, found, needed, next_step)) from None
                self.retries += 1
                longest = min(_BACK_OFF_S * 2**self._tries, _LONGEST_PAUSE_S)
                time.sleep(random.uniform(0.5, 1.0) * longest if again.pause_s is None else again.pause_s)

    def admit(self, name: str, validator: str | None = None, *, is_folder: bool = False) -> Path:
        """Return the final path, if it may be taken.

        Args:
            name: what the source calls it.
            validator: what the source says of its present version; None where it was not asked.
            is_folder: whether it is one.

        Raises:
            Unchanged: if the final path has it already.
            TargetExists: if something else is there.
            InvalidOption: if it is a folder, which has no digest, and one is asked for.
        """
        if is_folder and self.wanted is not None:
            raise digest_of_folder(self.act)
        final = self.target.folder / (self.target.name or name)
        if not os.path.lexists(final):
            return final
        if final.is_dir() != is_folder:
            found = f"{str(final)!r} is {'a folder' if final.is_dir() else 'a file'}"
            needed = f"a path for a {'folder' if is_folder else 'file'}"
            raise TargetExists(cannot(self.act, found, needed, "Choose another target"))
        if self.overwrite:
            return final
        if self.wanted is not None and (found_digests := digests_of(final, self.wanted)):
            if found_digests[self.wanted.kind] == self.wanted.digits:
                sha256 = found_digests["sha256"]
                raise Unchanged(FetchRecord(str(final), "", state_of(final), 1, sha256, "the file that was there"))
        elif self.finished is not None and Path(self.finished.path) == Path(os.path.realpath(final)):
            if validator is None or (validator and validator == self.finished.validator):
                raise Unchanged(self.finished)
            raise TargetExists(
                cannot(
                    self.act,
                    f"{str(final)!r} was fetched earlier, and the source has changed or does not tell",
                    "a free path",
                    "Use overwrite=True to fetch it again",
                )
            )
        found = f"{str(final)!r} is there" + (" with another digest" if self.wanted is not None else "")
        raise TargetExists(cannot(self.act, found, "a free path", "Use overwrite=True or choose another target"))

    def check_digest(self, fetched: Fetched) -> None:
        """Raise `Corrupt` unless the file has the digest that was asked for."""
        if self.wanted is None or fetched.digests[self.wanted.kind] == self.wanted.digits:
            return
        found = f"its {self.wanted.kind} is {fetched.digests[self.wanted.kind]}"
        needed = f"{self.wanted.digits}, as asked for"
        raise Corrupt(cannot(self.act, found, needed, "Check the digest; if it is right, the source is not"))


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the medium."""
    fd = file_changes.reopen(path)
    try:
        file_changes.sync(fd, path)
    finally:
        os.close(fd)


def digest_of_folder(act: str) -> InvalidOption:
    """Return the error for a digest that is asked of a folder."""
    return InvalidOption(cannot(act, "digest= with a folder", "a single file", "Leave digest away"))
