"""Image files that are not packed, as a map-style PyTorch dataset."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from colabkit.foundation import (
    PYTHON,
    BadImage,
    BadSource,
    call,
    cannot,
    check_one_of,
    checked_call,
    format_things,
)
from colabkit.packs.dataset.columns import ImageFiles, convert_pixels
from colabkit.packs.dataset.datasets import LabelledDataset
from colabkit.packs.decode.images import decode_image
from colabkit.packs.format.layout import LABELS, SAMPLES, Indices, find_split, name_inferred
from colabkit.packs.labels.labelling import label_samples
from colabkit.packs.labels.sample_files import check_complete
from colabkit.packs.labels.splits import missing_split
from colabkit.storage import Item, PathTable, Retries, SequentialSource, Source, answer_of, open_source, read_item


class FileDataset(LabelledDataset):
    """Image files that are not packed: `dataset[i]` is a decoded image, `uint8 [C, H, W]`, and its label.

    The source is listed once. With a remote source, `Loader` reads many files ahead and decodes them in threads; with
    `size=`, it caches decoded images if there is room, so later epochs read fewer files or none. For repeated training,
    use `pack()` instead.

    Args:
        source: a folder, a zip archive, a table of paths (DataFrame, CSV, list), or a folder in a bucket.
        split: the split to read: `train`, `val` (also named `valid` or `dev`) or `test`.
        labels: as in `pack()`: `"auto"`, a column, several columns, a function of the path, or None.
        task: as in `pack()`: `"classes"`, `"multilabel"`, `"regression"`, or `"auto"` to infer it from the labels.
        renumber: as in `pack()`: number the occurring classes from 0.
        splits: as in `pack()`: a column, shares such as `"train=0.8,test=0.2"`, a function of the path, or None for the
            source's splits.
        path_column: as in `pack()`: the column of a table that holds the paths.
        root: as in `pack()`: the folder of the relative paths in a table.
        seed: seed for assigning samples to splits by shares.
        on_bad: `"skip"` skips table rows without a path, and those whose files are missing; `"raise"` raises an error
            for them.
        channels: 3 for RGB, 1 for luminance.

    Raises:
        SourceMissing: if the source, or a file that a table lists, does not exist.
        BadSource: if no samples, labels or splits are found, or the archive does not support random access.
        BadArchive: if the archive is damaged.
        MissingSplit: if the split does not exist.
        InvalidOption: if an option is invalid.

    Attributes:
        source: the source of the files.
        split_name, labels, classes, fields: see `LabelledDataset`.
        left_out: files that are missing or are not samples, with the reason.
        inferred: inferred values, such as the task, by the argument that overrides each.
        fingerprint: hash of the files' relative paths, sizes and labels; a copy of the files has the same fingerprint.

    Example:
        >>> import colabkit
        >>> staged = colabkit.stage("samples:digits", to="digits")
        >>> data = colabkit.FileDataset(staged.path)
        >>> image, label = data[0]
        >>> len(data), image.shape, label
        (1797, torch.Size([3, 8, 8]), 0)
    """

    @checked_call(**dict.fromkeys(("transform", "transforms", "target_transform"), "Pass transform= to the Loader"))
    def __init__(
        self,
        source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | PathTable | Source,
        *,
        split: str = "train",
        labels: str | Sequence[str] | Callable[[str], Any] | None = "auto",
        task: Literal["auto", "classes", "multilabel", "regression"] = "auto",
        renumber: bool = False,
        splits: str | Mapping[str, float] | Callable[[str], str] | None = None,
        path_column: str | None = None,
        root: str | os.PathLike[str] | None = None,
        seed: int = 0,
        on_bad: Literal["raise", "skip"] = "raise",
        channels: int = 3,
    ) -> None:
        self.source: Source = open_source(source, path_column=path_column, root=root, skips_missing=on_bad == "skip")
        act = f"read {self.source.name!r} file by file"
        check_one_of(act, "on_bad", on_bad, ("raise", "skip"))
        check_one_of(act, "channels", channels, (1, 3), "Use 3 for RGB, 1 for luminance")
        if isinstance(self.source, SequentialSource) and self.source.is_sequential:
            found, expected = "the archive can only be read from start to end", "files that can be read in any order"
            next_step = ("Pack it with ", call("pack"), ", or extract it first with ", call("stage"))
            raise BadSource(cannot(act, found, expected, next_step))
        check_complete(act, self.source, labels)
        labelled = label_samples(
            self.source.list(),
            self.source.name,
            labels=labels,
            task=task,
            renumber=renumber,
            splits=splits,
            seed=seed,
        )
        name = find_split(labelled.splits, split)
        if name is None:
            raise missing_split(act, split, labelled.splits)
        numbers = labelled.splits[name]
        self.split_name = name
        self.classes = labelled.classes
        self.inferred = labelled.inferred
        self.left_out = labelled.left_out
        self._channels = channels
        self._is_class = labelled.kind == "class"
        values = labelled.values
        labels_of = None if values is None else torch.from_numpy(values[numbers])
        self.fields = (SAMPLES,) if labels_of is None else (SAMPLES, LABELS)
        self._set_items(tuple(labelled.items[number] for number in numbers.tolist()), labels_of)

    def _set_items(self, items: tuple[Item, ...], labels: Tensor | None) -> None:
        self._items, self._count, self.labels = items, len(items), labels
        # Omit times and location, so training can resume with a new copy of the files.
        about = "".join(f"{item.path}\0{item.size}\0" for item in items).encode("utf-8", "surrogateescape")
        stored = b"" if labels is None else labels.numpy().tobytes()
        self.fingerprint = f"files/{hashlib.sha256(about + stored).hexdigest()[:32]}"

    def __getitem__(self, index: int) -> Any:
        place = self._place(index)
        try:
            pixels = decode_image(self.encoded(place), self._channels)
        except BadImage as bad:
            act = f"decode {self.name_of(place)}"
            raise BadImage(cannot(act, str(bad), "", "Repair or remove this file")) from bad.__cause__
        image = convert_pixels(pixels)
        return image if self.labels is None else (image, self._label(place))

    def __repr__(self) -> str:
        classes = f", {format_things(len(self.classes), 'class')}" if self.classes else ""
        about = f"FileDataset {self.split_name!r} of {self.source.name!r}: {format_things(len(self), 'file')}{classes}"
        return f"{about}\nInferred: {PYTHON.render(name_inferred(self.inferred))}" if self.inferred else about

    def _view(self, numbers: Indices) -> Self:
        view = copy.copy(self)
        items = tuple(self._items[number] for number in numbers.tolist())
        view._set_items(items, None if self.labels is None else self.labels[torch.from_numpy(numbers)])  # noqa: SLF001
        return view

    def image_files(self) -> ImageFiles:
        """Return the decoding settings for the files."""
        return ImageFiles(self._channels, None)

    @property
    def names(self) -> list[str]:
        """Paths of the files in the source, in the order of the samples."""
        return [item.path for item in self._items]

    def item(self, number: int) -> Item:
        """Return a sample's file in the source."""
        return self._items[number]

    def encoded(self, number: int) -> bytes:
        """Return the bytes of a sample's file, retrying temporary errors.

        Raises:
            SourceChanged: if the file has changed since it was listed.
            BadArchive: if it is a damaged member of an archive.
            FileFailed: if it cannot be read.
            TimedOut: if the source does not respond.
        """
        return answer_of(lambda: read_item(self.source, self._items[number], Retries()), self.source.can_hang)

    def name_of(self, number: int) -> str:
        """Return the name of a sample, for messages."""
        return f"{self._items[number].path!r} of {self.source.name!r}"
