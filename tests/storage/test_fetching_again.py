"""`fetch()` after interruptions, in concurrent calls and with existing data at the target; file names and messages."""

from __future__ import annotations

import base64
import errno
import os
import random
import signal
import ssl
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import http_servers as servers
import pytest
import trustme
from http_servers import cut_after, served
from trees import leftovers
from waiting import wait_until
from web_fetches import CONTENT, FETCH, get

from colabkit.errors import ColabkitError, FetchFailed, InvalidOption, NotMounted, TargetExists
from colabkit.foundation import mount_table as mounts
from colabkit.storage.fetching.api import fetch

pytestmark = pytest.mark.usefixtures("plain_network")

CLAIM = "the download resumes where it stopped"
OTHER = random.Random(2).randbytes(300_001)


def kept_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(".colabkit-*/data"))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_or_interrupted_fetch_resumes_in_a_new_process(tmp_path, sent):
    with served(CONTENT, servers.hang_after(600_000), servers.serve) as server:
        child = subprocess.Popen([sys.executable, "-c", FETCH, server.url, str(tmp_path)], stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: server.reached.is_set() and kept_bytes(tmp_path) >= 262_144)
            began = time.monotonic()
            child.send_signal(sent)
            child.wait(10)
        finally:
            child.kill()
            child.wait()
        assert time.monotonic() - began < 5
        assert not (tmp_path / "file.bin").exists()
        kept = kept_bytes(tmp_path)
        report = get(server, tmp_path)
    assert report.path.read_bytes() == CONTENT
    assert 262_144 <= kept <= 600_000
    assert report.resumed_bytes == kept
    assert report.fetched_bytes == len(CONTENT) - kept
    assert server.ranges() == [None, f"bytes={kept}-"]
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("plan", [servers.silent, servers.hang_after(300_000)])
def test_ctrl_c_stops_at_once_and_leaves_no_thread(tmp_path, plan):
    def interrupt() -> None:
        server.reached.wait(10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with served(CONTENT, plan) as server:
        thread = threading.Thread(target=interrupt)
        thread.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            get(server, tmp_path)
        thread.join()
    assert time.monotonic() - began < 3
    assert not [one for one in threading.enumerate() if one.name.startswith("colabkit-")]


def test_partial_data_of_another_version_is_discarded(tmp_path):
    with served(CONTENT, cut_after(600_000), cut_after(0)) as server:
        with pytest.raises(FetchFailed):
            get(server, tmp_path)
        server.content, server.headers["ETag"], server.plans = OTHER, '"v2"', [servers.serve]
        assert get(server, tmp_path).path.read_bytes() == OTHER


def test_a_complete_unpublished_download_is_checked_with_the_server(tmp_path):
    with served(CONTENT, cut_after(600_000), cut_after(0)) as server:
        with pytest.raises(FetchFailed):
            get(server, tmp_path)
        (data,) = tmp_path.glob(".colabkit-*/data")
        data.write_bytes(CONTENT)
        server.plans = [servers.serve]
        report = get(server, tmp_path)
        assert (report.path.read_bytes(), report.fetched_bytes) == (CONTENT, 0)
        assert server.ranges()[-1] == f"bytes={len(CONTENT)}-"


@pytest.mark.full
def test_a_kill_leaves_old_or_new_data_and_the_next_call_finishes(tmp_path, killed_at):
    final = tmp_path / "to" / "file.bin"
    final.parent.mkdir()
    with served(CONTENT) as server:
        number = 0
        while True:
            number += 1
            final.write_bytes(OTHER)
            is_killed = killed_at(number, partial(fetch, server.url, final.parent, overwrite=True, progress=False))
            assert final.read_bytes() in (OTHER, CONTENT)
            if not is_killed:
                break
            assert get(server, final.parent, overwrite=True).path.read_bytes() == CONTENT
            assert [path.name for path in final.parent.iterdir()] == ["file.bin"]
    assert number > 10


def test_two_concurrent_fetches_of_one_source_do_not_interfere(tmp_path):
    failed: list[ColabkitError] = []

    def first() -> None:
        try:
            get(server, tmp_path, timeout=20)
        except ColabkitError as error:
            failed.append(error)

    with served(CONTENT, servers.hang_after(300_000), servers.serve) as server:
        thread = threading.Thread(target=first)
        thread.start()
        wait_until(server.reached.is_set)
        second = get(server, tmp_path)
        assert second.path.read_bytes() == CONTENT
        server.released.set()
        thread.join()
    assert [type(error) for error in failed] == [TargetExists]
    assert second.path.read_bytes() == CONTENT


def test_a_second_call_checks_that_the_source_is_unchanged(tmp_path):
    with served(CONTENT) as server:
        first = get(server, tmp_path)
        again = get(server, tmp_path)
        assert again.reused
        assert (again.path, again.sha256, again.fetched_bytes) == (first.path, first.sha256, 0)
        assert repr(again).startswith("Already fetched: ")
        server.content, server.headers["ETag"] = OTHER, '"v2"'
        with pytest.raises(TargetExists, match="the source has changed"):
            get(server, tmp_path)
        assert first.path.read_bytes() == CONTENT
        assert get(server, tmp_path, overwrite=True).path.read_bytes() == OTHER


def test_a_modified_file_or_one_without_a_version_is_not_reused(tmp_path):
    with served(CONTENT) as server:
        path = get(server, tmp_path).path
        path.write_bytes(CONTENT[:-1] + b"x")
        with pytest.raises(TargetExists, match="already exists"):
            get(server, tmp_path)
        server.headers = {}
        get(server, tmp_path, overwrite=True)
        with pytest.raises(TargetExists, match="its version is unknown"):
            get(server, tmp_path)


def test_a_file_with_the_requested_digest_is_reused_without_network_access(tmp_path):
    with served(CONTENT) as server:
        report = get(server, tmp_path / "mine.bin")
        count = len(server.requests)
        os.utime(report.path, (1, 1))
        again = get(server, tmp_path / "mine.bin", digest=f"sha256:{report.sha256}")
        assert (again.reused, again.sha256, len(server.requests)) == (True, report.sha256, count)
        with pytest.raises(TargetExists, match="with another digest"):
            get(server, tmp_path / "mine.bin", digest=f"sha256:{'0' * 64}")
        assert len(server.requests) == count


def test_other_data_at_the_target_is_not_overwritten(tmp_path):
    (tmp_path / "file.bin").write_text("mine")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file.bin").mkdir()
    with served(CONTENT) as server:
        with pytest.raises(TargetExists, match="already exists"):
            get(server, tmp_path)
        with pytest.raises(TargetExists, match="already exists"):
            get(server, tmp_path / "file.bin")
        assert len(server.requests) == 1, "an explicit path is checked before any request"
        with pytest.raises(TargetExists, match="is a folder"):
            get(server, tmp_path / "taken", overwrite=True)
        assert (tmp_path / "file.bin").read_text() == "mine"
        assert get(server, tmp_path, overwrite=True).path.read_bytes() == CONTENT


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path):
    (tmp_path / "file.bin").write_text("old")
    with served(CONTENT, cut_after(400_000), cut_after(0)) as server, pytest.raises(FetchFailed):
        get(server, tmp_path, overwrite=True)
    assert (tmp_path / "file.bin").read_text() == "old"


