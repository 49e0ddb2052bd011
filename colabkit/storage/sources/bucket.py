"""A folder of an fsspec file system as a source: Google Cloud Storage, S3, Hugging Face and many more."""

from __future__ import annotations

import datetime as dt
import errno
import io
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

from colabkit.foundation import (
    BadSource,
    ColabkitError,
    FetchFailed,
    InvalidOption,
    MissingPackage,
    SourceMissing,
    cannot,
    import_optional,
)
from colabkit.storage.addresses import FSSPEC, Address, address_of
from colabkit.storage.sources.concurrency import answer_of
from colabkit.storage.sources.items import Item, Listing

_WHOLE_BYTES = 8 << 20  # objects up to this size are got in one request
_RANGE_BYTES = 4 << 20  # of larger ones at least so much, since each request costs a latency
_LISTING_S = 600.0  # a listing shows no sign of life until it is whole: five million objects take so long
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_LATEST_S = 1 << 33
_NO_NAMES = frozenset({"", ".", ".."})
_PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "s3a": "s3fs",
    "hf": "huggingface_hub",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "adl": "adlfs",
    "az": "adlfs",
}
_LOGINS = {
    "gs": "Run google.colab.auth.authenticate_user() in Colab, elsewhere gcloud auth application-default login",
    "s3": "Give credentials, or set FSSPEC_S3_ANON=true before Python starts if the bucket is public",
    "hf": "Run huggingface_hub.login()",
}
_LOGIN_ERRORS = frozenset(
    {"PermissionError", "NoCredentialsError", "PartialCredentialsError", "RefreshError", "DefaultCredentialsError"}
)
_FINAL = (NotADirectoryError, IsADirectoryError, NotImplementedError, ImportError, TypeError)


class BucketSource:
    """The objects below an address that fsspec reads, or the one object at it.

    An archive in a bucket is one object like any other: `stage()` or `fetch()` it, then read the copy.

    Args:
        address: as in `"gs://bucket/birds"`.

    Raises:
        InvalidOption: if it is no address of a file system that fsspec knows.
        MissingPackage: if fsspec or the package of the address's protocol is not installed.
    """

    def __init__(self, address: str) -> None:
        self._address = address_of(address)
        self.name = self._address.shown
        self.can_hang = True
        self._act = f"read {self.name!r}"
        if self._address.kind != FSSPEC:
            needed = "the address of a bucket, as in 'gs://bucket/birds'"
            raise InvalidOption(cannot(self._act, f"a {self._address.kind} address", needed, "Fetch it first"))
        try:
            self._fs, root, _ = file_system_of(self._address, self._act)
        except ColabkitError:
            raise
        except Exception as error:
            raise self._failed(self._act, error) from None
        self._root = root.rstrip("/")
        self._is_object: bool | None = None  # whether the address is that of one object

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._address.text,)

    def list(self) -> Listing:
        """Return every object below the address, by one listing.

        Raises:
            SourceMissing: if nothing is there.
            BadSource: if an object's name leads outside the folder, or is that of a folder too.
            FetchFailed: if it cannot be listed: without a login, for one.
            TimedOut: if there was no answer in ten minutes, twice.
        """
        try:
            found = answer_of(self._find, self.can_hang, _LISTING_S)
        except ColabkitError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError):
                found = {}
            else:
                raise self._failed(self._act, error) from None
        if not found:
            next_step = "Check the address and your access"
            raise SourceMissing(cannot(self._act, "nothing is there", "objects at this address", next_step))
        self._is_object = set(found) == {self._root}
        items, skipped = [], []
        folders: set[str] = set()
        for key, info in found.items():
            if info.get("type") == "directory" or (not info.get("size") and key.endswith("/")):
                continue  # stores without folders mark them by empty objects
            if key == self._root and not self._is_object:
                continue  # such a mark too
            path = self._inner_path(key)
            if info.get("size") is None:
                skipped.append((path, "its size is not known"))
                continue
            items.append(Item(path, int(info["size"]), _mtime_ns(info)))
            while (path := path.rpartition("/")[0]) and path not in folders:
                folders.add(path)
        if clash := next((item.path for item in items if item.path in folders), None):
            twice = f"{clash!r} is an object and a folder"
            raise BadSource(cannot(self._act, twice, "one of them", "Rename the object"))
        return Listing(tuple(sorted(items, key=lambda item: item.path)), tuple(sorted(skipped)))

    def open(self, item: Item) -> BinaryIO:
        """Open an object: a small one is got whole, a large one by the ranges that are read of it.

        Raises:
            FetchFailed: if it is gone or may not be read.
            OSError: EIO, if it could not be read this time.
        """
        if item.size > _WHOLE_BYTES:
            return cast(BinaryIO, _Object(self, item))
        return io.BytesIO(self.read(item))

    def read(self, item: Item, start: int | None = None, end: int | None = None) -> bytes:
        """Return an object's bytes, all or those from `start` to before `end`; errors as of `open`."""
        try:
            return bytes(self._fs.cat_file(self._key(item), start=start, end=end))
        except Exception as error:
            act = f"read {item.path!r} of {self.name!r}"
            if (refused := refusal(self._address, act, error)) is not None:
                raise refused from None
            raise OSError(errno.EIO, self._told(error)) from None

    def close(self) -> None:
        """Do nothing: no object stays open."""

    def _find(self) -> dict[str, Mapping[str, Any]]:
        self._fs.invalidate_cache()
        found: dict[str, Mapping[str, Any]] = self._fs.find(self._root, detail=True)
        if set(found) == {self._root}:
            return {self._root: self._fs.info(self._root)}  # find() may say nothing of it
        return found

    def _key(self, item: Item) -> str:
        if self._is_object is None:
            self._is_object = bool(self._fs.isfile(self._root))
        if self._is_object:
            return self._root
        return f"{self._root}/{item.path}" if self._root else item.path

    def _inner_path(self, key: str) -> str:
        path = key.rpartition("/")[2] if self._is_object else key.removeprefix(self._root)
        if self._is_object or not self._root or path.startswith("/"):
            path = path.removeprefix("/")
            if "\0" not in path and _NO_NAMES.isdisjoint(path.split("/")):
                return path
        found = f"an object named {self._address.scrubbed(key)!r}"
        raise BadSource(cannot(self._act, found, "names inside the folder", "Do not use a source like this"))

    def _failed(self, act: str, error: Exception) -> FetchFailed:
        """Return what an error means; its own text may hold secrets of the address."""
        known = refusal(self._address, act, error)
        needed = "a file system that answers"
        return known or FetchFailed(cannot(act, self._told(error), needed, "Check the address, then run it again"))

    def _told(self, error: Exception) -> str:
        return self._address.scrubbed(f"{type(error).__name__}: {error}")


