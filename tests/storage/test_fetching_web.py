"""`fetch()` from web servers: whatever the server does, the result is a single version of the file, or an error."""

from __future__ import annotations

import hashlib
import json
import random
import time
from pathlib import Path
from typing import Any

import http_servers as servers
import pytest
from http_servers import Plan, cut_after, served
from sampling import sampled
from trees import leftovers
from web_fetches import CONTENT, get

from colabkit.errors import Corrupt, FetchFailed, InvalidOption, NotEnoughSpace, TimedOut
from colabkit.foundation import file_changes
from colabkit.foundation.progress import ProgressBar
from colabkit.storage.fetching import transfer
from colabkit.storage.fetching.api import fetch

pytestmark = pytest.mark.usefixtures("plain_network")

SHA256 = hashlib.sha256(CONTENT).hexdigest()


def test_a_file_is_fetched_with_its_own_name(tmp_path, monkeypatch):
    named = []

    class Bar(ProgressBar):
        def __init__(self, action: str, *arguments: Any) -> None:
            named.append(action)
            super().__init__(action, *arguments)

    monkeypatch.setattr(transfer, "ProgressBar", Bar)
    with served(CONTENT) as server:
        report = get(server, tmp_path)
    assert named == ["fetch"]
    assert report.path == tmp_path / "file.bin"
    assert report.path.read_bytes() == CONTENT
    assert (report.sha256, report.files, report.via, report.reused) == (SHA256, 1, "http", False)
    assert (report.fetched_bytes, report.resumed_bytes, report.retries) == (len(CONTENT), 0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]
    assert server.requests[0]["Accept-Encoding"] == "identity"
    assert repr(report).startswith(f"Fetched {str(report.path)!r}: 684 KiB in ")
    json.dumps(report.to_dict())


def test_the_target_is_a_folder_or_the_path_of_the_file(tmp_path):
    (tmp_path / "there").mkdir()
    with served(CONTENT) as server:
        for to, path in {
            "there": "there/file.bin",
            "new/": "new/file.bin",
            "new/a.zip": "new/a.zip",
            "a.zip": "a.zip",
        }.items():
            report = fetch(server.url, f"{tmp_path}/{to}", progress=False)
            assert report.path == tmp_path / path
            assert report.path.read_bytes() == CONTENT


def test_an_empty_file_and_a_chunked_body_without_a_length_are_fetched(tmp_path):
    with served(b"") as server:
        assert get(server, tmp_path / "empty").path.read_bytes() == b""
    with served(CONTENT, servers.chunked) as server:
        assert get(server, tmp_path / "chunked").sha256 == SHA256


CUT_THEN = [
    ("good", servers.serve, 1),
    ("ignores ranges", servers.without_ranges, 1),
    ("another start", servers.ranged(lambda start, total: {"Content-Range": f"bytes 0-{total - 1}/{total}"}), 2),
    ("no Content-Range", servers.ranged(lambda start, total: {}), 2),
    (
        "the complete file as the rest",
        servers.ranged(lambda start, total: {"Content-Range": f"bytes {start}-{total - 1}/{total}"}, is_whole=True),
        2,
    ),
    (
        "another total",
        servers.ranged(lambda start, total: {"Content-Range": f"bytes {start}-{total}/{total + 1}"}),
        2,
    ),
    (
        "another version",
        servers.ranged(lambda start, total: {"ETag": '"v2"', "Content-Range": f"bytes {start}-{total - 1}/{total}"}),
        2,
    ),
    ("not satisfiable", servers.status(416, Content_Range="bytes */5"), 2),
    ("no answer", servers.slammed, 2),
    ("busy", servers.status(503), 2),
    ("busy for a moment", servers.status(429, Retry_After=0), 2),
]


@pytest.mark.parametrize(("second", "retries"), [case[1:] for case in CUT_THEN], ids=[case[0] for case in CUT_THEN])
def test_the_file_is_complete_after_a_broken_connection_whatever_the_next_response_is(tmp_path, second: Plan, retries):
    with served(CONTENT, cut_after(300_000), second, servers.serve) as server:
        report = get(server, tmp_path)
    assert report.path.read_bytes() == CONTENT
    assert report.retries == retries
    assert report.resumed_bytes == 0
    assert server.ranges()[:2] == [None, "bytes=300000-"]
    assert server.requests[1]["If-Range"] == '"v1"'
    assert leftovers(tmp_path) == []


