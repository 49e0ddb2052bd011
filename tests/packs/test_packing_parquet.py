"""`pack()` and `prepare()` read Parquet files with images, local or on Hugging Face, and datasets of `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from packed_files import opened
from parquet_files import IMAGE, class_label, image_cells, parquet_of
from picture_sets import NAMES, PIXELS, png
from PIL import Image

from colabkit.errors import BadImage, BadSource, InvalidOption
from colabkit.packs.dataset.opened_pack import Pack
from colabkit.packs.packing.api import pack
from colabkit.packs.preparing.api import prepare
from colabkit.storage.staging import places

FEATURES = {"image": IMAGE, "label": class_label(NAMES), "tags": {"feature": class_label("pqr"), "_type": "List"}}


@pytest.fixture(autouse=True)
def _local_storage(near_storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put local copies that would be in RAM into the test's folder."""
    monkeypatch.setattr(places, "TMPFS", near_storage)


def hub(place: Path, numbers: Any = range(24), **columns: Any) -> Path:
    """Write the pictures in three files, as in a repository on Hugging Face; the last is the validation split."""
    numbers = list(numbers)
    for name, some in (
        ("train-00000-of-00002", numbers[:9]),
        ("train-00001-of-00002", numbers[9:18]),
        ("validation-00000-of-00001", numbers[18:]),
    ):
        cells = {
            "image": image_cells([png(n) for n in some]),
            "label": [n % 2 for n in some],
            "tags": [[n % 3, (n + 1) % 3] for n in some],
            "note": [f"note {n}" for n in some],
        }
        changed = {key: values[numbers.index(some[0]) :][: len(some)] for key, values in columns.items()}
        parquet_of(place / f"data/{name}.parquet", {**cells, **changed}, FEATURES)
    (place / "README.md").write_text("a card")
    return place


def check_pictures(found: Pack) -> None:
    """Check that the pictures of `hub()` are in both splits, in order."""
    assert found.splits == {"train": 18, "val": 6}
    for split, first in (("train", 0), ("val", 18)):
        for n in range(len(found[split])):
            image, label = found[split][n][:2]
            assert np.array_equal(image.permute(1, 2, 0), PIXELS[first + n])
            assert label == (first + n) % 2


def test_files_of_a_dataset_give_labels_splits_and_fields(tmp_path):
    found = opened(hub(tmp_path / "hub"), tmp_path / "p.h5", fields=["note"])
    check_pictures(found)
    # All classes of the metadata count, although one does not occur.
    assert found.classes == NAMES
    assert [found["val"][n][2] for n in range(6)] == [f"note {n}" for n in range(18, 24)]
    assert pack(tmp_path / "hub", tmp_path / "p.h5", fields=["note"], progress=False).reused
    alone = opened(f"{tmp_path}/hub/data/train-*.parquet", tmp_path / "q.h5", labels=None, splits="train=0.5,test=0.5")
    assert alone.splits == {"train": 9, "test": 9}


def test_lists_of_classes_are_labels_with_names_and_renumbering_keeps_only_those_that_occur(tmp_path):
    found = opened(hub(tmp_path / "hub"), tmp_path / "p.h5", labels="tags", encoding="source")
    assert (found.info.meta["label_kind"], found.classes) == ("multilabel", ("p", "q", "r"))
    assert found["train"].labels[:3].tolist() == [[1, 1, 0], [0, 1, 1], [1, 0, 1]]
    assert opened(tmp_path / "hub", tmp_path / "q.h5", renumber=True).classes == NAMES[:2]
    numbers = opened(tmp_path / "hub", tmp_path / "r.h5", task="regression")
    assert numbers.info.meta["label_kind"] == "regression"


@pytest.mark.parametrize("wrong", [-1, 3])
def test_labels_outside_the_classes_are_an_error_that_names_the_row(tmp_path, wrong):
    hub(tmp_path / "hub", label=[*[0] * 20, wrong, *[0] * 3])
    message = rf"contains {wrong} for 'validation-00000-of-00001/00000002'; expected one of the class numbers 0 to 2"
    with pytest.raises(BadSource, match=message):
        pack(tmp_path / "hub", tmp_path / "p.h5", progress=False)


def test_a_row_without_an_image_is_a_bad_sample(tmp_path):
    images = image_cells([png(0), None, png(2), png(3)])
    path = parquet_of(tmp_path / "t.parquet", {"image": images, "label": [0, 1, 0, 1]}, FEATURES)
    with pytest.raises(BadImage, match="pack 't/00000001' of "):
        pack(path, tmp_path / "p.h5", progress=False)
    for encoding in ("raw", "source"):
        found = opened(path, tmp_path / f"{encoding}.h5", on_bad="skip", max_bad=1, encoding=encoding)
        assert found["train"].labels.tolist() == [0, 0, 1]
        assert [name for name, _ in found.info.bad] == ["t/00000001"]


