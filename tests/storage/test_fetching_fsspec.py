"""`fetch()` of files and folders through fsspec: consistent versions, resuming and timeouts."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.zip import ZipFileSystem
from trees import files_of, leftovers
from waiting import wait_until

from colabkit.errors import Corrupt, FetchFailed, InvalidOption, MissingPackage, TargetExists, TimedOut
from colabkit.storage.fetching.api import FetchReport, fetch
from colabkit.storage.sources import bucket, concurrency
from colabkit.storage.sources.engine import BLOCK_BYTES

# The content spans three blocks.
CONTENT = random.Random(1).randbytes(9_000_001)
TREE = {"a/one.bin": CONTENT, "a/b/two.txt": b"2", "three": b""}


class FaultyFileSystem(MemoryFileSystem):
    """A file system in memory that calls `fault` with the path and offset before each read."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fault: Callable[[str, int], None]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        FaultyFileSystem.fault(path, start or 0)
        return super().cat_file(path, start, end)


@pytest.fixture(autouse=True)
def remote(plain_network: None, monkeypatch: pytest.MonkeyPatch) -> FaultyFileSystem:
    """Return the faulty file system, empty and without faults; each block is read with one request.

    Calls that hang are awaited only briefly at the end.
    """
    monkeypatch.setattr(bucket, "_FIRST_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(bucket, "_CLOSE_S", 0.1)
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.1)
    monkeypatch.setattr(FaultyFileSystem, "fault", staticmethod(lambda path, offset: None), raising=False)
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.store.clear()
    return FaultyFileSystem(skip_instance_cache=True)


def faults(monkeypatch: pytest.MonkeyPatch, fault: Callable[[str, int], None]) -> None:
    monkeypatch.setattr(FaultyFileSystem, "fault", staticmethod(fault))


def fails_once(at: int, error: BaseException) -> Callable[[str, int], None]:
    """Return a fault that raises `error` once, at the first read from offset `at` or later."""
    left = [error]

    def fault(path: str, offset: int) -> None:
        if offset >= at and left:
            raise left.pop()

    return fault


def fails_after_a_block(to: Path, error: BaseException) -> Callable[[str, int], None]:
    """Return a fault that raises `error` once, after the journal in `to` has recorded a block of the file."""
    fault = fails_once(1, error)

    def wait(path: str, offset: int) -> None:
        if offset:
            name = path.rpartition("/")[2]
            wait_until(lambda: any(name in journal.read_text() for journal in to.glob(".colabkit-*/journal")))
        fault(path, offset)

    return wait


def get(url: str, to: Path, **options: Any) -> FetchReport:
    return fetch(url, to, progress=False, **options)


def raise_(error: BaseException) -> None:
    raise error


def plant(remote: FaultyFileSystem) -> None:
    for path, content in TREE.items():
        remote.pipe(f"/tree/{path}", content)


def test_a_file_of_real_fsspec_is_fetched(tmp_path):
    memory = fsspec.filesystem("memory")
    memory.pipe("/colabkit-test/x.bin", CONTENT)
    try:
        report = get("memory://colabkit-test/x.bin", tmp_path)
    finally:
        memory.rm("/colabkit-test", recursive=True)
    assert report.path == tmp_path / "x.bin"
    assert report.path.read_bytes() == CONTENT
    assert report.via == f"fsspec {fsspec.__version__} (memory)"
    assert report.sha256 == hashlib.sha256(CONTENT).hexdigest()
    assert leftovers(tmp_path) == []


def test_a_folder_is_fetched_with_all_subfolders(tmp_path, remote):
    plant(remote)
    report = get("faulty://tree", tmp_path)
    assert report.path == tmp_path / "tree"
    assert files_of(report.path) == TREE
    assert (report.files, report.fetched_bytes, report.sha256) == (3, len(CONTENT) + 1, None)
    assert get("faulty://tree/a", tmp_path / "other").path == tmp_path / "other"
    assert files_of(tmp_path / "other") == {"one.bin": CONTENT, "b/two.txt": b"2"}


