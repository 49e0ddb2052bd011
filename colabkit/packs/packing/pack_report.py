"""The report of `pack()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import (
    Report,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    format_things,
    option,
)
from colabkit.packs.format.layout import count_omitted, name_inferred

_LISTED = 5


@dataclass(frozen=True, repr=False)
class PackReport(Report):
    """Result of `pack()`.

    Attributes:
        path: path of the pack, or of the index if there are several shards; text for an address.
        source: name of the source.
        splits: number of samples in each split.
        classes: names of the classes, or of several labels or targets; may be empty.
        encoding: `raw` for pixels and `.npy` files, `source`, `jpeg`, or `array` for other samples.
        sample_shape: height, width and channels of every image, or the shape of every array; () if unequal or unknown.
        pack_bytes: size of the pack in bytes, including all shards.
        shards: number of files that hold the samples.
        seconds: duration of the call in seconds.
        made_by: workers that made the samples: processes, threads or executor tasks; empty if the pack was reused.
        retries: number of reads that failed and were retried.
        attempts: number of times that the executor began to write a shard; 0 without an executor.
        duplicates: attempts that were complete after another attempt at the same shard; their files were removed.
        lost: attempts that did not end, because their worker died or no longer responded.
        left_out: files that are missing or are not samples, with the reason.
        bad: samples that could not be decoded, with the reason.
        note: reason for the chosen encoding; empty if it needs none.
        inferred: inferred values, such as the task, the splits and the layout, by the option that overrides each.
        reused: whether the same pack already existed and was reused.
    """

    path: Path | str
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
    attempts: int
    duplicates: int
    lost: int
    left_out: tuple[tuple[str, str], ...]
    bad: tuple[tuple[str, str], ...]
    note: str
    inferred: Mapping[str, str]
    reused: bool

    def __fspath__(self) -> str:
        """Return the path, so the report can be passed wherever a path is expected."""
        return str(self.path)

    def _summary(self) -> str:
        samples = sum(self.splits.values())
        shape = f" {'x'.join(map(str, self.sample_shape))}" if self.sample_shape else ""
        kind = "sample" if self.encoding == "array" else "image"
        size = f"{format_things(samples, kind)}{shape}, {format_bytes(self.pack_bytes)}"
        size += f" in {self.shards} shards" if self.shards > 1 else ""
        if self.reused:
            found = f"Already packed at {str(self.path)!r}: {size}"
            again = (found, "; use ", option("overwrite", True), " to pack the source again")
            return "\n".join(
                [self._words.render(again), *count_omitted(self.left_out, self.bad), *self._inferred_lines()]
            )
        rate = format_rate(samples / max(self.seconds, 1e-9), f"{kind}s")
        notes = f", {format_things(self.retries, 'retry')}" if self.retries else ""
        notes += f", {format_things(self.lost, 'lost attempt')}" if self.lost else ""
        text = f"Packed {size} to {str(self.path)!r} in {format_seconds(self.seconds)} ({rate}{notes})"
        lines = [text, *count_omitted(self.left_out, self.bad)]
        lines += [f"Encoding {self.encoding}: {self.note}"] if self.note else []
        return "\n".join([*lines, *self._inferred_lines()])

    def _inferred_lines(self) -> list[str]:
        return [f"Inferred: {self._words.render(name_inferred(self.inferred))}"] if self.inferred else []

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("path", str(self.path)),
            ("source", self.source),
            ("splits", ", ".join(f"{split} {format_count(count)}" for split, count in self.splits.items())),
            ("classes", f"{len(self.classes)}: {', '.join(self.classes[:12])}" if self.classes else "none"),
            ("encoding", self.encoding),
            ("inferred", self._words.render(name_inferred(self.inferred)) or "nothing"),
            ("made by", self.made_by or "an earlier call"),
            *self._attempt_rows(),
            ("left out", _listed(self.left_out)),
            ("bad", _listed(self.bad)),
        ]

    def _attempt_rows(self) -> list[tuple[str, ...]]:
        if not self.attempts:
            return []
        others = f"{format_count(self.lost)} lost, {format_things(self.duplicates, 'duplicate')}"
        return [("attempts", f"{format_count(self.attempts)}: {others}")]


def _listed(files: tuple[tuple[str, str], ...]) -> str:
    more = f"; and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    return "; ".join(f"{name!r} ({why})" for name, why in files[:_LISTED]) + more or "none"
