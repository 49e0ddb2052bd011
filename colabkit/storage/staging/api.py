"""`stage()` copies a source to local storage with concurrent reads, and verifies the copy.

A local copy holds the source's files and a seal, `.colabkit-stage.json`, which is written last. The copy appears at
its path atomically. Many files are read at once, since a mount answers each request with a delay; large files are read
in several concurrent ranges; a remote archive is copied as one file and extracted locally. After an interruption, the
next run reuses the data already copied.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

from colabkit.foundation import (
    BadArchive,
    BadSource,
    Corrupt,
    InvalidOption,
    NotSealed,
    SourceMissing,
    TargetExists,
    call,
    can_hang,
    cannot,
    check_one_of,
    check_type,
    checked_call,
    file_changes,
    interruptible,
    local_root,
    mounts,
    omit,
    option,
)
from colabkit.storage.addresses import FSSPEC, Address
from colabkit.storage.fetching.api import fetch
from colabkit.storage.shard_index import ShardedFile, listed_shards
from colabkit.storage.sources.concurrency import answer_of, check_threads
from colabkit.storage.sources.folder import FileSource
from colabkit.storage.sources.items import ArchiveSource, Source
from colabkit.storage.sources.manifest import ManifestSource
from colabkit.storage.sources.registry import AnySource, PathTable, open_source
from colabkit.storage.staging.local_copy import LocalCopy, Origin, origin_of
from colabkit.storage.staging.places import Target, candidates, choose, identity_of, keys_of_copies
from colabkit.storage.staging.reports import StagePlan, StageReport, UnstageReport
from colabkit.storage.staging.run import StagingRun

_PASS_PATH = ("Pass the path returned by ", call("stage"), "; a copy at a custom path cannot be found by its source")


@interruptible("Staging", "The files copied so far are kept. Run the same call again to resume.")
@checked_call()
def stage(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | PathTable | Source,
    to: str | os.PathLike[str] = "auto",
    *,
    path_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    on_bad: Literal["raise", "skip"] = "raise",
    threads: int | Literal["auto"] = "auto",
    verify: Literal["size", "full"] = "size",
    extract: bool = True,
    refresh: bool = False,
    dry_run: bool = False,
    progress: bool = True,
) -> StageReport:
    """Copy a source to local storage and return the local path.

    The size of every file is checked against the listing, and no file may change during the copy. The copy appears at
    its path only when it is complete. An existing copy of the same source is reused without accessing the source, but a
    local file is copied again if its size or times have changed. If a run was stopped by Ctrl-C, a kill or most errors,
    the next call resumes it and does not read copied files again, unless a file has neither a time nor a version. If
    another process is staging the same source, the call waits for that process. The index of a pack of shards is copied
    with its shards, except from a bucket.

    Args:
        source: a folder; a zip or tar archive; any other file; a table of paths (DataFrame, `.csv`, `.parquet`
            or a list of paths); an https address or Drive link, through `fetch()`; a bucket's folder (`gs://`,
            `s3://`); `samples:digits`; or a `Source`.
        to: `"auto"` uses tmpfs if enough RAM remains for training, otherwise disk; `"tmpfs"` and `"disk"` select one of
            them; any other value is the path of the copy. If the copy fits in RAM but not in the existing tmpfs, and
            the process may mount file systems, a separate tmpfs is mounted for it until `unstage()`.
        path_column: the column of a table that holds the paths; None searches for a common name, such as `path`, `file`
            or `image`.
        root: the folder of the relative paths in a table; None uses the folder of the table file, or the working folder
            for a DataFrame or list.
        on_bad: action for a row of a table without a path, or whose file is missing: `"raise"` raises an error, and
            `"skip"` leaves out the row and lists it in the report.
        threads: number of concurrent reads; `"auto"` increases it while throughput grows, and reduces it after errors.
        verify: `"size"` compares file sizes; `"full"` reads the source a second time, compares all bytes, and replaces
            outdated files, unless an existing copy has already been verified this way. For an https address or a Drive
            link, it reads the downloaded file twice and does not download it again.
        extract: False keeps an archive as one file.
        refresh: check the source again even if a local copy exists, and copy changed files: those with another size,
            modification time or change time. Change times are ignored if those of all files on a mount differ.
        dry_run: copy nothing; the report's `plan` gives the target and the expected sizes, or is None if an existing
            copy would be reused.
        progress: show a progress bar.

    Returns:
        The path of the copy, its number of files, and the time taken.

    Raises:
        InvalidOption: if an argument is invalid.
        NotMounted: if a path begins with `drive:` and Drive is not mounted.
        SourceMissing: if the source, or a shard of a pack, does not exist.
        BadSource: if the source has no files, or the target is inside it.
        BadArchive: if an archive is damaged, truncated or malicious.
        TargetExists: if something else is at the target path, or a file that you added to the local copy has the path
            of a new source file.
        NotEnoughSpace: if the target is too small; raised before anything is written if the sizes are known.
        SourceChanged: if a file changed after it was listed or during the read, or if all listings of a folder differ.
        Corrupt: if, with `verify="full"`, two reads of the source return different bytes.
        FetchFailed: if an address cannot be fetched, or a bucket cannot be read.
        FileFailed: if a file cannot be read, or the copy cannot be written.
        TimedOut: if the source does not respond.

    Example:
        >>> import colabkit
        >>> staged = colabkit.stage("samples:digits", to="digits")
        >>> staged.files
        1797
        >>> colabkit.stage("samples:digits", to="digits").reused
        True
    """
    started = time.monotonic()
    is_skipping = on_bad == "skip"
    as_table: dict[str, Any] = {"path_column": path_column, "root": root, "skips_missing": is_skipping}
    name, key, address = identity_of(source, extract=extract, **as_table)
    act = f"stage {name!r}"
    check_one_of(act, "on_bad", on_bad, ("raise", "skip"))
    check_threads(act, threads)
    check_type(act, "to", to, (str, os.PathLike), "'auto', 'tmpfs', 'disk' or a path", ("Use ", option("to", "auto")))
    check_one_of(act, "verify", verify, ("size", "full"))
    with file_changes.translated(act):
        places = candidates(name, to, key, act)
        run = StagingRun(act, name, places, to != "auto", threads, verify, refresh, progress, _local_origin(name))
        if found := run.find():
            # A previous run may have been killed before its cleanup.
            Target("", found.folder, key).discard_kept()
            return _report(run, found, started)
        with _local_file(source, address, run, dry_run=dry_run) as local:
            if local is None:
                return _report(run, _plan_of_address(run), started)
            # Another process may have fetched and staged the source meanwhile.
            if not (found := run.find()):
                with closing(_open(act, local, extract=extract, **as_table)) as opened:
                    path = getattr(opened, "path", "")
                    if run.origin is None and not opened.can_hang and os.path.isfile(path):
                        # The source is a download or data included in colabkit.
                        run.origin = origin_of(Path(path))
                    found = run.run(opened, dry_run)
    return _report(run, found or run.plan, started)


@checked_call()
def unstage(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | PathTable | Source | StageReport,
) -> UnstageReport:
    """Remove a local copy made by `stage()`, or the data of an interrupted run, to free the space.

    Args:
        path: the copy's path, the report of `stage()`, or the source if it was staged without a custom path. Data of an
            interrupted run with `path_column` or `root` is found only by the path.

    Returns:
        The removed path, and the bytes freed.

    Raises:
        SourceMissing: if there is neither a local copy nor data of an interrupted run.
        NotSealed: if `stage()` did not create the data at this path; the data is left unchanged.
        TargetExists: if you have added files to the local copy; the data is left unchanged.

    Example:
        >>> import colabkit
        >>> staged = colabkit.stage("samples:digits", to="digits")
        >>> removed = colabkit.unstage(staged)
        >>> removed.freed_bytes == staged.staged_bytes
        True
    """
    if isinstance(path, StageReport):
        path = path.path
    name, _, address = identity_of(path, extract=True)
    act = f"unstage {name!r}"
    is_local = os.path.isabs(name) and not can_hang(name, mounts())
    with file_changes.translated(act):
        freed = [(target.path, target.clear(act)) for target in _targets_of(path, name, act, is_local=is_local)]
        if address is not None and (download := _download(address)).path.parent.is_dir():
            freed.append((download.path, download.discard_kept() or None))
        if given := [(folder, size) for folder, size in freed if size is not None]:
            return UnstageReport(given[0][0], sum(size for _, size in given))
        if is_local and os.path.lexists(name):
            found = "it is not a local copy, so it stays unchanged"
            raise NotSealed(cannot(act, found, "", _PASS_PATH))
    raise SourceMissing(cannot(act, "it has no local copy", "", _PASS_PATH))


def _targets_of(source: AnySource, name: str, act: str, *, is_local: bool) -> Iterator[Target]:
    """Yield the targets to remove: the local copy at a path, or all places where a source may have one."""
    if is_local:
        folder = Path(os.path.realpath(name))
        if copy := LocalCopy.of(folder):
            tmpfs = Path(copy.seal.tmpfs) if copy.seal.tmpfs else None
            yield Target(copy.seal.target, copy.folder, copy.seal.key, mounted_at=tmpfs)
            return
        yield Target("path", folder, "")
    keys = [identity_of(source, extract=extract)[1] for extract in (True, False)]
    for key in dict.fromkeys([*keys, *sorted(keys_of_copies(name, keys[0], act))]):
        yield from candidates(name, "auto", key, act)


def _download(address: Address) -> Target:
    return Target("disk", local_root(os.environ) / "downloads" / address.digest()[:12], address.digest())


@contextmanager
def _local_file(
    source: AnySource, address: Address | None, run: StagingRun, *, dry_run: bool
) -> Iterator[AnySource | None]:
    """Yield the source; for an address that `fetch()` downloads, the downloaded path, or None for a dry run.

    A download is kept until it is staged, so that an interrupted run can resume it. If another process is fetching the
    same address, wait for that process.
    """
    if address is None or address.kind == FSSPEC:
        yield source
    elif dry_run:
        yield None
    else:
        download = _download(address)
        download.wait_for_others(run.progress)
        with download.kept() as kept:
            kept.note(key=run.key)
            try:
                if run.find():
                    yield kept.data
                else:
                    yield _fetched(str(source), f"{kept.data}/", run)
            except (BadArchive, BadSource, Corrupt):
                # Discard the download; otherwise, the next call would reuse the same bad data.
                kept.start_over()
                raise
            kept.start_over()


def _fetched(source: str, folder: str, run: StagingRun) -> Path:
    try:
        return fetch(source, folder, overwrite=run.refresh, progress=run.progress).path
    except TargetExists:
        # The source has changed since an earlier download, or has no version.
        return fetch(source, folder, overwrite=True, progress=run.progress).path


def _local_origin(name: str) -> Origin | None:
    """Return the origin of a source that is a local file, else None; remote files are not accessed."""
    if not os.path.isabs(name) or can_hang(name, mounts()) or not os.path.isfile(name):
        return None
    return origin_of(Path(name))


def _open(act: str, source: AnySource, *, extract: bool, **as_table: Any) -> Source:
    opened = open_source(source, **as_table)
    if as_table["skips_missing"] and not isinstance(opened, ManifestSource):
        opened.close()
        not_table = (option("on_bad", "skip"), " applies only to a table of paths")
        raise InvalidOption(cannot(act, not_table, "", omit("on_bad")))
    if isinstance(opened, ArchiveSource) and not extract:
        opened.close()
        return FileSource(opened.path)
    if isinstance(opened, FileSource) and (
        shards := answer_of(lambda: listed_shards(act, opened.path), opened.can_hang)
    ):
        return ShardedFile([os.path.abspath(file.path) for file in (opened, *shards)])
    return opened


def _plan_of_address(run: StagingRun) -> StagePlan:
    target = choose(run.places, 0, is_requested=len(run.places) == 1)
    why = "as requested" if target.name == "path" else "the size is known after the download"
    return StagePlan(run.name, "address", None, 0, 0, 0, 0, 0, target.name, why, target.path, ())


def _report(run: StagingRun, found: LocalCopy | StagePlan | None, started: float) -> StageReport:
    assert found is not None
    is_dry = isinstance(found, StagePlan)
    facts = found if isinstance(found, StagePlan) else found.seal
    return StageReport(
        path=found.path,
        source=facts.source,
        target=facts.target,
        why=facts.why,
        files=facts.files or 0,
        staged_bytes=facts.staged_bytes,
        seconds=time.monotonic() - started,
        retries=0 if isinstance(facts, StagePlan) else facts.retries,
        skipped=facts.skipped,
        reused=run.is_reused and not is_dry,
        resumed_bytes=run.resumed_bytes,
        verify="size" if isinstance(facts, StagePlan) else facts.verify,
        plan=found if isinstance(found, StagePlan) else run.plan,
        is_dry=is_dry,
        is_refreshed=run.refresh and not is_dry,
    )
