"""Locations of local copies: their names and keys, and the choice between tmpfs, disk and a given path."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colabkit.foundation import (
    DRIVEFS,
    DRIVEFS_FOLDER,
    InvalidOption,
    KeptPartial,
    NotEnoughSpace,
    ProgressBar,
    TargetExists,
    Text,
    call,
    cannot,
    discard,
    discard_abandoned,
    discard_kept,
    file_changes,
    format_bytes,
    kind_of,
    local_root,
    memory_limits,
    mount_holding,
    mounts,
    option,
    partials,
    printable,
    read_file,
    resolved,
    run,
    user_path,
    wait_while_busy,
)
from colabkit.storage.addresses import Address, address_of, local_target
from colabkit.storage.sources.items import Item, PathSource, Source
from colabkit.storage.sources.manifest import ManifestSource, as_pandas, is_frame
from colabkit.storage.sources.ranges import RangeSource
from colabkit.storage.sources.registry import AnySource
from colabkit.storage.sources.table_files import categories_of
from colabkit.storage.staging.local_copy import LocalCopy

TMPFS = Path("/dev/shm")
RESERVE_BYTES = 2 << 30
"""Minimum RAM in bytes that staging to tmpfs leaves for training; a quarter of the available RAM if that is more."""

_TABLE = "a table of paths"
# Maximum length of a name: with part of a key and a suffix, it has at most 255 bytes, even at 4 bytes per character.
_NAME_CHARS = 60
# Number of digits of the digests in a key.
_HALF = 32
_CAP_SYS_ADMIN = 21
_MOUNT_S = 10.0
# Extra space, in bytes, of a tmpfs for folders and journals.
_SLACK_BYTES = 16 << 20
_PAGE_BYTES = 4096
# Estimated space, in bytes, that a file system uses for each file's entry.
_ENTRY_BYTES = 1024


@file_changes.translated("read the source")
def identity_of(
    source: AnySource,
    *,
    extract: bool,
    path_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    skips_missing: bool = False,
) -> tuple[str, str, Address | None]:
    """Return a source's name for messages, the key of the source and its options, and its address or None.

    Remote sources are not accessed, since they may be slow, hang or no longer exist.
    """
    address = None
    if isinstance(source, Source):
        name, words = source.name, [type(source).__name__, source.name]
        # Tables have few different names, so their rows distinguish them.
        words += [source.digest] if isinstance(source, ManifestSource) else []
    elif isinstance(source, str | os.PathLike) and os.fspath(source):
        text = os.fspath(source)
        if not isinstance(text, str):
            raise InvalidOption(cannot(f"read {text!r}", "it is bytes", "a string", "Decode it with os.fsdecode()"))
        if text.startswith("samples:"):
            name, words = text, [text]
        elif address := _address(text):
            name, words = address.shown, [address.digest()]
        else:
            name = os.path.abspath(user_path(source, f"stage {text!r}"))
            words = [name]
    elif isinstance(source, str):
        expected = "a folder, a file, an address, a table of paths or 'samples:digits'"
        raise InvalidOption(cannot("read ''", "the path is empty", expected, "Pass the path of the source"))
    else:
        name, words = _TABLE, [os.getcwd(), *_table_lines(source)]
    options = [] if path_column is None else [f"path_column={path_column}"]
    options += [] if root is None else [f"root={os.path.abspath(user_path(root, f'read {name!r}'))}"]
    options += ["on_bad=skip"] if skips_missing else []
    # The first half identifies the source alone, so that `keys_of_copies` finds the copies with all options.
    return name, _digest(*words)[:_HALF] + _digest(*words, *options, str(extract))[:_HALF], address


def short_name(name: str) -> str:
    """Return the base name of local copies and packs of a source, which is derived from the end of its name."""
    if name == _TABLE:
        return "paths"
    stem = Path(name).stem.removesuffix(".tar").rpartition(":")[2]
    return stem[:_NAME_CHARS] or "root"


def _address(text: str) -> Address | None:
    if "://" in text or text.startswith(("drive.google.com/", "docs.google.com/")):
        return address_of(text)
    if "/" in text or os.path.lexists(text):
        return None
    try:
        # The text may be the ID of a Drive file.
        return address_of(text)
    except InvalidOption:
        return None


def _table_lines(source: Any) -> list[str]:
    if isinstance(source, list | tuple):
        return [os.fspath(path) for path in source if isinstance(path, str | os.PathLike)]
    if not is_frame(source):
        found, expected = f"the source is {kind_of(source)}", "a path, an address or a table of paths"
        is_array = bool(getattr(source, "shape", ()))
        next_step: Text = ("To pack arrays, use ", call("pack")) if is_array else "Pass the path as a string"
        raise InvalidOption(cannot("read the source", found, expected, next_step))
    table = as_pandas(f"read {_TABLE!r}", source)
    categories = categories_of(table, is_pandas=table is source)
    return [str(table.to_csv(index=False)), *([repr(categories)] if categories else [])]


def _digest(*words: str) -> str:
    return hashlib.sha256(os.fsencode("\0".join(words))).hexdigest()


@dataclass(frozen=True, slots=True)
class Target:
    """A possible location of a source's local copy.

    Attributes:
        name: `"tmpfs"`, `"disk"` or `"path"`.
        path: path of the local copy.
        key: key of the source and its options; empty if unknown.
        why: the reason for choosing this target.
        mounted_at: folder of a tmpfs that is mounted only for this copy, otherwise None.
    """

    name: str
    path: Path
    key: str
    why: str = ""
    mounted_at: Path | None = None

    def kept(self, on_wait: Callable[[], None] | None = None) -> KeptPartial:
        """Return the partial that keeps the data of an interrupted run for this target."""
        return KeptPartial(self.path.parent, self.identity, on_wait)

    @property
    def identity(self) -> str:
        """Digest that identifies the data of interrupted runs for this target."""
        return _digest(self.key, self.path.name)

    def wait_for_others(self, progress: bool) -> None:
        """Wait while another process is staging to this target and shows activity."""
        kept = self.kept()
        if kept.is_busy():
            with ProgressBar("wait for another stage()", None, " s", progress) as bar:
                wait_while_busy(kept.kept_folder, kept.is_busy, bar.wait)

    def discard_kept(self) -> int:
        """Remove the data of an interrupted run unless a process is using it; return the bytes freed."""
        identity = self.identity if self.key else partials.kept_for(self.path)
        return discard_kept(self.path, identity) if identity else 0

    def clear(self, act: str, *, has_moved: bool = False) -> int | None:
        """Remove the local copy, data of interrupted runs, the remains of an interrupted removal, and an empty tmpfs.

        Args:
            act: verb and object for messages.
            has_moved: whether files that the user has added to the local copy are elsewhere, too.

        Returns:
            The bytes freed; None if nothing was removed.

        Raises:
            TargetExists: if the local copy has files that the user has added.
        """
        freed = discard_abandoned(self.path) or None
        if (copy := LocalCopy.at(self.path)) is not None and copy.seal.key == self.key:
            if not has_moved and (added := copy.added()):
                found = f"your file {added[0]!r} is in the local copy"
                next_step = f"Move {os.fspath(self.path / added[0])!r} elsewhere, then try again"
                raise TargetExists(cannot(act, found, "only files that stage() has copied", next_step))
            freed = (freed or 0) + copy.seal.staged_bytes
            discard(self.path)
        if left := self.discard_kept():
            freed = (freed or 0) + left
        self.give_back_tmpfs(act)
        return freed

    def fits(self, needed: int) -> bool:
        """Return whether the given number of bytes fit here and, on tmpfs, leave enough RAM for training."""
        if self.name != "tmpfs":
            return needed <= file_changes.free_bytes(self.path)
        if self.mounted_at is None:
            return needed <= tmpfs_room()
        return needed + _SLACK_BYTES <= _spare_ram() and can_mount()

    def prepare(self, act: str, needed: int) -> None:
        """Create a private folder in the shared tmpfs, or mount or enlarge a separate tmpfs; do nothing on disk.

        Raises:
            NotEnoughSpace: if the separate tmpfs cannot be mounted or enlarged.
        """
        if self.name == "tmpfs" and self.mounted_at is None:
            file_changes.make_private_folder(self.path.parent)
        if (point := self.mounted_at) is None:
            return
        file_changes.make_folder(point)
        with _locked(point.parent):
            is_mounted = os.path.ismount(point)
            size = needed + _SLACK_BYTES + (file_changes.used_bytes(point) if is_mounted else 0)
            options = f"{'remount,' if is_mounted else ''}size={size},mode=0700,nosuid,nodev"
            mounted = run(["mount", "-t", "tmpfs", "-o", options, "colabkit", str(point)], act, _MOUNT_S)
        if mounted.status:
            self.give_back_tmpfs(act)
            verb = "enlarged" if is_mounted else "mounted"
            found = f"a separate tmpfs cannot be {verb} ({printable(mounted.output.strip())})"
            raise NotEnoughSpace(cannot(act, found, "", ("Use ", option("to", "disk"))))

    def give_back_tmpfs(self, act: str) -> None:
        """Unmount this target's separate tmpfs and remove its folder, if the tmpfs is empty."""
        if (point := self.mounted_at) is None or not point.is_dir() or any(point.iterdir()):
            return
        if os.path.ismount(point):
            run(["umount", str(point)], act, _MOUNT_S)
        if not os.path.ismount(point):
            file_changes.remove_empty_folder(point)

    def check_room(self, act: str, needed: int, cached: int) -> None:
        """Raise `NotEnoughSpace` if `needed` bytes do not fit here, or DriveFS's disk cannot cache `cached` bytes.

        `needed` is ignored for a separate tmpfs, which is mounted with the necessary size.
        """
        cache = Path.home() / DRIVEFS_FOLDER
        if self.mounted_at is None:
            shared = cached if cached and _device(self.path) == _device(cache) else 0
            room = tmpfs_room() if self.name == "tmpfs" else None
            file_changes.check_space(act, needed + shared, self.path, room)
        if cached and cached > (free := file_changes.free_bytes(cache)):
            found = f"the disk on which DriveFS caches all reads has {format_bytes(free)} free"
            next_step = ("Free some disk space, or run ", call("clear_cache"))
            raise NotEnoughSpace(cannot(act, found, f"at least {format_bytes(cached)}", next_step))


