"""Uploads to a bucket's folder."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

import fsspec
import pytest

from colabkit.errors import ColabkitError, TimedOut
from colabkit.storage import BucketFolder, bucket_folder, file_address, sibling_of
from colabkit.storage.sources import concurrency


def test_a_local_folder_never_shows_a_part_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"new")
    folder = BucketFolder(file_address(f"file://{tmp_path}/bucket"), "pack to the bucket")
    local = type(fsspec.filesystem("file"))
    put_file = local.put_file

    def put_half(self: object, path: str, to: str) -> None:
        put_file(self, path, to)
        Path(to).write_bytes(b"n")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for upload in (folder.put, folder.create):
        with monkeypatch.context() as patch:
            patch.setattr(local, "put_file", put_half)
            with pytest.raises(ColabkitError):
                upload(tmp_path / "a", "a")
        assert list((tmp_path / "bucket").iterdir()) == []
    assert [folder.create(tmp_path / "a", "a") for _ in range(2)] == [True, False]
    (tmp_path / "a").write_bytes(b"newer")
    folder.put(tmp_path / "a", "a")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "bucket").iterdir()] == [("a", b"newer")]


def test_the_address_of_a_sibling_on_the_web_is_quoted():
    web = sibling_of(file_address("https://host/data/birds%232.h5"), "birds#2-00000.h5")
    assert (web.text, web.name) == ("https://host/data/birds%232-00000.h5", "birds#2-00000.h5")
    assert sibling_of(file_address("memory://data/a#b.h5"), "a#b-0.h5").text == "memory://data/a#b-0.h5"


def test_a_slow_upload_has_time_by_its_size_and_is_not_started_twice(tmp_path, monkeypatch):
    started, is_over = [], threading.Event()

    def hang(*arguments: object) -> None:
        started.append(arguments)
        is_over.wait(30)

    monkeypatch.setattr(bucket_folder, "_ANSWER_S", 0.1)
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.0)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", hang)
    (tmp_path / "a").write_bytes(bytes(bucket_folder._SLOWEST_BYTES_S // 5))
    folder = BucketFolder(file_address("memory://uploads"), "pack to the bucket")
    expected = re.escape("Cannot pack to the bucket: uploading 'a' took more than 300 ms")
    with pytest.raises(TimedOut, match=f"{expected}.*Check the connection"):
        folder.put(tmp_path / "a", "a")
    is_over.set()
    assert len(started) == 1
