"""Folders as sources: listings that miss nothing, reads that give exactly the listed bytes, counted retries."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colabkit import sources
from colabkit.errors import ColabkitError, FileFailed, SourceChanged
from colabkit.sources import (
    FolderSource,
    Item,
    Listing,
    Retries,
    SlowSource,
    read_blocks,
    read_item,
)


def contents(source: sources.Source) -> dict[str, bytes]:
    """Return the bytes of all items of a source."""
    return {item.path: read_item(source, item, Retries()) for item in source.list().items}


def tree_bytes(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def listed(folder: Path) -> list[str]:
    """Return the paths a folder's listing has."""
    return [item.path for item in FolderSource(folder).list().items]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(sources.engine, "_BACK_OFF_S", 0)


class TestFolders:
    def test_every_file_is_listed_once_sorted_with_its_size(self, image_tree):
        (image_tree / "ants" / "deep" / "deeper").mkdir(parents=True)
        (image_tree / "ants" / "deep" / "deeper" / "x.png").write_bytes(b"12345")
        (image_tree / "empty").mkdir()
        listing = FolderSource(image_tree).list()
        expected = tree_bytes(image_tree)
        assert [item.path for item in listing.items] == sorted(expected)
        assert {item.path: item.size for item in listing.items} == {path: len(data) for path, data in expected.items()}
        assert listing.total_bytes == sum(map(len, expected.values()))
        assert listing.skipped == ()

    def test_an_empty_folder_lists_nothing(self, tmp_path):
        assert FolderSource(tmp_path).list() == Listing((), ())

    def test_links_are_passed_over_and_named(self, image_tree):
        (image_tree / "file").symlink_to(image_tree / "ants" / "000.png")
        (image_tree / "folder").symlink_to(image_tree / "ants")
        (image_tree / "dangling").symlink_to(image_tree / "nowhere")
        (image_tree / "cycle").symlink_to(image_tree)
        (image_tree / "ants" / "self").symlink_to("self")
        listing = FolderSource(image_tree).list()
        assert len(listing.items) == 24
        assert listing.skipped == tuple((name, "link") for name in ("ants/self", "cycle", "dangling", "file", "folder"))

    def test_special_files_are_passed_over_and_never_opened(self, image_tree):
        os.mkfifo(image_tree / "pipe")
        server = socket.socket(socket.AF_UNIX)
        before = Path.cwd()
        os.chdir(image_tree)  # the name of a socket is short
        try:
            server.bind("socket")
        finally:
            os.chdir(before)
            server.close()
        listing = FolderSource(image_tree).list()
        assert len(listing.items) == 24
        assert listing.skipped == (("pipe", "special file"), ("socket", "special file"))

    @pytest.mark.parametrize(
        "name", [b"caf\xe9.png", b"a\nb", b" ", b"-rf", b"\xff" * 255, "é".encode() * 127, b"a\\b"]
    )
    def test_any_name_a_file_can_have_is_read(self, tmp_path, name):
        with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
            file.write(b"data")
        source = FolderSource(tmp_path)
        (item,) = source.list().items
        assert os.fsencode(item.path) == name
        assert read_item(source, item, Retries()) == b"data"

    def test_the_seal_of_a_near_copy_is_no_data(self, tmp_path):
        (tmp_path / "deep").mkdir()
        for folder in (tmp_path, tmp_path / "deep"):
            (folder / sources.STAGE_SEAL).write_text("{}")
        assert listed(tmp_path) == [f"deep/{sources.STAGE_SEAL}"]

    def test_a_folder_that_cannot_be_listed_is_an_error_not_a_gap(self, image_tree, monkeypatch):
        scan = os.scandir

        def refuse(path):
            if Path(path).name == "bees":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return scan(path)

        monkeypatch.setattr(os, "scandir", refuse)
        with pytest.raises(FileFailed, match=r"Cannot list .*Permission denied .*bees"):
            FolderSource(image_tree).list()

    def test_a_file_that_grew_or_shrank_is_changed(self, image_tree):
        source = FolderSource(image_tree)
        items = source.list().items
        (image_tree / items[0].path).write_bytes(b"x" * (items[0].size + 1))
        (image_tree / items[1].path).write_bytes(b"x" * (items[1].size - 1))
        for item in items[:2]:
            with pytest.raises(SourceChanged, match=f"the {item.size} listed before"):
                read_item(source, item, Retries())

    def test_a_file_that_became_a_link_is_not_followed(self, image_tree):
        source = FolderSource(image_tree)
        item = source.list().items[0]
        path = image_tree / item.path
        path.rename(path.with_suffix(".moved"))
        path.symlink_to(path.with_suffix(".moved"))
        with pytest.raises(FileFailed):
            read_item(source, item, Retries())

    def test_a_file_that_became_a_pipe_does_not_hang_the_reader(self, image_tree):
        source = FolderSource(image_tree)
        item = source.list().items[0]
        (image_tree / item.path).unlink()
        os.mkfifo(image_tree / item.path)
        with pytest.raises(ColabkitError):
            read_item(source, item, Retries())

    def test_a_file_that_vanished_is_an_error_that_names_it(self, image_tree):
        source = FolderSource(image_tree)
        item = source.list().items[0]
        (image_tree / item.path).unlink()
        with pytest.raises(FileFailed, match=item.path):
            read_item(source, item, Retries())

    def test_reading_leaves_no_descriptor_open(self, image_tree):
        source = FolderSource(image_tree)
        items = source.list().items
        (image_tree / items[-1].path).write_bytes(b"")
        before = open_files()
        for item in items[:-1]:
            read_item(source, item, Retries())
        with pytest.raises(SourceChanged):
            read_item(source, items[-1], Retries())
        assert open_files() == before


