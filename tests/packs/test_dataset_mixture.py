"""A `Mixture` holds the samples of several packs as one dataset, and refuses packs that differ."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from contract import make_pack, make_shards, seal_every_kind, seal_fields
from packed_files import flip_byte
from remote_packs import pack_server

from colabkit.errors import Corrupt, InvalidOption
from colabkit.packs import Mixture, PackedDataset, open_pack
from colabkit.packs.format.pack_file import read_pack


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[PackedDataset]:
    """Return a split in one file, a view of a split in one file, and a split in shards."""
    folder = tmp_path_factory.mktemp("packs")
    view = open_pack(make_pack(folder / "b.h5", seed=12, train=9, val=3))["train"].subset([7, 2, 5])
    shards = open_pack(make_shards(folder / "c.h5", {"train": 4}, {"train": 3}))["train"]
    return [open_pack(make_pack(folder / "a.h5", train=8))["train"], view, shards]


def same(one: object, other: object) -> bool:
    (image, label), (other_image, other_label) = one, other  # type: ignore[misc]
    return torch.equal(image, other_image) and np.array_equal(label, other_label)


def test_samples_are_those_of_the_packs_one_pack_after_the_other(parts):
    mixture = Mixture(dict.fromkeys(parts, 1))
    samples = [part[number] for part in parts for number in range(len(part))]
    assert len(mixture) == len(samples) == 18
    assert all(same(mixture[number], sample) for number, sample in enumerate(samples))
    batch = zip((17, 0, 8, 9, 3), *mixture[[17, 0, 8, 9, 3]], strict=True)
    assert all(same(one, samples[number]) for number, *one in batch)
    assert mixture.labels.tolist() == [label for part in parts for label in part.labels.tolist()]


def test_views_and_unpickled_copies_hold_the_same_samples(parts):
    mixture = Mixture({parts[0]: 0.7, parts[1]: 0.2, parts[2]: 0.1}, num_samples=50)
    view = mixture.subset([17, 9])
    for one in (mixture, pickle.loads(pickle.dumps(mixture))):
        assert (one.num_samples, [*one.packs.values()]) == (50, [7, 2, 1])
        assert one.fingerprint == mixture.fingerprint
        assert same(one[17], view[0])
    assert same(pickle.loads(pickle.dumps(view))[1], mixture[9])
    assert sum(map(len, mixture.split((0.5, 0.5)))) == 18


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((3, 1, 2), [3, 1, 2]), ((0.25, 0.5, 1), [1, 2, 4]), ((2e9, 1e9, 1e9), [2, 1, 1]), ((1e300, 1, 1), None)],
)
def test_weights_are_exact_proportions_in_whole_numbers(parts, weights, expected):
    found = [*Mixture(dict(zip(parts, weights, strict=True))).packs.values()]
    assert found == expected if expected else found[1:] == [1, 1]


def test_fields_of_every_kind_can_be_mixed(tmp_path):
    images = np.arange(2 * 3 * 4 * 3, dtype="|u1").reshape(2, 3, 4, 3)
    parts = [open_pack(seal_every_kind(tmp_path / name, images))["train"] for name in ("a.h5", "b.h5")]
    batch, expected = Mixture(dict.fromkeys(parts, 1))[[1, 2]], parts[0][[1, 0]]
    assert len(batch) == 7
    assert all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else str(one) == str(other)
        for one, other in zip(batch, expected, strict=True)
    )


def test_a_damaged_sample_is_named_by_its_own_pack(tmp_path):
    paths = [make_pack(tmp_path / name, train=4) for name in ("a.h5", "b.h5")]
    flip_byte(paths[1], read_pack(paths[1]).data_sets["X_train"].offset + 2 * 36)
    mixture = Mixture({open_pack(path)["train"]: 1 for path in paths})
    with pytest.raises(Corrupt, match=r"train\[2\] of '.*b\.h5'"):
        mixture[6]
    with pytest.raises(Corrupt, match=r"train\[2\] of '.*b\.h5'"):
        mixture[[1, 6]]


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"shape": (5, 3, 3)}, r"the size of samples is 4x3x3 in '.*a\.h5' and 5x3x3 in '.*b\.h5'"),
        ({"dtype": "<i2"}, r"'X' is image torch\.uint8 \[3, 4, 3\] in .* and image torch\.int16 \[3, 4, 3\] in"),
        (
            {"classes": ["d", "e", "f"]},
            r"the list of classes .* in '.*b\.h5'.* pandas Categorical with all classes.* labels=.* class numbers",
        ),
        ({"label_kind": "regression"}, "the kind of labels"),
        ({"fields": {"Z": np.zeros((6, 2))}}, "the list of fields is X, Y in .* and X, Y, Z"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_packs_that_differ_are_refused_with_the_first_difference(tmp_path, other, match):
    def make(
        name: str,
        shape: tuple[int, ...] = (4, 3, 3),
        dtype: str = "|u1",
        label_kind: str = "class",
        fields: dict[str, np.ndarray] | None = None,
        **meta: object,
    ) -> PackedDataset:
        arrays = {"X": np.zeros((6, *shape), dtype), "Y": np.arange(6) % 3, **(fields or {})}
        contents = {name: "array" for name in arrays if name != "Y"} | ({"X": "image"} if len(shape) == 3 else {})
        by_split = {name: {"train": array} for name, array in arrays.items()}
        return open_pack(seal_fields(tmp_path / name, by_split, contents, label_kind, **meta))["train"]

    with pytest.raises(InvalidOption, match=match):
        Mixture({make("a.h5"): 1, make("b.h5", **other): 1})


def test_invalid_packs_and_weights_are_refused(parts, tmp_path):
    first, pack = parts[0], open_pack(make_pack(tmp_path / "a.h5", dev=2))
    refused = {
        "one is a whole pack; expected splits of packs. Use pack['dev']": {pack: 1},
        "one is a Mixture": {Mixture({first: 1}): 1},
        "one is a str": {"a.h5": 1},
        "is empty": {first.subset([]): 1},
        "is 0; expected a number above 0": {first: 0},
        "is nan": {first: float("nan")},
        "there are none": {},
        "packs is a list": [first],
    }
    for words, packs in refused.items():
        with pytest.raises(InvalidOption) as caught:
            Mixture(packs)  # type: ignore[arg-type]
        assert words in str(caught.value)
    with pytest.raises(InvalidOption, match="num_samples=0"):
        Mixture({first: 1}, num_samples=0)


def test_packs_behind_caches_are_named_by_their_addresses(tmp_path, monkeypatch, parts):
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    with pack_server(tmp_path / "packs") as server:
        index = server.folder / "birds.h5"
        for opened, name in ((server.url, server.url), (index, str(index))):
            with pytest.raises(InvalidOption) as caught:
                Mixture({parts[0]: 1, open_pack(opened, cache="1MiB")["train"]: 1})
            assert f"in {name!r}; expected" in str(caught.value)


def test_samples_of_packs_behind_caches_are_those_of_the_packs(tmp_path, monkeypatch):
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    with pack_server(tmp_path / "packs") as server:
        remote, local = open_pack(server.url, cache="1MiB"), open_pack(server.folder / "birds.h5")
        mixture = Mixture({remote["train"]: 1, remote["train"].subset([30, 2]): 2, local["test"]: 1})
        expected = [*local["train"], *local["train"].subset([30, 2]), *local["test"]]
        for one in (mixture, pickle.loads(pickle.dumps(mixture))):
            assert all(same(one[number], sample) for number, sample in enumerate(expected))
