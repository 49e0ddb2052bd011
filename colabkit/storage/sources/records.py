"""Which sources are records: an LMDB, WebDataset's shards, TFRecord files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from colabkit.foundation import (
    InvalidOption,
    SourceMissing,
    can_hang,
    cannot,
    format_things,
    mounts,
    translated,
    user_path,
)
from colabkit.storage.sources.answering import answer_of
from colabkit.storage.sources.items import Source
from colabkit.storage.sources.lmdb_records import DATA_FILE, LMDB_SUFFIXES, LmdbSource
from colabkit.storage.sources.ranges import RangeSource
from colabkit.storage.sources.tfrecord import TfRecordSource, is_tfrecord_name
from colabkit.storage.sources.webdataset import WebDatasetSource, is_webdataset

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
    kind = _kind_of(texts) if len(texts) == len(names) else None
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
        kind = _kind_of([file.name for file in files])
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
    files = _expanded(act, path) if _kind_of([name]) else [*islice(_matches(act, path), _MOST_SHARDS)]
    kind = _kind_of([file.name for file in files])
    return kind(str(path), files) if kind else None


def _kind_of(names: Sequence[str]) -> Callable[[str, Sequence[Path]], RangeSource] | None:
    """Return what reads files of these names; None if they are not all shards of one kind."""
    if names and all(name.lower().endswith(".tar") for name in names):
        return WebDatasetSource
    return TfRecordSource if names and all(map(is_tfrecord_name, names)) else None


def _shards_in(folder: Path) -> list[Path]:
    """Return the shards of a folder and of those in it, sorted; none if there is anything else."""
    files: list[Path] = []
    for inner in _visible(folder):
        for entry in _visible(Path(inner.path)) if inner.is_dir() else [inner]:
            if entry.is_file() and _kind_of([entry.name]):
                files.append(Path(entry.path))
            elif not entry.is_file() or not entry.name.lower().endswith(_COMPANIONS):
                return []
    return sorted(files)


def _visible(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _expanded(act: str, path: Path) -> list[Path]:
    """Return the files that a path or pattern means; every one that is spelled out has to be there.

    Raises:
        SourceMissing: naming the first that is missing.
    """
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
    """Return what a pattern with `{000..012}` or `{train,val}` means, as shells read it.

    Raises:
        InvalidOption: if it means more than 100,000, or its numbers are longer than any shard's.
    """
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
