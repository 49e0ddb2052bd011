"""A folder of an fsspec file system to write to, for example in a bucket."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from colabkit.foundation import ColabkitError, FileFailed, cannot
from colabkit.storage.addresses import Address
from colabkit.storage.sources.bucket import BucketSource
from colabkit.storage.sources.reads import Retries

T = TypeVar("T")


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

        return self._done(listed)

    def put(self, path: Path, name: str) -> None:
        """Upload a file; an object of this name is replaced atomically."""

        def upload() -> None:
            if not self._is_local:
                self._fs.put_file(str(path), self._inside(name))
                return
            hidden = self._inside(f".{uuid.uuid4().hex}")
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.put_file(str(path), hidden)
            self._fs.mv(hidden, self._inside(name))

        self._done(upload)

    def create(self, path: Path, name: str) -> bool:
        """Upload a small file unless an object of this name exists, and return whether it did not exist.

        Many stores check and upload atomically.
        """

        def upload() -> bool:
            try:
                self._fs.pipe_file(self._inside(name), path.read_bytes(), mode="create")
            except Exception:
                # Stores raise different errors if the object exists.
                if self._fs.exists(self._inside(name)):
                    return False
                raise
            return True

        return self._done(upload)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that do not exist are ignored."""

        def remove_one(name: str) -> None:
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._inside(name))

        for name in names:
            self._done(lambda name=name: remove_one(name))  # type: ignore[misc]

    def _done(self, work: Callable[[], T]) -> T:
        try:
            return Retries().run(lambda: self._ask(work))
        except ColabkitError:
            raise
        except OSError as error:
            found = f"the file system of {self.name!r} reports an error ({error.strerror or error})"
            next_step = "Check the address and your permissions, then try again"
            raise FileFailed(cannot(self._act, found, "", next_step)) from error

    def _inside(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name
