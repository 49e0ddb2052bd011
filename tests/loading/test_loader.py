"""`Loader` yields rows of the dataset in batches that stay valid, resumes at any sample, and leaves no threads."""

from __future__ import annotations

import gc
import signal
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from contract import make_pack
from loader_batches import LoaderContract, epoch, fails_at, loader_threads
from sampling import sampled
from torch import Tensor

from colabkit.augment import Normalize, PerBatch, RandomResizedCrop
from colabkit.errors import InvalidOption, LoaderFailed
from colabkit.foundation import epoch_order, meters
from colabkit.loading import Loader
from colabkit.loading.engine import gather
from colabkit.loading.engine.gather import PageableSlots
from colabkit.packs import PackedDataset, open_pack

DEADLINE_S = 60.0


def rows(data: PackedDataset, order: np.ndarray | slice) -> Tensor:
    return data.rows[order].permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    "options",
    sampled(
        [
            {},
            {"shuffle": True, "seed": 5},
            {"shuffle": True, "drop_last": True},
            {"shuffle": True, "prefetch_batches": 1},
            {"shuffle": True, "prefetch_batches": 9},
            {"shuffle": True, "transform": Normalize()},
        ],
        3,
    ),
    ids=lambda options: "-".join(options) or "in_order",
)
class TestLoaderStream(LoaderContract):
    @pytest.fixture(autouse=True)
    def _stream_of(self, data, options):
        self.data, self.options = data, options
        self.dropped = 2 if "drop_last" in options else 0


@pytest.mark.parametrize("shape", [(5, 7, 3), (3, 3, 1), (1, 1, 1), (1, 1, 2), (9, 11, 3), (32, 32, 3), (16, 20, 1)])
@pytest.mark.parametrize("dtype", sampled(["|u1", "<i2", "<f4", "<f8"], 2))
def test_batches_are_the_rows_of_the_data_set_for_any_shape_and_dtype(tmp_path, shape, dtype):
    data = open_pack(make_pack(tmp_path / "p.h5", shape, dtype, train=11))["train"]
    loader = Loader(data, 4, shuffle=True, seed=3)
    images, labels = epoch(loader)
    order = epoch_order(11, 3, 0, 0, 11)
    assert images.dtype == torch.from_numpy(np.empty(0, dtype)).dtype
    assert torch.equal(images, rows(data, order))
    assert torch.equal(labels, data.labels[order])