def candidates(source: str, to: str | os.PathLike[str], key: str, act: str) -> list[Target]:
    """Return the targets that `to` allows for a local copy, the preferred one first."""
    name = f"{short_name(source)}-{key[:4]}{key[-4:]}"
    disk = local_root(os.environ)
    shared, own = TMPFS / f"colabkit-{os.getuid()}", disk / f"{name}.tmpfs"
    places = [Target("tmpfs", own / name, key, mounted_at=own), Target("disk", disk / name, key)]
    if _is_own(shared):
        places.insert(0, Target("tmpfs", shared / name, key))
    if isinstance(to, str) and to in ("auto", "tmpfs", "disk"):
        return [place for place in places if to in ("auto", place.name)]
    return [Target("path", local_target(to, act).absolute(), key, "as requested")]


def keys_of_copies(source: str, key: str, act: str) -> set[str]:
    """Return the keys of all local copies of a source that `candidates` can find, made with any options."""
    found = set()
    pattern = f"{glob.escape(short_name(source))}-{key[:4]}*"
    for parent in {place.path.parent for place in candidates(source, "auto", key, act) if place.mounted_at is None}:
        for path in parent.glob(pattern):
            copy = LocalCopy.at(path) or LocalCopy.at(path / path.name.removesuffix(".tmpfs"))
            if copy is not None and copy.seal.key[:_HALF] == key[:_HALF]:
                found.add(copy.seal.key)
    return found


