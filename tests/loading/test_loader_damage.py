"""`Loader` over packs whose bytes were flipped or cut off: no wrong sample is served without an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from contract import make_pack, make_shards, seal_fields
from forks import in_fork
from loader_batches import epoch
from packed_files import flip_byte, photos
from sampling import sampled
from torch import Tensor
from torch.utils.data import default_collate
from trainings import nothing, train

from colabkit.augment import Normalize, RandomCrop
from colabkit.errors import ColabkitError, Corrupt
from colabkit.loading import Loader
from colabkit.loading.engine import columns
from colabkit.packs import open_pack, pack
from colabkit.packs.dataset import open_split, samples
from colabkit.packs.format.pack_file import read_pack
from colabkit.sampler import ShuffledOrder
from colabkit.training.checkpoints.folder import CheckpointFolder

SIDE = (8, 8, 3)
ROW = 8 * 8 * 3
"""Shape and size in bytes of the images of raw packs."""


def flip_sample(path: Path, number: int) -> None:
    flip_byte(path, read_pack(path).data_sets["X_train"].offset + number * ROW + 5)


def with_fields(path: Path) -> Path:
    """Seal a pack whose samples have a mask and a caption in addition to the image, and a table of ages."""
    draws = np.random.default_rng(3)
    fields: dict[str, dict[str, Any]] = {
        "X": {"train": draws.integers(0, 256, (9, *SIDE)).astype(np.uint8)},
        "mask": {"train": draws.integers(0, 2, (9, 8, 8)).astype(np.uint8)},
        "caption": {"train": [b"caption %d" % number for number in range(9)]},
        "age": {"train": draws.random(9).astype("<f4")},
        "Y": {"train": np.arange(9, dtype="<i8") % 3},
    }
    contents = {"X": "image", "mask": "array", "caption": "text", "age": "array"}
    return seal_fields(path, fields, contents, "class", tables=("age",))


def with_files(encoding: str) -> Callable[[Path], Path]:
    return lambda path: pack(photos(path.with_name("photos"), 3), path, encoding=encoding, progress=False).path


PACKS: dict[str, Callable[[Path], Path]] = {
    "raw": lambda path: make_pack(path, SIDE, train=9),
    "shards": lambda path: make_shards(path, {"train": 5}, {"train": 4}, shape=SIDE),
    "fields": with_fields,
    "source": with_files("source"),
    "jpeg": with_files("jpeg"),
}


@pytest.mark.parametrize("kind", PACKS)
def test_a_flipped_bit_anywhere_is_an_error_by_the_end_of_the_first_epoch_or_never_read(tmp_path, kind):
    path = PACKS[kind](tmp_path / "p.h5")
    whole = content(Loader(open_pack(path)["train"], 4))
    files = [path, *(path.with_name(shard.name) for shard in read_pack(path).shards)]
    found = {}
    for file in files:
        # The labels of shards are never read: the index holds those of all shards.
        unread = ("Y_train",) if file != path else ()
        for one in read_pack(file).data_sets.values():
            for at in {0, one.size_bytes // 2, one.size_bytes - 1}:
                flip_byte(file, one.offset + at)
                found[f"{one.name} of {file.name}, byte {at}"] = outcome(path, whole), one.name not in unread
                flip_byte(file, one.offset + at)
        for at in range(0, file.stat().st_size, file.stat().st_size // 25):
            flip_byte(file, at)
            found[f"byte {at} of {file.name}"] = outcome(path, whole), False
            flip_byte(file, at)
    assert {case: ending for case, (ending, _) in found.items() if ending == "wrong"} == {}
    assert {case: ending for case, (ending, must_be_found) in found.items() if must_be_found and ending == "same"} == {}


def outcome(path: Path, whole: list[list[Any]]) -> str:
    """Return the outcome of an epoch of a pack: "refused" with a typed error, the "same" as `whole`, or "wrong"."""
    try:
        return "same" if content(Loader(open_pack(path)["train"], 4)) == whole else "wrong"
    except ColabkitError:
        return "refused"


def content(loader: Loader) -> list[list[Any]]:
    return [[value.numpy().tobytes() if isinstance(value, Tensor) else value for value in batch] for batch in loader]


WAYS: dict[str, dict[str, Any]] = {
    "gathered": {},
    "without threads": {"num_workers": 0},
    "channels last": {"channels_last": True},
    "read ahead from disk": {"keep": "disk"},
    "transformed in threads": {"transform": Normalize(), "num_workers": 2},
    "cropped in threads": {"transform": RandomCrop(8), "num_workers": 2},
    "sample by sample": {"collate_fn": default_collate, "num_workers": 0},
}


@pytest.mark.parametrize("way", sampled([*WAYS], 4))
def test_a_damaged_sample_raises_an_error_with_its_number_after_all_batches_before_it(tmp_path, way):
    paths = PACKS["raw"](tmp_path / "p.h5"), PACKS["shards"](tmp_path / "s.h5")
    for path, file, number in zip(paths, (paths[0], tmp_path / "s-00001.h5"), (6, 1), strict=True):
        loader = Loader(open_pack(path)["train"], 2, **WAYS[way])
        expected = [images.clone() for images, _ in Loader(open_pack(path)["train"], 2, **WAYS[way])][:3]
        flip_sample(file, number)
        batches = iter(loader)
        got = [next(batches)[0].clone() for _ in range(3)]
        with pytest.raises(Corrupt, match=rf"Cannot read train\[6\] of '{file}': it does not match its CRC32.*verify"):
            next(batches)
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_views_are_refused_only_if_they_contain_the_damaged_sample(tmp_path):
    path = PACKS["raw"](tmp_path / "p.h5")
    flip_sample(path, 6)
    data = open_pack(path)["train"]
    assert len(epoch(Loader(data.subset([0, 8, 5]), 2, shuffle=True))[0]) == 3
    for few in (data.subset([8, 6]), data.subset([6])):
        with pytest.raises(Corrupt, match=r"train\[6\]"):
            epoch(Loader(few, 2))
    for read in (lambda: data[5:8], lambda: data.__getitems__([1, 6]), lambda: data.subset([6])[:]):
        with pytest.raises(Corrupt, match=r"train\[6\]"):
            read()


def test_each_sample_is_checked_only_once_in_a_process(tmp_path, monkeypatch):
    checked: list[int] = []
    monkeypatch.setattr(samples, "crc32", lambda data, crc=0: checked.append(0) or crc32(data, crc))
    data = open_pack(PACKS["raw"](tmp_path / "p.h5"))["train"]
    for _ in range(3):
        epoch(Loader(data, 4, shuffle=True))
        data[2:5]
    assert len(checked) == len(data)


def test_a_file_that_was_modified_between_epochs_is_checked_again(tmp_path):
    path = PACKS["raw"](tmp_path / "p.h5")
    loader = Loader(open_pack(path)["train"], 4)
    before = epoch(loader)[0]
    os.utime(path, ns=(1, 1))
    assert torch.equal(epoch(loader)[0], before)
    flip_sample(path, 3)
    with pytest.raises(Corrupt, match=r"train\[3\]"):
        epoch(loader)


def test_other_fields_of_cached_images_are_checked_again_after_the_file_was_modified(tmp_path):
    fields = {"mask": lambda _: np.full(1000, 7, np.uint8)}
    pack(photos(tmp_path / "photos", 3), path := tmp_path / "p.h5", encoding="source", fields=fields, progress=False)
    loader = Loader(open_pack(path)["train"], 4, size=8, fields=["X", "mask"])
    before = epoch(loader)[0]
    assert loader.tier.name == "ram"
    os.utime(path, ns=(1, 1))
    assert torch.equal(epoch(loader)[0], before)
    flip_byte(path, path.read_bytes().index(b"\7" * 1000) + 5)
    with pytest.raises(Corrupt, match=r"train\[\d\]"):
        epoch(loader)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_file_that_is_cut_short_raises_an_error_if_samples_are_loaded_one_by_one(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(open_split, "_LOOK_EVERY_S", 0.0)
    path = PACKS["raw"](tmp_path / "p.h5")
    loader = Loader(open_pack(path)["train"], 4, num_workers=workers, collate_fn=default_collate)
    epoch(loader)
    os.truncate(path, 4096)
    with pytest.raises(Corrupt, match="the file was truncated from"):
        epoch(loader)


@pytest.mark.parametrize("kind", ["raw", "shards", "source"])
def test_a_file_that_is_cut_short_between_epochs_raises_an_error_instead_of_a_signal(tmp_path, kind):
    path = PACKS[kind](tmp_path / "p.h5")
    loader = Loader(open_pack(path)["train"], 4, transform=RandomCrop(8))
    epoch(loader)
    cut = path.with_name(read_pack(path).shards[-1].name) if kind == "shards" else path
    os.truncate(cut, 4096)
    with pytest.raises(
        Corrupt, match=rf"{cut}.*the file was truncated from [\d,]+ to 4,096 bytes.*Pack or stage the data again"
    ):
        epoch(loader)


def test_a_file_that_is_cut_short_during_an_epoch_raises_an_error_when_it_is_examined_again(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "_LOOK_EVERY_S", 0.0)
    path = PACKS["raw"](tmp_path / "p.h5")
    batches = iter(Loader(open_pack(path)["train"], 2, num_workers=0, prefetch_batches=1))
    next(batches)
    os.truncate(path, 4096)
    with pytest.raises(Corrupt, match="the file was truncated from"):
        next(batches)


@pytest.mark.parametrize("encoding", ["raw", "source"])
def test_a_large_sample_in_a_part_that_was_cut_off_raises_an_error_instead_of_a_signal(tmp_path, encoding):
    source = photos(tmp_path / "photos", 3, (200, 300), "PNG")
    path = pack(source, tmp_path / "p.h5", encoding=encoding, progress=False).path
    data = open_pack(path)["train"]
    os.truncate(path, 4096)

    def read() -> None:
        for work in (lambda: data[8], lambda: data[2:4], lambda: data.encoded(5) if encoding == "source" else data[5]):
            with pytest.raises(Corrupt, match=r"the file was truncated from .* to 4,096 bytes"):
                work()

    # Read in a child process, which a bus error would kill, so that its exit code would differ.
    assert in_fork(read) == 0


def test_a_file_that_is_replaced_or_removed_can_still_be_read(tmp_path):
    path = PACKS["raw"](tmp_path / "p.h5")
    loader = Loader(open_pack(path)["train"], 4)
    before = epoch(loader)[0]
    os.replace(make_pack(tmp_path / "q.h5", SIDE, seed=5, train=2), path)
    assert torch.equal(epoch(loader)[0], before)
    path.unlink()
    assert torch.equal(epoch(loader)[0], before)


@pytest.mark.parametrize("transform", [None, RandomCrop(8)])
def test_on_bad_applies_to_image_files_that_do_not_match_their_crc(tmp_path, transform):
    path = PACKS["source"](tmp_path / "p.h5")
    data = open_pack(path)["train"]
    options = {"transform": transform, "shuffle": True, "seed": 4}
    images, labels = epoch(Loader(data, 4, **options))
    info = read_pack(path)
    flip_byte(path, info.data_sets["X_train"].offset + info.table("X_train_index")[5, 0] + 400)
    with pytest.raises(Corrupt, match=r"train\[5\]"):
        epoch(Loader(open_pack(path)["train"], 4, **options))
    place = ShuffledOrder(9, 4).indices(0, 0, 9).tolist().index(5)
    fewer = Loader(open_pack(path)["train"], 4, on_bad="skip", **options)
    for expected, found in zip((images, labels), epoch(fewer), strict=True):
        assert torch.equal(found, torch.cat([expected[:place], expected[place + 1 :]]))
    assert fewer.bad_samples == {f"train[5] of {str(path)!r}": "its bytes do not match their CRC32"}
    assert not epoch(Loader(open_pack(path)["train"], 4, on_bad="blank", **options))[0][place].any()


def test_no_checkpoint_is_written_after_a_damaged_sample(tmp_path):
    path = PACKS["raw"](tmp_path / "p.h5")
    flip_sample(path, 6)
    with pytest.raises(Corrupt, match=r"train\[6\]"):
        train(nothing, Loader(open_pack(path)["train"], 2), to=tmp_path / "run", save_every=1)
    assert CheckpointFolder(tmp_path / "run").newest_step() <= 3
