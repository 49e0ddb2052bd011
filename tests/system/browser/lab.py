"""A real JupyterLab in Chromium for the scripts in this folder: its server, its commands and its elements."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from playwright.sync_api import Page

ROOT = Path(__file__).parents[3]
READY = """async () => {
    const notebook = window.jupyterapp.shell.currentWidget;
    await notebook.context.ready;
    await notebook.sessionContext.ready;
    await notebook.sessionContext.session.kernel.info;
}"""


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run JupyterLab in a folder and yield its address and token, separated by `|`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = folder / "home"
    settings = home / "settings" / "@jupyterlab"
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
        "JUPYTERLAB_SETTINGS_DIR": str(settings.parent),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    token = secrets.token_hex(16)
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
        "--ip=127.0.0.1", f"--port={port}", f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}",
        "--ServerApp.port_retries=0",
    ]  # fmt: skip
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            _wait_for(f"http://127.0.0.1:{port}/api?token={token}", process)
            yield f"http://127.0.0.1:{port}|{token}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=2).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("JupyterLab did not start")


def save_notebook(path: Path, cells: list[str]) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


def do(page: Page, command: str, **arguments: object) -> None:
    page.evaluate("([name, taken]) => { window.jupyterapp.commands.execute(name, taken); }", [command, arguments])


def open_lab(page: Page, address: str, path: str = "") -> None:
    base, _, token = address.partition("|")
    page.goto(f"{base}/lab/tree/{path}?reset&token={token}" if path else f"{base}/lab?reset&token={token}")
    page.wait_for_function("window.jupyterapp !== undefined")
    page.evaluate("() => window.jupyterapp.restored")
    do(page, "application:toggle-left-area")


def check(what: str, found: object, holds: bool) -> bool:
    print(f"{'passed' if holds else 'FAILED':<12}{what}: {found}")
    return holds


def cut_off(page: Page, selector: str) -> list[str]:
    """Return the parts of an element that extend beyond its right edge, except those that can be scrolled into view."""
    return page.evaluate(
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


def picture(page: Page, path: Path) -> None:
    page.wait_for_timeout(700)
    page.screenshot(path=path)
