"""Writes one pack file: reserves space, fills in rows, closes gaps, writes tables, then seals and renames the file."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt

from colabkit.foundation import (
    ColabkitError,
    ProgressBar,
    TargetExists,
    cannot,
    file_changes,
    partials,
)
from colabkit.packs.format.arrival import Arrival
from colabkit.packs.format.layout import CRC, DataSet, Indices, PackInfo
from colabkit.packs.format.pack_file import create_pack, read_pack, seal_pack
from colabkit.packs.packing.file_samples import FileSampleMaker
from colabkit.packs.packing.pack_plan import BadSample, Lengths, PackPlan
from colabkit.packs.packing.sample_writer import FileSampleWriter, SampleWriter, WrittenRange
from colabkit.storage import Retries, Threads

_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Attempts:
    """Counts of the attempts at shards: all, those at shards already complete, and those that did not end."""

    total: int = 0
    duplicates: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class WrittenPack:
    """Result of writing a plan.

    Attributes:
        seal: seal of the file; empty if no file was written.
        counts: number of samples in each split.
        bad: samples that could not be made.
        retries: number of reads that were retried.
        made_by: workers that made the samples, such as threads or processes.
        attempts: attempts of an executor at shards.
    """

    seal: str
    counts: Mapping[str, int]
    bad: tuple[BadSample, ...]
    retries: int
    made_by: str
    attempts: Attempts = Attempts()


def write_pack(
    plan: PackPlan,
    final: Path,
    threads: Threads,
    bar: ProgressBar,
    *,
    replace: bool = False,
    arrival: Arrival | None = None,
) -> WrittenPack:
    """Write a plan to one sealed file.

    Rows are written directly at their final position. If lengths are not known in advance, or bad samples leave gaps,
    samples are first written to temporary files and copied at the end. A shard whose samples are all skipped is not
    written.

    Args:
        plan: contents of the file.
        final: path of the file.
        threads: number of threads that read files.
        bar: progress bar, advanced by samples.
        replace: whether to replace an existing file.
        arrival: record for readers of the incomplete file, which the plan must allow; see `why_complete_first`.

    Raises:
        BadImage: if more samples are bad than allowed.
        BadSource: if all samples are bad.
        TargetExists: if something exists at `final` and `replace` is false.
        NotEnoughSpace: if the pack does not fit; raised before anything is read if its size is known.
    """
    retries = Retries()
    every = {split: np.arange(count) for split, count in plan.counts.items()}
    layout = plan.data_sets(every, plan.lengths or {})
    file_changes.check_space(plan.act, sum(one.size_bytes for one in layout), final)
    with partials.Partial(final) as pack:
        with contextlib.ExitStack() as stack:
            work = stack.enter_context(partials.Partial(final.with_name(f"{final.name}-work")))
            placed, crcs = create_pack(pack.path, layout, plan.meta(plan.counts))
            if arrival is not None:
                arrival.open(_described_early(plan, pack.path, placed, crcs))
            compaction = stack.enter_context(Compaction(plan, work.path))
            writing = FileSampleWriter if isinstance(plan.maker, FileSampleMaker) else SampleWriter
            writer = writing(plan, pack.path, placed, retries, arrival)
            syncing = stack.enter_context(file_changes.BackgroundSync(pack.path))
            for written in stack.enter_context(contextlib.closing(writer.write(threads, bar))):
                compaction.add(written)
                syncing.written(written.samples.count * plan.row_bytes)
                plan.check_bad(compaction.bad)
                bar.advance(written.samples.count)
            if compaction.is_needed:
                if not compaction.counts:
                    return WrittenPack("", {}, tuple(compaction.bad), retries.count, writer.made_by)
                layout = plan.data_sets(compaction.kept, compaction.lengths)
                file_changes.check_space(plan.act, sum(one.size_bytes for one in layout), final)
                rows, work_placed = compaction.take_over(pack.path), placed
                placed, crcs = create_pack(pack.path, layout, plan.meta(compaction.counts, compaction.listed_bad()))
                compaction.copy(rows, work_placed, pack.path, placed)
            crcs |= _write_tables(plan, pack.path, placed, compaction)
            seal = seal_pack(pack.path, placed.values(), crcs)
        if not replace:
            check_free(plan, final)
        if arrival is not None:
            arrival.check_needed()
        pack.publish(replace=replace)
    return WrittenPack(seal, compaction.counts, tuple(compaction.bad), retries.count, writer.made_by)


def check_free(plan: PackPlan, final: Path) -> None:
    """Raise `TargetExists` if another process has created something at the final path."""
    if os.path.lexists(final):
        found = f"another process created {str(final)!r} in the meantime"
        raise TargetExists(cannot(plan.act, found, "", "Pack again, or choose another path"))


def find_written(path: Path, about: Mapping[str, Any]) -> WrittenPack | None:
    """Return the result of an earlier call if `path` holds a finished pack of the plan described by `about`."""
    try:
        info = read_pack(path)
    except ColabkitError:
        return None
    if any(info.meta.get(name) != about.get(name) for name in ("plan", "shard", "encoding")):
        return None
    bad = tuple(BadSample(split, index or 0, name, why) for split, index, name, why in info.meta["bad"])
    return WrittenPack(info.seal, info.meta["splits"], bad, 0, "an earlier call")


class Compaction:
    """Collects CRCs, lengths and bad samples, and copies the kept samples to a new file without gaps.

    Args:
        plan: plan of the file.
        folder: folder in which samples of initially unknown length are spooled; created on demand.
    """

    def __init__(self, plan: PackPlan, folder: Path) -> None:
        self._plan = plan
        self._known = plan.lengths or {}
        self._folder = folder
        self.bad: list[BadSample] = []
        self._crcs = {split: np.zeros(count, "<u4") for split, count in plan.counts.items()}
        # Offset and length of each spooled sample, by dataset.
        self._spooled = {
            made.data_set(split): np.zeros((count, 2), np.int64)
            for made in plan.spooled
            for split, count in plan.counts.items()
        }
        self._spools: dict[str, tuple[int, Path]] = {}
        self._ends: dict[str, int] = {}

    def __enter__(self) -> Self:
        if self._plan.spooled:
            file_changes.make_folder(self._folder)
            for number, made in enumerate(self._plan.spooled):
                path = self._folder / f"spool-{number}"
                self._spools[made.name] = (file_changes.create(path), path)
                self._ends[made.name] = 0
        return self

    def __exit__(self, *error: object) -> None:
        for fd, _ in self._spools.values():
            os.close(fd)

    def add(self, written: WrittenRange) -> None:
        """Record a range of written samples and spool those of initially unknown length."""
        split, span = written.samples.split, slice(written.samples.start, written.samples.stop)
        self._crcs[split][span] = written.crcs
        self.bad += written.bad
        for made, (lengths, data) in zip(self._plan.spooled, written.spooled, strict=True):
            name = made.name
            fd, path = self._spools[name]
            file_changes.write_at(fd, data, self._ends[name], path)
            starts = self._ends[name] + np.cumsum(lengths) - lengths
            self._spooled[made.data_set(split)][span] = np.stack([starts, lengths], 1)
            self._ends[name] += len(data)

    @property
    def is_needed(self) -> bool:
        """Whether samples must be copied to a new file."""
        return bool(self.bad or self._spooled)

    @cached_property
    def kept(self) -> Mapping[str, Indices]:
        """Indices of the samples to store, by split and in order: all except skipped bad samples."""
        is_kept = {split: np.ones(count, bool) for split, count in self._plan.counts.items()}
        if self._plan.on_bad == "skip":
            for one in self.bad:
                is_kept[one.split][one.index] = False
        return {split: np.flatnonzero(kept) for split, kept in is_kept.items() if kept.any()}

    @property
    def counts(self) -> dict[str, int]:
        """Number of samples in each non-empty split."""
        return {split: len(kept) for split, kept in self.kept.items()}

    def listed_bad(self) -> list[tuple[str, int | None, str, str]]:
        """Return the split, the index in the pack (None if omitted), the path and the reason of each bad sample."""
        is_blank = self._plan.on_bad == "blank"
        splits = list(self._plan.splits)
        ordered = sorted(self.bad, key=lambda one: (splits.index(one.split), one.index))
        return [(one.split, one.index if is_blank else None, one.path, one.why) for one in ordered]

    @cached_property
    def lengths(self) -> Lengths:
        """Size in bytes of each kept sample of the ragged fields, by dataset."""
        found = {}
        bad = {split: [one.index for one in self.bad if one.split == split] for split in self.kept}
        for name, lengths in [*self._known.items(), *((name, rows[:, 1]) for name, rows in self._spooled.items())]:
            split = name.rpartition("_")[2]
            if split in self.kept:
                own = lengths.copy()
                # Bad samples that are kept have no bytes.
                if name in self._known:
                    own[bad[split]] = 0
                found[name] = own[self.kept[split]]
        return found

    def crcs(self, split: str) -> npt.NDArray[np.uint32]:
        """Return the CRC32 of each kept sample of a split."""
        return self._crcs[split][self.kept[split]]

    def take_over(self, path: Path) -> Path:
        """Move the filled file to the temporary folder and return its new path."""
        file_changes.make_folder(self._folder)
        rows = self._folder / "rows"
        file_changes.rename(path, rows)
        return rows

    def copy(self, rows: Path, old: Mapping[str, DataSet], path: Path, new: Mapping[str, DataSet]) -> None:
        """Copy all kept samples to the pack, from the spool files and from the datasets `old` of the file `rows`."""
        with (
            file_changes.descriptor(os.open(rows, os.O_RDONLY | os.O_CLOEXEC)) as fd,
            file_changes.descriptor(file_changes.reopen(path)) as to_fd,
        ):
            for split, kept in self.kept.items():
                for made in self._plan.maker.fields:
                    name = made.data_set(split)
                    to, from_fd = new[name].offset, fd
                    if name in self._spooled:
                        starts, from_fd = self._spooled[name][kept, 0], self._spools[made.name][0]
                    elif name in self._known:
                        known = self._known[name]
                        starts = old[name].offset + (np.cumsum(known) - known)[kept]
                    else:
                        starts = old[name].offset + kept * made.row_bytes
                    sizes = self.lengths.get(name, np.full(len(kept), made.row_bytes))
                    for start, size in _runs(starts, sizes):
                        file_changes.copy_range(from_fd, start, size, to_fd, to, path)
                        to += size


def _runs(starts: Indices, sizes: Indices) -> Iterator[tuple[int, int]]:
    starts, sizes = starts[sizes > 0], sizes[sizes > 0]
    if not len(starts):
        return
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1
    for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(starts)], strict=True):
        yield int(starts[first]), int(sizes[first:last].sum())


def _write_tables(plan: PackPlan, path: Path, placed: Mapping[str, DataSet], compaction: Compaction) -> dict[str, int]:
    """Write labels, CRCs, offsets and columns, and return the CRC32 of each by dataset name."""
    crcs = {}
    with file_changes.descriptor(file_changes.reopen(path)) as fd:
        for split, kept in compaction.kept.items():
            known = _known_tables(plan, split, kept, compaction.lengths)
            for name, values in itertools.chain([(f"{CRC}_{split}", compaction.crcs(split))], known):
                crcs[name] = write_table(fd, values, placed[name], path)
            for made in plan.maker.fields:
                # This table was written together with the samples, so only its CRC is missing.
                if made.is_table:
                    crcs[made.data_set(split)] = _stored_crc(fd, placed[made.data_set(split)])
    return crcs


def write_table(fd: int, values: npt.NDArray[Any], placed: DataSet, path: Path) -> int:
    """Write a table at its position and return its CRC32."""
    data = np.ascontiguousarray(values, placed.dtype).reshape(-1).view(np.uint8).data
    file_changes.write_at(fd, data, placed.offset, path)
    return crc32(data)


def why_complete_first(plan: PackPlan) -> str:
    """Return the reason why samples cannot be read while the file is written; empty if they can.

    The places of the samples must be final, and the files must arrive slowly, but in any order.
    """
    source = plan.maker.source if isinstance(plan.maker, FileSampleMaker) else None
    if source is None or not source.can_hang:
        return "the source is on this machine"
    if getattr(source, "is_sequential", False):
        return "the source can only be read from start to end"
    if plan.on_bad == "skip":
        return "the number of bad files, which are skipped, is not known before"
    if plan.spooled or (plan.on_bad == "blank" and plan.lengths):
        return "the sizes of the samples are not known before"
    return ""


def _described_early(plan: PackPlan, path: Path, placed: Mapping[str, DataSet], crcs: Mapping[str, int]) -> PackInfo:
    """Write the tables that are already known, and describe the unsealed file."""
    known = {}
    with file_changes.descriptor(file_changes.reopen(path)) as fd:
        for split, count in plan.counts.items():
            for name, values in _known_tables(plan, split, np.arange(count), plan.lengths or {}):
                known[name] = write_table(fd, values, placed[name], path)
    meta = json.loads(json.dumps(plan.meta(plan.counts)))
    return PackInfo(path, placed, meta, {**crcs, **known}, "")


def _known_tables(
    plan: PackPlan, split: str, kept: Indices, lengths: Lengths
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for table in plan.tables:
        values = table.subset(plan.splits[split][kept]).values
        if isinstance(values, np.ndarray):
            yield table.field.data_set(split), values
        else:
            yield table.field.data_set(split), np.frombuffer(b"".join(values), np.uint8)
            yield table.field.index(split), _index(np.fromiter(map(len, values), np.int64, len(values)))
    for made in plan.maker.fields:
        if made.is_ragged:
            yield made.index(split), _index(lengths[made.data_set(split)])


def _index(lengths: Indices) -> Indices:
    return np.stack([np.cumsum(lengths) - lengths, lengths], 1)


def _stored_crc(fd: int, one: DataSet) -> int:
    crc, at, end = 0, one.offset, one.offset + one.size_bytes
    while at < end:
        block = os.pread(fd, min(_READ_BYTES, end - at), at)
        if not block:
            raise OSError(errno.EIO, "the pack became shorter while it was being written")
        crc = crc32(block, crc)
        at += len(block)
    return crc
