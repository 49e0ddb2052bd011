"""`Loader` decodes, resizes and crops the images of packs that store image files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loader_batches import epoch
from packed_files import packed, photos
from pictures import AGREEMENT, exif, photo, saved
from PIL import Image
from sampling import sampled
from torch import Tensor

from colabkit.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    Draws,
    JointTransform,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    Transform,
)
from colabkit.errors import BadImage, InvalidOption
from colabkit.loading import Loader
from colabkit.packs import FileDataset, PackedDataset, decode_image, open_pack

KINDS: dict[str, dict[str, Any]] = {
    "baseline": {"format": "JPEG"},
    "progressive": {"format": "JPEG", "progressive": True},
    "grey": {"format": "JPEG", "mode": "L"},
    "CMYK": {"format": "JPEG", "mode": "CMYK"},
    "turned": {"format": "JPEG", "exif": exif(6)},
    "png": {"format": "PNG"},
    "palette": {"format": "PNG", "mode": "P"},
    "webp": {"format": "WEBP"},
}


def file_of(kind: str, pixels: np.ndarray) -> bytes:
    options = dict(KINDS[kind])
    form, mode = options.pop("format"), options.pop("mode", "RGB")
    return saved(Image.fromarray(pixels).convert(mode), form, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose subfolder `files` holds images of all kinds in three classes.

    Upright, all images are 40 pixels high and 56 pixels wide.
    """
    root = tmp_path_factory.mktemp("kinds")
    for number, kind in enumerate([*KINDS, "baseline", "png", "grey", "progressive"]):
        place = root / "files" / "abc"[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        pixels = photo(*((56, 40) if kind == "turned" else (40, 56)), seed=number)
        suffix = "jpg" if KINDS[kind]["format"] == "JPEG" else KINDS[kind]["format"].lower()
        (place / f"{number:02d} {kind}.{suffix}").write_bytes(file_of(kind, pixels))
    return root


@pytest.fixture(scope="module")
def sized(folder: Path) -> dict[str, PackedDataset]:
    return {
        encoding: open_pack(packed(folder / "files", folder / f"{encoding}.h5", encoding=encoding))["train"]
        for encoding in ("source", "jpeg", "raw")
    }


def one_by_one(data: Any, count: int | None = None) -> Tensor:
    return torch.stack([data[number][0] for number in range(count or len(data))])


def applied(transform: Transform, images: Tensor, seed: int = 0, epoch: int = 0) -> Tensor:
    """Apply a transform with the random numbers of an epoch's first samples."""
    return transform.apply(images, None, Draws(seed, epoch, np.arange(len(images))))[0]


def distance(one: Tensor, other: Tensor) -> int:
    assert one.shape == other.shape
    return int((one.int() - other.int()).abs().max())


@pytest.mark.parametrize("encoding", ["source", "jpeg"])
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_of_encoded_packs_equal_the_decoded_images(sized, encoding, workers):
    data = sized[encoding]
    images, labels = epoch(Loader(data, 5, num_workers=workers))
    last, _ = epoch(Loader(data, 5, num_workers=workers, channels_last=True))
    expected = torch.stack(
        [torch.from_numpy(decode_image(data.encoded(n)).copy()).permute(2, 0, 1) for n in range(len(data))]
    )
    assert torch.equal(images, expected)
    assert torch.equal(labels, data.labels)
    assert torch.equal(last, expected)
    assert images.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_shuffled_images_keep_their_labels(sized):
    loader = Loader(sized["source"], 5, shuffle=True, num_workers=3)
    plain = one_by_one(sized["source"])
    for _ in range(2):
        images, labels = epoch(loader)
        places = [next(n for n in range(12) if torch.equal(plain[n], image)) for image in images]
        assert sorted(places) == list(range(12))
        assert places != sorted(places)
        assert torch.equal(labels, sized["source"].labels[places])


@pytest.mark.parametrize("size", [24, (17, 30), (80, 90)])
def test_size_gives_the_same_images_as_packing_with_that_size(folder, sized, tmp_path, size):
    expected = open_pack(packed(folder / "files", tmp_path / "p.h5", size=size))["train"].rows.permute(0, 3, 1, 2)
    for data in (sized["source"], FileDataset(folder / "files")):
        loader = Loader(data, 5, size=size, num_workers=2)
        assert torch.equal(epoch(loader)[0], expected)
        assert torch.equal(epoch(loader)[0], expected)


@pytest.mark.parametrize("encoding", ["source", "raw"])
@pytest.mark.parametrize(
    "transform",
    sampled(
        [
            RandomResizedCrop(30),
            Compose([RandomVerticalFlip(), RandomResizedCrop((24, 32), scale=(0.3, 1.0)), RandomHorizontalFlip()]),
            Compose([RandomVerticalFlip(), Resize((24, 32))]),
            Compose([RandomCrop(24, padding=6, fill=9), RandomHorizontalFlip()]),
            CenterCrop(50),
            RandomHorizontalFlip(),
            Compose([RandomResizedCrop(30), Normalize((0.5,), (0.25,))]),
        ],
        2,
    ),
    ids=repr,
)
def test_a_transform_gives_the_same_result_as_on_whole_batches(sized, encoding, transform):
    data = sized[encoding]
    loader = Loader(data, 5, transform=transform, seed=7, num_workers=3)
    for number in range(2):
        found = epoch(loader)[0]
        expected = applied(transform, one_by_one(data), 7, number)
        if found.dtype == torch.uint8:
            assert distance(found, expected) <= AGREEMENT
        else:
            assert (found - expected).abs().max() <= 1.01 * AGREEMENT / 255 / 0.25


def test_large_crops_of_jpegs_differ_little_from_those_of_the_decoded_images(tmp_path):
    for index in range(8):
        Image.fromarray(photo(331 + 7 * index, 447 - 9 * index, index)).save(tmp_path / f"{index}.jpg", quality=95)
    transform = Compose([RandomResizedCrop(40, scale=(0.3, 1.0)), RandomHorizontalFlip()])
    loader = Loader(FileDataset(tmp_path, labels=None), 8, transform=transform, seed=7)
    for number in range(5):
        (images,) = loader
        for index, image in enumerate(images):
            pixels = torch.from_numpy(decode_image((tmp_path / f"{index}.jpg").read_bytes())).permute(2, 0, 1)[None]
            expected = transform.apply(pixels, None, Draws(7, number, np.array([index])))[0][0]
            difference = (expected.int() - image.int()).abs().float()
            assert difference.mean() < 1
            assert difference.max() <= 8


@pytest.mark.parametrize("workers", [1, 4])
def test_a_sample_is_cropped_identically_by_any_number_of_threads_and_in_any_batch(sized, workers):
    transform = Compose([RandomResizedCrop(16), RandomHorizontalFlip()])
    expected = epoch(Loader(sized["source"], 4, shuffle=True, seed=3, transform=transform, num_workers=2))[0]
    for batch_size in (1, 5, 12):
        loader = Loader(sized["source"], batch_size, shuffle=True, seed=3, transform=transform, num_workers=workers)
        assert torch.equal(epoch(loader)[0], expected)


@pytest.mark.full
@pytest.mark.parametrize("progressive", sampled([False, True], 1))
@pytest.mark.parametrize(("grain", "most"), sampled([(0, 12), (60, 20)], 1))
def test_the_error_of_photos_scaled_while_decoding_is_below_that_of_area_averages(tmp_path, progressive, grain, most):
    random = np.random.default_rng(1)
    for number in range(6):
        pixels = photo(900, 1200, seed=number) + random.integers(-grain, grain + 1, (900, 1200, 3))
        data = saved(np.clip(pixels, 0, 255).astype(np.uint8), "JPEG", quality=92, progressive=progressive)
        (tmp_path / f"{number}.jpg").write_bytes(data)
    files = FileDataset(tmp_path, labels=lambda _: 0)
    whole = one_by_one(files)
    for transform in (RandomResizedCrop(64, scale=(0.1, 1.0)), RandomResizedCrop(112, scale=(0.3, 1.0))):
        found = epoch(Loader(files, 4, transform=transform, num_workers=2))[0]
        exact = applied(transform, whole).int()
        difference = (found.int() - exact).abs().float()
        averaged = (area_averages(transform, whole) - exact).abs().mean((1, 2, 3))
        # On smooth photos, most of the error is that scaled images are rounded to bytes before they are resized.
        assert (difference.mean((1, 2, 3)) < averaged.clamp(min=0.5)).all()
        assert difference.max() <= most


def area_averages(transform: RandomResizedCrop, images: Tensor) -> Tensor:
    """Return the boxes of images, reduced with the averages of areas, as in the mode INTER_AREA of OpenCV."""

    def shares(length: int, size: int) -> Tensor:
        pixels, ends = torch.arange(length), torch.linspace(0, length, size + 1, dtype=torch.float64)[:, None]
        covered = (pixels + 1).minimum(ends[1:]) - pixels.maximum(ends[:-1])
        return covered.clamp(min=0) * size / length

    boxes = transform.boxes(np.array([images.shape[2:]] * len(images)), Draws(0, 0, np.arange(len(images))))
    reduced = []
    for image, (top, left, height, width, *_) in zip(images, boxes.rows(), strict=True):
        box = image[:, top : top + height, left : left + width].double()
        reduced.append(shares(height, transform.size[0]) @ box @ shares(width, transform.size[1]).T)
    return torch.stack(reduced).round()


def test_boxes_at_the_top_of_large_photos_equal_those_of_the_whole_image(tmp_path):
    photos(tmp_path / "large", 4, (500, 400), quality=92)
    data = FileDataset(tmp_path / "large")
    transform = RandomResizedCrop(200, scale=(0.1, 0.3))
    found = epoch(Loader(data, 5, transform=transform))[0]
    assert distance(found, applied(transform, one_by_one(data))) <= AGREEMENT


def test_images_of_different_sizes_are_cropped_to_one_size(tmp_path):
    photos(tmp_path / "f", 2, (40, 50))
    (tmp_path / "f" / "bees" / "000.jpg").write_bytes(saved(photo(61, 37), "JPEG"))
    (tmp_path / "f" / "cats" / "001.jpg").write_bytes(saved(photo(90, 33), "JPEG", exif=exif(6)))
    data, transform = FileDataset(tmp_path / "f"), Compose([RandomResizedCrop(45), RandomHorizontalFlip()])
    found = epoch(Loader(data, 4, transform=transform, num_workers=2))[0]
    for number, (image, _) in enumerate(data):
        draws = Draws(0, 0, np.array([number]))
        assert distance(found[number : number + 1], transform.apply(image[None], None, draws)[0]) <= AGREEMENT


def test_images_of_different_sizes_without_size_raise_an_error(tmp_path):
    photos(tmp_path / "f", 2)
    (tmp_path / "f" / "bees" / "001.jpg").write_bytes(saved(photo(30, 37), "JPEG"))
    loader = Loader(FileDataset(tmp_path / "f"), 2)
    with pytest.raises(BadImage, match=r"Cannot decode 'bees/001\.jpg' of .*30x37.*24x32.*Pass size=, or"):
        list(loader)
    data = open_pack(packed(tmp_path / "f", tmp_path / "p.h5", encoding="source"))["train"]
    with pytest.raises(BadImage, match=r"Cannot decode train\[3\] of .*p\.h5.*Pass size="):
        list(Loader(data, 2))


BOX = [8.0, 6.0, 20.0, 18.0]
BOXED = Compose([Resize((48, 40)), RandomHorizontalFlip(), RandomCrop(36)])


@pytest.fixture
def boxed(tmp_path: Path) -> PackedDataset:
    """Return photos of different sizes with a bounding box each, and an empty one, in pixels of the original photo."""
    photos(tmp_path / "f", 2)
    for name in ("bees/001", "cats/000"):
        (tmp_path / "f" / f"{name}.jpg").write_bytes(saved(photo(61, 37), "JPEG"))
    boxes = np.array([BOX, [0] * 4], np.float32)
    options = {"encoding": "source", "labels": None, "fields": {"boxes": lambda path: boxes}}
    return open_pack(packed(tmp_path / "f", tmp_path / "p.h5", **options))["train"]


@pytest.mark.parametrize("transform", [BOXED, Compose([RandomResizedCrop(30), RandomHorizontalFlip()])])
@pytest.mark.parametrize("workers", [0, 2])
def test_bounding_boxes_follow_images_of_different_sizes(boxed, transform, workers):
    joint = JointTransform(transform, labels="boxes")
    loader = Loader(boxed, 4, shuffle=True, seed=3, transform=joint, num_workers=workers)
    images, boxes = (torch.cat(parts) for parts in zip(*loader, strict=True))
    order = next(iter(Loader(torch.arange(len(boxed)), len(boxed), shuffle=True, seed=3))).tolist()
    for position, number in enumerate(order):
        image, given = boxed[number]
        expected = joint.apply(image[None], given[None], Draws(3, 0, np.array([position])))
        assert torch.equal(boxes[position], expected[1][0])
        assert distance(images[position], expected[0][0]) <= AGREEMENT
    assert not boxes[:, 1].any()
    assert boxes[:, 0].any()


def test_bounding_boxes_follow_only_crops_in_the_transform(boxed):
    joint = JointTransform(BOXED, labels="boxes")
    advice = re.escape("JointTransform(Compose([Resize((224, 224)), ...]), labels='boxes')")
    for transform in (joint, Compose([joint, ColorJitter(0.1)])):
        with pytest.raises(InvalidOption, match=rf"not their bounding boxes\. Omit size=, .*transform={advice}"):
            Loader(boxed, 4, size=40, transform=transform)
    with pytest.raises(BadImage, match=rf"images of one size\. Pass a transform that resizes .* as {advice}\."):
        list(Loader(boxed, 4, transform=JointTransform(RandomHorizontalFlip(), labels="boxes")))
    with pytest.raises(InvalidOption, match=r"the labels are None; expected floating-point bounding boxes"):
        list(Loader(boxed, 4, fields=["X"], transform=joint))


@pytest.mark.parametrize("fill", [0.5, 300])
@pytest.mark.parametrize("encoding", ["raw", "source"])
def test_a_fill_value_that_is_not_a_byte_raises_an_error_before_training(sized, encoding, fill):
    crop = RandomCrop(8, padding=4, fill=fill)
    with pytest.raises(
        InvalidOption, match=rf"fill={fill} is used with uint8 images; expected a whole number from 0 to 255"
    ):
        list(Loader(sized[encoding], 2, transform=crop))


@pytest.mark.parametrize("option", [{"size": 8}, {"on_bad": "skip"}])
def test_decoding_options_raise_an_error_if_nothing_is_decoded(sized, option):
    with pytest.raises(
        InvalidOption, match=r"(size=8|size=\(8, 8\)|on_bad='skip').* (stored|decoding).*Omit (size|on_bad)="
    ):
        Loader(sized["raw"], 2, **option)
