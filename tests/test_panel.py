"""The panel: a pure picture, a recorder of events, screens, and a run that it can never stop."""

from __future__ import annotations

import io
import re
import threading
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import colabkit
from colabkit import meters
from colabkit.errors import InvalidOption
from colabkit.panel import Dashboard, show_beside_training
from colabkit.panel.render import BLUE, GREEN, GREY, VERMILION, render
from colabkit.panel.screens import NotebookScreen, NullScreen, TerminalScreen, choose_screen
from colabkit.panel.state import PanelState, Recorder
from colabkit.telemetry import GpuSnapshot, HostSnapshot

HOST = HostSnapshot(0.5, 3 << 30, 12 << 30, 1e6, (GpuSnapshot("T4", 0.9, 5 << 30, 15 << 30),))
STATE = PanelState(
    phase="running",
    epoch=2,
    epochs=3,
    step=14,
    steps_per_epoch=23,
    elapsed_s=12.0,
    remaining_s=8.0,
    wait_share=0.25,
    images_per_s=1234.0,
    gathered_bytes_per_s=3e6,
    occupancy_rate=0.5,
    values={"loss": 0.5, "accuracy": 0.75},
    speed_curve=(1.0, 3.0, 2.0),
    loss_curve=(2.0, 1.0, 0.5),
    gpu_curve=(0.2, 0.9),
    host=HOST,
    cost_share=0.002,
)
EMPTY = PanelState(phase="starting")


class Tags(HTMLParser):
    """Collects tags and checks that they close in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs) -> None:
        self.tags.append(tag)
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("state", [STATE, EMPTY, replace(STATE, host=None), replace(STATE, values={}, loss_curve=())])
def test_every_frame_is_whole_small_and_safe_where_scripts_and_styles_are_stripped(state: PanelState) -> None:
    html, text = render(state)
    assert set(Tags(html).tags) <= {"div", "span", "img", "strong"}
    assert len(html) < 8000
    assert len(text.splitlines()) == 7
    assert all(len(line) <= 110 for line in text.splitlines())


def test_unknown_is_not_drawn_as_zero() -> None:
    html, text = render(EMPTY)
    assert "waiting for data n/a" in text
    assert "0%" not in text
    assert "waiting for data n/a" in html


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (EMPTY, "Warming up"),
        (replace(STATE, wait_share=0.01), "Data keeps up: 1.0% of the time waiting"),
        (replace(STATE, wait_share=0.1), "Data slows training: 10% of the time waiting"),
        (STATE, "Training waits for data: 25% of the time"),
        (replace(STATE, phase="waiting", waiting_s=3.2), "Waiting for data since 3.2 s"),
        (replace(STATE, phase="finished", wait_share=0.01), "Data kept up: 1.0% of the time waiting"),
        (
            replace(STATE, phase="stopped", stopped_by="KeyboardInterrupt"),
            "Stopped by KeyboardInterrupt. Training waited",
        ),
        (replace(EMPTY, phase="finished"), "Finished"),
    ],
)
def test_the_first_line_is_the_verdict(state: PanelState, sentence: str) -> None:
    html, text = render(state)
    assert text.splitlines()[0].startswith(sentence)
    assert f">{sentence}" in html


def test_names_are_never_html() -> None:
    html, _ = render(replace(STATE, values={"<img src=x onerror=alert(1)>": 1.0}, stopped_by="<b>"))
    assert "<img src=x" not in html
    assert "&lt;img src=x" in html


def test_curves_have_words_for_those_who_cannot_see_them() -> None:
    html, _ = render(STATE)
    assert re.search(r'<img alt="Loss from 2 to 0.5, between 0.5 and 2" src="data:image/svg\+xml;base64,', html)
    assert 'aria-label="waiting for data 25%, the step itself 75%"' in html


def luminance(color: str) -> float:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", [BLUE, VERMILION, GREEN, GREY])
@pytest.mark.parametrize("background", ["#ffffff", "#131314"])
def test_colours_are_seen_on_light_and_dark(color: str, background: str) -> None:
    high, low = sorted([luminance(color), luminance(background)], reverse=True)
    assert (high + 0.05) / (low + 0.05) >= 3


def meter(wait_s: float = 1.0, user_s: float = 3.0, batches: int = 10) -> meters.LoaderMeters:
    made = meters.LoaderMeters(batches=batches, samples=batches * 4, wait_s=wait_s, user_s=user_s, ready=batches // 2)
    made.add("gather", batches * 4, 4000, 0.5)
    return made


def test_the_recorder_follows_a_run() -> None:
    recorder, counts = Recorder(), meters.LoaderMeters()
    recorder.note(meters.RunStarted(counts, 2, 10))
    recorder.note(meters.EpochStarted(counts, 1, 10, 40))
    full = meter()
    for name in ("batches", "samples", "wait_s", "user_s", "ready", "_parts"):
        setattr(counts, name, getattr(full, name))
    recorder.note(meters.BatchTaken(counts))
    recorder.note(meters.StepDone(1, 13, 3, {"loss": 0.5}))
    state = recorder.state(None, 0.0)
    assert (state.phase, state.epoch, state.epochs, state.step, state.steps_per_epoch) == ("running", 2, 2, 3, 10)
    assert (state.wait_share, state.images_per_s, state.occupancy_rate) == (0.25, 10.0, 0.5)
    assert state.gathered_bytes_per_s == 1000
    assert state.values == {"loss": 0.5}
    recorder.note(meters.RunEnded("ValueError"))
    assert recorder.state(None, 0.0).phase == "stopped"
    assert recorder.state(None, 0.0).stopped_by == "ValueError"


def test_the_recorder_ignores_the_loader_of_the_validation() -> None:
    recorder, counts, other = Recorder(), meters.LoaderMeters(), meters.LoaderMeters()
    recorder.note(meters.RunStarted(counts, 1, 10))
    recorder.note(meters.StepDone(0, 4, 4, {}))
    recorder.note(meters.EpochStarted(other, 7, 99, 99))
    recorder.note(meters.Waiting(other, 5.0))
    state = recorder.state(None, 0.0)
    assert (state.epoch, state.step, state.steps_per_epoch, state.waiting_s) == (1, 4, 10, 0.0)


def test_the_recorder_follows_a_plain_loop() -> None:
    recorder, counts = Recorder(), meters.LoaderMeters()
    recorder.note(meters.EpochStarted(counts, 3, 6, 24))
    recorder.note(meters.BatchTaken(counts))
    recorder.note(meters.BatchTaken(counts))
    recorder.note(meters.Waiting(counts, 2.0))
    state = recorder.state(None, 0.0)
    assert (state.phase, state.epoch, state.epochs, state.step, state.waiting_s) == ("waiting", 4, None, 2, 2.0)


def test_losses_that_are_no_numbers_do_not_break_the_curve() -> None:
    recorder = Recorder()
    for loss in (1.0, float("nan"), float("inf"), 2.0):
        recorder.note(meters.StepDone(0, 1, 1, {"loss": loss}))
        state = recorder.state(None, 0.0)
        render(state)
    assert state.loss_curve == (1.0, 2.0)


class Frames:
    """A screen that keeps what it is given."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, str, bool]] = []

    def paint(self, html: str, text: str, final: bool) -> None:
        self.frames.append((html, text, final))


