"""The progress of operations in terminals, logs and notebooks, during the operation and afterwards."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import IPython
import IPython.display
import pytest

from colabkit.foundation import progress, screens
from colabkit.foundation.progress import Progress, ProgressBar, Show, heartbeat, offer_view


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of bars and screens; return a list with one number, the current time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Run the test in a kernel without ipywidgets; return a list of later displays."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setattr(IPython.display, "display", lambda bundle, **options: found.append(bundle))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    return found


@pytest.mark.parametrize(
    ("action", "total", "unit", "done", "text"),
    [
        ("stage", 3, " files", 1, "stage: 33%, 1/3 files, 1 files/s, 2.0 s left"),
        ("list", None, " files", 5, "list: 5 files, 5 files/s"),
        ("stage", 4 << 20, "B", 1 << 20, "stage: 25%, 1.0 of 4.0 MiB, 1.0 MiB/s, 3.0 s left"),
        ("stage", 0, "B", 0, "stage: 0 B"),
    ],
)
def test_a_terminal_shows_action_count_speed_and_remaining_time_until_the_end(
    monkeypatch, now, action, total, unit, done, text
):
    shown = terminal(monkeypatch)
    with ProgressBar(action, total, unit) as bar:
        now[0] += 1.0
        bar.advance(done)
        assert shown.getvalue().endswith(f"{text}\n")
    assert shown.getvalue().endswith("\x1b[1F\x1b[J")
    with pytest.raises(KeyboardInterrupt):
        interrupted(ProgressBar(action, total, unit), now)
    assert shown.getvalue().endswith("\x1b[1F\x1b[J")


def interrupted(bar, now):
    with bar:
        now[0] += 1.0
        bar.advance(1)
        raise KeyboardInterrupt


def test_short_operations_show_nothing(monkeypatch, now, displayed):
    shown = terminal(monkeypatch)
    for is_notebook in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(screens, "_fitting", lambda stream, name="notebook" if is_notebook else "text": name)
            with ProgressBar("pack", 10, " samples") as bar:
                for _ in range(10):
                    now[0] += 0.04
                    bar.advance(1)
    assert (shown.getvalue(), displayed) == ("", [])


def test_a_log_gets_a_line_every_10_s_in_the_first_minute_and_few_afterwards(monkeypatch, now):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with ProgressBar("stage", 36_000, " files") as bar:
        for _ in range(3600):
            now[0] += 1.0
            bar.advance(10)
    lines = log.getvalue().splitlines()
    assert lines[0] == "stage: 0.3%, 100/36,000 files, 10 files/s, 59 min 50 s left"
    assert [line.split(",")[1].split("/")[0] for line in lines[:3]] == [" 100", " 200", " 300"]
    assert len(lines) == 11
    assert len(log.getvalue()) < 2000


def test_a_disabled_bar_shows_nothing(monkeypatch, now):
    shown = terminal(monkeypatch)
    with ProgressBar("stage", 2, " files", enabled=False) as bar:
        now[0] += 100
        bar.wait()
        bar.advance(2)
    monkeypatch.setenv("COLABKIT_SCREEN", "none")
    with ProgressBar("stage", 2, " files") as bar:
        now[0] += 100
        bar.advance(2)
    assert shown.getvalue() == ""


def test_a_notebook_without_widgets_shows_a_bar_and_keeps_one_line_of_text(now, displayed):
    with ProgressBar("stage", 4 << 20, "B", files=20) as bar:
        for _ in range(2):
            now[0] += 2.0
            bar.advance(1 << 20, files=5)
    *live, last = displayed
    assert len(live) == 2
    assert '<progress value="0.500"' in live[-1]["text/html"]
    assert "stage: 50%, 2.0 of 4.0 MiB, 10/20 files, 512 KiB/s, 4.0 s left" in live[-1]["text/html"]
    assert last == {
        "text/html": "<div>stage: 2.0 of 4.0 MiB in 4.0 s</div>",
        "text/plain": "stage: 2.0 of 4.0 MiB in 4.0 s",
    }


def test_names_are_shown_as_text(now, displayed):
    with ProgressBar("fetch <b>", None, "B") as bar:
        now[0] += 2.0
        bar.advance(1)
    assert all("<b>" not in bundle["text/html"] for bundle in displayed)


def test_only_the_thread_of_the_cell_draws(now, displayed):
    with ProgressBar("stage", 4, " files") as bar:
        for _ in range(3):
            now[0] += 2.0
            other = threading.Thread(target=bar.advance, args=(1,))
            other.start()
            other.join()
            assert displayed == []
        bar.wait()
        assert "3/4 files" in displayed[0]["text/plain"], "even if another thread has just advanced"
        now[0] += 2.0
        bar.advance(1)
    assert "4/4 files" in displayed[1]["text/plain"]


def test_a_broken_front_end_does_not_stop_the_operation(monkeypatch, now, displayed):
    monkeypatch.setattr(IPython.display, "display", lambda bundle, **options: 1 / 0)
    with ProgressBar("stage", 4, " files") as bar:
        for _ in range(4):
            now[0] += 2.0
            bar.advance(1)


def test_neither_widgets_nor_ipython_nor_marimo_are_imported():
    program = (
        "import sys\n"
        "from colabkit.foundation.progress import ProgressBar\n"
        "with ProgressBar('stage', 1, ' files') as bar:\n"
        "    bar.advance(1)\n"
        "print({'IPython', 'ipywidgets', 'marimo', 'tqdm'} & {*sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_heartbeat_shows_whole_seconds_of_the_timeout(monkeypatch, now):
    shown = terminal(monkeypatch)
    with heartbeat("upload", 90.0) as tick:
        for passed in (0.2, 0.9, 1.4, 30.0):
            now[0] = 100.0 + passed
            tick(passed)
    assert "upload: 33%, 30/90 s\n" in shown.getvalue()


def test_files_and_retries_are_shown_beside_the_bytes(monkeypatch, now):
    shown = terminal(monkeypatch)
    with ProgressBar("stage", 4 << 20, "B", files=2000) as bar:
        bar.retried(3)
        now[0] += 1.0
        bar.advance(1 << 20, files=1234)
        assert "1,234/2,000 files, 3 retries" in shown.getvalue()


def test_a_bar_shows_the_time_without_progress(monkeypatch, now):
    shown = terminal(monkeypatch)
    with ProgressBar("stage", 10, "B") as bar:
        bar.wait()
        assert "no progress for" not in shown.getvalue()
        now[0] += 12.5
        bar.wait()
        assert "no progress for 12" in shown.getvalue()
        now[0] += 1.0
        bar.advance(1)
        assert "no progress for" not in shown.getvalue().rpartition("\x1b[J")[2]


@contextlib.contextmanager
def shown_by(show: Show) -> Iterator[None]:
    stop = offer_view(lambda: show)
    yield
    stop()


def test_a_custom_display_gets_the_progress_instead_of_a_bar(monkeypatch, now):
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
        now[0] += 1.0
        bar.advance(1)
    assert "stage" in shown.getvalue()


def test_a_custom_display_is_updated_only_a_few_times_per_second(now):
    reported = []
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
