"""Take pictures of every state of the launcher and the panel in real notebooks, operated with simulated clicks.

    pip install ".[test,browser]" && python tests/doubles/screenshots.py FOLDER

The pictures show each state in the light and the dark theme, at full width, at 400 and at 200 pixels. `--only form`
takes only those of the scene `form`. `--classic PYTHON` also takes pictures in the classic notebook of the environment
with this interpreter, which needs `notebook<7` or `nbclassic`, and ipywidgets. Photos are on a slow FUSE mount that
stands in for Drive, so this needs fuse3.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from far_mounts import FuseMount
from jupyter_lab import DIGITS, PANEL, ROOT, Lab, Server, chromium, lab_server, opened_browser, served
from launcher_page import LAUNCHER, LauncherPage
from panel_picture import drawn
from panel_states import STATES, render
from PIL import Image
from sklearn.datasets import load_sample_images

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OUTPUT = ".jp-OutputArea"
WIDTHS = {"full": 1100, "400": 532, "200": 332}
"""Widths of the window in which launcher and panel have these widths."""
PANEL_WIDTHS = {"full": 784, "400": 424, "200": 224}
TALL = 3200
THEMES = ("Light", "Dark")
PATIENCE_S = 900.0
"""Deadline for each state, also on a busy machine, in seconds."""
PHOTOS = 1600
# Number of epochs, large enough that pictures can be taken during training.
EPOCHS = 80
CLASSES = ("temple-roof", "trees-and-sky", "petals", "dark-background-of-the-flower")
PID = "import os, pathlib; pathlib.Path('kernel.pid').write_text(str(os.getpid()))"
TRAINING = f"{DIGITS}\n%train step train --epochs 100000 --validate val --to runs/digits"


def write_photos(folder: Path, count: int) -> None:
    """Write JPEG files in four classes: crops of the halves of two photos.

    The halves overlap, so that a model confuses some of the classes.
    """
    random = np.random.default_rng(0)
    photos = load_sample_images().images
    for number, name in enumerate(CLASSES):
        photo, left = photos[number // 2], number % 2
        (folder / name).mkdir(parents=True)
        for crop in range(count // len(CLASSES)):
            side = int(random.integers(72, 120))
            top = random.integers(0, photo.shape[0] - side)
            first = random.integers(0, 380 - side) + left * 260
            pixels = photo[top : top + side, first : first + side]
            Image.fromarray(pixels).save(folder / name / f"{crop:04d}.jpg", quality=85)


class Camera:
    """Takes screenshots of a JupyterLab page that show the same state in every theme and width.

    Args:
        lab: the page.
        folder: folder for the screenshots.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self._folder = folder

    def take(self, name: str, selector: str = LAUNCHER) -> None:
        """Take pictures of the last matching element while the kernel is halted, so that all show the same state."""
        with self._halted():
            for theme in THEMES:
                self.lab.use_theme(theme)
                for width, pixels in WIDTHS.items():
                    self.lab.use_width(pixels, TALL)
                    self._shoot(self.lab.page, f"{name}-{width}-{theme.lower()}", selector)
            self.lab.use_width(WIDTHS["full"], TALL)
            self.lab.use_theme("Light")

    def page(self, name: str) -> None:
        """Take a picture of the page at full width in the light theme."""
        self.lab.use_width(1280, 900)
        self.lab.page.screenshot(path=self._folder / f"{name}-page.png")
        self.lab.use_width(WIDTHS["full"], TALL)

    def _shoot(self, page: Page, name: str, selector: str) -> None:
        find = "name => [...document.querySelectorAll(name)].at(-1).getBoundingClientRect().toJSON()"
        box = page.evaluate(find, selector)
        around = {"x": box["x"] - 8, "y": box["y"] - 8, "width": box["width"] + 16, "height": box["height"] + 16}
        page.screenshot(path=self._folder / f"{name}.png", clip=around)
        print(name, f"{box['width']:.0f}×{box['height']:.0f}")

    @contextmanager
    def _halted(self) -> Iterator[None]:
        file = self.lab.folder / "kernel.pid"
        pid = int(file.read_text()) if file.exists() else None
        if pid is None or not Path(f"/proc/{pid}").exists():
            yield
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            # A killed kernel may have been a zombie until now.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class Mouse(LauncherPage):
    """Operates a launcher in a tall window, with time limits that suffice on a busy machine."""

    def open(self, name: str = "launcher.ipynb", first_cell: str = PID) -> None:
        """Open a notebook with the launcher."""
        self.lab.use_width(WIDTHS["full"], TALL)
        super().open(name, first_cell)

    def waits_for_error(self) -> None:
        """Wait until a click has failed, and Train can be clicked again."""
        self.lab.page.locator(f"{LAUNCHER} [role=alert]").nth(1).wait_for()
        self.waits_for_form()

    def waits_for_form(self) -> None:
        """Wait until clicks are accepted again."""
        self.lab.page.locator(f"{LAUNCHER} .colabkit-main:visible:enabled").wait_for()

    def waits_for(self, text: str, seconds: float = PATIENCE_S) -> None:
        """Wait until the launcher shows the given text."""
        self.lab.wait_for_text(LAUNCHER, text, seconds)