def test_an_address_is_refused_as_a_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption, match="target 'gs://bucket/' is an address"):
        fetch("https://127.0.0.1:9/file.bin", "gs://bucket/", progress=False)
    assert os.listdir(tmp_path) == []


def test_drive_in_the_target_needs_a_mount(monkeypatch):
    monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
    monkeypatch.setattr(mounts, "mounts", list)
    with pytest.raises(NotMounted):
        fetch("https://example.org/x", "drive:data")


def test_the_servers_file_name_cannot_leave_the_target_folder(tmp_path):
    names = {
        'attachment; filename="a b.zip"': "a b.zip",
        "attachment; filename=plain.zip; size=3": "plain.zip",
        "attachment; filename=\"old.zip\"; filename*=UTF-8''%e2%82%ac%20new.zip": "€ new.zip",
        "attachment; filename*=iso-8859-1'en'%a3.zip": "£.zip",
        "attachment; filename*=nonsense''x; filename=\"kept.zip\"": "kept.zip",
        'attachment; filename="../../etc/passwd"': "passwd",
        'attachment; filename="..\\\\..\\\\evil.exe"': "evil.exe",
        "attachment; filename*=UTF-8''..%2F..%2F.bashrc": "_bashrc",
        'attachment; filename=".."': "file.bin",
        'attachment; filename="\x01\x7f"': "file.bin",
        'attachment; filename="\xc3\xa9.zip"': "é.zip",
        "inline": "file.bin",
        f'attachment; filename="{"n" * 300}.tar"': "n" * 196 + ".tar",
    }
    for number, (disposition, name) in enumerate(names.items()):
        folder = tmp_path / str(number)
        with served(CONTENT, servers.body(b"data", Content_Disposition=disposition)) as server:
            assert get(server, f"{folder}/").path == folder / name
        assert [path.name for path in folder.iterdir()] == [name]


