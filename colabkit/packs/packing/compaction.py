"""What was learnt while samples were made, and how the gaps are closed that it leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from colabkit.foundation import file_changes
from colabkit.packs.format.layout import DataSet
from colabkit.packs.packing.filling import Bad, Done
from colabkit.packs.packing.plan import Lengths, PackPlan

Numbers = npt.NDArray[np.int64]


class Compaction:
    """Collects CRCs, lengths and bad samples; copies what is good to a new file, one after the other.

    Args:
        plan: what is made.
        known: lengths that were known before.
        folder: where bytes lie whose lengths were not; it is made when there are any.
    """

    def __init__(self, plan: PackPlan, known: Lengths, folder: Path) -> None:
        self._plan = plan
        self._known = known
        self._folder = folder
        self.bad: list[Bad] = []
        self._crcs = {split: np.zeros(count, "<u4") for split, count in plan.counts.items()}
        names = [made.field.data_set(split) for made in plan.spooled for split in plan.splits]
        self._spooled = {name: np.zeros((plan.counts[name.rpartition("_")[2]], 2), np.int64) for name in names}
        self._spools: dict[str, tuple[int, Path]] = {}
        self._ends: dict[str, int] = {}

    def __enter__(self) -> Self:
        if self._plan.spooled:
            file_changes.make_folder(self._folder)
            for number, made in enumerate(self._plan.spooled):
                path = self._folder / f"spool-{number}"
                self._spools[made.field.name] = (file_changes.create(path), path)
                self._ends[made.field.name] = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd, _ in self._spools.values():
            os.close(fd)

    def add(self, done: Done) -> None:
        """Take in a chunk."""
        chunk = done.chunk
        self._crcs[chunk.split][chunk.start : chunk.stop] = done.crcs
        self.bad += done.bad
        for made, (lengths, data) in zip(self._plan.spooled, done.spooled, strict=True):
            name = made.field.name
            fd, path = self._spools[name]
            file_changes.write_at(fd, data, self._ends[name], path)
            rows = self._spooled[made.field.data_set(chunk.split)][chunk.start : chunk.stop]
            rows[:, 1] = lengths
            rows[:, 0] = self._ends[name] + np.cumsum(lengths) - lengths
            self._ends[name] += len(data)

    @property
    def is_needed(self) -> bool:
        """Whether the file that was filled is not the pack that is wanted."""
        return bool(self.bad or self._spooled)

    @cached_property
    def kept(self) -> Mapping[str, Numbers]:
        """The samples of each split that the pack has, in its order: all but bad ones that are skipped."""
        is_kept = {split: np.ones(count, bool) for split, count in self._plan.counts.items()}
        if self._plan.on_bad == "skip":
            for one in self.bad:
                is_kept[one.split][one.index] = False
        return {split: np.flatnonzero(kept) for split, kept in is_kept.items() if kept.any()}

    @property
    def counts(self) -> dict[str, int]:
        """Samples of each split that has any."""
        return {split: len(kept) for split, kept in self.kept.items()}

    def listed_bad(self) -> list[tuple[str, int | None, str, str]]:
        """Return split, index in the pack, path and reason of each bad sample, in order; None for what was left out."""
        is_blank = self._plan.on_bad == "blank"
        splits = list(self._plan.splits)
        ordered = sorted(self.bad, key=lambda one: (splits.index(one.split), one.index))
        return [(one.split, one.index if is_blank else None, one.path, one.why) for one in ordered]

    @cached_property
    def lengths(self) -> Lengths:
        """Bytes of each kept sample of ragged fields."""
        found = {}
        bad = {split: [one.index for one in self.bad if one.split == split] for split in self.kept}
        for name, lengths in [*self._known.items(), *((name, rows[:, 1]) for name, rows in self._spooled.items())]:
            split = name.rpartition("_")[2]
            if split in self.kept:
                own = lengths.copy()
                if name in self._known:  # the files of bad samples are not in the pack
                    own[bad[split]] = 0
                found[name] = own[self.kept[split]]
        return found

    def crcs(self, split: str) -> npt.NDArray[np.uint32]:
        """Return the CRC32 of each kept sample of a split."""
        return self._crcs[split][self.kept[split]]

    def take_over(self, path: Path) -> Path:
        """Move the file that was filled out of the way, and return where it is."""
        file_changes.make_folder(self._folder)
        rows = self._folder / "rows"
        file_changes.rename(path, rows)
        return rows

    def copy(self, rows: Path, old: Mapping[str, DataSet], path: Path, new: Mapping[str, DataSet]) -> None:
        """Copy all kept samples from the file that was filled, and from the spools, to the pack.

        Args:
            rows: that file.
            old: its data sets.
            path: the pack.
            new: its data sets.
        """
        fd = os.open(rows, os.O_RDONLY | os.O_CLOEXEC)
        to_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for split, kept in self.kept.items():
                for made in self._plan.maker.fields:
                    name = made.field.data_set(split)
                    to = new[name].offset
                    if name in self._spooled:
                        starts, from_fd = self._spooled[name][kept, 0], self._spools[made.field.name][0]
                    elif name in self._known:
                        starts, from_fd = old[name].offset + _starts(self._known[name])[kept], fd
                    else:
                        starts, from_fd = old[name].offset + kept * made.row_bytes, fd
                    sizes = self.lengths.get(name, np.full(len(kept), made.row_bytes))
                    for start, size in _runs(starts, sizes):
                        file_changes.copy_range(from_fd, start, size, to_fd, to, path)
                        to += size
        finally:
            os.close(to_fd)
            os.close(fd)


def _starts(lengths: Numbers) -> Numbers:
    return np.cumsum(lengths) - lengths


def _runs(starts: Numbers, sizes: Numbers) -> Iterator[tuple[int, int]]:
    """Yield offset and size of each run of bytes without a gap."""
    starts, sizes = starts[sizes > 0], sizes[sizes > 0]
    if not len(starts):
        return
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1
    for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(starts)], strict=True):
        yield int(starts[first]), int(sizes[first:last].sum())
