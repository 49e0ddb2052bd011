"""Measure packs of shards on a web server: the speed within a small cache, and the quality of the shuffle.

    python tests/benchmarks/bench_remote.py --peers-python PATH

The server runs in a separate process. Its connections share one bandwidth, and each request waits for one latency.
`link` compares the bytes that arrive per second with those of plain concurrent downloads, and watches the disk usage of
the cache. `peers` does the same for first epochs of colabkit and litdata, each in a new process with an empty cache.
`shuffle` compares windows of shards with a full shuffle: it prints how far the classes in a batch differ from those of
all samples, for a pack whose classes follow each other and for one whose samples were shuffled before packing.
`simulate` compares the predictions of `colabkit.simulate` with an epoch, and times a simulation of a million samples.
`cache` counts the bytes that later epochs download with larger caches.

litdata reads the same rows by obstore, as from S3, with two workers. With chunks of 8 MB instead of those in `CHUNKS`,
its two workers wait for each other until it gives up. `--peers-python` is the Python of an environment with litdata,
which `tests/benchmarks/install_peers.sh` creates.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))

import numpy as np
from remote_packs import cache_root, largest_usage
from rounds import HERE, Bench, Found, child, table, timed

import colabkit
from colabkit import sampler
from colabkit.foundation import format_bytes
from colabkit.packs import DOWNLOADS

BLOCK_BYTES = 64 << 10
DEADLINE_S = 300
CHUNKS = ("16 MB", "64 MB")
"""Sizes of litdata's chunks: the fastest of 4, 8, 16 and 64 MB for two workers, and the default."""
SIDE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=800, help="size of the pack")
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--bandwidth", type=float, default=50e6, help="bytes per second")
    parser.add_argument("--latency-ms", type=float, default=20.0)
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter with litdata")
    parser.add_argument("--serve", type=Path, help="serve this folder (for the benchmark's own use)")
    if "--serve" in sys.argv:
        serve(parser.parse_args())
    else:
        Bench.main(parser, PARTS, rounds=5)


def serve(options: argparse.Namespace) -> None:
    """Serve a folder with a limited bandwidth, and print the port."""
    lock, free_at, sent = threading.Lock(), time.monotonic(), [0]

    def pass_link(size: int) -> None:
        nonlocal free_at
        with lock:
            free_at = max(free_at, time.monotonic() - 0.1) + size / options.bandwidth
            until = free_at
        time.sleep(max(0.0, until - time.monotonic()))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path.endswith("/sent"):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(str(sent[0]).encode())
                self.close_connection = True
                return
            data = self.answer()
            # Ignore broken connections, since the loader cancels downloads at the end of an iteration.
            with suppress(ConnectionError):
                for start in range(0, len(data), BLOCK_BYTES):
                    pass_link(len(data[start : start + BLOCK_BYTES]))
                    self.wfile.write(data[start : start + BLOCK_BYTES])
                sent[0] += len(data) * ("-" in self.path)

        def do_HEAD(self) -> None:
            self.answer()

        def answer(self) -> memoryview:
            """Send the status and the headers, as S3 does, and return the bytes of the answer to GET."""
            time.sleep(options.latency_ms / 1000)
            path = options.serve / self.path.strip("/")
            first, size = 0, path.stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            last = size - 1
            if asked:
                first, last = int(asked[1]), min(last, int(asked[2] or last))
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(last + 1 - first))
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            with path.open("rb") as file:
                file.seek(first)
                return memoryview(file.read(last + 1 - first))

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


