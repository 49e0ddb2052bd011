"""The columns (fields) from which batches are built: those of a packed split, of files, or of arrays and tensors."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import StackDataset

from colabkit.foundation import Corrupt, InvalidOption, LoaderMeters, cannot, format_things, kind_of, option
from colabkit.loading.engine.batches import BatchPlan, split_plans
from colabkit.loading.engine.gather import RowGather
from colabkit.packs import LABELS, SAMPLES, FileDataset, Indices, Pack, PackedDataset

_CHANNELS = (1, 3, 4)
# A list of at most this many arrays, each with more rows than this number, probably holds fields rather than samples.
_FEW = 4
# Interval in seconds at which the files of a pack are examined for changes during an epoch.
_LOOK_EVERY_S = 1.0
# Budgets of memory ignore fields of at most this many bytes per sample, such as class labels.
_SMALL_ROW = 256

Structure: TypeAlias = Literal["alone", "tuple", "dict"]
ImageDataset: TypeAlias = PackedDataset | FileDataset


class ColumnReader:
    """Reads samples of a field by index, for a pack whose rows cannot be memory-mapped.

    Args:
        dataset: split of the pack.
        name: name of the field.

    Attributes:
        shape: shape of a stored sample, `[H, W, C]` for images; () if samples differ in shape, or are text or bytes.
        row_bytes: size of a sample in bytes; 0 if samples differ in size.
        are_images: whether samples are images, which become `[C, H, W]`.
    """

    def __init__(self, dataset: PackedDataset, name: str) -> None:
        self._dataset = dataset
        self._name = name
        self.are_images = dataset.info.fields[name].content == "image"
        self.shape: tuple[int, ...] = ()
        self.row_bytes = 0
        # An empty batch has the shape and dtype of the samples, and reads none.
        empty = dataset.column(name, np.empty(0, np.int64))
        if isinstance(empty, Tensor):
            self.shape = tuple((empty.movedim(1, -1) if self.are_images else empty).shape[1:])
            self.row_bytes = prod(self.shape) * empty.dtype.itemsize

    def read(self, indices: Indices, is_contiguous: bool) -> Any:
        """Return samples: a tensor, or a list for text, bytes, and samples whose shapes may differ.

        Args:
            indices: indices of the samples, `int64 [B]`.
            is_contiguous: whether images become contiguous `[B, C, H, W]`.
        """
        values = self._dataset.column(self._name, indices)
        return values.contiguous() if is_contiguous and self.are_images and isinstance(values, Tensor) else values


DatasetColumn: TypeAlias = RowGather | ImageDataset | ColumnReader
"""The source of a field: rows to gather, image files to decode, or samples that a pack reads by index."""


@dataclass(frozen=True)
class DatasetColumns:
    """The columns of a dataset.

    Attributes:
        by_name: columns by name; transforms apply to the first one.
        structure: structure of batches: a single value, a tuple or a dict.
        labels: name of the column with the labels, or else of the second column; None if there is only one.
        count: number of samples.
        description: description of the dataset for the loader's `repr`.
        packed: split of a pack, whose rows are in mapped files; None for files and arrays.
        order: names of the columns in the order of batches; None for the order of `by_name`.
        name_of: function that returns the name of a sample for messages; None if samples have no names.
    """

    by_name: Mapping[str, DatasetColumn]
    structure: Structure
    labels: str | None
    count: int
    description: str
    packed: PackedDataset | None = None
    order: tuple[str, ...] | None = None
    name_of: Callable[[int], str] | None = None

    @property
    def first(self) -> DatasetColumn:
        """The column that transforms apply to."""
        return next(iter(self.by_name.values()))

    @property
    def rows(self) -> RowGather | None:
        """The first column, if it holds rows to gather."""
        return self.first if isinstance(self.first, RowGather) else None

    @property
    def stored(self) -> RowGather | ColumnReader | None:
        """The first column, unless it holds image files to decode."""
        return None if isinstance(self.first, ImageDataset) else self.first

    @property
    def images(self) -> ImageDataset | None:
        """The first column, if it holds image files to decode."""
        return self.first if isinstance(self.first, ImageDataset) else None

    @property
    def other_bytes(self) -> int:
        """Size in bytes of a sample's other fields, such as a mask, as far as it is known and not small."""
        others = [*self.by_name.values()][1:]
        sizes = [column.row_bytes for column in others if isinstance(column, RowGather | ColumnReader)]
        return sum(size for size in sizes if size > _SMALL_ROW)

    @property
    def label_place(self) -> int | None:
        """Index of the labels among the columns; None if there are none."""
        return None if self.labels is None else [*self.by_name].index(self.labels)

    def are_checked(self) -> bool:
        """Look for changes to a pack's files; return False if its samples must be checked against their CRCs.

        Labels were checked when the pack was opened, and image files are checked when they are decoded.

        Raises:
            Corrupt: if a file became shorter.
        """
        are_checked = self.packed is None or self.packed.check_files()
        return are_checked or self.images is not None or all(name == LABELS for name in self.by_name)

    def checked(self, plans: Iterable[BatchPlan], most_batches: int, counts: LoaderMeters) -> Iterator[BatchPlan]:
        """Yield plans after checking their samples; split those with unchecked samples into smaller plans.

        Args:
            plans: plans of the batches.
            most_batches: largest number of batches in a plan with unchecked samples.
            counts: meters of the loader.

        Raises:
            Corrupt: for a damaged sample, after all batches before it; or if a file of the pack became shorter.
        """
        are_checked, look_at_s = False, 0.0
        for plan in plans:
            if time.monotonic() >= look_at_s:
                are_checked = self.are_checked()
                look_at_s = time.monotonic() + _LOOK_EVERY_S
            if are_checked:
                yield plan
                continue
            for some in split_plans([plan], most_batches):
                try:
                    self.check(some.indices, counts)
                except Corrupt:
                    for number in range(len(some.sizes)):
                        batch = some.slice(number, number + 1)
                        self.check(batch.indices, counts)
                        yield batch
                else:
                    yield some

    def check(self, indices: Indices, counts: LoaderMeters) -> None:
        """Check samples of a pack; count the time as gathering, because the first read loads them from the disk."""
        if self.packed is not None:
            with counts.busy("gather", 0, 0):
                self.packed.check(indices)

    def batch(self, values: Sequence[Any]) -> Any:
        """Arrange the values of the columns in the structure of batches."""
        names: Iterable[str] = self.by_name
        if self.order is not None:
            named = dict(zip(names, values, strict=True))
            names, values = self.order, [named[name] for name in self.order]
        if self.structure == "dict":
            return dict(zip(names, values, strict=True))
        return tuple(values) if self.structure == "tuple" else values[0]


