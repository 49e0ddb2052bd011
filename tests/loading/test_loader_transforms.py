"""Transforms in `Loader` draw the same numbers for any batch size and number of workers. Errors name the samples."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import make_pack, make_shards
from loader_batches import same
from sampling import sampled
from torch import Tensor, nn
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from trees import make_tree, needs

from colabkit.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    Cutout,
    Draws,
    MixUp,
    Normalize,
    PerBatch,
    PerSample,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    Transform,
    TrivialAugmentWide,
)
from colabkit.errors import InvalidOption, LoaderFailed
from colabkit.foundation import epoch_order
from colabkit.loading import Loader
from colabkit.packs import FileDataset, PackedDataset, open_pack

COUNT = 26
SEED = 6
BATCH = 4


class TurnedLabels(Transform):
    """A custom transform that uses the random numbers of each sample to change images and labels."""

    changes_labels = True

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        turned = torch.from_numpy(draws.uniforms(1)[:, 0] < 0.5)
        images = torch.where(turned[:, None, None, None], images.flip(3), images)
        return images, None if labels is None else torch.where(turned, 9 - labels, labels)

    def __repr__(self) -> str:
        return "TurnedLabels()"


OURS = {
    "crop": RandomCrop(8, padding=2),
    "resized crop": RandomResizedCrop(7),
    "flip": RandomHorizontalFlip(),
    "upside down": Compose([RandomVerticalFlip(), RandomResizedCrop(7), RandomVerticalFlip()]),
    "resize": Compose([RandomVerticalFlip(), Resize((5, 9))]),
    "shorter side": Compose([Resize(9), CenterCrop(6)]),
    "center": CenterCrop(6),
    "cutout": Cutout(4),
    "normalize": Normalize(),
    "compose": Compose([RandomHorizontalFlip(), RandomResizedCrop(8), Cutout(3), Normalize()]),
    "two crops": Compose([RandomCrop(9), RandomResizedCrop(6), RandomHorizontalFlip()]),
    "foreign step": Compose([RandomResizedCrop(8), lambda images: images.flip(2), RandomHorizontalFlip(), Normalize()]),
    "foreign first": Compose([lambda images: 255 - images, RandomCrop(6), Normalize()]),
    "per batch": Compose([RandomCrop(6), PerBatch(lambda images: images.float() - images.float().mean())]),
    "mixup": MixUp(3, alpha=0.5),
    "colors": Compose([ColorJitter(0.4, 0.4, 0.4, 0.1), TrivialAugmentWide(), RandomCrop(8), CutMix(3)]),
    "labels": TurnedLabels(),
    "labels between": Compose([RandomHorizontalFlip(), Normalize(), TurnedLabels(), Cutout(2)]),
    "all": Compose([RandomResizedCrop(8), RandomHorizontalFlip(), Normalize(), MixUp(3), Cutout(2)]),
}


class Noise(nn.Module):
    """A module that draws from torch's global generator once per batch."""

    def forward(self, images: Tensor) -> Tensor:
        return images.float() + torch.rand(images.shape)


def noisy(image: Any) -> Tensor:
    values = torch.as_tensor(np.asarray(image), dtype=torch.float64)
    return values + random.random() + np.random.rand() + torch.rand(3, 1, 1, dtype=torch.float64)


@pytest.fixture(scope="module")
def data(folder: Path) -> PackedDataset:
    return open_pack(make_pack(folder / "data.h5", (12, 10, 3), train=COUNT))["train"]


@pytest.fixture(scope="module")
def kinds(folder: Path, data: PackedDataset) -> dict[str, Any]:
    """Return datasets of every kind that is gathered as rows."""
    images, labels = data[:]
    shards = make_shards(folder / "s.h5", {"train": 9}, {"train": 1}, {"train": 16}, shape=(12, 10, 3))
    return {
        "pack": data,
        "view": data.subset(range(COUNT - 1, -1, -1)),
        "shards": open_pack(shards)["train"],
        "channels last": (images, labels),
        "channels first": (images.contiguous(), labels),
        "floats": (images.float(), labels),
    }


