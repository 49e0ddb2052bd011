"""`verify()` checks every byte of a pack or a local copy against its checksums."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from colabkit.foundation import (
    Corrupt,
    InvalidOption,
    NotSealed,
    ProgressBar,
    Report,
    Text,
    call,
    cannot,
    checked_call,
    file_changes,
    format_seconds,
    format_things,
    interruptible,
    user_path,
)
from colabkit.packs.format.layout import CRC, PackInfo
from colabkit.packs.format.mapped_pages import read_pages
from colabkit.packs.format.pack_file import read_pack
from colabkit.storage import LocalCopy, StageReport, StageVerifyReport, address_of

_LISTED = 5
# Number of bytes to read in advance.
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, repr=False)
class VerifyReport(Report):
    """Result of `verify()`.

    Attributes:
        path: path of the pack, or of the index if there are several shards.
        samples: number of checked samples.
        damaged: split and index of each sample that does not match its CRC.
        damaged_files: names of the files with damaged samples.
        seconds: duration of the check in seconds.
    """

    path: Path
    samples: int
    damaged: tuple[tuple[str, int], ...]
    damaged_files: tuple[str, ...]
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether no sample is damaged."""
        return not self.damaged

    def _summary(self) -> str:
        if not self.damaged:
            return f"{str(self.path)!r} is intact: {format_things(self.samples, 'sample')} match their checksums"
        first = ", ".join(f"{split}[{index}]" for split, index in self.damaged[:_LISTED])
        damage = f"{len(self.damaged)} of {format_things(self.samples, 'sample')}, starting with {first}"
        if self.damaged_files != (self.path.name,):
            damage += f", in {', '.join(map(repr, self.damaged_files))}"
        return f"{str(self.path)!r} is damaged: {damage}; pack or stage the data again"

    def _rows(self) -> list[tuple[str, ...]]:
        files = ", ".join(self.damaged_files) or "none"
        return [
            ("damaged", str(len(self.damaged))),
            ("damaged files", files),
            ("checked in", format_seconds(self.seconds)),
        ]


@interruptible("The check", "No file was changed.")
@checked_call()
def verify(path: str | os.PathLike[str] | StageReport, *, progress: bool = True) -> VerifyReport | StageVerifyReport:
    """Check every byte of a pack or a local copy against its checksums and report damaged samples or files.

    This reads all data once, including all shards.

    Args:
        path: a pack, a local copy made by `stage()`, or the report of `stage()`.
        progress: show a progress bar.

    Returns:
        A report; its `is_good` is true if nothing is damaged.

    Raises:
        InvalidOption: if the path is an address, such as `"gs://bucket/birds.h5"`.
        NotMounted: if the path begins with `drive:` and Drive is not mounted.
        SourceMissing, BadSource, NotSealed: if there is no finished pack at the path.
        Corrupt: if the layout, the labels or the table of CRCs is damaged, so samples cannot be checked.
        FileFailed: if the disk or the mount returns an error.

    Example:
        >>> import colabkit
        >>> packed = colabkit.pack("samples:digits", "digits.h5")
        >>> checked = colabkit.verify("digits.h5")
        >>> checked.is_good, checked.samples
        (True, 1797)
    """
    started = time.monotonic()
    if isinstance(path, StageReport):
        path = path.path
    act = f"verify {os.fspath(path)!r}" if isinstance(path, str | os.PathLike) else "verify a pack"
    if isinstance(path, str) and "://" in path and not path.startswith("file://"):
        next_step: Text = ("Fetch the pack with ", call("fetch"), ", and verify the copy")
        raise InvalidOption(cannot(f"verify {address_of(path).shown!r}", "it is an address", "a local path", next_step))
    place = user_path(path, act)
    with file_changes.translated(act):
        if found := LocalCopy.of(place):
            return found.verify(progress=progress)
        if place.is_dir():
            what = "it is a folder without checksums"
            next_step = ("Stage or pack it with ", call("stage"), " or ", call("pack"), ", and verify the result")
            raise NotSealed(cannot(act, what, "a pack, or a local copy made by staging", next_step))
    info = read_pack(place)
    damaged: list[tuple[str, int]] = []
    files: list[str] = []
    samples = sum(map(info.count, info.splits))
    with file_changes.translated(act), ProgressBar("verify", samples, " samples", progress) as bar:
        for name in info.table_crcs:
            info.table(name)
        before = dict.fromkeys(info.splits, 0)
        for shard in shards_of(info):
            known = len(damaged)
            for split in shard.splits:
                damaged += [(split, before[split] + index) for index in _damaged(shard, split, bar)]
                before[split] += shard.count(split)
            files += [shard.path.name] if len(damaged) > known else []
    return VerifyReport(info.path, samples, tuple(damaged), tuple(files), time.monotonic() - started)


def shards_of(info: PackInfo) -> Iterator[PackInfo]:
    """Yield the description of each file that holds samples of a pack, after comparing its seal with the index.

    Raises:
        Corrupt: if the seal of a shard differs from the one in the index.
        SourceMissing, BadSource, NotSealed: if a shard is missing or is not a pack.
    """
    if not info.shards:
        yield info
    for shard in info.shards:
        found = read_pack(info.path.with_name(Path(shard.name).name))
        if found.seal != shard.seal:
            act = f"open {str(info.path)!r}"
            other = f"the shard {shard.name!r} belongs to another pack"
            raise Corrupt(cannot(act, other, "the shard that the index lists", "Pack or stage the data again"))
        yield found


def _damaged(info: PackInfo, split: str, bar: ProgressBar) -> Iterator[int]:
    crcs = np.zeros(info.count(split), np.uint32)
    for name in info.table_crcs:
        if name.endswith((f"_{split}", f"_{split}_index")):
            info.table(name)
    for place, field in enumerate(info.sample_fields()):
        data = np.asarray(info.map(field.data_set(split))).reshape(-1).view(np.uint8)
        row_bytes = data.size // max(1, len(crcs))
        spans = info.table(field.index(split)).tolist() if field.is_ragged else None
        view, read_bytes = data.data, 0
        for index in range(len(crcs)):
            start, size = (index * row_bytes, row_bytes) if spans is None else spans[index]
            while read_bytes < min(start + size, data.size):
                read_pages(data[read_bytes : read_bytes + _BLOCK_BYTES])
                read_bytes += _BLOCK_BYTES
            crcs[index] = crc32(view[start : start + size], int(crcs[index]))
            if not place:
                bar.advance(1)
    yield from np.flatnonzero(crcs != info.table(f"{CRC}_{split}")).tolist()
