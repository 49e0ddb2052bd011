"""`Loader` on a GPU yields the same batches as on the CPU, in bounded memory; skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
from contract import make_pack
from PIL import Image

from colabkit.augment import Compose, MixUp, Normalize, PerSample, RandomHorizontalFlip, RandomResizedCrop
from colabkit.errors import LoaderFailed
from colabkit.loading import Loader
from colabkit.packs import FileDataset, open_pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def in_order(loader: Loader) -> torch.Tensor:
    return torch.cat([images.cpu() for images, _ in loader])


@pytest.mark.parametrize("keep", ["ram", "gpu"])
@pytest.mark.parametrize("options", [{}, {"transform": Normalize()}, {"prefetch_batches": 1}])
def test_batches_on_the_gpu_are_the_same_and_stay_valid(data, options, keep):
    held, expected = [], []
    here = Loader(data, 3, shuffle=True, **options)
    there = Loader(data, 3, shuffle=True, device="cuda", keep=keep, **options)
    assert there.tier.name == keep
    for _ in range(5):
        for on_cpu, on_gpu in zip(here, there, strict=True):
            assert {tensor.device.type for tensor in on_gpu} == {"cuda"}
            assert on_gpu[0].is_contiguous(memory_format=torch.channels_last)
            assert on_cpu[0].is_contiguous()
            held.append(on_gpu)
            expected.append(on_cpu)
    for on_gpu, on_cpu in zip(held, expected, strict=True):
        assert torch.allclose(on_gpu[0].cpu().float(), on_cpu[0].float(), atol=1e-6)
        assert torch.equal(on_gpu[1].cpu(), on_cpu[1])


def test_copies_never_overwrite_what_queued_kernels_still_read(folder):
    data = open_pack(make_pack(folder / "gpu.h5", (64, 64, 3), train=256))["train"]
    busy = torch.randn(2048, 2048, device="cuda")
    sums = []
    for images, _ in Loader(data, 16, device="cuda", keep="ram"):
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        # The GPU computes this sum after the queued products, long after the host has continued.
        sums.append(images.double().sum())
        del images
    expected = [rows.double().sum() for rows in data.rows.split(16)]
    assert torch.equal(torch.stack(sums).cpu(), torch.stack(expected))


@pytest.mark.parametrize("keep", ["ram", "gpu"])
def test_epochs_on_the_gpu_do_not_grow_its_memory(data, keep):
    loader = Loader(data, 4, shuffle=True, device="cuda", keep=keep)
    for _ in range(3):
        list(loader)
    reserved = torch.cuda.memory_reserved()
    for _ in range(30):
        list(loader)
    assert torch.cuda.memory_reserved() == reserved
    parts = {part.name: part for part in loader.meters.snapshot().parts}
    assert parts["gather"].samples >= 33 * 22
    if keep == "ram":
        # Copies in flight at the last check are not counted yet.
        assert parts["transfer"].samples >= 33 * 22 - 8


def test_a_state_resumes_from_cpu_to_gpu_and_back(data):
    expected = in_order(Loader(data, 4, shuffle=True))
    loader = Loader(data, 4, shuffle=True)
    first = next(iter(loader))[0].clone()
    resumed = Loader(data, 5, shuffle=True, device="cuda")
    resumed.load_state_dict(loader.state_dict())
    second = next(iter(resumed))[0].cpu()
    again = Loader(data, 4, shuffle=True)
    again.load_state_dict(resumed.state_dict())
    assert torch.equal(torch.cat([first, second, in_order(again)]), expected)


@pytest.mark.parametrize("keep", ["ram", "gpu"])
def test_transforms_on_the_gpu_draw_the_same_numbers_as_on_the_cpu(folder, keep):
    data = open_pack(make_pack(folder / f"mixed-{keep}.h5", (40, 40, 3), train=30))["train"]
    transform = Compose([RandomResizedCrop(32), RandomHorizontalFlip(), Normalize(), MixUp(3)])
    here = Loader(data, 8, shuffle=True, transform=transform)
    there = Loader(data, 8, shuffle=True, transform=transform, device="cuda", keep=keep)
    for (images, labels), (on_gpu, labels_on_gpu) in zip(here, there, strict=True):
        assert on_gpu.device.type == labels_on_gpu.device.type == "cuda"
        assert torch.allclose(on_gpu.cpu(), images, atol=2 / 255 / 0.5)
        assert torch.allclose(labels_on_gpu.cpu(), labels, atol=1e-6)


def test_an_error_is_raised_after_the_batches_before_it(data):
    calls = iter(range(10**6))

    def sample(image: torch.Tensor) -> torch.Tensor:
        if next(calls) == 9:
            raise ValueError("planned")
        return image

    batches = iter(Loader(data, 3, device="cuda", transform=PerSample(sample), num_workers=0))
    assert [images.device.type for images, _ in (next(batches) for _ in range(3))] == ["cuda"] * 3
    with pytest.raises(LoaderFailed, match="planned"):
        next(batches)


def test_decoded_images_are_in_gpu_memory_from_the_second_epoch(tmp_path):
    pictures = tmp_path / "files" / "one"
    pictures.mkdir(parents=True)
    for number in range(12):
        Image.effect_noise((20, 20), 50).convert("RGB").save(pictures / f"{number}.png")
    loader = Loader(FileDataset(tmp_path / "files"), 5, device="cuda", size=16, keep="gpu")
    first, second = in_order(loader), in_order(loader)
    assert torch.equal(first, second)
    assert loader.tier.name == "gpu"


def test_the_generators_of_the_caller_are_unchanged(data):
    torch.manual_seed(5)
    torch.cuda.manual_seed(6)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    list(Loader(data, 4, device="cuda", transform=lambda images: images + torch.rand_like(images.float())))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])
