"""Transforms do not modify their input, treat samples independently unless they mix them, and equal their copies.

The random numbers are uniform, independent, and a pure function of seed, epoch, position and stream.
"""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from image_batches import draws, images
from simulated_gpu import SimulatedGpu

from colabkit.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    Cutout,
    Draws,
    MixUp,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    TrivialAugmentWide,
)
from colabkit.errors import InvalidOption

ALL = [
    RandomResizedCrop(8),
    RandomResizedCrop((9, 8), scale=(0.2, 0.9), ratio=(0.5, 2)),
    RandomCrop(8, padding=2),
    RandomCrop((6, 7), padding=(1, 2, 3, 4), fill=77),
    CenterCrop((30, 12)),
    RandomHorizontalFlip(0.25),
    RandomVerticalFlip(0.25),
    Resize((8, 40)),
    Normalize((0.1, 0.2, 0.3), (1.0, 2.0, 3.0)),
    Cutout((3, 4), p=0.5, fill=7),
    MixUp(5, alpha=0.3),
    CutMix(5, alpha=0.7),
    ColorJitter(0.4, (0.5, 2), 0.4, hue=0.1),
    TrivialAugmentWide(7, interpolation="bilinear", fill=9),
    Compose([RandomCrop(8), RandomHorizontalFlip(), Normalize()]),
]
LABELS = torch.arange(10) % 5
DTYPES = [torch.uint8, torch.float32, torch.float64, torch.bfloat16]

every = pytest.mark.parametrize("transform", ALL, ids=lambda transform: type(transform).__name__)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_dtype_memory_format_and_input_are_preserved(memory_format):
    for transform, dtype in itertools.product(ALL, DTYPES):
        batch = images().to(dtype).contiguous(memory_format=memory_format)
        before, labels = batch.clone(), LABELS.clone()
        got, same = transform.apply(batch, labels, draws())
        assert torch.equal(batch, before)
        assert torch.equal(labels, LABELS)
        assert (same is labels) == (not transform.changes_labels)
        assert got.data_ptr() != batch.data_ptr()
        assert got.dtype == (torch.float32 if "Normalize" in repr(transform) else dtype)
        assert got.is_contiguous(memory_format=memory_format), (transform, dtype)


def test_a_sample_does_not_depend_on_its_neighbours():
    order = np.random.default_rng(1).permutation(10)
    for transform in (transform for transform in ALL if not transform.whole_batch):
        whole = transform.apply(images(), None, draws())[0]
        assert torch.equal(transform.apply(images()[5:9], None, draws().part(5, 9))[0], whole[5:9])
        mixed = transform.apply(images()[torch.from_numpy(order)], None, Draws(5, 1, order))[0]
        assert torch.equal(mixed, whole[torch.from_numpy(order)])


def test_an_empty_batch_stays_empty():
    for transform, dtype in itertools.product([*ALL, RandomCrop(200, padding=100)], [torch.uint8, torch.float32]):
        got = transform.apply(images()[:0].to(dtype), LABELS[:0], draws(0))[0]
        size = getattr(transform, "size", None) if not isinstance(transform, Cutout) else None
        assert got.shape == (0, 3, *((8, 8) if isinstance(transform, Compose) else size or (23, 31)))
        assert got.dtype == (torch.float32 if "Normalize" in repr(transform) else dtype)


@pytest.mark.parametrize("batch", [images().int(), images()[0], images().bool(), images().numpy(), [1]])
def test_anything_but_a_batch_of_images_raises_an_error(batch):
    for transform in ALL:
        with pytest.raises(
            InvalidOption, match=r"Cannot .*: the images .*; expected a uint8 or floating-point tensor \[B, C, H, W\]"
        ):
            transform(batch, LABELS)


@every
def test_evaluating_the_repr_gives_an_equal_transform(transform):
    names = {type(each).__name__: type(each) for each in ALL}
    again = eval(repr(transform), {**names, "torch": torch})
    for other in (again, pickle.loads(pickle.dumps(transform)), copy.deepcopy(transform)):
        assert other == transform
        assert hash(other) == hash(transform)
        outcome = other(images().float(), LABELS, draws=draws())
        for got, expected in zip(outcome, transform(images().float(), LABELS, draws=draws()), strict=True):
            assert torch.equal(got, expected)


def test_transforms_with_different_arguments_are_unequal():
    assert len(set(ALL)) == len(ALL)
    assert RandomCrop(8) != CenterCrop(8)
    assert RandomCrop(8) == RandomCrop((8, 8), padding=[0, 0])
    assert RandomCrop(8) != RandomCrop(8, fill=1)
    assert Normalize([0.5], [0.25]) == Normalize((0.5,), (0.25,)) != Normalize([0.5], [0.25], torch.float16)
    assert repr(Normalize([0.5], [0.25], torch.float16)) == "Normalize(mean=(0.5,), std=(0.25,), dtype=torch.float16)"


def test_a_transform_computes_on_the_device_of_the_images():
    # Tensors on the "meta" device have no values, so copying them to the CPU would fail.
    for transform, dtype in itertools.product(ALL, DTYPES):
        got = transform.apply(images().to(dtype).to("meta"), LABELS.to("meta"), draws())
        assert [result.device.type for result in got] == ["meta", "meta"], (transform, dtype)


