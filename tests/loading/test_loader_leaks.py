"""`Loader` in loops with breaks, nesting and interrupts leaks no resources and overwrites no batch."""

from __future__ import annotations

import gc
import multiprocessing
import operator
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from contract import make_pack, seal_fields
from loader_batches import same
from pictures import photo, saved
from sampling import sampled
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from trees import make_tree
from waiting import comes_true

from colabkit.augment import (
    Compose,
    Cutout,
    MixUp,
    Normalize,
    PerSample,
    RandomHorizontalFlip,
    RandomResizedCrop,
)
from colabkit.errors import LoaderFailed
from colabkit.loading import Loader
from colabkit.packs import FileDataset, open_pack

COUNT = 60
DEADLINE_S = 60.0
ALL = Compose([RandomResizedCrop(20), RandomHorizontalFlip(), Cutout(5), Normalize(), MixUp(3)])

Make = Callable[..., Loader]


def left() -> tuple[list[str], list[psutil.Process]]:
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("colabkit")]
    return threads, psutil.Process().children(recursive=True)


@pytest.fixture(autouse=True)
def children() -> Iterator[list[psutil.Process]]:
    """Return the existing child processes. After the test, check that no thread and no other process is left."""
    before = left()[1]
    yield before
    if left() != ([], before):
        # A loader's iterator in a reference cycle keeps its threads until the garbage collector frees the iterator.
        gc.collect()
    psutil.wait_procs([process for process in left()[1] if process not in before], 10)
    assert left() == ([], before)


