"""`stage()`: local copies are identical and complete, and neither the source nor other data is modified."""

from __future__ import annotations

import errno
import io
import os
import threading
import zipfile
from functools import partial
from pathlib import Path

import pytest
from contract import make_shards
from local_copies import MemorySource, copy, data_of, kept_partials, state_of, tarred, zipped
from sampling import sampled
from strikes import failures, fill_disk
from tar_files import tar_of
from trees import leftovers, make_tree, needs

from colabkit.errors import (
    BadArchive,
    BadSource,
    NotEnoughSpace,
    SourceChanged,
    SourceMissing,
    TargetExists,
)
from colabkit.foundation import file_changes
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.storage.sources.engine import BLOCK_BYTES
from colabkit.storage.sources.folder import FolderSource, SlowSource
from colabkit.storage.sources.items import Item, Source
from colabkit.storage.sources.manifest import ManifestSource
from colabkit.storage.sources.zip_archive import ZipSource
from colabkit.storage.staging.api import unstage


@pytest.fixture
def archive(image_tree, tmp_path):
    return zipped(image_tree, tmp_path / "tree.zip")


def test_a_folder_or_an_archive_is_staged_with_identical_bytes(image_tree, tmp_path, near_storage):
    (image_tree / "ants" / "empty.png").write_bytes(b"")
    for source in (image_tree, zipped(image_tree, tmp_path / "a.zip")):
        report = copy(source)
        assert data_of(report.path) == data_of(image_tree)
        assert report.path.parent == near_storage
        assert (report.files, report.staged_bytes) == (25, sum(map(len, data_of(image_tree).values())))
        assert (report.target, report.reused, report.retries, report.skipped) == ("disk", False, 0, ())
        assert repr(report).startswith("Staged 25 files, ")
        assert str(source) in report._repr_html_()
        assert report.to_dict()["path"] == str(report.path)
    assert leftovers(near_storage) == []


@pytest.mark.full
@pytest.mark.parametrize("threads", sampled(["auto", 1, 5], 1))
def test_large_files_are_copied_block_by_block_with_identical_bytes(tmp_path, threads):
    sizes = (BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 5, 0)
    files = {f"{size}.bin": os.urandom(size) for size in sizes}
    report = copy(MemorySource(files), tmp_path / "local", threads=threads)
    assert data_of(report.path) == files
    folder = tmp_path / "plain"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    assert data_of(copy(folder, threads=threads).path) == files
    assert data_of(copy(SlowSource(FolderSource(folder), 0), threads=threads).path) == files
    assert data_of(copy(zipped(folder, tmp_path / "a.zip"), threads=threads).path) == files


def test_a_file_or_unextracted_archive_is_staged_as_a_file_and_again_if_replaced(image_tree, archive, near_storage):
    report = copy(archive, extract=False)
    assert (report.path.name, report.files, report.staged_bytes) == ("tree.zip", 1, archive.stat().st_size)
    assert report.path.read_bytes() == archive.read_bytes()
    assert copy(archive, extract=False).reused
    extracted = copy(archive)
    assert extracted.path != report.path.parent
    (image_tree / "ants" / "more.png").write_bytes(b"more")
    zipped(image_tree, archive)
    for options, former in (({"extract": False}, report), ({}, extracted)):
        again = copy(archive, **options)
        assert (again.reused, again.path) == (False, former.path)
    assert report.path.read_bytes() == archive.read_bytes()
    assert data_of(extracted.path) == data_of(image_tree)
    unstage(report.path)
    unstage(extracted.path)
    assert list(near_storage.iterdir()) == []


def test_a_local_copy_is_reused_without_accessing_the_source(image_tree, archive, monkeypatch):
    first, packed = copy(image_tree), copy(archive)
    list_folder = FolderSource.list

    def list_near(self):
        assert self.path in (first.path, packed.path), "the source was listed again"
        return list_folder(self)

    monkeypatch.setattr(FolderSource, "list", list_near)
    monkeypatch.setattr(ZipSource, "list", lambda self: pytest.fail("listed again"))
    for source, report in ((image_tree, first), (archive, packed), (str(image_tree) + "/", first)):
        again = copy(source)
        assert again.reused
        assert "Already staged" in repr(again)
        assert (again.path, again.files, again.staged_bytes) == (report.path, report.files, report.staged_bytes)


