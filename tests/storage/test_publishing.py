"""`publish()` leaves the old or the new version at the target after any error, and no other files."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contract import make_shards
from dead_mounts import break_mount
from published_files import NEW, NEW_FOLDER, OLD, OLD_FOLDER, assert_nothing_is_open, bring, content, write
from strikes import ChangeHook, failures, fill_disk, interrupt
from trees import leftovers

from colabkit.errors import (
    BadSource,
    ColabkitError,
    FileFailed,
    InvalidOption,
    NotEnoughSpace,
    NotMounted,
    SourceChanged,
    SourceMissing,
    TargetExists,
)
from colabkit.foundation import file_changes
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.storage.sources import reads
from colabkit.storage.sources.engine import BLOCK_BYTES
from colabkit.storage.sources.folder import FolderSource
from colabkit.storage.sources.items import Item


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert_nothing_is_open(tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write(tmp_path / "local" / "birds.h5", NEW)


@pytest.mark.parametrize("verify", ["size", "full"])
@pytest.mark.parametrize("files", [NEW, NEW_FOLDER, {"": b""}, {"": b"x" * (3 * BLOCK_BYTES + 1)}])
def test_a_file_or_folder_is_copied_completely(tmp_path, files, verify):
    source, final = write(tmp_path / "thing", files), tmp_path / "new" / "folder" / "thing"
    report = bring(source, final, verify=verify)
    assert content(final) == files
    assert (report.path, report.replaced, report.is_sent) == (final, False, True)
    assert report.published_bytes == sum(map(len, files.values()))
    assert ("read back" in repr(report)) == (verify == "full")
    assert leftovers(tmp_path) == []
    assert bring(source, final).replaced


@pytest.mark.parametrize("to", ["saved/", "saved/new.h5"])
def test_a_pack_of_shards_is_published_with_all_shards_and_the_index_last(tmp_path, to, file_hook):
    (tmp_path / "packed").mkdir()
    index = make_shards(tmp_path / "packed" / "birds.h5", {"train": 4}, {"train": 2, "test": 1})
    shards, states = {"birds-00000.h5", "birds-00001.h5"}, []
    file_hook(lambda *_: states.append({path.name for path in (tmp_path / "saved").glob("[!.]*")}))
    report = bring(index, f"{tmp_path}/{to}")
    file_hook(None)
    assert content(tmp_path / "saved").keys() == {report.path.name, *shards}
    assert shards in states
    assert all(state >= shards for state in states if report.path.name in state)
    assert report.published_bytes == sum(file.stat().st_size for file in index.parent.iterdir())
    assert len(open_pack(report.path)["train"][:][0]) == 6
    index.with_name("birds-00001.h5").unlink()
    with pytest.raises(SourceMissing, match=r"the shard 'birds-00001\.h5' is missing"):
        bring(index, tmp_path / "other" / "birds.h5")
    assert not (tmp_path / "other").exists()


def test_an_empty_folder_is_published_and_links_are_skipped(tmp_path):
    (tmp_path / "empty").mkdir()
    bring(tmp_path / "empty", tmp_path / "nothing")
    assert content(tmp_path / "nothing") == {}
    source = write(tmp_path / "run", NEW_FOLDER)
    (source / "link").symlink_to("a.png")
    bring(source, tmp_path / "final")
    assert content(tmp_path / "final") == NEW_FOLDER


@pytest.mark.parametrize("to", ["packs", "packs/", "new/", "packs/birds.h5"])
def test_a_file_keeps_its_name_in_an_existing_folder_or_after_a_slash(local, tmp_path, monkeypatch, to):
    (tmp_path / "packs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert bring(local, to).path == tmp_path / to.split("/")[0] / "birds.h5"


def test_a_folder_that_is_published_twice_to_one_path_replaces_its_first_copy(tmp_path):
    source = write(tmp_path / "run", OLD_FOLDER)
    assert not bring(source, tmp_path / "results").replaced
    write(source, NEW_FOLDER)
    again = bring(source, tmp_path / "results")
    assert (again.path, again.replaced) == (tmp_path / "results", True)
    assert content(tmp_path / "results") == {**OLD_FOLDER, **NEW_FOLDER}
    inside = [bring(source, f"{tmp_path}/results/").path for _ in range(2)]
    assert inside == [tmp_path / "results" / "run"] * 2


def test_a_folder_with_other_files_is_never_replaced(tmp_path):
    source = write(tmp_path / "run", NEW_FOLDER)
    for number, other in enumerate(["precious.txt", "deep/er/precious.txt", "run/a.png"]):
        folder = write(tmp_path / f"backups{number}", {other: b"mine", "a.png": b"old"})
        advice = f"Publish to '{folder}/run' with a slash at the end, or remove"
        with pytest.raises(TargetExists, match=f"has a file that the source lacks, '{other}'.* {advice}"):
            bring(source, folder)
        assert content(folder) == {other: b"mine", "a.png": b"old"}
    (folder := tmp_path / "linked").mkdir()
    (folder / "e.txt").symlink_to(source)
    (folder / "link").symlink_to(source)
    with pytest.raises(TargetExists, match="'link'"):
        bring(source, folder)
    (tmp_path / "shortcut").symlink_to(folder)
    assert [bring(source, tmp_path / "shortcut").replaced for _ in range(2)] == [False, True]
    assert content(folder / "run") == NEW_FOLDER
    write(tmp_path / "backups" / "run", mine := {"a.png": b"old", "notes": b"mine"})
    for to in (tmp_path / "backups" / "run", f"{tmp_path}/backups/"):
        with pytest.raises(TargetExists, match="has a file that the source lacks, 'notes'"):
            bring(source, to)
    assert content(tmp_path / "backups" / "run") == mine


def test_a_file_that_appears_in_the_target_during_the_copy_is_never_removed(tmp_path, file_hook):
    source, final = write(tmp_path / "run", NEW_FOLDER), write(tmp_path / "remote", OLD_FOLDER)
    bring(source, tmp_path / "fresh")
    for target in (final, tmp_path / "fresh", tmp_path / "new"):

        def act(at: str, path: Path, target: Path = target) -> None:
            if at == "write":
                file_hook(None)
                write(target, {"checkpoint.pt": b"mine"})

        for name in set(content(target)) - set(NEW_FOLDER) if target.exists() else ():
            (target / name).unlink()
        before = content(target) if target.exists() else {}
        file_hook(act)
        with pytest.raises(TargetExists, match=r"has a file that the source lacks, 'checkpoint\.pt'"):
            bring(source, target)
        assert content(target) == {**before, "checkpoint.pt": b"mine"}
    assert leftovers(tmp_path) == []


def test_drive_is_the_folder_in_the_environment_and_is_never_replaced(tmp_path, monkeypatch):
    root = write(tmp_path / "drive", {"precious.txt": b"mine"})
    source = write(tmp_path / "local" / "drive", NEW_FOLDER)
    monkeypatch.setenv("COLABKIT_DRIVE", str(root))
    assert bring(source, "drive:").path == root / "drive"
    assert bring(source, "drive:packs/").path == root / "packs" / "drive"
    assert (root / "precious.txt").read_bytes() == b"mine"
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path / "typo"))
    with pytest.raises(NotMounted, match="typo"):
        bring(source, "drive:")


INVALID: list[tuple[Any, str, type[ColabkitError], str]] = [
    ("gone", "final", SourceMissing, "does not exist"),
    ("pipe", "final", BadSource, "special file"),
    ("run", "file", TargetExists, "is not a folder, but the source is a folder"),
    ("file", "blocked/", TargetExists, "is a folder, but the source is a file"),
    ("file", "file/", TargetExists, "inside the source"),
    ("file", "file", TargetExists, "the source itself"),
    ("file", ".", TargetExists, "the source itself"),
    ("run", "run", TargetExists, "the source itself"),
    ("run", "run/inner/final", TargetExists, "inside the source"),
    ("run/run", "run", TargetExists, "contains the source"),
    ("file", "file2/final", FileFailed, "file2"),
    ("file", "", InvalidOption, "'' is not a valid path"),
    (7, "final", InvalidOption, "7 is not a valid path"),
    ("file", "gs://bucket/file", InvalidOption, "'gs://bucket/file' is an address; expected a local path"),
]


def test_invalid_arguments_raise_one_line_and_change_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"file": b"x", "file2": b"y", "run/run/a": b"z", "run/inner/b": b"", "blocked/file/c": b""})
    os.mkfifo("pipe")
    before = content(tmp_path)
    for path, to, kind, words in INVALID:
        with pytest.raises(kind, match=r"^Cannot publish .*\.$") as caught:
            bring(path, to)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(InvalidOption, match="verify"):
        bring(tmp_path / "file", "final", verify="some")
    assert content(tmp_path) == before


def test_links_and_retries_are_reported(tmp_path, monkeypatch):
    source = write(tmp_path / "run", NEW_FOLDER)
    (source / "link").symlink_to("a.png")
    open_item, failed = FolderSource.open, []

    def fail_once(folder: FolderSource, item: Item) -> Any:
        if not failed:
            failed.append(item)
            raise OSError(errno.EIO, "flaky")
        return open_item(folder, item)

    monkeypatch.setattr(reads, "_BACK_OFF_S", 0)
    monkeypatch.setattr(FolderSource, "open", fail_once)
    report = bring(source, tmp_path / "final")
    assert (report.skipped, report.retries) == ((("link", "link"),), 1)
    assert "1 retry, 1 path skipped" in repr(report)
    assert "link" in report._repr_html_()


def test_a_dead_mount_is_not_reported_as_a_missing_source(tmp_path, monkeypatch):
    break_mount(tmp_path / "mount", monkeypatch)
    with pytest.raises(FileFailed, match="Cannot publish"):
        bring(tmp_path / "mount" / "run", tmp_path / "final")


def test_a_removed_working_folder_raises_one_line(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for path, to in (("run", tmp_path / "final"), (write(tmp_path / "file", NEW), "final")):
        with pytest.raises(FileFailed, match=r"^Cannot publish .*\.$"):
            bring(path, to)


def test_an_error_of_the_target_raises_one_line_that_names_it(local, tmp_path, file_hook):
    for number in (errno.EROFS, errno.EACCES, errno.EDQUOT):
        for at in range(1, 6):

            def refuse(number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            file_hook(ChangeHook(at, refuse))
            with pytest.raises((FileFailed, NotEnoughSpace), match=f"(?i){os.strerror(number)}") as caught:
                bring(local, tmp_path / f"new-{number}-{at}" / "final.h5")
            assert at == 1 or f"new-{number}-{at}" in str(caught.value)
    assert leftovers(tmp_path) == []


def test_too_little_space_raises_before_anything_is_written(local, tmp_path, monkeypatch):
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 100)
    with pytest.raises(NotEnoughSpace, match=r"expected at least 14\.6 KiB"):
        bring(local, tmp_path / "final.h5")
    assert os.listdir(tmp_path) == ["local"]


@pytest.mark.parametrize(("old", "new"), [(OLD, NEW), (OLD_FOLDER, NEW_FOLDER)], ids=["file", "folder"])
@pytest.mark.parametrize(("act", "error"), [(fill_disk, NotEnoughSpace), (interrupt, KeyboardInterrupt)])
def test_a_failure_at_any_operation_leaves_the_old_or_the_new_version_and_no_other_files(
    tmp_path, file_hook, old, new, act, error
):
    source, final = write(tmp_path / "local" / "thing", new), write(tmp_path / "remote" / "thing", old)
    for number, strike in failures(file_hook, act, lambda: bring(source, final), error):
        assert content(final) in (old, new), f"at operation {number}, {strike.operation}"
        assert leftovers(tmp_path) == [], f"at operation {number}, {strike.operation}"
        bring(source, tmp_path / "other")
        file_changes.remove(final)
        write(final, old)
    assert number >= (4 if old is OLD else 13)
    assert content(final) == new


def test_a_source_that_changes_during_the_copy_raises(tmp_path, file_hook):
    cases = [(NEW, ""), (NEW_FOLDER, "e.txt"), (NEW_FOLDER, "added.txt")]
    for number, ((files, part), change, operation) in enumerate(
        itertools.product(cases, ("append", "touch", "gone"), ("write", "sync"))
    ):
        if part == "added.txt" and change != "append":
            continue
        source = write(tmp_path / f"local{number}" / "thing", files)
        final = tmp_path / f"remote{number}" if part else write(tmp_path / f"remote{number}", {"": b"old"})
        changing = source / part if part else source

        def act(at: str, path: Path, changing: Path = changing, change: str = change, on: str = operation) -> None:
            if at == on:
                file_hook(None)
                if change == "append":
                    changing.open("ab").write(b"+")
                elif change == "touch":
                    os.utime(changing, (1, 1))
                else:
                    changing.unlink()

        file_hook(act)
        before = content(final)
        with pytest.raises((SourceChanged, FileFailed), match=r"Cannot (publish|read) "):
            bring(source, final)
        assert content(final) == before
    assert leftovers(tmp_path) == []
