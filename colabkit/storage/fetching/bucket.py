"""Fetch files and folders from any fsspec file system with concurrent reads, and resume with the missing blocks."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from colabkit.foundation import (
    BadSource,
    ColabkitError,
    FetchFailed,
    FileFailed,
    SourceChanged,
    SourceMissing,
    TimedOut,
    cannot,
    file_changes,
    format_seconds,
    option,
    partials,
)
from colabkit.storage.addresses import safe_name
from colabkit.storage.fetching.transfer import UNCHANGED, FetchJob, FetchResult, TryFailed, digests_of, sync_file
from colabkit.storage.sources.bucket import BucketSource, items_of, protocol_of, version_of
from colabkit.storage.sources.engine import BLOCK_BYTES, ConcurrentReader
from colabkit.storage.sources.items import Item
from colabkit.storage.sources.reads import Retries
from colabkit.storage.staging.partial_copy import PartialCopy, requests


def fetch_bucket(job: FetchJob, kept: partials.KeptPartial) -> FetchResult:
    """Fetch the file, or every file below the folder, into the partial; raise the errors of `fetch()`."""
    try:
        download = _BucketDownload(job, kept)
        return job.try_until_done(download.attempt, download.can_resume)
    except (SourceMissing, BadSource) as error:
        raise FetchFailed(error.message or str(error)) from None


class _BucketDownload:
    def __init__(self, job: FetchJob, kept: partials.KeptPartial) -> None:
        self.job, self.kept = job, kept

    @cached_property
    def bucket(self) -> BucketSource:
        """The source; opened on first use, since opening may access the network."""
        try:
            return BucketSource(self.job.address, self.job.act, self.job.timeout)
        except FetchFailed as error:
            if isinstance(error.__cause__, OSError):
                raise TryFailed(error.__cause__.strerror or "", "Try again") from None
            raise

    def can_resume(self) -> bool:
        """Return whether the next call can reuse data: some data has arrived, and its version is known."""
        return bool(self.kept.record.get("validator") and file_changes.disk_bytes(self.kept.data))

    def attempt(self) -> FetchResult:
        retries = Retries()
        try:
            return self._fetch(retries)
        except TimedOut:
            protocol, timeout = protocol_of(self.job.address), self.job.timeout
            found = f"{protocol}:// did not answer within {format_seconds(timeout)} in two attempts"
            next_step = ("Check the network or use ", option("timeout", 2 * timeout), ", then try again")
            raise TimedOut(cannot(self.job.act, found, "", self.job.advice(next_step, self.can_resume()))) from None
        except SourceChanged:
            raise self._start_over() from None
        except FileFailed as error:
            # The cause holds the file system's message without secrets. Drop the error's own message,
            # since it names a different action from this job's.
            cause = error.__cause__
            reason = str(cause.strerror if isinstance(cause, OSError) else error)
            raise TryFailed(reason, "Try again") from None
        except ColabkitError:
            raise
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise TryFailed(error.strerror or "", "Try again") from None
        finally:
            self.job.retries += retries.count

    def _facts(self) -> dict[str, Mapping[str, Any]]:
        try:
            return self.bucket.find()
        except ColabkitError:
            raise
        except OSError as error:
            raise TryFailed(error.strerror or "", "Try again") from None

    def _fetch(self, retries: Retries) -> FetchResult:
        job, kept, bucket = self.job, self.kept, self.bucket
        facts = self._facts()
        version = _version_of_all(facts)
        is_folder = not bucket.is_object
        name = safe_name(bucket.base_name) or "download"
        final = job.admit(name, version, is_folder=is_folder)
        if not version or kept.record.get("validator") != version:
            kept.start_over()
            kept.note(validator=version)
        items = {item.path: item for item in items_of(facts)}
        in_order = facts.keys() - items.keys() if bucket.has_ranges else facts.keys()
        total = sum(item.size for item in items.values())
        with PartialCopy(bucket.name, kept.data, kept.folder / "journal") as copy:
            complete = {item.path for item in copy.resume(items.values())}
            have = sum(min(BLOCK_BYTES, items[path].size - at) for path, crcs in copy.crcs.items() for at in crcs)
            file_changes.check_space(job.act, total - have, final)
            job.begin(have, total if len(items) == len(facts) else None)
            with ConcurrentReader(bucket, "auto", retries, stalled_s=job.timeout) as reader:
                ranged = [item for path, item in items.items() if path not in in_order]
                for block in reader.blocks(requests(bucket, ranged, copy.crcs)):
                    copy.write(block)
                    job.advance(block.size)
            for inside in sorted(in_order - complete):
                copy.write_blocks(items.get(inside, Item(inside, 0)), self._blocks(inside, items.get(inside)))
        if _version_of_all(self._facts()) != version:
            raise self._start_over()
        for inside in facts:
            sync_file(kept.data / inside)
        path = kept.data if is_folder else kept.data / next(iter(facts))
        return FetchResult(path, name, bucket.via, version, len(facts), digests_of(path, job.expected))

    def _blocks(self, path: str, item: Item | None) -> Iterator[bytes]:
        received = 0
        for block in self.bucket.stream(path, BLOCK_BYTES):
            received += len(block)
            self.job.advance(len(block))
            yield block
        if item is not None and received != item.size:
            raise self._start_over()

    def _start_over(self) -> TryFailed:
        self.kept.start_over()
        return TryFailed("the source changed during the download", UNCHANGED, starts_over=True)


def _version_of_all(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a digest of the versions of all files; empty if any file has no version other than its size."""
    versions = {path: version_of(info) for path, info in facts.items()}
    return hashlib.sha256(json.dumps(versions).encode()).hexdigest() if all(versions.values()) else ""
