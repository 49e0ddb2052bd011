"""Count clicks and measure the machine time from the uploaded template to a network trained on photos on a slow Drive.

    python tests/benchmarks/bench_one_click.py

A real JupyterLab in Chromium opens the self-contained template, in an environment without colabkit and with a kernel
like Colab's. Drive is the fake of `google.colab`: a FUSE mount (tests/doubles/slow_drive.py) that takes 25 ms for each
open and each listing, 16 at once, at 100 MB/s. The page itself counts the clicks and the changed fields; a click into a
field counts as part of its change. The first run has the default settings, and Drive is mounted during it.

In interleaved rounds, the time from the click on Train until the launcher has finished is compared with the minimum
time of the same work: a copy of the same photos by as many plain threads as help, and a plain PyTorch loop over decoded
images in memory, with the same network, image size, batches, epochs and validation, but without augmentation,
checkpoints, panel and report. Each round uses a different folder with the same photos. The benchmark needs root or
`fusermount3`, mfusepy and Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

import numpy as np
from far_side import DOUBLE, Colab
from jupyter_lab import Lab, Server, chromium, lab_server, opened_browser
from kernels import link_packages, make_environment
from launcher_page import LAUNCHER
from pictures import fitted_by_pillow, photo, saved
from rounds import Bench
from slow_drive import detach

import colabkit

DRIVE = {"open_s": 0.025, "list_s": 0.025, "at_once": 16, "bandwidth": 100e6, "attr_s": 60.0, "direct_io": False}
THREADS = (8, 16, 32, 64)
"""Numbers of threads of which the fastest copies the photos."""

TINTS = {"alder": (40, 0, 0), "birch": (0, 40, 0), "cedar": (0, 0, 40), "elm": (0, 0, 0)}
HEIGHT, WIDTH = 375, 500
DEADLINE_S = 1200.0
_WATCH = """
    window.clicks = [];
    window.changed = [];
    const isField = target => target.matches('input, textarea, select, [contenteditable=true]');
    const name = (target, around) => (target.labels?.[0] ?? target.closest(around) ?? target).innerText.trim();
    addEventListener('pointerdown', ({isTrusted, target}) => {
        if (isTrusted && !isField(target)) window.clicks.push(name(target, 'button, .lm-MenuBar-item, .lm-Menu-item'));
    }, true);
    addEventListener('input', ({isTrusted, target}) => {
        if (isTrusted) window.changed.push(name(target, '.cm-content'));
    }, true);
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=5, help="in the rounds; at first, the default")
    parser.add_argument("--bare", nargs=2, metavar=("PHOTOS", "MYDRIVE"), help=argparse.SUPPRESS)
    known, _ = parser.parse_known_args()
    if known.bare:
        serve_bare(*map(Path, known.bare))
    else:
        Bench.main(parser, {"one click": run}, rounds=2, quick={"photos": 80, "epochs": 1})


