"""Rows that only have to be gathered are, a few batches at a time, where they are asked for.

A gather of some megabytes takes less than a millisecond, so all that is done beside it counts. Its target stays in a
processor's cache when two small buffers take turns: the user holds one while the other is filled.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from colabkit.foundation import LoaderMeters
from colabkit.loading.loader.feeds import Feed
from colabkit.loading.loader.gather import RowGather
from colabkit.loading.loader.making import sliced
from colabkit.loading.loader.portions import Portion
from colabkit.loading.loader.slots import empty_bytes
from colabkit.loading.loader.workers import Batch

_GATHERED_BYTES = 5 << 20  # at once; two buffers of this size stay in a third-level cache
_SMALL_ROW = 256  # bytes; such fields are gathered for a whole portion at once
_KEPT_SLOTS = 4


class DirectRows:
    """Makes batches of rows in the thread that asks for them.

    Args:
        feed: what they consist of.
        batch_size: samples of a batch.
        meters: count the parts `gather` and `read`.
    """

    def __init__(self, feed: Feed, batch_size: int, meters: LoaderMeters) -> None:
        self._columns = [*feed.columns.values()]
        self._meters = meters
        rows = [column for column in self._columns if isinstance(column, RowGather)]
        self._row_bytes = sum(column.row_bytes for column in rows)
        largest = max((column.row_bytes for column in rows), default=1)
        self._batches_at_once = max(1, _GATHERED_BYTES // (batch_size * max(1, largest)))
        samples = min(self._batches_at_once * batch_size, max(1, feed.count))  # a few batches are larger
        self._slots = {
            place: _Slots(column, samples)
            for place, column in enumerate(self._columns)
            if isinstance(column, RowGather) and column.row_bytes > _SMALL_ROW
        }

    def made(self, portion: Portion) -> Generator[tuple[float, list[Batch]], None, None]:
        """Yield the batches of a portion, those gathered together in a list, backwards, and the seconds it took."""
        clock, together, gather_s, given = time.perf_counter, self._batches_at_once, 0.0, 0
        sizes, positions, reached = portion.sizes, portion.positions, portion.reached
        starts = [*itertools.accumulate(sizes, initial=0)]
        steps = [*starts[:-1:together], starts[-1]]
        numbers = torch.from_numpy(portion.numbers)
        began = clock()
        small = {
            place: column.gathered(numbers).split_with_sizes(sizes)
            for place, column in enumerate(self._columns)
            if isinstance(column, RowGather) and place not in self._slots
        }
        gathered = numbers.split_with_sizes([stop - start for start, stop in itertools.pairwise(steps)])
        try:
            for first, rows in zip(range(0, len(sizes), together), gathered, strict=True):
                some = sizes[first : first + together]
                values = []
                for place, column in enumerate(self._columns):
                    if place in self._slots:
                        values.append(self._slots[place].gather(rows, some))
                    elif place in small:
                        values.append(small[place][first : first + together])
                    else:
                        values.append(self._read(column, rows.numpy(), some))
                batches = [
                    Batch(fields, positions[starts[place] : starts[place + 1]], reached[place], was_ready=False)
                    for place, fields in enumerate(zip(*values, strict=True), first)
                ]
                del values  # or a buffer could not be used again when the user lets go of its batches
                batches.reverse()
                made_s = clock() - began
                gather_s += made_s
                given += len(rows)
                yield made_s, batches
                began = clock()
        finally:
            self._meters.add("gather", given, given * self._row_bytes, gather_s)

    def _read(self, column: Any, numbers: npt.NDArray[np.int64], sizes: tuple[int, ...]) -> list[Any]:
        with self._meters.busy("read", 0, 0):
            found = column(numbers)
        return list(sliced(found, sizes))


class _Slots:
    """Buffers that rows are gathered into, each used again when no tensor shares its memory any more.

    Args:
        rows: what to gather.
        samples: of a buffer.
    """

    def __init__(self, rows: RowGather, samples: int) -> None:
        self._rows = rows
        self._samples = samples
        self._slots: deque[_Slot] = deque(maxlen=_KEPT_SLOTS)
        self._lock = threading.Lock()

    def gather(self, numbers: Tensor, sizes: tuple[int, ...]) -> Sequence[Tensor]:
        """Return the rows of some samples, parted into batches."""
        with self._lock:  # two threads may iterate one loader
            for slot in self._slots:
                if slot.is_free:
                    break
            else:
                slot = _Slot(self._rows, max(self._samples, len(numbers)))
                self._slots.append(slot)
            wide, found = slot.of(len(numbers))
        self._rows.gather_wide(numbers, wide)
        return (found,) if len(sizes) == 1 else found.split_with_sizes(sizes)


class _Slot:
    """A buffer, and how to see whether any tensor shares it.

    torch keeps the array that a tensor was made from alive as long as any tensor has its storage; each of these arrays
    refers to the one that owns the memory, whose references so tell of them.
    """

    def __init__(self, rows: RowGather, samples: int) -> None:
        self._rows = rows
        self._make(samples)

    def _make(self, samples: int) -> None:
        memory = empty_bytes(samples * self._rows.row_bytes).reshape(samples, -1)
        self._samples = samples
        with torch.inference_mode(False):  # what is made in that mode cannot be filled again outside
            self._wide = self._rows.wide(torch.from_numpy(memory).view(-1), samples)
        shaped = self._rows.shaped_array(memory)
        self._is_shaped = shaped is not None
        self._array = memory if shaped is None else shaped
        del memory, shaped
        self._owner = self._array.base
        self._own_references = sys.getrefcount(self._owner)

    @property
    def is_free(self) -> bool:
        """Whether nobody sees its content."""
        return sys.getrefcount(self._owner) == self._own_references

    def of(self, count: int) -> tuple[Tensor, Tensor]:
        """Return its first `count` rows as what is to be filled, and as they are; only while it is free."""
        if count > self._samples:  # as the last batch of several ranks may be, and any of a sampler of the user's own
            self._make(count)
        wide = self._wide if count == self._samples else self._wide[:count]
        found = torch.from_numpy(self._array[:count])
        return wide, found if self._is_shaped else self._rows.shaped(found.view(-1), count)
