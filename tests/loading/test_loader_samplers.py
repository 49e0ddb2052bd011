"""`Loader` with samplers from `colabkit.sampler`, torch and users, including resumed epochs."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from contract import make_pack
from sampling import sampled
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from colabkit.augment import RandomResizedCrop
from colabkit.errors import InvalidOption, LoaderFailed
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.packs import open_pack
from colabkit.sampler import BalancedOrder, BlockShuffledOrder, SequentialOrder, ShuffledOrder, WeightedOrder

N = 23
BATCH = 4
LABELS = np.arange(N) % 3 % 2
WEIGHTS = np.arange(N) % 5


def loader(sampler: Any = None, batch_size: int = BATCH, **options: Any) -> Loader:
    return Loader(torch.arange(N), batch_size, sampler=sampler, **options)


def batches(loader: Loader, most: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(loader, most)]


def flat(some: list[list[int]]) -> list[int]:
    return [sample for batch in some for sample in batch]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class EvenSampler:
    """A custom sampler of even numbers, whose order depends on `set_epoch`."""

    def __init__(self, length: int = (N + 1) // 2) -> None:
        self.epoch = 0
        self.length = length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from np.roll(np.arange(0, N, 2), self.epoch)


class Buckets:
    """A batch sampler without `batch_size`, whose batches differ in size; two are larger than `BATCH`."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([1, 2, 3], [4], [22, 20, 5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19], [0, 1, 21])


class GlobalRandomSampler(torch.utils.data.Sampler[int]):
    """A sampler that shuffles with a global generator, as many custom samplers do."""

    def __init__(self, permuted: Callable[[int], Any]) -> None:
        self.permuted = permuted

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(self.permuted(N).tolist())


