"""The texts and recommendations of a probe's report, and the rates computed from individual operations."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colabkit.storage.probing.child import LARGE_LEVELS, SMALL_LEVELS, Op, portions, rates
from colabkit.storage.probing.report import ProbeReport, ReadRate, best_rate, doubt

MIB = 1 << 20


def small(*per_s: float | None, quick: int = 0) -> tuple[ReadRate, ...]:
    levels = zip(SMALL_LEVELS, per_s, strict=True)
    return tuple(ReadRate(c, 20, 20_000, v, 1000 * v, quick) if v else ReadRate(c) for c, v in levels)


def large(*per_s: float | None) -> tuple[ReadRate, ...]:
    levels = zip(LARGE_LEVELS, per_s, strict=True)
    return tuple(ReadRate(c, 8, 8 * MIB, v / MIB, v) if v else ReadRate(c) for c, v in levels)


def make_report(**changes: Any) -> ProbeReport:
    values: dict[str, Any] = {
        "path": "drive:birds",
        "type": "folder",
        "fstype": "fuse.drive",
        "mount_source": "drive",
        "is_remote": True,
        "open_s": 0.1,
        "open_p95_s": 0.12,
        "listed_entries": 20_010,
        "listing_rate": 5000.0,
        "is_complete": True,
        "files": 20_000,
        "sized_files": 20_000,
        "sized_bytes": 20_000_000,
        "small_files": 20_000,
        "small_bytes": 20_000_000,
        "largest_bytes": 2000,
        "small": small(10, 40, 150, 200),
        "large": large(None, None, None, None),
        "errors": (),
        "stalled": False,
        "stall": "",
        "seconds": 8.0,
    }
    return ProbeReport(**{**values, **changes})


def test_the_best_concurrency_is_the_lowest_that_reaches_90_percent() -> None:
    assert best_rate(small(10, 95, 100, 98), of_bytes=False) == small(10, 95, 100, 98)[1]
    assert best_rate(small(10, 89, 100, 98), of_bytes=False) == small(10, 89, 100, 98)[2]
    assert best_rate(small(None, None, None, None), of_bytes=False) is None
    best = best_rate(large(5 * MIB, 9 * MIB, None, None), of_bytes=True)
    assert best is not None
    assert best.concurrency == 2


PART = {"sized_files": 5000, "sized_bytes": 5_000_000, "small_files": 5000, "small_bytes": 5_000_000}
NOTHING = {"small": small(None, None, None, None)}
ARCHIVE = {"type": "file", "files": 1, "largest_bytes": 1000 * MIB, **NOTHING}
LOCAL = {"is_remote": False, "fstype": "ext4"}
ADVICE: list[tuple[dict[str, Any], str]] = [
    (
        {},
        "1,000 small files take 1 min 40 s one by one and 5.0 s with 32 threads; the 20,000 files here take "
        "33 min 20 s and 1 min 40 s. Stage it with colabkit.stage('drive:birds', threads=32).",
    ),
    # Without a complete listing, the time for the tree is not estimated.
    (
        {"is_complete": False},
        "1,000 small files take 1 min 40 s one by one and 5.0 s with 32 threads. Stage it with "
        "colabkit.stage('drive:birds', threads=32).",
    ),
    # The sizes of some of the files are sufficient for the estimate.
    (PART, "... 33 min 20 s and 1 min 40 s. ..."),
    # The time for larger files is estimated from their bytes.
    (
        {"sized_bytes": 20_000_000 + 1000 * MIB, "large": large(MIB, 2 * MIB, 4 * MIB, 10 * MIB)},
        "... the 20,000 files here take 35 min 00 s and 3 min 20 s. ...",
    ),
    ({"small": small(1, 4, 15, 20)}, "... save the pack: one large file is read much faster."),
    ({"small": small(100, 101, 99, 100)}, "... more threads do not help; ... threads=1)."),
    ({**LOCAL, "small": small(900, 900, 900, 900)}, "... The folder is fast enough to pack from it directly."),
    ({**LOCAL, "small": small(300, 300, 300, 300)}, "... Stage it with colabkit.stage('drive:birds', threads=1)."),
    (
        {"files": 6, "small": small(10, None, None, None)},
        "1,000 small files take 1 min 40 s one by one. There are too few files to find the best number of threads.",
    ),
    (
        {**ARCHIVE, "large": large(10 * MIB, 20 * MIB, 40 * MIB, 41 * MIB)},
        "The file of 1000 MiB takes 25.0 s in 4 concurrent ranges and 1 min 40 s in one.",
    ),
    (
        {**ARCHIVE, "large": large(10 * MIB, 10 * MIB, 10 * MIB, 10 * MIB)},
        "The file of 1000 MiB takes 1 min 40 s, and more ranges do not help.",
    ),
    ({**ARCHIVE, "large": large(10 * MIB, None, None, None)}, "The file of 1000 MiB takes 1 min 40 s."),
    (
        {**ARCHIVE, "path": "drive:birds.zip", "large": large(10 * MIB, None, None, None)},
        "... Stage it with colabkit.stage('drive:birds.zip'), which reads several ranges concurrently.",
    ),
    ({**NOTHING, "errors": (("EIO", 30),)}, "No file could be read (EIO 30 times). Fix these errors first."),
    ({**NOTHING, "files": 0}, "The folder has no files."),
    ({**NOTHING, "files": 0, "is_complete": False}, "... Allow more time with seconds=."),
    ({**NOTHING, "files": 1, "small_files": 1}, "There are too few files for a recommendation."),
    (NOTHING, "Too few files were read in time for a recommendation. Allow more time with seconds=."),
]


def test_the_recommendation_gives_durations_and_the_next_step() -> None:
    for changes, expected in ADVICE:
        pattern = re.escape(expected).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, make_report(**changes).recommendation), changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fstype": "fuse.drive"}, "colabkit.mount(force=True)"),
        ({"fstype": "fuse.rclone"}, "mount it again"),
        ({"fstype": "ext4", "is_remote": False}, "disk"),
        ({"stall": "listing '/x' did not finish within 4.0 s"}, "very many files"),
    ],
)
def test_the_recommendation_after_a_stall_names_the_operation_and_the_remedy(
    changes: dict[str, Any], words: str
) -> None:
    report = make_report(**{"stalled": True, "stall": "opening '/x' did not finish within 4.0 s", **changes})
    assert report.stall in report.recommendation
    assert words in report.recommendation


def test_rates_of_a_cache_get_a_caveat_except_on_tmpfs() -> None:
    quick, fast = small(1500, 1500, 1500, 1500, quick=15), large(900 * MIB, 3000 * MIB, None, None)
    assert doubt(make_report()) == ""
    assert doubt(make_report(small=small(10, 40, 150, 200, quick=2))) == ""
    assert "15 of 20 small files" in doubt(make_report(small=quick))
    assert doubt(make_report(small=quick, fstype="nfs4")) == ""
    assert "speed of memory" in doubt(make_report(large=fast))
    assert "speed of memory" in doubt(make_report(large=fast, fstype="ext4", is_remote=False))
    assert doubt(make_report(large=fast, fstype="tmpfs", is_remote=False)) == ""


@pytest.mark.parametrize(
    ("ops", "threads", "expected"),
    [
        ([], 2, None),
        ([Op(n, n + 1, 10) for n in range(3)], 1, (1, 10)),
        ([Op(n, n + 1, 10) for n in (0, 0, 1, 1, 2, 2)], 2, (2, 20)),
        # The mount serves one of 32 concurrent reads at a time, so queueing does not raise the rate.
        ([Op(0, n, 1) for n in range(1, 33)], 32, (1, 1)),
        # A straggler does not lower the rate.
        ([Op(n / 10, (n + 1) / 10, 1) for n in range(10)] + [Op(1.0, 30.0, 1)], 2, (10, 10)),
    ],
)
def test_the_rate_is_the_total_of_all_threads(
    ops: list[Op], threads: int, expected: tuple[float, float] | None
) -> None:
    assert rates(ops, 0, threads) == (None if expected is None else pytest.approx(expected))


@given(st.integers(0, 5000))
def test_portions_never_exceed_the_count_and_fill_low_levels_first(count: int) -> None:
    def least(level: int) -> int:
        return 2 * level

    shares = portions(count, SMALL_LEVELS, least, lambda level: 100 * level)
    assert sum(shares) <= count
    for level, own, before in zip(SMALL_LEVELS[1:], shares[1:], shares, strict=False):
        assert own == 0 or (own >= least(level) and before > 0)


def test_unmeasured_levels_and_empty_panels_are_hidden() -> None:
    report = make_report(small=small(10, 40, None, None))
    picture, lines = report._repr_html_(), str(report).splitlines()[-3:-1]
    picture = picture[picture.index("<svg") :]
    # The title and the value of the best bar are bold.
    assert picture.count("font-weight: 700") == 2
    assert "n/a" not in picture + str(report)
    assert "One large file" not in picture
    assert [line.split()[-1] for line in lines] == ["██████", "best"]
    assert "files/s: 10 with 1 thread, 40 with 4 threads<" in picture
    assert "<svg" not in make_report(**NOTHING)._repr_html_()


def test_without_matplotlib_the_bars_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    report = make_report()
    assert "<svg" in report._repr_html_()
    assert report._repr_html_() == report._repr_html_()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = report._repr_html_()
    assert "<svg" not in page
    assert "200  ████████████████████████  best</pre>" in page


def test_the_best_bar_is_explained_because_it_may_not_be_the_longest() -> None:
    report = make_report(small=small(10, 95, 100, 98))
    lines = str(report).splitlines()
    assert next(line for line in lines if line.endswith(" best")).split()[:3] == ["4", "threads", "95"]
    assert lines[-1] == "  best: the fewest threads or ranges that reach 90% of the highest rate"
    assert "the fewest threads or ranges that reach 90% of the highest rate" in report._repr_html_()
    nothing = make_report(**NOTHING)
    assert "the fewest" not in str(nothing) + nothing._repr_html_()


def test_counts_of_one_are_singular() -> None:
    report = make_report(
        files=1, listed_entries=1, small=small(10, None, None, None), large=large(MIB, None, None, None)
    )
    assert "10 files/s with 1 thread, 1.0 MiB/s of one file in 1 range" in repr(report)
    assert "; 1 entry, the whole tree" in str(report)
    assert "; 20,010 entries, the whole tree" in str(make_report())
