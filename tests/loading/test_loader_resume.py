"""Resumed epochs are bit-identical to uninterrupted ones, even with random transforms.

`TestAugmentedStream` covers more cases on every pipeline: a second resume in an epoch, a state at the end of an epoch,
a state that is loaded twice, an early break, prefetched batches, and independent streams. Samplers are tested in
test_loader_samplers.py, ranks in test_loader_ranks.py.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import make_pack, make_shards, seal_fields
from loader_batches import LoaderContract, fails_at
from packed_files import photos
from pictures import saved
from sampling import sampled
from torch.utils.data import ConcatDataset, SubsetRandomSampler, TensorDataset

from colabkit.augment import (
    Compose,
    Cutout,
    MixUp,
    Normalize,
    PerBatch,
    PerSample,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
)
from colabkit.errors import InvalidOption
from colabkit.foundation import meters
from colabkit.loading import Loader
from colabkit.packs import FileDataset, PackedDataset, open_pack
from colabkit.sampler import BalancedOrder
from colabkit.storage.staging.api import stage, unstage

N = 22
# An epoch has six batches, the last one with two samples.
BATCH = 4
OTHER_BATCH = 3
AUGMENT = Compose([RandomResizedCrop(6), RandomHorizontalFlip(), Cutout(3, p=0.7)])

Samples = list[tuple[bytes, int]]


@pytest.fixture(scope="module")
def raw(folder: Path) -> PackedDataset:
    return open_pack(make_pack(folder / "raw.h5", (9, 8, 3), train=N))["train"]


@pytest.fixture(scope="module")
def encoded(folder: Path) -> PackedDataset:
    random = np.random.default_rng(4)
    files = [saved(random.integers(0, 256, (8 + n % 5, 12 - n % 3, 3), dtype=np.uint8), "PNG") for n in range(N)]
    fields = {"X": {"train": files}, "Y": {"train": np.arange(N) % 3}}
    return open_pack(seal_fields(folder / "files.h5", fields, {"X": "image"}, "class"))["train"]


@pytest.fixture(params=["raw", "encoded"])
def data(request: pytest.FixtureRequest) -> PackedDataset:
    return request.getfixturevalue(request.param)


def make(data: Any, threads: int = 2, batch_size: int = BATCH, state: Any = None, **options: Any) -> Loader:
    options = {"shuffle": True, "seed": 5, "transform": AUGMENT, **options}
    loader = Loader(data, batch_size, num_workers=threads, **options)
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def samples(batch: Any) -> Samples:
    images, labels = batch
    return [(image.numpy().tobytes(), int(label)) for image, label in zip(images, labels, strict=True)]


def take(loader: Loader, most: int | None = None) -> Samples:
    taken = itertools.islice(loader, most) if most != 0 else ()
    return [sample for batch in taken for sample in samples(batch)]


# Each state is taken after this number of full epochs and this number of batches of the next epoch.
POSITIONS = {
    "fresh": (0, 0),
    "mid": (0, 2),
    "end, not exhausted": (0, 6),
    "end": (1, 0),
    "end + 1": (1, 1),
}


@pytest.mark.parametrize("again", sampled([0, 1, 3], 2), ids=["first resume", "second resume", "second resume, later"])
@pytest.mark.parametrize("batch_size", sampled([BATCH, OTHER_BATCH], 2), ids=["same batch", "other batch"])
@pytest.mark.parametrize("threads", sampled([1, 2, 4], 2))
@pytest.mark.parametrize("position", sampled(POSITIONS, 3))
def test_a_resumed_stream_equals_the_uninterrupted_one_bit_for_bit(data, position, threads, batch_size, again):
    """With `again`, the stream is resumed twice, with different numbers of threads."""
    epochs, batches = POSITIONS[position]
    reference = make(data)
    expected = [sample for _ in range(3) for sample in take(reference)]
    loader = make(data, threads)
    got = [sample for _ in range(epochs) for sample in take(loader)] + take(loader, batches)
    if again:
        loader = make(data, 5 - threads, batch_size, loader.state_dict())
        got += take(loader, again)
    loader = make(data, threads, batch_size, loader.state_dict())
    while len(got) < len(expected):
        got += take(loader)
    assert got == expected


def test_the_augmented_epochs_and_samples_differ(data):
    """If samples or epochs were equal, comparing streams in the other tests would prove nothing."""
    loader = make(data)
    epochs = [take(loader) for _ in range(2)]
    assert len({image for epoch in epochs for image, _ in epoch}) == 2 * N


TRANSFORMS = {
    "plain callable": lambda images: images.float() + torch.rand(images.shape),
    "between transforms of colabkit": Compose(
        [RandomCrop(7, padding=1), lambda images: images * torch.rand(1), RandomHorizontalFlip()]
    ),
    "per batch": Compose([AUGMENT, PerBatch(lambda images: images.float() / 255)]),
    "per sample": PerSample(lambda image: image[:, :6, :6].float() + np.random.rand() + torch.rand(1)),
    "normalised": Compose([AUGMENT, Normalize()]),
}


@pytest.mark.parametrize("name", sampled(TRANSFORMS, 2))
@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_of_custom_code_are_the_same_after_a_resume(raw, name, workers):
    options = {"transform": TRANSFORMS[name], "threads": workers}
    torch.manual_seed(1)
    expected = take(make(raw, **options))
    torch.manual_seed(2)
    for stop in (1, 4):
        loader = make(raw, **options)
        got = take(loader, stop)
        torch.rand(stop)
        got += take(make(raw, **{**options, "threads": 0}, state=loader.state_dict()))
        assert got == expected


def test_mixed_images_and_labels_are_the_same_after_a_resume(raw):
    transform = Compose([AUGMENT, Normalize(), MixUp(3)])

    def mixed(loader: Loader, most: int | None = None) -> list[tuple[bytes, bytes]]:
        taken = itertools.islice(loader, most)
        return [(images.numpy().tobytes(), labels.numpy().tobytes()) for images, labels in taken]

    expected = mixed(make(raw, transform=transform))
    loader = make(raw, transform=transform)
    got = mixed(loader, 2)
    assert got + mixed(make(raw, 4, transform=transform, state=loader.state_dict())) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_combined_data_sets_count_each_sample_once_and_raise_no_index_error(raw, workers):
    parts = [TensorDataset(torch.arange(start, stop)) for start, stop in ((0, 9), (9, 10), (10, 23))]
    options = {"transform": None, "collate_fn": lambda some: torch.stack([sample for (sample,) in some])}
    numbers = [int(sample) for batch in make(ConcatDataset(parts), workers, **options) for sample in batch]
    assert sorted(numbers) == list(range(23))
    for stop in (1, 3, 5):
        loader = make(ConcatDataset(parts), workers, **options)
        got = [int(sample) for batch in itertools.islice(loader, stop) for sample in batch]
        resumed = make(ConcatDataset(parts), workers, OTHER_BATCH, loader.state_dict(), **options)
        assert got + [int(sample) for batch in resumed for sample in batch] == numbers


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_state_carries_the_permutation_and_the_seed_of_the_transforms_and_not_only_the_position(raw, name):
    """Without the epoch or the seed, a state would resume at the right position of the wrong permutation."""
    reference, loader = (make(raw, 0, transform=TRANSFORMS[name], seed=77) for _ in range(2))
    expected = [take(reference) for _ in range(3)]
    assert take(loader) == expected[0]
    got = take(loader, 2)
    other = make(raw, 0, transform=TRANSFORMS[name], seed=1, shuffle=False, state=loader.state_dict())
    assert got + take(other) == expected[1]
    assert take(other) == expected[2]


def test_a_state_loaded_before_between_and_during_iterations_is_for_the_next_one(data):
    first = make(data)
    expected = take(make(data))
    take(first, 3)
    state = first.state_dict()
    loader = make(data, state=state)
    assert take(loader) == expected[3 * BATCH :]
    take(loader)
    loader.load_state_dict(state)
    assert take(loader) == expected[3 * BATCH :]
    running = iter(make(data))
    running_samples = samples(next(running))
    loader.load_state_dict(state)
    assert running_samples + [sample for batch in running for sample in samples(batch)] == expected
    assert take(loader) == expected[3 * BATCH :]
    loader.load_state_dict(state)
    # Training loops call `set_epoch` before each epoch.
    loader.set_epoch(0)
    assert take(loader) == expected[3 * BATCH :]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_state_with_another_seed_loaded_during_an_iteration_does_not_change_it(raw, name):
    options = {"transform": TRANSFORMS[name], "threads": 0}
    expected = take(make(raw, **options))
    loader = make(raw, **options)
    running = iter(loader)
    got = samples(next(running))
    loader.load_state_dict(make(raw, **options, seed=9).state_dict())
    assert got + [sample for batch in running for sample in samples(batch)] == expected
    assert take(loader) == take(make(raw, **options, seed=9))


def test_a_batch_that_an_interrupt_held_back_is_not_lost_on_resume(data):
    def interrupt(event: meters.Event) -> None:
        if isinstance(event, meters.BatchTaken) and loader.meters.batches == 3:
            raise KeyboardInterrupt

    loader, got = make(data), []
    unsubscribe = meters.subscribe(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            for batch in loader:
                got += samples(batch)
    finally:
        unsubscribe()
    assert len(got) == 2 * BATCH
    assert got + take(make(data, state=loader.state_dict())) == take(make(data))


def test_a_checkpoint_of_torch_or_of_plain_json_holds_the_state(data):
    loader = make(data)
    got = take(loader, 2)
    buffer = io.BytesIO()
    torch.save({"loader": loader.state_dict()}, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)["loader"]
    assert state == json.loads(json.dumps(state)) == loader.state_dict()
    assert all(type(value) in (int, str) for value in state.values())
    assert got + take(make(data, state=state)) == take(make(data))


def test_no_block_of_a_block_shuffle_is_lost_or_repeated(data):
    expected = take(make(data, shuffle="block"))
    assert len(set(expected)) == N
    for stop in range(1, 6):
        loader = make(data, shuffle="block")
        got = take(loader, stop)
        assert got + take(make(data, 1, OTHER_BATCH, loader.state_dict(), shuffle="block")) == expected


@pytest.mark.full
def test_loaders_that_run_at_the_same_time_share_no_state(data):
    """Threads share more state than processes do, so this test uses threads."""
    expected = take(make(data))

    def stop_and_go(stop: int) -> bool:
        loader = make(data)
        got = take(loader, stop)
        return got + take(make(data, state=loader.state_dict())) == expected

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(stop_and_go, [1, 2, 3, 4] * 3))


@pytest.mark.parametrize("million", [False, True])
def test_a_state_at_every_step_costs_less_than_a_fifth_of_a_millisecond(raw, million):
    loader = make(raw)
    if million:
        numbers = torch.arange(10**6)
        loader = Loader(numbers, 512, sampler=BalancedOrder((numbers % 10).numpy()))
    next(iter(loader))
    loader.state_dict()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(100):
            loader.state_dict()
        seconds.append((time.perf_counter() - began) / 100)
    assert min(seconds) < 2e-4


def test_a_state_taken_while_batches_are_built_ahead_counts_only_received_ones(raw):
    """All batches of the epoch are built before the second batch is taken."""
    changed, made = threading.Condition(), 0

    class CountingCutout(Cutout):
        def apply(self, images: torch.Tensor, labels: Any, draws: Any) -> tuple[torch.Tensor, Any]:
            nonlocal made
            with changed:
                made += len(images)
                changed.notify_all()
            return super().apply(images, labels, draws)

    loader = make(raw, transform=CountingCutout(3), prefetch_batches=12)
    running = iter(loader)
    next(running)
    with changed:
        assert changed.wait_for(lambda: made >= N, 30)
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, BATCH)
    next(running)
    assert loader.state_dict()["samples"] == 2 * BATCH
    running.close()
    assert loader.state_dict()["samples"] == 2 * BATCH


def test_a_state_loads_with_another_transform_batch_size_or_thread_count(raw):
    loader = make(raw)
    take(loader, 2)
    other = Loader(raw, 7, num_workers=1, prefetch_batches=1, drop_last=True)
    other.load_state_dict(loader.state_dict())
    assert sum(len(labels) for _, labels in other) == 14


def test_an_epoch_of_files_resumes_after_they_were_staged_again(tmp_path):
    """A new Colab session starts without the local copy."""
    tree, local = photos(tmp_path / "tree"), tmp_path / "local"
    expected = take(make(FileDataset(stage(tree, local, progress=False).path)))
    first = make(FileDataset(local))
    got = take(first, 1)
    unstage(local)
    again = FileDataset(stage(tree, local, progress=False).path)
    assert got + take(make(again, state=first.state_dict())) == expected


def test_a_state_of_other_files_raises_an_error_with_advice_for_files(tmp_path):
    state = make(FileDataset(photos(tmp_path / "tree"))).state_dict()
    with pytest.raises(InvalidOption, match=r"another dataset\. Use the same files, labels and splits"):
        make(FileDataset(photos(tmp_path / "others", 3)), state=state)


@pytest.mark.parametrize(
    ("sampler", "other"),
    [
        ([0, 1, 2, 3], [6, 7, 8, 9]),
        (range(4), range(1, 5)),
        ([[0, 1], [2, 3]], [[0, 1, 2, 3], [8, 9]]),
        (SubsetRandomSampler(range(4)), SubsetRandomSampler(range(4, 8))),
    ],
)
def test_the_state_of_a_sampler_of_other_samples_is_refused(sampler, other):
    data = torch.arange(12)
    loader = Loader(data, 2, sampler=sampler)
    next(iter(loader))
    state = loader.state_dict()
    Loader(data, 2, sampler=copy.copy(sampler)).load_state_dict(state)
    with pytest.raises(InvalidOption, match=r"Create the Loader with the same sampler"):
        Loader(data, 2, sampler=other).load_state_dict(state)


SPOILT_STATES = [
    ({"version": 1}, "version 1"),
    ({"version": None}, "version None"),
    ({"fingerprint": "other"}, "another dataset"),
    ({"order": "weighted 0123"}, "order 'weighted 0123'"),
    ({"order": "sampler RandomSampler"}, "order 'sampler RandomSampler'"),
    *(({"order": order}, "order") for order in ("block x", "block 0x0", 3)),
    *(({name: None}, name) for name in ("order_seed", "seed", "epoch", "samples", "world_size")),
    ({"order_seed": "five"}, "five"),
    ({"seed": True}, "True"),
    ({"epoch": -1}, "-1"),
    ({"epoch": 1.5}, "1.5"),
    ({"samples": -4}, "-4"),
    ({"samples": "4"}, "'4'"),
    ({"world_size": "two"}, "two"),
]
"""Changes to a state, each with a part of the error message."""


def test_an_invalid_or_incomplete_state_raises_an_error_and_changes_nothing(raw):
    state = make(raw).state_dict()
    spoilt = [({**state, **change}, message) for change, message in SPOILT_STATES]
    spoilt += [({name: state[name] for name in state if name != drop}, drop) for drop in state]
    spoilt += [(None, "the state is None"), ([], "the state is a list"), ("state", "the state is a str")]
    spoilt += [({}, "version None"), ({"version": 1}, "version 1")]
    loader = make(raw, shuffle=False, seed=1)
    take(loader, 1)
    before = loader.state_dict()
    for each, message in spoilt:
        with pytest.raises(InvalidOption, match=rf"Cannot resume the Loader: .*{message}"):
            loader.load_state_dict(each)
        assert loader.state_dict() == before
        assert loader.shuffle is False


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.intc])
def test_states_with_numpy_integers_are_json_serializable(number):
    """States with NumPy integers can be loaded, too."""

    def made(state: Any = None, **options: Any) -> Loader:
        loader = Loader(torch.arange(N), number(BATCH), rank=number(0), world_size=number(2), **options)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    for options in ({"shuffle": True, "seed": number(3)}, {"num_workers": number(2)}, {"sampler": range(N)}):
        loader = made(**options)
        loader.set_epoch(number(2))
        expected = [batch.tolist() for batch in loader]
        loader.set_epoch(number(2))
        got = [batch.tolist() for batch in itertools.islice(loader, number(1))]
        state = loader.state_dict()
        assert {type(value) for value in state.values()} == {int, str}
        assert (state["epoch"], loader.received[0]) == (2, 2)
        of_before = {name: number(value) if isinstance(value, int) else value for name, value in state.items()}
        for each in (json.loads(json.dumps(state)), of_before):
            resumed = made(each, **options)
            assert json.loads(json.dumps(resumed.state_dict())) == state
            assert got + [batch.tolist() for batch in resumed] == expected


@pytest.mark.parametrize("what", sampled(["raw", "encoded", "cached", "block", "sharded", "samples", "one ahead"], 3))
class TestAugmentedStream(LoaderContract):
    """The stream contract, with random transforms, on every pipeline."""

    @pytest.fixture(autouse=True)
    def _stream_of(self, raw, encoded, folder, what):
        self.options: dict[str, Any] = {}
        self.data: Any = raw
        if what == "encoded":
            self.data = encoded
        elif what == "cached":
            self.data = encoded
            self.options = {"size": 9, "keep": "disk"}
        elif what == "block":
            self.options = {"shuffle": "block"}
        elif what == "sharded":
            path = folder / "s.h5"
            counts = {"train": 9}, {"train": 1}, {"train": 12}
            self.data = open_pack(path if path.exists() else make_shards(path, *counts, shape=(9, 8, 3)))["train"]
        elif what == "samples":
            self.options = {"transform": PerSample(lambda image: AUGMENT(image[None])[0]), "threads": 0}
        elif what == "one ahead":
            self.options = {"prefetch_batches": 1, "threads": 1}

    def make(self, fail_at=None):
        options = dict(self.options)
        if fail_at is not None and isinstance(transform := options.get("transform"), PerSample):
            fail = fails_at(fail_at * BATCH)
            options["transform"] = PerSample(lambda image: fail(transform.function(image)))
        elif fail_at is not None:
            options["transform"] = Compose([AUGMENT, fails_at(fail_at)])
        return make(self.data, **options)

    def everything(self):
        return take(self.make())

    def assert_whole(self, got):
        """Compare the labels with those of the data.

        Images cannot be compared, because they are cropped differently in each epoch.
        """
        assert len(got) == len(set(got)) == N
        assert sorted(label for _, label in got) == sorted(self.data.labels.tolist())