def test_the_file_name_comes_from_the_address_if_the_server_sends_none(tmp_path):
    paths = {"/a/b%20c.zip?x=/no.zip": "b c.zip", "/a/%2e%2e%2fx": "x", "/": "download", "/a/é.zip": "é.zip"}
    with served(b"data") as server:
        for path, name in paths.items():
            report = fetch(server.url.replace("/data/file.bin", path), tmp_path, progress=False)
            assert report.path == tmp_path / name
            assert report.source == server.url.replace("/data/file.bin", path.partition("?")[0])


def test_redirects_are_followed_with_ranges_and_the_final_name(tmp_path):
    plans = [servers.redirect("/x/real.zip"), cut_after(300_000), servers.redirect("/x/real.zip", 307), servers.serve]
    with served(CONTENT, *plans) as server:
        report = fetch(server.url.replace("file.bin", "12"), tmp_path, progress=False)
    assert report.path.name == "real.zip"
    assert report.path.read_bytes() == CONTENT
    assert server.ranges() == [None, None, "bytes=300000-", "bytes=300000-"]


def test_endless_redirects_and_other_schemes_are_refused(tmp_path):
    for to in ("/again", "", "file:///etc/passwd", "ftp://127.0.0.1/x"):
        with served(CONTENT, servers.redirect(to)) as server, pytest.raises(FetchFailed, match="redirects"):
            get(server, tmp_path)
        assert len(server.requests) <= 12


def test_user_and_password_are_sent_to_their_own_host_only(tmp_path):
    with served(CONTENT) as other:
        to = other.url.replace("127.0.0.1", "localhost")
        with served(CONTENT, servers.redirect("/on"), servers.redirect(to)) as server:
            fetch(server.url.replace("://", "://me:p%40ss@"), tmp_path, progress=False)
    expected = "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert [request.get("Authorization") for request in server.requests] == [expected, expected]
    assert other.requests[0].get("Authorization") is None


def test_certificates_are_checked_and_https_never_redirects_to_http(tmp_path, monkeypatch):
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with served(CONTENT) as plain, served(CONTENT, servers.serve, servers.redirect(plain.url)) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url.replace("http://", "https://")
        with pytest.raises(FetchFailed, match="the server's certificate is not trusted"):
            fetch(url, tmp_path, progress=False)
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        report = fetch(url, tmp_path, progress=False)
        assert (report.path.read_bytes(), report.via) == (CONTENT, "https")
        with pytest.raises(FetchFailed, match="redirects from https to http"):
            fetch(url, tmp_path / "again", progress=False)
    assert plain.requests == []


SECRETS = ("hunter22", "me:hunter22", "X-Amz-Signature", "abcdef0123456789", "sessiontoken", "fragment99")


@pytest.mark.parametrize(
    "plans",
    [
        [servers.status(403)],
        [servers.status(500)],
        [servers.body(b"<html><title>/file.bin?X-Amz-Signature=abcdef0123456789 for hunter22</title>")],
        [cut_after(10)],
        [servers.redirect("/again?X-Amz-Signature=abcdef0123456789")],
        [servers.serve],
    ],
)
def test_no_secret_of_the_address_reaches_messages_reports_or_files(tmp_path, plans, monkeypatch, capfd):
    monkeypatch.setenv("COLABKIT_DEBUG", "1")
    query = "?X-Amz-Signature=abcdef0123456789&X-Amz-Security-Token=sessiontoken#fragment99"
    with served(CONTENT, *plans) as server:
        url = server.url.replace("://", "://me:hunter22@") + query
        try:
            report = fetch(url, tmp_path)
            text = repr(report) + report._repr_html_() + str(report.to_dict())
        except ColabkitError as error:
            text = "\n".join(error._render_traceback_()) + repr(error)
    text += "".join(capfd.readouterr())
    for folder in (tmp_path, Path(os.environ["COLABKIT_LOCAL"])):
        for path in folder.rglob("*"):
            text += str(path) + (path.read_bytes().decode("latin-1") if path.is_file() else "")
    assert not [secret for secret in SECRETS if secret in text]


def test_an_unknown_host_name_fails_at_once(tmp_path):
    with pytest.raises(FetchFailed, match=r"'nowhere\.invalid' has no IP address"):
        fetch("https://nowhere.invalid/x", tmp_path, progress=False)
    to_nowhere = servers.redirect("http://nowhere.invalid/x")
    unknown = r"'nowhere\.invalid' has no IP address"
    with served(CONTENT, to_nowhere) as server, pytest.raises(FetchFailed, match=unknown):
        get(server, tmp_path)


