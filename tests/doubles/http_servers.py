"""A local web server with planned faults: each request follows the next plan, and the last plan is repeated."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Plan = Callable[["Handler"], None]
Server = TypeVar("Server", bound="WebServer")


class WebServer(ThreadingHTTPServer):
    """A server that sends `content` for every path.

    Attributes:
        requests: headers of all requests.
        paths: paths of all requests.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, content: bytes, plans: tuple[Plan, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.headers: dict[str, str] = {"ETag": '"v1"', "Content-Type": "application/octet-stream"}
        self.plans = list(plans)
        self.requests: list[Any] = []
        self.paths: list[str] = []
        self.released = threading.Event()
        self.reached = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data/file.bin"

    def next_plan(self) -> Plan:
        with self.lock:
            return self.plans.pop(0) if len(self.plans) > 1 else self.plans[0] if self.plans else serve

    def ranges(self) -> list[str | None]:
        """Return the requested byte ranges; None stands for the complete file."""
        return [request.get("Range") for request in self.requests]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Suppress error output, because clients may disconnect at any time."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer

    def do_GET(self) -> None:
        self.server.requests.append(self.headers)
        self.server.paths.append(self.path)
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.server.next_plan()(self)

    def log_message(self, *arguments: Any) -> None:
        pass

    def answer(self, status: int, headers: dict[str, object], body: bytes = b"") -> None:
        """Send a reply without the headers that are None; `Content-Length` is the size of the body unless given."""
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    @property
    def content(self) -> bytes:
        """The bytes of the requested file."""
        return self.server.content

    @property
    def facts(self) -> dict[str, str]:
        """Headers of the requested file."""
        return self.server.headers

    def start(self) -> int:
        """Return the start of a requested range; 0 without a range, or if `If-Range` names another version."""
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        known = self.headers.get("If-Range")
        versions = (None, self.facts.get("ETag"), self.facts.get("Last-Modified"))
        return int(found[1]) if found and known in versions else 0

    def reply(self) -> tuple[int, dict[str, object], bytes]:
        """Return the status, the headers and the body of a correct reply."""
        start, content = self.start(), self.content
        if start >= len(content) and "Range" in self.headers:
            return 416, {"Content-Range": f"bytes */{len(content)}"}, b""
        if not start:
            return 200, dict(self.facts), content
        ranged = {**self.facts, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        return 206, ranged, content[start:]

    def hang(self) -> None:
        """Wait until the test ends."""
        self.server.reached.set()
        self.server.released.wait(60)


def serve(handler: Handler) -> None:
    """Answer like a correct server."""
    handler.answer(*handler.reply())


def without_ranges(handler: Handler) -> None:
    """Ignore the requested range and send the complete file."""
    handler.answer(200, dict(handler.facts), handler.content)


def cut_after(count: int, is_ranged: bool = True) -> Plan:
    """Announce the body, but close the connection after `count` bytes; without `is_ranged`, ignore requested ranges."""

    def plan(handler: Handler) -> None:
        whole = (200, dict(handler.facts), handler.content)
        status, headers, body = handler.reply() if is_ranged else whole
        handler.answer(status, {"Content-Length": len(body), **headers}, body[:count])

    return plan


def hang_after(count: int) -> Plan:
    """Send `count` bytes of the body, then nothing more."""

    def plan(handler: Handler) -> None:
        status, headers, body = handler.reply()
        handler.answer(status, {"Content-Length": len(body), **headers}, body[:count])
        handler.hang()

    return plan


def silent(handler: Handler) -> None:
    """Send nothing at all."""
    handler.hang()


def slammed(handler: Handler) -> None:
    """Close the connection without a reply."""
    handler.connection.shutdown(socket.SHUT_RDWR)


def drip(handler: Handler) -> None:
    """Send the body one byte at a time."""
    status, headers, body = handler.reply()
    handler.answer(status, {"Content-Length": len(body), **headers})
    drops(handler, body)


def drip_headers(handler: Handler) -> None:
    """Send endless headers, one byte at a time."""
    drops(handler, b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % number for number in range(100_000)))


def drops(handler: Handler, data: bytes) -> None:
    """Send one byte of the data every 20 ms, until the test ends."""
    for byte in data:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        if handler.server.released.wait(0.02):
            return


def ranged(headers: Callable[[int, int], dict[str, object]], is_whole: bool = False) -> Plan:
    """Answer with 206, headers made from the range's start and the total size, and the rest or all of the file."""

    def plan(handler: Handler) -> None:
        content, start = handler.content, handler.start()
        made = {**handler.facts, **headers(start, len(content))}
        handler.answer(206, made, content if is_whole else content[start:])

    return plan


def status(code: int, **headers: object) -> Plan:
    """Answer with the given status and headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.answer(code, named, b"<html>no</html>")


def redirect(to: str, code: int = 302) -> Plan:
    return lambda handler: handler.answer(code, {"Location": to}, b"moved")


def body(data: bytes, **headers: object) -> Plan:
    """Answer with the given bytes and headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.answer(200, named, data)


def chunked(handler: Handler) -> None:
    """Send the body in chunks, without a length."""
    handler.answer(200, {**handler.facts, "Content-Length": None, "Transfer-Encoding": "chunked"})
    for start in range(0, len(handler.content), 50_000):
        block = handler.content[start : start + 50_000]
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))
    handler.wfile.write(b"0\r\n\r\n")


def chunked_until(count: int) -> Plan:
    """Send the body in chunks, without a length, but close the connection after `count` bytes."""

    def plan(handler: Handler) -> None:
        handler.answer(200, {**handler.facts, "Content-Length": None, "Transfer-Encoding": "chunked"})
        handler.wfile.write(b"%x\r\n%s\r\n" % (count, handler.content[:count]))
        handler.close_connection = True

    return plan


@contextlib.contextmanager
def served(content: bytes, *plans: Plan) -> Iterator[WebServer]:
    with running(WebServer(content, plans)) as server:
        yield server


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """Run an existing server within the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
