"""Files from https and http addresses: resumed by ranges that are checked, never spliced from two versions."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import urllib.error
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from colabkit.foundation import FetchFailed, cannot, file_changes, format_bytes, format_seconds, partials
from colabkit.storage.addresses import safe_name
from colabkit.storage.fetching.connections import RedirectRefused, Watchdog, open_address
from colabkit.storage.fetching.headers import (
    HEAD_BYTES,
    content_range,
    disposition_name,
    html_title,
    is_html,
    retry_after_s,
    total_bytes,
    validator,
)
from colabkit.storage.fetching.sinks import Sink
from colabkit.storage.fetching.transfer import MIN_BYTES, Again, Fetched, FetchJob

_BLOCK_BYTES = 1 << 18
_PAGE_BYTES = 1 << 16  # of a page, read for its title
_TRANSIENT = frozenset({408, 425, 429})
_FINAL = (ssl.SSLCertVerificationError, http.client.InvalidURL, UnicodeError)
_AGAIN = "Check the network, then run it again"
_AGENT = "Mozilla/5.0 (compatible; colabkit)"  # some hosts refuse the name that the standard library sends
_CAUSES = {
    401: ("it needs a login", "Use an address that needs none, or one with user and password in it"),
    403: ("the server does not allow it", "Check whether it needs a login, or whether a signed address has expired"),
    404: ("nothing is at this address", "Check the address"),
    407: ("the proxy needs a login", "Put user and password into the variable https_proxy"),
    410: ("the file is no longer there", "Check the address"),
}


def fetch_web(job: FetchJob, kept: partials.KeptPartial) -> Fetched:
    """Bring the file into the partial.

    Raises:
        FetchFailed: if it cannot be had, with the cause.
        TimedOut: if the server hung in two tries without anything new between them.
        TargetExists: if something else is at the final path.
        NotEnoughSpace: before anything is written, where the length is announced.
    """
    with Sink(kept.data, job.wanted) as sink:
        client = _Client(job, kept, sink)
        return job.try_until_done(client.attempt, client.goes_on)


class _Client:
    def __init__(self, job: FetchJob, kept: partials.KeptPartial, sink: Sink) -> None:
        self.job, self.kept, self.sink = job, kept, sink
        self.has_ranges = True
        parts = urlsplit(job.address.text)
        userinfo, _, host = parts.netloc.rpartition("@")
        with suppress(UnicodeError):  # looking it up will fail, and say so
            host = host if host.isascii() else host.encode("idna").decode()
        path = quote(parts.path or "/", safe="/%:=&~+!$,;'@()*[]")
        query = quote(parts.query, safe="/%:=&?~+!$,;'@()*[]")
        self.url = urlunsplit((parts.scheme, host, path, query, ""))
        user, _, password = userinfo.partition(":")
        plain = f"{unquote(user)}:{unquote(password)}".encode()
        self.authorization = f"Basic {base64.b64encode(plain).decode()}" if userinfo else None

    def goes_on(self) -> bool:
        """Return whether a request can be for the rest of what has come: its version is known, and there are ranges."""
        return bool(self.sink.size and self.kept.record.get("validator") and self.has_ranges)

    def attempt(self) -> Fetched:
        """Make one request and take what it brings."""
        have = self.sink.open()
        record = self.kept.record
        if have and not (self.goes_on() and have <= (record["total"] or have)):
            self.sink.begin_anew()
            have = 0
        headers = {"User-Agent": _AGENT, "Accept": "*/*", "Accept-Encoding": "identity"}
        if have:
            headers |= {"Range": f"bytes={have}-", "If-Range": record["validator"]}
        with Watchdog(self.job.timeout) as watchdog:
            try:
                response = open_address(self.url, headers, self.authorization, watchdog)
            except RedirectRefused:
                found = "the server redirects from https to an address without encryption"
                raise self._failure(found, "an answer over https", "Ask for an https address of it") from None
            except urllib.error.HTTPError as error:
                with closing(error):
                    return self._refused(error, have)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._again(error, watchdog) from None
            with closing(response):
                self._take(response, watchdog, have)
        return self._whole()

    def _take(self, response: HTTPResponse, watchdog: Watchdog, have: int) -> None:
        with watchdog.paused():  # the disk's time is not the server's
            have, expected = self._answered(response, have)
        total = None if expected is None else have + expected
        self.job.begin(have, total)
        blocks = self._blocks(response, watchdog, expected)
        if not have:
            self._check_head(response, blocks, watchdog)
        for block in blocks:
            self._keep(block, watchdog)

    def _answered(self, response: HTTPResponse, have: int) -> tuple[int, int | None]:
        """Return after how many bytes the reply goes on, and how many it has to bring."""
        expected: int | None
        if response.status == 206:
            expected = self._checked_range(response, have)
            file_changes.check_space(self.job.act, expected, self._admit_rest())
        elif response.status in (200, 203):
            if have:  # the file has changed, or the server knows no ranges
                self.has_ranges = validator(response.headers) != self.kept.record["validator"]
                self.sink.begin_anew()
            have, expected = 0, total_bytes(response.headers)
            self._admit(response, expected)
        else:
            raise self._failure(f"the server answered {response.status}", "a file", "Check the address")
        return have, expected

    def _admit(self, response: HTTPResponse, total: int | None) -> None:
        """Decide on the final path, by the name that the server gives, and note what has to stay the same."""
        name = disposition_name(response.headers.get("Content-Disposition")) or self._name_of_path(response)
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity") and not name.lower().endswith((".gz", ".tgz", ".br", ".zst")):
            found = f"the server packs it for the way ({encoding[:20]!r}) though asked not to"
            raise self._failure(found, "the file's own bytes", "Fetch it with another program")
        version = validator(response.headers)
        final = self.job.admit(name, _version(version, total))
        if total is not None:
            file_changes.check_space(self.job.act, total, final)
        self.kept.note(name=name, total=total, validator=version)

    def _admit_rest(self) -> Path:
        """Return the final path of what is continued, which may be taken meanwhile or be of this version already."""
        record = self.kept.record
        return self.job.admit(record["name"], _version(record["validator"], record["total"]))

    def _name_of_path(self, response: HTTPResponse) -> str:
        own = self.job.address.name
        if "." in own:
            return own
        return safe_name(unquote(urlsplit(response.geturl()).path.rpartition("/")[2])) or own or "download"

    def _checked_range(self, response: HTTPResponse, have: int) -> int:
        """Return the bytes that a reply of status 206 has to bring."""
        record = self.kept.record
        first, last, total = content_range(response.headers) or (None, None, None)
        length = total_bytes(response.headers)
        now = validator(response.headers)
        is_same = (not now or now == record.get("validator")) and total in (None, record.get("total"))
        if have and not is_same:
            self._begin_anew("the file changed while it was fetched", "Run it again when it is at rest")
        if not have or first != have or last is None or (length is not None and length != last - first + 1):
            self.has_ranges = False
            self._begin_anew("the server sent another part of the file than it was asked for", "Try another server")
        assert last is not None
        return last - have + 1

    def _blocks(self, response: HTTPResponse, watchdog: Watchdog, expected: int | None) -> Iterator[bytes]:
        """Yield the body as it comes; it has to be as long as announced, and to come in time."""
        received = since = 0
        while expected is None or received <= expected:
            try:
                block = response.read1(_BLOCK_BYTES)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise self._again(error, watchdog) from None
            if not block:
                break
            received += len(block)
            since += len(block)
            if since >= MIN_BYTES:
                watchdog.restart()
                since = 0
            yield block
        if watchdog.fired:
            raise self._again(TimeoutError(), watchdog)
        if expected is not None and received > expected:
            self.has_ranges = False
            self._begin_anew("the server sent more than it announced", "Try another server")
        if expected is not None and received < expected:
            missing = format_bytes(expected - received)
            raise Again(f"the connection ended {missing} too early", _AGAIN)

    def _check_head(self, response: HTTPResponse, blocks: Iterator[bytes], watchdog: Watchdog) -> None:
        """Keep the first bytes, unless they are those of a page."""
        head = b""
        for block in blocks:
            head += block
            if len(head) >= HEAD_BYTES:
                break
        name = self.job.target.name or self.kept.record["name"]
        if is_html(response.headers, head[:HEAD_BYTES], name):
            for block in blocks:
                head += block
                if len(head) >= _PAGE_BYTES:
                    break
            title = self.job.address.scrubbed(html_title(head))
            page = f"a web page titled {title!r}" if title else "a web page"
            next_step = "Open the address in a browser: it may need a login, or lead to the file's own address"
            raise self._failure(page, "a file", next_step)
        self._keep(head, watchdog)

    def _keep(self, block: bytes, watchdog: Watchdog) -> None:
        with watchdog.paused():
            self.sink.write(block)
        self.job.advance(len(block))

    def _whole(self) -> Fetched:
        record = self.kept.record
        total, version = record["total"], record["validator"]
        if total is not None and self.sink.size < total:
            raise Again("the server sends a part of the rest at a time", _AGAIN)
        digests = self.sink.finish()
        via = urlsplit(self.url).scheme
        return Fetched(self.kept.data, record["name"], via, _version(version, total), 1, digests)

    def _refused(self, error: urllib.error.HTTPError, have: int) -> Fetched:
        """Return the file if the refusal says that it is complete; else raise what the status means."""
        status = error.code
        if status == 416 and have:
            total = (content_range(error.headers) or (None, None, None))[2]
            if total == have and self.kept.record["total"] in (None, have):
                self._admit_rest()
                return self._whole()
            self._begin_anew("the file changed while it was fetched", "Run it again when it is at rest")
        if status in _TRANSIENT or status >= 500:
            pause_s = retry_after_s(error.headers)
            if pause_s is not None and pause_s > self.job.timeout:
                found = f"the server answered {status} and asks to wait {format_seconds(pause_s)}"
                needed = f"an answer within {format_seconds(self.job.timeout)}"
                raise self._failure(found, needed, "Run it again after that") from None
            raise Again(f"the server answered {status}", "Run it again later", pause_s=pause_s) from None
        if 300 <= status < 400:
            next_step = "Open the address in a browser to see where it leads"
            raise self._failure("redirects that lead nowhere", "a file", next_step) from None
        cause, next_step = _CAUSES.get(status, ("the server refuses it", "Check the address"))
        raise self._failure(f"{cause} (status {status})", "a file that can be read", next_step) from None

    def _begin_anew(self, found: str, next_step: str) -> NoReturn:
        self.sink.begin_anew()
        raise Again(found, next_step, is_anew=True)

    def _again(self, error: Exception, watchdog: Watchdog) -> Again:
        """Return the reason to try again after an error of the network; raise where trying is no use."""
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if watchdog.fired or isinstance(cause, TimeoutError):
            return Again("nothing or too little came", _AGAIN, hung=True)
        if isinstance(cause, ssl.SSLCertVerificationError):
            found = f"its certificate is not trusted ({cause.verify_message})"
            next_step = "Check the address and this machine's clock"
            raise self._failure(found, "a server that proves who it is", next_step) from None
        if isinstance(cause, socket.gaierror):
            found = f"the name {watchdog.host!r} has no address"
            if cause.errno == socket.EAI_NONAME:
                raise self._failure(found, "a host that is known", "Check the address and the network") from None
            return Again(found, _AGAIN)
        if not isinstance(cause, Exception) or isinstance(cause, _FINAL):
            # The text of an error about an address holds the address.
            told = type(cause).__name__ if isinstance(cause, Exception) else self.job.address.scrubbed(cause)
            raise self._failure(told, "an address that can be asked", "Check it, and the proxy's") from None
        if isinstance(cause, http.client.RemoteDisconnected):
            return Again("the server closed the connection without an answer", _AGAIN)
        if isinstance(cause, http.client.IncompleteRead):
            return Again("the connection ended too early", _AGAIN)
        told = cause.strerror if isinstance(cause, OSError) and cause.strerror else f"{type(cause).__name__}: {cause}"
        return Again(f"the network failed ({self.job.address.scrubbed(told)})", _AGAIN)

    def _failure(self, found: str, needed: str, next_step: str) -> FetchFailed:
        return FetchFailed(cannot(self.job.act, found, needed, next_step))


def _version(validator: str, total: int | None) -> str:
    """Return what tells this version of a file from others, empty where its server says nothing but the length."""
    return f"{validator}|{total}" if validator else ""
