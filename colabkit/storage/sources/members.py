"""What every archive has to keep: names inside it, one meaning each, and no more bytes than its own size allows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from colabkit.foundation import BadArchive, cannot, format_bytes
from colabkit.storage.sources.items import STAGE_SEAL, Item, Listing

MOST_MEMBERS = 10_000_000
"""Members that an archive may have."""

_INFLATION = 200  # a photo archive inflates by a few per cent; a bomb by thousands
_INFLATION_SLACK_BYTES = 1 << 30

_PLAIN_NAME = re.compile(r"(?:[^/\0.][^/\0]*/)*[^/\0.][^/\0]*")  # nothing in it means anything but itself

H = TypeVar("H")


class Member(NamedTuple, Generic[H]):
    """What an archive says of one member.

    Attributes:
        name: as it stands in the archive.
        size: in bytes, as declared.
        mtime_ns: as in `Item`.
        handle: where its bytes are, as the archive's own kind needs it.
        is_folder: whether it is a folder.
        oddity: what it is if neither a regular file nor a folder.
    """

    name: str
    size: int
    mtime_ns: int
    handle: H
    is_folder: bool = False
    oddity: str = ""


@dataclass(frozen=True, slots=True)
class Directory(Generic[H]):
    """An archive's listing, and the handle of each item by its path."""

    listing: Listing
    handles: Mapping[str, H]


def directory_of(source: str, members: Iterable[Member[H]], archive_bytes: int) -> Directory[H]:
    """Return the regular files among an archive's members; of several with one path the last counts.

    Args:
        source: the archive's name, for messages.
        members: in the archive's order.
        archive_bytes: its length.

    Raises:
        BadArchive: if a name points out of the archive, is a file and a folder, if there are more than 10 million
            members, or they would inflate to more than 200 times the archive's length and 1 GiB.
    """
    act = f"read {source!r}"
    last: dict[str, Member[H]] = {}
    folders: set[str] = set()
    skipped: list[tuple[str, str]] = []
    for number, member in enumerate(members):
        if number == MOST_MEMBERS:
            found = f"more than {MOST_MEMBERS} members"
            raise BadArchive(cannot(act, found, "at most so many", "Extract it yourself if you trust it"))
        path = _inner_path(act, member)
        if member.is_folder:
            _add_folder(path, folders)
        elif path != STAGE_SEAL:
            if path in last:
                skipped.append((path, "a later member has its name"))
            last[path] = member
    items = []
    for path, member in last.items():
        if member.oddity:
            skipped.append((path, member.oddity))
        else:
            items.append(Item(path, member.size, member.mtime_ns))
            _add_folder(path.rpartition("/")[0], folders)
    if clash := next((item.path for item in items if item.path in folders), None):
        found = f"{clash!r} is a file and a folder"
        raise BadArchive(cannot(act, found, "one of them", "Do not use an archive like this"))
    listing = Listing(tuple(sorted(items, key=lambda item: item.path)), tuple(sorted(skipped)))
    if listing.total_bytes > inflation_limit(archive_bytes):
        raise inflates_too_far(source, listing.total_bytes, archive_bytes)
    return Directory(listing, {item.path: last[item.path].handle for item in items})


def inflation_limit(archive_bytes: int) -> int:
    """Return how many bytes an archive of this length may inflate to."""
    return _INFLATION * archive_bytes + _INFLATION_SLACK_BYTES


def inflates_too_far(source: str, size: int, archive_bytes: int) -> BadArchive:
    """Return the error for an archive that inflates to `size` bytes or more."""
    found = f"{format_bytes(size)} or more when inflated"
    limit = f"at most {format_bytes(inflation_limit(archive_bytes))}"
    return BadArchive(cannot(f"read {source!r}", found, limit, "Extract it yourself if you trust it"))


def _inner_path(act: str, member: Member[H]) -> str:
    """Return a member's path inside the archive; empty for its own top folder."""
    if _PLAIN_NAME.fullmatch(member.name) and not member.is_folder:
        return member.name
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.is_folder and not parts:
        return ""
    if member.name.startswith("/") or not parts or ".." in parts or "\0" in member.name:
        found = f"a member named {member.name!r}"
        raise BadArchive(cannot(act, found, "names inside the archive", "Do not use an archive like this"))
    return "/".join(parts)


def _add_folder(path: str, folders: set[str]) -> None:
    """Add a folder and those that it lies in."""
    while path and path not in folders:
        folders.add(path)
        path = path.rpartition("/")[0]
