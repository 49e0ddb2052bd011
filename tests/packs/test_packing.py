"""`pack()` stores the right samples in the right order, and leaves no incomplete files."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packed_files import packed
from PIL import Image
from trees import make_tree

from colabkit.errors import (
    BadSource,
    ColabkitError,
    InvalidOption,
    SourceMissing,
    TargetExists,
)
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.verification import verify
from colabkit.storage.staging.api import stage


def samples(path: Path, split: str = "train") -> tuple[np.ndarray, list[int]]:
    info = read_pack(path)
    return np.array(info.map(f"X_{split}")), info.table(f"Y_{split}").tolist()


def decoded(folder: Path, pattern: str = "*/*.png") -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)) for path in sorted(folder.glob(pattern))])


def zipped(folder: Path, out: Path, inside: str = "") -> Path:
    with zipfile.ZipFile(out, "w") as archive:
        for path in sorted(folder.rglob("*.png"), reverse=True):
            archive.write(path, inside + str(path.relative_to(folder)))
    return out


def test_the_pack_holds_the_decoded_images_sorted_by_class(tmp_path, image_tree):
    report = pack(image_tree, tmp_path / "p.h5", progress=False)
    images, labels = samples(report.path)
    assert np.array_equal(images, decoded(image_tree))
    assert labels == [0] * 8 + [1] * 8 + [2] * 8
    assert (report.classes, report.splits) == (("ants", "bees", "cats"), {"train": 24})
    assert (report.sample_shape, report.retries, report.left_out, report.reused) == ((6, 5, 3), 0, (), False)
    assert report.pack_bytes == report.path.stat().st_size
    assert verify(report.path, progress=False).damaged == ()


def test_folder_and_zip_give_the_same_samples(tmp_path, image_tree):
    folder = packed(image_tree, tmp_path / "folder.h5")
    for inside in ("", "wrapped/twice/"):
        archive = packed(zipped(image_tree, tmp_path / "tree.zip", inside), tmp_path / "zip.h5", overwrite=True)
        assert np.array_equal(samples(folder)[0], samples(archive)[0])
        assert samples(folder)[1] == samples(archive)[1]


def test_an_archive_with_constant_times_is_not_taken_for_its_former_version(tmp_path):
    def write(value: int) -> None:
        with tarfile.open(tmp_path / "a.tar", "w") as archive:
            for name in ("owl/1.npy", "owl/2.npy"):
                data = io.BytesIO()
                np.save(data, np.full(4, value))
                member = tarfile.TarInfo(name)
                member.size = len(data.getvalue())
                archive.addfile(member, io.BytesIO(data.getvalue()))
        os.utime(tmp_path / "a.tar", (value, value))

    write(1)
    pack(tmp_path / "a.tar", tmp_path / "p.h5", progress=False)
    assert pack(tmp_path / "a.tar", tmp_path / "p.h5", progress=False).reused
    write(2)
    with pytest.raises(TargetExists, match="with other samples or options"):
        pack(tmp_path / "a.tar", tmp_path / "p.h5", progress=False)


def test_a_single_file_is_not_reused_if_shards_are_requested(tmp_path, image_tree):
    pack(image_tree, tmp_path / "p.h5", progress=False)
    with pytest.raises(TargetExists, match=r"in a single file; expected a pack of shards\. .*overwrite=True"):
        pack(image_tree, tmp_path / "p.h5", shard_bytes="1KiB", progress=False)
    assert pack(image_tree, tmp_path / "p.h5", shard_bytes="1KiB", overwrite=True, progress=False).shards > 1
    assert pack(image_tree, tmp_path / "p.h5", shard_bytes="1KiB", progress=False).reused


def test_packs_of_copied_files_have_one_fingerprint_unless_the_samples_differ(tmp_path, image_tree):
    def fingerprint(tree: Path, name: str) -> str:
        return read_pack(pack(tree, tmp_path / name, progress=False).path).fingerprint

    expected = fingerprint(image_tree, "p.h5")
    other = tmp_path / "elsewhere" / "images"
    shutil.copytree(image_tree, other, copy_function=shutil.copyfile)
    assert fingerprint(other, "q.h5") == expected
    first, second = sorted((other / "ants").glob("*.png"))[:2]
    first.write_bytes(second.read_bytes())
    assert fingerprint(other, "r.h5") != expected


def image_folder(root: Path) -> tuple[list[Path], list[int], list[str]]:
    """Return the files, labels and classes in the order of torchvision's `ImageFolder`."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    files, labels = [], []
    for label, name in enumerate(classes):
        for folder, _, names in sorted(os.walk(root / name)):
            files += [Path(folder) / file for file in sorted(names)]
            labels += [label] * len(names)
    return files, labels, classes


