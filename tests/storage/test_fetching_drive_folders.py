"""`fetch()` of Drive folders is atomic, with real gdown 5 and 6."""

from __future__ import annotations

import random
from pathlib import Path

import http_servers as servers
import pytest
from fake_drive import DriveFolder, FakeDrive, drive_id, only_new, only_old
from http_servers import cut_after
from trees import files_of, leftovers

from colabkit.errors import FetchFailed, InvalidOption, TargetExists, TimedOut
from colabkit.storage.fetching import transfer
from colabkit.storage.fetching.api import FetchReport, fetch

CONTENT = random.Random(1).randbytes(1_500_001)
TREE = {"one.bin": CONTENT, "inner/two.txt": b"2", "inner/three.txt": b"3"}


def plant(drive: FakeDrive) -> None:
    for name, content in TREE.items():
        drive.add(name.rpartition("/")[2], content)
    inner = [("two.txt", drive_id("two")), ("three.txt", drive_id("three"))]
    drive.folders[drive_id("inner")] = DriveFolder("inner", inner)
    drive.folders[drive_id("birds")] = DriveFolder(
        "Birds", [("one.bin", drive_id("one")), ("inner", drive_id("inner"))]
    )


def get(to: Path | str, **options: object) -> FetchReport:
    return fetch(f"https://drive.google.com/drive/folders/{drive_id('birds')}", to, progress=False, **options)


def test_a_folder_is_fetched_with_its_own_name(drive, tmp_path):
    plant(drive)
    report = get(tmp_path)
    assert report.path == tmp_path / "Birds"
    assert files_of(report.path) == TREE
    assert (report.files, report.sha256, report.fetched_bytes) == (3, None, len(CONTENT) + 2)
    assert [path.name for path in tmp_path.iterdir()] == ["Birds"]
    count = len(drive.asked)
    assert get(tmp_path).reused
    assert len(drive.asked) == count
    (tmp_path / "Birds" / "mine").touch()
    with pytest.raises(TargetExists):
        get(tmp_path)
    assert (tmp_path / "Birds" / "mine").exists()
    assert leftovers(tmp_path) == []


@pytest.mark.full
def test_a_folder_gets_the_requested_name_and_replaces_the_old_one(drive, tmp_path):
    plant(drive)
    assert get(tmp_path / "mine").path == tmp_path / "mine"
    assert files_of(get(tmp_path / "mine").path) == TREE, "an existing folder gets the source's own name"
    (tmp_path / "mine" / "Birds" / "stale").touch()
    report = get(tmp_path / "mine", overwrite=True)
    assert (report.path, files_of(report.path)) == (tmp_path / "mine" / "Birds", TREE)


def test_a_broken_connection_is_resumed(drive, tmp_path):
    plant(drive)
    drive.files[drive_id("one")].plans = [cut_after(1_000_000), servers.serve]
    report = get(tmp_path)
    assert files_of(report.path) == TREE
    assert report.retries == 1
    assert report.fetched_bytes == len(CONTENT) + 2
    assert len(set(drive.ranges())) == 2


@pytest.mark.full
def test_the_next_call_resumes_an_interrupted_folder(drive, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "TRIES", 1)
    plant(drive)
    drive.files[drive_id("three")].plans = [servers.silent, servers.serve]
    with pytest.raises(TimedOut):
        get(tmp_path, timeout=1.5)
    assert not (tmp_path / "Birds").exists()
    report = get(tmp_path)
    assert files_of(report.path) == TREE
    assert report.resumed_bytes == len(CONTENT) + 1
    assert leftovers(tmp_path) == []


@pytest.mark.full
def test_versions_of_a_file_that_changes_between_two_attempts_are_never_mixed(drive, tmp_path):
    plant(drive)
    file = drive.files[drive_id("one")]
    other = random.Random(2).randbytes(len(CONTENT))

    def cut_and_change(handler: servers.Handler) -> None:
        cut_after(1_000_000)(handler)
        file.content, file.facts["Last-Modified"] = other, "Thu, 22 Oct 2015 07:28:00 GMT"

    file.plans = [cut_and_change, servers.serve]
    assert files_of(get(tmp_path).path) == {**TREE, "one.bin": other}


@pytest.mark.full
def test_a_folder_that_cannot_be_fetched_is_refused_with_the_cause(drive, tmp_path):
    def refused(cause: str) -> None:
        with pytest.raises(FetchFailed, match=cause):
            get(tmp_path)
        assert list(tmp_path.iterdir()) == []

    refused("has no folder with this ID")
    drive.folders[drive_id("birds")] = DriveFolder("Birds", [])
    refused("the folder has no shared files")
    plant(drive)
    inner = drive.folders[drive_id("inner")]
    inside, inner.inside = inner.inside, [("same.txt", drive_id("two")), ("same.txt", drive_id("three"))]
    refused(r"two files named 'Birds/inner/same\.txt'")
    inner.inside, drive.files[drive_id("two")].page = inside, "quota"
    with pytest.raises(FetchFailed, match="too many people have downloaded it recently"):
        get(tmp_path)
    assert not (tmp_path / "Birds").exists()


@pytest.mark.full
@only_old
def test_the_file_limit_of_gdown_5_is_reported_with_its_remedy(drive, tmp_path):
    inside = []
    for number in range(50):
        drive.add(f"f{number}.txt", b"x")
        inside.append((f"f{number}.txt", drive_id(f"f{number}")))
    drive.folders[drive_id("birds")] = DriveFolder("Birds", inside)
    with pytest.raises(FetchFailed, match=r"more than 50 files, .* pip install -U gdown"):
        get(tmp_path)


@only_new
@pytest.mark.parametrize("name", ["../out", "..", "/etc/x", "a\\b"])
def test_names_in_a_folder_stay_inside_it(drive, tmp_path, name):
    drive.add("one.bin", b"1")
    drive.folders[drive_id("birds")] = DriveFolder(name, [(name, drive_id("one"))])
    report = get(f"{tmp_path}/to/")
    assert report.path.parent == tmp_path / "to"
    assert [path.name for path in tmp_path.iterdir()] == ["to"]
    assert list(files_of(report.path).values()) == [b"1"]


@pytest.mark.full
@only_new
def test_each_page_of_a_slow_listing_counts_as_progress(drive, tmp_path):
    """Listing many folders takes longer than the timeout, but must not look like a Drive that hangs."""
    drive.add("one.bin", b"1")
    pages = 8
    for number in range(pages):
        inside = (f"d{number + 1}", drive_id(f"d{number + 1}")) if number + 1 < pages else ("one.bin", drive_id("one"))
        drive.folders[drive_id(f"d{number}")] = DriveFolder(f"d{number}", [inside])
    drive.folders[drive_id("birds")] = DriveFolder("Birds", [("d0", drive_id("d0"))])
    drive.listing_s = 0.3
    assert get(tmp_path, timeout=1.5).files == 1


def test_a_digest_of_a_folder_is_refused(tmp_path):
    with pytest.raises(InvalidOption, match="the source is a folder, which has no digest"):
        get(tmp_path, digest=f"md5:{'0' * 32}")
