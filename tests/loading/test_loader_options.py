"""Invalid arguments of `Loader` raise a one-line error with advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from contract import make_pack
from packed_files import photos
from torch import nn
from torch.utils.data import DistributedSampler, default_collate
from torchvision.transforms import v2

from colabkit.augment import Compose, MixUp, Normalize, PerSample, RandomCrop, RandomHorizontalFlip
from colabkit.errors import InvalidOption
from colabkit.loading import Loader
from colabkit.packs import FileDataset, Pack, open_pack

IMAGES = torch.zeros(20, 3, 8, 8, dtype=torch.uint8)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return open_pack(make_pack(tmp_path_factory.mktemp("packs") / "p.h5", train=22, dev=4))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> FileDataset:
    return FileDataset(photos(tmp_path_factory.mktemp("files") / "tree", 4))


def refused(dataset: Any, batch_size: Any = 4, **options: Any) -> str:
    with pytest.raises(InvalidOption, match="Cannot make a Loader: ") as caught:
        Loader(dataset, batch_size, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("collate_fn", [None, default_collate])
def test_a_whole_pack_raises_an_error_that_names_a_split(pack, collate_fn):
    assert refused(pack, collate_fn=collate_fn).endswith(
        "a whole pack; expected one of its splits. Pass pack['train']."
    )


@pytest.mark.parametrize("collate_fn", [None, default_collate])
def test_a_list_of_arrays_raises_an_error_even_with_collate_fn(collate_fn):
    assert "Pass a tuple such as (images, labels)" in refused([IMAGES, torch.arange(20)], collate_fn=collate_fn)


def test_a_table_raises_an_error_that_names_its_arrays():
    assert "the dataset is a DataFrame; expected arrays" in refused(pd.DataFrame({"a": [1.0, 2.0], "b": [0, 1]}))


def test_a_list_of_samples_is_a_data_set():
    assert len(Loader([torch.ones(3)] * 9, 2, num_workers=0)) == 5
    assert len(Loader([torch.ones(3), torch.ones(3)], 2, num_workers=0)) == 1


@pytest.mark.parametrize("path", ["data.h5", "/a/folder", Path("/a/folder")])
def test_a_path_raises_an_error_that_names_the_functions_to_open_it(path):
    message = refused(path)
    assert "Pass colabkit.FileDataset(path) for a folder of images" in message
    assert "colabkit.open_pack(path)['train'] for a pack" in message


@pytest.mark.parametrize(
    ("options", "next_step"),
    [
        ({"batch_size": 32.0}, "batch_size=32.0; expected a whole number of 1 or more. Use batch_size=32."),
        ({"batch_size": "16"}, "batch_size='16'; expected a whole number of 1 or more. Use batch_size=16."),
        (
            {"batch_size": -32.0},
            "batch_size=-32.0; expected a whole number of 1 or more. For example, use batch_size=1.",
        ),
        (
            {"batch_size": float("inf")},
            "batch_size=inf; expected a whole number of 1 or more. For example, use batch_size=1.",
        ),
        (
            {"batch_size": "many"},
            "batch_size='many'; expected a whole number of 1 or more. For example, use batch_size=1.",
        ),
        ({"num_workers": 0.0}, "num_workers=0.0; expected a whole number of 0 or more. Use num_workers=0."),
        ({"seed": np.float64(7)}, "seed=np.float64(7.0); expected a whole number of 0 or more. Use seed=7."),
        (
            {"prefetch_batches": True},
            "prefetch_batches=True; expected a whole number of 1 or more. For example, use prefetch_batches=1.",
        ),
    ],
)
def test_the_advice_for_a_whole_float_or_text_is_that_number(options, next_step):
    assert refused(IMAGES, **options).endswith(next_step)


def test_numbers_out_of_range_and_missing_devices_raise_an_error_with_the_argument():
    for name, values in {
        "batch_size": (0, -3, True, None),
        "prefetch_batches": (0, 2.5),
        "num_workers": (-1,),
        "seed": (None, -1),
        "device": ("no such device", "meta", 99, *([] if torch.cuda.is_available() else ["cuda"])),
    }.items():
        for value in values:
            assert name in refused(IMAGES, **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": [RandomCrop(4), Normalize()]}, "Combine the transforms with colabkit.augment.Compose([...])."),
        ({"transform": (v2.RandomCrop(4),)}, "Combine the transforms with torchvision.transforms.v2.Compose([...])."),
        (
            {"transform": Normalize},
            "transform=Normalize is a class; expected a callable or None. Create an instance: transform=Normalize(",
        ),
        (
            {"transform": "flip"},
            "transform='flip'; expected a callable or None. Pass a function that takes a batch of images.",
        ),
        ({"collate_fn": dict}, "collate_fn=dict is a class"),
        ({"transform": 3}, "transform=3; expected a callable or None"),
        ({"collate_fn": 3}, "Pass a function that takes a list of samples."),
        ({"shuffle": "yes"}, "True, False or 'block'"),
    ],
)
def test_an_invalid_function_raises_an_error_with_advice(options, message):
    assert message in refused(IMAGES, **options)


def test_size_is_allowed_only_if_it_matches_the_stored_images(pack):
    expected = [images for images, _ in Loader(pack["train"], 4)]
    for images, (resized, _) in zip(expected, Loader(pack["train"], 4, size=(4, 3)), strict=True):
        assert torch.equal(images, resized)
    for size in ((3, 4), 4):
        message = refused(pack["train"], size=size)
        assert "the images are stored with size (4, 3). Omit size=, resize with a transform" in message
        assert message.endswith("or run colabkit.pack(..., size=(3, 4))." if size != 4 else "size=(4, 4)).")
    assert "these samples need no decoding. Omit size=" in refused(torch.zeros(9, 5), size=8)


@pytest.mark.parametrize("size", [(8, 8, 8), (), "8", 0, (8, -1)])
def test_an_invalid_size_raises_an_error(files, size):
    assert "size=" in refused(files, size=size)


def test_the_error_names_all_unsupported_arguments_and_no_others(files):
    message = refused(files, transform=v2.RandomCrop(4), size=8, on_bad="skip", fields=["X"])
    assert (
        "torchvision transforms samples one by one, so the Loader does not support fields=, size=, on_bad=." in message
    )
    assert "as_dict" not in message
    assert "torchvision transforms" in refused(files, transform=nn.Sequential(v2.RandomCrop(4)), size=8)
    assert "PerSample transforms" in refused(files, transform=PerSample(torch.neg), as_dict=True)


def test_keep_gpu_for_batches_on_the_cpu_raises_an_error_with_or_without_a_gpu(pack, files, monkeypatch):
    for dataset in (pack["train"], IMAGES, files):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        assert "keep='gpu', but PyTorch finds no usable GPU" in refused(dataset, keep="gpu")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        message = refused(dataset, keep="gpu")
        assert "keep='gpu', but the batches are on the CPU" in message
        assert message.endswith("Pass device='cuda' as well.")


def test_keep_disk_raises_an_error_for_arrays_in_memory(pack):
    assert "keep='disk', but arrays are already in memory" in refused(IMAGES, keep="disk")
    assert Loader(pack["train"], 4, keep="disk").tier.name == "disk"


def test_drop_last_without_a_full_batch_suggests_a_batch_size():
    assert refused(IMAGES, 21, drop_last=True).endswith(
        "no batch from 20 samples; expected at least 21 samples. Use batch_size=20 or less, or drop_last=False."
    )
    message = refused(IMAGES, 4, drop_last=True, rank=0, world_size=6)
    assert "20 samples in 6 processes; expected at least 24 samples. Use batch_size=3 or less, or drop_" in message
    assert len(Loader(IMAGES, 3, drop_last=True, rank=0, world_size=6)) == 1
    for drop_last in (False, True):
        message = refused(IMAGES, 4, drop_last=drop_last, rank=0, world_size=21)
        assert "only 20 samples for 21 processes; expected at least one sample per process" in message
        assert message.endswith("Use fewer processes.")


def test_skipping_bad_images_raises_an_error_in_several_processes(files, monkeypatch):
    for sampler in (None, DistributedSampler(range(12), 2, 0)):
        message = refused(files, on_bad="skip", rank=0, world_size=2, sampler=sampler)
        assert "on_bad='skip' may give the 2 processes different numbers of batches" in message
        assert "Use on_bad='blank'" in message
    assert len(Loader(files, 4, on_bad="blank", rank=0, world_size=2)) == 2
    assert len(list(Loader(files, 4, on_bad="skip", rank=0, world_size=1))) == 3
    late = Loader(files, 4, on_bad="skip")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(InvalidOption, match="Cannot load batches: on_bad='skip' may give the 2 processes"):
        iter(late)


def halved(images: torch.Tensor) -> torch.Tensor:
    return images / 2


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (Compose([RandomHorizontalFlip(), MixUp(3)]), "Compose([RandomHorizontalFlip(0.5), MixUp(3, alpha=0.2)])"),
        (halved, "halved"),
        (nn.Sequential(nn.Flatten(), nn.Flatten()), "Sequential( (0): Flatten("),
        (v2.Compose([v2.RandomCrop(4), v2.RandomHorizontalFlip()]), "Compose( RandomCrop(size=(4, 4)"),
    ],
)
def test_the_repr_names_rank_and_transform_in_one_line(transform, text):
    loader = Loader(IMAGES, 4, transform=transform, rank=1, world_size=2)
    assert f"3 batches of 4, in order, on cpu, rank 1 of 2, transform {text}" in repr(loader)
    assert "\n" not in repr(loader)


def test_the_repr_omits_rank_and_transform_for_one_process_without_transform():
    assert "in order, on cpu, samples in ram" in repr(Loader(IMAGES, 4))


def test_the_repr_of_the_meters_has_no_private_names():
    loader = Loader(IMAGES, 4)
    list(loader)
    assert "batches=5, samples=20" in repr(loader.meters)
    assert " _" not in repr(loader.meters)
    assert "(_" not in repr(loader.meters)
