"""Counter-based random numbers: each word is a pure function of a key and a counter, so any word is computed directly.

Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014): SplitMix64.
"""

from __future__ import annotations

import enum
import operator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words64: TypeAlias = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
"""The increment of SplitMix64's state before each number."""

_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

# The factors are arrays, because NumPy would look up the type of a scalar again in each operation.
_FACTORS = [np.array(factor, np.uint64) for factor in (_FIRST, _SECOND)]
_SHIFTS = [np.array(bits, np.uint64) for bits in (30, 27, 31)]


class Stream(enum.IntEnum):
    """Purposes of random words, which are mixed into the key so that different purposes get different words."""

    BLOCKS = 1
    SHORT_BLOCK = 2
    WINDOWS = 3
    DRAWS = 4
    PRIORITIES = 5
    RUNS = 6
    PASSES = 7


def key_of(seed: int, *numbers: int) -> int:
    """Return a 64-bit key for a seed and further integers, such as the epoch; their order matters."""
    key = mixed(operator.index(seed) & MASK)
    for number in numbers:
        key = mixed((key + operator.index(number) * GAMMA) & MASK)
    return key


def round_keys(key: int, count: int) -> list[int]:
    """Return `count` 32-bit keys: the upper halves of the first words of SplitMix64 with the seed `key`."""
    return [mixed((key + (place + 1) * GAMMA) & MASK) >> 32 for place in range(count)]


def hashed(keys: int | Words64, numbers: npt.NDArray[np.integer]) -> Words64:
    """Return a random 64-bit word for each number; for a given key, different numbers have different words.

    Args:
        keys: one key for all numbers, or an array of keys that broadcasts with `numbers`.
        numbers: non-negative integers.
    """
    words = numbers.astype(np.uint64) * np.uint64(GAMMA)
    words = words + (np.uint64(keys) if isinstance(keys, int) else keys)
    return finalise(words, np.empty_like(words))


def finalise(words: Words64, scratch: Words64) -> Words64:
    """Apply the finalizer of SplitMix64 to words in place, and return them.

    Args:
        words: sums of a key and a number times `GAMMA`, modulo 2**64.
        scratch: array of the same shape, which is overwritten.
    """
    np.right_shift(words, _SHIFTS[0], out=scratch)
    for factor, shift in zip(_FACTORS, _SHIFTS[1:], strict=True):
        words ^= scratch
        words *= factor
        np.right_shift(words, shift, out=scratch)
    words ^= scratch
    return words


def uniforms(words: Words64) -> npt.NDArray[np.float64]:
    """Convert words to uniform random numbers in [0, 1), `float64 [N]`, which are multiples of 2**-53."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mixed(value: int) -> int:
    """Apply the finalizer of SplitMix64 to a 64-bit integer."""
    value = ((value ^ (value >> 30)) * _FIRST) & MASK
    value = ((value ^ (value >> 27)) * _SECOND) & MASK
    return value ^ (value >> 31)
