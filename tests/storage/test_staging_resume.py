"""`stage()` after an interruption, concurrently with another process, and after changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from local_copies import MemorySource, copy, data_of, kept_partials
from strikes import interrupt_at
from trees import leftovers

from colabkit.errors import Corrupt
from colabkit.foundation import KeptPartial, locks
from colabkit.storage.sources.engine import BLOCK_BYTES, Block
from colabkit.storage.sources.items import Item, Listing
from colabkit.storage.staging import run
from colabkit.storage.staging.api import unstage
from colabkit.storage.staging.partial_copy import PartialCopy, read_journal
from colabkit.storage.staging.places import candidates, identity_of


class CountingSource(MemorySource):
    """A source in memory that records opened items, and can interrupt the run."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.opened: list[str] = []
        self.fails_at: int | None = None
        self.mtime_ns = 1

    def list(self) -> Listing:
        return Listing(tuple(replace(item, mtime_ns=self.mtime_ns) for item in super().list().items), ())

    def open(self, item: Item):
        self.opened.append(item.path)
        if self.fails_at is not None and len(self.opened) > self.fails_at:
            raise KeyboardInterrupt
        return super().open(item)


class VersionedSource(CountingSource):
    """A source whose items have a number as their version, like the objects of a bucket."""

    version = 1

    def list(self) -> Listing:
        return Listing(tuple(replace(item, ctime_ns=self.version) for item in super().list().items), ())


FILES = {f"{folder}/{number}.bin": os.urandom(50 + number) for folder in "ab" for number in range(10)}


def interrupted(source: CountingSource, after: int, **options: object) -> None:
    source.fails_at = after
    with pytest.raises(KeyboardInterrupt):
        copy(source, threads=1, **options)
    source.fails_at = None
    source.opened.clear()


def test_stage_resumes_after_an_interruption(near_storage):
    source = CountingSource(FILES)
    interrupted(source, 13)
    report = copy(source, threads=1)
    assert data_of(report.path) == FILES
    assert len(source.opened) == len(FILES) - 13
    assert report.resumed_bytes == sum(len(FILES[path]) for path in FILES if path not in source.opened)
    assert " reused" in repr(report)
    assert leftovers(near_storage) == []


def test_blocks_of_a_big_file_are_not_read_again(near_storage):
    source = CountingSource({"big": os.urandom(3 * BLOCK_BYTES + 7)})
    read: list[int] = []
    note = PartialCopy.write

    def stop_after_two(self: PartialCopy, block: Block) -> bool:
        read.append(block.offset)
        if len(read) == 3:
            raise KeyboardInterrupt
        return note(self, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialCopy, "write", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            copy(source, threads=1)
    kept = kept_partials(near_storage)[0]
    ((_, noted),) = read_journal(kept / "journal")[0].items()
    assert sorted(noted.crcs) == sorted(read[:2])
    read.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialCopy, "write", lambda self, block: read.append(block.offset) or note(self, block))
        assert data_of(copy(source, threads=1).path) == source.files
    assert not set(read) & set(noted.crcs)


def test_data_damaged_meanwhile_is_read_again(near_storage):
    source = CountingSource(FILES)
    interrupted(source, 13)
    local = sorted(path for path in (kept_partials(near_storage)[0] / "data").rglob("*") if path.is_file())
    data = bytearray(local[3].read_bytes())
    data[0] ^= 1
    local[3].write_bytes(data)
    local[4].write_bytes(b"")
    local[5].unlink()
    assert data_of(copy(source, threads=1).path) == FILES
    assert len(source.opened) == len(FILES) - 13 + 3


def test_source_files_modified_meanwhile_are_read_again(image_tree, file_hook):
    victim = image_tree / "ants" / "003.png"
    file_hook(interrupt_at("bees/005.png"))
    with pytest.raises(KeyboardInterrupt):
        copy(image_tree)
    file_hook(None)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    # Write new content of the same size.
    victim.write_bytes(data)
    (image_tree / "ants" / "004.png").unlink()
    report = copy(image_tree)
    assert report.resumed_bytes
    assert data_of(report.path) == data_of(image_tree)


def test_files_without_a_time_or_version_are_read_again(tmp_path):
    source = CountingSource({"a": bytes(100), "b": bytes(100)})
    source.mtime_ns = 0
    interrupted(source, 1, to=tmp_path / "local")
    source.files = dict.fromkeys(source.files, b"1" * 100)
    assert data_of(copy(source, tmp_path / "local").path) == source.files


