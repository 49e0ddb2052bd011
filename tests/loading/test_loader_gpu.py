"""`Loader` on a GPU yields the same batches as on the CPU, in bounded memory; skipped without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contract import make_pack
from pictures import exif, photo, saved
from PIL import Image

from colabkit.augment import CenterCrop, Compose, MixUp, Normalize, PerSample, RandomHorizontalFlip, RandomResizedCrop
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


@pytest.fixture
def jpegs(tmp_path: Path) -> FileDataset:
    """Return 64 smooth images of several sizes and orientations, some of which nvJPEG cannot decode."""
    for number in range(64):
        image = Image.fromarray(photo(200 + number, 300 - number, seed=number))
        kind, mode = ("PNG", "RGB") if number % 8 == 5 else ("JPEG", ("RGB", "L", "CMYK")[number % 3])
        image = image.convert(mode)
        options = {"exif": exif(number % 8 + 1), "progressive": number % 2 == 1} if kind == "JPEG" else {}
        (tmp_path / f"{number:02}.{kind.lower()}").write_bytes(saved(image, kind, **options))
    return FileDataset(tmp_path, labels=None)


@pytest.mark.parametrize(
    "options", [{"size": 96}, {"transform": RandomResizedCrop(96)}, {"transform": CenterCrop(260)}]
)
def test_jpegs_decoded_on_the_gpu_match_those_decoded_on_the_cpu(jpegs, options):
    on_cpu = Loader(jpegs, 16, shuffle=True, **options)
    on_gpu = Loader(jpegs, 16, shuffle=True, device="cuda", decode="gpu", **options)
    held = [[*on_gpu] for _ in range(3)]
    for batches in held:
        for images, expected in zip(batches, on_cpu, strict=True):
            assert images.device.type == "cuda"
            assert images.is_contiguous(memory_format=torch.channels_last)
            # nvJPEG interpolates colors differently.
            assert (images.cpu().float() - expected.float()).abs().flatten(1).mean(1).max() < 4


def test_decoding_on_the_gpu_never_overwrites_batches_in_use_and_frees_its_memory(jpegs):
    loader = Loader(jpegs, 8, device="cuda", decode="gpu", size=224)
    expected = [images.double().sum() for images in loader]
    busy, side, reserved = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream(), 0
    for number in range(20):
        sums = []
        with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
            for images in loader:
                for _ in range(10):
                    busy = torch.tanh(busy @ busy)
                # The GPU computes this sum long after the host has continued.
                sums.append(images.double().sum())
                del images
            assert torch.equal(torch.stack(sums), torch.stack(expected))
        torch.cuda.synchronize()
        reserved = reserved if number > 3 else torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == reserved


def test_a_pass_left_while_the_gpu_decodes_leaves_the_other_batches_intact(jpegs):
    loader = Loader(jpegs, 8, device="cuda", decode="gpu", size=224)
    first = next(iter(loader)).clone()
    for _ in range(5):
        next(iter(loader))
        junk = torch.full((64, 1 << 20), 255, dtype=torch.uint8, device="cuda")
        assert torch.equal(next(iter(loader)), first)
        del junk


def test_the_fastest_decoder_is_measured_on_the_gpu(jpegs):
    loader = Loader(jpegs, 16, device="cuda", decode="auto", transform=RandomResizedCrop(96))
    assert "images/s on the GPU" in loader.decoder.reason
    assert len(list(loader)) == 4
