"""Values of additional fields, from table columns or functions of paths, stay with their samples."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from packed_files import WAYS, assert_refused, files_of, fork, labels_of, names_in, packed, stored
from trees import leftovers, needs

from colabkit.errors import BadSource, InvalidOption, TargetExists
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing.api import pack


@pytest.fixture
def table(tree: Path) -> pd.DataFrame:
    """Return a table of the photos in random order, with columns of many types."""
    files = files_of(tree)
    order = np.random.default_rng(2).permutation(len(files)).tolist()
    return pd.DataFrame(
        {
            "path": [str(files[number]) for number in order],
            "label": [files[number].parent.name for number in order],
            "age": order,
            "weight": [number / 7 for number in order],
            "box": [[number, 2 * number, 5] for number in order],
            "says": [f"Größe {number}" * (number % 3) for number in order],
            "old": [number > 5 for number in order],
        }
    )


@pytest.mark.parametrize("encoding", ["raw", "source", "jpeg"])
def test_columns_of_a_table_become_fields(tmp_path, table, encoding):
    names = ["age", "weight", "box", "says", "old", "path"]
    path = packed(table, tmp_path / "p.h5", encoding=encoding, fields=names, splits={"train": 0.5, "test": 0.5})
    seen = []
    for split in ("train", "test"):
        info = read_pack(path)
        ages = info.table(f"age_{split}").tolist()
        seen += ages
        assert info.table(f"weight_{split}").tolist() == [age / 7 for age in ages]
        assert info.table(f"box_{split}").tolist() == [[age, 2 * age, 5] for age in ages]
        assert info.table(f"old_{split}").tolist() == [age > 5 for age in ages]
        assert [text.decode() for text in stored(path, split, "says")] == [f"Größe {age}" * (age % 3) for age in ages]
        files = [text.decode() for text in stored(path, split, "path")]
        assert [int(Path(file).stem) for file in files] == [age % 4 for age in ages]
        assert labels_of(path, split) == [age // 4 for age in ages]
    assert sorted(seen) == list(range(12))
    assert open_pack(path)["train"].fields[0] == "X"


def test_other_values_in_a_column_make_another_pack(tmp_path, table):
    path = packed(table, tmp_path / "p.h5", fields=["age"])
    assert pack(table, path, fields=["age"], progress=False).reused
    with pytest.raises(TargetExists, match="other samples or options"):
        pack(table.assign(age=table["age"] + 1), path, fields=["age"], progress=False)


def test_large_integers_of_a_column_are_never_rounded(tmp_path, table):
    numbers = [2**63 + 1, *range(11)]
    path = packed(table.assign(id=np.array(numbers, np.uint64)), tmp_path / "p.h5", fields=["id"])
    assert sorted(read_pack(path).table("id_train").tolist()) == sorted(numbers)
    mixed = table.assign(id=pd.Series([-1, *numbers[:-1]], dtype=object))
    match = r"no integer dtype holds both -1 and 9223372036854775809 in the column 'id'"
    assert_refused(BadSource, match, mixed, tmp_path / "q.h5", fields=["id"])


@pytest.mark.parametrize("encoding", ["raw", "source", "jpeg"])
@pytest.mark.parametrize("way", WAYS)
def test_functions_of_the_path_become_fields(tmp_path, tree, monkeypatch, encoding, way):
    fork(monkeypatch)
    fields = {
        "number": lambda path: int(path[-7:-4]),
        "square": lambda path: np.full((2, 3), int(path[-7:-4]), "<f4"),
        "name": lambda path: f"Größe {path}",
        "mark": lambda path: path.encode() * int(path[-7:-4]),
        "where": "path",
    }
    path = packed(tree, tmp_path / "p.h5", encoding=encoding, fields=fields, **WAYS[way])
    paths = [str(file.relative_to(tree)) for file in files_of(tree)]
    numbers = [int(one[-7:-4]) for one in paths]
    if encoding == "source":
        assert stored(path) == [file.read_bytes() for file in files_of(tree)]
    assert np.array(stored(path, field="number")).tolist() == numbers
    assert np.array(stored(path, field="square"))[:, 1, 2].tolist() == numbers
    assert stored(path, field="name") == [f"Größe {one}".encode() for one in paths]
    assert stored(path, field="mark") == [one.encode() * number for one, number in zip(paths, numbers, strict=True)]
    assert stored(path, field="where") == [one.encode() for one in paths]


def test_a_function_whose_results_change_type_is_an_error_and_nothing_is_rounded(tmp_path, tree):
    pairs = [(1, 2.5), (1, 2**40 + 0.5), (True, 2), (np.uint8(1), 300), (1, [1, 2])]
    for values in [*pairs, (0.5, "a"), ("a", 3), (b"a", "a"), ("a", None)]:
        fields = {"z": lambda path, values=values: values["000" not in path]}
        match = r"Cannot pack the field 'z' of 'ants/001.jpg': .* the first sample"
        assert_refused(BadSource, match, tree, tmp_path / "p.h5", fields=fields)


def test_numbers_are_converted_to_the_dtype_of_the_first_without_loss(tmp_path, tree):
    path = packed(tree, tmp_path / "p.h5", fields={"z": lambda path: 0.5 if "000" in path else 3})
    assert sorted({value.item() for value in stored(path, field="z")}) == [0.5, 3.0]


def test_an_error_in_a_user_function_is_raised_unchanged(tmp_path, tree):
    def fail(path: str) -> int:
        return 1 // (path != "bees/002.jpg")

    with pytest.raises(ZeroDivisionError):
        pack(tree, tmp_path / "p.h5", fields={"z": fail}, threads=1, progress=False)
    assert names_in(tmp_path) == ["tree"]


def test_more_fields_than_fit_into_a_seal_are_a_one_line_error(tmp_path, tree):
    fields = {f"a further field {number}": "path" for number in range(100)}
    with pytest.raises(
        InvalidOption, match=r"Cannot pack into one file: the list of its 204 datasets.*Pack fewer fields"
    ):
        pack(tree, tmp_path / "p.h5", fields=fields, progress=False)
    assert names_in(tmp_path) == ["tree"]
    few = dict(list(fields.items())[:10])
    assert len(read_pack(packed(tree, tmp_path / "p.h5", fields=few)).fields) == 12


@pytest.mark.parametrize("name", ["..", "rows", "spool-0", "ä b", "X_train", "_", "n" * 300])
def test_a_field_may_have_any_name(tmp_path, tree, name):
    path = packed(tree, tmp_path / "p.h5", fields={name: lambda path: path})
    assert stored(path, field=name)[0] == b"ants/000.jpg"
    assert leftovers(tmp_path) == []


def test_tables_of_equal_names_in_different_folders_are_different_sources(tmp_path):
    """The files have equal names, sizes and modification times."""
    for number, folder in enumerate(("one", "two")):
        (tmp_path / folder / "a").mkdir(parents=True)
        np.save(tmp_path / folder / "a" / "0.npy", np.full((2, 2), number))
        os.utime(tmp_path / folder / "a" / "0.npy", (1, 1))
    for make in (lambda path: [path], lambda path: pd.DataFrame({"path": [path]})):
        target = tmp_path / "p.h5"
        pack(make(str(tmp_path / "one" / "a" / "0.npy")), target, labels=None, progress=False)
        assert pack(make(str(tmp_path / "one" / "a" / "0.npy")), target, labels=None, progress=False).reused
        with pytest.raises(TargetExists):
            pack(make(str(tmp_path / "two" / "a" / "0.npy")), target, labels=None, progress=False)
        target.unlink()


def test_text_of_a_csv_in_windows_1252_is_stored_with_its_characters(tmp_path, tree):
    files = files_of(tree)
    (tmp_path / "table.csv").write_bytes(
        b"path,caption\n" + b"\n".join(os.fsencode(file) + b",caf\xe9 %d" % n for n, file in enumerate(files))
    )
    pack(tmp_path / "table.csv", tmp_path / "p.h5", fields=["caption"], labels=None, progress=False)
    data = open_pack(tmp_path / "p.h5")["train"]
    assert [caption for *_, caption in data] == [f"café {n}" for n in range(len(files))]
    assert data[:2][-1] == [data[0][-1], data[1][-1]]


@pytest.mark.parametrize("text", ["cut \ud83d", "\udce9 and \ud83d", "\U0001f600", ""])
def test_a_caption_with_half_of_a_character_is_stored_unchanged(tmp_path, tree, text):
    pack(tree, tmp_path / "p.h5", fields={"caption": lambda path: text + "!"}, progress=False)
    assert {caption for *_, caption in open_pack(tmp_path / "p.h5")["train"]} == {text + "!"}
    arrays = np.zeros((2, 3)), np.zeros(2, int)
    pack({"X": arrays[0], "Y": arrays[1], "text": [text, "b"]}, tmp_path / "q.h5", progress=False)
    assert open_pack(tmp_path / "q.h5")["train"][:][-1] == [text, "b"]


def test_a_function_may_return_the_same_array_for_each_sample(tmp_path, tree):
    again = np.zeros(2, np.int64)

    def filled(path: str) -> np.ndarray:
        again[:] = len(path), int(Path(path).stem)
        return again

    pack(tree, tmp_path / "p.h5", fields={"made": filled}, progress=False)
    found = open_pack(tmp_path / "p.h5")["train"]
    assert [made[1].item() for *_, made in found] == [int(file.stem) for file in files_of(tree)]


@pytest.mark.parametrize("value", [np.longdouble(1), [[1], [2, 3]]], ids=["longdouble", "uneven"])
def test_a_function_whose_results_cannot_be_stored_is_an_error(tmp_path, tree, value):
    with pytest.raises(
        InvalidOption, match=r"the function for the field 'made' returned .*Convert the value in the function"
    ):
        pack(tree, tmp_path / "p.h5", fields={"made": lambda path: value}, progress=False)
    first = files_of(tree)[0].name
    for other in ([[1], [2, 3]], [[1, 2]]):
        with pytest.raises(
            (BadSource, InvalidOption), match=r"Cannot pack the field 'made' of .*Pad values of different lengths"
        ):
            pack(
                tree,
                tmp_path / "p.h5",
                fields={"made": lambda path, other=other: [[1, 2], [3, 4]] if path.endswith(first) else other},
                progress=False,
            )


def test_lists_of_different_lengths_in_a_column_raise_with_the_advice_to_pad_them(tmp_path, table):
    table["boxes"] = [[[1, 2, 3, 4]] * (row % 3) for row in range(len(table))]
    match = r"in the column 'boxes' have different shapes, such as .*; expected equally long.* Pad values of different"
    assert_refused(BadSource, match, table, tmp_path / "p.h5", fields=["boxes"])


def test_a_frame_of_another_package_is_a_table_of_paths_and_not_a_dataset(tmp_path, table):
    path = packed(table, tmp_path / "p.h5", fields=["age"])
    assert pack(pa.Table.from_pandas(table), path, fields=["age"], progress=False).reused


@pytest.mark.full
def test_columns_of_polars_are_fields(tmp_path):
    needs("polars", importlib.util.find_spec("polars") is not None)
    import polars as pl

    frame = pl.DataFrame({"Y": [1.5, 2.5], "name": ["one", "two"]})
    pack({"X": np.zeros((2, 3), np.float32), "Y": frame["Y"], "name": frame["name"]}, tmp_path / "p.h5")
    data = open_pack(tmp_path / "p.h5")["train"]
    assert [(label.item(), name) for _, label, name in (data[0], data[1])] == [(1.5, "one"), (2.5, "two")]
