"""`stage()` again: after a kill, beside another process, and for what changed since."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from near_copies import MemorySource, copy, data_of, kept_partials, zipped
from trees import leftovers, make_tree

from colabkit.errors import Corrupt, TargetExists
from colabkit.foundation import file_changes
from colabkit.packs.packing.verification import verify
from colabkit.storage.sources.engine import BLOCK_BYTES, Block
from colabkit.storage.sources.items import STAGE_SEAL, Item
from colabkit.storage.staging.api import unstage
from colabkit.storage.staging.partial_copy import PartialCopy, read_journal
from colabkit.storage.staging.places import candidates, identity_of


class CountingSource(MemorySource):
    """A source in memory that remembers what was opened, and can be told to fail."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.opened: list[str] = []
        self.fails_at: int | None = None

    def open(self, item: Item):
        self.opened.append(item.path)
        if self.fails_at is not None and len(self.opened) > self.fails_at:
            raise KeyboardInterrupt
        return super().open(item)


FILES = {f"{folder}/{number}.bin": os.urandom(50 + number) for folder in "ab" for number in range(10)}


def interrupted(source: CountingSource, after: int, **options: object) -> None:
    """Stage and be interrupted at the opening of one file."""
    source.fails_at = after
    with pytest.raises(KeyboardInterrupt):
        copy(source, threads=1, **options)
    source.fails_at = None
    source.opened.clear()


def test_stage_goes_on_where_it_was_interrupted(near_storage):
    source = CountingSource(FILES)
    interrupted(source, 13)
    report = copy(source, threads=1)
    assert data_of(report.path) == FILES
    assert len(source.opened) == len(FILES) - 13
    assert report.resumed_bytes == sum(len(FILES[path]) for path in FILES if path not in source.opened)
    assert "there already" in repr(report)
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
    assert sorted(noted) == sorted(read[:2])
    read.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialCopy, "write", lambda self, block: read.append(block.offset) or note(self, block))
        assert data_of(copy(source, threads=1).path) == source.files
    assert not set(read) & set(noted)


def test_what_was_damaged_meanwhile_is_read_again(near_storage):
    source = CountingSource(FILES)
    interrupted(source, 13)
    near = sorted(path for path in (kept_partials(near_storage)[0] / "data").rglob("*") if path.is_file())
    data = bytearray(near[3].read_bytes())
    data[0] ^= 1
    near[3].write_bytes(data)
    near[4].write_bytes(b"")
    near[5].unlink()
    assert data_of(copy(source, threads=1).path) == FILES
    assert len(source.opened) == len(FILES) - 13 + 3


def test_what_changed_at_the_source_meanwhile_is_read_again(image_tree, near_storage):
    victim = image_tree / "ants" / "003.png"

    def stop(operation: str, path: Path) -> None:
        if operation == "create" and path.name == "005.png" and "bees" in str(path):
            raise KeyboardInterrupt

    file_changes.hook = stop
    try:
        with pytest.raises(KeyboardInterrupt):
            copy(image_tree)
    finally:
        file_changes.hook = None
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)  # the size is the same
    (image_tree / "ants" / "004.png").unlink()
    report = copy(image_tree)
    assert report.resumed_bytes
    assert data_of(report.path) == data_of(image_tree)


def test_a_journal_that_was_cut_short_counts_to_its_last_whole_line(near_storage):
    source = CountingSource(FILES)
    interrupted(source, 13)
    journal = kept_partials(near_storage)[0] / "journal"
    for garbage in (b'["a/0.bin", 50', b"\xff\xfe", b"{}\n"):
        lines = journal.read_bytes().splitlines(keepends=True)[:10]
        journal.write_bytes(b"".join(lines) + garbage)
        interrupted(source, 2)
    assert data_of(copy(source, threads=1).path) == FILES


