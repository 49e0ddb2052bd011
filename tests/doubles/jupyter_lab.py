"""A real JupyterLab in Chromium: its server, its page, and the content of the page.

This module does not depend on what the tests click. It waits for conditions, never for a fixed time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from trees import needs
from waiting import comes_true

if TYPE_CHECKING:
    from nbformat import NotebookNode
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
DIGITS = """
import torch
import colabkit

torch.manual_seed(0)
data = colabkit.prepare("samples:digits", splits={"train": 0.8, "val": 0.2})
train, val = (colabkit.Loader(data[name], 64, shuffle=True) for name in ("train", "val"))
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
step = colabkit.supervised_step(model, torch.optim.AdamW(model.parameters()))
"""
"""A cell that prepares digits, two loaders, a model and a step."""
PANEL = "[aria-label='Training panel']"
START_S = 120.0
"""Deadline for the start of a server or a kernel, in seconds."""
WORK_S = 240.0
"""Deadline for cells, in seconds."""
WIDTH, HEIGHT = 1100, 1000

_READY = """async () => {
    const notebook = window.jupyterapp.shell.currentWidget;
    await notebook.context.ready;
    await notebook.sessionContext.ready;
    await notebook.sessionContext.session.kernel.info;
}"""
_IS_BUSY = "[...document.querySelectorAll('.jp-InputPrompt')].some(prompt => prompt.innerText.includes('*'))"
_ERRORS = """[...(window.jupyterapp.shell.currentWidget?.content?.model?.cells ?? [])]
    .flatMap(cell => cell.toJSON().outputs ?? []).filter(output => output.output_type === 'error')
    .map(output => `${output.ename}: ${output.evalue}`)"""
_LOOK_MS = 100
_PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def chromium() -> str:
    """Return the path of Chromium; skip the test if it or a package that drives it is missing."""
    for package in ("playwright", "jupyterlab"):
        needs(package, importlib.util.find_spec(package) is not None)
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    needs("Chromium", found is not None)
    return str(found)


@contextmanager
def opened_browser(path: str) -> Iterator[Browser]:
    """Run the browser at the given path. Meanwhile, this thread cannot run other event loops."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass(frozen=True)
class Server:
    """A running JupyterLab: its address, its token, and the folder that it shows."""

    address: str
    token: str
    folder: Path


@contextmanager
def lab_server(folder: Path, environ: Mapping[str, str] = {}) -> Iterator[Server]:
    """Run JupyterLab in a folder, with its own settings and these environment variables."""
    with served(folder, environ, (sys.executable, "-m", "jupyterlab", "--expose-app-in-browser")) as server:
        yield server


