"""Pack a folder of images with one system in a separate process: `python packing_systems.py SYSTEM SOURCE TARGET`.

The script prints one line of JSON: the number of samples, the seconds from listing the folder to the finished file, the
CPU seconds of the process and its children, and the peak memory of the process; or the reason why the system cannot be
imported. Imports are not timed. This file also runs without colabkit, which is one of the systems.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from loader_peers import arrays, own_temporary_folder

Run = Callable[[str, str], int]
Files = list[tuple[str, int]]

WORKERS = 2
SIZE = 256


def main() -> None:
    system, source, target = sys.argv[1:]
    with own_temporary_folder(Path(target).absolute().parent):
        measure(system, source, target)


def measure(system: str, source: str, target: str) -> None:
    try:
        run = SYSTEMS[system]()
    except ImportError as error:
        print(json.dumps({"missing": f"not installed: {type(error).__name__}: {error}"}))
        return
    before = cpu_seconds()
    started = time.perf_counter()
    samples = run(source, target)
    seconds = time.perf_counter() - started
    peak = peak_bytes()
    for child in multiprocessing.active_children():
        # FFCV does not wait for its workers, but CPU seconds count only children that have been waited for.
        child.join(10)
    cpu = cpu_seconds() - before
    print("\n" + json.dumps({"samples": samples, "seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak}))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the child processes it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes; `ru_maxrss` would include its parent's memory at the fork."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def imports_alone() -> Run:
    """Import colabkit without packing, to subtract the memory that imports take."""
    packing()
    return lambda source, target: 0


def packing() -> Callable[..., Any]:
    """Return `colabkit.pack` after triggering all imports that it makes on demand."""
    import h5py  # noqa: F401
    import simplejpeg  # noqa: F401

    import colabkit

    return colabkit.pack


def colabkit_raw() -> Run:
    pack = packing()
    return lambda source, target: samples_of(pack(source, target, encoding="raw", progress=False))


def colabkit_source() -> Run:
    pack = packing()
    return lambda source, target: samples_of(pack(source, target, encoding="source", progress=False))


def colabkit_raw_size() -> Run:
    pack = packing()
    return lambda source, target: samples_of(pack(source, target, size=SIZE, encoding="raw", progress=False))


def samples_of(report: Any) -> int:
    return sum(report.splits.values())


def ffcv() -> Run:
    """Write an `ImageFolder` as in FFCV's documentation, with one field for the image and one for the label."""
    return ffcv_of("raw", image_folder())


def ffcv_jpg() -> Run:
    """Re-encode photos at their size and FFCV's default quality of 90, because FFCV cannot store original bytes."""
    return ffcv_of("jpg", image_folder())


def ffcv_rows() -> Run:
    return ffcv_of("raw", Rows)


def ffcv_of(mode: str, read: Callable[[str], Any]) -> Run:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    def run(source: str, target: str) -> int:
        dataset = read(source)
        fields = {"image": RGBImageField(write_mode=mode), "label": IntField()}
        DatasetWriter(target, fields, num_workers=WORKERS).from_indexed_dataset(dataset)
        return len(dataset)

    return run


def image_folder() -> Callable[[str], Any]:
    from torchvision.datasets import ImageFolder

    return ImageFolder


class Rows:
    """The rows of a raw pack, as a dataset of the form that FFCV's writer expects."""

    def __init__(self, path: str) -> None:
        self._images, self._labels = arrays(path)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._images[index], int(self._labels[index])


def arrow() -> Run:
    from datasets import Array3D, Dataset, Features, Value

    def run(source: str, target: str) -> int:
        images, labels = arrays(source)
        features = Features({"image": Array3D(images.shape[1:], "uint8"), "label": Value("int64")})

        def rows() -> Iterator[dict[str, Any]]:
            yield from ({"image": image, "label": label} for image, label in zip(images, labels, strict=True))

        Dataset.from_generator(rows, features=features).save_to_disk(target)
        return len(labels)

    return run