@pytest.mark.parametrize("mtime_ns", [0, 1], ids=["version only", "same time"])
def test_an_interrupted_refresh_resumes_only_files_of_the_current_version(mtime_ns):
    source = VersionedSource({"first": b"1"})
    source.mtime_ns = mtime_ns
    copy(source)
    source.files, source.version = dict.fromkeys(FILES, b"2" * 50), 2
    interrupted(source, 10, refresh=True)
    interrupted(source, 5, refresh=True)
    source.files, source.version = dict.fromkeys(FILES, b"3" * 50), 3
    interrupted(source, 8, refresh=True)
    report = copy(source, refresh=True)
    assert data_of(report.path) == source.files
    assert len(source.opened) == len(FILES) - 8


def test_a_process_shows_life_while_it_checks_kept_blocks(monkeypatch):
    source = CountingSource(FILES)
    interrupted(source, 13)
    signs: list[int] = []
    monkeypatch.setattr(run, "_SIGN_S", -1)
    monkeypatch.setattr(KeptPartial, "show_life", lambda kept: signs.append(len(source.opened)))
    copy(source, threads=1)
    assert signs.count(0) >= 13


def test_a_truncated_journal_counts_up_to_its_last_complete_line(near_storage):
    source = CountingSource(FILES)
    interrupted(source, 13)
    journal = kept_partials(near_storage)[0] / "journal"
    for garbage in (b'["a/0.bin", 50', b"\xff\xfe", b"{}\n"):
        lines = journal.read_bytes().splitlines(keepends=True)[:10]
        journal.write_bytes(b"".join(lines) + garbage)
        interrupted(source, 2)
    assert data_of(copy(source, threads=1).path) == FILES


def test_staging_works_without_file_locks(image_tree, tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(37, "No locks available")))
    assert data_of(copy(image_tree, tmp_path / "local").path) == data_of(image_tree)
    assert leftovers(tmp_path) == []


def test_a_second_process_waits_for_the_first(image_tree, tmp_path):
    local = tmp_path / "local"
    waited: list[Callable[[], None]] = []
    (place,) = candidates("remote", local, identity_of(image_tree, extract=True)[1], "stage")
    held = place.kept()
    held.__enter__()

    def release(seconds: float) -> None:
        if seconds != locks._BUSY_S:
            # The reader waits here for a clock tick, since the source was just modified.
            return
        waited.append(lambda: None)
        if len(waited) == 3:
            held.__exit__(None, None, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("colabkit.foundation.locks.time.sleep", release)
        report = copy(image_tree, local)
    assert len(waited) == 3
    assert data_of(report.path) == data_of(image_tree)
    assert leftovers(tmp_path) == []


def test_full_verification_reads_the_source_twice(tmp_path):
    source = CountingSource(FILES)
    report = copy(source, tmp_path / "local", verify="full")
    assert sorted(source.opened) == sorted([*FILES, *FILES])
    assert report.verify == "full"
    assert "read twice" in str(report._repr_html_())


def test_full_verification_finds_bytes_that_differ(tmp_path):
    class FickleSource(CountingSource):
        def open(self, item: Item):
            if item.path in self.opened:
                self.files[item.path] = self.files[item.path][::-1]
            return super().open(item)

    with pytest.raises(Corrupt, match="different in the second read"):
        copy(FickleSource(FILES), tmp_path / "local", verify="full")
    assert not (tmp_path / "local").exists()


def test_unstage_frees_an_interrupted_copy(tmp_path, near_storage):
    source = CountingSource(FILES)
    interrupted(source, 13)
    assert unstage(source).freed_bytes > 0
    assert list(near_storage.iterdir()) == []
    interrupted(source, 5, to=tmp_path / "local")
    assert unstage(tmp_path / "local").freed_bytes > 0
    assert leftovers(tmp_path) == []


def test_a_folder_that_became_a_file_is_staged_again(image_tree, tmp_path):
    source = CountingSource({"a/b": b"x", "c": b"y"})
    interrupted(source, 1, to=tmp_path / "local")
    source.files = {"a": b"z", "c": b"y"}
    assert data_of(copy(source, tmp_path / "local").path) == source.files
