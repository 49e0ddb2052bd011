"""`pack()` stores the samples of map-style datasets, such as those of torch and torchvision."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from packed_files import assert_refused, opened
from pictures import photo, saved
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
from trees import leftovers, make_tree

from colabkit.errors import BadImage, BadSource, InvalidOption
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.decode.images import decode_image
from colabkit.packs.decode.jpeg import encode_jpeg
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.sample_writer import SampleRange, SampleWriter

RANDOM = np.random.default_rng(5)
PIXELS = RANDOM.integers(0, 256, (12, 8, 6, 3), dtype=np.uint8)
TENSORS = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
LABELS = torch.arange(12) % 3


class Samples(Dataset):
    """A map-style dataset of the given samples; a sample that is an exception is raised."""

    def __init__(self, samples: list[Any], count: int | None = None, **attributes: Any) -> None:
        self._samples = samples
        self._count = len(samples) if count is None else count
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        sample = self._samples[index]
        if isinstance(sample, Exception):
            raise sample
        return sample


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))


def images() -> list[Image.Image]:
    return [Image.fromarray(pixels) for pixels in PIXELS]


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(TENSORS),
        TensorDataset(TENSORS, LABELS),
        TensorDataset(TENSORS, LABELS, torch.rand(12, 3), torch.rand(12)),
        TensorDataset(torch.rand(12, 3, 4), torch.rand(12)),
        TensorDataset(torch.rand(12, 5), torch.rand(12, 2)),
        TensorDataset(torch.rand(12, 5), (torch.rand(12, 4) > 0.5).int()),
        TensorDataset(torch.rand(12, 5), torch.randint(0, 9, (12, 4, 4))),
        Samples([(torch.rand(2), number % 2, f"word {number}", b"\0" * number) for number in range(12)]),
        Samples([(TENSORS[number], [0.5, float(number)], np.float64(number)) for number in range(12)]),
        Samples([np.full((2, 2), number, ">i4") for number in range(12)]),
    ],
)
def test_samples_are_stored_as_the_dataset_returns_them(tmp_path, dataset):
    found = opened(dataset, tmp_path / "p.h5")
    assert found.splits == {"train": 12}
    for number in range(12):
        given = dataset[number]
        expected = given[0] if isinstance(given, tuple) and len(given) == 1 else given
        assert same(found["train"][number], expected)


def test_an_image_folder_dataset_gives_the_same_pack_as_its_folder(tmp_path):
    tree = make_tree(tmp_path / "tree", 4)
    dataset = torchvision.datasets.ImageFolder(str(tree))
    found = opened(dataset, tmp_path / "p.h5", splits={"train": 0.5, "test": 0.5})
    expected = opened(tree, tmp_path / "q.h5", splits={"train": 0.5, "test": 0.5})
    assert (found.classes, found.source, found.encoding) == (("ants", "bees", "cats"), "ImageFolder", "raw")
    for split in ("train", "test"):
        assert torch.equal(found[split].rows, expected[split].rows)
        assert torch.equal(found[split].labels, expected[split].labels)
        assert torch.bincount(found[split].labels).tolist() == [2, 2, 2]


def test_fake_data_is_stored_without_class_names(tmp_path):
    dataset = torchvision.datasets.FakeData(10, (3, 9, 7), 4)
    found = opened(dataset, tmp_path / "p.h5")
    for number in range(10):
        image, label = dataset[number]
        assert np.array_equal(found["train"][number][0].permute(1, 2, 0), np.asarray(image))
        assert found["train"][number][1] == int(label)
    assert found.classes == ()


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "CMYK", "1", "I;16", "YCbCr"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [None, (5, 4)])
def test_a_pillow_image_of_any_mode_is_converted_like_a_file(tmp_path, mode, channels, size):
    if mode == "I;16":
        image = Image.fromarray(RANDOM.integers(0, 65536, (8, 6), dtype=np.uint16))
    else:
        image = Image.fromarray(PIXELS[0]).convert(mode)
    file = io.BytesIO()
    image.save(file, "TIFF")
    found = opened(Samples([image]), tmp_path / "p.h5", channels=channels, size=size)
    expected = decode_image(file.getvalue(), channels, size)
    assert np.array_equal(found["train"][0].permute(1, 2, 0), expected)


def test_the_exif_orientation_of_a_pillow_image_is_applied(tmp_path):
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS[0]).save(file, "PNG", exif=exif)
    image = Image.open(file)
    found = opened(Samples([image, image.convert("RGB")]), tmp_path / "p.h5")
    for number in range(2):
        assert np.array_equal(found["train"][number].permute(1, 2, 0), np.rot90(PIXELS[0], -1))


@pytest.mark.parametrize("kind", ["image", "tensor", "array"])
def test_size_and_jpeg_apply_to_images_of_every_type(tmp_path, kind):
    large = [photo(64, 48 + 6 * number) for number in range(3)]
    make = {"image": Image.fromarray, "tensor": lambda p: torch.from_numpy(p).permute(2, 0, 1), "array": np.asarray}
    dataset = Samples([(make[kind](pixels), number) for number, pixels in enumerate(large)])
    with pytest.raises(
        BadImage, match=r"'sample 1' of 'Samples': the shape is 64x54x3, but 64x48x3 in the first sample.*size="
    ):
        pack(dataset, tmp_path / "p.h5", progress=False)
    assert list(tmp_path.iterdir()) == []
    sized = opened(dataset, tmp_path / "p.h5", size=16)
    as_jpeg = opened(dataset, tmp_path / "q.h5", encoding="jpeg", quality=95)
    small = opened(dataset, tmp_path / "r.h5", encoding="jpeg", size=16, quality=95)
    assert (sized.encoding, as_jpeg.encoding) == ("raw", "jpeg")
    for number, pixels in enumerate(large):
        expected = Image.fromarray(pixels)
        assert sized["train"][number][0].shape == small["train"][number][0].shape == (3, 16, 16)
        image = as_jpeg["train"][number][0].permute(1, 2, 0).numpy()
        assert image.shape == np.asarray(expected).shape
        assert np.abs(image.astype(int) - pixels).mean() < 4
        raw = np.ascontiguousarray(sized["train"][number][0].permute(1, 2, 0))
        assert np.array_equal(small["train"][number][0].permute(1, 2, 0), decode_image(encode_jpeg(raw, 95)))


def test_grayscale_tensors_stay_grayscale_and_channels_1_converts_colors(tmp_path):
    grey = opened(TensorDataset(TENSORS[:, :1]), tmp_path / "p.h5")
    assert torch.equal(grey["train"][:], TENSORS[:, :1])
    one = opened(TensorDataset(TENSORS), tmp_path / "q.h5", channels=1)
    assert np.array_equal(one["train"][3][0], np.asarray(Image.fromarray(PIXELS[3]).convert("L")))


def test_the_keys_of_mappings_determine_the_fields(tmp_path):
    rows = [{"id": f"r{n}", "image": image, "label": n % 3, "box": [n, 0.5]} for n, image in enumerate(images())]
    found = opened(Samples(rows), tmp_path / "p.h5")
    assert found["train"].fields == ("X", "Y", "id", "box")
    image, label, name, box = found["train"][5]
    assert np.array_equal(image.permute(1, 2, 0), PIXELS[5])
    assert (label, name, box.tolist()) == (2, "r5", [5, 0.5])
    other = opened(Samples(rows), tmp_path / "q.h5", labels=None)
    assert (other["train"].labels, other["train"].fields) == (None, ("X", "id", "box"))
    fine = [{"img": row["image"], "fine": row["label"], "coarse": 7} for row in rows]
    named = opened(Samples(fine), tmp_path / "r.h5", labels="fine")
    assert (named["train"].fields, named["train"].labels.tolist()) == (("X", "Y", "coarse"), LABELS.tolist())


def test_mappings_as_targets_and_masks_become_fields(tmp_path):
    boxes = [(TENSORS[n], {"boxes": torch.full((2, 4), n), "label": n, "area": 1.5}) for n in range(4)]
    found = opened(Samples(boxes), tmp_path / "p.h5")
    assert found["train"].fields == ("X", "Y", "boxes", "area")
    assert same(found["train"][2][1:], (2, np.full((2, 4), 2), 1.5))
    masks = [Image.fromarray(PIXELS[n, :, :, 0]).convert("P") for n in range(4)]
    found = opened(Samples([(TENSORS[n], masks[n], 5) for n in range(4)]), tmp_path / "q.h5")
    assert found["train"].fields == ("X", "Z", "Z2")
    assert same(found["train"][3], (TENSORS[3], np.asarray(masks[3]), 5))


def test_an_image_file_in_another_field_is_decoded_with_the_same_limits_as_x(tmp_path):
    masks = [saved(PIXELS[n, :, :, 0], "PNG") for n in range(4)]
    # Pillow raises a ValueError for the first, and reads the second with an external program.
    broken = b"P5 6 8 25x\n" + bytes(48)
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 8\n%%EndComments\n%%EOF\n"
    files = [*masks, broken, drawing]
    rows = [{"image": TENSORS[n], "mask": {"bytes": file, "path": None}} for n, file in enumerate(files)]
    report = pack(Samples(rows), tmp_path / "p.h5", progress=False, on_bad="skip", max_bad=2)
    assert [name for name, _ in report.bad] == ["sample 4", "sample 5"]
    assert "in 'mask', Pillow raised" in report.bad[0][1]
    assert report.bad[1][1] == "in 'mask', the file is not a readable image (it starts with b'%!PS-Ado')"
    data = open_pack(report.path)["train"]
    assert all(np.array_equal(data[n][1], PIXELS[n, :, :, 0]) for n in range(4))


def test_a_dataset_may_have_an_attribute_named_format(tmp_path):
    for number, attributes in enumerate(({"format": "png"}, {"format": None, "features": {}})):
        found = opened(Samples([(TENSORS[0], 1)], **attributes), tmp_path / f"{number}.h5")
        assert same(found["train"][0], (TENSORS[0], 1))


def test_class_names_come_from_the_dataset(tmp_path):
    names = ["owl", "elk", "ant"]
    words = Samples([(TENSORS[n], names[n % 3]) for n in range(12)], classes=names)
    numbers = Samples([(TENSORS[n], n % 3) for n in range(12)], classes=names, targets=LABELS.tolist())
    features = {"image": None, "label": SimpleNamespace(names=names)}
    rows = Samples([{"image": TENSORS[n], "label": n % 3} for n in range(12)], features=features)
    for number, dataset in enumerate((words, numbers, rows, Subset(numbers, range(12)), ConcatDataset([numbers]))):
        found = opened(dataset, tmp_path / f"{number}.h5")
        assert found.classes == ("owl", "elk", "ant")
        assert found["train"].labels.tolist() == LABELS.tolist()
    assert opened(Samples([(1.5, n > 2) for n in range(4)]), tmp_path / "b.h5").classes == ("False", "True")
    assert opened(Samples([(1.5, n) for n in (0, 2)], targets=[0, 2]), tmp_path / "n.h5").classes == ("0", "1", "2")


def test_labels_changed_by_a_target_transform_have_no_class_names(tmp_path):
    tree = make_tree(tmp_path / "tree", 4)
    whole = torchvision.datasets.ImageFolder(str(tree), target_transform=lambda label: label // 2)
    labels = [0] * 8 + [1] * 4
    changed = {"classes": ["owl", "elk", "ant"], "targets": LABELS, "transforms": SimpleNamespace(target_transform=abs)}
    other = Samples([(TENSORS[n], label) for n, label in enumerate(labels)], **changed)
    for number, dataset in enumerate((whole, Subset(whole, range(12)), ConcatDataset([whole]), other)):
        found = opened(dataset, tmp_path / f"{number}.h5")
        assert found.classes == ()
        assert found["train"].labels.tolist() == labels


def test_class_names_of_changed_labels_are_kept_for_text_and_for_a_wrapper_that_has_its_own(tmp_path):
    names = ["owl", "elk", "ant"]
    texts = Samples([(TENSORS[n], names[n % 3]) for n in range(12)], classes=names, target_transform=str)
    found = opened(texts, tmp_path / "texts.h5")
    assert (found.classes, found["train"].labels.tolist()) == (tuple(names), [n % 3 for n in range(12)])
    inner = Samples([(TENSORS[n], n % 2) for n in range(12)], classes=names, target_transform=abs)
    wrapper = Subset(inner, range(12))
    wrapper.classes = ["even", "odd"]
    assert opened(wrapper, tmp_path / "wrapper.h5").classes == ("even", "odd")
    wrapper.classes = names
    assert opened(wrapper, tmp_path / "passed-on.h5").classes == ()
    plain = Samples([(TENSORS[n], n % 3) for n in range(12)], classes=names)
    with pytest.raises(BadSource, match="the splits 'train' and 'test' have different classes"):
        pack({"train": inner, "test": plain}, tmp_path / "mixed.h5")


def test_subsets_and_concatenations_are_packed_and_split_by_class(tmp_path):
    whole = Samples([(TENSORS[n], n % 3) for n in range(12)], targets=LABELS)
    first, second = random_split(whole, [9, 3], torch.Generator().manual_seed(1))
    found = opened({"train": first, "val": second}, tmp_path / "p.h5")
    assert found.splits == {"train": 9, "val": 3}
    for split, view in (("train", first), ("val", second)):
        assert all(same(found[split][n], view[n]) for n in range(len(view)))
    joined = ConcatDataset([Subset(whole, [0, 3, 6, 9, 1, 4]), Subset(whole, [7, 10])])
    dealt = opened(joined, tmp_path / "q.h5", splits={"train": 0.5, "test": 0.5})
    for split in ("train", "test"):
        assert torch.bincount(dealt[split].labels).tolist() == [2, 2]


def test_shares_are_stratified_if_the_dataset_lists_its_classes_and_reported_otherwise(tmp_path):
    labels = torch.tensor([0] * 8 + [1] * 4)
    tensors = TensorDataset(torch.arange(12.0)[:, None].repeat(1, 3), labels)
    splits = {"train": 0.5, "val": 0.5}
    listed = opened(tensors, tmp_path / "p.h5", splits=splits)
    assert [sorted(listed[split].labels.tolist()) for split in splits] == [[0, 0, 0, 0, 1, 1]] * 2
    assert "splits" not in listed.info.inferred
    unlisted = opened(Samples([*tensors]), tmp_path / "q.h5", splits=splits)
    assert "not stratified" in unlisted.info.inferred["splits"]


def test_a_packed_dataset_can_be_packed_again_with_its_fields(tmp_path):
    source = {"X": PIXELS, "Y": LABELS.numpy(), "word": [f"w{n}" for n in range(12)], "box": np.eye(12)}
    first = opened(source, tmp_path / "p.h5", splits={"train": 0.75, "test": 0.25})
    for again in (opened(first, tmp_path / "q.h5"), opened(dict(first), tmp_path / "r.h5")):
        assert (again.splits, again.classes, again["train"].fields) == (
            first.splits,
            first.classes,
            first["train"].fields,
        )
        assert all(same(again[split][n], first[split][n]) for split in first for n in range(len(first[split])))
    view = first["train"].subset([5, 1])
    assert [label for _, label, _, _ in opened(view, tmp_path / "s.h5")["train"]] == [view[0][1], view[1][1]]


BOOM = ValueError("of your own\nin two lines")
GOOD = [(torch.zeros(2), n) for n in range(9)]
WRONG = {
    "raises": (
        Samples([*GOOD, BOOM]),
        BadImage,
        r"'sample 9' of 'Samples': the dataset raised ValueError: of your own in",
    ),
    "raises at once": (Samples([BOOM, *GOOD]), BadImage, r"sample 0 is bad \(the dataset raised ValueError"),
    "raises StopIteration": (Samples([*GOOD, StopIteration()]), BadImage, "'sample 9' .* raised StopIteration"),
    "is shorter than its length": (Samples(GOOD, count=12), BadImage, "'sample 9' .* raised IndexError"),
    "is empty": (Samples([]), BadSource, "the split 'train' has no samples"),
    "has an empty part": ({"train": Samples(GOOD), "test": Samples([])}, BadSource, "the split 'test' has no samples"),
    "changes its shape": (
        Samples([*GOOD, (torch.zeros(3), 1)]),
        BadImage,
        "the shape is 3, but 2 in the first sample.*same fields, with the same shapes",
    ),
    "changes its dtype": (
        Samples([*GOOD, (torch.zeros(2), 0.5)]),
        BadImage,
        "dtype of 'Y' is float32, but int64 in the first sample",
    ),
    "changes its kind": (Samples([*GOOD, ("word", 1)]), BadImage, "'X' is a str, unlike in the first sample"),
    "loses a field": (Samples([*GOOD, (torch.zeros(2),)]), BadImage, "the field 'Y' is missing"),
    "has an image among arrays": (Samples([*GOOD, (TENSORS[0], 1)]), BadImage, "'X' is a Tensor of torch.uint8"),
    "has text labels": (
        Samples([(1.0, "owl")]),
        BadSource,
        "the label 'owl' is text, but the dataset has no .classes.",
    ),
    "has a label without a name": (
        Samples([(1.0, 2)], classes=["owl", "elk"]),
        BadSource,
        "the label 2 has no name in the dataset's .classes., a list of 2 names",
    ),
    "has odd labels": (
        Samples([(1.0, [3, 4])]),
        BadSource,
        r"the label is int64 \[2\].* under another key, such as 'box_classes'. Pad values of different lengths",
    ),
    "has boxes of different lengths": (
        Samples([{"image": 1.0, "boxes": np.zeros((count, 4))} for count in (2, 1)]),
        BadImage,
        r"shape of 'boxes' is 1x4, but 2x4 in the first sample.* Pad values of different lengths",
    ),
    "has a label that is NaN": (Samples([(1.0, 2.0), (1.0, np.nan)]), BadImage, "'sample 1' .*label.* NaN"),
    "has objects": (Samples([(1.0, 2, object())]), BadSource, "in sample 0, 'Z' is an object"),
    "has empty tuples": (Samples([()]), BadSource, "an empty tuple"),
    "has no key of samples": (Samples([{"a": 1, "b": 2}]), BadSource, "the keys 'a', 'b'"),
    "has a bad key": (Samples([{"x": 1, "a/b": 2}]), InvalidOption, "a field is named 'a/b'"),
    "has other classes in a split": (
        {"train": Samples(GOOD, classes=["a", "b"]), "test": Samples(GOOD, classes=["b", "a"])},
        BadSource,
        "the splits 'train' and 'test' have different classes",
    ),
    "has unknown splits": ({"train": Samples(GOOD), "extra": Samples(GOOD)}, InvalidOption, "'train', 'extra'"),
}


def test_invalid_datasets_are_one_line_errors(tmp_path):
    for source, error, match in WRONG.values():
        assert_refused(error, f"^Cannot pack .*{match}", source, tmp_path / "p.h5")


def test_bad_samples_are_skipped_and_listed(tmp_path):
    def dataset() -> Samples:
        broken = Image.open(io.BytesIO(saved(PIXELS[0], "PNG")[:-40] + bytes(40)))
        return Samples([BOOM, (TENSORS[0], 7), (broken, 8), (TENSORS[1], 9)])

    report = pack(dataset(), tmp_path / "p.h5", progress=False, on_bad="skip", max_bad=3)
    assert [name for name, _ in report.bad] == ["sample 0", "sample 2"]
    assert report.bad[0][1].startswith("the dataset raised ValueError")
    assert open_pack(report.path)["train"].labels.tolist() == [7, 9]
    with pytest.raises(BadImage, match="at least 2 bad files"):
        pack(dataset(), tmp_path / "q.h5", progress=False, on_bad="skip", max_bad=1)


def test_options_that_do_not_apply_to_datasets_are_errors(tmp_path):
    given = {"on_bad": ["blank"], "fields": [["a"]], "labels": ["a", len], "splits": ["split"], "size": [8]}
    for name, values in {"encoding": ["source", "jpeg"], **given}.items():
        for value in values:
            assert_refused(InvalidOption, "^Cannot pack 'Samples'", Samples(GOOD), tmp_path / "p.h5", **{name: value})


def test_an_error_in_a_late_sample_leaves_no_files(tmp_path):
    with pytest.raises(BadImage) as caught:
        pack(Samples([*GOOD * 300, BOOM]), tmp_path / "p.h5", progress=False)
    assert "of your own" in repr(caught.value.__cause__)
    assert leftovers(tmp_path) == []


def test_samples_of_unknown_sizes_are_made_in_small_ranges(tmp_path, monkeypatch):
    sizes: list[int] = []
    written = SampleWriter._written

    def counted(writer: SampleWriter, samples: SampleRange, make: Any) -> Any:
        sizes.append(samples.count)
        return written(writer, samples, make)

    monkeypatch.setattr(SampleWriter, "_written", counted)
    found = opened(Samples([bytes([number]) * number for number in range(100)]), tmp_path / "p.h5")
    assert len(found["train"]) == sum(sizes) == 100
    assert max(sizes) <= 16


def test_labels_that_would_change_when_stored_are_errors(tmp_path):
    for label in (np.uint64(2**63 + 5), 1e300):
        assert_refused(BadSource, "^Cannot pack", Samples([(np.zeros(3), label)]), tmp_path / "p.h5")


def test_a_dataset_may_return_the_same_memory_for_each_sample(tmp_path):
    class ReusedMemorySamples(Samples):
        def __init__(self, memory: Any) -> None:
            super().__init__([])
            self._count, self._memory = 6, memory

        def __getitem__(self, index: int) -> Any:
            self._memory[...] = index
            return self._memory, index

    for number, memory in enumerate(
        (torch.zeros(3, 4, 4, dtype=torch.uint8), np.zeros((4, 4, 3), np.uint8), torch.zeros(5), np.zeros(5))
    ):
        data = opened(ReusedMemorySamples(memory), tmp_path / f"{number}.h5")["train"]
        assert [int(x.flatten()[-1]) for x, _ in data] == data.labels.tolist() == [*range(6)]