def litdata_raw() -> Run:
    return litdata(litdata_array)


def litdata_jpeg() -> Run:
    return litdata(litdata_image)


def litdata(sample: Callable[[tuple[str, int]], dict[str, Any]]) -> Run:
    """Run litdata's `optimize()` with two workers and chunks of 64 MB, as in its documentation."""
    from litdata import optimize
    from torchvision.datasets import ImageFolder

    def run(source: str, target: str) -> int:
        files = ImageFolder(source).samples
        optimize(fn=sample, inputs=files, output_dir=target, num_workers=WORKERS, chunk_bytes="64MB", verbose=False)
        return len(files)

    return run


def litdata_rows(chunk_bytes: str) -> Run:
    """Write the rows of all shards of a raw pack, whose index is the source, in chunks of the given size."""
    from litdata import optimize

    def run(source: str, target: str) -> int:
        shards = sorted(map(str, Path(source).parent.glob(f"{Path(source).stem}-*.h5")))
        optimize(
            fn=shard_rows,
            inputs=shards,
            output_dir=target,
            num_workers=WORKERS,
            chunk_bytes=chunk_bytes,
            verbose=False,
        )
        return sum(len(arrays(shard)[1]) for shard in shards)

    return run


def shard_rows(shard: str) -> Iterator[dict[str, Any]]:
    images, labels = arrays(shard)
    yield from ({"image": image, "label": int(label)} for image, label in zip(images, labels, strict=True))


def litdata_array(file: tuple[str, int]) -> dict[str, Any]:
    import numpy as np
    from PIL import Image

    with Image.open(file[0]) as image:
        return {"image": np.asarray(image.convert("RGB")), "label": file[1]}


def litdata_image(file: tuple[str, int]) -> dict[str, Any]:
    from PIL import Image

    # For a JPEG file that Pillow opened, litdata stores the original bytes.
    return {"image": Image.open(file[0]), "label": file[1]}


def mds_raw() -> Run:
    """Write arrays that torchvision's loader decodes, in one process because MDS's writer has no workers."""
    import numpy as np
    from streaming import MDSWriter
    from torchvision.datasets import ImageFolder

    def run(source: str, target: str) -> int:
        dataset = ImageFolder(source)
        with MDSWriter(out=target, columns={"image": "ndarray:uint8", "label": "int"}) as writer:
            for image, label in dataset:
                writer.write({"image": np.asarray(image), "label": label})
        return len(dataset)

    return run


def mds_jpeg() -> Run:
    """Write the original file bytes."""
    from streaming import MDSWriter
    from torchvision.datasets import ImageFolder

    def run(source: str, target: str) -> int:
        files = ImageFolder(source).samples
        with MDSWriter(out=target, columns={"image": "bytes", "label": "int"}) as writer:
            for path, label in files:
                writer.write({"image": Path(path).read_bytes(), "label": label})
        return len(files)

    return run


def webdataset() -> Run:
    """Write the original file bytes in shards of 10,000."""
    return webdataset_of(10_000, lambda files: files)


def webdataset_shuffled() -> Run:
    """Write the original file bytes in random order, in shards of 1,000."""
    return webdataset_of(1000, lambda files: random.sample(files, len(files)))


def webdataset_of(shard_samples: int, order: Callable[[Files], Files]) -> Run:
    from torchvision.datasets import ImageFolder
    from webdataset import ShardWriter

    def run(source: str, target: str) -> int:
        files = order(ImageFolder(source).samples)
        Path(target).mkdir()
        with ShardWriter(f"{target}/%06d.tar", maxcount=shard_samples, verbose=0) as writer:
            for number, (path, label) in enumerate(files):
                writer.write({"__key__": f"{number:08d}", "jpg": Path(path).read_bytes(), "cls": label})
        return len(files)

    return run


