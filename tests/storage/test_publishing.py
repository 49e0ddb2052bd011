"""`publish()`: the old or the new thing at its place, whatever fails, and nothing beside it."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from published_files import NEW, NEW_FOLDER, OLD, OLD_FOLDER, assert_nothing_is_open, bring, content, write
from strikes import Strike, full, interrupt, struck_runs
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
from colabkit.storage.sources.engine import BLOCK_BYTES


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Look after each test for threads and open files that stayed."""
    yield
    assert_nothing_is_open(tmp_path)


@pytest.fixture
def near(tmp_path: Path) -> Path:
    """Return a file to publish."""
    return write(tmp_path / "near" / "birds.h5", NEW)


@pytest.mark.parametrize("verify", ["size", "full"])
@pytest.mark.parametrize("files", [NEW, NEW_FOLDER, {"": b""}, {"": b"x" * (3 * BLOCK_BYTES + 1)}])
def test_a_file_or_folder_comes_to_its_place_whole(tmp_path, files, verify):
    source, final = write(tmp_path / "thing", files), tmp_path / "new" / "folder" / "thing"
    report = bring(source, final, verify=verify)
    assert content(final) == files
    assert (report.path, report.replaced, report.is_sent) == (final, False, True)
    assert report.published_bytes == sum(map(len, files.values()))
    assert ("read back" in repr(report)) == (verify == "full")
    assert leftovers(tmp_path) == []
    assert bring(source, final).replaced


def test_an_empty_folder_comes_to_its_place_and_links_are_left_out(tmp_path):
    (tmp_path / "empty").mkdir()
    bring(tmp_path / "empty", tmp_path / "nothing")
    assert content(tmp_path / "nothing") == {}
    source = write(tmp_path / "run", NEW_FOLDER)
    (source / "link").symlink_to("a.png")
    bring(source, tmp_path / "final")
    assert content(tmp_path / "final") == NEW_FOLDER


@pytest.mark.parametrize("to", ["packs", "packs/", "new/", "packs/birds.h5"])
def test_a_file_keeps_its_name_in_a_folder_that_is_there_or_named_with_a_slash(near, tmp_path, monkeypatch, to):
    (tmp_path / "packs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert bring(near, to).path == tmp_path / to.split("/")[0] / "birds.h5"


def test_a_folder_keeps_its_name_in_another_and_takes_the_place_of_its_former_version_only(tmp_path):
    source = write(tmp_path / "run", NEW_FOLDER)
    write(tmp_path / "backups", {"precious.txt": b"mine"})
    write(tmp_path / "backups" / "run", OLD_FOLDER)
    assert bring(source, tmp_path / "backups").path == tmp_path / "backups" / "run"
    assert bring(source, tmp_path / "backups" / "run").replaced
    assert content(tmp_path / "backups" / "run") == NEW_FOLDER
    assert (tmp_path / "backups" / "precious.txt").read_bytes() == b"mine"
    assert bring(source, f"{tmp_path}/backups/run/").path == tmp_path / "backups" / "run" / "run"


def test_drive_is_the_folder_that_the_environment_names_and_never_what_is_replaced(tmp_path, monkeypatch):
    root = write(tmp_path / "drive", {"precious.txt": b"mine"})
    source = write(tmp_path / "near" / "drive", NEW_FOLDER)
    monkeypatch.setenv("COLABKIT_DRIVE", str(root))
    assert bring(source, "drive:").path == root / "drive"
    assert bring(source, "drive:packs/").path == root / "packs" / "drive"
    assert (root / "precious.txt").read_bytes() == b"mine"
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path / "typo"))
    with pytest.raises(NotMounted, match="typo"):
        bring(source, "drive:")


REFUSED: list[tuple[Any, str, type[ColabkitError], str]] = [
    ("gone", "final", SourceMissing, "nothing is there"),
    ("pipe", "final", BadSource, "special file"),
    ("run", "file", TargetExists, "is no folder"),
    ("file", "blocked/", TargetExists, "is a folder"),
    ("file", "file/", TargetExists, "in it"),
    ("file", "file", TargetExists, "the same place"),
    ("file", ".", TargetExists, "the same place"),
    ("run", "run", TargetExists, "the same place"),
    ("run", "run/inner/final", TargetExists, "lies in it"),
    ("run/run", "run", TargetExists, "around it"),
    ("file", "file2/final", FileFailed, "file2"),
    ("file", "", InvalidOption, "as path"),
    (7, "final", InvalidOption, "7 as path"),
]


def test_what_cannot_be_published_is_one_typed_line_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"file": b"x", "file2": b"y", "run/run/a": b"z", "run/inner/b": b"", "blocked/file/c": b""})
    os.mkfifo("pipe")
    before = content(tmp_path)
    for path, to, kind, said in REFUSED:
        with pytest.raises(kind, match=r"^Cannot publish .*\.$") as caught:
            bring(path, to)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(InvalidOption, match="verify"):
        bring(tmp_path / "file", "final", verify="some")
    assert content(tmp_path) == before


def test_a_target_that_refuses_is_one_typed_line_that_names_it(near, tmp_path, file_hook):
    for number in (errno.EROFS, errno.EACCES, errno.EDQUOT):
        for at in range(1, 6):

            def refuse(number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            file_hook(Strike(at, refuse))
            with pytest.raises((FileFailed, NotEnoughSpace), match=os.strerror(number)) as caught:
                bring(near, tmp_path / f"new-{number}-{at}" / "final.h5")
            assert at == 1 or "final.h5" in str(caught.value)
    assert leftovers(tmp_path) == []


def test_what_does_not_fit_is_refused_before_anything_is_written(near, tmp_path, monkeypatch):
    monkeypatch.setattr(file_changes, "free_bytes", lambda path: 100)
    with pytest.raises(NotEnoughSpace, match=r"expected at least 14\.6 KiB"):
        bring(near, tmp_path / "final.h5")
    assert os.listdir(tmp_path) == ["near"]


@pytest.mark.parametrize(("old", "new"), [(OLD, NEW), (OLD_FOLDER, NEW_FOLDER)], ids=["file", "folder"])
@pytest.mark.parametrize(("act", "error"), [(full, NotEnoughSpace), (interrupt, KeyboardInterrupt)])
def test_a_failure_at_any_operation_leaves_the_old_or_the_new_and_nothing_beside_it(
    tmp_path, file_hook, old, new, act, error
):
    source, final = write(tmp_path / "near" / "thing", new), write(tmp_path / "far" / "thing", old)
    for number, strike in struck_runs(file_hook, act, lambda: bring(source, final), error):
        assert content(final) in (old, new), f"at operation {number}, {strike.operation}"
        assert leftovers(tmp_path) == [], f"at operation {number}, {strike.operation}"
        bring(source, tmp_path / "other")
        file_changes.remove(final)
        write(final, old)
    assert number >= (4 if old is OLD else 13)
    assert content(final) == new


def test_a_source_that_changes_meanwhile_is_found_out(tmp_path, file_hook):
    cases = [(NEW, ""), (NEW_FOLDER, "e.txt"), (NEW_FOLDER, "added.txt")]
    for number, ((files, part), change, operation) in enumerate(
        itertools.product(cases, ("append", "touch", "gone"), ("write", "sync"))
    ):
        if part == "added.txt" and change != "append":
            continue
        source = write(tmp_path / f"near{number}" / "thing", files)
        final = tmp_path / f"far{number}" if part else write(tmp_path / f"far{number}", {"": b"old"})
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
