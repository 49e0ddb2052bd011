"""What a source consists of, and the protocol that all sources follow."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol, runtime_checkable

from colabkit.foundation import BadArchive, SourceChanged, cannot

STAGE_SEAL = ".colabkit-stage.json"
"""The seal that `stage()` leaves in a near copy; it is no part of the data."""


@dataclass(frozen=True, slots=True)
class Item:
    """One file of a source.

    Attributes:
        path: inside the source, with forward slashes.
        size: in bytes.
        mtime_ns: when it was last changed, in nanoseconds since 1970 as its file system says; 0 where it does not.
    """

    path: str
    size: int
    mtime_ns: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of a source: its manifest.

    Attributes:
        items: its files, sorted by path; of a table one for each row, in the table's order.
        skipped: what was passed over, with the reason.
        retries: folders that were tried again.
        columns: further columns of a table by name, a value for each item.
        extras: files that belong to the source but are no samples of it: the table itself.
    """

    items: tuple[Item, ...]
    skipped: tuple[tuple[str, str], ...]
    retries: int = 0
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    extras: tuple[Item, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all items together."""
        return sum(item.size for item in self.items)


@runtime_checkable
class Source(Protocol):
    """A place with files: `list()` once, `open()` for any item from any thread.

    Attributes:
        name: for messages.
        can_hang: whether another program or machine answers for it, so that a read may never return.
    """

    name: str
    can_hang: bool

    def list(self) -> Listing:
        """Return every regular file of the source."""

    def open(self, item: Item) -> BinaryIO:
        """Return an unbuffered binary file of the item's bytes."""

    def close(self) -> None:
        """Let go of what reading holds open; the next use opens it again."""


@runtime_checkable
class SequentialSource(Source, Protocol):
    """A source that may be readable from its front only: `walk()` passes through it once.

    Attributes:
        is_sequential: whether it is.
    """

    @property
    def is_sequential(self) -> bool:
        """Whether `open()` would have to pass through all that lies before an item."""

    def walk(self, wanted: Container[str] | None = None) -> Iterator[tuple[Item, BinaryIO]]:
        """Yield the wanted items in their order, each with its bytes, which can be read until the next step."""


def changed_item(source: str, item: Item, found: int) -> SourceChanged:
    """Return the error for an item of another size or time than listed; `found` is its size now, in bytes."""
    told, needed = f"{found} bytes", f"the {item.size} listed before"
    if found == item.size:
        told, needed = "it was written to meanwhile", "a file that stays as listed"
    next_step = "List it anew: run it again, or make the FileDataset again"
    return SourceChanged(cannot(f"read {item.path!r} of {source!r}", told, needed, next_step))


def broken_archive(source: str, reason: str) -> BadArchive:
    """Return the error for an archive whose bytes make no sense."""
    return BadArchive(
        cannot(f"read {source!r}", f"a broken or cut-short archive ({reason})", "a whole archive", "Download it again")
    )
