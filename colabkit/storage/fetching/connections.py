"""HTTP requests that cannot hang, and the meaning of their replies' headers and first bytes.

A socket's own timeout counts each read alone, so a server that sends a byte now and then is waited for forever. Here
every operation of a socket gets the seconds that are left of one deadline: for looking up the name, connecting, TLS,
redirects and headers together; the reader of the body moves it when enough bytes came.

The transport is the standard library's: requests and urllib3 give no deadline over several reads, read the bodies of
redirects and take logins from ~/.netrc, and undoing that takes more code than their redirects and proxies save.
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

from colabkit.foundation import printable
from colabkit.storage.addresses import safe_name
from colabkit.storage.sources.concurrency import answer_of

HEAD_BYTES = 512
"""Bytes by which a page is recognised; browsers decide by as many (WHATWG, MIME Sniffing)."""

_HTML = re.compile(
    rb"\s*(<!--.*?-->\s*)*<(!doctype\s+html|html[\s>]|head[\s>]|script[\s>]|title>)", re.IGNORECASE | re.DOTALL
)
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_HTML_NAMES = (".html", ".htm", ".xhtml")
_TITLE_CHARS = 80
_COUNT = "[0-9]{1,18}"  # more digits are no number of bytes, and thousands of them no number of Python's


class RedirectRefused(Exception):
    """A redirect leads from https to another scheme, or to neither https nor http."""


class Deadline:
    """The time by which a server has to answer.

    Args:
        timeout: seconds until then, from the start and from each `restart()`.

    Attributes:
        host: the name or address that was connected to last: of a redirect or proxy too.
    """

    def __init__(self, timeout: float) -> None:
        self.host = ""
        self._timeout = timeout
        self.restart()

    def restart(self) -> None:
        """Allow the whole timeout from now on."""
        self._until = time.monotonic() + self._timeout

    def extend(self, seconds: float) -> None:
        """Move the deadline by time that was not spent on the server."""
        self._until += seconds

    def left_s(self) -> float:
        """Return the seconds that are left; `TimeoutError` if there are none."""
        if (left := self._until - time.monotonic()) <= 0:
            raise TimeoutError
        return left

    def connect(self, where: tuple[str, int], *_: Any) -> socket.socket:
        """Return a socket connected to host and port, whose reads end by the deadline."""
        self.host = where[0]
        # The system cannot be interrupted while it looks up a name, so a thread does it.
        ask = lambda: socket.getaddrinfo(*where, type=socket.SOCK_STREAM)  # noqa: E731
        found = answer_of(ask, True, self.left_s(), tries=1)
        failed: OSError = TimeoutError()
        for number, (family, kind, protocol, _name, address) in enumerate(found):
            connected: socket.socket = _timed(socket.socket, self)(family, kind, protocol)
            try:
                connected.settimeout(self.left_s() / (len(found) - number))  # of several, some may be dead
                connected.connect(address)
            except OSError as error:
                connected.close()
                failed = error
            else:
                return connected
        raise failed

    def tls_context(self) -> ssl.SSLContext:
        """Return the system's certificates, for sockets whose reads end by the deadline."""
        context = ssl.create_default_context()
        context.sslsocket_class = _timed(ssl.SSLSocket, self)
        return context


