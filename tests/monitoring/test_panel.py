"""The panel during loops and runs: it is painted by one thread and never stops a run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from panel_states import HOST, FakeTime, Frames, Machine, machine
from torch.utils.data import DataLoader, TensorDataset
from trainings import train
from trees import make_tree

import colabkit
from colabkit.errors import InvalidOption
from colabkit.foundation import Frame, LoaderMeters, meters
from colabkit.monitoring.diagnosing.verdict import Doctor
from colabkit.monitoring.panel.api import Dashboard, is_any_open, show_beside_training


@pytest.fixture
def loader() -> colabkit.Loader:
    return colabkit.Loader((np.zeros((24, 2), np.float32), np.zeros(24, np.int64)), 4)


def test_the_panel_runs_during_a_plain_loop_and_ends_with_one_final_frame(loader: colabkit.Loader) -> None:
    screen = Frames()
    with Dashboard(screen, machine=machine):
        assert screen.frames == [], "nothing is to be shown yet"
        for number, _ in enumerate(loader):
            assert number or len(screen.frames) == 1, "it is there with the first batch"
    assert [final for _, _, final in screen.frames].count(True) == 1
    assert screen.frames[-1][2]
    assert "epoch 1 · step 6/6" in screen.frames[-1][1]
    assert f"RAM 6.0 of {HOST.ram_total_bytes >> 30}.0 GiB" in screen.frames[-1][1]
    assert "Training panel" in screen.frames[-1][0]
    assert screen.is_closed
    assert not is_any_open()
    assert not meters.listeners


def test_the_panel_follows_training_that_begins_with_a_validation_as_with_lightning(loader: colabkit.Loader) -> None:
    screen = Frames()
    held_out = colabkit.Loader((np.zeros((8, 2), np.float32), np.zeros(8, np.int64)), 4)
    with Dashboard(screen, machine=machine):
        for _ in range(3):
            with torch.no_grad():
                assert len(list(held_out)) == 2
            assert len(list(loader)) == 6
        with torch.no_grad():
            assert len(list(held_out)) == 2
    assert "epoch 1 · step 0/2" in screen.frames[0][1], "the validation is shown while there is nothing else"
    assert "epoch 3 · step 6/6" in screen.frames[-1][1]


def test_the_panel_stays_with_training_after_an_evaluation_of_the_same_loader(loader: colabkit.Loader) -> None:
    screen = Frames()
    held_out = colabkit.Loader((np.zeros((8, 2), np.float32), np.zeros(8, np.int64)), 4)
    with Dashboard(screen, machine=machine):
        assert len(list(loader)) == 6
        with torch.no_grad():
            assert len(list(loader)) == 6
        assert len(list(held_out)) == 2
    assert "epoch 2 · step 6/6" in screen.frames[-1][1]


def test_the_panel_runs_during_training(loader: colabkit.Loader) -> None:
    screen = Frames()
    with Dashboard(screen, machine=machine):
        train(lambda batch: 0.25, loader, epochs=2)
    assert "epoch 2/2 · step 6/6" in screen.frames[-1][1]
    assert "Loss training 0.25 " in screen.frames[-1][1]


def test_training_and_validation_are_shown_with_different_names(loader: colabkit.Loader) -> None:
    screen = Frames()
    with Dashboard(screen, machine=machine):
        step = lambda batch: {"loss": 0.25, "accuracy": 0.9}  # noqa: E731
        train(step, loader, epochs=3, validate=lambda: {"loss": 0.5, "accuracy": 0.8, "auc": 0.7})
    html, text, _ = screen.frames[-1]
    assert re.search(
        r"^  Loss training 0\.25 ▁+, validation 0\.5 █+ \(best validation: 0\.5 in epoch 1\)$", text, re.MULTILINE
    )
    assert re.search(r"^  Accuracy training 0\.9 █+, validation 0\.8 ▁+", text, re.MULTILINE)
    assert "auc 0.7" in text
    assert html.count("validation</span> <b>0.") == 2


def test_staging_and_packing_are_shown_in_place_of_bars_and_training_after_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Frames()
    make_tree(tmp_path / "photos", 2)
    with Dashboard(screen, refresh_s=0.0, machine=machine, work_after_s=0.0):
        local = colabkit.stage(tmp_path / "photos", to=tmp_path / "near").path
        data = colabkit.prepare(local, to=None)["train"]
        said = [text.splitlines()[0] for _, text, _ in screen.frames]
        assert said.index("Copying files to this machine") < said.index("Packing samples into one file")
        assert "CPU 93%" in screen.frames[-1][1]
        train(lambda batch: 0.5, colabkit.Loader(data, 4))
    assert "epoch 1/1" in screen.frames[-1][1]
    assert capsys.readouterr().err == "", "no bars"


def test_after_a_run_operations_leave_its_panel_unchanged(loader: colabkit.Loader, tmp_path: Path) -> None:
    screen = Frames()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.txt").write_text("a")
    with Dashboard(screen, machine=machine):
        train(lambda batch: 0.5, loader)
        colabkit.stage(tmp_path / "photos", to=tmp_path / "near")
    assert "epoch 1/1 · step 6/6" in screen.frames[-1][1]


def test_the_panel_runs_during_a_loop_over_a_watched_data_loader() -> None:
    screen = Frames()
    watched = colabkit.watch(DataLoader(TensorDataset(torch.zeros(80, 2)), batch_size=1))
    with Dashboard(screen, machine=machine):
        for _ in watched:
            pass
    text = screen.frames[-1][1]
    assert "epoch 1 · step 80/80" in text
    assert "waiting for data" in text


def test_two_runs_in_one_block_are_shown_one_after_the_other(loader: colabkit.Loader) -> None:
    screen, doctors = Frames(), []

    def doctor() -> Doctor:
        doctors.append(Doctor())
        return doctors[-1]

    with Dashboard(screen, machine=machine, doctor=doctor):
        train(lambda batch: 0.5, loader, epochs=1)
        assert "epoch 1/1 · step 6/6" in screen.frames[-1][1]
        train(lambda batch: 0.125, loader, epochs=3)
    assert "epoch 3/3 · step 6/6" in screen.frames[-1][1]
    assert "training 0.125 " in screen.frames[-1][1]
    assert len(doctors) == 3, "one for each run, and one for what was before"


def test_the_panel_shows_how_long_it_has_waited_for_data() -> None:
    screen, time, counts = Frames(), FakeTime(), LoaderMeters()
    with Dashboard(screen, machine=machine, clock=time, cpu_clock=time):
        meters.publish(meters.EpochStarted(counts, 0, 10, 40))
        for _ in range(12):
            time.now_s += 0.25
            meters.publish(meters.DataWait(counts, time.now_s - 1000))
    said = [text.splitlines()[0] for _, text, _ in screen.frames]
    assert [line for line in said if "Waiting" in line] == [
        f"Waiting for data for {seconds} s" for seconds in (1, 2, 3)
    ]


def test_a_failing_screen_is_replaced_by_text_once_and_training_continues(
    loader: colabkit.Loader, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    class BrokenFrames(Frames):
        def paint(self, frame: Frame, final: bool) -> None:
            super().paint(frame, final)
            raise OSError("no front end")

    screen = BrokenFrames()
    with Dashboard(screen, machine=machine):
        report = train(lambda batch: 0.5, loader)
    assert report.epochs[0].samples == 24
    assert len(screen.frames) == 1
    assert screen.is_closed
    assert caplog.text.count("so it is shown as text") == 1
    assert capsys.readouterr().out.count("epoch 1/1 · step 6/6") == 1


def test_training_continues_if_a_screen_cannot_be_closed(
    loader: colabkit.Loader, caplog: pytest.LogCaptureFixture
) -> None:
    class StuckFrames(Frames):
        def close(self) -> None:
            raise OSError("no front end")

    with Dashboard(StuckFrames(), machine=machine):
        list(loader)
    assert "cannot be closed" in caplog.text
    assert not is_any_open()


def test_without_any_working_screen_there_is_no_panel_and_training_continues(
    loader: colabkit.Loader, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "recent", lambda machine, seconds: 1 / 0)
    with Dashboard(Frames(), machine=machine):
        report = train(lambda batch: 0.5, loader)
    assert report.epochs[0].samples == 24
    assert caplog.text.count("so it is closed") == 1


def test_an_error_of_the_loop_is_shown_and_passes_through(loader: colabkit.Loader) -> None:
    screen = Frames()
    with pytest.raises(ZeroDivisionError), Dashboard(screen, machine=machine):
        train(lambda batch: 1 / 0, loader)
    assert "stopped by ZeroDivisionError" in screen.frames[-1][1]


def test_ctrl_c_leaves_a_final_frame(loader: colabkit.Loader) -> None:
    screen = Frames()
    with pytest.raises(KeyboardInterrupt), Dashboard(screen, machine=machine):
        [signal.raise_signal(signal.SIGINT) for _ in loader]
    assert screen.frames[-1][2]
    assert "interrupted · epoch 1 · step 1/6" in screen.frames[-1][1]


def test_ctrl_c_during_painting_passes_through_and_releases_everything(loader: colabkit.Loader) -> None:
    class LateInterrupt(Frames):
        def paint(self, frame: Frame, final: bool) -> None:
            super().paint(frame, final)
            if final or "step 6/6" in frame.text:
                raise KeyboardInterrupt

    screen = LateInterrupt()
    with pytest.raises(KeyboardInterrupt), Dashboard(screen, machine=machine):
        train(lambda batch: 0.5, loader)
    assert screen.is_closed
    assert not is_any_open()
    assert not meters.listeners


def test_only_the_thread_that_opened_the_panel_paints(loader: colabkit.Loader) -> None:
    screen, time, painters = Frames(), FakeTime(), set()
    paint = screen.paint
    screen.paint = lambda *frame: (painters.add(threading.get_ident()), paint(*frame))
    with Dashboard(screen, machine=machine, clock=time, cpu_clock=time):
        time.now_s += 100
        other = threading.Thread(target=lambda: list(loader))
        other.start()
        other.join()
        assert screen.frames == []
    assert len(screen.frames) == 1
    assert "step 6/6" in screen.frames[-1][1]
    assert painters == {threading.get_ident()}


def test_the_panel_leaves_no_thread_and_no_descriptor_behind(loader: colabkit.Loader) -> None:
    def held() -> tuple[set[threading.Thread], list[str]]:
        return set(threading.enumerate()), os.listdir("/proc/self/fd")

    with Dashboard(Frames()):
        list(loader)
    threads, descriptors = held()
    with Dashboard(Frames()):
        list(loader)
        assert any(thread.name == "colabkit-telemetry" for thread in threading.enumerate())
    assert held() == (threads, descriptors)


def test_the_panel_opens_and_closes_itself_during_training_and_names_the_error_that_stopped_it(
    loader: colabkit.Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = show_beside_training()
    try:
        train(lambda batch: 0.5, loader)
        assert capsys.readouterr().out.count("epoch 1/1, step 6/6") == 1
        with colabkit.dashboard(screen="none"):
            train(lambda batch: 0.5, loader)
        assert capsys.readouterr().out == "", "one panel is enough, and none is none"
        with pytest.raises(ZeroDivisionError):
            train(lambda batch: 1 / 0, loader)
    finally:
        stop()
    assert "stopped by ZeroDivisionError" in capsys.readouterr().out
    assert not meters.listeners
    assert not is_any_open()


def test_a_nested_training_leaves_the_panel_of_the_outer_one_open(
    loader: colabkit.Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def step(batch: object) -> float:
        if not seen:
            train(lambda inner: 0.5, colabkit.Loader(loader.dataset, 4))
        seen.append(is_any_open())
        return 0.5

    stop = show_beside_training()
    try:
        train(step, loader)
    finally:
        stop()
    assert seen == [True] * 6
    assert len([line for line in capsys.readouterr().out.splitlines() if "epoch 1/1" in line]) == 1
    assert not is_any_open()


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_nested_training_is_not_shown_on_the_panel_of_the_outer_one(
    loader: colabkit.Loader, is_failing: bool
) -> None:
    screen, within = Frames(), colabkit.Loader(loader.dataset, 8)

    def step(batch: object) -> float:
        with contextlib.suppress(ZeroDivisionError):
            train(lambda inner: 1 / (not is_failing), within, epochs=3)
        return 0.25

    with Dashboard(screen, machine=machine):
        train(step, loader, epochs=2)
        assert "epoch 2/2 · step 6/6" in screen.frames[-1][1]
        assert "Loss training 0.25 " in screen.frames[-1][1]
        train(lambda batch: 0.125, loader, epochs=1)
    assert "epoch 1/1 · step 6/6" in screen.frames[-1][1]
    assert "loss 0.125" in screen.frames[-1][1]
    assert not [text for _, text, _ in screen.frames if "stopped by" in text or "/3 " in text]


def test_a_training_that_is_interrupted_while_it_starts_does_not_count_as_running(loader: colabkit.Loader) -> None:
    class EarlyInterrupt(Frames):
        def paint(self, frame: Frame, final: bool) -> None:
            super().paint(frame, final)
            if len(self.frames) == 1:
                raise KeyboardInterrupt

    screen = EarlyInterrupt()
    with Dashboard(screen, machine=machine):
        with pytest.raises(KeyboardInterrupt):
            train(lambda batch: 0.5, loader)
        train(lambda batch: 0.125, loader, epochs=2)
    assert "epoch 2/2 · step 6/6" in screen.frames[-1][1]


def test_a_panel_can_be_shown_again_and_restarts_its_count_of_runs(loader: colabkit.Loader) -> None:
    screen = Frames()
    panel = Dashboard(screen, machine=machine)
    with panel:
        meters.publish(meters.RunStarted(LoaderMeters(), 1, 6, None))
    with panel:
        train(lambda batch: 0.5, loader, epochs=2)
        assert panel.has_heard
    assert "epoch 2/2 · step 6/6" in screen.frames[-1][1]
    assert [final for _, _, final in screen.frames].count(True) == 2
    with panel:
        pass
    assert not panel.has_heard, "of what was before it was entered"


def test_a_panel_that_shows_nothing_and_one_without_a_loop_do_nothing(loader: colabkit.Loader) -> None:
    def never() -> None:
        raise AssertionError

    with Dashboard(None, machine=never, doctor=never):
        assert is_any_open()
        assert not meters.listeners
        list(loader)
    assert not is_any_open()
    screen = Frames()
    with Dashboard(screen, machine=never):
        pass
    assert screen.frames == []
    assert screen.is_closed


def test_the_inner_one_of_nested_panels_is_shown(loader: colabkit.Loader) -> None:
    outer, inner = Frames(), Frames()
    with Dashboard(outer, machine=machine):
        with Dashboard(inner, machine=machine):
            list(loader)
        assert outer.frames == []
        with colabkit.dashboard(screen="none"):
            list(loader)
        assert outer.frames == []
        list(loader)
    assert "epoch 1 · step 6/6" in inner.frames[-1][1]
    assert "epoch 3 · step 6/6" in outer.frames[-1][1]


def test_training_continues_if_the_machine_cannot_be_sampled(
    loader: colabkit.Loader, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenMachine(Machine):
        def __enter__(self) -> Machine:
            raise OSError

        def __exit__(self, *error: object) -> None:
            raise AssertionError

    screen = Frames()
    with Dashboard(screen, machine=BrokenMachine):
        assert len(list(loader)) == 6
    assert "was removed; the run continues" in caplog.text
    assert screen.frames == []
    assert not is_any_open()
    assert screen.is_closed


def test_the_interval_between_frames_may_be_text() -> None:
    assert colabkit.dashboard(refresh_s="1min", screen="none")._refresh_s == 60


def test_invalid_options_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for refresh_s in (0, 0.1, float("nan"), "1", "0.1s", None, True):
        message = f"^Cannot show the panel: refresh_s={refresh_s!r}; expected a duration of 0.5 or more in seconds"
        with pytest.raises(InvalidOption, match=message):
            colabkit.dashboard(refresh_s=refresh_s)
    with pytest.raises(InvalidOption, match="'window'"):
        colabkit.dashboard(screen="window")
    monkeypatch.setenv("COLABKIT_SCREEN", "window")
    with pytest.raises(InvalidOption, match="COLABKIT_SCREEN"):
        colabkit.dashboard()
    colabkit.dashboard(screen="lines")
