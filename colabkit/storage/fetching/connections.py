"""HTTP requests with a total deadline, and parsers for response headers and first bytes.

A socket's own timeout applies to each read separately, so a server that sends a byte now and then could hold a request
forever. Here, name lookup, connecting, TLS, redirects and headers share one deadline, and each socket operation gets
at most the time that is left. The code that reads the body restarts the deadline whenever enough bytes arrive.

This module uses `urllib.request`. The `requests` package has no deadline over several reads, reads the bodies of
redirects and takes credentials from ~/.netrc; avoiding this behavior would take more code than `requests` saves.
"""

from __future__ import annotations

import codecs
import contextlib
import email.utils
import html
import http.client
import re
import socket
import ssl
import time
import urllib.request
from email.message import Message
from http.client import HTTPResponse
from typing import IO, Any, cast
from urllib.parse import unquote_to_bytes, urljoin, urlsplit, urlunsplit

from colabkit.foundation import printable, shortened
from colabkit.storage.addresses import safe_name
from colabkit.storage.sources.concurrency import answer_of

HEAD_BYTES = 512
"""Number of first bytes that are examined to recognize a web page."""

_HTML = re.compile(
    rb"\s*(<!--.*?-->\s*)*<(!doctype\s+html|html[\s>]|head[\s>]|script[\s>]|title>)", re.IGNORECASE | re.DOTALL
)
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_HTML_NAMES = (".html", ".htm", ".xhtml")
_TITLE_CHARS = 80
# A byte count. Longer numbers are not plausible, and Python refuses to convert thousands of digits.
_COUNT = "[0-9]{1,18}"


class RedirectRefused(Exception):
    """A redirect from https to http, or to a scheme other than https and http; the message names both schemes."""


class Deadline:
    """The time by which a server must answer.

    Args:
        timeout: seconds until the deadline, from the start and from each `restart()`.

    Attributes:
        host: the host that was connected to last, which can be a proxy or the target of a redirect.
    """

    def __init__(self, timeout: float) -> None:
        self.host = ""
        self._timeout = timeout
        self.restart()

    def restart(self) -> None:
        """Set the deadline to the full timeout from now."""
        self._until = time.monotonic() + self._timeout

    def extend(self, seconds: float) -> None:
        """Extend the deadline by time that was not spent waiting for the server."""
        self._until += seconds

    def left_s(self) -> float:
        """Return the remaining seconds; raise `TimeoutError` if there are none."""
        if (left := self._until - time.monotonic()) <= 0:
            raise TimeoutError
        return left

    def connect(self, where: tuple[str, int], *_: Any) -> socket.socket:
        """Return a socket connected to host and port, whose reads end by the deadline."""
        self.host = where[0]
        # A name lookup cannot be interrupted, so it runs in a thread.
        ask = lambda: socket.getaddrinfo(*where, type=socket.SOCK_STREAM)  # noqa: E731
        found = answer_of(ask, True, self.left_s(), tries=1)
        failed: OSError = TimeoutError()
        for number, (family, kind, protocol, _name, address) in enumerate(found):
            connected: socket.socket = _timed(socket.socket, self)(family, kind, protocol)
            try:
                # Split the time among the addresses, since some of them may not respond.
                connected.settimeout(self.left_s() / (len(found) - number))
                connected.connect(address)
            except OSError as error:
                connected.close()
                failed = error
            else:
                return connected
        raise failed

    def tls_context(self) -> ssl.SSLContext:
        """Return a TLS context with the system's certificates, whose sockets obey the deadline."""
        context = ssl.create_default_context()
        context.sslsocket_class = _timed(ssl.SSLSocket, self)
        return context


def _timed(kind: Any, deadline: Deadline) -> Any:
    """Return a subclass of a socket class whose reads and TLS handshakes end by the deadline."""

    class TimedSocket(kind):  # type: ignore[misc]
        def recv_into(self, *arguments: Any) -> Any:
            self.settimeout(deadline.left_s())
            return super().recv_into(*arguments)

        def do_handshake(self, *arguments: Any) -> Any:
            self.settimeout(deadline.left_s())
            return super().do_handshake(*arguments)

    return TimedSocket


