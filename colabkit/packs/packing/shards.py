"""Writes packs of several files: first the shards, in this process or in tasks of an executor, then their index.

Shards are written into a hidden folder next to the index. Only one call at a time uses that folder. The folder is kept
if the call is interrupted. Once all shards exist, they are moved to their final names and the index is written. A list
in the hidden folder names the files that are moved or replaced, so that the next call recognizes them if this one is
interrupted.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colabkit.foundation import (
    ColabkitError,
    ProgressBar,
    TargetExists,
    cannot,
    file_changes,
    interrupted_later,
    partials,
)
from colabkit.packs.format.arrival import Arrival
from colabkit.packs.format.layout import LABELS, DataSet, Field, Indices, PackInfo, Shard
from colabkit.packs.format.pack_file import create_pack, is_pack, read_pack, seal_pack
from colabkit.packs.packing.file_samples import FileSampleMaker
from colabkit.packs.packing.pack_plan import PackPlan, digest_of
from colabkit.packs.packing.pack_writer import (
    Attempts,
    WrittenPack,
    check_free,
    find_written,
    write_pack,
    write_table,
)
from colabkit.packs.packing.shard_tasks import ShardTask, ShardTasks, remove_attempts
from colabkit.storage import Threads

SHARD_BYTES = 256 << 20
"""Default shard size if an executor is given."""

# The file that lists the pack's files. It also prevents the removal of the hidden folder, which must be empty for that.
_OWN = "own"
_SIGN = "wanted-"
_ATTEMPTS = "attempts"
_PROBED = 16
_LIFE_S = 1.0


@dataclass(frozen=True)
class WriteOptions:
    """Options for writing a pack; see `pack()`, where `final` is called `to`."""

    final: Path
    threads: Threads
    shard_bytes: int | None
    executor: concurrent.futures.Executor | None
    resume: bool
    overwrite: bool
    retries: int = 0


def write_plan(plan: PackPlan, options: WriteOptions, bar: ProgressBar, arrival: Arrival | None = None) -> WrittenPack:
    """Write a plan to one file, whose samples may be read early with `arrival`, or to shards and their index.

    Raises:
        TargetExists: if a file at the pack's path must not be replaced, or a shard's path holds an unrelated file.
        NotEnoughSpace: if a file does not fit; raised before its samples are read if its size is known.
        BadImage: if more samples are bad than allowed.
        BadSource: if all samples are bad.
        PackingFailed: if the executor fails.
    """
    if options.shard_bytes is None:
        return _write_single(plan, options, bar, arrival)
    return _write_shards(plan, options, options.shard_bytes, bar)


def _write_shards(plan: PackPlan, options: WriteOptions, shard_bytes: int, bar: ProgressBar) -> WrittenPack:
    final, executor, replace = options.final.absolute(), options.executor, options.overwrite
    sizes = estimate_bytes(plan)
    ranges = divide_samples(sizes, shard_bytes)
    names = [f"{final.stem}-{number:05d}{final.suffix}" for number in range(len(ranges))]
    with ShardFolder(final, bar.wait) as kept:
        if not replace:
            check_free(plan, final)
        work = digest_shards(plan, ranges)
        is_same = options.resume and kept.record.get("work") == work and plan.about["plan"] is not None
        kept.note(path=os.fspath(final), work=work)
        if not is_same:
            file_changes.remove(kept.data)
        for sign in kept.folder.glob(f"{_SIGN}*"):
            file_changes.remove(sign)
        file_changes.make_folder(kept.data)
        shards = _ShardSet(plan, kept, names, ranges, bar)
        if is_same:
            shards.take_over([] if os.path.lexists(final) else kept.own)
        missing_bytes = sum(sizes[slice(*ranges[number])].sum() for number in shards.missing)
        file_changes.check_space(plan.act, int(missing_bytes), final)
        if executor is None:
            shards.write(options.threads)
        else:
            shards.run(options.threads, executor, options.retries)
        ordered = [shards.written[number] for number in range(len(names))]
        full = [name for name, one in zip(names, ordered, strict=True) if one.counts]
        listed = [ListedShard.of(info, info.path.name) for info in _publish(plan, kept, full, replace=replace)]
        seal, counts = write_index(plan, final, listed, ordered, replace=replace)
        kept.start_over()
    bad = tuple(one for shard in ordered for one in shard.bad)
    retries, made_by = sum(one.retries for one in ordered), shards.made_by or "an earlier call"
    return WrittenPack(seal, counts, bad, retries, made_by, shards.attempts)


def _write_single(plan: PackPlan, options: WriteOptions, bar: ProgressBar, arrival: Arrival | None) -> WrittenPack:
    """Write a plan to one file, then remove the shards of a pack that it replaced."""
    final, threads, replace = options.final.absolute(), options.threads, options.overwrite
    reclaim(final)
    old = _names_in(final) if replace else []
    if not old:
        return write_pack(plan, final, threads, bar, replace=replace, arrival=arrival)
    with ShardFolder(final, bar.wait) as kept:
        kept.note(path=os.fspath(final), work="")
        kept.add_own(old)
        try:
            written = write_pack(plan, final, threads, bar, replace=True, arrival=arrival)
        except BaseException:
            # The old pack remains, so its shards must not count as leftovers.
            kept.start_over()
            raise
        kept.remove_own()
        kept.start_over()
    return written


def reclaim(final: Path) -> None:
    """Remove shards that interrupted calls left next to `final`, unless another process is working there."""
    kept = ShardFolder(final.absolute())
    if kept.is_begun() and not kept.is_busy():
        with kept:
            kept.remove_own(but=_names_in(final))
            kept.start_over()


class ShardFolder(partials.KeptPartial):
    """The hidden folder of a sharded pack, with a list of the files next to the index that belong to the pack.

    Args:
        index: path of the index.
        on_wait: called several times a second while waiting for another process that uses the folder; None does not
            wait.
    """

    def __init__(self, index: Path, on_wait: Callable[[], None] | None = None) -> None:
        super().__init__(index.parent, hashlib.sha256(b"shards of " + os.fsencode(index.name)).hexdigest(), on_wait)
        self.index = index

    @property
    def own(self) -> list[str]:
        """Names of the files that belong to the pack."""
        try:
            return list(json.loads((self.folder / _OWN).read_bytes()))
        except (OSError, ValueError):
            return []

    def add_own(self, names: Collection[str]) -> None:
        """Add names to the list."""
        path = self.folder / _OWN
        new = path.with_suffix(".new")
        file_changes.remove(new)
        file_changes.write_file(new, json.dumps(sorted({*self.own, *names})).encode())
        file_changes.rename(new, path)

    def remove_own(self, but: Collection[str] = ()) -> None:
        """Remove the listed files that are packs, except those in `but`."""
        for name in self.own:
            if name not in but and is_pack(self.index.with_name(name)):
                file_changes.remove(self.index.with_name(name))


@dataclass
class _ShardSet:
    """The shards of a plan, written or missing.

    Attributes:
        plan: plan of the complete pack.
        kept: the hidden folder.
        names: file names of the shards.
        ranges: sample range of each shard, counted across all splits.
        bar: progress bar, advanced by samples.
        written: the shards already written, by number.
        made_by: workers that made the samples.
        attempts: attempts of an executor at shards.
    """

    plan: PackPlan
    kept: ShardFolder
    names: Sequence[str]
    ranges: Sequence[tuple[int, int]]
    bar: ProgressBar
    written: dict[int, WrittenPack] = field(default_factory=dict)
    made_by: str = ""
    attempts: Attempts = field(default_factory=Attempts)
    _life: float = 0.0

    @property
    def missing(self) -> list[int]:
        return [number for number in range(len(self.names)) if number not in self.written]

    def take_over(self, moved: Collection[str]) -> None:
        """Reuse complete shards in the hidden folder, and those in `moved` at their final path."""
        for number, (name, (start, stop)) in enumerate(zip(self.names, self.ranges, strict=True)):
            places = [self.kept.data, *([self.kept.folder.parent] if name in moved else [])]
            found = next(filter(None, (find_written(place / name, self._about(number)) for place in places)), None)
            if found is not None:
                self.written[number] = found
                self.bar.advance(stop - start)
        self._check_bad()

    def write(self, threads: Threads) -> None:
        for number in self.missing:
            path = self.kept.data / self.names[number]
            written = write_pack(self._shard(number), path, threads, self.bar, replace=True)
            self.written[number], self.made_by = written, written.made_by
            self._check_bad()

    def run(self, threads: Threads, executor: concurrent.futures.Executor, retries: int) -> None:
        threads = threads_of_tasks(self.plan, threads)
        sign, attempts = self.kept.folder / f"{_SIGN}{uuid.uuid4().hex}", self.kept.folder / _ATTEMPTS
        # A task that outlives an earlier call can no longer write.
        remove_attempts(attempts)
        tasks = {
            number: ShardTask(self._shard(number), self.kept.data / self.names[number], attempts, sign, threads)
            for number in self.missing
        }
        running = ShardTasks(self.plan.act, tasks, executor, retries, sign, attempts, self._wait)
        try:
            with closing(running.results()) as results:
                for number, written in results:
                    self.written[number] = written
                    self.bar.advance(tasks[number].plan.samples)
                    self._check_bad()
            self.attempts = running.count_attempts()
        finally:
            remove_attempts(attempts)
        self.made_by = running.made_by if tasks else ""

    def _shard(self, number: int) -> PackPlan:
        return self.plan.shard(*self.ranges[number], self._about(number))

    def _about(self, number: int) -> dict[str, Any]:
        return describe_shard(self.plan, self.ranges, number)

    def _wait(self) -> None:
        self.bar.wait()
        if time.monotonic() - self._life > _LIFE_S:
            self._life = time.monotonic()
            self.kept.show_life()

    def _check_bad(self) -> None:
        self.plan.check_bad([one for number in sorted(self.written) for one in self.written[number].bad])


def threads_of_tasks(plan: PackPlan, threads: Threads) -> Threads:
    """Return the threads of each task of an executor: one, unless the user chose a number or the source can hang."""
    can_hang = isinstance(plan.maker, FileSampleMaker) and plan.maker.source.can_hang
    return 1 if threads == "auto" and not can_hang else threads


def describe_shard(plan: PackPlan, ranges: Sequence[tuple[int, int]], number: int) -> dict[str, Any]:
    """Return the metadata of a shard."""
    return {**plan.about, "left_out": (), "shard": [number, len(ranges), *ranges[number]]}


def estimate_bytes(plan: PackPlan) -> Indices:
    """Return the approximate size of each sample in bytes, in the order of the splits."""
    sizes = np.full(plan.samples, plan.row_bytes, np.int64)
    if plan.lengths:
        sizes += np.concatenate(list(plan.lengths.values()))
    if plan.spooled:
        sizes += _spooled_bytes(plan)
    return sizes


def _spooled_bytes(plan: PackPlan) -> int:
    """Estimate the bytes per sample of fields of unknown length from some samples or a sequential source's size."""
    if isinstance(plan.maker, FileSampleMaker) and getattr(plan.maker.source, "is_sequential", False):
        return int(plan.about["source_bytes"]) // plan.samples
    every = plan.numbers
    some = every[np.unique(np.linspace(0, len(every) - 1, _PROBED, dtype=np.int64))].tolist()
    found = [
        sum(len(value) for made, value in zip(plan.maker.fields, sample, strict=True) if made in plan.spooled)
        for sample in plan.maker.examples(some)
    ]
    return sum(found) // max(1, len(found))


