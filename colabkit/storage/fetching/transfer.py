"""Code shared by all downloads: the target, limited retries with pauses, progress, and digests."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from colabkit.foundation import (
    Corrupt,
    FetchFailed,
    InvalidOption,
    ProgressBar,
    TargetExists,
    Text,
    TimedOut,
    cannot,
    file_changes,
    format_bytes,
    format_seconds,
    local_root,
    omit,
    option,
    partials,
)
from colabkit.storage.addresses import DRIVE_FOLDER, Address, local_target

TRIES = 5
"""Limit for consecutive attempts without new data, and for restarts from the first byte."""

HUNG_TRIES = 2
"""Limit for timeouts without new data; lower than `TRIES`, since such an attempt lasts for the whole timeout."""

MIN_BYTES = 4096
"""Bytes that must arrive within the timeout; a slower server counts as not responding."""

UNCHANGED = "Try again when nothing writes to the source"
"""Advice for a source that changed during the download."""

_BACK_OFF_S = 0.5
_LONGEST_PAUSE_S = 30.0
_DIGITS = {"md5": 32, "sha1": 40, "sha256": 64, "sha512": 128}


class TryFailed(Exception):
    """A failed attempt to download; another attempt may succeed.

    Args:
        found: the failure, for the message if this was the last attempt.
        next_step: the advice for the message; a note is added if the next call resumes.
        hung: whether the attempt timed out.
        starts_over: whether the received data is unusable.
        pause_s: seconds to wait before the next attempt; None for a pause that grows with each attempt.
    """

    def __init__(
        self,
        found: str,
        next_step: Text,
        *,
        hung: bool = False,
        starts_over: bool = False,
        pause_s: float | None = None,
    ) -> None:
        super().__init__(found)
        self.found, self.next_step = found, next_step
        self.hung, self.starts_over, self.pause_s = hung, starts_over, pause_s


class AlreadyThere(Exception):
    """The final path already holds the source's data."""

    def __init__(self, record: FetchRecord) -> None:
        super().__init__()
        self.record = record


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """A record of a completed fetch: its final path, that path's state, and the source's version.

    Each record is a small file in `local_root()`, named by a digest of the address and the target; it never contains
    the address. A fetched file counts as unmodified while its size and modification time are the same; a folder, while
    the number and total size of its files are the same.
    """

    path: str
    validator: str
    state: tuple[int, int]
    files: int
    sha256: str | None
    via: str

    @classmethod
    def read(cls, identity: str) -> FetchRecord | None:
        """Return the record of an earlier fetch with the given identity, if its path is unmodified."""
        try:
            values = json.loads(_record_path(identity).read_bytes())
            found = cls(**{**values, "state": tuple(values["state"])})
            return found if path_state(Path(found.path)) == found.state else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, identity: str) -> None:
        """Save the record for the next fetch; if saving fails, the next fetch cannot reuse the data."""
        values = {name: getattr(self, name) for name in self.__slots__}
        try:
            partials.write_atomically(_record_path(identity), json.dumps(values).encode())
        except OSError:
            return


def _record_path(identity: str) -> Path:
    return local_root(os.environ) / "fetched" / f"{identity}.json"


