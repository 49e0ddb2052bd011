"""The progress bar in terminals, logs and notebooks, and its cleanup."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import warnings

import pytest

from colabkit.foundation import progress
from colabkit.foundation.progress import Progress, ProgressBar, heartbeat, shown_by


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.mark.parametrize(
    ("action", "total", "unit", "done", "text"),
    [
        ("stage", 3, " files", 1, "1/3"),
        ("list", None, " files", 5, "5 files"),
        ("stage", 4 << 20, "B", 1 << 20, "1.00M/4.00M"),
    ],
)
def test_a_terminal_shows_action_count_and_unit_until_the_end(monkeypatch, action, total, unit, done, text):
    shown = terminal(monkeypatch)
    with ProgressBar(action, total, unit) as bar:
        bar.advance(done)
        bar._bar.refresh()
        assert action in shown.getvalue()
        assert text in shown.getvalue()
    assert shown.getvalue().endswith("\r")
    assert "\n" not in shown.getvalue()
    with pytest.raises(KeyboardInterrupt), ProgressBar(action, total, unit):
        raise KeyboardInterrupt
    assert shown.getvalue().endswith("\r")


@pytest.mark.parametrize(("stream", "enabled"), [(io.StringIO, True), (Terminal, False)])
def test_logs_stay_clean_and_a_disabled_bar_shows_nothing(monkeypatch, stream, enabled):
    shown = stream()
    now = [100.0]
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with ProgressBar("stage", 2, " files", enabled=enabled) as bar:
        now[0] += 100
        bar.wait()
        bar.advance(2)
    assert shown.getvalue() == ""


@pytest.mark.parametrize("enabled", [True, False])
def test_a_bar_leaves_no_thread(monkeypatch, enabled):
    terminal(monkeypatch)
    with ProgressBar("stage", 2, " files", enabled=enabled) as bar:
        bar.advance(1)
    assert [thread.name for thread in threading.enumerate() if "tqdm" in type(thread).__module__] == []


def test_a_missing_widget_package_causes_no_warning():
    program = (
        "import sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "sys.modules['ipywidgets'] = None\n"
        "from colabkit.foundation.progress import ProgressBar\n"
        "with ProgressBar('stage', 1, ' files') as bar:\n"
        "    bar.advance(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_users_warning_filters_are_unchanged():
    before = list(warnings.filters)
    with ProgressBar("stage", 1, " files"):
        pass
    assert warnings.filters == before


def test_a_heartbeat_shows_whole_seconds_of_the_timeout(monkeypatch):
    shown = terminal(monkeypatch)
    with heartbeat("upload", 90.0) as tick:
        for passed in (0.2, 0.9, 1.4, 30.0):
            tick(passed)
    assert "upload" in shown.getvalue()
    assert "/90" in shown.getvalue()


def test_files_and_retries_are_shown_beside_the_bytes(monkeypatch):
    shown = terminal(monkeypatch)
    monkeypatch.setattr(progress, "_REDRAWN_S", -1.0)
    with ProgressBar("stage", 4 << 20, "B", files=2000) as bar:
        bar.retried(3)
        bar.advance(1 << 20, files=1234)
        bar._bar.refresh()
        assert "1,234/2,000 files, 3 retries" in shown.getvalue()


def test_a_bar_shows_the_time_without_progress(monkeypatch):
    shown = terminal(monkeypatch)
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with ProgressBar("stage", 10, "B") as bar:
        bar.wait()
        assert "no progress for" not in shown.getvalue()
        now[0] += 12.5
        bar.wait()
        assert "no progress for 12" in shown.getvalue()
        bar.advance(1)
        bar._bar.refresh()
        assert "no progress for" not in shown.getvalue().rpartition("\r")[2]


def test_a_custom_display_gets_the_progress_instead_of_tqdm(monkeypatch):
    shown, reported = terminal(monkeypatch), []
    monkeypatch.setattr(progress, "_REDRAWN_S", -1.0)
    with shown_by(reported.append), ProgressBar("stage", 4 << 20, "B", files=20) as bar:
        bar.retried(1)
        bar.advance(1 << 20, files=5)
        bar.advance(1 << 20, files=5)
    assert shown.getvalue() == ""
    assert [one and (one.action, one.done, one.total, one.unit, one.note) for one in reported] == [
        ("stage", 0, 4 << 20, "B", ""),
        ("stage", 1 << 20, 4 << 20, "B", "5/20 files, 1 retry"),
        ("stage", 2 << 20, 4 << 20, "B", "10/20 files, 1 retry"),
        None,
    ]
    assert all(one.seconds >= 0 for one in reported if one)
    with ProgressBar("stage", 2, " files") as bar:
        bar._bar.refresh()
    assert "stage" in shown.getvalue()


def test_a_custom_display_is_updated_only_a_few_times_per_second(monkeypatch):
    now, reported = [100.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with shown_by(reported.append), ProgressBar("pack", None, " samples") as bar:
        for _ in range(1000):
            now[0] += 0.001
            bar.advance(1)
        assert 4 <= len(reported) <= 6
        now[0] += 10.0
        bar.wait()
    assert reported[-2] == Progress("pack", 1000, None, " samples", "no progress for 10.0 s", pytest.approx(11.0))


def test_disabled_bars_and_heartbeats_work_with_a_custom_display(monkeypatch):
    reported = []
    with shown_by(reported.append):
        with ProgressBar("stage", 2, " files", enabled=False) as bar:
            bar.advance(1)
        assert reported == []
        with heartbeat("probe", 8.0) as tick:
            tick(2.5)
    assert reported[0] == Progress("probe", 0, 8, " s", "", pytest.approx(0, abs=1))
    assert reported[-1] is None
