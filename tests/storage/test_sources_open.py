"""The type of source that `open_source()` chooses for a path, an address or a table."""

from __future__ import annotations

import io
import os
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from dead_mounts import break_mount
from tar_files import tar_bytes

from colabkit.errors import BadSource, ColabkitError, FileFailed, InvalidOption, NotMounted, SourceMissing, TimedOut
from colabkit.packs import label_samples
from colabkit.storage.sources import concurrency, items, registry
from colabkit.storage.sources.bucket import BucketSource
from colabkit.storage.sources.folder import FileSource, FolderSource, SlowSource
from colabkit.storage.sources.manifest import ManifestSource
from colabkit.storage.sources.reads import Retries, read_item
from colabkit.storage.sources.registry import open_samples, open_source
from colabkit.storage.sources.tar_archive import TarSource
from colabkit.storage.sources.zip_archive import ZipSource


def zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("cats/1.png", b"cat")
    return buffer.getvalue()


def test_an_archive_is_recognized_by_its_suffix_or_its_bytes(tmp_path):
    for name, data, kind in (
        ("a.zip", zip_bytes(), ZipSource),
        ("A.ZIP", b"no zip", ZipSource),
        ("archive", zip_bytes(), ZipSource),
        ("archive.download", zip_bytes(), ZipSource),
        ("a.tar", tar_bytes({"x": b"1"}), TarSource),
        ("A.TAR.GZ", b"no tar", TarSource),
        ("archive.part", tar_bytes({"x": b"1"}), TarSource),
        ("zip-inside.tar", tar_bytes({"x.zip": zip_bytes()}), TarSource),
        ("zip-inside", tar_bytes({"x.zip": zip_bytes()}), TarSource),
        ("model.pt", zip_bytes(), FileSource),
        ("pytorch_model.bin", zip_bytes(), FileSource),
        ("arrays.npz", zip_bytes(), FileSource),
        ("train.h5", b"\x89HDF", FileSource),
        ("notes.txt", b"hello", FileSource),
        ("labels.csv.gz", b"\x1f\x8bno gzip", FileSource),
        ("empty", b"", FileSource),
    ):
        (tmp_path / name).write_bytes(data)
        assert type(open_source(tmp_path / name)) is kind, name
        assert type(open_source(str(tmp_path / name))) is kind, name


def test_a_folder_and_a_source_are_opened(image_tree):
    source = open_source(image_tree)
    assert isinstance(source, FolderSource)
    assert open_source(source) is source


def test_the_home_folder_is_expanded(image_tree, monkeypatch):
    monkeypatch.setenv("HOME", str(image_tree.parent))
    assert open_source(f"~/{image_tree.name}").list().items


def test_single_files_on_drive_are_opened(tmp_path, monkeypatch):
    (tmp_path / "train.h5").write_bytes(b"pack")
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path))
    source = open_source("drive:train.h5")
    assert isinstance(source, FileSource)
    assert [item.path for item in source.list().items] == ["train.h5"]


def test_a_missing_path_on_drive_is_not_answered_with_the_advice_to_mount(tmp_path, monkeypatch):
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path))
    with pytest.raises(SourceMissing, match=r"Check the path\.$"):
        open_source("drive:birds")
    with pytest.raises(SourceMissing, match=r"Check the path, or run colabkit\.mount\(\) if it is on Drive\.$"):
        open_source(tmp_path / "birds")


def test_a_csv_is_a_table_of_paths_if_its_first_file_exists(tmp_path):
    (tmp_path / "1.png").write_bytes(b"1")
    for table, kind in (
        ("path,label\n1.png,cat\n", ManifestSource),
        ("label,Image_Path\ncat,1.png\n", ManifestSource),
        ("\ufeffpath\n1.png\n", ManifestSource),
        ("path,label\nmissing.png,cat\n", FileSource),
        ("path,label\n,cat\n", FileSource),
        ("path,label\n", FileSource),
        ("name,label\n1.png,cat\n", FileSource),
        ("1.png\n1.png\n", FileSource),
        ("path\n.\n", FileSource),
        ("", FileSource),
        ("path\n\0\n", FileSource),
    ):
        (tmp_path / "a.csv").write_text(table)
        (tmp_path / "a.tsv").write_text(table.replace(",", "\t"))
        assert type(open_source(tmp_path / "a.csv")) is kind, table
        assert type(open_source(tmp_path / "a.tsv")) is kind, table


def test_a_parquet_file_is_a_table_of_paths_if_its_first_file_exists(tmp_path, monkeypatch):
    (tmp_path / "1.png").write_bytes(b"1")
    for name, frame in {
        "yes": pd.DataFrame({"label": ["cat"], "file_name": ["1.png"]}),
        "missing": pd.DataFrame({"path": ["2.png"]}),
        "numbers": pd.DataFrame({"path": [1]}),
        "no rows": pd.DataFrame({"path": []}),
        "no paths": pd.DataFrame({"x": ["1.png"], "y": [1]}),
    }.items():
        frame.to_parquet(tmp_path / f"{name}.parquet")
        assert type(open_source(tmp_path / f"{name}.parquet")) is (ManifestSource if name == "yes" else FileSource)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no PAR1")
    assert type(open_source(tmp_path / "broken.parquet")) is FileSource
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    assert type(open_source(tmp_path / "yes.parquet")) is FileSource, "without pyarrow, it is a plain file"