@contextmanager
def serving(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Serve a folder and those beside it, and yield the address of the pack in it."""
    words = [
        "--serve",
        str(folder.parent),
        "--bandwidth",
        str(options.bandwidth),
        "--latency-ms",
        str(options.latency_ms),
    ]
    process = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/{folder.name}/pack.h5"
    finally:
        process.kill()
        process.wait()


def measure_link(bench: Bench) -> None:
    """Compare two epochs, with a cache of a tenth of the pack's size that is empty at first, with plain downloads."""
    folder, count, total = packed(bench)
    options, cache, excess = bench.options, total // 10, []
    rates: dict[str, list[float]] = {"plain downloads": [], "first epoch": [], "second epoch, at least": []}
    for _ in range(bench.rounds):
        shutil.rmtree(cache_root(), ignore_errors=True)
        with serving(folder, options) as address:
            rates["plain downloads"].append(total / 1e6 / timed(partial(download_all, address, folder)))
            loader = colabkit.Loader(colabkit.open_pack(address, cache=cache)["train"], 256, shuffle="block")
            # Subtract shards that were already in the cache, since their bytes did not cross the link.
            for name, crossed in (("first epoch", total), ("second epoch, at least", total - cache)):
                with largest_usage(cache_root(), every_s=0.02) as largest:
                    began = time.perf_counter()
                    samples = sum(len(labels) for _, labels in loader)
                    rates[name].append(crossed / 1e6 / (time.perf_counter() - began))
                assert samples == count
                excess.append(largest[0] - cache)
    title = f"A pack of {format_bytes(total)} in {options.shards} shards through a link of "
    title += f"{options.bandwidth / 1e6:g} MB/s, with a cache of {format_bytes(cache)}"
    medians = bench.show(title, "MB/s", rates, ["plain downloads"])
    bench.figures["link"] = {"excess_bytes": excess}
    bench.need_ratio("link", medians, "first epoch", "plain downloads", 0.9)
    bench.need("disk usage above the cache's size", max(excess), 0, "{:.0f}", at_most=True)


def measure_peers(bench: Bench) -> None:
    """Compare epochs of colabkit and litdata, with an empty cache of a tenth of the pack's size, with the link."""
    folder, count, total = packed(bench)
    cache, used_mb = total // 10, {}

    def run(name: str, python: str, system: str, address: str) -> Found:
        with (
            tempfile.TemporaryDirectory(dir=bench.folder, ignore_cleanup_errors=True) as own,
            largest_usage(Path(own), every_s=0.02) as largest,
        ):
            found = child([python, HERE / "remote_systems.py", system, address, str(cache), own], DEADLINE_S)
        assert found.get("samples", count) == count, (name, found, count)
        used_mb.setdefault(name, []).append(largest[0] / 1e6)
        return found

    def litdata(chunks: str, number: int) -> Found:
        target = bench.folder / f"litdata-{chunks[:2]}" / "data"
        if not target.exists():
            writer = [bench.options.peers_python, HERE / "packing_systems.py", f"litdata rows, {chunks}"]
            target.parent.mkdir(exist_ok=True)
            found = child([*writer, folder / "pack.h5", target], DEADLINE_S)
            if "missing" in found:
                return found
        address = f"{root}/{target.relative_to(bench.folder)}"
        return run(f"litdata, {chunks}", bench.options.peers_python, "litdata", address)

    with serving(folder, bench.options) as address:
        root = address.removesuffix(f"/{folder.name}/pack.h5")
        systems = {
            "plain downloads": lambda _: {"samples": count, "seconds": timed(lambda: download_all(address, folder))},
            "colabkit": lambda _: run("colabkit", sys.executable, "colabkit", address),
            **{f"litdata, {chunks}": partial(litdata, chunks) for chunks in CHUNKS},
        }
        others = [name for name in systems if name != "colabkit"]
        title = f"A first epoch through the link, with a cache of {format_bytes(cache)}"
        middle = bench.compare(title, systems, others)
    bench.show(f"Largest disk usage of the cache of {cache / 1e6:.1f} MB", "MB", used_mb)
    for name in others:
        bench.need_ratio("peers", middle, "colabkit", name, 0.9 if name == "plain downloads" else 1.5)
    bench.need("disk usage of colabkit, MB", max(used_mb["colabkit"]), cache / 1e6, "{:.1f}", at_most=True)


def packed(bench: Bench) -> tuple[Path, int, int]:
    """Write the pack; return its folder, its number of samples and the bytes of its shards."""
    os.environ["COLABKIT_LOCAL"] = str(bench.folder / "local")
    folder, options = bench.folder / "packed", bench.options
    count = options.mb * 10**6 // (3 * SIDE * SIDE)
    if not folder.exists():
        folder.mkdir()
        images = np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)
        size = images.nbytes // options.shards
        colabkit.pack((images, np.arange(count) % 10), folder / "pack.h5", shard_bytes=size, progress=False)
    return folder, count, sum(path.stat().st_size for path in folder.glob("pack-*.h5"))


