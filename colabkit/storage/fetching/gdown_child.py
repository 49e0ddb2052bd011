"""Script of the child process that runs gdown and reports to its parent in JSON lines.

gdown has no timeouts, prints its messages, and trusts the part files that it resumes. `_Guard` checks every response
before gdown reads it: if a range does not continue the part file, or belongs to another version, the download ends
before a byte is written. The code uses only arguments that gdown 5 and 6 share.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import re
import sys
import threading
import time
import urllib.parse
from typing import Any

_OLDEST = (5, 2)
_KEPT_CHARS = 4000
_LOCK_S = 10.0


class RangeRefused(Exception):
    """The response does not continue the part file."""


class VersionMismatch(Exception):
    """The part file holds a different version from that in Drive, or an unknown version."""


class _Tail:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text = (self.text + text)[-_KEPT_CHARS:]
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


class _Guard:
    """Adds the resource key to gdown's requests, and checks each final response before gdown reads its body."""

    def __init__(self, plan: dict[str, Any], say: Any) -> None:
        self.plan, self.say = plan, say
        self.status = 0
        self.file: dict[str, Any] = {}
        self.known: dict[str, Any] | None = None

    def watch(self, session: Any) -> None:
        send = session.send

        def guarded(own: Any, request: Any, **options: Any) -> Any:
            self.add_key(request)
            response = send(own, request, **options)
            # requests calls `send` again for each redirect, with `allow_redirects=False`; check only the final
            # response.
            if options.get("allow_redirects"):
                self.check(response)
            return response

        session.send = guarded

    def add_key(self, request: Any) -> None:
        """Add the resource key that some older links need, since gdown drops it."""
        key, drive_id = self.plan["resource_key"], self.plan["id"]
        query = urllib.parse.urlsplit(request.url).query
        if key and drive_id in request.url and "resourcekey=" not in query:
            request.prepare_url(request.url, {"resourcekey": key})

    def check(self, response: Any) -> None:
        headers = response.headers
        self.status = response.status_code
        # By default, version 1 of urllib3 mistakes a broken connection for the end of the file.
        response.raw.enforce_content_length = True
        requested = re.fullmatch(r"bytes=(\d+)-", response.request.headers.get("Range", ""))
        if requested:
            got = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", headers.get("Content-Range", ""))
            if response.status_code != 206 or not got or got[1] != requested[1] or int(got[2]) != int(got[3]) - 1:
                raise RangeRefused
            if self.file["total"] != int(got[3]):
                raise VersionMismatch
            if self.known is None or self.known["total"] is None or not self.known["validator"]:
                # The version of the part file is unknown, so it may differ from that in Drive.
                raise VersionMismatch
            if any(self.known[fact] != self.file[fact] for fact in ("total", "validator")):
                raise VersionMismatch
        elif "Content-Disposition" in headers:
            encoded = headers.get("Content-Encoding", "identity") != "identity"
            length = headers.get("Content-Length", "")
            first = urllib.parse.urlsplit((response.history or [response])[0].request.url)
            in_query = urllib.parse.parse_qs(first.query).get("id", [""])[0]
            drive_id = in_query if self.plan["is_folder"] else self.plan["id"]
            self.file = {
                "id": drive_id,
                "total": int(length) if length.isdecimal() and not encoded else None,
                "validator": headers.get("Last-Modified") or headers.get("ETag") or headers.get("X-Goog-Hash") or "",
                "disposition": headers["Content-Disposition"],
            }
            self.known = self.plan["known"].get(drive_id)
            self.say(file=self.file)
        elif "folder" in urllib.parse.urlsplit(response.url).path:
            self.say(listed=True)


def _end_with(parent: int) -> None:
    """Exit when the parent does, since an orphan could write to the files of the next fetch."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _lock(path: str) -> None:
    """Lock the file at `path`; wait up to 10 s for the child of an earlier, killed parent that still holds the lock."""
    fd = os.open(path, os.O_RDONLY)
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        except OSError:
            # Continue without a lock: if the file system does not support locks, each fetch has a separate folder.
            return
        else:
            return


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _reason(error: Exception) -> str:
    inner = getattr(error.args[0] if error.args else None, "reason", None) or error
    return re.sub(r"^.*?\w*Connection\w*\(.*?\): ", "", str(inner))


def _fetch(plan: dict[str, Any], guard: _Guard, tail: _Tail) -> dict[str, Any]:
    gdown = importlib.import_module("gdown")
    version = gdown.__version__
    if _numbers(version) < _OLDEST:
        return {"failed": "old", "version": version}
    requests = importlib.import_module("requests")
    guard.watch(requests.Session)
    options = {"id": plan["id"], "output": plan["output"], "use_cookies": plan["cookies"], "resume": True}
    status: dict[str, Any] = {"version": version}
    try:
        if plan["is_folder"]:
            # gdown reports errors of a folder's files only in its output, so do not suppress the output.
            done = gdown.download_folder(quiet=False, **options)
        else:
            done = gdown.download(quiet=True, **options)
    except RangeRefused:
        return {"failed": "range", **status}
    except VersionMismatch:
        return {"failed": "changed", **status}
    except requests.exceptions.RequestException as error:
        return {"failed": "network", "kind": type(error).__name__, "text": _reason(error), **status}
    except Exception as error:
        text = f"{error} {tail.text if plan['is_folder'] else ''}"
        number = error.errno if isinstance(error, OSError) else None
        facts = {"kind": type(error).__name__, "text": text, "status": guard.status, "errno": number}
        return {"failed": "gdown", **facts, **status}
    if done is None:
        return {"failed": "gdown", "kind": "", "text": tail.text, "status": guard.status, **status}
    if not plan["is_folder"]:
        return {"done": 1, **status}
    repeated = next((path for number, path in enumerate(done) if path in done[:number]), None)
    return {"done": len(done), "repeated": repeated and os.path.relpath(repeated, plan["output"]), **status}


def main() -> None:
    """Run the fetch described by the JSON in the first argument, and print its result as the last line."""
    plan = json.loads(sys.argv[1])
    out = sys.stdout

    def say(**line: Any) -> None:
        print(f"\n{json.dumps(line)}", file=out, flush=True)

    threading.Thread(target=_end_with, args=(plan["parent"],), daemon=True).start()
    tail = _Tail()
    with contextlib.redirect_stdout(tail), contextlib.redirect_stderr(tail):
        try:
            _lock(plan["lock"])
            result = _fetch(plan, _Guard(plan, say), tail)
        except ModuleNotFoundError as error:
            result = {"failed": "missing", "kind": error.name or "", "text": str(error)}
        except Exception as error:
            result = {"failed": "child", "kind": type(error).__name__, "text": str(error)}
    say(**result)


if __name__ == "__main__":
    main()
