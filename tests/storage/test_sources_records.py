"""Record files as sources: format detection, glob patterns, and the contract that all formats share."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from record_files import example, framed, image, lmdb_of, tar_of
from source_contract import FILES, UNDECODABLE, check_source, check_untouched, contents

from colabkit.errors import ColabkitError, FileFailed, InvalidOption, NotMounted, SourceChanged, SourceMissing
from colabkit.storage.sources import registry
from colabkit.storage.sources.items import Item, Source
from colabkit.storage.sources.lmdb_records import LmdbSource
from colabkit.storage.sources.reads import Retries, read_item
from colabkit.storage.sources.registry import open_records
from colabkit.storage.sources.tar_archive import TarSource
from colabkit.storage.sources.tfrecord import TfRecordSource
from colabkit.storage.sources.webdataset import WebDatasetSource

pytestmark = pytest.mark.timeout(60)

Maker = Callable[[Path, Mapping[str, bytes]], Path]


def database(place: Path, samples: Mapping[str, bytes]) -> Path:
    """Write samples as an LMDB; their paths are the keys."""
    return lmdb_of(place / "db", {path.encode(): data for path, data in samples.items()})


def shards(place: Path, samples: Mapping[str, bytes]) -> Path:
    """Write samples as tars; their paths are `SHARD/KEY`."""
    folder = place / "shards"
    folder.mkdir()
    for shard, paths in itertools.groupby(samples, lambda path: path.partition("/")[0]):
        tar_of(
            folder / f"{shard}.tar",
            *(
                (f"{path.partition('/')[2]}{end}", data)
                for path in paths
                for end, data in ((".cls", b"1"), (".png", samples[path]))
            ),
        )
    return folder


def records(place: Path, samples: Mapping[str, bytes]) -> Path:
    """Write samples as TFRecord files; their paths are `FILE/NUMBER`."""
    folder = place / "records"
    folder.mkdir()
    for shard, paths in itertools.groupby(samples, lambda path: path.partition("/")[0]):
        data = framed(*(example(image__encoded=[samples[path]], label=[1]) for path in paths))
        (folder / f"{shard}.tfrecord").write_bytes(data)
    return folder


KINDS: dict[str, Maker] = {"lmdb": database, "webdataset": shards, "tfrecord": records}
SAMPLES = {f"{shard}/{number:08d}": image(3 * number + len(shard)) for shard in ("a", "bb") for number in range(30)}


def opened(source: object) -> Source:
    found = open_records(source)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_records_keep_what_all_sources_promise(tmp_path, kind):
    source = opened(KINDS[kind](tmp_path, SAMPLES))
    check_untouched(tmp_path, lambda: check_source(source, SAMPLES))
    times = {file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    assert {item.mtime_ns for item in source.list().items} <= times
    assert source.list().skipped == ()


@pytest.mark.parametrize("kind", [*KINDS, "tar"])
def test_a_file_with_a_time_in_the_future_is_read_at_once(tmp_path, monkeypatch, kind):
    path = tar_of(tmp_path / "a.tar", ("1.png", b"1")) if kind == "tar" else KINDS[kind](tmp_path, SAMPLES)
    for file in [path, *path.rglob("*")]:
        # A program can set this time, such as unzip in another time zone.
        os.utime(file, (time.time(), int(time.time()) + 3600))
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert contents(TarSource(path) if kind == "tar" else opened(path))
    # Shorter pauses wait for the child process that lists an LMDB.
    assert [seconds for seconds in pauses if seconds >= 1] == []


def test_a_database_of_other_files_has_every_key(tmp_path):
    values = {os.fsencode(path): data for path, data in {**FILES, UNDECODABLE: b"2"}.items()}
    check_source(opened(lmdb_of(tmp_path / "db", values)), {**FILES, UNDECODABLE: b"2"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_used_before_a_fork_is_read_by_parent_and_child(tmp_path, kind):
    source = opened(KINDS[kind](tmp_path, SAMPLES))
    expected = contents(source)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def read() -> None:
        sender.send(contents(source) == expected)

    children = [context.Process(target=read) for _ in range(3)]
    try:
        for child in children:
            child.start()
        for _ in range(20):
            assert contents(source) == expected
        for child in children:
            child.join(30)
        assert [receiver.recv() if receiver.poll(1) else None for _ in children] == [True] * 3
    finally:
        for child in children:
            child.kill()
            child.join()


@pytest.mark.parametrize("kind", KINDS)
def test_pickled_items_are_read_by_a_reopened_source_without_indexing(tmp_path, kind, monkeypatch):
    place = KINDS[kind](tmp_path, SAMPLES)
    items = pickle.loads(pickle.dumps(opened(place).list().items))
    fresh = opened(place)
    monkeypatch.setattr(fresh, "_indexed", lambda: pytest.fail("indexed"))
    assert {item.path: read_item(fresh, item, Retries()) for item in items} == SAMPLES
    for file in fresh.files:
        os.utime(file, ns=(1, 1))
    with pytest.raises(SourceChanged):
        fresh.open(items[0])


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_no_payload_stays_in_memory(tmp_path, kind):
    samples = {f"a/{number:08d}": image(0) + os.urandom(1 << 20) for number in range(40)}
    source = opened(KINDS[kind](tmp_path, samples))
    tracemalloc.start()
    try:
        assert len(source.list().items) == 40
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The limit is generous, because imported packages use most of this memory.
    assert kept < 2 << 20
    assert peak < 8 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_read_by_name_without_open_descriptors_until_their_files_are_removed(tmp_path, kind):
    place = KINDS[kind](tmp_path, SAMPLES)
    source, fresh = opened(place), opened(place)
    items = source.list().items
    before = os.listdir("/proc/self/fd")
    assert {item.path: source.open(Item(item.path, item.size)).read() for item in items} == SAMPLES
    assert len(os.listdir("/proc/self/fd")) == len(before)
    for unknown in (Item("a/nothing", 3), Item("zzz", 3), Item("a/00000000", 1)):
        with pytest.raises(SourceChanged, match="no such sample"):
            source.open(unknown)
    for file in source.files:
        file.unlink()
    with pytest.raises(FileFailed):
        fresh.list()
    with pytest.raises(FileFailed):
        read_item(source, items[0], Retries())


def test_sources_other_than_records_are_declined(tmp_path):
    (tmp_path / "tree" / "cats").mkdir(parents=True)
    (tmp_path / "tree" / "cats" / "1.jpg").write_bytes(image(1))
    (tmp_path / "empty").mkdir()
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    tar_of(mixed / "a.tar", ("1.jpg", b"1"))
    (mixed / "b.jpg").write_bytes(b"1")
    both = tmp_path / "both"
    both.mkdir()
    tar_of(both / "a.tar", ("1.jpg", b"1"))
    (both / "a.tfrecord").write_bytes(framed(b"1"))
    plain = tar_of(tmp_path / "plain.tar", ("1.jpg", b"1"), ("2.jpg", b"2"), ("c.h", b"3"), ("c.c", b"4"))
    (tmp_path / "broken.tar").write_bytes(b"no tar" * 1000)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"1")
    others = [tmp_path / "tree", tmp_path / "empty", mixed, both, plain, tmp_path / "broken.tar", tmp_path / "*.jpg"]
    others += [tmp_path / "none.tar", tmp_path / "model-00001-of-00002.safetensors", tmp_path / "tree/*/*.jpg"]
    for other in [*map(str, others), others[0], [], [others[3], plain], ["a.jpg"], [3], 3, None, ""]:
        assert open_records(other) is None, other
    for other in ("gs://bucket/a.tar", ["gs://bucket/a.tar"], "samples:digits", "a\0b", {"X": 1}):
        assert open_records(other) is None, other


def test_a_drive_path_needs_the_mount(monkeypatch):
    monkeypatch.setattr("colabkit.foundation.mount_table.drive_mount", lambda table: None)
    with pytest.raises(NotMounted):
        open_records("drive:shards/{0..3}.tar")


def test_folders_lists_patterns_and_braces_open_the_same_shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        tar_of(folder / f"x-{number:06d}.tar", ("1.jpg", b"%d" % number), ("1.cls", b"1"))
    (folder / "notes.json").write_text("{}")
    (folder / ".hidden").write_text("")
    expected = {f"x-{number:06d}/1": b"%d" % number for number in range(3)}
    files = sorted(folder.glob("*.tar"))
    patterns = [
        "*.tar",
        "x-{000000..000002}.tar",
        "x-00000{0,1,2}.tar",
        "x-{000002..000000}.tar",
        "x-*",
        "x-00000[0-2].tar",
    ]
    for source in (folder, files, [*map(str, files)], tuple(files), *(str(folder / one) for one in patterns)):
        found = opened(source)
        assert isinstance(found, WebDatasetSource)
        assert contents(found) == expected, source


@pytest.mark.parametrize("pattern", ["", "*.tar"])
def test_a_shard_that_a_mount_leaves_out_of_a_listing_is_found(tmp_path, monkeypatch, pattern):
    for number in range(3):
        tar_of(tmp_path / f"x-{number}.tar", ("1.jpg", b"%d" % number), ("1.cls", b"1"))
    scan, scans = os.scandir, itertools.count()

    @contextlib.contextmanager
    def forgetful(path: object) -> Iterator[Iterator[os.DirEntry[str]]]:
        is_first = next(scans) == 0
        with scan(path) as entries:
            yield (entry for entry in entries if not is_first or os.path.basename(entry.name) != "x-1.tar")

    monkeypatch.setattr(registry, "can_hang", lambda path, table: True)
    monkeypatch.setattr(os, "scandir", forgetful)
    assert len(contents(opened(tmp_path / pattern))) == 3


def test_shards_in_folders_of_splits_have_the_folder_in_their_names(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        tar_of(tmp_path / split / "000.tar", ("1.jpg", split.encode()), ("1.cls", b"1"))
    for source in (tmp_path, str(tmp_path / "{train,val}" / "000.tar"), str(tmp_path / "*" / "*.tar")):
        found = opened(source)
        assert contents(found) == {"train/000/1": b"train", "val/000/1": b"val"}
        assert found.list().columns["split"] == ("train", "val")


def test_a_shard_that_is_missing_is_named(tmp_path):
    tar_of(tmp_path / "x-0.tar", ("1.jpg", b"1"), ("1.cls", b"1"))
    for source in (str(tmp_path / "x-{0..3}.tar"), [tmp_path / "x-0.tar", tmp_path / "x-1.tar"]):
        with pytest.raises(SourceMissing, match=r"x-1\.tar"):
            open_records(source)
    with pytest.raises(SourceMissing, match="no file matches this pattern"):
        open_records(tmp_path / "y-*.tfrecord")


@pytest.mark.parametrize(
    "pattern",
    ["{0..99999999}.tar", "{0..999}{0..999}.tar", f"{{0..9{'9' * 5000}}}.tar", f"{{{0:019}..{3:019}}}.tar"],
)
def test_a_pattern_of_too_many_shards_is_refused_at_once(tmp_path, pattern):
    with pytest.raises((InvalidOption, FileFailed)):
        open_records(str(tmp_path / pattern))


def test_types_of_records_are_recognized_by_name(tmp_path):
    lmdb_of(tmp_path / "one.lmdb", {b"1": b"1"}, subdir=False)
    for name in ("a.tfrecord", "a.tfrecords", "a.tfrec", "a.tfrecord-00000-of-00001", "a-00000-of-00001"):
        (tmp_path / name).write_bytes(framed(example(image=[image(1)])))
        assert isinstance(open_records(tmp_path / name), TfRecordSource)
        assert open_records([tmp_path / name]).list().items[0].size == len(image(1))
    assert isinstance(open_records(tmp_path / "one.lmdb"), LmdbSource)


def test_importing_sources_imports_no_package_for_records():
    code = (
        "import sys, colabkit.storage.sources.registry\n"
        "print([name for name in ('lmdb', 'google.protobuf', 'google_crc32c', 'webdataset') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_one_line(tmp_path, kind):
    place = KINDS[kind](tmp_path, SAMPLES)
    for file in opened(place).files:
        file.write_bytes(b"")
    with pytest.raises(ColabkitError) as caught:
        opened(place).list()
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("Cannot read ")
