"""The samples of a pack that another thread is still writing; reading a sample waits until it has arrived."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from colabkit.packs.dataset.columns import FieldBatch, Flags
from colabkit.packs.dataset.hdf5_reader import file_stamp
from colabkit.packs.dataset.open_split import OpenSplit, open_sealed, read_labels
from colabkit.packs.dataset.samples import SingleFileSamples, open_columns
from colabkit.packs.format.arrival import Arrival
from colabkit.packs.format.layout import Indices, PackInfo


class ArrivingSamples(SingleFileSamples):
    """The samples of one split of a pack that is being written; they stay readable when the file gets its final name.

    Args:
        arrival: the record of the pack.
        written: description of the unsealed file.
        path: final path of the pack, for messages.
        split: name of the split.
    """

    def __init__(self, arrival: Arrival, written: PackInfo, path: Path, split: str) -> None:
        checked = [field.name for field in written.sample_fields()]
        super().__init__(path, split, open_columns(written, split), checked, arrival.crcs[split])
        self._arrival = arrival
        self._is_watched = False

    @property
    def is_complete(self) -> bool:
        """Whether all samples have arrived."""
        return self._arrival.is_complete

    def want(self, rows: Indices) -> None:
        """Ask for samples before all others, in the given order."""
        self._arrival.want(self.split, rows)

    def wait_for(self, rows: Indices, on_wait: Callable[[], None] | None = None) -> None:
        """Wait until samples have arrived; an exception raised by `on_wait` ends the wait."""
        self._arrival.wait_for(self.split, rows, on_wait)

    def wait_for_all(self) -> None:
        """Wait until the pack is complete."""
        self._arrival.wait_for_all()

    def one(self, row: int) -> tuple[Any, ...]:
        """Return the fields of one sample, checked against its CRC."""
        self.wait_for(np.array([row]))
        return super().one(row)

    def encoded(self, row: int) -> bytes:
        """Return the stored bytes of `X` of one sample, checked against its CRC."""
        self.wait_for(np.array([row]))
        return super().encoded(row)

    def many(self, rows: Indices) -> tuple[FieldBatch, ...]:
        """Return the fields of several samples."""
        self.wait_for(rows)
        return super().many(rows)

    def column(self, name: str, rows: Indices) -> FieldBatch:
        """Return one field of several samples."""
        self.wait_for(rows)
        return super().column(name, rows)

    def matches(self, rows: Indices) -> Flags:
        """Return whether each sample matches its CRC, `bool [B]`."""
        self.wait_for(rows)
        return super().matches(rows)

    def has_changed(self) -> bool:
        """Return whether the complete file was modified in place since the last call.

        Raises:
            Corrupt: if the file became shorter.
        """
        if not self.is_complete:
            return False
        if not self._is_watched:
            self._stamp, self._is_watched = file_stamp(self.path), True
        return super().has_changed()


def open_arriving(arrival: Arrival, written: PackInfo, info: PackInfo, split: str) -> OpenSplit:
    """Return a split of a pack that is being written.

    Args:
        arrival: the record of the pack.
        written: description of the unsealed file.
        info: the same description with the final path.
        split: name of the split.
    """
    samples = ArrivingSamples(arrival, written, info.path, split)
    reopen: Any = _SplitOpener(arrival, split)
    return OpenSplit(info, split, samples, read_labels(written, split), reopen)


class _SplitOpener:
    """A function that opens a split of the complete pack; pickling it waits until the pack is complete."""

    def __init__(self, arrival: Arrival, split: str) -> None:
        self._arrival = arrival
        self._split = split

    def __call__(self) -> OpenSplit:
        return self._complete()()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (open_sealed, *self._complete().args)

    def _complete(self) -> partial[OpenSplit]:
        info = self._arrival.wait_for_all()
        return partial(open_sealed, info.path.absolute(), info.seal, self._split)
