"""Fetch files over https and http, and resume with range requests; check the version and offset of each response."""

from __future__ import annotations

import base64
import http.client
import os
import socket
import ssl
import time
import urllib.error
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPResponse
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from colabkit.foundation import FetchFailed, cannot, file_changes, format_bytes, format_seconds, partials
from colabkit.storage.addresses import safe_name
from colabkit.storage.fetching.connections import (
    HEAD_BYTES,
    Deadline,
    RedirectRefused,
    content_range,
    disposition_name,
    html_title,
    is_html,
    open_address,
    retry_after_s,
    total_bytes,
    validator,
)
from colabkit.storage.fetching.transfer import (
    MIN_BYTES,
    UNCHANGED,
    ExpectedDigest,
    FetchJob,
    FetchResult,
    TryFailed,
    new_digests,
)

# Number of bytes to collect for each write, since TLS delivers at most 16 KiB at a time.
_HELD_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 18
# Number of bytes to read from a web page to find its title.
_PAGE_BYTES = 1 << 16
_TRANSIENT = frozenset({408, 425, 429})
_FINAL = (ssl.SSLCertVerificationError, http.client.InvalidURL, UnicodeError)
_AGAIN = "Check the network, then try again"
# User agent of requests, since some hosts refuse that of the standard library.
_AGENT = "Mozilla/5.0 (compatible; colabkit)"
_CAUSES = {
    401: ("it needs a login", "Use an address that needs none, or add user and password to the address"),
    403: ("the server denies access", "Check whether it needs a login, or whether a signed address has expired"),
    404: ("the server has no file at this address", "Check the address"),
    407: ("the proxy needs a login", "Add user and password to the environment variable https_proxy"),
    410: ("the server has removed the file", "Check the address"),
}


def fetch_web(job: FetchJob, kept: partials.KeptPartial) -> FetchResult:
    """Fetch the file into the partial; raise the errors of `fetch()`."""
    with _Sink(kept.data, job.expected) as sink:
        download = _WebDownload(job, kept, sink)
        return job.try_until_done(download.attempt, download.can_resume)


