"""Folders as sources: listings are complete, and the same for local folders and for folders that can hang."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from reader_threads import no_reader_threads
from trees import files_of
from waiting import LONG_S, comes_true

from colabkit.errors import ColabkitError, FileFailed, SourceChanged, TimedOut
from colabkit.storage.sources import concurrency, folder, items, reads
from colabkit.storage.sources.folder import FolderSource
from colabkit.storage.sources.items import STAGE_SEAL, Item, Listing
from colabkit.storage.sources.reads import Retries, read_item


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_BACK_OFF_S", 0)


@pytest.fixture(params=[False, True], ids=["local", "can hang"], autouse=True)
def can_hang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Run each test with folders treated as local, and as able to hang; check that no thread is left."""
    monkeypatch.setattr(items, "can_hang", lambda path, table: request.param)
    yield request.param
    assert comes_true(no_reader_threads)


def listed(folder: Path) -> list[str]:
    return [item.path for item in FolderSource(folder).list().items]


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_every_file_is_listed_once_sorted_with_its_size(image_tree):
    (image_tree / "ants" / "deep" / "deeper").mkdir(parents=True)
    (image_tree / "ants" / "deep" / "deeper" / "x.png").write_bytes(b"12345")
    (image_tree / "empty").mkdir()
    listing = FolderSource(image_tree).list()
    expected = files_of(image_tree)
    assert [item.path for item in listing.items] == sorted(expected)
    assert {item.path: item.size for item in listing.items} == {path: len(data) for path, data in expected.items()}
    assert listing.total_bytes == sum(map(len, expected.values()))
    assert listing.skipped == ()


def test_an_empty_folder_lists_nothing(tmp_path):
    assert FolderSource(tmp_path).list() == Listing((), ())


def test_links_are_skipped_and_reported(image_tree):
    (image_tree / "file").symlink_to(image_tree / "ants" / "000.png")
    (image_tree / "folder").symlink_to(image_tree / "ants")
    (image_tree / "dangling").symlink_to(image_tree / "nowhere")
    (image_tree / "cycle").symlink_to(image_tree)
    (image_tree / "ants" / "self").symlink_to("self")
    listing = FolderSource(image_tree).list()
    assert len(listing.items) == 24
    assert listing.skipped == tuple((name, "link") for name in ("ants/self", "cycle", "dangling", "file", "folder"))


def test_special_files_are_skipped_and_never_opened(image_tree):
    os.mkfifo(image_tree / "pipe")
    server = socket.socket(socket.AF_UNIX)
    before = Path.cwd()
    # The path of a socket must be short, so bind it relative to the folder.
    os.chdir(image_tree)
    try:
        server.bind("socket")
    finally:
        os.chdir(before)
        server.close()
    listing = FolderSource(image_tree).list()
    assert len(listing.items) == 24
    assert listing.skipped == (("pipe", "special file"), ("socket", "special file"))


@pytest.mark.parametrize("name", [b"caf\xe9.png", b"a\nb", b" ", b"-rf", b"\xff" * 255, "é".encode() * 127, b"a\\b"])
def test_any_name_a_file_can_have_is_read(tmp_path, name):
    with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
        file.write(b"data")
    source = FolderSource(tmp_path)
    (item,) = source.list().items
    assert os.fsencode(item.path) == name
    assert read_item(source, item, Retries()) == b"data"


def test_the_seal_of_a_local_copy_is_not_listed(tmp_path):
    (tmp_path / "deep").mkdir()
    for place in (tmp_path, tmp_path / "deep"):
        (place / STAGE_SEAL).write_text("{}")
    assert listed(tmp_path) == [f"deep/{STAGE_SEAL}"]


def test_a_folder_that_cannot_be_listed_raises_instead_of_being_omitted(image_tree, monkeypatch):
    scan = FolderSource._scanned

    def refuse(source, inside):
        if inside == "bees":
            raise PermissionError(errno.EACCES, "Permission denied", str(image_tree / inside))
        return scan(source, inside)

    monkeypatch.setattr(FolderSource, "_scanned", refuse)
    with pytest.raises(FileFailed, match=r"Cannot list .*permission denied .*bees"):
        FolderSource(image_tree).list()


