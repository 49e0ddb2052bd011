"""Images decoded on the device reach the caller without copies or races, with a simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from simulated_gpu import DEVICE, SimulatedGpu
from torch import Tensor

from colabkit.foundation import LoaderMeters
from colabkit.loading.engine.batches import Batch
from colabkit.loading.engine.device import DeviceTransfer
from colabkit.loading.engine.device_decoder import idle_stream, send_decoded
from colabkit.loading.engine.gather import PinnedSlots

COUNT, SIZE = 12, 1 << 20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    simulated = SimulatedGpu(copy_bytes_per_s=1e9)
    simulated.install(monkeypatch)
    with simulated:
        yield simulated


def decoded_groups() -> Iterator[tuple[list[Batch], Tensor | None]]:
    for number in range(COUNT):
        with idle_stream(DEVICE):
            images = torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)
            images.fill_(number)
        yield [Batch([images, torch.tensor([number])], np.arange(1), number + 1)], None
        del images


def test_decoded_images_are_not_copied_and_their_memory_is_not_used_too_early(gpu: SimulatedGpu) -> None:
    transfer = DeviceTransfer(DEVICE, PinnedSlots(0, DEVICE), LoaderMeters())
    for number, batch in enumerate(send_decoded(transfer, decoded_groups(), lambda ahead: ahead > 2)):
        images, labels = batch.values
        assert int(images[0]) == int(images[-1]) == int(labels[0]) == number
        # Delay the GPU, so that it reads the images long after the host has continued.
        gpu.compute(0.01, images, labels)
        del images, labels, batch
    # Each batch is filled once, and only its label is copied.
    assert gpu.calls["copy"] == 2 * COUNT


def test_a_pass_that_is_left_frees_the_images_that_were_never_taken(gpu: SimulatedGpu) -> None:
    transfer = DeviceTransfer(DEVICE, PinnedSlots(0, DEVICE), LoaderMeters())
    batches = send_decoded(transfer, decoded_groups(), lambda ahead: ahead > 2)
    next(batches)
    batches.close()
    assert not len(transfer)
    gpu.synchronize()
    assert gpu.allocated < SIZE
