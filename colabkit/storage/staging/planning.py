"""What `stage()` looks at before it writes anything: near copies that are there, the listing, the target, the room."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import BadSource, Corrupt, KeptPartial, TargetExists, cannot
from colabkit.storage.sources.bucket import BucketSource
from colabkit.storage.sources.engine import BLOCK_BYTES
from colabkit.storage.sources.folder import FileSource
from colabkit.storage.sources.items import STAGE_SEAL, Item, Listing, Source
from colabkit.storage.sources.manifest import ManifestSource
from colabkit.storage.sources.registry import check_outside
from colabkit.storage.sources.tar_archive import TarSource
from colabkit.storage.sources.zip_archive import ZipSource
from colabkit.storage.staging.local_copy import Seal, is_complete, read_manifest, read_seal
from colabkit.storage.staging.reports import StagePlan
from colabkit.storage.staging.targets import Target, cache_bytes, choose, fits, room_of
from colabkit.storage.staging.writer import Archive, Known, journalled

JOURNAL, ARCHIVE_JOURNAL = "journal", "archive-journal"
_INFLATION = 4  # what a compressed archive is taken to grow to until it is near and can be asked


@dataclass(frozen=True, slots=True)
class Begun:
    """What lies near already of a source that is to be staged.

    Attributes:
        place: where; None if there is nothing.
        is_sealed: whether it is a finished copy, which is to be refreshed or lost files, and not an interrupted run.
        known: its files, as a journal tells them.
        archive_bytes: how much of an archive is there.
    """

    place: Target | None
    is_sealed: bool
    known: Known
    archive_bytes: int = 0


def kept_identity(key: str, path: Path) -> str:
    """Return what tells the interrupted work on one near copy from any other."""
    return hashlib.sha256(os.fsencode(f"{key}\0{path.name}")).hexdigest()


def find_staged(
    places: Iterable[Target], key: str, origin: tuple[int, int] | None = None, verify: str = "size"
) -> tuple[Path, Seal] | None:
    """Return the near copy of a source, if there is a whole one in one of these places.

    Args:
        places: where it may be.
        key: of the source and the way it is staged.
        origin: size and time of the source if it is one file on this machine, to tell one that was replaced.
        verify: how it has to be verified at least.
    """
    for place in places:
        seal = read_seal(place.path)
        is_same = seal is not None and seal.key == key and (origin is None or seal.origin in (None, origin))
        is_enough = seal is not None and (verify == "size" or seal.verify == "full")
        if seal and is_same and is_enough and is_complete(place.path, seal):
            return place.path, seal
    return None


def begun_at(places: Iterable[Target], key: str) -> Begun:
    """Return the sealed copy in one of these places, else what an interrupted run left in one."""
    places = list(places)
    for place in places:
        if (seal := read_seal(place.path)) and seal.key == key:
            try:
                manifest = read_manifest(place.path)
            except Corrupt:
                continue
            known: Known = {
                (item.path, item.size, item.mtime_ns): dict(enumerate(crcs)) for item, crcs in manifest if item.mtime_ns
            }
            return Begun(place, is_sealed=True, known=known)
    for place in places:
        folder = KeptPartial(place.path.parent, kept_identity(key, place.path)).kept_folder
        if folder.is_dir():
            blocks = sum(len(crcs) for crcs in journalled(folder / ARCHIVE_JOURNAL)[0].values())
            return Begun(
                place, is_sealed=False, known=journalled(folder / JOURNAL)[0], archive_bytes=blocks * BLOCK_BYTES
            )
    return Begun(None, is_sealed=False, known={})


def check_target(act: str, source: Source, final: Path, key: str, refresh: bool) -> None:
    """Refuse a target that lies inside the source, or holds anything but this near copy.

    Raises:
        BadSource, TargetExists: naming the target.
    """
    check_outside(act, source, final)
    if not os.path.lexists(final):
        return
    seal = read_seal(final)
    is_ours = seal is not None and (seal.key == key or (refresh and seal.source == source.name))
    is_empty = final.is_dir() and not final.is_symlink() and not any(final.iterdir())
    if not is_ours and not is_empty:
        found = f"{str(final)!r} holds {f'a copy of {seal.source!r}' if seal else 'something else'}"
        raise TargetExists(cannot(act, found, "a free path", "Choose another target"))


def check_listing(act: str, source: Source, listing: Listing) -> None:
    """Refuse a source without files, and names that lead outside; a far tar is not listed before it is near.

    Raises:
        BadSource: naming what is wrong.
    """
    if not listing.items and not (isinstance(source, TarSource) and source.can_hang):
        raise BadSource(cannot(act, "no files in it", "at least one", "Check the path"))
    for item in listing.items:
        if not {"", ".", ".."}.isdisjoint(item.path.split("/")):
            outside = f"a file named {item.path!r}"
            raise BadSource(cannot(act, outside, "names inside the source", "Do not use a source like this"))


def files_of(listing: Listing) -> list[Item]:
    """Return the files to copy, each once: the rows of a table may name one several times."""
    files = {item.path: item for item in (*listing.items, *listing.extras)}
    files.pop(STAGE_SEAL, None)
    return list(files.values())


def make_plan(
    name: str, source: Source, listing: Listing, places: list[Target], begun: Begun, *, is_asked: bool
) -> tuple[StagePlan, Target]:
    """Return what is going to be done, and where.

    Args:
        name: of the source.
        source: opened.
        listing: of it.
        places: where the near copy may be, from `candidates`.
        begun: what lies near already.
        is_asked: whether the user chose the kind of place.
    """
    files = files_of(listing)
    missing = [item for item in files if (item.path, item.size, item.mtime_ns) not in begun.known]
    staged_bytes, room = sum(item.size for item in files), room_of(missing)
    read_bytes = sum(item.size for item in missing)
    if isinstance(source, Archive):
        archived = max(0, source.archive_bytes - begun.archive_bytes)
        if not files:
            is_compressed = isinstance(source, TarSource) and source.is_sequential
            staged_bytes = room = source.archive_bytes * (_INFLATION if is_compressed else 1)
        room += archived if source.can_hang else 0
        read_bytes = archived
    if begun.place is not None and (begun.is_sealed or is_asked or fits(begun.place, room)):
        why = "the copy to be refreshed is there" if begun.is_sealed else "an interrupted run began there"
        target = Target(begun.place.name, why, begun.place.path, begun.place.mounted_at)
    else:
        target = choose(places, room, is_asked)
    plan = StagePlan(
        source=name,
        kind=_kind(source),
        files=len(files) or None,
        read_bytes=read_bytes,
        staged_bytes=staged_bytes,
        peak_bytes=room,
        cache_bytes=cache_bytes(getattr(source, "root", source.name), read_bytes),
        present_bytes=staged_bytes - sum(item.size for item in missing) if files else begun.archive_bytes,
        target=target.name,
        why=target.why,
        path=target.path,
        skipped=listing.skipped,
    )
    return plan, target


def origin_of(path: Path) -> tuple[int, int]:
    """Return size and time of a file, which tell whether it is still the same."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _kind(source: Source) -> str:
    kinds = {FileSource: "file", ManifestSource: "table", BucketSource: "bucket", ZipSource: "archive"}
    return kinds.get(type(source), "archive" if isinstance(source, TarSource) else "folder")


_look: ContextVar[Callable[[Listing], None] | None] = ContextVar("_look", default=None)


@contextmanager
def looked_at_by(look: Callable[[Listing], None]) -> Iterator[None]:
    """Have `look` called with what `stage()` lists in the block; what it raises ends the call, and nothing is copied.

    So a far source is listed once. It is not called where a near copy is there already, and not for a far tar, which
    cannot be listed before it is near.
    """
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


def look_at(listing: Listing) -> None:
    """Show a listing to who asked for it."""
    if listing.items and (look := _look.get()) is not None:
        look(listing)