class _Object(io.RawIOBase):
    """A large object, got by ranges; each opened one is for one thread."""

    def __init__(self, bucket: BucketSource, item: Item) -> None:
        self._bucket = bucket
        self._item = item
        self._at = 0
        self._held_at, self._held = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._item.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return so many bytes, fewer only at the object's end."""
        left = max(0, self._item.size - self._at)
        size = left if size is None or size < 0 else min(size, left)
        if not size:
            return b""
        if not self._held_at <= self._at < self._at + size <= self._held_at + len(self._held):
            end = self._at + min(left, max(size, _RANGE_BYTES))
            self._held = self._bucket.read(self._item, self._at, end)
            self._held_at = self._at
        inside = self._at - self._held_at
        data = self._held[inside : inside + size]
        self._at += len(data)
        return data


def _mtime_ns(info: Mapping[str, Any]) -> int:
    """Return when an object was changed, by the names that file systems give it; 0 where they do not say."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, str):
            try:
                value = dt.datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, dt.datetime):
            zoned = value if value.tzinfo else value.replace(tzinfo=dt.UTC)
            value = round(zoned.timestamp() * 10**6) / 10**6
        if isinstance(value, int | float) and 0 < value < _LATEST_S:
            return round(value * 10**6) * 1000
    return 0


def protocol_of(address: Address) -> str:
    """Return the protocol of an address, as in `"gs"`; of a chain that of its first link."""
    return address.text.partition("://")[0].partition("::")[0].lower()


def file_system_of(address: Address, act: str) -> tuple[Any, str, str]:
    """Return the file system of an address, the path in it, and both programs' names for a report.

    Raises:
        MissingPackage: if fsspec or the protocol's package is not installed.
        InvalidOption: if fsspec does not know the protocol.
    """
    protocol = protocol_of(address)
    purpose, package = f"to read {protocol}://", _PACKAGES.get(protocol)
    advice = f"Run pip install {package}" if package else ""
    fsspec = import_optional("fsspec", act, purpose, next_step=advice)
    core = import_optional("fsspec.core", act, purpose, next_step=advice)
    try:
        fs, root = core.url_to_fs(address.text)
    except ImportError as error:
        known = import_optional("fsspec.registry", act, purpose).known_implementations
        advice = advice or address.scrubbed(known.get(protocol, {}).get("err", str(error))).rstrip(".")
        found = f"{package or 'a package'} is not installed"
        raise MissingPackage(cannot(act, found, f"it, {purpose}", advice)) from None
    except ValueError as error:
        needed = "an address that fsspec knows"
        told = address.scrubbed(error)
        raise InvalidOption(cannot(act, told, needed, "Check the part before ://")) from None
    return fs, root, f"fsspec {fsspec.__version__} ({protocol})"


def refusal(address: Address, act: str, error: BaseException) -> FetchFailed | None:
    """Return what an error of a file system means where trying again is of no use, None where it may be.

    The error's own text may hold addresses with signatures: what is returned does not.
    """
    told = address.scrubbed(f"{type(error).__name__}: {error}")
    if isinstance(error, FileNotFoundError):
        return FetchFailed(cannot(act, "nothing is at this address", "a file or folder", "Check the address"))
    if type(error).__name__ in _LOGIN_ERRORS:
        protocol = protocol_of(address)
        next_step = _LOGINS.get(protocol, f"Give credentials as the package for {protocol}:// describes")
        return FetchFailed(cannot(act, f"it needs a login ({told})", "access to it", next_step))
    if isinstance(error, _FINAL):
        return FetchFailed(cannot(act, told, "a file system that can be read", "Check the address"))
    return None
