"""Remote sources for the rows about reads: a bucket and a web server whose faults are planned for each case."""

from __future__ import annotations

import errno
import fnmatch
import io
import itertools
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import urlopen

import fsspec
from http_servers import (
    Handler,
    Plan,
    WebServer,
    body,
    chunked,
    cut_after,
    drip,
    hang_after,
    ranged,
    running,
    serve,
    silent,
    slammed,
    status,
    without_ranges,
)

from colabkit.storage.fetching.api import fetch
from colabkit.storage.staging import api as staging

from .board import Result, spread
from .copies import FORMS, SMALL, Originals, checked_copy, consistent_with, make_quick, new_folder, rewritten
from .tools import Copier

_BLOCKS = {"big.bin": (12 << 20) + 4321, "one/small.bin": 1000}
_ERRORS: Mapping[str, BaseException] = {
    "EIO": OSError(errno.EIO, "Input/output error"),
    "a reset connection": ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "a timeout": TimeoutError("timed out"),
    "status 503": RuntimeError("503, message='Service Unavailable'"),
}
_FINAL_ERRORS: Mapping[str, BaseException] = {
    "EIO": _ERRORS["EIO"],
    "status 403": PermissionError("403 Forbidden"),
    "status 404": FileNotFoundError("404 Not Found"),
    "a bug of the file system": TypeError("unhashable type"),
}
_TIMEOUT_S = 0.5
_REPAIR = "/repair"


