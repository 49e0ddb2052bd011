"""Make pictures of the panel, which Chromium draws in light and dark colors.

    pip install ".[test,browser]" && python tests/doubles/panel_picture.py

By default, these are the README's pictures: a frame of a real run. The run trains a small network on 400 JPEG files,
crops of scikit-learn's two photos. Decoding them takes longer than training, so that the panel has a bottleneck to
report. With `--states`, they are pictures of all states of the panel, at several widths.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import numpy as np
import torch
from jupyter_lab import ROOT, chromium, opened_browser
from panel_states import STATES, render
from PIL import Image
from playwright.sync_api import Browser
from sklearn.datasets import load_sample_images
from torch import nn

import colabkit
from colabkit import augment
from colabkit.foundation import Frame
from colabkit.monitoring.panel.api import Dashboard

TARGET = ROOT / "docs" / "images"
THEMES = {"light": ("#ffffff", "#1f2328"), "dark": ("#0d1117", "#e6edf3")}
BORDERS = {"light": "#d0d7de", "dark": "#30363d"}
WIDTH = 784
WIDTHS = (WIDTH, 400, 200)
# A palette of this many colors makes the files smaller.
COLORS = 128


class KeptFrames:
    def __init__(self) -> None:
        self.frames: list[str] = []

    def paint(self, frame: Frame, final: bool) -> None:
        self.frames.append(frame.html)

    def close(self) -> None:
        pass


def write_photos(folder: Path, count: int, size: tuple[int, int] = (384, 512)) -> Path:
    """Write JPEG files in two classes: crops of two photos."""
    random = np.random.default_rng(0)
    for name, photo in zip(("china", "flower"), load_sample_images().images, strict=True):
        (folder / name).mkdir(parents=True)
        for number in range(count // 2):
            top, left = (random.integers(0, whole - part) for whole, part in zip(photo.shape, size, strict=False))
            piece = Image.fromarray(photo[top : top + size[0], left : left + size[1]])
            piece.save(folder / name / f"{number:03d}.jpg", quality=90)
    return folder


def frames_of_a_run(epochs: int) -> list[str]:
    torch.manual_seed(0)
    # Leave the other cores for decoding.
    torch.set_num_threads(1)
    screen = KeptFrames()
    with tempfile.TemporaryDirectory() as name, chdir(name):
        write_photos(Path("photos"), 400)
        crops = augment.Compose([augment.RandomResizedCrop(64), augment.RandomHorizontalFlip(), augment.Normalize()])
        loader = colabkit.Loader(colabkit.FileDataset("photos"), 16, shuffle=True, transform=crops)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 2),
        )  # fmt: skip
        step = colabkit.supervised_step(model, torch.optim.AdamW(model.parameters(), lr=0.0002))
        held_out = colabkit.Loader(colabkit.FileDataset(write_photos(Path("others"), 64)), 16, transform=crops)
        with Dashboard(screen):
            colabkit.train(step, loader, epochs=epochs, validate=held_out)
    return screen.frames


@contextmanager
def drawn(browser: Browser, theme: str, width: int, frame: str) -> Iterator[None]:
    """Yield a page with a frame."""
    background, color = THEMES[theme]
    page = browser.new_page(viewport={"width": width, "height": 100}, device_scale_factor=2)
    style = f"margin:12px;background:{background};color:{color};--jp-border-color2:{BORDERS[theme]}"
    page.set_content(f'<!doctype html><body style="{style}">{frame}</body>')
    yield page
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--states", nargs="*", metavar="NAME", help="draw these states, or all, instead of a real run")
    options = parser.parse_args()
    if options.states is None:
        frames = frames_of_a_run(options.epochs)
        pictures = {("panel", WIDTH): frames[len(frames) * 3 // 4]}
    else:
        names = options.states or STATES
        pictures = {(name.replace(" ", "-"), width): render(STATES[name])[0] for name in names for width in WIDTHS}
    options.target.mkdir(parents=True, exist_ok=True)
    with opened_browser(chromium()) as browser:
        for (name, width), frame in pictures.items():
            for theme in THEMES:
                size = "" if options.states is None else f"-{width}"
                with drawn(browser, theme, width, frame) as page:
                    # Without a background, the picture suits every dark page.
                    page.evaluate("document.body.style.background = 'none'")
                    taken = page.locator("[aria-label='Training panel']").screenshot(omit_background=True)
                few = Image.open(io.BytesIO(taken)).quantize(
                    COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
                )
                few.save(options.target / f"{name}{size}-{theme}.png", optimize=True)


if __name__ == "__main__":
    main()