def test_a_member_of_an_archive_and_a_file_of_unknown_size_are_read_once(tmp_path, remote, monkeypatch):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("large.bin", CONTENT)
    remote.pipe("/a.zip", buffer.getvalue())
    opened, opens = [], ZipFileSystem._open
    monkeypatch.setattr(ZipFileSystem, "_open", lambda *a, **k: opened.append(a[1]) or opens(*a, **k))
    assert get("zip://large.bin::faulty://a.zip", tmp_path).path.read_bytes() == CONTENT
    assert opened == ["large.bin"]
    remote.pipe("/x", CONTENT)
    real = FaultyFileSystem.info
    monkeypatch.setattr(FaultyFileSystem, "info", lambda self, path, **_: {**real(self, path), "size": None})
    assert get("faulty://x", tmp_path).path.read_bytes() == CONTENT


@pytest.mark.parametrize("error", [OSError("reset by peer"), asyncio.CancelledError()])
def test_a_failed_or_cancelled_read_is_retried(tmp_path, remote, monkeypatch, error):
    remote.pipe("/x", CONTENT)
    faults(monkeypatch, fails_once(BLOCK_BYTES, error))
    report = get("faulty://x", tmp_path)
    assert report.path.read_bytes() == CONTENT
    assert (report.retries, report.fetched_bytes) == (1, len(CONTENT))
    assert report.seconds < 10


@pytest.mark.parametrize(("files", "blocks"), [(24, 1), (1, 6)], ids=["files", "parts of one file"])
def test_files_and_their_blocks_are_read_concurrently(tmp_path, remote, monkeypatch, files, blocks):
    tree = {str(number): b"%d" % number * ((blocks - 1) * BLOCK_BYTES + 1) for number in range(files)}
    for name, content in tree.items():
        remote.pipe(f"/tree/{name}", content)
    # The barrier opens only if this many reads run at once.
    at_once = threading.Barrier(files * blocks)
    faults(monkeypatch, lambda path, offset: at_once.wait(30) and None)
    assert files_of(get("faulty://tree", tmp_path).path) == tree


@pytest.mark.parametrize("url", ["faulty://tree/a/one.bin", "faulty://tree"])
def test_the_next_call_resumes_an_interrupted_file_or_folder(tmp_path, remote, monkeypatch, url):
    plant(remote)
    faults(monkeypatch, fails_after_a_block(tmp_path, PermissionError("expired")))
    with pytest.raises(FetchFailed, match=r"it needs a login \(PermissionError: expired\)"):
        get(url, tmp_path)
    assert not (tmp_path / "tree").exists()
    report = get(url, tmp_path)
    assert (files_of(report.path) if report.path.is_dir() else {"a/one.bin": report.path.read_bytes()}).items() <= (
        TREE.items()
    )
    assert BLOCK_BYTES <= report.resumed_bytes < len(CONTENT)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("url", ["faulty://tree/a/one.bin", "faulty://tree"])
def test_a_source_that_changes_during_the_download_is_fetched_again(tmp_path, remote, monkeypatch, url):
    plant(remote)
    other = random.Random(2).randbytes(len(CONTENT))
    changed = []

    def change(path: str, offset: int) -> None:
        if offset and not changed:
            changed.append(remote.pipe("/tree/a/one.bin", other))

    faults(monkeypatch, change)
    path = get(url, tmp_path).path
    assert (path if path.is_file() else path / "a/one.bin").read_bytes() == other


def test_a_changed_file_is_not_resumed_by_the_next_call(tmp_path, remote, monkeypatch):
    remote.pipe("/x", CONTENT)
    faults(monkeypatch, fails_after_a_block(tmp_path, PermissionError("expired")))
    with pytest.raises(FetchFailed):
        get("faulty://x", tmp_path)
    remote.pipe("/x", CONTENT[::-1])
    report = get("faulty://x", tmp_path)
    assert (report.path.read_bytes(), report.resumed_bytes) == (CONTENT[::-1], 0)


@pytest.mark.parametrize("claimed", [-1, 1])
def test_a_file_must_have_the_size_that_its_file_system_reports(tmp_path, remote, monkeypatch, claimed):
    remote.pipe("/x", b"12345")
    real = FaultyFileSystem.info
    monkeypatch.setattr(FaultyFileSystem, "info", lambda self, path, **_: {**real(self, path), "size": 5 + claimed})
    with pytest.raises(FetchFailed, match="the source changed during the download"):
        get("faulty://x", tmp_path)
    assert not (tmp_path / "x").exists()