def bare() -> Run:
    """Decode in two forked processes into a shared memory map; write no file, compute no digests, and check nothing."""
    import numpy as np
    from simplejpeg import decode_jpeg

    def run(source: str, target: str) -> int:
        files = listed(source)
        with open(files[0][0], "rb") as file:
            shape = decode_jpeg(file.read()).shape
        memory = mmap.mmap(-1, len(files) * int(np.prod(shape)))
        rows = np.frombuffer(memory, np.uint8).reshape(len(files), *shape)

        def decode(numbers: Iterable[int]) -> None:
            for number in numbers:
                with open(files[number][0], "rb") as file:
                    data = file.read()
                rows[number] = decode_jpeg(data)

        halves(forked, decode, len(files))
        return len(files)

    return run


def bare_size_threads() -> Run:
    return bare_size(threaded)


def bare_size_processes() -> Run:
    return bare_size(forked)


def bare_size(workers: Callable[[Callable[[Iterable[int]], None], list[range]], None]) -> Run:
    """Decode, resize and center-crop in two threads or processes; big photos are scaled while they are decoded."""
    import numpy as np
    from PIL import Image
    from simplejpeg import decode_jpeg, decode_jpeg_header

    def run(source: str, target: str) -> int:
        files = listed(source)
        memory = mmap.mmap(-1, len(files) * SIZE * SIZE * 3)
        rows = np.frombuffer(memory, np.uint8).reshape(len(files), SIZE, SIZE, 3)

        def decode(numbers: Iterable[int]) -> None:
            for number in numbers:
                with open(files[number][0], "rb") as file:
                    data = file.read()
                height, width = decode_jpeg_header(data)[:2]
                # Follow colabkit's rule: the decoder scales if at least twice the requested size remains.
                factor = next((by for by in (8, 4, 2) if min(height, width) >= 2 * by * SIZE), 1)
                pixels = decode_jpeg(data, min_height=-(-height // factor), min_width=-(-width // factor))
                height, width = pixels.shape[:2]
                side = min(height, width)
                left, top = (width - side) / 2, (height - side) / 2
                box = (left, top, left + side, top + side)
                resized = Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
                rows[number] = np.asarray(resized)

        halves(workers, decode, len(files))
        return len(files)

    return run


def listed(source: str) -> Files:
    """Return the files of a tree that has one folder for each class, with their labels."""
    classes = sorted(os.listdir(source))
    return [
        (f"{source}/{name}/{file}", label)
        for label, name in enumerate(classes)
        for file in sorted(os.listdir(f"{source}/{name}"))
    ]


def halves(workers: Callable[..., None], decode: Callable[[Iterable[int]], None], count: int) -> None:
    # Interleave the files, so that the workers get similar amounts of work even if the files are sorted by size.
    workers(decode, [range(first, count, WORKERS) for first in range(WORKERS)])


def forked(decode: Callable[[Iterable[int]], None], parts: list[range]) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=decode, args=(part,)) for part in parts]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise RuntimeError("a child process of the plain loop failed")


def threaded(decode: Callable[[Iterable[int]], None], parts: list[range]) -> None:
    threads = [threading.Thread(target=decode, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


SYSTEMS: dict[str, Callable[[], Run]] = {
    "imports alone": imports_alone,
    "colabkit raw": colabkit_raw,
    "colabkit source": colabkit_source,
    "colabkit raw 256": colabkit_raw_size,
    "bare": bare,
    "plain 256, threads": bare_size_threads,
    "plain 256, processes": bare_size_processes,
    "FFCV raw": ffcv,
    "FFCV jpg": ffcv_jpg,
    "FFCV rows": ffcv_rows,
    "arrow": arrow,
    "litdata raw": litdata_raw,
    "litdata jpeg": litdata_jpeg,
    "litdata rows, 16 MB": partial(litdata_rows, "16MB"),
    "litdata rows, 64 MB": partial(litdata_rows, "64MB"),
    "MDS raw": mds_raw,
    "MDS jpeg": mds_jpeg,
    "WebDataset jpeg": webdataset,
    "WebDataset jpeg, shuffled": webdataset_shuffled,
}

if __name__ == "__main__":
    main()
