"""Make the README's pictures of the launcher during a real run in JupyterLab, in the light and the dark theme.

pip install ".[bench]" jupyterlab && python tests/system/browser/launcher_picture.py --chromium /usr/bin/chromium

The script clicks "Stage and train" for crops of scikit-learn's two photos, in a folder that stands in for Drive.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
from pathlib import Path

from lab import READY, do, open_lab, save_notebook, server
from panel_picture import TARGET, write_photos
from PIL import Image
from playwright.sync_api import Page, sync_playwright

LAUNCHER = ".colabkit-launcher"
# A palette of this size makes the file smaller.
COLORS = 256


def fill(page: Page, label: str, text: str) -> None:
    page.get_by_label(label, exact=True).fill(text)


def take(page: Page, path: Path) -> None:
    image = Image.open(io.BytesIO(page.locator(LAUNCHER).screenshot())).convert("RGB")
    few = image.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(path, image.size, path.stat().st_size)


def take_pictures(page: Page, address: str, target: Path, epochs: int) -> None:
    open_lab(page, address, "launcher.ipynb")
    page.wait_for_function("window.jupyterapp.shell.currentWidget?.sessionContext !== undefined")
    page.evaluate(READY)
    do(page, "notebook:run-all-cells")
    page.wait_for_selector(LAUNCHER, timeout=60_000)
    fill(page, "Source", "drive:photos")
    fill(page, "Epochs", str(epochs))
    page.locator(f"{LAUNCHER} button:visible", has_text="Stage and train").first.click()
    panel = page.locator(f"{LAUNCHER} [aria-label='Training panel']")
    panel.get_by_text(f"epoch {epochs // 3}/{epochs}").wait_for(timeout=120_000)
    for theme in ("light", "dark"):
        do(page, "apputils:change-theme", theme=f"JupyterLab {theme.capitalize()}")
        # Wait until the page is painted.
        page.wait_for_timeout(1000)
        # Changing the theme uses a CPU, so the doctor may briefly report a bottleneck.
        panel.get_by_text("Data loading needs no fix").wait_for(timeout=60_000)
        take(page, target / f"launcher-{theme}.png")
    do(page, "notebook:shutdown-kernel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--target", type=Path, default=TARGET)
    options = parser.parse_args()
    options.target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        write_photos(Path(name) / "drive" / "photos", 2000, (48, 48))
        # Leave a CPU to the browser.
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["COLABKIT_DRIVE"] = str(Path(name) / "drive")
        save_notebook(Path(name) / "launcher.ipynb", ["%load_ext colabkit", "%colabkit"])
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 960, "height": 1400}, device_scale_factor=2)
        with server(Path(name)) as address:
            take_pictures(page, address, options.target, options.epochs)
        browser.close()


if __name__ == "__main__":
    main()
