"""Make the README's pictures of the launcher during a real run in JupyterLab, in the light and the dark theme.

    pip install ".[test,browser]" && python tests/doubles/launcher_picture.py

The script clicks "Train" for crops of scikit-learn's two photos, in a folder that stands in for Drive.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path

from jupyter_lab import PANEL, WORK_S, Lab, chromium, lab_server, opened_browser
from launcher_page import LAUNCHER, LauncherPage
from panel_picture import TARGET, write_photos
from PIL import Image

# A palette of this many colors makes the file smaller.
COLORS = 256


def take(lab: Lab, path: Path) -> None:
    image = Image.open(io.BytesIO(lab.page.locator(LAUNCHER).screenshot())).convert("RGB")
    few = image.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(path, image.size, path.stat().st_size)


def take_pictures(lab: Lab, target: Path, epochs: int) -> None:
    launcher = LauncherPage(lab)
    lab.use_width(960, 1400)
    launcher.open()
    launcher.fill("Source", "drive:photos")
    launcher.fill("Epochs", str(epochs))
    lab.wait_for_text(LAUNCHER, "2,000 images")
    launcher.button("Train").click()
    panel = f"{LAUNCHER} {PANEL}"
    launcher.waits_for_epoch(epochs // 3, WORK_S)
    for theme in ("Light", "Dark"):
        lab.use_theme(theme)
        # Changing the theme uses a CPU, so the doctor may briefly report a bottleneck.
        lab.wait_for_text(panel, "Data loading needs no fix")
        take(lab, target / f"launcher-{theme.lower()}.png")
    lab.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--target", type=Path, default=TARGET)
    options = parser.parse_args()
    options.target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photos(folder / "drive" / "photos", 2000, (48, 48))
        environ = {"COLABKIT_DRIVE": str(folder / "drive")}
        with lab_server(folder, environ) as server, opened_browser(chromium()) as browser:
            take_pictures(Lab.new(browser, server, scale=2.0), options.target, options.epochs)


if __name__ == "__main__":
    main()
