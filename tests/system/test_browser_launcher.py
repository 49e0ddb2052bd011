"""The launcher in a real JupyterLab in Chromium, driven with mouse and keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from jupyter_lab import PANEL, Lab
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

LAUNCHER = ".colabkit-launcher"
SOURCE = "two classes"
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


class Launcher:
    """The launcher of an opened notebook: its fields, its buttons and its messages."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        lab.write("launcher.ipynb", ["%load_ext colabkit", "%colabkit"])
        lab.open("launcher.ipynb")
        lab.run_all()
        lab.page.wait_for_selector(LAUNCHER)

    def fill(self, label: str, text: str) -> None:
        self.lab.page.get_by_label(label, exact=True).fill(text)

    def button(self, label: str) -> Locator:
        return self.lab.page.locator(f"{LAUNCHER} button:visible", has_text=label).first

    def waits_for(self, words: str) -> str:
        """Wait until the message of the last action contains these words, and return it."""
        said = self.lab.page.locator(f"{LAUNCHER} [role=status], {LAUNCHER} [role=alert]").filter(has_text=words)
        said.first.wait_for(timeout=1000 * WORK_S)
        return said.first.inner_text()


@pytest.fixture
def launcher(lab: Lab) -> Launcher:
    return Launcher(lab)


def test_the_launcher_fits_in_narrow_windows_and_shows_errors_as_text(launcher: Launcher) -> None:
    lab = launcher.lab
    launcher.fill("Source", "no/such/<b>place</b>")
    launcher.button("Stage").click()
    launcher.waits_for("Cannot read 'no/such/<b>place</b>'")
    for width in (1100, 780, 500):
        lab.use_width(width, 1600)
        for theme in ("Dark", "Light"):
            lab.use_theme(theme)
            lab.picture(f"launcher-error-{width}-{theme.lower()}", LAUNCHER)
        assert lab.cut_off(LAUNCHER) == [], f"cut off at {width} px"


def test_the_launcher_trains_once_resumes_after_an_interrupt_and_leaves_its_reports(launcher: Launcher) -> None:
    lab = launcher.lab
    write_images(lab.folder / SOURCE, 1000)
    launcher.fill("Source", SOURCE)
    launcher.fill("Epochs", "6")
    launcher.button("Stage and train").dblclick()
    lab.wait_for_text(f"{LAUNCHER} {PANEL}", "epoch 2/6")
    lab.picture("launcher-running")
    lab.interrupt()
    launcher.waits_for("Stopped")
    lab.picture("launcher-stopped")

    launcher.button("Stage and train").click()
    lab.frames(f"{LAUNCHER} {PANEL}", 2)
    launcher.waits_for("Done")
    text = lab.page.inner_text(LAUNCHER)
    assert "(6 in total)" in text, "the training did not resume"
    assert "Already staged" in text
    assert "Already packed" in text

    outputs = [sorted(output.get("data", {})) for output in lab.save().cells[-1].outputs]
    assert outputs == [[VIEW, "text/plain"], ["text/html", "text/plain"]]
    assert lab.page.locator(".jp-OutputArea-output").last.inner_text() == "", "the saved report is shown twice"
    lab.open_without_kernel("launcher.ipynb")
    lab.picture("launcher-reopened")
    text = lab.page.locator(".jp-OutputArea-output").last.inner_text()
    assert all(words in text for words in ("Done in", "epoch 6/6", "Already staged", "Trained")), text
