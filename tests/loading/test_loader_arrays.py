"""`Loader` over arrays, packs with several fields or without labels, and HDF5 files written by other programs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from contract import seal_every_kind, seal_fields
from loader_batches import LoaderContract
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

from colabkit.augment import Compose, PerBatch, RandomHorizontalFlip
from colabkit.errors import InvalidOption
from colabkit.foundation import epoch_order
from colabkit.loading import Loader
from colabkit.loading.engine import batch_builder
from colabkit.packs import PackedDataset, open_pack

COUNT = 23
RANDOM = np.random.default_rng(3)
IMAGES = RANDOM.integers(0, 256, (COUNT, 6, 5, 3)).astype("|u1")
LABELS = np.arange(COUNT) % 3


def order_of(epoch: int = 0) -> np.ndarray:
    return epoch_order(COUNT, 5, epoch, 0, COUNT)


def loaded(dataset: Any, **options: Any) -> list[Any]:
    return list(Loader(dataset, 4, shuffle=True, seed=5, **options))


def joined(batches: list[Any], place: Any) -> torch.Tensor:
    return torch.cat([batch[place] for batch in batches])


class TestArrayStream(LoaderContract):
    data: Any = MappingProxyType({"x": torch.from_numpy(IMAGES), "y": LABELS})
    options: Any = MappingProxyType({"shuffle": True, "seed": 2})


@pytest.mark.parametrize("dtype", ["|u1", "|b1", "<i2", "<i8", "<f2", "<f4", "<f8", "<c8"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5, 2), (2, 3, 4, 5)])
def test_a_single_array_or_tensor_gives_batches_of_its_rows(shape, dtype):
    array = (RANDOM.normal(size=(COUNT, *shape)) * 50).astype(dtype)
    expected = torch.from_numpy(array)[order_of()]
    for rows in (array, torch.from_numpy(array)):
        batches = loaded(rows)
        assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 3]
        assert torch.equal(torch.cat(batches), expected)
        assert batches[0].dtype == expected.dtype


@pytest.mark.parametrize("dtype", [">i2", ">i8", ">f4", ">c8"])
def test_arrays_of_the_other_byte_order_are_converted(dtype):
    array = (RANDOM.normal(size=(COUNT, 4)) * 50).astype(dtype)
    expected = torch.from_numpy(array.astype(dtype.replace(">", "<")))[order_of()]
    batch = torch.cat(loaded(array))
    assert torch.equal(batch, expected)
    assert batch.dtype == expected.dtype


@pytest.mark.parametrize("mode", ["r", "c", "r+"])
def test_memory_maps_load_and_writing_into_a_batch_does_not_change_the_file(tmp_path, mode):
    np.save(tmp_path / "rows.npy", IMAGES)
    rows = np.load(tmp_path / "rows.npy", mmap_mode=mode)
    batches = loaded(rows)
    assert torch.equal(torch.cat(batches), torch.from_numpy(IMAGES)[order_of()])
    batches[0].zero_()
    assert np.array_equal(np.load(tmp_path / "rows.npy"), IMAGES)


@pytest.mark.parametrize(
    "arranged",
    [
        lambda array: array[::-1],
        lambda array: array[:, ::2],
        np.asfortranarray,
        lambda array: np.broadcast_to(array[:1], array.shape),
        lambda array: array.transpose(0, 3, 1, 2),
    ],
    ids=["reversed", "strided", "fortran", "broadcast", "transposed"],
)
def test_arrays_in_any_memory_layout_give_the_same_values(arranged):
    array = arranged(IMAGES)
    expected = torch.from_numpy(np.ascontiguousarray(array))[order_of()]
    assert torch.equal(torch.cat(loaded(array)), expected)


def test_images_in_channels_last_memory_become_contiguous_unless_channels_last_is_true():
    images = torch.from_numpy(IMAGES).permute(0, 3, 1, 2)
    for tensor in (images, images.float()):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        for memory_format in (torch.channels_last, torch.contiguous_format):
            batches = loaded(tensor, channels_last=memory_format == torch.channels_last or None)
            assert torch.equal(torch.cat(batches), tensor[order_of()])
            assert all(batch.is_contiguous(memory_format=memory_format) for batch in batches)
    batches = loaded(images.contiguous(), channels_last=True)
    assert torch.equal(torch.cat(batches), images[order_of()])
    assert all(batch.is_contiguous() for batch in batches)


def test_writing_into_a_batch_changes_no_data():
    rows = torch.arange(COUNT * 3).view(COUNT, 3)
    for batch in Loader(rows, 4):
        batch.zero_()
    assert torch.equal(rows, torch.arange(COUNT * 3).view(COUNT, 3))


def test_tensors_that_require_gradients_are_detached():
    rows = torch.ones(COUNT, 3, requires_grad=True)
    assert not any(batch.requires_grad for batch in loaded(rows * 2))


@pytest.mark.parametrize(
    ("structure", "places"),
    [
        (lambda x, y, z: (x, y, z), (0, 1, 2)),
        (lambda x, y, z: (torch.from_numpy(x), y, torch.from_numpy(z)), (0, 1, 2)),
        (lambda x, y, z: TensorDataset(*map(torch.from_numpy, (x, y, z))), (0, 1, 2)),
        (lambda x, y, z: {"image": x, "label": torch.from_numpy(y), "more": z}, ("image", "label", "more")),
    ],
    ids=["tuple", "mixed tuple", "TensorDataset", "dict"],
)
def test_several_arrays_are_batched_together_in_their_structure(structure, places):
    more = RANDOM.normal(size=(COUNT, 2, 4)).astype("<f4")
    batches = loaded(structure(IMAGES, LABELS, more))
    assert all(type(batch) is (dict if isinstance(places[0], str) else tuple) for batch in batches)
    for place, array in zip(places, (IMAGES, LABELS, more), strict=True):
        assert torch.equal(joined(batches, place), torch.from_numpy(array)[order_of()])
    assert list(batches[0]) == list(places) if isinstance(batches[0], dict) else len(batches[0]) == 3


def test_one_array_in_a_structure_keeps_the_structure():
    assert [type(batch) for batch in loaded((IMAGES,))] == [tuple] * 6
    assert [type(batch) for batch in loaded(TensorDataset(torch.from_numpy(IMAGES)))] == [tuple] * 6
    assert [list(batch) for batch in loaded({"x": IMAGES})] == [["x"]] * 6


def test_fields_chooses_arrays_and_as_dict_names_them():
    arrays = {"x": IMAGES, "y": LABELS, "z": LABELS * 2}
    assert [list(batch) for batch in loaded(arrays, fields=["x", "z"], as_dict=True)] == [["x", "z"]] * 6
    batches = loaded(arrays, fields=["x", "z"])
    assert torch.equal(torch.cat([z for _, z in batches]), torch.from_numpy(LABELS * 2)[order_of()])
    assert all(isinstance(batch, torch.Tensor) for batch in loaded(arrays, fields=["y"]))
    assert [list(batch) for batch in loaded((IMAGES, LABELS), as_dict=True)] == [["0", "1"]] * 6


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (lambda: (IMAGES, LABELS[:-1]), "array 0 has 23 rows, array 1 has 22 rows; expected the same number"),
        (lambda: {"x": IMAGES[:5], "y": LABELS}, "array x has 5 rows, array y has 23 rows"),
        (lambda: (IMAGES, [1, 2]), "item 1 of the dataset is a list"),
        (lambda: {"x": IMAGES, "y": "text"}, "item 'y' of the dataset is a str"),
        (lambda: (), "a tuple without arrays"),
        (dict, "a dict without arrays"),
        (lambda: np.array(3), "dense tensor"),
        (lambda: torch.tensor(3.0), "dense tensor"),
        (lambda: torch.eye(5).to_sparse(), "sparse"),
        (lambda: np.array(["a", "b"]), "<U1; expected a dtype that PyTorch supports"),
        (lambda: np.array([None, 1]), "object; expected a dtype that PyTorch supports"),
        (lambda: np.empty((0, 3)), "there are no samples; expected at least one"),
        (lambda: torch.empty(0), "there are no samples; expected at least one"),
        (lambda: np.zeros(4, [("a", "i4")]), "a dtype that PyTorch supports"),
        (lambda: np.zeros(4, "M8[s]"), "a dtype that PyTorch supports"),
    ],
)
def test_arrays_that_cannot_be_loaded_raise_a_one_line_error(dataset: Callable[[], Any], message):
    with pytest.raises(InvalidOption, match=f"Cannot make a Loader: .*{message}") as caught:
        Loader(dataset(), 2)
    assert "\n" not in str(caught.value)


def test_a_state_of_other_arrays_raises_an_error_and_one_of_equal_arrays_loads():
    loader = Loader((IMAGES, LABELS), 4, shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    Loader((torch.from_numpy(IMAGES.copy()), LABELS.copy()), 4, shuffle=True).load_state_dict(state)
    for other in ((IMAGES[:-1], LABELS[:-1]), (255 - IMAGES, LABELS), (IMAGES.astype("<f4"), LABELS)):
        with pytest.raises(InvalidOption, match="another dataset"):
            Loader(other, 4, shuffle=True).load_state_dict(state)


# Only the first way gathers rows; the others load samples one by one.
WAYS = {
    "rows": {},
    "transform of samples": {"transform": v2.RandomHorizontalFlip()},
    "collate_fn": {"collate_fn": torch.utils.data.default_collate},
}


@pytest.mark.parametrize("kind", ["alone", "tuple", "dict", "TensorDataset", "every second one"])
def test_a_state_of_arrays_depends_only_on_their_content(kind):
    def made(images: Any, labels: Any) -> Any:
        tensors = torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels)
        return {
            "alone": tensors[0],
            "tuple": tensors,
            "dict": {"image": tensors[0], "label": tensors[1]},
            "TensorDataset": TensorDataset(*tensors),
            "every second one": tuple(tensor[::2] for tensor in tensors),
        }[kind]

    def stream(data: Any, way: str) -> Loader:
        return Loader(data, 4, shuffle=True, num_workers=0, **WAYS[way])

    states = {}
    for way in WAYS:
        loader = stream(made(IMAGES, LABELS), way)
        next(iter(loader))
        states[way] = loader.state_dict()
    for one, other in itertools.product(WAYS, repeat=2):
        stream(made(IMAGES.copy(), LABELS.copy()), one).load_state_dict(states[other])
        for data in (made(255 - IMAGES, LABELS), made(IMAGES[:-2], LABELS[:-2])):
            with pytest.raises(InvalidOption, match=r"another dataset\. Pass the same arrays"):
                stream(data, one).load_state_dict(states[other])


@pytest.mark.parametrize(
    "values",
    [
        np.array(["a", "b", "c"]),
        np.array([None, "b", {}], object),
        np.zeros(3, ">i2"),
        torch.eye(3).to_sparse(),
        torch.eye(3, dtype=torch.complex64).conj(),
        torch.eye(3, dtype=torch.bfloat16).requires_grad_(),
    ],
    ids=["texts", "objects", "other byte order", "sparse", "conjugated", "with a gradient"],
)
def test_arrays_of_any_kind_load_sample_by_sample_and_resume(values):
    def stream() -> Loader:
        return Loader((values, torch.arange(3)), 1, collate_fn=lambda samples: samples, num_workers=0)

    loader = stream()
    ((_, label),) = next(iter(loader))
    again = stream()
    again.load_state_dict(loader.state_dict())
    assert [int(label), *(int(label) for ((_, label),) in again)] == [0, 1, 2]


@pytest.fixture
def everything(tmp_path: Path) -> PackedDataset:
    return open_pack(seal_every_kind(tmp_path / "all.h5", IMAGES))["train"]


@pytest.mark.parametrize("is_view", [False, True])
def test_further_fields_of_a_pack_follow_in_its_order(everything, is_view):
    data = everything.subset(range(COUNT - 1, -1, -1)) if is_view else everything
    for as_dict in (False, True):
        position = 0
        for batch in Loader(data, 4, shuffle=True, seed=5, as_dict=as_dict):
            values = batch if as_dict else dict(zip(data.fields, batch, strict=True))
            size = len(values["Y"])
            expected = dict(zip(data.fields, data[order_of()[position : position + size]], strict=True))
            position += size
            assert list(values) == list(data.fields)
            for name, value in values.items():
                if isinstance(expected[name], torch.Tensor):
                    assert torch.equal(value, expected[name]), name
                    assert value.dtype == expected[name].dtype, name
                else:
                    assert value == expected[name], name
        assert position == COUNT


def test_fields_of_a_pack_are_chosen_by_name(everything):
    batches = loaded(everything, fields=["X", "caption"])
    assert [caption for _, captions in batches for caption in captions] == [f"Größe {n}" for n in order_of()]
    assert torch.equal(torch.cat([x for x, _ in batches]), everything[order_of()][0])
    assert torch.equal(torch.cat(loaded(everything, fields=["age"])), torch.from_numpy(order_of()).short())
    assert list(loaded(everything, fields=("Y", "age"), as_dict=True)[0]) == ["Y", "age"]


@pytest.mark.parametrize("fields", [["nothing"], [], "X", ["X", "X"], ["X", "y"], ["X", 1], 3])
def test_unknown_fields_raise_an_error_with_the_existing_names(everything, fields):
    with pytest.raises(InvalidOption, match="names from 'X', 'Y', 'Z', 'caption', 'raw', 'age', 'code', each once"):
        Loader(everything, 4, fields=fields)


def test_fields_come_in_the_requested_order(everything):
    expected = loaded(everything, as_dict=True, transform=lambda images: images.float())
    for fields in (["caption", "X"], ["Y", "age", "X"], ["age", "Y"]):
        transform = None if "X" not in fields else lambda images: images.float()
        tuples = loaded(everything, fields=fields, transform=transform)
        dicts = loaded(everything, fields=fields, transform=transform, as_dict=True)
        for whole, some, named in zip(expected, tuples, dicts, strict=True):
            assert list(named) == fields
            for name, value in zip(fields, some, strict=True):
                for found in (value, named[name]):
                    is_text = isinstance(found, list)
                    assert found == whole[name] if is_text else torch.equal(found, whole[name])


def test_a_pack_without_labels_yields_only_images(tmp_path):
    fields = {"X": {"train": IMAGES}}
    data = open_pack(seal_fields(tmp_path / "u.h5", fields, {"X": "image"}, "none"))["train"]
    batches = loaded(data)
    assert torch.equal(torch.cat(batches), data[order_of()])
    assert loaded(data, transform=lambda images: images.float())[0].dtype == torch.float32
    assert [list(batch) for batch in loaded(data, as_dict=True)] == [["X"]] * 6


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize(
    "stored",
    [{}, {"chunks": (4, 6, 5, 3)}, {"chunks": (7, 3, 5, 1), "compression": "gzip", "shuffle": True}],
    ids=["contiguous", "chunked", "gzip"],
)
def test_hdf5_files_of_other_programs_load_mapped_or_through_hdf5(tmp_path, stored, is_view):
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file.create_dataset("images", data=IMAGES, **stored)
        file.create_dataset("labels", data=LABELS)
    data = open_pack(tmp_path / "theirs.h5", x="images", y="labels")["train"]
    expected = torch.from_numpy(IMAGES).permute(0, 3, 1, 2)
    if is_view:
        data = data.subset(range(COUNT - 1, -1, -1))
        expected = expected.flip(0)
    loader = Loader(data, 4, shuffle=True, seed=5)
    for epoch in range(2):
        batches = list(loader)
        assert torch.equal(joined(batches, 0), expected[order_of(epoch)])
        assert torch.equal(joined(batches, 1), data.labels[order_of(epoch)])
    batches = loaded(data, transform=lambda images: images.float() / 255)
    assert torch.equal(joined(batches, 0), expected[order_of()].float() / 255)


def halves(images: torch.Tensor) -> torch.Tensor:
    return images / 2


def test_channels_last_arrays_raise_an_error_if_a_transform_requires_channels_first(tmp_path):
    images = np.zeros((4, 8, 6, 3), np.uint8)
    with pytest.raises(InvalidOption, match=r"with the channels last.*torch\.as_tensor\(images\)\.permute\(0, 3, 1"):
        Loader(images, 2, transform=RandomHorizontalFlip())
    stored = open_pack(seal_fields(tmp_path / "p.h5", {"X": {"train": images}}, {"X": "array"}, "none"))["train"]
    with pytest.raises(InvalidOption, match=r"with the channels last.*Start the transform with PerBatch"):
        Loader(stored, 2, transform=RandomHorizontalFlip())
    turned = torch.from_numpy(images).permute(0, 3, 1, 2)
    assert next(iter(Loader(turned, 2, transform=RandomHorizontalFlip()))).shape == (2, 3, 8, 6)
    assert next(iter(Loader(images, 2))).shape == (2, 8, 6, 3)
    assert next(iter(Loader(images, 2, transform=halves))).shape == (2, 8, 6, 3)
    turns = Compose([PerBatch(lambda batch: batch.permute(0, 3, 1, 2)), RandomHorizontalFlip()])
    assert next(iter(Loader(images, 2, transform=turns))).shape == (2, 3, 8, 6)


def chunked(path: Path, images: np.ndarray) -> PackedDataset:
    """Return images of a compressed HDF5 file, which are read instead of memory-mapped."""
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, compression="gzip")
    return open_pack(path, x="images")["train"]


def test_channels_last_arrays_in_a_compressed_hdf5_file_raise_the_error_too(tmp_path):
    data = chunked(tmp_path / "theirs.h5", np.zeros((4, 8, 6, 3), "<f4"))
    with pytest.raises(InvalidOption, match=r"shape \[4, 8, 6, 3\], with the channels last.*with PerBatch"):
        Loader(data, 2, transform=RandomHorizontalFlip())
    data = chunked(tmp_path / "ours.h5", np.zeros((4, 3, 8, 6), "<f4"))
    assert next(iter(Loader(data, 2, transform=RandomHorizontalFlip()))).shape == (2, 3, 8, 6)


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"transform": PerBatch(lambda images: images)}])
def test_images_of_a_compressed_hdf5_file_are_contiguous_or_channels_last_as_requested(tmp_path, options):
    data = chunked(tmp_path / "theirs.h5", IMAGES)
    for images in Loader(data, 4, **options):
        assert images.view(len(images), -1).shape[1] == 90
    for images in Loader(data, 4, channels_last=True, **options):
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_the_stored_size_is_allowed_for_images_of_a_compressed_hdf5_file(tmp_path):
    data = chunked(tmp_path / "theirs.h5", IMAGES)
    assert torch.equal(torch.cat(loaded(data, size=(6, 5))), data[order_of()])
    with pytest.raises(InvalidOption, match=r"size=\(6, 6\), but the images are stored with size \(6, 5\)"):
        Loader(data, 4, size=6)
    with pytest.raises(InvalidOption, match=r"read from their files in every epoch; expected samples that can be mem"):
        Loader(data, 4, keep="ram")


def test_the_bytes_that_are_read_at_once_from_a_compressed_hdf5_file_are_limited(tmp_path, monkeypatch):
    data = chunked(tmp_path / "theirs.h5", np.zeros((64, 1 << 17), "<f8"))
    requested, column = list[int](), PackedDataset.column

    def counted(self: PackedDataset, name: str, numbers: np.ndarray) -> Any:
        requested.append(len(numbers))
        return column(self, name, numbers)

    monkeypatch.setattr(PackedDataset, "column", counted)
    monkeypatch.setattr(batch_builder, "_READ_BYTES", 8 << 20, raising=False)
    assert [len(batch) for batch in Loader(data, 4, num_workers=0)] == [4] * 16
    # A sample takes 1 MiB.
    assert max(requested) == 8


def negative(images: torch.Tensor) -> torch.Tensor:
    assert isinstance(images, torch.Tensor)
    return 255 - images


@pytest.mark.parametrize("dtype", ["|u1", ">f4"])
def test_transforms_of_torchvision_apply_to_arrays_as_to_tensors(dtype):
    images = np.ascontiguousarray(IMAGES.transpose(0, 3, 1, 2)).astype(dtype)
    images.flags.writeable = False
    transform = v2.Compose([v2.RandomHorizontalFlip(1), negative])
    batches = loaded((images, LABELS), transform=transform, num_workers=0)
    expected = 255 - torch.from_numpy(images[order_of()].astype(images.dtype.newbyteorder("="))).flip(-1)
    assert torch.equal(joined(batches, 0), expected)
    assert torch.equal(joined(batches, 1), torch.from_numpy(LABELS[order_of()]))


def test_arrays_with_the_channels_last_need_a_transform_of_torchvision_that_moves_the_channels():
    with pytest.raises(InvalidOption, match=r"shape \[6, 5, 3\], with the channels last.*v2\.ToImage\(\)"):
        loaded((IMAGES, LABELS), transform=v2.RandomHorizontalFlip(1), num_workers=0)
    batches = loaded((IMAGES, LABELS), transform=v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(1)]), num_workers=0)
    assert torch.equal(joined(batches, 0), torch.from_numpy(IMAGES[order_of()]).permute(0, 3, 1, 2).flip(-1))