class _WebDownload:
    def __init__(self, job: FetchJob, kept: partials.KeptPartial, sink: _Sink) -> None:
        self.job, self.kept, self.sink = job, kept, sink
        self.has_ranges = True
        parts = urlsplit(job.address.text)
        userinfo, _, host = parts.netloc.rpartition("@")
        # An invalid host name fails later, with a clear error, when it is looked up.
        with suppress(UnicodeError):
            host = host if host.isascii() else host.encode("idna").decode()
        path = quote(parts.path or "/", safe="/%:=&~+!$,;'@()*[]")
        query = quote(parts.query, safe="/%:=&?~+!$,;'@()*[]")
        self.url = urlunsplit((parts.scheme, host, path, query, ""))
        user, _, password = userinfo.partition(":")
        plain = f"{unquote(user)}:{unquote(password)}".encode()
        self.authorization = f"Basic {base64.b64encode(plain).decode()}" if userinfo else None

    def can_resume(self) -> bool:
        """Return whether the rest of the file can be requested.

        This requires stored data whose version is known, and a server that supports range requests.
        """
        return bool(self.sink.size and self.kept.record.get("validator") and self.has_ranges)

    def attempt(self) -> FetchResult:
        have = self.sink.open()
        record = self.kept.record
        if have and not (self.can_resume() and have <= (record["total"] or have)):
            self.sink.start_over()
            have = 0
        headers = {"User-Agent": _AGENT, "Accept": "*/*", "Accept-Encoding": "identity"}
        if have:
            headers |= {"Range": f"bytes={have}-", "If-Range": record["validator"]}
        deadline = Deadline(self.job.timeout)
        try:
            response = open_address(self.url, headers, self.authorization, deadline)
        except RedirectRefused as error:
            found = f"the server redirects {error}"
            next_step = "Ask the provider of the file for an https address"
            raise FetchFailed(cannot(self.job.act, found, "an https address", next_step)) from None
        except urllib.error.HTTPError as error:
            with closing(error):
                return self._refused(error, have)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._network_failure(error, deadline.host) from None
        with closing(response):
            have, expected = self._answered(response, have)
            self.job.begin(have, None if expected is None else have + expected)
            blocks = self._blocks(response, deadline, expected)
            if not have:
                self._check_head(response, blocks)
            for block in blocks:
                self._keep(block)
        return self._whole()

    def _answered(self, response: HTTPResponse, have: int) -> tuple[int, int | None]:
        expected: int | None
        if response.status == 206:
            expected = self._checked_range(response, have)
            file_changes.check_space(self.job.act, expected, self._admit_rest())
        elif response.status in (200, 203):
            # The server answered a range request with the complete file: the file has changed, or ranges are not
            # supported.
            if have:
                self.has_ranges = validator(response.headers) != self.kept.record["validator"]
                self.sink.start_over()
            have, expected = 0, total_bytes(response.headers)
            self._admit(response, expected)
        else:
            status = f"the server answered with status {response.status}"
            raise FetchFailed(cannot(self.job.act, status, "a file", "Check the address"))
        return have, expected

    def _admit(self, response: HTTPResponse, total: int | None) -> None:
        name = disposition_name(response.headers.get("Content-Disposition")) or self._name_of_path(response)
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity") and not name.lower().endswith((".gz", ".tgz", ".br", ".zst")):
            found = f"the server sends the file compressed ({encoding[:20]!r}), contrary to the request"
            raise FetchFailed(cannot(self.job.act, found, "uncompressed data", "Download it with another program"))
        version = validator(response.headers)
        final = self.job.admit(name, _version(version, total))
        if total is not None:
            file_changes.check_space(self.job.act, total, final)
        self.kept.note(name=name, total=total, validator=version)

    def _admit_rest(self) -> Path:
        """Return the final path of a resumed file, after checking again whether it is free or already complete."""
        record = self.kept.record
        return self.job.admit(record["name"], _version(record["validator"], record["total"]))

    def _name_of_path(self, response: HTTPResponse) -> str:
        own = self.job.address.name
        if "." in own:
            return own
        return safe_name(unquote(urlsplit(response.geturl()).path.rpartition("/")[2])) or own or "download"

    def _checked_range(self, response: HTTPResponse, have: int) -> int:
        record = self.kept.record
        first, last, total = content_range(response.headers) or (None, None, None)
        length = total_bytes(response.headers)
        now = validator(response.headers)
        known = record.get("total")
        is_same = (not now or now == record.get("validator")) and (known is None or total in (None, known))
        if have and not is_same:
            self._start_over("the file changed during the download", UNCHANGED)
        if not have or first != have or last is None or (length is not None and length != last - first + 1):
            self.has_ranges = False
            self._start_over("the server sent a different part of the file than requested", "Try another server")
        assert last is not None
        return last - have + 1

    def _blocks(self, response: HTTPResponse, deadline: Deadline, expected: int | None) -> Iterator[bytes]:
        """Yield the body's blocks; check that it has the announced length and arrives in time."""
        received = since = 0
        deadline.restart()
        while expected is None or received <= expected:
            try:
                block = response.read1(_BLOCK_BYTES)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._network_failure(error, deadline.host) from None
            if not block:
                break
            received += len(block)
            since += len(block)
            if since >= MIN_BYTES:
                deadline.restart()
                since = 0
            yielded = time.monotonic()
            yield block
            # Do not count time spent writing to disk.
            deadline.extend(time.monotonic() - yielded)
        if expected is not None and received > expected:
            self.has_ranges = False
            self._start_over("the server sent more bytes than it announced", "Try another server")
        if expected is not None and received < expected:
            missing = format_bytes(expected - received)
            raise TryFailed(f"the connection ended {missing} too early", _AGAIN)

    def _check_head(self, response: HTTPResponse, blocks: Iterator[bytes]) -> None:
        head = b""
        for block in blocks:
            head += block
            if len(head) >= HEAD_BYTES:
                break
        name = self.job.name or self.kept.record["name"]
        if is_html(response.headers, head[:HEAD_BYTES], name):
            for block in blocks:
                head += block
                if len(head) >= _PAGE_BYTES:
                    break
            title = self.job.address.scrubbed(html_title(head))
            page = f"a web page titled {title!r}" if title else "a web page"
            next_step = "Open the address in a browser, log in if necessary, and copy the address of the file itself"
            raise FetchFailed(cannot(self.job.act, f"the server sent {page}", "a file", next_step))
        self._keep(head)

    def _keep(self, block: bytes) -> None:
        self.sink.write(block)
        self.job.advance(len(block))

    def _whole(self) -> FetchResult:
        record = self.kept.record
        total, version = record["total"], record["validator"]
        if total is not None and self.sink.size < total:
            raise TryFailed("the server sent only a part of the missing bytes", _AGAIN)
        digests = self.sink.finish()
        via = urlsplit(self.url).scheme
        return FetchResult(self.kept.data, record["name"], via, _version(version, total), 1, digests)

    def _refused(self, error: urllib.error.HTTPError, have: int) -> FetchResult:
        """Return the file if the status shows that it is complete; otherwise raise the error for the status."""
        status = error.code
        if status == 416 and have:
            total = (content_range(error.headers) or (None, None, None))[2]
            if total == have and self.kept.record["total"] in (None, have):
                self._admit_rest()
                return self._whole()
            self._start_over("the file changed during the download", UNCHANGED)
        if status in _TRANSIENT or status >= 500:
            pause_s = retry_after_s(error.headers)
            if pause_s is not None and pause_s > self.job.timeout:
                pause = format_seconds(pause_s)
                busy = f"the server answered with status {status} and a waiting time of {pause}"
                limit = f"at most {format_seconds(self.job.timeout)}"
                raise FetchFailed(cannot(self.job.act, busy, limit, f"Try again after {pause}")) from None
            text = f"the server answered with status {status}"
            raise TryFailed(text, "Try again later", pause_s=pause_s) from None
        if 300 <= status < 400:
            redirect = "the server redirects in a loop or without a target"
            browse = "Open the address in a browser to see where it leads"
            raise FetchFailed(cannot(self.job.act, redirect, "a file", browse)) from None
        cause, next_step = _CAUSES.get(status, ("the server rejects the request", "Check the address"))
        raise FetchFailed(cannot(self.job.act, f"{cause} (status {status})", "", next_step)) from None

    def _start_over(self, found: str, next_step: str) -> NoReturn:
        self.sink.start_over()
        raise TryFailed(found, next_step, starts_over=True)

    def _network_failure(self, error: Exception, host: str) -> TryFailed:
        """Return `TryFailed` for a network error, or raise `FetchFailed` if another attempt cannot help."""
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            return TryFailed("too little data arrived", _AGAIN, hung=True)
        if isinstance(cause, ssl.SSLCertVerificationError):
            found = f"the server's certificate is not trusted ({cause.verify_message})"
            next_step = "Check the address and the clock of this machine"
            raise FetchFailed(cannot(self.job.act, found, "", next_step)) from None
        if isinstance(cause, socket.gaierror):
            unknown = f"the host {host!r} has no IP address"
            if cause.errno == socket.EAI_NONAME:
                raise FetchFailed(cannot(self.job.act, unknown, "", "Check the address and the network")) from None
            return TryFailed(unknown, _AGAIN)
        if not isinstance(cause, Exception) or isinstance(cause, _FINAL):
            # The text of an error about an address contains the address, so report only the error's type.
            reason = type(cause).__name__ if isinstance(cause, Exception) else self.job.address.scrubbed(cause)
            invalid = f"the address cannot be requested ({reason})"
            check = "Check the address and the proxy settings"
            raise FetchFailed(cannot(self.job.act, invalid, "", check)) from None
        if isinstance(cause, http.client.RemoteDisconnected):
            return TryFailed("the server closed the connection without an answer", _AGAIN)
        if isinstance(cause, http.client.IncompleteRead):
            return TryFailed("the connection ended too early", _AGAIN)
        text = cause.strerror if isinstance(cause, OSError) and cause.strerror else f"{type(cause).__name__}: {cause}"
        return TryFailed(f"the network failed ({self.job.address.scrubbed(text)})", _AGAIN)


