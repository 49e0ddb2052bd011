"""Wait for samples of a pack that is still being packed, and ask for them in the order in which an epoch needs them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from colabkit.foundation import LoaderMeters
from colabkit.loading.engine.batches import BatchPlan
from colabkit.loading.engine.read_ahead import Cancellation
from colabkit.loading.sampler.orders import Order
from colabkit.packs import ArrivingSamples, Indices


class SampleWait:
    """Delays the plans of an epoch until their samples have arrived.

    Args:
        samples: the samples of a split of a pack that is being packed.
        numbers: row numbers of a view of the split; None for all rows.
        order: order of the samples; None if it is unknown.
        epoch: number of the epoch.
        counts: meters of the loader, which count the wait as reading.
    """

    def __init__(
        self, samples: ArrivingSamples, numbers: Tensor | None, order: Order | None, epoch: int, counts: LoaderMeters
    ) -> None:
        self._samples = samples
        self._numbers = None if numbers is None else numbers.numpy()
        self._order = order
        self._epoch = epoch
        self._counts = counts
        self._is_over = False

    def following(self, plans: Iterator[BatchPlan]) -> Iterator[BatchPlan]:
        """Yield plans once their samples have arrived."""
        is_first = True
        for plan in plans:
            if is_first and self._order is not None:
                coming = self._order.indices(self._epoch, int(plan.positions[0]), len(self._order))
                self._samples.want(self._rows_of(coming))
            is_first = False
            with self._counts.busy("read", len(plan.indices), 0):
                self._samples.wait_for(self._rows_of(plan.indices), self._check_over)
            yield plan

    def close(self) -> None:
        """End the wait of another thread."""
        self._is_over = True

    def _rows_of(self, indices: Indices) -> Indices:
        return indices if self._numbers is None else self._numbers[indices]

    def _check_over(self) -> None:
        if self._is_over:
            raise Cancellation
