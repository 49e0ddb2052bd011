"""Measure the time from click to trained: from starting Python to a network trained on the images of a slow drive.

    python tests/benchmarks/bench_click_to_trained.py --data cifar10-images.zip --peers-python PATH

The slow drive is a real FUSE mount (tests/doubles/slow_drive.py) with a latency for each open and listing, a limited
bandwidth and a maximum number of concurrent requests. It is mounted again for every run, so nothing on it is cached.
Every run is a new process, and its time includes the start of Python and the import of torch. All systems train the
same network for the same number of epochs, on the CPU, in interleaved rounds. A second visit is a new session: the
local folder is empty, and the drive holds the pack that the first visit saved. The second table shows what the data
costs: the time without the start of Python and torch, whose first step takes two seconds, and without three epochs of
training on a complete pack. Systems that open one file after another run only once. The part `visits` measures
`prepare()` and `train()` separately, and the part `starts` measures `prepare(start="now")`, which trains while files
still arrive.

The benchmark needs root or `fusermount3`, `mfusepy`, and `rclone`. `--peers-python` is the Python of an environment
with FFCV and WebDataset, see `bench_loader.py`, and with colabkit, for the network: `uv pip install --python PATH -e .`
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

from far_mounts import FuseMount
from rounds import Bench, Found, child, paired, verdict

IMAGE_FOLDER = "ImageFolder and DataLoader"
SYSTEMS = {
    "start": "start of Python and torch, with one step",
    "direct": f"{IMAGE_FOLDER} on the drive",
    "copied": f"cp -r, then {IMAGE_FOLDER}",
    "unzipped": f"copied and extracted zip, {IMAGE_FOLDER}",
    "ffcv": "rclone copy, then FFCV",
    "webdataset": "WebDataset, shards made before",
    "first": "colabkit, first visit, files",
    "now": "colabkit, first visit, files, start='now'",
    "zipped": "colabkit, first visit, zip",
    "second": "colabkit, second visit",
}
OURS = ("first", "now", "zipped", "second")
PEERS = ("ffcv", "webdataset")
ONCE = ("direct", "copied")
"""Systems that take many minutes, so they run in the first round only."""

BATCH = 64
SHARDS = 8
DEADLINE_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="zip archive of images in train/CLASS/; by default generated")
    parser.add_argument("--peers-python", help="interpreter with FFCV and WebDataset")
    parser.add_argument("--files", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=40)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--bandwidth", type=float, default=20e6, help="bytes per second")
    parser.add_argument("--run", nargs=4, metavar=("SYSTEM", "DRIVE", "LOCAL", "STARTED"), help=argparse.SUPPRESS)
    known, _ = parser.parse_known_args()
    if known.run:
        system, drive, local, started = known.run
        print(json.dumps(run(system, Path(drive), Path(local), known.epochs, float(started))))
    else:
        Bench.main(parser, {"click": click, "visits": visits, "starts": starts}, rounds=3, quick={"files": 60})


def click(bench: Bench) -> None:
    """Run all systems in interleaved rounds; round 0 is a warm-up."""
    # The warm-up loads all packages into the page cache; running one system of each kind is enough.
    found = visited(bench, SYSTEMS, ("unzipped", "zipped", *PEERS))
    base = [SYSTEMS["unzipped"]]
    values = {SYSTEMS[name]: [one["seconds"] for one in rounds] for name, rounds in found.items()}
    bench.show(f"From click to trained: {conditions(bench)}", "s", values, base)
    training_s = bench.options.epochs * statistics.median(one["epochs"][-1] for one in found["first"])
    data = {
        SYSTEMS[name]: [one["seconds"] - one["ready"] - training_s for one in rounds]
        for name, rounds in found.items()
        if name != "start"
    }
    limit = "all files opened, at the drive's limit"
    data[limit] = [open_s(bench, bench.options.files)] * bench.rounds
    medians = bench.show(f"The cost of the data: without the start and {training_s:.1f} s of training", "s", data, base)
    first, now, second, zipped = (data[SYSTEMS[name]] for name in ("first", "now", "second", "zipped"))
    of_files, of_archives = (
        data.get(min(names, key=lambda name: medians.get(name, math.inf)), [])
        for names in ([SYSTEMS["copied"], SYSTEMS["ffcv"]], [SYSTEMS["unzipped"], SYSTEMS["webdataset"]])
    )
    bench.need_paired("first visit / the drive's limit", first, data[limit], 1.1, at_most=True)
    bench.need_paired("first visit, start='now' / the drive's limit", now, data[limit], 1.1, at_most=True)
    bench.need_paired("the best other system from files / first visit", of_files, first, 1.3)
    bench.need_paired("the best other system from files / second visit", of_files, second, 10, "{:.1f}")
    bench.need_paired("the best other system from archives / first visit, zip", of_archives, zipped, 1.3)


def visits(bench: Bench) -> None:
    """Compare `prepare()`, on a first and a second visit, with the least time in which the drive opens all files."""
    options = bench.options
    found = visited(bench, ("first", "second"), ("first",))
    parts = ("prepare", "train")
    values = {f"{SYSTEMS[name]}: {part}()": [one[part] for one in found[name]] for name in found for part in parts}
    limit = "all files opened, at the drive's limit"
    values[limit] = [open_s(bench, options.files)] * bench.rounds
    bench.show(f"The parts of a visit: {conditions(bench)}", "s", values, [limit])


def starts(bench: Bench) -> None:
    """Compare training that starts at once with the longer of the transfer and the training."""
    options = bench.options
    found = visited(bench, ("first", "now"), ("now",))
    link_s = open_s(bench, options.files)
    early, later = found["now"], found["first"]
    # The last epochs of a complete pack show how long training alone takes.
    alone_s = [one["epochs"][-1] for one in later]
    epoch, total, begin = "the first epoch", "prepare() and train()", "from the first request to the first batch"
    epoch_limit, total_limit = (f"the transfer or {one}, if longer" for one in ("one epoch", "all epochs"))
    begin_limit = "files of the first batch, at the drive's limit"
    values = {
        epoch: [one["epochs"][0] for one in early],
        epoch_limit: [max(link_s, one) for one in alone_s],
        total: [one["prepare"] + one["train"] for one in early],
        total_limit: [max(link_s, options.epochs * one) for one in alone_s],
        f"{total}, start='complete'": [one["prepare"] + one["train"] for one in later],
        begin: [one["first_batch"] for one in early],
        begin_limit: [open_s(bench, BATCH)] * bench.rounds,
    }
    bench.show(f"Training while files arrive: {conditions(bench)}", "s", values)
    late_s = statistics.median(values[begin]) - open_s(bench, BATCH)
    bench.verdicts += [
        verdict(f"{epoch} / {epoch_limit}", paired(values, epoch, epoch_limit), 1.1, "{:.2f}", at_most=True),
        verdict(f"{total} / {total_limit}", paired(values, total, total_limit), 1.1, "{:.2f}", at_most=True),
        verdict(f"{begin}, beyond {begin_limit}", late_s, 1.0, "{:.2f} s", at_most=True),
    ]


def open_s(bench: Bench, files: int) -> float:
    """Return the least time in which the drive opens files."""
    return float(files * bench.options.latency_ms / 1e3 / bench.options.at_once)


def conditions(bench: Bench) -> str:
    options = bench.options
    return (
        f"{options.files:,} images, {options.epochs} epochs; drive: {options.latency_ms:g} ms to open a file, "
        f"{options.at_once} requests at once, {options.bandwidth / 1e6:g} MB/s"
    )


def visited(bench: Bench, systems: Iterable[str], warming: Iterable[str]) -> dict[str, list[Found]]:
    """Return what the processes of each system found, one for each round after a warm-up by the systems `warming`."""
    options = bench.options
    root, local = bench.folder / "root", bench.folder / "local"
    shutil.rmtree(root, ignore_errors=True)
    fill(root, bench.archive, options.files)
    every: dict[str, list[Found]] = {name: [] for name in systems}
    latency_s = options.latency_ms / 1e3
    for number in range(bench.rounds + 1):
        for saved in ("colabkit", "early"):
            shutil.rmtree(root / saved, ignore_errors=True)
        for name in every if number == 1 else [one for one in every if one not in ONCE] if number else warming:
            shutil.rmtree(local, ignore_errors=True)
            local.mkdir()
            mount = FuseMount(
                bench.folder / "drive", root, at_once=options.at_once, open_s=latency_s, list_s=latency_s, read_s=0.0,
                bandwidth=options.bandwidth, attr_s=60.0, direct_io=False,
            )  # fmt: skip
            with mount:
                python = options.peers_python if name in PEERS else sys.executable
                if python is None:
                    bench.failed.append(f"{name}: --peers-python is missing")
                    continue
                words = [python, __file__, f"--epochs={options.epochs}", "--run", name, mount.point, local]
                found: Found = child([*words, str(time.time())], DEADLINE_S)
            if "missing" in found:
                bench.failed.append(f"{name}: {found['missing']}")
            elif number:
                every[name].append(found)
    return every


def fill(root: Path, archive: Path, count: int) -> None:
    """Write `count` images of the archive to the drive: files in class folders, a zip archive, and shards."""
    with zipfile.ZipFile(archive) as opened:
        names = sorted(name for name in opened.namelist() if "/train/" in f"/{name}" and not name.endswith("/"))
        chosen = names[:: max(1, len(names) // count)][:count]
        for name in chosen:
            target = root / "images" / Path(name).parent.name / Path(name).name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(opened.read(name))
    shutil.make_archive(str(root / "images"), "zip", root / "images")
    write_shards(root / "images", root / "shards")


def write_shards(images: Path, folder: Path) -> None:
    """Write shuffled tar archives as WebDataset reads them, with the class number of each image."""
    folder.mkdir()
    classes = sorted(path.name for path in images.iterdir())
    paths = sorted(images.rglob("*.*"))
    random.Random(0).shuffle(paths)
    for number in range(SHARDS):
        with tarfile.open(folder / f"{number:05}.tar", "w") as shard:
            for path in paths[number::SHARDS]:
                label = str(classes.index(path.parent.name)).encode()
                name = f"{path.parent.name}-{path.stem}".replace(".", "-")
                shard.add(path, f"{name}.jpg")
                entry = tarfile.TarInfo(f"{name}.cls")
                entry.size = len(label)
                shard.addfile(entry, io.BytesIO(label))


def run(system: str, drive: Path, local: Path, epochs: int, started: float) -> Found:
    """Train on the images of the drive, with one of the systems; return the seconds of known parts."""
    import torch

    train_on([(torch.rand(BATCH, 3, 32, 32), torch.zeros(BATCH, dtype=torch.int64))], 1)
    parts: Found = {"ready": time.time() - started}
    files = drive / "images"
    if system in OURS:
        source = files.with_suffix(".zip") if system == "zipped" else files
        parts |= train_with_colabkit(source, drive, local, epochs, system)
    elif system in PEERS:
        train_on(loader_of(system, drive, local), epochs)
    elif system != "start":
        if system == "copied":
            files = shutil.copytree(files, local / "images")
        elif system == "unzipped":
            shutil.copy(files.with_suffix(".zip"), local)
            shutil.unpack_archive(local / "images.zip", local / "images")
            files = local / "images"
        train_on(image_folder(files), epochs)
    return {"seconds": time.time() - started, **parts}


def train_with_colabkit(source: Path, drive: Path, local: Path, epochs: int, system: str) -> Found:
    import os

    import torch

    import colabkit

    os.environ["COLABKIT_LOCAL"] = str(local)
    saved = None if system == "zipped" else drive / ("early" if system == "now" else "colabkit")
    began = time.perf_counter()
    start = "now" if system == "now" else "complete"
    pack = colabkit.prepare(source, size=32, to=saved, start=start, progress=False)
    prepared_s = time.perf_counter() - began
    loader = colabkit.Loader(pack["train"], BATCH, shuffle=True)
    model = colabkit.small_network(10, (32, 32, 3))
    step = colabkit.supervised_step(model, torch.optim.AdamW(model.parameters()))
    first: list[float] = []

    def timed(batch: object) -> object:
        if not first:
            first.append(time.perf_counter() - began)
        return step(batch)

    began = time.perf_counter()
    report = colabkit.train(timed, loader, epochs=epochs)
    pack.finish()
    epochs_s = [one.seconds for one in report.epochs]
    return {"prepare": prepared_s, "train": report.seconds, "epochs": epochs_s, "first_batch": first[0]}


def image_folder(files: Path) -> Iterable[Any]:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import ToTensor

    return DataLoader(ImageFolder(files, ToTensor()), BATCH, shuffle=True, num_workers=2, persistent_workers=True)


def loader_of(system: str, drive: Path, local: Path) -> Iterable[Any]:
    """Return a loader of another package, after it has copied and written what it needs."""
    import loader_peers
    import packing_systems

    if system == "webdataset":
        return loader_peers.webdataset(str(drive / "shards"))(BATCH)
    at_once = [f"--{option}=16" for option in ("transfers", "checkers")]
    subprocess.run(["rclone", "copy", drive / "images", local / "images", *at_once], check=True)
    packing_systems.ffcv()(str(local / "images"), str(local / "images.beton"))
    return loader_peers.ffcv(str(local / "images.beton"))(BATCH)


def train_on(batches: Iterable[Any], epochs: int) -> None:
    import torch

    import colabkit

    model = colabkit.small_network(10, (32, 32, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(epochs):
        for images, labels in batches:
            loss = torch.nn.functional.cross_entropy(model(inputs_of(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def inputs_of(images: Any) -> Any:
    """Return images as floats in [0, 1], with their channels first."""
    # FFCV's images have their channels last.
    images = images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)
    return images if images.is_floating_point() else images.float().div_(255)


if __name__ == "__main__":
    main()
