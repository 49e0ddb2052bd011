"""Open a source of any type, such as a folder, archive, table, bucket or records, by path, address or pattern.

To add a source type, write a class in a new module that implements the protocol in `items.py`, and add it here:
in `_ARCHIVES` for an archive, in `_kind_of` for any other path, in `_open_address` for an address, and in `_open_path`
and `_shard_kind` for records.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from colabkit.foundation import (
    BadSource,
    InvalidOption,
    SourceMissing,
    Text,
    call,
    can_hang,
    cannot,
    format_things,
    kind_of,
    mounts,
    omit,
    option,
    resolved,
    translated,
    user_path,
)
from colabkit.storage.addresses import FSSPEC, address_of
from colabkit.storage.sources.bucket import BucketSource
from colabkit.storage.sources.concurrency import answer_of
from colabkit.storage.sources.folder import FileSource, FolderSource
from colabkit.storage.sources.items import MOST_LISTINGS, ArchiveSource, Source, mode_of, unsteady_listing
from colabkit.storage.sources.lmdb_records import DATA_FILE, LMDB_SUFFIXES, LmdbSource
from colabkit.storage.sources.manifest import ManifestSource, is_frame
from colabkit.storage.sources.parquet import PARQUET_SUFFIX, ParquetSource, holds_images
from colabkit.storage.sources.ranges import RangeSource
from colabkit.storage.sources.table_files import TABLE_SUFFIXES, is_manifest
from colabkit.storage.sources.tar_archive import TAR_SUFFIXES, TarSource, is_tar
from colabkit.storage.sources.tfrecord import TfRecordSource, is_tfrecord_name
from colabkit.storage.sources.webdataset import WebDatasetSource, is_webdataset
from colabkit.storage.sources.zip_archive import ZipSource

AnySource: TypeAlias = str | os.PathLike[str] | Source | Any
"""Any source, before its type is checked; public functions list the types that they accept."""


_ARCHIVES: tuple[tuple[tuple[str, ...], type[ArchiveSource], Callable[[Path], bool]], ...] = (
    # Suffixes, class, and a test of the content for files without a known suffix. Tar comes first, since a tar that
    # contains a zip archive at its end also passes the zip test.
    (TAR_SUFFIXES, TarSource, is_tar),
    ((".zip",), ZipSource, zipfile.is_zipfile),
)
ARCHIVE_SUFFIXES = tuple(suffix for suffixes, *_ in _ARCHIVES for suffix in suffixes)
"""File name suffixes of archives."""

_SAMPLES = Path(__file__).parent.parent / "samples"
# Files with these suffixes are opened as single files, although many of them are zip archives internally.
_WHOLE_SUFFIXES = (
    *(".bin", ".ckpt", ".keras", ".npz", ".onnx", ".pt", ".pt2", ".ptl", ".pth", ".safetensors"),
    *(".apk", ".docx", ".epub", ".ipynb", ".jar", ".kmz", ".odp", ".ods", ".odt", ".pptx", ".whl", ".xlsx"),
    *(".h5", ".hdf5", ".npy", ".arrow", ".feather", ".tfrecord"),
)


class PathTable(Protocol):
    """A pandas DataFrame that lists one file in each row, or a Series of paths.

    Polars frames, Arrow tables and Ray datasets are accepted as well, and so are Hugging Face datasets with a column of
    text that has one of the names below.

    The path column is the first of `path, file, filename, file_name, filepath, file_path, image, image_path,
    img, img_path, photo` that exists, ignoring case, or the only column.
    """

    @property
    def iloc(self) -> Any:
        """Rows by number, as in pandas."""


def open_source(
    source: AnySource,
    *,
    path_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    skips_missing: bool | None = None,
) -> Source:
    """Open a source and return it.

    A path can be a folder, a zip or tar archive, a table of paths, or a single file of any other type. Archives are
    recognized by their suffix or, without a known suffix, by their first and last bytes. A `.csv`, `.tsv` or `.parquet`
    file is a table if it has a path column and the first path in it exists, or if one of the options below is set.

    Args:
        source: a path; a list of paths, or a pandas DataFrame with a path column; the address of a bucket's folder,
            such as `"gs://bucket/birds"`; `samples:NAME` for data included in the package; or a `Source`.
        path_column: the column of a table that holds the paths.
        root: the folder of the relative paths in a table.
        skips_missing: leave out a table's rows without a path and those whose files are missing, unless no row
            remains; None if the caller has no `on_bad=` for this.

    Raises:
        SourceMissing: if the path does not exist, or `samples:NAME` is unknown.
        BadSource: if the path is a special file or a broken link, a table is invalid, or an address is local or must be
            fetched first.
        InvalidOption: if `source` is invalid, or if `path_column` or `root` is given for anything but a table.
        NotMounted: if the path begins with `drive:` and Drive is not mounted.
        TimedOut: if the file system does not respond in two attempts.
    """
    as_table: dict[str, Any] = {"path_column": path_column, "root": root, "skips_missing": skips_missing}
    if not isinstance(source, Source) and (isinstance(source, list | tuple) or is_frame(source)):
        return ManifestSource(source, **as_table)
    is_table = isinstance(source, str | os.PathLike) and str(source).lower().endswith(TABLE_SUFFIXES)
    given = {name: as_table[name] for name in ("path_column", "root") if as_table[name] is not None}
    if isinstance(source, Source):
        _check_not_table(source.name, given)
        return source
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if not name or not isinstance(name, str):
        found = "the path is empty" if name == "" else f"the source is {kind_of(source)}"
        expected = "a path, an address, a table of paths or 'samples:digits'"
        raise InvalidOption(cannot("read the source", found, expected, "Pass the path of the source"))
    if "://" in name or name.startswith(("drive.google.com/", "docs.google.com/")):
        _check_not_table(name, given)
        return _open_address(name)
    act = f"read {name!r}"
    path = sample_archive(name.removeprefix("samples:")) if name.startswith("samples:") else user_path(name, act)
    with translated(act):
        kind = answer_of(lambda: _kind_of(path), can_hang(os.path.abspath(path), mounts()))
        if kind is ManifestSource or (is_table and kind is FileSource and (given or skips_missing)):
            return ManifestSource(path, **as_table)
        if kind is not None:
            _check_not_table(name, given)
            return kind(path)
        if os.path.lexists(path):
            special, readable = "it is a special file or a broken link", "a folder, a file or an archive"
            raise BadSource(cannot(act, special, readable, "Pass the folder that holds the files"))
        parent = next(folder for folder in path.absolute().parents if folder.exists())
    missing = f"no such file or folder (the last part that exists is {str(parent)!r})"
    # Omit this advice for paths that begin with `drive:`, which can be resolved only if Drive is mounted.
    mount: Text = "" if name.startswith("drive:") else (", or run ", call("mount"), " if it is on Drive")
    raise SourceMissing(cannot(act, missing, "", ("Check the path", mount)))


def _check_not_table(name: str, given: dict[str, Any]) -> None:
    """Raise `InvalidOption` if there are options of tables, because the source is something else."""
    for one, value in given.items():
        not_table = (option(one, value), " applies only to a table of paths")
        raise InvalidOption(cannot(f"read {name!r:.60}", not_table, "", omit(one)))


def _open_address(text: str) -> Source:
    if text.lower().startswith(("file://", "local://")):
        scheme = text.partition("://")[0]
        next_step = f"Remove {scheme}:// from the path"
        raise BadSource(cannot(f"read {text!r}", "it is a local path written as an address", "a path", next_step))
    address = address_of(text)
    if address.kind == FSSPEC:
        return BucketSource(text)
    stage = ("Run ", call("stage"), " on it, and use the path that it returns")
    raise BadSource(cannot(f"read {address.shown!r}", "it is a remote address", "a local path", stage))


def _kind_of(path: Path) -> Callable[[Path], Source] | None:
    """Return the class that opens a path; None if it is neither a folder nor a regular file."""
    mode = mode_of(path)
    if stat.S_ISDIR(mode):
        return FolderSource
    if not stat.S_ISREG(mode):
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
    """Raise `BadSource` if the target is the source or inside it, since sources are never modified."""
    # Resolve paths by the mount table, without accessing a mount that may hang.
    table = mounts()
    if Path(resolved(os.path.abspath(target), table)).is_relative_to(resolved(os.path.abspath(source.name), table)):
        found = f"the target {str(target)!r} is inside the source"
        raise BadSource(cannot(act, found, "", "Choose another target"))


def sample_archive(name: str) -> Path:
    """Return the path of the archive of an included dataset, such as `sample_archive("digits")`."""
    path = _SAMPLES / f"{name}.zip"
    if not path.is_file():
        known = " or ".join(repr(f"samples:{file.stem}") for file in sorted(_SAMPLES.glob("*.zip")))
        act = f"read {f'samples:{name}'!r}"
        raise SourceMissing(cannot(act, "colabkit does not include this dataset", known, "Check the name"))
    return path


# Suffixes of files that are ignored next to shards.
_COMPANIONS = (".json", ".txt", ".md", ".idx")
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}")
_MOST_SHARDS = 100_000
# Levels of subfolders in which shards are found, for example `default/train/0000.parquet`.
_MOST_LEVELS = 3
_MOST_DIGITS = 18


def open_samples(
    source: AnySource,
    *,
    path_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    skips_missing: bool | None = None,
) -> Source:
    """Open records with `open_records()`, or any other source with `open_source()`, which describes the arguments."""
    records = None if root is not None else open_records(source, path_column)
    return records or open_source(source, path_column=path_column, root=root, skips_missing=skips_missing)


def open_records(source: Any, column: str | None = None) -> Source | None:
    """Open a source that consists of records; return None for any other source.

    An LMDB is a folder with `data.mdb`, or a file with the suffix `.lmdb` or `.mdb`. WebDataset shards are tar files.
    The name of a TFRecord file ends in `.tfrecord`, `.tfrecords`, `.tfrec` or a number such as `-00000-of-00010`.
    Parquet files contain images; one file without a column of images is a table instead. Shards are given as one file,
    a list of files, a pattern such as `shards/*.tar` or `train-{000000..000012}.tar`, or a folder that contains only
    such files, directly or in subfolders such as `train/`; `.json`, `.txt`, `.md` and `.idx` files next to them are
    ignored. A tar given by its own path is a shard only if adjacent members share a stem and one of them has a known
    extension.

    Args:
        source: a path, a list of paths, a pattern or any other source.
        column: the column of Parquet files that holds the images; None if there is only one. Other records have no
            such column, so they are not opened if it is given.

    Raises:
        SourceMissing: if a shard is missing, or a pattern matches no shards.
        InvalidOption: if a pattern has more than 100,000 shards, or a number with more than 18 digits.
        BadArchive: if a Parquet file is damaged.
        MissingPackage: if the source is a Parquet file and pyarrow is not installed.
        NotMounted: if the source begins with `drive:` and Drive is not mounted.
        FileFailed: if the source cannot be accessed.
        SourceChanged: if all listings of a folder on a mount differ.
        TimedOut: if there is no answer in two attempts.
    """
    if isinstance(source, list | tuple):
        return _open_list(source, column)
    text = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if not text or not isinstance(text, str) or "\0" in text or "://" in text or text.startswith("samples:"):
        return None
    act = f"read {text!r}"
    path = user_path(text, act)
    with translated(act):
        return answer_of(lambda: _open_path(act, path, column), can_hang(os.path.abspath(path), mounts()))


def is_record_bucket(bucket: BucketSource) -> bool:
    """Return whether a folder in a bucket contains only shards, and files that are ignored next to shards."""
    names = []
    for path in bucket.paths():
        *folders, name = path.split("/")
        if any(part.startswith(".") for part in (*folders, name)) or name.lower().endswith(_COMPANIONS):
            continue
        names.append(name)
        if _shard_kind(names[-1:], None) is None or len(folders) > _MOST_LEVELS:
            return False
    return _shard_kind(names, None) is not None


def _open_list(given: Sequence[Any], column: str | None) -> Source | None:
    names = [os.fspath(one) if isinstance(one, str | os.PathLike) else None for one in given]
    texts = [name for name in names if isinstance(name, str) and "://" not in name]
    kind = _shard_kind(texts, column) if len(texts) == len(names) else None
    if kind is None:
        return None
    act = f"read {texts[0]!r}"
    paths = [user_path(text, act) for text in texts]
    table = mounts()
    with translated(act):
        folders = {os.path.dirname(os.path.abspath(path)) for path in paths}
        is_remote = any(can_hang(folder, table) for folder in folders)
        files = answer_of(lambda: [file for path in paths for file in _expanded(act, path)], is_remote)
        return kind(texts[0] if len(texts) == 1 else f"{texts[0]} and {len(texts) - 1} more", files)


def _open_path(act: str, path: Path, column: str | None) -> Source | None:
    mode = mode_of(path)
    if stat.S_ISDIR(mode):
        if column is None and stat.S_ISREG(mode_of(path / DATA_FILE)):
            return LmdbSource(path)
        files = _agreed(act, path, lambda: _shards_in(path))
        kind = _shard_kind([file.name for file in files], column)
        return kind(str(path), files) if kind else None
    name = path.name.lower()
    if stat.S_ISREG(mode):
        if name.endswith(PARQUET_SUFFIX):
            return ParquetSource(str(path), [path], column) if holds_images(act, path, column) else None
        if column is not None:
            return None
        if name.endswith(LMDB_SUFFIXES):
            return LmdbSource(path)
        if is_tfrecord_name(name):
            return TfRecordSource(str(path), [path])
        return WebDatasetSource(str(path), [path]) if name.endswith(".tar") and is_webdataset(path) else None
    if not glob.has_magic(str(path)) and not _BRACES.search(str(path)):
        return None
    files = (
        _expanded(act, path)
        if _shard_kind([name], column)
        else _agreed(act, path, lambda: [*islice(_matches(act, path), _MOST_SHARDS)])
    )
    kind = _shard_kind([file.name for file in files], column)
    return kind(str(path), files) if kind else None


def _shard_kind(names: Sequence[str], column: str | None) -> Callable[[str, Sequence[Path]], RangeSource] | None:
    if names and all(name.lower().endswith(PARQUET_SUFFIX) for name in names):
        return partial(ParquetSource, column=column)
    if column is not None:
        return None
    if names and all(name.lower().endswith(".tar") for name in names):
        return WebDatasetSource
    return TfRecordSource if names and all(map(is_tfrecord_name, names)) else None


def _shards_in(folder: Path) -> list[Path]:
    """Return the shards of a folder and its subfolders, sorted; empty if there are other files that are not ignored."""
    files: list[Path] = []
    waiting = [(folder, _MOST_LEVELS)]
    while waiting:
        inner, levels = waiting.pop()
        for entry in _visible(inner):
            if entry.is_dir() and levels:
                waiting.append((Path(entry.path), levels - 1))
            elif entry.is_file() and _shard_kind([entry.name], None):
                files.append(Path(entry.path))
            elif not entry.is_file() or not entry.name.lower().endswith(_COMPANIONS):
                return []
    return sorted(files)


def _agreed(act: str, path: Path, list_files: Callable[[], list[Path]]) -> list[Path]:
    """Return the files at a path; on a mount, whose listings may leave names out, list until two results agree."""
    results: list[list[Path]] = []
    is_remote = can_hang(os.path.abspath(path), mounts())
    while True:
        found = list_files()
        # Do not list again after an empty result: the caller then opens no shards, or raises an error.
        if not is_remote or not found or found in results:
            return found
        results.append(found)
        if len(results) == MOST_LISTINGS:
            raise unsteady_listing(act)


def _visible(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _expanded(act: str, path: Path) -> list[Path]:
    files = _agreed(act, path, lambda: list(dict.fromkeys(_matches(act, path))))
    if missing := [file for file in files if not stat.S_ISREG(mode_of(file))]:
        shards = format_things(len(files), "shard")
        found = f"files are missing for {len(missing)} of {shards}, starting with {str(missing[0])!r}"
        raise SourceMissing(cannot(act, found, "", "Check the path, or stage the missing shards"))
    if not files:
        raise SourceMissing(cannot(act, "no file matches this pattern", "at least one shard", "Check the pattern"))
    return files


def _matches(act: str, path: Path) -> Iterator[Path]:
    """Yield the files that match a path with braces and wildcards, in the order in which its braces expand."""
    if mode_of(path):
        yield path
        return
    for text in _unbraced(act, str(path)):
        if glob.has_magic(text):
            yield from map(Path, sorted(glob.iglob(text, recursive=True)))
        else:
            yield Path(text)


def _unbraced(act: str, text: str) -> list[str]:
    """Expand `{000..012}` and `{train,val}` in a pattern as shells do, to at most 100,000 paths."""
    texts = [""]
    at = 0
    for match in _BRACES.finditer(text):
        first, last, words = match.groups()
        if words is None and max(len(first), len(last)) > _MOST_DIGITS:
            longest, limit = f"a number in braces has {max(len(first), len(last))} digits", f"at most {_MOST_DIGITS}"
            raise InvalidOption(cannot(act, longest, limit, "Check the numbers in braces"))
        numbers = None if words is not None else _numbers(int(first), int(last))
        count = words.count(",") + 1 if numbers is None else len(numbers)
        if len(texts) * count > _MOST_SHARDS:
            found = f"the pattern names {len(texts) * count} shards"
            raise InvalidOption(cannot(act, found, f"at most {_MOST_SHARDS}", "Check the numbers in braces"))
        chosen = words.split(",") if numbers is None else [str(number).zfill(len(first)) for number in numbers]
        texts = [f"{before}{text[at : match.start()]}{one}" for before in texts for one in chosen]
        at = match.end()
    return [before + text[at:] for before in texts]


def _numbers(first: int, last: int) -> range:
    return range(first, last + 1) if first <= last else range(first, last - 1, -1)
