"""The panel in a real JupyterLab in Chromium: live, interrupted, narrow, and in a saved notebook.

`pytest --full -n 1 tests/system/test_browser_panel.py --pictures FOLDER` also saves pictures of these states.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import nbformat
import pytest
from jupyter_lab import DIGITS, PANEL, Lab
from nbformat import NotebookNode
from panel_states import STATES, render
from PIL import Image
from waiting import comes_true

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

TRAINING = """
with colabkit.dashboard():
    colabkit.train(step, train, epochs=100_000, validate=val, to="runs/digits")
"""
ATTACHED = "import colabkit; colabkit.dashboard(attach='runs/digits')"
WIDTHS = {760: 1100, 400: 532, 200: 332}
"""Widths of the panel, and of the windows in which it has this width, in pixels."""
FRAMES, ATTACHED_FRAMES = 5, 2
MARK = "img[alt='mark of an old frame']"


@dataclass(frozen=True)
class Run:
    """A training run that was watched, also from a second notebook, and then interrupted with the toolbar's button."""

    lab: Lab
    frames: list[str]
    was_busy: bool
    attached: list[str]
    saved: NotebookNode


@pytest.fixture(scope="module")
def run(open_lab: Callable[[], Lab]) -> Iterator[Run]:
    lab = open_lab()
    lab.write("training.ipynb", [DIGITS, TRAINING])
    lab.open("training.ipynb")
    lab.run_all()
    lab.wait_for_text(PANEL, "best validation")
    frames = lab.frames(PANEL, FRAMES)
    was_busy = lab.is_busy
    lab.picture("panel-running")
    other = open_lab()
    other.write("other.ipynb", [ATTACHED])
    other.open("other.ipynb")
    other.run_all()
    attached = other.frames(PANEL, ATTACHED_FRAMES, 60.0)
    other.picture("panel-attached")
    lab.interrupt()
    lab.wait_until_idle()
    lab.picture("panel-interrupted")
    other.wait_until_idle()
    other.picture("panel-attached-ended")
    attached.append(other.page.inner_text(PANEL))
    other.page.close()
    yield Run(lab, frames, was_busy, attached, lab.save())
    lab.close()


def is_colored(png: bytes) -> bool:
    """Return whether a picture has pixels that are not white, gray or black."""
    colors = Image.open(io.BytesIO(png)).convert("RGB").getcolors(1 << 20)
    return any(max(color) - min(color) > 40 for _, color in colors)


def test_the_panel_is_live_while_the_cell_runs(run: Run) -> None:
    assert run.was_busy, "the cell had ended while its frames were counted"
    assert len(set(run.frames)) == FRAMES, "the panel showed a frame again"


def test_a_second_notebook_shows_the_live_panel_until_the_run_ends(run: Run) -> None:
    *live, ended = run.attached
    assert len(set(live)) == ATTACHED_FRAMES
    assert "best validation" in live[-1]
    assert ended.startswith("Stopped by Ctrl-C. Start the same training again to resume"), ended


def test_the_panel_is_one_output_that_names_the_interrupt(run: Run) -> None:
    (panel,) = [output.data for output in run.saved.cells[-1].outputs if "data" in output]
    assert sorted(panel) == ["text/html", "text/plain"]
    assert "interrupted" in panel["text/plain"]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_part_of_the_panel_is_cut_off(run: Run, width: int) -> None:
    run.lab.use_width(WIDTHS[width], 1600)
    for theme in ("Dark", "Light"):
        run.lab.use_theme(theme)
        run.lab.picture(f"panel-interrupted-{width}-{theme.lower()}", PANEL)
    assert run.lab.page.locator(PANEL).bounding_box()["width"] == pytest.approx(width, abs=10)
    assert run.lab.cut_off(PANEL) == []


def test_a_frame_that_is_not_updated_says_so(lab: Lab) -> None:
    frame = render(STATES["running"])[0]
    assert 'begin="60s"' in frame
    mark = lab.page.locator(MARK)
    for begin, seconds in (("60s", 1.0), ("0.1s", 20.0)):
        lab.page.set_content(f"<body>{frame.replace('60s', begin)}</body>")
        is_shown = comes_true(lambda: is_colored(mark.screenshot()), seconds, look_s=0.1)
        assert is_shown == (begin == "0.1s")
    panel, verdict, box = (lab.page.locator(one).bounding_box() for one in (PANEL, f"{PANEL} [role=status]", MARK))
    assert verdict["y"] - panel["y"] >= 14, "the mark moves the panel's text"
    assert box["y"] + box["height"] <= verdict["y"], "the mark covers the verdict"


def test_an_untrusted_notebook_without_a_kernel_shows_the_last_frame(run: Run, lab: Lab) -> None:
    # Change the copy, because JupyterLab trusts files that it wrote, but not changed copies of them.
    run.saved.metadata["copied"] = True
    nbformat.write(run.saved, lab.folder / "copied.ipynb")
    lab.open_without_kernel("copied.ipynb")
    panel = lab.page.locator(".jp-OutputArea-output").filter(has_text="images/s")
    panel.wait_for()
    lab.page.wait_for_function("[...document.querySelectorAll('.jp-OutputArea-output img')].every(one => one.complete)")
    lab.picture("panel-reopened")
    drawn = panel.evaluate("panel => [...panel.querySelectorAll('img')].filter(one => one.naturalWidth > 0).length")
    assert drawn >= 6, f"{drawn} of the charts are drawn"
    text = panel.inner_text()
    for words in ("interrupted", "epoch", "images/s", "best validation"):
        assert words in text
