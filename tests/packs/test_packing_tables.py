"""Tables whose paths are in a column of any name, are relative to any folder, or name missing files."""

from __future__ import annotations

from functools import partial

import pandas as pd
import pytest
from PIL import Image

import colabkit
from colabkit.errors import BadSource, InvalidOption, SourceMissing
from colabkit.packs.dataset.file_dataset import FileDataset

AGES = [20.0, 30.5, 41.0, 52.5]


@pytest.fixture(params=["frame", "csv", "parquet"])
def table(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for number in range(len(AGES)):
        Image.new("RGB", (8, 8), (number * 9, 0, 0)).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "tables").mkdir()

    def make(*missing):
        names = [*(f"{number}.png" for number in range(len(AGES))), *missing]
        frame = pd.DataFrame({"portrait": names, "age": [*AGES, *(0.5 for _ in missing)]})
        if request.param == "csv":
            frame.to_csv("tables/t.csv", index=False)
        elif request.param == "parquet":
            frame.to_parquet("tables/t.parquet")
        return frame if request.param == "frame" else f"tables/t.{request.param}"

    return make


def test_a_column_of_any_name_holds_paths_relative_to_any_folder(table):
    options = {"path_column": "portrait", "root": "photos"}
    source = table()
    report = colabkit.pack(source, "p.h5", labels="age", progress=False, **options)
    assert colabkit.open_pack(report)["train"].labels.tolist() == AGES
    assert colabkit.pack(source, "p.h5", labels="age", progress=False, **options).reused
    pack = colabkit.prepare(source, labels="age", to=None, progress=False, **options)
    assert pack["train"].labels.tolist() == AGES
    assert colabkit.FileDataset(source, labels="age", **options).labels.tolist() == AGES
    staged = colabkit.stage(source, "copy", progress=False, **options)
    assert sorted(path.name for path in staged.path.glob("*.png")) == [f"{number}.png" for number in range(len(AGES))]


def test_rows_of_missing_files_are_left_out_and_listed_on_request(table, tmp_path):
    options = {"path_column": "portrait", "root": "photos", "labels": "age"}
    source, gone = table("gone.png"), str(tmp_path / "photos" / "gone.png")
    with pytest.raises(SourceMissing, match=r"for 1 of 5 rows, starting with '.*gone.png'.*in root=.*on_bad='skip'"):
        colabkit.pack(source, "p.h5", progress=False, **options)
    with pytest.raises(SourceMissing, match=r"missing for 1 of 5 rows.*at most 0.*increase max_bad="):
        colabkit.pack(source, "p.h5", on_bad="skip", max_bad=0, progress=False, **options)
    report = colabkit.pack(source, "p.h5", on_bad="skip", progress=False, **options)
    assert report.left_out == ((gone, "the file is missing"),)
    assert "gone.png" in repr(report)
    assert colabkit.open_pack(report)["train"].labels.tolist() == AGES
    prepared = colabkit.prepare(source, on_bad="skip", to=None, progress=False, **options).report
    assert prepared.left_out == report.left_out
    assert "gone.png" in repr(prepared)
    data = colabkit.FileDataset(source, on_bad="skip", **options)
    assert (data.labels.tolist(), data.left_out) == (AGES, report.left_out)
    with pytest.raises(SourceMissing, match="missing for 5 of 5 rows"):
        colabkit.pack(source, "q.h5", on_bad="skip", progress=False, path_column="portrait", root="tables")


def test_errors_count_the_rows_of_missing_files(table, tmp_path):
    (tmp_path / "photos" / "folder").mkdir()
    source = table("gone.png", "folder")
    with pytest.raises(BadSource, match=r"(row 6|line 7|row with index 5) contains '.*folder', a folder"):
        colabkit.pack(
            source, "p.h5", labels="age", path_column="portrait", root="photos", on_bad="skip", progress=False
        )


def test_rows_without_a_path_are_left_out_and_listed_on_request(table, tmp_path):
    options = {"path_column": "portrait", "root": "photos", "labels": "age", "progress": False}
    source = table("", "gone.png")
    with pytest.raises(BadSource, match=r"(row 5|line 6|row with index 4) contains no path.*on_bad='skip'"):
        colabkit.pack(source, "p.h5", **options)
    with pytest.raises(SourceMissing, match=r"files or paths are missing for 2 of 6 rows, starting with '.*(4|5|6)'"):
        colabkit.pack(source, "p.h5", on_bad="skip", max_bad=1, **options)
    report = colabkit.pack(source, "p.h5", on_bad="skip", max_bad=2, **options)
    assert [reason for _, reason in report.left_out] == ["the path is missing", "the file is missing"]
    assert colabkit.open_pack(report)["train"].labels.tolist() == AGES