def run(bench: Bench) -> None:
    """Train with the default settings, then in rounds that alternate with the plain copy and loop."""
    options = bench.options
    colab = Colab(bench.folder / "colab")
    folders = [colab.root / "MyDrive" / f"photos {number}" for number in range(bench.rounds + 2)]
    write_photos(folders[0], options.photos)
    for folder in folders[1:]:
        shutil.copytree(folders[0], folder, copy_function=os.link)
    colab.plan(drive=DRIVE)
    with ExitStack() as running:
        running.callback(detach, Path(colab.point))
        lab = running.enter_context(opened_template(bench.folder, colab))
        began = time.perf_counter()
        lab.run_all()
        lab.wait_until_idle(DEADLINE_S)
        print(f"Run All, with the installation and the training on the digits: {time.perf_counter() - began:.0f} s")
        first_s = train(lab, folders[0].name)
        clicks, fields = count(lab)
        print(f"clicks: {', '.join(clicks)}; fields: {', '.join(fields)}; consents: {colab.count('consent')}")
        print(f"the first training, with the mount: {first_s:.1f} s; the launcher says: {said(lab)}")

        child = running.enter_context(bare_process(folders[0], Path(colab.point) / "MyDrive"))
        # The child answers once it has decoded the photos.
        threads = ask(child, "", 0)[0]
        figures: dict[str, list[float]] = {"colabkit": [], "plain copy and loop": [], "copy alone": []}
        for number, folder in enumerate(folders[2:]):
            for turn in (1, 0) if number % 2 else (0, 1):
                if turn == 0:
                    figures["colabkit"].append(train(lab, folder.name, options.epochs))
                else:
                    copy_s, loop_s = ask(child, folder.name, options.epochs)
                    figures["plain copy and loop"].append(copy_s + loop_s)
                    figures["copy alone"].append(copy_s)
    files = len([*(bench.folder / "lab").glob("*.ipynb")])
    title = f"{options.photos:,} photos, {options.epochs} epochs; the plain copy with {threads:.0f} threads"
    bench.show(title, "s", figures, ["plain copy and loop"])
    ratios = [one / two for one, two in zip(figures["colabkit"], figures["plain copy and loop"], strict=True)]
    print(f"ratio of each round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    bench.figures = {"clicks": clicks, "fields": fields, "first": first_s}
    bench.need("files", files, 1, "{:.0f}", at_most=True)
    bench.need("fields", len(fields), 1, "{:.0f}", at_most=True)
    bench.need("clicks", len(clicks), 3, "{:.0f}", at_most=True)
    bench.need("time relative to plain copy and loop", statistics.median(ratios), 1.2, "{:.2f}", at_most=True)


def write_photos(folder: Path, count: int) -> None:
    """Write JPEG files with the size and grain of photos, in four class folders; the classes differ in tint."""
    grain = np.random.default_rng(0).normal(0, 12, (8, HEIGHT, WIDTH, 3))
    for number in range(count):
        name, tint = [*TINTS.items()][number % len(TINTS)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = 0.6 * photo(HEIGHT, WIDTH, number) + grain[number % len(grain)] + 50 + np.array(tint)
        data = saved(pixels.clip(0, 255).astype(np.uint8), "JPEG", quality=88)
        (folder / name / f"{number:05d}.jpg").write_bytes(data)


@contextmanager
def opened_template(folder: Path, colab: Colab) -> Iterator[Lab]:
    """Open the template in JupyterLab, with a kernel like Colab's in an environment without colabkit."""
    python = make_environment(folder / "environment", link_packages(sysconfig.get_path("purelib"), folder / "packages"))
    doubles = DOUBLE.parent
    spec = folder / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    search = os.pathsep.join(map(str, (DOUBLE, doubles)))
    environ = {
        "PYTHONPATH": search,
        "COLAB_DOUBLE": str(colab._file),
        "COLAB_POINT": colab.point,
        "HOME": str(colab.home),
    }
    argv = [str(python), str(doubles / "colab_kernel.py"), "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python", "env": environ}))
    (folder / "lab").mkdir()
    report = colabkit.write_template(folder / "lab")
    path = chromium()
    with lab_server(folder / "lab", {"JUPYTER_PATH": str(folder)}) as server, opened_browser(path) as browser:
        lab = watched(Lab.new(browser, server), server)
        lab.open(report.path.name)
        yield lab
        lab.close()


def watched(lab: Lab, server: Server) -> Lab:
    """Make the page record clicks and changed fields; events that scripts create are not trusted and not recorded."""
    assert [path.name for path in server.folder.glob("*.ipynb")] == ["colabkit_template.ipynb"]
    lab.page.add_init_script(_WATCH)
    return lab


def count(lab: Lab) -> tuple[list[str], list[str]]:
    """Return the clicked buttons and menu entries, and the changed fields."""
    clicks, changed = lab.page.evaluate("() => [window.clicks, window.changed]")
    return clicks, [*dict.fromkeys(changed)]


def train(lab: Lab, name: str, epochs: int | None = None) -> float:
    """Enter a folder on Drive, click Train, and return the seconds until the launcher has finished."""
    launcher = lab.page.locator(LAUNCHER)
    for label, text in {**({"Epochs": str(epochs)} if epochs else {}), "Source": f"drive:{name}"}.items():
        launcher.get_by_label(label, exact=True).click()
        lab.page.keyboard.press("Control+a")
        lab.page.keyboard.type(text)
        lab.page.keyboard.press("Enter")
    lab.wait_for_text(LAUNCHER, f"train_on('drive:{name}'")
    lab.wait_for_text(LAUNCHER, "images, 4 classes" if epochs else "Google Drive is not connected")
    button, stop = (launcher.get_by_role("button", name=one, exact=True) for one in ("Train", "Stop"))
    button.click()
    began = time.perf_counter()
    stop.wait_for()
    stop.wait_for(state="hidden", timeout=1e3 * DEADLINE_S)
    seconds = time.perf_counter() - began
    assert said(lab).startswith("Done"), said(lab)
    return seconds