def _version(validator: str, total: int | None) -> str:
    """Return a string that identifies this version of a file; empty if the server sends no validator."""
    return f"{validator}|{total}" if validator else ""


class _Sink:
    """A file in a partial. It is hashed while it is written, and can continue the file of an earlier process.

    Args:
        path: the file's path.
        expected: a digest to compute besides SHA-256, or None.
    """

    def __init__(self, path: Path, expected: ExpectedDigest | None) -> None:
        self.path = path
        self._expected = expected
        self._fd: int | None = None
        self._held = bytearray()
        self._written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            try:
                self._flush()
            except OSError:
                if error is None:
                    raise
            finally:
                os.close(self._fd)
                self._fd = None

    @property
    def size(self) -> int:
        return self._written + len(self._held)

    def open(self) -> int:
        """Open the file for appending, unless it is open, and return the number of bytes received so far."""
        if self._fd is None:
            is_there = self.path.exists()
            self._digests = new_digests(self._expected)
            self._fd = file_changes.reopen(self.path) if is_there else file_changes.create(self.path)
            self._written = self._read_back(self._fd)
        return self.size

    def start_over(self) -> None:
        self._held.clear()
        self.__exit__(None, None, None)
        file_changes.remove(self.path)
        self.open()

    def write(self, block: bytes) -> None:
        for digest in self._digests.values():
            digest.update(block)
        self._held += block
        if len(self._held) >= _HELD_BYTES:
            self._flush()

    def finish(self) -> dict[str, str]:
        assert self._fd is not None
        self._flush()
        file_changes.sync(self._fd, self.path)
        return {kind: digest.hexdigest() for kind, digest in self._digests.items()}

    def _flush(self) -> None:
        assert self._fd is not None
        held, self._held = self._held, bytearray()
        if held:
            file_changes.write_at(self._fd, held, self._written, self.path)
            self._written += len(held)

    def _read_back(self, fd: int) -> int:
        offset = 0
        while block := os.pread(fd, 1 << 20, offset):
            for digest in self._digests.values():
                digest.update(block)
            offset += len(block)
        return offset