def columns_of(act: str, dataset: Any, fields: Sequence[str] | None, as_dict: bool) -> DatasetColumns | None:
    """Return the columns of a dataset; None for a dataset that can only be loaded sample by sample.

    Args:
        act: verb and object of error messages.
        dataset: a `PackedDataset`, a `FileDataset`, a tensor, an array, a tuple or dict of them, or a `TensorDataset`;
            any other dataset gives None.
        fields: names of the columns to keep; None for all.
        as_dict: whether batches are dicts.

    Raises:
        InvalidOption: if a field does not exist, arrays differ in length, or an array is not supported.
    """
    name_of = None
    if _gives_samples_of(dataset, PackedDataset, FileDataset):
        name_of, columns = dataset.name_of, _stored(dataset)
        structure: Structure = "tuple" if len(columns) > 1 else "alone"
        description, count = repr(dataset), len(dataset)
        labels = None if dataset.labels is None else LABELS
    else:
        found = _arrays(act, dataset)
        if found is None:
            return None
        arrays, structure = found
        columns = {name: _row_gather(act, name, value) for name, value in arrays.items()}
        count = _length(act, arrays)
        description = f"arrays of {format_things(count, 'sample')}"
        labels = [*arrays][1] if len(arrays) > 1 else None
    if fields is not None:
        columns = _chosen(act, columns, fields)
        structure = "tuple" if len(columns) > 1 else "alone"
    # Without labels, transforms of labels apply to the second field, such as masks.
    if labels not in columns:
        labels = [*columns][1] if len(columns) > 1 else None
    order = None if fields is None or list(columns) == list(fields) else tuple(fields)
    packed = dataset if name_of is not None and isinstance(dataset, PackedDataset) else None
    structure = "dict" if as_dict else structure
    return DatasetColumns(columns, structure, labels, count, description, packed, order, name_of)


def fingerprint_of(act: str, dataset: Any) -> str:
    """Return a string that identifies a dataset.

    It is the `fingerprint` of the dataset, if there is one. For arrays, it depends on some of the samples; for other
    datasets, it depends on their type and length. A `Subset` also depends on its indices. It is the same whether
    samples are loaded in batches or one by one.
    """
    if isinstance(own := getattr(dataset, "fingerprint", None), str):
        return own
    if isinstance(dataset, torch.utils.data.Subset):
        indices = np.asarray(dataset.indices, np.int64)
        return f"{fingerprint_of(act, dataset.dataset)}/{hashlib.sha256(indices.tobytes()).hexdigest()[:16]}"
    if (found := _arrays(act, dataset)) is not None:
        return _digest(found[0])
    return f"{type(dataset).__qualname__} of {len(dataset)}"


def is_channels_last(shape: Sequence[int]) -> bool:
    """Return whether the shape of a sample looks like `[H, W, C]` and not like `[C, H, W]`."""
    return len(shape) == 3 and shape[2] in _CHANNELS and shape[0] not in _CHANNELS