def test_one_of_several_columns_of_images_is_packed(tmp_path):
    columns = {"image": image_cells([png(0)] * 2), "mask": image_cells([png(1)] * 2)}
    path = parquet_of(tmp_path / "set/t.parquet", columns, {"image": IMAGE, "mask": IMAGE})
    for source in (path, path.parent):
        with pytest.raises(BadSource, match="2 columns of images"):
            pack(source, tmp_path / "p.h5", labels=None, progress=False)
        found = opened(source, tmp_path / f"{source.stem}.h5", labels=None, path_column="mask")
        assert np.array_equal(found["train"][1].permute(1, 2, 0), PIXELS[1])
        assert [name for name, _ in found.info.left_out] == ["image"]


class Hub(MemoryFileSystem):
    """A stand-in for Hugging Face's file system."""

    protocol = "hf"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("hf://"))


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setitem(_registry, "hf", Hub)
    yield fsspec.filesystem("hf")
    Hub.store.clear()
    Hub.pseudo_dirs[:] = [""]


def test_a_dataset_on_hugging_face_is_staged_and_packed(tmp_path, remote):
    remote.put(str(hub(tmp_path / "hub")), "/datasets/owner/name", recursive=True)
    check_pictures(opened("hf://datasets/owner/name", tmp_path / "p.h5"))
    assert opened("hf://datasets/owner/name", tmp_path / "s.h5", path_column="image").classes == NAMES
    check_pictures(prepare("hf://datasets/owner/name", to=None, progress=False))
    assert prepare("hf://datasets/owner/name", to=None, progress=False).report.way == "local"
    one = opened("hf://datasets/owner/name/data/train-00000-of-00002.parquet", tmp_path / "q.h5")
    assert one.splits == {"train": 9}


def test_a_bucket_of_other_files_is_read_without_staging(tmp_path, remote, near_storage):
    for n in range(4):
        remote.pipe(f"/datasets/plain/{NAMES[n % 2]}/{n}.png", png(n))
    assert opened("hf://datasets/plain", tmp_path / "p.h5").splits == {"train": 4}
    assert list(near_storage.rglob("*.png")) == []
    with pytest.raises(InvalidOption, match="applies only to"):
        pack("hf://datasets/plain", tmp_path / "q.h5", path_column="image", progress=False)


class Feature:
    """A feature as `datasets` describes it."""

    def __init__(self, decode: bool = True, mode: str | None = None, names: Any = None) -> None:
        self.decode, self.mode, self.names = decode, mode, names


FeatureOfImages = type("Image", (Feature,), {})


class Rows:
    """Rows like those of `datasets`, which decodes images with Pillow unless the feature says otherwise."""

    format: ClassVar[dict[str, Any]] = {"type": None}

    def __init__(self, files: list[Any], features: dict[str, Any] | None = None) -> None:
        self.files = files
        self.features = features or {"image": FeatureOfImages(), "label": Feature(names=NAMES)}

    def cast_column(self, name: str, feature: Any) -> Rows:
        return Rows(self.files, {**self.features, name: feature})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> dict[str, Any]:
        assert not self.features["image"].decode, "Pillow would decode the image"
        return {"image": self.files[number], "label": number % 3}


def test_images_of_datasets_are_not_decoded_by_pillow_first(tmp_path):
    (tmp_path / "0.png").write_bytes(png(0))
    files = [{"bytes": None, "path": str(tmp_path / "0.png")}, *({"bytes": png(n), "path": None} for n in range(1, 6))]
    found = opened(Rows(files), tmp_path / "p.h5")
    assert found.classes == NAMES
    for n in range(6):
        assert np.array_equal(found["train"][n][0].permute(1, 2, 0), PIXELS[n])
    assert opened(Rows(files), tmp_path / "s.h5", size=4)["train"][0][0].shape == (3, 4, 4)


def test_a_missing_or_broken_file_of_a_dataset_is_a_bad_sample(tmp_path):
    good = [{"bytes": png(n), "path": None} for n in range(3)]
    lost, broken = {"bytes": None, "path": str(tmp_path / "lost.png")}, {"bytes": b"no image", "path": None}
    with pytest.raises(BadImage, match=r"the file '.*lost.png' cannot be read"):
        pack(Rows([*good, lost]), tmp_path / "p.h5", progress=False)
    found = opened(Rows([*good, broken, lost]), tmp_path / "q.h5", on_bad="skip", max_bad=2)
    assert (found.splits, len(found.info.bad)) == ({"train": 3}, 2)


def test_masks_in_other_fields_of_datasets_keep_their_values(tmp_path):
    mask = Image.fromarray(PIXELS[0, :, :, 0]).convert("P")
    mask.save(tmp_path / "mask.png")
    sample = {
        "image": {"bytes": png(0), "path": None},
        "mask": {"bytes": (tmp_path / "mask.png").read_bytes(), "path": None},
    }
    found = opened(pa_like([sample] * 2), tmp_path / "p.h5")
    assert np.array_equal(found["train"][1][1], np.asarray(mask))


def pa_like(samples: list[Any]) -> Any:
    return type("Plain", (), {"__len__": lambda _: len(samples), "__getitem__": lambda _, at: samples[at]})()
