"""`status()` and `dashboard(attach=)` show runs in other processes, and how to resume dead ones."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from magic_shells import loaded_shell
from panel_states import Frames, render
from trainings import train

import colabkit
from colabkit.errors import InvalidOption, SourceMissing
from colabkit.foundation import partials
from colabkit.loading import Loader
from colabkit.monitoring.attaching import RunWatch
from colabkit.monitoring.diagnosing.verdict import Doctor
from colabkit.monitoring.panel import attached
from colabkit.notebook.command_line import main

ELSEWHERE = "00000000-7-1"
"""The owner of a status that was written on another machine."""

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m"


def train_for(folder: Path, epochs: int = 1) -> None:
    train(
        lambda batch: {"loss": 0.5}, Loader([[1.0], [2.0]], 1), epochs=epochs, to=folder, validate=lambda: {"loss": 2}
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train_for(folder, 3)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder of a finished run."""
    for file in finished.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder: Path, **values: Any) -> Path:
    """Change values of a status, which by default has just been written by a run that is training."""
    path = folder / "status.json"
    former = json.loads(path.read_bytes())
    now = {"state": "training", "written_s": time.time(), "step_in_epoch": 1, "epoch": 1, "step": 3}
    path.write_text(json.dumps({**former, **now, **values}))
    return folder


def test_a_finished_run_and_its_values_are_shown(folder: Path) -> None:
    report = colabkit.status(folder)
    (run,) = report.runs
    assert (run.state, run.is_good, run.epoch, run.step, run.checkpoint_step) == ("finished", True, 3, 2, 6)
    assert str(report) == f"{str(folder)!r}: finished; epoch 3/3, step 2/2, loss 0.5, val_loss 2"


STATES: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    ({"owner": partials.owner()}, "running", "running", ""),
    ({"owner": partials.owner(), "state": "validating"}, "running", "running, validating", ""),
    ({"owner": partials.owner(), "waiting_s": 60.0}, "running", "running, waiting for data for 1 min 00 s", ""),
    ({"owner": partials.owner(), "written_s": 1.0}, "silent", "exists, but has not reported for", "If its process no"),
    ({"owner": f"{partials.owner()}0"}, "dead", "ended without a final report", "again to resume from step 6"),
    ({"owner": ELSEWHERE}, "running", "by the clock of this machine", ""),
    ({"owner": ELSEWHERE, "written_s": 1.0}, "silent", "ago by the clock", "If its process no longer exists, start"),
    ({"owner": ELSEWHERE, "written_s": 1e12}, "silent", "in the future by the clock", "If its process no"),
    ({"state": "stopped", "reason": "Ctrl-C"}, "stopped", "stopped by Ctrl-C", "Start the same training again"),
    ({"state": "failed", "reason": "ValueError: no"}, "failed", "failed: ValueError: no", "resume from step 6"),
    ({"format": 2}, "unknown", "its format is 2; expected format 1. Install the version", ""),
    ({"epoch_count": "many"}, "unknown", "the file is damaged", ""),
)


def test_the_state_of_a_run_and_how_to_resume_it(folder: Path) -> None:
    original = (folder / "status.json").read_bytes()
    for values, state, message, advice in STATES:
        (folder / "status.json").write_bytes(original)
        (run,) = colabkit.status(change(folder, **values)).runs
        assert run.state == state, values
        assert message in run.message
        assert advice in run.advice
        assert run.is_good == (state in ("running", "finished"))
        assert bool(advice) == bool(run.advice) or state == "unknown"
    for text in (b"", b"{", b"[]", b"null", b"\xff"):
        (folder / "status.json").write_bytes(text)
        assert "the file is damaged" in colabkit.status(folder).runs[0].message
    (folder / "status.json").unlink()
    (run,) = colabkit.status(folder).runs
    assert (run.state, run.checkpoint_step) == ("unknown", 6)


def test_on_another_machine_a_run_is_alive_if_its_status_changes_whatever_the_clocks_say(folder: Path) -> None:
    now_s = 100.0
    watch = RunWatch(change(folder, owner=ELSEWHERE, written_s=1e9), clock=lambda: now_s)
    assert (watch.look().state, watch.is_certain) == ("silent", False)
    change(folder, owner=ELSEWHERE, written_s=1e9, beat=50)
    now_s += 10
    assert (watch.look().state, watch.is_certain) == ("running", True)
    now_s += 60
    assert watch.look().state == "running", "Drive shows changes late"
    now_s += 20
    assert "has not reported for 1 min 20 s, so it is probably dead" in watch.look().message
    (folder / "status.json").write_bytes(b"")
    now_s += 1
    assert watch.look().state == "silent", "an unreadable file does not hide the last status"