def test_a_file_that_grew_or_shrank_raises_source_changed(image_tree):
    source = FolderSource(image_tree)
    items = source.list().items
    (image_tree / items[0].path).write_bytes(b"x" * (items[0].size + 1))
    (image_tree / items[1].path).write_bytes(b"x" * (items[1].size - 1))
    for item in items[:2]:
        with pytest.raises(SourceChanged, match=f"the listed {item.size} bytes"):
            read_item(source, item, Retries())


def test_a_file_that_became_a_link_is_not_followed(image_tree):
    source = FolderSource(image_tree)
    item = source.list().items[0]
    path = image_tree / item.path
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))
    with pytest.raises(FileFailed):
        read_item(source, item, Retries())


def test_a_file_that_became_a_pipe_does_not_hang_the_reader(image_tree):
    source = FolderSource(image_tree)
    item = source.list().items[0]
    (image_tree / item.path).unlink()
    os.mkfifo(image_tree / item.path)
    with pytest.raises(ColabkitError):
        read_item(source, item, Retries())


def test_a_removed_file_is_named_in_the_error(image_tree):
    source = FolderSource(image_tree)
    item = source.list().items[0]
    (image_tree / item.path).unlink()
    with pytest.raises(FileFailed, match=item.path):
        read_item(source, item, Retries())


def test_reading_leaves_no_descriptor_open(image_tree):
    source = FolderSource(image_tree)
    items = source.list().items
    (image_tree / items[-1].path).write_bytes(b"")
    before = open_files()
    for item in items[:-1]:
        read_item(source, item, Retries())
    with pytest.raises(SourceChanged):
        read_item(source, items[-1], Retries())
    assert open_files() == before


def test_items_have_the_times_of_their_files(image_tree):
    os.utime(image_tree / "ants" / "000.png", ns=(0, 1_234_567_890_123_456_789))
    for item in FolderSource(image_tree).list().items:
        assert item.mtime_ns == (image_tree / item.path).stat().st_mtime_ns


def test_a_large_folder_and_a_deep_one_are_listed_completely(tmp_path):
    deep = tmp_path.joinpath(*"abcdefghij")
    deep.mkdir(parents=True)
    for number in range(3 * folder._STATS_AT_ONCE + 1):
        (tmp_path / f"{number}").touch()
        (deep / f"{number}").touch()
    listing = FolderSource(tmp_path).list()
    assert {item.path: item.size for item in listing.items} == dict.fromkeys(files_of(tmp_path), 0)
    assert len(listing.items) == 2 * (3 * folder._STATS_AT_ONCE + 1)


def test_the_listing_does_not_depend_on_whether_the_folder_can_hang(image_tree, monkeypatch):
    (image_tree / "link").symlink_to("ants")
    listings = []
    for can_hang in (False, True):
        source = FolderSource(image_tree)
        source.can_hang = can_hang
        listings.append(source.list())
    assert listings[0] == listings[1]


def test_a_file_removed_during_the_listing_is_skipped_and_reported(image_tree, monkeypatch):
    stats_of = folder._stats_of

    def vanish(files: folder._Files) -> folder._ListingResult:
        if "ants/003.png" in files.paths:
            (image_tree / "ants" / "003.png").unlink()
        return stats_of(files)

    monkeypatch.setattr(folder, "_stats_of", vanish)
    listing = FolderSource(image_tree).list()
    assert listing.skipped == (("ants/003.png", "removed while the folder was listed"),)
    assert [item.path for item in listing.items] == sorted(files_of(image_tree))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN, errno.ESTALE])
