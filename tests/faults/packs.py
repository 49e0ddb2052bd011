"""Faults 31 to 33: packs that are damaged, cut short, of another format, or hostile."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import h5py
import numpy as np
import torch
from hdf5_files import HOSTILE, ODD, write_hdf5
from packed_files import META, photos, sharded

from colabkit.errors import ColabkitError
from colabkit.loading import Loader
from colabkit.packs import PackedDataset, open_pack
from colabkit.packs.format.layout import DataSet
from colabkit.packs.format.pack_file import create_pack, seal_pack
from colabkit.packs.packing.api import pack

from .board import COLABKIT, Outcome, Result, attempts, fault, spread
from .mutations import cuts, flips, overwrites, zeros

Content = list[Any]
Cases = list[tuple[str, Callable[[], Outcome | None]]]


def _batches(data: PackedDataset, **options: Any) -> Content:
    return [
        [np.asarray(field).tobytes() for field in batch] for batch in Loader(data, 4, shuffle=True, seed=3, **options)
    ]


READERS: dict[str, Callable[[PackedDataset], Content]] = {
    "Loader": partial(_batches, num_workers=0),
    "Loader with threads": partial(_batches, num_workers=2),
    "samples": lambda data: [[np.asarray(field).tobytes() for field in data[row]] for row in range(len(data))],
}


@dataclass(frozen=True)
class Format:
    """A file format of samples: `write(folder)` returns its files, and `read(path, reader)` all samples."""

    name: str
    write: Callable[[Path], list[Path]]
    read: Callable[[Path, str], Content]
    readers: tuple[str, ...]
    refusals: type[Exception]


def _write_pack(encoding: str, folder: Path) -> list[Path]:
    source = photos(folder / "photos", per_class=2, size=(28, 36), quality=60)
    return [pack(source, folder / "p.h5", encoding=encoding, threads=1, progress=False).path]


def _write_shards(folder: Path) -> list[Path]:
    report = sharded(photos(folder / "photos", per_class=2, size=(28, 36)), folder / "p.h5", 3 * 28 * 36 * 3)
    assert report.shards == 2
    return [report.path, *sorted(folder.glob("p-0*.h5"))]


def _read_pack(path: Path, reader: str) -> Content:
    return [(split, READERS[reader](data)) for split, data in open_pack(path).items()]


PACKS = tuple(
    Format(name, write, _read_pack, tuple(READERS), ColabkitError)
    for name, write in {
        "raw": partial(_write_pack, "raw"),
        "source": partial(_write_pack, "source"),
        "jpeg": partial(_write_pack, "jpeg"),
        "shards": _write_shards,
    }.items()
)
_PIXELS = np.random.default_rng(5).integers(1, 256, (6, 28, 36, 3), dtype=np.uint8)


def _write_plain_hdf5(folder: Path) -> list[Path]:
    return [write_hdf5(folder / "p.h5", _PIXELS, np.arange(6))]


def _read_plain_hdf5(path: Path, reader: str) -> Content:
    with h5py.File(path) as file:
        return [file["images"][()].tobytes(), file["labels"][()].tobytes()]


def _write_tensors(folder: Path) -> list[Path]:
    torch.save((torch.from_numpy(_PIXELS), torch.arange(6)), folder / "p.pt")
    return [folder / "p.pt"]


def _read_tensors(path: Path, reader: str) -> Content:
    return [tensor.numpy().tobytes() for tensor in torch.load(path, weights_only=True)]


FORMATS = {
    COLABKIT: PACKS,
    "h5py": (Format("contiguous", _write_plain_hdf5, _read_plain_hdf5, ("all",), Exception),),
    "torch.load": (Format("tensors", _write_tensors, _read_tensors, ("all",), Exception),),
}


def _readings(form: Format, folder: Path, damages: Callable[[Path, bytes], Iterable[tuple[str, bytes]]]) -> Cases:
    """Return a case for each damaged copy of each of the format's files; each case uses the next reader in turn."""
    (folder / form.name).mkdir()
    files = form.write(folder / form.name)
    good = {reader: form.read(files[0], reader) for reader in form.readers}
    readers = itertools.cycle(form.readers)
    numbers = itertools.count()

    def read(damaged: Path, data: bytes, reader: str, number: int) -> None:
        # Use a new folder for each case, because results may be cached by path.
        place = folder / form.name / f"case{number}"
        place.mkdir()
        for file in files:
            if file != damaged:
                shutil.copy(file, place)
        (place / damaged.name).write_bytes(data)
        try:
            found = form.read(place / files[0].name, reader)
            assert found == good[reader], "the samples differ, and there was no error"
        finally:
            shutil.rmtree(place)

    return [
        (f"{form.name}, {file.name}, {reader}: {name}", partial(read, file, data, reader, next(numbers)))
        for file in files
        for (name, data), reader in zip(damages(file, file.read_bytes()), readers, strict=False)
    ]