class FaultyBucket(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """The files below `root` as objects, with a planned fault in some requests.

    Attributes:
        root: a folder.
        plan: `on` is `"read"`, `"list"` or `"info"`, `path` a glob, and requests `first` to `first + count - 1` are
            faulty. `do` is an error, or a fault of `planned_faults`; `"long"` adds a byte to a reply.
    """

    protocol = "faulty"
    cachable = False
    root: ClassVar[Path]
    plan: ClassVar[Mapping[str, Any]] = {}
    _asked: ClassVar[int] = 0
    _changes: ClassVar[dict[str, int]] = {}
    _longer: ClassVar[set[str]] = set()
    _released: ClassVar[threading.Event] = threading.Event()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def replan(cls, plan: Mapping[str, Any] | None = None) -> None:
        """Set another plan, by default without faults, and release hanging requests; changed objects stay changed."""
        cls._released.set()
        cls._released = threading.Event()
        cls.plan, cls._asked = plan or {}, 0

    def _fault(self, operation: str, path: str) -> Any:
        """Return the fault planned for the request, or None without one; raise planned errors."""
        plan, cls = self.plan, type(self)
        if operation != plan.get("on") or not fnmatch.fnmatch(path, plan.get("path", "*")):
            return None
        with self._lock:
            cls._asked += 1
            turn = cls._asked - plan.get("first", 1)
            if turn < 0 or (plan.get("count") is not None and turn >= plan["count"]):
                return None
            if plan["do"] in ("change", "rewrite"):
                self._changes[path] = self._changes.get(path, 0) + 1
                self._longer.update([path] if plan["do"] == "change" else [])
        if plan["do"] == "hang":
            self._released.wait(60)
        elif isinstance(plan["do"], BaseException):
            raise plan["do"]
        return plan["do"]

    def _size(self, path: str) -> int:
        return (self.root / path).stat().st_size + (self._changes.get(path, 0) if path in self._longer else 0)

    def _data(self, path: str, start: int | None, end: int | None) -> bytes:
        first, last, _ = slice(start, end).indices(self._size(path))
        with (self.root / path).open("rb") as file:
            file.seek(first)
            data = rewritten(file.read(max(0, last - first)), self._changes.get(path, 0))
        return data + b"+" * (last - first - len(data))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        self._fault("info", path)
        if (self.root / path).is_dir():
            return {"name": path, "size": 0, "type": "directory"}
        version = f'"{self._changes.get(path, 0)}"'
        return {"name": path, "size": self._size(path), "type": "file", "ETag": version}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        self._fault("list", path)
        found = [self.info(one.relative_to(self.root).as_posix()) for one in sorted((self.root / path).iterdir())]
        return found if detail else [one["name"] for one in found]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        done = self._fault("read", path)
        data = self._data(path, start, end)
        return {"short": data[: len(data) // 2], "end": b"", "long": data + b"+"}.get(done, data)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return io.BytesIO(self.cat_file(path))


def _bucket_plans(number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the faults of a bucket that belong to this row, by name."""
    firsts = (1, 2, 4, 7)
    if number == 1:
        for on, (name, error), first, count in itertools.product(("read", "list"), _ERRORS.items(), firsts, (1, 3)):
            yield f"{name} at {on} {first}, {count} times", {"on": on, "do": error, "first": first, "count": count}
    elif number == 2:
        for on, (name, error), path in itertools.product(("read", "list"), _FINAL_ERRORS.items(), SMALL):
            place = f"tree/{path}" if on == "read" else "*"
            yield f"{name} at every {on} of {path}", {"on": on, "path": place, "do": error}
    elif number in (3, 9):
        deeds = _ERRORS.items() if number == 3 else [("a rewrite", "rewrite")]
        for (name, deed), first, count in itertools.product(deeds, range(1, 10), (1, None)):
            plan = {"on": "read", "path": "*big.bin", "do": deed, "first": first, "count": count}
            yield f"{name} at read {first} of a big file, {count or 'unlimited'} times", plan
    elif number == 4:
        for deed, first, count in itertools.product(("short", "end", "long"), firsts, (1, 2, None)):
            plan = {"on": "read", "do": deed, "first": first, "count": count}
            yield f"{deed} reply to read {first}, {count or 'unlimited'} times", plan
    elif number == 5:
        for on, first, count in itertools.product(("read", "list", "info"), firsts, (1, None)):
            plan = {"on": on, "do": "hang", "first": first, "count": count}
            yield f"{on} {first} hangs, {count or 'unlimited'} times", plan
    elif number == 8:
        for on, first, count in itertools.product(("read", "info"), firsts, (1, None)):
            plan = {"on": on, "path": "*.bin", "do": "change", "first": first, "count": count}
            yield f"an object changes at {on} {first}, {count or 'unlimited'} times", plan


def _bucket_cases(number: int, copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    if "bucket" not in copier.remotes:
        return
    fsspec.register_implementation(FaultyBucket.protocol, FaultyBucket, clobber=True)
    make_quick()
    originals = Originals(folder / "bucket", _BLOCKS if number in (3, 9) else SMALL, ("table",))
    versions = [rewritten, lambda data, times: rewritten(data, times) + b"+" * times]
    FaultyBucket.root = originals.root
    for case, plan in spread(list(_bucket_plans(number)), limit):
        FaultyBucket.replan(plan)
        with new_folder(folder / "case") as made:
            yield checked_copy(
                f"bucket: {case}",
                copier,
                f"{FaultyBucket.protocol}://tree",
                originals.files,
                made,
                is_correct=consistent_with(originals.files, versions),
                repair=FaultyBucket.replan,
                seconds=20.0,
            )


class _Archive(WebServer):
    """A server of one archive. A request for `_REPAIR` ends all faults."""

    def next_plan(self) -> Plan:
        if self.paths[-1] == _REPAIR:
            self.plans = [serve]
        return super().next_plan()


def _sends(change: Callable[[bytes], bytes], **headers: object) -> Plan:
    """Answer with different bytes, as if they were the complete file."""
    return lambda handler: handler.answer(200, {**handler.facts, **headers}, change(handler.content))


def _chunks_cut(place: int) -> Plan:
    """Send the first `place` bytes as one chunk, without the final chunk that marks the end."""

    def plan(handler: Handler) -> None:
        handler.answer(200, {**handler.facts, "Content-Length": None, "Transfer-Encoding": "chunked"})
        handler.wfile.write(b"%x\r\n%s\r\n" % (place, handler.content[:place]) if place else b"")

    return plan


def _range(add: int) -> Callable[[int, int], dict[str, object]]:
    return lambda start, size: {"Content-Range": f"bytes {start + add}-{size - 1}/{size}"}


def _changes(new: bytes, version: str, place: int) -> list[Plan]:
    """Send the first bytes of the file, then those of another version, which the header `version` may distinguish."""

    def of_version(number: int) -> dict[str, str]:
        dates = ("Sat, 01 Mar 2025 10:00:00 GMT", "Sat, 01 Mar 2025 10:00:01 GMT")
        return {version: f'"v{number}"' if version == "ETag" else dates[number]} if version else {}

    def first(handler: Handler) -> None:
        handler.server.headers = of_version(0)
        cut_after(place)(handler)

    def then(handler: Handler) -> None:
        handler.server.headers, handler.server.content = of_version(1), new
        serve(handler)

    return [first, then]


def _web_plans(number: int, size: int, new: bytes) -> Iterator[tuple[str, list[Plan]]]:
    """Yield the faults of a web server that belong to a row, as answers to successive requests."""
    places = (0, 1, size // 2, size - 1)
    if number == 1:
        faults = {f"status {code}": status(code) for code in (408, 429, 500, 502, 503, 504)} | {"no reply": slammed}
        for (name, plan), count in itertools.product(faults.items(), (1, 2, 4)):
            yield f"{name}, {count} times", [plan] * count + [serve]
    elif number == 2:
        yield from ((f"always status {code}", [status(code)]) for code in (400, 401, 403, 404, 410, 416, 500, 503))
        yield "never a reply", [slammed]
        yield "a page in place of the archive", [body(b"<html>Please log in</html>", Content_Type="text/html")]
    elif number == 3:
        for place, count, has_ranges in itertools.product(places, (1, 3, 9), (True, False)):
            plans = [cut_after(place, has_ranges)] * count + [serve if has_ranges else without_ranges]
            yield f"{'' if has_ranges else 'without ranges, '}cut after {place} bytes, {count} times", plans
    elif number == 4:
        for place in places:
            yield f"always cut after {place} bytes", [cut_after(place)]
            yield f"announces and sends only {place} bytes", [_sends(lambda data, place=place: data[:place])]
            yield f"chunks that end after {place} bytes", [_chunks_cut(place), serve]
        yield "sends a byte more", [_sends(lambda data: data + b"+")]
        yield "sends a byte more than announced", [_sends(lambda data: data + b"+", Content_Length=size)]
        yield "chunks", [chunked]
        yield "resumes at another byte", [cut_after(size // 2), ranged(_range(1)), serve]
        yield "resumes with the complete file", [cut_after(size // 2), ranged(_range(0), is_whole=True), serve]
    elif number == 5:
        for place, then in itertools.product(places, ([], [serve])):
            yield f"stalls {'once' if then else 'always'} after {place} bytes", [hang_after(place), *then]
        yield from (("never answers", [silent]), ("does not answer once", [silent, serve]), ("single bytes", [drip]))
    elif number in (8, 9):
        for place, version in itertools.product(places, ("ETag", "Last-Modified", "")):
            name = f"the file changes after {place} bytes, with {version or 'no version'}"
            yield name, _changes(new + b"+" * (number == 8), version, place)


def _web_cases(number: int, copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    if "web" not in copier.remotes:
        return
    make_quick()
    staging.fetch = partial(fetch, timeout=_TIMEOUT_S)  # type: ignore[attr-defined]
    originals = Originals(folder / "web", SMALL, ("zip",))
    old = (originals.root / FORMS["zip"]).read_bytes()
    changed = {path: rewritten(data, 1) for path, data in originals.files.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, data in changed.items():
            archive.writestr(path, data)
    for case, plans in spread(list(_web_plans(number, len(old), buffer.getvalue())), limit):
        with running(_Archive(old, tuple(plans))) as server, new_folder(folder / "case") as made:
            address = server.url.removesuffix("/data/file.bin")

            def repair(address: str = address) -> None:
                with urlopen(address + _REPAIR) as answer:
                    answer.read()

            yield checked_copy(
                f"web: {case}",
                copier,
                f"{address}/{FORMS['zip']}",
                originals.files,
                made,
                is_correct=lambda found: found == changed,
                repair=repair,
                release=server.released.set,
                seconds=20.0,
            )


def remote_cases(number: int, copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    """Copy a bucket and an archive of a web server, with each fault that belongs to this row."""
    yield from _bucket_cases(number, copier, folder, limit)
    yield from _web_cases(number, copier, folder, limit)
