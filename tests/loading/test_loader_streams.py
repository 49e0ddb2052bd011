"""The contract of streams, with random transforms on, for every way in which `Loader` makes batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract import StreamContract, make_shards
from sampling import sampled
from test_loader_resume import AUGMENT, BATCH, N, encoded, folder, make, no_thread_is_left, raw, samples, take

from colabkit.augment import Compose, PerSample
from colabkit.packs import open_pack

__all__ = ["TestAugmentedStream", "encoded", "folder", "no_thread_is_left", "raw"]


class Failing:
    """Lets images pass, and fails at one batch of a loader."""

    def __init__(self, fail_at: int) -> None:
        self.calls, self.fail_at = 0, fail_at

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fail_at + 1:
            raise ValueError("planned")
        return images


@pytest.mark.parametrize("what", sampled(["raw", "encoded", "kept", "block", "sharded", "samples", "one ahead"], 3))
class TestAugmentedStream(StreamContract):
    """The contract, which holds most rows of the catalogue, with transforms on, on every way to batches."""

    @pytest.fixture(autouse=True)
    def _stream_of(self, raw, encoded, folder, what):
        self.options: dict[str, Any] = {}
        self.data: Any = raw
        if what == "encoded":
            self.data = encoded
        elif what == "kept":
            self.data = encoded
            self.options = {"size": 9, "keep": "disk"}
        elif what == "block":
            self.options = {"shuffle": "block"}
        elif what == "sharded":
            path = folder / "s.h5"
            counts = {"train": 9}, {"train": 1}, {"train": 12}
            self.data = open_pack(path if path.exists() else make_shards(path, *counts, shape=(9, 8, 3)))["train"]
        elif what == "samples":
            self.options = {"transform": PerSample(lambda image: AUGMENT(image[None])[0]), "threads": 0}
        elif what == "one ahead":
            self.options = {"prefetch_batches": 1, "threads": 1}

    def make(self, fail_at=None):
        options = dict(self.options)
        if fail_at is not None and "threads" in options and "transform" in options:
            inner, fail = options["transform"].function, Failing(fail_at * BATCH)
            options["transform"] = PerSample(lambda image: fail(inner(image)))
        elif fail_at is not None:
            options["transform"] = Compose([AUGMENT, Failing(fail_at)])
        return make(self.data, **options)

    def samples(self, batch):
        return samples(batch)

    def everything(self):
        return take(self.make())

    def assert_whole(self, got):
        """Images of each epoch are cut anew; the labels are what can be told beforehand."""
        assert len(got) == len(set(got)) == N
        assert sorted(label for _, label in got) == sorted(self.data.labels.tolist())