def path_state(path: Path) -> tuple[int, int]:
    """Return values that reveal a change: a file's size and time, or the number and total size of a folder's files."""
    if path.is_dir():
        sizes = [file.lstat().st_size for file in path.rglob("*") if not file.is_dir()]
        return len(sizes), sum(sizes)
    stats = path.stat()
    return stats.st_size, stats.st_mtime_ns


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The result of a download: the path inside the partial to publish, and facts about the data."""

    path: Path
    name: str
    via: str
    validator: str
    files: int
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class ExpectedDigest:
    """A digest that the file must have."""

    kind: str
    digits: str

    @classmethod
    def parse(cls, act: str, text: str | None) -> ExpectedDigest | None:
        """Parse a digest such as `"sha256:<hex>"`; None stays None."""
        if text is None:
            return None
        kind, _, digits = text.partition(":") if isinstance(text, str) else ("", "", "")
        if len(digits) != _DIGITS.get(kind) or not re.fullmatch("[0-9a-fA-F]+", digits):
            expected = "sha256, sha512, sha1 or md5, followed by a colon and all hexadecimal digits"
            next_step = ("Use a digest of the form ", option("digest", "sha256:HEX"))
            raise InvalidOption(cannot(act, option("digest", text), expected, next_step))
        return cls(kind, digits.lower())

    def check(self, act: str, result: FetchResult) -> None:
        """Raise `Corrupt` unless the file has the given digest."""
        if (found := result.digests[self.kind]) != self.digits:
            next_step = "Check the digest; if it is right, use another source"
            raise Corrupt(cannot(act, f"its {self.kind} is {found}", f"the requested {self.digits}", next_step))


def new_digests(expected: ExpectedDigest | None) -> dict[str, Any]:
    """Return new hash objects, by kind, for SHA-256 and the kind of the expected digest."""
    kinds = {"sha256"} | ({expected.kind} if expected else set())
    return {kind: hashlib.new(kind, usedforsecurity=False) for kind in kinds}


def digests_of(path: Path, expected: ExpectedDigest | None) -> dict[str, str]:
    """Return the hex digests of a file by kind: SHA-256 and the kind of `expected`; empty if there is no file."""
    if not path.is_file():
        return {}
    digests = new_digests(expected)
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            for digest in digests.values():
                digest.update(block)
    return {kind: digest.hexdigest() for kind, digest in digests.items()}


def sync_file(path: Path) -> None:
    """Write a file's bytes to stable storage."""
    with file_changes.descriptor(file_changes.reopen(path)) as fd:
        file_changes.sync(fd, path)