def test_a_folder_of_runs_shows_each_and_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    for name in ("b", "a"):
        train_for(tmp_path / name)
    (tmp_path / "other").mkdir()
    report = colabkit.status(tmp_path)
    assert [run.folder.name for run in report.runs] == ["a", "b"]
    assert len(str(report).splitlines()) == len(report._rows()) == 2
    with pytest.raises(InvalidOption, match="there are 2 runs in"):
        colabkit.dashboard(attach=tmp_path, screen="none")
    for nowhere in (tmp_path / "other", tmp_path / "missing"):
        with pytest.raises(SourceMissing, match="there is no run in this folder or its subfolders"):
            colabkit.status(nowhere)


def test_of_several_runs_in_the_folder_of_train_on_the_panel_of_the_live_one_is_shown(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, live = (tmp_path / "birds-12ab" / f"run-{number}" / "checkpoints" for number in (1, 2))
    for one in (old, live):
        shutil.copytree(finished, one)
    change(live, owner=partials.owner())
    assert [run.state for run in colabkit.status(tmp_path).runs] == ["finished", "running"]
    monkeypatch.setattr(attached.time, "sleep", lambda _: change(live, state="finished"))
    (shown,) = colabkit.dashboard(attach=tmp_path, screen="none").runs
    assert (shown.folder, shown.state) == (live, "finished")


def test_the_panel_of_another_process_shows_the_same_run_and_when_it_is_dead(folder: Path) -> None:
    def shown(**values: Any) -> tuple[str, str]:
        watch = RunWatch(change(folder, **values))
        found = watch.look()
        assert watch.saved is not None
        return render(attached.panel_state(watch.saved, found, Doctor()))

    html, text = shown(owner=partials.owner(), written_s=86_400.0, every_s=1e9)
    assert "epoch 2/3 · step 1/2" in text
    assert "validation 2 ███ (best validation: 2 in epoch 1)" in text
    assert "updated 2 Jan 00:00:00 UTC" in text
    _, text = shown(owner=f"{partials.owner()}0")
    assert text.startswith("Dead: process")
    assert "Start the same training again to resume from step 6" in text
    _, text = shown(owner=f"{partials.owner()}0", host="a-virtual-machine-with-a-long-name.europe-west4.internal")
    assert "to resume from step 6" in text.splitlines()[0], "the step is shown for a host with any usual name"
    html, text = shown(owner=f"{partials.owner()}0", host=HOSTILE, values={HOSTILE: 1.0}, reason=HOSTILE)
    assert "<img src=x" not in html
    assert "\x1b[31m" not in html + text


def test_an_attached_panel_ends_with_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Frames()
    watch = RunWatch(change(folder, owner=partials.owner()))

    def end(seconds: float) -> None:
        change(folder, state="finished", epoch=3)

    monkeypatch.setattr(attached.time, "sleep", end)
    assert attached.show_run(watch, screen, 0.5).state == "finished"
    assert [final for _, _, final in screen.frames] == [False, True]
    assert screen.is_closed

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attached.time, "sleep", interrupt)
    change(folder, owner=partials.owner())
    assert attached.show_run(watch, None, 0.5).state == "running", "Ctrl-C ends the display, not the run"
    change(folder, state="finished")
    assert colabkit.dashboard(attach=folder, screen="none").runs[0].state == "finished"


def test_a_command_and_a_magic_show_the_status_and_the_panel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(folder)]) == 0
    assert "finished; epoch 3/3, step 2/2" in capsys.readouterr().out
    assert main(["status", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["step"] == 2
    assert main(["dashboard", "--attach", str(folder)]) == 0
    assert "step 2/2" in capsys.readouterr().out
    with loaded_shell() as shell:
        assert shell.run_cell(f"%status {folder}").result.runs[0].state == "finished"
        capsys.readouterr()
        shell.run_cell(f"%dashboard --attach {folder}").raise_error()
    assert "step 2/2" in capsys.readouterr().out