@pytest.fixture
def loader(image_tree: Path, tmp_path: Path) -> colabkit.Loader:
    packed = colabkit.pack(image_tree, tmp_path / "p.h5", progress=False)
    return colabkit.Loader(colabkit.open_pack(packed.path)["train"], 4)


def test_the_panel_runs_beside_a_plain_loop_and_ends_with_one_final_frame(loader: colabkit.Loader) -> None:
    screen = Frames()
    with Dashboard(screen, 0.1):
        for _ in loader:
            pass
    assert [final for _, _, final in screen.frames].count(True) == 1
    assert screen.frames[-1][2]
    assert "epoch 1 · step 6/6" in screen.frames[-1][1]
    assert meters._listeners == []


def test_the_panel_runs_beside_training(loader: colabkit.Loader) -> None:
    screen = Frames()
    with Dashboard(screen, 0.1):
        colabkit.train(lambda batch: 0.25, loader, epochs=2)
    assert "epoch 2/2 · step 6/6" in screen.frames[-1][1]
    assert "loss 0.25" in screen.frames[-1][1]


def test_a_screen_that_fails_is_dropped_and_training_goes_on(
    loader: colabkit.Loader, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def paint(self, html: str, text: str, final: bool) -> None:
            raise OSError("no front end")

    with Dashboard(Broken(), 0.1):
        report = colabkit.train(lambda batch: 0.5, loader)
    assert report.epochs[0].samples == 24
    assert "the run goes on" in caplog.text


def test_an_error_of_the_loop_is_shown_and_passes_through(loader: colabkit.Loader) -> None:
    screen = Frames()
    with pytest.raises(ZeroDivisionError), Dashboard(screen, 0.1):
        colabkit.train(lambda batch: 1 / 0, loader)
    assert screen.frames[-1][1].startswith("Stopped by ZeroDivisionError")


def test_only_the_thread_of_the_cell_paints(loader: colabkit.Loader) -> None:
    screen = Frames()
    with Dashboard(screen, 0.1):
        other = threading.Thread(target=lambda: list(loader))
        other.start()
        other.join()
        assert screen.frames == []
    assert len(screen.frames) == 1


def test_the_panel_opens_and_closes_itself_beside_training(
    loader: colabkit.Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = show_beside_training()
    try:
        colabkit.train(lambda batch: 0.5, loader)
        assert capsys.readouterr().out.count("epoch 1/1 · step 6/6") == 1
        with colabkit.dashboard(screen="none"):
            colabkit.train(lambda batch: 0.5, loader)
        assert capsys.readouterr().out == "", "one panel is enough"
    finally:
        stop()
    assert meters._listeners == []


def test_the_panel_that_opened_itself_tells_what_stopped_training(
    loader: colabkit.Loader, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = show_beside_training()
    try:
        with pytest.raises(ZeroDivisionError):
            colabkit.train(lambda batch: 1 / 0, loader)
    finally:
        stop()
    assert "Stopped by ZeroDivisionError" in capsys.readouterr().out


def test_a_terminal_is_rewritten_in_place_and_a_log_gets_the_last_frame_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        screen = TerminalScreen(stream)
        screen.paint("", "one\nframe", False)
        screen.paint("", "two\nframe", True)
    assert terminal.getvalue() == "one\nframe\n\x1b[2F\x1b[Jtwo\nframe\n"
    assert log.getvalue() == "two\nframe\n"


def test_a_terminal_without_unicode_still_gets_the_words() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    TerminalScreen(stream).paint("", render(STATE)[1], True)
    stream.flush()
    assert b"Training waits for data" in stream.buffer.getvalue()


def test_options_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(InvalidOption, match="refresh_s=0"):
        colabkit.dashboard(refresh_s=0)
    with pytest.raises(InvalidOption, match="'widgets'"):
        colabkit.dashboard(screen="widgets")


def test_screens_are_chosen_by_name_and_by_place() -> None:
    assert isinstance(choose_screen("auto"), TerminalScreen)
    assert isinstance(choose_screen("notebook"), NotebookScreen)
    assert isinstance(choose_screen("none"), NullScreen)
