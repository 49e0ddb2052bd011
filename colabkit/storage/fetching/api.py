"""`fetch()` downloads a file or folder from Google Drive, an https address or any fsspec URL, and can resume.

Received data stays in a hidden folder next to the target, `.colabkit-...-kept.partial`, until all data has arrived.
Therefore, an interrupted or killed fetch can resume when it is run again, even in a new process. At every instant, the
final path holds nothing, the complete old data or the complete new data.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from colabkit.foundation import (
    Corrupt,
    Report,
    check_duration,
    checked_call,
    file_changes,
    format_bytes,
    format_count,
    format_seconds,
    interruptible,
    option,
    partials,
)
from colabkit.storage.addresses import DRIVE_FILE, DRIVE_FOLDER, FSSPEC, WEB, address_of
from colabkit.storage.fetching.bucket import fetch_bucket
from colabkit.storage.fetching.gdrive import fetch_drive_file, fetch_drive_folder
from colabkit.storage.fetching.transfer import (
    AlreadyThere,
    ExpectedDigest,
    FetchJob,
    FetchRecord,
    path_state,
)
from colabkit.storage.fetching.web import fetch_web

_DOWNLOADERS = {WEB: fetch_web, DRIVE_FILE: fetch_drive_file, DRIVE_FOLDER: fetch_drive_folder, FSSPEC: fetch_bucket}


@dataclass(frozen=True, repr=False)
class FetchReport(Report):
    """The report of `fetch()`.

    Attributes:
        path: the fetched file or folder.
        source: the source's address, without userinfo, query and fragment; for Drive, the kind and the ID.
        via: `"https"` or `"http"`; the program and its version, for example `"gdown 5.2.2"` or
            `"fsspec 2026.1 (memory)"`; or `"existing file"` if a file with the requested digest existed.
        files: number of files.
        fetched_bytes: bytes received by this call, including those of failed attempts.
        resumed_bytes: bytes reused from an earlier, interrupted call.
        seconds: duration of the call.
        retries: number of failed attempts that were followed by another.
        sha256: SHA-256 of the file, in hex; None for a folder.
        reused: whether nothing was fetched because the final path already had the data.
    """

    path: Path
    source: str
    via: str
    files: int
    fetched_bytes: int
    resumed_bytes: int
    seconds: float
    retries: int
    sha256: str | None
    reused: bool

    def _summary(self) -> str:
        if self.reused:
            advice = ("use ", option("overwrite", True), " to fetch it again")
            return self._words.render((f"Already fetched: {str(self.path)!r}; ", *advice))
        rate = f"{format_bytes(self.fetched_bytes / max(self.seconds, 1e-9))}/s"
        retries = "retry" if self.retries == 1 else "retries"
        notes = f", {self.retries} {retries}" if self.retries else ""
        reused = f", {format_bytes(self.resumed_bytes)} reused from an earlier call" if self.resumed_bytes else ""
        size = f"{format_bytes(self.fetched_bytes)} in {format_seconds(self.seconds)}"
        return f"Fetched {str(self.path)!r}: {size} ({rate}{notes}){reused}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("path", str(self.path)),
            ("source", self.source),
            ("via", self.via),
            ("files", format_count(self.files)),
            ("retries", format_count(self.retries)),
            *([("sha256", self.sha256)] if self.sha256 else []),
        ]


@interruptible("The download", "Run the same call again, which resumes if the server allows that.")
@checked_call()
def fetch(
    source: str,
    to: str | os.PathLike[str] = ".",
    *,
    digest: str | None = None,
    timeout: float | str = 60.0,
    cookies: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> FetchReport:
    """Download a file or folder to `to`.

    A fetch that was stopped by an error, Ctrl-C or a kill resumes when you repeat the call, if the server supports
    resuming and reports the same version.

    A repeated call fetches nothing if the final path already holds the data. With `digest`, the file must have that
    digest. Without `digest`, an earlier call must have fetched the same source to the same path, the fetched data must
    be unmodified, and the server must report the same version. Data counts as unmodified if a file's size and
    modification time, or a folder's number and total size of files, are the same. Versions of Drive files are not
    compared. Any other file or folder at the final path stays unchanged unless you set `overwrite`.

    For fsspec URLs, threads read many files and parts of files at once, with small requests on a slow line. If a
    request takes longer than `timeout` twice, `fetch` raises `TimedOut`; the waiting thread cannot be stopped and
    remains until the file system answers.

    Args:
        source: the ID of a Drive file, a share link of a Drive file or folder, an `https://` or `http://` address, or
            any URL that fsspec reads (`gs://`, `s3://`, `hf://` and more), including folders.
        to: an existing folder, or a path that ends with a slash, to keep the source's name; otherwise the path of the
            file or folder. `drive:` and `~` work.
        digest: the digest that the file must have: `"sha256:"`, `"sha512:"`, `"sha1:"` or `"md5:"` followed by its hex
            digits.
        timeout: seconds, or text such as `"2min"`, within which at least 4 KiB must arrive, or the attempt fails.
            `fetch` gives up after two timeouts, or five failures of any kind, without new data in between.
        cookies: let gdown use and rewrite its cookie file, for Drive files that need a login.
        overwrite: replace an existing file or folder at the final path, once all data has arrived.
        progress: show a progress bar.

    Returns:
        A report with the path, the number of bytes fetched and, for a file, the SHA-256.

    Raises:
        FetchFailed: if the source cannot be fetched; the message gives the cause and a remedy.
        TimedOut: if not enough data arrived in time.
        Corrupt: if the file does not have the requested digest; the data is discarded.
        TargetExists: if the final path holds other data or another version and `overwrite` is not set, or if a file
            would replace a folder or vice versa.
        NotEnoughSpace: if the data does not fit; raised before it is written if its size is known.
        MissingPackage: if gdown, fsspec or a file system's package is missing; the message states what to install.
        InvalidOption: if `source` or an option is invalid; for local paths, use `stage()`.

    Example:
        >>> import colabkit
        >>> link = "https://drive.google.com/file/d/1AbCdEfGhIjKlMnOpQrStUvWxYz012345/view?usp=sharing"
        >>> fetched = colabkit.fetch(link, "birds.zip")
        >>> fetched.path.name, fetched.files
        ('birds.zip', 1)
        >>> colabkit.fetch(link, "birds.zip").reused
        True
    """
    started = time.monotonic()
    address = address_of(source)
    act = f"fetch {address.shown!r}"
    timeout_s = check_duration(act, "timeout", timeout)
    expected = ExpectedDigest.parse(act, digest)
    options = {"cookies": cookies, "overwrite": overwrite, "progress": progress}
    with (
        file_changes.translated(act),
        FetchJob(act, address, to, expected, timeout_s, **options) as job,
        _no_new_empty_folder(job.folder),
    ):
        try:
            _look_first(job)
            path, record = _fetch(job)
            reused = False
        except AlreadyThere as there:
            record, reused = there.record, True
            path = job.folder / (job.name or Path(record.path).name)
            # Discard the partial of an interrupted call that was to replace the data.
            partials.discard_kept(path, address.digest(job.name))
    return FetchReport(
        path=path,
        source=address.shown,
        via=record.via,
        files=record.files,
        fetched_bytes=job.fetched_bytes,
        resumed_bytes=job.resumed_bytes or 0,
        seconds=time.monotonic() - started,
        retries=job.retries,
        sha256=record.sha256,
        reused=reused,
    )


def _look_first(job: FetchJob) -> None:
    """Check the final path before any network access: it may already hold this source or something else."""
    earlier = job.earlier
    name = job.name or (Path(earlier.path).name if earlier else "")
    if name and not job.overwrite:
        is_drive = job.address.kind in (DRIVE_FILE, DRIVE_FOLDER)
        is_folder = (job.folder / name).is_dir() if job.address.kind == FSSPEC else False
        if job.expected or earlier is None or is_drive:
            job.admit(name, is_folder=is_folder or job.address.kind == DRIVE_FOLDER)


def _fetch(job: FetchJob) -> tuple[Path, FetchRecord]:
    with partials.KeptPartial(job.folder, job.address.digest(job.name)) as kept:
        job.is_kept = kept.folder == kept.kept_folder
        result = _DOWNLOADERS[job.address.kind](job, kept)
        try:
            if job.expected is not None:
                job.expected.check(job.act, result)
        except Corrupt:
            kept.start_over()
            raise
        final = job.admit(result.name, "", is_folder=result.path.is_dir())
        kept.publish_as(result.path, final, job.overwrite)
    where, sha256 = os.path.realpath(final), result.digests.get("sha256")
    record = FetchRecord(where, result.validator, path_state(final), result.files, sha256, result.via)
    record.write(job.identity)
    return final, record


@contextlib.contextmanager
def _no_new_empty_folder(folder: Path) -> Iterator[None]:
    """If the block raises an exception, remove the empty folders that were created for it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        # Keep folders that are not empty; removing these fails.
        with contextlib.suppress(OSError):
            for path in missing:
                file_changes.remove_empty_folder(path)
        raise
