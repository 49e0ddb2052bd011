"""Fixtures for the loader tests: a folder for packs, and a check that no loader thread outlives its test."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from loader_batches import loader_threads
from waiting import comes_true


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    if loader_threads("colabkit-"):
        # A loader's iterator in a reference cycle keeps its threads until the garbage collector frees the iterator.
        gc.collect()
    assert comes_true(lambda: not loader_threads("colabkit-"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packs")