def test_invalid_addresses_and_timeouts_are_refused_without_showing_secrets(tmp_path):
    def refused(source: object, match: str | None = None, **options: object) -> str:
        with pytest.raises(InvalidOption, match=match) as caught:
            fetch(source, tmp_path, **options)
        return str(caught.value)

    for path in ("/content/file.zip", "file.zip", "~/x", "drive:x.zip", "file:///etc/passwd", "local://x", "a/b"):
        refused(path, r"it is a local path or has no scheme; .* colabkit\.stage\(\)")
    for source in ("", "  ", None, 7, "https://", "http://:80/x", "https://host:port/x"):
        refused(source)
    for secret in ("me:hunter22@host/x?sig=hunter22", b"https://me:hunter22@host/x"):
        assert "hunter22" not in refused(secret)
    for timeout in (0, -1, "60", float("inf")):
        refused("https://example.org/x", "timeout=", timeout=timeout)


def test_a_failed_fetch_removes_the_folders_that_it_created(tmp_path):
    for to in ("new/", "new/deep/", "new/deep/file.zip"):
        with served(CONTENT, servers.status(404)) as server, pytest.raises(FetchFailed):
            fetch(server.url, f"{tmp_path}/{to}", progress=False)
        assert list(tmp_path.iterdir()) == []


def test_a_failed_fetch_keeps_existing_and_non_empty_folders(tmp_path):
    (tmp_path / "mine").mkdir()
    with served(CONTENT, servers.status(404)) as server, pytest.raises(FetchFailed):
        get(server, tmp_path / "mine" / "new" / "file.bin")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with served(CONTENT, cut_after(300_000), cut_after(0)) as server, pytest.raises(FetchFailed):
        get(server, tmp_path / "new" / "file.bin")
    (data,) = (tmp_path / "new").glob(".colabkit-*-kept.partial/data")
    assert data.read_bytes() == CONTENT[:300_000]


def failure(url: str, to: Path) -> str:
    with pytest.raises(ColabkitError) as caught:
        fetch(url, to, timeout=0.3, progress=False)
    return str(caught.value)


def test_an_error_announces_resuming_only_if_the_next_call_resumes(tmp_path):
    with served(CONTENT, servers.slammed) as server:
        assert CLAIM not in failure(server.url, tmp_path), "no data had arrived"
        server.plans = [servers.silent]
        assert CLAIM not in failure(server.url, tmp_path), "no data had arrived"
        server.plans = [cut_after(300_000), servers.slammed]
        assert CLAIM in failure(server.url, tmp_path)
        server.plans = [servers.status(503)]
        assert CLAIM in failure(server.url, tmp_path), "the previous call saved the data"
        server.plans = [servers.serve]
        assert get(server, tmp_path).resumed_bytes == 300_000
        server.headers, server.plans = {}, [cut_after(300_000)]
        assert CLAIM not in failure(server.url, tmp_path / "other"), "the version is unknown"


def test_an_error_does_not_announce_resuming_if_nothing_can_be_saved(tmp_path, monkeypatch):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    with served(CONTENT, cut_after(300_000), servers.slammed) as server:
        assert CLAIM not in failure(server.url, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept_bytes", [300_000, len(CONTENT)], ids=["a part", "all"])
def test_the_partial_of_a_replacement_is_discarded_if_the_source_is_unchanged(tmp_path, kept_bytes):
    with served(CONTENT) as server:
        path = get(server, tmp_path).path
        server.plans = [cut_after(300_000), cut_after(0)]
        with pytest.raises(FetchFailed):
            get(server, tmp_path, overwrite=True)
        (data,) = tmp_path.glob(".colabkit-*/data")
        data.write_bytes(CONTENT[:kept_bytes])
        server.plans = [servers.serve]
        again = get(server, tmp_path)
    assert (again.path, again.reused, again.fetched_bytes) == (path, True, 0)
    assert leftovers(tmp_path) == []


def test_a_target_that_appears_meanwhile_is_refused_before_the_rest_is_downloaded(tmp_path):
    with served(CONTENT, cut_after(300_000), cut_after(0)) as server:
        with pytest.raises(FetchFailed):
            get(server, tmp_path)
        (tmp_path / "file.bin").write_text("mine")
        server.plans = [servers.serve]
        with pytest.raises(TargetExists, match="already exists"):
            get(server, tmp_path)
        (data,) = tmp_path.glob(".colabkit-*/data")
        assert data.stat().st_size == 300_000
        assert get(server, tmp_path, overwrite=True).resumed_bytes == 300_000
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