@pytest.mark.parametrize(
    "transform", [RandomHorizontalFlip(), Cutout(2), MixUp(9), CutMix(9), ColorJitter(0.5, 0.5, 0.5, 0.1)]
)
def test_transforms_of_large_batches_do_not_wait_for_the_gpu(monkeypatch, transform):
    with SimulatedGpu() as gpu:
        gpu.install(monkeypatch)
        many = torch.zeros(20_000, 3, 3, 3, dtype=torch.uint8).to("cuda")
        labels = torch.zeros(20_000, dtype=torch.int64).to("cuda")
        gpu.compute(10.0)
        before = gpu.host.now
        transform(many, labels)
        assert gpu.host.now == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@every
def test_the_gpu_gives_the_same_result_as_the_cpu(transform):
    got = transform(images(40, 3, 64, 72).cuda(), LABELS.repeat(4).cuda(), draws=draws(40))
    expected = transform(images(40, 3, 64, 72), LABELS.repeat(4), draws=draws(40))
    assert got[0].is_contiguous(memory_format=torch.channels_last)
    for result, other in zip(got, expected, strict=True):
        assert result.device.type == "cuda"
        # Allow more for `ColorJitter`, whose consecutive adjustments may amplify a rounding difference.
        most = 3 if isinstance(transform, ColorJitter) else int(got[0].dtype == torch.uint8)
        assert (result.cpu().double() - other.double()).abs().max() <= most + 1e-6


def numbered(seed: int = 0, epoch: int = 0, count: int = 1000, start: int = 0) -> Draws:
    return Draws(seed, epoch, np.arange(start, start + count))


def test_the_random_numbers_do_not_change_between_versions():
    got = Draws(42, 3, np.array([0, 1, 10**9])).uniforms(3)
    assert got.tolist() == [
        [0.8535083202918115, 0.24115099865972345, 0.41343160531676093],
        [0.5031822392936144, 0.8886761414456131, 0.1851990224150325],
        [0.15853276488075885, 0.5796160998417645, 0.7726301939111212],
    ]
    assert Draws(42, 3, np.array([7])).of(2).of(0).uniforms(1)[0, 0] == 0.6964409847966117


def test_the_random_numbers_are_those_of_splitmix64():
    mask, step = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def hashed(state: int) -> int:
        state = (state + step) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    assert hashed(1234567) == 6457827717110365317, "not the first number of the published SplitMix64 for this seed"
    # Add only 8 steps for position 9, because `hashed` adds the ninth.
    state = hashed((hashed(hashed(hashed(5) + 2) + 0) + 8 * step) & mask)
    row = numbered(5, 2, 1, start=9).uniforms(4)[0]
    assert row.tolist() == [(hashed((state + column * step) & mask) >> 11) / 2**53 for column in range(4)]


def test_the_first_columns_do_not_depend_on_the_count():
    assert np.array_equal(numbered().uniforms(9)[:, :4], numbered().uniforms(4))
    assert numbered().uniforms(0).shape == (1000, 0)


def test_a_sample_gets_the_same_random_numbers_in_any_batch():
    whole = numbered(3, 1).uniforms(5)
    mixed = np.random.default_rng(0).permutation(1000)
    assert np.array_equal(Draws(3, 1, mixed).uniforms(5), whole[mixed])
    assert np.array_equal(numbered(3, 1).part(100, 107).uniforms(5), whole[100:107])
    assert np.array_equal(numbered(3, 1).of(2).part(5, 6).uniforms(5), numbered(3, 1).part(5, 6).of(2).uniforms(5))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, np.int64(7)])
def test_random_numbers_are_uniform_for_any_seed(seed):
    values = numbered(seed, 4, 20_000).uniforms(5)
    assert values.dtype == np.float64
    assert values.min() >= 0
    assert values.max() < 1
    for column in values.T:
        counts = np.bincount((column * 64).astype(int), minlength=64)
        # With 63 degrees of freedom, chi-squared exceeds 128 with probability 2.5e-6.
        assert ((counts - 312.5) ** 2 / 312.5).sum() < 128


def test_only_64_bits_of_the_seed_matter():
    assert np.array_equal(numbered(5).uniforms(2), numbered(5 + 2**64).uniforms(2))


def test_neighbouring_seeds_epochs_streams_positions_and_columns_are_independent():
    base = numbered(10, 10, 40_000)
    first = base.uniforms(2)
    others = {
        "column": first[:, 1],
        "next position": numbered(10, 10, 40_000, start=1).uniforms(1)[:, 0],
        "next epoch": numbered(10, 11, 40_000).uniforms(1)[:, 0],
        "next seed": numbered(11, 10, 40_000).uniforms(1)[:, 0],
        "seed and epoch swapped": numbered(11, 9, 40_000).uniforms(1)[:, 0],
        "first transform": base.of(0).uniforms(1)[:, 0],
        "second transform": base.of(1).uniforms(1)[:, 0],
    }
    series = np.stack([first[:, 0], *others.values()])
    correlations = np.corrcoef(series)[np.triu_indices(len(series), 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(40_000)
    for name, other in others.items():
        pairs = np.bincount((first[:, 0] * 8).astype(int) * 8 + (other * 8).astype(int), minlength=64)
        assert ((pairs - 625) ** 2 / 625).sum() < 128, name


def test_transforms_of_a_compose_never_share_random_numbers():
    streams = [numbered().of(first).of(second) for first in range(20) for second in range(20)]
    streams += [numbered()] + [numbered().of(number) for number in range(20)]
    assert len({stream.stream for stream in streams}) == len(streams)
    assert len({stream.uniforms(1)[0, 0] for stream in streams}) == len(streams)
