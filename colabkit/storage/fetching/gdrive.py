"""Fetch files and folders from Google Drive with gdown, in a child process that is stopped if no data arrives."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import time
from pathlib import Path
from typing import Any

from colabkit.foundation import (
    FetchFailed,
    MissingPackage,
    TargetExists,
    Text,
    call,
    cannot,
    file_changes,
    format_things,
    partials,
    printable,
    processes,
)
from colabkit.storage.addresses import safe_name
from colabkit.storage.fetching import gdown_child
from colabkit.storage.fetching.connections import HEAD_BYTES, disposition_name, html_title, is_html
from colabkit.storage.fetching.transfer import (
    MIN_BYTES,
    UNCHANGED,
    AlreadyThere,
    FetchJob,
    FetchResult,
    TryFailed,
    digests_of,
    sync_file,
)

_AGAIN = "Check the network, then try again"
# Time between checks for new data.
_LOOK_S = 0.5
_PAGE_BYTES = 1 << 16

# Number of files whose versions the record keeps.
_KNOWN_FILES = 50
_TRANSIENT = frozenset({408, 429})
_CAUSES: tuple[tuple[tuple[str, ...], str, Text], ...] = (
    (
        ("too many users have viewed or downloaded", "download quota", "quota exceeded"),
        "too many people have downloaded it recently, so Drive blocks further downloads for up to a day",
        ("Copy it to your own Drive, run ", call("mount"), ", and read the copy there"),
    ),
    (
        ("has more than 50 files",),
        "the folder has more than 50 files, the limit of this version of gdown",
        "Run pip install -U gdown, since version 6.0 has no limit, then try again",
    ),
)
_PRIVATE = ("cannot retrieve the public link", "cannot retrieve the folder information", "failed to retrieve folder")


def fetch_drive_file(job: FetchJob, kept: partials.KeptPartial) -> FetchResult:
    """Fetch a Drive file into the partial and raise the errors of `fetch()`; gdown exports Google documents."""
    child = _Child(job, kept, is_folder=False)
    return job.try_until_done(lambda: _whole_file(job, kept, child.run()), child.can_resume)


def fetch_drive_folder(job: FetchJob, kept: partials.KeptPartial) -> FetchResult:
    """Fetch a Drive folder into the partial; raise the errors of `fetch()`."""
    child = _Child(job, kept, is_folder=True)
    return job.try_until_done(lambda: _whole_folder(job, kept, child.run()), child.can_resume)


class _Child:
    def __init__(self, job: FetchJob, kept: partials.KeptPartial, *, is_folder: bool) -> None:
        self.job, self.kept, self.is_folder = job, kept, is_folder
        self._looked = self._moved = 0.0
        self._seen = self._counted = 0
        self._last: dict[str, Any] = {}
        self._is_admitted = False

    def run(self) -> dict[str, Any]:
        known = self.kept.record.get("known", {})
        if self._bytes_there() and not self.is_folder and not known:
            # The version of the existing bytes is unknown, so they cannot be resumed.
            self.kept.start_over()
        self.kept.note(known=known)
        lock = self.kept.folder / "child"
        if not lock.exists():
            file_changes.write_file(lock, b"")
        plan = {
            "id": self.job.address.text,
            "resource_key": self.job.address.resource_key,
            "is_folder": self.is_folder,
            # With a trailing slash, gdown creates a folder with the Drive folder's name inside the output folder.
            "output": f"{self.kept.data.absolute()}{os.sep if self.is_folder else ''}",
            "cookies": self.job.cookies,
            "known": known,
            "lock": str(lock.absolute()),
            "parent": os.getpid(),
        }
        self._seen = self._counted = self._bytes_there()
        self._looked = self._moved = time.monotonic()
        self._last = {}
        self.job.begin(self._seen, known.get(self.job.address.text, {}).get("total"))
        command = processes.python(inspect.getsource(gdown_child), json.dumps(plan), isolated=False)
        try:
            processes.run(
                command, self.job.act, float("inf"), environ=_environment(), on_tick=self._tick, on_line=self._line
            )
            self._look()
        except (TargetExists, AlreadyThere):
            # Discard the first bytes, which may have arrived before the name was checked.
            self.kept.start_over()
            raise
        if "done" not in self._last:
            raise self._failed(self._last)
        return self._last

    def can_resume(self) -> bool:
        """Return whether another run can reuse data: any file of a folder, or part of a file whose version is known."""
        file = self.kept.record.get("known", {}).get(self.job.address.text, {})
        return self._bytes_there() > 0 and (self.is_folder or bool(file.get("total") and file.get("validator")))

    def _bytes_there(self) -> int:
        total = 0
        for path in [*self.kept.folder.glob(f"{self.kept.data.name}*"), *self.kept.data.rglob("*")]:
            # gdown may have renamed the file meanwhile.
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size if path.is_file() else 0
        return total

    def _look(self) -> None:
        if self.is_folder and not self._is_admitted and (names := _folders_in(self.kept.data)):
            # The folder's name is now known, so check the target before more data is downloaded.
            self.job.admit(names[0].name, is_folder=True)
            self._is_admitted = True
        now = self._bytes_there()
        if now > self._seen:
            self.job.advance(now - self._seen)
            self._seen = now
        if self._seen - self._counted >= MIN_BYTES:
            self._counted, self._moved = self._seen, time.monotonic()

    def _tick(self, _passed: float) -> None:
        now = time.monotonic()
        if now - self._looked >= min(_LOOK_S, self.job.timeout / 4):
            self._looked = now
            self._look()
        if now - self._moved >= self.job.timeout:
            raise TryFailed("too little data arrived from Drive", _AGAIN, hung=True)

    def _line(self, line: str) -> None:
        if (message := processes.parse_record(line)) is None:
            return
        if "file" in message:
            self._found(message["file"])
        elif "listed" in message:
            self._moved = time.monotonic()
        else:
            self._last = message

    def _found(self, file: dict[str, Any]) -> None:
        """Record the version of the arriving bytes; for a single file, also check the target and the free space."""
        known = {**self.kept.record["known"], file["id"]: file}
        if self.is_folder:
            # Every new file counts as progress, since it may be smaller than `MIN_BYTES`.
            self._moved = time.monotonic()
        else:
            final = self.job.admit(_name(self.job, file))
            if file["total"] is not None:
                file_changes.check_space(self.job.act, max(0, file["total"] - self._seen), final)
            self.job.begin(self._seen, file["total"])
        self.kept.note(known=dict(list(known.items())[-_KNOWN_FILES:]))

    def _failed(self, result: dict[str, Any]) -> Exception:
        """Translate the child's failure into an error; a failure that may be temporary becomes `TryFailed`."""
        failed, status = result.get("failed", ""), result.get("status", 0)
        text = f"{result.get('kind', '')} {result.get('text', '')}"
        reason = self.job.address.scrubbed(text)
        text = " ".join(text.split()).lower()
        if failed == "missing" and result["kind"] == "gdown":
            found = "the package gdown, which is needed to read Drive links, is not installed"
            return MissingPackage(cannot(self.job.act, found, "", "Run pip install gdown"))
        if failed == "old":
            version = f"gdown {printable(result['version'])[:20]} is installed"
            return MissingPackage(cannot(self.job.act, version, "gdown 5.2 or newer", "Run pip install -U gdown"))
        if failed in ("range", "changed"):
            self._drop_parts()
            is_range = failed == "range"
            restart = "Drive did not resume at the requested byte" if is_range else "the file changed in Drive"
            return TryFailed(restart, "Try again", starts_over=True)
        if failed == "network":
            return TryFailed(f"the network failed ({reason})", _AGAIN)
        if result.get("errno"):
            return OSError(result["errno"], os.strerror(result["errno"]), str(self.kept.data))
        if failed != "gdown":
            return TryFailed(f"gdown's process ended early{f' ({reason})' if reason else ''}", _AGAIN)
        for signs, cause, advice in _CAUSES:
            if any(sign in text for sign in signs):
                return FetchFailed(cannot(self.job.act, cause, "", advice))
        if status in _TRANSIENT or status >= 500:
            return TryFailed(f"Drive answered with status {status}", "Try again later")
        if status == 404:
            missing = f"Drive has no {'folder' if self.is_folder else 'file'} with this ID"
            check = "Check the link; for a folder, use the full link instead of the ID"
            return FetchFailed(cannot(self.job.act, missing, "", check))
        if any(sign in text for sign in _PRIVATE):
            share = ('In Drive, share it with "Anyone with the link", or run ', call("mount"), " and read it there")
            return FetchFailed(cannot(self.job.act, "it is not shared publicly", "", share))
        if "incomplete" in text:
            return TryFailed("the connection ended too early", _AGAIN)
        browse = "Open the link in a browser to see Drive's message"
        return FetchFailed(cannot(self.job.act, f"gdown failed ({reason})", "", browse))

    def _drop_parts(self) -> None:
        if not self.is_folder:
            self.kept.start_over()
        for part in self.kept.data.rglob("*.part"):
            file_changes.remove(part)