def form(mouse: Mouse, camera: Camera) -> None:
    """Take pictures of the form before a click: start, list of places, source chosen, options, errors."""
    mouse.open()
    mouse.waits_for("1,797 images")
    camera.take("start")
    camera.page("start")
    mouse.button("Browse").click()
    mouse.choose("Google Drive")
    mouse.waits_for("photos/")
    camera.take("browsing")
    mouse.choose("photos/")
    mouse.choose("use drive:photos")
    mouse.waits_for("1,600 images")
    camera.take("chosen")
    mouse.lab.page.get_by_label("Image size", exact=True).focus()
    mouse.lab.page.keyboard.press("Tab")
    mouse.lab.page.keyboard.press("Tab")
    camera.take("focus")
    mouse.fill("Image size", "16")
    mouse.waits_for("⚠")
    mouse.button("More options").click()
    mouse.button("Only").click()
    camera.take("options")
    mouse.fill("Epochs", "many")
    mouse.button("Train").click()
    mouse.lab.page.locator(f"{LAUNCHER} .colabkit-pointed").first.wait_for()
    camera.take("error-field")
    mouse.fill("Epochs", "auto")
    mouse.fill("Image size", "auto")
    mouse.fill("Source", "drive:birds/2024")
    mouse.waits_for("Cannot read")
    camera.take("missing-described")
    mouse.button("Train").click()
    mouse.waits_for_error()
    camera.take("missing")
    (mouse.lab.folder / "broken.zip").write_bytes(b"PK\3\4" + bytes(100))
    mouse.fill("Source", "broken.zip")
    mouse.waits_for("broken.zip'")
    mouse.button("Train").click()
    mouse.waits_for_error()
    camera.take("unreadable")