def check_channels_first(act: str, columns: DatasetColumns) -> None:
    """Raise `InvalidOption` for arrays `[N, H, W, C]` if a transform needs `[N, C, H, W]`."""
    stored = columns.stored
    if stored is not None and not stored.are_images and is_channels_last(stored.shape):
        found = f"the images have shape {[columns.count, *stored.shape]}, with the channels last"
        next_step = "Pass torch.as_tensor(images).permute(0, 3, 1, 2), which makes no copy"
        if columns.packed is not None:
            next_step = "Start the transform with PerBatch(lambda images: images.permute(0, 3, 1, 2))"
        raise InvalidOption(cannot(act, found, "shape [N, C, H, W] for this transform", next_step))


def unwrap_subset(act: str, dataset: Any) -> Any:
    """Replace torch's `Subset` of a packed split or of files with a view; return other datasets unchanged.

    Raises:
        InvalidOption: if the dataset is a pack instead of one of its splits.
    """
    if isinstance(dataset, Pack):
        next_step = f"Pass pack[{next(iter(dataset), 'train')!r}]"
        raise InvalidOption(cannot(act, "the dataset is a whole pack", "one of its splits", next_step))
    if _gives_samples_of(dataset, torch.utils.data.Subset):
        whole = unwrap_subset(act, dataset.dataset)
        if _gives_samples_of(whole, PackedDataset, FileDataset):
            return whole.subset(dataset.indices)
    return dataset


def as_samples(act: str, dataset: Any) -> Any:
    """Return a map-style dataset unchanged, or make one from a tuple or dict of arrays.

    Raises:
        InvalidOption: if arrays differ in length, or the argument is not a dataset.
    """
    found = _arrays(act, dataset) if isinstance(dataset, tuple | list | Mapping) else None
    if found is None:
        kind, is_path = type(dataset), isinstance(dataset, str | os.PathLike)
        if hasattr(dataset, "iloc"):
            # A DataFrame has __getitem__ and __len__, but returns columns.
            next_step = "Pass arrays, for example (table[columns].to_numpy(), table[label].to_numpy())"
            raise InvalidOption(cannot(act, f"the dataset is {kind_of(dataset)}", "arrays or a dataset", next_step))
        if hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and not is_path:
            return dataset
        next_step = "Pass colabkit.open_pack(path)['train'], colabkit.FileDataset(folder) or arrays"
        if is_path:
            next_step = (
                "Pass colabkit.FileDataset(path) for a folder of images, "
                "or colabkit.open_pack(path)['train'] for a pack"
            )
        expected = "a dataset with __getitem__ and __len__, or arrays"
        raise InvalidOption(cannot(act, f"the dataset is {kind_of(dataset)}", expected, next_step))
    arrays, structure = found
    _length(act, arrays)
    return StackDataset(**arrays) if structure == "dict" else StackDataset(*arrays.values())


def _gives_samples_of(dataset: Any, *kinds: type[Any]) -> bool:
    """Return whether a dataset is an instance of one of these classes and its own class does not override indexing."""
    methods = ("__getitem__", "__getitems__")
    return any(
        isinstance(dataset, kind)
        and all(getattr(type(dataset), name, None) is getattr(kind, name, None) for name in methods)
        for kind in kinds
    )


def _stored(dataset: PackedDataset | FileDataset) -> dict[str, DatasetColumn]:
    columns: dict[str, DatasetColumn] = {}
    for name in dataset.fields:
        if name == LABELS and dataset.labels is not None:
            columns[name] = RowGather((dataset.labels.contiguous(),), None, are_images=False)
        elif name == SAMPLES and dataset.image_files() is not None:
            columns[name] = dataset
        else:
            assert isinstance(dataset, PackedDataset)
            if maps := dataset.maps(name):
                are_images = dataset.info.fields[name].content == "image"
                columns[name] = RowGather(maps, dataset.numbers, are_images)
            else:
                columns[name] = ColumnReader(dataset, name)
    return columns


def _length(act: str, arrays: Mapping[str, Any]) -> int:
    counts = {name: len(value) if value.ndim else 0 for name, value in arrays.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"array {name} has {format_things(count, 'row')}" for name, count in counts.items())
        raise InvalidOption(cannot(act, found, "the same number in each", "Pass one row per sample in each array"))
    return next(iter(counts.values()))


def _chosen(act: str, columns: Mapping[str, DatasetColumn], fields: Sequence[str]) -> dict[str, DatasetColumn]:
    is_list = isinstance(fields, Sequence) and not isinstance(fields, str) and len(fields) > 0
    if not is_list or sorted(name for name in columns if name in fields) != sorted(fields, key=str):
        expected = f"a list of field names from {', '.join(map(repr, columns))}, each once"
        example = ("For example, use ", option("fields", [next(iter(columns))]))
        raise InvalidOption(cannot(act, option("fields", fields), expected, example))
    return {name: column for name, column in columns.items() if name in fields}


