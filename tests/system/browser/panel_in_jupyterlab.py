"""Train in a real JupyterLab in Chromium, and check the panel in the running and in the saved notebook.

pip install ".[bench]" jupyterlab && python tests/system/browser/panel_in_jupyterlab.py --pictures pictures

The script checks that the panel's text changes at least every 1.5 seconds while the cell is running, and that the panel
is the cell's only output. In the saved, untrusted notebook without a kernel, the panel must be readable. A narrow
window must cut nothing off. The script saves pictures of each state.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from lab import READY, check, cut_off, do, open_lab, picture, save_notebook, server
from playwright.sync_api import Page, sync_playwright

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


def watched(page: Page) -> tuple[list[float], int]:
    """Run the notebook; return the times at which the panel's text changed, and the number of outputs."""
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


def look_at(page: Page, address: str, folder: Path, screen: str, pictures: Path) -> list[bool]:
    name = f"{screen}.ipynb"
    save_notebook(folder / name, [TRAINING.replace("SCREEN", repr(screen))])
    open_lab(page, address, name)
    changes, outputs = watched(page)
    steps = [later - earlier for earlier, later in itertools.pairwise(changes)]
    results = [
        check(f"{screen}: frames while the cell is busy", len(changes), len(changes) >= 10),
        check(f"{screen}: longest time without a change, s", f"{max(steps):.2f}", max(steps) <= 1.5),
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
    results.append(check(f"{screen}: cut off in a narrow window", cut_off(page, PANEL), not cut_off(page, PANEL)))
    picture(page, pictures / f"{screen}-narrow.png")
    page.set_viewport_size(wide)
    do(page, "apputils:change-theme", theme="JupyterLab Light")
    do(page, "notebook:shutdown-kernel")
    return results


def look_at_saved(page: Page, address: str, folder: Path, screen: str, pictures: Path) -> list[bool]:
    """Open an untrusted copy of the saved notebook without a kernel, save a picture, and check the panel."""
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
        check(f"{screen}: words in the saved notebook", text.split("\n")[0], "epoch" in text and "images/s" in text),
        check(f"{screen}: pictures in the saved notebook", drawn, drawn >= 6),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--pictures", default="pictures", type=Path)
    parser.add_argument("--screens", nargs="+", default=["notebook"])
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
