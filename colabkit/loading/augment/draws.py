"""Random numbers of samples: a pure function of (seed, epoch, position), so nothing has to be saved to resume."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from colabkit.foundation import GAMMA, MASK, hashed, mixed, uniforms


@dataclass(frozen=True, eq=False)
class Draws:
    """The random numbers of some samples; those of one sample depend on nothing but its place in the training.

    SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) started at a hash
    of seed, epoch, stream and position; nothing is kept between calls.

    Attributes:
        seed: any integer; the lowest 64 bits count.
        epoch: number of the pass.
        positions: `int64 [B]`, places in the epoch's global order.
        stream: which of the sample's sequences of numbers; each transform of a `Compose` has its own.
    """

    seed: int
    epoch: int
    positions: npt.NDArray[np.int64]
    stream: int = 0

    def uniforms(self, count: int) -> npt.NDArray[np.float64]:
        """Return numbers in [0, 1), `float64 [B, count]`; the first columns do not depend on `count`."""
        key = _hashed(_hashed(_hashed(operator.index(self.seed)) + operator.index(self.epoch)) + self.stream)
        states = hashed(key, self.positions)
        return uniforms(hashed(states[:, None], np.arange(1, count + 1)))

    def of(self, number: int) -> Draws:
        """Return the draws of the `number`-th transform inside a `Compose`: a stream of its own."""
        return Draws(self.seed, self.epoch, self.positions, _hashed(self.stream + number + 1))

    def part(self, start: int, stop: int) -> Draws:
        """Return the draws of the samples from `start` to `stop` of these."""
        return Draws(self.seed, self.epoch, self.positions[start:stop], self.stream)


def _hashed(value: int) -> int:
    """Return the number that SplitMix64 gives after the state `value`."""
    return mixed((value + GAMMA) & MASK)
