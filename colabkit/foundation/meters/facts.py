"""What is known of a loader beside its counts: the facts that a verdict needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """What a loader loads, and how. None is what is not known.

    Attributes:
        kind: how batches are made: rows `"gathered"` or images `"decoded"` in threads, samples one by one in
            `"processes"`, rows gathered on the `"device"`, or a `"foreign"` loader.
        samples: of an epoch of all processes.
        batch_size: of this process.
        device: where batches go, as in `"cpu"` and `"cuda:0"`.
        workers: threads or processes that make them.
        sample_bytes: of a sample as it is stored, on average.
        path: where the samples lie.
        source: where the files lie that a pack was made of.
        is_far: whether that is behind a mount or a network.
        files: how many files they are.
        encoding: `"raw"` rows, `"encoded"` image files, or `"python"` objects.
        tier: where samples live while training, as `Tier.name` has it.
        transform: name of what is done to them.
        is_pinned: whether batches are in page-locked memory before they are sent.
        keeps_workers: whether worker processes outlive an epoch.
    """

    kind: Literal["gathered", "decoded", "processes", "device", "foreign"]
    samples: int | None = None
    batch_size: int | None = None
    device: str = "cpu"
    workers: int | None = None
    sample_bytes: float | None = None
    path: str | None = None
    source: str | None = None
    is_far: bool | None = None
    files: int | None = None
    encoding: Literal["raw", "encoded", "python"] | None = None
    tier: str | None = None
    transform: str | None = None
    is_pinned: bool | None = None
    keeps_workers: bool | None = None
