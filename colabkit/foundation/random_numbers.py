"""Random numbers by counter: a word is a pure function of a key and a number, so any of them comes at once.

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
"""What SplitMix64 adds to its state before each number."""

_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

# Arrays, because numpy would look up the type of a scalar anew in each operation.
_FACTORS = [np.array(factor, np.uint64) for factor in (_FIRST, _SECOND)]
_SHIFTS = [np.array(bits, np.uint64) for bits in (30, 27, 31)]


class Stream(enum.IntEnum):
    """What words are for, mixed into their key, so that no two uses share words."""

    BLOCKS = 1
    SHORT_BLOCK = 2
    WINDOWS = 3
    DRAWS = 4
    PRIORITIES = 5
    RUNS = 6
    PASSES = 7


def key_of(seed: int, *numbers: int) -> int:
    """Return one 64-bit key for a seed and further integers, as of an epoch; their order counts."""
    key = mixed(operator.index(seed) & MASK)
    for number in numbers:
        key = mixed((key + operator.index(number) * GAMMA) & MASK)
    return key


def round_keys(key: int, count: int) -> list[int]:
    """Return 32-bit keys: the upper halves of the first words of SplitMix64 started at `key`."""
    return [mixed((key + (place + 1) * GAMMA) & MASK) >> 32 for place in range(count)]


def hashed(keys: int | Words64, numbers: npt.NDArray[np.integer]) -> Words64:
    """Return a random word for each number, of the shape of both arguments; words of one key and two numbers differ.

    Args:
        keys: one for all numbers, or one for each.
        numbers: not negative.
    """
    words = numbers.astype(np.uint64) * np.uint64(GAMMA)
    words = words + (np.uint64(keys) if isinstance(keys, int) else keys)
    return finalise(words, np.empty_like(words))


def finalise(words: Words64, scratch: Words64) -> Words64:
    """Return what the finaliser of SplitMix64 makes of words, in their own memory.

    Args:
        words: sums of a key and a number times `GAMMA`, modulo 2**64.
        scratch: of the same shape; overwritten.
    """
    np.right_shift(words, _SHIFTS[0], out=scratch)
    for factor, shift in zip(_FACTORS, _SHIFTS[1:], strict=True):
        words ^= scratch
        words *= factor
        np.right_shift(words, shift, out=scratch)
    words ^= scratch
    return words


def uniforms(words: Words64) -> npt.NDArray[np.float64]:
    """Return words as numbers evenly spread over 0 <= u < 1, `float64 [N]`: multiples of 2**-53."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mixed(value: int) -> int:
    """Return a number of 64 bits put through the finaliser of SplitMix64."""
    value = ((value ^ (value >> 30)) * _FIRST) & MASK
    value = ((value ^ (value >> 27)) * _SECOND) & MASK
    return value ^ (value >> 31)