def test_a_killed_process_is_gone_on_with_by_the_next(tmp_path, near_storage):
    code = (
        "import sys, os, signal; from colabkit import stage; from colabkit.foundation import file_changes\n"
        "def hook(operation, path):\n"
        "    if operation == 'create' and path.name == '6.bin': os.kill(os.getpid(), signal.SIGKILL)\n"
        "file_changes.hook = hook; stage(sys.argv[1], sys.argv[2], progress=False)"
    )
    far = tmp_path / "far"
    for path, data in FILES.items():
        (far / path).parent.mkdir(parents=True, exist_ok=True)
        (far / path).write_bytes(data)
    died = subprocess.run([sys.executable, "-c", code, far, tmp_path / "near"], check=False)
    assert died.returncode == -signal.SIGKILL
    report = copy(far, tmp_path / "near")
    assert report.resumed_bytes
    assert data_of(report.path) == FILES


@pytest.mark.full
def test_eight_processes_that_stage_the_same_all_end_right_and_copy_once(tmp_path):
    far = make_tree(tmp_path / "far", 100)
    code = (
        "import sys, colabkit; sys.stdin.readline(); r = colabkit.stage(sys.argv[1], sys.argv[2], progress=False);"
        "print(r.reused)"
    )
    words = [sys.executable, "-c", code, far, tmp_path / "near"]
    children = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    said = [child.communicate("go\n", timeout=120)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0] * 8
    assert said.count("False") == 1
    assert data_of(tmp_path / "near") == data_of(far)
    assert leftovers(tmp_path) == []


def test_without_locks_processes_work_beside_each_other_and_end_right(image_tree, tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(37, "No locks available")))
    assert data_of(copy(image_tree, tmp_path / "near").path) == data_of(image_tree)
    assert leftovers(tmp_path) == []


def test_another_stage_of_the_same_is_waited_for(image_tree, tmp_path):
    near = tmp_path / "near"
    waited: list[Callable[[], None]] = []
    (place,) = candidates("far", near, identity_of(image_tree, extract=True)[1], "stage")
    held = place.kept()
    held.__enter__()

    def release(seconds: float) -> None:
        waited.append(lambda: None)
        if len(waited) == 3:
            held.__exit__(None, None, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("colabkit.foundation.locks.time.sleep", release)
        report = copy(image_tree, near)
    assert len(waited) == 3
    assert data_of(report.path) == data_of(image_tree)
    assert leftovers(tmp_path) == []


def test_refresh_reads_only_what_changed(image_tree, near_storage):
    report = copy(image_tree)
    (image_tree / "ants" / "000.png").write_bytes(b"changed")
    (image_tree / "bees" / "000.png").unlink()
    (image_tree / "cats" / "new.png").write_bytes(b"new")
    kept = (report.path / "cats" / "000.png").stat().st_ino
    again = copy(image_tree, refresh=True)
    assert not again.reused
    assert data_of(again.path) == data_of(image_tree)
    assert (again.path / "cats" / "000.png").stat().st_ino == kept
    assert again.resumed_bytes == again.staged_bytes - len(b"changed" + b"new")
    assert copy(image_tree, refresh=True).reused, "nothing has changed"
    assert leftovers(near_storage) == []


def test_refresh_reads_again_what_was_damaged_near(image_tree):
    report = copy(image_tree)
    (report.path / "ants" / "000.png").write_bytes(b"x" * (image_tree / "ants" / "000.png").stat().st_size)
    assert copy(image_tree).reused, "sizes are as they were"
    copy(image_tree, refresh=True)
    assert data_of(report.path) == data_of(image_tree)


def test_refresh_reads_a_big_file_again_of_which_one_block_was_damaged(tmp_path):
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "big.bin").write_bytes(os.urandom(2 * BLOCK_BYTES + 3))
    local = copy(tmp_path / "remote").path
    with (local / "big.bin").open("r+b") as file:
        file.seek(BLOCK_BYTES + 5)
        file.write(b"other")
    copy(tmp_path / "remote", refresh=True)
    assert data_of(local) == data_of(tmp_path / "remote")


def test_refresh_of_an_archive_that_is_the_same_copies_nothing(image_tree, tmp_path, file_hook):
    archive = zipped(image_tree, tmp_path / "a.zip")
    path = copy(archive).path
    created = []
    file_hook(lambda operation, path: operation == "create" and created.append(path.name))
    assert copy(archive, refresh=True).path == path
    assert [name for name in created if name.endswith(".png")] == []


