"""The samples that the ranks of a training run receive from their loaders in each step."""

from __future__ import annotations

import itertools
from typing import Any

from colabkit.loading import Loader

State = dict[str, Any]
# Sample numbers for each step and rank.
Steps = list[list[list[int]]]


def steps(loaders: list[Loader], most: int | None = None) -> Steps:
    """Return the samples of all ranks in each step of the next epoch; all ranks must end at the same step."""
    taken = [[batch.tolist() for batch in itertools.islice(loader, most)] for loader in loaders]
    return [list(step) for step in zip(*taken, strict=True)]


def in_order(taken: Steps) -> list[int]:
    return [sample for step in taken for batch in step for sample in batch]


def state_of(loaders: list[Loader]) -> State:
    """Return the state of the loaders, which must be the same on all ranks."""
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return states[0]
