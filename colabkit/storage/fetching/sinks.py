"""Bytes put into a partial and digested on the way, and the digest that somebody asked for."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from colabkit.foundation import InvalidOption, cannot, file_changes

_HELD_BYTES = 1 << 18  # TLS delivers 16 KiB at a time, which would be many small writes
_DIGITS = {"md5": 32, "sha1": 40, "sha256": 64, "sha512": 128}


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """A digest that the file must have."""

    kind: str
    digits: str

    @classmethod
    def parsed(cls, act: str, text: str | None) -> ExpectedFile | None:
        """Return the digest of a text as `"sha256:<hex>"`, None for None."""
        if text is None:
            return None
        kind, _, digits = text.partition(":") if isinstance(text, str) else ("", "", "")
        if len(digits) != _DIGITS.get(kind) or not re.fullmatch("[0-9a-fA-F]+", digits):
            needed = "sha256, sha512, sha1 or md5, a colon, and all its hexadecimal digits"
            raise InvalidOption(cannot(act, f"digest={text!r}", needed, 'Use digest="sha256:9f86d0..."'))
        return cls(kind, digits.lower())


class Sink:
    """A file in a partial, written from its start or from where an earlier process stopped, and digested meanwhile.

    Args:
        path: of the file.
        wanted: a digest beside SHA-256.
    """

    def __init__(self, path: Path, wanted: ExpectedFile | None) -> None:
        self.path = path
        self._wanted = wanted
        self._fd: int | None = None
        self._held = bytearray()
        self._written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            try:
                self._flush()
            except OSError:
                if error is None:
                    raise
            finally:
                os.close(self._fd)
                self._fd = None

    @property
    def size(self) -> int:
        """The bytes that it has."""
        return self._written + len(self._held)

    def open(self) -> int:
        """Return how many bytes are there, ready to be followed by more."""
        if self._fd is None:
            is_there = self.path.exists()
            self._digests = _digests(self._wanted)
            self._fd = file_changes.reopen(self.path) if is_there else file_changes.create(self.path)
            self._written = self._read_back(self._fd)
        return self.size

    def begin_anew(self) -> None:
        """Forget all bytes."""
        self._held.clear()
        self.__exit__(None, None, None)
        file_changes.remove(self.path)
        self.open()

    def write(self, block: bytes) -> None:
        """Add bytes."""
        for digest in self._digests.values():
            digest.update(block)
        self._held += block
        if len(self._held) >= _HELD_BYTES:
            self._flush()

    def finish(self) -> dict[str, str]:
        """Wait until all is on the medium, and return the digests."""
        assert self._fd is not None
        self._flush()
        file_changes.sync(self._fd, self.path)
        return {kind: digest.hexdigest() for kind, digest in self._digests.items()}

    def _flush(self) -> None:
        assert self._fd is not None
        held, self._held = self._held, bytearray()
        if held:
            file_changes.write_at(self._fd, held, self._written, self.path)
            self._written += len(held)

    def _read_back(self, fd: int) -> int:
        offset = 0
        while block := os.pread(fd, 1 << 20, offset):
            for digest in self._digests.values():
                digest.update(block)
            offset += len(block)
        return offset


def digests_of(path: Path, wanted: ExpectedFile | None) -> dict[str, str]:
    """Return a file's digests, empty for what is no file."""
    if not path.is_file():
        return {}
    digests = _digests(wanted)
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            for digest in digests.values():
                digest.update(block)
    return {kind: digest.hexdigest() for kind, digest in digests.items()}


def _digests(wanted: ExpectedFile | None) -> dict[str, Any]:
    kinds = {"sha256"} | ({wanted.kind} if wanted else set())
    return {kind: hashlib.new(kind, usedforsecurity=False) for kind in kinds}
