"""`Loader` mixes the packs of a `Mixture` in exact proportions, in a pure order that resumes on any number of ranks."""

from __future__ import annotations

import itertools
import json
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm_python
from contract import seal_fields
from pictures import saved
from rank_steps import State, in_order, state_of, steps

from colabkit.errors import InvalidOption
from colabkit.loading import Loader
from colabkit.loading.sampler.mixed import MixedOrder
from colabkit.packs import Mixture, PackedDataset, open_pack
from colabkit.sampler import ShuffledOrder

SIZES = (40, 17, 6, 9, 1)
# The sample `number` of pack `part` has the value `part * BASE + number`.
BASE = 1000


@pytest.fixture(scope="module")
def parts(folder: Path) -> list[PackedDataset]:
    return [
        open_pack(seal_fields(folder / f"{part}.h5", {"X": {"train": values}}, {"X": "array"}, "none"))["train"]
        for part, count in enumerate(SIZES)
        for values in [np.arange(count) + part * BASE]
    ]


def mixed(parts: list[PackedDataset], *weights: float, num_samples: int | None = None) -> Mixture:
    return Mixture(dict(zip(parts, weights, strict=False)), num_samples=num_samples)


def stream(loader: Loader, epochs: int = 1) -> list[int]:
    return [value for _ in range(epochs) for batch in loader for value in batch.tolist()]


def ranks(data: Mixture, batch_size: int, world: int, state: State | None = None, **options: Any) -> list[Loader]:
    options = {"shuffle": True, "seed": 3, "fields": ["X"], **options}
    loaders = [Loader(data, batch_size, rank=rank, world_size=world, **options) for rank in range(world)]
    for loader in loaders if state else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loaders


@pytest.mark.parametrize(
    ("weights", "error"),
    [((1, 1), 0.5), ((0.97, 0.03), 0.5), ((7, 2, 1), 1), ((5e5, 3, 3), 1), ((8, 4, 4, 2, 1), 2), ((9, 9, 9, 9, 1), 2)],
)
def test_every_prefix_has_the_proportion_of_each_pack(parts, weights, error):
    for shuffle in (True, False, "block"):
        loader = Loader(mixed(parts, *weights, num_samples=1999), 100, shuffle=shuffle)
        owners = np.array(stream(loader))[:, None] // BASE == np.arange(len(weights))
        shares = np.arange(1, 2000)[:, None] * np.array(weights) / sum(weights)
        assert np.abs(owners.cumsum(0) - shares).max() <= error


