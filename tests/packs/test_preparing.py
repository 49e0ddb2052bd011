"""`prepare()` takes the fastest route to a local pack, reports the route, and recovers from damaged packs."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import os
import pickle
import re
import shutil
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from far_mounts import FuseMount, has_fuse, wait_for
from http_servers import served
from local_copies import zipped
from packed_files import flip_byte
from PIL import Image
from preparations import forget_local, left_over, ready, samples
from reader_threads import reader_threads
from trees import leftovers, make_tree, needs

from colabkit.errors import BadImage, InvalidOption, SourceMissing
from colabkit.foundation import try_lock
from colabkit.notebook.command_line import main
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.verification import verify
from colabkit.packs.preparing import preparation as preparing
from colabkit.packs.preparing import source_state
from colabkit.packs.preparing.api import prepare
from colabkit.packs.preparing.prepared_pack import PreparedPack
from colabkit.storage import stage
from colabkit.storage.sources.folder import SlowSource
from colabkit.storage.sources.manifest import ManifestSource
from colabkit.storage.staging import places


@pytest.fixture(autouse=True)
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "drive"
    folder.mkdir()
    monkeypatch.setenv("COLABKIT_DRIVE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path: Path, near_storage: Path) -> Iterator[None]:
    """Check after each test that no threads and no incomplete files are left."""
    yield
    assert left_over(near_storage) + leftovers(tmp_path) == []


@pytest.fixture
def mounted(tmp_path: Path) -> Callable[..., FuseMount]:
    needs("FUSE", has_fuse())
    return lambda root, **options: FuseMount(tmp_path / "far", root, **options)


def archives(tree: Path) -> None:
    zipped(tree, tree.with_suffix(".zip"))
    with tarfile.open(tree.with_suffix(".tar.gz"), "w:gz") as archive:
        archive.add(tree, "tree")


def add_image(tree: Path, name: str = "dogs") -> None:
    (tree / name).mkdir()
    shutil.copy(tree / "ants" / "000.png", tree / name / "000.png")


def test_an_address_is_no_folder_for_saved_packs(tmp_path, monkeypatch, image_tree):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption, match=r"'gs://bucket/packs' is an address; expected a folder or a mount\. "):
        prepare(image_tree, to="gs://bucket/packs", progress=False)
    assert not (tmp_path / "gs:").exists()


def test_the_first_call_packs_and_saves_and_the_second_uses_the_local_pack(image_tree, drive):
    first = ready(image_tree)
    assert samples(first) == 24
    assert first.report.way == "packed"
    assert [first.report.saved_path] == list(drive.glob("colabkit/*.h5"))
    again = ready(image_tree)
    assert again.report.way == "local"
    assert again.path == first.path
    assert again.report.packed_s == first.report.packed_s
    assert again.report.saved_path == first.report.saved_path


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_a_local_pack_is_used_if_the_source_no_longer_exists(image_tree, form):
    source = image_tree if form == "folder" else zipped(image_tree, image_tree.with_suffix(".zip"))
    ready(source)
    shutil.rmtree(image_tree)
    if form == "zip":
        source.unlink()
    assert ready(source).report.way == "local"


def test_a_local_pack_is_used_if_a_file_of_a_remote_source_cannot_be_examined(image_tree, monkeypatch):
    monkeypatch.setattr("colabkit.packs.preparing.api.can_hang", lambda *_: True)
    ready(image_tree, to=None)
    stat, refused = os.stat, str(image_tree / "ants/000.png")

    def failing(path: object, **options: object) -> os.stat_result:
        if path == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", failing)
    report = ready(image_tree, to=None).report
    assert report.way == "local"
    assert report.checked.startswith("nothing, because ")


def test_a_pack_with_more_bad_files_than_a_later_max_bad_allows_is_an_error(image_tree):
    (image_tree / "ants" / "000.png").write_bytes(b"no image")
    ready(image_tree, on_bad="skip", max_bad=1)
    match = r"already exists with 1 bad sample; expected at most 0\. Repair the samples, or increase max_bad="
    with pytest.raises(BadImage, match=match):
        prepare(image_tree, on_bad="skip", max_bad=0, progress=False)
    assert ready(image_tree, on_bad="skip", max_bad=1).report.way == "local"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits for a mount that hangs."""
    monkeypatch.setattr(preparing, "_CHECK_S", 0.3)
    monkeypatch.setattr("colabkit.storage.sources.concurrency._GRACE_S", 0.1)


