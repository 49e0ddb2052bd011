"""Objects of an fsspec file system as a source, for example on Google Cloud Storage, S3 or Hugging Face."""

from __future__ import annotations

import datetime as dt
import errno
import hashlib
import io
import json
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO, ClassVar, TypeVar, cast

from colabkit.foundation import (
    BadSource,
    ColabkitError,
    FetchFailed,
    InvalidOption,
    MissingPackage,
    SourceMissing,
    call,
    cannot,
    import_optional,
)
from colabkit.storage.addresses import FSSPEC, Address, address_of
from colabkit.storage.sources.concurrency import STALLED_S, answer_of, still_moving
from colabkit.storage.sources.items import ByteSpan, Item, Listing, SourceKind, changed_item
from colabkit.storage.sources.reads import Retries

T = TypeVar("T")

# Maximum size of a request, and of objects that the first small read fetches to their end.
_WHOLE_BYTES = 8 << 20
# Minimum number of bytes to read ahead from larger objects, since each request costs a round trip.
_RANGE_BYTES = 4 << 20
# Initial and minimum size of a request. The size grows only while requests are answered quickly, so that on a slow
# line, concurrent requests are answered before they count as stalled.
_FIRST_BYTES = 16 << 10
# Share of the timeout below which requests grow; they shrink if they take more than four times this share.
_QUICK_SHARE = 1 / 30
_CLOSE_S = 1.0
# Timeout of a listing, which shows no progress until it is complete: five million objects can take this long.
_LISTING_S = 600.0
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_LATEST_S = 1 << 33
_VERSION_NAMES = (
    *("ETag", "etag", "md5Hash", "md5", "crc32c", "generation", "checksum", "oid", "blob_id", "sha", "sha256"),
    *("version_id", "VersionId"),
)
_VERSION_FIELDS = frozenset({*_VERSION_NAMES, *_TIMES, "modified"})
# Modules of fsspec's base classes; methods defined there are generic.
_GENERIC_MODULES = frozenset({"fsspec.spec", "fsspec.asyn"})
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
    "gs": "Run google.colab.auth.authenticate_user() in Colab, or gcloud auth application-default login elsewhere",
    "s3": "Provide credentials, or set FSSPEC_S3_ANON=true before Python starts if the bucket is public",
    "hf": "Run huggingface_hub.login()",
}
_LOGIN_ERRORS = frozenset(
    {"PermissionError", "NoCredentialsError", "PartialCredentialsError", "RefreshError", "DefaultCredentialsError"}
)
_FINAL = (NotADirectoryError, IsADirectoryError, NotImplementedError, ImportError, TypeError)


