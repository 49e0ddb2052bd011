"""A folder of an fsspec file system to write to, for example in a bucket."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from colabkit.foundation import ColabkitError, FileFailed, TimedOut, cannot, file_changes, format_seconds
from colabkit.storage.addresses import Address
from colabkit.storage.sources.bucket import BucketSource
from colabkit.storage.sources.reads import Retries

T = TypeVar("T")

# Timeout of a call, besides the time to send a file: listings of folders with many objects take minutes.
_ANSWER_S = 600.0
# Slowest rate of an upload, in bytes per second, just below the 1 Mbit/s of slow home lines. Slower ones are abandoned.
_SLOWEST_BYTES_S = 100_000


class BucketFolder(BucketSource):
    """A folder to write to; object stores create it with the first object.

    All methods retry errors that may be transient, and raise `FileFailed` or `FetchFailed`.

    Args:
        address: address of the folder.
        act: verb and object for messages.
    """

    def __init__(self, address: Address, act: str) -> None:
        super().__init__(address, act)
        # Only local file systems have folders that must be created, and show a file before it is complete.
        self._is_local = self.protocol in ("file", "local")

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each object directly in the folder, by name; empty if it does not exist."""

        def listed() -> dict[str, int]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return {}
            return {info["name"].rpartition("/")[2]: info["size"] or 0 for info in found if info["type"] == "file"}

        return self._done("listing the folder", listed, tries=2)

    def put(self, path: Path, name: str) -> None:
        """Upload a file; an object of this name is replaced atomically."""

        def upload() -> None:
            if not self._is_local:
                self._fs.put_file(str(path), self._inside(name))
                return
            with self._hidden(path) as hidden:
                self._fs.mv(hidden, self._inside(name))

        self._done(f"uploading {name!r}", upload, path.stat().st_size)

    @contextmanager
    def _hidden(self, path: Path) -> Iterator[str]:
        """Copy a file to a hidden file of a local folder, which is removed afterwards unless the block renames it."""
        hidden = self._inside(f".{uuid.uuid4().hex}")
        self._fs.makedirs(self._root, exist_ok=True)
        try:
            self._fs.put_file(str(path), hidden)
            yield hidden
        finally:
            with suppress(FileNotFoundError):
                self._fs.rm_file(hidden)

    def create(self, path: Path, name: str) -> bool:
        """Upload a small file unless an object of this name exists, and return whether it did not exist.

        Many stores check and upload atomically.
        """

        def upload() -> bool:
            if self._is_local:
                with self._hidden(path) as hidden:
                    try:
                        file_changes.link(Path(hidden), Path(self._inside(name)))
                    except FileExistsError:
                        return False
                return True
            try:
                self._fs.pipe_file(self._inside(name), path.read_bytes(), mode="create")
            except Exception:
                # Stores raise different errors if the object exists.
                if self._fs.exists(self._inside(name)):
                    return False
                raise
            return True

        return self._done(f"uploading {name!r}", upload, path.stat().st_size)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that do not exist are ignored."""

        def remove_one(name: str) -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._inside(name))

        for name in names:
            self._done(f"removing {name!r}", partial(remove_one, name))

    def _done(self, doing: str, work: Callable[[], T], size: int = 0, tries: int = 1) -> T:
        """Return the result of `work`, which sends `size` bytes; after a timeout, only a read may be tried again."""
        timeout_s = _ANSWER_S + size / _SLOWEST_BYTES_S
        try:
            return Retries().run(lambda: self._ask(work, tries, timeout_s))
        except TimedOut:
            found = f"{doing} took more than {format_seconds(timeout_s)}"
            raise TimedOut(cannot(self._act, found, "", "Check the connection, then try again")) from None
        except ColabkitError:
            raise
        except OSError as error:
            found = f"the file system of {self.name!r} reports an error ({error.strerror or error})"
            next_step = "Check the address and your permissions, then try again"
            raise FileFailed(cannot(self._act, found, "", next_step)) from error

    def _inside(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name
