"""Read one epoch of images from a web server: `python remote_systems.py SYSTEM ADDRESS CACHE_BYTES FOLDER`.

ADDRESS is that of a pack for colabkit, and of a folder of chunks for litdata; FOLDER is a new folder for the cache. The
script prints one line of JSON: the number of samples, the seconds from the start of the epoch to its last batch, and
the CPU seconds of the process and its children; or the reason why the system cannot be imported. Imports and the
download of the index are not timed. This file also runs without colabkit, which is one of the systems.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from packing_systems import WORKERS, cpu_seconds

BATCH = 256


def main() -> None:
    system, address, cache, folder = sys.argv[1:]
    try:
        batches = SYSTEMS[system](address, int(cache), folder)
    except ImportError as error:
        print(json.dumps({"missing": f"not installed: {type(error).__name__}: {error}"}))
        return
    cpu, samples = cpu_seconds(), 0
    began = ended = time.perf_counter()
    for _, labels in batches:
        samples += len(labels)
        ended = time.perf_counter()
    print("\n" + json.dumps({"samples": samples, "seconds": ended - began, "cpu_seconds": cpu_seconds() - cpu}))


def colabkit_epoch(address: str, cache: int, folder: str) -> Iterable[Any]:
    os.environ["COLABKIT_LOCAL"] = folder
    import colabkit

    return colabkit.Loader(colabkit.open_pack(address, cache=cache)["train"], BATCH, shuffle="block")


def litdata_epoch(address: str, cache: int, folder: str) -> Iterable[Any]:
    """Read chunks with two workers from a server that imitates S3, by obstore, which litdata prefers to boto3."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    class Images(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return sample["image"], sample["label"]

    # litdata has no option to let obstore read from a server without TLS.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"
    parts = urlsplit(address)
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "value", "region_name": "us-east-1"}
    data = Images(
        f"s3:/{parts.path}",
        cache_dir=folder,
        shuffle=True,
        max_cache_size=cache,
        storage_options={"endpoint_url": f"{parts.scheme}://{parts.netloc}", **keys},
    )
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS)


SYSTEMS: dict[str, Callable[[str, int, str], Iterable[Any]]] = {"colabkit": colabkit_epoch, "litdata": litdata_epoch}

if __name__ == "__main__":
    main()
