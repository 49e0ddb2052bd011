"""`Loader(decode=)` decodes JPEG files on a GPU, or else on the CPU; a fake stands in for torchvision's nvJPEG."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from fake_nvjpeg import FakeNvjpeg, nvjpeg
from loader_batches import epoch, same
from packed_files import files_of, packed
from pictures import exif, photo, saved
from PIL import Image

from colabkit.augment import (
    CenterCrop,
    Compose,
    JointTransform,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
)
from colabkit.errors import BadImage, InvalidOption
from colabkit.loading import Loader
from colabkit.loading.engine.device_decoder import idle_stream
from colabkit.packs import FileDataset, open_pack

__all__ = ["nvjpeg"]

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "baseline": ("RGB", "JPEG", {}),
    "progressive": ("RGB", "JPEG", {"progressive": True}),
    "gray": ("L", "JPEG", {}),
    "cmyk": ("CMYK", "JPEG", {}),
    "rgb": ("RGB", "JPEG", {"keep_rgb": True}),
    "png": ("RGB", "PNG", {}),
    "palette": ("P", "PNG", {}),
}
ON_GPU = 3 + 8
"""Number of files in `folder` that nvJPEG decodes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images of all kinds, different sizes and all orientations."""
    root = tmp_path_factory.mktemp("kinds")
    for number, (mode, form, options) in enumerate([*KINDS.values(), *[KINDS["baseline"]] * 8]):
        image = Image.fromarray(photo(60 + 3 * number, 110 - 4 * number, seed=number)).convert(mode)
        turned = {"exif": exif(number - len(KINDS) + 1)} if number >= len(KINDS) else {}
        place = root / "ab"[number % 2] / f"{number:02}.{form.lower()}"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(saved(image, form, quality=95, **options, **turned))
    return root


CROPS = Compose([RandomResizedCrop(32), RandomHorizontalFlip()])
PADDED = Compose([RandomCrop(60, padding=12, fill=7), RandomHorizontalFlip()])


@pytest.mark.parametrize(
    "options",
    [
        {"size": (40, 24)},
        {"size": 32, "channels_last": True, "num_workers": 0},
        {"transform": PADDED},
        {"transform": CenterCrop(48)},
        {"transform": CROPS, "num_workers": 3},
    ],
)
def test_images_match_those_decoded_on_the_cpu_in_the_same_order(
    folder: Path, nvjpeg: FakeNvjpeg, options: dict[str, Any]
) -> None:
    data = FileDataset(folder)
    on_cpu = Loader(data, 4, shuffle=True, keep="auto", **options)
    on_gpu = Loader(data, 4, shuffle=True, decode="gpu", **options)
    nvjpeg.calls.clear()
    for _ in range(2):
        (expected, labels), (images, found) = epoch(on_cpu), epoch(on_gpu)
        assert torch.equal(labels, found)
        difference = (images.float() - expected.float()).abs().flatten(1)
        # Resizing after the full decode, not while decoding, changes individual values by more.
        assert difference.mean(1).max() < 0.7
        assert difference.max() <= (12 if "size" in options else 6 if options["transform"] is CROPS else 0)
        assert images.is_contiguous() or "channels_last" in options
    assert sum(nvjpeg.calls) == 2 * ON_GPU
    assert len(nvjpeg.calls) <= 2 * len(on_gpu)


def test_luminance_and_files_in_a_pack_are_decoded_on_the_gpu(folder: Path, nvjpeg: FakeNvjpeg, tmp_path: Path) -> None:
    pack = open_pack(packed(folder, tmp_path / "p.h5", encoding="source"))["train"]
    for data in (FileDataset(folder, channels=1), pack):
        nvjpeg.calls.clear()
        (expected, _), (images, _) = (epoch(Loader(data, 4, size=32, decode=decode)) for decode in ("cpu", "gpu"))
        assert images.shape == expected.shape
        assert (images.float() - expected.float()).abs().mean() < 0.7
        assert sum(nvjpeg.calls) == 1 + ON_GPU


def test_bounding_boxes_follow_crops_on_the_gpu(folder: Path, nvjpeg: FakeNvjpeg, tmp_path: Path) -> None:
    boxes = np.array([[8, 6, 40, 30], [0] * 4], np.float32)
    fields = {"boxes": lambda path: boxes}
    pack = open_pack(packed(folder, tmp_path / "p.h5", encoding="source", labels=None, fields=fields))["train"]
    joint = JointTransform(CROPS, labels="boxes")
    found = [epoch(Loader(pack, 4, transform=joint, decode=decode)) for decode in ("cpu", "gpu", "auto")]
    assert same(found[1][1], found[0][1])
    assert same(found[2][1], found[0][1])
    assert found[0][1][:, 0].any()


def test_every_epoch_decodes_again_and_nothing_is_cached(folder: Path, nvjpeg: FakeNvjpeg) -> None:
    loader = Loader(FileDataset(folder), 4, size=32, decode="gpu")
    assert (loader.tier.name, loader.tier.rows, loader.decoder.name) == ("source", 0, "gpu")
    assert "decoded on gpu (requested with decode='gpu')" in repr(loader)
    nvjpeg.calls.clear()
    assert same(list(loader), list(loader))
    assert sum(nvjpeg.calls) == 2 * ON_GPU


def test_large_images_are_decoded_a_few_at_a_time(
    folder: Path, nvjpeg: FakeNvjpeg, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(FileDataset(folder), 15, size=32, decode="gpu")
    expected = list(loader)
    monkeypatch.setattr("colabkit.loading.engine.device_decoder._DECODED_BYTES", 50_000)
    nvjpeg.calls.clear()
    assert same(list(loader), expected)
    assert max(nvjpeg.calls) <= 3


def test_a_file_that_nvjpeg_rejects_is_decoded_on_the_cpu(
    folder: Path, nvjpeg: FakeNvjpeg, caplog: pytest.LogCaptureFixture
) -> None:
    loader = Loader(FileDataset(folder), 15, size=32, decode="gpu")
    expected = list(loader)
    nvjpeg.rejected = {file.read_bytes() for file in files_of(folder)[:3]}
    nvjpeg.calls.clear()
    with caplog.at_level(logging.WARNING, "colabkit"):
        assert same(list(loader), expected)
    # Once in an epoch, a warning names the reason.
    assert [record.message for record in caplog.records] == [
        "a JPEG file cannot be decoded on the GPU (Error while decoding JPEG images: 5), so the CPU decodes such files"
    ]
    # The whole list fails first, then each file is decoded alone.
    assert nvjpeg.calls == [ON_GPU, *[1] * ON_GPU]


def test_bad_files_are_an_error_skipped_or_blank(nvjpeg: FakeNvjpeg, tmp_path: Path) -> None:
    files = [saved(photo(seed=number), "JPEG") for number in range(12)]
    good = files[0]
    # nvJPEG rejects the first bad file, and Pillow finds no pixels in it; the second is truncated.
    files[2], files[4], files[9] = good[: good.index(b"\xff\xda") + 2] + b"\xff\xd9", good[:-40], b"<html> not found"
    nvjpeg.rejected = {files[2]}
    for number, file in enumerate(files):
        (tmp_path / f"{number:02}.jpg").write_bytes(file)
    data, transforms = FileDataset(tmp_path, labels=None), (None, RandomResizedCrop(8))
    for transform in transforms:
        size = {"size": 16} if transform is None else {"transform": transform}
        for on_bad in ("skip", "blank"):
            loader = Loader(data, 5, decode="gpu", on_bad=on_bad, **size)
            expected, images = torch.cat([*Loader(data, 5, on_bad=on_bad, **size)]), torch.cat([*loader])
            assert len(images) == (9 if on_bad == "skip" else 12)
            # The CPU reduces large crops while it decodes them.
            assert (images.float() - expected.float()).abs().mean() < 3
            assert len(loader.bad_samples) == 3
            blank = [number for number, image in enumerate(images) if not image.any()]
            assert blank == ([2, 4, 9] if on_bad == "blank" else [])
        with pytest.raises(BadImage, match=r"Cannot decode '02\.jpg'"):
            list(Loader(data, 3, decode="gpu", num_workers=0, **size))


@pytest.mark.parametrize("decode", ["gpu", "auto"])
def test_images_are_on_the_device_of_the_loader_for_any_default_device(
    folder: Path, nvjpeg: FakeNvjpeg, decode: Any
) -> None:
    with torch.device("meta"):
        for images, _ in Loader(FileDataset(folder), 4, transform=CROPS, decode=decode, device="cpu"):
            assert images.device.type == "cpu"


def test_threads_decode_in_streams_of_their_own_that_are_idle_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, torchvision would write to memory that queued work still reads."""
    queued: dict[object, int] = {}

    class Stream:
        def __init__(self, _: object) -> None:
            queued[self] = 0

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Stream) -> None:
            self.stream, self.work = stream, queued[stream]

        def synchronize(self) -> None:
            queued[self.stream] -= self.work

    current: list[object] = []

    @contextmanager
    def in_stream(stream: Stream) -> Iterator[None]:
        assert stream not in current
        current.append(stream)
        yield
        current.remove(stream)

    fakes = {"Stream": Stream, "Event": Event, "stream": in_stream, "device": lambda _: nullcontext()}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    device = torch.device("cuda:97")
    with idle_stream(device) as synchronize, idle_stream(device):
        first, second = current
        assert first is not second
        queued[first] += 5
        synchronize()
        assert queued[first] == 0
        queued[first] += 2
        queued[second] += 3
    assert set(queued.values()) == {0}
    for _ in range(3):
        with suppress(RuntimeError), idle_stream(device):
            queued[current[0]] += 1
            raise RuntimeError("planned")
        current.clear()
    assert list(queued.values()) == [0, 0]


