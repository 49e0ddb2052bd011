"""Uploads to a bucket's folder."""

from __future__ import annotations

import re
import threading

import fsspec
import pytest

from colabkit.errors import TimedOut
from colabkit.storage import BucketFolder, bucket_folder, file_address
from colabkit.storage.sources import concurrency


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
