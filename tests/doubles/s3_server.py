"""A server that imitates S3, for tests of packs in buckets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fsspec.registry import _registry


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a server that fsspec uses for `s3://`, with the bucket `birds`, and yield its client; skip without moto."""
    moto, boto3 = pytest.importorskip("moto.server"), pytest.importorskip("boto3")
    s3fs = pytest.importorskip("s3fs")
    store = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    store.start()
    try:
        host, port = store.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "private-value")
        client = boto3.client("s3")
        client.create_bucket(Bucket="birds")
        yield client
    finally:
        store.stop()
        # fsspec keeps the class and its instances, but other tests need the package to be missing.
        s3fs.S3FileSystem.clear_instance_cache()
        for protocol in ("s3", "s3a"):
            _registry.pop(protocol, None)