def divide_samples(sizes: Indices, shard_bytes: int) -> list[tuple[int, int]]:
    """Divide samples, counted across all splits, into shards of similar size with at least one sample each."""
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    count = max(1, min(len(sizes), round(total / shard_bytes)))
    bounds = [0]
    for number in range(1, count):
        bound = int(np.searchsorted(ends, total * number / count, "right"))
        if bound > bounds[-1]:
            bounds.append(bound)
    return list(zip(bounds, [*bounds[1:], len(sizes)], strict=True))


def digest_shards(plan: PackPlan, ranges: Sequence[tuple[int, int]]) -> str:
    """Return a digest of a plan's metadata, fields, columns and file times; equal digests allow reusing shards."""
    # Omit the options, because their note contains timings, which differ between calls.
    about = {name: value for name, value in plan.about.items() if name != "options"}
    made = [[one.name, list(one.shape), one.dtype, one.is_ragged] for one in plan.maker.fields]
    digest = hashlib.sha256()
    if isinstance(plan.maker, FileSampleMaker):
        items, numbers = plan.maker.items, plan.numbers.tolist()
        digest.update(np.fromiter((items[number].version_ns for number in numbers), np.int64, len(numbers)).tobytes())
    for table in plan.tables:
        values = table.values
        whole = values.tobytes() if isinstance(values, np.ndarray) else b"".join([blob + b"\0" for blob in values])
        digest.update(whole)
    return digest_of(about, made, ranges, digest.hexdigest())


