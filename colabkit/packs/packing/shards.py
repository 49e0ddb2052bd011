"""A pack of several files: shards written whole one by one, here or by tasks of an executor, and at last the index.

Shards are written into a hidden folder beside the index, which one process at a time has, and which is kept when it is
interrupted. When all are there they are moved to their names, and the index is written. A list of the names that are
moved or replaced lies in the hidden folder meanwhile: what is at these names is ours, whoever kills us when.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colabkit.foundation import BadImage, ColabkitError, ProgressBar, TargetExists, cannot, file_changes, partials
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.format.pack_file import is_pack, read_pack
from colabkit.packs.packing.executors import Task, run_tasks
from colabkit.packs.packing.filling import too_many_bad
from colabkit.packs.packing.index import names_in, write_index
from colabkit.packs.packing.plan import PackPlan, digest_of
from colabkit.packs.packing.reading import SampleReading
from colabkit.packs.packing.writing import Written, none_good, whole_pack, write_pack
from colabkit.storage import Retries, Threads, Wanted

SHARD_BYTES = 256 << 20
"""What a shard holds where an executor packs and nothing else was asked for."""

_OWN = "own"  # the file with the names that are ours, which also keeps the folder
_SIGN = "wanted-"
_PROBED = 16
_LIFE_S = 1.0


def write_shards(
    plan: PackPlan,
    final: Path,
    threads: Threads,
    bar: ProgressBar,
    *,
    shard_bytes: int,
    executor: concurrent.futures.Executor | None,
    resume: bool,
    replace: bool,
) -> Written:
    """Write a plan to shards beside `final`, and there the index that names them.

    Args:
        plan: what the pack will hold.
        final: of the index.
        threads: files read at once, or `"auto"`.
        bar: advances by each sample.
        shard_bytes: about how large each is.
        executor: runs one task a shard; None writes them one after the other.
        resume: whether whole shards of an interrupted call are taken over.
        replace: whether what is at `final` is replaced.

    Raises:
        TargetExists: if something is at `final` and `replace` is false, or something else at the name of a shard.
        NotEnoughSpace: before anything is read, if the pack cannot fit.
        BadImage, BadSource: if too many samples are bad, or all.
        PackingFailed: if the executor fails.
    """
    final = final.absolute()
    sizes = _sample_bytes(plan)
    ranges = _ranges(sizes, shard_bytes)
    names = [f"{final.stem}-{number:05d}{final.suffix}" for number in range(len(ranges))]
    with _kept_beside(final, bar) as kept:
        if not replace:
            _check_free(plan, final)
        work = _digest(plan, ranges)
        is_same = resume and kept.record.get("work") == work and plan.about["plan"] is not None
        kept.note(path=os.fspath(final), work=work)
        if not is_same:
            file_changes.remove(kept.data)
        for sign in kept.folder.glob(f"{_SIGN}*"):
            file_changes.remove(sign)
        file_changes.make_folder(kept.data)
        shards = _Shards(plan, kept, names, ranges, bar)
        if is_same:
            shards.take_over([] if os.path.lexists(final) else [final.with_name(name) for name in _own(kept)])
        file_changes.check_space(
            plan.act, int(sum(sizes[slice(*ranges[number])].sum() for number in shards.missing)), final
        )
        if executor is None:
            shards.write(threads)
        else:
            shards.run(threads, executor)
        ordered = [shards.written[number] for number in range(len(names))]
        if sum(len(one.bad) for one in ordered) == plan.samples:
            raise none_good(plan)
        full = [name for name, one in zip(names, ordered, strict=True) if one.counts]
        infos = _published(plan, kept, final, full, replace=replace)
        seal, counts = write_index(plan, final, infos, ordered, replace=replace)
        kept.start_over()
    bad = tuple(one for shard in ordered for one in shard.bad)
    return Written(seal, counts, bad, sum(one.retries for one in ordered), shards.how or "an earlier call")


def write_single(plan: PackPlan, final: Path, threads: Threads, bar: ProgressBar, *, replace: bool) -> Written:
    """Write a plan to one file, as `write_pack()`; the shards of a pack that it replaces are removed behind it."""
    final = final.absolute()
    reclaim(final)
    old = names_in(final) if replace else []
    if not old:
        return write_pack(plan, final, threads, bar, replace=replace)
    with _kept_beside(final, bar) as kept:
        kept.note(path=os.fspath(final), work="")
        _add_own(kept, old)
        try:
            written = write_pack(plan, final, threads, bar, replace=True)
        except BaseException:
            kept.start_over()  # the old pack stays
            raise
        _remove_own(kept, final, but=[])
        kept.start_over()
    return written


def reclaim(final: Path) -> None:
    """Remove what interrupted calls left of shards beside `final`, if no process works there."""
    final = final.absolute()
    kept = partials.KeptPartial(final.parent, _identity(final))
    if kept.is_begun() and not kept.is_busy():
        with kept:
            _remove_own(kept, final, but=names_in(final))
            kept.start_over()


class _Shards:
    """The shards of a plan, and what is written of them.

    Args:
        plan: of the whole pack.
        kept: the hidden folder.
        names: of the shards.
        ranges: their samples, counted through all splits.
        bar: advances by each sample.
    """

    def __init__(
        self,
        plan: PackPlan,
        kept: partials.KeptPartial,
        names: Sequence[str],
        ranges: Sequence[tuple[int, int]],
        bar: ProgressBar,
    ) -> None:
        self.written: dict[int, Written] = {}
        self.how = ""
        self._plan = plan
        self._kept = kept
        self._paths = [kept.data / name for name in names]
        self._ranges = ranges
        self._bar = bar
        self._life = 0.0

    @property
    def missing(self) -> list[int]:
        """The numbers of the shards that are not written."""
        return [number for number in range(len(self._paths)) if number not in self.written]

    def take_over(self, moved: Sequence[Path]) -> None:
        """Take over whole shards from the hidden folder, and those that were moved to their names already."""
        places = {path.name: path for path in moved}
        for number, (start, stop) in enumerate(self._ranges):
            path, about = self._paths[number], self._about(number)
            found = whole_pack(path, about) or (whole_pack(places[path.name], about) if path.name in places else None)
            if found is not None:
                self.written[number] = found
                self._bar.advance(stop - start)
        self._check_bad()

    def write(self, threads: Threads) -> None:
        """Write the missing shards here, one after the other."""
        for number in self.missing:
            self.written[number] = write_pack(self._part(number), self._paths[number], threads, self._bar, replace=True)
            self.how = self.written[number].how
            self._check_bad()

    def run(self, threads: Threads, executor: concurrent.futures.Executor) -> None:
        """Write the missing shards by tasks of an executor."""
        source = self._plan.maker.source
        if threads == "auto" and (source is None or not source.can_hang):
            threads = 1
        sign = self._kept.folder / f"{_SIGN}{uuid.uuid4().hex}"
        missing = self.missing
        tasks = {number: Task(self._part(number), self._paths[number], sign, threads) for number in missing}
        with closing(run_tasks(self._plan.act, tasks, executor, sign, self._wait)) as results:
            for number, written in results:
                self.written[number] = written
                self._bar.advance(tasks[number].plan.samples)
                self._check_bad()
        self.how = "tasks of an executor" if missing else ""

    def _part(self, number: int) -> PackPlan:
        return changed(self._plan.part(*self._ranges[number]), about=self._about(number))

    def _about(self, number: int) -> dict[str, Any]:
        """Return what a shard says of itself: which it is, too."""
        return {**self._plan.about, "left_out": (), "shard": [number, len(self._ranges), *self._ranges[number]]}

    def _wait(self) -> None:
        self._bar.wait()
        if time.monotonic() - self._life > _LIFE_S:
            self._life = time.monotonic()
            self._kept.show_life()

    def _check_bad(self) -> None:
        """Refuse more bad samples in all shards together than are allowed."""
        bad = [one for number in sorted(self.written) for one in self.written[number].bad]
        if len(bad) > self._plan.most_bad:
            raise too_many_bad(self._plan, bad)


def _sample_bytes(plan: PackPlan) -> npt.NDArray[np.int64]:
    """Return about how many bytes each sample takes, counted through all splits."""
    sizes = np.full(plan.samples, sum(made.row_bytes for made in plan.maker.fields), np.int64)
    if known := plan.lengths():
        sizes += np.concatenate(list(known.values()))
    if plan.spooled:
        sizes += _spooled_bytes(plan)
    return sizes


def _spooled_bytes(plan: PackPlan) -> int:
    """Return how many bytes the fields of a sample have whose lengths are not known, by making some samples."""
    maker, source = plan.maker, plan.maker.source
    every = np.concatenate(list(plan.splits.values()))
    some = every[np.unique(np.linspace(0, len(every) - 1, _PROBED, dtype=np.int64))].tolist()
    data = dict.fromkeys(some, b"")
    if source is not None:
        if getattr(source, "is_sequential", False):
            return int(plan.about["source_bytes"]) // plan.samples
        numbers = {maker.item(number): number for number in some}
        reading = SampleReading(source, "auto", Retries(), is_strict=plan.on_bad == "raise")
        with reading:
            blocks = reading.blocks(Wanted(item, 0, item.size) for item in numbers)
            read = {numbers[block.item]: reading.data(block) for block in blocks}
        data = {number: found for number, found in read.items() if isinstance(found, bytes)}
    found = []
    for number, whole in data.items():
        with contextlib.suppress(BadImage):
            made = zip(maker.fields, maker.make(number, whole), strict=True)
            found.append(sum(len(value) for field, value in made if field in plan.spooled))
    return sum(found) // max(1, len(found))


def _ranges(sizes: npt.NDArray[np.int64], shard_bytes: int) -> list[tuple[int, int]]:
    """Return which samples, counted through all splits, go into each shard: at least one, and as many bytes in each."""
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    count = max(1, min(len(sizes), round(total / shard_bytes)))
    bounds = [0]
    for number in range(1, count):
        bound = int(np.searchsorted(ends, total * number / count, "right"))
        if bound > bounds[-1]:
            bounds.append(bound)
    return list(zip(bounds, [*bounds[1:], len(sizes)], strict=True))


def _digest(plan: PackPlan, ranges: Sequence[tuple[int, int]]) -> str:
    """Return what tells the shards of a plan from all others: content, columns, and times of the files."""
    about = {name: value for name, value in plan.about.items() if name != "options"}  # which holds timings
    made = [[one.field.name, list(one.shape), one.dtype, one.field.is_ragged] for one in plan.maker.fields]
    times = b""
    if plan.maker.source is not None:
        numbers = np.concatenate(list(plan.splits.values())).tolist()
        times = np.fromiter((plan.maker.item(number).mtime_ns for number in numbers), np.int64, len(numbers)).tobytes()
    digest = hashlib.sha256(times)
    for table in plan.tables:
        values = table.values
        whole = values.tobytes() if isinstance(values, np.ndarray) else b"".join([blob + b"\0" for blob in values])
        digest.update(whole)
    return digest_of(about, made, ranges, digest.hexdigest())


def _identity(final: Path) -> str:
    return hashlib.sha256(b"shards of " + os.fsencode(final.name)).hexdigest()


def _kept_beside(final: Path, bar: ProgressBar) -> partials.KeptPartial:
    """Return the hidden folder of a pack, which waits for a process that has it and still moves."""
    return partials.KeptPartial(final.parent, _identity(final), bar.wait)


def _own(kept: partials.KeptPartial) -> list[str]:
    """Return the names beside the hidden folder that belong to this pack."""
    try:
        return list(json.loads((kept.folder / _OWN).read_bytes()))
    except (OSError, ValueError):
        return []


def _add_own(kept: partials.KeptPartial, names: Collection[str]) -> None:
    path = kept.folder / _OWN
    new = path.with_suffix(".new")
    file_changes.remove(new)
    file_changes.write_file(new, json.dumps(sorted({*_own(kept), *names})).encode())
    file_changes.rename(new, path)


def _remove_own(kept: partials.KeptPartial, final: Path, but: Collection[str]) -> None:
    for name in _own(kept):
        if name not in but and is_pack(final.with_name(name)):
            file_changes.remove(final.with_name(name))


def _check_free(plan: PackPlan, path: Path) -> None:
    if os.path.lexists(path):
        found = f"{str(path)!r} was made meanwhile"
        raise TargetExists(cannot(plan.act, found, "a free path", "Run it again"))


def _published(
    plan: PackPlan, kept: partials.KeptPartial, final: Path, names: Sequence[str], *, replace: bool
) -> list[PackInfo]:
    """Move all shards to their names, where some may be already, and return them; nothing moves if one is taken."""
    old = names_in(final) if replace else []
    own = {*_own(kept), *old}
    for name in names:
        path, to = kept.data / name, final.with_name(name)
        is_free = not os.path.lexists(to) or not os.path.lexists(path) or (name in own and is_pack(to))
        if not is_free and not _is_same(path, to):
            found, needed = f"{str(to)!r} is in the way", "a free path for each shard"
            raise TargetExists(cannot(plan.act, found, needed, "Remove it, or choose another path"))
    if not replace:
        _check_free(plan, final)
    _add_own(kept, {*old, *names})
    if old:
        file_changes.remove(final)  # without its index a pack of shards is absent, never half of it
    _remove_own(kept, final, but=names)
    for name in names:
        if os.path.lexists(kept.data / name):
            file_changes.rename(kept.data / name, final.with_name(name))
    return [read_pack(final.with_name(name)) for name in names]


def _is_same(path: Path, other: Path) -> bool:
    try:
        return read_pack(path).seal == read_pack(other).seal
    except ColabkitError:
        return False
