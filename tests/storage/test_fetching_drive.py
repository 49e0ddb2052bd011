"""`fetch()` of Drive files, with real gdown 5 and 6 and a fake Drive that misbehaves like Drive."""

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
from fake_drive import children, drive_id, only_new, running
from http_servers import cut_after
from trees import leftovers
from waiting import wait_until
from web_fetches import FETCH

from colabkit.errors import (
    Corrupt,
    FetchFailed,
    InvalidOption,
    MissingPackage,
    NotEnoughSpace,
    TargetExists,
    TimedOut,
)
from colabkit.storage.addresses import address_of
from colabkit.storage.fetching import transfer
from colabkit.storage.fetching.api import FetchReport, fetch

CONTENT = random.Random(1).randbytes(2_000_001)
ID = drive_id("birds")
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def get(name: str, to: Path, **options: object) -> FetchReport:
    return fetch(drive_id(name), to, progress=False, **options)


@pytest.mark.parametrize("page", ["small", "large"])
def test_a_file_is_fetched_with_its_own_name_by_the_installed_gdown(drive, gdown, tmp_path, page):
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
    "quota": "a public Drive file has reached its download quota",
    "private": "a Drive link is not shared",
    "missing": "a Drive link has no target",
}


@pytest.mark.parametrize(
    ("page", "cause", "remedy"),
    [
        ("quota", "too many people have downloaded it", r"Copy it to your own Drive, run colabkit\.mount\(\)"),
        ("private", "it is not shared publicly", 'share it with "Anyone with the link"'),
        ("missing", "has no file with this ID", "Check the link"),
    ],
)
def test_a_refusal_names_its_cause_and_remedy(drive, gdown, tmp_path, page, cause, remedy, report_row):
    if page != "missing":
        drive.add("birds.zip", CONTENT, page)
    with pytest.raises(FetchFailed, match=rf"{cause}.*{remedy}") as caught:
        get("birds", tmp_path)
    assert list(tmp_path.iterdir()) == []
    if "gdown--6" in gdown:
        report_row(SYMPTOMS[page], "one error with cause and remedy", caught.value)


def test_a_busy_drive_is_retried(drive, tmp_path):
    drive.add("birds.zip", CONTENT, "busy")
    report = get("birds", tmp_path)
    assert (report.sha256, report.retries) == (SHA256, 1)


def test_a_broken_connection_is_resumed(drive, tmp_path):
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


@pytest.mark.full
@pytest.mark.parametrize("second", SPLICES.values(), ids=SPLICES)
def test_a_response_that_does_not_continue_the_part_is_never_appended(drive, tmp_path, second):
    drive.add("birds.zip", CONTENT, "small", cut_after(1_500_000), servers.serve, second, servers.serve)
    report = get("birds", tmp_path)
    assert report.path.read_bytes() == CONTENT
    assert report.retries == 2
    assert leftovers(tmp_path) == []


@pytest.mark.full
def test_versions_of_a_file_that_changes_between_two_attempts_are_never_mixed(drive, tmp_path):
    file = drive.add("birds.zip", CONTENT)
    other = random.Random(2).randbytes(len(CONTENT))

    def cut_and_change(handler: servers.Handler) -> None:
        cut_after(1_500_000)(handler)
        file.content, file.facts["Last-Modified"] = other, "Thu, 22 Oct 2015 07:28:00 GMT"

    file.plans = [cut_and_change, servers.serve]
    assert get("birds", tmp_path).path.read_bytes() == other


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "resumes"),
    [(servers.silent, False), (servers.hang_after(1_000_000), True)],
    ids=["at first", "in the body"],
)
def test_a_hanging_drive_times_out(drive, tmp_path, monkeypatch, plan, resumes):
    monkeypatch.setattr(transfer, "TRIES", 1)
    drive.add("birds.zip", CONTENT, "small", plan)
    began = time.monotonic()
    with pytest.raises(
        TimedOut, match=r"too little data arrived from Drive; expected at least 4\.0 KiB in 1\.5 s"
    ) as caught:
        get("birds", tmp_path, timeout=1.5)
    assert ("the download resumes where it stopped" in str(caught.value)) is resumes
    assert 1.4 < time.monotonic() - began < 6


def is_half_there(folder: Path) -> bool:
    """Return whether over a million bytes of the file, and its version, have been saved."""
    notes = "".join(path.read_text() for path in folder.glob(".colabkit-*/record"))
    kept_bytes = sum(path.stat().st_size for path in folder.glob(".colabkit-*/data*"))
    return "validator" in notes and kept_bytes > 1_000_000


def test_ctrl_c_stops_at_once_and_the_next_call_resumes(drive, tmp_path):
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


def test_a_killed_fetch_leaves_no_child_and_resumes_in_a_new_process(drive, tmp_path):
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


