"""The share of a process in each global batch: which positions of the order it takes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from colabkit.foundation import InvalidOption, cannot, check_whole_number


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a process in each global batch.

    Attributes:
        rank: rank of this process, counted from 0; the ranks of a machine follow each other.
        world_size: number of processes.
        machines: number of machines, each with the same number of processes.
    """

    rank: int = 0
    world_size: int = 1
    machines: int = 1

    @property
    def turn(self) -> int:
        """The turn of this process when positions are dealt to the machines one after the other."""
        machine, local = divmod(self.rank, self.world_size // self.machines)
        return local * self.machines + machine

    def of_machine(self) -> list[Share]:
        """Return the shares of all processes of this machine."""
        each = self.world_size // self.machines
        first = self.rank // each * each
        return [replace(self, rank=rank) for rank in range(first, first + each)]

    def consecutive(self, begin: int, end: int) -> range:
        """Return this process's positions from `begin` to `end`, as one piece."""
        count = end - begin
        return range(begin + count * self.rank // self.world_size, begin + count * (self.rank + 1) // self.world_size)

    def dealt(self, begin: int, end: int) -> range:
        """Return this process's positions from `begin` to `end`, if each process has the same turn everywhere."""
        return range(begin + (self.turn - begin) % self.world_size, end, self.world_size)


def share_of(act: str, rank: int | None, world_size: int | None) -> Share:
    """Return the rank and world size: the arguments, else those of `torch.distributed`, else a single process.

    The number of machines is `GROUP_WORLD_SIZE`, which `torchrun` sets, if it describes these processes.

    Raises:
        InvalidOption: if only one of the two is given, if one is not a whole number, or if the rank is not in the range
            from 0 to the world size - 1.
    """
    if (rank is None) != (world_size is None):
        alone = "world_size= is given without rank=" if rank is None else "rank= is given without world_size="
        raise InvalidOption(cannot(act, alone, "", "Pass both or neither"))
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return _launched(torch.distributed.get_rank(), torch.distributed.get_world_size())
        return Share()
    world_size = check_whole_number(act, "world_size", world_size, 1)
    rank = check_whole_number(act, "rank", rank, 0)
    if rank >= world_size:
        found, expected = f"rank={rank} with world_size={world_size}", f"a rank from 0 to {world_size - 1}"
        raise InvalidOption(cannot(act, found, expected, "Count ranks from 0"))
    return _launched(rank, world_size)


def _launched(rank: int, world_size: int) -> Share:
    # All processes must agree on the number of machines, so do not use LOCAL_WORLD_SIZE, which may differ.
    launched, groups = (os.environ.get(name, "") for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"))
    machines = int(groups) if groups.isdecimal() and launched == str(world_size) else 1
    return Share(rank, world_size, machines if machines and world_size % machines == 0 else 1)