@fault(31, "bits of a pack are flipped", FORMATS)
def flipped_bits(formats: tuple[Format, ...], folder: Path, limit: int) -> Iterator[Result]:
    # Run more cases than other rows, since fuzzing needs many cases and these are cheap.
    count = max(1, 5 * limit // len(formats))
    for seed, form in enumerate(formats):

        def damages(file: Path, data: bytes, seed: int = seed, shards: bool = form.name == "shards") -> Any:
            return flips(data, max(1, count // (3 if shards else 1)), seed)

        yield from attempts(_readings(form, folder, damages), refusals=form.refusals)


@fault(32, "packs are cut, zeroed, overwritten, or of another format", FORMATS)
def broken_files(formats: tuple[Format, ...], folder: Path, limit: int) -> Iterator[Result]:
    count = max(1, 2 * limit // len(formats))
    for seed, form in enumerate(formats):

        def damages(file: Path, data: bytes, seed: int = seed) -> Iterator[tuple[str, bytes]]:
            yield from spread([*cuts(data), *zeros(data)], count)
            yield from overwrites(data, count // 4, seed)
            yield "empty", b""
            yield "longer", data + b"\0"
            yield "without the first page", data[4096:]
            yield "another version", data.replace(b"colabkit pack 2\n", b"colabkit pack 9\n", 1)[:-1]
            yield "a web page", b"<!DOCTYPE html><html>Sign in</html>"

        yield from attempts(_readings(form, folder, damages), refusals=form.refusals)


_SECRET = 201
"""Value of every byte of the file that a hostile pack refers to; no other sample contains it."""

_META = {**META, "options": {}, "left_out": [], "bad": []}
_LAYOUTS = (DataSet("X_train", (2, 2, 2, 3), "|u1"), DataSet("Y_train", (2,), "<i8"), DataSet("crc_train", (2,), "<u4"))


def _nest(depth: int) -> Any:
    nested: Any = 1
    for _ in range(depth):
        nested = [nested]
    return nested


HOSTILE_META: dict[str, dict[str, Any]] = {
    "more samples than rows": {"splits": {"train": 1 << 40}},
    "fewer than no samples": {"splits": {"train": -2}},
    "a fraction of a sample": {"splits": {"train": 1.5}},
    "no splits": {"splits": {}},
    "split with a path": {"splits": {"../../secret": 2}},
    "shape of other rows": {"sample_shape": [1 << 20, 1 << 20, 3]},
    "negative shape": {"sample_shape": [-2, -2, 3]},
    "encoding that does not exist": {"encoding": "pickle"},
    "fields that do not exist": {"fields": {"X": ["image", False], "Y": ["labels", False], "Z": ["pickle", False]}},
    "content that is code": {"fields": {"X": ["__import__('os').system('true')", False], "Y": ["labels", False]}},
    "classes that are numbers": {"classes": 7},
    "deeply nested": {"options": _nest(900)},
    "shard beside the folder": {"shards": [{"name": "../secret.h5", "seal": "0" * 64, "splits": {"train": 2}}]},
    "shard with an absolute path": {"shards": [{"name": "/etc/passwd", "seal": "0" * 64, "splits": {"train": 2}}]},
    "shard that is its own index": {"shards": [{"name": "hostile.h5", "seal": "0" * 64, "splits": {"train": 2}}]},
    "shards that are not a list": {"shards": {"name": 3}},
}


def _sealed_with(meta: dict[str, Any], path: Path) -> None:
    placed, crcs = create_pack(path, _LAYOUTS, {**_META, **meta})
    tables = {name: crc32(bytes(one.size_bytes)) for name, one in placed.items() if name != "X_train"}
    seal_pack(path, placed.values(), {**crcs, **tables})


def _groups(path: Path, depth: int, width: int) -> None:
    """Write a file with `depth` nested groups and `width` sibling groups."""
    with h5py.File(path, "w") as file:
        group: h5py.Group = file
        for number in range(depth):
            group = group.create_group(f"g{number % 10}")
        for number in range(width):
            file.create_group(f"w{number}")


def _sealed_and_odd(add: Callable[[h5py.File, Path], object], secret: Path, path: Path) -> None:
    """Seal a pack that also contains a hostile dataset."""
    placed, _ = create_pack(path, _LAYOUTS, _META)
    with h5py.File(path, "r+") as file:
        add(file, secret)
    seal_pack(path, placed.values(), {"Y_train": 0, "crc_train": 0})


def _foreign(add: Callable[[h5py.File, Path], object], secret: Path, path: Path) -> None:
    with h5py.File(path, "w") as file:
        add(file, secret)


def _hostile_files(secret: Path) -> dict[str, Callable[[Path], object]]:
    """Return functions that write hostile files, by name."""
    found: dict[str, Callable[[Path], object]] = {}
    for name, add in HOSTILE.items():
        found[f"foreign file, {name}"] = partial(_foreign, add, secret)
    for name, add in ODD.items():
        found[f"sealed pack, {name}"] = partial(_sealed_and_odd, add, secret)
    for name, meta in HOSTILE_META.items():
        found[f"sealed pack, {name}"] = partial(_sealed_with, meta)
    for depth, width in ((1000, 0), (5000, 0), (0, 5000)):
        found[f"{depth} nested groups, {width} beside"] = partial(_groups, depth=depth, width=width)
    empty = np.zeros((0, 4, 3, 3), np.uint8)
    found["foreign file, no samples"] = lambda path: write_hdf5(path, empty, np.zeros(0, int))
    found["foreign file, no bytes"] = lambda path: write_hdf5(path, np.zeros((4, 0, 3, 3), np.uint8), np.arange(4))
    return found


def _open_colabkit(path: Path, names: bool) -> Content:
    options = {"x": "e/images"} if names else {}
    return [
        np.asarray(sample[0] if isinstance(sample, tuple) else sample)
        for data in open_pack(path, **options).values()
        for sample in itertools.islice(data, 40)
    ]


def _open_h5py(path: Path, names: bool) -> Content:
    with h5py.File(path) as file:
        group = file["e"] if names else file
        return [np.asarray(item[:40]) for item in group.values() if isinstance(item, h5py.Dataset)]


@fault(33, "hostile packs and HDF5 files", {COLABKIT: (_open_colabkit, ColabkitError), "h5py": (_open_h5py, Exception)})
def hostile_files(tool: tuple[Callable[[Path, bool], Content], type[Exception]], folder: Path, limit: int) -> Any:
    read, refusals = tool
    secret = folder / "secret.h5"
    # Write this value to every path that a link could refer to.
    with h5py.File(secret, "w") as file:
        for name in ("images", "X_train", "e/images"):
            file[name] = np.full((30, 6, 5, 3), _SECRET, np.uint8)

    numbers = itertools.count()

    def work(write: Callable[[Path], object], names: bool) -> None:
        place = folder / f"case{next(numbers)}"
        place.mkdir()
        try:
            write(place / "hostile.h5")
            for values in read(place / "hostile.h5", names):
                assert not np.any(values == _SECRET), "bytes of another file were read"
        finally:
            shutil.rmtree(place)

    files = _hostile_files(secret)
    cases: Cases = [
        (f"{name}{', by name' * names}", partial(work, write, names))
        for name, write in files.items()
        for names in ((False, True) if name.startswith("foreign") else (False,))
    ]
    yield from attempts(cases[:limit], refusals=refusals)
    original = write_hdf5(folder / "fuzzed.h5", _PIXELS, np.arange(6))

    def parse(data: bytes) -> None:
        """Read a damaged file; other samples or a colabkit error are allowed, but no crash, hang or other error."""
        (folder / "case.h5").write_bytes(data)
        with_samples = open_pack(folder / "case.h5")
        for dataset in with_samples.values():
            READERS["Loader"](dataset)

    if read is _open_colabkit:
        header = original.read_bytes()
        damaged = [*overwrites(header[:2048], limit // 2, 9), *flips(header[:2048], limit // 2, 8)]
        fuzzed: Cases = [(f"foreign file, {name}", partial(parse, data + header[2048:])) for name, data in damaged]
        yield from attempts(fuzzed)
