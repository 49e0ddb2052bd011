"""How one file of a pack comes to be: space reserved, rows filled in, tables written, sealed, renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colabkit.foundation import (
    BadSource,
    ColabkitError,
    ProgressBar,
    TargetExists,
    cannot,
    file_changes,
    format_things,
    partials,
)
from colabkit.packs.format.pack_file import create_pack, read_pack, seal_pack
from colabkit.packs.packing.compaction import Compaction
from colabkit.packs.packing.filling import Bad, Filling, too_many_bad
from colabkit.packs.packing.plan import PackPlan
from colabkit.packs.packing.tables import write_tables
from colabkit.storage import Retries, Threads


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a plan.

    Attributes:
        seal: of the file; empty if there is none.
        counts: samples of each split.
        bad: samples that could not be made.
        retries: reads that were tried again.
        how: what made the samples: threads, processes.
    """

    seal: str
    counts: Mapping[str, int]
    bad: tuple[Bad, ...]
    retries: int
    how: str


def write_pack(plan: PackPlan, final: Path, threads: Threads, bar: ProgressBar, *, replace: bool = False) -> Written:
    """Write a plan to one sealed file.

    Rows are written where they stay. Only where samples have lengths that their making tells, or bad ones leave gaps,
    are they written beside it first, and copied when all is known. A shard without a good sample
    is not written.

    Args:
        plan: what it will hold.
        final: its path.
        threads: files read at once, or `"auto"`.
        bar: advances by each sample.
        replace: whether a file that is there is replaced.

    Raises:
        BadSource: if no sample is good.
        TargetExists: if something is there and `replace` is false.
        NotEnoughSpace: before anything is read, if the pack cannot fit.
    """
    retries = Retries()
    row_bytes = sum(made.row_bytes for made in plan.maker.fields)
    known = plan.lengths() or {}
    layout = plan.data_sets(plan.all_kept(), known)
    file_changes.check_space(plan.act, sum(one.size_bytes for one in layout), final)
    with partials.Partial(final) as pack:
        with contextlib.ExitStack() as stack:
            work = stack.enter_context(partials.Partial(final.with_name(f"{final.name}-work")))
            placed, crcs = create_pack(pack.path, layout, plan.meta(plan.counts))
            compaction = stack.enter_context(Compaction(plan, known, work.path))
            filling = Filling(plan, pack.path, placed, known, retries)
            syncing = stack.enter_context(file_changes.Syncing(pack.path))
            for done in stack.enter_context(contextlib.closing(filling.done(threads, bar))):
                compaction.add(done)
                syncing.written((done.chunk.stop - done.chunk.start) * row_bytes)
                if len(compaction.bad) > plan.most_bad:
                    raise too_many_bad(plan, compaction.bad)
                bar.advance(done.chunk.stop - done.chunk.start)
            if compaction.is_needed:
                if len(compaction.bad) == plan.samples and not plan.is_part:
                    raise none_good(plan)
                if not compaction.counts:
                    return Written("", {}, tuple(compaction.bad), retries.count, filling.how)
                layout = plan.data_sets(compaction.kept, compaction.lengths)
                file_changes.check_space(plan.act, sum(one.size_bytes for one in layout), final)
                rows, work_placed = compaction.take_over(pack.path), placed
                placed, crcs = create_pack(pack.path, layout, plan.meta(compaction.counts, compaction.listed_bad()))
                compaction.copy(rows, work_placed, pack.path, placed)
            crcs |= write_tables(plan, pack.path, placed, compaction)
            seal = seal_pack(pack.path, placed.values(), crcs)
        if not replace and os.path.lexists(final):
            found = f"{str(final)!r} was made meanwhile"
            raise TargetExists(cannot(plan.act, found, "a free path", "Run it again"))
        pack.publish(replace=replace)
    return Written(seal, compaction.counts, tuple(compaction.bad), retries.count, filling.how)


def whole_pack(path: Path, about: Mapping[str, Any]) -> Written | None:
    """Return what an earlier call wrote to `path`, if it is a finished pack of the plan with this `about`."""
    try:
        info = read_pack(path)
    except ColabkitError:
        return None
    if any(info.meta.get(name) != about.get(name) for name in ("plan", "shard", "encoding")):
        return None
    bad = tuple(Bad(split, index or 0, name, why) for split, index, name, why in info.meta["bad"])
    return Written(info.seal, info.meta["splits"], bad, 0, "an earlier call")


def none_good(plan: PackPlan) -> BadSource:
    """Return the error for a source without a good sample."""
    return BadSource(
        cannot(
            plan.act, f"no good one among {format_things(plan.samples, 'sample')}", "at least one", "Check the source"
        )
    )