def run(mouse: Mouse, camera: Camera) -> None:
    """Take pictures of a training run: packing, early, late, stopped, finished, and the notebook without its kernel."""
    mouse.open()
    mouse.fill("Source", "drive:photos")
    mouse.fill("Epochs", str(EPOCHS))
    mouse.waits_for("1,600 images")
    mouse.button("Train").click()
    mouse.waits_for("Packing samples")
    camera.take("packing")
    camera.page("packing")
    mouse.waits_for_epoch(1, PATIENCE_S)
    camera.take("training-early")
    mouse.waits_for_epoch(EPOCHS // 2, PATIENCE_S)
    camera.take("training-late")
    camera.page("training-late")
    mouse.button("Stop").click()
    mouse.waits_for("Stopped. Click Continue")
    mouse.waits_for_form()
    camera.take("stopped")
    mouse.button("Continue").click()
    mouse.waits_for("are classified correctly")
    mouse.waits_for_form()
    camera.take("finished")
    for summary in mouse.lab.page.locator(f"{LAUNCHER} summary").all():
        summary.click()
    camera.take("finished-unfolded")
    mouse.lab.save()
    mouse.lab.page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    mouse.lab.open_without_kernel("launcher.ipynb")
    mouse.lab.wait_for_text(OUTPUT, "are classified correctly")
    camera.take("reopened", OUTPUT)
    camera.page("reopened")


def only(mouse: Mouse, camera: Camera) -> None:
    """Take pictures of the reports of the buttons in the section "Only measure, copy or pack"."""
    mouse.open()
    mouse.fill("Source", "drive:photos")
    mouse.waits_for("1,600 images")
    mouse.button("Only").click()
    for label, said in {"Measure": "Probed", "Copy": "Staged", "Pack": re.compile("[Pp]ack")}.items():
        # Other buttons of the launcher contain the same words.
        mouse.lab.page.locator(f"{LAUNCHER} .colabkit-only button", has_text=label).click()
        mouse.lab.page.locator(f"{LAUNCHER} details[open] summary", has_text=said).wait_for()
        mouse.waits_for_form()
        camera.take(f"only-{label.lower()}")


def reload(mouse: Mouse, camera: Camera) -> None:
    """Reload the page during training; take pictures immediately, a minute later, and after an interrupt."""
    mouse.open()
    mouse.fill("Source", "drive:photos")
    mouse.fill("Epochs", "2000")
    mouse.waits_for("1,600 images")
    mouse.button("Train").click()
    mouse.waits_for_epoch(3, PATIENCE_S)
    mouse.lab.save()
    mouse.lab.reload()
    mouse.lab.wait_for_text(OUTPUT, "not live")
    camera.take("reloaded", OUTPUT)
    camera.page("reloaded")
    mouse.lab.page.wait_for_timeout(61_000)
    camera.take("reloaded-later", OUTPUT)
    mouse.lab.interrupt()
    mouse.waits_for("Stopped. Click Continue")
    mouse.waits_for_form()
    camera.take("reloaded-interrupted")


def attached(mouse: Mouse, camera: Camera) -> None:
    """Take pictures of a live and of a killed run, from a second notebook and from the run's own."""
    lab = mouse.lab
    lab.write("training.ipynb", [PID, "%load_ext colabkit", TRAINING])
    lab.use_width(WIDTHS["full"], TALL)
    lab.open("training.ipynb")
    lab.run_all()
    lab.wait_for_text(PANEL, "best validation")
    camera.take("panel-running", PANEL)
    camera.page("panel-running")
    pid = int((lab.folder / "kernel.pid").read_text())
    lab.save()
    other = lab.another()
    view = Camera(other, camera._folder)
    other.write("other.ipynb", ["%load_ext colabkit", "%dashboard --attach runs/digits"])
    other.use_width(WIDTHS["full"], TALL)
    other.open("other.ipynb")
    other.run_all()
    other.frames(PANEL, 2, 60.0)
    view.take("attached", PANEL)
    view.page("attached")
    lab.reload()
    lab.wait_for_text(OUTPUT, "best validation")
    camera.take("panel-reloaded", OUTPUT)
    os.kill(pid, signal.SIGKILL)
    other.wait_for_text(PANEL, "killed or crashed")
    other.wait_until_idle()
    view.take("dead", f"{OUTPUT}")
    view.page("dead")
    other.write("status.ipynb", ["%load_ext colabkit", "%status runs/digits"])
    other.open("status.ipynb")
    other.run_all()
    other.wait_until_idle()
    view.take("dead-status", OUTPUT)
    lab.page.wait_for_timeout(3000)
    camera.page("dead-own")
    other.page.close()


def reopened(mouse: Mouse, camera: Camera) -> None:
    """Take pictures of the template after Run All, and as a saved notebook without a kernel."""
    lab = mouse.lab
    name = "colabkit_template.ipynb"
    text = (ROOT / "notebooks" / name).read_text()
    (lab.folder / name).write_text(text.replace('\\"samples:digits\\"  #', '\\"drive:photos\\"  #'))
    lab.use_width(WIDTHS["full"], 2 * TALL)
    lab.open(name)
    lab.run_all()
    lab.wait_until_idle(PATIENCE_S)
    lab.wait_for_text(LAUNCHER, "images")
    lab.page.screenshot(path=camera._folder / "template-page.png")
    lab.save()
    lab.page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    lab.open_without_kernel(name)
    lab.wait_for_text(OUTPUT, "are classified correctly")
    for theme in THEMES:
        lab.use_theme(theme)
        lab.page.screenshot(path=camera._folder / f"template-reopened-{theme.lower()}-page.png")
    assert "Error displaying widget" not in lab.page.inner_text("body")


SCENES = {scene.__name__: scene for scene in (form, run, only, reload, attached, reopened)}


def take_states(browser: Browser, folder: Path) -> None:
    """Take pictures of states of the panel that a real run rarely has."""
    for name, state in STATES.items():
        for theme in THEMES:
            for width, pixels in PANEL_WIDTHS.items():
                with drawn(browser, theme.lower(), pixels, render(state)[0]) as page:
                    file = f"panel-{name.replace(' ', '-')}-{width}-{theme.lower()}.png"
                    page.screenshot(path=folder / file, full_page=True)


class ClassicPage:
    """A browser page with one notebook, open in the classic Jupyter Notebook.

    Args:
        page: an empty page of the browser.
        server: the server of the classic Jupyter Notebook.
        folder: folder for the pictures.
    """

    def __init__(self, page: Page, server: Server, folder: Path) -> None:
        self.page = page
        self._server = server
        self._folder = folder

    def open(self, name: str) -> None:
        self.page.goto(f"{self._server.address}/notebooks/{name}?token={self._server.token}")
        self.page.wait_for_function("window.Jupyter?.notebook?.kernel?.is_connected()", timeout=60_000)

    def wait_for(self, text: str, selector: str = LAUNCHER) -> None:
        self.page.locator(selector, has_text=text).first.wait_for(timeout=240_000)

    def take(self, name: str, selector: str = LAUNCHER) -> None:
        for width, pixels in {"full": 1100, "400": 560, "200": 360}.items():
            self.page.set_viewport_size({"width": pixels, "height": TALL})
            self.page.wait_for_timeout(300)
            self.page.locator(selector).last.screenshot(path=self._folder / f"classic-{name}-{width}.png")
        self.page.set_viewport_size({"width": 1280, "height": 900})
        self.page.screenshot(path=self._folder / f"classic-{name}-page.png")


def take_classic(browser: Browser, server: Server, folder: Path) -> None:
    """Take pictures of the launcher in the classic notebook: start, training, finished, reopened."""
    page = ClassicPage(browser.new_page(viewport={"width": 1100, "height": TALL}), server, folder)
    Lab(page.page, server).write("classic.ipynb", ["%load_ext colabkit\n%colabkit"])
    page.open("classic.ipynb")
    page.page.evaluate("() => Jupyter.notebook.execute_all_cells()")
    page.wait_for("1,797 images")
    page.take("start")
    for label, text in {"Source": "drive:photos", "Epochs": str(EPOCHS)}.items():
        field = page.page.get_by_label(label, exact=True)
        field.fill(text)
        field.press("Enter")
    page.wait_for("1,600 images")
    page.take("chosen")
    page.page.locator(f"{LAUNCHER} button:visible", has_text="Train").first.click()
    page.wait_for("left")
    page.take("staging")
    page.wait_for("images/s")
    page.take("training")
    page.wait_for("are classified correctly")
    page.page.locator(f"{LAUNCHER} button:visible", has_text="from scratch").wait_for()
    page.take("finished")
    page.page.evaluate("() => Jupyter.notebook.save_notebook()")
    page.page.evaluate("() => new Promise(done => Jupyter.notebook.kernel.kill(done, done))")
    page.page.evaluate("() => { window.onbeforeunload = null }")
    page.page.goto("about:blank")
    page.open("classic.ipynb")
    page.wait_for("are classified correctly", ".output_area")
    page.take("reopened", ".output_wrapper")


@contextmanager
def studio() -> Iterator[tuple[Path, dict[str, str], Browser]]:
    """Yield a folder, environment variables that name a slow drive with photos, and a browser."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as held:
        work = Path(name)
        write_photos(work / "remote" / "photos", PHOTOS)
        write_photos(work / "remote" / "holiday pictures" / "2024", 8)
        (work / "drive").mkdir()
        mount = FuseMount(work / "drive", work / "remote", open_s=0.04, list_s=0.04, at_once=4)
        environ = {"COLABKIT_DRIVE": str(held.enter_context(mount).point)}
        yield work, environ, held.enter_context(opened_browser(chromium()))


def take_scene(name: str, browser: Browser, server: Server, folder: Path) -> None:
    """Take the pictures of a scene."""
    lab = Lab.new(browser, server)
    lab.page.set_default_timeout(1000 * PATIENCE_S)
    SCENES[name](Mouse(lab), Camera(lab, folder))
    lab.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", metavar="SCENE", help=", ".join([*SCENES, "states", "classic"]))
    parser.add_argument("--classic", metavar="PYTHON", help="interpreter of an environment with the classic notebook")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    scenes = [name for name in SCENES if options.only in ("", name)]
    with studio() as (work, environ, browser):
        if options.only in ("", "states"):
            take_states(browser, options.folder)
        if scenes:
            (work / "lab").mkdir()
            with lab_server(work / "lab", environ) as server:
                for name in scenes:
                    take_scene(name, browser, server, options.folder)
        if options.classic and options.only in ("", "classic"):
            (work / "classic").mkdir()
            with served(work / "classic", environ, (options.classic, "-m", "nbclassic")) as server:
                take_classic(browser, server, options.folder)


if __name__ == "__main__":
    main()
