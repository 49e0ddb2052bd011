"""`ParquetSource` reads images in Parquet files, and `open_records()` recognizes such files."""

from __future__ import annotations

import errno
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forks import in_fork
from parquet_files import IMAGE, class_label, image_cells, parquet_of
from record_files import image
from source_contract import check_source, check_untouched

from colabkit.errors import BadArchive, BadSource, InvalidOption, MissingPackage, SourceChanged
from colabkit.storage.sources import parquet
from colabkit.storage.sources.manifest import ManifestSource
from colabkit.storage.sources.parquet import ParquetSource
from colabkit.storage.sources.reads import Retries, read_item
from colabkit.storage.sources.registry import open_records, open_samples

IMAGES = [None if number == 5 else image(number) for number in range(11)]
FEATURES = {"image": IMAGE, "label": class_label(["ant", "bee"])}


def written(path: Path, **columns: Any) -> Path:
    return parquet_of(path, {"image": image_cells(IMAGES), "label": [n % 2 for n in range(11)], **columns}, FEATURES)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 20_000)


@pytest.mark.parametrize("is_struct", [True, False])
def test_every_row_is_an_item_and_keeps_the_contract_of_sources(tmp_path, is_struct):
    column = image_cells(IMAGES) if is_struct else pa.array(IMAGES, pa.large_binary())
    for name in ("a", "b"):
        parquet_of(tmp_path / f"data/{name}.parquet", {"picture": column}, rows=6)
    expected = {f"{name}/{row:08d}": one or b"" for name in ("a", "b") for row, one in enumerate(IMAGES)}
    check_untouched(tmp_path, lambda: check_source(open_samples(tmp_path / "data"), expected))


def test_rows_are_read_in_any_order_and_in_other_processes(tmp_path):
    source = open_samples(written(tmp_path / "t.parquet"))
    items = [*source.list().items]
    random.Random(1).shuffle(items)
    read = [read_item(source, item, Retries()) for item in items]
    assert read == [IMAGES[int(item.path[-2:])] or b"" for item in items]

    def check() -> None:
        assert [read_item(source, item, Retries()) for item in items] == read

    assert in_fork(check) == 0
    again = pickle.loads(pickle.dumps(source))
    assert read_item(again, items[3], Retries()) == read[3]


def test_rows_are_read_again_after_an_error_of_the_file_system(tmp_path, monkeypatch):
    source = open_samples(written(tmp_path / "t.parquet"))
    items = source.list().items
    errors = [OSError(errno.EIO, "broken")]

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(parquet, "still_moving", fail_once)
    assert [read_item(source, item, Retries()) for item in items] == [one or b"" for one in IMAGES]
    assert errors == []


def test_columns_and_class_names_come_from_the_schema(tmp_path):
    columns = {"note": [f"n{n}" for n in range(11)], "sizes": [[n, n] for n in range(11)]}
    others = {"long": [[0] * 2000] * 11, "when": pa.array([0] * 11, pa.timestamp("ms"))}
    for split in ("train-00000-of-00001", "validation-00000-of-00001"):
        written(tmp_path / f"set/data/{split}.parquet", **columns, **others)
    (tmp_path / "set/README.md").write_text("text")
    listing = open_samples(tmp_path / "set").list()
    assert listing.columns["note"] == (*columns["note"], *columns["note"])
    assert listing.columns["sizes"][:11] == (*columns["sizes"],)
    assert listing.columns["split"] == ("train",) * 11 + ("validation",) * 11
    assert listing.classes == {"label": ("ant", "bee")}
    assert [name for name, _ in listing.skipped] == ["long", "when"]
    assert dict(listing.skipped)["when"] == "a column of timestamp[ms]"


@pytest.mark.full
def test_a_large_row_group_is_read_in_small_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 1 << 20)
    head, count = image(0), 160
    blobs = [head + bytes(200_000) for _ in range(count)]
    source = open_samples(
        parquet_of(
            tmp_path / "t.parquet",
            {"image": blobs},
            rows=count,
            write_batch_size=10,
            compression="none",
            use_dictionary=False,
        )
    )
    del blobs
    before, most = pa.total_allocated_bytes(), 0
    for item in source.list().items:
        assert len(read_item(source, item, Retries())) == item.size
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 12 << 20


