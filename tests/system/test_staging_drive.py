"""`stage()` from a real slow FUSE drive that fails, changes, hangs and dies as planned."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from far_mounts import FuseMount, has_fuse, wait_for
from local_copies import MemorySource, copy, data_of, kept_partials, state_of, zipped
from sampling import sampled
from trees import leftovers, make_tree, needs

from colabkit.errors import ColabkitError, FileFailed, NotEnoughSpace, SourceChanged, TimedOut
from colabkit.foundation import file_changes
from colabkit.foundation.environment.limits import MemoryReport
from colabkit.foundation.mount_table import DRIVEFS_FOLDER
from colabkit.storage.sources import concurrency, engine, reads
from colabkit.storage.sources.engine import BLOCK_BYTES
from colabkit.storage.staging import places
from colabkit.storage.staging.api import unstage
from colabkit.storage.staging.partial_copy import read_journal

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("FUSE", has_fuse())
    monkeypatch.setattr(reads, "_BACK_OFF_S", 0.001)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder for the drive: 24 small images, and a file of slightly more than two blocks."""
    folder = make_tree(tmp_path / "root" / "data", 8)
    (folder / "big.bin").write_bytes(os.urandom(2 * BLOCK_BYTES + 1000))
    return tmp_path / "root"


@pytest.fixture
def drive(root: Path, tmp_path: Path) -> Any:
    def mounted(*faults: dict[str, Any], **options: Any) -> FuseMount:
        return FuseMount(tmp_path / "drive", root, plan={"faults": list(faults), **options.pop("plan", {})}, **options)

    return mounted


def test_all_bytes_of_a_folder_or_an_archive_are_copied_and_the_drive_is_not_written_to(root, drive, near_storage):
    archive = zipped(root / "data", root / "data.zip")
    before = state_of(root)
    with drive() as mount:
        report = copy(mount.point / "data")
        assert data_of(report.path) == data_of(root / "data")
        assert sorted(set(mount.opened_paths)) == sorted(mount.opened_paths), "a file was opened twice"
        report = copy(mount.point / archive.name)
        assert data_of(report.path) == data_of(root / "data")
        assert mount.opened_paths.count("/data.zip") < 10
    assert state_of(root) == before
    assert leftovers(near_storage) == []


