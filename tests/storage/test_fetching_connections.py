"""Connections of `fetch()`, which never hang past the timeout, and its parsers of headers, pages and addresses."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from email.message import Message

import http_servers as servers
import pytest
from http_servers import served

from colabkit.errors import FetchFailed, TimedOut
from colabkit.storage.addresses import address_of, safe_name
from colabkit.storage.fetching import connections, transfer
from colabkit.storage.fetching.api import fetch


@pytest.fixture(autouse=True)
def one_try(plain_network: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "TRIES", 1)


@pytest.fixture
def deaf() -> Iterator[int]:
    """Return the port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def message(**named: str) -> Message:
    made = Message()
    for name, value in named.items():
        made[name.replace("_", "-")] = value
    return made


@pytest.mark.parametrize("is_proxy", [False, True], ids=["no TLS greeting", "proxy"])
def test_a_server_or_proxy_that_never_answers_times_out(deaf, tmp_path, monkeypatch, is_proxy):
    if is_proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{deaf}")
    began = time.monotonic()
    with pytest.raises(TimedOut):
        fetch(f"https://{'example.org' if is_proxy else f'127.0.0.1:{deaf}'}/x", tmp_path, timeout=0.3, progress=False)
    assert 0.25 < time.monotonic() - began < 3


def test_a_proxy_from_the_environment_is_used(tmp_path, monkeypatch):
    with served(b"data") as server:
        monkeypatch.setenv("http_proxy", server.url.rpartition("/data")[0].replace("://", "://me:hunter22@"))
        report = fetch("http://nowhere.invalid/file.bin", tmp_path, progress=False)
        assert report.path.read_bytes() == b"data"
        assert server.paths == ["http://nowhere.invalid/file.bin"]
        server.plans = [servers.status(407)]
        with pytest.raises(FetchFailed, match="the proxy needs a login") as caught:
            fetch("http://nowhere.invalid/other.bin", tmp_path, progress=False)
    assert "hunter22" not in str(caught.value)


@pytest.mark.full
def test_a_slow_name_lookup_times_out(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(connections.socket, "getaddrinfo", lambda *_, **__: released.wait(30) and [])
    began = time.monotonic()
    try:
        with pytest.raises(TimedOut):
            fetch("https://example.org/x", tmp_path, timeout=0.3, progress=False)
        assert time.monotonic() - began < 3
    finally:
        released.set()


def test_the_address_that_answers_is_used_if_a_host_has_several(tmp_path, monkeypatch):
    with served(b"data") as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        found = [(*kind, closed.getsockname()), (*kind, server.server_address)]
        monkeypatch.setattr(connections.socket, "getaddrinfo", lambda *_, **__: found)
        assert fetch("http://example.org/x", tmp_path, progress=False).path.read_bytes() == b"data"


def test_time_spent_writing_to_disk_does_not_count_against_the_server(tmp_path, file_hook):
    slow = []

    def wait(operation: str, path: object) -> None:
        if operation == "write" and len(slow) < 3:
            slow.append(time.sleep(0.4))

    content = bytes(1_000_000)
    with served(content) as server:
        file_hook(wait)
        assert fetch(server.url, tmp_path, timeout=0.3, progress=False).path.read_bytes() == content
    assert len(slow) == 3


def test_content_range():
    for text, expected in {
        "bytes 0-9/10": (0, 9, 10),
        "Bytes 5-9/*": (5, 9, None),
        "bytes */10": (None, None, 10),
        "bytes 5-9": None,
        "items 0-1/2": None,
        "bytes -1-9/10": None,
        f"bytes 0-9/{'9' * 5000}": None,
        "": None,
    }.items():
        assert connections.content_range(message(Content_Range=text)) == expected


def test_content_length():
    for text, expected in {"10": 10, "": None, "-1": None, "1e3": None, "9" * 5000: None}.items():
        assert connections.total_bytes(message(Content_Length=text)) == expected
        assert connections.total_bytes(message(Content_Length=text, Transfer_Encoding="chunked")) is None


def test_retry_after():
    past = "Wed, 21 Oct 2015 07:28:00 GMT"
    for text, seconds in {"7": 7.0, "": None, "soon": None, "-1": None, past: 0}.items():
        assert connections.retry_after_s(message(Retry_After=text)) == seconds
    assert (connections.retry_after_s(message(Retry_After=past.replace("2015", "2099"))) or 0) > 1e9


def test_a_web_page_is_recognized_by_its_first_bytes():
    for head, name, is_page in (
        (b"<!DOCTYPE html>", "x.zip", True),
        (b" \n<html lang=en>", "x.zip", True),
        (b"<HTML>", "", True),
        (b"<!DOCTYPE html>", "x.HTML", False),
        (b"<?xml version='1.0'?>", "x.xml", False),
        (b"<svg>", "x.svg", False),
        (b"<htmlish", "x", False),
        (b"", "x", False),
    ):
        assert connections.is_html(None, head, name) == is_page


def test_a_title_is_one_short_printable_line():
    assert connections.html_title(b"<title>a\x1b[31m\n  b</title>") == "a\\x1b[31m b"
    assert len(connections.html_title(b"<title>" + b"x" * 999 + b"</title>")) < 100
    assert connections.html_title(b"no title") == ""


def test_unusable_file_names_are_rejected():
    assert {safe_name(name) for name in ("..", ".", "", "/", "a/..", "\x00", "\u202e", "\ud800")} == {""}


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("https://me:secret@host:8080/a/b.zip?key=1#x", "https://host:8080/a/b.zip"),
        ("https://me:se@cret@host/a", "https://host/a"),
        ("https://host/a@b/c", "https://host/a@b/c"),
        ("https://web.archive.org/web/https://x.org/y?z", "https://web.archive.org/web/https://x.org/y"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("s3://me:a/secret@bucket/b", "s3://.../bucket/b"),
        ("zip://a.csv::https://me:secret@host/b.zip?sig=1", "zip://a.csv::https://host/b.zip"),
        ("https://host/\x1b[31m", "https://host/\\x1b[31m"),
    ],
)
def test_an_address_is_shown_without_its_secrets(source, shown):
    assert address_of(source).shown == shown
    assert "secret" not in repr(address_of(source))


def test_messages_of_other_programs_are_shown_without_the_secrets_of_an_address():
    for source in (
        "s3://key:pass1234@bucket/a",
        "zip://a.csv::https://me:pass1234@host/b.zip",
        "zip://a::s3://b/c?sig=pass1234",
    ):
        assert "pass1234" not in address_of(source).scrubbed(f"{source} was refused: pass1234 is wrong")
    assert address_of("s3://[bucket/x").scrubbed("no s3://[bucket/x") == "no s3://[bucket/x"