def test_order_and_labels_are_those_of_image_folder(tmp_path, image_tree):
    pixels = iter(np.random.default_rng(3).integers(0, 256, (40, 6, 5, 3), dtype=np.uint8))
    names = ("z.png", "deep/a.png", "deep/b/c.png", "deep-er/a.png", "A.PNG", "10.png", "9.png", "ä.png")
    for group in ("ants-2", "ants 1", "Ants", "deep"):
        for name in names:
            path = image_tree / group / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(next(pixels)).save(path)
    files, labels, classes = image_folder(image_tree)
    images, found = samples(packed(image_tree, tmp_path / "p.h5"))
    assert read_pack(tmp_path / "p.h5").meta["classes"] == classes
    assert found == labels
    assert np.array_equal(images, np.stack([np.asarray(Image.open(file)) for file in files]))


def test_split_folders_become_splits(tmp_path):
    tree = tmp_path / "tree"
    for number, split in enumerate(("train", "val", "test"), 1):
        make_tree(tree, number, prefix=split)
    report = pack(tree, tmp_path / "p.h5", progress=False)
    assert report.splits == {"train": 3, "val": 6, "test": 9}
    for split, folder in (("train", "train"), ("val", "val"), ("test", "test")):
        images, labels = samples(report.path, split)
        assert np.array_equal(images, decoded(tree / folder))
        assert labels == sorted(labels)


def test_shares_divide_each_class_among_the_splits(tmp_path, image_tree):
    paths = [
        packed(image_tree, tmp_path / f"{number}.h5", splits={"train": 0.5, "val": 0.25, "test": 0.25}, seed=seed)
        for number, seed in enumerate((3, 3, 4))
    ]
    whole = {image.tobytes() for image in decoded(image_tree)}
    found = [{split: samples(path, split) for split in ("train", "val", "test")} for path in paths]
    for splits in found:
        assert [labels for _, labels in splits.values()] == [
            [0] * share + [1] * share + [2] * share for share in (4, 2, 2)
        ]
        assert {image.tobytes() for images, _ in splits.values() for image in images} == whole
    assert np.array_equal(found[0]["val"][0], found[1]["val"][0])
    assert not np.array_equal(found[0]["val"][0], found[2]["val"][0])


def test_files_without_an_image_suffix_are_left_out_and_reported(tmp_path, image_tree):
    (image_tree / "ants" / "notes.txt").write_text("x")
    (image_tree / ".hidden").mkdir()
    (image_tree / ".hidden" / "a.png").write_text("x")
    report = pack(image_tree, tmp_path / "p.h5", progress=False)
    assert set(report.left_out) == {("ants/notes.txt", "no image extension"), (".hidden/a.png", "hidden")}
    assert report.splits == {"train": 24}
    assert "2 other files left out" in repr(report)


@pytest.mark.parametrize(("make", "error"), [(lambda path: None, SourceMissing), (Path.mkdir, BadSource)])
def test_a_missing_or_empty_source_is_an_error(tmp_path, make, error):
    make(tmp_path / "source")
    with pytest.raises(error):
        packed(tmp_path / "source", tmp_path / "p.h5")
    assert not (tmp_path / "p.h5").exists()


def test_a_local_copy_in_another_folder_is_the_same_source(tmp_path, image_tree):
    one = stage(image_tree, to=tmp_path / "one", progress=False).path
    path = packed(one, tmp_path / "p.h5", size=4)
    other = stage(image_tree, to=tmp_path / "other", progress=False).path
    assert pack(other, path, size=4, progress=False).reused
    (other / "ants" / "one-more.png").write_bytes((other / "ants" / "000.png").read_bytes())
    with pytest.raises(TargetExists):
        pack(other, path, size=4, progress=False)


def swap_classes(tree: Path) -> None:
    os.rename(tree / "ants" / "000.png", tree / "x")
    os.rename(tree / "bees" / "000.png", tree / "ants" / "zzz.png")
    os.rename(tree / "x", tree / "bees" / "zzz.png")


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda tree: None, {"channels": 1}),
        (lambda tree: None, {"size": 4}),
        (lambda tree: None, {"splits": {"train": 0.5, "val": 0.5}}),
        (lambda tree: os.remove(tree / "ants" / "000.png"), {}),
        (lambda tree: os.rename(tree / "ants" / "000.png", tree / "bees" / "x.png"), {}),
        (swap_classes, {}),
    ],
)
def test_a_pack_of_other_files_or_options_is_replaced_only_with_overwrite(tmp_path, image_tree, change, options):
    path = packed(image_tree, tmp_path / "p.h5")
    old = path.read_bytes()
    change(image_tree)
    with pytest.raises(TargetExists, match="overwrite=True"):
        packed(image_tree, path, **options)
    assert path.read_bytes() == old
    assert not pack(image_tree, path, overwrite=True, progress=False, **options).reused
    assert path.read_bytes() != old