@pytest.mark.parametrize(
    ("batch_size", "drop_last"),
    [(1, False), (4, False), (22, False), (23, False), (1000, False), (4, True), (22, True)],
)
@pytest.mark.parametrize("channels_last", [None, True])
def test_batches_have_the_documented_count_shape_and_memory_format(data, batch_size, drop_last, channels_last):
    loader = Loader(data, batch_size, drop_last=drop_last, channels_last=channels_last)
    batches = list(loader)
    sizes = [batch_size] * (22 // batch_size) + [22 % batch_size] * bool(22 % batch_size and not drop_last)
    assert [len(labels) for _, labels in batches] == sizes
    assert len(loader) == len(batches)
    for images, labels in batches:
        assert tuple(images.shape) == (len(labels), 3, 4, 3)
        assert (images.dtype, labels.dtype, images.device.type) == (torch.uint8, torch.int64, "cpu")
        assert images.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    if batches:
        assert torch.equal(torch.cat([images for images, _ in batches]), rows(data, slice(sum(sizes))))


def test_each_epoch_and_seed_has_its_own_order(data):
    orders = [epoch(loader)[0] for seed in (0, 1) for loader in [Loader(data, 5, shuffle=True, seed=seed)] * 3]
    for number, order in enumerate(orders):
        assert all(not torch.equal(order, other) for other in orders[:number])


def test_batch_size_prefetch_and_threads_do_not_change_the_order(data):
    expected = epoch(Loader(data, 1, shuffle=True, seed=2))[0]
    for batch_size, prefetch in ((3, None), (7, 1), (22, 2), (2, 30)):
        loader = Loader(data, batch_size, shuffle=True, seed=2, prefetch_batches=prefetch)
        assert torch.equal(epoch(loader)[0], expected)


@pytest.mark.every_case
@pytest.mark.parametrize("columns", [4, 400])
@pytest.mark.parametrize(
    "options",
    [{}, {"prefetch_batches": 16}, *({"transform": PerBatch(lambda rows: rows), "num_workers": n} for n in (0, 2))],
    ids=lambda options: "-".join(options) or "inline",
)
@pytest.mark.parametrize("requests_in", [nullcontext, torch.inference_mode])
def test_a_batch_may_change_in_place_while_autograd_needs_another(requests_in, options, columns):
    samples, weight = torch.rand(60, columns), torch.ones(columns, requires_grad=True)
    with requests_in():
        batches = list(Loader((samples, torch.arange(60)), 5, **options))
    (first, numbers), (second, other_numbers) = batches[6:8]
    loss = (weight * first).gather(1, numbers[:, None] % 4).sum()
    second.mul_(2)
    other_numbers.add_(1)
    loss.backward()
    assert torch.equal(second, 2 * samples[35:40])
    assert other_numbers.tolist() == [*range(36, 41)]


def test_buffers_are_reused_when_their_batches_are_released(data, monkeypatch):
    made, empty = list[int](), gather.empty_bytes
    monkeypatch.setattr(gather, "empty_bytes", lambda size: made.append(size) or empty(size))
    loader = Loader(data, 2, shuffle=True, prefetch_batches=2)
    epoch_of_pointers = [{images.untyped_storage().data_ptr() for images, _ in loader} for _ in range(20)]
    assert len(set.union(*epoch_of_pointers)) <= 6
    assert 1 <= len(made) <= 6


def test_a_buffer_is_returned_only_when_its_last_tensor_is_deleted():
    slots = PageableSlots(64, keep=2)
    lent = slots.lend(64)
    first, view = lent.data_ptr(), lent.view(8, 8)[3:5].numpy()[:, :2]
    del lent
    assert slots.lend(64).data_ptr() != first
    del view
    gc.collect()
    assert first in {slots.lend(10).data_ptr() for _ in range(2)}


@pytest.mark.parametrize("batch_size", [1, 3, 5, 22, 40])
def test_resuming_with_another_batch_size_continues_at_the_same_sample(data, batch_size):
    reference = Loader(data, 4, shuffle=True, seed=9)
    expected = torch.cat([epoch(reference)[0] for _ in range(2)])
    for stop in range(6):
        loader = Loader(data, 4, shuffle=True, seed=9)
        before = [images.clone() for _, (images, _) in zip(range(stop), loader, strict=False)]
        after = Loader(data, batch_size, shuffle=True, seed=9)
        after.load_state_dict(loader.state_dict())
        got = torch.cat([*before, epoch(after)[0], epoch(after)[0]])
        assert torch.equal(got, expected)


def test_set_epoch_chooses_the_order_and_preserves_a_position_loaded_for_that_epoch(data):
    loader = Loader(data, 4, shuffle=True)
    for number in (5, 0, 5):
        loader.set_epoch(number)
        assert torch.equal(epoch(loader)[0], rows(data, epoch_order(22, 0, number, 0, 22)))
    loader.set_epoch(3)
    next(iter(loader))
    resumed = Loader(data, 4, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(3)
    assert torch.equal(epoch(resumed)[0], rows(data, epoch_order(22, 0, 3, 4, 22)))
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(4)
    assert torch.equal(epoch(resumed)[0], rows(data, epoch_order(22, 0, 4, 0, 22)))


def test_functions_wrapped_in_per_batch_run_in_the_background(data):
    seen: list[tuple[str, int]] = []

    def transform(images: Tensor) -> Tensor:
        seen.append((threading.current_thread().name, len(images)))
        return images.float().neg_()

    images, _ = epoch(Loader(data, 5, transform=PerBatch(transform)))
    assert torch.equal(images, -rows(data, slice(None)).float())
    assert sorted(size for _, size in seen) == [2, 5, 5, 5, 5]
    assert all(name.startswith("colabkit-loader") for name, _ in seen)


def test_an_error_in_a_transform_is_the_cause_of_a_loader_error_and_the_loader_stays_usable(data):
    loader = Loader(data, 4, transform=fails_at(3))
    with pytest.raises(
        LoaderFailed, match=r"Cannot make a batch: transforming samples 12 .* of epoch 0 raised ValueError: planned"
    ) as caught:
        list(loader)
    assert isinstance(caught.value.__cause__, ValueError)
    assert torch.equal(epoch(loader)[0], rows(data, slice(None)))


def test_a_wait_for_batches_is_published_and_can_be_interrupted(data):
    gate = threading.Event()
    waits: list[float] = []

    def transform(images: Tensor) -> Tensor:
        assert gate.wait(DEADLINE_S)
        return images

    def listen(event: meters.Event) -> None:
        if isinstance(event, meters.DataWait):
            waits.append(event.wait_s)
            if len(waits) == 2:
                gate.set()
                signal.raise_signal(signal.SIGINT)

    loader, unsubscribe = Loader(data, 4, transform=PerBatch(transform)), meters.subscribe(listen)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(loader)
    finally:
        gate.set()
        unsubscribe()
    assert loader_threads() == []
    assert len(list(loader)) == 6
    assert len(waits) == 2
    assert 0 < waits[0] < waits[1]


def test_meters_add_up(data, heard):
    loader = Loader(data, 4, transform=Normalize())
    for _ in range(3):
        list(loader)
    for _ in loader:
        break
    found = loader.meters.snapshot()
    assert (found.batches, found.samples) == (19, 70)
    parts = {part.name: part for part in found.parts}
    assert list(parts) == ["gather", "augment"]
    for part in parts.values():
        assert 70 <= part.samples <= 88
        # Only the gather part also counts the 8 bytes of each label.
        assert part.handled_bytes == part.samples * (36 + 8 * (part.name == "gather"))
        assert part.busy_s > 0
    assert 0 <= found.ready <= 19
    assert min(found.wait_s, found.compute_s) > 0
    assert found.copy_s == found.other_s == 0
    assert (found.steps, found.passes) == (18, 4)
    started = [event for event in heard if isinstance(event, meters.EpochStarted)]
    assert [(event.epoch, event.batches, event.samples) for event in started] == [(n, 6, 22) for n in range(4)]
    taken = [event for event in heard if isinstance(event, meters.BatchTaken)]
    assert len(taken) == 19
    assert all(event.meters is loader.meters for event in (*started, *taken))


def test_the_stored_rows_count_as_gathered_if_each_is_cropped(data):
    loader = Loader(data, 4, transform=RandomResizedCrop(2))
    list(loader)
    gathered = next(part for part in loader.meters.snapshot().parts if part.name == "gather")
    assert gathered.handled_bytes == gathered.samples * (36 + 8)


def test_a_resumed_epoch_publishes_the_number_of_remaining_batches(data, heard):
    loader = Loader(data, 4)
    loader.load_state_dict({**loader.state_dict(), "samples": 10})
    list(loader)
    assert [(e.batches, e.samples) for e in heard if isinstance(e, meters.EpochStarted)] == [(3, 12)]


@pytest.mark.parametrize("prefetch", [1, 2, 3, 4, 8])
def test_the_requested_number_of_batches_is_built_ahead_and_never_more(folder, prefetch):
    path = folder / "long.h5"
    data = open_pack(path if path.exists() else make_pack(path, train=60))["train"]
    changed = threading.Condition()
    requested, made, ahead = 1, 0, []

    def transform(images: Tensor) -> Tensor:
        nonlocal made
        with changed:
            made += 1
            ahead.append(made - requested)
            changed.notify_all()
        return images

    for _ in Loader(data, 2, transform=PerBatch(transform), prefetch_batches=prefetch, num_workers=1):
        with changed:
            # At the third batch, `prefetch` more batches must be ready; at other batches, at least half as many.
            # Groups of batches grow at first, and in the middle of a group, fewer batches are ready.
            wanted = min(requested + (prefetch if requested == 3 else (prefetch + 1) // 2), 30)
            assert changed.wait_for(lambda wanted=wanted: made >= wanted, DEADLINE_S)
            requested += 1
    assert made == 30
    assert max(ahead) == prefetch


@pytest.mark.parametrize("what", [iter([1, 2, 3]), 5, "data.h5", None, {1, 2}])
def test_a_data_set_without_length_or_indexing_raises_an_error(what):
    with pytest.raises(InvalidOption, match="a dataset with __getitem__ and __len__, or arrays"):
        Loader(what, 1)


def test_the_repr_describes_the_batches(data):
    assert "6 batches of 4, shuffled with seed 3, on cpu" in repr(Loader(data, 4, shuffle=True, seed=3))


def test_holding_the_labels_does_not_hold_the_images(data):
    loader = Loader(data, 4)
    labels = [labels for _, labels in loader]
    assert all(some.untyped_storage().nbytes() <= 8 * len(data) for some in labels)


def test_closing_waits_for_at_most_one_transform(data):
    entered, release, calls = threading.Event(), threading.Event(), []

    def transform(images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        # The third call is in the second group, which has two batches.
        if len(calls) == 3:
            entered.set()
            release.wait(30)
        return images

    batches = iter(Loader(data, 2, transform=PerBatch(transform), prefetch_batches=8, num_workers=1))
    next(batches)
    entered.wait(30)
    threading.Timer(0.05, release.set).start()
    batches.close()
    made = len(calls)
    assert made == 3
    assert loader_threads() == []


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_peek_returns_the_next_batches_without_moving_the_position(taken):
    loader, reference = (Loader(torch.arange(20), 4, shuffle=True, transform=torch.neg) for _ in range(2))
    expected = [batch.tolist() for _ in range(2) for batch in reference]
    running = iter(loader)
    received = [next(running).tolist() for _ in range(taken)]
    position = loader.state_dict()
    assert [batch.tolist() for batch in loader.peek(2)] == expected[taken : min(taken + 2, 5)]
    assert [batch.tolist() for batch in loader.peek(9)] == expected[taken:5]
    assert loader.state_dict() == position
    received += [batch.tolist() for batch in running]
    assert received + [batch.tolist() for batch in loader] == expected
    with pytest.raises(InvalidOption, match="batches=0"):
        loader.peek(0)


def test_iterations_inside_aside_are_neither_counted_nor_published(data, heard):
    loader = Loader(data, 4)
    for number, _ in enumerate(loader):
        loader.meters.clock.worked(0.0)
        if number == 2:
            clock, count = loader.meters.clock, len(heard)
            loader.peek(2)
            assert loader.meters.clock is clock
            assert len(heard) == count
    found = loader.meters.snapshot()
    assert (found.batches, found.samples, found.passes, found.steps) == (6, 22, 1, 6)
    assert found.compute_s == 0


@pytest.mark.parametrize("allowed", [0, 2])
def test_a_system_that_allows_few_threads_gets_the_same_batches_and_a_warning(data, allow_threads, allowed, caplog):
    options = {"shuffle": True, "seed": 5, "transform": Normalize(), "num_workers": 3}
    expected = epoch(Loader(data, 4, **options))
    allow_threads(allowed)
    found = epoch(Loader(data, 4, **options))
    assert all(map(torch.equal, found, expected))
    # One of the two allowed threads reads the pack.
    assert f"allows only {allowed // 2} of 3 loader threads" in caplog.text
    assert not loader_threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_need_no_gradients_although_a_transform_contains_a_network(workers):
    network = PerBatch(torch.nn.Conv2d(3, 2, 1))
    for images in Loader(torch.rand(8, 3, 4, 4), 4, transform=network, num_workers=workers):
        assert not images.requires_grad