def everything(dataset: Any) -> tuple[Tensor, Tensor]:
    return dataset[:] if isinstance(dataset, PackedDataset) else dataset


def epochs(count: int, dataset: Any, batch_size: int = BATCH, **options: Any) -> list[Any]:
    loader = Loader(dataset, batch_size, shuffle=True, seed=SEED, **options)
    return [batch for _ in range(count) for batch in loader]


def resumed_at(stop: int, dataset: Any, **options: Any) -> list[Any]:
    """Return the batches of an epoch: the first `stop` from one loader, the others from a second one that resumes."""
    first = Loader(dataset, BATCH, shuffle=True, seed=SEED, **options)
    batches = [batch for _, batch in zip(range(stop), first, strict=False)]
    # Seed and shuffle come from the state.
    second = Loader(dataset, BATCH, **{**options, "num_workers": 2})
    second.load_state_dict(first.state_dict())
    return batches + list(second)


def expected_batches(dataset: Any, transform: Any, epoch: int, batch_size: int = BATCH) -> list[Any]:
    images, labels = everything(dataset)
    order = epoch_order(COUNT, SEED, epoch, 0, COUNT)
    found = []
    for start in range(0, COUNT, batch_size):
        rows = order[start : start + batch_size]
        draws = Draws(SEED, epoch, np.arange(start, start + len(rows)))
        batch = images[rows]
        if images.is_contiguous(memory_format=torch.channels_last):
            batch = batch.contiguous(memory_format=torch.channels_last)
        found.append(transform.apply(batch, labels[rows], draws))
    return found


@pytest.mark.parametrize("kind", sampled(["pack", "view", "shards", "channels last", "channels first", "floats"], 3))
@pytest.mark.parametrize("name", sampled(OURS, 5))
def test_batches_are_bit_identical_to_applying_the_transform_to_the_plain_batch(kinds, kind, name):
    dataset, transform = kinds[kind], OURS[name]
    expected = [batch for epoch in range(2) for batch in expected_batches(dataset, transform, epoch)]
    for num_workers in (0, 1, 2, 4):
        assert same(epochs(2, dataset, transform=transform, num_workers=num_workers), expected)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["pack", "shards", "channels last", "floats"])
def test_channels_last_changes_only_the_memory_format_of_batches(kinds, kind):
    for transform in (None, *OURS.values()):
        for num_workers in (0, 2):
            found = epochs(1, kinds[kind], transform=transform, num_workers=num_workers)
            assert all(images.is_contiguous() for images, _ in found)
            assert same(found, epochs(1, kinds[kind], transform=transform, num_workers=num_workers, channels_last=True))


def flat(images: Tensor) -> Tensor:
    return images.view(len(images), -1)


@pytest.mark.parametrize("transform", [flat, PerBatch(flat), Compose([RandomCrop(8), MixUp(3), flat])])
def test_a_custom_function_may_view_the_images_that_it_receives(data, transform):
    assert all(images.ndim == 2 for images, _ in epochs(1, data, transform=transform))


@pytest.mark.parametrize("name", [name for name, transform in OURS.items() if not transform.whole_batch])
def test_the_batch_size_does_not_change_the_parameters_of_a_sample(data, name):
    whole = [torch.cat(field) for field in zip(*epochs(2, data, transform=OURS[name]), strict=True)]
    for batch_size in (1, 3, COUNT, 100):
        found = zip(*epochs(2, data, batch_size, transform=OURS[name], num_workers=2), strict=True)
        assert all(torch.equal(torch.cat(field), of_whole) for field, of_whole in zip(found, whole, strict=True))


@pytest.mark.parametrize("name", sampled(OURS, 5))
def test_a_resumed_epoch_gets_the_same_parameters(data, name):
    whole = epochs(1, data, transform=OURS[name])
    for stop in range(1, len(whole)):
        assert same(resumed_at(stop, data, transform=OURS[name], num_workers=1), whole)


