"""The targets of `pack()`, which may hold an existing pack: a local path, or an address in a bucket."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import BadSource, Corrupt, InvalidOption, cannot, file_changes, local_root, option, partials
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.format.pack_file import is_pack, read_pack
from colabkit.packs.packing.shards import reclaim
from colabkit.packs.packing.verification import shards_of
from colabkit.storage import (
    FSSPEC,
    Address,
    BucketFolder,
    Source,
    check_outside,
    download,
    file_address,
    sibling_of,
)

_MOST_INDEX_BYTES = 1 << 40


@dataclass(frozen=True)
class LocalTarget:
    """A local path.

    Attributes:
        act: verb and object for messages.
        place: the path; its file system holds the work.
    """

    act: str
    place: Path

    @property
    def name(self) -> str:
        """The path, for messages."""
        return str(self.place)

    def check_outside(self, source: Source) -> None:
        """Raise `BadSource` if the target is inside the source."""
        check_outside(self.act, source, self.place)

    def exists(self) -> bool:
        """Return whether anything exists at the path."""
        return os.path.lexists(self.place)

    def is_pack(self) -> bool:
        """Return whether a sealed pack exists, which may be damaged."""
        return is_pack(self.place)

    def read(self) -> PackInfo:
        """Return the description of the existing pack, after checking that each shard exists and matches its seal."""
        info = read_pack(self.place)
        for _ in shards_of(info):
            pass
        return info

    def reclaim(self) -> None:
        """Remove the leftovers of a call that was killed just before it finished."""
        reclaim(self.place)

    def size_bytes(self, info: PackInfo) -> int:
        """Return the size of a pack at this target, with all shards."""
        names = [info.path.name, *(Path(shard.name).name for shard in info.shards)]
        return sum(info.path.with_name(name).stat().st_size for name in names)

    @property
    def path(self) -> Path | str:
        """The path for the report."""
        return self.place


@dataclass(frozen=True)
class BucketTarget:
    """The address of an index in a bucket, with the shards next to it.

    Attributes:
        act: verb and object for messages.
        address: address of the index.
    """

    act: str
    address: Address

    @property
    def name(self) -> str:
        """The address without secrets, for messages."""
        return self.address.shown

    @property
    def file_name(self) -> str:
        """Name of the index."""
        return self.address.text.rpartition("/")[2]

    @property
    def folder(self) -> BucketFolder:
        """The folder of the index."""
        return BucketFolder(sibling_of(self.address, ""), self.act)

    def check_outside(self, source: Source) -> None:
        """Raise `BadSource` if the target is inside the source."""
        name = source.name if "://" in source.name else os.path.abspath(source.name)
        if self.name.startswith(f"{name.rstrip('/')}/"):
            inside = f"the target {self.name!r} is inside the source"
            raise BadSource(cannot(self.act, inside, "", "Choose another target"))

    def exists(self) -> bool:
        """Return whether an object exists at the address."""
        return self.file_name in self.folder.sizes()

    def is_pack(self) -> bool:
        """Return whether the object is the index of a pack, which may be damaged."""
        with self._copy() as path:
            return is_pack(path)

    def read(self) -> PackInfo:
        """Return the description of the existing pack, after checking that each shard exists and has its size.

        The file at its `path` no longer exists.
        """
        with self._copy() as path:
            info = read_pack(path)
        sizes = self.folder.sizes()
        if missing := [shard.name for shard in info.shards if sizes.get(shard.name) != shard.length]:
            found = f"the shard {missing[0]!r} of {self.name!r} is missing or has another size"
            raise Corrupt(cannot(self.act, found, "", ("Use ", option("overwrite", True))))
        return info

    def shard_name(self, number: int, seal: str) -> str:
        """Return the file name of an attempt at a shard."""
        name = Path(self.file_name)
        return f"{name.stem}-{number:05d}.{seal[:8]}{name.suffix}"

    def remove_unlisted(self) -> None:
        """Remove all attempts at shards that the index does not list; without an index, all."""
        name, sizes, listed = Path(self.file_name), self.folder.sizes(), set()
        if self.file_name in sizes:
            with self._copy() as path:
                listed = {shard.name for shard in read_pack(path).shards}
        attempt = re.compile(rf"{re.escape(name.stem)}-\d{{5,}}\.[0-9a-f]{{8}}{re.escape(name.suffix)}")
        self.folder.remove(name for name in sizes if attempt.fullmatch(name) and name not in listed)

    def reclaim(self) -> None:
        """Do nothing: unlisted shards may belong to a call that is still running."""

    def size_bytes(self, info: PackInfo) -> int:
        """Return the size of a pack at this target, with all shards."""
        return self.folder.sizes()[self.file_name] + sum(shard.length for shard in info.shards)

    @property
    def place(self) -> Path:
        """A path on the disk that holds the work; nothing is created at this path."""
        return local_root(os.environ).absolute() / "packing" / self.file_name

    @property
    def path(self) -> Path | str:
        """The address for the report."""
        return self.name

    @contextmanager
    def _copy(self) -> Iterator[Path]:
        with work_folder() as folder:
            path = folder / self.file_name
            download(self.address, path, _MOST_INDEX_BYTES)
            yield path


@contextmanager
def work_folder() -> Iterator[Path]:
    """Create a folder on the local disk that is removed at the end, or by the next call if this process is killed."""
    with partials.Partial(local_root(os.environ).absolute() / "packing" / "work") as work:
        file_changes.make_folder(work.path)
        yield work.path


def bucket_target(act: str, to: str) -> BucketTarget:
    """Return the target at an address.

    Raises:
        InvalidOption: if fsspec cannot write there.
    """
    address = file_address(to)
    if address.kind != FSSPEC or not address.text.rpartition("/")[2]:
        found = f"the target is {address.shown!r}"
        expected = "a local path, or the URL of a file that fsspec can write"
        raise InvalidOption(cannot(act, found, expected, "For example, pack to 's3://bucket/birds.h5'"))
    return BucketTarget(act, address)
