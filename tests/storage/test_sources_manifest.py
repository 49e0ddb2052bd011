"""Tables of paths as sources: one item per row, with labels; errors name the row."""

from __future__ import annotations

import datetime as dt
import importlib.util
import os
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_contract import UNDECODABLE, write_tree
from trees import needs

from colabkit.errors import BadSource, FileFailed, InvalidOption, MissingPackage, SourceChanged, SourceMissing
from colabkit.storage.sources import manifest, reads
from colabkit.storage.sources.items import Listing
from colabkit.storage.sources.manifest import ManifestSource, is_frame
from colabkit.storage.sources.reads import Retries, read_item
from colabkit.storage.sources.registry import open_source
from colabkit.storage.staging.places import identity_of

FILES = {"a/1.png": b"1", "a/2.png": b"22", "b/3.png": b"333"}


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path / "tree", FILES)


def table(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return path


def paths(listing: Listing) -> list[str]:
    return [item.path for item in listing.items]


def test_rows_keep_their_order_and_their_labels(tree):
    text = "path,label,weight\nb/3.png,bee,0.5\na/1.png,ant,2\na/1.png,again,\n"
    listing = ManifestSource(table(tree / "t.csv", text)).list()
    assert paths(listing) == ["b/3.png", "a/1.png", "a/1.png"]
    assert [item.size for item in listing.items] == [3, 1, 1]
    assert listing.items[0].mtime_ns == (tree / "b/3.png").stat().st_mtime_ns
    assert listing.columns == {"label": ("bee", "ant", "again"), "weight": (0.5, 2.0, None)}
    assert [item.path for item in listing.extras] == ["t.csv"]
    assert listing.extras[0].size == len(text)


@pytest.mark.parametrize("write", ["csv", "tsv", "parquet", "frame"])
def test_every_kind_of_table_has_the_same_listing(tree, write, monkeypatch):
    frame = pd.DataFrame({"label": ["x", None, "z"], "Filename": list(FILES), "count": [1, 2, 3]})
    if write == "csv":
        frame.to_csv(tree / "t.csv", index=False)
    elif write == "tsv":
        frame.to_csv(tree / "t.tsv", index=False, sep="\t")
    elif write == "parquet":
        frame.to_parquet(tree / "t.parquet")
    monkeypatch.chdir(tree)
    listing = ManifestSource(frame if write == "frame" else tree / f"t.{write}").list()
    assert paths(listing) == list(FILES)
    assert listing.columns == {"label": ("x", None, "z"), "count": (1, 2, 3)}
    assert [item.path for item in listing.extras] == ([] if write == "frame" else [f"t.{write}"])


class ConvertibleTable:
    """A dataset that can be converted to pandas."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame

    def to_pandas(self) -> pd.DataFrame:
        return self._frame


class RayTable(ConvertibleTable):
    """A dataset of Ray Data, which has a schema and cannot be indexed."""

    def schema(self) -> list[str]:
        return [*self._frame]


class MapStyle(ConvertibleTable):
    """A map-style dataset of samples."""

    def __len__(self) -> int:
        return len(self._frame)

    def __getitem__(self, row: int) -> dict[str, object]:
        return dict(self._frame.iloc[row])


class HuggingFace(MapStyle):
    """A Hugging Face dataset; its `features` give the dtype of each column, or are None."""

    def __init__(self, frame: pd.DataFrame, path_type: str | None) -> None:
        super().__init__(frame)
        self.features = path_type and {name: SimpleNamespace(dtype=path_type) for name in frame.columns}


def frames_of(package: str, frame: pd.DataFrame) -> tuple[object, object]:
    """Return a frame as another package's table; for polars, also return its path column, otherwise None."""
    if package == "polars":
        needs("polars", importlib.util.find_spec("polars") is not None)
        import polars as pl

        made = pl.DataFrame(frame.to_dict("list"))
        return made, made["path"]
    if package == "arrow":
        return pa.Table.from_pandas(frame), None
    return HuggingFace(frame, "string") if package == "hugging face" else RayTable(frame), None


@pytest.mark.every_case
@pytest.mark.parametrize("package", [pytest.param("polars", marks=pytest.mark.full), "arrow", "ray", "hugging face"])
def test_frames_of_other_packages_are_taken_like_those_of_pandas(tree, package, monkeypatch):
    frame = pd.DataFrame({"path": list(FILES), "age": [1.5, 2.5, 3.5]})
    made, series = frames_of(package, frame)
    monkeypatch.chdir(tree)
    found, expected = open_source(made).list(), open_source(frame).list()
    assert (found.items, found.columns) == (expected.items, expected.columns)
    assert identity_of(made, extract=False) == identity_of(frame, extract=False)
    if series is not None:
        assert paths(open_source(series).list()) == list(FILES)


def test_datasets_of_samples_and_arrays_are_no_tables_of_paths():
    frame = pd.DataFrame({"image": [b"pixels"]})
    array = SimpleNamespace(dtype=np.dtype("f4"), to_pandas=lambda: frame)
    assert not is_frame(HuggingFace(frame, "binary"))
    # The columns of a streamed dataset can be unknown.
    assert not is_frame(HuggingFace(frame, None))
    assert not is_frame(MapStyle(frame))
    assert not is_frame(array)
    assert not is_frame(RayTable)


def test_cells_are_plain_python_values(tree):
    time = dt.datetime(2024, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    frame = pd.DataFrame(
        {
            "path": [str(tree / "a/1.png"), tree / "a/2.png"],
            "integer": np.array([1, 2], "i2"),
            "float": np.array([0.5, np.nan], "f4"),
            "missing": pd.array([1, None], dtype="Int64"),
            "flag": [True, False],
            "time": pd.to_datetime([time, None]),
            "span": pd.to_timedelta([1, None], unit="s"),
            "class": pd.Categorical(["x", "y"]),
            "list": [[1, 2], np.array([3])],
            "object": pd.Series([np.int64(7), None], dtype=object),
        }
    )
    columns = ManifestSource(frame).list().columns
    assert columns == {
        "integer": (1, 2),
        "float": (0.5, None),
        "missing": (1, None),
        "flag": (True, False),
        "time": (time, None),
        "span": (dt.timedelta(seconds=1), None),
        "class": ("x", "y"),
        "list": ([1, 2], [3]),
        "object": (7, None),
    }
    assert {type(column[0]) for column in columns.values()} == {
        *(int, float, bool, dt.datetime, dt.timedelta, str, list)
    }


def test_text_categories_keep_their_order_and_unordered_ones_only_in_pandas(tree):
    names = ["small", "medium", "large"]
    frame = pd.DataFrame(
        {
            "path": pd.Categorical([str(tree / "a/1.png"), str(tree / "a/2.png")]),
            "ordered": pd.Categorical(["large", "small"], names, ordered=True),
            "unordered": pd.Categorical(["large", None], names),
            "number": pd.Categorical([2, 1], [2, 1]),
        }
    )
    listing = ManifestSource(frame).list()
    assert listing.columns["unordered"] == ("large", None)
    assert listing.categories == {"ordered": tuple(names), "unordered": tuple(names)}
    frame.to_parquet(tree / "t.parquet")
    for other in (tree / "t.parquet", pa.Table.from_pandas(frame)):
        assert ManifestSource(other).list().categories == {"ordered": tuple(names)}
    fewer = frame.assign(ordered=frame["ordered"].cat.remove_unused_categories())
    assert identity_of(frame, extract=False) != identity_of(fewer, extract=False)


def test_words_that_pandas_treats_as_missing_are_labels_and_digits_are_names(tmp_path):
    write_tree(tmp_path, {"0001": b"1", "NA": b"2", "null": b"3"})
    listing = ManifestSource(table(tmp_path / "t.csv", "path,label\n0001,NA\nNA,None\nnull,null\n")).list()
    assert paths(listing) == ["0001", "NA", "null"]
    assert listing.columns == {"label": ("NA", "None", "null")}


def test_spaces_around_the_cells_of_a_csv_are_no_part_of_names_and_labels(tmp_path):
    write_tree(tmp_path, {"1.png": b"1", "2.png": b"2", "3.png": b"3"})
    text = 'label , path, note, size\n p, 1.png, "a, b", 3\np , 2.png,, 4\np,3.png, " c ", 5\n'
    listing = open_source(table(tmp_path / "t.csv", text)).list()
    assert paths(listing) == ["1.png", "2.png", "3.png"]
    assert listing.columns == {"label ": ("p", "p", "p"), "note": ("a, b", None, "c"), "size": (3, 4, 5)}


def test_undecodable_names_are_preserved_beside_labels(tmp_path):
    write_tree(tmp_path, {UNDECODABLE: b"1", "é.png": b"2"})
    text = f"path,größe\n{UNDECODABLE},ü\né.png,{os.fsdecode(bytes([0xFF]))}\n"
    listing = ManifestSource(table(tmp_path / "t.csv", text)).list()
    assert paths(listing) == [UNDECODABLE, "é.png"]
    assert listing.columns == {"größe": ("ü", "ÿ")}


def test_a_csv_that_excel_saved_in_windows_1252_has_readable_labels(tmp_path):
    write_tree(tmp_path, {"1.png": b"1", "2.png": b"2"})
    (tmp_path / "t.csv").write_bytes("path,größe,price\n1.png,Café,5 €\n2.png,Hügel,6\n".encode("cp1252"))
    listing = ManifestSource(tmp_path / "t.csv").list()
    assert listing.columns == {"größe": ("Café", "Hügel"), "price": ("5 €", "6")}


def test_the_first_known_name_is_the_column_of_paths(tree):
    text = "img_path,image,File,x\nno,no,a/1.png,1\n"
    assert set(ManifestSource(table(tree / "t.csv", text)).list().columns) == {"img_path", "image", "x"}
    listing = ManifestSource(table(tree / "t.csv", "whatever\na/1.png\n")).list()
    assert (paths(listing), listing.columns) == (["a/1.png"], {})
    with pytest.raises(BadSource, match="the columns name, label; expected one of the columns path, file"):
        ManifestSource(table(tree / "t.csv", "name,label\na/1.png,1\n"))


def test_two_columns_with_the_same_name_are_refused(tree):
    frame = pd.DataFrame([[str(tree / "a/1.png"), 1, 2]], columns=["path", "label", "label"])
    with pytest.raises(BadSource, match="two columns are named 'label'"):
        ManifestSource(frame)


def test_item_paths_are_relative_to_the_tables_folder_or_the_common_folder(tree, tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    inside = ManifestSource(table(tree / "t.csv", f"path\n{tree}/a/1.png\n./a/../a/2.png\n")).list()
    assert paths(inside) == ["a/1.png", "a/2.png"]
    beside = ManifestSource(table(tmp_path / "tables" / "t.csv", "path\n../tree/a/1.png\n../tree/b/3.png\n")).list()
    assert paths(beside) == ["a/1.png", "b/3.png"]
    assert beside.extras == ()
    monkeypatch.chdir(tmp_path)
    assert paths(ManifestSource(["tree/a/1.png", "tree/a/2.png"]).list()) == ["tree/a/1.png", "tree/a/2.png"]
    assert paths(ManifestSource([tree / "a/1.png", tree / "a/2.png"]).list()) == ["1.png", "2.png"]
    assert paths(ManifestSource(["tree/a/1.png", f"{tree}/b/3.png"]).list()) == ["a/1.png", "b/3.png"]


def test_a_list_needs_no_pandas_and_a_table_names_the_missing_package(tree, monkeypatch):
    frame = pd.DataFrame({"path": [str(tree / "a/1.png")]})
    frame.to_parquet(tree / "t.parquet")
    frame.to_csv(tree / "t.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match="Run pip install pyarrow"):
        ManifestSource(tree / "t.parquet")
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert paths(ManifestSource([tree / "a/1.png"]).list()) == ["1.png"]
    with pytest.raises(MissingPackage, match="Run pip install pandas"):
        ManifestSource(tree / "t.csv")


def test_a_path_may_begin_with_drive_or_home(tree, monkeypatch):
    monkeypatch.setenv("COLABKIT_DRIVE", str(tree / "a"))
    monkeypatch.setenv("HOME", str(tree / "b"))
    listing = ManifestSource(table(tree / "t.csv", "path\ndrive:1.png\n~/3.png\n")).list()
    assert paths(listing) == ["a/1.png", "b/3.png"]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ("a/1.png,1\n,2\n", "line 3 contains no path"),
        ("a/1.png,1\n  ,2\n", "line 3 contains no path"),
        ('a/1.png,"1\n1"\n\n \n,"2\n2"\n', "line 6 contains no path"),
        # Too long for Python's reader of CSV, so the line is unknown.
        (f"a/1.png,{'x' * 200_000}\n,2\n", "row 2 contains no path"),
        ("https://u:hunter2@example.com/x.png,1\n", "line 2 contains an address"),
    ],
)
def test_a_row_without_a_path_is_named_by_its_line(tree, rows, found):
    with pytest.raises(BadSource, match=found) as caught:
        ManifestSource(table(tree / "t.csv", f"path,label\n{rows}"))
    assert "hunter2" not in str(caught.value)


def test_rows_without_a_path_are_named_by_the_index_of_a_frame_and_by_their_number_in_other_tables(tree):
    frame = pd.DataFrame({"path": [str(tree / "a/1.png"), None], "label": [1, 2]}, index=["first", "second"])
    with pytest.raises(BadSource, match="the row with index 'second' contains no path"):
        ManifestSource(frame)
    with pytest.raises(BadSource, match="the row with index 1 contains no path"):
        ManifestSource(frame.reset_index()["path"])
    frame.to_parquet(tree / "t.parquet")
    for other in (tree / "t.parquet", pa.Table.from_pandas(frame), [*frame["path"]]):
        with pytest.raises(BadSource, match="row 2 contains no path"):
            ManifestSource(other)


@pytest.mark.parametrize("write", ["csv", "frame", "list"])
def test_rows_without_a_path_are_skipped_with_those_of_missing_files(tree, write, monkeypatch):
    monkeypatch.chdir(tree)
    frame = pd.DataFrame({"path": ["", "a/1.png", "gone.png", None, "b/3.png"], "label": list("abcde")})
    frame.to_csv("t.csv", index=False)
    given = {"csv": "t.csv", "frame": frame, "list": [*frame["path"]]}[write]
    source = open_source(given, skips_missing=True)
    for listing in (source.list(), pickle.loads(pickle.dumps(source.list()))):
        assert paths(listing) == ["a/1.png", "b/3.png"]
        assert listing.columns == ({} if write == "list" else {"label": ("b", "e")})
        places = {"csv": "line {}", "frame": "the row with index {}", "list": "row {}"}[write]
        first = {"csv": 2, "frame": 0, "list": 1}[write]
        assert listing.skipped == (
            (places.format(first), "the path is missing"),
            (str(tree / "gone.png"), "the file is missing"),
            (places.format(first + 3), "the path is missing"),
        )
    advice = "Repair or remove the row, or leave it out with on_bad='skip'"
    with pytest.raises(BadSource, match=f"{places.format(first)} contains no path.*{advice}"):
        open_source(given, skips_missing=False)
    with pytest.raises(BadSource, match="contains no path"):
        open_source(["", None], skips_missing=True)


@pytest.mark.parametrize("cell", [None, float("nan"), 3, b"bytes", "", "a\0b"])
def test_a_cell_that_is_not_a_path_is_named(tree, cell):
    for bad in ([tree / "a/1.png", cell], pd.DataFrame({"path": pd.Series([str(tree), cell], dtype=object)})):
        with pytest.raises(BadSource, match=r"row (2|with index 1) contains .*; expected a path in each row"):
            ManifestSource(bad)


def test_arrays_in_place_of_paths_are_named():
    table = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    with pytest.raises(
        BadSource, match=r"item 1 of the source is a DataFrame.* pass colabkit\.pack\(\) a tuple of NumPy arrays"
    ):
        ManifestSource((table, table["a"]))
    with pytest.raises(BadSource, match=r"it has the columns a, b.* holds the samples themselves"):
        ManifestSource(table)


def test_missing_files_are_counted_and_the_first_is_named(tree):
    source = ManifestSource([tree / "a/1.png", tree / "gone", tree / "a/1.png/below", tree / "gone"])
    with pytest.raises(SourceMissing, match=r"files are missing for 3 of 4 rows, starting with '.*/gone'"):
        source.list()


def test_a_missing_root_folder_is_named_instead_of_all_its_files(tree):
    with pytest.raises(SourceMissing, match=r"root='.* is not a folder"):
        ManifestSource(["a/1.png", "b/1.png"], root=tree / "gone").list()
    with pytest.raises(SourceMissing, match="files are missing for 1 of 1 row"):
        ManifestSource([str(tree / "no such")], root=tree / "gone").list()


def test_missing_files_below_a_root_name_the_joined_path_and_the_root(tree):
    joined = r"starting with '.*/b/a/1\.png' \('a/1\.png' in the table\)\. "
    with pytest.raises(SourceMissing, match=f"{joined}.*correct the folder of relative paths in root="):
        ManifestSource(["a/1.png"], root=tree / "b").list()


@pytest.mark.parametrize("ending", [".JPEG", ".png"])
def test_a_suffix_that_all_paths_lack_is_named(tree, ending):
    for name in ("one", "two"):
        (tree / f"b/{name}{ending}").write_bytes(b"1")
    names = pd.DataFrame({"image_name": ["one", "two"], "label": ["x", "y"]})
    names.to_csv(tree / "names.csv", index=False)
    found = rf"files are missing for 2 of 2 rows, starting with '.*/b/one', but '.*/b/one\{ending}' exists"
    example = re.escape(f"for example table['image_name'] = table['image_name'] + '{ending}', with pandas")
    for source in (names, tree / "names.csv"):
        with pytest.raises(SourceMissing, match=rf"{found}\. Add the suffix '\{ending}' to the paths, {example}"):
            ManifestSource(source, path_column="image_name", root=tree / "b", skips_missing=True).list()
    with pytest.raises(SourceMissing, match=re.escape(f"for example [path + '{ending}' for path in paths]")):
        ManifestSource([tree / "b/one", tree / "b/two"]).list()
    with pytest.raises(SourceMissing, match=r"missing for 1 of 2 rows, starting with '.*/one'\. Check the paths"):
        ManifestSource([tree / "b/one", tree / "a/1.png"]).list()


def test_folders_and_special_files_are_named_by_their_row(tree):
    os.mkfifo(tree / "pipe")
    with pytest.raises(BadSource, match=r"row 2 contains .*, a folder"):
        ManifestSource([tree / "a/1.png", tree / "a"]).list()
    with pytest.raises(BadSource, match=r"row 1 contains .*, a special file"):
        ManifestSource([tree / "pipe"]).list()


def test_an_empty_or_invalid_table_is_refused(tree):
    for bad in ([], pd.DataFrame({"path": []}), table(tree / "t.csv", "path,label\n")):
        with pytest.raises(BadSource, match="no rows"):
            ManifestSource(bad)
    with pytest.raises(BadSource, match="EmptyDataError"):
        ManifestSource(table(tree / "t.csv", ""))
    (tree / "t.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(BadSource, match="not a valid table"):
        ManifestSource(tree / "t.parquet")
    with pytest.raises(FileFailed, match=r"gone\.csv"):
        ManifestSource(tree / "gone.csv")
    for bad in (3, tree / "t.xlsx"):
        with pytest.raises(InvalidOption, match=r"[Pp]ass (a|the) DataFrame"):
            ManifestSource(bad)


def test_each_file_is_examined_once_and_transient_errors_are_counted(tree, monkeypatch):
    examined, stat = [], os.stat

    def flaky(path, **options):
        if str(path).endswith("1.png"):
            examined.append(path)
            if len(examined) == 1:
                raise OSError(5, "Input/output error")
        return stat(path, **options)

    source = ManifestSource([tree / "a/1.png"] * 5)
    monkeypatch.setattr(os, "stat", flaky)
    monkeypatch.setattr(reads, "_BACK_OFF_S", 0)
    listing = source.list()
    assert len(listing.items) == 5
    assert listing.retries == 1
    assert len(examined) == 2


def test_a_file_that_changed_is_not_read(tree):
    source = ManifestSource([tree / "a/1.png"])
    (item,) = source.list().items
    (tree / "a/1.png").write_bytes(b"longer")
    with pytest.raises(SourceChanged):
        read_item(source, item, Retries())


def test_a_table_or_file_on_a_mount_makes_the_source_one_that_can_hang(tree, monkeypatch):
    assert not ManifestSource([tree / "a/1.png"]).can_hang
    remote = str(tree / "b")
    monkeypatch.setattr(manifest, "can_hang", lambda path, _: path.startswith(remote))
    assert ManifestSource([tree / "a/1.png", tree / "b/3.png"]).can_hang
    assert not ManifestSource([tree / "a/1.png"]).can_hang
    (tree / "b" / "t.csv").write_text("path\n../a/1.png\n")
    assert ManifestSource(tree / "b" / "t.csv").can_hang


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    labels=st.lists(
        st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(
            lambda text: not _reads_as_a_number(text)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_labels_of_any_text_survive_a_csv_without_the_spaces_around_them(tmp_path, labels):
    write_tree(tmp_path, {"x": b"1"})
    pd.DataFrame({"path": ["x"] * len(labels), "label": labels}).to_csv(tmp_path / "t.csv", index=False)
    assert ManifestSource(tmp_path / "t.csv").list().columns["label"] == tuple(label.strip(" ") for label in labels)


def _reads_as_a_number(text: str) -> bool:
    """Return whether reading a CSV file may turn a label into a number, a boolean or a missing value."""
    return text.strip().lower() in ("true", "false", "nan", "inf", "-inf", "+inf", "infinity") or text.strip()[:1] in (
        *"+-.0123456789",
        "",
    )