@pytest.mark.full
@pytest.mark.usefixtures("impatient")
def test_a_local_pack_is_used_although_the_mount_hangs_and_the_report_says_so(image_tree, mounted, tmp_path):
    with mounted(image_tree.parent) as mount:
        ready(mount.point / "tree", to=tmp_path / "kept")
        mount.hang()
        report = ready(mount.point / "tree", to=tmp_path / "kept").report
        assert report.way == "local"
        assert report.checked.startswith("nothing, because the check took more than 0.3 s; use refresh=True")
        assert "\nChecked: nothing, because" in repr(report)
        mount.go_on()
        wait_for(lambda: not reader_threads(), "the end of the threads")


@pytest.mark.parametrize("name", ["tree", "tree.zip"])
def test_a_saved_pack_is_staged_without_opening_files_of_the_source(tmp_path, mounted, near_storage, name):
    make_tree(tmp_path / "root" / "tree", 2)
    zipped(tmp_path / "root" / "tree", tmp_path / "root" / "tree.zip")
    with mounted(tmp_path / "root") as mount:
        first = ready(mount.point / name, to=mount.point / "packs").report
        forget_local(near_storage)
        before = len(mount.opened_paths)
        prepared = prepare(mount.point / name, to=mount.point / "packs", progress=False)
        assert set(mount.opened_paths[before:]) == {f"/packs/{first.saved_path.name}"}
        report = prepared.report
        assert (report.way, report.saved_path, report.packed_s) == ("saved", first.saved_path, None)
        assert report.saved_s > 0
        assert samples(prepared) == 6


def test_the_report_shows_the_way_and_the_known_times(image_tree, near_storage, capsys):
    packed = ready(image_tree)
    assert repr(packed).startswith("Packed the source to ")
    assert "\nSaved at '" in repr(packed)
    assert "\nTimes: local pack " in repr(packed)
    assert ", packing the source " in repr(packed)
    assert "saved pack" not in repr(packed)
    forget_local(near_storage)
    saved = ready(image_tree)
    assert repr(saved).startswith("Staged the saved pack ")
    assert ", saved pack " in repr(saved)
    assert "packing the source" not in repr(saved)
    assert repr(ready(image_tree)).startswith("Used the local pack ")
    assert repr(saved).endswith(repr(open_pack(saved.path)))
    assert ", saved pack " in saved._repr_html_()
    assert main(["prepare", str(image_tree), "--json"]) == 0
    assert '"way": "local"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "other",
    [
        {"size": 4},
        {"channels": 1},
        {"splits": {"train": 0.5, "test": 0.5}},
        {"splits": {"train": 0.5, "test": 0.5}, "seed": 1},
    ],
)
def test_other_options_make_another_pack(image_tree, drive, other):
    first = ready(image_tree, splits={"train": 0.75, "test": 0.25})
    second = ready(image_tree, **other)
    assert second.report.way == "packed"
    assert second.path != first.path
    assert len(list(drive.glob("colabkit/*.h5"))) == 2
    assert ready(image_tree, **other).report.way == "local"
    assert ready(image_tree, splits={"train": 0.75, "test": 0.25}).report.way == "local"


def test_a_changed_function_makes_another_pack(image_tree):
    first, second, third = (ready(image_tree, labels=lambda path, text=text: text) for text in ("old", "new", "old"))
    assert [pack.classes for pack in (first, second, third)] == [("old",), ("new",), ("old",)]
    assert first.path == third.path != second.path


def test_equivalent_options_use_the_same_pack(image_tree, monkeypatch):
    ready(image_tree, size=4)
    assert ready(image_tree, size=(4, 4)).report.way == "local"
    # Without shares in `splits`, the seed has no effect.
    assert ready(image_tree, size=4, seed=5).report.way == "local"
    monkeypatch.chdir(image_tree.parent)
    assert ready("tree", size=4).report.way == "local"


