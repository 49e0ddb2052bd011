"""`FileDataset`: image files as they are, in a folder, an archive or a table, as a map-style torch data set."""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from colabkit.foundation import BadImage, BadSource, InvalidOption, MissingSplit, cannot, format_things
from colabkit.packs.dataset.packed_dataset import resolve_indices
from colabkit.packs.dataset.samples import ImageFiles, convert_pixels
from colabkit.packs.decode.images import decode_image
from colabkit.packs.labels.labelling import Labels, Splits, label_samples
from colabkit.storage import AnySource, Item, Retries, SequentialSource, Source, answer_of, open_source, read_item


class FileDataset(Dataset[Any]):
    """Image files that are not packed: `dataset[i]` is an image, `uint8 [C, H, W]`, decoded, and its label.

    The source is listed once. `Loader` reads a far source many files ahead and decodes in threads; with `size=` it
    keeps what it decoded, so that later epochs read nothing. To train often, pack instead: see `pack()`.

    Args:
        source: a folder, a zip archive, a table of paths (DataFrame, CSV, list), a bucket; see `open_source`.
        split: of the source, where it has several: `train`, `dev` or `test`.
        labels: as of `pack()`: `"auto"`, a column, several columns, a function of the path, or None.
        splits: as of `pack()`: a column, shares, a function of the path, or None for what the source says.
        seed: of shares.
        channels: 3 for RGB, 1 for luminance.

    Raises:
        BadSource: if there are no samples, labels or splits to be found, or the archive can only be read from its
            front.
        MissingSplit: if there is no such split.
        InvalidOption: if an option cannot be meant.

    Attributes:
        source: where the files are.
        split_name: the split.
        labels: `int64 [N]` for classes, `uint8 [N, K]` for several labels, `float32` for regression, None for none.
        classes: class names; a label is an index into them.
        fields: what a sample consists of.
        fingerprint: tells these files, by their paths inside the source, their sizes and labels, from all others; it is
            the same for a copy of them elsewhere.
    """

    def __init__(
        self,
        source: AnySource,
        *,
        split: str = "train",
        labels: Labels = "auto",
        splits: Splits = None,
        seed: int = 0,
        channels: int = 3,
    ) -> None:
        self.source: Source = open_source(source)
        act = f"read {self.source.name!r} file by file"
        if channels not in (1, 3):
            raise InvalidOption(cannot(act, f"channels={channels!r}", "1 or 3", "Use 3 for RGB, 1 for luminance"))
        if isinstance(self.source, SequentialSource) and self.source.is_sequential:
            found = "an archive that can only be read from its front"
            needed = "files that can be read in any order"
            raise BadSource(cannot(act, found, needed, "Use pack(), or stage() it first"))
        labelled = label_samples(self.source.list(), self.source.name, labels=labels, splits=splits, seed=seed)
        if split not in labelled.splits:
            known = ", ".join(map(repr, labelled.splits))
            raise MissingSplit(cannot(act, f"no split {split!r}", f"one of {known}", "Name one of these"))
        numbers = labelled.splits[split]
        self.split_name = split
        self.classes = labelled.classes
        self._channels = channels
        self._is_class = labelled.kind == "class"
        self._items: tuple[Item, ...] = tuple(labelled.items[number] for number in numbers.tolist())
        self.labels: Tensor | None = None
        if labelled.values is not None:
            self.labels = torch.from_numpy(labelled.values[numbers])
        self.fields: tuple[str, ...] = ("X",) if self.labels is None else ("X", "Y")
        self.fingerprint = self._digest()

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"sample {place} of {len(self)}")
        place %= len(self)
        try:
            pixels = decode_image(self.encoded(place), self._channels)
        except BadImage as error:
            next_step = "Remove or repair this file"
            raise BadImage(cannot(f"decode {self.name_of(place)}", str(error), "an image", next_step)) from error
        image = convert_pixels(pixels)
        if self.labels is None:
            return image
        return image, self.labels[place].item() if self._is_class else self.labels[place].clone()

    def __repr__(self) -> str:
        classes = f", {format_things(len(self.classes), 'class')}" if self.classes else ""
        return f"FileDataset {self.split_name!r} of {self.source.name!r}: {format_things(len(self), 'file')}{classes}"

    def subset(self, indices: slice | Sequence[int] | npt.NDArray[Any] | Tensor) -> FileDataset:
        """Return a view of some samples, in the order given.

        Args:
            indices: integers, bools for all samples, or a slice.

        Raises:
            InvalidOption: if they are something else.
            IndexError: if one of them is no sample.
        """
        numbers = resolve_indices(indices, len(self))
        view = copy.copy(self)
        view._items = tuple(self._items[number] for number in numbers.tolist())  # noqa: SLF001 - its own class
        view.labels = None if self.labels is None else self.labels[torch.from_numpy(numbers)]
        view.fingerprint = view._digest()  # noqa: SLF001
        return view

    def image_files(self) -> ImageFiles:
        """Return what the files become."""
        return ImageFiles(self._channels, None)

    def item(self, number: int) -> Item:
        """Return a sample's file in the source."""
        return self._items[number]

    def encoded(self, number: int) -> bytes:
        """Return the bytes of a sample's file, tried again where that helps.

        Raises:
            SourceChanged: if it is not the file any more that was listed.
            FileFailed: if it cannot be read.
            TimedOut: if there was no answer, twice.
        """
        item = self._items[number]
        if not self.source.can_hang:
            return read_item(self.source, item, Retries())
        return answer_of(lambda: read_item(self.source, item, Retries()), can_hang=True)

    def name_of(self, number: int) -> str:
        """Return what to call a sample in a message."""
        return f"{self._items[number].path!r} of {self.source.name!r}"

    def _digest(self) -> str:
        # No times, and no place: a training goes on with files that were copied anew since.
        about = "".join(f"{item.path}\0{item.size}\0" for item in self._items).encode("utf-8", "surrogateescape")
        labels = b"" if self.labels is None else self.labels.numpy().tobytes()
        return f"files/{hashlib.sha256(about + labels).hexdigest()[:32]}"
