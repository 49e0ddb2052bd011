"""Click through the launcher and the template notebook in a real JupyterLab in Chromium, and check them.

pip install ".[bench]" jupyterlab && python tests/system/browser/launcher_in_jupyterlab.py --pictures pictures

The script checks that the template finishes after "Run All Cells" in the menu. A double click on the launcher's "Stage
and train" must train once, move the progress bar, and show the live panel and the reports. The launcher must report an
interrupt, resume, and show errors such as a wrong path. A narrow window must cut nothing off. The script saves
pictures.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import numpy as np
from lab import READY, ROOT, check, cut_off, do, open_lab, picture, save_notebook, server
from PIL import Image
from playwright.sync_api import Locator, Page, sync_playwright

LAUNCHER = ".colabkit-launcher"
PANEL = "[aria-label='Training panel']"
OPEN = ["%load_ext colabkit", "%colabkit"]
VIEW = "application/vnd.jupyter.widget-view+json"
LOOK_S = 0.05


def wait_until(page: Page, holds: Callable[[], bool], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        page.wait_for_timeout(1000 * LOOK_S)
    return holds()


def click_in_menu(page: Page, menu: str, item: str) -> None:
    page.locator(".lm-MenuBar-itemLabel", has_text=menu).first.click()
    page.locator(".lm-Menu-itemLabel", has_text=item).first.click()


def is_idle(page: Page) -> bool:
    return not page.evaluate(
        "[...document.querySelectorAll('.jp-InputPrompt')].some(prompt => prompt.innerText.includes('*'))"
    )


def open_notebook(page: Page, address: str, name: str) -> None:
    open_lab(page, address, name)
    page.wait_for_function("window.jupyterapp.shell.currentWidget?.sessionContext !== undefined")
    page.evaluate(READY)


def look_at_template(page: Page, address: str, folder: Path, pictures: Path) -> list[bool]:
    shutil.copy(ROOT / "notebooks" / "colabkit_template.ipynb", folder)
    open_notebook(page, address, "colabkit_template.ipynb")
    click_in_menu(page, "Run", "Run All Cells")
    page.wait_for_timeout(1000)
    ended = wait_until(page, lambda: is_idle(page), 240)
    do(page, "notebook:move-cursor-down")
    text = page.evaluate(
        "window.jupyterapp.shell.currentWidget.content.model.cells.get(0) && "
        "[...window.jupyterapp.shell.currentWidget.content.model.cells].map(cell => "
        "JSON.stringify(cell.toJSON().outputs ?? '')).join('\\n')"
    )
    page.locator(PANEL).first.scroll_into_view_if_needed()
    picture(page, pictures / "template.png")
    do(page, "notebook:shutdown-kernel")
    return [
        check("template: all cells have run", ended, ended),
        check("template: errors", text.count('"ename"'), '"ename"' not in text),
        check("template: trained to the end", "held-out images" in text, "held-out images" in text),
    ]


def button(page: Page, label: str) -> Locator:
    return page.locator(f"{LAUNCHER} button:visible", has_text=label).first


def said(page: Page) -> str:
    return page.locator(f"{LAUNCHER} [role=status], {LAUNCHER} [role=alert]").first.inner_text()


def fill(page: Page, label: str, text: str) -> None:
    page.get_by_label(label, exact=True).fill(text)


def is_over(page: Page) -> bool:
    found = page.locator(f"{LAUNCHER} > * [role=status], {LAUNCHER} [role=alert]").all_inner_texts()
    return any(text.startswith(("Done", "Stopped", "Cannot")) for text in found)


def watched(page: Page) -> tuple[set[str], set[str]]:
    """Wait until the work is finished, and return the observed widths of the progress bar and texts of the panel."""
    bars: set[str] = set()
    frames: set[str] = set()
    look = f"""[
        document.querySelector('{LAUNCHER} .progress')?.clientHeight > 0
            ? document.querySelector('{LAUNCHER} .progress-bar').style.width : '',
        document.querySelector("{LAUNCHER} {PANEL}")?.innerText ?? '']"""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and not is_over(page):
        bar, frame = page.evaluate(look)
        bars.add(bar)
        frames.add(frame)
        page.wait_for_timeout(1000 * LOOK_S)
    return bars - {"", "0%"}, frames - {""}


def write_images(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    for name in ("dark", "light"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        name = ("dark", "light")[number % 2]
        pixels = random.integers(0, 128, (48, 48, 3), dtype=np.uint8) + 100 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:05d}.png")


def look_at_launcher(page: Page, address: str, folder: Path, pictures: Path) -> list[bool]:
    write_images(folder / "two classes", 4000)
    path = folder / "launcher.ipynb"
    save_notebook(path, OPEN)
    open_notebook(page, address, "launcher.ipynb")
    do(page, "notebook:run-all-cells")
    page.wait_for_selector(LAUNCHER, timeout=60_000)
    picture(page, pictures / "launcher-light.png")
    results = [check("launcher: opened in one output", True, page.locator(LAUNCHER).count() == 1)]

    fill(page, "Source", "no/such/<b>place</b>")
    button(page, "Stage").click()
    wait_until(page, lambda: is_over(page), 30)
    wrong = said(page)
    results.append(
        check("launcher: an error about a wrong path is shown", wrong, "Cannot read 'no/such/<b>place</b>'" in wrong)
    )
    picture(page, pictures / "launcher-error.png")

    fill(page, "Source", "two classes")
    fill(page, "Epochs", "6")
    page.locator(f"{LAUNCHER} .widget-radio label", has_text="disk:").last.click()
    button(page, "Stage and train").dblclick()
    wait_until(page, lambda: not is_over(page), 10)
    page.wait_for_selector(f"{LAUNCHER} {PANEL}", timeout=120_000)
    wait_until(page, lambda: "epoch 2/6" in page.inner_text(f"{LAUNCHER} {PANEL}"))
    picture(page, pictures / "launcher-running.png")
    do(page, "notebook:interrupt-kernel")
    wait_until(page, lambda: is_over(page))
    stopped = said(page)
    results.append(check("launcher: an interrupt is reported", stopped, stopped.startswith("Stopped")))
    picture(page, pictures / "launcher-stopped.png")

    button(page, "Stage and train").click()
    wait_until(page, lambda: not is_over(page), 10)
    bars, frames = watched(page)
    text = page.inner_text(LAUNCHER)
    results += [
        check("launcher: trained to the end", said(page), said(page).startswith("Done")),
        check("launcher: frames of the live panel", len(frames), len(frames) >= 3),
        check("launcher: resumes the training", "(6 in total)" in text, "(6 in total)" in text),
        check("launcher: reports", "Already staged" in text, "Already staged" in text and "Already packed" in text),
    ]

    page.locator(f"{LAUNCHER} button", has_text="Pack options").click()
    fill(page, "Image size", "44")
    button(page, "Stage and train").click()
    wait_until(page, lambda: not is_over(page), 10)
    bars, frames = watched(page)
    results += [
        check("launcher: other options make another pack", said(page), said(page).startswith("Done")),
        check("launcher: widths of the bar", len(bars), len(bars) >= 2),
    ]
    page.locator(f"{LAUNCHER} button", has_text="Show the code").click()
    page.wait_for_selector(f"{LAUNCHER} pre")
    code = page.inner_text(f"{LAUNCHER} pre")
    results.append(check("launcher: the code is shown", code.splitlines()[0], "colabkit.stage('two classes'" in code))
    do(page, "docmanager:save")
    page.wait_for_timeout(1500)
    kinds = [sorted(output.get("data", {})) for output in nbformat.read(path, as_version=4).cells[-1].outputs]
    results.append(check("launcher: saved", kinds, kinds == [[VIEW, "text/plain"], ["text/html", "text/plain"]]))
    hidden = page.locator(".jp-OutputArea-output").last.inner_text()
    results.append(check("launcher: the saved panel is hidden", hidden, hidden == ""))
    results += look_around(page, pictures)
    do(page, "notebook:shutdown-kernel")
    return results


def look_at_saved(page: Page, address: str, pictures: Path) -> list[bool]:
    """Open the saved notebook without a kernel, save a picture, and check the text."""
    open_lab(page, address)
    kernel = {"shouldStart": False, "canStart": False, "autoStartDefault": False}
    do(page, "docmanager:open", path="launcher.ipynb", factory="Notebook", kernelPreference=kernel)
    page.wait_for_selector(".jp-OutputArea-output")
    page.wait_for_timeout(1500)
    picture(page, pictures / "launcher-saved.png")
    text = page.locator(".jp-OutputArea-output").last.inner_text()
    is_whole = all(words in text for words in ("Done in", "epoch 6/6", "Already staged", "Trained 6 epochs"))
    return [check("launcher: words in the saved notebook", text.splitlines()[:2], is_whole)]


def look_around(page: Page, pictures: Path) -> list[bool]:
    """Save pictures of the launcher in several widths and both themes; check that the light one cuts nothing off."""
    results = []
    for theme in ("Light", "Dark"):
        do(page, "apputils:change-theme", theme=f"JupyterLab {theme}")
        for width in (1000, 640, 360):
            page.set_viewport_size({"width": width + 140, "height": 2400})
            page.wait_for_timeout(500)
            if theme == "Light":
                cut = cut_off(page, LAUNCHER)
                results.append(check(f"launcher: cut off at {width} px", cut, not cut))
            page.locator(LAUNCHER).screenshot(path=pictures / f"launcher-{theme.lower()}-{width}.png")
    do(page, "apputils:change-theme", theme="JupyterLab Light")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--pictures", default="pictures", type=Path)
    parser.add_argument("--only", choices=["template", "launcher"])
    options = parser.parse_args()
    options.pictures.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 1000})
        if options.only != "launcher":
            results += look_at_template(page, address, Path(name), options.pictures)
        if options.only != "template":
            results += look_at_launcher(page, address, Path(name), options.pictures)
            results += look_at_saved(page, address, options.pictures)
        browser.close()
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
