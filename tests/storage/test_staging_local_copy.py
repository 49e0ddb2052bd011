"""A finished local copy: its seal, verification, refresh, and added files."""

from __future__ import annotations

import errno
import json
import os
import re
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from local_copies import MemorySource, copy, data_of, tarred, zipped
from packed_files import flip_byte
from strikes import interrupt_at
from trees import files_of, leftovers

from colabkit.errors import TargetExists
from colabkit.foundation import file_changes
from colabkit.packs.packing.verification import verify
from colabkit.storage.sources.engine import BLOCK_BYTES
from colabkit.storage.sources.items import STAGE_SEAL, Listing


def test_the_seal_lists_every_file_with_its_checksums(image_tree):
    path = copy(image_tree).path
    head, times, *lines = (path / STAGE_SEAL).read_text().splitlines()
    assert json.loads(head)["files"] == len(lines) == 24
    for line, ctime_ns in zip(lines, json.loads(times), strict=True):
        name, size, mtime_ns, crc = json.loads(line)
        assert (image_tree / name).stat().st_ctime_ns == ctime_ns
        assert (image_tree / name).stat().st_size == size
        assert (image_tree / name).stat().st_mtime_ns == mtime_ns
        assert crc == zlib.crc32((image_tree / name).read_bytes())


def test_verify_names_the_damaged_files(image_tree, tmp_path):
    path = copy(image_tree).path
    assert verify(path, progress=False).is_good
    flip_byte(path / "ants" / "000.png", 5)
    (path / "cats" / "001.png").unlink()
    report = verify(path, progress=False)
    assert report.damaged == ("ants/000.png", "cats/001.png")
    assert "2 of 24 files, starting with 'ants/000.png'" in repr(report)
    big = tmp_path / "big.bin"
    big.write_bytes(os.urandom(2 * BLOCK_BYTES + 3))
    local = copy(big).path
    assert verify(local, progress=False).is_good
    flip_byte(local, BLOCK_BYTES + 5)
    assert verify(local, progress=False).damaged == ("big.bin",)


def test_refresh_reads_damaged_blocks_again(image_tree):
    (image_tree / "big.bin").write_bytes(os.urandom(2 * BLOCK_BYTES + 3))
    path = copy(image_tree).path
    # Only one block of the big file is damaged.
    for name, at in (("ants/000.png", 0), ("big.bin", BLOCK_BYTES + 5)):
        flip_byte(path / name, at)
        assert copy(image_tree).reused, "the sizes are unchanged"
        copy(image_tree, refresh=True)
        assert data_of(path) == data_of(image_tree)


def test_refresh_of_an_unchanged_archive_copies_nothing(image_tree, tmp_path, file_hook):
    archive = zipped(image_tree, tmp_path / "a.zip")
    path = copy(archive).path
    created = []
    file_hook(lambda operation, path: operation == "create" and created.append(path.name))
    assert copy(archive, refresh=True).path == path
    assert [name for name in created if name.endswith(".png")] == []


def test_refresh_extracts_an_archive_again_if_a_copied_file_is_damaged(image_tree, tmp_path):
    archive = zipped(image_tree, tmp_path / "a.zip")
    path = copy(archive).path
    flip_byte(path / "ants" / "000.png", 0)
    assert copy(archive, refresh=True).path == path
    assert data_of(path) == data_of(image_tree)


def test_refresh_of_the_included_samples_copies_nothing(tmp_path):
    assert not copy("samples:digits", to=tmp_path / "digits").reused
    assert copy("samples:digits", to=tmp_path / "digits", refresh=True).reused


def test_refresh_reads_only_changed_files(image_tree, near_storage):
    report = copy(image_tree)
    (image_tree / "ants" / "000.png").write_bytes(b"changed")
    (image_tree / "bees" / "000.png").unlink()
    (image_tree / "cats" / "new.png").write_bytes(b"new")
    inode = (report.path / "cats" / "000.png").stat().st_ino
    again = copy(image_tree, refresh=True)
    assert not again.reused
    assert data_of(again.path) == data_of(image_tree)
    assert (again.path / "cats" / "000.png").stat().st_ino == inode
    assert again.resumed_bytes == again.staged_bytes - len(b"changed" + b"new")
    assert copy(image_tree, refresh=True).reused, "nothing has changed"
    assert leftovers(near_storage) == []


def rewrite(path: Path) -> None:
    """Write other bytes of the same size into a file, and restore its modification time."""
    found = path.stat()
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def test_refresh_copies_a_file_that_was_rewritten_and_got_its_modification_time_back(image_tree, tmp_path):
    archive = tarred(image_tree, tmp_path / "a.tar")
    copy(image_tree, tmp_path / "near")
    copy(archive)
    rewrite(image_tree / "bees" / "001.png")
    again = copy(image_tree, tmp_path / "near", refresh=True)
    assert data_of(again.path) == files_of(image_tree)
    assert again.resumed_bytes == again.staged_bytes - (image_tree / "bees" / "001.png").stat().st_size
    found = archive.stat()
    tarred(image_tree, archive)
    os.utime(archive, ns=(found.st_atime_ns, found.st_mtime_ns))
    # A local archive is compared with its copy even without `refresh`.
    assert data_of(copy(archive).path) == files_of(image_tree)


