"""`stage()` brings a far source near: read concurrently, checked, published whole or not at all.

A near copy holds exactly the source's files, and one more, `.colabkit-stage.json`: its seal and manifest, written last.
Files are read many at once, since a mount answers each after a latency; large files in several ranges at once; an
archive is brought near whole and extracted from there. What an interrupted run brought is kept, and the next one goes
on from there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from colabkit.foundation import (
    InvalidOption,
    NotSealed,
    SourceMissing,
    can_hang,
    cannot,
    file_changes,
    mounts,
    near_folder,
    partials,
)
from colabkit.storage.addresses import FSSPEC, Address
from colabkit.storage.fetching.api import fetch
from colabkit.storage.sources.concurrency import Threads, check_threads
from colabkit.storage.sources.folder import FileSource
from colabkit.storage.sources.items import Source
from colabkit.storage.sources.registry import AnySource, open_source
from colabkit.storage.sources.tar_archive import TarSource
from colabkit.storage.sources.zip_archive import ZipSource
from colabkit.storage.staging.identity import identity_of
from colabkit.storage.staging.job import Job, wait_for_others
from colabkit.storage.staging.local_copy import Seal, near_copy_at, read_seal
from colabkit.storage.staging.planning import find_staged, kept_identity, origin_of
from colabkit.storage.staging.reports import StagePlan, StageReport, UnstageReport
from colabkit.storage.staging.targets import Target, candidates, choose, give_back_tmpfs

_NAME_COPY = "Name the path that stage() returned; a copy at a path of your own is not found by its source"


def stage(
    source: AnySource,
    to: str | os.PathLike[str] = "auto",
    *,
    threads: Threads = "auto",
    verify: Literal["size", "full"] = "size",
    extract: bool = True,
    refresh: bool = False,
    dry_run: bool = False,
    progress: bool = True,
) -> StageReport:
    """Copy a source to near storage and return where it is.

    Every file's byte count is checked against the listing, and the file against being written to meanwhile; the copy
    appears at its path only when it is whole. A copy of the same source that is there already is used again without
    touching the source. A run that was stopped, by an error, Ctrl-C or a kill, is gone on with: what is near already is
    not read again. While another process stages the same, this one waits for it.

    Args:
        source: a folder; a zip or tar archive; any other file; a table of paths (pandas DataFrame, `.csv`, `.parquet`
            or a list of paths); an https address or Drive link, through `fetch()`; a bucket's folder (`gs://`, `s3://`);
            `samples:digits`; or a `Source`.
        to: `"auto"` takes tmpfs where the bytes fit with room for training, else disk; `"tmpfs"` and `"disk"` insist;
            anything else is the path of the copy. As root, where RAM allows more than the tmpfs that is there, one is
            mounted for the copy alone, until `unstage()`.
        threads: reads in flight; `"auto"` measures: their number climbs while throughput climbs, and falls on errors.
        verify: `"size"` compares byte counts; `"full"` reads the source a second time and compares all bytes.
        extract: false keeps an archive as it is.
        refresh: look at the source again although a near copy is there, and copy what has changed.
        dry_run: only plan; the report's `plan` says what would be done.
        progress: show a progress bar.

    Raises:
        SourceMissing: if nothing is at the source's path.
        BadSource: if the source holds no files, or the target lies inside it.
        BadArchive: if an archive is broken, cut short or hostile.
        TargetExists: if something else is at the target's path, or a file of your own in the near copy has a place that
            the source now takes.
        NotEnoughSpace: before anything is written, where that can be known.
        SourceChanged: if a file changed between listing and reading, or while it was read.
        Corrupt: if with `verify="full"` the second reading gives other bytes.
        TimedOut: if the source does not answer.
    """
    started = time.monotonic()
    name, key, address = identity_of(source, extract=extract)
    act = f"stage {name!r}"
    check_threads(act, threads)
    if not isinstance(to, str | os.PathLike):
        needed = "'auto', 'tmpfs', 'disk' or a path"
        raise InvalidOption(cannot(act, f"to={to!r}", needed, "Use to='auto'"))
    if verify not in ("size", "full"):
        raise InvalidOption(cannot(act, f"verify={verify!r}", "'size' or 'full'", "Use verify='size'"))
    with file_changes.translated(act):
        places = candidates(name, to, key, act)
        origin = _near_origin(name)
        if not refresh and (found := find_staged(places, key, origin, verify)):
            partials.discard_kept(found[0], kept_identity(key, found[0]))  # of a kill after the last step but one
            return _report(found, started)
        with _near_file(source, address, places, key, refresh=refresh, progress=progress, dry_run=dry_run) as local:
            if local is None:
                return _report_of_address(name, places, started)
            if not refresh and (found := find_staged(places, key, origin, verify)):
                return _report(found, started)  # another process fetched and staged it meanwhile
            with closing(_opened(local, extract=extract)) as opened:
                job = Job(
                    act=act,
                    name=name,
                    key=key,
                    source=opened,
                    places=places,
                    is_asked=to != "auto",
                    threads=threads,
                    verify=verify,
                    refresh=refresh,
                    progress=progress,
                    origin=origin if address is None else origin_of(opened.path) if hasattr(opened, "path") else None,
                )
                staged = job.run(dry_run)
    return _report(staged, started, job=job, refresh=refresh)


def unstage(path: AnySource | StageReport) -> UnstageReport:
    """Remove a near copy that `stage()` made, or what is left of one that was interrupted, and give its space back.

    Args:
        path: the copy's path, the report of `stage()`, or the source that was staged with `to="auto"`.

    Raises:
        SourceMissing: if nothing is there.
        NotSealed: if `stage()` did not make it; then it is left alone.
    """
    if isinstance(path, StageReport):
        path = path.path
    name, _, address = identity_of(path, extract=True)
    act = f"unstage {name!r}"
    is_near = os.path.isabs(name) and not can_hang(name, mounts())
    with file_changes.translated(act):
        found = list(_places_of(path, name, act, is_near=is_near))
        freed = [(folder, _given_back(act, folder, key, tmpfs)) for folder, key, tmpfs in found]
        if address is not None and (downloads := _downloads(address)).parent.is_dir():
            freed.append((downloads, partials.discard_kept(downloads, address.digest())))
        if given := [(folder, size) for folder, size in freed if size is not None]:
            return UnstageReport(given[0][0], sum(size for _, size in given))
        if is_near and os.path.lexists(name):
            told = "it was not staged and is no near copy"
            raise NotSealed(cannot(act, told, "so it was left alone", _NAME_COPY))
    raise SourceMissing(cannot(act, "it was not staged", "so there is nothing to remove", _NAME_COPY))


def _places_of(source: AnySource, name: str, act: str, *, is_near: bool) -> Iterator[tuple[Path, str, Path | None]]:
    """Yield where near copies may be, with the key of each and the tmpfs that it may have for itself."""
    if is_near:
        folder = Path(os.path.realpath(name))
        if near := near_copy_at(folder):
            yield near[0], near[1].key, Path(near[1].tmpfs) if near[1].tmpfs else None
            return
        yield folder, "", None
    for extract in (True, False):
        key = identity_of(source, extract=extract)[1]
        for place in candidates(name, "auto", key, act):
            yield place.path, key, place.mounted_at


def _given_back(act: str, folder: Path, key: str, tmpfs: Path | None) -> int | None:
    """Remove a near copy, and what an interrupted run left of one; return the bytes given back, None without either."""
    freed: int | None = None
    if (seal := read_seal(folder)) is not None and key in ("", seal.key):
        freed, key = seal.staged_bytes, seal.key
        partials.discard(folder)
    kept = partials.kept_for(folder) if not key else kept_identity(key, folder)
    if kept and (left := partials.discard_kept(folder, kept)):
        freed = (freed or 0) + left
    give_back_tmpfs(act, tmpfs)
    return freed


def _downloads(address: Address) -> Path:
    """Return the path beside which a download lies until it is staged."""
    return near_folder(os.environ) / "downloads" / address.digest()[:12]


@contextmanager
def _near_file(
    source: AnySource,
    address: Address | None,
    places: list[Target],
    key: str,
    *,
    refresh: bool,
    progress: bool,
    dry_run: bool,
) -> Iterator[AnySource | None]:
    """Give the source, or what was fetched if it is an address, once no other process fetches it; None for a dry run.

    A download is kept until it is staged: an interrupted run goes on with it.
    """
    if address is None or address.kind == FSSPEC:
        yield source
    elif dry_run:
        yield None
    else:
        at = _downloads(address)
        wait_for_others(at, address.digest(), progress)
        with partials.KeptPartial(at.parent, kept_identity(address.digest(), at)) as kept:
            kept.note(key=key)
            if refresh or find_staged(places, key) is None:
                yield fetch(str(source), f"{kept.data}/", progress=progress).path
            else:
                yield kept.data
            kept.start_over()


def _near_origin(name: str) -> tuple[int, int] | None:
    """Return size and time of a source that is a file on this machine, None of any other: that may be far."""
    if not os.path.isabs(name) or can_hang(name, mounts()) or not os.path.isfile(name):
        return None
    return origin_of(Path(name))


def _opened(source: AnySource, *, extract: bool) -> Source:
    opened = open_source(source)
    if isinstance(opened, ZipSource | TarSource) and not extract:
        opened.close()
        return FileSource(opened.path)
    return opened


def _report_of_address(name: str, places: list[Target], started: float) -> StageReport:
    """Return what is known of an address without fetching it."""
    target = choose(places, 0, is_asked=len(places) == 1)
    why = "as asked" if target.name == "path" else "how much it is is known once it is fetched"
    plan = StagePlan(name, "address", None, 0, 0, 0, 0, 0, target.name, why, target.path, ())
    return StageReport(
        target.path,
        name,
        target.name,
        why,
        0,
        0,
        time.monotonic() - started,
        0,
        (),
        reused=False,
        plan=plan,
        is_dry=True,
    )


def _report(
    found: tuple[Path, Seal] | None, started: float, *, job: Job | None = None, refresh: bool = False
) -> StageReport:
    plan = job.plan if job else None
    seconds = time.monotonic() - started
    if found is None:
        assert plan is not None
        return StageReport(
            path=plan.path,
            source=plan.source,
            target=plan.target,
            why=plan.why,
            files=plan.files or 0,
            staged_bytes=plan.staged_bytes,
            seconds=seconds,
            retries=0,
            skipped=plan.skipped,
            reused=False,
            plan=plan,
            is_dry=True,
        )
    folder, seal = found
    return StageReport(
        path=folder / seal.file if seal.file else folder,
        source=seal.source,
        target=seal.target,
        why=seal.why,
        files=seal.files,
        staged_bytes=seal.staged_bytes,
        seconds=seconds,
        retries=seal.retries,
        skipped=seal.skipped,
        reused=job is None or job.is_reused,
        resumed_bytes=job.resumed_bytes if job else 0,
        verify=seal.verify,
        plan=plan,
        is_refreshed=refresh,
    )
