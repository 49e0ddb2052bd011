"""The index of a pack of shards: their names and seals, and the labels of all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from colabkit.foundation import ColabkitError, file_changes, partials
from colabkit.packs.format.layout import LABELS, DataSet, Field, PackInfo
from colabkit.packs.format.pack_file import create_pack, read_pack, seal_pack
from colabkit.packs.packing.plan import PackPlan
from colabkit.packs.packing.writing import Written


def names_in(index: Path) -> list[str]:
    """Return the names of the shards of an index; none if there is no index."""
    try:
        return [Path(shard.name).name for shard in read_pack(index).shards]
    except ColabkitError:
        return []


def write_index(
    plan: PackPlan, final: Path, shards: Sequence[PackInfo], written: Sequence[Written], *, replace: bool
) -> tuple[str, dict[str, int]]:
    """Write the index of shards that lie beside it, and return its seal and how many samples each split has.

    Args:
        plan: of the whole pack.
        final: of the index.
        shards: in their order, those that there are.
        written: of all shards, in their order.
        replace: whether a file that is there is replaced.
    """
    counts = {
        split: total for split in plan.splits if (total := sum(shard.meta["splits"].get(split, 0) for shard in shards))
    }
    meta = {
        **plan.meta(counts, _bad(plan, written)),
        "shards": [{"name": one.path.name, "seal": one.seal, "splits": one.meta["splits"]} for one in shards],
    }
    tables: dict[str, Any] = {}
    if LABELS in plan.fields:
        for split in counts:
            name = Field(LABELS, "labels").data_set(split)
            tables[name] = np.concatenate([shard.table(name) for shard in shards if split in shard.splits])
    with partials.Partial(final) as partial:
        layout = [DataSet(name, table.shape, table.dtype.str) for name, table in tables.items()]
        placed, crcs = create_pack(partial.path, layout, meta)
        fd = file_changes.reopen(partial.path)
        try:
            for name, table in tables.items():
                data = np.ascontiguousarray(table).reshape(-1).view(np.uint8).data
                file_changes.write_at(fd, data, placed[name].offset, partial.path)
                crcs[name] = crc32(data)
        finally:
            os.close(fd)
        seal = seal_pack(partial.path, placed.values(), crcs)
        partial.publish(replace=replace)
    return seal, counts


def _bad(plan: PackPlan, written: Sequence[Written]) -> list[list[Any]]:
    """Return the bad samples of all shards, blank ones with their places in the whole pack."""
    before = dict.fromkeys(plan.splits, 0)
    found = []
    for shard in written:
        for bad in sorted(shard.bad, key=lambda one: (one.split, one.index)):
            place = before[bad.split] + bad.index if plan.on_bad == "blank" else None
            found.append([bad.split, place, bad.path, bad.why])
        for split, count in shard.counts.items():
            before[split] += count
    return found
