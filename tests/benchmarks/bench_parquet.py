"""Measure `pack()` on Parquet files with embedded photos, compared with a bare loop of pyarrow and a decoder.

    python tests/benchmarks/bench_parquet.py

The bare loops read the image column with `iter_batches()`, and decode each photo to 224x224 with the decoder of
colabkit, which is faster than Pillow; they keep nothing. `pack()` also lists the rows, checks the labels, and writes a
sealed pack of raw pixels. All systems run in interleaved rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rounds import Bench, interleaved, write_images

import colabkit
from colabkit.foundation import usable_cpus
from colabkit.packs import row_decoder

SIDE, ROWS, FILES, NEEDED = 224, 100, 2, 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=2000, help="number of photos")
    Bench.main(parser, {"photos": photos}, rounds=21, quick={"images": 40})


def photos(bench: Bench) -> None:
    count_of_images, threads = bench.options.images, max(1, round(usable_cpus()))
    folder = write_files(bench.folder, count_of_images)
    packing, alone, several = "pack()", "bare loop", f"bare loop, {threads} threads"
    systems = {
        packing: packed(folder, bench.folder),
        alone: bare(folder, 1),
        several: bare(folder, threads),
    }
    seconds = interleaved(systems, bench.rounds)
    figures = {name: [count_of_images / one for one in values] for name, values in seconds.items()}
    title = f"Parquet with {count_of_images} photos of 500x375, decoded to {SIDE}x{SIDE}"
    medians = bench.show(title, "images/s", figures, [alone, several])
    bench.need_ratio("Parquet", medians, packing, alone, NEEDED)


def write_files(folder: Path, images: int) -> Path:
    """Write the photos and their labels into Parquet files, as the package `datasets` does."""
    found = sorted(write_images(folder / "made-photos", images, (500, 375), 4).rglob("*.jpg"))
    (folder / "parquet").mkdir()
    for number in range(FILES):
        paths = found[number::FILES]
        cells = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
        columns = {"image": cells, "label": [int(path.parent.name[-1]) for path in paths]}
        target = folder / "parquet" / f"train-{number:05}-of-{FILES:05}.parquet"
        pq.write_table(pa.table(columns), target, row_group_size=ROWS)
    return folder / "parquet"


def packed(source: Path, folder: Path) -> Callable[[], float]:
    numbers = count()

    def run() -> float:
        target = folder / f"{next(numbers)}.h5"
        started = time.perf_counter()
        colabkit.pack(source, target, size=SIDE, encoding="raw", progress=False)
        seconds = time.perf_counter() - started
        target.unlink()
        return seconds

    return run


def bare(folder: Path, threads: int) -> Callable[[], float]:
    decode = row_decoder((SIDE, SIDE, 3), True)

    def decode_one(data: bytes) -> None:
        decode(data, np.empty((SIDE, SIDE, 3), np.uint8))

    def run() -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            call = map if threads == 1 else pool.map
            for batch in batches(folder):
                for _ in call(decode_one, batch):
                    pass
        return time.perf_counter() - started

    return run


def batches(folder: Path) -> Iterator[list[bytes]]:
    for path in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS, columns=["image.bytes"]):
                yield batch.column("image").field("bytes").to_pylist()


if __name__ == "__main__":
    main()
