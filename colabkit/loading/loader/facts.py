"""What a loader is known to load, and how: the facts that a verdict about it needs."""

from __future__ import annotations

import os
from typing import Any, Literal

from colabkit.foundation import LoaderFacts, can_hang, mounts
from colabkit.loading.loader.building import Built
from colabkit.loading.loader.engines import InProcesses, OnDevice
from colabkit.packs import FileDataset, PackedDataset

_SIZES_ASKED = 256


def facts_of(built: Built, dataset: Any, count: int, transform: str | None) -> LoaderFacts:
    """Return what is known of a loader of ours.

    Args:
        built: what makes its batches.
        dataset: what it loads.
        count: samples of the data set.
        transform: name of what is done to them.
    """
    asked, engine = built.asked, built.engine
    kind: Literal["gathered", "decoded", "processes", "device"]
    encoding: Literal["raw", "encoded", "python"] | None = "raw"
    if isinstance(engine, InProcesses):
        kind, encoding = "processes", "python"
    elif isinstance(engine, OnDevice):
        kind = "device"
    else:
        kind = "decoded" if built.decodes else "gathered"
    sample_bytes = float(built.row_bytes) if built.row_bytes else None
    if isinstance(dataset, FileDataset):
        encoding = "encoded"
        sizes = [dataset.item(number).size for number in range(0, len(dataset), max(1, len(dataset) // _SIZES_ASKED))]
        known = [size for size in sizes if size]
        sample_bytes = sum(known) / len(known) if known else None
    elif isinstance(dataset, PackedDataset) and dataset.image_files() is not None:
        encoding = "encoded" if kind != "processes" else encoding
    path = path_of(dataset)
    return LoaderFacts(
        kind=kind,
        samples=count,
        batch_size=asked.batch_size,
        device=str(asked.device),
        workers=asked.workers if kind in ("decoded", "processes") else min(1, asked.workers),
        sample_bytes=sample_bytes,
        path=path,
        source=_packed_from(dataset) or files_of(dataset),
        is_far=dataset.source.can_hang if isinstance(dataset, FileDataset) else is_far(path),
        files=len(dataset) if isinstance(dataset, FileDataset) else None,
        encoding=encoding,
        tier=built.tier.name,
        transform=transform,
        is_pinned=True if asked.device.type == "cuda" else None,
        keeps_workers=asked.persistent_workers or not asked.workers if kind == "processes" else None,
    )


def _packed_from(dataset: Any) -> str | None:
    """Return where the files lie that a pack was made of, if it tells and they can be named from anywhere."""
    name = str(dataset.info.meta["source"]) if isinstance(dataset, PackedDataset) else ""
    return name if name != path_of(dataset) and (os.path.isabs(name) or "://" in name) else None


def is_far(path: str | None) -> bool | None:
    """Return whether a path lies behind a mount that another program or machine serves; None if it is not known."""
    return None if path is None else can_hang(os.path.abspath(path), mounts())


def path_of(dataset: Any) -> str | None:
    """Return where the samples of a data set lie, as far as it tells; also of torchvision's and of views of them."""
    try:
        return _path_of(dataset)
    except Exception:  # properties of other people's data sets may do anything
        return None


def files_of(dataset: Any) -> str | None:
    """Return the folder of a data set that lists its files, as torchvision's `ImageFolder` does; None of others."""
    try:
        inner = getattr(dataset, "dataset", None)
        if inner is not None:
            return files_of(inner)
        if (first := _first_file(dataset)) is None:
            return None
        root = getattr(dataset, "root", None)
        return os.path.abspath(root if isinstance(root, str | os.PathLike) else os.path.dirname(first))
    except Exception:
        return None


def _path_of(dataset: Any) -> str | None:
    if isinstance(dataset, PackedDataset):
        return str(dataset.info.path)
    if isinstance(dataset, FileDataset):
        return dataset.source.name
    inner = getattr(dataset, "dataset", None)  # of torch's Subset
    if inner is not None and inner is not dataset:
        return _path_of(inner)
    root = getattr(dataset, "root", None)
    if isinstance(root, str | os.PathLike):
        return os.path.abspath(root)
    first = _first_file(dataset)
    return None if first is None else os.path.dirname(os.path.abspath(first))


def _first_file(dataset: Any) -> str | None:
    """Return the path of a data set's first sample, if it has a list of them."""
    for name in ("samples", "imgs"):
        found = getattr(dataset, name, None)
        if isinstance(found, list) and found:
            first = found[0][0] if isinstance(found[0], tuple | list) else found[0]
            if isinstance(first, str | os.PathLike):
                return os.fspath(first)
    return None