@pytest.mark.full
def test_a_hanging_file_system_times_out(tmp_path, remote, monkeypatch):
    remote.pipe("/x", CONTENT)
    released = threading.Event()
    faults(monkeypatch, lambda path, offset: released.wait(30) and None)
    began = time.monotonic()
    try:
        with pytest.raises(TimedOut, match=r"within 300 ms in two attempts\. .* timeout=0\.6, then try again\.$"):
            get("faulty://x", tmp_path, timeout=0.3)
    finally:
        released.set()
    assert time.monotonic() - began < 3


@pytest.mark.full
def test_opening_a_file_system_is_retried_and_times_out(tmp_path, remote, monkeypatch):
    remote.pipe("/x", CONTENT)
    opens, fails, released = fsspec.core.url_to_fs, [ConnectionError("reset by peer")], threading.Event()
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: opens(url) if not fails else raise_(fails.pop()))
    report = get("faulty://x", tmp_path)
    assert (report.path.read_bytes(), report.retries) == (CONTENT, 1)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: released.wait(30) and opens(url))
    try:
        with pytest.raises(TimedOut, match=r"^Cannot fetch 'faulty://x': faulty:// did not answer within 300 ms"):
            get("faulty://x", tmp_path / "other", timeout=0.3)
    finally:
        released.set()


@pytest.mark.full
def test_a_file_whose_reads_and_close_hang_times_out(tmp_path, remote, monkeypatch):
    remote.pipe("/x", CONTENT)
    released, real = threading.Event(), FaultyFileSystem.info
    hung = SimpleNamespace(read=lambda size: released.wait(30) and b"", close=lambda: released.wait(30))
    monkeypatch.setattr(FaultyFileSystem, "info", lambda self, path, **_: {**real(self, path), "size": None})
    monkeypatch.setattr(FaultyFileSystem, "open", lambda *_, **__: hung)
    began = time.monotonic()
    try:
        with pytest.raises(TimedOut, match="faulty:// did not answer"):
            get("faulty://x", tmp_path, timeout=0.3)
        assert time.monotonic() - began < 15
    finally:
        released.set()


@pytest.mark.full
def test_data_received_before_a_timeout_is_saved_and_the_error_says_so(tmp_path, remote, monkeypatch):
    plant(remote)
    for url in ("faulty://tree/a/one.bin", "faulty://tree"):
        released = threading.Event()
        faults(monkeypatch, lambda path, offset, released=released: offset and released.wait(30) and None)
        try:
            with pytest.raises(TimedOut, match=r"then try again; the download resumes where it stopped\.$"):
                get(url, tmp_path, timeout=0.3)
        finally:
            released.set()
        assert get(url, tmp_path).resumed_bytes >= BLOCK_BYTES


def test_a_file_in_place_of_an_interrupted_folder_is_fetched(tmp_path, remote, monkeypatch):
    plant(remote)
    faults(monkeypatch, fails_after_a_block(tmp_path, PermissionError("expired")))
    with pytest.raises(FetchFailed):
        get("faulty://tree", tmp_path)
    remote.rm("/tree", recursive=True)
    remote.pipe("/tree", b"now a file")
    assert get("faulty://tree", tmp_path).path.read_bytes() == b"now a file"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("size", [0, 1], ids=["a folder marker", "a file"])
def test_an_object_named_like_a_folder_is_its_marker_or_refused(tmp_path, remote, monkeypatch, size):
    plant(remote)
    real = FaultyFileSystem.find
    both = {"/tree/a": {"name": "/tree/a", "size": size, "type": "file", "created": 1}}
    monkeypatch.setattr(FaultyFileSystem, "find", lambda self, path, **options: {**both, **real(self, path, **options)})
    if size:
        with pytest.raises(FetchFailed, match="'a' is both an object and a folder"):
            get("faulty://tree", tmp_path)
        assert list(tmp_path.iterdir()) == []
    else:
        assert files_of(get("faulty://tree", tmp_path).path) == TREE


def test_paths_outside_the_folder_are_refused(tmp_path, remote, monkeypatch):
    plant(remote)
    for name in ("../out", "a/../../out", "a//b", "a/./b"):
        found = {f"/tree/{name}": {"name": f"/tree/{name}", "size": 1, "type": "file"}}
        monkeypatch.setattr(FaultyFileSystem, "find", lambda self, path, found=found, **_: found)
        with pytest.raises(FetchFailed, match="paths inside the folder"):
            get("faulty://tree", tmp_path / "to")
    assert not (tmp_path / "out").exists()