def said(lab: Lab) -> str:
    return lab.page.locator(f"{LAUNCHER} [role=status], {LAUNCHER} [role=alert]").first.inner_text()


@contextmanager
def bare_process(photos: Path, my_drive: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `serve_bare()` in a process with one thread for PyTorch, like the kernel."""
    command = [sys.executable, __file__, "--bare", str(photos), str(my_drive)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as child:
        yield child
        child.communicate()


def ask(child: subprocess.Popen[str], folder: str, epochs: int) -> list[float]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps([folder, epochs]) + "\n")
    child.stdin.flush()
    answer: list[float] = json.loads(child.stdout.readline())
    return answer


def serve_bare(photos: Path, my_drive: Path, asked: IO[str] = sys.stdin) -> None:
    """For each folder and number of epochs, copy the folder and train; print the seconds of both.

    Without a folder, print the number of threads that copy.
    """
    loop = PlainLoop(photos)
    paths = [str(path.relative_to(photos)) for path in sorted(photos.rglob("*.jpg"))]
    tried = my_drive / "photos 1"
    few = [paths[number :: len(THREADS)] for number in range(len(THREADS))]
    threads = min(THREADS, key=lambda one: copy(tried, few[THREADS.index(one)], one))
    for line in asked:
        folder, epochs = json.loads(line)
        found = [copy(my_drive / folder, paths, threads), loop.train(epochs)] if folder else [threads]
        print(json.dumps(found), flush=True)


def copy(folder: Path, paths: list[str], threads: int) -> float:
    """Copy files with plain threads, and return the seconds."""
    with tempfile.TemporaryDirectory() as target:
        for name in TINTS:
            Path(target, name).mkdir()
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda path: Path(target, path).write_bytes((folder / path).read_bytes()), paths))
        return time.perf_counter() - began


class PlainLoop:
    """A plain PyTorch training loop on decoded photos in memory, with the settings that `train_on()` chooses."""

    def __init__(self, photos: Path) -> None:
        import torch

        from colabkit.notebook.recipe.plan import choose_batch_size, choose_size
        from colabkit.packs import describe_source

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.size = choose_size("auto", describe_source(photos, progress=False), self.device).value
        files = sorted(photos.rglob("*.jpg"), key=lambda path: path.name)
        images = torch.from_numpy(np.stack([fitted_by_pillow(path.read_bytes(), self.size) for path in files]))
        labels = torch.tensor([[*TINTS].index(path.parent.name) for path in files])
        held_out = torch.arange(len(files)) % 5 == 0
        self.trained = images[~held_out], labels[~held_out]
        self.validated = images[held_out], labels[held_out]
        self.batch_size = choose_batch_size("auto", len(self.trained[0]), self.device).value

    def train(self, epochs: int) -> float:
        """Train a new network, validate it after each epoch, and return the seconds."""
        import torch
        from torch.nn.functional import cross_entropy

        from colabkit.training import choose_network

        count = len(self.trained[0])
        network = choose_network("train", "auto", len(TINTS), self.size, count, self.device)
        optimizer, scheduler = network.optimizer(epochs * (count // self.batch_size))
        model, (mean, std) = network.model, (torch.tensor(one).to(self.device) for one in (network.mean, network.std))

        def batch_of(data: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            images, labels = (one[rows].to(self.device) for one in data)
            return ((images / 255 - mean) / std).permute(0, 3, 1, 2), labels

        began = time.perf_counter()
        for _ in range(epochs):
            model.train()
            order = torch.randperm(count)[: count // self.batch_size * self.batch_size]
            for rows in order.view(-1, self.batch_size):
                images, labels = batch_of(self.trained, rows)
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
            model.eval()
            right = 0
            with torch.no_grad():
                for rows in torch.arange(len(self.validated[0])).split(256):
                    images, labels = batch_of(self.validated, rows)
                    right += int((model(images).argmax(1) == labels).sum())
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
