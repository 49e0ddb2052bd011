"""Permutations as pure functions: any range of positions is computed directly, without the positions before it.

Up to 65,536 samples are sorted by random words, all at once. This takes less than 1 ms if NumPy sorts with vector
instructions (for example 2.0 or later on x86 with AVX2), otherwise up to 3 ms. The last few orders are cached.

Larger permutations, and `permute_each` above 32 samples, use a balanced Feistel network over a grid of about
sqrt(n) x sqrt(n) cells. Positions that map to one of the few cells beyond n are permuted again (cycle walking). Rounds
mix with the 32-bit finalizer of MurmurHash3, without its first shift. On grids of up to 4,096 columns, `permute` uses
tables of a few times sqrt(n) entries, which are cached for the last few permutations.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002): network on a grid, cycle walking.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from colabkit.foundation.errors import InvalidOption
from colabkit.foundation.messages import cannot
from colabkit.foundation.random_numbers import GAMMA, MASK, Words64, finalise, hashed, key_of, round_keys

CHUNK = 16384
"""Number of positions processed together, so that scratch arrays fit in the cache of a core."""

MAX_SAMPLES = 1 << 62

_ROUNDS = 8
_SORTED_UP_TO = 1 << 16
_INDEX_BITS = np.array(_SORTED_UP_TO - 1, np.uint64)
_RANDOM_BITS = np.array(~_INDEX_BITS)
# Up to this size, random words are sorted, since the network would return some permutations too often.
_EACH_SORTED_UP_TO = 32
# Maximum number of columns for which tables are used. Larger tables take milliseconds and megabytes to build, and make
# permutations only a third faster.
_TABLES_UP_TO = 4096
_UPPER_HALF = slice(1, None, 2) if sys.byteorder == "little" else slice(0, None, 2)

# The factors are arrays, because NumPy would look up the type of a scalar again in each of about a hundred operations.
_FIRST_FACTOR = np.array(0x85EBCA6B, np.uint32)
_SECOND_FACTOR = np.array(0xC2B2AE35, np.uint32)
_FIRST_SHIFT = np.array(13, np.uint32)
_SECOND_SHIFT = np.array(16, np.uint32)

Positions: TypeAlias = npt.NDArray[np.int64]
Words32: TypeAlias = npt.NDArray[np.uint32]


def check_range(start: int, stop: int, n: int) -> None:
    """Raise `InvalidOption` unless 0 <= start <= stop <= n <= 2**62."""
    if not 0 <= start <= stop <= n <= MAX_SAMPLES:
        act, found = f"order positions {start} to {stop}", f"there are {n} samples"
        raise InvalidOption(cannot(act, found, "0 <= start <= stop <= samples <= 2**62", "Check the range"))


def epoch_order(n: int, seed: int, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Return the samples at positions `start` to `stop` of a shuffled epoch.

    Over all positions, every sample in [0, n) occurs exactly once. The result depends only on the arguments, not on the
    machine, the version of NumPy, threads, or earlier calls.

    Args:
        n: number of samples in the dataset.
        seed: any integer.
        epoch: index of the epoch.
        start: first position.
        stop: position after the last one.

    Returns:
        The sample indices, `int64 [stop - start]`.

    Raises:
        InvalidOption: unless 0 <= start <= stop <= n <= 2**62.

    Example:
        >>> from colabkit import sampler
        >>> order = sampler.epoch_order(5, seed=0, epoch=0, start=0, stop=5)
        >>> sorted(order.tolist())
        [0, 1, 2, 3, 4]
    """
    check_range(start, stop, n)
    if n <= _SORTED_UP_TO:
        return _samples(_sorted_words(n, key_of(seed, epoch))[start:stop])
    order = np.arange(start, stop, dtype=np.int64)
    permute(order, n, key_of(seed, epoch))
    return order


def permute(positions: Positions, n: int, key: int) -> None:
    """Replace positions in [0, n), in place, with their values in the permutation of [0, n) given by `key`."""
    if n <= 1:
        return
    if n <= _SORTED_UP_TO:
        positions[:] = _samples(_sorted_words(n, key)[positions])
        return
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    for first in range(0, positions.size, CHUNK):
        _permute_cells(positions[first : first + CHUNK], rows, columns, key)
    while (outside := np.flatnonzero(positions >= n)).size:
        walking = positions[outside]
        _permute_cells(walking, rows, columns, key)
        positions[outside] = walking