def test_a_table_whose_first_row_has_no_path_is_a_table(table, tmp_path):
    table()
    (tmp_path / "photos" / "e.csv").write_text("path,label\n,a\n0.png,b\n1.png,b\n")
    with pytest.raises(BadSource, match="line 2 contains no path"):
        colabkit.pack("photos/e.csv", "p.h5", progress=False)
    report = colabkit.pack("photos/e.csv", "p.h5", on_bad="skip", max_bad=1, progress=False)
    assert report.left_out == (("line 2", "the path is missing"),)


def test_categories_of_a_column_are_the_classes_in_their_order(table):
    table()
    names = ["small", "medium", "large", "huge"]
    frame = pd.DataFrame({"path": [f"photos/{number}.png" for number in range(4)]})
    frame["label"] = pd.Categorical(["large", "small", "medium", "large"], names, ordered=True)
    data = colabkit.open_pack(colabkit.pack(frame, "p.h5", fields=["label"], progress=False))["train"]
    assert (data.classes, data.labels.tolist()) == (tuple(names), [2, 0, 1, 2])
    assert data[0][2] == "large"
    # The order of the categories belongs to the options of a pack.
    frame["label"] = frame["label"].cat.reorder_categories(names[::-1])
    for pack in (
        colabkit.open_pack(colabkit.pack(frame, "p.h5", overwrite=True, progress=False)),
        colabkit.prepare(frame, to=None, progress=False),
    ):
        assert (pack.classes, pack["train"].labels.tolist()) == (tuple(names[::-1]), [1, 3, 2, 1])
    files = colabkit.FileDataset(frame, renumber=True)
    assert (files.classes, files.labels.tolist()) == (("large", "medium", "small"), [0, 2, 1, 0])
    frame["label"] = frame["label"].astype(str)
    assert colabkit.FileDataset(frame).classes == ("large", "medium", "small")
    assert colabkit.prepare(frame, to=None, progress=False).classes == ("large", "medium", "small")


def test_other_columns_of_categories_are_not_taken_for_labels(table):
    table()
    frame = pd.DataFrame(
        {"path": [f"photos/{number}.png" for number in range(4)], "kind": pd.Categorical(list("abab"))}
    )
    with pytest.raises(BadSource, match=r"no column \(kind\) has a common label name"):
        colabkit.pack(frame, "p.h5", progress=False)
    frame["kind"] = pd.Categorical([7, 5, 7, 5], [7, 5])
    assert colabkit.FileDataset(frame, labels="kind").labels.tolist() == [7, 5, 7, 5]


def test_a_list_of_paths_has_no_column_of_paths(table):
    table()
    with pytest.raises(InvalidOption, match=r"a list of paths has no columns. Omit path_column="):
        colabkit.pack(["photos/0.png"], "p.h5", path_column="portrait", labels=None, progress=False)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_local_copy_of_a_table_is_not_packed_without_its_labels(tmp_path, suffix):
    for number in range(4):
        (tmp_path / "ants" / f"{number}").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "ants" / f"{number}" / "x.png")
    frame = pd.DataFrame({"path": [f"ants/{number}/x.png" for number in range(4)], "label": list("abab")})
    table = tmp_path / f"rows.{suffix}"
    write = frame.to_parquet if suffix == "parquet" else partial(frame.to_csv, index=False)
    write(table)
    staged = colabkit.stage(table, tmp_path / "copy", progress=False).path
    for make in (
        lambda **k: colabkit.pack(staged, tmp_path / "p.h5", progress=False, **k),
        partial(FileDataset, staged),
    ):
        with pytest.raises(BadSource, match=rf"that '.*rows\.{suffix}' lists, without the labels.*root='.*copy'"):
            make()
        make(labels=None)
    report = colabkit.pack(table, tmp_path / "q.h5", root=staged, progress=False)
    assert report.classes == ("a", "b")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("photos/0.png,a\nphotos/1.png,b\n", r"no header line \(its first line contains 'photos/0\.png'\).*Insert"),
        ("path;label\nphotos/0.png;a\n", r"separated by ';' instead of ','.*Save .* separator ','.*sep=';'"),
        ("path\tlabel\nphotos/0.png\ta\n", r"separated by '\\t' instead of ','"),
        ("photos/0.png;a\nphotos/1.png;b\n", r"separated by ';'"),
    ],
)
def test_a_csv_without_a_header_line_or_with_another_separator_is_named(tmp_path, text, found):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(BadSource, match=found) as caught:
        colabkit.pack(tmp_path / "rows.csv", tmp_path / "p.h5", progress=False)
    assert "path_column" not in str(caught.value)


def test_errors_name_the_options_for_tables(table):
    source = table()
    with pytest.raises(BadSource, match="with path_column="):
        colabkit.pack(source, "p.h5", progress=False)
    with pytest.raises(InvalidOption, match="no column 'foto'; expected one of portrait, age"):
        colabkit.pack(source, "p.h5", path_column="foto", progress=False)
    for other in ("photos", {"X": [[1.0]]}):
        with pytest.raises(InvalidOption, match=r"root='photos'.* appl.*Omit root="):
            colabkit.pack(other, "p.h5", root="photos", labels=None, progress=False)
