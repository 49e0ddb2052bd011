"""http connections that cannot hang: a watchdog shuts the socket down, whatever waits on it.

A socket's own time-out counts each read alone, so that a server that sends a byte now and then is waited for without
end. Here one deadline holds for looking up the name, connecting, TLS and all headers, redirects included; the reader of
the body moves it when enough bytes came. Proxies of the environment and the system's certificates are used.
"""

from __future__ import annotations

import contextlib
import http.client
import queue
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPResponse
from types import TracebackType
from typing import IO, Any, Self, cast
from urllib.parse import urljoin, urlsplit, urlunsplit

_REDIRECTS = 10
_Addresses = Sequence[tuple[int, int, int, str, Any]]


class RedirectRefused(Exception):
    """A redirect leads from https to another scheme."""


class Watchdog:
    """Shuts down the sockets of one try when its deadline passes.

    Args:
        timeout: seconds until then, from the start and from each `restart()`.

    Attributes:
        fired: whether it has passed.
        host: the name or address that was connected to last: of a redirect or proxy too.
    """

    def __init__(self, timeout: float) -> None:
        self.fired = False
        self.host = ""
        self._timeout = timeout
        self._handles: list[socket.socket] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._deadline = time.monotonic() + timeout
        self._thread = threading.Thread(target=self._run, name="colabkit-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()
        for handle in self._handles:
            handle.close()

    def restart(self) -> None:
        """Begin the time-out anew."""
        self._deadline = time.monotonic() + self._timeout

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock while the block does something else than waiting for the server."""
        left = self._left_s()
        self._deadline = float("inf")
        try:
            yield
        finally:
            with self._changed:
                self._deadline = time.monotonic() + left
                self._changed.notify()

    def open_socket(self, where: tuple[str, int], *_: Any) -> socket.socket:
        """Return a socket connected to host and port, in place of `socket.create_connection`."""
        self.host = where[0]
        found = _resolved(*where, self._left_s())
        failed: OSError = TimeoutError("no time left to connect")
        for number, (family, kind, protocol, _name, address) in enumerate(found):
            made = socket.socket(family, kind, protocol)
            try:
                made.settimeout(max(0.01, self._left_s() / (len(found) - number)))  # of several, some may be dead
                made.connect(address)
                made.settimeout(None)
                with self._changed:
                    # A handle of its own: `made` changes hands when TLS wraps it.
                    self._handles.append(made.dup())
            except OSError as error:
                made.close()
                failed = error
            else:
                return made
        raise failed

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _run(self) -> None:
        with self._changed:
            while not self._is_over:
                left = self._left_s()
                if left:
                    self._changed.wait(None if left == float("inf") else left)
                    continue
                self.fired = True
                for handle in self._handles:
                    with contextlib.suppress(OSError):
                        handle.shutdown(socket.SHUT_RDWR)
                self._changed.wait(0.05)  # until it is over; a socket may still be opened


def _resolved(host: str, port: int, left_s: float) -> _Addresses:
    """Return a host's addresses; the system's look-up cannot be interrupted, so a thread does it."""
    answers: queue.SimpleQueue[_Addresses | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:  # also UnicodeError, of names that are none
            answers.put(error)

    thread = threading.Thread(target=ask, name="colabkit-resolver", daemon=True)
    thread.start()
    try:
        answer = answers.get(timeout=left_s)
    except queue.Empty:
        raise TimeoutError("the name's address was not found in time") from None
    thread.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = _REDIRECTS

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


def open_address(url: str, headers: dict[str, str], authorization: str | None, watchdog: Watchdog) -> HTTPResponse:
    """Return the response to a GET, redirects followed; its body is to be read while the watchdog lives.

    Args:
        url: without userinfo.
        headers: sent also to where redirects lead.
        authorization: a header for this host alone.
        watchdog: of this try.

    Raises:
        RedirectRefused: if a redirect leads away from https.
        urllib.error.HTTPError: for any status that is no success.
        OSError, http.client.HTTPException, ValueError: if there is no response.
    """

    def connection(kind: type[http.client.HTTPConnection]) -> Any:
        def made(*arguments: Any, **options: Any) -> http.client.HTTPConnection:
            one = kind(*arguments, **options)
            # There is no other way to connect without a time-out of each read alone.
            one._create_connection = watchdog.open_socket  # type: ignore[attr-defined]  # noqa: SLF001
            return one

        return made

    class _Web(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> HTTPResponse:
            return self.do_open(connection(http.client.HTTPConnection), req)

    class _SecureWeb(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> HTTPResponse:
            context = ssl.create_default_context()
            return self.do_open(connection(http.client.HTTPSConnection), req, context=context)

    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        _Web(),
        _SecureWeb(),
        _Redirects(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http and https alone have handlers
    if authorization:
        request.add_unredirected_header("Authorization", authorization)
    return cast(HTTPResponse, opener.open(request))