def test_a_second_call_reuses_unchanged_data(tmp_path, remote):
    plant(remote)
    for url, name in (("faulty://tree", "tree"), ("faulty://tree/three", "three")):
        first = get(url, tmp_path)
        again = get(url, tmp_path)
        assert (again.reused, again.path, again.fetched_bytes) == (True, tmp_path / name, 0)
        assert again.files == first.files
    remote.pipe("/tree/a/b/two.txt", b"3")
    with pytest.raises(TargetExists, match="the source has changed"):
        get("faulty://tree", tmp_path)
    get("faulty://tree", tmp_path, overwrite=True)
    assert files_of(tmp_path / "tree")["a/b/two.txt"] == b"3"
    (tmp_path / "tree" / "mine").touch()
    with pytest.raises(TargetExists, match="already exists"):
        get("faulty://tree", tmp_path)


def test_a_digest_of_a_folder_is_refused(tmp_path, remote, monkeypatch):
    plant(remote)
    digest = f"md5:{hashlib.md5(b'2').hexdigest()}"
    assert get("faulty://tree/a/b/two.txt", tmp_path, digest=digest).files == 1
    with pytest.raises(Corrupt):
        get("faulty://tree/a/one.bin", tmp_path, digest=digest)
    get("faulty://tree/a", tmp_path)
    faults(monkeypatch, lambda path, offset: pytest.fail("read although the digest is refused"))
    for url in ("faulty://tree/a/b", "faulty://tree/a"):
        with pytest.raises(InvalidOption, match="the source is a folder, which has no digest"):
            get(url, tmp_path, digest=digest)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("module", "url", "line"),
    [
        ("fsspec", "memory://x", "Run pip install fsspec."),
        ("fsspec", "gs://bucket/x", "Run pip install gcsfs."),
        ("gcsfs", "gs://bucket/x", "Run pip install gcsfs."),
        ("s3fs", "s3://bucket/x", "Run pip install s3fs."),
        ("huggingface_hub", "hf://datasets/a/b", "Run pip install huggingface_hub."),
        ("adlfs", "abfs://box/x", "Run pip install adlfs."),
        ("adlfs", "az://box/x", "Run pip install adlfs."),
        ("paramiko", "sftp://host/x", 'requires "paramiko" to be installed). Install this package with pip.'),
    ],
)
def test_a_missing_package_is_named_with_its_install_command(tmp_path, monkeypatch, module, url, line):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackage) as caught:
        get(url, tmp_path)
    assert str(caught.value).endswith(line)
    assert list(tmp_path.iterdir()) == []


def test_unknown_protocols_and_missing_sources_are_reported(tmp_path, remote):
    remote.makedirs("/empty")
    for url, error, found in (
        ("nope://x/y", InvalidOption, "Protocol not known: nope"),
        ("faulty://missing", FetchFailed, "nothing exists at this address"),
        ("faulty://empty", FetchFailed, "nothing exists at this address"),
    ):
        with pytest.raises(error, match=found):
            get(url, tmp_path)
        assert list(tmp_path.iterdir()) == []


SECRETS = ("hunter22", "abcdef0123456789", "token9876", "pass1234", "part99")
SAID = "GET https://me:{}@host/x?X-Amz-Signature={} said {} and {} of {}".format(*SECRETS)
SECRET_URL = "faulty://me:{3}@host/x?sig={2}#{4}".format(*SECRETS)


def test_errors_of_a_file_system_show_no_secrets(tmp_path, remote, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(SAID)

    monkeypatch.setattr(FaultyFileSystem, "info", fail)
    with pytest.raises(FetchFailed) as caught:
        get(SECRET_URL, tmp_path)
    monkeypatch.setenv("COLABKIT_DEBUG", "1")
    text = "".join(caught.value._render_traceback_())
    assert "faulty://host/x" in text
    assert "OSError: GET https://host/x said ... and ... of ..." in text
    assert not [secret for secret in SECRETS if secret in text]


def test_importing_fetch_imports_no_heavy_package():
    code = "import sys, colabkit.storage.fetching.api; print([name for name in sys.argv[1:] if name in sys.modules])"
    heavy = ["fsspec", "gdown", "requests", "tqdm", "torch", "numpy"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
