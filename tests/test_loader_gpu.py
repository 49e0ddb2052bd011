"""`Loader` on a GPU: the same batches as on the CPU, on time, in bounded memory. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contract import make_pack

from colabkit.augment import Normalize
from colabkit.dataset import PackedDataset, open_pack
from colabkit.loader import Loader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packs")


@pytest.fixture(scope="module")
def data(folder: Path) -> PackedDataset:
    return open_pack(make_pack(folder / "data.h5", train=22))["train"]


def in_order(loader: Loader) -> torch.Tensor:
    return torch.cat([images.cpu() for images, _ in loader])


@pytest.mark.parametrize("options", [{}, {"transform": Normalize()}, {"prefetch_batches": 1}])
def test_batches_on_the_gpu_are_the_same_and_stay_valid(data, options):
    held, expected = [], []
    here, there = (Loader(data, 3, shuffle=True, device=device, **options) for device in ("cpu", "cuda"))
    for _ in range(5):
        for on_cpu, on_gpu in zip(here, there, strict=True):
            assert {tensor.device.type for tensor in on_gpu} == {"cuda"}
            assert on_gpu[0].is_contiguous(memory_format=torch.channels_last)
            held.append(on_gpu)
            expected.append(on_cpu)
    for on_gpu, on_cpu in zip(held, expected, strict=True):
        assert torch.allclose(on_gpu[0].cpu().float(), on_cpu[0].float(), atol=1e-6)
        assert torch.equal(on_gpu[1].cpu(), on_cpu[1])


def test_copies_never_overwrite_what_queued_kernels_still_read(folder):
    data = open_pack(make_pack(folder / "gpu.h5", (64, 64, 3), train=256))["train"]
    busy = torch.randn(2048, 2048, device="cuda")
    sums = []
    for images, _ in Loader(data, 16, device="cuda"):
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        sums.append(images.double().sum())  # queued behind the products, long after the host has gone on
        del images
    expected = [rows.double().sum() for rows in data.rows.split(16)]
    assert torch.equal(torch.stack(sums).cpu(), torch.stack(expected))


def test_epochs_on_the_gpu_do_not_grow_its_memory(data):
    loader = Loader(data, 4, shuffle=True, device="cuda")
    for _ in range(3):
        list(loader)
    reserved = torch.cuda.memory_reserved()
    for _ in range(30):
        list(loader)
    assert torch.cuda.memory_reserved() == reserved
    assert {part.name for part in loader.meters.snapshot().parts} >= {"gather"}


def test_resume_goes_from_cpu_to_gpu_and_back(data):
    expected = in_order(Loader(data, 4, shuffle=True))
    loader = Loader(data, 4, shuffle=True)
    first = next(iter(loader))[0].clone()
    resumed = Loader(data, 5, shuffle=True, device="cuda")
    resumed.load_state_dict(loader.state_dict())
    second = next(iter(resumed))[0].cpu()
    again = Loader(data, 4, shuffle=True)
    again.load_state_dict(resumed.state_dict())
    assert torch.equal(torch.cat([first, second, in_order(again)]), expected)
