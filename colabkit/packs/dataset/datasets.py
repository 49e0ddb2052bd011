"""Map-style torch data sets: a split of a pack, and image files that are not packed."""

from __future__ import annotations

import copy
import hashlib
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from colabkit.foundation import (
    BadImage,
    BadSource,
    InvalidOption,
    MissingSplit,
    cannot,
    check_one_of,
    check_whole_number,
    format_count,
    format_things,
)
from colabkit.packs.dataset.samples import (
    ImageFiles,
    OpenSplit,
    convert_pixels,
    index_error,
    resolve_indices,
    stack_samples,
)
from colabkit.packs.decode.images import decode_image
from colabkit.packs.format.layout import LABELS, SAMPLES, Indices
from colabkit.packs.labels.labelling import Labels, Splits, label_samples
from colabkit.packs.labels.splits import fold_numbers, split_shares, strata_of
from colabkit.storage import AnySource, Item, Retries, SequentialSource, Source, answer_of, open_source, read_item


class LabelledDataset(Dataset[Any]):
    """What data sets of samples with labels have in common.

    Attributes:
        split_name: the split that it is, or is a view of.
        labels: `int64 [N]` for classes, `uint8 [N, K]` for several labels, `float32 [N]` or `[N, K]` for regression;
            None if there are none.
        classes: class names; a label is an index into them.
        fields: names of what a sample consists of, in order.
        fingerprint: tells these samples from all others.
    """

    split_name: str
    labels: Tensor | None
    classes: tuple[str, ...]
    fields: tuple[str, ...]
    fingerprint: str
    _is_class: bool
    _count: int

    def __len__(self) -> int:
        return self._count

    def _place(self, index: Any) -> int:
        """Return an index as one from 0; raises `TypeError` for what is no integer, `IndexError` beyond the end."""
        place = operator.index(index)
        if not -self._count <= place < self._count:
            raise IndexError(f"sample {place} of {self._count}")
        return place % self._count

    def _label(self, place: int) -> Any:
        """Return a label that may be written to: an `int` for classes, else a tensor."""
        assert self.labels is not None
        return self.labels[place].item() if self._is_class else self.labels[place].clone()


