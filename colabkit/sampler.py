"""Sample orders: pure functions of the seed and the epoch that compute any range of positions directly.

No permutation of a large dataset is stored, so an epoch of a billion samples starts immediately and resumes at any
position.
"""

from colabkit.foundation import epoch_order
from colabkit.loading import Balanced, BlockShuffled, Order, Sequential, ShardShuffled, Shuffled, Weighted

__all__ = [
    "Balanced",
    "BlockShuffled",
    "Order",
    "Sequential",
    "ShardShuffled",
    "Shuffled",
    "Weighted",
    "epoch_order",
]


def __dir__() -> list[str]:
    return __all__
