"""`probe()` of real mounts with a known latency, and of mounts that hang, die or fail."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from far_mounts import FuseMount, has_fuse, wait_for
from probed_files import add_large, fill, probe_quietly
from sampling import sampled
from trees import needs

from colabkit.errors import FileFailed
from colabkit.storage.probing.child import LARGE_LEVELS, SMALL_LEVELS
from colabkit.storage.probing.report import best_rate

LATENCY_S = 0.03
SLACK_S = 2.0

Mounted = Callable[..., FuseMount]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    """Return a function that mounts `tmp_path / "root"` until the test ends; then check that no process uses it."""
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


@pytest.mark.full
def test_the_measured_rates_match_the_latency_of_the_mount_and_no_file_is_read_twice(
    tmp_path: Path, mounted: Mounted
) -> None:
    root = fill(tmp_path / "root", 800, folders=4)
    add_large(root, 300)
    mount = mounted(latency_s=LATENCY_S)
    report = probe_quietly(mount.point, 3.0)
    assert (report.fstype, report.mount_source, report.is_remote) == ("fuse.far", "far", True)
    assert (report.files, report.listed_entries, report.is_complete) == (801, 805, True)
    assert (report.small_files, report.small_bytes, report.largest_bytes) == (800, 800 * 5000, 300 << 20)
    assert report.open_s == pytest.approx(LATENCY_S, rel=0.3)
    assert report.open_p95_s is not None
    assert report.open_s <= report.open_p95_s < 3 * LATENCY_S
    for rate, level in zip(report.small, SMALL_LEVELS, strict=True):
        assert rate.concurrency == level
        # Each file takes one open and one read, which have the same latency.
        assert rate.reads_per_s == pytest.approx(level / (2 * LATENCY_S), rel=0.35)
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


@pytest.mark.full
def test_the_best_concurrency_of_a_mount_is_found(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 400)
    report = probe_quietly(mounted(latency_s=LATENCY_S, at_once=4).point, 2.0)
    best = best_rate(report.small, of_bytes=False)
    assert best is not None
    assert best.concurrency == 4
    assert "threads=4)" in report.recommendation


@pytest.mark.full
def test_a_slow_mount_is_measured_and_not_reported_as_stalled(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 200)
    report = probe_quietly(mounted(latency_s=0.35).point, 2.5)
    assert not report.stalled
    assert report.open_s == pytest.approx(0.35, rel=0.2)
    assert report.small[0].reads_per_s == pytest.approx(1 / 0.7, rel=0.2)
    assert report.seconds < 2.5 + SLACK_S


@pytest.mark.full
@pytest.mark.parametrize(
    ("operation", "after", "words"),
    sampled(
        [
            (None, 0, "accessing"),
            ("list", 2, "listing"),
            ("open", 9, "opening"),
            ("read", 9, "reading"),
        ],
        2,
    ),
)
def test_a_probe_of_a_hanging_mount_ends_in_time_and_names_the_operation(
    tmp_path: Path, mounted: Mounted, operation: str | None, after: int, words: str
) -> None:
    fill(tmp_path / "root", 300, folders=3)
    mount = mounted(fstype="fuse.drive", latency_s=0.001)
    mount.hang(operation, after)  # type: ignore[arg-type]
    started = time.monotonic()
    report = probe_quietly(mount.point, 1.0)
    assert time.monotonic() - started < 1.0 + SLACK_S + 0.3
    assert report.stalled
    assert not report.is_good
    assert report.stall.startswith(f"{words} {str(mount.point)!r}"[:-1])
    assert "did not respond in time" in report.recommendation
    assert "colabkit.mount(force=True)" in report.recommendation
    if operation == "list" and after:
        assert 0 < report.listed_entries < 303
        assert not report.is_complete
    if operation in ("open", "read"):
        assert (report.files, report.is_complete) == (300, True)
        assert report.open_s is not None
        assert report.small[0].reads_per_s is not None
        assert report.small[-1].reads_per_s is None


def test_a_dead_mount_raises_at_once_and_names_the_remedy(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 3)
    mount = mounted(fstype="fuse.drive")
    mount.kill()
    started = time.monotonic()
    (tmp_path / "link").symlink_to(mount.point / "class0")
    for path in (mount.point / "class0", tmp_path / "link"):
        with pytest.raises(FileFailed, match=r"the DriveFS mount at .* is dead.*Run colabkit.mount\(\)"):
            probe_quietly(path, 5.0)
    assert time.monotonic() - started < 2


def test_errors_are_counted_by_name_and_the_other_files_are_measured(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 200)
    mount = mounted(latency_s=0.001)
    mount.fail(errno.EIO, one_in=5)
    report = probe_quietly(mount.point, 10.0)
    assert [name for name, _ in report.errors] == ["EIO"]
    assert 10 < dict(report.errors)["EIO"] < 60
    assert report.small[0].reads_per_s is not None
    assert not report.is_good
    assert "EIO" in repr(report)
    # A failed read is not retried.
    assert max(Counter(mount.opened_paths).values()) == 1


def test_a_folder_that_cannot_be_listed_raises(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 3)
    mount = mounted()
    mount.fail(errno.EACCES)
    with pytest.raises(FileFailed, match=r"Cannot probe .*[Pp]ermission denied"):
        probe_quietly(mount.point, 2.0)


def test_a_link_is_followed(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 20)
    (tmp_path / "link").symlink_to(mounted().point)
    report = probe_quietly(tmp_path / "link", 2.0)
    assert report.fstype == "fuse.far"
    assert report.files == 20


def test_files_that_are_too_fast_for_a_network_are_reported_as_cached(tmp_path: Path, mounted: Mounted) -> None:
    fill(tmp_path / "root", 300)
    assert "from a cache" in probe_quietly(mounted().point, 2.0).caveat
