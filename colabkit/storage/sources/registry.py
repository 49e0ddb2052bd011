"""What opens a source: a folder, an archive, a table, a bucket or records, by a path, an address or a pattern.

A new source type is a class in a file of its own, which follows the protocol in `items.py`, and a line here: in
`_ARCHIVES` for an archive, in `_kind_of` for any other path, in `_open_address` for an address, in `_open_path` and
`_shard_kind` for records.
"""

from __future__ import annotations

import glob
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from colabkit.foundation import (
    BadSource,
    InvalidOption,
    SourceMissing,
    can_hang,
    cannot,
    format_things,
    kind_of,
    mounts,
    resolved,
    translated,
    user_path,
)
from colabkit.storage.addresses import FSSPEC, address_of
from colabkit.storage.sources.bucket import BucketSource
from colabkit.storage.sources.concurrency import answer_of
from colabkit.storage.sources.folder import FileSource, FolderSource
from colabkit.storage.sources.items import ArchiveSource, Source
from colabkit.storage.sources.lmdb_records import DATA_FILE, LMDB_SUFFIXES, LmdbSource
from colabkit.storage.sources.manifest import TABLE_SUFFIXES, ManifestSource, is_manifest
from colabkit.storage.sources.ranges import RangeSource
from colabkit.storage.sources.tar_archive import TAR_SUFFIXES, TarSource, is_tar
from colabkit.storage.sources.tfrecord import TfRecordSource, is_tfrecord_name
from colabkit.storage.sources.webdataset import WebDatasetSource, is_webdataset
from colabkit.storage.sources.zip_archive import ZipSource

AnySource: TypeAlias = str | os.PathLike[str] | Source | Any
"""What public calls take as source; a table of paths is a list of them, or a pandas DataFrame."""

_ARCHIVES: tuple[tuple[tuple[str, ...], type[ArchiveSource], Callable[[Path], bool]], ...] = (
    # How names end, what opens them, and whether the bytes of a file of no known name are such an archive's. A tar is
    # looked for first: one that holds a zip archive ends as a zip does.
    (TAR_SUFFIXES, TarSource, is_tar),
    ((".zip",), ZipSource, zipfile.is_zipfile),
)
ARCHIVE_SUFFIXES = tuple(suffix for suffixes, *_ in _ARCHIVES for suffix in suffixes)
"""How the names of archives end."""

_SAMPLES = Path(__file__).parent.parent / "samples"
_WHOLE_SUFFIXES = (  # zip archives inside, many of them, which those who read them want whole
    *(".bin", ".ckpt", ".keras", ".npz", ".onnx", ".pt", ".pt2", ".ptl", ".pth", ".safetensors"),
    *(".apk", ".docx", ".epub", ".ipynb", ".jar", ".kmz", ".odp", ".ods", ".odt", ".pptx", ".whl", ".xlsx"),
    *(".h5", ".hdf5", ".npy", ".arrow", ".feather", ".tfrecord"),
)


