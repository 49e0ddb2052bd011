"""`open_pack()` and the `Pack` that it returns, a mapping of split names to datasets."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from colabkit.foundation import (
    PYTHON,
    InvalidOption,
    call,
    cannot,
    check_whole_number,
    checked_call,
    format_bytes,
    format_count,
    format_things,
    html_table,
    omit,
    option,
    user_path,
)
from colabkit.packs.dataset.datasets import PackedDataset
from colabkit.packs.dataset.hdf5_files import Hdf5Options, inspect_hdf5, is_plain_hdf5, open_hdf5_split
from colabkit.packs.dataset.open_split import OpenSplit, open_sealed
from colabkit.packs.dataset.remote_pack import open_remote
from colabkit.packs.dataset.sample_grid import SampleGrid, draw_samples
from colabkit.packs.format.layout import LABELS, SAMPLES, PackInfo, find_split, name_inferred
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.labels.splits import missing_split
from colabkit.storage import file_address

_SEAL_CHARS = 16
_LEFT = (("bad", "bad", "sample"), ("left out", "left_out", "file"))


@checked_call()
def open_pack(
    path: str | os.PathLike[str],
    *,
    x: str | Mapping[str, str] | None = None,
    y: str | Mapping[str, str] | None = None,
    task: Literal["auto", "classes", "multilabel", "regression"] = "auto",
    renumber: bool = False,
    layout: Literal["auto", "nhwc", "nchw", "nhw", "array"] = "auto",
    trusted: bool = False,
    cache: int | str | None = None,
) -> Pack:
    """Open the pack at `path`; `open_pack(path)["train"]` is a dataset.

    For a pack made by `pack()`, this checks the seal, the length and the layout, which takes milliseconds regardless of
    size. Each sample is checked against its CRC when it is first read; `verify()` checks all samples. Shards are opened
    and checked on first use.

    Other HDF5 files can be opened too. Contiguous datasets are memory-mapped; all others are read through HDF5.
    These files have no seal, so damage may result in wrong samples without an error, or crash the HDF5 library.

    With `cache`, `path` can also be the address of the index of a pack of shards, for example `"gs://bucket/birds.h5"`.
    `Loader` downloads each shard before it needs it, checks it completely, and removes the shards that it needs last.
    All processes of a machine share the cache, which remains for later calls.

    Args:
        path: a pack made by `pack()`, or any HDF5 file. With `cache`, also an https address or a URL that fsspec reads.
        x: for an HDF5 file, the dataset with the samples, for example `"images"` or `"group/images"`; with several
            splits, one dataset for each, as in `{"train": "X_train", "test": "X_test"}`. None searches for common names
            such as `X_train` and `Y_train`, or `images` with `labels` or `targets`.
        y: the datasets with the labels, in the same form; None means no labels if `x` is given.
        task: for an HDF5 file, the task of the labels, as in `pack()`.
        renumber: for an HDF5 file, number the classes that occur in order, as in `pack()`.
        layout: for an HDF5 file, order of the dimensions of `uint8` images, as in `pack()`; `"array"` means that
            samples are not images. `"auto"` infers it, and `print(pack)` shows the result.
        trusted: for an HDF5 file, also allow links, external storage, virtual datasets, filter plugins, elements of
            varying length, such as text labels, and implausibly high compression. Some of these read other files or
            run third-party code.
        cache: for a pack of shards, the largest size of a cache on the local disk, to which shards are copied, in bytes
            or as text such as `"20GiB"`. None opens a local pack in place.

    Returns:
        The pack, a mapping of split names to datasets. `pack["train"].split((0.8, 0.2))` divides a dataset.

    Raises:
        NotMounted: if the path begins with `drive:` and Drive is not mounted.
        SourceMissing: if the file does not exist.
        BadSource: if the file is not an HDF5 file, or its datasets cannot be used.
        NotSealed: if the file is a pack that was never finished, lost its seal or has another format version.
        Corrupt: if the pack has changed since it was sealed.
        InvalidOption: if `x`, `y`, `task`, `renumber` or `layout` is invalid, or given for a pack, which stores them;
            if `cache` is invalid, smaller than a shard, or missing for an address.
        FetchFailed, TimedOut: with `cache`, if the index cannot be downloaded.

    Example:
        >>> import colabkit
        >>> packed = colabkit.pack("samples:digits", "digits.h5")
        >>> data = colabkit.open_pack("digits.h5")["train"]
        >>> image, label = data[0]
        >>> image.shape, data.classes[label]
        (torch.Size([3, 8, 8]), '0')
    """
    options = Hdf5Options(trusted, task, renumber, layout)
    if cache is not None:
        if x is not None or y is not None or options != Hdf5Options():
            found_both = (option("cache"), " applies only to packs, and the other options only to HDF5 files")
            raise InvalidOption(cannot("open a pack", found_both, "", ("Omit ", option("cache"), " or the others")))
        info, open_split = open_remote(path, cache)
        return Pack(info, open_split, is_remote=True)
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if isinstance(text, str) and "://" in text:
        raise _address_error(text)
    act = "open a pack" if text is None else f"open {text!r}"
    found = user_path(path, act).absolute()
    if is_plain_hdf5(found):
        contents = inspect_hdf5(found, x, y, options)
        reopen = partial(open_hdf5_split, found, contents.x, contents.y, options, contents.info.seal)
        return Pack(contents.info, reopen)
    info = read_pack(found)
    chosen = (("task", task, "auto"), ("renumber", renumber, False), ("layout", layout, "auto"))
    for name, value, default in (("x", x, None), ("y", y, None), *chosen):
        if value != default:
            message = (option(name, value), " applies only to HDF5 files that are not packs")
            raise InvalidOption(cannot(act, message, "", omit(name)))
    return Pack(info, partial(open_sealed, found, info.seal))


def _address_error(path: str) -> InvalidOption:
    # The address itself may hold a password.
    act = f"open {file_address(path).shown!r}"
    next_step = ("Set ", option("cache", "20GiB"), " to read it from there, or download it with ", call("fetch"))
    return InvalidOption(cannot(act, "it is an address", "a local path", next_step))


class Pack(Mapping[str, PackedDataset]):
    """The splits of a pack by name, as in `pack["train"]`.

    Attributes:
        path: path of the file.
        classes: names of the classes, or of several labels or targets; may be empty.
        source: name of the source of the samples.
        encoding: how samples are stored: as arrays (`raw` and `array`) or as image files (`source` and `jpeg`).
        splits: number of samples in each split.
        info: layout and seal, read from the file.

    Example:
        >>> import colabkit
        >>> packed = colabkit.pack("samples:digits", "digits.h5")
        >>> pack = colabkit.open_pack("digits.h5")
        >>> dict(pack.splits), len(pack.classes)
        ({'train': 1797}, 10)
        >>> len(pack["train"])
        1797
    """

    def __init__(self, info: PackInfo, open_split: Callable[[str], OpenSplit], is_remote: bool = False) -> None:
        self.info = info
        self._is_remote = is_remote
        self._open_split = open_split
        self._opened: dict[str, PackedDataset] = {}
        self.path = info.path
        self.classes: tuple[str, ...] = tuple(info.meta["classes"])
        self.source: str = info.meta["source"]
        self.encoding: str = info.meta["encoding"]
        self.splits: Mapping[str, int] = {split: info.count(split) for split in info.splits}

    def __getitem__(self, split: str) -> PackedDataset:
        """Return the dataset of a split; `val`, `valid` and `dev` are names of the same split.

        Raises:
            MissingSplit: if the pack has no such split.
        """
        name = find_split(self.splits, split)
        if name is None:
            raise missing_split(f"open a split of {str(self.path)!r}", split, self)
        if name not in self._opened:
            # Another pack may have replaced the file by now, so opening a split compares the seals.
            self._opened[name] = PackedDataset(self._open_split(name))
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the splits."""
        return iter(self.splits)

    def __hash__(self) -> int:
        return hash(self.info.seal)

    def __len__(self) -> int:
        """Return the number of splits."""
        return len(self.splits)

    def __reduce__(self) -> tuple[object, ...]:
        return Pack, (self.info, self._open_split, self._is_remote)

    def __fspath__(self) -> str:
        """Return the path, so an open pack can be passed wherever a path is expected."""
        return str(self.path)

    def show(self, split: str | None = None, n: int = 16, *, seed: int = 0) -> SampleGrid:
        """Draw random samples with their labels in a grid; notebooks display the result as a picture.

        Args:
            split: name of the split; None uses the first.
            n: maximum number of samples.
            seed: seed of the random choice.

        Raises:
            InvalidOption: if `n` is not a whole number of 1 or more.
            MissingSplit: if the split does not exist.
            MissingPackage: if matplotlib is not installed.
            Corrupt: if a sample does not match its CRC.
        """
        check_whole_number(f"show {str(self.path)!r}", "n", n, 1)
        data = self[next(iter(self)) if split is None else split]
        chosen = np.random.default_rng(seed).choice(len(data), min(n, len(data)), replace=False)
        return draw_samples(data, np.sort(chosen), self.info.meta["label_kind"], f"{self.path.name}, {data.split_name}")

    def __repr__(self) -> str:
        rows = self._split_rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        about = ", ".join(f"{name} {value}" for name, value in self._about())
        inferred = [f"Inferred: {text}"] if (text := self._inferred()) else []
        return "\n  ".join([self._line(), *lines, about, *inferred])

    def _inferred(self) -> str:
        """Describe the values inferred for an HDF5 file that is not a pack; empty for a pack."""
        return PYTHON.render(name_inferred(self.info.inferred)) if self.info.meta.get("is_foreign") else ""

    def _repr_html_(self) -> str:
        header, *rows = self._split_rows()
        inferred = [("inferred", text)] if (text := self._inferred()) else []
        return html_table(self._line(), rows, header) + html_table("", [*self._about(), *inferred])

    def _line(self) -> str:
        splits = ", ".join(f"{split} {format_count(count)}" for split, count in self.splits.items())
        shape = self.info.meta["sample_shape"]
        what = "images" if self.info.fields[SAMPLES].content == "image" else "samples"
        what += f" {'x'.join(map(str, shape))}" if shape else " of different sizes" if what == "images" else ""
        classes = f", {format_things(len(self.classes), 'class')}" if self.classes else ""
        sizes, missing = self._file_bytes()
        size = format_bytes(sizes)
        if self.info.shards:
            absent = f"{missing} of them {'not in the cache' if self._is_remote else 'missing'}"
            size += f" in {format_things(len(self.info.shards), 'shard')}" + (f", {absent}" if missing else "")
        return f"Pack {str(self.path)!r}: {splits}; {what}{classes}, {size}"

    def _file_bytes(self) -> tuple[int, int]:
        total, missing = 0, 0
        for name in [self.path.name, *(Path(shard.name).name for shard in self.info.shards)]:
            try:
                total += self.path.with_name(name).stat().st_size
            except OSError:
                missing += 1
        return sum(shard.length for shard in self.info.shards) if self._is_remote else total, missing

    def _split_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("split", "samples", "stored as", "bytes")]
        shape, field = self.info.meta["sample_shape"], self.info.fields[SAMPLES]
        for split, count in self.splits.items():
            stored, size = self.encoding, "-"
            if (found := self.info.data_sets.get(field.data_set(split))) is not None:
                size = format_bytes(found.size_bytes)
                if not field.is_ragged:
                    stored = f"{np.dtype(found.dtype)} {' x '.join(map(str, found.shape))}"
                else:
                    stored = "image files" if field.content == "image" else field.content
            elif shape and not field.is_ragged:
                stored = f"{self.encoding} {' x '.join(map(str, [count, *shape]))}"
                size = format_bytes(count * math.prod(shape)) if field.content == "image" else "-"
            rows.append((split, format_count(count), stored, size))
        return rows

    def _about(self) -> list[tuple[str, str]]:
        meta = self.info.meta
        fields = list(self.info.fields)
        return [
            ("encoding", self.encoding),
            *([("fields", ", ".join(fields))] if set(fields) - {SAMPLES, LABELS} else []),
            ("source", self.source),
            ("seal", "none" if meta.get("is_foreign") else self.info.seal[:_SEAL_CHARS]),
            *(
                (name, f"{format_things(len(meta[key]), unit)} (first {meta[key][0][-2]!r})")
                for name, key, unit in _LEFT
                if meta.get(key)
            ),
        ]