def test_images_of_another_size_are_an_error(nvjpeg: FakeNvjpeg, folder: Path) -> None:
    with pytest.raises(BadImage, match="height and width of the image"):
        list(Loader(FileDataset(folder), 5, decode="gpu"))


def test_a_state_resumes_only_with_the_same_decoder(
    folder: Path, nvjpeg: FakeNvjpeg, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = FileDataset(folder)
    on_gpu, expected = Loader(data, 4, size=32, decode="gpu"), list(Loader(data, 4, size=32, decode="gpu"))
    next(iter(on_gpu))
    state = on_gpu.state_dict()
    assert state["decoder"] == "gpu"
    resumed = Loader(data, 4, size=32, decode="gpu")
    resumed.load_state_dict(state)
    assert same(list(resumed), expected[1:])
    on_cpu = Loader(data, 4, size=32)
    with pytest.raises(InvalidOption, match="images decoded with decode='gpu'; expected decode='cpu'"):
        on_cpu.load_state_dict(state)
    assert on_cpu.received == (0, 0)
    with caplog.at_level(logging.WARNING, "colabkit"):
        Loader(data, 4, size=32, decode="auto").load_state_dict(state)
    assert "images are decoded on the CPU now, so their pixels differ slightly" in caplog.text


def test_auto_chooses_the_faster_decoder_unless_images_are_cached(
    folder: Path, nvjpeg: FakeNvjpeg, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = FileDataset(folder)
    cached = Loader(data, 4, size=32, decode="auto").decoder
    assert (cached.name, cached.reason) == ("cpu", "each sample is decoded once, and cached in ram")
    nvjpeg.calls.clear()
    measured = Loader(data, 4, transform=CROPS, decode="auto", on_bad="raise")
    assert measured.decoder.reason.endswith("on the CPU")
    assert sum(nvjpeg.calls) == 1 + 2 * ON_GPU
    for cpu, gpu, chosen in ((100.0, 140.0, "cpu"), (100.0, 160.0, "gpu")):
        monkeypatch.setattr("colabkit.loading.engine.decoder_choice._rates", lambda *_, both=(cpu, gpu): both)
        loader = Loader(data, 4, transform=CROPS, decode="auto")
        assert str(loader.decoder) == f"{chosen} ({gpu:.0f} images/s on the GPU, {cpu:.0f} on the CPU)"
        assert loader.state_dict()["decoder"] == chosen


def refused(data: Any, **options: Any) -> str:
    with pytest.raises(InvalidOption) as caught:
        Loader(data, 4, **options)
    return str(caught.value)


def test_decoding_on_a_gpu_that_is_impossible_is_an_error_and_auto_uses_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = FileDataset(folder)
    pixels = torch.zeros(9, 3, 8, 8, dtype=torch.uint8), torch.zeros(9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    without_gpu = (
        "decode='gpu', but PyTorch finds no usable GPU. Choose a GPU runtime and pass device='cuda', or omit decode=."
    )
    assert refused(data, size=32, decode="gpu").endswith(without_gpu)
    assert str(Loader(data, 4, size=32, decode="auto").decoder) == "cpu (PyTorch finds no usable GPU)"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "the batches are on the CPU. Pass device='cuda' as well" in refused(data, size=32, decode="gpu")
    assert refused(pixels, decode="gpu").endswith("but the samples need no decoding. Omit decode=.")
    assert Loader(pixels, 4, decode="auto").decoder.reason == "the samples need no decoding"
    assert "does not support decode=" in refused(pixels, decode="gpu", collate_fn=torch.utils.data.default_collate)
    assert "decode='nvjpeg'; expected" in refused(data, decode="nvjpeg")


def test_a_torchvision_that_cannot_decode_on_a_gpu_is_an_error_and_auto_uses_the_cpu(
    folder: Path, nvjpeg: FakeNvjpeg, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_nvjpeg(*_: Any, **__: Any) -> None:
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support")

    data = FileDataset(folder)
    assert "keep='ram' caches samples that are decoded on the CPU. Omit keep=, or omit decode=." in refused(
        data, size=32, decode="gpu", keep="ram"
    )
    monkeypatch.setattr(torchvision.io, "decode_jpeg", without_nvjpeg)
    reason = (
        "torchvision cannot decode JPEG files on cpu (decode_jpegs_cuda: torchvision not compiled with nvJPEG support)"
    )
    assert f"decode='gpu', but {reason}" in refused(data, size=32, decode="gpu")
    assert Loader(data, 4, size=32, decode="auto").decoder.reason == reason
    monkeypatch.setattr(torchvision.io, "decode_jpeg", lambda files, **_: [torch.zeros(3, 64, 64)] * len(files))
    assert "a test image was decoded incorrectly" in refused(data, size=32, decode="gpu")
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    assert "torchvision is not installed. Run pip install torchvision, or omit decode=." in refused(
        data, size=32, decode="gpu"
    )


def test_transforms_after_decoding_are_applied(folder: Path, nvjpeg: FakeNvjpeg) -> None:
    data = FileDataset(folder)
    steps = Compose([RandomResizedCrop(32), lambda images: images.float() / 255, Normalize((0.5,), (0.5,))])
    (expected, _), (images, _) = (epoch(Loader(data, 4, transform=steps, decode=decode)) for decode in ("cpu", "gpu"))
    assert images.dtype == torch.float32
    assert np.isclose(images.mean(), expected.mean(), atol=0.02)
