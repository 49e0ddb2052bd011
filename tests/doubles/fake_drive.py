"""A fake Google Drive for gdown: a proxy that impersonates the hosts of Google Drive, with a test certificate.

The pages contain the parts that gdown parses: the confirmation form, an error's caption, and a folder's listing for
gdown 5 (`_DRIVE_ivd`) and gdown 6 (`embeddedfolderview`).
"""

from __future__ import annotations

import contextlib
import fcntl
import html
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
import trustme
from http_servers import Handler, Plan, WebServer, serve
from http_servers import running as running_server
from trees import needs

from colabkit.storage.fetching import transfer

HOSTS = ("drive.google.com", "docs.google.com", "drive.usercontent.google.com")
QUOTA = (
    "Too many users have viewed or downloaded this file recently. Please try accessing the file again later. If the "
    "file you are trying to access is particularly large or is shared with many people, it may take up to 24 hours."
)
DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


def drive_id(name: str) -> str:
    """Return an ID of 28 characters, which begins with 1 like a real one."""
    return f"1{name:x<27}"


@dataclass
class DriveFile:
    """A file; its link shows `page`: `"small"`, `"large"`, `"quota"`, `"private"`, `"document"` or `"busy"`."""

    name: str
    content: bytes
    page: str = "small"
    plans: list[Plan] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=lambda: {"Last-Modified": DATE, "Content-Type": "application/zip"})


@dataclass
class DriveFolder:
    """A folder; `inside` holds the names and IDs of its files and subfolders."""

    name: str
    inside: list[tuple[str, str]]