def test_full_verification_reads_the_source_twice(tmp_path):
    source = CountingSource(FILES)
    report = copy(source, tmp_path / "near", verify="full")
    assert sorted(source.opened) == sorted([*FILES, *FILES])
    assert report.verify == "full"
    assert "read twice" in str(report._repr_html_())


def test_full_verification_finds_bytes_that_differ(tmp_path):
    class Fickle(CountingSource):
        def open(self, item: Item):
            if item.path in self.opened:
                self.files[item.path] = self.files[item.path][::-1]
            return super().open(item)

    with pytest.raises(Corrupt, match="when read again"):
        copy(Fickle(FILES), tmp_path / "near", verify="full")
    assert not (tmp_path / "near").exists()


def test_an_interrupted_copy_is_given_back_by_unstage(near_storage):
    source = CountingSource(FILES)
    interrupted(source, 13)
    report = unstage(source)
    assert report.freed_bytes > 0
    assert list(near_storage.iterdir()) == []


def test_the_seal_tells_every_file_with_its_digests(image_tree):
    path = copy(image_tree).path
    head, *lines = (path / STAGE_SEAL).read_text().splitlines()
    assert json.loads(head)["files"] == len(lines) == 24
    for line in lines:
        name, size, mtime_ns, crc = json.loads(line)
        assert (image_tree / name).stat().st_size == size
        assert (image_tree / name).stat().st_mtime_ns == mtime_ns
        assert crc == zlib.crc32((image_tree / name).read_bytes())


def test_verify_names_the_files_that_are_not_as_they_were_staged(image_tree, tmp_path):
    path = copy(image_tree).path
    assert verify(path, progress=False).is_good
    damage = path / "ants" / "000.png"
    data = bytearray(damage.read_bytes())
    data[5] ^= 1
    damage.write_bytes(data)
    (path / "cats" / "001.png").unlink()
    report = verify(path, progress=False)
    assert report.damaged == ("ants/000.png", "cats/001.png")
    assert "2 of 24 files, first 'ants/000.png'" in repr(report)
    big = tmp_path / "big.bin"
    big.write_bytes(os.urandom(2 * BLOCK_BYTES + 3))
    near = copy(big).path
    assert verify(near, progress=False).is_good
    with near.open("r+b") as file:
        file.seek(BLOCK_BYTES + 5)
        file.write(b"other")
    assert verify(near, progress=False).damaged == ("big.bin",)


def test_files_that_others_put_into_a_near_copy_stay(image_tree):
    path = copy(image_tree).path
    (path / "ants" / "labels.cache").write_bytes(b"mine")
    assert copy(image_tree).reused
    (image_tree / "cats" / "new.png").write_bytes(b"new")
    copy(image_tree, refresh=True)
    assert data_of(path) == data_of(image_tree) | {"ants/labels.cache": b"mine"}


def test_a_copy_that_lost_a_file_reads_only_that_again(image_tree):
    path = copy(image_tree).path
    (path / "ants" / "000.png").unlink()
    report = copy(image_tree)
    assert report.staged_bytes - report.resumed_bytes == (image_tree / "ants" / "000.png").stat().st_size
    assert data_of(path) == data_of(image_tree)


def test_a_stricter_verification_is_not_answered_by_a_laxer_one(image_tree):
    assert copy(image_tree).verify == "size"
    report = copy(image_tree, verify="full")
    assert (report.verify, report.reused) == ("full", False)
    assert copy(image_tree, verify="full").reused
    assert copy(image_tree).reused


def test_a_folder_that_became_a_file_is_staged_again(image_tree, tmp_path):
    source = CountingSource({"a/b": b"x", "c": b"y"})
    interrupted(source, 1, to=tmp_path / "near")
    source.files = {"a": b"z", "c": b"y"}
    assert data_of(copy(source, tmp_path / "near").path) == source.files