def test_a_table_of_files_on_drive_needs_the_mount(tmp_path, monkeypatch):
    monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
    for module in ("foundation.mount_table", "storage.sources.manifest"):
        monkeypatch.setattr(f"colabkit.{module}.mounts", lambda *_: [])
    (tmp_path / "a.csv").write_text("path\ndrive:1.png\n")
    with pytest.raises(NotMounted):
        open_source(tmp_path / "a.csv")


def test_lists_and_frames_are_tables(tmp_path):
    (tmp_path / "1.png").write_bytes(b"1")
    frame = pd.DataFrame({"path": [str(tmp_path / "1.png")]})
    for table in ([tmp_path / "1.png"], (str(tmp_path / "1.png"),), frame, frame["path"]):
        source = open_source(table)
        assert isinstance(source, ManifestSource)
        assert [item.path for item in source.list().items] == ["1.png"]


def test_invalid_sources_are_refused_in_one_line():
    for source in (None, 3, "", b"bytes", {"path": ["x"]}, np.zeros(3), Path):
        with pytest.raises(InvalidOption, match=r"^Cannot read .*Pass the path of the source\.$"):
            open_source(source)


def test_addresses_of_buckets_are_buckets():
    assert isinstance(open_source("memory://bucket/birds"), BucketSource)


def test_a_remote_address_is_refused_without_showing_secrets():
    for address in (
        "https://user:hunter2@example.com/birds.zip?signature=hunter2hunter2",
        "drive.google.com/file/d/1abcdefghijklmnopqrstuvwxyz012345/view",
        "https://drive.google.com/drive/folders/1abcdefghijklmnopqrstuvwxyz012345",
    ):
        with pytest.raises(BadSource, match=r"Run colabkit\.stage\(\) on it") as caught:
            open_source(address)
        assert "hunter2" not in str(caught.value)


def test_a_path_written_as_an_address_is_refused():
    with pytest.raises(BadSource, match="Remove file:// from the path"):
        open_source("file:///content/birds")


def test_a_missing_path_names_the_part_that_exists(tmp_path):
    with pytest.raises(SourceMissing) as caught:
        open_source(tmp_path / "no" / "where")
    assert repr(str(tmp_path)) in str(caught.value)


def test_a_dead_mount_is_not_reported_as_a_missing_path(tmp_path, monkeypatch):
    break_mount(tmp_path / "mount", monkeypatch)
    for name in ("birds", "train-{0..1}.tar", "birds.parquet"):
        for opened in (open_source, open_samples):
            with pytest.raises(FileFailed, match="Cannot read"):
                opened(tmp_path / "mount" / name)


def test_special_files_and_broken_links_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("pipe.tar", "link"):
        with pytest.raises(BadSource, match="special file"):
            open_source(tmp_path / name)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_impossible_names_raise_colabkit_errors(tmp_path, name):
    with pytest.raises(ColabkitError):
        open_source(f"{tmp_path}/{name}")


def test_samples_are_included_in_the_package():
    assert len(open_source("samples:digits").list().items) > 100
    with pytest.raises(SourceMissing, match="samples:digits"):
        open_source("samples:nothing")


def test_one_file_has_no_classes(tmp_path):
    (tmp_path / "train.h5").write_bytes(b"pack")
    source = open_source(tmp_path / "train.h5")
    with pytest.raises(BadSource, match=r"no image among 1 file \(1 .h5\);"):
        label_samples(source.list(), source.name)


@pytest.mark.full
def test_a_path_that_never_answers_times_out(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "a", "w"):
        pass
    answer = threading.Event()
    monkeypatch.setattr(concurrency, "STALLED_S", 0.05)
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.05)
    for module in (registry, items):
        monkeypatch.setattr(module, "can_hang", lambda path, table: True)
    sources = [kind(tmp_path / "a") for kind in (FileSource, TarSource, ZipSource)]
    stat = os.stat

    def hangs(path, **options):
        if str(path) == str(tmp_path / "a"):
            answer.wait(30)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", hangs)
    monkeypatch.setattr(zipfile, "ZipFile", lambda path: answer.wait(30))
    try:
        with pytest.raises(TimedOut):
            open_source(tmp_path / "a")
        for source in sources:
            with pytest.raises(TimedOut):
                source.list()
    finally:
        answer.set()


def test_every_call_waits_once_and_returns_the_result_of_the_inner_source(image_tree, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    slow = SlowSource(FolderSource(image_tree), 0.25)
    assert {item.path: read_item(slow, item, Retries()) for item in slow.list().items} == {
        path.relative_to(image_tree).as_posix(): path.read_bytes() for path in image_tree.rglob("*.png")
    }
    assert slow.name == str(image_tree)
    # Other pauses wait for the clock's tick before files that were just modified are read.
    assert [pause for pause in pauses if pause == 0.25] == [0.25] * 25
