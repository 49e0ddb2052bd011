"""Bad files are named in an error, skipped, or stored as black images; other samples keep their labels."""

from __future__ import annotations

import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from packed_files import ENCODINGS, WAYS, files_of, fork, labels_of, names_in, packed, photos, stored
from pictures import photo, saved
from trees import leftovers

from colabkit.errors import BadArchive, BadImage, BadSource, InvalidOption
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing import file_plan
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.pack_report import PackReport
from colabkit.packs.packing.verification import verify
from colabkit.storage.sources.tar_archive import TarSource
from colabkit.storage.sources.zip_archive import ZipSource

HTML = b"<!DOCTYPE html><html><body>404</body></html>"
FILES = 12


def bomb(width: int) -> bytes:
    """Return a small PNG file whose header has the given width and a height of 9000 pixels."""
    header = struct.pack(">IIBBBBB", width, 9000, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    body = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


BROKEN = {
    "empty": (lambda whole: b"", "the file is empty"),
    "web page": (lambda whole: HTML, "a web page with the name of an image"),
    "zeros": (lambda whole: bytes(len(whole)), "not a readable image"),
    "half": (lambda whole: whole[: len(whole) // 2], ""),
    "bomb": (lambda whole: bomb(10_000), "9000x10000, more than"),
    "larger bomb": (lambda whole: bomb(100_000), "more than the limit"),
    "array": (lambda whole: b"\x93NUMPY" + bytes(90), "not a readable image"),
}


def spoil(tree: Path, *numbers: int, how: Callable[[bytes], bytes] = BROKEN["half"][0]) -> list[str]:
    files = files_of(tree)
    for number in numbers:
        files[number].write_bytes(how(files[number].read_bytes()))
    return [str(files[number].relative_to(tree)) for number in numbers]


def check(
    path: Path, reference_path: Path, bad: dict[str, list[int]], on_bad: str, report: PackReport | None = None
) -> None:
    """Compare a pack with a reference pack made before some files were broken.

    `bad` holds the numbers of the broken files in each split.
    """
    reference, info = read_pack(reference_path), read_pack(path)
    listed = []
    for split in reference.splits:
        gone = bad.get(split, [])
        kept = [number for number in range(reference.count(split)) if on_bad == "blank" or number not in gone]
        listed += [(split, number if on_bad == "blank" else None) for number in gone]
        if not kept:
            assert split not in info.splits
            continue
        before, labels = stored(reference_path, split), labels_of(reference_path, split)
        now = stored(path, split)
        assert labels_of(path, split) == [labels[number] for number in kept]
        for number, value in zip(kept, now, strict=True):
            if number in gone:
                assert not np.any(value) if isinstance(value, np.ndarray) else value == b""
                assert not open_pack(path)[split][number][0].any()
            else:
                assert np.array_equal(value, before[number])
    assert [(split, index) for split, index, _, _ in info.meta["bad"]] == listed
    assert verify(path, progress=False).is_good
    assert leftovers(path.parent) == []
    if report is not None:
        assert report.bad == tuple((name, why) for _, _, name, why in info.meta["bad"])
        assert report.splits == {split: info.count(split) for split in info.splits}


@pytest.mark.parametrize("options", ENCODINGS, ids=lambda one: one["encoding"])
@pytest.mark.parametrize("number", [0, 5, FILES - 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_bad_file_is_an_error_that_names_it_and_leaves_no_files(tmp_path, tree, monkeypatch, options, number, way):
    fork(monkeypatch)
    (name,) = spoil(tree, number)
    with pytest.raises(
        BadImage, match=f"Cannot pack '{name}' of .*Repair or remove this file.*on_bad='skip'"
    ) as caught:
        pack(tree, tmp_path / "p.h5", progress=False, **options, **WAYS[way])
    assert "\n" not in str(caught.value)
    assert names_in(tmp_path) == ["tree"]


@pytest.mark.parametrize("on_bad", ["skip", "blank"])
@pytest.mark.parametrize("options", ENCODINGS, ids=lambda one: one["encoding"])
@pytest.mark.parametrize("numbers", [[0], [FILES - 1], [0, 1, 4, 7, 11], [4, 5, 6, 7]], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_bad_files_are_listed_and_other_samples_stay_aligned(
    tmp_path, tree, monkeypatch, on_bad, options, numbers, way
):
    whole = packed(tree, tmp_path / "whole.h5", **options)
    names = spoil(tree, *numbers)
    fork(monkeypatch)
    report = pack(tree, tmp_path / "p.h5", on_bad=on_bad, max_bad=0.5, progress=False, **options, **WAYS[way])
    check(report.path, whole, {"train": numbers}, on_bad, report)
    assert [name for name, _ in report.bad] == names
    assert f"{len(names)} bad file{'s' * (len(names) > 1)}, starting with '{names[0]}' (" in repr(report)
    again = pack(tree, tmp_path / "p.h5", on_bad=on_bad, max_bad=0.5, progress=False, **options)
    assert again.bad == report.bad
    assert again.reused
    assert set(repr(report).splitlines()[1:]) <= set(repr(again).splitlines()[1:]) | {
        f"Encoding {report.encoding}: {report.note}"
    }
    with pytest.raises(BadImage, match=r"already exists with \d+ bad samples?; expected at most 0\. "):
        pack(tree, tmp_path / "p.h5", on_bad=on_bad, max_bad=0, progress=False, **options)


def split_tree(folder: Path) -> Path:
    """Write 6 training, 3 validation and 6 test photos, and return the folder."""
    for split, per_class in (("train", 2), ("val", 1), ("test", 2)):
        photos(folder / split, per_class)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("on_bad", ["skip", "blank"])
@pytest.mark.parametrize("options", ENCODINGS, ids=lambda one: one["encoding"])
def test_bad_files_of_several_splits_are_listed_in_the_order_of_samples(tmp_path, monkeypatch, on_bad, options):
    tree = split_tree(tmp_path / "tree")
    whole = packed(tree, tmp_path / "whole.h5", **options)
    # The files are sorted by path: test, train, val.
    names = spoil(tree, 6, 8, 0, 5, 9, 10, 11)
    fork(monkeypatch)
    for way, threads in WAYS.items():
        report = pack(tree, tmp_path / f"{way}.h5", on_bad=on_bad, max_bad=9, progress=False, **options, **threads)
        bad = {"train": [0, 2, 3, 4, 5], "test": [0, 5]}
        check(report.path, whole, bad, on_bad, report)
        assert [name for name, _ in report.bad] == sorted(names, key=lambda name: (not name.startswith("train"), name))
    assert len({path.read_bytes() for path in tmp_path.glob("*.h5") if path != whole}) == 1


@pytest.mark.parametrize("options", ENCODINGS, ids=lambda one: one["encoding"])
def test_a_split_of_bad_files_is_omitted_or_black(tmp_path, options):
    tree = split_tree(tmp_path / "tree")
    whole = packed(tree, tmp_path / "whole.h5", **options)
    spoil(tree, 12, 13, 14)
    for on_bad in ("skip", "blank"):
        report = pack(tree, tmp_path / f"{on_bad}.h5", on_bad=on_bad, max_bad=3, progress=False, **options)
        check(report.path, whole, {"val": [0, 1, 2]}, on_bad, report)
    assert list(open_pack(tmp_path / "skip.h5")) == ["train", "test"]
    assert list(open_pack(tmp_path / "blank.h5")) == ["train", "val", "test"]


@pytest.mark.parametrize("on_bad", ["skip", "blank"])
@pytest.mark.parametrize("options", [*ENCODINGS, {"encoding": "raw", "size": 8}, {}], ids=str)
@pytest.mark.parametrize("max_bad", [0.3, 0.99, 500])
def test_a_source_without_a_good_file_is_an_error(tmp_path, tree, on_bad, options, max_bad):
    spoil(tree, *range(FILES))
    with pytest.raises((BadImage, BadSource), match=r"Cannot pack '.*tree'") as caught:
        pack(tree, tmp_path / "p.h5", on_bad=on_bad, max_bad=max_bad, progress=False, **options)
    if max_bad == 500:
        assert str(caught.value).endswith("Check the source."), (
            "the error suggests a larger max_bad, which does not help"
        )
    assert names_in(tmp_path) == ["tree"]


@pytest.mark.parametrize("options", ENCODINGS, ids=lambda one: one["encoding"])
@pytest.mark.parametrize(
    ("max_bad", "allowed"), [(0, 0), (0.1, 1), (0.25, 3), (0.2501, 3), (1, 1), (2, 2), (2.0, 2), (0.01, 1)]
)
def test_more_bad_files_than_max_bad_are_an_error_with_their_number(tmp_path, tree, options, max_bad, allowed):
    names = spoil(tree, *range(1, 1 + allowed))
    if allowed:
        report = pack(tree, tmp_path / "p.h5", on_bad="skip", max_bad=max_bad, threads=1, progress=False, **options)
        assert [name for name, _ in report.bad] == names
        (tmp_path / "p.h5").unlink()
    names += spoil(tree, 1 + allowed)
    with pytest.raises(
        BadImage, match=rf"Cannot pack '.*tree': there are at least {allowed + 1} bad file.* starting with '{names[0]}'"
    ) as caught:
        pack(tree, tmp_path / "p.h5", on_bad="skip", max_bad=max_bad, threads=1, progress=False, **options)
    assert ("at least 1 bad file, " in str(caught.value)) == (allowed == 0)
    assert f"at most {allowed}" in str(caught.value)
    assert "max_bad" in str(caught.value)
    assert names_in(tmp_path) == ["tree"]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("options", [*ENCODINGS, {"encoding": "raw", "size": 20}], ids=str)
def test_the_reason_is_reported_for_every_kind_of_broken_file(tmp_path, tree, kind, options):
    how, why = BROKEN[kind]
    (name,) = spoil(tree, 6, how=how)
    report = pack(tree, tmp_path / "p.h5", on_bad="skip", progress=False, **options)
    assert report.splits == {"train": FILES - 1}
    assert report.bad[0][0] == name
    assert why in report.bad[0][1]
    assert "\n" not in report.bad[0][1]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("options", [*ENCODINGS, {"encoding": "raw", "size": 20}], ids=str)
def test_truncated_files_are_bad_and_never_decoded_in_part(tmp_path, kind, options):
    tree = tmp_path / "tree"
    data = saved(photo(40, 60), kind)
    step = max(100, len(data) // 25)
    for cut in [*range(0, len(data), step), len(data)]:
        file = tree / "a" / f"{cut:06d}.{kind.lower()}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data[:cut])
    count = len(files_of(tree))
    report = pack(tree, tmp_path / "p.h5", on_bad="skip", max_bad=0.999, progress=False, **options)
    assert verify(report.path, progress=False).is_good
    assert report.splits["train"] + len(report.bad) == count
    # A GIF or BMP that lacks only its last bytes may be decoded completely.
    assert report.splits["train"] <= 2
    opened = open_pack(report.path)["train"]
    whole = open_pack(report.path)["train"][len(opened) - 1][0]
    assert all((opened[number][0] == whole).all() for number in range(len(opened)))


def zipped(tree: Path, out: Path, broken: int | None = None) -> Path:
    """Write a zip archive of the files, and damage member `broken` so that its CRC no longer matches."""
    with zipfile.ZipFile(out, "w") as archive:
        for file in files_of(tree):
            archive.write(file, file.relative_to(tree))
        infos = archive.infolist()
    if broken is not None:
        with out.open("r+b") as file:
            file.seek(infos[broken].header_offset + 30 + len(infos[broken].filename) + 200)
            file.write(b"\xff" if archive else b"")
            file.write(b"\x00\x01\x02")
    return out


@pytest.mark.parametrize("options", [*ENCODINGS, {}], ids=str)
@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("number", [0, 6])
def test_a_broken_member_of_an_archive_is_a_bad_file(tmp_path, tree, options, is_remote, number):
    whole = packed(zipped(tree, tmp_path / "tree.zip"), tmp_path / "whole.h5", **options)
    source = ZipSource(zipped(tree, tmp_path / "broken.zip", number))
    source.can_hang = is_remote
    with pytest.raises(BadArchive, match=r"Cannot read .*broken.zip'.*do not match its CRC"):
        pack(source, tmp_path / "p.h5", progress=False, **options)
    for on_bad in ("skip", "blank"):
        report = pack(source, tmp_path / f"{on_bad}.h5", on_bad=on_bad, progress=False, **options)
        check(report.path, whole, {"train": [number]}, on_bad, report)
        name = str(files_of(tree)[number].relative_to(tree))
        assert report.bad == ((name, "its bytes do not match its CRC"),)


@pytest.mark.parametrize("options", ENCODINGS, ids=lambda one: one["encoding"])
def test_bad_files_of_a_remote_source_are_skipped(tmp_path, tree, options):
    whole = packed(tree, tmp_path / "whole.h5", **options)
    spoil(tree, 0, 3, 11)
    source = ZipSource(zipped(tree, tmp_path / "tree.zip"))
    source.can_hang = True
    for on_bad in ("skip", "blank"):
        report = pack(source, tmp_path / f"{on_bad}.h5", on_bad=on_bad, max_bad=3, progress=False, **options)
        assert report.made_by == "threads, as files arrived"
        check(report.path, whole, {"train": [0, 3, 11]}, on_bad, report)


@pytest.mark.parametrize("options", ENCODINGS, ids=lambda one: one["encoding"])
def test_a_sequential_archive_skips_bad_files_but_damage_to_it_is_an_error(tmp_path, tree, options):
    whole = packed(tree, tmp_path / "whole.h5", **options)
    spoil(tree, 2, 8)
    with tarfile.open(tmp_path / "tree.tar.gz", "w:gz") as archive:
        for file in reversed(files_of(tree)):
            archive.add(file, file.relative_to(tree))
    report = pack(tmp_path / "tree.tar.gz", tmp_path / "p.h5", on_bad="skip", max_bad=2, progress=False, **options)
    check(report.path, whole, {"train": [2, 8]}, "skip", report)
    listing = TarSource(tmp_path / "tree.tar.gz").list()
    data = bytearray((tmp_path / "tree.tar.gz").read_bytes())
    (tmp_path / "cut.tar.gz").write_bytes(data[: len(data) // 2])
    assert len(listing.items) == FILES
    with pytest.raises(BadArchive):
        pack(tmp_path / "cut.tar.gz", tmp_path / "cut.h5", on_bad="skip", max_bad=500, progress=False, **options)
    assert not (tmp_path / "cut.h5").exists()


@pytest.mark.parametrize("on_bad", ["skip", "blank"])
@pytest.mark.parametrize("options", ENCODINGS, ids=lambda one: one["encoding"])
@pytest.mark.parametrize("way", WAYS)
def test_additional_fields_stay_aligned_with_samples(tmp_path, tree, monkeypatch, on_bad, options, way):
    spoil(tree, 0, 6, 7)
    fork(monkeypatch)
    fields = {"name": lambda path: path, "length": lambda path: len(path) * 1.5, "file": "path"}
    path = packed(tree, tmp_path / "p.h5", fields=fields, on_bad=on_bad, max_bad=3, **options, **WAYS[way])
    kept = [number for number in range(FILES) if on_bad == "blank" or number not in (0, 6, 7)]
    names = [str(files_of(tree)[number].relative_to(tree)) for number in kept]
    assert stored(path, field="name") == stored(path, field="file") == [name.encode() for name in names]
    assert np.array(stored(path, field="length")).tolist() == [len(name) * 1.5 for name in names]


@pytest.mark.parametrize("probed", [1, 2, 16])
def test_auto_probes_files_until_one_is_good(tmp_path, tree, monkeypatch, probed):
    monkeypatch.setattr(file_plan, "_PROBED", probed)
    spoil(tree, *range(10), 11)
    report = pack(tree, tmp_path / "p.h5", on_bad="skip", max_bad=11, progress=False)
    assert (report.encoding, report.sample_shape, report.splits) == ("raw", (24, 32, 3), {"train": 1})


def test_an_image_of_another_size_is_an_error_not_a_bad_file(tmp_path, tree):
    (tree / "bees" / "001.jpg").write_bytes(saved(photo(9, 9), "JPEG"))
    for on_bad in ("skip", "blank"):
        with pytest.raises(BadImage, match=r"'bees/001.jpg' .*9x9x3, but 24x32x3 in the first sample.*size="):
            pack(tree, tmp_path / "p.h5", encoding="raw", on_bad=on_bad, progress=False)


def test_bad_npy_arrays_are_skipped(tmp_path):
    tree = tmp_path / "tree" / "a"
    tree.mkdir(parents=True)
    for number in range(10):
        np.save(tree / f"{number}.npy", np.full((3, 2), number))
    (tree / "4.npy").write_bytes((tree / "4.npy").read_bytes()[:-1])
    (tree / "0.npy").write_bytes(b"")
    report = pack(tree.parent, tmp_path / "p.h5", on_bad="skip", max_bad=2, progress=False)
    assert [name for name, _ in report.bad] == ["a/0.npy", "a/4.npy"]
    for name, value in {"size": 8, "encoding": "jpeg", "channels": 1, "quality": 80}.items():
        with pytest.raises(InvalidOption, match=rf"{name}=.* applies only to images, but all samples are \.npy arrays"):
            pack(tree.parent, tmp_path / "q.h5", progress=False, **{name: value})
    assert [row[0, 0] for row in stored(report.path)] == [1, 2, 3, 5, 6, 7, 8, 9]


def test_many_bad_files_are_listed_in_the_pack_and_shortened_in_the_html_report(tmp_path):
    tree = photos(tmp_path / "tree", per_class=150, size=(8, 8))
    spoil(tree, *range(0, 450, 2))
    report = pack(tree, tmp_path / "p.h5", on_bad="blank", max_bad=0.6, progress=False)
    assert len(report.bad) == len(read_pack(report.path).meta["bad"]) == 225
    assert [index for _, index, _, _ in read_pack(report.path).meta["bad"]] == list(range(0, 450, 2))
    assert len(report._repr_html_()) < 5000
    assert verify(report.path, progress=False).is_good
