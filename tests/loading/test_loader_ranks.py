"""On any number of ranks, `Loader` yields each sample once, equal numbers of batches, and the same stream."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from contract import make_pack
from rank_steps import State, in_order, state_of, steps
from sampling import sampled
from torch.utils.data import BatchSampler, DistributedSampler, StackDataset

from colabkit.augment import Compose, Cutout, MixUp, PerSample, RandomHorizontalFlip, RandomResizedCrop
from colabkit.errors import InvalidOption
from colabkit.foundation import epoch_order
from colabkit.loading import Loader
from colabkit.loading.sampler.orders import BlockShuffledOrder
from colabkit.loading.sampler.resampling import BalancedOrder, WeightedOrder
from colabkit.packs import open_pack

WORLDS = (1, 2, 3, 4, 5)


def ranks(n: int, batch_size: int, world_size: int, state: State | None = None, **options: Any) -> list[Loader]:
    loaders = [
        Loader(torch.arange(n), batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]
    for loader in loaders if state else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loaders


@pytest.mark.parametrize("shuffle", [False, True, "block"])
@pytest.mark.parametrize("world_size", sampled(WORLDS, 3))
def test_every_sample_comes_once_over_all_ranks_in_equal_numbers_of_batches(world_size, shuffle):
    for count, batch_size in itertools.product((world_size, world_size + 1, 11, 16, 22, 23, 41), (1, 2, 4, 9)):
        # With batches of one sample, the number of samples must be a multiple of the number of ranks.
        n = count - count % world_size if batch_size == 1 else count
        loaders = ranks(n, batch_size, world_size, shuffle=shuffle, seed=3)
        for _ in range(2):
            taken = steps(loaders)
            assert sorted(in_order(taken)) == list(range(n))
            assert [len(loader) for loader in loaders] == [len(taken)] * world_size
            for step in taken:
                sizes = [len(batch) for batch in step]
                assert 1 <= min(sizes) <= max(sizes) <= batch_size
                assert max(sizes) - min(sizes) <= 1
            assert all(len(batch) == batch_size for step in taken[:-2] for batch in step)


@pytest.mark.parametrize("world_size", WORLDS[1:])
def test_too_few_samples_for_a_last_global_batch_are_shared_with_the_one_before(world_size):
    for rest in range(1, world_size):
        sizes = [sum(map(len, step)) for step in steps(ranks(6 * world_size + rest, 3, world_size))]
        last_two = 3 * world_size + rest
        assert sizes == [3 * world_size, last_two // 2, last_two - last_two // 2]


@pytest.mark.parametrize("world_size", WORLDS)
def test_with_drop_last_all_batches_are_full_and_less_than_one_step_is_dropped(world_size):
    for n, batch_size in itertools.product((20, 23, 41), (1, 3, 4)):
        taken = steps(ranks(n, batch_size, world_size, shuffle=True, drop_last=True))
        assert all(len(batch) == batch_size for step in taken for batch in step)
        assert len(set(in_order(taken))) == len(in_order(taken)) == n - n % (batch_size * world_size)


@pytest.mark.parametrize("shuffle", [False, True, "block"])
def test_the_stream_of_all_ranks_together_does_not_depend_on_their_number(shuffle):
    expected = in_order(steps(ranks(41, 2, 1, shuffle=shuffle, seed=7)))
    for world_size in WORLDS:
        assert in_order(steps(ranks(41, 4, world_size, shuffle=shuffle, seed=7))) == expected


@pytest.mark.parametrize(
    "order",
    [
        BalancedOrder([0] * 20 + [1] * 9, num_samples=37, seed=2),
        WeightedOrder(np.arange(29), num_samples=37, seed=2),
        BlockShuffledOrder(29, seed=2, block_samples=3, window_blocks=2),
    ],
    ids=lambda order: type(order).__name__,
)
def test_every_position_of_an_order_comes_once_over_all_ranks(order):
    for world_size in WORLDS:
        loaders = ranks(29, 4, world_size, sampler=order)
        for number in range(2):
            taken = steps(loaders)
            assert in_order(taken) == order.indices(number, 0, len(order)).tolist()
            assert len(taken) == len(loaders[0])


@pytest.mark.parametrize("drop_last", [False, True])
def test_states_resume_with_other_numbers_of_ranks_and_other_batch_sizes(drop_last):
    n = 47
    orders = [epoch_order(n, 5, number, 0, n).tolist() for number in range(2)]
    options = {"shuffle": True, "seed": 5, "drop_last": drop_last}
    for first, second, third in ((2, 1, 2), (2, 3, 2), (1, 2, 3), (3, 1, 4)):
        for stop, again in itertools.product(range(4), range(3)):
            loaders = ranks(n, 3, first, **options)
            got = in_order(steps(loaders, stop)) if stop else []
            for world_size, batch_size in ((second, 5), (third, 2)):
                loaders = ranks(n, batch_size, world_size, state_of(loaders), **options)
                if world_size == second and again:
                    got += in_order(steps(loaders, again))
            got += in_order(steps(loaders)) if state_of(loaders)["epoch"] == 0 else []
            assert got == orders[0][: len(got)]
            assert len(got) > n - max(5 * second, 2 * third) if drop_last else len(got) == n
            whole = in_order(steps(loaders))
            assert whole == orders[1][: len(whole)]
            assert len(whole) == n - n % (2 * third) * drop_last


def test_a_state_at_the_end_of_an_epoch_is_the_start_of_the_next_on_any_number_of_ranks():
    for world_size, other in itertools.permutations((1, 2, 3), 2):
        # End the epoch by exhausting the iterator, or by stopping after the last batch.
        for most in (None, len(ranks(23, 3, world_size)[0])):
            loaders = ranks(23, 3, world_size, shuffle=True)
            steps(loaders, most)
            resumed = ranks(23, 4, other, state_of(loaders), shuffle=True)
            assert in_order(steps(resumed)) == epoch_order(23, 0, 1, 0, 23).tolist()


def test_more_ranks_than_samples_left_in_an_epoch_are_refused():
    loaders = ranks(9, 1, 1)
    assert in_order(steps(loaders, 7)) == list(range(7))
    state = state_of(loaders)
    with pytest.raises(InvalidOption, match="2 remaining samples cannot be divided among 3 processes"):
        ranks(9, 1, 3, state)
    assert in_order(steps(ranks(9, 2, 2, state))) == [7, 8]
    assert in_order(steps(ranks(9, 2, 1, state))) == [7, 8]


def test_batches_of_one_sample_are_refused_if_the_ranks_cannot_get_equally_many():
    with pytest.raises(
        InvalidOption, match=r"8 samples cannot be divided among 3 .*batch_size=2 or more, or drop_last=True"
    ):
        ranks(8, 1, 3)
    assert len(in_order(steps(ranks(8, 1, 3, drop_last=True)))) == 6


def test_a_change_of_ranks_within_an_epoch_loses_no_sample():
    for n, batch_size, first in ((26, 3, 8), (35, 2, 3)):
        for stop, other in itertools.product((1, 2), (1, 2, 5)):
            loaders = ranks(n, batch_size, first, shuffle=True)
            got = in_order(steps(loaders, stop))
            if state_of(loaders)["epoch"] == 0:
                got += in_order(steps(ranks(n, 2, other, state_of(loaders), shuffle=True)))
            assert sorted(got) == list(range(n))


def test_len_is_that_of_a_full_epoch_after_a_resume():
    loaders = ranks(23, 2, 2)
    steps(loaders, 3)
    for loader in ranks(23, 3, 2, state_of(loaders)):
        assert len(loader) == 4
        assert len(list(loader)) == 2


def transformed(data: Any, world_size: int, batch_size: int, transform: Any, **options: Any) -> dict[int, bytes]:
    found = {}
    for rank in range(world_size):
        share = {"rank": rank, "world_size": world_size}
        for images, labels in Loader(data, batch_size, shuffle=True, seed=6, transform=transform, **share, **options):
            found.update({int(label): image.numpy().tobytes() for image, label in zip(images, labels, strict=True)})
    return found


@pytest.mark.parametrize(
    "transform",
    [
        Compose([RandomResizedCrop(6), RandomHorizontalFlip(), Cutout(2)]),
        PerSample(lambda image: image + torch.randint(0, 100, image.shape).to(torch.uint8)),
    ],
    ids=["colabkit", "per sample"],
)
def test_a_sample_gets_the_same_random_numbers_on_any_rank_layout(transform):
    images = torch.randint(0, 256, (23, 3, 8, 9), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    data = (images, torch.arange(23))
    expected = transformed(data, 1, 4, transform, num_workers=0)
    assert len(expected) == 23
    for world_size, batch_size in ((2, 4), (3, 5), (5, 2)):
        assert transformed(data, world_size, batch_size, transform, num_workers=0) == expected


def test_labels_are_mixed_only_within_a_rank():
    images, labels = torch.zeros(16, 3, 4, 4), torch.arange(16)
    batches = [list(Loader((images, labels), 4, transform=MixUp(16), rank=rank, world_size=2)) for rank in range(2)]
    for rank, step in itertools.product(range(2), range(2)):
        mixed = batches[rank][step][1]
        own = range(8 * step + 4 * rank, 8 * step + 4 * rank + 4)
        assert {place for row in mixed for place in row.nonzero().flatten().tolist()} == set(own)


@pytest.mark.parametrize(
    ("rank", "world_size"), [(0, None), (None, 2), (2, 2), (-1, 2), (0, 0), (0.0, 1), ("0", "1"), (True, 2)]
)
def test_invalid_ranks_raise_an_error(rank, world_size):
    with pytest.raises(InvalidOption, match=r"Cannot make a Loader.*(rank|world_size)"):
        Loader(torch.arange(9), 2, rank=rank, world_size=world_size)


def initialise(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)


def test_the_share_follows_torch_distributed_even_if_it_starts_after_the_loader(monkeypatch):
    loader, explicit = Loader(torch.arange(23), 2), Loader(torch.arange(23), 2, rank=1, world_size=3)
    assert len(loader) == 12
    initialise(monkeypatch, rank=1, world_size=2)
    assert len(loader) == len(Loader(torch.arange(23), 2)) == 6
    expected = [step[1] for step in steps(ranks(23, 2, 2))]
    assert [batch.tolist() for batch in loader] == expected
    assert loader.state_dict()["global_batch"] == 4
    assert [batch.tolist() for batch in explicit] == [step[1] for step in steps(ranks(23, 2, 3))]


def test_more_ranks_than_samples_raise_an_error_even_if_they_start_after_the_loader(monkeypatch):
    with pytest.raises(InvalidOption, match="only 5 samples for 6 processes; expected at least one sample per process"):
        ranks(5, 1, 6)
    loader = Loader(torch.arange(5), 1)
    initialise(monkeypatch, rank=0, world_size=6)
    with pytest.raises(InvalidOption, match="only 5 samples for 6 processes; expected at least one sample per process"):
        list(loader)


def test_a_custom_sampler_is_not_split_again():
    n, world_size = 23, 3
    loaders = []
    for rank in range(world_size):
        sampler = DistributedSampler(range(n), world_size, rank, shuffle=True, seed=2)
        loaders.append(Loader(torch.arange(n), 2, sampler=sampler, rank=rank, world_size=world_size))
    for number in range(2):
        taken = [[sample for batch in loader for sample in batch.tolist()] for loader in loaders]
        for rank, samples in enumerate(taken):
            reference = DistributedSampler(range(n), world_size, rank, shuffle=True, seed=2)
            reference.set_epoch(number)
            assert samples == list(reference)
        assert set(itertools.chain(*taken)) == set(range(n))


@pytest.mark.parametrize("name", ["distributed", "batches"])
def test_a_state_with_a_custom_sampler_loads_on_the_same_number_of_ranks(name):
    data = torch.arange(32)

    def loaders(world_size: int, state: State | None = None) -> list[Loader]:
        made = []
        for rank in range(world_size):
            sampler: Any = DistributedSampler(data, world_size, rank, seed=2)
            sampler = sampler if name == "distributed" else BatchSampler(sampler, 4, drop_last=False)
            made.append(Loader(data, 4, sampler=sampler, rank=rank, world_size=world_size))
        for loader in made if state else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        return made

    expected = [steps(loaders(2)), steps(loaders(1))]
    taken = loaders(2)
    got = steps(taken, 2)
    state = state_of(taken)
    assert (state["samples"], state["world_size"], state["global_batch"]) == (8, 2, 8)
    assert got + steps(loaders(2, state)) == expected[0]
    with pytest.raises(InvalidOption, match="the state lacks world_size"):
        loaders(2, {name: value for name, value in state.items() if name != "world_size"})
    with pytest.raises(InvalidOption) as caught:
        loaders(1, state)
    assert str(caught.value) == (
        "Cannot resume the Loader: 2 processes saved this state of a custom sampler in the middle of an epoch;"
        " expected the same number of processes, not 1."
        " Start 2 processes, or start the epoch again with loader.set_epoch(0)."
    )
    steps(taken)
    (alone,) = loaders(1, state_of(taken))
    assert alone.next_epoch == 2
    alone.set_epoch(0)
    assert steps([alone]) == expected[1]


@pytest.mark.parametrize("as_data", [lambda images: images, StackDataset], ids=["rows", "samples"])
@pytest.mark.parametrize(
    ("transform", "size"),
    [
        (RandomResizedCrop(8), 4),
        (PerSample(lambda image: image + torch.randint(0, 100, image.shape).to(torch.uint8)), 4),
        # Plain functions are seeded once per batch.
        (lambda images: images + torch.randint(0, 100, images.shape).to(torch.uint8), 2),
    ],
    ids=["colabkit", "per sample", "at last"],
)
def test_ranks_with_a_custom_sampler_draw_different_random_numbers(transform, size, as_data):
    images = torch.arange(32 * 32).view(1, 1, 32, 32).remainder(100).to(torch.uint8).repeat(16, 1, 1, 1)

    def made(rank: int, world_size: int, after: int = 0) -> list[bytes]:
        sampler = DistributedSampler(images, world_size, rank, shuffle=False)
        share = {"rank": rank, "world_size": world_size}
        data = as_data(images)
        loader = Loader(data, 2, sampler=sampler, transform=transform, num_workers=0, **share)
        taken = list(itertools.islice(loader, after))
        resumed = Loader(data, size if after else 2, sampler=sampler, transform=transform, num_workers=0, **share)
        resumed.load_state_dict(loader.state_dict())
        batches = [batch[0] if isinstance(batch, tuple | list) else batch for batch in [*taken, *resumed]]
        return [image.numpy().tobytes() for batch in batches for image in batch]

    of_ranks = [made(rank, 2) for rank in range(2)]
    assert not set(of_ranks[0]) & set(of_ranks[1])
    assert [made(rank, 2, after=2) for rank in range(2)] == of_ranks


def test_ranks_of_a_pack_of_images_get_its_rows(tmp_path):
    data = open_pack(make_pack(tmp_path / "p.h5", train=23))["train"]
    loaders = [Loader(data, 4, shuffle=True, seed=1, rank=rank, world_size=3) for rank in range(3)]
    for step in zip(*loaders, strict=True):
        assert all(images.is_contiguous() for images, _ in step)
    taken = [list(loader) for loader in loaders]
    images = torch.cat([step[0] for rank_steps in zip(*taken, strict=True) for step in rank_steps])
    assert torch.equal(images, data.rows[epoch_order(23, 1, 1, 0, 23)].permute(0, 3, 1, 2))
