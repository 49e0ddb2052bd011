"""Which source is meant: its name, and the key that tells it and its near copies from all others."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from colabkit.foundation import InvalidOption, cannot, kind_of, user_path
from colabkit.storage.addresses import Address, address_of
from colabkit.storage.sources.items import Source
from colabkit.storage.sources.registry import AnySource

_TABLE = "a table of paths"
_NAME_CHARS = 60  # with a key at most 255 bytes, also of 4 a character


def identity_of(source: AnySource, *, extract: bool) -> tuple[str, str, Address | None]:
    """Return a source's name for messages, the key that tells it from others, and its address if it has one.

    All from its text: the far side, which may be slow, hung or gone, is not touched.
    """
    address = None
    if isinstance(source, Source):
        name, parts = source.name, [type(source).__name__, source.name]
    elif isinstance(source, str | os.PathLike) and os.fspath(source):
        text = os.fspath(source)
        if not isinstance(text, str):
            raise InvalidOption(cannot(f"read {text!r}", "bytes as path", "a text", "Decode it with os.fsdecode"))
        if text.startswith("samples:"):
            name, parts = text, [text]
        elif address := _address(text):
            name, parts = address.shown, [address.digest()]
        else:
            name = os.path.abspath(user_path(source, f"stage {text!r}"))
            parts = [name]
    elif isinstance(source, str):
        needed = "a folder, a file, an address, a table of paths or 'samples:digits'"
        raise InvalidOption(cannot("read ''", "an empty text", needed, "Pass its path"))
    else:
        name, parts = _TABLE, [os.getcwd(), *_table_lines(source)]
    digest = hashlib.sha256(os.fsencode("\0".join([*parts, str(extract)])))
    return name, digest.hexdigest(), address


def short_name(name: str) -> str:
    """Return what near copies and packs of a source are called: the last part of its name, without endings."""
    if name == _TABLE:
        return "paths"
    stem = Path(name).stem.removesuffix(".tar").rpartition(":")[2]
    return stem[:_NAME_CHARS] or "root"


def _address(text: str) -> Address | None:
    """Return what a text that is no path of this machine stands for."""
    if "://" in text or text.startswith(("drive.google.com/", "docs.google.com/")):
        return address_of(text)
    if "/" in text or os.path.lexists(text):
        return None
    try:
        return address_of(text)  # the id of a Drive file
    except InvalidOption:
        return None


def _table_lines(source: Any) -> list[str]:
    """Return what a table of paths holds, as text."""
    if isinstance(source, list | tuple):
        return [os.fspath(path) for path in source if isinstance(path, str | os.PathLike)]
    to_csv = getattr(source, "to_csv", None)
    if to_csv is None:
        found, needed = kind_of(source), "a path, an address or a table of paths"
        raise InvalidOption(cannot(f"read {source!r:.60}", found, needed, "Pass the path as a text"))
    return [str(to_csv(index=False))]