ORDERS: dict[str, Callable[[], Any]] = {
    "balanced": lambda: BalancedOrder(LABELS, seed=2),
    "balanced longer": lambda: BalancedOrder(LABELS, num_samples=37, seed=2),
    "weighted": lambda: WeightedOrder(WEIGHTS, num_samples=30, seed=2),
    "weighted once": lambda: WeightedOrder(WEIGHTS, seed=2, replacement=False),
    "block": lambda: BlockShuffledOrder(N, 2, block_samples=3, window_blocks=2),
    "shuffled": lambda: ShuffledOrder(N, 2),
    "sequential": lambda: SequentialOrder(N),
}
SINGLES: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomSampler(range(N), generator=seeded(3)),
    "random without a generator": lambda: RandomSampler(range(N)),
    "random with replacement": lambda: RandomSampler(range(N), replacement=True, num_samples=70, generator=seeded(3)),
    "subset": lambda: SubsetRandomSampler(range(5, 19), generator=seeded(3)),
    "weighted of torch": lambda: WeightedRandomSampler(torch.rand(N, generator=seeded(1)), 21, generator=seeded(3)),
    "distributed": lambda: DistributedSampler(range(N), num_replicas=2, rank=1, shuffle=True, seed=5),
    "sequential of torch": lambda: SequentialSampler(range(N)),
    "list": lambda: [3, 1, 1, 22, 0, 5, 5, 9, 2, 2, 3, 7, 11],
    "array": lambda: np.random.default_rng(1).permutation(N),
    "tensor": lambda: torch.randperm(N, generator=seeded(1)),
    "custom": EvenSampler,
    "by torch's global generator": lambda: GlobalRandomSampler(torch.randperm),
    "by NumPy's global generator": lambda: GlobalRandomSampler(np.random.permutation),
    "by Python's global generator": lambda: GlobalRandomSampler(lambda n: np.array(random.sample(range(n), n))),
}
LISTS: dict[str, Callable[[], Any]] = {
    "batches": lambda: BatchSampler(RandomSampler(range(N), generator=seeded(3)), 5, drop_last=False),
    "full batches": lambda: BatchSampler(RandomSampler(range(N)), 5, drop_last=True),
    "batches of a rank": lambda: BatchSampler(DistributedSampler(range(N), 2, 0, seed=1), 3, drop_last=False),
    "list of lists": lambda: [[0, 1], [5, 4, 3, 2, 7], [9], [22, 11]],
    "arrays": lambda: [np.array([3, 1]), np.array([2, 2, 2])],
    "tensors": lambda: list(torch.arange(20).view(4, 5)),
    "buckets": Buckets,
    "batches by a global generator": lambda: BatchSampler(GlobalRandomSampler(torch.randperm), 5, drop_last=False),
}
ALL = {**ORDERS, **SINGLES, **LISTS}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_of_colabkit_determines_the_stream_of_samples(name):
    order = ORDERS[name]()
    stream = loader(ORDERS[name]())
    for number in range(3):
        taken = batches(stream)
        assert flat(taken) == order.indices(number, 0, len(order)).tolist()
        assert len(taken) == len(stream) == -(-len(order) // BATCH)


def test_balanced_batches_hold_all_classes_equally_often():
    for batch in batches(loader(BalancedOrder(LABELS, seed=1))):
        assert abs(int(LABELS[batch].sum()) * 2 - len(batch)) <= 1


def test_block_shuffled_batches_stay_in_a_window_of_blocks():
    data = torch.arange(4096)
    order = BlockShuffledOrder(4096, 1, block_samples=64, window_blocks=4)
    for batch in Loader(data, 256, sampler=order):
        assert len({int(sample) // 64 for sample in batch}) <= 4
    taken = [batch.tolist() for batch in Loader(data, 256, shuffle="block", seed=1)]
    assert sorted(flat(taken)) == data.tolist() != flat(taken)


def test_blocks_are_chosen_by_the_size_of_a_sample(tmp_path):
    for side, block in ((4, 1024), (128, 85)):
        pack = make_pack(tmp_path / f"{side}.h5", (side, side, 3), train=4)
        policy = Loader(open_pack(pack)["train"], 2, shuffle="block").state_dict()["order"]
        assert policy == f"block {block}x64"


@pytest.mark.parametrize("name", ["distributed", "sequential of torch", "list", "array", "tensor", "custom"])
def test_batches_are_filled_from_a_sampler_of_single_samples(name):
    stream, reference = loader(SINGLES[name]()), SINGLES[name]()
    for number in range(2):
        if hasattr(reference, "set_epoch"):
            reference.set_epoch(number)
        taken = batches(stream)
        assert flat(taken) == [int(sample) for sample in reference]
        assert [len(batch) for batch in taken[:-1]] == [BATCH] * (len(stream) - 1)


def test_random_samplers_of_torch_keep_their_guarantees():
    for _ in range(2):
        assert sorted(flat(batches(loader(SINGLES["random"]())))) == list(range(N))
        assert sorted(flat(batches(loader(SINGLES["subset"]())))) == list(range(5, 19))
        drawn = flat(batches(loader(WeightedRandomSampler([0.0, 1.0, 0.0, 3.0], 400))))
        assert set(drawn) == {1, 3}
        assert 50 < drawn.count(1) < 150


@pytest.mark.parametrize("name", ALL)
def test_len_equals_the_number_of_batches_and_the_published_number(name, heard):
    stream = loader(ALL[name]())
    taken = batches(stream)
    assert len(stream) == len(taken) > 1
    (started,) = [event for event in heard if isinstance(event, meters.EpochStarted)]
    assert started.batches == len(taken)
    assert started.samples >= len(flat(taken)) or name == "buckets"
    if name not in ("batches by a global generator", "batches", "batches of a rank", "full batches", "buckets"):
        assert started.samples == len(flat(taken))


@pytest.mark.parametrize("name", LISTS)
def test_batches_are_the_lists_of_a_batch_sampler(name):
    sampler = LISTS[name]()
    taken = batches(loader(sampler, batch_size=100))
    assert len(taken) == len(sampler)
    if isinstance(sampler, BatchSampler):
        sizes = [len(batch) for batch in sampler]
        assert [len(batch) for batch in taken] == sizes
        assert len(set(flat(taken))) == sum(sizes)
    else:
        assert taken == [[int(sample) for sample in batch] for batch in sampler]


@pytest.mark.parametrize("name", [*ORDERS, *SINGLES])
def test_with_drop_last_only_full_batches_come(name):
    sampler = ALL[name]()
    taken = batches(loader(sampler, drop_last=True))
    assert [len(batch) for batch in taken] == [BATCH] * (len(sampler) // BATCH)
    assert len(loader(ALL[name](), drop_last=True)) == len(taken)


@pytest.mark.parametrize("name", sampled(ALL, 12))
def test_resuming_at_any_batch_of_any_epoch_equals_the_uninterrupted_stream(name):
    """The resumed loader has a new sampler with the same arguments, as in a new process."""
    reference = loader(ALL[name](), seed=1)
    expected = [flat(batches(reference)) for _ in range(3)]
    for number, stop in itertools.product(range(2), range(1, len(reference) + 1)):
        stream = loader(ALL[name](), seed=1)
        for _ in range(number):
            batches(stream)
        got = flat(batches(stream, stop))
        resumed = loader(ALL[name](), seed=1)
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        if stop < len(reference):
            got += flat(batches(resumed))
        assert got == expected[number]
        assert flat(batches(resumed)) == expected[number + 1]


@pytest.mark.parametrize("name", ["buckets", "misjudged"])
def test_at_least_one_remaining_batch_is_published_while_the_end_is_unknown(name, heard):
    samplers = {"buckets": Buckets, "misjudged": lambda: EvenSampler(length=3)}
    stream = loader(samplers[name](), batch_size=2)
    got = batches(stream, 4 if name == "buckets" else 3)
    resumed = loader(samplers[name](), batch_size=2)
    resumed.load_state_dict(stream.state_dict())
    got += batches(resumed)
    assert flat(got) == [int(sample) for some in samplers[name]() for sample in np.atleast_1d(some)]
    *_, started = [event for event in heard if isinstance(event, meters.EpochStarted)]
    assert (started.batches, started.samples) == (1, 1)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", [*ORDERS, *SINGLES])
def test_resuming_with_another_batch_size_continues_at_the_same_sample(name, drop_last):
    expected = flat(batches(loader(ALL[name](), batch_size=1)))
    stream = loader(ALL[name](), batch_size=3)
    got = batches(stream, 1)
    for batch_size in (2, 4):
        state = stream.state_dict()
        stream = loader(ALL[name](), batch_size=batch_size, drop_last=drop_last)
        stream.load_state_dict(state)
        if batch_size == 2:
            got += batches(stream, 1)
    rest = batches(stream)
    assert all(len(batch) == 4 for batch in rest[:-1])
    left_out = (len(expected) - len(flat(got))) % 4 if drop_last else 0
    assert flat(got + rest) == expected[: len(expected) - left_out]


@pytest.mark.parametrize("name", [name for name in SINGLES if "random" in name])
def test_orders_of_torch_samplers_depend_only_on_seeds_and_epoch(name):
    """The seeds are those of the sampler's generator and of the loader. No generator of the caller changes."""
    random.seed(1)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    sampler = SINGLES[name]()
    state = None if sampler.generator is None else sampler.generator.get_state()
    stream = loader(sampler)
    orders = [flat(batches(stream)) for _ in range(2)]
    assert orders[0] != orders[1]
    assert flat(batches(loader(SINGLES[name](), seed=1))) not in orders
    torch.manual_seed(2)
    again = loader(sampler)
    again.set_epoch(1)
    assert flat(batches(again)) == orders[1]
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert (sampler.generator is None) == (state is None)
    assert state is None or torch.equal(sampler.generator.get_state(), state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", [name for name in ALL if "global" in name])
def test_orders_drawn_from_the_global_generators_depend_only_on_seed_and_epoch(name, workers):
    """The caller's generators do not change, and worker threads do not change the order."""

    def order(seed: int, epoch: int) -> list[int]:
        stream = loader(ALL[name](), seed=seed, num_workers=workers, prefetch_batches=workers or None)
        stream.set_epoch(epoch)
        return flat(batches(stream))

    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    orders = [order(seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len(set(map(tuple, orders))) == 3
    assert all(sorted(each) == list(range(N)) for each in orders)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    torch.manual_seed(2)
    np.random.seed(2)
    random.seed(2)
    assert [order(0, 0), order(0, 1), order(1, 0)] == orders


def test_generators_of_other_seeds_give_other_orders():
    orders = [flat(batches(loader(RandomSampler(range(N), generator=seeded(seed))))) for seed in (1, 2)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(N))


def test_a_distributed_sampler_inside_a_batch_sampler_receives_the_epoch():
    stream = loader(BatchSampler(DistributedSampler(range(N), 2, 0, seed=1), 3, drop_last=False))
    for number in range(3):
        reference = DistributedSampler(range(N), 2, 0, seed=1)
        reference.set_epoch(number)
        assert flat(batches(stream)) == list(reference)


@pytest.mark.parametrize(
    ("taken", "given"),
    [
        ("balanced", lambda: BalancedOrder(LABELS, seed=3)),
        ("balanced", lambda: BalancedOrder(1 - LABELS, seed=2)),
        ("balanced", lambda: WeightedOrder(WEIGHTS, seed=2)),
        ("weighted", lambda: WeightedOrder(WEIGHTS + 1, num_samples=30, seed=2)),
        ("weighted", lambda: WeightedOrder(WEIGHTS, num_samples=31, seed=2)),
        ("weighted", lambda: None),
        ("shuffled", lambda: WeightedOrder(WEIGHTS, seed=2)),
        ("random", lambda: RandomSampler(range(N), generator=seeded(4))),
        ("random", lambda: SubsetRandomSampler(range(N), generator=seeded(3))),
        ("random", lambda: None),
        ("sequential", lambda: RandomSampler(range(N))),
        ("distributed", lambda: DistributedSampler(range(N), 2, 1, seed=6)),
    ],
)
def test_a_state_of_another_sampler_raises_an_error_and_changes_nothing(taken, given):
    stream = loader(ALL[taken]())
    batches(stream, 2)
    other = loader(given())
    before = other.state_dict()
    with pytest.raises(InvalidOption, match="Cannot resume the Loader: the state has the order"):
        other.load_state_dict(stream.state_dict())
    assert other.state_dict() == before


def test_a_loader_without_a_sampler_restores_the_shuffle_of_a_state():
    for shuffle, other in itertools.permutations((True, False, "block"), 2):
        stream = loader(shuffle=shuffle, seed=8)
        expected = flat(batches(loader(shuffle=shuffle, seed=8)))
        got = flat(batches(stream, 2))
        resumed = loader(shuffle=other)
        resumed.load_state_dict(stream.state_dict())
        assert (resumed.shuffle, resumed.seed) == (shuffle, 8)
        assert got + flat(batches(resumed)) == expected


@pytest.mark.parametrize(
    ("sampler", "found"),
    [
        ([0, 1, N], N),
        ([0, -1, 2], -1),
        ([[0, 1], [2, N]], N),
        ([0, 1.5, 2], 1.5),
        (["a", "b"], "a"),
        ("abc", "a"),
        ([0, None, 1], None),
        ([None, 1], None),
        ([3, [0]], [0]),
        ([torch.tensor([0.5])], torch.tensor(0.5)),
        ([1 << 70], 1 << 70),
        ([[[0]]], [0]),
        ([True, False], True),
        (torch.tensor([False, True]), torch.tensor(False)),
        (np.array([[1], [0]], bool), np.True_),
    ],
    ids=repr,
)
def test_a_sampler_that_yields_an_invalid_index_raises_an_error_with_that_value(sampler, found):
    with pytest.raises(InvalidOption) as caught:
        batches(loader(sampler, batch_size=2))
    expected = f"expected sample indices from 0 to {N - 1}. Correct the sampler."
    assert str(caught.value) == f"Cannot make a batch: the sampler yielded {found!r}; {expected}"


def test_a_sampler_whose_first_item_is_a_list_must_yield_only_lists():
    with pytest.raises(
        InvalidOption, match="the sampler yielded 3; expected a list of sample indices, like its first item"
    ):
        batches(loader([[0], 3], batch_size=2))


def test_empty_lists_of_a_batch_sampler_are_skipped():
    assert [len(batch) for batch in batches(loader([[0, 1], [], [2]], batch_size=2))] == [2, 1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fails_at", [0, 1, 9])
def test_an_error_of_a_sampler_is_the_cause_of_the_error_of_the_loader(fails_at, workers):
    class FailingSampler:
        is_asked_again = False

        def __len__(self) -> int:
            return N

        def __iter__(self) -> Iterator[int]:
            for number in range(N):
                if number == fails_at and self.is_asked_again:
                    raise RuntimeError("no more")
                yield number

    sampler = FailingSampler()
    stream = loader(sampler, num_workers=workers, prefetch_batches=workers or None)
    sampler.is_asked_again = True
    with pytest.raises(LoaderFailed, match=r"Cannot make a batch: .*sampl.* raised RuntimeError: no more") as caught:
        batches(stream)
    assert isinstance(caught.value.__cause__, RuntimeError)


class MisjudgedList(list[int]):
    def __init__(self, length: int) -> None:
        super().__init__(range(N))
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("length", [1, 9, 2 * N])
def test_a_sampler_with_a_wrong_length_still_ends_its_epochs(length):
    stream = loader(MisjudgedList(length))
    assert flat(batches(stream)) == list(range(N))
    assert (stream.state_dict()["epoch"], stream.state_dict()["samples"]) == (1, 0)
    for stop in range(1, 6):
        stream = loader(MisjudgedList(length))
        batches(stream, stop)
        state = stream.state_dict()
        assert (state["epoch"], state["samples"]) == (0, 4 * stop)


def test_a_repeated_sample_of_an_epoch_gets_other_random_numbers():
    images = torch.randint(0, 256, (2, 3, 9, 9), generator=seeded(1), dtype=torch.uint8)
    taken = torch.cat(list(Loader(images, 3, sampler=[1] * 12, transform=RandomResizedCrop(5))))
    assert len({image.numpy().tobytes() for image in taken}) == 12


def test_the_start_of_a_sampler_counts_as_waiting_for_the_first_batch():
    class SlowSampler:
        def __len__(self):
            return N

        def __iter__(self):
            until = time.perf_counter() + 0.05
            while time.perf_counter() < until:
                pass
            return iter(range(N))

    slow = loader(SlowSampler())
    batches(slow)
    assert slow.meters.snapshot().first_s >= 0.05


def test_invalid_samplers_raise_an_error_when_the_loader_is_created():
    made_for_others = [
        ShuffledOrder(N + 1),
        SequentialOrder(N - 1),
        BalancedOrder([0, 1, 1]),
        WeightedOrder([1.0, 2.0, 3.0]),
        BlockShuffledOrder(40),
    ]
    for sampler, options, message in [
        *(((what), {}, "sampler=.*with a length") for what in (iter([1, 2]), 3, (i for i in range(4)))),
        *((empty, {}, "the sampler is empty; expected at least one") for empty in ([], (), np.zeros(0, np.int64))),
        (torch.zeros(0, dtype=torch.int64), {}, "the sampler is empty; expected at least one sample index"),
        ([[0, 1], [2]], {"drop_last": True}, "drop_last=True is used with a sampler that yields batches"),
        (SequentialOrder(N), {"shuffle": True}, "shuffle=True is used with a sampler"),
        (SequentialOrder(N), {"shuffle": "block"}, "shuffle='block' is used with a sampler"),
        (None, {"shuffle": "blocks"}, "True, False or 'block'"),
        *((order, {}, f"the sampler is for {order.n} samples, but the dataset has {N}") for order in made_for_others),
    ]:
        with pytest.raises(InvalidOption, match=f"Cannot make a Loader: .*{message}"):
            loader(sampler, **options)