def test_each_epoch_and_seed_has_its_own_parameters(data):
    first, second = Loader(data, COUNT, transform=OURS["crop"]), Loader(data, COUNT, transform=OURS["crop"], seed=1)
    found = [next(iter(loader))[0] for loader in (first, first, second)]
    assert not any(torch.equal(found[a], found[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_mixup_changes_labels_and_other_transforms_do_not(data):
    for images, labels in epochs(1, data, transform=OURS["all"]):
        assert (labels.shape, labels.dtype) == ((len(images), 3), torch.float32)
        assert torch.allclose(labels.sum(1), torch.ones(len(images)))
    assert all(labels.dtype == torch.int64 for _, labels in epochs(1, data, transform=OURS["compose"]))


def test_mixup_without_labels_or_with_too_few_classes_raises_a_one_line_error(data):
    for dataset, transform in ((data[:][0], MixUp(3)), (data, MixUp(2))):
        with pytest.raises(InvalidOption, match="Cannot mix images") as caught:
            epochs(1, dataset, transform=transform)
        assert "\n" not in str(caught.value)


WHOLE = {
    "function": lambda images: images.float() / 255,
    "module": nn.Sequential(Noise(), nn.AvgPool2d(2)),
    "drawing": noisy,
    "foreign and colabkit": Compose([RandomCrop(6), Noise(), RandomHorizontalFlip()]),
    "marked": PerBatch(lambda images: images.double() * 2),
}


@pytest.mark.parametrize("name", WHOLE)
def test_functions_of_a_batch_give_the_same_with_any_workers_and_after_a_resume(data, name):
    whole = epochs(2, data, transform=WHOLE[name], num_workers=0)
    for num_workers in (1, 2):
        assert same(epochs(2, data, transform=WHOLE[name], num_workers=num_workers), whole)
    for stop in (1, 3, 6):
        assert same(resumed_at(stop, data, transform=WHOLE[name], num_workers=1), whole[:7])


SINGLE = {
    "torchvision's in a row": nn.Sequential(v2.RandomResizedCrop(8), v2.ColorJitter(0.5)),
    "torchvision": v2.Compose([v2.RandomResizedCrop(8), v2.RandomHorizontalFlip(), v2.ColorJitter(0.5), v2.ToImage()]),
    "marked": PerSample(noisy),
    "marked module": PerSample(nn.Sequential(v2.ToDtype(torch.float32), nn.Dropout(0.5))),
}


@pytest.mark.parametrize("name", sampled(SINGLE, 2))
@pytest.mark.parametrize("is_pack", [True, False])
def test_functions_of_a_sample_give_the_same_with_any_workers_in_any_batch_and_after_a_resume(data, name, is_pack):
    dataset = data if is_pack else torch.utils.data.ConcatDataset([data, data.subset(range(3))])
    whole = epochs(1, dataset, transform=SINGLE[name], num_workers=0)
    for num_workers in (1, 2):
        assert same(epochs(1, dataset, transform=SINGLE[name], num_workers=num_workers), whole)
    images = torch.cat([images for images, _ in whole])
    assert torch.equal(torch.cat([x for x, _ in epochs(1, dataset, 7, transform=SINGLE[name], num_workers=2)]), images)
    assert same(resumed_at(2, dataset, transform=SINGLE[name], num_workers=1), whole)
    assert len({image.numpy().tobytes() for image in images}) == len(images)


def test_transforms_inside_a_data_set_are_as_reproducible(tmp_path):
    tree = make_tree(tmp_path / "tree", 5, (12, 10))
    steps = v2.Compose([v2.RandomCrop(8), v2.RandomHorizontalFlip(), v2.PILToTensor(), v2.Lambda(noisy)])
    images = ImageFolder(tree, transform=steps)
    whole = epochs(2, images, num_workers=0)
    assert same(epochs(2, images, num_workers=2), whole)
    assert same(resumed_at(2, images, num_workers=1), whole[:4])


@pytest.mark.full
def test_modules_of_kornia_work_on_batches_and_on_samples(data):
    needs("kornia", importlib.util.find_spec("kornia") is not None)
    from kornia.augmentation import AugmentationSequential, RandomAffine, RandomHorizontalFlip

    by_batch = nn.Sequential(
        v2.ToDtype(torch.float32, scale=True), AugmentationSequential(RandomAffine(30.0), RandomHorizontalFlip())
    )
    whole = epochs(2, data, transform=by_batch, num_workers=1)
    assert whole[0][0].shape == (BATCH, 3, 12, 10)
    assert same(epochs(2, data, transform=by_batch, num_workers=2), whole)
    assert same(resumed_at(2, data, transform=by_batch, num_workers=1), whole[:7])
    by_sample = PerSample(lambda image: RandomAffine(30.0, keepdim=True)(image.float() / 255))
    whole = epochs(1, data, transform=by_sample, num_workers=0)
    assert same(epochs(1, data, 4, transform=by_sample, num_workers=2), whole)


@pytest.mark.parametrize(
    "transform",
    sampled([*WHOLE.values(), *SINGLE.values(), OURS["foreign step"], OURS["all"]], 4),
    ids=[*WHOLE, *SINGLE, "foreign step", "all"],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_does_not_change_the_generators_of_the_caller(data, transform, num_workers):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    loader = Loader(data, BATCH, shuffle=True, transform=transform, num_workers=num_workers)
    for _ in loader:
        assert random.getstate() == before[0]
        assert str(np.random.get_state()) == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert (random.getstate(), str(np.random.get_state())) == before[:2]


@pytest.mark.parametrize("transform", [None, noisy, PerSample(noisy)], ids=["none", "batch", "sample"])
def test_random_numbers_drawn_by_the_caller_change_nothing(data, transform):
    expected = epochs(1, data, transform=transform, num_workers=0)
    found = []
    for batch in Loader(data, BATCH, shuffle=True, seed=SEED, transform=transform, num_workers=0):
        torch.manual_seed(len(found))
        random.random()
        np.random.seed(7)
        found.append(batch)
    assert same(found, expected)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda i: (torch.full((3, 4, 4), i), i),
        lambda i: {"x": torch.full((3, 4, 4), i), "y": i},
        lambda i: torch.full((3, 4, 4), i),
    ],
    ids=["tuple", "dict", "alone"],
)
def test_a_function_of_a_batch_is_applied_to_the_first_field_of_any_data_set(make, num_workers):
    samples = FunctionDataset(make)
    batches = list(Loader(samples, 3, transform=lambda x: x.float() / 255, num_workers=num_workers))
    for number, batch in enumerate(batches):
        first = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list | tuple) else batch
        wanted = torch.stack([torch.full((3, 4, 4), i) for i in range(3 * number, 3 * number + 3)]).float() / 255
        assert torch.equal(first, wanted)


@pytest.mark.parametrize("make", [lambda data: data, lambda data: torch.utils.data.ConcatDataset([data])])
@pytest.mark.parametrize("steps", [[], [RandomCrop(6)]], ids=["alone", "after colabkit"])
def test_the_seconds_of_a_function_of_a_batch_count_as_augmenting(data, make, steps):
    def slow(images: Tensor) -> Tensor:
        time.sleep(0.02)
        return images

    loader = Loader(make(data), BATCH, transform=Compose([*steps, slow]) if steps else slow, num_workers=1)
    batches = len(list(loader))
    (part,) = (part for part in loader.meters.snapshot().parts if part.name == "augment")
    assert part.busy_s > 0.02 * batches
    assert part.samples % COUNT == 0
    assert part.handled_bytes > 0


def test_transforms_of_colabkit_work_on_batches_of_any_data_set_and_of_collate_fn(data):
    dataset = torch.utils.data.ConcatDataset([data])
    for transform in (OURS["compose"], OURS["all"]):
        expected = expected_batches(data, transform, 0)
        for options in ({}, {"collate_fn": torch.utils.data.default_collate}):
            found = [tuple(batch) for batch in epochs(1, dataset, transform=transform, num_workers=1, **options)]
            assert same(found, expected)


class FunctionDataset(torch.utils.data.Dataset):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def fails(images: Any) -> Any:
    raise ValueError("planned")


@pytest.mark.parametrize(
    "transform",
    [fails, PerBatch(fails), PerSample(fails), Compose([RandomCrop(4), fails]), v2.Lambda(fails)],
    ids=["function", "per batch", "per sample", "compose", "torchvision"],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_a_transform_is_one_line_with_its_cause(data, transform, num_workers):
    with pytest.raises(LoaderFailed, match=r"Cannot make a batch: .*ValueError: planned") as caught:
        list(Loader(data, BATCH, transform=transform, num_workers=num_workers))
    assert "\n" not in str(caught.value)


SEED = 6


def fails_on(number: int) -> Callable[[Tensor], Tensor]:
    def fails_on_it(batch: Tensor) -> Tensor:
        if number in batch.flatten().tolist():
            raise ValueError("planned")
        return batch

    return fails_on_it


class SliceFailure(Transform):
    def __init__(self, number: int) -> None:
        self.fails = fails_on(number)

    def apply(self, images: Tensor, labels: Any, draws: Draws) -> tuple[Tensor, Any]:
        return self.fails(images), labels

    def __repr__(self) -> str:
        return "SliceFailure()"


def dataset_of_its_own(values: Tensor) -> Any:
    return FunctionDataset(lambda number: values[number])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [fails_on, lambda number: PerBatch(fails_on(number))])
@pytest.mark.parametrize("make_data", [lambda values: values, dataset_of_its_own])
def test_an_error_of_a_batch_names_its_epoch_and_first_samples(make_data, make, num_workers):
    order = epoch_order(12, SEED, 1, 0, 12).tolist()
    values = torch.arange(12).view(12, 1)
    loader = Loader(make_data(values), 5, shuffle=True, seed=SEED, transform=make(order[7]), num_workers=num_workers)
    loader.set_epoch(1)
    where = ", ".join(map(str, order[5:8]))
    with pytest.raises(
        LoaderFailed, match=rf"transforming samples {where} and 2 more of epoch 1 raised ValueError: plann"
    ) as caught:
        list(loader)
    assert str(caught.value).endswith("Run transform on a batch of these samples to see the error.")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_a_slice_of_a_batch_names_its_samples(num_workers):
    loader = Loader(torch.arange(12).view(12, 1), 3, transform=SliceFailure(7), num_workers=num_workers)
    with pytest.raises(LoaderFailed, match=r"transforming samples 6, 7, 8 of epoch 0 raised ValueError: planned"):
        list(loader)


@pytest.mark.parametrize("mark", [PerBatch, lambda function: function])
def test_an_error_of_a_batch_names_its_first_sample_as_the_data_set_does(tmp_path, mark):
    tree = make_tree(tmp_path / "tree", 2, (12, 10))
    names = r"samples 0 \('.*/000\.\w+' of '.*tree'\), 1 of epoch 0 raised ValueError: planned"
    with pytest.raises(LoaderFailed, match=names):
        list(Loader(FileDataset(tree), 2, transform=mark(fails)))
    with pytest.raises(LoaderFailed, match=r"sample 0 \('.*/000\.\w+'\) of epoch 0 raised ValueError: planned"):
        list(Loader(ImageFolder(tree, transform=v2.PILToTensor()), 1, transform=mark(fails), num_workers=0))


def test_an_error_of_a_batch_of_a_custom_sampler_names_its_position():
    values = torch.arange(12).view(12, 1)
    loader = Loader(values, 5, sampler=torch.utils.data.SequentialSampler(values), transform=fails_on(7))
    with pytest.raises(
        LoaderFailed, match=r"transforming 5 samples from position 5 of epoch 0 raised ValueError: planned"
    ):
        list(loader)


class UnnamedSamples(FunctionDataset):
    """A dataset whose attribute `samples` holds no paths."""

    samples = torch.arange(12)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_sample_without_a_name_has_its_index(num_workers):
    with pytest.raises(LoaderFailed, match=r"Cannot make a batch: sample 0 raised ValueError: planned"):
        list(Loader(UnnamedSamples(fails), 4, num_workers=num_workers))