def test_a_download_without_an_announced_length_resumes_too(tmp_path):
    with served(CONTENT, servers.chunked_until(300_000), servers.serve) as server:
        report = get(server, tmp_path)
    assert report.path.read_bytes() == CONTENT
    assert (report.retries, server.ranges()) == (1, [None, "bytes=300000-"])


def test_a_server_that_ignores_ranges_is_read_again_from_the_start(tmp_path):
    with served(CONTENT, cut_after(300_000, False), cut_after(400_000, False), servers.without_ranges) as server:
        report = get(server, tmp_path)
    assert report.path.read_bytes() == CONTENT
    assert server.ranges() == [None, "bytes=300000-", None]
    assert report.fetched_bytes == 300_000 + 400_000 + len(CONTENT)


def test_versions_of_a_file_that_changes_between_two_attempts_are_never_mixed(tmp_path):
    other = random.Random(2).randbytes(len(CONTENT))

    def change(handler: servers.Handler) -> None:
        handler.server.content, handler.server.headers["ETag"] = other, '"v2"'
        servers.serve(handler)

    with served(CONTENT, cut_after(300_000), change) as server:
        assert get(server, tmp_path).path.read_bytes() == other


def test_only_a_strong_tag_or_the_time_of_the_last_change_lets_a_file_be_resumed(tmp_path):
    date, weak = "Wed, 21 Oct 2015 07:28:00 GMT", {"ETag": 'W/"weak"'}
    for number, (headers, second) in enumerate(
        [({}, None), (weak, None), (weak | {"Last-Modified": date}, "bytes=300000-")]
    ):
        with served(CONTENT, cut_after(300_000), servers.serve) as server:
            server.headers = headers
            assert get(server, tmp_path / str(number)).sha256 == SHA256
        assert server.ranges() == [None, second]
    assert server.requests[1]["If-Range"] == date


def test_attempts_that_make_progress_do_not_count(tmp_path):
    with served(CONTENT, cut_after(60_000)) as server:
        report = get(server, tmp_path)
    assert report.sha256 == SHA256
    assert report.retries == len(CONTENT) // 60_000


def test_attempts_without_new_data_end_the_fetch_and_keep_the_received_data(tmp_path):
    with served(CONTENT, cut_after(300_000), cut_after(0)) as server:
        with pytest.raises(
            FetchFailed, match=r"ended 391 KiB too early; expected new data in one of 5 .*; the download resumes"
        ):
            get(server, tmp_path)
        server.plans = [servers.serve]
        report = get(server, tmp_path)
    assert report.sha256 == SHA256
    assert report.resumed_bytes == 300_000
    assert leftovers(tmp_path) == []


def test_a_server_that_always_disconnects_and_has_no_ranges_is_given_up(tmp_path):
    with (
        served(CONTENT, cut_after(300_000, False)) as server,
        pytest.raises(FetchFailed, match="new data in one of 5 attempts"),
    ):
        get(server, tmp_path)
    assert len(server.requests) < 12


HANGS = {
    "before the headers": [servers.silent],
    "in the headers": [servers.drip_headers],
    "in the body": [servers.hang_after(1000)],
    "dripping": [servers.drip],
    "dripping on": [cut_after(100_000), servers.drip],
}


@pytest.mark.parametrize("plans", sampled(HANGS.values(), 2), ids=HANGS)
def test_a_server_that_hangs_or_drips_is_given_up_after_two_timeouts(tmp_path, plans):
    began = time.monotonic()
    with (
        served(CONTENT, *plans) as server,
        pytest.raises(TimedOut, match=r"too little data arrived; expected at least 4\.0 KiB in 300 ms"),
    ):
        get(server, tmp_path, timeout=0.3)
    assert 0.5 < time.monotonic() - began < 3
    assert len(server.requests) == len(plans) + 1


def test_a_server_that_hangs_once_is_retried(tmp_path):
    with served(CONTENT, servers.hang_after(100_000), servers.serve) as server:
        report = get(server, tmp_path, timeout=0.3)
    assert (report.sha256, report.retries) == (SHA256, 1)
    assert server.ranges() == [None, "bytes=100000-"]
    assert "/s, 1 retry)" in repr(report)


def test_a_waiting_time_longer_than_the_timeout_ends_the_fetch(tmp_path):
    plan = servers.status(429, Retry_After=3600)
    with (
        served(CONTENT, plan) as server,
        pytest.raises(FetchFailed, match=r"status 429 and a waiting time of 1 h 00 min"),
    ):
        get(server, tmp_path)
    assert len(server.requests) == 1


