"""Files and folders from any fsspec file system, read on a thread that the caller stops waiting for when it hangs."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from pathlib import PurePosixPath
from typing import Any, NoReturn, TypeVar

from colabkit.foundation import (
    ColabkitError,
    FetchFailed,
    TimedOut,
    cannot,
    file_changes,
    format_seconds,
    partials,
)
from colabkit.storage.addresses import safe_name
from colabkit.storage.fetching.sinks import Sink
from colabkit.storage.fetching.transfer import Again, Fetched, FetchJob
from colabkit.storage.sources.bucket import file_system_of, protocol_of, refusal

T = TypeVar("T")

_BLOCK_BYTES = 1 << 20
_READ_AHEAD_BYTES = 4 << 20  # some file systems read 50 MiB for the first byte, which a slow line brings too late
_QUEUE_BLOCKS = 4
_VERSION_FIELDS = frozenset(
    {"ETag", "etag", "md5Hash", "md5", "crc32c", "generation", "checksum", "oid", "blob_id"}
) | {
    *("sha", "sha256", "version_id", "VersionId"),
    *("mtime", "modified", "LastModified", "last_modified", "updated", "created"),
}

_Info = dict[str, Any]


def fetch_fsspec(job: FetchJob, kept: partials.KeptPartial) -> Fetched:
    """Bring the file, or every file below the folder, into the partial.

    Raises:
        MissingPackage: if fsspec or the protocol's package is not installed.
        FetchFailed: if it cannot be had.
        TimedOut: if the file system did not answer in time.
        TargetExists: if something else is at the final path.
    """
    with Sink(kept.data, job.wanted) as sink:
        reader = _Reader(job, kept, sink)
        return job.try_until_done(reader.attempt, reader.goes_on)


class _Reader:
    def __init__(self, job: FetchJob, kept: partials.KeptPartial, sink: Sink) -> None:
        self.job, self.kept, self.sink = job, kept, sink
        self.protocol = protocol_of(job.address)
        self.fs: Any = None
        self.root = self.via = ""

    def goes_on(self) -> bool:
        """Return whether what has come can be used: there is something, and its version is known."""
        return bool(self.kept.record.get("validator") and (self.sink.size or file_changes.disk_bytes(self.kept.data)))

    def attempt(self) -> Fetched:
        """Ask what is there and bring what is missing."""
        if self.fs is None:
            self.fs, self.root, self.via = self._ask(self._opened)
        info = self._ask(self._info)
        name = safe_name(self.root.rstrip("/").rpartition("/")[2]) or "download"
        if info["type"] != "directory":
            return self._file(name, info)
        return self._folder(name)

    def _file(self, name: str, info: _Info) -> Fetched:
        size, version, sink = info.get("size"), _version(info), self.sink
        if self.kept.data.is_dir():
            self.kept.start_over()  # a folder was here when an earlier call was stopped
        have = sink.open()
        if have and (not version or self.kept.record.get("validator") != version or have > (size or 0)):
            sink.begin_anew()
            have = 0
        final = self.job.admit(name, version)
        file_changes.check_space(self.job.act, (size or have) - have, final)
        self.kept.note(validator=version)
        self.job.begin(have, size)
        self._read(self.root, size, sink)
        if _version(self._ask(self._info)) != version:
            sink.begin_anew()
            raise Again("the file changed while it was fetched", "Run it again when it is at rest", is_anew=True)
        return Fetched(self.kept.data, name, self.via, version, 1, sink.finish())

    def _folder(self, name: str) -> Fetched:
        found = self._ask(self._found)
        version = _version_of_all(found)
        total = sum(info.get("size") or 0 for info in found.values())
        final = self.job.admit(name, version, is_folder=True)
        if not version or self.kept.record.get("validator") != version:
            self.kept.start_over()
            self.kept.note(validator=version)
        file_changes.make_folder(self.kept.data)
        paths = {inside: self.kept.data / inside for inside in found}
        have = {inside: path.stat().st_size for inside, path in paths.items() if path.is_file()}
        file_changes.check_space(self.job.act, max(0, total - sum(have.values())), final)
        self.job.begin(sum(have.values()), total)
        for inside, info in found.items():
            size = info.get("size")
            if inside in have and have[inside] == size:
                continue
            file_changes.make_folder(paths[inside].parent)
            with Sink(paths[inside], None) as sink:
                if sink.open() > (size or 0):
                    sink.begin_anew()
                self._read(info["name"], size, sink)
                sink.finish()
        if _version_of_all(self._ask(self._found)) != version:
            self.kept.start_over()
            raise Again("files changed while they were fetched", "Run it again when they are at rest", is_anew=True)
        return Fetched(self.kept.data, name, self.via, version, len(found), {})

    def _read(self, path: str, size: int | None, sink: Sink) -> None:
        """Bring the rest of one file; it has to be as long as its file system says."""
        start = sink.size
        with closing(self._watched(lambda: self._blocks(path, start))) as blocks:
            for block in blocks:
                sink.write(block)
                self.job.advance(len(block))
        if size is not None and sink.size != size:
            is_more = sink.size > size
            if is_more:
                sink.begin_anew()
            found = f"{'more' if is_more else 'fewer'} bytes came than the file has"
            raise Again(found, "Run it again when the file is at rest", is_anew=is_more)

    def _ask(self, call: Callable[[], T]) -> T:
        """Return what a call on the thread returns."""
        with closing(self._watched(lambda: [call()])) as answers:
            return next(answers)

    def _watched(self, produce: Callable[[], Iterable[T]]) -> Generator[T]:
        """Yield what `produce` yields on a thread, as long as each comes in time."""
        came: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(_QUEUE_BLOCKS)
        abandoned = threading.Event()

        def put(item: tuple[T] | BaseException | None) -> bool:
            while not abandoned.is_set():
                try:
                    came.put(item, timeout=0.1)
                except queue.Full:
                    continue
                return True
            return False

        def work() -> None:
            try:
                for item in produce():
                    if not put((item,)):
                        return
            except BaseException as error:  # also asyncio's CancelledError, or it would be waited for in vain
                put(error)
            else:
                put(None)

        thread = threading.Thread(target=work, name="colabkit-fetch", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    item = came.get(timeout=self.job.timeout)
                except queue.Empty:
                    found = f"no answer of {self.protocol}:// in {format_seconds(self.job.timeout)}"
                    next_step = "Check the network or allow more seconds with timeout=, then run it again"
                    next_step = self.job.advice(next_step, self.goes_on())
                    raise TimedOut(cannot(self.job.act, found, "one in this time", next_step)) from None
                if item is None:
                    break
                if isinstance(item, BaseException):
                    self._failed(item)
                yield item[0]
        finally:
            abandoned.set()
            thread.join(0.5)  # it ends at once unless its file system does not answer

    def _failed(self, error: BaseException) -> NoReturn:
        """Raise what an error of a file system means; its own text may hold addresses with signatures."""
        if isinstance(error, ColabkitError):
            raise error
        if (refused := refusal(self.job.address, self.job.act, error)) is not None:
            raise refused from None
        told = self.job.address.scrubbed(f"{type(error).__name__}: {error}")
        raise Again(told, "Run it again") from None

    # These run on the thread.

    def _opened(self) -> tuple[Any, str, str]:
        return file_system_of(self.job.address, self.job.act)

    def _info(self) -> _Info:
        self.fs.invalidate_cache()
        return dict(self.fs.info(self.root))

    def _found(self) -> dict[str, _Info]:
        """Return every file below the folder by its path inside, in order."""
        self.fs.invalidate_cache()
        root = self.root.rstrip("/")
        files: dict[str, _Info] = {}
        for path, info in sorted(self.fs.find(self.root, detail=True).items()):
            inside = path.removeprefix(root).strip("/")
            if info.get("type") == "directory" or (not info.get("size") and (not inside or path.endswith("/"))):
                continue  # stores without folders mark them by empty objects
            if not path.startswith(f"{root}/") or not {"", ".", ".."}.isdisjoint(inside.split("/")) or "\0" in inside:
                found = f"a file named {self.job.address.scrubbed(path)!r}"
                raise FetchFailed(
                    cannot(self.job.act, found, "names inside the folder", "Do not use a source like this")
                )
            files[inside] = {**info, "name": path}
        # Some mark a folder by an empty object of its bare name.
        for both in files.keys() & {str(folder) for inside in files for folder in PurePosixPath(inside).parents}:
            if files.pop(both).get("size"):
                found = f"a file and a folder of the name {self.job.address.scrubbed(both)!r}"
                raise FetchFailed(cannot(self.job.act, found, "one of them", "Rename one at the source"))
        if not files:
            raise FetchFailed(cannot(self.job.act, "no files in it", "at least one", "Check the address"))
        return files

    def _blocks(self, path: str, offset: int) -> Iterator[bytes]:
        with self.fs.open(path, "rb", block_size=_READ_AHEAD_BYTES) as file:
            if offset:
                file.seek(offset)
            while block := file.read(_BLOCK_BYTES):
                yield bytes(block)


def _version(info: _Info) -> str:
    """Return what tells this version of a file from others, empty where its file system has nothing but the size."""
    found = {field: str(info[field]) for field in sorted(_VERSION_FIELDS & info.keys()) if info[field]}
    return json.dumps([info.get("size"), found]) if found else ""


def _version_of_all(files: dict[str, _Info]) -> str:
    versions = {inside: _version(info) for inside, info in files.items()}
    return hashlib.sha256(json.dumps(versions).encode()).hexdigest() if all(versions.values()) else ""
