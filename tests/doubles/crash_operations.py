"""Operations that change several files, for tests that stop them at each of these changes.

Every operation reads from `folder / "in"` and writes to `folder / "out"`. Its state identifies the content of `out`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import fsspec
import numpy as np
from checkpoint_folders import found, save, with_far
from contract import whole_content
from fsspec.implementations.local import LocalFileSystem
from trainings import nothing, train
from trees import files_of, make_tree

import colabkit
from colabkit.errors import ColabkitError, NotEnoughSpace, SourceMissing
from colabkit.notebook import template
from colabkit.storage.sources.items import STAGE_SEAL

QUIET = {"progress": False}
SMALL = {"shard_bytes": 100, "threads": 1}


@dataclass(frozen=True)
class Operation:
    """An operation: `start` writes input and earlier output, `work` runs it, and `state` identifies its output.

    Args:
        start: called once with an empty folder.
        work: runs the operation; it is importable, and can be called again.
        state: returns equal values for equal output; raises `AssertionError` if the output is incomplete.
        is_removed_first: whether the old output is removed before the new output appears, as documented.
    """

    start: Callable[[Path], object]
    work: Callable[[Path], object]
    state: Callable[[Path], object]
    is_removed_first: bool = False


class LocalBucket(LocalFileSystem):
    """Local files at an address that `fetch()` accepts."""

    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return LocalFileSystem._strip_protocol(path.removeprefix("bucket://"))


def _tree(folder: Path, images: int = 1) -> None:
    make_tree(folder / "in" / "tree", images)


def _staged(folder: Path) -> object:
    path = folder / "out" / "staged"
    if not path.exists():
        return None
    files = files_of(path)
    assert files.pop(STAGE_SEAL)
    return files


def _start_refresh(folder: Path) -> None:
    _tree(folder)
    _refresh(folder)
    (folder / "in" / "tree" / "ants" / "000.png").write_bytes(b"changed")


def _refresh(folder: Path) -> None:
    colabkit.stage(folder / "in" / "tree", folder / "out" / "staged", threads=1, refresh=True, **QUIET)


def _start_unstage(folder: Path) -> None:
    _tree(folder)
    _refresh(folder)


def _unstage(folder: Path) -> None:
    with contextlib.suppress(SourceMissing):
        colabkit.unstage(folder / "out" / "staged")


def _start_pack(folder: Path) -> None:
    _tree(folder)
    _pack(folder)
    shutil.copy(folder / "in" / "tree" / "ants" / "000.png", folder / "in" / "tree" / "cats" / "001.png")


def _pack(folder: Path) -> None:
    colabkit.pack(folder / "in" / "tree", folder / "out" / "p.h5", overwrite=True, threads=1, **QUIET)


def _start_shards(folder: Path) -> None:
    _tree(folder)
    _pack_shards(folder)
    shutil.copy(folder / "in" / "tree" / "ants" / "000.png", folder / "in" / "tree" / "cats" / "001.png")


def _pack_shards(folder: Path) -> None:
    colabkit.pack(folder / "in" / "tree", folder / "out" / "p.h5", overwrite=True, **SMALL, **QUIET)


def _packed(folder: Path) -> object:
    path = folder / "out" / "p.h5"
    if not path.exists():
        return None
    try:
        images, labels = colabkit.open_pack(path)["train"][:][:2]
        assert colabkit.verify(path, **QUIET).is_good
    except ColabkitError as error:
        raise AssertionError("the pack does not open") from error
    return images.numpy().tobytes(), labels.numpy().tobytes()


def _start_prepare(folder: Path) -> None:
    _tree(folder)


def _prepare(folder: Path) -> None:
    report = colabkit.prepare(folder / "in" / "tree", to=folder / "out", threads=1, **QUIET).report
    if report.unsaved:
        # The pack is usable, and the report states why it was not saved.
        raise NotEnoughSpace(report.unsaved)


def _prepared(folder: Path) -> object:
    packs = [path for path in (folder / "out").rglob("*.h5") if ".partial" not in str(path)]
    return [whole_content(path) for path in packs] or None


def _start_file(folder: Path) -> None:
    (folder / "in").mkdir()
    (folder / "in" / "file").write_bytes(b"new" * 1000)
    (folder / "out").mkdir()
    (folder / "out" / "file").write_bytes(b"old")


def _publish_file(folder: Path) -> None:
    colabkit.publish(folder / "in" / "file", folder / "out" / "file", **QUIET)


def _start_folder(folder: Path) -> None:
    _tree(folder)
    (folder / "out").mkdir()
    _publish_folder(folder)
    (folder / "in" / "tree" / "ants" / "000.png").write_bytes(b"changed")


def _publish_folder(folder: Path) -> None:
    colabkit.publish(folder / "in" / "tree", folder / "out" / "tree", **QUIET)


def _published_folder(folder: Path) -> object:
    path = folder / "out" / "tree"
    return files_of(path) if path.exists() else None


def _fetch(folder: Path) -> None:
    url = (folder / "in" / "url").read_text()
    colabkit.fetch(url, folder / "out" / "file", overwrite=True, **QUIET)


def _start_fetched_folder(folder: Path) -> None:
    _tree(folder)
    (folder / "out").mkdir()
    _fetch_folder(folder)
    (folder / "in" / "tree" / "ants" / "000.png").write_bytes(b"changed")


def _fetch_folder(folder: Path) -> None:
    fsspec.register_implementation(LocalBucket.protocol, LocalBucket, clobber=True)
    address = f"{LocalBucket.protocol}://{folder / 'in' / 'tree'}"
    colabkit.fetch(address, folder / "out", overwrite=True, **QUIET)


def _file(folder: Path) -> object:
    return (folder / "out" / "file").read_bytes()


def _start_checkpoints(folder: Path) -> None:
    save(folder / "out", 10, 20)


def _save(folder: Path) -> None:
    save(folder / "out", 30)


def _save_remotely(folder: Path) -> None:
    with_far(save, folder / "out", 30)


def _checkpoint(folder: Path) -> object:
    step, skipped = found(folder / "out")
    assert skipped == []
    return step


def _remote_checkpoint(folder: Path) -> object:
    # A checkpoint that cannot be published remains on the local disk.
    step, skipped = with_far(found, folder / "out")
    assert skipped == []
    return step


@functools.cache
def _report() -> colabkit.types.TrainReport:
    return train(nothing, colabkit.Loader((np.zeros(4), np.zeros(4)), 2), epochs=1)


def _save_report(folder: Path) -> None:
    _report().save(folder / "out" / "file")


def _save_trace(folder: Path) -> None:
    _report().to_trace(folder / "out" / "file")


def _save_plot(folder: Path) -> None:
    _report().plot(folder / "out" / "file.png")


def _start_template(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "file.ipynb").write_bytes(b"old")


def _write_template(folder: Path) -> None:
    # The content of the wheel does not matter here, and compressing the whole package takes a second.
    with patch.object(template, "_build_wheel", lambda: ("wheel.whl", b"wheel")):
        colabkit.write_template(folder / "out" / "file.ipynb", overwrite=True)


def _template(folder: Path) -> object:
    data = (folder / "out" / "file.ipynb").read_bytes()
    return "old" if data == b"old" else len(json.loads(data)["cells"])


def _json(folder: Path) -> object:
    data = (folder / "out" / "file").read_bytes()
    return "old" if data == b"old" else type(json.loads(data))


def _plot(folder: Path) -> object:
    path = folder / "out" / "file.png"
    assert not path.exists() or path.read_bytes().endswith(b"IEND\xaeB`\x82")
    return path.exists()


OPERATIONS = {
    "publish a file": Operation(_start_file, _publish_file, _file),
    "publish a folder": Operation(_start_folder, _publish_folder, _published_folder, is_removed_first=True),
    "fetch a file": Operation(_start_file, _fetch, _file),
    "fetch a folder": Operation(_start_fetched_folder, _fetch_folder, _published_folder, is_removed_first=True),
    "refresh a local copy": Operation(_start_refresh, _refresh, _staged, is_removed_first=True),
    "unstage": Operation(_start_unstage, _unstage, _staged),
    "pack": Operation(_start_pack, _pack, _packed),
    "pack shards": Operation(_start_shards, _pack_shards, _packed, is_removed_first=True),
    "prepare": Operation(_start_prepare, _prepare, _prepared),
    "save a checkpoint": Operation(_start_checkpoints, _save, _checkpoint),
    "save a checkpoint remotely": Operation(_start_checkpoints, _save_remotely, _remote_checkpoint),
    "write the template": Operation(_start_template, _write_template, _template),
    "save a plot": Operation(_start_file, _save_plot, _plot),
    "save a trace": Operation(_start_file, _save_trace, _json),
    "save a report": Operation(_start_file, _save_report, _json),
}
