"""The order of a mixture: several orders, whose samples alternate in given proportions."""

from __future__ import annotations

import heapq
import itertools
import operator
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from colabkit.foundation import Positions
from colabkit.loading.sampler.orders import BlockShuffledOrder, PureOrder, SequentialOrder, ShuffledOrder
from colabkit.loading.sampler.shard_order import ShardShuffledOrder

PartOrder: TypeAlias = SequentialOrder | ShuffledOrder | BlockShuffledOrder | ShardShuffledOrder


@dataclass(frozen=True)
class _Pair:
    """A node of the tree: two nodes, each a `_Pair` or the number of a part, with the first weight and the sum."""

    first: _Pair | int
    second: _Pair | int
    first_weight: int
    weight: int

    def of_first(self, count: Any) -> Any:
        """Return the number of samples that the first node has among the first `count` of this node, rounded."""
        rounds, rest = divmod(count, self.weight)
        return rounds * self.first_weight + (rest * self.first_weight + self.weight // 2) // self.weight


@dataclass(frozen=True)
class MixedOrder(PureOrder):
    """Several orders, one for each part of a dataset, whose samples alternate in the proportion of their weights.

    The parts form a Huffman tree, in which each node divides its samples between two nodes, rounded to the nearest
    sample. Therefore, the count of a part can be computed for any position. It differs from its proportion by the sum
    of the rounding errors on its path, each weighted with the part's share of the node: at most one half for two parts,
    less than one for three, and less than 1.68 for any number, because weights on a path grow like Fibonacci numbers.

    A pass through a part continues in the next epoch. The order of each pass is an epoch of the part's order.

    Args:
        parts: orders of the parts, in the order of the samples in the dataset.
        weights: weight of each part, whole numbers above 0 with a sum of at most 2**31.
        num_samples: positions per epoch; None for as many as possible without repeating a sample in the first epoch.
        seed: seed of the first part's order; the seed of each further part is one higher.
    """

    parts: tuple[PartOrder, ...]
    weights: tuple[int, ...]
    num_samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        seeded = [
            part if isinstance(part, SequentialOrder) else replace(part, seed=self.seed + number)
            for number, part in enumerate(self.parts)
        ]
        object.__setattr__(self, "parts", tuple(seeded))

    def __len__(self) -> int:
        return self._length

    @property
    def n(self) -> int:
        """Number of samples in the dataset."""
        return sum(map(len, self.parts))

    @property
    def policy(self) -> str:
        """The weights, the positions per epoch and the parts' policies: `"mixed 3:1 over 2000, shuffle, shuffle"`."""
        weights = ":".join(map(str, self.weights))
        return ", ".join([f"mixed {weights} over {len(self)}", *(part.policy for part in self.parts)])

    @cached_property
    def _length(self) -> int:
        if self.num_samples is not None:
            return self.num_samples
        # An epoch in the exact proportion may end just before the first part is used up, or after it has begun again.
        sizes, total = [*map(len, self.parts)], sum(self.weights)
        exact = min(size * total // weight for size, weight in zip(sizes, self.weights, strict=True))
        ends = range(self.n + 2)
        used_up = bisect_left(ends, True, key=lambda end: any(map(operator.ge, self._counts(end), sizes)))
        repeats = bisect_left(ends, True, key=lambda end: any(map(operator.gt, self._counts(end), sizes)))
        return min(max(exact, used_up), repeats - 1)

    @cached_property
    def _tree(self) -> _Pair | int:
        # The number of the node orders nodes of equal weight.
        nodes: list[tuple[int, int, _Pair | int]] = [(weight, at, at) for at, weight in enumerate(self.weights)]
        heapq.heapify(nodes)
        for number in range(len(nodes), 2 * len(nodes) - 1):
            (light, _, first), (heavy, _, second) = heapq.heappop(nodes), heapq.heappop(nodes)
            heapq.heappush(nodes, (light + heavy, number, _Pair(first, second, light, light + heavy)))
        return nodes[0][2]

    @property
    def counts(self) -> list[int]:
        """Number of samples of each part in an epoch."""
        return self._counts(len(self))

    def position(self, part: int, count: int) -> int:
        """Return the position in an epoch of the sample of a part that follows `count` other samples of this part."""
        return bisect_right(range(len(self)), count, key=lambda at: self._counts(at + 1)[part])

    def _counts(self, end: int) -> list[int]:
        """Return the number of samples of each part before position `end` of an epoch."""
        counts = [0] * len(self.parts)
        pending = [(self._tree, end)]
        for node, count in pending:
            if isinstance(node, _Pair):
                first = node.of_first(count)
                pending += [(node.first, first), (node.second, count - first)]
            else:
                counts[node] = count
        return counts

    def _owners(self, start: int, stop: int) -> Positions:
        """Return the part of each position from `start` to `stop` of an epoch."""
        owners = np.empty(stop - start, np.int64)
        # The samples of a node are consecutive, so the number of samples before them describes them.
        pending = [(self._tree, start, np.arange(stop - start))]
        for node, before, places in pending:
            if isinstance(node, _Pair):
                counts = node.of_first(np.arange(before, before + len(places) + 1))
                is_first, first = np.diff(counts) > 0, counts.item(0)
                pending.append((node.first, first, places[is_first]))
                pending.append((node.second, before - first, places[~is_first]))
            else:
                owners[places] = node
        return owners

    def _samples(self, epoch: int, start: int, stop: int) -> Positions:
        owners, samples = self._owners(start, stop), np.empty(stop - start, np.int64)
        firsts = itertools.accumulate(map(len, self.parts), initial=0)
        counts = zip(self.counts, self._counts(start), self._counts(stop), strict=True)
        for number, (part, first, (each, begin, end)) in enumerate(zip(self.parts, firsts, counts, strict=False)):
            earlier = operator.index(epoch) * each
            samples[owners == number] = first + _passes(part, earlier + begin, earlier + end)
        return samples


def _passes(part: PartOrder, start: int, stop: int) -> Positions:
    """Return the samples from `start` to `stop` of all passes of an order, one after the other."""
    found = [np.empty(0, np.int64)]
    while start < stop:
        number, place = divmod(start, len(part))
        end = min(len(part), place + stop - start)
        found.append(part.indices(number, place, end))
        start += end - place
    return np.concatenate(found)
