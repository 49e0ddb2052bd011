"""What makes the batches of epochs: rows in the memory of a device, or worker processes; `threaded` is the third."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import Protocol

import torch

from colabkit.foundation import ColabkitError, LoaderFailed, cannot, meters
from colabkit.loading.loader.failing import failed
from colabkit.loading.loader.portions import Portion
from colabkit.loading.loader.processes import SampleWorkers
from colabkit.loading.loader.resident import Resident
from colabkit.loading.loader.slots import PinnedSlots
from colabkit.loading.loader.structures import bytes_of
from colabkit.loading.loader.transfer import DeviceTransfer, Taken, marked, sent
from colabkit.loading.loader.workers import Batch

_SENT_AHEAD = 2


class Engine(Protocol):
    """Makes the batches of epochs.

    Attributes:
        portion_batches: how many batches are planned together at most.
    """

    portion_batches: int

    def batches(self, seed: int, epoch: int, portions: Iterator[Portion]) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch; closing the generator ends all that works for it."""


class OnDevice:
    """Batches are gathered from rows that are all in the memory of a device.

    Args:
        resident: the rows.
        counts: the loader's meters.
        portion_batches: batches that are gathered together.
    """

    def __init__(self, resident: Resident, counts: meters.LoaderMeters, portion_batches: int) -> None:
        self.portion_batches = portion_batches
        self._resident = resident
        self._counts = counts

    def batches(self, seed: int, epoch: int, portions: Iterator[Portion]) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch."""
        for portion in portions:
            began, before = time.perf_counter(), marked(self._resident.device)
            batches = [*self._resident.batches(portion)]
            self._counts.add("gather", len(portion.numbers), 0, time.perf_counter() - began)
            batches[0].marks = before, marked(self._resident.device)
            batches.reverse()
            while batches:
                yield batches.pop()


class InProcesses:
    """Batches are made sample by sample in worker processes.

    Args:
        workers: make them.
        device: where batches go.
        counts: the loader's meters.
    """

    def __init__(self, workers: SampleWorkers, device: torch.device, counts: meters.LoaderMeters) -> None:
        self.portion_batches = 1
        self._workers = workers
        self._device = device
        self._counts = counts
        self._slots = PinnedSlots(0, device) if device.type == "cuda" else None

    def batches(self, seed: int, epoch: int, portions: Iterator[Portion]) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch."""
        made = self._made(seed, epoch, portions)
        if self._slots is None:
            yield from made
            return

        def take() -> Taken:
            batch = next(made, None)
            return Taken() if batch is None else Taken([batch], None, batch.was_ready)

        transfer = DeviceTransfer(self._device, self._slots, self._counts)
        yield from sent(transfer, take, lambda under_way: under_way < _SENT_AHEAD)

    def _made(self, seed: int, epoch: int, portions: Iterator[Portion]) -> Generator[Batch, None, None]:
        ahead = self._workers.ahead
        asked = deque([time.perf_counter()], maxlen=max(1, ahead))
        try:
            for made, reached, positions in self._workers.batches(seed, epoch, portions, self._waits):
                if isinstance(made.error, ColabkitError):
                    raise made.error
                if made.error is not None:
                    raise failed(made.error.text, made.error.next_step) from made.error.cause()
                size = bytes_of(made.batch)
                self._counts.add("samples", made.samples, size, made.busy_s, made.wait_s, cpu_s=made.cpu_s)
                if ahead:  # it was there each time that it, or one of those before it, was asked for since it is made
                    self._counts.queued += sum(made.made_at <= at for at in asked)
                    self._counts.queue_room += ahead
                yield Batch(made.batch, positions, reached, was_ready=made.made_at <= asked[-1])
                asked.append(time.perf_counter())
        except ColabkitError:
            raise
        except RuntimeError as error:  # of `DataLoader`: a worker that is gone
            found = str(error).partition("\n")[0].rstrip(" .")
            next_step = "Use fewer num_workers if memory is short, or num_workers=0 to see what happens"
            raise LoaderFailed(cannot("make a batch", found, "worker processes that live", next_step)) from error
        except Exception as error:
            raise failed(error) from error

    def _waits(self, wait_s: float) -> None:
        meters.publish(meters.Waiting(self._counts, wait_s))
