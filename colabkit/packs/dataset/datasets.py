"""The base class of map-style PyTorch datasets, and the dataset of one split of a pack."""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from colabkit.foundation import (
    InvalidOption,
    cannot,
    check_whole_number,
    checked_call,
    format_count,
    format_things,
)
from colabkit.packs.dataset.arriving import ArrivingSamples
from colabkit.packs.dataset.columns import FieldBatch, ImageFiles, stack_samples
from colabkit.packs.dataset.indices import index_error, missing_sample, resolve_indices
from colabkit.packs.dataset.open_split import OpenSplit
from colabkit.packs.dataset.remote_pack import RemotePart, RemoteSamples
from colabkit.packs.dataset.samples import MixedSamples, ShardedSamples
from colabkit.packs.format.layout import LABELS, SAMPLES, Indices, PackInfo
from colabkit.packs.labels.label_values import LabelKind
from colabkit.packs.labels.splits import fold_numbers, split_labelled, split_shares, strata_of


class LabelledDataset(Dataset[Any]):
    """Base class of datasets with labeled samples.

    Attributes:
        split_name: name of the split.
        labels: `int64 [N]` classes, `uint8 [N, K]` multi-label, `float32 [N]` or `[N, K]` regression targets, or None.
        classes: names of the classes, or of the `K` labels or targets; may be empty.
        fields: names of a sample's fields, in order.
        fingerprint: string that identifies these samples.
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
        place = operator.index(index)
        if not -self._count <= place < self._count:
            raise missing_sample(place, self._count)
        return place % self._count

    def _label(self, place: int) -> Any:
        """Return a label that is safe to modify: an `int` for classes, otherwise a copied tensor."""
        assert self.labels is not None
        return self.labels[place].item() if self._is_class else self.labels[place].clone()

    def subset(self, indices: slice | Sequence[int] | npt.NDArray[Any] | Tensor) -> Self:
        """Return a view of the given samples, in the given order; no samples are copied.

        Args:
            indices: integers, for example from a scikit-learn splitter; one bool per sample; or a slice.

        Raises:
            InvalidOption: if the indices are of any other kind.
            MissingSample: if an index is out of range.
        """
        return self._view(resolve_indices(indices, len(self)))

    def _view(self, numbers: Indices) -> Self:
        raise NotImplementedError


class PackedDataset(LabelledDataset):
    """One split of a pack, or a view of it: `dataset[i]` is a sample, such as an image `uint8 [C, H, W]` and its label.

    An integer index returns one sample. A slice, or an array of integers or bools, returns a batch.

    - `X` of images and arrays is a newly allocated tensor: images, decoded if necessary, are `uint8 [C, H, W]`; other
      arrays keep their stored shape and dtype. `X` of text or bytes is `str` or `bytes`.
    - `Y` is an `int` for classes, a tensor for multi-label and regression. It is omitted if the split has no labels.
    - Additional fields are tensors, `str` or `bytes`, in the order of `fields`. If `X` is the only field, a sample is
      the value of `X` instead of a tuple.
    - In a batch, each field is one tensor `[B, ...]`, or a list for text, bytes, and samples of different shapes.

    Each sample of a pack is checked against its CRC when this process first reads it; `verify()` checks all samples.
    Other HDF5 files have no CRCs. If a file is cut short while it is open, reading the lost part ends the process with
    the signal SIGBUS, as with any memory map; reads of samples check for this about once per second.

    A plain `DataLoader` accepts the dataset; `colabkit.Loader` reads rows at memory speed. Any number of threads and
    processes may read the dataset. A pickle contains the path instead of the samples; unpickling reopens the file.

    Attributes:
        split_name, labels, classes, fields, fingerprint: see `LabelledDataset`.
        numbers: row numbers of a view within the split, `int64 [N]`; None for the full split.

    Example:
        >>> import colabkit
        >>> packed = colabkit.pack("samples:digits", "digits.h5")
        >>> data = colabkit.open_pack("digits.h5")["train"]
        >>> images, labels = data[:4]
        >>> images.shape, labels.dtype
        (torch.Size([4, 3, 8, 8]), torch.int64)
    """

    def __init__(self, opened: OpenSplit, numbers: npt.NDArray[np.int64] | None = None) -> None:
        self._opened = opened
        self._numbers = numbers
        self.split_name = opened.split
        self.classes: tuple[str, ...] = tuple(opened.info.meta["classes"])
        self.fields: tuple[str, ...] = tuple(opened.info.fields)
        self.labels = opened.labels
        self.numbers: Tensor | None = None
        if numbers is not None:
            self.numbers = torch.from_numpy(numbers)
            self.labels = None if opened.labels is None else opened.labels[self.numbers]
        self._label_place = self.fields.index(LABELS) if LABELS in self.fields else len(self.fields)
        self._is_class = opened.info.meta["label_kind"] == "class"
        self._count = opened.info.count(opened.split) if numbers is None else len(numbers)

    @property
    def info(self) -> PackInfo:
        """Description of the pack."""
        return self._opened.info

    @cached_property
    def _view_digest(self) -> str:
        return "" if self._numbers is None else f"/{hashlib.sha256(self._numbers.tobytes()).hexdigest()[:16]}"

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """String that identifies these samples; see `is_same_data` for packs that are still being packed."""
        return f"{self.info.fingerprint}/{self.split_name}{self._view_digest}"

    @property
    def rows(self) -> Tensor:
        """`X` of all samples as stored, `[N, ...]`: a tensor over the read-only memory map. Never write to it.

        The samples are not checked against their CRCs; `verify()` does that.

        Raises:
            InvalidOption: if the dataset is a view, or its samples are in several shards or cannot be used as stored.
        """
        if (arriving := self.arriving) is not None:
            arriving.wait_for_all()
        maps = self._opened.samples.maps(self._opened.samples.names[0])
        if self._numbers is not None or maps is None or len(maps) != 1:
            unmapped = "the samples are in several shards, or must be decoded or converted"
            found = "the dataset is a view" if self._numbers is not None else unmapped
            next_step = "Index the dataset, for example dataset[:100]"
            act, expected = "return all rows as a tensor", "a full split in one file, stored as rows"
            raise InvalidOption(cannot(act, found, expected, next_step))
        return _map_tensor(maps[0])

    @property
    def remote(self) -> RemoteSamples | None:
        """The reader of the shards, if `open_pack` opened the pack with `cache`; otherwise None."""
        return self._opened.samples if isinstance(self._opened.samples, RemoteSamples) else None

    @property
    def remote_parts(self) -> list[RemotePart]:
        """The parts of the samples that are downloaded into a cache when they are needed."""
        samples = self._opened.samples
        if isinstance(samples, RemoteSamples):
            return [RemotePart(0, 0, samples, self.shard_counts())]
        parts = samples.parts if isinstance(samples, MixedSamples) else ()
        return [
            RemotePart(number, first, part, None)
            for number, (part, first) in enumerate(parts)
            if isinstance(part, RemoteSamples)
        ]

    @property
    def arriving(self) -> ArrivingSamples | None:
        """The reader of the samples, if `prepare(start="now")` is still packing them; otherwise None."""
        samples = self._opened.samples
        return samples if isinstance(samples, ArrivingSamples) and not samples.is_complete else None

    def shard_counts(self) -> dict[int, int] | None:
        """Return the number of samples in each shard, by the number of the shard, in the order of the samples.

        Returns None if the pack has no shards, or if a view mixes the samples of several shards.
        """
        samples = self._opened.samples
        return samples.counts(self._numbers) if isinstance(samples, ShardedSamples) else None

    def maps(self, name: str = SAMPLES) -> tuple[Tensor, ...] | None:
        """Return a field's rows for the full split as stored, `[N, ...]`: one tensor per file. Never write to it.

        The rows are not checked; call `check` for the samples that you use. Returns None if the field must be decoded,
        converted or read through HDF5.
        """
        maps = self._opened.samples.maps(name)
        return None if maps is None else tuple(map(_map_tensor, maps))

    def mapped_files(self, name: str = SAMPLES) -> tuple[tuple[Path, int], ...] | None:
        """Return the file and byte offset of each tensor of `maps()`; None unless all rows are memory-mapped."""
        found: list[tuple[Path, int]] = []
        for array in self._opened.samples.maps(name) or ():
            mapped = array if isinstance(array, np.memmap) else array.base
            if not isinstance(mapped, np.memmap) or not mapped.filename:
                return None
            found.append((Path(mapped.filename), mapped.offset))
        return tuple(found) or None

    def column(self, name: str, numbers: npt.NDArray[np.int64]) -> Tensor | list[Any]:
        """Return one field of several samples: a tensor, or a list for text, bytes, and values whose shapes may differ.

        Args:
            name: one of `fields`, except the labels.
            numbers: indices of the samples, `int64 [B]`.
        """
        rows = self._rows_of(numbers)
        self._opened.check(rows)
        return self._opened.samples.column(name, rows)

    def check(self, numbers: npt.NDArray[np.int64]) -> None:
        """Check samples against their CRCs, unless this process has already done so.

        Args:
            numbers: indices of the samples, `int64 [B]`.

        Raises:
            Corrupt: for the first sample that does not match its CRC.
        """
        self._opened.check(self._rows_of(numbers))

    def completed(self) -> PackedDataset:
        """Return this dataset; if it is still being packed, wait until it is complete, and open it again."""
        return self if self.arriving is None else self.reopened()

    def reopened(self) -> PackedDataset:
        """Return a dataset of the same samples with a reader of its own."""
        return _reopen(self._opened.reopen, self._numbers)

    def check_files(self) -> bool:
        """Look for changes to the files, and return whether all samples have been checked against their CRCs.

        If a file was modified in place, all samples count as unchecked.

        Raises:
            Corrupt: if a file became shorter after it was opened.
        """
        self._opened.check_files()
        is_checked = self._opened.is_checked
        return bool((is_checked if self._numbers is None else is_checked[self._numbers]).all())

    def image_files(self) -> ImageFiles | None:
        """Return the decoding settings for `X` if a pack stores it as image files; otherwise None."""
        return self._opened.samples.image_files()

    def encoded(self, number: int) -> bytes:
        """Return the bytes of a sample's image file, checked against the CRC; empty if the sample was bad when packed.

        Raises:
            Corrupt: if the bytes do not match the CRC.
        """
        return self._opened.samples.encoded(number if self._numbers is None else self._numbers.item(number))

    def name_of(self, number: int) -> str:
        """Return the name of a sample, for messages."""
        return self._opened.samples.name_of(number if self._numbers is None else self._numbers.item(number))

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice | Sequence) and getattr(index, "ndim", 0) == 0:
            return self._sample(index)
        chosen = resolve_indices(index, len(self))
        fields = [stack_samples(field) for field in self._many(chosen)]
        if self.labels is not None:
            fields.insert(self._label_place, self.labels[torch.from_numpy(chosen)])
        return tuple(fields) if len(fields) > 1 else fields[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a list of samples, read together instead of one by one; `DataLoader` calls this method."""
        chosen = resolve_indices(indices, len(self))
        fields: list[Iterable[Any]] = list(self._many(chosen))
        if self.labels is not None:
            labels = self.labels[torch.from_numpy(chosen)]
            fields.insert(self._label_place, labels.tolist() if self._is_class else labels)
        return list(zip(*fields, strict=True)) if len(fields) > 1 else list(fields[0])

    def _view(self, numbers: Indices) -> Self:
        return type(self)(self._opened, self._rows_of(numbers))

    @overload
    def split(
        self, shares: Mapping[str, float], *, seed: int = 0, stratify: bool = True
    ) -> dict[str, PackedDataset]: ...
    @overload
    def split(
        self, shares: Sequence[float] = (0.8, 0.2), *, seed: int = 0, stratify: bool = True
    ) -> tuple[PackedDataset, ...]: ...
    @checked_call()
    def split(
        self, shares: Mapping[str, float] | Sequence[float] = (0.8, 0.2), *, seed: int = 0, stratify: bool = True
    ) -> dict[str, PackedDataset] | tuple[PackedDataset, ...]:
        """Split the dataset at random into views, as in `training, validation = data.split((0.9, 0.1))`.

        Args:
            shares: share of each view, adding up to 1; a mapping such as `{"train": 0.9, "val": 0.1}` returns a dict.
            seed: seed of the shuffle.
            stratify: preserve the proportions of classes, of label combinations, or of up to ten bins of a regression
                target, which hold equally many samples each.

        Raises:
            InvalidOption: if the shares do not add up to 1, or a view would be empty.
        """
        if not isinstance(shares, Mapping | Sequence) or isinstance(shares, str) or not shares:
            example = "For example, use data.split((0.8, 0.2))"
            raise InvalidOption(cannot("split the dataset", f"shares={shares!r:.80}", "a share for each part", example))
        named = shares if isinstance(shares, Mapping) else {str(place): share for place, share in enumerate(shares)}
        # This first call also validates the shares, which the strata depend on.
        dealt = split_shares(None, len(self), named, seed)
        if stratify:
            dealt = split_labelled(*self._labels_with_kind(), len(self), named, seed)
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
        """Return a training view and a test view: fold `k` of `n` is held out for testing.

        Each sample is held out in exactly one fold.

        Args:
            k: index of the held-out fold, from 0.
            n: number of folds.
            stratify: preserve the proportions of the labels in each fold, as in `split`; with groups, approximately.
            groups: group of each sample, such as its patient, or the name of a field that holds the groups. A group is
                never divided between folds.
            seed: seed of the shuffle.

        Raises:
            InvalidOption: if `k`, `n` or `groups` is invalid, or there are fewer samples or groups than folds.
        """
        act = f"make fold {k!r} of {n!r}"
        check_whole_number(act, "n", n, 2)
        check_whole_number(act, "k", k, 0, n - 1)
        grouped = self._field(act, groups) if isinstance(groups, str) else groups
        strata = strata_of(*self._labels_with_kind(), {"held out": 1 / n}) if stratify else None
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
        fields = self._opened.one(place if self._numbers is None else self._numbers.item(place))
        if self.labels is None:
            return fields if len(fields) > 1 else fields[0]
        return *fields[: self._label_place], self._label(place), *fields[self._label_place :]

    def _many(self, chosen: Indices) -> tuple[FieldBatch, ...]:
        rows = self._rows_of(chosen)
        self._opened.check(rows)
        return self._opened.samples.many(rows)

    def _rows_of(self, chosen: Indices) -> Indices:
        return chosen if self._numbers is None else self._numbers[chosen]

    def _labels_with_kind(self) -> tuple[LabelKind, npt.NDArray[Any] | None]:
        return self.info.meta["label_kind"], None if self.labels is None else self.labels.numpy()

    def _field(self, act: str, name: str) -> npt.NDArray[Any]:
        if name == LABELS and self.labels is not None:
            return self.labels.numpy()
        if name not in self._opened.samples.names:
            expected, next_step = " or ".join(map(repr, self.fields)), "Use one of these, or an array"
            raise InvalidOption(cannot(act, f"there is no field {name!r}", expected, next_step))
        return np.asarray(self.column(name, np.arange(len(self))))


def _map_tensor(array: npt.NDArray[Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _reopen(reopen: partial[OpenSplit], numbers: Indices | None) -> PackedDataset:
    return PackedDataset(reopen(), numbers)
