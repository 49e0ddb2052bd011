"""`Loader` reads remote files ahead and only once, raises errors in order, and gives up on reads that hang."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from far_mounts import FuseMount, has_fuse
from held_reads import HeldReads
from loader_batches import epoch, loader_threads
from local_copies import zipped
from packed_files import files_of, photos
from torch import Tensor
from trees import needs
from waiting import LONG_S, comes_true

from colabkit.augment import RandomHorizontalFlip, RandomResizedCrop
from colabkit.errors import BadImage, ColabkitError, FileFailed, SourceChanged, TimedOut
from colabkit.loading import Loader
from colabkit.loading.engine import read_ahead
from colabkit.packs import FileDataset
from colabkit.sampler import ShuffledOrder
from colabkit.storage.sources import concurrency, reads
from colabkit.storage.sources.folder import FolderSource, SlowSource
from colabkit.storage.sources.items import Item

COUNT = 60


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_BACK_OFF_S", 0.001)
    monkeypatch.setattr(concurrency, "_TICK_S", 0.01)
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.05)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of sixty small photos in three classes."""
    return photos(tmp_path_factory.mktemp("remote") / "tree", COUNT // 3)


@pytest.fixture(scope="module")
def plain(tree: Path) -> Tensor:
    return torch.stack([image for image, _ in FileDataset(tree)])


@pytest.fixture
def remote(tree: Path) -> Iterator[HeldReads]:
    found = HeldReads(tree)
    yield found
    found.go_on()


@pytest.fixture
def drive(tree: Path, tmp_path: Path) -> Callable[..., FuseMount]:
    needs("FUSE", has_fuse())
    return lambda *faults, **options: FuseMount(tmp_path / "drive", tree, plan={"faults": list(faults)}, **options)


def decoded(loader: Loader) -> int:
    return next(part.samples for part in loader.meters.snapshot().parts if part.name == "decode")


def until_it_fails(loader: Loader, kind: type[ColabkitError], match: str) -> Tensor:
    got = [torch.empty(0, 3, 24, 32, dtype=torch.uint8)]
    with pytest.raises(kind, match=match):
        got.extend(images.clone() for images, _ in loader)
    return torch.cat(got)


def order(number: int = 0, seed: int = 0) -> list[int]:
    return ShuffledOrder(COUNT, seed).indices(number, 0, COUNT).tolist()


def test_many_more_files_than_one_batch_are_read_at_once(remote, plain):
    data = FileDataset(remote)
    loader = Loader(data, 2, num_workers=2)
    remote.most, remote.may_read = 0, lambda _: remote.most >= 30
    images, labels = epoch(loader)
    assert remote.most >= 30
    assert torch.equal(images, plain)
    assert torch.equal(labels, data.labels)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_file_is_read_once_per_epoch(remote, workers):
    loader = Loader(FileDataset(remote), 7, shuffle=True, num_workers=workers, transform=RandomResizedCrop(30))
    for number in range(1, 3):
        epoch(loader)
        assert set(remote.reads.values()) == {number}
        assert len(remote.reads) == COUNT


def test_batches_equal_those_of_a_local_source(remote, tree):
    options: dict[str, Any] = {"shuffle": True, "transform": RandomHorizontalFlip(), "size": 20, "num_workers": 2}
    local, other = Loader(FileDataset(tree), 7, **options), Loader(FileDataset(remote), 7, **options)
    for _ in range(2):
        for one, two in zip(local, other, strict=True):
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1], two[1])


def test_files_that_arrive_in_any_order_are_batched_in_the_order_of_the_epoch(remote, plain):
    loader, let = Loader(FileDataset(remote), 5, num_workers=2), set()
    remote.may_read = let.__contains__
    result: list[Tensor] = []
    thread = threading.Thread(target=lambda: result.append(epoch(loader)[0]))
    thread.start()
    for path in np.random.default_rng(3).permutation([item.path for item in remote.list().items]).tolist():
        with remote.changed:
            let.add(path)
            remote.changed.notify_all()
    thread.join(LONG_S)
    assert torch.equal(result[0], plain)


def test_a_resumed_epoch_reads_only_the_remaining_files(remote):
    loader = Loader(FileDataset(remote), 10, transform=RandomResizedCrop(30))
    loader.load_state_dict({**loader.state_dict(), "samples": 40})
    remote.reads.clear()
    assert len(epoch(loader)[0]) == 20
    assert sum(remote.reads.values()) == 20