def test_a_file_with_images_is_a_source_of_samples_and_one_with_paths_is_a_table(tmp_path, monkeypatch):
    assert isinstance(open_records(written(tmp_path / "a.parquet")), ParquetSource)
    written(tmp_path / "hub/default/train/0000.parquet")
    assert isinstance(open_records(tmp_path / "hub"), ParquetSource)
    assert isinstance(open_records([tmp_path / "a.parquet"]), ParquetSource)
    (tmp_path / "a.png").write_bytes(b"")
    table = parquet_of(tmp_path / "t.parquet", {"path": ["a.png"], "other": [b"no image"]})
    assert isinstance(open_samples(table), ManifestSource)
    assert isinstance(open_samples(table, path_column="path"), ManifestSource)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match="pyarrow, which is needed to read Parquet, is not installed"):
        open_records(tmp_path / "a.parquet")


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "no images": ({"a": [1], "b": [b"text"]}, None, r"no column of encoded images .*'a' \(int64\), 'b' \(binary\)"),
    "nested": ({"images": [[{"bytes": image(0)}]]}, None, r"no column of encoded images .*'images' \(list<"),
    "audio": ({"a": image_cells([image(0)])}, {"a": {"_type": "Audio"}}, "no column of encoded images"),
    "several": ({"a": [image(0)], "b": [image(1)]}, None, r"2 columns of images \('a', 'b'\).*path_column='a'"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", WRONG)
def test_files_without_one_column_of_images_are_one_clear_error(tmp_path, case):
    columns, features, message = WRONG[case]
    parquet_of(tmp_path / "set/t.parquet", columns, features)
    with pytest.raises(BadSource, match=message):
        open_samples(tmp_path / "set").list()


def test_images_that_are_only_paths_and_columns_that_do_not_exist_are_errors(tmp_path):
    parquet_of(tmp_path / "t.parquet", {"a": image_cells([None] * 3)}, {"a": IMAGE})
    with pytest.raises(BadSource, match="the column 'a' contains no bytes"):
        open_samples(tmp_path / "t.parquet").list()
    written(tmp_path / "set/t.parquet")
    with pytest.raises(InvalidOption, match="no column 'label' of images; expected one of 'image'"):
        open_samples(tmp_path / "set", path_column="label").list()
    parquet_of(tmp_path / "set/u.parquet", {"image": image_cells(IMAGES)}, FEATURES)
    with pytest.raises(BadSource, match=r"only one of .* has the column 'label'"):
        open_samples(tmp_path / "set").list()


def test_one_of_several_columns_is_chosen(tmp_path):
    parquet_of(tmp_path / "t.parquet", {"a": [image(0)], "b": [image(1)]})
    source = open_samples(tmp_path / "t.parquet", path_column="b")
    (item,) = source.list().items
    assert read_item(source, item, Retries()) == image(1)


def test_damaged_and_changed_files_are_errors(tmp_path):
    path = parquet_of(tmp_path / "t.parquet", {"image": image_cells(IMAGES)}, FEATURES, write_page_checksum=True)
    whole = path.read_bytes()
    source = open_samples(path)
    items = source.list().items
    path.write_bytes(whole[:-100])
    with pytest.raises(SourceChanged):
        read_item(source, items[0], Retries())
    with pytest.raises(BadArchive, match="damaged or truncated"):
        open_samples(path)
    path.write_bytes(whole[: len(whole) // 3] + b"\0\1\2\3" + whole[len(whole) // 3 + 4 :])
    with pytest.raises(BadArchive, match="damaged or truncated"):
        open_samples(path).list()


@pytest.mark.parametrize("metadata", [b"{", b"[]", b'{"info": {"features": {"image": 3, "label": []}}}'])
def test_invalid_metadata_is_ignored(tmp_path, metadata):
    table = pa.table({"image": image_cells(IMAGES), "label": [0] * 11})
    pq.write_table(table.replace_schema_metadata({"huggingface": metadata}), tmp_path / "t.parquet")
    assert open_samples(tmp_path / "t.parquet").list().classes == {}
