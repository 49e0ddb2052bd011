"""`Loader` on a GPU yields the same batches as on the CPU, in bounded memory; skipped without a GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from contract import make_pack
from pictures import exif, photo, saved
from PIL import Image

import colabkit
from colabkit.augment import (
    CenterCrop,
    Compose,
    CutMix,
    MixUp,
    Normalize,
    PerSample,
    RandomHorizontalFlip,
    RandomResizedCrop,
)
from colabkit.errors import InvalidOption, LoaderFailed
from colabkit.foundation import processes
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
    torch.cuda.synchronize()
    parts = {part.name: part for part in loader.meters.snapshot().parts}
    assert parts["gather"].samples >= 33 * 22
    if keep == "ram":
        assert parts["transfer"].samples == 33 * 22


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
            # Allow a difference, because nvJPEG interpolates colors differently.
            assert (images.cpu().float() - expected.float()).abs().flatten(1).mean(1).max() < 4


@pytest.mark.parametrize("workers", [1, 4])
def test_decoding_on_the_gpu_never_overwrites_batches_in_use_and_frees_its_memory(jpegs, workers):
    loader = Loader(jpegs, 8, device="cuda", decode="gpu", size=224, num_workers=workers)
    expected = [images.double().sum() for images in loader]
    busy, side, allocated = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream(), 0
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
        # Memory that another stream used counts as allocated until the allocator looks at it again.
        torch.cuda.empty_cache()
        allocated = allocated if number > 3 else torch.cuda.memory_allocated()
    # Each thread has its own cuBLAS handle, whose workspace torch keeps.
    if workers == 1:
        assert torch.cuda.memory_allocated() == allocated


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


@pytest.fixture
def busy() -> Callable[[], None]:
    """Return a function that queues work of several milliseconds in the current stream."""
    factor = torch.randn(4096, 4096, device="cuda")

    def queue() -> None:
        for _ in range(4):
            torch.mm(factor, factor)

    return queue


@pytest.mark.parametrize("keep", ["ram", "gpu"])
def test_memory_of_a_pass_left_in_another_stream_is_not_used_before_its_copies_end(data, busy, keep):
    side, shape = torch.cuda.Stream(), (3, 3, 4, 3)
    for _ in range(20):
        with torch.cuda.stream(side):
            batches = iter(Loader(data, 3, device="cuda", keep=keep))
            next(batches)
            busy()
            next(batches)
        batches.close()
        with torch.cuda.stream(side):
            held = [torch.full(shape, 7, dtype=torch.uint8, device="cuda") for _ in range(20)]
        torch.cuda.synchronize()
        assert all(bool(tensor.eq(7).all()) for tensor in held)


@pytest.mark.parametrize("keep", ["ram", "gpu"])
def test_batches_may_be_requested_in_alternating_streams(data, busy, keep):
    expected = in_order(Loader(data, 3, shuffle=True))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(10):
        loader, copies = Loader(data, 3, shuffle=True, device="cuda", keep=keep), []
        batches = iter(loader)
        for number in range(len(loader)):
            with torch.cuda.stream(streams[number % 3]):
                images, labels = next(batches)
                busy()
                copies.append(images.clone())
                del images, labels
        torch.cuda.synchronize()
        assert torch.equal(torch.cat(copies).cpu(), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("keep", ["ram", "gpu"])
def test_batches_arrive_on_another_gpu_than_the_current_one(data, keep):
    before = torch.cuda.memory_allocated(0)
    loader = Loader(data, 3, device="cuda:1", keep=keep)
    batches = list(loader)
    assert {tensor.device for batch in batches for tensor in batch} == {torch.device("cuda", 1)}
    assert torch.equal(torch.cat([images.cpu() for images, _ in batches]), in_order(Loader(data, 3)))
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"keep": "ram"}, {"keep": "gpu"}])
def test_the_default_device_may_be_a_gpu(data, tmp_path, options):
    expected = in_order(Loader(data, 3, shuffle=True))
    model = torch.nn.Linear(3 * 3 * 4, 3).to(options.get("device", "cuda"))
    step = colabkit.supervised_step(
        torch.nn.Sequential(torch.nn.Flatten(), model), torch.optim.Adam(model.parameters())
    )
    with torch.device("cuda"):
        loader = Loader(data, 3, shuffle=True, **{"device": "cuda", **options})
        assert torch.equal(in_order(loader), expected)
        report = colabkit.train(step, loader, to=tmp_path / "run")
    assert report.steps == len(loader)
    assert report.failed_saves == ()


def sparse_diagonal(samples: list[int]) -> torch.Tensor:
    return torch.diag(torch.tensor(samples)).to_sparse()


def test_sparse_batches_arrive_on_the_gpu():
    for workers in (0, 1):
        batches = list(Loader(range(1, 9), 4, device="cuda", collate_fn=sparse_diagonal, num_workers=workers))
        assert [batch.device.type for batch in batches] == ["cuda", "cuda"]
        assert [batch.to_dense().diagonal().tolist() for batch in batches] == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("keep", ["ram", "gpu"])
def test_deleting_a_loader_frees_its_memory_without_a_collection(keep):
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        loader = Loader(torch.zeros(256, 1 << 16), 16, device="cuda", keep=keep)
        for batch in loader:
            batch.sum()
        del loader, batch
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before
    finally:
        gc.enable()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Allow torch to allocate only 32 MiB more, although the GPU has more free memory."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (32 << 20)) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("little_memory")
def test_samples_that_do_not_fit_in_gpu_memory_stay_in_ram():
    rows = torch.arange(64 << 20, dtype=torch.int64).to(torch.uint8).view(1024, -1)
    loader = Loader(rows, 16, device="cuda")
    assert loader.tier.name == "ram"
    assert loader.tier.reason.endswith("the GPU ran out of memory")
    assert torch.equal(torch.cat([batch.cpu() for batch in loader]), rows)
    with pytest.raises(InvalidOption, match="keep='gpu', but the GPU ran out of memory"):
        Loader(rows, 16, device="cuda", keep="gpu")


@pytest.mark.usefixtures("little_memory")
def test_samples_leave_gpu_memory_after_training_ran_out_of_it():
    rows = torch.arange(8 << 20, dtype=torch.int64).to(torch.uint8).view(1024, -1)
    loader = Loader(rows, 16, device="cuda")
    for expected in ("gpu", "ram"):
        assert torch.equal(torch.cat([batch.cpu() for batch in loader]), rows)
        assert loader.tier.name == expected
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(64 << 20, dtype=torch.uint8, device="cuda")


def test_mixed_images_keep_their_memory_format():
    images = torch.rand(8, 3, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
    for transform in (MixUp(4), CutMix(4)):
        mixed, _ = transform(images, torch.arange(8, device="cuda") % 4)
        assert mixed.is_contiguous(memory_format=torch.channels_last)


def test_a_process_may_exit_while_copies_are_under_way():
    program = """
import torch
from colabkit.loading import Loader
batches = iter(Loader(torch.zeros(64, 1 << 20), 4, device="cuda", keep="ram"))
next(batches)
factor = torch.randn(4096, 4096, device="cuda")
for _ in range(50):
    torch.mm(factor, factor)
next(batches)
"""
    done = processes.run([sys.executable, "-c", program], "exit", 300.0)
    assert done.status == 0, done.output
    assert "Error" not in done.output
