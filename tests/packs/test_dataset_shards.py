"""A pack of several shards is read as one dataset, opens shards on first use, and rejects wrong shards."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from contract import make_pack, make_shards

from colabkit.errors import Corrupt, FileFailed, NotSealed, SourceMissing
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.format.pack_file import read_pack

COUNTS = ({"train": 9, "test": 2}, {"train": 4}, {"test": 3}, {"train": 8, "test": 1})


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return make_shards(tmp_path / "birds.h5", *COUNTS)


def shard(index: Path, number: int) -> Path:
    return index.with_name(f"birds-{number:05d}.h5")


def expected(index: Path, split: str) -> torch.Tensor:
    infos = [read_pack(shard(index, number)) for number, counts in enumerate(COUNTS) if split in counts]
    return torch.from_numpy(np.concatenate([info.map(f"X_{split}") for info in infos])).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("split", "count"), [("train", 21), ("test", 6)])
def test_samples_are_in_the_order_of_the_shards(index, split, count):
    data, images = open_pack(index)[split], expected(index, split)
    assert len(data) == len(images) == count
    for number in range(count):
        assert torch.equal(data[number][0], images[number])
        assert data[number][1] == int(data.labels[number])
    assert torch.equal(data[:][0], images)


@pytest.mark.parametrize("numbers", [[20, 0, 9, 8, 12, 13, 13, 20], [3], [], list(range(21))[::-1]])
def test_batches_across_shards_keep_the_requested_order(index, numbers):
    data, images = open_pack(index)["train"], expected(index, "train")
    assert torch.equal(data[numbers][0], images[numbers])
    assert [label for _, label in data.__getitems__(numbers)] == data.labels[numbers].tolist()


def test_opening_a_pack_and_a_split_opens_no_shard(index):
    for number in range(len(COUNTS)):
        shard(index, number).rename(shard(index, number).with_suffix(".away"))
    pack = open_pack(index)
    assert len(pack["train"]) == 21
    assert pack["train"].labels.tolist()[:4] == [0, 1, 2, 0]
    assert "4 shards, 4 of them missing" in repr(pack)


def test_a_missing_shard_raises_when_its_samples_are_read(index):
    data = open_pack(index)["train"]
    shard(index, 1).rename(index.with_name("away.h5"))
    assert data[8][1] == 2
    for read in (lambda: data[9], lambda: data[5:12], data.maps):
        with pytest.raises(SourceMissing, match=r"birds-00001\.h5' is missing; expected all shards.*Copy all shards"):
            read()


def test_a_damaged_or_replaced_shard_raises(index):
    whole = shard(index, 1).read_bytes()
    for damaged in (whole[:-1], whole[4096:]):
        shard(index, 1).write_bytes(damaged)
        with pytest.raises((Corrupt, NotSealed), match=r"birds-00001\.h5"):
            open_pack(index)["train"][9]
    make_pack(index.with_name("other.h5"), seed=99, train=4).replace(shard(index, 1))
    with pytest.raises(Corrupt, match=r"'birds-00001\.h5' is not a shard of this index"):
        open_pack(index)["train"][9]


def test_a_damaged_sample_is_named_by_its_index_in_the_whole_split(index):
    found = read_pack(shard(index, 1)).data_sets["X_train"]
    with shard(index, 1).open("r+b") as file:
        file.seek(found.offset + 36 * 2)
        file.write(b"\xff\0\xff\0")
    data = open_pack(index)["train"]
    with pytest.raises(Corrupt, match=r"train\[11\] of .*birds-00001\.h5"):
        data[11]
    assert torch.equal(data[10][0], expected(index, "train")[10])


def test_too_many_open_shards_raise_and_the_message_names_the_limit(index):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    data = open_pack(index)["train"]
    assert data[0][1] == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(FileFailed) as caught:
            data[20]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in str(caught.value)
    assert "ulimit" in str(caught.value)
    assert data[20][1] == 1


def test_a_shard_name_that_is_not_a_plain_file_name_raises(tmp_path):
    (tmp_path / "other").mkdir()
    outside = make_pack(tmp_path / "other" / "birds.h5", train=2)
    for name in ("", "..", "other/birds.h5"):
        about = {"name": name, "seal": read_pack(outside).seal, "splits": {"train": 2}}
        with pytest.raises(Corrupt, match="is not a plain file name"):
            open_pack(make_shards(tmp_path / f"{len(name)}.h5", {"train": 2}, shards=[about]))


@pytest.mark.parametrize("splits", [{"train": 1}, {"train": 3}, {"test": 2}, {}])
def test_shards_with_wrong_sample_counts_raise(tmp_path, splits):
    about = {"name": "birds-00000.h5", "seal": "0" * 64, "splits": splits}
    index = make_shards(tmp_path / "birds.h5", {"train": 2}, shards=[about])
    with pytest.raises(Corrupt, match=f"shards have {splits.get('train', 0)} samples of train instead of 2"):
        open_pack(index)["train"]