def test_transient_errors_are_retried_and_counted(image_tree, monkeypatch, number):
    before = FolderSource(image_tree).list()
    scan, stats_of, failed = FolderSource._scanned, folder._stats_of, set()

    def fail_once(what: object) -> None:
        if what not in failed:
            failed.add(what)
            raise OSError(number, "flaky")

    def flaky_scan(source: FolderSource, inside: str) -> object:
        fail_once(inside)
        return scan(source, inside)

    def flaky_stats(files: folder._Files) -> folder._ListingResult:
        fail_once("stats")
        return stats_of(files)

    monkeypatch.setattr(FolderSource, "_scanned", flaky_scan)
    monkeypatch.setattr(folder, "_stats_of", flaky_stats)
    listing = FolderSource(image_tree).list()
    assert (listing.items, listing.skipped) == (before.items, before.skipped)
    # The listings of the tree and of its three folders, and one batch of file sizes, are retried.
    assert listing.retries == 5


def test_a_permanent_error_ends_the_listing(image_tree, monkeypatch):
    calls = []

    def fail(path: Path) -> object:
        calls.append(path)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(FileFailed, match=r"Cannot list .*Input/output error"):
        FolderSource(image_tree).list()
    assert len(calls) == 4


def test_on_found_gets_each_item_once_as_soon_as_it_is_found(image_tree):
    found: list[Item] = []
    listing = FolderSource(image_tree).list(found.extend)
    assert sorted(found, key=lambda item: item.path) == list(listing.items)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ColabkitError])
def test_an_error_of_on_found_ends_the_listing(image_tree, error):
    def fail(items: list[Item]) -> None:
        raise error("enough")

    with pytest.raises(error, match="enough"):
        FolderSource(image_tree).list(fail)


@pytest.mark.parametrize("can_hang", [True], indirect=True)
class TestFoldersThatCanHang:
    @pytest.fixture
    def answers(self, image_tree: Path) -> Iterator[threading.Event]:
        """Return an event that the listing of one folder waits for."""
        event, scan = threading.Event(), os.scandir

        def wait(path: Path) -> object:
            if Path(path).name == "bees":
                event.wait(LONG_S)
            return scan(path)

        # Undo the patch before the test's folder is removed.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "scandir", wait)
            patch.setattr(concurrency, "_TICK_S", 0.005)
            patch.setattr(concurrency, "_GRACE_S", 0.05)
            yield event
            event.set()

    def test_a_listing_that_hangs_twice_raises(self, image_tree, answers, monkeypatch):
        monkeypatch.setattr(folder, "STALLED_S", 0.05)
        with pytest.raises(TimedOut):
            FolderSource(image_tree).list()
        answers.set()

    def test_a_listing_whose_entries_arrive_slowly_does_not_count_as_hanging(self, image_tree, monkeypatch):
        now, looks, scan = [0.0], [0], FolderSource._scanned

        @contextlib.contextmanager
        def scanned(source: FolderSource, inside: str) -> Iterator[Iterator[os.DirEntry[str]]]:
            with scan(source, inside) as entries:
                yield (arrived(entry) for entry in entries)

        def arrived(entry: os.DirEntry[str]) -> os.DirEntry[str]:
            now[0] += 0.7 * concurrency.STALLED_S
            seen = looks[0]
            assert comes_true(lambda: looks[0] > seen + 1)
            return entry

        def look() -> None:
            looks[0] += 1

        monkeypatch.setattr(FolderSource, "_scanned", scanned)
        monkeypatch.setattr(concurrency, "_TICK_S", 0.002)
        monkeypatch.setattr(
            concurrency, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=time.thread_time)
        )
        assert len(FolderSource(image_tree / "ants").list(on_wait=look).items) == 8

    def test_on_wait_is_called_while_nothing_is_found(self, image_tree, answers):
        assert len(FolderSource(image_tree).list(on_wait=answers.set).items) == 24
        assert answers.is_set()

    def test_the_callers_thread_never_accesses_the_folder(self, image_tree, monkeypatch):
        callers = set()

        def noted(ask: Callable[..., object]) -> Callable[..., object]:
            return lambda *args, **options: callers.add(threading.current_thread()) or ask(*args, **options)

        source = FolderSource(image_tree)
        for place, name in ((os, "scandir"), (os, "lstat"), (os, "readlink"), (folder, "_stats_of")):
            monkeypatch.setattr(place, name, noted(getattr(place, name)))
        assert len(source.list().items) == 24
        monkeypatch.undo()
        assert callers
        assert threading.current_thread() not in callers