def test_a_local_copy_is_reused_and_removed_although_the_drive_hangs(root, drive, tmp_path, near_storage):
    archive = zipped(root / "data", root / "data.zip")
    (tmp_path / "way").symlink_to(tmp_path / "drive")
    with drive() as mount:
        names = ("drive/data", f"drive/{archive.name}", "drive/data/big.bin", "way/data")
        first = [copy(tmp_path / name) for name in names]
        mount.hang()
        for name, report in zip(names, first, strict=True):
            again = copy(tmp_path / name)
            assert again.reused
            assert again.path == report.path
            assert unstage(tmp_path / name).freed_bytes > 0
        mount.go_on()
    assert list(near_storage.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_transient_errors_are_retried_and_counted(root, drive, number):
    name = errno.errorcode[number]
    faults = [
        {"on": "read", "path": "*/000.png", "do": "error", "errno": name, "count": 2, "each": True},
        {"on": "open", "path": "*/001.png", "do": "error", "errno": name, "count": 1, "each": True},
        {"on": "list", "path": "/data/cats", "do": "error", "errno": name, "count": 1},
    ]
    with drive(*faults) as mount:
        report = copy(mount.point / "data")
    # The kernel itself retries an open that fails with ESTALE.
    assert report.retries == (3 * 2 if number == errno.ESTALE else 3 * 2 + 3 + 1)
    assert data_of(report.path) == data_of(root / "data")


@pytest.mark.parametrize("first", [1, 2])
def test_names_that_a_listing_leaves_out_are_copied_and_the_listing_counts_as_retried(root, drive, first):
    hide = {"on": "list", "path": "/data/[bc]*", "do": "hide", "first": first, "count": 1, "each": True}
    with drive(hide) as mount:
        report = copy(mount.point / "data")
    assert data_of(report.path) == data_of(root / "data")
    # The listings of the folder and of its subfolders bees and cats.
    assert report.retries == 3


def test_a_folder_whose_listings_never_agree_is_refused(root, drive, near_storage):
    # The n-th listing omits the n-th file.
    faults = [
        {"on": "list", "path": f"/data/cats/00{n}.png", "do": "hide", "first": n + 1, "count": 1} for n in range(6)
    ]
    with drive(*faults) as mount, pytest.raises(SourceChanged, match=r"Cannot list .*cats.* the same names"):
        copy(mount.point / "data")
    assert leftovers(near_storage) == []


def test_a_big_file_resumes_at_the_offset_where_it_failed(root, drive):
    fault = {"on": "read", "path": "*/big.bin", "do": "error", "offset_from": BLOCK_BYTES + 1, "count": 2}
    with drive(fault) as mount:
        report = copy(mount.point / "data" / "big.bin")
        assert mount.read_bytes < 3 * BLOCK_BYTES
    assert report.path.read_bytes() == (root / "data" / "big.bin").read_bytes()
    assert 1 <= report.retries <= 2


def test_an_unreadable_file_is_named_and_the_next_run_reuses_the_others(root, drive, near_storage):
    with (
        drive({"on": "read", "path": "*/003.png", "do": "error"}) as mount,
        pytest.raises(FileFailed, match=r"003\.png"),
    ):
        copy(mount.point / "data", threads=1)
    assert kept_partials(near_storage)
    with drive() as mount:
        report = copy(mount.point / "data")
        assert report.resumed_bytes
    assert data_of(report.path) == data_of(root / "data")
    assert leftovers(near_storage) == []


def test_short_reads_are_continued_and_a_removed_file_is_one_error(root, drive):
    faults = [
        {"on": "read", "path": f"/data/{name}", "do": "short", "count": 3} for name in ("cats/003.png", "big.bin")
    ]
    with drive(*faults) as mount:
        assert data_of(copy(mount.point / "data").path) == data_of(root / "data")
    with (
        drive({"on": "open", "path": "*/cats/003.png", "do": "vanish"}) as mount,
        pytest.raises(ColabkitError, match=r"cats/003\.png.*No such file"),
    ):
        copy(mount.point / "data", refresh=True, verify="full")


@pytest.mark.full
@pytest.mark.parametrize("name", ["cats/003.png", "big.bin"])
@pytest.mark.parametrize("grain_s", sampled([0.0, 0.4], 1))
def test_a_file_modified_while_it_is_read_is_detected(root, drive, near_storage, monkeypatch, name, grain_s):
    # Wait for a tick of this clock, not for one of the coarsest clock.
    monkeypatch.setattr(reads, "_COARSE_TICK_NS", 400_000_000)
    fault = {"on": "read", "path": f"/data/{name}", "do": "change", "count": 1}
    with drive(fault, plan={"mtime_grain_s": grain_s}) as mount:
        with pytest.raises(SourceChanged, match=name):
            copy(mount.point / "data")
        report = copy(mount.point / "data")
        assert data_of(report.path) == data_of(mount.point / "data")


def test_refresh_uses_change_times_on_a_drive_unless_a_new_mount_gives_all_files_new_ones(root, drive):
    file = root / "data" / "cats" / "003.png"
    found = file.stat()
    with drive() as mount:
        copy(mount.point / "data")
        file.write_bytes(bytes(found.st_size))
        os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
        assert data_of(copy(mount.point / "data", refresh=True).path) == data_of(root / "data")
    for path in root.rglob("*.*"):
        path.chmod(0o600)
    with drive() as mount:
        assert copy(mount.point / "data", refresh=True).reused


@pytest.mark.full
def test_a_file_rewritten_within_one_tick_of_a_coarse_clock_is_not_copied_in_part(root, drive, near_storage):
    big = root / "data" / "big.bin"
    with drive(plan={"mtime_grain_s": 2.0}, read_s=0.05) as mount:

        def rewrite() -> None:
            wait_for(lambda: mount.read_bytes > BLOCK_BYTES, "the first reads")
            with big.open("r+b") as file:
                file.write(b"\1" * big.stat().st_size)

        # The clock that `touch` reads may be a few milliseconds behind.
        wait_for(lambda: 0.05 < time.time() % 2 < 0.2, "the beginning of a tick")
        big.touch()
        writer = threading.Thread(target=rewrite)
        writer.start()
        with pytest.raises(SourceChanged, match=r"big\.bin"):
            copy(mount.point / "data" / "big.bin", threads=1)
        writer.join()


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `stage()` give up on reads after half a second."""
    monkeypatch.setattr(engine, "STALLED_S", 0.5)
    monkeypatch.setattr("colabkit.storage.sources.folder.STALLED_S", 0.5)
    monkeypatch.setattr("colabkit.storage.sources.concurrency.STALLED_S", 0.5)
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.2)


@pytest.mark.usefixtures("short_deadline")
def test_a_hanging_read_is_abandoned_and_repeated(root, drive):
    with drive({"on": "read", "path": "*/cats/003.png", "do": "hang", "count": 1}) as mount:
        report = copy(mount.point / "data")
        assert data_of(report.path) == data_of(root / "data")


@pytest.mark.usefixtures("short_deadline")
@pytest.mark.parametrize("operation", sampled(["open", "read", "list"], 1))
def test_a_hanging_drive_is_one_error_in_time(root, drive, operation):
    with drive() as mount:
        mount.hang(operation, after=2)
        started = time.monotonic()
        with pytest.raises(TimedOut, match="in two attempts"):
            copy(mount.point / "data")
        assert time.monotonic() - started < 10
        mount.go_on()
        assert data_of(copy(mount.point / "data").path) == data_of(root / "data")


def test_local_data_survives_a_drive_that_dies_and_a_new_mount_resumes(root, drive, near_storage):
    with drive({"on": "open", "path": "/data/cats/*", "do": "hang", "first": 4}) as mount:

        def die_when_a_file_is_copied() -> None:
            wait_for(lambda: any(near_storage.rglob("cats/*.png")), "a local copy")
            mount.kill()

        death = threading.Thread(target=die_when_a_file_is_copied)
        death.start()
        with pytest.raises(ColabkitError):
            copy(mount.point / "data", threads=1)
        death.join()
    (saved,) = kept_partials(near_storage)
    there = {f"/data/{path}" for path, *_ in read_journal(saved / "journal")[0]}
    assert there
    with drive() as mount:
        report = copy(mount.point / "data", threads=1)
        assert not there & set(mount.opened_paths), "what was near was read again"
    assert data_of(report.path) == data_of(root / "data")


def test_an_interrupt_stops_at_once_while_the_drive_hangs(drive):
    interrupted: list[float] = []

    def consume() -> None:
        started = time.monotonic()
        timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), 2))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            copy(mount.point / "data")
        interrupted.append(time.monotonic() - started)
        timer.join()

    with drive() as mount:
        mount.hang("open")
        consume()
        mount.go_on()
    assert interrupted[0] < 0.5 + 2.5


def test_full_verification_finds_bytes_that_differ_when_read_again(root, drive, tmp_path):
    archive = zipped(root / "data", root / "data.zip")
    for name in ("data", archive.name):
        with drive() as mount:
            assert copy(mount.point / name, tmp_path / f"near-{name}", verify="full").verify == "full"
            assert mount.read_bytes >= 2 * (2 * BLOCK_BYTES + 1000)


@pytest.mark.full
@pytest.mark.usefixtures("short_deadline")
def test_a_drive_that_stops_while_a_big_file_is_read_is_one_error_in_time(root, drive):
    (root / "data" / "big.bin").write_bytes(os.urandom(12 * BLOCK_BYTES))
    with drive(bandwidth=20e6) as mount:
        timer = threading.Timer(0.7, mount.hang)
        timer.start()
        started = time.monotonic()
        with pytest.raises(TimedOut):
            copy(mount.point / "data" / "big.bin")
        assert time.monotonic() - started < 10
        timer.join()
        mount.go_on()


def test_an_archive_on_a_remote_mount_needs_space_for_itself_and_its_files(image_tree, tmp_path):
    (tmp_path / "root").mkdir()
    archive = zipped(image_tree, tmp_path / "root" / "a.zip")
    room = copy(archive, dry_run=True).plan.peak_bytes
    assert 24 * 4096 <= room <= 24 * 6000, "files take whole pages"
    with FuseMount(tmp_path / "drive", tmp_path / "root", "fuse.other") as mount:
        plan = copy(mount.point / "a.zip", dry_run=True).plan
    assert plan.peak_bytes == room + archive.stat().st_size
    assert plan.cache_bytes == 0


def test_drive_needs_space_twice_since_it_caches_reads(image_tree, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    size = sum(map(len, data_of(image_tree).values()))
    with FuseMount(tmp_path / "drive", image_tree, "fuse.drive") as mount:
        plan = copy(mount.point, dry_run=True).plan
        assert plan.cache_bytes == size
        (tmp_path / "way").symlink_to(mount.point)
        assert copy(tmp_path / "way", dry_run=True).plan.cache_bytes == size, "a link to the drive is the drive"
        needed = plan.peak_bytes + size
        monkeypatch.setattr(
            file_changes, "free_bytes", lambda path: size - 1 if str(path).endswith(DRIVEFS_FOLDER) else 9 * needed
        )
        with pytest.raises(NotEnoughSpace, match="DriveFS caches"):
            copy(mount.point)
        monkeypatch.setattr(file_changes, "free_bytes", lambda path: needed - 1)
        with pytest.raises(NotEnoughSpace):
            copy(mount.point)
        monkeypatch.setattr(file_changes, "free_bytes", lambda path: needed)
        assert copy(mount.point).files == 24


def test_a_tmpfs_is_mounted_if_ram_allows_more_and_is_removed_by_unstage(near_storage, monkeypatch):
    needs("root", os.geteuid() == 0 and places.can_mount())
    monkeypatch.setattr(places, "memory_limits", lambda read: MemoryReport(64 * GIB, 64 * GIB, "machine"))
    free = file_changes.free_bytes
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 1000 if path == places.TMPFS else free(path))
    source = MemorySource({"a": os.urandom(3000), "b/c": os.urandom(50_000)})
    report = copy(source, "auto")
    try:
        assert report.target == "tmpfs"
        assert "a separate tmpfs is mounted" in report.why
        assert data_of(report.path) == source.files
        assert os.path.ismount(report.path.parent)
        assert copy(source, "auto").reused
    finally:
        unstage(report)
    assert list(near_storage.iterdir()) == []


def test_a_small_tmpfs_is_refused_in_advance_and_handled_if_it_fills(tmp_path, monkeypatch):
    needs("root", os.geteuid() == 0 and places.can_mount())
    point = tmp_path / "tmpfs"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "test", str(point)], check=True)
    try:
        source = MemorySource({f"{number}": os.urandom(100_000) for number in range(20)})
        with pytest.raises(NotEnoughSpace, match="free; expected at least"):
            copy(source, point / "near")
        monkeypatch.setattr(file_changes, "free_bytes", lambda path: GIB)
        with pytest.raises(NotEnoughSpace, match="No space left"):
            copy(source, point / "near")
        assert list(point.iterdir()) == [], "the space was not freed"
    finally:
        subprocess.run(["umount", str(point)], check=True)