def measure_simulation(bench: Bench) -> None:
    """Compare a first epoch, at several training speeds, with its simulation."""
    folder, count, total = packed(bench)
    options, rows, errors, excess = bench.options, [], [], []
    cache, batch = total // 10, 256
    batches = -(-count // batch)
    for share in (0.5, 0.9, 1.5):
        # The speed at which training takes this share of the time of the download.
        rate = batches / (total / options.bandwidth * share)
        [(seconds, sent)] = train_epochs(bench, folder, cache, batch, rate, 1)
        found = simulated_epochs(bench, folder, cache, batch, rate, 2)[0]
        errors.append(abs(found.seconds / seconds - 1))
        # Downloads for the next epoch are in flight when the epoch ends.
        excess.append(abs(found.fetched_bytes - sent) / (total / options.shards))
        times = (f"{seconds:.2f}", f"{found.seconds:.2f}", f"{found.seconds / seconds:.3f}")
        rows.append([f"{share:g}", *times, format_bytes(sent), format_bytes(found.fetched_bytes)])
    columns = ["training relative to download", "seconds", "simulated", "ratio", "complete shards sent", "simulated"]
    table(f"First epoch with a cache of {format_bytes(cache)}:", columns, rows)
    million = folder.parent / "million"
    million.mkdir()
    samples = np.zeros((1_000_000, 1, 1, 1), np.uint8)
    colabkit.pack((samples, np.zeros(len(samples), int)), million / "p.h5", shard_bytes="10kB", progress=False)
    seconds = timed(lambda: colabkit.simulate(million / "p.h5", "20MB", "1MB", 1000, batch_size=256))
    bench.figures["simulate"] = {"errors": errors, "bytes": excess, "million_s": seconds}
    bench.need("largest error of the simulated time", max(errors), 0.1, "{:.3f}", at_most=True)
    bench.need(
        "largest difference in shards, of which the last may be in flight", max(excess), DOWNLOADS, "{:.1f}", True
    )
    bench.need("seconds to simulate a million samples", seconds, 1.0, "{:.2f}", at_most=True)


def train_epochs(
    bench: Bench, folder: Path, cache: int, batch: int, rate: float, epochs: int
) -> list[tuple[float, int]]:
    """Train at `rate` batches per second with an empty cache; return the seconds and bytes of each epoch."""
    shutil.rmtree(cache_root(), ignore_errors=True)
    found, before = [], 0
    with serving(folder, bench.options) as address:
        loader = colabkit.Loader(colabkit.open_pack(address, cache=cache)["train"], batch, shuffle="block")
        for _ in range(epochs):
            began = free_at = time.perf_counter()
            for _ in loader:
                free_at = max(free_at, time.perf_counter()) + 1 / rate
                time.sleep(max(0.0, free_at - time.perf_counter()))
            seconds = time.perf_counter() - began
            with urllib.request.urlopen(address.replace("pack.h5", "sent")) as response:
                sent = int(response.read())
            found.append((seconds, sent - before))
            before = sent
    return found


def simulated_epochs(
    bench: Bench, folder: Path, cache: int, batch: int, rate: float, epochs: int
) -> tuple[colabkit.types.SimulatedEpoch, ...]:
    """Simulate `train_epochs`."""
    link = {"bandwidth": int(bench.options.bandwidth), "latency_s": bench.options.latency_ms / 1000}
    return colabkit.simulate(folder / "pack.h5", cache, batch_rate=rate, batch_size=batch, epochs=epochs, **link).epochs


def measure_cache(bench: Bench) -> None:
    """Compare the downloads of the epochs after the first one with their simulation and the bytes the cache lacks."""
    folder, count, total = packed(bench)
    options, rows, excess, errors = bench.options, [], [], []
    batch = 256
    batches, epochs = -(-count // batch), 1 + bench.rounds
    for share in (0.1, 0.25, 0.5):
        cache = int(total * share)
        for link in (0.5, 1.2, 12.0):
            rate = batches / (total / options.bandwidth * link)
            simulated = simulated_epochs(bench, folder, cache, batch, rate, epochs)[1:]
            predicted = sum(epoch.fetched_bytes for epoch in simulated) / total / bench.rounds
            excess.append(predicted - (1 - share))
            row = [f"{share:.0%}", f"{link:g}", f"{predicted:.0%}"]
            # Epochs at the slowest speed take minutes, and do not differ from those at the middle one.
            if link < 2:
                received = sum(sent for _, sent in train_epochs(bench, folder, cache, batch, rate, epochs)[1:])
                row.append(f"{received / total / bench.rounds:.0%}")
                errors.append(abs(predicted - received / total / bench.rounds))
            rows.append(row)
    columns = ["cache", "link relative to training", "downloaded per later epoch, simulated", "measured"]
    title = f"A pack of {format_bytes(total)} in {options.shards} shards, epochs after the first:"
    table(title, columns, [row + [""] * (4 - len(row)) for row in rows])
    bench.figures["cache"] = {"excess": excess, "errors": errors}
    bench.need("largest part that is downloaded beyond what the cache lacks", max(excess), 0.1, "{:.3f}", True)
    bench.need("largest error of the simulated part", max(errors), DOWNLOADS / options.shards, "{:.3f}", True)


def download_all(address: str, folder: Path) -> None:
    """Download all shards with as many concurrent requests as the loader uses."""

    def download(path: Path) -> None:
        with urllib.request.urlopen(address.replace("pack.h5", path.name)) as response:
            while response.read(BLOCK_BYTES):
                pass

    with ThreadPoolExecutor(DOWNLOADS) as executor:
        list(executor.map(download, sorted(folder.glob("pack-*.h5"))))


def measure_shuffle(bench: Bench) -> None:
    """Compare the classes of batches of 256 with those of all samples, for 100 classes."""
    shards, each, classes = bench.options.shards, 1000, 100
    count = shards * each
    by_class = np.arange(count) * classes // count
    mixed = np.random.default_rng(1).permutation(by_class)
    orders = {"full shuffle": sampler.ShuffledOrder(count)}
    for window in (1, 2, 4, 8, 16, 32, shards):
        orders[f"windows of {window} shards"] = sampler.ShardShuffledOrder((each,) * shards, window_shards=window)
    rows = []
    for name, order in orders.items():
        found = [distance(labels[order.indices(0, 0, count)], classes) for labels in (by_class, mixed)]
        bench.figures[name] = found
        rows.append([name, *(f"{one:.3f}" for one in found)])
    title = f"Distance of the classes in a batch of 256 from those of all {count:,} samples (0 equal, 1 disjoint):"
    table(title, ["order", "classes follow each other", "shuffled before packing"], rows)
    ratio = bench.figures["windows of 4 shards"][1] / bench.figures["full shuffle"][1]
    bench.need(
        "distance with windows of 4, shuffled before packing, relative to a full shuffle", ratio, 1.02, "{:.3f}", True
    )


def distance(labels: np.ndarray, classes: int, batch: int = 256) -> float:
    """Return the mean total variation distance between the classes of a batch and a uniform distribution."""
    batches = labels[: len(labels) // batch * batch].reshape(-1, batch)
    shares = np.stack([np.bincount(one, minlength=classes) for one in batches]) / batch
    return float(np.abs(shares - 1 / classes).sum(1).mean() / 2)


PARTS = {
    "shuffle": measure_shuffle,
    "link": measure_link,
    "peers": measure_peers,
    "simulate": measure_simulation,
    "cache": measure_cache,
}

if __name__ == "__main__":
    main()
