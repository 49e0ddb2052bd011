"""Makes samples and writes their rows: in threads, in forked processes, or as their files arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadImage, ProgressBar, cannot, file_changes, option, usable_cpus
from colabkit.packs.format.arrival import Arrival
from colabkit.packs.format.layout import DataSet, Indices
from colabkit.packs.packing.file_samples import BrokenMember, FileSampleMaker, SampleReader, read_sample
from colabkit.packs.packing.forked_workers import ForkedWorkers, can_fork
from colabkit.packs.packing.pack_plan import (
    BadHandler,
    BadSample,
    ColumnValues,
    MemorySampleMaker,
    PackPlan,
    SampleField,
    UnequalSample,
)
from colabkit.storage import Block, Item, Retries, Threads, concurrently

# Target duration of a chunk: long compared to the overhead of a task, but short enough that all workers end at about
# the same time.
_CHUNK_S = 0.015
_CHUNK_SAMPLES = 1024
_CHUNK_BYTES = 8 << 20
# Number of samples in a chunk if their sizes are unknown.
_UNSIZED_SAMPLES = 16
_MEASURED_S = 0.005
# Samples that take less time than this are made in processes, because threads would mostly wait for the GIL.
_TINY_S = 1e-3
# Minimum seconds of work for which starting processes is worthwhile.
_FORKING_S = 0.2
# Number of ranges whose files the system reads ahead.
_READ_AHEAD = 8


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Samples `start` to `stop` of a split, made together."""

    split: str
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Number of samples."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """Samples whose rows have been written.

    Attributes:
        samples: the range.
        crcs: CRC32 of each sample, `uint32`.
        bad: samples that could not be made.
        spooled: for each field of initially unknown lengths, the lengths and the joined bytes of the samples.
    """

    samples: SampleRange
    crcs: npt.NDArray[np.uint32]
    bad: tuple[BadSample, ...]
    spooled: tuple[tuple[Indices, bytes], ...]


class SampleWriter:
    """Makes the samples of a plan and writes their rows into an unsealed pack.

    Args:
        plan: plan of the pack.
        path: path of the unsealed pack, in which space is reserved.
        placed: datasets of the pack, with their offsets, by name.
        retries: counts reads that were retried.
        arrival: record for readers of the samples, which also determines the order in which files are read.
    """

    def __init__(
        self,
        plan: PackPlan,
        path: Path,
        placed: dict[str, DataSet],
        retries: Retries,
        arrival: Arrival | None = None,
    ) -> None:
        self._plan = plan
        self._arrival = arrival
        self._path = path
        self._placed = placed
        self._retries = retries
        self._starts = {name: np.concatenate(([0], np.cumsum(of))) for name, of in (plan.lengths or {}).items()}
        self.made_by = "one thread"

    def write(self, threads: Threads, bar: ProgressBar) -> Generator[WrittenRange, None, None]:
        """Fill the pack and yield each range of samples once it is written, in any order.

        Raises:
            BadImage: if a sample cannot be made and bad samples are errors.
            SourceChanged, BadArchive, FileFailed, TimedOut, PackingFailed: if a file cannot be read or packed.
        """
        with file_changes.descriptor(file_changes.reopen(self._path)) as self._fd:
            yield from self._write_all(threads, bar)

    def _write_all(self, threads: Threads, bar: ProgressBar) -> Iterator[WrittenRange]:
        maker, is_sized = self._plan.maker, not self._plan.spooled
        assert isinstance(maker, MemorySampleMaker)
        for samples in self._ranges(0, _CHUNK_SAMPLES if is_sized else _UNSIZED_SAMPLES):
            numbers = self._plan.splits[samples.split][samples.start : samples.stop]
            yield self._written(samples, partial(maker.columns, numbers, on_wait=bar.wait))

    def _written(self, samples: SampleRange, make: Callable[[BadHandler], Sequence[ColumnValues]]) -> WrittenRange:
        bad: list[BadSample] = []
        columns = make(lambda place, number, error: bad.append(self._bad(samples, place, number, error)))
        crcs = [0] * samples.count
        spooled = []
        for made, column in zip(self._plan.maker.fields, columns, strict=True):
            name = made.data_set(samples.split)
            if not made.is_ragged:
                rows = _row_bytes(made, column)
                if not made.is_table:
                    crcs = list(map(crc32, rows, crcs))
                offset = self._placed[name].offset + samples.start * made.row_bytes
                file_changes.write_at(self._fd, rows.reshape(-1).data, offset, self._path)
                continue
            crcs = list(map(crc32, column, crcs))
            if name in self._starts:
                self._write_known(name, self._starts[name][samples.start : samples.stop + 1], column)
            else:
                spooled.append((np.fromiter(map(len, column), np.int64, len(column)), b"".join(column)))
        return WrittenRange(samples, np.array(crcs, "<u4"), tuple(bad), tuple(spooled))

    def _write_known(self, name: str, starts: Indices, blobs: ColumnValues) -> None:
        """Write samples of known lengths back to back; the space of bad samples is filled with zeros."""
        sizes = np.diff(starts).tolist()
        whole = b"".join(blob or bytes(size) for blob, size in zip(blobs, sizes, strict=True))
        file_changes.write_at(self._fd, whole, self._placed[name].offset + int(starts[0]), self._path)

    def _bad(self, samples: SampleRange, place: int, number: int, error: BadImage) -> BadSample:
        path, why = self._plan.maker.path(number), str(error)
        act = f"pack {path!r} of {self._plan.name!r}"
        if isinstance(error, UnequalSample):
            raise type(error)(cannot(act, why, "", error.next_step)) from error
        if self._plan.on_bad == "raise":
            is_file = isinstance(self._plan.maker, FileSampleMaker)
            repair = "Repair or remove this file" if is_file else "Repair or remove this sample"
            raise BadImage(cannot(act, why, "", (repair, ", or use ", option("on_bad", "skip")))) from error.__cause__
        return BadSample(samples.split, samples.start + place, path, why)

    def _ranges(self, first: int, count: int) -> Iterator[SampleRange]:
        """Yield all samples from number `first` on, counted across splits, in ranges of at most `count`.

        Neither the rows nor the files of a range exceed 8 MiB, unless the range is a single sample. This bounds memory
        use, and the duration of a range if later files are larger than the measured ones.
        """
        step = max(1, min(count, _CHUNK_SAMPLES, _CHUNK_BYTES // max(1, self._plan.row_bytes)))
        before = 0
        for split, samples in self._plan.counts.items():
            ends = self._read_ends(split)
            start = max(0, first - before)
            while start < samples:
                stop = min(start + step, samples)
                if ends is not None:
                    read = int(ends[start - 1]) if start else 0
                    stop = min(stop, max(int(np.searchsorted(ends, read + _CHUNK_BYTES, "right")), start + 1))
                yield SampleRange(split, start, stop)
                start = stop
            before += samples

    def _read_ends(self, split: str) -> Indices | None:
        return None


class FileSampleWriter(SampleWriter):
    """Makes samples from files, with a suitable number of threads or processes; see `SampleWriter` for arguments."""

    def __init__(
        self,
        plan: PackPlan,
        path: Path,
        placed: dict[str, DataSet],
        retries: Retries,
        arrival: Arrival | None = None,
    ) -> None:
        super().__init__(plan, path, placed, retries, arrival)
        assert isinstance(plan.maker, FileSampleMaker)
        self._maker = plan.maker
        self._numbers = {split: numbers.tolist() for split, numbers in plan.splits.items()}
        self._ends: dict[str, Indices] = {}

    def _write_all(self, threads: Threads, bar: ProgressBar) -> Iterator[WrittenRange]:
        source = self._maker.source
        is_remote = source.can_hang or getattr(source, "is_sequential", False)
        yield from (self._write_arriving if is_remote else self._write_measured)(threads, bar)

    def write_range(self, samples: SampleRange) -> WrittenRange:
        """Read, make and write a range of samples."""
        maker, numbers = self._maker, self._numbers[samples.split][samples.start : samples.stop]
        items = (maker.items[number] for number in numbers)
        data = (read_sample(maker.source, item, self._retries, is_strict=maker.is_strict) for item in items)
        return self._written_of(samples, numbers, data)

    def _written_of(
        self, samples: SampleRange, numbers: Sequence[int], data: Iterable[bytes | BrokenMember]
    ) -> WrittenRange:
        return self._written(samples, lambda on_bad: self._maker.columns(numbers, data, on_bad))

    def _read_ends(self, split: str) -> Indices | None:
        if split not in self._ends:
            self._ends[split] = np.cumsum(self._maker.sizes(self._plan.splits[split]))
        return self._ends[split]

    def _write_measured(self, threads: Threads, bar: ProgressBar) -> Iterator[WrittenRange]:
        """Make the first samples in this thread, then choose threads or processes by the measured time per sample."""
        made, spent_s, samples = 0, 0.0, self._plan.samples
        while made < samples and spent_s < _MEASURED_S:
            few = next(self._ranges(made, max(1, made)))
            started = time.perf_counter()
            written = self.write_range(few)
            # Do not count the first sample, because its time includes lazy imports.
            if made:
                spent_s += time.perf_counter() - started
            made += few.count
            yield written
        sample_s = spent_s / max(1, made - 1)
        cpus = max(1, round(usable_cpus()))
        ranges = self._read_ahead(self._ranges(made, max(1, round(_CHUNK_S / max(sample_s, 1e-9)))))
        is_long = (samples - made) * sample_s > _FORKING_S
        if threads == "auto" and sample_s < _TINY_S and is_long and cpus > 1 and can_fork():
            self.made_by = f"{cpus} processes"
            with ForkedWorkers(self._plan.act, self.write_range, cpus, self._described) as workers:
                yield from workers.results(ranges, bar.wait)
            return
        at_once = threads if threads != "auto" else cpus if sample_s >= _TINY_S else 1
        self.made_by = f"{at_once} threads" if at_once > 1 else "one thread"
        yield from concurrently(self.write_range, ranges, at_once, on_wait=bar.wait)

    def _read_ahead(self, ranges: Iterable[SampleRange]) -> Iterator[SampleRange]:
        """Yield ranges, and let the system read the files of the next ones, because workers read one file at a time."""
        read_ahead = getattr(self._maker.source, "read_ahead", None)
        waiting: deque[SampleRange] = deque()
        for samples in ranges:
            if read_ahead is not None:
                numbers = self._numbers[samples.split][samples.start : samples.stop]
                read_ahead([self._maker.items[number] for number in numbers])
            waiting.append(samples)
            if len(waiting) > _READ_AHEAD:
                yield waiting.popleft()
        yield from waiting

    def _described(self, samples: SampleRange) -> str:
        numbers = self._numbers[samples.split]
        first, last = (self._maker.path(numbers[at]) for at in (samples.start, samples.stop - 1))
        return f"{first!r} to {last!r}"

    def _write_arriving(self, threads: Threads, bar: ProgressBar) -> Iterator[WrittenRange]:
        """Make samples as their files arrive.

        Reading and making are separate, so a hanging read can be abandoned, and no more samples are made at once than
        there are CPUs.
        """
        maker = self._maker
        # One file may be the source of several samples.
        places: dict[Item, list[tuple[str, int, int]]] = {}
        for split, numbers in self._numbers.items():
            for index, number in enumerate(numbers):
                places.setdefault(maker.items[number], []).append((split, index, number))
        reader = SampleReader(maker.source, threads, self._retries, bar.wait, is_strict=maker.is_strict)

        def write(block: Block) -> list[WrittenRange]:
            data, written = reader.data(block), []
            for split, index, number in places[block.item]:
                written.append(self._written_of(SampleRange(split, index, index + 1), [number], [data]))
                # The results are taken later, once more files have arrived.
                if self._arrival is not None:
                    self._arrival.add(split, index, written[-1].crcs)
            return written

        with reader, closing(reader.items(self._in_order(places))) as blocks:
            for several in concurrently(write, blocks, "auto"):
                yield from several
        self.made_by = "threads, as files arrived"

    def _in_order(self, places: Mapping[Item, object]) -> Iterator[Item]:
        """Yield each item once, those of wanted samples first."""
        if self._arrival is None:
            yield from places
            return
        left = set(places)
        for split, index in self._arrival.samples():
            if not left:
                return
            item = self._maker.items[self._numbers[split][index]]
            if item in left:
                left.discard(item)
                yield item


def _row_bytes(made: SampleField, column: ColumnValues) -> npt.NDArray[np.uint8]:
    if isinstance(column, np.ndarray):
        rows = column
    else:
        rows = np.empty((len(column), *made.shape), made.dtype)
        for at, value in enumerate(column):
            rows[at] = value
    return rows.reshape(-1).view(np.uint8).reshape(len(column), made.row_bytes)
