"""`fetch()` of Drive files, by real gdown of both lines against a Drive that misbehaves as Drive does."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import http_servers as servers
import pytest
from fake_drive import children, drive_id, old_in_full, running
from http_servers import cut_after
from trees import leftovers
from waiting import wait_until
from web_fetches import FETCH

from colabkit.errors import FetchFailed, TimedOut
from colabkit.storage.fetching import transfer
from colabkit.storage.fetching.api import FetchReport, fetch

CONTENT = random.Random(1).randbytes(2_000_001)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def get(name: str, to: Path, **options: object) -> FetchReport:
    return fetch(drive_id(name), to, progress=False, **options)


@pytest.mark.parametrize("page", ["small", "large"])
def test_a_file_comes_whole_under_its_own_name_by_the_gdown_that_is_installed(drive, gdown, tmp_path, page):
    drive.add("birds.zip", CONTENT, page)
    report = fetch(f"https://drive.google.com/file/d/{drive_id('birds')}/view?usp=sharing", tmp_path, progress=False)
    assert report.path == tmp_path / "birds.zip"
    assert report.path.read_bytes() == CONTENT
    assert (report.sha256, report.fetched_bytes, report.files) == (SHA256, len(CONTENT), 1)
    (info,) = Path(gdown).glob("gdown-*.dist-info")
    assert report.via == f"gdown {info.name.split('-')[1].removesuffix('.dist')}"
    assert report.source == f"Drive file {drive_id('birds')}"
    assert [path.name for path in tmp_path.iterdir()] == ["birds.zip"]
    assert not Path(os.environ["HOME"], ".cache/gdown/cookies.txt").exists()
    count = len(drive.asked)
    assert get("birds", tmp_path).reused
    assert len(drive.asked) == count


SYMPTOMS = {
    "quota": "a public Drive file has had its downloads",
    "private": "a Drive link is not shared",
    "missing": "a Drive link leads nowhere",
}


@pytest.mark.parametrize(
    ("page", "cause", "cure"),
    [
        ("quota", "too many people have downloaded it lately", r"Copy it into your own Drive, .* colabkit\.mount\(\)"),
        ("private", "does not give it to people without a login", 'share it with "Anyone with the link"'),
        ("missing", "has no file of this id", "Check the link"),
    ],
)
def test_a_refusal_is_told_with_its_cure(drive, gdown, tmp_path, page, cause, cure, report_row):
    if page != "missing":
        drive.add("birds.zip", CONTENT, page)
    with pytest.raises(FetchFailed, match=rf"{cause}.*{cure}") as caught:
        get("birds", tmp_path)
    assert list(tmp_path.iterdir()) == []
    if "gdown--6" in gdown:
        report_row(SYMPTOMS[page], "one error with cause and cure", caught.value)


@old_in_full
def test_a_drive_that_is_busy_is_asked_again(drive, tmp_path):
    drive.add("birds.zip", CONTENT, "busy")
    report = get("birds", tmp_path)
    assert (report.sha256, report.retries) == (SHA256, 1)


def test_a_cut_connection_is_resumed_where_it_was(drive, tmp_path):
    drive.add("birds.zip", CONTENT, "large", cut_after(1_500_000), servers.serve)
    report = get("birds", tmp_path)
    assert (report.sha256, report.retries, report.fetched_bytes) == (SHA256, 1, len(CONTENT))
    assert [each for each in drive.ranges() if each] == [each for each in drive.ranges() if each][:1]
    assert any(each and each != "bytes=0-" for each in drive.ranges())


SPLICES = {
    "ignores the range": servers.without_ranges,
    "another start": servers.ranged(lambda start, total: {"Content-Range": f"bytes 0-{total - 1}/{total}"}, True),
    "another total": servers.ranged(lambda start, total: {"Content-Range": f"bytes {start}-{total}/{total + 1}"}),
    "a page": servers.body(b"<html>quota</html>", Content_Type="text/html"),
}


@old_in_full
@pytest.mark.parametrize("second", SPLICES.values(), ids=SPLICES)
def test_a_reply_that_does_not_continue_the_part_is_never_added_to_it(drive, tmp_path, second):
    drive.add("birds.zip", CONTENT, "small", cut_after(1_500_000), servers.serve, second, servers.serve)
    report = get("birds", tmp_path)
    assert report.path.read_bytes() == CONTENT
    assert report.retries == 2
    assert leftovers(tmp_path) == []


@old_in_full
def test_a_file_that_changes_between_two_tries_is_never_spliced(drive, tmp_path):
    file = drive.add("birds.zip", CONTENT)
    other = random.Random(2).randbytes(len(CONTENT))

    def cut_and_change(handler: servers.Handler) -> None:
        cut_after(1_500_000)(handler)
        file.content, file.facts["Last-Modified"] = other, "Thu, 22 Oct 2015 07:28:00 GMT"

    file.plans = [cut_and_change, servers.serve]
    assert get("birds", tmp_path).path.read_bytes() == other


@old_in_full
@pytest.mark.parametrize(
    ("plan", "goes_on"),
    [(servers.silent, False), (servers.hang_after(1_000_000), True)],
    ids=["at first", "in the body"],
)
def test_a_drive_that_hangs_is_left_after_the_time_out(drive, tmp_path, monkeypatch, plan, goes_on):
    monkeypatch.setattr(transfer, "TRIES", 1)
    drive.add("birds.zip", CONTENT, "small", plan)
    began = time.monotonic()
    with pytest.raises(
        TimedOut, match=r"too little came from Drive in the last try, at least 4\.0 KiB in 1\.5 s"
    ) as caught:
        get("birds", tmp_path, timeout=1.5)
    assert ("it resumes where it stopped" in str(caught.value)) is goes_on
    assert 1.4 < time.monotonic() - began < 6


def is_half_there(folder: Path) -> bool:
    """Return whether much of the file is kept, and noted of what version it is."""
    notes = "".join(path.read_text() for path in folder.glob(".colabkit-*/record"))
    kept_bytes = sum(path.stat().st_size for path in folder.glob(".colabkit-*/data*"))
    return "validator" in notes and kept_bytes > 1_000_000


@old_in_full
def test_ctrl_c_stops_at_once_and_the_next_call_goes_on(drive, tmp_path):
    drive.add("birds.zip", CONTENT, "small", servers.hang_after(1_500_000), servers.serve)

    def interrupt() -> None:
        wait_until(lambda: is_half_there(tmp_path))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        get("birds", tmp_path)
    thread.join()
    assert time.monotonic() - began < 5
    assert children() == []
    report = get("birds", tmp_path)
    assert report.sha256 == SHA256
    assert report.resumed_bytes > 1_000_000


@old_in_full
def test_a_killed_fetch_leaves_no_child_and_goes_on_in_a_new_process(drive, tmp_path):
    drive.add("birds.zip", CONTENT, "small", servers.hang_after(1_500_000), servers.serve)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parents[1])])}
    child = subprocess.Popen([sys.executable, "-c", FETCH, drive_id("birds"), str(tmp_path)], env=environ)
    try:
        wait_until(lambda: is_half_there(tmp_path))
    finally:
        child.kill()
        child.wait()
    wait_until(lambda: not running(str(tmp_path)))
    report = get("birds", tmp_path)
    assert report.sha256 == SHA256
    assert report.resumed_bytes > 1_000_000
    assert leftovers(tmp_path) == []


@old_in_full
def test_a_page_that_calls_itself_a_file_is_refused(drive, tmp_path):
    drive.add("birds.zip", b"<!doctype html><title>Sign in</title>")
    with pytest.raises(FetchFailed, match="a web page titled 'Sign in'"):
        get("birds", tmp_path)
    assert list(tmp_path.iterdir()) == []


@old_in_full
def test_a_google_document_comes_as_gdown_exports_it(drive, tmp_path):
    drive.add("notes.docx", CONTENT, "document")
    assert get("notes", tmp_path).path == tmp_path / "notes.docx"
    assert (tmp_path / "notes.docx").read_bytes() == CONTENT
