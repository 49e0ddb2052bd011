"""The orders of epochs: pure functions of a seed and an epoch, for any range of positions, in the time of that range.

No permutation is kept, so a billion samples start at once and a resumed epoch is a slice.
"""

from colabkit.sampler.blocks import BlockShuffled
from colabkit.sampler.classes import Balanced
from colabkit.sampler.network import epoch_order
from colabkit.sampler.orders import Order, Sequential, Shuffled
from colabkit.sampler.weights import Weighted

__all__ = ["Balanced", "BlockShuffled", "Order", "Sequential", "Shuffled", "Weighted", "epoch_order"]