@pytest.mark.parametrize("refresh", [False, True])
def test_full_verification_replaces_files_whose_times_hide_that_they_are_outdated(refresh):
    class TimedSource(MemorySource):
        def list(self) -> Listing:
            return Listing(tuple(replace(item, mtime_ns=1) for item in super().list().items), ())

    files = {"1.bin": b"one", "2.bin": b"two", "big.bin": bytes(BLOCK_BYTES + 1)}
    copy(TimedSource(files))
    files.update({"2.bin": b"TWO", "big.bin": bytes(BLOCK_BYTES) + b"1"})
    report = copy(TimedSource(files), verify="full", refresh=refresh)
    assert data_of(report.path) == files
    assert (report.verify, report.resumed_bytes) == ("full", 3)


def test_an_archive_that_changed_since_an_interrupted_run_is_extracted_from_the_start(tmp_path, file_hook):
    archive, time = tmp_path / "a.zip", (2024, 1, 1, 0, 0, 0)

    def write(data: bytes) -> None:
        with zipfile.ZipFile(archive, "w") as file:
            for name in ("1.bin", "2.bin", "3.bin"):
                file.writestr(zipfile.ZipInfo(name, time), data)

    write(b"old")
    file_hook(interrupt_at("3.bin"))
    with pytest.raises(KeyboardInterrupt):
        copy(archive)
    file_hook(None)
    write(b"new")
    assert set(data_of(copy(archive).path).values()) == {b"new"}


@pytest.mark.parametrize("taken_by", ["a file", "a folder", "a file instead of its folder"])
def test_a_refresh_keeps_added_files_whose_path_the_source_now_uses(image_tree, near_storage, taken_by):
    found = copy(image_tree).path
    own = found / "mine" / "notes" if taken_by == "a file instead of its folder" else found / "mine"
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(b"theirs")
    new = "mine/x.jpg" if taken_by == "a folder" else "mine"
    (image_tree / new).parent.mkdir(exist_ok=True)
    (image_tree / new).write_bytes(b"new")
    place = re.escape(str(own))
    with pytest.raises(TargetExists, match=f"your file .* conflicts with a file or folder .*\\. Move '{place}'"):
        copy(image_tree, refresh=True)
    assert own.read_bytes() == b"theirs"
    own.rename(found / "elsewhere")
    assert copy(image_tree, refresh=True).resumed_bytes > 0
    assert (found / new).read_bytes() == b"new"
    assert (found / "elsewhere").read_bytes() == b"theirs"


def test_nothing_is_written_through_added_links(image_tree, near_storage, tmp_path):
    found, theirs = copy(image_tree).path, tmp_path / "theirs"
    theirs.mkdir()
    (found / "latest").symlink_to(theirs)
    (found / "notes").write_bytes(b"theirs")
    (image_tree / "notes").write_bytes(b"new")
    # The error may be raised after the added link has been carried over.
    with pytest.raises(TargetExists, match="your file 'notes'"):
        copy(image_tree, refresh=True)
    (found / "notes").unlink()
    (found / "latest").unlink()
    (image_tree / "latest").mkdir()
    (image_tree / "latest" / "x.jpg").write_bytes(b"new")
    copy(image_tree, refresh=True)
    assert list(theirs.iterdir()) == []
    assert (found / "latest" / "x.jpg").read_bytes() == b"new"


def test_a_local_copy_with_a_damaged_seal_keeps_added_files(image_tree, near_storage):
    found = copy(image_tree).path
    (found / "notes").write_bytes(b"theirs")
    seal = found / STAGE_SEAL
    seal.write_bytes(seal.read_bytes().partition(b"\n")[0] + b"\n{broken")
    copy(image_tree, refresh=True)
    assert (found / "notes").read_bytes() == b"theirs"


def test_added_files_stay_when_an_archive_is_staged_unextracted_later(image_tree, tmp_path):
    archive, local = zipped(image_tree, tmp_path / "a.zip"), tmp_path / "local"
    (copy(archive, to=local).path / "notes").write_bytes(b"theirs")
    copy(archive, to=local, refresh=True, extract=False)
    assert sorted(path.name for path in local.iterdir() if path.name != STAGE_SEAL) == ["a.zip", "notes"]


def test_full_verification_does_not_reuse_a_copy_verified_by_size(image_tree):
    assert copy(image_tree).verify == "size"
    report = copy(image_tree, verify="full")
    assert (report.verify, report.reused) == ("full", False)
    assert copy(image_tree, verify="full").reused
    assert copy(image_tree).reused


@pytest.mark.parametrize("refusal", [None, errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP])
def test_files_and_links_added_to_a_local_copy_stay(image_tree, monkeypatch, refusal):
    def refused(path: Path, to: Path) -> None:
        raise OSError(refusal, os.strerror(refusal))

    path = copy(image_tree).path
    (path / "ants" / "labels.cache").write_bytes(b"mine")
    (path / "latest").symlink_to("nowhere")
    for folder in (path, image_tree):
        (folder / "both").write_bytes(b"same")
    assert copy(image_tree).reused
    (image_tree / "cats" / "new.png").write_bytes(b"new")
    # Simulate two file systems, or one without hard links.
    if refusal is not None:
        monkeypatch.setattr(file_changes, "link", refused)
    assert not copy(image_tree, refresh=True).reused
    assert data_of(path) == data_of(image_tree) | {"ants/labels.cache": b"mine"}
    assert (path / "latest").readlink() == Path("nowhere")
