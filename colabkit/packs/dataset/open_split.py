"""An opened split: its samples, its labels, and a record of the samples already checked against their CRCs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colabkit.foundation import InvalidOption, cannot
from colabkit.packs.dataset.columns import Flags
from colabkit.packs.dataset.samples import JoinedSamples, ShardedSamples, SingleFileSamples, file_samples, read_table
from colabkit.packs.format.layout import LABELS, Indices, PackInfo
from colabkit.packs.format.pack_file import read_pack

# Interval in seconds at which the files of an open split are examined for changes.
_LOOK_EVERY_S = 1.0


@dataclass(eq=False)
class OpenSplit:
    """An opened split, shared by all views of it in this process.

    Attributes:
        info: description of the pack.
        split: name of the split.
        samples: all fields except the labels.
        labels: labels, `[N]` or `[N, K]`; None if there are none.
        reopen: function that opens the split in another process.
        is_checked: whether each sample has matched its CRC in this process, `bool [N]`.
    """

    info: PackInfo
    split: str
    samples: SingleFileSamples | JoinedSamples
    labels: Tensor | None
    reopen: partial[OpenSplit]
    is_checked: Flags = field(init=False, repr=False)
    _look_at_s: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.is_checked = np.zeros(self.info.count(self.split), bool)

    def one(self, row: int) -> tuple[Any, ...]:
        """Return the fields of one sample except the labels, checked against its CRC.

        Raises:
            Corrupt: if the sample does not match its CRC, or a file became shorter.
        """
        self._look()
        return self.samples.one(row)

    def check(self, rows: Indices) -> None:
        """Check samples against their CRCs, each only once in this process.

        Raises:
            Corrupt: for the first sample that does not match its CRC, or if a file became shorter.
        """
        self._look()
        unchecked = rows[~self.is_checked[rows]]
        if len(unchecked):
            matches = self.samples.matches(unchecked)
            self.is_checked[unchecked[matches]] = True
            if not matches.all():
                raise self.samples.damage_error(unchecked.item(matches.argmin()))

    def check_files(self) -> None:
        """Make `check` recheck all samples if a file was modified in place since it was opened or last examined.

        Raises:
            Corrupt: if a file became shorter.
        """
        if self.samples.has_changed():
            self.is_checked[:] = False

    def _look(self) -> None:
        if time.monotonic() >= self._look_at_s:
            self.check_files()
            self._look_at_s = time.monotonic() + _LOOK_EVERY_S


def open_sealed(path: Path, seal: str, split: str) -> OpenSplit:
    """Return a split of the pack at `path`.

    Raises:
        InvalidOption: if the file at `path` has another seal, because another pack replaced it.
        Corrupt: if a table does not match its checksum.
    """
    info = read_pack(path)
    if info.seal != seal:
        act, found = f"reopen {str(path)!r}", "the path now holds another pack"
        raise InvalidOption(cannot(act, found, "", "Open the pack again, and create the dataset again"))
    samples = ShardedSamples(info, split) if info.shards else file_samples(info, split)
    return OpenSplit(info, split, samples, read_labels(info, split), partial(open_sealed, path, seal, split))


def read_labels(info: PackInfo, split: str) -> Tensor | None:
    """Return the labels of a split, checked against their CRC; None if there are none."""
    labels = torch.from_numpy(read_table(info, f"{LABELS}_{split}")) if LABELS in info.fields else None
    return labels.long() if labels is not None and info.meta["label_kind"] == "class" else labels