def choose(places: list[Target], needed: int, is_requested: bool) -> Target:
    """Choose a tmpfs with room for `needed` bytes, otherwise disk or the requested target; set the reason."""
    size, room, spare = format_bytes(needed), format_bytes(tmpfs_room()), format_bytes(_spare_ram())
    shared = next((place for place in places if place.name == "tmpfs" and place.mounted_at is None), None)
    own = next((place for place in places if place.mounted_at is not None), None)
    if shared is not None and (shared.fits(needed) or (is_requested and not (own and own.fits(needed)))):
        why = "as requested" if is_requested else f"{size} fit in the {room} of tmpfs that training can spare"
        return replace(shared, why=why)
    if own is not None and (own.fits(needed) or len(places) == 1):
        fitting = f"{size} fit in the {spare} of RAM that training can spare, but not in {str(TMPFS)!r}"
        return replace(own, why=f"{fitting}, so a separate tmpfs is mounted")
    why = "as requested" if is_requested else f"{size} do not fit in the {room} of tmpfs that training can spare"
    return replace(places[-1], why=why)


def room_of(items: Iterable[Item]) -> int:
    """Estimate the space, in bytes, that files take up: full pages, plus an entry for each file."""
    return sum(-(-item.size // _PAGE_BYTES) * _PAGE_BYTES + _ENTRY_BYTES for item in items)


def tmpfs_room() -> int:
    """Return the bytes that staging may put into the existing tmpfs."""
    return min(file_changes.free_bytes(TMPFS), _spare_ram()) if TMPFS.is_dir() else 0


def _spare_ram() -> int:
    """Return the RAM in bytes that local copies may use, which excludes a reserve for training."""
    available = memory_limits(read_file).available_bytes
    return max(0, available - max(RESERVE_BYTES, available // 4))


def mount_cache_bytes(source: Source, read_bytes: int) -> int:
    """Return the bytes cached on the local disk when reading `read_bytes` of a source: all for DriveFS, else 0."""
    if isinstance(source, ManifestSource | RangeSource):
        folders = {os.path.dirname(os.path.abspath(file)) for file in source.files}
    elif isinstance(source, PathSource):
        folders = {os.path.abspath(source.path)}
    else:
        # Names of other sources may not be paths.
        folders = {source.name} if os.path.isabs(source.name) else set()
    table = mounts()
    holding = [mount_holding(resolved(folder, table), table) for folder in folders]
    return read_bytes if any(mount is not None and mount.fstype == DRIVEFS for mount in holding) else 0


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with file_changes.descriptor(os.open(folder, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        # Some file systems do not support locks.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def _is_own(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def can_mount() -> bool:
    """Return whether this process may mount file systems."""
    try:
        status = dict(line.split(":", 1) for line in read_file("/proc/self/status").splitlines())
        return bool(int(status["CapEff"], 16) >> _CAP_SYS_ADMIN & 1)
    except (OSError, KeyError, ValueError):
        return False


def _device(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return path.stat().st_dev