@pytest.mark.parametrize("form", ["folder", "zip"])
@pytest.mark.parametrize("is_new_session", [False, True])
def test_a_changed_source_is_packed_again(image_tree, near_storage, form, is_new_session):
    archive = image_tree.with_suffix(".zip")
    source = image_tree if form == "folder" else zipped(image_tree, archive)
    assert samples(ready(source)) == 24
    add_image(image_tree)
    if form == "zip":
        archive.unlink()
        zipped(image_tree, archive)
    if is_new_session:
        forget_local(near_storage)
    changed = ready(source)
    assert changed.report.way == "packed"
    assert samples(changed) == 25
    assert [path.name for path in changed.path.parent.glob("*.h5")] == [changed.path.name]
    forget_local(near_storage)
    assert samples(ready(source)) == 25


def rewrite(path: Path, old: Path) -> None:
    """Overwrite a file in place with the bytes of another, and keep its size and modification time."""
    before, data = path.stat(), old.read_bytes()
    with path.open("r+b") as file:
        file.write(data[: before.st_size].ljust(before.st_size, b"\0"))
        file.truncate(before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_with_same_times(path: Path, old: Path) -> None:
    """Replace a file with another of the same size and modification time."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    rewrite(other, old)
    other.replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "move": lambda tree: (tree / "train/ants/001.png").rename(tree / "train/bees/100.png"),
    "move between splits": lambda tree: (tree / "train/ants/001.png").rename(tree / "val/ants/100.png"),
    "add": lambda tree: shutil.copy2(tree / "train/ants/000.png", tree / "val/bees/new.png"),
    "remove": lambda tree: (tree / "train/cats/001.png").unlink(),
    "rewrite": lambda tree: (tree / "val/cats/001.png").write_bytes((tree / "val/cats/000.png").read_bytes()),
    "restore": lambda tree: rewrite(tree / "val/cats/001.png", tree / "val/cats/000.png"),
    "replace": lambda tree: replace_with_same_times(tree / "val/cats/001.png", tree / "val/cats/000.png"),
}


def contents(prepared: PreparedPack) -> dict[str, list[tuple[bytes, int]]]:
    return {name: [(image.numpy().tobytes(), label) for image, label in prepared[name]] for name in prepared}


@pytest.mark.parametrize("is_new_session", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_local_tree_is_packed(tmp_path, near_storage, change, is_new_session):
    tree = tmp_path / "birds"
    for split in ("train", "val"):
        # Uncompressed images of one size have files of one size.
        for path in make_tree(tree, 2, prefix=split).rglob("*.png"):
            Image.open(path).save(path, compress_level=0)
    before = contents(ready(tree))
    assert ready(tree).report.checked == "names, sizes and times of 12 files"
    CHANGES[change](tree)
    if is_new_session:
        forget_local(near_storage)
    changed = ready(tree)
    assert changed.report.way == "packed"
    assert contents(changed) != before
    assert contents(changed) == contents(ready(tree, refresh=True))
    assert ready(tree).report.way == "local"


def test_a_pack_of_the_same_samples_has_the_same_fingerprint_so_that_training_resumes(image_tree, tmp_path):
    (image_tree / "notes.txt").write_text("old")
    copy = stage(image_tree, tmp_path / "copy", progress=False).path
    before = [ready(source)["train"].fingerprint for source in (image_tree, copy)]
    packed = pack(image_tree, tmp_path / "hand.h5", progress=False)
    assert open_pack(packed.path)["train"].fingerprint == before[0]
    (image_tree / "notes.txt").write_text("new")
    for path in copy.rglob("*.png"):
        os.utime(path, (1, 1))
    again = [ready(source) for source in (image_tree, copy)]
    assert [prepared.report.way for prepared in again] == ["packed", "packed"]
    assert [prepared["train"].fingerprint for prepared in again] == before
    shutil.copy(image_tree / "ants/000.png", image_tree / "ants/001.png")
    assert ready(image_tree)["train"].fingerprint != before[0]


@pytest.mark.full
def test_a_changed_file_that_a_table_lists_is_packed(image_tree):
    table = image_tree / "rows.csv"
    paths = sorted(path.relative_to(image_tree) for path in image_tree.rglob("*.png"))[::4]
    table.write_text("\n".join(["path,label", *(f"{path},{path.parent}" for path in paths)]))
    sources = [table, [str(image_tree / path) for path in paths]]
    for source in sources:
        assert ready(source).report.way == "packed"
        assert ready(source).report.way == "local"
    shutil.copy(image_tree / paths[1], image_tree / paths[0])
    for source in sources:
        assert ready(source).report.way == "packed"
    table.write_text(table.read_text().replace(",bees", ",ants"))
    assert ready(table).report.way == "packed"


@pytest.mark.parametrize("wrap", [lambda table: table, lambda table: SlowSource(table, 0.0)], ids=["table", "slow"])
def test_tables_given_as_sources_with_the_same_name_have_their_own_packs(image_tree, wrap):
    paths = [str(path) for path in sorted(image_tree.rglob("*.png"))[:4]]
    frames = [pd.DataFrame({"path": paths, "label": labels}) for labels in ([0, 1, 0, 1], [1, 0, 0, 1])]
    for frame in (*frames, pd.DataFrame({"path": paths[::-1], "label": [1, 0, 0, 0]})):
        assert ready(wrap(ManifestSource(frame)))["train"].labels.tolist() == frame["label"].tolist()


def test_changed_shards_are_packed(image_tree, tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()

    def write(name: str, number: str) -> None:
        with tarfile.open(shards / name, "w") as archive:
            for kind, text in (("png", None), ("cls", b"1")):
                path = tmp_path / f"{number}.{kind}"
                path.write_bytes(text or (image_tree / "ants" / f"{number}.png").read_bytes())
                archive.add(path, path.name)

    write("a-0.tar", "000")
    sources = [shards / "a-*.tar", [str(shards / "a-0.tar")], shards]
    assert [samples(ready(source)) for source in sources] == [1, 1, 1]
    assert [ready(source).report.way for source in sources] == ["local"] * 3
    write("a-0.tar", "001")
    assert [ready(source).report.way for source in sources] == ["packed"] * 3
    write("a-1.tar", "002")
    assert [samples(ready(source)) for source in sources] == [2, 1, 2]


@pytest.mark.parametrize("name", ["tree", "tree.zip", "tree.tar.gz"])
def test_a_changed_source_on_a_mount_is_packed_at_once_and_in_the_next_session(
    tmp_path, mounted, near_storage, monkeypatch, name
):
    monkeypatch.setattr(places, "TMPFS", tmp_path)
    tree = make_tree(tmp_path / "root" / "tree", 2)
    archives(tree)
    with mounted(tmp_path / "root") as mount:
        ready(mount.point / name)
        (tree / "ants/001.png").rename(tree / "bees/100.png")
        archives(tree)
        moved = ready(mount.point / name)
        assert (moved.report.way, moved["train"].labels.tolist()) == ("packed", [0, 1, 1, 1, 2, 2])
        add_image(tree)
        archives(tree)
        forget_local(near_storage)
        assert samples(ready(mount.point / name)) == 7


def test_the_report_says_which_files_of_a_large_remote_source_were_not_checked(image_tree, mounted, monkeypatch):
    monkeypatch.setattr(source_state, "_REMOTE_STATS", 8)
    with mounted(image_tree.parent) as mount:
        ready(mount.point / "tree", to=None)
        report = ready(mount.point / "tree", to=None).report
        counts = "names of 24 files, and sizes and times of 8 of them"
        assert report.checked == f"{counts}; use refresh=True if the contents of others have changed"
        (image_tree / "cats/007.png").rename(image_tree / "bees/100.png")
        assert ready(mount.point / "tree", to=None).report.way == "packed"


def test_checking_and_packing_a_folder_on_a_mount_share_one_listing(image_tree, mounted, monkeypatch):
    monkeypatch.setattr(source_state, "_REMOTE_STATS", 8)
    listed: Counter[str] = Counter()

    def counted(path: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
        listed[os.path.basename(path)] += 1
        return scandir(path)

    scandir = os.scandir
    with mounted(image_tree.parent) as mount, monkeypatch.context() as patched:
        patched.setattr(os, "scandir", counted)
        prepared = ready(mount.point / "tree", to=None)
    assert contents(prepared) == contents(ready(image_tree, to=None))
    # Since a mount can leave out names, each folder is listed until two listings agree. The first folder is also
    # searched for shards.
    assert [listed[name] for name in ("bees", "cats")] == [2, 2]


@pytest.mark.parametrize("place", ["saved", "local"])
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ("source", r"it holds 6 samples of '.*dogs' in 3 classes, and was not prepared from this source"),
        ("options", r"it was prepared with other options, and holds 24 samples of '.*tree' in 3 classes"),
        ("state", "the source has changed since it was prepared, when it had 23 samples"),
        ("pack", r"it holds 24 samples of '.*tree' in 3 classes, and was not prepared from this source"),
    ],
)
def test_another_pack_under_the_right_name_is_never_used(image_tree, tmp_path, near_storage, place, other, difference):
    def lent() -> Path:
        if other == "pack":
            return pack(image_tree, tmp_path / "hand.h5", progress=False).path
        if other == "source":
            return ready(make_tree(tmp_path / "dogs", 2), to=None).path
        if other == "options":
            return ready(image_tree, size=4, to=None).path
        (removed := image_tree / "cats" / "007.png").rename(tmp_path / "away.png")
        path = ready(image_tree, to=None).path
        shutil.copy(path, tmp_path / "earlier.h5")
        (tmp_path / "away.png").rename(removed)
        return tmp_path / "earlier.h5"

    another = lent().read_bytes()
    first = ready(image_tree)
    expected = contents(first)
    if place == "saved":
        first.report.saved_path.write_bytes(another)
        forget_local(near_storage)
    else:
        first.report.path.write_bytes(another)
        first.report.saved_path.unlink()
    again = ready(image_tree)
    assert again.report.way == "packed"
    assert re.search(rf"^Pack not used: '.*': {difference}$", repr(again.report), re.MULTILINE)
    assert contents(again) == expected
    forget_local(near_storage)
    assert ready(image_tree).report.way == "saved"


def test_refresh_packs_again_and_replaces_the_saved_pack(image_tree, near_storage):
    first = ready(image_tree).report
    old = first.saved_path.read_bytes()
    DAMAGES["a sample"](first.saved_path)
    fresh = ready(image_tree, refresh=True).report
    assert (fresh.way, fresh.saved_path) == ("packed", first.saved_path)
    assert fresh.saved_path.read_bytes() == old
    forget_local(near_storage)
    assert ready(image_tree).report.way == "saved"
    assert ready(image_tree, refresh=True).report.way == "packed"


def test_save_to_none_saves_nothing_and_a_later_call_saves_the_local_pack(image_tree, drive):
    report = ready(image_tree, to=None).report
    assert (report.way, report.unsaved, report.to_dict()["unsaved"]) == ("packed", "to=None", "to=None")
    assert "\nNot saved: to=None" in repr(report)
    assert list(drive.iterdir()) == []
    assert ready(image_tree).report.saved_path is not None
    assert ready(image_tree).report.way == "local"


def test_without_drive_the_report_explains_why_the_pack_is_not_saved(image_tree, drive, monkeypatch):
    monkeypatch.delenv("COLABKIT_DRIVE")
    monkeypatch.setattr("colabkit.foundation.mount_table.mounts", list)
    report = ready(image_tree).report
    assert report.way == "packed"
    assert "\nNot saved: Google Drive is not mounted. Run colabkit.mount() first" in repr(report)
    assert ", or use to=None to save nothing" in repr(report)
    monkeypatch.setenv("COLABKIT_DRIVE", str(drive))
    assert ready(image_tree).report.saved_path is not None, "the pack is not saved although Drive is mounted"


def test_packs_are_never_saved_inside_their_source(image_tree):
    before = sorted(image_tree.rglob("*"))
    report = ready(image_tree, to=image_tree / "packs").report
    assert "is inside the source" in report.unsaved
    assert sorted(image_tree.rglob("*")) == before


def test_invalid_sources_and_options_are_errors_that_leave_no_files(image_tree, near_storage, drive):
    with pytest.raises(SourceMissing, match="no such file or folder"):
        ready(image_tree / "gone")
    with pytest.raises(InvalidOption, match="save packs"):
        ready(image_tree, to=7)
    with pytest.raises(InvalidOption, match="size="):
        ready(image_tree, size=2.5)
    assert [*near_storage.iterdir(), *drive.iterdir()] == []
    with pytest.raises(InvalidOption, match="channels"):
        ready(image_tree, channels=2)
    with pytest.raises(InvalidOption, match="splits"):
        ready(image_tree, splits=0.8)


def test_an_address_is_fetched_once_and_again_with_refresh(image_tree, tmp_path, near_storage, monkeypatch):
    monkeypatch.setattr(places, "TMPFS", tmp_path)
    content = zipped(image_tree, tmp_path / "birds.zip").read_bytes()
    with served(content) as server:
        address = server.url.replace("file.bin", "birds.zip?token=secret")
        first = ready(address)
        assert (first.report.way, samples(first)) == ("packed", 24)
        assert "secret" not in repr(first)
        requests = len(server.requests)
        again = ready(address).report
        assert again.way == "local"
        assert again.checked == "nothing, because the source is an address; use refresh=True to fetch it again"
        forget_local(near_storage)
        assert ready(address).report.way == "saved"
        assert len(server.requests) == requests
        add_image(image_tree)
        server.content = zipped(image_tree, tmp_path / "more.zip").read_bytes()
        server.headers["ETag"] = '"v2"'
        assert samples(ready(address, refresh=True)) == 25
        assert len(server.requests) > requests


def test_a_prepared_pack_keeps_its_report_when_it_is_copied_or_pickled(image_tree):
    prepared = ready(image_tree)
    for other in (copy.copy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert isinstance(other, PreparedPack)
        assert other.report == prepared.report
        assert samples(other) == samples(prepared)


# The tests below cover damaged packs, full or hanging drives, and other processes that prepare the same source.


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "unsealed": lambda path: path.write_bytes(bytes(4096) + path.read_bytes()[4096:]),
    "garbled": lambda path: path.write_bytes(b"<html>quota</html>" * 1000),
    "a sample": lambda path: flip_byte(path, open_pack(path).info.data_sets["X_train"].offset),
}


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "a sample"])
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_damaged_local_pack_is_made_again(image_tree, damage, is_saved):
    to = "drive:colabkit" if is_saved else None
    DAMAGES[damage](ready(image_tree, to=to).path)
    again = ready(image_tree, to=to)
    assert again.report.way == ("saved" if is_saved else "packed")
    assert "\nPack not used: Cannot open " in repr(again)
    assert samples(again) == 24


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_saved_pack_is_replaced(image_tree, near_storage, damage):
    DAMAGES[damage](ready(image_tree).report.saved_path)
    forget_local(near_storage)
    again = ready(image_tree).report
    assert again.way == "packed"
    assert "the pack is damaged" in again.unused
    assert "\nPack not used: Cannot use " in repr(again)
    forget_local(near_storage)
    assert ready(image_tree).report.way == "saved"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_a_full_or_read_only_drive_is_reported_and_the_next_call_saves_the_pack(
    image_tree, drive, file_hook, number, operation
):
    def refuse(at: str, path: Path) -> None:
        if at == operation and path.is_relative_to(drive):
            raise OSError(number, os.strerror(number), str(path))

    file_hook(refuse)
    report = ready(image_tree).report
    assert report.way == "packed"
    assert os.strerror(number) in report.unsaved
    assert "\nNot saved: Cannot publish " in repr(report)
    file_hook(None)
    again = ready(image_tree).report
    assert again.way == "local"
    assert again.saved_path is not None


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_a_drive_that_dies_while_the_pack_is_saved_loses_nothing(image_tree, tmp_path, file_hook, mounted, operation):
    (tmp_path / "root").mkdir()
    with mounted(tmp_path / "root") as mount:

        def die(at: str, path: Path) -> None:
            if at == operation and path.is_relative_to(mount.point):
                mount.kill()

        file_hook(die)
        first = ready(image_tree, to=mount.point / "packs")
        assert first.report.way == "packed"
        assert "\nNot saved: Cannot publish " in repr(first.report)
        file_hook(None)
        assert ready(image_tree, to=mount.point / "packs").report.way == "local"
    assert ready(image_tree, to=tmp_path / "packs").report.saved_path is not None
    shutil.rmtree(tmp_path / "root")


def test_a_saved_pack_that_was_deleted_or_cut_is_saved_again(image_tree):
    saved = ready(image_tree).report.saved_path
    for damage in (Path.unlink, DAMAGES["cut"]):
        damage(saved)
        again = ready(image_tree).report
        assert (again.way, again.saved_path) == ("local", saved)
        assert verify(saved, progress=False).is_good


def test_a_hanging_drive_is_reported(image_tree, tmp_path, monkeypatch):
    needs("FUSE", has_fuse())
    monkeypatch.setattr("colabkit.storage.sources.concurrency.STALLED_S", 0.3)
    monkeypatch.setattr("colabkit.storage.sources.concurrency._GRACE_S", 0.1)
    (tmp_path / "root").mkdir()
    with FuseMount(tmp_path / "far", tmp_path / "root") as mount:
        mount.hang()
        report = ready(image_tree, to=mount.point / "packs").report
        assert report.way == "packed"
        assert "does not respond" in report.unsaved
        mount.go_on()
        wait_for(lambda: not reader_threads(), "the end of the threads")


def test_the_second_of_two_concurrent_calls_waits_and_uses_the_pack_of_the_first(image_tree, file_hook, monkeypatch):
    has_started, is_waiting, may_continue = threading.Event(), threading.Event(), threading.Event()
    found: list[PreparedPack] = []
    monkeypatch.setattr(preparing, "ProgressBar", lambda *_: is_waiting.set() or contextlib.nullcontext(Mock()))

    def hold(operation: str, path: Path) -> None:
        if operation == "sync":
            file_hook(None)
            has_started.set()
            assert may_continue.wait(20)

    file_hook(hold)
    calls = [threading.Thread(target=lambda: found.append(ready(image_tree))) for _ in range(2)]
    for call, event in zip(calls, (has_started, is_waiting), strict=True):
        call.start()
        assert event.wait(20)
    may_continue.set()
    for call in calls:
        call.join(20)
    assert sorted(one.report.way for one in found) == ["local", "packed"]


def test_a_process_that_was_forked_during_a_call_does_not_hold_its_lock(image_tree, file_hook, monkeypatch):
    may_end, is_asked = os.pipe()
    children = []

    def fork(operation: str, path: Path) -> None:
        if operation == "sync":
            file_hook(None)
            if (pid := os.fork()) == 0:
                os.close(is_asked)
                os.read(may_end, 1)
                os._exit(0)
            children.append(pid)

    file_hook(fork)
    path = ready(image_tree).path
    with (path.parent / "lock").open() as lock:
        is_free = try_lock(lock.fileno())
    os.close(is_asked)
    os.close(may_end)
    assert os.waitpid(children[0], 0)[1] == 0
    assert is_free


def test_a_stalled_process_is_not_waited_for(image_tree, near_storage, monkeypatch):
    path = ready(image_tree).path
    path.unlink()
    with (path.parent / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr("colabkit.foundation.locks.FOLDER_STALLED_S", 0.05)
        assert ready(image_tree).report.way == "saved"


def test_a_file_system_without_locks_is_supported(image_tree, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert ready(image_tree).report.way == "packed"
    assert ready(image_tree).report.way == "local"


@pytest.mark.parametrize("is_saved", [False, True])
def test_concurrent_processes_all_succeed(image_tree, drive, near_storage, is_saved):
    if is_saved:
        ready(image_tree)
        forget_local(near_storage)
    children = []
    for _ in range(4):
        if (pid := os.fork()) == 0:
            try:
                prepared = prepare(image_tree, progress=False)
                is_right = samples(prepared) == 24 and verify(prepared.path, progress=False).is_good
                os._exit(0 if is_right else 1)
            except BaseException:
                os._exit(2)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    report = ready(image_tree).report
    assert report.way == "local"
    assert [report.saved_path] == list(drive.glob("colabkit/*.h5"))


@pytest.mark.parametrize("source", ["arrays", "dict", "dataset"])
def test_arrays_and_datasets_are_refused_because_they_have_no_path_to_identify_them(source):
    images, labels = np.zeros((4, 8, 8, 3), np.uint8), np.arange(4)
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))
    sources = {"arrays": (images, labels), "dict": {"X": images, "Y": labels}, "dataset": dataset}
    with pytest.raises(InvalidOption, match=r"the source is a \w+; expected a path.* Pack arrays and datasets with"):
        prepare(sources[source], to=None)
