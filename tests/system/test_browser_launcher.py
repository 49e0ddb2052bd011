"""The launcher in a real JupyterLab in Chromium, driven with mouse and keyboard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jupyter_lab import PANEL, Lab
from launcher_page import LAUNCHER, LauncherPage
from PIL import Image

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

SOURCE, BROWSED, RELOADED = "two classes", "it's {few}", "reloaded"
VIEW = "application/vnd.jupyter.widget-view+json"
WORK_S = 120.0


def write_images(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    for name in ("dark", "light"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        name = ("dark", "light")[number % 2]
        pixels = random.integers(0, 128, (48, 48, 3), dtype=np.uint8) + 100 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:05d}.png")


@pytest.fixture
def launcher(lab: Lab) -> LauncherPage:
    launcher = LauncherPage(lab)
    launcher.open()
    return launcher


def test_the_launcher_fits_in_narrow_windows_and_shows_errors_as_text(launcher: LauncherPage) -> None:
    lab = launcher.lab
    launcher.button("More options").click()
    launcher.button("Only").click()
    launcher.fill("Source", "no/such/<b>place</b>")
    lab.wait_for_text(LAUNCHER, "Cannot read 'no/such/<b>place</b>'")
    launcher.button("Train").click()
    launcher.waits_for_message("Cannot read 'no/such/<b>place</b>'", WORK_S)
    for width in (1100, 540, 340):
        lab.use_width(width, 1600)
        for theme in ("Dark", "Light"):
            lab.use_theme(theme)
            lab.picture(f"launcher-error-{width}-{theme.lower()}", LAUNCHER)
        assert lab.cut_off(LAUNCHER) == [], f"cut off at {width} px"


def test_a_source_is_browsed_and_the_shown_code_is_copied(launcher: LauncherPage) -> None:
    lab = launcher.lab
    write_images(lab.folder / BROWSED, 40)
    launcher.button("Browse").click()
    for entry in ("this folder", f"{BROWSED}/", f"use {BROWSED}"):
        launcher.choose(entry)
    lab.wait_for_text(LAUNCHER, "40 images, 2 classes, 48×48")
    lab.picture("launcher-chosen", LAUNCHER)
    launcher.button("Copy").click()
    lab.wait_for_text(f"{LAUNCHER} .colabkit-copy", "Copied")
    launcher.fill("Image size", "9")
    lab.page.locator(".jp-CodeCell .cm-content").first.click()
    lab.page.keyboard.press("Control+a")
    lab.page.keyboard.press("Control+v")
    code = lab.page.locator(".jp-CodeCell .cm-content").first.inner_text()
    assert code == f"import colabkit\ncolabkit.train_on({BROWSED!r})"


def test_train_trains_once_stops_at_a_click_and_continues_and_leaves_its_report(launcher: LauncherPage) -> None:
    lab = launcher.lab
    write_images(lab.folder / SOURCE, 1000)
    launcher.fill("Source", SOURCE)
    # Train long enough that even a fast machine can be stopped during the run.
    launcher.fill("Epochs", "30")
    lab.wait_for_text(LAUNCHER, "1,000 images, 2 classes")
    launcher.button("Train").dblclick()
    lab.wait_for_text(f"{LAUNCHER} {PANEL}", "epoch ")
    lab.picture("launcher-running")
    assert launcher.is_kernel_busy
    launcher.button("Stop").click()
    launcher.waits_for_message("Stopped. Click Continue to resume.", WORK_S)
    lab.picture("launcher-stopped")

    launcher.button("Continue").click()
    launcher.waits_for_message("Done", WORK_S)
    launcher.button("Train 30 more epochs").wait_for()
    launcher.button("Train again from scratch").wait_for()
    lab.wait_for_text(LAUNCHER, "held-out images (val) are classified correctly")
    lab.picture("launcher-finished", LAUNCHER)
    for width in (540, 340):
        lab.use_width(width, 3000)
        lab.picture(f"launcher-finished-{width}", LAUNCHER)
        assert lab.cut_off(LAUNCHER) == [], f"cut off at {width} px"

    outputs = [sorted(output.get("data", {})) for output in lab.save().cells[-1].outputs]
    assert outputs == [[VIEW, "text/plain"], ["text/html", "text/plain"]]
    assert lab.page.locator(".jp-OutputArea-output").last.inner_text() == "", "the saved report is shown twice"
    lab.use_width(1100)
    lab.page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    lab.open_without_kernel("launcher.ipynb")
    lab.wait_for_text(".jp-OutputArea-output", "are classified correctly")
    lab.picture("launcher-reopened")
    text = lab.page.locator(".jp-OutputArea").last.inner_text()
    assert "Done in" in text
    assert "Error" not in text
    assert "not live" not in text


def test_a_page_reloaded_during_the_training_shows_an_old_state_as_such_and_then_the_launcher(
    launcher: LauncherPage,
) -> None:
    lab = launcher.lab
    write_images(lab.folder / RELOADED, 1000)
    launcher.fill("Source", RELOADED)
    launcher.fill("Epochs", "400")
    lab.wait_for_text(LAUNCHER, "1,000 images, 2 classes")
    launcher.button("Train").click()
    lab.wait_for_text(f"{LAUNCHER} {PANEL}", "epoch ")
    lab.save()
    lab.reload()
    lab.wait_for_text(".jp-OutputArea", "UTC, not live")
    lab.picture("launcher-reloaded")
    lab.interrupt()
    launcher.waits_for_message("Stopped. Click Continue to resume.", WORK_S)
    lab.picture("launcher-reloaded-stopped")
    launcher.button("Continue").click()
    launcher.waits_for_message("Training …", WORK_S)
