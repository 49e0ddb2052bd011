"""Random numbers of samples: a pure function of (seed, epoch, position), so nothing has to be saved to resume."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Draws"]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15

Words = npt.NDArray[np.uint64]


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
        state = self.positions.astype(np.uint64)
        state *= np.uint64(_STEP)
        state += np.uint64(key)
        _mix(state)
        steps = np.arange(1, count + 1, dtype=np.uint64)
        steps *= np.uint64(_STEP)
        words = state[:, None] + steps
        _mix(words)
        words >>= np.uint64(11)
        return words.astype(np.float64) * 2.0**-53

    def of(self, number: int) -> Draws:
        """Return the draws of the `number`-th transform inside a `Compose`: a stream of its own."""
        return Draws(self.seed, self.epoch, self.positions, _hashed(self.stream + number + 1))

    def part(self, start: int, stop: int) -> Draws:
        """Return the draws of the samples from `start` to `stop` of these."""
        return Draws(self.seed, self.epoch, self.positions[start:stop], self.stream)


def _hashed(value: int) -> int:
    """Return the number that SplitMix64 gives after the state `value`."""
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix(words: Words) -> None:
    """Put every word through the finaliser of SplitMix64, in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