def test_a_web_page_sent_as_a_file_is_refused(drive, tmp_path):
    drive.add("birds.zip", b"<!doctype html><title>Sign in</title>")
    with pytest.raises(FetchFailed, match="a web page titled 'Sign in'"):
        get("birds", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_google_document_is_fetched_in_the_format_that_gdown_exports(drive, tmp_path):
    drive.add("notes.docx", CONTENT, "document")
    assert get("notes", tmp_path).path == tmp_path / "notes.docx"
    assert (tmp_path / "notes.docx").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (ID, "file"),
        (f"  {ID}\n", "file"),
        (f"https://drive.google.com/file/d/{ID}/view?usp=sharing", "file"),
        (f"https://drive.google.com/file/d/{ID}", "file"),
        (f"https://drive.google.com/file/u/1/d/{ID}/edit", "file"),
        (f"drive.google.com/file/d/{ID}/preview", "file"),
        (f"https://drive.google.com/open?id={ID}", "file"),
        (f"https://drive.google.com/uc?id={ID}&export=download", "file"),
        (f"https://drive.google.com/u/0/uc?id={ID}&export=download", "file"),
        (f"https://docs.google.com/uc?export=download&id={ID}", "file"),
        (f"https://drive.usercontent.google.com/download?id={ID}&export=download&confirm=t", "file"),
        (f"https://docs.google.com/document/d/{ID}/edit", "file"),
        (f"https://docs.google.com/spreadsheets/u/0/d/{ID}/edit#gid=0", "file"),
        (f"https://drive.google.com/drive/folders/{ID}?usp=drive_link", "folder"),
        (f"https://drive.google.com/drive/u/0/folders/{ID}", "folder"),
        (f"https://drive.google.com/drive/mobile/folders/{ID}", "folder"),
        (f"https://drive.google.com/embeddedfolderview?id={ID}#list", "folder"),
    ],
)
def test_every_form_of_a_link_contains_its_id(source, kind):
    address = address_of(source)
    assert (address.kind, address.text, address.shown) == (f"Drive {kind}", ID, f"Drive {kind} {ID}")


def test_pages_without_an_id_other_addresses_and_folders_named_like_an_id_are_not_drive_links(tmp_path, monkeypatch):
    for source in (
        f"https://docs.google.com/spreadsheets/d/{ID}/export?format=csv",
        "https://docs.google.com/spreadsheets/d/e/2PACX-1v/pub?output=csv",
        f"https://example.org/file/d/{ID}/view",
    ):
        assert address_of(source).kind == "web"
    for path in ("drive/my-drive", "drive/shared-with-me", "", "uc?export=download", "open?id=../x"):
        with pytest.raises(InvalidOption, match="Copy link"):
            address_of(f"https://drive.google.com/{path}")
    monkeypatch.chdir(tmp_path)
    Path(ID).mkdir()
    with pytest.raises(InvalidOption, match="it is a local path or has no scheme"):
        address_of(ID)


@only_new
def test_a_digest_is_checked(drive, tmp_path):
    drive.add("birds.zip", CONTENT)
    with pytest.raises(Corrupt, match=f"its sha256 is {SHA256}"):
        get("birds", tmp_path, digest=f"sha256:{'0' * 64}")
    assert list(tmp_path.iterdir()) == []
    assert get("birds", tmp_path, digest=f"sha256:{SHA256}").sha256 == SHA256


@only_new
def test_cookies_are_used_if_requested(drive, tmp_path):
    Path(os.environ["HOME"], ".cache/gdown").mkdir(parents=True)
    drive.add("birds.zip", CONTENT)
    get("birds", tmp_path, cookies=True)
    assert Path(os.environ["HOME"], ".cache/gdown/cookies.txt").exists()


@only_new
def test_the_resource_key_of_an_older_link_is_sent(drive, tmp_path):
    drive.add("birds.zip", CONTENT)
    link = f"https://drive.google.com/open?id={drive_id('birds')}&resourcekey=0-AbC"
    report = fetch(link, tmp_path, progress=False)
    assert report.sha256 == SHA256
    assert any("resourcekey=0-AbC" in address for address in drive.asked)
    assert "0-AbC" not in repr(report) + str(report.to_dict())


@only_new
def test_other_data_at_the_target_is_not_overwritten(drive, tmp_path):
    (tmp_path / "birds.zip").write_text("mine")
    drive.add("birds.zip", CONTENT)
    with pytest.raises(TargetExists):
        get("birds", tmp_path)
    assert leftovers(tmp_path) == []
    assert get("birds", tmp_path, overwrite=True).path.read_bytes() == CONTENT


@only_new
def test_modules_in_the_working_folder_are_not_imported_as_gdown(drive, tmp_path, monkeypatch):
    (tmp_path / "gdown.py").write_text("raise SystemExit('mine')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", os.environ["PYTHONPATH"]]))
    drive.add("birds.zip", CONTENT)
    assert fetch(drive_id("birds"), progress=False).sha256 == SHA256


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    full = "def download(**_):\n    raise OSError(28, 'No space left on device')\n"
    (tmp_path / "gdown.py").write_text(f"__version__ = '6.0'\n{full}")
    (tmp_path / "requests.py").write_text(
        "class Session:\n    send = None\n\nclass exceptions:\n    class RequestException(OSError): pass"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(NotEnoughSpace, match="No space left on device"):
        get("birds", tmp_path / "to")


@pytest.mark.parametrize(
    ("module", "error", "text"),
    [
        ("raise ModuleNotFoundError(name='gdown')", MissingPackage, r"Run pip install gdown\."),
        (
            "__version__ = '4.7.3'",
            MissingPackage,
            r"gdown 4\.7\.3 is installed; expected gdown 5\.2 .* Run pip install -U gdown\.",
        ),
        ("raise RuntimeError('broken')", FetchFailed, r"process ended early \(RuntimeError broken\)"),
        ("import os; os._exit(3)", FetchFailed, "the last attempt failed: gdown's process ended early"),
    ],
)
def test_an_unusable_gdown_is_reported(tmp_path, monkeypatch, module, error, text):
    monkeypatch.setattr(transfer, "_BACK_OFF_S", 0.001)
    (tmp_path / "gdown.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(error, match=text):
        get("birds", tmp_path / "to")
    assert leftovers(tmp_path) == []