@pytest.mark.parametrize("weights", [(1, 1), (5, 1), (3, 1, 2), (8, 3, 5, 2, 1)])
@pytest.mark.parametrize("num_samples", [None, 23, 150])
def test_each_pass_through_a_pack_is_a_new_permutation_across_epochs(parts, weights, num_samples):
    loader = Loader(mixed(parts, *weights, num_samples=num_samples), 8, shuffle=True)
    values = stream(loader, epochs=6)
    for part, size in enumerate(SIZES[: len(weights)]):
        own = [value - part * BASE for value in values if value // BASE == part]
        passes = [tuple(own[start : start + size]) for start in range(0, len(own) - size + 1, size)]
        assert all(sorted(one) == list(range(size)) for one in passes)
        assert len(set(passes)) == len(passes) or size < 8


@pytest.mark.parametrize(
    ("weights", "counts"),
    [((1, 1), (17, 17)), ((1, 2), (8, 17)), ((2, 1), (34, 17)), ((40, 17, 6), (40, 17, 6)), ((3, 1, 1), (18, 6, 6))],
)
def test_an_epoch_ends_when_the_first_pack_is_used_up_in_its_proportion(parts, weights, counts):
    loader = Loader(mixed(parts, *weights), 4, shuffle=True)
    for _ in range(3):
        found = Counter(value // BASE for value in stream(loader))
        assert tuple(found[part] for part in range(len(weights))) == counts
        assert len(loader) == -(-sum(counts) // 4)


def test_packs_of_equal_length_are_shuffled_differently(parts):
    halves = [parts[0].subset(range(20)), parts[0].subset(range(20, 40))]
    values = stream(Loader(Mixture(dict.fromkeys(halves, 1)), 8, shuffle=True))
    first, second = ([value % 20 for value in values if value // 20 == half] for half in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)


def test_without_shuffling_each_pack_keeps_its_stored_order(parts):
    values = stream(Loader(mixed(parts, 1, 1, num_samples=60), 8))
    assert [value for value in values if value < BASE] == list(range(30))
    assert [value - BASE for value in values if value >= BASE] == [*range(17), *range(13)]


def test_a_state_resumes_bit_equal_on_any_number_of_ranks_and_batch_size(parts):
    data = mixed(parts, 3, 1, 2, num_samples=61)
    expected = stream(*ranks(data, 8, 1), epochs=2)
    for first, second, stop in itertools.product((1, 2), (1, 3), (0, 1, 3)):
        loaders = ranks(data, 4, first)
        got = in_order(steps(loaders, stop)) if stop else []
        # The order of the state replaces that of another seed.
        loaders = ranks(data, 5, second, state_of(loaders), seed=9)
        got += in_order(steps(loaders)) + in_order(steps(loaders))
        assert got == expected


def test_a_state_of_other_weights_or_another_length_is_refused(parts):
    [loader] = ranks(mixed(parts, 3, 1), 4, 1)
    next(iter(loader))
    for other in (mixed(parts, 3, 2), mixed(parts, 3, 1, num_samples=9)):
        with pytest.raises(InvalidOption, match="the state has the order 'mixed 3:1 over 53, shuffle, shuffle'"):
            ranks(other, 4, 1, loader.state_dict())
    with pytest.raises(InvalidOption, match="the state belongs to another dataset"):
        ranks(mixed(parts[::-1], 3, 1), 4, 1, loader.state_dict())


def test_worker_processes_load_the_same_stream(parts):
    data = mixed(parts, 3, 1, 2)
    by_process = Loader(data, 8, shuffle=True, collate_fn=lambda samples: samples, num_workers=1)
    values = [int(sample) for batch in by_process for sample in batch]
    assert values == stream(Loader(data, 8, shuffle=True))


def test_image_files_and_rows_of_several_files_give_the_samples_of_the_packs(folder):
    random = np.random.default_rng(4)
    files = [saved(random.integers(0, 256, (8, 12, 3), dtype=np.uint8), "PNG") for _ in range(9)]
    kept = {"encoded": files, "raw": random.integers(0, 256, (9, 4, 4, 3), np.uint8)}
    for kind, rows in kept.items():
        packs = [
            seal_fields(folder / f"{kind}{y[0]}.h5", {"X": {"train": x}, "Y": {"train": y}}, {"X": "image"}, "class")
            for x, y in ((rows[:6], np.arange(6)), (rows[6:], np.arange(6, 9)))
        ]
        data = Mixture({open_pack(path)["train"]: weight for path, weight in zip(packs, (2, 1), strict=True)})
        for images, labels in Loader(data, 4, shuffle=True):
            expected = torch.stack([data[label][0] for label in labels.tolist()])
            assert torch.equal(images, expected)


def test_a_sampler_orders_the_samples_of_all_packs_without_weights(parts):
    data = mixed(parts, 3, 1)
    assert len(stream(Loader(data, 8, sampler=ShuffledOrder(len(data))))) == 57


def test_the_loader_describes_the_mixture(parts):
    text = repr(Loader(mixed(parts, 0.75, 0.25), 8, shuffle=True, seed=4))
    assert "Loader of Mixture of 2 packs: 0.75 of 40 + 0.25 of 17 samples: 7 batches of 8" in text
    assert "mixed 3:1, shuffled with seed 4" in text
    assert "mixed 1:1, on cpu" in repr(Loader(mixed(parts, 1, 1), 8))


@pytest.mark.full
def test_another_process_computes_the_same_order(parts):
    data = mixed(parts, 3, 1, 2, num_samples=200)
    code = (
        "import pickle, sys; from colabkit.loading import Loader\n"
        "loader = Loader(pickle.load(sys.stdin.buffer), 8, shuffle=True, seed=5)\n"
        "print([value for batch in loader for value in batch.tolist()])"
    )
    found = warm_python.run([sys.executable, "-c", code], stdin=pickle.dumps(data), check=True)
    assert json.loads(found.stdout) == stream(Loader(data, 8, shuffle=True, seed=5))


def test_any_range_of_a_billion_samples_is_computed_directly():
    order = MixedOrder((ShuffledOrder(1 << 40), ShuffledOrder(1 << 20), ShuffledOrder(1000)), (5, 2, 1), 1 << 41)
    found = order.indices(3, (1 << 40) - 8, (1 << 40) + 8)
    assert found.tolist() == [order.indices(3, at, at + 1).item() for at in range((1 << 40) - 8, (1 << 40) + 8)]
    owners = np.searchsorted([1 << 40, (1 << 40) + (1 << 20)], found, side="right")
    assert np.bincount(owners).tolist() == [10, 4, 2]