def test_all_that_is_left_of_a_source_is_given_back_at_once(image_tree, tmp_path, near_storage):
    archive = zipped(image_tree, tmp_path / "a.zip")
    copy(archive)
    copy(archive, extract=False)
    unstage(archive)
    assert list(near_storage.iterdir()) == []
    source = CountingSource(FILES)
    interrupted(source, 5, to=tmp_path / "near")
    assert unstage(tmp_path / "near").freed_bytes > 0
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("taken_by", ["a file", "a folder", "a file where its folder was"])
def test_a_refresh_loses_no_file_of_others_whose_place_is_taken(image_tree, near_storage, taken_by):
    found = copy(image_tree).path
    own = found / "mine" / "notes" if taken_by == "a file where its folder was" else found / "mine"
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(b"theirs")
    new = "mine/x.jpg" if taken_by == "a folder" else "mine"
    (image_tree / new).parent.mkdir(exist_ok=True)
    (image_tree / new).write_bytes(b"new")
    place = re.escape(str(own))
    with pytest.raises(TargetExists, match=f"of your own lies .* where the source has something else.* Move '{place}'"):
        copy(image_tree, refresh=True)
    assert own.read_bytes() == b"theirs"
    own.rename(found / "elsewhere")
    assert copy(image_tree, refresh=True).resumed_bytes > 0
    assert (found / new).read_bytes() == b"new"
    assert (found / "elsewhere").read_bytes() == b"theirs"


def test_a_file_that_others_brought_and_the_source_has_as_well_is_one_file(image_tree, near_storage):
    found = copy(image_tree).path
    for folder in (found, image_tree):
        (folder / "both").write_bytes(b"same")
    copy(image_tree, refresh=True)
    assert (found / "both").read_bytes() == b"same"


def test_links_of_others_in_a_near_copy_outlive_a_refresh(image_tree, near_storage):
    found = copy(image_tree).path
    (found / "latest").symlink_to("nowhere")
    (image_tree / "more.jpg").write_bytes(b"new")
    copy(image_tree, refresh=True)
    assert (found / "more.jpg").read_bytes() == b"new"
    assert (found / "latest").readlink() == Path("nowhere")


def test_nothing_is_ever_written_through_a_link_of_others(image_tree, near_storage, tmp_path):
    found, theirs = copy(image_tree).path, tmp_path / "theirs"
    theirs.mkdir()
    (found / "latest").symlink_to(theirs)
    (found / "notes").write_bytes(b"theirs")
    (image_tree / "notes").write_bytes(b"new")
    with pytest.raises(TargetExists, match="'notes' of your own"):  # after the link got its second name
        copy(image_tree, refresh=True)
    (found / "notes").unlink()
    (found / "latest").unlink()
    (image_tree / "latest").mkdir()
    (image_tree / "latest" / "x.jpg").write_bytes(b"new")
    copy(image_tree, refresh=True)
    assert list(theirs.iterdir()) == []
    assert (found / "latest" / "x.jpg").read_bytes() == b"new"


def test_a_near_copy_whose_seal_is_damaged_loses_no_file_of_others(image_tree, near_storage):
    found = copy(image_tree).path
    (found / "notes").write_bytes(b"theirs")
    seal = found / STAGE_SEAL
    seal.write_bytes(seal.read_bytes().partition(b"\n")[0] + b"\n{broken")
    copy(image_tree, refresh=True)
    assert (found / "notes").read_bytes() == b"theirs"


def test_files_of_others_stay_when_an_archive_is_kept_as_it_is_after_all(image_tree, tmp_path):
    archive, near = zipped(image_tree, tmp_path / "a.zip"), tmp_path / "near"
    (copy(archive, to=near).path / "notes").write_bytes(b"theirs")
    copy(archive, to=near, refresh=True, extract=False)
    assert sorted(path.name for path in near.iterdir() if path.name != STAGE_SEAL) == ["a.zip", "notes"]


def test_files_of_others_move_along_to_another_file_system(image_tree, near_storage, monkeypatch):
    found = copy(image_tree).path
    (found / "notes").write_bytes(b"theirs")
    (found / "latest").symlink_to("nowhere")
    (image_tree / "more.jpg").write_bytes(b"new")

    def refused(path: Path, to: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(file_changes, "link", refused)
    copy(image_tree, refresh=True)
    assert (found / "notes").read_bytes() == b"theirs"
    assert (found / "latest").readlink() == Path("nowhere")
