"""Download one file of a remote folder with the retries and timeouts of `fetch()`, but without its report."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from colabkit.foundation import InvalidOption, cannot, file_changes, format_bytes, partials, user_path
from colabkit.storage.addresses import FSSPEC, WEB, Address, address_of
from colabkit.storage.fetching.bucket import fetch_bucket
from colabkit.storage.fetching.transfer import FetchJob
from colabkit.storage.fetching.web import fetch_web

_TIMEOUT_S = 60.0
_LOCAL = ("file://", "local://")


class FileTooLarge(InvalidOption):
    """Error for a file that is larger than the caller allows."""


def file_address(path: str | os.PathLike[str]) -> Address:
    """Return the address of a file in a folder: on the web, in a bucket, or at a local path, which fsspec reads too.

    Raises:
        InvalidOption: if names of other files in the folder cannot be derived from the address.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if "://" not in text or text.startswith(_LOCAL):
        found = text.partition("://")[2] if text.startswith(_LOCAL) else path
        local = user_path(found, "open a pack").absolute()
        return Address(FSSPEC, f"file://{local}", str(local))
    address = address_of(text)
    if address.kind not in (WEB, FSSPEC) or "?" in text or "::" in text:
        single = "it addresses a single file"
        expected = "an address in a folder, such as 'gs://bucket/birds.h5'"
        next_step = "Omit the query, and use no chain of addresses"
        raise InvalidOption(cannot(f"open {address.shown!r}", single, expected, next_step))
    return address


def sibling_of(address: Address, name: str) -> Address:
    """Return the address of another file in the same folder."""
    part = quote(name, safe="") if address.kind == WEB else name
    text, shown = f"{address.text.rpartition('/')[0]}/{part}", f"{address.shown.rpartition('/')[0]}/{name}"
    return replace(address, text=text, shown=shown, name=name)


def download(address: Address, to: Path, most_bytes: int, on_block: Callable[[], None] = lambda: None) -> None:
    """Download a file to the path `to`, which is replaced; resume if an earlier call was interrupted.

    Args:
        address: address of the file, as `file_address` returns it.
        to: path of the file; hidden partials are written next to it.
        most_bytes: maximum size in bytes.
        on_block: function that is called for each block that arrives; an exception that it raises ends the download.

    Raises:
        FileTooLarge: if the file has more than `most_bytes` bytes.
        FetchFailed, TimedOut, NotEnoughSpace, MissingPackage: as `fetch()` does.
    """
    act = f"fetch {address.shown!r}"
    with (
        file_changes.translated(act),
        _Download(act, address, to, most_bytes, on_block) as job,
        partials.KeptPartial(job.folder, address.digest(job.name)) as kept,
    ):
        job.is_kept = kept.folder == kept.kept_folder
        result = (fetch_web if address.kind == WEB else fetch_bucket)(job, kept)
        kept.publish_as(result.path, to, replace=True)


class _Download(FetchJob):
    def __init__(self, act: str, address: Address, to: Path, most_bytes: int, on_block: Callable[[], None]) -> None:
        super().__init__(act, address, to, None, _TIMEOUT_S, cookies=False, overwrite=True, progress=False)
        self._most_bytes = most_bytes
        self._on_block = on_block

    def begin(self, done: int, total: int | None) -> None:
        """Record that an attempt resumes after `done` bytes of `total`."""
        self._check(total or 0)
        super().begin(done, total)

    def advance(self, count: int) -> None:
        """Record that `count` bytes arrived."""
        super().advance(count)
        self._check(self._done)
        self._on_block()

    def _check(self, size: int) -> None:
        if size > self._most_bytes:
            found, expected = f"it has {format_bytes(size)} or more", f"at most {format_bytes(self._most_bytes)}"
            raise FileTooLarge(cannot(self.act, found, expected, "Check the address"))