def test_a_pack_of_shards_is_staged_with_all_shards(tmp_path):
    (tmp_path / "packed").mkdir()
    index = make_shards(tmp_path / "packed" / "birds.h5", {"train": 4}, {"train": 2, "test": 1})
    report = copy(index)
    assert (report.path.name, report.files) == ("birds.h5", 3)
    assert len(open_pack(report.path)["train"][:][0]) == 6
    assert copy(index).reused
    index.with_name("birds-00000.h5").unlink()
    assert copy(index).reused
    with pytest.raises(SourceMissing, match=r"the shard 'birds-00000\.h5' is missing"):
        copy(index, refresh=True)


def test_only_lost_files_of_a_local_copy_are_read_again(image_tree, tmp_path):
    path = copy(image_tree, tmp_path / "local").path
    for name, damage in (("ants/000.png", Path.unlink), ("bees/000.png", lambda file: file.write_bytes(b"short"))):
        damage(path / name)
        report = copy(image_tree, tmp_path / "local")
        assert not report.reused
        assert report.staged_bytes - report.resumed_bytes == (image_tree / name).stat().st_size
        assert data_of(path) == data_of(image_tree)


def test_the_copy_is_at_the_chosen_path_also_below_the_home_folder(image_tree, tmp_path, monkeypatch):
    report = copy(image_tree, tmp_path / "deep" / "local")
    assert (report.path, report.target) == (tmp_path / "deep" / "local", "path")
    (tmp_path / "empty").mkdir()
    assert data_of(copy(image_tree, str(tmp_path / "empty")).path) == data_of(image_tree)
    monkeypatch.setenv("HOME", str(tmp_path))
    report = copy(image_tree, "~/local")
    assert report.path == tmp_path / "local"
    assert copy(image_tree, "~/local").reused
    unstage("~/local")
    assert not report.path.exists()


def test_sources_with_the_same_name_have_separate_local_copies(tmp_path):
    one, other = (make_tree(tmp_path / name / "birds", 1) for name in ("a", "b"))
    assert copy(one).path != copy(other).path
    paths = [str(path) for path in sorted(one.rglob("*.png"))]
    tables = [ManifestSource(paths[:2]), ManifestSource(paths[1:])]
    assert [len(data_of(copy(table).path)) for table in tables] == [2, len(paths) - 1]