@contextmanager
def served(folder: Path, environ: Mapping[str, str], program: Sequence[str]) -> Iterator[Server]:
    """Run a Jupyter server in a folder; kernels run in this environment, even if the server is from another one.

    Args:
        folder: the folder.
        environ: environment variables for the server and its kernels.
        program: command of the server, without the options that all servers have.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = folder / "home"
    settings = home / "settings" / "@jupyterlab"
    kernel = home / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "Python 3", "language": "python"}))
    for name, content in {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "docmanager-extension/plugin": {"autosave": False},
    }.items():
        file = settings / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "COLABKIT_LOCAL")
    environment = {
        **os.environ,
        **{name: str(home / name) for name in places},
        "JUPYTER_PATH": str(home),
        "JUPYTERLAB_SETTINGS_DIR": str(settings.parent),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        # Leave a CPU for the browser.
        "OMP_NUM_THREADS": "1",
        **environ,
    }
    token = secrets.token_hex(16)
    command = [
        *program, "--no-browser", "--allow-root",
        "--ip=127.0.0.1", f"--port={port}", f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}",
        "--ServerApp.port_retries=0",
    ]  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            known = f"{address}/api?token={token}"
            comes_true(lambda: process.poll() is not None or _answers(known), START_S, look_s=0.1)
            assert _answers(known), f"the server did not start: {(folder / 'server.log').read_text()[-2000:]}"
            yield Server(address, token, folder)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(address: str) -> bool:
    with suppress(OSError):
        urllib.request.urlopen(address, timeout=2).close()
        return True
    return False


class Lab:
    """A page with JupyterLab, which shows one notebook at a time.

    Args:
        page: an empty page of the browser.
        server: the server of JupyterLab.
        pictures: folder for pictures; None to save none.

    Attributes:
        page: the page.
    """

    def __init__(self, page: Page, server: Server, pictures: Path | None = None) -> None:
        self.page = page
        self._server = server
        self._pictures = pictures

    @classmethod
    def new(cls, browser: Browser, server: Server, pictures: Path | None = None, scale: float = 1.0) -> Lab:
        """Open a page; `scale` is the number of picture pixels per CSS pixel."""
        size = {"width": WIDTH, "height": HEIGHT}
        return cls(browser.new_page(viewport=size, device_scale_factor=scale), server, pictures)

    def another(self) -> Lab:
        """Open another page of the same server, with the same size."""
        context = self.page.context.browser
        assert context is not None
        return Lab.new(context, self._server, self._pictures)

    @property
    def folder(self) -> Path:
        """The folder that the server shows."""
        return self._server.folder

    def write(self, name: str, cells: Sequence[str]) -> Path:
        """Write a notebook with the given code cells into the server's folder."""
        path = self.folder / name
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, path)
        return path

    def open(self, name: str) -> None:
        """Open a notebook of the server's folder, and wait until its kernel is ready."""
        self._go(f"/lab/tree/{name}?reset")
        self._wait_for_kernel()

    def open_without_kernel(self, name: str) -> None:
        """Open a notebook without a kernel, so that only its saved outputs are shown."""
        self._go("/lab?reset")
        kernel = {"shouldStart": False, "canStart": False, "autoStartDefault": False}
        self.start("docmanager:open", path=name, factory="Notebook", kernelPreference=kernel)
        self.page.wait_for_selector(".jp-OutputArea-output", state="attached")

    def reload(self) -> None:
        """Reload the page, as the browser's button does, and wait until it shows the notebook again.

        This does not wait for the kernel, which cannot respond while it is running a cell.
        """
        self.page.reload()
        self._wait_for_app()
        self._wait("window.jupyterapp.shell.currentWidget?.context?.isReady", START_S)

    def _go(self, path: str) -> None:
        self.page.goto(f"{self._server.address}{path}&token={self._server.token}")
        self._wait_for_app()
        self.start("application:toggle-left-area")

    def _wait_for_app(self) -> None:
        self.page.wait_for_function("window.jupyterapp !== undefined", timeout=1000 * START_S)
        self.page.evaluate("() => window.jupyterapp.restored")

    def _wait_for_kernel(self) -> None:
        self.page.wait_for_function("window.jupyterapp.shell.currentWidget?.sessionContext !== undefined")
        self.page.evaluate(_READY)

    def close(self) -> None:
        """Shut down all kernels of the server, and close the page."""
        self.page.evaluate("() => window.jupyterapp?.serviceManager.sessions.shutdownAll()")
        self.page.close()

    def start(self, command: str, **arguments: object) -> None:
        """Start a command of JupyterLab, without waiting until it ends."""
        start = "([name, given]) => { window.jupyterapp.commands.execute(name, given); }"
        self.page.evaluate(start, [command, arguments])

    def click_in_menu(self, menu: str, item: str) -> None:
        self.page.locator(".lm-MenuBar-itemLabel", has_text=menu).first.click()
        self.page.locator(".lm-Menu-itemLabel", has_text=item).first.click()

    def run_all(self) -> None:
        """Start all cells, and wait until the first one is busy."""
        self.click_in_menu("Run", "Run All Cells")
        self.page.wait_for_function(_IS_BUSY)

    def interrupt(self) -> None:
        """Click the toolbar's stop button."""
        self.page.locator("[data-command='notebook:interrupt-kernel']").first.click()

    @property
    def is_busy(self) -> bool:
        """Whether a cell is running or waiting to run."""
        return bool(self.page.evaluate(_IS_BUSY))

    def wait_until_idle(self, seconds: float = WORK_S) -> None:
        self._wait(f"!{_IS_BUSY}", seconds)

    def wait_for_text(self, selector: str, text: str, seconds: float = WORK_S) -> None:
        """Wait until an element contains the given text; fail immediately if a cell fails."""
        appears = (
            "([selector, text]) => [...document.querySelectorAll(selector)].some(one => one.innerText.includes(text))"
        )
        self._wait(f"given => ({appears})(given) || {_ERRORS}.length > 0", seconds, [selector, text])
        assert self.errors == []

    @property
    def errors(self) -> list[str]:
        """The errors of the notebook's cells."""
        return self.page.evaluate(_ERRORS)

    def _wait(self, condition: str, seconds: float, given: object = None) -> None:
        self.page.wait_for_function(condition, arg=given, timeout=1000 * seconds, polling=_LOOK_MS)

    def frames(self, selector: str, count: int, seconds: float = 30.0) -> list[str]:
        """Wait until an element has shown `count` different texts, with a time limit for each, and return them."""
        other = "([selector, before]) => [...document.querySelectorAll(selector)].at(-1)?.innerText.replace(before, '')"
        texts = [""]
        while len(texts) <= count:
            self._wait(other, seconds, [selector, texts[-1]])
            texts.append(self.page.locator(selector).last.inner_text())
        return texts[1:]

    def save(self) -> NotebookNode:
        """Save the notebook, and return the file's content."""
        path = self.page.evaluate(
            "async () => { const {context} = window.jupyterapp.shell.currentWidget;"
            " await context.save(); return context.path; }"
        )
        return nbformat.read(self.folder / path, as_version=4)

    def use_theme(self, theme: str) -> None:
        """Use the `"Light"` or the `"Dark"` theme."""
        self.start("apputils:change-theme", theme=f"JupyterLab {theme}")
        is_light = str(theme == "Light").lower()
        self.page.wait_for_function(f"document.body.dataset.jpThemeLight === '{is_light}'")
        # Wait, because JupyterLab covers the page while it loads a theme.
        self.page.locator("#jupyterlab-splash").wait_for(state="detached")
        self.page.evaluate(_PAINTED)

    def use_width(self, width: int, height: int = HEIGHT) -> None:
        """Resize the window to a size in pixels."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.evaluate(_PAINTED)

    def cut_off(self, selector: str) -> list[str]:
        """Return the parts of an element beyond its right edge, except those that can be scrolled into view."""
        return self.page.evaluate(
            """(whole) => {
                const scrolls = (part) => part && part !== document.querySelector(whole)
                    && (getComputedStyle(part).overflowX === 'auto' || scrolls(part.parentElement));
                const box = document.querySelector(whole).getBoundingClientRect();
                return [...document.querySelectorAll(whole + ' *')]
                    .filter((part) => part.getBoundingClientRect().right > box.right + 1 && !scrolls(part))
                    .map((part) => part.outerHTML.slice(0, 80));
            }""",
            selector,
        )

    def picture(self, name: str, selector: str = "") -> None:
        """Save a picture of the page or of the visible part of the last matching element, if a folder is set."""
        if self._pictures is not None:
            self.page.evaluate(_PAINTED)
            # The panel replaces its elements, so an element may be gone before a picture of it is taken.
            find = """name => {
                const found = [...document.querySelectorAll(name)].at(-1);
                found.scrollIntoView({block: 'nearest'});
                return found.getBoundingClientRect().toJSON();
            }"""
            box = self.page.evaluate(find, selector) if selector else None
            self.page.screenshot(path=self._pictures / f"{name}.png", clip=box)