def _timed(kind: Any, deadline: Deadline) -> Any:
    """Return a kind of sockets that wait no longer than the deadline allows."""

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
        fp.close()  # its body may be endless, and nobody reads it
        return super().http_error_302(req, cast(IO[bytes], fp), code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302  # type: ignore[assignment]

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(urljoin(req.full_url, newurl))
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
            raise RedirectRefused
        host = new.netloc.rpartition("@")[2]  # nobody gave these credentials
        made = super().redirect_request(req, fp, code, msg, headers, urlunsplit(new._replace(netloc=host)))
        secret = req.unredirected_hdrs.get("Authorization")
        if made is not None and secret and (old.scheme, old.netloc) == (new.scheme, host):
            made.add_unredirected_header("Authorization", secret)
        return made


def open_address(url: str, headers: dict[str, str], authorization: str | None, deadline: Deadline) -> HTTPResponse:
    """Return the response to a GET; redirects are followed, through the environment's proxies.

    Args:
        url: without userinfo.
        headers: sent also to where redirects lead.
        authorization: a header for this host alone.
        deadline: for the response, and for the reads of its body.

    Raises:
        RedirectRefused: if a redirect leads away from https.
        urllib.error.HTTPError: for any status that is no success.
        OSError, http.client.HTTPException, ValueError: if there is no response.
    """

    def connection(kind: type[http.client.HTTPConnection]) -> Any:
        def made(*arguments: Any, **options: Any) -> http.client.HTTPConnection:
            one = kind(*arguments, **options)
            one._create_connection = deadline.connect  # type: ignore[attr-defined]  # noqa: SLF001 - no other way
            return one

        return made

    class _Web(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
        def http_open(self, req: urllib.request.Request) -> HTTPResponse:
            return self.do_open(connection(http.client.HTTPConnection), req)

        def https_open(self, req: urllib.request.Request) -> HTTPResponse:
            return self.do_open(connection(http.client.HTTPSConnection), req, context=deadline.tls_context())

    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the address is of http or https
    if authorization:
        request.add_unredirected_header("Authorization", authorization)
    return cast(HTTPResponse, urllib.request.build_opener(_Web, _Redirects).open(request))


def validator(headers: Message) -> str:
    """Return what tells this version of the bytes from any other, as `If-Range` takes it; empty if there is nothing.

    A strong ETag, else the time of the last change (RFC 9110, 13.1.5).
    """
    tag = headers.get("ETag", "").strip()
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "").strip()


def total_bytes(headers: Message) -> int | None:
    """Return the announced length, None where there is none."""
    text = headers.get("Content-Length", "").strip()
    is_chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
    return int(text) if re.fullmatch(_COUNT, text) and not is_chunked else None


def content_range(headers: Message) -> tuple[int | None, int | None, int | None] | None:
    """Return first byte, last byte and total of a `Content-Range`, None for what is unknown or not one."""
    text = headers.get("Content-Range", "").strip()
    if not (found := re.fullmatch(rf"bytes\s+(?:({_COUNT})-({_COUNT})|\*)/({_COUNT}|\*)", text, re.IGNORECASE)):
        return None
    first, last, total = (None if text in (None, "*") else int(text) for text in found.groups())
    return first, last, total


def retry_after_s(headers: Message) -> float | None:
    """Return the seconds that a server asks to wait, from a number or a date; None where it does not."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def disposition_name(value: str | None) -> str:
    """Return the file name of a `Content-Disposition` (RFC 6266), safe as one path component; empty without one."""
    if not value:
        return ""
    if found := re.search(r"filename\*\s*=\s*\"?([\w.-]+)'[^']*'([^;\s\"]+)", value, re.IGNORECASE):
        try:
            codecs.lookup(found[1])
            return safe_name(unquote_to_bytes(found[2]).decode(found[1], "replace"))
        except (LookupError, ValueError):
            pass  # a character set that nobody knows: the plain form may be there as well
    if found := re.search(r'(?:^|[;\s])filename\s*=\s*(?:"((?:\\.|[^"\\])*)"|([^;]+))', value, re.IGNORECASE):
        name = re.sub(r"\\(.)", r"\1", found[1]) if found[1] is not None else found[2].strip()
        with contextlib.suppress(ValueError):
            name = name.encode("latin-1").decode("utf-8")  # what servers send, whatever the standard says
        return safe_name(name)
    return ""


def is_html(headers: Message | None, head: bytes, name: str) -> bool:
    """Return whether a page came where a file was asked for.

    Args:
        headers: of the reply, if they are known.
        head: the first `HEAD_BYTES`, or all if there are fewer.
        name: of the file; one that ends like a page is meant to be one.
    """
    if name.lower().endswith(_HTML_NAMES) or b"\0" in head:
        return False
    is_typed = headers is not None and headers.get_content_type() in _HTML_TYPES and "Content-Type" in headers
    return is_typed or _HTML.match(head.removeprefix(codecs.BOM_UTF8)) is not None


def html_title(text: bytes) -> str:
    """Return the title of a page as one short line, safe in a message; empty without one."""
    found = re.search(rb"<title[^>]*>(.*?)</title", text, re.IGNORECASE | re.DOTALL)
    title = " ".join(html.unescape(found[1].decode("utf-8", "replace")).split()) if found else ""
    title = printable(title)
    return title if len(title) <= _TITLE_CHARS else f"{title[:_TITLE_CHARS]}..."
