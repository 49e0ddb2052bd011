"""`read_probe()` against real mounts of known latency, mounts that hang, die or fail, and local folders."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from far_mounts import FuseMount, has_fuse, wait_for
from sampling import sampled
from trees import needs

from colabkit.errors import BadSource, FileFailed, InvalidOption, NotMounted, SourceMissing
from colabkit.storage.probing.api import read_probe
from colabkit.storage.probing.child import LARGE_LEVELS, SMALL_LEVELS
from colabkit.storage.probing.report import ProbeReport, best_rate

LATENCY_S = 0.03
SLACK_S = 2.0

Mounted = Callable[..., FuseMount]


def fill(folder: Path, files: int, folders: int = 1, size: int = 5000) -> Path:
    for number in range(files):
        path = folder / f"class{number % folders}" / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return folder


def add_large(folder: Path, mebibytes: int) -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / "large.bin").open("wb") as file:
        file.truncate(mebibytes << 20)
    return folder / "large.bin"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    """Return a function that mounts `tmp_path / "root"` until the test ends; no process may be left that touches it."""
    needs("FUSE", has_fuse())
    with contextlib.ExitStack() as stack:

        def mount(**options: object) -> FuseMount:
            options = {"fstype": "fuse.far", **options}
            return stack.enter_context(FuseMount(tmp_path / "far", tmp_path / "root", **options))  # type: ignore[arg-type]

        yield mount
    wait_for(lambda: not processes_with(tmp_path), "the end of all processes")


def processes_with(path: Path) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [file.parent.name] * (os.fsencode(path) in file.read_bytes())
    return found


def probe(path: Path | str, seconds: float) -> ProbeReport:
    return read_probe(path, seconds=seconds, progress=False)


def test_the_figures_are_those_the_mount_was_given_and_no_file_is_read_twice(tmp_path: Path, mounted: Mounted) -> None:
    root = fill(tmp_path / "root", 800, folders=4)
    add_large(root, 300)
    mount = mounted(latency_s=LATENCY_S)
    report = probe(mount.point, 3.0)
    assert (report.fstype, report.mount_source, report.is_remote) == ("fuse.far", "far", True)
    assert (report.files, report.listed_entries, report.is_complete) == (801, 805, True)
    assert (report.small_files, report.small_bytes, report.largest_bytes) == (800, 800 * 5000, 300 << 20)
    assert report.open_s == pytest.approx(LATENCY_S, rel=0.3)
    assert report.open_p95_s is not None
    assert report.open_s <= report.open_p95_s < 3 * LATENCY_S
    for rate, level in zip(report.small, SMALL_LEVELS, strict=True):
        assert rate.concurrency == level
        assert rate.reads_per_s == pytest.approx(level / (2 * LATENCY_S), rel=0.35)  # an open and a read each
        assert rate.bytes_per_s == pytest.approx(5000 * rate.reads_per_s, rel=0.01)
    for rate, level in zip(report.large, LARGE_LEVELS, strict=True):
        assert rate.concurrency == level
        assert rate.bytes_per_s == pytest.approx(level * (1 << 20) / LATENCY_S, rel=0.4)
    assert report.is_good
    assert report.caveat == ""
    assert f"colabkit.stage({str(mount.point)!r}, threads=32)" in report.recommendation
    opened = Counter(mount.opened_paths)
    assert opened.pop("/large.bin") <= 1 + LARGE_LEVELS[-1]
    assert set(opened.values()) == {1}
    assert report.seconds < 3.0 + SLACK_S


def test_the_concurrency_that_a_mount_rewards_is_found(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 400)
    report = probe(mounted(latency_s=LATENCY_S, at_once=4).point, 2.0)
    best = best_rate(report.small, of_bytes=False)
    assert best is not None
    assert best.concurrency == 4
    assert "threads=4)" in report.recommendation


def test_a_slow_mount_is_measured_and_not_called_stalled(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 200)
    report = probe(mounted(latency_s=0.35).point, 2.5)
    assert not report.stalled
    assert report.open_s == pytest.approx(0.35, rel=0.2)
    assert report.small[0].reads_per_s == pytest.approx(1 / 0.7, rel=0.2)
    assert report.seconds < 2.5 + SLACK_S


@pytest.mark.parametrize(
    ("operation", "after", "words"),
    sampled(
        [
            (None, 0, "looking at"),
            ("list", 2, "listing"),
            ("open", 9, "opening"),
            ("read", 9, "reading"),
        ],
        2,
    ),
)
def test_a_mount_that_hangs_is_left_in_time_and_the_stall_is_named(
    tmp_path: Path, mounted: Mounted, operation: str | None, after: int, words: str
) -> None:
    fill(tmp_path / "root", 300, folders=3)
    mount = mounted(fstype="fuse.drive", latency_s=0.001)
    mount.hang(operation, after)  # type: ignore[arg-type]
    started = time.monotonic()
    report = probe(mount.point, 1.0)
    assert time.monotonic() - started < 1.0 + SLACK_S + 0.3
    assert report.stalled
    assert not report.is_good
    assert report.stall.startswith(f"{words} {str(mount.point)!r}"[:-1])
    assert "did not answer in time" in report.recommendation
    assert "colabkit.mount(force=True)" in report.recommendation
    if operation == "list" and after:
        assert 0 < report.listed_entries < 303
        assert not report.is_complete
    if operation in ("open", "read"):
        assert (report.files, report.is_complete) == (300, True)
        assert report.open_s is not None
        assert report.small[0].reads_per_s is not None
        assert report.small[-1].reads_per_s is None


def test_a_dead_mount_is_refused_at_once_with_its_cure(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 3)
    mount = mounted(fstype="fuse.drive")
    mount.kill()
    started = time.monotonic()
    (tmp_path / "link").symlink_to(mount.point / "class0")
    for path in (mount.point / "class0", tmp_path / "link"):
        with pytest.raises(FileFailed, match=r"the DriveFS mount at .* is dead.*Run colabkit.mount\(\)"):
            probe(path, 5.0)
    assert time.monotonic() - started < 2


def test_errors_are_counted_by_name_and_the_rest_is_measured(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 200)
    mount = mounted(latency_s=0.001)
    mount.fail(errno.EIO, one_in=5)
    report = probe(mount.point, 2.0)
    assert [name for name, _ in report.errors] == ["EIO"]
    assert 10 < dict(report.errors)["EIO"] < 60
    assert report.small[0].reads_per_s is not None
    assert not report.is_good
    assert "EIO" in repr(report)
    assert max(Counter(mount.opened_paths).values()) == 1  # a read that failed is not tried again


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 3)
    mount = mounted()
    mount.fail(errno.EACCES)
    with pytest.raises(FileFailed, match=r"Cannot probe .*Permission denied"):
        probe(mount.point, 2.0)


def test_a_link_is_measured_as_what_it_leads_to(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 20)
    (tmp_path / "link").symlink_to(mounted().point)
    report = probe(tmp_path / "link", 2.0)
    assert report.fstype == "fuse.far"
    assert report.files == 20


def test_files_that_come_too_quickly_for_a_network_are_called_cached(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 300)
    assert "from a cache" in probe(mounted().point, 2.0).caveat


def test_a_local_tree_of_tiny_files_is_quick_enough_and_left_as_it_was(tmp_path: Path) -> None:
    root = fill(tmp_path / "root", 1500, folders=10, size=100)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    report = probe(root, 4.0)
    assert (report.files, report.sized_files, report.sized_bytes) == (1500, 1500, 150_000)
    assert (report.is_complete, report.is_remote, report.is_good) == (True, False, True)
    assert all(rate.reads_per_s for rate in report.small)
    assert sum(rate.reads for rate in report.small) <= 1500
    assert all(rate.bytes_per_s is None for rate in report.large)
    assert "Quick enough to pack from directly" in report.recommendation
    assert report.seconds < 4
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_few_files_leave_higher_levels_open(tmp_path: Path) -> None:
    report = probe(fill(tmp_path / "root", 14), 2.0)
    assert [rate.reads for rate in report.small] == [5, 8, 0, 0]
    assert [rate.reads_per_s is None for rate in report.small] == [False, False, True, True]


def test_files_of_some_mebibytes_count_as_small_where_there_are_no_smaller_ones(tmp_path: Path) -> None:
    root = fill(tmp_path / "root", 60, size=3 << 20)
    report = probe(root, 4.0)
    assert (report.small_files, report.small_bytes) == (60, 180 << 20)
    assert [bool(rate.bytes_per_s) for rate in report.small] == [True, True, True, False]
    assert all(rate.read_bytes == rate.reads * (3 << 20) for rate in report.small)


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    report = probe(tmp_path, 2.0)
    assert report.recommendation == "There is no file in it."
    assert report.listing_rate is None
    assert report.is_complete


def test_a_single_large_file_is_read_in_ranges(tmp_path: Path) -> None:
    path = add_large(tmp_path, 130)
    report = probe(path, 2.0)
    assert (report.type, report.files, report.largest_bytes) == ("file", 1, 130 << 20)
    assert sum(rate.read_bytes for rate in report.large) <= 130 << 20
    assert all(rate.bytes_per_s for rate in report.large)
    assert report.open_s is not None
    assert "130 MiB take" in report.recommendation


def test_a_file_of_two_blocks_is_read_in_one_range_only(tmp_path: Path) -> None:
    report = probe(add_large(tmp_path, 16), 2.0)
    assert [rate.read_bytes > 0 for rate in report.large] == [True, False, False, False]


def test_a_single_small_file_is_too_little_to_tell(tmp_path: Path) -> None:
    report = probe(next(fill(tmp_path, 1).rglob("*.png")), 2.0)
    assert report.recommendation == "Too few files to tell."
    assert report.open_s is not None
    assert report.small[0].reads == 1


def test_names_that_are_no_text_are_read_too(tmp_path: Path) -> None:
    for number in range(3):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff%d.png" % number)).write_bytes(b"pixels")
    report = probe(tmp_path, 2.0)
    assert (report.files, report.is_good) == (3, True)
    assert report.small[0].reads == 3


def test_a_relative_path_in_a_folder_that_was_removed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileFailed, match="Cannot probe 'birds'"):
        probe("birds", 2.0)


def test_what_is_no_folder_or_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
    with pytest.raises(BadSource, match="device, pipe or socket"):
        probe(tmp_path / "pipe", 2.0)
    for missing in (tmp_path / "nothing", tmp_path / "file" / "inside"):
        with pytest.raises(SourceMissing, match=r"Cannot probe .*nothing at this path"):
            probe(missing, 2.0)
    for path in ("", None, b"bytes"):
        with pytest.raises(InvalidOption, match="as path"):
            read_probe(path)  # type: ignore[arg-type]
    for seconds in (0, -1, float("inf"), "8"):
        with pytest.raises(InvalidOption, match="seconds"):
            read_probe(tmp_path, seconds=seconds)  # type: ignore[arg-type]
    monkeypatch.setattr("colabkit.foundation.mount_table.mounts", list)
    with pytest.raises(NotMounted):
        probe("drive:birds", 2.0)


def test_the_report_reads_as_text_html_and_json(tmp_path: Path) -> None:
    hostile = tmp_path / "<script>alert(1)</script>"
    fill(hostile, 300)
    add_large(hostile, 130)
    report = probe(hostile, 3.0)
    page = report._repr_html_()
    assert "<script" not in page
    picture = ET.fromstring(page[page.index("<svg") :])
    names = {element.tag.rpartition("}")[2]: element.text for element in picture}
    assert names["title"]
    assert "Small files, files/s: " in (names["desc"] or "")
    assert "currentColor" in page
    lines = str(report).splitlines()
    assert sum("█" in line for line in lines) >= 2
    assert sum(line.endswith(" best") for line in lines) == 2
    assert len(repr(report).splitlines()) in (2, 3)
    assert report.to_dict()["small"][0]["concurrency"] == 1
