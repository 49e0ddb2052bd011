"""The whole data set in the memory of a device: batches are gathered there, and the host does next to nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from colabkit.loading.loader.feeds import Column
from colabkit.loading.loader.gather import RowGather
from colabkit.loading.loader.portions import Portion
from colabkit.loading.loader.structures import mapped
from colabkit.loading.loader.workers import Batch
from colabkit.packs import stack_samples

_STEP_BYTES = 64 << 20


class Resident:
    """All rows of a feed on a device.

    Args:
        columns: fields by name; those that are rows are copied to the device, others are read when they are needed.
        device: where to; also an attribute.
    """

    def __init__(self, columns: Mapping[str, Column], device: torch.device) -> None:
        self.device = device
        self._columns = [
            column.on(device, _STEP_BYTES) if isinstance(column, RowGather) else column for column in columns.values()
        ]

    def batches(self, portion: Portion) -> Iterator[Batch]:
        """Yield the batches of a portion, gathered on the device at once."""
        numbers = torch.from_numpy(portion.numbers).to(self.device, non_blocking=True)  # or the host would wait for it
        values: list[Any] = []
        for column in self._columns:
            if isinstance(column, RowGather):
                memory = torch.empty(len(numbers) * column.row_bytes, dtype=torch.uint8, device=self.device)
                values.append(column.gather(numbers, memory))
            else:
                assert callable(column)
                values.append(mapped(column(portion.numbers), self._sent))
        start = 0
        for size, reached in zip(portion.sizes, portion.reached, strict=True):
            stop = start + size
            parts = [stack_samples(value[start:stop]) for value in values]
            yield Batch(parts, portion.positions[start:stop], reached)
            start = stop

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)
