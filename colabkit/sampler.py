"""The order of an epoch: a pure function of (seed, epoch, n), for any range of positions, in the time of that range.

No permutation is kept, so a billion samples start at once and a resumed epoch is a slice. The permutation is a
balanced Feistel network over a grid of about sqrt(n) x sqrt(n) cells; positions that fall on the few cells beyond n
walk on along their cycle. Rounds mix with the 32-bit finaliser of MurmurHash3. On a tiny grid such networks cannot
reach every permutation, so small data sets are sorted by random words instead.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002): network on a grid, cycle walking.
"""

from __future__ import annotations

import math
import operator

import numpy as np
import numpy.typing as npt

from colabkit.errors import InvalidOption, cannot

__all__ = ["epoch_order"]

_ROUNDS = 8
_SORTED_UP_TO = 1024
_MASK = (1 << 64) - 1
_MAX_SAMPLES = 1 << 62

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


def epoch_order(n: int, seed: int, epoch: int, start: int, stop: int) -> Positions:
    """Return which samples stand at positions `start` to `stop` of a shuffled epoch, `int64 [stop - start]`.

    Over all positions every sample in [0, n) comes exactly once. The result depends on the arguments alone: not on the
    machine, the version of numpy, threads, or what was asked before.

    Args:
        n: samples in the data set.
        seed: any integer.
        epoch: number of the pass.
        start: first position.
        stop: position after the last.

    Raises:
        InvalidOption: if the range does not lie in [0, n].
    """
    if not 0 <= start <= stop <= n <= _MAX_SAMPLES:
        raise InvalidOption(
            cannot(f"order positions {start} to {stop}", f"{n} samples", "0 <= start <= stop <= n", "Check the range")
        )
    positions = np.arange(start, stop, dtype=np.int64)
    if n <= 1:
        return positions
    if n <= _SORTED_UP_TO:
        return _sorted_order(n, seed, epoch)[start:stop]
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    keys = _keys(seed, epoch)
    order = _permute(positions, rows, columns, keys)
    while True:
        outside = np.flatnonzero(order >= n)
        if not outside.size:
            return order
        order[outside] = _permute(order[outside], rows, columns, keys)


def _sorted_order(n: int, seed: int, epoch: int) -> Positions:
    """Return all of a small order: the indices sorted by two random words each, so that ties do not happen."""
    high, low, *_ = _keys(seed, epoch)
    index = np.arange(n, dtype=np.uint32)
    words = _mix(_mix(index, low), high).astype(np.uint64) << np.uint64(32) | _mix(_mix(index, high), low)
    return np.argsort(words, kind="stable").astype(np.int64)


def _permute(positions: Positions, rows: int, columns: int, keys: list[int]) -> Positions:
    """Return a permutation of the cells of a grid, cell by cell."""
    quotients = positions // columns
    row = quotients.astype(np.uint32)
    column = (positions - quotients * columns).astype(np.uint32)
    for index in range(0, _ROUNDS, 2):
        row = _add(row, _scaled(_mix(column, keys[index]), rows), rows)
        column = _add(column, _scaled(_mix(row, keys[index + 1]), columns), columns)
    return row.astype(np.int64) * columns + column


def _mix(words: Words, key: int) -> Words:
    mixed = (words ^ np.uint32(key)) * np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed


def _scaled(words: Words, bound: int) -> Words:
    """Return words brought evenly to [0, bound) by multiplication, which is faster than division."""
    return ((words.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(np.uint32)


def _add(words: Words, more: Words, bound: int) -> Words:
    """Return the sum modulo `bound`: the difference wraps to a large word exactly when the sum is below it."""
    total = words + more
    wrapped: Words = np.minimum(total, total - np.uint32(bound))
    return wrapped


def _keys(seed: int, epoch: int) -> list[int]:
    """Return the rounds' 32-bit keys: SplitMix64 started from seed and epoch."""
    # Mixed again after adding the epoch, or each epoch would begin with its predecessor's second key.
    state = _splitmix((_splitmix(operator.index(seed) & _MASK) + operator.index(epoch) * 0x9E3779B97F4A7C15) & _MASK)
    keys = []
    for _ in range(_ROUNDS):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        keys.append(_splitmix(state) >> 32)
    return keys


def _splitmix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