class _Redirects(urllib.request.HTTPRedirectHandler):
    def http_error_302(  # type: ignore[override]
        self, req: urllib.request.Request, fp: HTTPResponse, code: int, msg: str, headers: http.client.HTTPMessage
    ) -> Any:
        # Do not read the body of a redirect, which may be endless.
        fp.close()
        return super().http_error_302(req, cast(IO[bytes], fp), code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302  # type: ignore[assignment]

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(urljoin(req.full_url, newurl))
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
            raise RedirectRefused(f"from {old.scheme} to {new.scheme[:20] or 'another scheme'}")
        # Drop credentials that the redirect itself contains.
        host = new.netloc.rpartition("@")[2]
        made = super().redirect_request(req, fp, code, msg, headers, urlunsplit(new._replace(netloc=host)))
        secret = req.unredirected_hdrs.get("Authorization")
        if made is not None and secret and (old.scheme, old.netloc) == (new.scheme, host):
            made.add_unredirected_header("Authorization", secret)
        return made


def open_address(url: str, headers: dict[str, str], authorization: str | None, deadline: Deadline) -> HTTPResponse:
    """Send a GET request through the environment's proxies, follow redirects, and return the response.

    Args:
        url: the address, without userinfo.
        headers: headers that are also sent to redirect targets.
        authorization: value of the Authorization header, sent only to this host; None for no such header.
        deadline: the deadline for the response and for reading its body.

    Raises:
        RedirectRefused: if a redirect leads from https to http, or to another scheme.
        urllib.error.HTTPError: for any status other than success.
        OSError, http.client.HTTPException, ValueError: if there is no valid response.
    """

    def connection(kind: type[http.client.HTTPConnection]) -> Any:
        def made(*arguments: Any, **options: Any) -> http.client.HTTPConnection:
            one = kind(*arguments, **options)
            one._create_connection = deadline.connect  # type: ignore[attr-defined]  # noqa: SLF001 - no public API
            return one

        return made

    class _Web(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
        def http_open(self, req: urllib.request.Request) -> HTTPResponse:
            return self.do_open(connection(http.client.HTTPConnection), req)

        def https_open(self, req: urllib.request.Request) -> HTTPResponse:
            return self.do_open(connection(http.client.HTTPSConnection), req, context=deadline.tls_context())

    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the address is http or https
    if authorization:
        request.add_unredirected_header("Authorization", authorization)
    return cast(HTTPResponse, urllib.request.build_opener(_Web, _Redirects).open(request))


def validator(headers: Message) -> str:
    """Return the header value that identifies the file's version in `If-Range`; empty if there is none.

    This is a strong ETag, or else the modification date (RFC 9110, 13.1.5).
    """
    tag = headers.get("ETag", "").strip()
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "").strip()


def total_bytes(headers: Message) -> int | None:
    """Return the announced length of the body in bytes; None if there is no valid length, or the body is chunked."""
    text = headers.get("Content-Length", "").strip()
    is_chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
    return int(text) if re.fullmatch(_COUNT, text) and not is_chunked else None


def content_range(headers: Message) -> tuple[int | None, int | None, int | None] | None:
    """Return the first byte, last byte and total (None if unknown) of a `Content-Range`; None if it is invalid."""
    text = headers.get("Content-Range", "").strip()
    if not (found := re.fullmatch(rf"bytes\s+(?:({_COUNT})-({_COUNT})|\*)/({_COUNT}|\*)", text, re.IGNORECASE)):
        return None
    first, last, total = (None if text in (None, "*") else int(text) for text in found.groups())
    return first, last, total


def retry_after_s(headers: Message) -> float | None:
    """Return the waiting time in seconds from `Retry-After`, a number or a date; None if absent or invalid."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def disposition_name(value: str | None) -> str:
    """Return the file name of a `Content-Disposition` (RFC 6266) as a safe path component; empty if there is none."""
    if not value:
        return ""
    if found := re.search(r"filename\*\s*=\s*\"?([\w.-]+)'[^']*'([^;\s\"]+)", value, re.IGNORECASE):
        try:
            codecs.lookup(found[1])
            return safe_name(unquote_to_bytes(found[2]).decode(found[1], "replace"))
        except (LookupError, ValueError):
            # The character set is unknown, so use the plain `filename` if the header also contains one.
            pass
    if found := re.search(r'(?:^|[;\s])filename\s*=\s*(?:"((?:\\.|[^"\\])*)"|([^;]+))', value, re.IGNORECASE):
        name = re.sub(r"\\(.)", r"\1", found[1]) if found[1] is not None else found[2].strip()
        with contextlib.suppress(ValueError):
            # Servers send UTF-8 here, contrary to the standard.
            name = name.encode("latin-1").decode("utf-8")
        return safe_name(name)
    return ""


def is_html(headers: Message | None, head: bytes, name: str) -> bool:
    """Return whether the response is a web page instead of the requested file.

    Args:
        headers: headers of the response, or None if unknown.
        head: the first `HEAD_BYTES` of the body, or the entire body if it is shorter.
        name: the file name; a suffix such as `.html` means that a web page was requested.
    """
    if name.lower().endswith(_HTML_NAMES) or b"\0" in head:
        return False
    is_typed = headers is not None and headers.get_content_type() in _HTML_TYPES and "Content-Type" in headers
    return is_typed or _HTML.match(head.removeprefix(codecs.BOM_UTF8)) is not None


def html_title(text: bytes) -> str:
    """Return the title of a web page as one short line, safe in a message; empty if there is none."""
    found = re.search(rb"<title[^>]*>(.*?)</title", text, re.IGNORECASE | re.DOTALL)
    title = " ".join(html.unescape(found[1].decode("utf-8", "replace")).split()) if found else ""
    return shortened(printable(title), _TITLE_CHARS)