@pytest.fixture(scope="module")
def makes(folder: Path) -> dict[str, Make]:
    raw = open_pack(make_pack(folder / "raw.h5", (48, 40, 3), train=COUNT))["train"]
    blobs = [saved(photo(24 + number % 3, 28, seed=number % 7), "JPEG") for number in range(COUNT)]
    fields = {"X": {"train": blobs}, "Y": {"train": np.arange(COUNT) % 3}}
    encoded = open_pack(seal_fields(folder / "encoded.h5", fields, {"X": "image"}, "class"))["train"]
    files = FileDataset(make_tree(folder / "tree", COUNT // 3, (24, 20)))

    def of(dataset: Any, **options: Any) -> Make:
        return lambda **more: Loader(dataset, 8, shuffle=True, **{**options, **more})

    return {
        "raw": of(raw),
        "arrays": of(raw[:]),
        "transformed": of(raw, transform=ALL),
        "lambda": of(raw, transform=lambda images: images.float().neg_()),
        "cached in ram": of(encoded, size=48, keep="ram"),
        "cached on disk": of(encoded, size=48, keep="disk", transform=RandomHorizontalFlip()),
        "decoded": of(encoded, transform=ALL),
        "files": of(files, size=20, transform=Normalize()),
    }


WAYS = ["raw", "arrays", "transformed", "lambda", "cached in ram", "cached on disk", "decoded", "files"]


@pytest.mark.parametrize("way", WAYS)
def test_the_length_is_the_number_of_batches_of_every_epoch(makes, way):
    for options, count in (({}, 8), ({"drop_last": True}, 7)):
        loader = makes[way](**options)
        assert len(loader) == count
        assert [sum(1 for _ in loader) for _ in range(3)] == [count] * 3
        for _ in loader:
            assert len(loader) == count
            break
        assert len(loader) == count


@pytest.mark.parametrize("way", WAYS)
def test_no_thread_or_process_remains_after_the_end_a_break_or_an_error(makes, way):
    loader = makes[way](prefetch_batches=6)
    list(loader)
    assert left()[0] == []
    for _ in loader:
        break
    assert left()[0] == []
    running = iter(loader)
    next(running)
    del running
    assert left()[0] == []
    with pytest.raises(ZeroDivisionError), closing(iter(loader)) as batches:
        len(next(batches)) / 0
    assert left()[0] == []
    unused = iter(loader)
    assert left()[0] == []
    del unused


def test_an_iterator_without_a_request_starts_no_epoch(makes):
    loader, reference = makes["raw"](), makes["raw"]()
    iter(loader)
    before = loader.state_dict()
    unused = iter(loader)
    assert loader.state_dict() == before
    assert same(list(loader), list(reference))
    del unused


@pytest.mark.parametrize("way", sampled(WAYS, 3))
def test_one_loader_may_be_iterated_inside_itself(makes, way):
    reference = makes[way]()
    epochs = [list(reference) for _ in range(4)]
    loader, outer = makes[way](), []
    for number, batch in enumerate(loader):
        outer.append(batch)
        if number < 3:
            assert same(list(loader), epochs[number + 1])
    assert same(outer, epochs[0])


@pytest.mark.parametrize("way", sampled(WAYS, 3))
def test_two_loaders_at_once_do_not_affect_each_other(makes, way):
    expected = list(makes[way]()), list(makes[way](seed=9))
    pairs = list(zip(makes[way](), makes[way](seed=9), strict=True))
    assert same([one for one, _ in pairs], expected[0])
    assert same([other for _, other in pairs], expected[1])


def test_loaders_in_several_threads_do_not_affect_each_other(makes):
    expected = {way: list(makes[way]()) for way in ("raw", "transformed", "cached in ram", "lambda")}
    found: dict[str, Any] = {}

    def load(way: str) -> None:
        found[way] = list(makes[way]())

    threads = [threading.Thread(target=load, args=(way,)) for way in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert all(same(found[way], batches) for way, batches in expected.items() if way != "lambda")
    assert len(found) == len(expected)


@pytest.mark.parametrize("prefetch", sampled([None, 1, 5], 2))
@pytest.mark.parametrize("way", WAYS)
def test_batches_stay_valid_as_long_as_they_are_held(makes, way, prefetch):
    loader = makes[way](prefetch_batches=prefetch)
    held, copies = [], []
    for epoch in range(4):
        for number, (images, labels) in enumerate(loader):
            if (number + epoch) % 3:
                bits = images.view(torch.int8) if images.dtype == torch.uint8 else images.detach()
                views = (images, images[1:2], images.flip(0)[:1], images.numpy()[0], images[:, 1], bits[-1:])
                view = views[number % 6]
                held.append((torch.as_tensor(view), labels))
                copies.append((torch.as_tensor(view).clone(), labels.clone()))
                del bits, views, view
            del images, labels
    assert same(held, copies)


@pytest.mark.parametrize("way", WAYS)
def test_writing_into_a_batch_changes_no_later_one(makes, way):
    loader, reference = makes[way](), makes[way]()
    for _ in range(3):
        for batch, expected in zip(loader, reference, strict=True):
            assert same([batch], [expected])
            batch[0].zero_()


def resources() -> tuple[int, int, int, int]:
    gc.collect()
    process = psutil.Process()
    return threading.active_count(), len(process.children(recursive=True)), process.num_fds(), process.memory_info().rss


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not count a process's resources")
@pytest.mark.parametrize("way", sampled(WAYS, 2))
def test_two_hundred_epochs_leak_nothing(makes, way):
    loader = makes[way](num_workers=2)
    epoch_bytes = sum(images.nbytes for images, _ in loader)
    for number in range(20):
        run(loader, number)
    before = resources()
    for number in range(200):
        run(loader, number)
    after = resources()
    assert after[:3] == before[:3]
    # One leaked batch per epoch would add up to the size of 25 epochs.
    assert after[3] - before[3] < max(4 << 20, 8 * epoch_bytes)


def run(loader: Loader, number: int) -> None:
    for taken, _ in enumerate(loader):
        if number % 3 == 0 and taken == 2:
            break


@pytest.mark.full
@pytest.mark.parametrize("ends", sampled(["break", "end", "error"], 2))
def test_epochs_with_worker_processes_leave_neither_processes_nor_descriptors(ends, children):
    loader = Loader(GatedDataset(12, at=7 if ends == "error" else None), 2, num_workers=2)
    before = (0, 0, 0)
    for number in range(8):
        try:
            for _ in loader:
                if ends == "break":
                    break
        except RuntimeError:
            assert ends == "error"
        # torch ends its workers asynchronously, so wait for them.
        psutil.wait_procs([process for process in left()[1] if process not in children], DEADLINE_S)
        if number == 2:
            before = resources()[:3]
    # Wait, because torch's threads may still be ending; leaked threads would remain.
    assert comes_true(lambda: all(map(operator.le, resources()[:3], before)))


def test_a_deleted_loader_releases_its_memory(makes):
    loader = makes["cached on disk"]()
    list(loader)
    before = psutil.Process().num_fds()
    del loader
    gc.collect()
    assert psutil.Process().num_fds() <= before
    assert not any(Path(os.environ["COLABKIT_LOCAL"]).rglob("*colabkit-cache*"))


@pytest.mark.parametrize("way", ["raw", "arrays", "lambda"])
def test_a_deleted_loader_is_freed_without_a_garbage_collection(makes, way):
    """The latest loader and the amount of free memory must not depend on when garbage is collected."""
    gc.collect()
    gc.disable()
    try:
        loader = makes[way]()
        for _ in range(2):
            run(loader, 0)
            run(loader, 1)
        loader_, meters_ = weakref.ref(loader), weakref.ref(loader.meters)
        del loader
        assert loader_() is None
        assert meters_() is None
    finally:
        gc.enable()


def test_an_interrupt_while_a_batch_is_built_preserves_the_last_position(makes):
    calls = iter(range(100))

    def transform(images: Tensor) -> Tensor:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return images

    expected = list(makes["raw"]())
    loader = makes["raw"](transform=transform)
    got: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        got.extend(loader)
    assert same(got, expected[:3])
    resumed = makes["raw"]()
    resumed.load_state_dict(loader.state_dict())
    assert same(list(resumed), expected[3:])


class GatedDataset(Dataset):
    """A dataset of numbers.

    Loading sample `at` raises an error or, if `gate` is set, writes to the pipe `entered` and waits for a byte from the
    pipe `gate`.
    """

    def __init__(self, count: int, at: int | None = None, entered: int = -1, gate: int = -1) -> None:
        self.count, self.at, self.entered, self.gate = count, at, entered, gate

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if index == self.at:
            if self.gate < 0:
                raise ValueError("planned")
            os.write(self.entered, b"x")
            os.read(self.gate, 1)
        return torch.tensor(index)


def test_a_wait_for_worker_processes_can_be_interrupted_and_no_process_remains(children):
    (entered, writes), (gate, opens) = os.pipe(), os.pipe()
    loader = Loader(GatedDataset(12, 8, writes, gate), 2, num_workers=2)

    def interrupt() -> None:
        if os.read(entered, 1):
            os.kill(os.getpid(), signal.SIGINT)
        os.write(opens, b"x")

    watching = threading.Thread(target=interrupt)
    watching.start()
    got: list[Tensor] = []
    try:
        with pytest.raises(KeyboardInterrupt):
            got.extend(loader)
    finally:
        # Closing the pipe ends the watching thread if no worker wrote to it.
        os.close(writes)
        watching.join(DEADLINE_S)
        for fd in (entered, gate, opens):
            os.close(fd)
    assert [batch.tolist() for batch in got] == [[0, 1], [2, 3], [4, 5], [6, 7]][: len(got)]
    assert left()[1] == children


@pytest.mark.parametrize("options", [{"transform": PerSample(torch.neg)}, {"collate_fn": default_collate}])
def test_worker_processes_support_nesting_breaks_and_counts_like_threads(makes, options, children):
    reference = makes["raw"](num_workers=0, **options)
    epochs = [list(reference) for _ in range(2)]
    loader = makes["raw"](num_workers=2, **options)
    assert len(loader) == 8
    outer = []
    for number, batch in enumerate(loader):
        outer.append(batch)
        if number == 0:
            assert same(list(loader), epochs[1])
    assert same(outer, epochs[0])
    for _ in loader:
        break
    assert left()[1] == children


def test_an_iteration_that_continues_in_a_forked_child_is_refused_instead_of_hanging():
    loader = Loader(torch.zeros(400, 3, 16, 16, dtype=torch.uint8), 8, num_workers=2, transform=RandomResizedCrop(8))
    batches, context = iter(loader), multiprocessing.get_context("fork")
    next(batches)
    results = context.SimpleQueue()

    def use() -> None:
        try:
            results.put(len(list(batches)))
        except LoaderFailed as error:
            results.put(str(error))

    child = context.Process(target=use)
    child.start()
    child.join(DEADLINE_S)
    is_hung = child.is_alive()
    child.kill()
    child.join()
    assert not is_hung
    assert "the process was forked during the iteration" in results.get()
    assert len(list(batches)) == 49