def _publish(plan: PackPlan, kept: ShardFolder, names: Sequence[str], *, replace: bool) -> list[PackInfo]:
    """Move all shards to their final names and return their descriptions.

    If an unrelated file has one of the names, move nothing and raise `TargetExists`.
    """
    final = kept.index
    old = _names_in(final) if replace else []
    own = {*kept.own, *old}
    for name in names:
        path, to = kept.data / name, final.with_name(name)
        is_free = not os.path.lexists(to) or not os.path.lexists(path) or (name in own and is_pack(to))
        if not is_free and not _is_same(path, to):
            found = f"{str(to)!r}, the path of a shard, already exists and does not belong to this pack"
            raise TargetExists(cannot(plan.act, found, "", "Remove it, or choose another path"))
    if not replace:
        check_free(plan, final)
    kept.add_own({*old, *names})
    with interrupted_later():
        if old:
            # Remove the index first, so no reader finds a pack with only some of its shards.
            file_changes.remove(final)
        kept.remove_own(but=names)
        for name in names:
            if os.path.lexists(kept.data / name):
                file_changes.rename(kept.data / name, final.with_name(name))
    return [read_pack(final.with_name(name)) for name in names]


def _is_same(path: Path, other: Path) -> bool:
    try:
        return read_pack(path).seal == read_pack(other).seal
    except ColabkitError:
        return False


