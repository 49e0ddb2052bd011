"""What the processes of one training tell each other: `torch.distributed`, or nothing where there is one process."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import distributed

T = TypeVar("T")

_AGREE_EVERY_S = 0.25
_AGREE_STEPS = 100


class Processes:
    """The processes that train together; a context manager.

    What they agree on travels over a group on the CPU, so that no process waits for its GPU.

    Attributes:
        rank: of this process.
        count: of the processes.
    """

    def __init__(self) -> None:
        self.rank, self.count = 0, 1
        self._group: Any = None
        self._own_group = False
        self._next_agreement = 0
        self._pause = 1

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def __enter__(self) -> Self:
        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.count = distributed.get_rank(), distributed.get_world_size()
        if self.count > 1 and "gloo" not in str(distributed.get_backend()):
            self._group = distributed.new_group(backend="gloo")
            self._own_group = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own_group and kind is None:  # after an error the others may never come to this point
            distributed.destroy_process_group(self._group)

    def from_first(self, value: T) -> T:
        """Return what the first process has."""
        if self.count == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def from_all(self, value: T) -> list[T]:
        """Return what each process has, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value, group=self._group)
        return values

    def agreed(self, step: int, step_s: float, wishes: list[int], at_once: bool = False) -> list[int]:
        """Return the largest of each wish over all processes, at steps that all of them take; zeros between.

        Args:
            step: number of the step, equal in all processes.
            step_s: seconds of a step, which say how seldom they ask each other.
            wishes: numbers from 0.
            at_once: ask at this step; equal in all processes.
        """
        if self.count == 1:
            return wishes
        if step < self._next_agreement and not at_once:
            return [0] * len(wishes)
        told = torch.tensor([*wishes, int(step_s * 1e6)], dtype=torch.int64, device="cpu")
        distributed.all_reduce(told, distributed.ReduceOp.MAX, group=self._group)
        *agreed, step_us = told.tolist()
        most = max(1, min(_AGREE_STEPS, int(_AGREE_EVERY_S * 1e6 / max(1, step_us))))
        self._pause = min(2 * self._pause, most)  # the first steps of a run say little about the others
        self._next_agreement = step + self._pause
        return agreed
