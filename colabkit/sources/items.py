"""What a source consists of, and the protocol that all sources follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, Protocol, runtime_checkable

from colabkit.errors import BadArchive, SourceChanged, cannot

__all__ = ["STAGE_SEAL", "Item", "Listing", "Source", "broken_archive", "changed_item"]

STAGE_SEAL = ".colabkit-stage.json"
"""The seal that `stage()` leaves in a near copy; it is no part of the data."""


@dataclass(frozen=True, slots=True)
class Item:
    """One file of a source: its path inside it, with forward slashes, and its size in bytes."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of a source, sorted by path; what was passed over with the reason; folders that were tried again."""

    items: tuple[Item, ...]
    skipped: tuple[tuple[str, str], ...]
    retries: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all items together."""
        return sum(item.size for item in self.items)


@runtime_checkable
class Source(Protocol):
    """A place with files: `name` for messages, `list()` once, `open()` for any item from any thread."""

    name: str

    def list(self) -> Listing:
        """Return every regular file of the source."""

    def open(self, item: Item) -> BinaryIO:
        """Return an unbuffered binary file of the item's bytes."""

    def close(self) -> None:
        """Let go of what reading holds open; the next use opens it again."""


def changed_item(source: str, item: Item, found: int) -> SourceChanged:
    """Return the error for an item that has another number of bytes than listed."""
    act = f"read {item.path!r} of {source!r}"
    return SourceChanged(cannot(act, f"{found} bytes", f"the {item.size} listed before", "Run it again"))


def broken_archive(source: str, reason: str) -> BadArchive:
    """Return the error for an archive whose bytes make no sense."""
    return BadArchive(
        cannot(f"read {source!r}", f"a broken or cut-short archive ({reason})", "a whole zip file", "Download it again")
    )
