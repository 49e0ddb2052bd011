"""The protocol of sample orders, and the sequential and shuffled orders, which contain every sample once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from colabkit.foundation import (
    CHUNK,
    MAX_SAMPLES,
    Stream,
    check_range,
    check_whole_number,
    epoch_order,
    hashed,
    key_of,
    kind_of,
    permute,
    permute_each,
)


@runtime_checkable
class Order(Protocol):
    """Protocol of a sample order: a pure function from the epoch and a range of positions to sample indices.

    Example:
        >>> from colabkit import sampler
        >>> order = sampler.ShuffledOrder(1000)
        >>> isinstance(order, sampler.Order)
        True
        >>> len(order), order.n, order.policy
        (1000, 1000, 'shuffle')
    """

    def __len__(self) -> int:
        """Return the number of positions per epoch."""

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the sample indices at positions `start` to `stop` of an epoch, `int64 [stop - start]`."""

    @property
    def n(self) -> int:
        """Number of samples in the dataset."""

    @property
    def policy(self) -> str:
        """Short text that identifies this order, without its seed, in a saved state."""

    @property
    def seed(self) -> int:
        """Seed that distinguishes orders of the same policy; 0 for an order without randomness."""


def set_whole_number(order: object, name: str, value: int, least: int, most: int | None = None) -> None:
    """Set an attribute of a frozen order; raise `InvalidOption` unless `value` is a whole number in the range."""
    object.__setattr__(order, name, check_whole_number(f"make {kind_of(order)}", name, value, least, most))


class PureOrder:
    """Base class of the sample orders; subclasses implement `_samples` for a range of positions, or `indices`."""

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the sample indices at positions `start` to `stop` of an epoch, `int64 [stop - start]`.

        Raises:
            InvalidOption: if the range is not inside the epoch.
        """
        check_range(start, stop, len(self))
        joined = np.empty(stop - start, np.int64)
        for first in range(start, stop, CHUNK):
            last = min(first + CHUNK, stop)
            joined[first - start : last - start] = self._samples(epoch, first, last)
        return joined

    def __len__(self) -> int:
        raise NotImplementedError

    def _samples(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        raise NotImplementedError


@dataclass(frozen=True)
class SequentialOrder(PureOrder):
    """The stored order: position i holds sample i in every epoch.

    Args:
        n: number of samples in the dataset.

    Raises:
        InvalidOption: if n is not a whole number of 0 or more.

    Example:
        >>> from colabkit import sampler
        >>> sampler.SequentialOrder(1000).indices(epoch=0, start=10, stop=14)
        array([10, 11, 12, 13])
    """

    n: int

    def __post_init__(self) -> None:
        set_whole_number(self, "n", self.n, 0, MAX_SAMPLES)

    def __len__(self) -> int:
        return self.n

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the numbers from `start` to `stop`, `int64 [stop - start]`."""
        check_range(start, stop, self.n)
        return np.arange(start, stop, dtype=np.int64)

    @property
    def policy(self) -> str:
        """Always `"sequential"`."""
        return "sequential"

    @property
    def seed(self) -> int:
        """Always 0, because this order has no randomness."""
        return 0


@dataclass(frozen=True)
class ShuffledOrder(PureOrder):
    """All samples in a random order that differs in each epoch.

    Args:
        n: number of samples in the dataset.
        seed: seed of the order, a whole number of 0 or more.

    Raises:
        InvalidOption: if an argument is not a whole number of 0 or more.

    Example:
        >>> from colabkit import sampler
        >>> order = sampler.ShuffledOrder(1_000_000_000, seed=1)
        >>> order.indices(epoch=0, start=500, stop=504)
        array([...])
    """

    n: int
    seed: int = 0

    def __post_init__(self) -> None:
        set_whole_number(self, "n", self.n, 0, MAX_SAMPLES)
        set_whole_number(self, "seed", self.seed, 0)

    def __len__(self) -> int:
        return self.n

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the sample indices at positions `start` to `stop` of an epoch, `int64 [stop - start]`."""
        return epoch_order(self.n, self.seed, epoch, start, stop)

    @property
    def policy(self) -> str:
        """Always `"shuffle"`."""
        return "shuffle"


@dataclass(frozen=True)
class BlockShuffledOrder(PureOrder):
    """All samples, shuffled within windows of blocks, so that reading touches only `window_blocks` blocks at a time.

    Blocks of consecutive samples are shuffled, and every `window_blocks` blocks of the result form a window, inside
    which all samples are shuffled. A short last block may end up at any position. Each epoch has a different order.
    Time and memory depend only on the length of the requested range, plus a table of at most 65,536 blocks.

    Args:
        n: number of samples in the dataset.
        seed: seed of the order, a whole number of 0 or more.
        block_samples: number of consecutive samples that are read together. 64 images of 224 x 224 x 3 bytes are 10 MB,
            enough to read from disks and networks at full speed.
        window_blocks: number of blocks whose samples are shuffled together; together, they have to fit in RAM.

    Raises:
        InvalidOption: if an argument is not a whole number in its range.

    Example:
        >>> from colabkit import sampler
        >>> order = sampler.BlockShuffledOrder(10_000, block_samples=64, window_blocks=4)
        >>> first_window = order.indices(epoch=0, start=0, stop=256)
        >>> len(set(first_window // 64))
        4
    """

    n: int
    seed: int = 0
    block_samples: int = 64
    window_blocks: int = 32

    def __post_init__(self) -> None:
        set_whole_number(self, "n", self.n, 0, MAX_SAMPLES)
        set_whole_number(self, "seed", self.seed, 0)
        set_whole_number(self, "block_samples", self.block_samples, 1)
        set_whole_number(self, "window_blocks", self.window_blocks, 1)

    def __len__(self) -> int:
        return self.n

    @property
    def policy(self) -> str:
        """The text `"block {block_samples}x{window_blocks}"`, for example `"block 64x32"`."""
        return f"block {self.block_samples}x{self.window_blocks}"

    def _samples(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        # Positions are numbered as if the short block were full, so all blocks and windows start at multiples of their
        # size; the missing samples are skipped. The full blocks are permuted, and the short one is inserted among them.
        block = min(self.block_samples, self.n)
        full_blocks, rest = divmod(self.n, block)
        lack = block - rest if rest else 0
        blocks = full_blocks + bool(rest)
        window = min(self.window_blocks, blocks) * block
        short = key_of(self.seed, epoch, Stream.SHORT_BLOCK) * blocks >> 64 if rest else blocks
        short_window = short * block // window

        places = np.arange(start, stop, dtype=np.int64)
        places += lack * (places >= (short_window + 1) * window - lack)
        windows = places // window
        starts = windows * window
        is_short = windows == short_window
        sizes = np.minimum(blocks * block - starts, window)
        sizes -= lack * is_short
        places -= starts
        permute_each(places, sizes, hashed(key_of(self.seed, epoch, Stream.WINDOWS), windows))
        places += starts
        places += lack * (is_short & (places >= short * block + rest))

        numbers = places // block
        places -= numbers * block
        is_short = numbers == short
        numbers -= numbers > short
        # If the short block is last, its number is one too large for the permutation.
        np.minimum(numbers, full_blocks - 1, out=numbers)
        permute(numbers, full_blocks, key_of(self.seed, epoch, Stream.BLOCKS))
        numbers[is_short] = full_blocks
        places += numbers * block
        return places