def test_every_rank_reads_its_share(remote):
    loaders = [Loader(FileDataset(remote), 4, transform=RandomResizedCrop(30), rank=n, world_size=2) for n in range(2)]
    for loader in loaders:
        epoch(loader)
    assert set(remote.reads.values()) == {1}


def test_memory_for_files_is_bounded_and_a_small_bound_only_slows_down(remote, plain, monkeypatch):
    monkeypatch.setattr(read_ahead, "_HELD_BYTES", 1)
    for workers in (0, 1, 3):
        assert torch.equal(epoch(Loader(FileDataset(remote), 4, num_workers=workers))[0], plain)


def test_meters_count_the_files_and_their_bytes(remote):
    loader = Loader(FileDataset(remote), 7, size=20)
    epoch(loader)
    parts = {part.name: part for part in loader.meters.snapshot().parts}
    assert parts["read"].samples == COUNT
    assert parts["read"].handled_bytes == sum(item.size for item in remote.list().items)
    assert parts["read"].busy_s > 0
    assert parts["decode"].samples == COUNT


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("number", [0, 1, 13, 59])
def test_an_error_is_raised_after_all_batches_before_it(remote, plain, number, shuffle):
    data = FileDataset(remote)
    loader = Loader(data, 4, shuffle=shuffle, num_workers=2)
    place = order().index(number) if shuffle else number
    path, read = data.item(number).path, FolderSource.open

    def fails(item: Item) -> BinaryIO:
        if item.path == path:
            raise PermissionError(errno.EACCES, "not for you", path)
        return read(remote, item)

    remote.open = fails  # type: ignore[method-assign]
    got = until_it_fails(loader, FileFailed, rf"Cannot read {path!r} of .*permission denied")
    assert torch.equal(got, plain[order() if shuffle else slice(None)][: place // 4 * 4])
    del remote.open
    assert len(epoch(loader)[0]) == COUNT


@pytest.mark.parametrize("on_bad", ["skip", "blank"])
def test_a_file_that_cannot_be_read_is_not_a_bad_image(remote, on_bad):
    data = FileDataset(remote)
    loader = Loader(data, 4, on_bad=on_bad)
    remote.open = lambda item: (_ for _ in ()).throw(PermissionError(errno.EACCES, "not for you"))  # type: ignore[method-assign]
    until_it_fails(loader, FileFailed, r"Cannot read 'ants/000\.jpg'")
    assert loader.bad_samples == {}
    del remote.open


def test_a_bad_image_of_a_remote_source_is_named(tmp_path):
    files_of(photos(tmp_path / "t"))[6].write_bytes(b"<html>")
    loader = Loader(FileDataset(HeldReads(tmp_path / "t")), 4, num_workers=2)
    got = until_it_fails(loader, BadImage, r"Cannot decode 'bees/002\.jpg'")
    assert len(got) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_read_that_hangs_raises_an_error_after_the_batches_before_it(remote, plain, workers, monkeypatch):
    monkeypatch.setattr(read_ahead, "STALLED_S", 0.2)
    loader = Loader(FileDataset(remote), 4, num_workers=workers)
    remote.may_read = lambda path: path != "bees/003.jpg"
    got = until_it_fails(loader, TimedOut, r"it sent no data for 0\.2 s in two attempts")
    assert torch.equal(got, plain[:20])
    assert remote.reads["bees/003.jpg"] == 2
    remote.go_on()


def test_a_read_that_hangs_once_is_repeated(remote, plain, monkeypatch):
    monkeypatch.setattr(read_ahead, "STALLED_S", 0.2)
    loader = Loader(FileDataset(remote), 4, num_workers=2)
    remote.may_read = lambda path: path != "bees/003.jpg" or remote.reads[path] > 1
    assert torch.equal(epoch(loader)[0], plain)


def test_the_other_files_are_read_while_one_read_hangs(remote, plain):
    loader = Loader(FileDataset(remote), 4, num_workers=2)
    remote.may_read = lambda path: path != "ants/000.jpg" or len(remote.reads) == COUNT
    assert torch.equal(epoch(loader)[0], plain)


def test_a_first_read_that_hangs_raises_an_error(remote, monkeypatch):
    data = FileDataset(remote)
    monkeypatch.setattr(concurrency, "STALLED_S", 0.1)
    remote.may_read = lambda _: False
    with pytest.raises(TimedOut, match=r"it sent no data for 0\.1 s in two attempts"):
        Loader(data, 4)
    remote.go_on()


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_abandoning_an_epoch_ends_all_threads_at_once_even_while_reads_hang(remote, workers, hangs):
    loader = Loader(FileDataset(remote), 4, num_workers=workers, transform=RandomResizedCrop(30), prefetch_batches=8)
    remote.may_read = lambda path: path.startswith("ants") or not hangs
    running = iter(loader)
    next(running)
    if hangs:
        # Wait until the 20 readable photos are decoded and the next read hangs.
        assert comes_true(lambda: decoded(loader) == 20)
    began = time.monotonic()
    running.close()
    assert time.monotonic() - began < 5
    assert loader_threads() == []
    remote.go_on()


def test_an_iterator_reads_nothing_before_its_first_batch_is_requested(remote):
    loader = Loader(FileDataset(remote), 4, size=16)
    running = iter(loader)
    assert remote.reads == {}
    del running


def test_iterations_may_be_nested(remote, plain):
    loader = Loader(FileDataset(remote), 20, size=(24, 32))
    for number, (images, _) in enumerate(loader):
        assert torch.equal(epoch(loader)[0], plain)
        assert torch.equal(images, plain[20 * number : 20 * number + 20])


def test_a_slow_source_is_read_ahead_inside_wrappers(tree, plain):
    loader = Loader(FileDataset(SlowSource(FolderSource(tree), 0.005)), 4)
    assert torch.equal(epoch(loader)[0], plain)


def test_a_drive_is_read_ahead_and_each_file_once(drive, plain):
    with drive(latency_s=0.02) as mount:
        data = FileDataset(mount.point)
        assert data.source.can_hang
        loader = Loader(data, 4, size=(24, 32), shuffle=True, num_workers=2)
        before = mount.opened
        for number in range(3):
            assert torch.equal(epoch(loader)[0], plain[order(number)])
            assert mount.opened - before == COUNT
        assert mount.busiest > 16
        assert len(set(mount.opened_paths)) == COUNT


def test_a_table_and_an_archive_on_a_drive(drive, tree, plain, tmp_path):
    zipped(tree, tree.parent / "a.zip")
    with FuseMount(tmp_path / "up", tree.parent) as mount:
        table = [str(mount.point / "tree" / path.relative_to(tree)) for path in files_of(tree)]
        for source in (table, mount.point / "a.zip"):
            data = FileDataset(source, labels=None)
            assert data.source.can_hang
            assert torch.equal(torch.cat(list(Loader(data, 7))), plain)
    (tree.parent / "a.zip").unlink()


@pytest.mark.parametrize("name", ["EIO", "ETIMEDOUT"])
def test_transient_errors_of_a_drive_are_retried(drive, plain, name):
    fault = {"on": "read", "path": "*", "do": "error", "errno": name, "count": 1, "each": True, "one_in": 3}
    with drive(fault) as mount:
        assert torch.equal(epoch(Loader(FileDataset(mount.point), 4))[0], plain)
        assert mount.faults > 0


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ({"on": "open", "do": "vanish"}, FileFailed, "No such file"),
        ({"on": "open", "do": "change"}, SourceChanged, "bytes; expected the listed"),
        ({"on": "read", "do": "error"}, FileFailed, ""),
    ],
)
def test_an_unreadable_or_changed_file_of_a_drive_is_named_after_earlier_batches(drive, plain, fault, kind, message):
    with drive({"path": "/cats/005.jpg", **fault}) as mount:
        loader = Loader(FileDataset(mount.point), 4, num_workers=2)
        got = until_it_fails(loader, kind, rf"Cannot read 'cats/005\.jpg' of .*drive'.*{message}")
    assert torch.equal(got, plain[:44])


def test_a_system_that_allows_few_threads_gets_the_same_batches_or_a_typed_error(remote, tree, plain, allow_threads):
    allow_threads(0)
    batches = torch.cat([images for images, _ in Loader(FileDataset(tree), 8, num_workers=2)])
    assert torch.equal(batches, plain.permute(0, 3, 1, 2) if batches.shape != plain.shape else plain)
    with pytest.raises(FileFailed, match="cannot start another thread"):
        list(Loader(FileDataset(remote), 8))


def test_a_drive_that_hangs_or_dies_raises_an_error(drive, plain, monkeypatch):
    monkeypatch.setattr(read_ahead, "STALLED_S", 0.4)
    with drive() as mount:
        loader = Loader(FileDataset(mount.point), 4)
        mount.hang("read", after=20)
        got = until_it_fails(loader, TimedOut, "in two attempts")
        assert torch.equal(got, plain[: len(got)])
        mount.go_on()
        assert torch.equal(epoch(loader)[0], plain)
        loader = Loader(FileDataset(mount.point), 4)
        mount.kill()
        assert len(until_it_fails(loader, ColabkitError, "Cannot read")) <= 4
