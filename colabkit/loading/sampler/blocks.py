"""The order for packs larger than RAM and shards far away: only a few blocks are read at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from colabkit.foundation import MAX_SAMPLES, Positions, Stream, check_range, hashed, key_of, permute, permute_each
from colabkit.loading.sampler.orders import by_chunks, set_whole_number


@dataclass(frozen=True)
class BlockShuffled:
    """Every sample once, mixed over a window of blocks: reading touches `window_blocks` blocks at a time.

    Blocks of consecutive samples are put into a random order, and each `window_blocks` consecutive blocks of it are a
    window, inside which all samples are mixed. A last block that is not full stands at any place, too. All of this is
    anew in each epoch, in the time and memory of the range that is asked for, and of 65,536 blocks at most.

    Args:
        n: samples in the data set.
        seed: a whole number of 0 or more.
        block_samples: consecutive samples that are read together. 64 images of 224 x 224 x 3 bytes are 10 MB, which
            disks and networks read at full speed.
        window_blocks: blocks whose samples are mixed; they have to fit in RAM together.

    Raises:
        InvalidOption: if an argument is no whole number in its range.
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
        """`"block "` and the samples of a block x the blocks of a window."""
        return f"block {self.block_samples}x{self.window_blocks}"

    def indices(self, epoch: int, start: int, stop: int) -> Positions:
        """Return the samples at positions `start` to `stop` of an epoch, `int64 [stop - start]`.

        Raises:
            InvalidOption: if the range does not lie in [0, n].
        """
        check_range(start, stop, self.n)
        return by_chunks(partial(self._samples, epoch), start, stop)

    def _samples(self, epoch: int, start: int, stop: int) -> Positions:
        # Places count as if the short block were full, so that all blocks and windows begin at multiples; what it
        # lacks is skipped. Full blocks are permuted among themselves and the short one is put in between.
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
        np.minimum(numbers, full_blocks - 1, out=numbers)  # there is one number more where the short block is last
        permute(numbers, full_blocks, key_of(self.seed, epoch, Stream.BLOCKS))
        numbers[is_short] = full_blocks
        places += numbers * block
        return places