class PackedDataset(LabelledDataset):
    """One split of a pack, or a view of it: `dataset[i]` is an image, `uint8 [C, H, W]`, and its label.

    An index is an integer, which gives one sample, or a slice or an array of integers or bools, which gives a batch.

    - `X` is a tensor of its own: images `uint8 [C, H, W]`, other arrays in their stored shape and dtype. The bytes of
      an image file are decoded.
    - `Y` is an `int` for classes, a tensor for several labels or for regression; without labels it is left out.
    - Further fields follow in the pack's order: tensors, `str` for text, `bytes`. A sample of one field is that field.
    - In a batch each field is one tensor, `[B, ...]`, or a list where samples differ in shape, of text and of bytes.

    A sample read by an integer is checked against its CRC; so is every one of a batch that is decoded or holds text.
    Batches of rows are not: that would take as long as reading them, and `verify()` checks them all.

    It works in a plain `DataLoader`; `colabkit.Loader` reads rows at memory speed. Any number of threads and processes
    may read it. Pickled, it takes its path along and opens the file again.

    Attributes:
        info: description of the pack.
        split_name, labels, classes, fields: as of `LabelledDataset`.
        fingerprint: tells this split of this pack, and this view of it, from all others.
        numbers: rows of the split that a view has, `int64 [N]`; None for the whole split.
    """

    def __init__(self, opened: OpenSplit, numbers: Indices | None = None) -> None:
        self._opened = opened
        self._numbers = numbers
        self.info = opened.info
        self.split_name = opened.split
        self.classes: tuple[str, ...] = tuple(opened.info.meta["classes"])
        self.fields: tuple[str, ...] = tuple(opened.info.fields)
        self.fingerprint = f"{opened.info.seal[:32]}/{opened.split}"
        self.labels = opened.labels
        self.numbers: Tensor | None = None
        if numbers is not None:
            self.fingerprint += f"/{hashlib.sha256(numbers.tobytes()).hexdigest()[:16]}"
            self.numbers = torch.from_numpy(numbers)
            self.labels = None if opened.labels is None else opened.labels[self.numbers]
        self._label_place = self.fields.index(LABELS) if LABELS in self.fields else len(self.fields)
        self._is_class = opened.info.meta["label_kind"] == "class"
        self._count = opened.info.count(opened.split) if numbers is None else len(numbers)

    @property
    def rows(self) -> Tensor:
        """Every sample as stored, `[N, ...]`, as a tensor over the read-only memory map: never write to it.

        Raises:
            InvalidOption: if there is no such map: a view, a pack of shards, files that have to be decoded.
        """
        maps = self._opened.samples.maps(self._opened.samples.names[0])
        if self._numbers is not None or maps is None or len(maps) != 1:
            what = "a view" if self._numbers is not None else "samples that lie in shards or are decoded"
            next_step = "Index the data set, as in dataset[:100]"
            raise InvalidOption(cannot("give all rows as one tensor", what, "one raw file", next_step))
        return _map_tensor(maps[0])

    def maps(self, name: str = SAMPLES) -> tuple[Tensor, ...] | None:
        """Return a field's rows of the whole split as stored, `[N, ...]`, a tensor over each file's read-only map.

        None if samples have to be decoded, or be read through HDF5.
        """
        maps = self._opened.samples.maps(name)
        return None if maps is None else tuple(map(_map_tensor, maps))

    def mapped_files(self, name: str = SAMPLES) -> tuple[tuple[Path, int], ...] | None:
        """Return for each map of a field its file and where in it the rows begin; None if one is no map of a file."""
        found: list[tuple[Path, int]] = []
        for array in self._opened.samples.maps(name) or ():
            mapped = array if isinstance(array, np.memmap) else array.base
            if not isinstance(mapped, np.memmap) or not mapped.filename:
                return None
            found.append((Path(mapped.filename), mapped.offset))
        return tuple(found) or None

    def column(self, name: str, numbers: Indices) -> Tensor | list[Any]:
        """Return one field of some samples: a tensor, or a list if samples may differ in shape; see `stack_samples`.

        Args:
            name: one of `fields`, but not the labels.
            numbers: samples, `int64 [B]`, from 0.
        """
        return self._opened.samples.column(name, self._rows_of(numbers))

    def image_files(self) -> ImageFiles | None:
        """Return what X is if it holds the bytes of image files, which have to be decoded; else None."""
        return self._opened.samples.image_files()

    def encoded(self, number: int) -> bytes:
        """Return the bytes of a sample's image file, checked; empty for one that was bad when it was packed.

        Raises:
            Corrupt: if they are not the sealed ones.
        """
        return self._opened.samples.encoded(number if self._numbers is None else self._numbers.item(number))

    def name_of(self, number: int) -> str:
        """Return what to call a sample in a message."""
        row = number if self._numbers is None else self._numbers.item(number)
        return f"{self.split_name}[{row}] of {str(self.info.path)!r}"

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice | Sequence) and getattr(index, "ndim", 0) == 0:
            return self._sample(index)
        chosen = resolve_indices(index, len(self))
        fields = [stack_samples(field) for field in self._opened.samples.many(self._rows_of(chosen))]
        if self.labels is not None:
            fields.insert(self._label_place, self.labels[torch.from_numpy(chosen)])
        return tuple(fields) if len(fields) > 1 else fields[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples at once, as `DataLoader` asks for them: rows are gathered in one pass."""
        chosen = resolve_indices(indices, len(self))
        fields: list[Iterable[Any]] = list(self._opened.samples.many(self._rows_of(chosen)))
        if self.labels is not None:
            labels = self.labels[torch.from_numpy(chosen)]
            fields.insert(self._label_place, labels.tolist() if self._is_class else labels)
        return list(zip(*fields, strict=True)) if len(fields) > 1 else list(fields[0])

    def subset(self, indices: slice | Sequence[int] | npt.NDArray[Any] | Tensor) -> PackedDataset:
        """Return a view of some samples, in the order given; nothing is copied but the numbers.

        Args:
            indices: integers, as any splitter of scikit-learn gives them, bools for all samples, or a slice.

        Raises:
            InvalidOption: if they are something else.
            IndexError: if one of them is no sample.
        """
        return PackedDataset(self._opened, self._rows_of(resolve_indices(indices, len(self))))

    @overload
    def split(
        self, shares: Mapping[str, float], *, seed: int = 0, stratify: bool = True
    ) -> dict[str, PackedDataset]: ...
    @overload
    def split(
        self, shares: Sequence[float] = (0.8, 0.2), *, seed: int = 0, stratify: bool = True
    ) -> tuple[PackedDataset, ...]: ...
    def split(
        self, shares: Mapping[str, float] | Sequence[float] = (0.8, 0.2), *, seed: int = 0, stratify: bool = True
    ) -> dict[str, PackedDataset] | tuple[PackedDataset, ...]:
        """Return views that share out all samples, as in `training, validation = data.split((0.9, 0.1))`.

        Args:
            shares: each view's share, in total 1; with names, as in `{"train": 0.9, "dev": 0.1}`, they are
                a dict.
            seed: of the order in which samples are dealt.
            stratify: keep the shares of the classes in each part, of combinations of several labels, or of bins of a
                number.

        Raises:
            InvalidOption: if the shares do not add up to 1, or leave a view without samples.
        """
        if not isinstance(shares, Mapping | Sequence) or isinstance(shares, str) or not shares:
            next_step = "Use data.split((0.8, 0.2)), for example"
            raise InvalidOption(cannot("split", f"shares={shares!r}", "shares of all parts", next_step))
        named = shares if isinstance(shares, Mapping) else {str(place): share for place, share in enumerate(shares)}
        dealt = split_shares(None, len(self), named, seed)  # which also checks the shares
        if stratify:
            dealt = split_shares(self._strata(named), len(self), named, seed)
        views = {name: self.subset(numbers) for name, numbers in dealt.items()}
        return views if isinstance(shares, Mapping) else tuple(views.values())

    def fold(
        self,
        k: int,
        n: int,
        *,
        stratify: bool = True,
        groups: str | Sequence[Any] | npt.NDArray[Any] | None = None,
        seed: int = 0,
    ) -> tuple[PackedDataset, PackedDataset]:
        """Return views for training and for testing: fold `k` of `n` is held out, the others train.

        The held-out views of all folds together are every sample once.

        Args:
            k: the fold, from 0.
            n: how many folds.
            stratify: keep the shares of the labels in each fold, as `split` does.
            groups: which samples belong together and stay in one fold, as those of one patient: one value for each
                sample, or the name of a field.
            seed: of the order in which samples are dealt.

        Raises:
            InvalidOption: if there are no such folds, or fewer samples or groups than folds.
        """
        act = f"make fold {k!r} of {n!r}"
        check_whole_number(act, "n", n, 2)
        check_whole_number(act, "k", k, 0, n - 1)
        grouped = self._field(act, groups) if isinstance(groups, str) else groups
        strata = self._strata({"held out": 1 / n}) if stratify else None
        numbers = fold_numbers(len(self), n, strata=strata, groups=grouped, seed=seed)
        return self.subset(numbers != k), self.subset(numbers == k)

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._opened.reopen, self._numbers)

    def __repr__(self) -> str:
        meta = self.info.meta
        shape = f" {'x'.join(map(str, meta['sample_shape']))}" if meta.get("sample_shape") else ""
        what = "images" if self.info.fields[self.fields[0]].content == "image" else "samples"
        classes = f", {format_things(len(self.classes), 'class')}" if self.classes else ""
        count, whole = format_count(len(self)), format_count(self.info.count(self.split_name))
        size = count if self._numbers is None else f"{count} of {whole}"
        return f"PackedDataset {self.split_name!r}: {size} {what}{shape}{classes}"

    def _sample(self, index: Any) -> Any:
        try:
            place = self._place(index)
        except TypeError:
            raise index_error(index, len(self)) from None
        fields = self._opened.samples.one(place if self._numbers is None else self._numbers.item(place))
        if self.labels is None:
            return fields if len(fields) > 1 else fields[0]
        return *fields[: self._label_place], self._label(place), *fields[self._label_place :]

    def _rows_of(self, chosen: Indices) -> Indices:
        """Return the rows of the split that samples of this view lie in."""
        return chosen if self._numbers is None else self._numbers[chosen]

    def _strata(self, shares: Mapping[str, float]) -> Indices | None:
        return strata_of(self.info.meta["label_kind"], None if self.labels is None else self.labels.numpy(), shares)

    def _field(self, act: str, name: str) -> npt.NDArray[Any]:
        """Return one field of all samples."""
        if name == LABELS and self.labels is not None:
            return self.labels.numpy()
        if name not in self._opened.samples.names:
            needed = f"one of {', '.join(self.fields)}"
            raise InvalidOption(cannot(act, f"no field {name!r}", needed, "Name one, or give an array"))
        return np.asarray(self._opened.samples.column(name, self._rows_of(np.arange(len(self)))))


class FileDataset(LabelledDataset):
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
        split_name, labels, classes, fields: as of `LabelledDataset`.
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
        check_one_of(act, "channels", channels, (1, 3), "Use 3 for RGB, 1 for luminance")
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
        values = labelled.values
        labels_of = None if values is None else torch.from_numpy(values[numbers])
        self.fields = (SAMPLES,) if labels_of is None else (SAMPLES, LABELS)
        self._set_items(tuple(labelled.items[number] for number in numbers.tolist()), labels_of)

    def _set_items(self, items: tuple[Item, ...], labels: Tensor | None) -> None:
        self._items, self._count, self.labels = items, len(items), labels
        # No times, and no place: training resumes with files that were copied again since.
        about = "".join(f"{item.path}\0{item.size}\0" for item in items).encode("utf-8", "surrogateescape")
        stored = b"" if labels is None else labels.numpy().tobytes()
        self.fingerprint = f"files/{hashlib.sha256(about + stored).hexdigest()[:32]}"

    def __getitem__(self, index: int) -> Any:
        place = self._place(index)
        try:
            pixels = decode_image(self.encoded(place), self._channels)
        except BadImage as error:
            next_step = "Remove or repair this file"
            raise BadImage(cannot(f"decode {self.name_of(place)}", str(error), "an image", next_step)) from error
        image = convert_pixels(pixels)
        return image if self.labels is None else (image, self._label(place))

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
        items = tuple(self._items[number] for number in numbers.tolist())
        view._set_items(items, None if self.labels is None else self.labels[torch.from_numpy(numbers)])  # noqa: SLF001
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


def _map_tensor(array: npt.NDArray[Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _reopen(reopen: partial[OpenSplit], numbers: Indices | None) -> PackedDataset:
    """Return a data set that was pickled."""
    return PackedDataset(reopen(), numbers)
