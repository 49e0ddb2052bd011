"""Make the pictures of the panel in README: a frame of a real run, drawn by Chromium in light and dark.

pip install ".[bench]" && python tests/browser/panel_picture.py --chromium /usr/bin/chromium
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright
from torch import nn

import colabkit
from colabkit.panel import Dashboard

TARGET = Path(__file__).parent.parent.parent / ".github" / "images"
THEMES = {"light": ("#ffffff", "#1f2328"), "dark": ("#0d1117", "#e6edf3")}
EPOCHS = 8


class KeptFrames:
    """A screen that keeps what it is given."""

    def __init__(self) -> None:
        self.frames: list[str] = []

    def paint(self, html: str, text: str, final: bool) -> None:
        self.frames.append(html)


def frames_of_a_run(data: str) -> list[str]:
    torch.manual_seed(0)
    screen = KeptFrames()
    with tempfile.TemporaryDirectory() as name:
        packed = colabkit.pack(data, Path(name) / "pack.h5", progress=False)
        dataset = colabkit.open_pack(packed.path)["train"]
        loader = colabkit.Loader(dataset, 32, shuffle=True, transform=colabkit.augment.Normalize())
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(256, len(dataset.classes)),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
        with Dashboard(screen, 0.25):
            colabkit.train(colabkit.supervised_step(model, optimizer), loader, epochs=EPOCHS)
    return screen.frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--data", default="samples:digits")
    options = parser.parse_args()
    frames = frames_of_a_run(options.data)
    frame = frames[len(frames) * 3 // 4]
    TARGET.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        for theme, (background, color) in THEMES.items():
            page = browser.new_page(viewport={"width": 784, "height": 256}, device_scale_factor=2)
            page.set_content(f'<body style="margin:12px;background:{background};color:{color}">{frame}</body>')
            page.screenshot(path=TARGET / f"panel-{theme}.png")
        browser.close()


if __name__ == "__main__":
    main()