class FakeDrive(WebServer):
    """A proxy that answers instead of Drive; `asked` lists the requested addresses.

    Each page of a folder listing takes `listing_s` seconds.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(b"")
        self.RequestHandlerClass = DriveHandler
        self.context = context
        self.files: dict[str, DriveFile] = {}
        self.folders: dict[str, DriveFolder] = {}
        self.asked: list[str] = []
        self.listing_s = 0.0

    def add(self, name: str, content: bytes = b"", page: str = "small", *plans: Plan) -> DriveFile:
        made = DriveFile(name, content, page, list(plans))
        self.files[drive_id(name.partition(".")[0])] = made
        return made


class DriveHandler(Handler):
    server: FakeDrive
    file: DriveFile
    host = ""

    @property
    def content(self) -> bytes:
        return self.file.content

    @property
    def facts(self) -> dict[str, str]:
        return {**self.file.facts, "Content-Disposition": f'attachment; filename="{self.file.name}"'}

    def do_CONNECT(self) -> None:  # noqa: N802
        self.host = self.path.partition(":")[0]
        self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        self.connection = self.server.context.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self.close_connection = False

    def do_GET(self) -> None:  # noqa: N802
        self.server.requests.append(self.headers)
        self.server.asked.append(f"https://{self.host}{self.path}")
        self.close_connection = True
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        names = parts.path.strip("/").split("/")
        with contextlib.suppress(OSError):
            if names[0] == "embeddedfolderview" or names[:2] == ["drive", "folders"]:
                self.folder(query.get("id", names[-1]), is_new=names[0] == "embeddedfolderview")
            elif (found := self.server.files.get(query.get("id", names[2] if len(names) > 2 else ""))) is None:
                self.page("Not Found", "Sorry, the file you have requested does not exist.", 404)
            else:
                self.file = found
                self.link(names, query)

    def link(self, names: list[str], query: dict[str, str]) -> None:
        page, file_id = self.file.page, query.get("id", "")
        to = f"https://drive.usercontent.google.com/download?id={file_id}&export=download"
        if page == "quota":
            self.page("Quota exceeded", f'<p class="uc-error-subcaption">{QUOTA}</p>')
        elif page == "private":
            self.page("Sign in", "You need access", 403)
        elif page == "busy":
            self.file.page = "small"
            self.page("Error", "Sorry", 503)
        elif page == "document":
            self.document(names)
        elif names[0] == "uc":
            self.answer(303, {"Location": to, "Content-Type": "text/html"})
        elif page == "large" and "confirm" not in query:
            inputs = {"id": file_id, "export": "download", "confirm": "t", "uuid": "0-1-2"}
            hidden = "".join(f'<input type="hidden" name="{name}" value="{text}">' for name, text in inputs.items())
            action = "https://drive.usercontent.google.com/download"
            form = f'<form id="download-form" action="{action}" method="get">{hidden}</form>'
            self.page("Virus scan warning", form)
        else:
            plans = self.file.plans
            (plans.pop(0) if len(plans) > 1 else plans[0] if plans else serve)(self)

    def document(self, names: list[str]) -> None:
        if names[0] == "uc":
            self.page("Error", "", 500)
        elif names[0] == "open":
            self.answer(302, {"Location": f"https://docs.google.com/document/d/{self.id_of_file()}/edit"})
        elif names[-1] == "edit":
            self.page(f"{self.file.name} - Google Docs", "")
        else:
            self.answer(200, self.facts, self.content)

    def id_of_file(self) -> str:
        return next(key for key, value in self.server.files.items() if value is self.file)

    def folder(self, folder_id: str, is_new: bool) -> None:
        found = self.server.folders.get(folder_id)
        self.server.released.wait(self.server.listing_s)
        if found is None:
            self.page("Not Found", "", 404)
        elif is_new:
            links = "".join(
                f'<a href="https://drive.google.com/{self.kind(inside)}">{html.escape(name)}</a>\n'
                for name, inside in found.inside
            )
            self.page(found.name, links)
        else:
            kinds = {True: "application/vnd.google-apps.folder", False: "application/octet-stream"}
            listed = [[inside, None, name, kinds[inside in self.server.folders]] for name, inside in found.inside]
            encoded = "".join(f"\\x{byte:02x}" for byte in json.dumps([listed or None]).encode())
            script = f"<script>window['_DRIVE_ivd'] = '{encoded}';</script>"
            self.page(f"{found.name} - Google Drive", script)

    def kind(self, inside: str) -> str:
        return f"drive/folders/{inside}" if inside in self.server.folders else f"file/d/{inside}/view"

    def page(self, title: str, text: str, status: int = 200) -> None:
        data = f"<!DOCTYPE html><html><head><title>{title}</title></head><body>\n{text}\n</body></html>".encode()
        self.answer(status, {"Content-Type": "text/html; charset=utf-8"}, data)


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session", params=[pytest.param("gdown==5.2.2", marks=pytest.mark.full), "gdown>=6"])
def gdown(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> str:
    """Return a folder that contains gdown from PyPI, cached by pytest; a mark of the test selects the version."""
    return installed(request.param, pytestconfig)


only_old = pytest.mark.parametrize("gdown", ["gdown==5.2.2"], indirect=True)
only_new = pytest.mark.parametrize("gdown", ["gdown>=6"], indirect=True)


@pytest.fixture
def drive(
    authority: trustme.CA, gdown: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDrive]:
    """Return a fake Drive for one test, and check that no child process remains."""
    monkeypatch.setattr(transfer, "_BACK_OFF_S", 0.001)
    with fake_drive(authority, gdown, tmp_path_factory.mktemp("home"), monkeypatch) as server:
        yield server
    assert children() == []


def installed(line: str, config: pytest.Config) -> str:
    """Return the folder that contains a version of gdown, after installing it if necessary."""
    name = f"{line.translate(str.maketrans('=>', '--'))}-{sys.version_info.major}.{sys.version_info.minor}"
    folder = config.cache.mkdir("gdown") / name
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "whole").exists():
            return str(folder)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), line]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        needs(f"{line} from PyPI", done.returncode == 0)
        (folder / "whole").touch()
    return str(folder)


@contextlib.contextmanager
def fake_drive(authority: trustme.CA, gdown: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[FakeDrive]:
    """Run a fake Drive within the block; child processes use it, with the given version of gdown."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*HOSTS).configure_cert(context)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    server = FakeDrive(context)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        patch.delenv(name)
    patch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.server_address[1]}")
    patch.setenv("REQUESTS_CA_BUNDLE", str(folder / "ca.pem"))
    patch.setenv("PYTHONPATH", gdown)
    patch.setenv("HOME", str(folder))
    with running_server(server):
        yield server


def children() -> list[int]:
    """Return the IDs of this process's running children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            # Helper processes of multiprocessing and of tests outlive the test. A child that hung and died is reaped
            # later.
            is_own = not re.search(rb"resource_tracker|forkserver|warm_python", path.with_name("cmdline").read_bytes())
            if int(parent) == os.getpid() and is_own and state != "Z":
                found.append(int(path.parent.name))
    return found


def running(text: str) -> list[int]:
    """Return the IDs of the other processes whose command line contains the given text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found