def _names_in(index: Path) -> list[str]:
    try:
        return [Path(shard.name).name for shard in read_pack(index).shards]
    except ColabkitError:
        return []


@dataclass(frozen=True)
class ListedShard:
    """A shard as the index lists it, its labels by split, and the digest of its samples, which the index also holds."""

    shard: Shard
    labels: Mapping[str, npt.NDArray[Any]]
    samples: str

    @classmethod
    def of(cls, info: PackInfo, name: str) -> ListedShard:
        """Return the entry of a complete shard under a file name."""
        field = info.fields.get(LABELS)
        labels = {} if field is None else {split: info.table(field.data_set(split)) for split in info.splits}
        return cls(Shard(name, info.seal, info.meta["splits"], info.path.stat().st_size), labels, info.samples_digest)


def write_index(
    plan: PackPlan, final: Path, listed: Sequence[ListedShard], written: Sequence[WrittenPack], *, replace: bool
) -> tuple[str, dict[str, int]]:
    """Write the index of some shards to a path, and return its seal and the number of samples in each split."""
    shards = [one.shard for one in listed]
    counts = {split: total for split in plan.splits if (total := sum(one.splits.get(split, 0) for one in shards))}
    meta = {**plan.meta(counts, _listed_bad(plan, written)), "shards": [asdict(one) for one in shards]}
    meta["samples"] = [one.samples for one in listed]
    tables = {}
    if LABELS in plan.fields:
        for split in counts:
            labels = [one.labels[split] for one in listed if split in one.labels]
            tables[Field(LABELS, "labels").data_set(split)] = np.concatenate(labels)
    with partials.Partial(final) as partial:
        layout = [DataSet(name, table.shape, table.dtype.str) for name, table in tables.items()]
        placed, crcs = create_pack(partial.path, layout, meta)
        with file_changes.descriptor(file_changes.reopen(partial.path)) as fd:
            crcs |= {name: write_table(fd, table, placed[name], partial.path) for name, table in tables.items()}
        seal = seal_pack(partial.path, placed.values(), crcs)
        partial.publish(replace=replace)
    return seal, counts


def _listed_bad(plan: PackPlan, written: Sequence[WrittenPack]) -> list[list[Any]]:
    before = dict.fromkeys(plan.splits, 0)
    found = []
    for shard in written:
        for bad in sorted(shard.bad, key=lambda one: (one.split, one.index)):
            place = before[bad.split] + bad.index if plan.on_bad == "blank" else None
            found.append([bad.split, place, bad.path, bad.why])
        for split, count in shard.counts.items():
            before[split] += count
    return found