def open_source(source: AnySource) -> Source:
    """Return the source that is meant.

    A path is a folder, a zip or tar archive, a table of paths, or one file of any other kind. Archives are told by
    their names, those of no known ending by their first and last bytes; a `.csv`, `.tsv` or `.parquet` file is a table
    if it has a column of paths and the first of them is there.

    Args:
        source: a path; a list of paths or a pandas DataFrame with a column of them; the address of a bucket's folder,
            as in `"gs://bucket/birds"`; `samples:NAME` for data inside the package; or a `Source`.

    Raises:
        SourceMissing: if nothing is there.
        BadSource: if it is a special file, or an address that has to be fetched first.
        InvalidOption: if it cannot be meant.
        TimedOut: if there was no answer, twice.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, list | tuple) or hasattr(source, "iloc"):
        return ManifestSource(source)
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if not name or not isinstance(name, str):
        needed = "a path, an address, a table of paths or 'samples:digits'"
        raise InvalidOption(cannot(f"read {source!r:.60}", kind_of(source), needed, "Pass its path"))
    if "://" in name or name.startswith(("drive.google.com/", "docs.google.com/")):
        return _open_address(name)
    act = f"read {name!r}"
    path = sample_archive(name.removeprefix("samples:")) if name.startswith("samples:") else user_path(name, act)
    with translated(act):
        kind = answer_of(lambda: _kind_of(path), can_hang(os.path.abspath(path), mounts()))
        if kind is not None:
            return kind(path)
        if os.path.lexists(path):
            next_step = "Name the folder that holds the files"
            raise BadSource(cannot(act, "a special file or broken link", "a folder, a file or an archive", next_step))
        parent = next(folder for folder in path.absolute().parents if folder.exists())
    found = f"no such file or folder; {str(parent)!r} is the last part that exists"
    next_step = "Check the path, or run colabkit.mount() if it is on Drive"
    raise SourceMissing(cannot(act, found, "a folder, a file or an archive", next_step))


def _open_address(text: str) -> Source:
    if text.lower().startswith(("file://", "local://")):
        raise BadSource(cannot(f"read {text!r}", "a path as address", "a path", "Leave out what stands before it"))
    address = address_of(text)
    if address.kind == FSSPEC:
        return BucketSource(text)
    next_step = "Run colabkit.stage() with it, and use the path that it returns"
    raise BadSource(cannot(f"read {address.shown!r}", "an address", "something on this machine", next_step))


def _kind_of(path: Path) -> Callable[[Path], Source] | None:
    """Return what opens a path; None if it is neither a folder nor a regular file."""
    if path.is_dir():
        return FolderSource
    if not path.is_file():
        return None
    name = path.name.lower()
    for suffixes, archive, _ in _ARCHIVES:
        if name.endswith(suffixes):
            return archive
    if name.endswith(TABLE_SUFFIXES):
        return ManifestSource if is_manifest(path) else FileSource
    if name.endswith(_WHOLE_SUFFIXES):
        return FileSource
    return next((archive for _, archive, is_one in _ARCHIVES if is_one(path)), FileSource)


def check_outside(act: str, source: Source, target: Path) -> None:
    """Refuse a target that is the source or lies inside it: a source is never written to."""
    table = mounts()  # a mount that hangs is not asked
    if Path(resolved(os.path.abspath(target), table)).is_relative_to(resolved(os.path.abspath(source.name), table)):
        found = f"the target {str(target)!r} lies inside the source"
        raise BadSource(cannot(act, found, "a target elsewhere", "Choose another target"))


def sample_archive(name: str) -> Path:
    """Return the archive of a data set that travels inside the package, as in `sample_archive("digits")`."""
    path = _SAMPLES / f"{name}.zip"
    if not path.is_file():
        known = ", ".join(repr(f"samples:{file.stem}") for file in sorted(_SAMPLES.glob("*.zip")))
        act = f"read {f'samples:{name}'!r}"
        raise SourceMissing(cannot(act, "no such samples", f"one of {known}", "Use one of these"))
    return path


_COMPANIONS = (".json", ".txt", ".md", ".idx")  # lie beside shards, and say nothing that is needed
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}")
_MOST_SHARDS = 100_000
_MOST_DIGITS = 18


def open_records(source: Any) -> Source | None:
    """Return the source if it consists of records; None if it is anything else.

    An LMDB is a folder with `data.mdb`, or a file that ends in `.lmdb` or `.mdb`. WebDataset's shards are tars, and
    TFRecord files end in `.tfrecord`, `.tfrecords` or `.tfrec`, perhaps with `-00000-of-00010` behind, or in that
    alone. Either is given as one file, a list of them, a pattern as in `shards/*.tar` and
    `train-{000000..000012}.tar`, or a folder that holds only such files, itself or in folders such as `train/`; files
    of `.json`, `.txt`, `.md` and `.idx` may lie beside. One tar alone is a shard only if neighbouring members have one
    stem.

    Args:
        source: what a user gave as source.

    Raises:
        SourceMissing: if a shard is missing, or a pattern of shards matches none.
        InvalidOption: if a pattern has more than 100,000 shards.
        NotMounted: if it begins with `drive:`, and Drive is not mounted.
        FileFailed: if it cannot be looked at.
        TimedOut: if there was no answer, twice.
    """
    if isinstance(source, list | tuple):
        return _open_list(source)
    text = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if not text or not isinstance(text, str) or "\0" in text or "://" in text or text.startswith("samples:"):
        return None
    act = f"read {text!r}"
    path = user_path(text, act)
    with translated(act):
        return answer_of(lambda: _open_path(act, path), can_hang(os.path.abspath(path), mounts()))


def _open_list(given: Sequence[Any]) -> Source | None:
    names = [os.fspath(one) if isinstance(one, str | os.PathLike) else None for one in given]
    texts = [name for name in names if isinstance(name, str) and "://" not in name]
    kind = _shard_kind(texts) if len(texts) == len(names) else None
    if kind is None:
        return None
    act = f"read {texts[0]!r}"
    paths = [user_path(text, act) for text in texts]
    far = mounts()
    with translated(act):
        is_far = any(can_hang(folder, far) for folder in {os.path.dirname(os.path.abspath(path)) for path in paths})
        files = answer_of(lambda: [file for path in paths for file in _expanded(act, path)], is_far)
        return kind(texts[0] if len(texts) == 1 else f"{texts[0]} and {len(texts) - 1} more", files)


def _open_path(act: str, path: Path) -> Source | None:
    if path.is_dir():
        if (path / DATA_FILE).is_file():
            return LmdbSource(path)
        files = _shards_in(path)
        kind = _shard_kind([file.name for file in files])
        return kind(str(path), files) if kind else None
    name = path.name.lower()
    if path.is_file():
        if name.endswith(LMDB_SUFFIXES):
            return LmdbSource(path)
        if is_tfrecord_name(name):
            return TfRecordSource(str(path), [path])
        return WebDatasetSource(str(path), [path]) if name.endswith(".tar") and is_webdataset(path) else None
    if not glob.has_magic(str(path)) and not _BRACES.search(str(path)):
        return None
    files = _expanded(act, path) if _shard_kind([name]) else [*islice(_matches(act, path), _MOST_SHARDS)]
    kind = _shard_kind([file.name for file in files])
    return kind(str(path), files) if kind else None


def _shard_kind(names: Sequence[str]) -> Callable[[str, Sequence[Path]], RangeSource] | None:
    """Return what reads files of these names; None if they are not all shards of one kind."""
    if names and all(name.lower().endswith(".tar") for name in names):
        return WebDatasetSource
    return TfRecordSource if names and all(map(is_tfrecord_name, names)) else None


def _shards_in(folder: Path) -> list[Path]:
    """Return the shards of a folder and of those in it, sorted; none if there is anything else."""
    files: list[Path] = []
    for inner in _visible(folder):
        for entry in _visible(Path(inner.path)) if inner.is_dir() else [inner]:
            if entry.is_file() and _shard_kind([entry.name]):
                files.append(Path(entry.path))
            elif not entry.is_file() or not entry.name.lower().endswith(_COMPANIONS):
                return []
    return sorted(files)


def _visible(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _expanded(act: str, path: Path) -> list[Path]:
    """Return the files that a path or pattern means; every one that is spelled out has to be there."""
    files = list(dict.fromkeys(_matches(act, path)))
    if missing := [file for file in files if not file.is_file()]:
        told = f"no file {str(missing[0])!r}, and {len(missing)} of {format_things(len(files), 'shard')} like it"
        raise SourceMissing(cannot(act, told, "every shard", "Check the path, or stage the shards that are missing"))
    if not files:
        raise SourceMissing(cannot(act, "no file of this pattern", "at least one shard", "Check the path"))
    return files


def _matches(act: str, path: Path) -> Iterator[Path]:
    """Yield the files that a path with braces and wildcards means, in the order of its braces."""
    if path.exists():
        yield path
        return
    for text in _unbraced(act, str(path)):
        if glob.has_magic(text):
            yield from map(Path, sorted(glob.iglob(text, recursive=True)))
        else:
            yield Path(text)


def _unbraced(act: str, text: str) -> list[str]:
    """Return what a pattern with `{000..012}` or `{train,val}` means, as shells read it, 100,000 texts at most."""
    texts = [""]
    at = 0
    for match in _BRACES.finditer(text):
        first, last, words = match.groups()
        if words is None and max(len(first), len(last)) > _MOST_DIGITS:
            found = f"a number of {max(len(first), len(last))} digits"
            raise InvalidOption(cannot(act, found, f"at most {_MOST_DIGITS}", "Check the numbers in its braces"))
        numbers = None if words is not None else _numbers(int(first), int(last))
        count = words.count(",") + 1 if numbers is None else len(numbers)
        if len(texts) * count > _MOST_SHARDS:
            found = f"a pattern of {len(texts) * count} shards"
            raise InvalidOption(cannot(act, found, f"at most {_MOST_SHARDS}", "Check the numbers in its braces"))
        chosen = words.split(",") if numbers is None else [str(number).zfill(len(first)) for number in numbers]
        texts = [f"{before}{text[at : match.start()]}{one}" for before in texts for one in chosen]
        at = match.end()
    return [before + text[at:] for before in texts]


def _numbers(first: int, last: int) -> range:
    return range(first, last + 1) if first <= last else range(first, last - 1, -1)