def permute_each(positions: Positions, sizes: Positions, keys: Words64) -> None:
    """Replace each position, in place, with its value in a separate permutation, in constant time per position.

    Args:
        positions: positions, each in [0, size), `int64 [N]`.
        sizes: sizes of the permutations, 1 or more, `int64 [N]`.
        keys: keys of the permutations, `uint64 [N]`.
    """
    small = np.flatnonzero(sizes <= _EACH_SORTED_UP_TO)
    of_small = _at_sorted(positions[small], sizes[small], keys[small]) if small.size else None
    rows = np.ceil(np.sqrt(sizes)).astype(np.int64)
    columns = -(-sizes // rows)
    rounds = [(keys * np.uint64(2 * place + 1)).view(np.uint32)[_UPPER_HALF] for place in range(_ROUNDS)]
    _mix_cells(positions, rows, columns, rounds)
    outside = np.flatnonzero(positions >= sizes)
    while outside.size:
        walking = positions[outside]
        _mix_cells(walking, rows[outside], columns[outside], [words[outside] for words in rounds])
        positions[outside] = walking
        outside = outside[walking >= sizes[outside]]
    if of_small is not None:
        positions[small] = of_small


def _at_sorted(positions: Positions, sizes: Positions, keys: Words64) -> Positions:
    numbers = np.arange(sizes.max())
    words = hashed(keys[:, None], numbers)
    words[numbers >= sizes[:, None]] = np.iinfo(np.uint64).max
    order = np.argsort(words, axis=1, kind="stable")
    return order[np.arange(positions.size), positions]


@functools.lru_cache(maxsize=4)
def _sorted_words(n: int, key: int) -> Words64:
    """Return a small permutation as sorted words: 48 random bits above the 16 bits of the sample index."""
    numbers, steps = _first_steps()
    words, scratch = np.empty(n, np.uint64), np.empty(min(n, CHUNK), np.uint64)
    for first in range(0, n, CHUNK):
        some = words[first : first + CHUNK]
        np.add(steps[: some.size], np.array((key + first * GAMMA) & MASK, np.uint64), out=some)
        finalise(some, scratch[: some.size])
        some &= _RANDOM_BITS
        some |= numbers[: some.size]
        some |= np.array(first, np.uint64)
    words.sort()
    words.flags.writeable = False
    return words


@functools.cache
def _first_steps() -> tuple[Words64, Words64]:
    numbers = np.arange(CHUNK, dtype=np.uint64)
    return numbers, numbers * np.uint64(GAMMA)


def _samples(words: Words64) -> Positions:
    return (words & _INDEX_BITS).view(np.int64)


def _permute_cells(cells: Positions, rows: int, columns: int, key: int) -> None:
    if columns <= _TABLES_UP_TO:
        _look_up_cells(cells, columns, _tables(rows, columns, key))
    else:
        keys = [np.array(word, np.uint32) for word in round_keys(key, _ROUNDS)]
        _mix_cells(cells, np.array(rows), np.array(columns), keys)


def _look_up_cells(cells: Positions, columns: int, tables: list[Positions]) -> None:
    *rounds, of_rows, of_columns = tables
    row = cells // columns
    added = row * columns
    column = cells
    column -= added
    for place, table in enumerate(rounds):
        changed, other = (column, row) if place % 2 else (row, column)
        # The indices are in range, so "clip" changes none. It is faster than the default mode, which copies `out`.
        table.take(other, out=added, mode="clip")
        changed += added
    of_columns.take(column, out=added, mode="clip")
    of_rows.take(row, out=cells, mode="clip")
    cells += added


@functools.lru_cache(maxsize=4)
def _tables(rows: int, columns: int, key: int) -> list[Positions]:
    """Return a table per round, with values to add to the row or column, and tables to decode final rows and columns.

    Sums are not reduced modulo their bound after each round; instead, the tables repeat as often as sums can exceed it.
    """
    keys = np.array(round_keys(key, _ROUNDS), np.uint32)[:, None]
    to_rows = _scaled(_mixed(np.arange(columns, dtype=np.uint32), keys[0::2]), rows)
    to_columns = _scaled(_mixed(np.arange(rows, dtype=np.uint32), keys[1::2]), columns)
    tables = []
    for place in range(_ROUNDS // 2):
        tables += [np.tile(to_rows[place], place + 1), np.tile(to_columns[place], place + 2)]
    repeats = _ROUNDS // 2 + 1
    return [*tables, np.tile(np.arange(rows) * columns, repeats), np.tile(np.arange(columns), repeats)]


def _mix_cells(cells: Positions, rows: Positions, columns: Positions, keys: Sequence[Words32]) -> None:
    """Permute cells in place, with one grid for all cells or one per cell."""
    wide = cells // columns
    row = wide.astype(np.uint32)
    wide *= columns
    cells -= wide
    column = cells.astype(np.uint32)
    mixed = np.empty_like(row)
    shifted = np.empty_like(row)
    product = wide.view(np.uint64)
    scaled = product.view(np.uint32)[_UPPER_HALF]
    bounds = [(bound.astype(np.uint32), bound.astype(np.uint64)) for bound in (rows, columns)]
    for place, key in enumerate(keys):
        changed, other = (column, row) if place % 2 else (row, column)
        bound, wide_bound = bounds[place % 2]
        np.bitwise_xor(other, key, out=mixed)
        np.multiply(mixed, _FIRST_FACTOR, out=mixed)
        np.right_shift(mixed, _FIRST_SHIFT, out=shifted)
        np.bitwise_xor(mixed, shifted, out=mixed)
        np.multiply(mixed, _SECOND_FACTOR, out=mixed)
        np.right_shift(mixed, _SECOND_SHIFT, out=shifted)
        np.bitwise_xor(mixed, shifted, out=mixed)
        # The upper half of a product maps words almost evenly to [0, bound), which is faster than a division.
        np.copyto(product, mixed)
        np.multiply(product, wide_bound, out=product)
        np.add(changed, scaled, out=changed)
        # The difference wraps around to a large word if and only if the sum is below the bound.
        np.subtract(changed, bound, out=shifted)
        np.minimum(changed, shifted, out=changed)
    np.multiply(row, columns, out=cells, dtype=np.int64)
    cells += column


def _mixed(words: Words32, key: Words32) -> Words32:
    mixed = (words ^ key) * _FIRST_FACTOR
    mixed ^= mixed >> _FIRST_SHIFT
    mixed *= _SECOND_FACTOR
    mixed ^= mixed >> _SECOND_SHIFT
    return mixed


def _scaled(words: Words32, bound: int) -> Positions:
    return ((words.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)