def open_files() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/dev/fd"))


class FlakySource:
    """A source whose reads follow a script: each open takes the next list of blocks and errors."""

    name = "flaky"

    def __init__(self, *opens: list[bytes | OSError] | OSError) -> None:
        self.opens = list(opens)
        self.offsets: list[int] = []

    def open(self, item: Item) -> FlakyFile:
        script = self.opens.pop(0)
        if isinstance(script, OSError):
            raise script
        return FlakyFile(script, self.offsets)


class FlakyFile:
    """A file that gives the next block or raises the next error at each read."""

    def __init__(self, script: list[bytes | OSError], offsets: list[int]) -> None:
        self.script = list(script)
        self.offsets = offsets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def seek(self, offset: int) -> None:
        self.offsets.append(offset)

    def read(self, size: int) -> bytes:
        if not self.script:
            return b""
        if isinstance(self.script[0], OSError):
            raise self.script.pop(0)
        block = self.script.pop(0)
        if len(block) > size:
            self.script.insert(0, block[size:])
        return block[:size]


def eio() -> OSError:
    return OSError(errno.EIO, "Input/output error")


class TestReads:
    @pytest.mark.parametrize("code", ["EIO", "ENOTCONN", "ETIMEDOUT", "ESTALE", "EAGAIN"])
    def test_errors_that_mounts_recover_from_are_tried_again_and_counted(self, code):
        error = OSError(getattr(errno, code), "flaky")
        source, retries = FlakySource(error, error, error, [b"data"]), Retries()
        assert read_item(source, Item("x", 4), retries) == b"data"
        assert retries.count == 3

    def test_the_fourth_failure_is_the_last(self):
        source, retries = FlakySource(*(eio() for _ in range(5))), Retries()
        with pytest.raises(FileFailed, match="Input/output error"):
            read_item(source, Item("x", 4), retries)
        assert len(source.opens) == 1
        assert retries.count == 3

    @pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EISDIR])
    def test_errors_that_stay_are_not_tried_again(self, code):
        source, retries = FlakySource(OSError(code, "stays"), [b"data"]), Retries()
        with pytest.raises(FileFailed):
            read_item(source, Item("x", 4), retries)
        assert retries.count == 0

    def test_a_retry_resumes_at_the_offset_reached(self):
        source, retries = FlakySource([b"abcd", eio()], [b"efgh", eio()], [b"ij"]), Retries()
        assert list(read_blocks(source, Item("x", 10), 4, retries)) == [b"abcd", b"efgh", b"ij"]
        assert source.offsets == [4, 8]
        assert retries.count == 2

    def test_progress_gives_new_tries(self):
        opens = [[bytes([number]), eio()] for number in range(9)]
        source, retries = FlakySource(*opens, [b"\x09"]), Retries()
        assert b"".join(read_blocks(source, Item("x", 10), 1, retries)) == bytes(range(10))
        assert retries.count == 9

    def test_short_reads_are_put_together(self):
        source = FlakySource([b"a", b"bc", b"defg", b"hij"])
        assert list(read_blocks(source, Item("x", 10), 4, Retries())) == [b"abcd", b"efgh", b"ij"]

    @given(size=st.integers(0, 70), block=st.integers(1, 80))
    @settings(max_examples=60)
    def test_blocks_together_are_the_file_whatever_their_size(self, size, block):
        data = bytes(range(size))
        blocks = list(read_blocks(FlakySource([data]), Item("x", size), block, Retries()))
        assert b"".join(blocks) == data
        assert all(len(some) == block for some in blocks[:-1])

    @pytest.mark.parametrize("block", [1, 3, 4, 5, 100])
    @pytest.mark.parametrize("data", [b"", b"abc", b"abcde", b"abcdefgh"])
    def test_fewer_or_more_bytes_than_listed_is_a_changed_source(self, data, block):
        with pytest.raises(SourceChanged):
            list(read_blocks(FlakySource([data]), Item("x", 4), block, Retries()))

    def test_retries_are_counted_from_any_thread(self):
        retries = Retries()
        threads = [threading.Thread(target=lambda: [retries.add() for _ in range(500)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert retries.count == 4000

    def test_pauses_between_tries_grow(self, monkeypatch):
        pauses: list[float] = []
        monkeypatch.setattr(sources.engine, "_BACK_OFF_S", 1.0)
        monkeypatch.setattr(time, "sleep", pauses.append)
        with pytest.raises(FileFailed):
            read_item(FlakySource(*(eio() for _ in range(4))), Item("x", 1), Retries())
        assert [2**number / 2 <= pause <= 2**number for number, pause in enumerate(pauses, 1)] == [True] * 3


class TestSlowSource:
    def test_every_call_waits_once_and_gives_what_the_inner_source_gives(self, image_tree, monkeypatch):
        pauses: list[float] = []
        monkeypatch.setattr(time, "sleep", pauses.append)
        slow = SlowSource(FolderSource(image_tree), 0.25)
        assert contents(slow) == tree_bytes(image_tree)
        assert slow.name == str(image_tree)
        assert pauses == [0.25] * 25