class FetchJob:
    """A call of `fetch()`, with its options, counters and progress bar."""

    def __init__(
        self,
        act: str,
        address: Address,
        to: str | os.PathLike[str],
        expected: ExpectedDigest | None,
        timeout: float,
        *,
        cookies: bool,
        overwrite: bool,
        progress: bool,
    ) -> None:
        self.act, self.address, self.expected, self.timeout = act, address, expected, timeout
        self.cookies, self.overwrite = cookies, overwrite
        path = local_target(to, act)
        is_folder = os.fspath(to).endswith(os.sep) or path.is_dir() or path.name in ("", "..")
        # An empty name means that the source's name is used.
        self.folder, self.name = (path, "") if is_folder else (path.parent, path.name)
        if address.kind == DRIVE_FOLDER:
            self._check_no_digest()
        self.identity = address.digest(os.path.realpath(self.folder), self.name)
        self.earlier = FetchRecord.read(self.identity)
        self.fetched_bytes = self.retries = 0
        self.resumed_bytes: int | None = None
        # Data is not kept if another process is using the partial, or if the file system does not support locks.
        self.is_kept = False
        self._progress = progress
        self._bar: ProgressBar | None = None
        self._total: int | None = None
        self._done = self._furthest = self._tries = self._hung = self._restarts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def begin(self, done: int, total: int | None) -> None:
        """Record that an attempt resumes after `done` bytes of `total`."""
        if self.resumed_bytes is None:
            self.resumed_bytes = self._furthest = done
        self.resumed_bytes = min(self.resumed_bytes, done)
        if self._bar is None or total != self._total:
            self.__exit__()
            self._bar, self._total, self._done = ProgressBar("fetch", total, "B", self._progress), total, 0
        self._bar.advance(done - self._done)
        self._done = done

    def advance(self, count: int) -> None:
        """Record that `count` bytes arrived."""
        assert self._bar is not None
        self._bar.advance(count)
        self._done += count
        self.fetched_bytes += count

    def advice(self, next_step: Text, can_resume: bool) -> Text:
        """Return a next step, with a note if the next call resumes."""
        return (next_step, "; the download resumes where it stopped") if can_resume and self.is_kept else next_step

    def try_until_done(self, attempt: Callable[[], FetchResult], can_resume: Callable[[], bool]) -> FetchResult:
        """Return the result of `attempt`; retry while it raises `TryFailed`, up to the limits below.

        Raises:
            TimedOut: after `HUNG_TRIES` timeouts without new data, or if the last of `TRIES` attempts timed out.
            FetchFailed: if the last attempt failed in another way, or the download had to start over `TRIES` times.
        """
        while True:
            try:
                return attempt()
            except TryFailed as failed:
                if self._done - self._furthest >= MIN_BYTES:
                    self._furthest, self._tries, self._hung = self._done, 0, 0
                self._tries += 1
                self._hung += failed.hung
                self._restarts += failed.starts_over
                if max(self._tries, self._restarts) >= TRIES or self._hung >= HUNG_TRIES:
                    found = f"the last attempt failed: {failed.found}"
                    next_step = self.advice(failed.next_step, can_resume())
                    if failed.hung:
                        rate = f"at least {format_bytes(MIN_BYTES)} in {format_seconds(self.timeout)}"
                        raise TimedOut(cannot(self.act, found, rate, next_step)) from None
                    has_restarted = self._restarts >= TRIES
                    limit = f"fewer than {TRIES} restarts" if has_restarted else f"new data in one of {TRIES} attempts"
                    raise FetchFailed(cannot(self.act, found, limit, next_step)) from None
                self.retries += 1
                longest = min(_BACK_OFF_S * 2**self._tries, _LONGEST_PAUSE_S)
                time.sleep(random.uniform(0.5, 1.0) * longest if failed.pause_s is None else failed.pause_s)

    def admit(self, name: str, validator: str | None = None, *, is_folder: bool = False) -> Path:
        """Return the final path, if it may be written.

        Args:
            name: the source's name.
            validator: the source's current version; empty if unknown; None if it has not been requested.
            is_folder: whether the source is a folder.

        Raises:
            AlreadyThere: if the final path already holds the source's data.
            TargetExists: if something else, which must not be replaced, is at the final path.
            InvalidOption: if a digest is requested for a folder.
        """
        if is_folder:
            self._check_no_digest()
        final = self.folder / (self.name or name)
        if not os.path.lexists(final):
            return final
        if final.is_dir() != is_folder:
            types = "a file, and the source is a folder" if is_folder else "a folder, and the source is a file"
            found = f"{str(final)!r} is {types}"
            raise TargetExists(cannot(self.act, found, "an unused path", "Choose another target"))
        if self.overwrite:
            return final
        if self.expected is not None:
            digests = digests_of(final, self.expected)
            if digests.get(self.expected.kind) == self.expected.digits:
                raise AlreadyThere(
                    FetchRecord(str(final), "", path_state(final), 1, digests["sha256"], "existing file")
                )
        elif self.earlier is not None and Path(self.earlier.path) == Path(os.path.realpath(final)):
            if validator is None or (validator and validator == self.earlier.validator):
                raise AlreadyThere(self.earlier)
            found = f"{str(final)!r} was fetched earlier, and the source has changed or its version is unknown"
            again = ("Use ", option("overwrite", True), " to fetch it again")
            raise TargetExists(cannot(self.act, found, "", again))
        exists = f"{str(final)!r} already exists{' with another digest' if self.expected else ''}"
        next_step = ("Use ", option("overwrite", True), " to replace it, or choose another target")
        raise TargetExists(cannot(self.act, exists, "an unused path", next_step))

    def _check_no_digest(self) -> None:
        if self.expected is not None:
            found = "the source is a folder, which has no digest"
            raise InvalidOption(cannot(self.act, found, "a single file", omit("digest")))
