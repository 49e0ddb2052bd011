"""`fetch()`: a file or folder from Google Drive, an https address or any fsspec URL, resumed and checked.

What has come is kept in one hidden folder beside the target, `.colabkit-...-kept.partial`, until all of it is there: a
fetch that was interrupted or killed resumes when it is run again, also in a new process. The final path
holds nothing, the complete old or the complete new thing at every instant.
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
    check_seconds,
    file_changes,
    format_bytes,
    format_count,
    format_seconds,
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
    state_of,
)
from colabkit.storage.fetching.web import fetch_web

_DOWNLOADERS = {WEB: fetch_web, DRIVE_FILE: fetch_drive_file, DRIVE_FOLDER: fetch_drive_folder, FSSPEC: fetch_bucket}


@dataclass(frozen=True, repr=False)
class FetchReport(Report):
    """What `fetch()` did.

    Attributes:
        path: the file or folder, ready to be used.
        source: where it came from, without userinfo, query and fragment.
        via: `"https"`, or the program with its version, as in `"gdown 5.2.2"` or `"fsspec 2026.1 (memory)"`.
        files: how many.
        fetched_bytes: received by this call, those of failed tries included.
        resumed_bytes: kept by an earlier, interrupted call.
        seconds: how long it took.
        retries: tries that failed and were followed by another.
        sha256: of the file, in hex; None for a folder.
        reused: whether it was there already.
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
            return f"Already fetched: {str(self.path)!r}; overwrite=True fetches it again"
        rate = f"{format_bytes(self.fetched_bytes / max(self.seconds, 1e-9))}/s"
        retries = "retry" if self.retries == 1 else "retries"
        notes = f", {self.retries} {retries}" if self.retries else ""
        kept = f", {format_bytes(self.resumed_bytes)} were there already" if self.resumed_bytes else ""
        size = f"{format_bytes(self.fetched_bytes)} in {format_seconds(self.seconds)}"
        return f"Fetched {str(self.path)!r}: {size} ({rate}{notes}){kept}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("path", str(self.path)),
            ("source", self.source),
            ("via", self.via),
            ("files", format_count(self.files)),
            ("retries", format_count(self.retries)),
            *([("sha256", self.sha256)] if self.sha256 else []),
        ]


def fetch(
    source: str,
    to: str | os.PathLike[str] = ".",
    *,
    digest: str | None = None,
    timeout: float = 60.0,
    cookies: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> FetchReport:
    """Bring a file or folder from the network to `to` and return where it is.

    A fetch that was stopped, by an error, Ctrl-C or a kill, resumes when it is run again.

    Run again, it fetches nothing where the final path is known to have it: the file has the digest that is asked for;
    or an earlier call fetched it from the same source to the same place, it is untouched since (size and time of
    change; of a folder the number and bytes of its files), and the server says that its version is still the same.
    Drive tells no versions and is not asked. Anything else at the final path is left alone without `overwrite`.

    An fsspec file system is read by threads, many files and parts of files at once. If one answer, of a file 4 MiB at
    most, takes longer than `timeout`, twice, `fetch` ends by `TimedOut`; a thread that waits for such an answer cannot
    be ended, and stays until its file system answers.

    Args:
        source: the id of a Drive file, a share link of a Drive file or folder, an `https://` or `http://` address, or
            any URL that fsspec reads: `gs://`, `s3://`, `hf://` and more, also of folders.
        to: an existing folder, or one named with a slash behind it, in which the source's name is kept; else the path
            of the file or folder. `drive:` and `~` work.
        digest: what the file must have: `"sha256:"`, `"sha512:"`, `"sha1:"` or `"md5:"` and its hexadecimal digits.
        timeout: seconds in which at least 4 KiB have to come, else the try has failed. `fetch` gives up after two such
            tries, or five that failed in any way, without anything new between them.
        cookies: let gdown use and rewrite its cookie file, for Drive files that need a login.
        overwrite: replace what is at the final path, once all is there.
        progress: show a progress bar.

    Raises:
        FetchFailed: if it cannot be had; the message names the cause and a cure.
        TimedOut: if nothing came in time.
        Corrupt: if the file has another digest than asked for; nothing is kept.
        TargetExists: if something else is at the final path.
        NotEnoughSpace: before anything is written, where the size is known.
        MissingPackage: if gdown, fsspec or a file system's package is not installed, with the line that installs it.
        InvalidOption: if `source` or an option cannot be meant; paths of this machine are for `stage()`.
    """
    started = time.monotonic()
    address = address_of(source)
    act = f"fetch {address.shown!r}"
    check_seconds(act, "timeout", timeout)
    expected = ExpectedDigest.parse(act, digest)
    options = {"cookies": cookies, "overwrite": overwrite, "progress": progress}
    with (
        file_changes.translated(act),
        FetchJob(act, address, to, expected, timeout, **options) as job,
        _no_new_empty_folder(job.folder),
    ):
        try:
            _look_first(job)
            path, record = _fetch(job)
            reused = False
        except AlreadyThere as there:
            record, reused = there.record, True
            path = job.folder / (job.name or Path(record.path).name)
            partials.discard_kept(path, address.digest(job.name))  # of a run that was to replace it
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
    """Answer without asking the network what can be answered: the same is there already, or something else is."""
    earlier = job.earlier
    name = job.name or (Path(earlier.path).name if earlier else "")
    if name and not job.overwrite:
        is_drive = job.address.kind in (DRIVE_FILE, DRIVE_FOLDER)
        is_folder = (job.folder / name).is_dir() if job.address.kind == FSSPEC else False
        if job.expected or earlier is None or is_drive:
            job.admit(name, is_folder=is_folder or job.address.kind == DRIVE_FOLDER)


def _fetch(job: FetchJob) -> tuple[Path, FetchRecord]:
    """Fetch into a partial, publish that, and return the final path and what is remembered of it."""
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
    record = FetchRecord(where, result.validator, state_of(final), result.files, sha256, result.via)
    record.write(job.identity)
    return final, record


@contextlib.contextmanager
def _no_new_empty_folder(folder: Path) -> Iterator[None]:
    """Remove the folder and its parents again if the block fails and has made them for nothing."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # something is in it
            for path in missing:
                file_changes.remove_empty_folder(path)
        raise
