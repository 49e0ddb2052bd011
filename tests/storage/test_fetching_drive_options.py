"""`fetch()` of Drive files: its options, links, and what happens where gdown itself cannot be used."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest
from fake_drive import drive_id, only_new
from trees import leftovers

from colabkit.errors import Corrupt, FetchFailed, InvalidOption, MissingPackage, NotEnoughSpace, TargetExists
from colabkit.storage.addresses import address_of
from colabkit.storage.fetching import transfer
from colabkit.storage.fetching.api import FetchReport, fetch

CONTENT = random.Random(1).randbytes(200_001)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
ID = drive_id("birds")


def get(name: str, to: Path, **options: object) -> FetchReport:
    return fetch(drive_id(name), to, progress=False, **options)


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
def test_every_form_of_a_link_gives_its_id(source, kind):
    address = address_of(source)
    assert (address.kind, address.text, address.shown) == (f"Drive {kind}", ID, f"Drive {kind} {ID}")


def test_pages_without_an_id_other_addresses_and_folders_named_like_an_id_are_no_links(tmp_path, monkeypatch):
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
    with pytest.raises(InvalidOption, match="a path of this machine"):
        address_of(ID)


@only_new
def test_a_digest_is_checked(drive, tmp_path):
    drive.add("birds.zip", CONTENT)
    with pytest.raises(Corrupt, match=f"its sha256 is {SHA256}"):
        get("birds", tmp_path, digest=f"sha256:{'0' * 64}")
    assert list(tmp_path.iterdir()) == []
    assert get("birds", tmp_path, digest=f"sha256:{SHA256}").sha256 == SHA256


@only_new
def test_cookies_are_used_when_asked_for(drive, tmp_path):
    Path(os.environ["HOME"], ".cache/gdown").mkdir(parents=True)
    drive.add("birds.zip", CONTENT)
    get("birds", tmp_path, cookies=True)
    assert Path(os.environ["HOME"], ".cache/gdown/cookies.txt").exists()


@only_new
def test_the_key_of_an_older_link_is_sent(drive, tmp_path):
    drive.add("birds.zip", CONTENT)
    link = f"https://drive.google.com/open?id={drive_id('birds')}&resourcekey=0-AbC"
    report = fetch(link, tmp_path, progress=False)
    assert report.sha256 == SHA256
    assert any("resourcekey=0-AbC" in address for address in drive.asked)
    assert "0-AbC" not in repr(report) + str(report.to_dict())


@only_new
def test_something_else_at_the_target_is_left_alone(drive, tmp_path):
    (tmp_path / "birds.zip").write_text("mine")
    drive.add("birds.zip", CONTENT)
    with pytest.raises(TargetExists):
        get("birds", tmp_path)
    assert leftovers(tmp_path) == []
    assert get("birds", tmp_path, overwrite=True).path.read_bytes() == CONTENT


@only_new
def test_modules_of_the_working_folder_are_not_taken_for_gdown(drive, tmp_path, monkeypatch):
    (tmp_path / "gdown.py").write_text("raise SystemExit('mine')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", ".", os.environ["PYTHONPATH"]]))
    drive.add("birds.zip", CONTENT)
    assert fetch(drive_id("birds"), progress=False).sha256 == SHA256


def test_a_full_disk_is_told_as_such(tmp_path, monkeypatch):
    full = "def download(**_):\n    raise OSError(28, 'No space left on device')\n"
    (tmp_path / "gdown.py").write_text(f"__version__ = '6.0'\n{full}")
    (tmp_path / "requests.py").write_text(
        "class Session:\n    send = None\n\nclass exceptions:\n    class RequestException(OSError): pass"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(NotEnoughSpace, match="No space left on device"):
        get("birds", tmp_path / "to")


@pytest.mark.parametrize(
    ("module", "error", "told"),
    [
        ("raise ModuleNotFoundError(name='gdown')", MissingPackage, r"Run pip install gdown\."),
        ("__version__ = '4.7.3'", MissingPackage, r"gdown 4\.7\.3 is too old, .* Run pip install -U gdown\."),
        ("raise RuntimeError('broken')", FetchFailed, r"process ended early \(RuntimeError broken\)"),
        ("import os; os._exit(3)", FetchFailed, "process ended early in the last try"),
    ],
)
def test_a_gdown_that_cannot_be_used_is_told(tmp_path, monkeypatch, module, error, told):
    monkeypatch.setattr(transfer, "_BACK_OFF_S", 0.001)
    (tmp_path / "gdown.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(error, match=told):
        get("birds", tmp_path / "to")
    assert leftovers(tmp_path) == []