def _arrays(act: str, dataset: Any) -> tuple[dict[str, Any], Structure] | None:
    if _gives_samples_of(dataset, torch.utils.data.TensorDataset):
        return {str(number): tensor for number, tensor in enumerate(dataset.tensors)}, "tuple"
    if isinstance(dataset, Tensor | np.ndarray):
        return {"0": dataset}, "alone"
    if isinstance(dataset, Mapping):
        named, structure = {str(name): value for name, value in dataset.items()}, "dict"
    elif isinstance(dataset, tuple):
        named, structure = {str(number): value for number, value in enumerate(dataset)}, "tuple"
    elif isinstance(dataset, list) and _are_columns(dataset):
        raise InvalidOption(
            cannot(
                act,
                f"the dataset is a list of {len(dataset)} arrays, which may be fields or samples",
                "a tuple of fields or one array of samples",
                "Pass a tuple such as (images, labels), or stack the arrays if they are samples",
            )
        )
    else:
        return None
    if not named:
        empty = f"the dataset is {kind_of(dataset)} without arrays"
        raise InvalidOption(cannot(act, empty, "at least one array or tensor", "Pass arrays, or a dataset"))
    for name, value in named.items():
        if not isinstance(value, Tensor | np.ndarray):
            item = name if structure == "tuple" else repr(name)
            found = f"item {item} of the dataset is {kind_of(value)}"
            next_step = "Convert it with numpy.asarray, or pass a dataset"
            raise InvalidOption(cannot(act, found, "an array or a tensor", next_step))
    return named, "dict" if structure == "dict" else "tuple"


def _are_columns(values: list[Any]) -> bool:
    """Return whether a list holds a few long arrays of the same length: probably fields, not samples."""
    is_few = 1 < len(values) <= _FEW
    if not is_few or not all(isinstance(value, Tensor | np.ndarray) and value.ndim for value in values):
        return False
    return len(set(map(len, values))) == 1 and len(values[0]) > _FEW


def _row_gather(act: str, name: str, value: Any) -> RowGather:
    if isinstance(value, np.ndarray):
        try:
            native = value.astype(value.dtype.newbyteorder("="), copy=False)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                # torch does not support negative strides.
                value = torch.from_numpy(native if min(native.strides, default=0) >= 0 else native.copy())
        except (TypeError, ValueError):
            found, expected = f"array {name!r} has dtype {value.dtype}", "a dtype that PyTorch supports"
            convert = "Convert the array first, for example with array.astype('float32')"
            if value.dtype.kind in "US":
                convert = "Number the texts first: names, numbers = numpy.unique(array, return_inverse=True)"
            raise InvalidOption(cannot(act, found, expected, convert)) from None
    if not value.ndim or value.layout != torch.strided or 0 in value.shape[1:]:
        raise InvalidOption(
            cannot(
                act,
                f"tensor {name!r} has shape {list(value.shape)} and layout {value.layout}",
                "a dense tensor [N, ...] whose rows are not empty",
                "Pass all samples in one dense tensor",
            )
        )
    if value.device.type != "cpu":
        raise InvalidOption(
            cannot(
                act,
                f"tensor {name!r} is on {value.device}",
                "a tensor on the CPU",
                "Pass tensor.cpu(), together with device='cuda' and keep='gpu'",
            )
        )
    value = value.detach().resolve_conj().resolve_neg()
    if value.ndim == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last):
        return RowGather((value.permute(0, 2, 3, 1),), None, are_images=True)
    return RowGather((value.contiguous(),), None, are_images=False)


def _digest(arrays: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name, array in arrays.items():
        shape, dtype = tuple(array.shape), str(array.dtype).removeprefix("torch.")
        digest.update(f"{name} {dtype} {shape} ".encode())
        for number in sorted({0, shape[0] // 2, shape[0] - 1}) if shape and shape[0] else ():
            digest.update(_row_bytes(array, number))
    return f"arrays/{digest.hexdigest()[:32]}"


def _row_bytes(array: Any, number: int) -> bytes:
    """Return the bytes of a row, independent of memory layout; empty for objects and sparse or quantized tensors."""
    if not isinstance(array, Tensor):
        # The bytes of an object array are addresses, which change from run to run.
        return b"" if array.dtype.hasobject else array[number : number + 1].tobytes()
    if array.layout != torch.strided or array.is_quantized:
        return b""
    row = array[number].detach().resolve_conj().resolve_neg().cpu().reshape(-1)
    return row.contiguous().view(torch.uint8).numpy().tobytes()