def test_a_refusal_ends_the_fetch_at_once_with_its_cause(tmp_path):
    causes = {401: "needs a login", 403: "denies access", 404: "no file at this", 418: "418"}
    for code, cause in causes.items():
        with served(CONTENT, servers.status(code)) as server, pytest.raises(FetchFailed, match=cause):
            get(server, tmp_path)
        assert len(server.requests) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_refused_connection_is_a_network_failure(tmp_path):
    with served(CONTENT) as server:
        url = server.url
    with pytest.raises(FetchFailed, match=r"last attempt failed: the network failed \(Connection refused\)"):
        fetch(url, tmp_path, progress=False)


def test_a_web_page_instead_of_a_file_is_refused_with_its_title(tmp_path):
    typed = servers.body(
        b"<html><head><title>Log\nin &amp; <b>pay</b></title>", Content_Type="text/html; charset=utf-8"
    )
    untyped = b"\xef\xbb\xbf  <!-- x -->\n<!DOCTYPE html><title>Log in &amp; <b>pay</b></title>" + b" " * 9000
    for plan in (typed, servers.body(untyped)):
        with served(CONTENT, plan) as server:
            with pytest.raises(FetchFailed, match=r"a web page titled 'Log in & <b>pay</b>'; expected a file\. Open"):
                get(server, tmp_path)
            assert list(tmp_path.glob("file*")) == []
            page = fetch(server.url, tmp_path / "page.html", progress=False, overwrite=True)
        assert b"<title>" in page.path.read_bytes()
    with served(CONTENT, servers.body(CONTENT, Content_Type="text/html")) as server:
        assert get(server, tmp_path).sha256 == SHA256


def test_a_compressed_body_is_refused_unless_the_file_name_says_so(tmp_path):
    plan = servers.body(b"\x1f\x8b\x00", Content_Encoding="gzip")
    with served(CONTENT, plan) as server:
        with pytest.raises(FetchFailed, match="sends the file compressed"):
            get(server, tmp_path)
        assert fetch(server.url.replace("bin", "tar.gz"), tmp_path, progress=False).path.name == "file.tar.gz"


def test_a_file_too_large_for_the_disk_is_refused_before_the_download(tmp_path, monkeypatch):
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 1000)
    with served(CONTENT) as server, pytest.raises(NotEnoughSpace, match=r"1000 B free; expected at least 684 KiB"):
        get(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_the_received_data(tmp_path, file_hook):
    def full(operation: str, path: Path) -> None:
        if operation == "write" and path.name == "data" and path.stat().st_size >= 262_144:
            raise OSError(28, "No space left on device")

    with served(CONTENT) as server:
        file_hook(full)
        with pytest.raises(NotEnoughSpace):
            get(server, tmp_path)
        file_hook(None)
        assert not (tmp_path / "file.bin").exists()
        report = get(server, tmp_path)
    assert report.sha256 == SHA256
    assert report.resumed_bytes >= 262_144


@pytest.mark.parametrize("kind", ["sha256", "md5", "sha1", "sha512"])
def test_a_digest_is_checked(tmp_path, kind):
    right = hashlib.new(kind, CONTENT).hexdigest()
    wrong = ("0" if right[0] != "0" else "1") + right[1:]
    with served(CONTENT) as server:
        with pytest.raises(Corrupt, match=rf"its {kind} is {right}; expected the requested {wrong}\."):
            get(server, tmp_path, digest=f"{kind}:{wrong}")
        assert list(tmp_path.iterdir()) == []
        assert get(server, tmp_path, digest=f"{kind}:{right.upper()}").sha256 == SHA256


def test_a_digest_covers_resumed_data_too(tmp_path):
    with served(CONTENT, cut_after(300_000), cut_after(0)) as server:
        with pytest.raises(FetchFailed):
            get(server, tmp_path)
        (data,) = tmp_path.glob(".colabkit-*/data")
        data.write_bytes(b"x" + data.read_bytes()[1:])
        server.plans = [servers.serve]
        with pytest.raises(Corrupt):
            get(server, tmp_path, digest=f"sha256:{SHA256}")
    assert list(tmp_path.iterdir()) == []


def test_invalid_digests_are_refused(tmp_path):
    for digest in ("", "sha256", "sha256:12", f"sha3:{SHA256}", f"sha256:{'g' * 64}", 7):
        with pytest.raises(InvalidOption, match="digest="):
            fetch("https://example.org/x", tmp_path, digest=digest)
