"""Train in a real JupyterLab in Chromium, and look at the panel: while the cell is busy, and in the saved notebook.

pip install ".[bench]" jupyterlab && python tests/browser/panel_in_jupyterlab.py --pictures pictures

It checks that the panel's words change at least once a second while the cell is busy, that nothing but the panel's one
output is there, that it can be read in the saved notebook without a kernel and without trust, and that a narrow window
cuts nothing off. It makes pictures of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parent.parent.parent
TRAINING = """
import torch
import colabkit

torch.manual_seed(0)
torch.set_num_threads(1)  # server and browser work on this machine, too
images, labels = torch.rand(4096, 3, 32, 32), torch.randint(0, 10, (4096,))
loader = colabkit.Loader((images, labels), 64, shuffle=True)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 24, 3), torch.nn.ReLU(), torch.nn.AdaptiveMaxPool2d(4), torch.nn.Flatten(),
    torch.nn.Linear(384, 10),
)
step = colabkit.supervised_step(model, torch.optim.AdamW(model.parameters()))
with colabkit.dashboard(screen=SCREEN):
    colabkit.train(step, loader, epochs=10_000, deadline="15s")
"""
PANEL = "[aria-label='Training panel']"
LOOK_S = 0.05
READY = """async () => {
    const notebook = window.jupyterapp.shell.currentWidget;
    await notebook.context.ready;
    await notebook.sessionContext.ready;
    await notebook.sessionContext.session.kernel.info;
}"""


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run JupyterLab over a folder; give its address."""
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
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "COLABKIT_NEAR")
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


def write_notebook(path: Path, screen: str) -> None:
    cell = nbformat.v4.new_code_cell(TRAINING.strip().replace("SCREEN", repr(screen)))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


def do(page: Page, command: str, **arguments: object) -> None:
    """Start one of JupyterLab's commands."""
    page.evaluate("([name, taken]) => { window.jupyterapp.commands.execute(name, taken); }", [command, arguments])


def open_lab(page: Page, address: str, path: str = "") -> None:
    base, _, token = address.partition("|")
    page.goto(f"{base}/lab/tree/{path}?reset&token={token}" if path else f"{base}/lab?reset&token={token}")
    page.wait_for_function("window.jupyterapp !== undefined")
    page.evaluate("() => window.jupyterapp.restored")
    do(page, "application:toggle-left-area")


def watched(page: Page) -> tuple[list[float], int]:
    """Run the notebook; return when the panel's words changed while the cell was busy, and how many outputs it has."""
    page.wait_for_function("window.jupyterapp.shell.currentWidget?.sessionContext !== undefined")
    page.evaluate(READY)
    do(page, "notebook:run-all-cells")
    page.wait_for_selector(PANEL, timeout=60_000)
    changes, shown = [], ""
    is_busy = "[...document.querySelectorAll('.jp-InputPrompt')].some(prompt => prompt.innerText.includes('*'))"
    look = f"[{is_busy}, document.querySelector(\"{PANEL}\")?.innerText ?? '']"
    while True:
        busy, text = page.evaluate(look)
        if not busy:
            break
        if text != shown:
            changes.append(time.monotonic())
            shown = text
        page.wait_for_timeout(1000 * LOOK_S)
    page.wait_for_timeout(500)
    return changes, page.locator(".jp-OutputArea-child").count()


def check(what: str, found: object, holds: bool) -> bool:
    print(f"{'holds' if holds else 'FALLS SHORT':<12}{what}: {found}")
    return holds


def cut_off(page: Page) -> list[str]:
    """Return the texts of the panel that end outside of it."""
    return page.evaluate(
        """(panel) => {
            const box = document.querySelector(panel).getBoundingClientRect();
            return [...document.querySelectorAll(panel + ' *')]
                .filter((part) => part.getBoundingClientRect().right > box.right + 1)
                .map((part) => part.outerHTML.slice(0, 80));
        }""",
        PANEL,
    )


def picture(page: Page, path: Path) -> None:
    page.wait_for_timeout(700)
    page.screenshot(path=path)


def look_at(page: Page, address: str, folder: Path, screen: str, pictures: Path) -> list[bool]:
    name = f"{screen}.ipynb"
    write_notebook(folder / name, screen)
    open_lab(page, address, name)
    changes, outputs = watched(page)
    steps = [later - earlier for earlier, later in itertools.pairwise(changes)]
    results = [
        check(f"{screen}: frames while the cell is busy", len(changes), len(changes) >= 10),
        check(f"{screen}: longest time without a change, s", f"{max(steps):.2f}", max(steps) <= 1 + 2 * LOOK_S),
        check(f"{screen}: outputs of the cell", outputs, outputs == 1),
    ]
    do(page, "docmanager:save")
    page.wait_for_timeout(1500)
    saved = nbformat.read(folder / name, as_version=4)
    kinds = [sorted(output.get("data", {})) for output in saved.cells[0].outputs]
    results.append(check(f"{screen}: saved", kinds, kinds == [["text/html", "text/plain"]]))
    for theme in ("Light", "Dark"):
        do(page, "apputils:change-theme", theme=f"JupyterLab {theme}")
        picture(page, pictures / f"{screen}-{theme.lower()}.png")
    wide = page.viewport_size
    page.set_viewport_size({"width": 480, "height": 900})
    page.wait_for_timeout(700)
    results.append(check(f"{screen}: cut off in a narrow window", cut_off(page), not cut_off(page)))
    picture(page, pictures / f"{screen}-narrow.png")
    page.set_viewport_size(wide)
    do(page, "apputils:change-theme", theme="JupyterLab Light")
    do(page, "notebook:shutdown-kernel")
    return results


def look_at_saved(page: Page, address: str, folder: Path, screen: str, pictures: Path) -> list[bool]:
    """Open a copy of the saved notebook, which nobody trusts, without a kernel."""
    saved = nbformat.read(folder / f"{screen}.ipynb", as_version=4)
    saved.metadata["copied"] = True
    nbformat.write(saved, folder / f"{screen}-saved.ipynb")
    open_lab(page, address)
    kernel = {"shouldStart": False, "canStart": False, "autoStartDefault": False}
    do(page, "docmanager:open", path=f"{screen}-saved.ipynb", factory="Notebook", kernelPreference=kernel)
    page.wait_for_selector(".jp-OutputArea-output")
    page.wait_for_timeout(1500)
    text = page.inner_text(".jp-OutputArea-output")
    drawn = page.evaluate(
        "[...document.querySelectorAll('.jp-OutputArea-output img')].filter(image => image.naturalWidth > 0).length"
    )
    picture(page, pictures / f"{screen}-saved.png")
    return [
        check(f"{screen}: words in the saved notebook", text.split("\n")[0], "epoch" in text and "Images/s" in text),
        check(f"{screen}: pictures in the saved notebook", drawn, drawn == 6),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--pictures", default="pictures", type=Path)
    parser.add_argument("--screens", nargs="+", default=["notebook", "widgets"])
    options = parser.parse_args()
    options.pictures.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        for screen in options.screens:
            page = browser.new_page(viewport={"width": 1100, "height": 900})
            results += look_at(page, address, Path(name), screen, options.pictures)
            results += look_at_saved(page, address, Path(name), screen, options.pictures)
            page.close()
        browser.close()
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