class BucketSource:
    """The objects below an address that fsspec reads, such as `"gs://bucket/birds"`, or the object at the address.

    An archive in a bucket is treated as one object: `stage()` or `fetch()` it, then read the copy.

    Args:
        address: an address of a file system that fsspec supports, as text or parsed.
        act: verb and object for messages.
        stalled_s: seconds without an answer after which a call, such as a listing, is abandoned; None for ten minutes.

    Attributes:
        protocol: the protocol, such as `"gs"`; for a chain, that of its first link.
        via: fsspec's version and the protocol, for a report.
    """

    kind: ClassVar[SourceKind] = "bucket"

    def __init__(self, address: str | Address, act: str = "", stalled_s: float | None = None) -> None:
        self._address = address_of(address) if isinstance(address, str) else address
        self.name = self._address.shown
        self.can_hang = True
        self._act = act or f"read {self.name!r}"
        self._stalled_s = stalled_s
        if self._address.kind != FSSPEC:
            found = f"it is a {self._address.kind} address"
            expected, fetch = "a bucket such as 'gs://bucket/birds'", ("Download it first with ", call("fetch"))
            raise InvalidOption(cannot(self._act, found, expected, fetch))
        self.protocol = protocol_of(self._address)
        try:
            self._fs, root, self.via = self._ask(lambda: _file_system_of(self._address, self._act))
        except ColabkitError:
            raise
        except OSError as error:
            # The error's text contains no secrets, so keep the error as the cause.
            raise self._unreadable(error) from error
        self._root = root.rstrip("/")
        self._is_object: bool | None = None
        self._request_bytes = _FIRST_BYTES
        self._quick_s = (stalled_s or STALLED_S) * _QUICK_SHARE
        self._pieced: set[Item] = set()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._address,)

    @property
    def is_object(self) -> bool:
        """Whether the address is a single object; the file system is queried if nothing has been listed yet."""
        if self._is_object is None:
            self._is_object = bool(self._fs.isfile(self._root))
        return self._is_object

    @property
    def has_ranges(self) -> bool:
        """Whether parts of objects can be read directly; False for chains, such as `zip://a::gs://b/c.zip`."""
        return "::" not in self._address.text

    @property
    def base_name(self) -> str:
        """The last component of the address."""
        return self._root.rpartition("/")[2]

    def list(self) -> Listing:
        """Return every object below the address; objects of unknown size are listed in `skipped`."""
        facts = self.facts()
        skipped = [(path, "its size is unknown") for path, info in facts.items() if info.get("size") is None]
        return Listing(tuple(items_of(facts)), tuple(skipped))

    def facts(self) -> dict[str, Mapping[str, Any]]:
        """Return the metadata of every object by path, sorted."""
        try:
            return self.find()
        except ColabkitError:
            raise
        except OSError as error:
            raise self._unreadable(error) from None

    def find(self) -> dict[str, Mapping[str, Any]]:
        """Return the same as `facts()`, but raise `OSError` for errors that may be transient."""
        found = self._ask(self._found)
        if not found:
            next_step = "Check the address and your permissions"
            raise SourceMissing(cannot(self._act, "nothing exists at this address", "", next_step))
        self._is_object = set(found) == {self._root}
        facts: dict[str, Mapping[str, Any]] = {}
        for key, info in found.items():
            is_mark = not info.get("size") and (key.endswith("/") or (key == self._root and not self._is_object))
            if info.get("type") != "directory" and not is_mark:
                facts[self._inner_path(key)] = info
        # Some stores mark a folder with an empty object of the same name.
        folders = {str(folder) for path in facts for folder in PurePosixPath(path).parents}
        for path in facts.keys() & folders:
            if facts.pop(path).get("size"):
                twice = f"{self._address.scrubbed(path)!r} is both an object and a folder"
                raise BadSource(cannot(self._act, twice, "", "Rename the object"))
        return dict(sorted(facts.items()))

    def paths(self) -> Iterator[str]:
        """Yield the path of every object below the address, folder by folder; errors as in `find()`."""
        self._fs.invalidate_cache()
        for info in self._walked(self._ask):
            yield info["name"].removeprefix(self._root).lstrip("/")

    def open(self, item: Item) -> BinaryIO:
        """Open an object; objects of up to 4 MiB are read in one request, larger objects in ranges."""
        if item.size > _RANGE_BYTES:
            return cast(BinaryIO, _Object(self, item))
        return io.BytesIO(self.read(item))

    def read(self, item: Item, start: int | None = None, end: int | None = None) -> bytes:
        """Return an object's bytes, by default all, from `start` up to but not including `end`."""
        at, stop, pieces = start, item.size if end is None else end, []
        with self._translated_errors(f"read {item.path!r} of {self.name!r}"):
            while self.has_ranges and (upto := (at or 0) + self._request_bytes) < stop:
                pieces.append(self._requested(item, at or 0, upto))
                at = upto
            if at is not None:
                self._pieced.add(item)
            # Without `end`, the last request reads to the object's end, which reveals that it has grown since listing.
            pieces.append(self._requested(item, at, end))
        return b"".join(pieces)

    def check_unchanged(self) -> None:
        """List the objects again if any took several requests, which may have returned bytes of different versions.

        Raises:
            SourceChanged: if the size, time or version of such an object has changed since it was read.
        """
        pieced, self._pieced = self._pieced, set()
        if not pieced:
            return
        try:
            found = {item.path: item for item in items_of(Retries().run(self.find))}
        except OSError as error:
            raise error if isinstance(error, ColabkitError) else self._unreadable(error) from None
        for item in pieced:
            now = found.get(item.path)
            if now != item or now.ctime_ns != item.ctime_ns:
                raise changed_item(self.name, item, item.size if now is None else now.size)

    def _requested(self, item: Item, start: int | None, end: int | None) -> bytes:
        """Return the result of one request, and adapt the size of later requests to its duration."""
        began, size = time.monotonic(), self._request_bytes
        data = bytes(self._fs.cat_file(self._key(item.path), start=start, end=end))
        seconds = time.monotonic() - began
        still_moving()
        if seconds > 4 * self._quick_s:
            self._request_bytes = max(_FIRST_BYTES, size // 2)
        elif seconds < self._quick_s and len(data) >= size:
            # Another thread may have increased the size meanwhile.
            self._request_bytes = max(self._request_bytes, min(_WHOLE_BYTES, 2 * size))
        return data

    def stream(self, path: str, block_bytes: int) -> Iterator[bytes]:
        """Yield an object's bytes in order, in blocks of `block_bytes`, for objects that do not support ranges."""
        file = self._ask(lambda: self._fs.open(self._key(path), "rb", block_size=_RANGE_BYTES), tries=1)
        try:
            block = b""
            while more := self._ask(partial(file.read, block_bytes - len(block)), tries=1):
                block += more
                if len(block) == block_bytes:
                    yield block
                    block = b""
            if block:
                yield block
        finally:
            # Errors on close do not matter, since the file was only read. Do not wait long if the file system hangs.
            with suppress(Exception):
                answer_of(file.close, self.can_hang, _CLOSE_S, tries=1)

    def close(self) -> None:
        """Do nothing: no object stays open."""

    def _key(self, path: str) -> str:
        return self._root if self.is_object else f"{self._root}/{path}" if self._root else path

    def _ask(self, call: Callable[[], T], tries: int = 2, stalled_s: float | None = None) -> T:
        with self._translated_errors(self._act):
            return answer_of(call, self.can_hang, stalled_s or self._stalled_s or _LISTING_S, tries)

    def _found(self) -> dict[str, Mapping[str, Any]]:
        self._fs.invalidate_cache()
        own: Mapping[str, Any] = {"type": "directory"}
        # Many object stores have no folders, so `info` fails if there are only objects below this path.
        with suppress(FileNotFoundError):
            own = self._fs.info(self._root)
        if own.get("type") != "directory" and own.get("size") != 0:
            # An object can be readable even if listing is forbidden.
            return {self._root: own}
        try:
            found = self._all_below()
        except FileNotFoundError:
            found = {}
        is_empty_object = own.get("type") != "directory" and not found.keys() - {self._root}
        return {self._root: own} if is_empty_object else found

    def _all_below(self) -> dict[str, Mapping[str, Any]]:
        """Return the metadata of every object below the root by key; raise `FileNotFoundError` if nothing exists."""
        find = getattr(type(self._fs), "_find", None) or type(self._fs).find
        if not self.has_ranges or find.__module__ not in _GENERIC_MODULES:
            return cast(dict[str, Mapping[str, Any]], self._fs.find(self._root, detail=True))
        # The generic `find` of fsspec omits folders whose listing fails.
        return {info["name"]: info for info in self._walked(lambda call: call())}

    def _walked(self, ask: Callable[[Callable[[], Any]], Any]) -> Iterator[Mapping[str, Any]]:
        folders = [self._root]
        while folders:
            folder = folders.pop()
            try:
                listed = ask(partial(self._fs.ls, folder, detail=True))
            except FileNotFoundError as error:
                if folder == self._root:
                    raise
                raise OSError(errno.EIO, "a folder vanished while it was listed") from error
            still_moving()
            for info in listed:
                name = info["name"].rstrip("/")
                if info["type"] == "directory" and name != folder:
                    folders.append(name)
                else:
                    yield info

    def _inner_path(self, key: str) -> str:
        path = key.rpartition("/")[2] if self._is_object else key.removeprefix(self._root)
        if self._is_object or not self._root or path.startswith("/"):
            path = path.removeprefix("/")
            if "\0" not in path and _NO_NAMES.isdisjoint(path.split("/")):
                return path
        found = f"it contains an object named {self._address.scrubbed(key)!r}"
        next_step = "Rename the object, or use another source"
        raise BadSource(cannot(self._act, found, "paths inside the folder", next_step))

    def _unreadable(self, error: OSError) -> FetchFailed:
        found = f"the file system reports an error ({error.strerror or error})"
        return FetchFailed(cannot(self._act, found, "", "Check the address, then try again"))

    @contextmanager
    def _translated_errors(self, act: str) -> Iterator[None]:
        """Translate errors, whose texts may hold secrets, to `FetchFailed`, or `OSError` if they may be transient."""
        try:
            yield
        except ColabkitError:
            raise
        except (Exception, CancelledError) as error:
            text = self._address.scrubbed(f"{type(error).__name__}: {error}")
            if isinstance(error, FileNotFoundError):
                found, next_step = "nothing exists at this address", "Check the address"
            elif type(error).__name__ in _LOGIN_ERRORS:
                found = f"it needs a login ({text})"
                default = f"Provide credentials as documented for {self.protocol}:// addresses in fsspec"
                next_step = _LOGINS.get(self.protocol, default)
            elif isinstance(error, _FINAL):
                found, next_step = f"the file system cannot be read ({text})", "Check the address"
            else:
                raise OSError(errno.EIO, text) from None
            raise FetchFailed(cannot(act, found, "", next_step)) from None


def items_of(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Item]:
    """Yield an item for each object whose size is known; its `ctime_ns` is a number that differs between versions."""
    for path, info in facts.items():
        if info.get("size") is not None:
            version = next((str(info[name]) for name in _VERSION_NAMES if info.get(name)), "")
            number = int.from_bytes(hashlib.sha256(version.encode()).digest()[:7], "big") if version else 0
            yield Item(path, int(info["size"]), _mtime_ns(info), number)


def version_of(info: Mapping[str, Any]) -> str:
    """Return the size and version of an object as text; empty if nothing but its size is known."""
    found = {field: str(info[field]) for field in sorted(_VERSION_FIELDS & info.keys()) if info[field]}
    return json.dumps([info.get("size"), found]) if found else ""


class _Object(ByteSpan):
    """A large object, read in ranges; each instance is for one thread."""

    def __init__(self, bucket: BucketSource, item: Item) -> None:
        super().__init__(item.size)
        self._bucket = bucket
        self._item = item
        self._held_at, self._held = 0, b""

    def _bytes(self, size: int) -> bytes:
        if not self._held_at <= self._at < self._at + size <= self._held_at + len(self._held):
            # Small reads are usually consecutive, so read ahead, but not after reads of entire blocks.
            is_whole = size < _RANGE_BYTES and self._size <= _WHOLE_BYTES
            end = self._size if is_whole else min(self._size, self._at + max(size, _RANGE_BYTES))
            self._held = self._bucket.read(self._item, self._at, end)
            self._held_at = self._at
        inside = self._at - self._held_at
        return self._held[inside : inside + size]


def _mtime_ns(info: Mapping[str, Any]) -> int:
    """Return an object's modification time in ns, from the field that its file system uses; 0 if unknown."""
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
    """Return the protocol of an address, such as `"gs"`; for a chain, that of its first link."""
    return address.text.partition("://")[0].partition("::")[0].lower()


def _file_system_of(address: Address, act: str) -> tuple[Any, str, str]:
    protocol = protocol_of(address)
    purpose, package = f"to read {protocol}://", _PACKAGES.get(protocol)
    install = f"Run pip install {package}" if package else ""
    fsspec = import_optional("fsspec", act, purpose, next_step=install)
    core = import_optional("fsspec.core", act, purpose, next_step=install)
    try:
        fs, root = core.url_to_fs(address.text)
    except ImportError as error:
        known = import_optional("fsspec.registry", act, purpose).known_implementations
        if package:
            found = f"the package {package}, which is needed {purpose}, is not installed"
            raise MissingPackage(cannot(act, found, "", f"Run pip install {package}")) from None
        reason = address.scrubbed(known.get(protocol, {}).get("err", str(error))).rstrip(".")
        missing = f"a package is not installed ({reason})"
        raise MissingPackage(cannot(act, missing, "", "Install this package with pip")) from None
    except ValueError as error:
        invalid = f"fsspec rejects the address ({address.scrubbed(error)})"
        next_step = "Check the part before ://"
        raise InvalidOption(cannot(act, invalid, "a protocol that fsspec supports", next_step)) from None
    return fs, root, f"fsspec {fsspec.__version__} ({protocol})"
