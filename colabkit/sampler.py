"""Sample orders: pure functions of the seed and the epoch that compute any range of positions directly.

No permutation of a large dataset is stored, so an epoch of a billion samples starts immediately and resumes at any
position.
"""

from colabkit.foundation import epoch_order
from colabkit.loading import (
    BalancedOrder,
    BlockShuffledOrder,
    Order,
    SequentialOrder,
    ShardShuffledOrder,
    ShuffledOrder,
    WeightedOrder,
)

__all__ = [
    "BalancedOrder",
    "BlockShuffledOrder",
    "Order",
    "SequentialOrder",
    "ShardShuffledOrder",
    "ShuffledOrder",
    "WeightedOrder",
    "epoch_order",
]


def __dir__() -> list[str]:
    return __all__
