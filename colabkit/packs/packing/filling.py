"""How the rows of a pack are made and written: by threads, by forked processes, or while they come from afar."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadImage, ProgressBar, cannot, file_changes, format_things, usable_cpus
from colabkit.packs.format.layout import DataSet
from colabkit.packs.packing.makers import ChunkMaker, FileSamples, MadeField, RowMaker, Unequal, Value
from colabkit.packs.packing.plan import Lengths, PackPlan
from colabkit.packs.packing.processes import ForkedWorkers, can_fork
from colabkit.packs.packing.reading import BrokenMember, SampleReading, read_if_whole
from colabkit.storage import Block, Item, Retries, Threads, Wanted, concurrently, read_item

_CHUNK_S = 0.015  # what a chunk should take: much longer than its hand-over, so short that all workers end together
_CHUNK_SAMPLES = 1024
_CHUNK_BYTES = 8 << 20
_UNSIZED_SAMPLES = 16  # where nothing tells how large they will be
_MEASURED_S = 0.005
_TINY_S = 1e-3  # samples that take less are made by processes: threads would mostly wait for the interpreter's lock
_FORKING_S = 0.2  # work that is over sooner is done at once
_LISTED_BAD = 5

Index: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples `start` to `stop` of a split."""

    split: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bad:
    """A sample that could not be made: where it would be, and why."""

    split: str
    index: int
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """A chunk whose rows are written.

    Attributes:
        chunk: which.
        crcs: of its samples, `uint32`.
        bad: the samples that could not be made.
        spooled: for each field whose lengths were not known, those of the samples, and all their bytes.
    """

    chunk: Chunk
    crcs: npt.NDArray[np.uint32]
    bad: tuple[Bad, ...]
    spooled: tuple[tuple[Index, bytes], ...]