def test_a_source_with_any_name_is_staged(tmp_path):
    for name in ("x" * 255, "🦜" * 63, "a.b.c", "...", "caf\udce9", "-rf $HOME", "a\nb"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(b"data")
        assert data_of(copy(folder).path) == {name: b"data"}
        assert copy(folder).reused


def test_links_and_special_files_are_skipped_and_reported(image_tree):
    (image_tree / "link").symlink_to("ants")
    os.mkfifo(image_tree / "pipe")
    report = copy(image_tree)
    assert report.skipped == (("link", "link"), ("pipe", "special file"))
    assert "2 paths skipped" in repr(report)
    assert copy(image_tree).skipped == report.skipped


def test_a_target_inside_the_source_is_refused_also_through_links(image_tree):
    (image_tree.parent / "way").symlink_to(image_tree)
    before = state_of(image_tree)
    for inside in (".", "local", "ants/local", "ants/../local", "../way/local"):
        with pytest.raises(BadSource, match="is inside the source"):
            copy(image_tree, image_tree / inside)
    assert state_of(image_tree) == before


def test_other_data_at_the_target_is_not_overwritten(image_tree, tmp_path):
    places = [tmp_path / kind for kind in ("file", "folder", "dangling link", "another copy")]
    file, folder, link, other = places
    file.write_text("mine")
    folder.mkdir()
    (folder / "mine").write_text("mine")
    link.symlink_to(tmp_path / "nowhere")
    copy(make_tree(tmp_path / "other", 1), other)
    before = state_of(tmp_path)
    for target in places:
        for refresh in (False, True):
            holds = "a copy of" if target == other else "other data"
            with pytest.raises(TargetExists, match=f"holds {holds}"):
                copy(image_tree, target, refresh=refresh)
    assert state_of(tmp_path) == before


def test_data_that_appears_at_the_target_meanwhile_is_not_overwritten(image_tree, tmp_path, file_hook):
    target = tmp_path / "target"

    def interfere(operation: str, path: Path) -> None:
        if path.name == "000.png" and not target.exists():
            target.mkdir()
            (target / "mine").write_text("mine")

    file_hook(interfere)
    with pytest.raises(TargetExists):
        copy(image_tree, target)
    assert data_of(target) == {"mine": b"mine"}
    (target / "mine").unlink()
    assert data_of(copy(image_tree, target).path) == data_of(image_tree)
    assert leftovers(tmp_path) == []


def test_an_invalid_source_is_refused_before_anything_is_written(tmp_path, file_hook):
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    file_hook(lambda operation, path: pytest.fail(f"{operation} {path}"))
    for source, error in {"nowhere": SourceMissing, "empty": BadSource, "pipe": BadSource}.items():
        with pytest.raises(error, match=source):
            copy(tmp_path / source)
    for name in ("../out", "/out", "a/../../out", "", "a//b", "."):
        with pytest.raises(BadSource, match="paths inside the source"):
            copy(MemorySource({"fine": b"x", name: b"x"}), tmp_path / "local")


def test_a_truncated_or_damaged_archive_leaves_nothing(image_tree, tmp_path, near_storage):
    for write, suffix in ((zipped, ".zip"), (tarred, ".tar"), (tarred, ".tar.gz")):
        archive = write(image_tree, tmp_path / f"tree{suffix}")
        data = archive.read_bytes()
        damaged = [data[:length] for length in (10, 100, len(data) // 2, len(data) * 3 // 4)]
        if suffix == ".zip":
            at = data.index(b"bees/004.png") + 40
            damaged += [b"", data[:-1], data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]]
        for content in damaged:
            archive.write_bytes(content)
            with pytest.raises(BadArchive, match=r"bees/004\.png" if len(content) == len(data) else None):
                copy(archive)
    assert list(near_storage.iterdir()) == []


def test_an_archive_of_a_local_copy_can_be_staged(image_tree, tmp_path):
    local = copy(image_tree).path
    again = copy(zipped(local, tmp_path / "local.zip"))
    assert data_of(again.path) == data_of(image_tree)
    assert data_of(copy(local, tmp_path / "third").path) == data_of(image_tree)


def test_too_little_space_is_refused_before_anything_is_written(archive, image_tree, monkeypatch, file_hook):
    file_hook(lambda operation, path: pytest.fail(f"{operation} {path}"))
    inflated = sum(map(len, data_of(image_tree).values()))
    packed = archive.stat().st_size
    for source, extract, needed in ((image_tree, True, inflated), (archive, True, inflated), (archive, False, packed)):
        monkeypatch.setattr(file_changes, "free_bytes", lambda path, needed=needed: needed - 1)
        with pytest.raises(NotEnoughSpace, match="free; expected at least"):
            copy(source, extract=extract)


def rewrite(path: Path, change: str) -> None:
    """Change a file's time and, unless `change` is "touch", its size."""
    data = path.read_bytes()
    path.write_bytes({"grow": data + b"x", "shrink": data[:-5], "touch": data}[change])
    os.utime(path, ns=(1, 1))


def test_a_file_modified_between_listing_and_reading_ends_the_run(image_tree, near_storage, file_hook):
    for change in ("grow", "shrink", "touch"):
        os.utime(image_tree / "cats" / "003.png")
        file_hook(lambda operation, path, change=change: rewrite(image_tree / "cats" / "003.png", change))
        with pytest.raises(SourceChanged, match=r"cats/003\.png"):
            copy(image_tree)
        file_hook(None)
        assert list(near_storage.iterdir()) == kept_partials(near_storage)
        report = copy(image_tree)
        assert report.resumed_bytes
        assert data_of(report.path) == data_of(image_tree)
        assert leftovers(near_storage) == []
        unstage(report)


@pytest.mark.parametrize("extract", [True, False])
def test_an_archive_modified_while_it_is_staged_ends_the_run(image_tree, archive, near_storage, file_hook, extract):
    for change in ("grow", "shrink", "touch"):
        zipped(image_tree, archive)
        file_hook(lambda at, path, change=change: rewrite(archive, change) if at == "write" else None)
        with pytest.raises((SourceChanged, BadArchive), match=r"Try again|Download or create it again"):
            copy(archive, extract=extract)
        file_hook(None)
        assert list(near_storage.iterdir()) == kept_partials(near_storage)


def test_the_source_is_never_written_to(image_tree, archive, tmp_path):
    (tmp_path / "remote").mkdir()
    for path in (image_tree, archive):
        path.rename(tmp_path / "remote" / path.name)
    before = state_of(tmp_path / "remote")
    for source in (tmp_path / "remote" / "tree", tmp_path / "remote" / "tree.zip"):
        unstage(copy(source))
        copy(source)
        copy(source, refresh=True)
    assert state_of(tmp_path / "remote") == before


class FlakySource(MemorySource):
    """A source whose first open of every second file fails, as on a flaky mount."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.failing = set(sorted(files)[::2])

    def open(self, item: Item) -> io.BytesIO:
        if item.path in self.failing:
            self.failing.remove(item.path)
            raise OSError(errno.EIO, "Input/output error")
        return super().open(item)


def test_retries_are_counted_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr("colabkit.storage.sources.reads._BACK_OFF_S", 0)
    files = {f"{number}": bytes([number]) for number in range(10)}
    report = copy(FlakySource(files), tmp_path / "local")
    assert data_of(report.path) == files
    assert report.retries == 5
    assert "5 retries" in repr(report)


class CountingSource(MemorySource):
    """A source that counts concurrent opens; after `after` opens, each waits until `wanted` have run at once."""

    def __init__(self, files: dict[str, bytes], wanted: int, after: int) -> None:
        super().__init__(files)
        self.most = self.running = self.started = 0
        self.wanted, self.after = wanted, after
        self.changed = threading.Condition()

    def open(self, item: Item) -> io.BytesIO:
        with self.changed:
            self.started += 1
            self.running += 1
            self.most = max(self.most, self.running)
            self.changed.notify_all()
            if self.started > self.after:
                self.changed.wait_for(lambda: self.most >= self.wanted, timeout=20)
            self.running -= 1
        return super().open(item)


@pytest.mark.parametrize("threads", ["auto", 7])
def test_a_slow_source_is_read_concurrently(tmp_path, threads):
    wanted, measured = (32, 16) if threads == "auto" else (7, 0)
    counting = CountingSource({f"{number:04d}": b"x" for number in range(16 + wanted * 16)}, wanted, measured)
    slow: Source = SlowSource(counting, 0.002)
    report = copy(slow, tmp_path / "local", threads=threads)
    assert report.files == len(counting.files)
    assert counting.most == wanted


@pytest.mark.full
@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
def test_a_source_of_1500_nested_folders_is_staged_and_removed(tmp_path, near_storage, kind):
    inner = "/".join("d" * 1500)
    source = tmp_path / f"a.{kind}"
    if kind == "folder":
        file_changes.make_folder(source / inner)
        file_changes.write_file(source / inner / "1.bin", b"data")
    elif kind == "tar":
        tar_of(source, {f"{inner}/1.bin": b"data"})
    else:
        with zipfile.ZipFile(source, "w") as file:
            file.writestr(f"{inner}/1.bin", b"data")
    report = copy(source)
    assert (report.path / inner / "1.bin").read_bytes() == b"data"
    assert unstage(source).path == report.path
    assert list(near_storage.iterdir()) == []
    file_changes.remove(source)


@pytest.mark.full
def test_a_failure_leaves_no_descriptor_open(archive, tmp_path, file_hook):
    needs("/proc/self/fd", os.path.isdir("/proc/self/fd"))

    def held() -> list[str]:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if os.path.islink(link) and str(tmp_path) in os.readlink(link)]

    for number, strike in failures(file_hook, fill_disk, partial(copy, archive, tmp_path / "local"), NotEnoughSpace):
        assert held() == [], f"at operation {number}"
        assert strike.error.__traceback__
    assert number >= 20
    assert held() == []