def _whole_file(job: FetchJob, kept: partials.KeptPartial, result: dict[str, Any]) -> FetchResult:
    file = kept.record["known"].get(job.address.text, {"total": None, "disposition": ""})
    name = _name(job, file)
    size = kept.data.stat().st_size
    if file["total"] not in (None, size):
        kept.start_over()
        raise TryFailed(f"{size:,} of {format_things(file['total'], 'byte')} arrived", "Try again", starts_over=True)
    with kept.data.open("rb") as opened:
        page = opened.read(_PAGE_BYTES)
    if is_html(None, page[:HEAD_BYTES], job.name or name):
        kept.start_over()
        title = job.address.scrubbed(html_title(page))
        page_name = f"a web page titled {title!r}" if title else "a web page"
        next_step = "Open the link in a browser to see Drive's message"
        raise FetchFailed(cannot(job.act, f"Drive sent {page_name}", "a file", next_step))
    sync_file(kept.data)
    return FetchResult(kept.data, name, f"gdown {result['version']}", "", 1, digests_of(kept.data, job.expected))


def _whole_folder(job: FetchJob, kept: partials.KeptPartial, result: dict[str, Any]) -> FetchResult:
    if result["repeated"]:
        # gdown keeps only one of several files with the same name.
        found = f"a folder has two files named {job.address.scrubbed(result['repeated'])!r}"
        next_step = "Rename one of them in Drive, then try again"
        kept.start_over()
        raise FetchFailed(cannot(job.act, found, "unique names in each folder", next_step))
    made = _folders_in(kept.data)
    files = [path for path in kept.data.rglob("*") if path.is_file()]
    if len(made) != 1 or len(files) != result["done"]:
        kept.start_over()
        raise TryFailed("the folder changed during the download", UNCHANGED, starts_over=True)
    if not files:
        share = 'In Drive, add files to it, and share it with "Anyone with the link"'
        raise FetchFailed(cannot(job.act, "the folder has no shared files", "", share))
    for path in files:
        sync_file(path)
    return FetchResult(made[0], safe_name(made[0].name) or "folder", f"gdown {result['version']}", "", len(files), {})


def _folders_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _name(job: FetchJob, file: dict[str, Any]) -> str:
    return disposition_name(file["disposition"]) or job.address.text


def _environment() -> dict[str, str]:
    # Keep Python from importing modules from the working folder.
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(folder)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
