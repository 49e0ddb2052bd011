"""`describe_source()` counts the images in a source and finds its classes, splits and image sizes, without a copy."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from colabkit.foundation import BadImage, ColabkitError, Report, format_count, format_things
from colabkit.packs.decode.images import image_size
from colabkit.packs.labels.label_values import LabelKind
from colabkit.packs.labels.labelling import LabelledSamples, label_samples
from colabkit.packs.packing.source_opening import opened_source
from colabkit.storage import (
    FSSPEC,
    STALLED_S,
    AnySource,
    ArchiveSource,
    FolderSource,
    Item,
    PathTable,
    RangeSource,
    Retries,
    SequentialSource,
    Source,
    concurrently,
    identity_of,
    open_samples,
    read_item,
)

_LOOKED = 32
"""Number of images whose headers are read."""

_HEAD_BYTES = 64 << 10
# Maximum size of a file that is read completely because its header is not in the first bytes.
_WHOLE_BYTES = 8 << 20
_ALIKE = 0.1
_NAMES = 12


@dataclass(frozen=True, repr=False)
class SourceSummary(Report):
    """The result of `describe_source()`.

    Attributes:
        source: name of the source, without secrets.
        samples: number of samples; None if the source must be copied before its contents are known.
        kind: kind of the labels: `"class"`, `"multilabel"`, `"regression"` or `"none"`.
        classes: names of the classes, or of several labels or targets.
        splits: number of samples in each split.
        median_size: median height and width, in pixels, of the images whose headers were read; None if unknown.
        sizes: height and width of each of these images, sorted.
        unreadable: sampled files that are not readable images, with the reason.
        left_out: number of files that are not samples or are missing.
        inferred: inferred values, such as the classes and the splits, by the option that overrides each.
    """

    source: str
    samples: int | None
    kind: LabelKind = "none"
    classes: tuple[str, ...] = ()
    splits: Mapping[str, int] | None = None
    median_size: tuple[int, int] | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    left_out: int = 0
    inferred: Mapping[str, str] | None = None

    @property
    def is_good(self) -> bool:
        """Whether all sampled files are readable images."""
        return not self.unreadable

    @property
    def has_one_size(self) -> bool:
        """Whether all images whose headers were read have the same size."""
        return len(set(self.sizes)) == 1

    @property
    def has_one_shape(self) -> bool:
        """Whether at least 90% of these images have nearly the same height-to-width ratio."""
        if self.median_size is None:
            return False
        ratios = [height / width for height, width in self.sizes]
        middle = statistics.median(ratios)
        return sum(abs(ratio / middle - 1) <= _ALIKE for ratio in ratios) >= 0.9 * len(ratios)

    def _summary(self) -> str:
        if self.samples is None:
            return f"{self.source!r} must be copied before its contents are known"
        parts = [f"{format_count(self.samples)} image{'' if self.samples == 1 else 's'}", self._labels]
        if self.median_size is not None:
            height, width = self.median_size
            parts.append(f"{'' if self.has_one_size else 'median '}{width}×{height}")
        parts.append(self._splits)
        if self.unreadable:
            looked = format_things(len(self.sizes) + len(self.unreadable), "sampled file")
            parts.append(f"{len(self.unreadable)} of {looked} unreadable")
        return ", ".join(parts)

    @property
    def _labels(self) -> str:
        if self.kind == "class":
            return format_things(len(self.classes), "class", "classes")
        if self.kind == "multilabel":
            return f"{format_things(len(self.classes), 'label')}, several per image"
        return "numbers as labels" if self.kind == "regression" else "no labels"

    @property
    def _splits(self) -> str:
        names = list(self.splits or {})
        if names == ["train"] or not names:
            return "not split yet"
        origin = (self.inferred or {}).get("splits", "")
        return f"{'/'.join(names)} {'folders' if 'folder' in origin else 'splits'} found"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [("source", self.source)]
        if self.classes:
            more = len(self.classes) - _NAMES
            rows.append(("classes", ", ".join(self.classes[:_NAMES]) + (f" and {more} more" if more > 0 else "")))
        if self.splits:
            rows.append(("splits", ", ".join(f"{name} {format_count(count)}" for name, count in self.splits.items())))
        rows += [("unreadable", f"{name!r}: {reason}") for name, reason in self.unreadable]
        return [*rows, *([("left out", format_things(self.left_out, "file"))] if self.left_out else [])]


def describe_source(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | PathTable | Source,
    *,
    labels: str | Sequence[str] | Callable[[str], Any] | None = "auto",
    splits: str | Mapping[str, float] | Callable[[str], str] | None = None,
    path_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    copies: bool = False,
    progress: bool = True,
) -> SourceSummary:
    """Return the number of images in a source, its classes and splits, and the sizes of its images.

    This lists the names of the files and reads the headers of up to 32 images, so it takes about a second even on a
    slow mount. The contents of web addresses, of remote record files, and of archives without a directory are unknown
    until they are copied.

    Args:
        source: any source of `prepare()`.
        labels: as in `prepare()`.
        splits: as in `prepare()`.
        path_column: as in `prepare()`.
        root: as in `prepare()`.
        copies: whether to copy a source whose contents are otherwise unknown.
        progress: show a progress bar while copying.

    Raises:
        ColabkitError: any error that `prepare()` raises for a source that is missing or has no usable labels.
    """
    as_table: dict[str, Any] = {"path_column": path_column, "root": root, "skips_missing": True}
    if copies:
        opened = opened_source(source, "", as_table, overwrite=False, progress=progress)
    else:
        found = _opened_in_place(source, as_table)
        if isinstance(found, str):
            return SourceSummary(found, None)
        opened = found
    with closing(opened):
        # On a mount, reading a file's size takes a request.
        listing = opened.list(has_sizes=not opened.can_hang) if isinstance(opened, FolderSource) else opened.list()
        labelled = label_samples(listing, opened.name, labels=labels, splits=splits)
        sizes, unreadable = _looked_at(opened, labelled)
    median = tuple(round(statistics.median(sides)) for sides in zip(*sizes, strict=True)) if sizes else None
    return SourceSummary(
        source=opened.name,
        samples=len(labelled.items),
        kind=labelled.kind,
        classes=labelled.classes,
        splits={name: len(numbers) for name, numbers in labelled.splits.items()},
        median_size=median,
        sizes=tuple(sorted(sizes)),
        unreadable=unreadable,
        left_out=len(labelled.left_out),
        inferred=labelled.inferred,
    )


def _opened_in_place(source: AnySource, as_table: Mapping[str, Any]) -> Source | str:
    """Open a source that can be inspected without copying it; return the name of any other source."""
    if not isinstance(source, Source):
        name, _, address = identity_of(source, extract=False)
        if address is not None and address.kind != FSSPEC:
            return name
    opened = source if isinstance(source, Source) else open_samples(source, **as_table)
    has_no_directory = isinstance(opened, ArchiveSource) and not opened.has_directory
    if opened.can_hang and (has_no_directory or isinstance(opened, RangeSource)):
        opened.close()
        return opened.name
    return opened


def _looked_at(source: Source, labelled: LabelledSamples) -> tuple[list[tuple[int, int]], tuple[tuple[str, str], ...]]:
    """Return the heights and widths of sampled images, and the sampled files that are not images, with reasons."""
    some = [
        item for item in labelled.items[:: max(1, len(labelled.items) // _LOOKED)] if not item.path.endswith(".npy")
    ]
    sizes: list[tuple[int, int]] = []
    unreadable: list[tuple[str, str]] = []
    for path, size, reason in _sizes_of(source, some[:_LOOKED]):
        if size is not None:
            sizes.append(size)
        elif reason:
            unreadable.append((path, reason))
    return sizes, tuple(sorted(unreadable))


def _sizes_of(source: Source, some: Sequence[Item]) -> Iterator[tuple[str, tuple[int, int] | None, str]]:
    if isinstance(source, SequentialSource) and source.is_sequential:
        walked = itertools.islice(source.walk({item.path for item in some}), _LOOKED)
        yield from (_size_in(item, file.read(item.size)) for item, file in walked)
        return

    def look(item: Item) -> tuple[str, tuple[int, int] | None, str]:
        try:
            sized = _with_size(source, item)
            with source.open(sized) as file:
                head = file.read(min(sized.size, _HEAD_BYTES))
            found = _size_in(sized, head)
            if found[1] is None and len(head) < sized.size <= _WHOLE_BYTES:
                return _size_in(sized, read_item(source, sized, Retries()))
        except (OSError, ColabkitError) as error:
            return item.path, None, str(error).splitlines()[0]
        # The header of a large file may be longer than the first bytes.
        return found if found[1] is not None or len(head) == sized.size else (item.path, None, "")

    yield from concurrently(look, some, "auto", stalled_s=STALLED_S if source.can_hang else None)


def _size_in(item: Item, data: bytes) -> tuple[str, tuple[int, int] | None, str]:
    try:
        return item.path, image_size(data), ""
    except BadImage as error:
        return item.path, None, str(error)


def _with_size(source: Source, item: Item) -> Item:
    """Return an item of a folder with its size and time, which the listing of a mount omits."""
    if not isinstance(source, FolderSource) or not source.can_hang:
        return item
    return Item.of(item.path, os.stat(source.path / item.path))