class Filling:
    """Makes the samples of a plan and writes their rows at their places in an unsealed pack.

    Args:
        plan: what to make.
        path: the pack, with its space reserved.
        placed: its data sets.
        lengths: of the samples of `X` where they are known before.
        retries: counts reads that were tried again.
    """

    def __init__(
        self, plan: PackPlan, path: Path, placed: dict[str, DataSet], lengths: Lengths | None, retries: Retries
    ) -> None:
        self._plan = plan
        self._path = path
        self._placed = placed
        self._retries = retries
        self._starts = {name: np.concatenate(([0], np.cumsum(of))) for name, of in (lengths or {}).items()}
        self._numbers = {split: numbers.tolist() for split, numbers in plan.splits.items()}
        self._ends: dict[str, Index] = {}
        self.how = ""

    def done(self, threads: Threads, bar: ProgressBar) -> Generator[Done, None, None]:
        """Fill the pack and yield each chunk when it is done, in any order.

        Args:
            threads: files read at once, or `"auto"`, which measures.
            bar: shows what comes.

        Raises:
            BadImage: if a sample cannot be made and that is an error.
            SourceChanged, BadArchive, FileFailed, TimedOut, PackingFailed: if a file cannot be read or packed.
        """
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        source = self._plan.maker.source
        try:
            if source is not None and (source.can_hang or getattr(source, "is_sequential", False)):
                yield from self._from_afar(threads, bar)
            elif self._plan.maker.can_share:
                yield from self._measured(threads, bar)
            else:
                self.how = "one thread"
                is_sized = not self._plan.spooled or isinstance(self._plan.maker, ChunkMaker)
                yield from map(self.fill, self._chunks(0, _CHUNK_SAMPLES if is_sized else _UNSIZED_SAMPLES))
        finally:
            os.close(self._fd)

    def fill(self, chunk: Chunk) -> Done:
        """Read, make and write the samples of a chunk."""
        maker, source, retries = self._plan.maker, self._plan.maker.source, self._retries
        if isinstance(maker, ChunkMaker):
            return self._written(chunk, maker.make_many(self._plan.splits[chunk.split][chunk.start : chunk.stop]), [])
        numbers = self._numbers[chunk.split][chunk.start : chunk.stop]
        if source is None:
            return self._filled(chunk, ((number, b"") for number in numbers))
        read = read_item if self._plan.on_bad == "raise" else read_if_whole
        return self._filled(chunk, ((number, read(source, maker.item(number), retries)) for number in numbers))

    def _filled(self, chunk: Chunk, numbered: Iterable[tuple[int, bytes | BrokenMember]]) -> Done:
        """Make the samples of a chunk of their items' bytes, and write them."""
        plan = self._plan
        if isinstance(plan.maker, RowMaker) and plan.maker.fills_rows:
            return self._filled_in_place(chunk, numbered, plan.maker)
        samples: list[tuple[Value, ...]] = []
        bad: list[Bad] = []
        make, add = plan.maker.make, samples.append
        for number, data in numbered:
            try:
                add(make(number, _whole(data)))
            except BadImage as error:
                bad.append(self._bad(chunk, len(samples), number, error))
                add(self._blank(number))
        return self._written(chunk, tuple(zip(*samples, strict=True)), bad)

    def _written(self, chunk: Chunk, columns: Sequence[Any], bad: list[Bad]) -> Done:
        """Write the samples of a chunk, a column for each field."""
        crcs = [0] * (chunk.stop - chunk.start)
        spooled = []
        for made, column in zip(self._plan.maker.fields, columns, strict=True):
            name = made.field.data_set(chunk.split)
            if not made.field.is_ragged:
                rows = _rows(made, column)
                if not made.is_table:
                    crcs = list(map(crc32, rows, crcs))
                offset = self._placed[name].offset + chunk.start * made.row_bytes
                file_changes.write_at(self._fd, rows.reshape(-1).data, offset, self._path)
                continue
            crcs = list(map(crc32, column, crcs))
            if name in self._starts:
                self._write_known(name, self._starts[name][chunk.start : chunk.stop + 1], column)
            else:
                spooled.append((np.fromiter(map(len, column), np.int64, len(column)), b"".join(column)))
        return Done(chunk, np.array(crcs, "<u4"), tuple(bad), tuple(spooled))

    def _filled_in_place(
        self, chunk: Chunk, numbered: Iterable[tuple[int, bytes | BrokenMember]], maker: RowMaker
    ) -> Done:
        """Make the samples of a chunk in one buffer, which is what is written."""
        made = maker.fields[0]
        rows = np.empty((chunk.stop - chunk.start, *made.shape), made.dtype)
        crcs: list[int] = []
        bad: list[Bad] = []
        for row, (number, data) in zip(rows, numbered, strict=True):
            try:
                maker.make_into(number, _whole(data), row)
            except BadImage as error:
                bad.append(self._bad(chunk, len(crcs), number, error))
                row[:] = 0
            crcs.append(crc32(row))
        offset = self._placed[made.field.data_set(chunk.split)].offset + chunk.start * made.row_bytes
        file_changes.write_at(self._fd, rows.reshape(-1).view(np.uint8).data, offset, self._path)
        return Done(chunk, np.array(crcs, "<u4"), tuple(bad), ())

    def _write_known(self, name: str, starts: Index, blobs: Sequence[Any]) -> None:
        """Write samples one after the other at the places that their lengths gave them; bad ones leave theirs empty."""
        sizes = np.diff(starts).tolist()
        whole = b"".join(blob or bytes(size) for blob, size in zip(blobs, sizes, strict=True))
        file_changes.write_at(self._fd, whole, self._placed[name].offset + int(starts[0]), self._path)

    def _blank(self, number: int) -> tuple[Value, ...]:
        """Return nothing in place of a bad sample, but for fields that do not depend on its bytes."""
        first, *others = (
            b"" if made.field.is_ragged else np.zeros(made.shape, made.dtype) for made in self._plan.maker.fields
        )
        maker = self._plan.maker
        return (first, *(maker.further(number) if isinstance(maker, FileSamples) else others))

    def _bad(self, chunk: Chunk, at: int, number: int, error: BadImage) -> Bad:
        """Return a sample that could not be made, or raise its error."""
        path, why = self._plan.maker.path(number), str(error)
        act = f"pack {path!r} of {self._plan.name!r}"
        if isinstance(error, Unequal):
            raise Unequal(cannot(act, why, "one shape for all", error.next_step)) from error
        if self._plan.on_bad == "raise":
            is_file = self._plan.maker.source is not None
            next_step = f"Remove or repair this {'file' if is_file else 'sample'}, or use on_bad='skip'"
            raise BadImage(cannot(act, why, "an image file" if is_file else "a good sample", next_step)) from error
        return Bad(chunk.split, chunk.start + at, path, why)

    def _chunks(self, first: int, samples: int) -> Iterator[Chunk]:
        """Yield the samples from the `first`, counted through all splits, in chunks of at most so many.

        Neither the rows of a chunk nor its files are more than 8 MiB, but for a single one. That bounds memory, and the
        time that a chunk takes where later files are larger than those that were measured.
        """
        row_bytes = sum(made.row_bytes for made in self._plan.maker.fields)
        step = max(1, min(samples, _CHUNK_SAMPLES, _CHUNK_BYTES // max(1, row_bytes)))
        before = 0
        for split, numbers in self._plan.splits.items():
            ends = self._read_ends(split)
            start = max(0, first - before)
            while start < len(numbers):
                stop = min(start + step, len(numbers))
                if ends is not None:
                    begun = int(ends[start - 1]) if start else 0
                    within = int(np.searchsorted(ends, begun + _CHUNK_BYTES, "right"))
                    stop = min(stop, max(within, start + 1))
                yield Chunk(split, start, stop)
                start = stop
            before += len(numbers)

    def _read_ends(self, split: str) -> Index | None:
        """Return how many bytes are read for the samples of a split up to each; None if none are."""
        maker = self._plan.maker
        if maker.source is None:
            return None
        if split not in self._ends:
            sizes = (maker.item(number).size for number in self._numbers[split])
            self._ends[split] = np.cumsum(np.fromiter(sizes, np.int64, len(self._numbers[split])))
        return self._ends[split]

    def _measured(self, threads: Threads, bar: ProgressBar) -> Iterator[Done]:
        """Make the first samples here, and the others by what they cost."""
        made, spent_s, samples = 0, 0.0, self._plan.samples
        while made < samples and spent_s < _MEASURED_S:
            chunk = next(self._chunks(made, max(1, made)))
            began = time.perf_counter()
            done = self.fill(chunk)
            if made:  # the first sample also pays for what is loaded on the way
                spent_s += time.perf_counter() - began
            made += chunk.stop - chunk.start
            yield done
        sample_s = spent_s / max(1, made - 1)
        cpus = max(1, round(usable_cpus()))
        chunks = self._chunks(made, max(1, round(_CHUNK_S / max(sample_s, 1e-9))))
        is_long = (samples - made) * sample_s > _FORKING_S
        if threads == "auto" and sample_s < _TINY_S and is_long and cpus > 1 and can_fork():
            self.how = f"{cpus} processes"
            with ForkedWorkers(self._plan.act, self.fill, cpus, self._described) as workers:
                yield from workers.results(chunks, bar.wait)
            return
        at_once = threads if threads != "auto" else cpus if sample_s >= _TINY_S else 1
        self.how = f"{at_once} threads" if at_once > 1 else "one thread"
        yield from concurrently(self.fill, chunks, at_once, on_wait=bar.wait)

    def _described(self, chunk: Chunk) -> str:
        numbers = self._numbers[chunk.split]
        first, last = (self._plan.maker.path(numbers[at]) for at in (chunk.start, chunk.stop - 1))
        return f"{first!r} to {last!r}"

    def _from_afar(self, threads: Threads, bar: ProgressBar) -> Iterator[Done]:
        """Make samples as their files come.

        Reading and making are apart: a read that hangs can be left behind, and no more samples are made at once than
        there are CPUs.
        """
        maker = self._plan.maker
        assert maker.source is not None
        places: dict[Item, list[tuple[str, int, int]]] = {}  # one file can be several samples
        for split, numbers in self._numbers.items():
            for index, number in enumerate(numbers):
                places.setdefault(maker.item(number), []).append((split, index, number))

        is_strict = self._plan.on_bad == "raise"
        reading = SampleReading(maker.source, threads, self._retries, bar.wait, is_strict=is_strict)

        def fill(block: Block) -> list[Done]:
            data = reading.data(block)
            return [
                self._filled(Chunk(split, index, index + 1), [(number, data)])
                for split, index, number in places[block.item]
            ]

        with reading:
            whole = (Wanted(item, 0, item.size) for item in places)
            with closing(reading.blocks(whole)) as blocks:
                for several in concurrently(fill, blocks, "auto"):
                    yield from several
        self.how = "as files came"


def _whole(data: bytes | BrokenMember) -> bytes:
    if isinstance(data, BrokenMember):
        raise data
    return data


def _rows(made: MadeField, column: Sequence[Any]) -> npt.NDArray[np.uint8]:
    """Return the bytes of each row, `[n, row_bytes]`."""
    if isinstance(column, np.ndarray):
        rows = column
    else:
        rows = np.empty((len(column), *made.shape), made.dtype)
        for at, value in enumerate(column):
            rows[at] = value
    return rows.reshape(-1).view(np.uint8).reshape(len(column), made.row_bytes)


def too_many_bad(plan: PackPlan, bad: Sequence[Bad]) -> BadImage:
    """Return the error for more bad files than are allowed."""
    first = "; ".join(f"{one.path!r} ({one.why})" for one in bad[:_LISTED_BAD])
    found = f"{format_things(len(bad), 'bad file')} or more, first {first}"
    next_step = "Check the source" if len(bad) == plan.samples else "Check the source, or raise max_bad="
    return BadImage(cannot(plan.act, found, f"at most {plan.most_bad}", next_step))