@pytest.mark.parametrize("content", [b"", b"somebody's work", b"\x89HDF\r\n\x1a\n"])
def test_only_packs_are_overwritten(tmp_path, small_tree, content):
    path = tmp_path / "p.h5"
    path.write_bytes(content)
    with pytest.raises(TargetExists, match="already exists and is not a pack"):
        packed(small_tree, path)
    with pytest.raises(TargetExists, match="is not a pack, and overwrite=True replaces only packs"):
        packed(small_tree, path, overwrite=True)
    assert path.read_bytes() == content
    path.unlink()
    packed(small_tree, path)
    # `overwrite=True` also replaces a damaged pack.
    path.write_bytes(path.read_bytes()[:5000])
    packed(small_tree, path, overwrite=True)
    assert samples(path)[1] == [0, 0, 1, 1, 2, 2]


def test_reports_describe_the_pack(tmp_path, image_tree):
    report = pack(image_tree, tmp_path / "p.h5", progress=False)
    assert repr(report).startswith("Packed 24 images 6x5x3, ")
    assert str(report.path) in repr(report)
    assert "<table" in report._repr_html_()
    verified = verify(report.path, progress=False)
    assert repr(verified).endswith("is intact: 24 samples match their checksums")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_is_never_replaced_by_a_pack(image_tree, tmp_path, overwrite):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "mine.txt").write_text("mine")
    with pytest.raises(TargetExists, match="is a folder"):
        pack(image_tree, tmp_path / "photos", overwrite=overwrite, progress=False)
    assert (tmp_path / "photos" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("to", "options", "error"),
    [
        ("p.h5", {"size": 0}, "size"),
        ("p.h5", {"shard_bytes": "many"}, "shard_bytes"),
        ("p.h5", {"executor": 3}, "executor"),
        ("https://example.org/p.h5", {}, "that fsspec can write"),
        ("folder", {}, "is a folder"),
    ],
)
@pytest.mark.every_case
def test_options_are_checked_before_the_source_is_fetched(tmp_path, monkeypatch, to, options, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    # Nothing listens at this port.
    with pytest.raises(ColabkitError, match=rf"^Cannot pack 'https://localhost:1/birds.zip': .*{error}"):
        pack("https://localhost:1/birds.zip", to, progress=False, **options)


def test_a_pack_is_never_written_into_or_over_its_source(image_tree, tmp_path):
    before = sorted(image_tree.rglob("*"))
    for target in (image_tree / "p.h5", image_tree / "ants" / "p.h5"):
        with pytest.raises(BadSource, match="is inside the source"):
            pack(image_tree, target, overwrite=True, progress=False)
    assert sorted(image_tree.rglob("*")) == before
    archive = tmp_path / "tree.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in image_tree.rglob("*.png"):
            file.write(path, path.relative_to(image_tree))
    data = archive.read_bytes()
    with pytest.raises(BadSource):
        pack(archive, archive, overwrite=True, progress=False)
    assert archive.read_bytes() == data


@pytest.mark.parametrize("source", [None, 3, "", b"a"])
def test_an_invalid_source_is_a_one_line_error(tmp_path, source):
    with pytest.raises(InvalidOption, match="Cannot read"):
        pack(source, tmp_path / "p.h5", progress=False)


def test_a_seed_without_splits_changes_nothing(image_tree, tmp_path):
    pack(image_tree, tmp_path / "p.h5", seed=1, progress=False)
    assert pack(image_tree, tmp_path / "p.h5", seed=2, progress=False).reused


def test_invalid_paths_are_one_line_errors(small_tree, tmp_path):
    for path in (tmp_path / ("x" * 300), tmp_path / "file" / "p.h5"):
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ColabkitError, match=r"^Cannot (open|pack) .*: .*\. .*\.$"):
            pack(small_tree, path, progress=False)
        with pytest.raises(ColabkitError, match=r"^Cannot open .*: .*\. .*\.$"):
            open_pack(path)
