"""What `pack()` and `verify()` say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import Report, format_bytes, format_count, format_rate, format_seconds, format_things

_LISTED = 5


@dataclass(frozen=True, repr=False)
class PackReport(Report):
    """What `pack()` made.

    Attributes:
        path: the pack; of several shards its index.
        source: where its samples came from.
        splits: samples of each split.
        classes: class names; a label is an index into them.
        encoding: `raw`, `source`, `jpeg`, or `array` for what came as arrays.
        sample_shape: height, width and channels of every image, or the shape of every array; () where they differ.
        pack_bytes: length of the pack, all shards together.
        shards: how many files hold the samples.
        seconds: how long it took.
        made_by: what made the samples: processes, threads, tasks of an executor.
        retries: reads that failed and were tried again.
        left_out: files that are no samples, with the reason.
        bad: samples that could not be decoded, with the reason.
        note: what there is to say of the encoding that was chosen.
        reused: whether the same pack was there already.
    """

    path: Path
    source: str
    splits: Mapping[str, int]
    classes: tuple[str, ...]
    encoding: str
    sample_shape: tuple[int, ...]
    pack_bytes: int
    shards: int
    seconds: float
    made_by: str
    retries: int
    left_out: tuple[tuple[str, str], ...]
    bad: tuple[tuple[str, str], ...]
    note: str
    reused: bool

    def __fspath__(self) -> str:
        """Return the path, so that the report stands for its pack."""
        return str(self.path)

    def _summary(self) -> str:
        samples = sum(self.splits.values())
        shape = f" {'x'.join(map(str, self.sample_shape))}" if self.sample_shape else ""
        kind = "sample" if self.encoding == "array" else "image"
        size = f"{format_things(samples, kind)}{shape}, {format_bytes(self.pack_bytes)}"
        size += f" in {self.shards} shards" if self.shards > 1 else ""
        if self.reused:
            return f"Already packed at {str(self.path)!r}: {size}; overwrite=True packs it again"
        rate = format_rate(samples / max(self.seconds, 1e-9), f"{kind}s")
        notes = f", {format_things(self.retries, 'retry')}" if self.retries else ""
        if self.left_out:
            path, why = self.left_out[0]
            notes += f", {format_things(len(self.left_out), 'other file')} left out, as {path!r} ({why})"
        text = f"Packed {size} to {str(self.path)!r} in {format_seconds(self.seconds)} ({rate}{notes})"
        if self.bad:
            path, why = self.bad[0]
            text += f"\n{format_things(len(self.bad), 'bad file')}, first {path!r} ({why}); .bad lists them"
        return f"{text}\nEncoding {self.encoding}: {self.note}" if self.note else text

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("path", str(self.path)),
            ("source", self.source),
            ("splits", ", ".join(f"{split} {format_count(count)}" for split, count in self.splits.items())),
            ("classes", f"{len(self.classes)}: {', '.join(self.classes[:12])}" if self.classes else "none"),
            ("encoding", self.encoding),
            ("made by", self.made_by or "an earlier call"),
            ("left out", _listed(self.left_out)),
            ("bad", _listed(self.bad)),
        ]


@dataclass(frozen=True, repr=False)
class VerifyReport(Report):
    """What `verify()` found.

    Attributes:
        path: the pack; of several shards its index.
        samples: how many were checked.
        damaged: split and index of each sample whose bytes changed.
        damaged_files: names of the files that hold them.
        seconds: how long it took.
    """

    path: Path
    samples: int
    damaged: tuple[tuple[str, int], ...]
    damaged_files: tuple[str, ...]
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether no sample is damaged."""
        return not self.damaged

    def _summary(self) -> str:
        if not self.damaged:
            return f"{str(self.path)!r} is whole: {format_things(self.samples, 'sample')}, each as it was sealed"
        first = ", ".join(f"{split}[{index}]" for split, index in self.damaged[:_LISTED])
        damage = f"{len(self.damaged)} of {format_things(self.samples, 'sample')}, first {first}"
        if self.damaged_files != (self.path.name,):
            damage += f", in {', '.join(map(repr, self.damaged_files))}"
        return f"{str(self.path)!r} is damaged: {damage}; pack or stage it again"

    def _rows(self) -> list[tuple[str, ...]]:
        files = ", ".join(self.damaged_files) or "none"
        return [
            ("damaged", str(len(self.damaged))),
            ("damaged files", files),
            ("checked in", format_seconds(self.seconds)),
        ]


def _listed(files: tuple[tuple[str, str], ...]) -> str:
    more = f"; and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    return "; ".join(f"{name!r} ({why})" for name, why in files[:_LISTED]) + more or "nothing"
