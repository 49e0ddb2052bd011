"""`probe()` on local folders and files."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from far_mounts import FuseMount
from probed_files import add_large, fill, probe_quietly

from colabkit.errors import BadSource, FileFailed, InvalidOption, NotMounted, SourceMissing
from colabkit.storage.probing.api import probe

LATENCY_S = 0.03
SLACK_S = 2.0

Mounted = Callable[..., FuseMount]


@pytest.mark.full
def test_a_local_tree_of_tiny_files_is_fast_enough_and_stays_unchanged(tmp_path: Path) -> None:
    root = fill(tmp_path / "root", 1500, folders=10, size=100)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    report = probe_quietly(root, 4.0)
    assert (report.files, report.sized_files, report.sized_bytes) == (1500, 1500, 150_000)
    assert (report.is_complete, report.is_remote, report.is_good) == (True, False, True)
    assert all(rate.reads_per_s for rate in report.small)
    assert sum(rate.reads for rate in report.small) <= 1500
    assert all(rate.bytes_per_s is None for rate in report.large)
    assert "fast enough to pack from it directly" in report.recommendation
    assert report.seconds < 4
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_higher_levels_are_not_measured_with_few_files(tmp_path: Path) -> None:
    report = probe_quietly(fill(tmp_path / "few", 14), 2.0)
    assert [rate.reads for rate in report.small] == [5, 8, 0, 0]
    assert [rate.reads_per_s is None for rate in report.small] == [False, False, True, True]
    report = probe_quietly(next(fill(tmp_path / "one", 1).rglob("*.png")), 2.0)
    assert report.recommendation == "There are too few files for a recommendation."
    assert report.open_s is not None
    assert report.small[0].reads == 1
    (tmp_path / "none").mkdir()
    report = probe_quietly(tmp_path / "none", 2.0)
    assert report.recommendation == "The folder has no files."
    assert report.listing_rate is None
    assert report.is_complete


def test_files_of_a_few_mebibytes_count_as_small_if_there_are_no_smaller_ones(tmp_path: Path) -> None:
    root = fill(tmp_path / "root", 60, size=3 << 20)
    report = probe_quietly(root, 4.0)
    assert (report.small_files, report.small_bytes) == (60, 180 << 20)
    assert [bool(rate.bytes_per_s) for rate in report.small] == [True, True, True, False]
    assert all(rate.read_bytes == rate.reads * (3 << 20) for rate in report.small)


def test_a_single_large_file_is_read_in_ranges(tmp_path: Path) -> None:
    path = add_large(tmp_path, 130)
    report = probe_quietly(path, 2.0)
    assert (report.type, report.files, report.largest_bytes) == ("file", 1, 130 << 20)
    assert sum(rate.read_bytes for rate in report.large) <= 130 << 20
    assert all(rate.bytes_per_s for rate in report.large)
    assert report.open_s is not None
    assert "file of 130 MiB takes" in report.recommendation
    report = probe_quietly(add_large(tmp_path, 16), 2.0)
    assert [rate.read_bytes > 0 for rate in report.large] == [True, False, False, False]


def test_files_with_undecodable_names_are_read(tmp_path: Path) -> None:
    for number in range(3):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff%d.png" % number)).write_bytes(b"pixels")
    report = probe_quietly(tmp_path, 2.0)
    assert (report.files, report.is_good) == (3, True)
    assert report.small[0].reads == 3


def test_invalid_arguments_and_paths_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
    with pytest.raises(BadSource, match="device, pipe or socket"):
        probe_quietly(tmp_path / "pipe", 2.0)
    for missing in (tmp_path / "nothing", tmp_path / "file" / "inside"):
        with pytest.raises(SourceMissing, match=r"Cannot probe .*this path does not exist"):
            probe_quietly(missing, 2.0)
    for path in ("", None, b"bytes"):
        with pytest.raises(InvalidOption, match="is not a valid path"):
            probe(path)  # type: ignore[arg-type]
    for seconds in (0, -1, float("inf"), "8"):
        with pytest.raises(InvalidOption, match="seconds"):
            probe(tmp_path, seconds=seconds)  # type: ignore[arg-type]
    monkeypatch.setattr("colabkit.foundation.mount_table.mounts", list)
    with pytest.raises(NotMounted):
        probe_quietly("drive:birds", 2.0)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileFailed, match="Cannot probe 'birds'"):
        probe_quietly("birds", 2.0)


def test_the_report_reads_as_text_html_and_json(tmp_path: Path) -> None:
    hostile = tmp_path / "<script>alert(1)</script>"
    fill(hostile, 300)
    add_large(hostile, 130)
    report = probe_quietly(hostile, 3.0)
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
