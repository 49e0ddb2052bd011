"""Packs of shards as sources: the shards that an index lists belong to it when it is copied."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

from colabkit.foundation import SourceMissing, cannot
from colabkit.storage.sources.folder import FileSource
from colabkit.storage.sources.items import SourceKind
from colabkit.storage.sources.manifest import ManifestSource

# The start of a pack, its metadata, and its dataset of long metadata, as in `colabkit.packs.format`.
_PACK_START = b"colabkit pack "
_META = "colabkit_meta"
_NOTES = "colabkit_notes"


class ShardedFile(ManifestSource):
    """The index of a pack of shards, which is the first item, and its shards."""

    kind: ClassVar[SourceKind] = "file"


def listed_shards(act: str, path: Path) -> list[FileSource]:
    """Return the shards that the file at `path` lists; none if it is not the index of a pack of shards.

    Raises:
        SourceMissing: if a shard is missing.
    """
    shards = [FileSource(path.with_name(os.path.basename(name))) for name in _listed_names(path)]
    if missing := [shard.path.name for shard in shards if not shard.path.is_file()]:
        found = f"the shard {missing[0]!r} is missing"
        next_step = "Copy all shards next to the index, or pack the data again"
        raise SourceMissing(cannot(act, found, "all shards in the folder of the index", next_step))
    return shards


def _listed_names(path: Path) -> list[str]:
    with path.open("rb") as start:
        if start.read(len(_PACK_START)) != _PACK_START:
            return []
    import h5py

    try:
        with h5py.File(path, "r", locking=False) as file:
            meta: dict[str, Any] = json.loads(file.attrs[_META])
            if _NOTES in file:
                meta |= json.loads(file[_NOTES][()].tobytes())
        return [shard["name"] for shard in meta.get("shards", ())]
    except (OSError, LookupError, ValueError, RuntimeError, TypeError):
        # A damaged pack is copied like any other file; opening it reports the damage.
        return []
