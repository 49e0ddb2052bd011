"""Images are packed as raw pixels, unchanged files or new JPEG files; all workers write the same bytes."""

from __future__ import annotations

import weakref
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packed_files import WAYS, assert_refused, files_of, fork, labels_of, names_in, packed, photos, stored
from pictures import AGREEMENT, by_pillow, distance, exif, photo, saved
from PIL import Image
from strikes import ChangeHook, fill_disk
from trees import leftovers

from colabkit.errors import BadImage, BadSource, InvalidOption, TargetExists
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.decode.images import decode_image
from colabkit.packs.decode.jpeg import encode_jpeg
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing import file_plan, pack_call, sample_writer
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.pack_plan import PackPlan
from colabkit.packs.packing.pack_writer import WrittenPack
from colabkit.packs.packing.verification import verify
from colabkit.storage.sources.folder import FolderSource

ENCODINGS: list[dict[str, Any]] = [
    {"encoding": "raw"},
    {"encoding": "raw", "size": (9, 7)},
    {"encoding": "source"},
    {"encoding": "jpeg"},
    {"encoding": "jpeg", "size": 16, "quality": 71, "channels": 1},
]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    folder = photos(tmp_path / "mixed")
    for kind, name in (("PNG", "png"), ("WEBP", "webp"), ("BMP", "bmp"), ("GIF", "gif")):
        (folder / "bees" / f"other.{name}").write_bytes(saved(photo(21, 30, seed=len(name)), kind))
    (folder / "cats" / "turned.jpg").write_bytes(saved(photo(30, 44), "JPEG", exif=exif(6)))
    return folder


def opened(path: Path, split: str = "train") -> list[np.ndarray]:
    """Return the images of a split as `[H, W, C]` arrays."""
    data = open_pack(path)[split]
    return [data[number][0].permute(1, 2, 0).numpy() for number in range(len(data))]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [None, 12, (40, 20)])
def test_raw_rows_are_the_decoded_images(tmp_path, tree, size, channels):
    report = pack(tree, tmp_path / "p.h5", encoding="raw", size=size, channels=channels, progress=False)
    wanted = None if size is None else (size, size) if isinstance(size, int) else size
    expected = [decode_image(path.read_bytes(), channels, wanted) for path in files_of(tree)]
    assert (report.encoding, report.sample_shape) == ("raw", expected[0].shape)
    assert np.array_equal(np.stack(stored(report.path)), np.stack(expected))
    assert np.array_equal(np.stack(opened(report.path)), np.stack(expected))
    assert labels_of(report.path) == [0] * 4 + [1] * 4 + [2] * 4


def test_raw_with_a_size_accepts_images_of_all_formats_and_sizes(tmp_path, mixed):
    path = packed(mixed, tmp_path / "p.h5", encoding="raw", size=(20, 30))
    expected = [decode_image(file.read_bytes(), 3, (20, 30)) for file in files_of(mixed)]
    assert np.array_equal(np.stack(stored(path)), np.stack(expected))


def test_source_stores_files_unchanged_and_the_pack_decodes_them(tmp_path, mixed):
    report = pack(mixed, tmp_path / "p.h5", encoding="source", progress=False)
    files = files_of(mixed)
    assert (report.encoding, report.sample_shape) == ("source", ())
    assert stored(report.path) == [file.read_bytes() for file in files]
    index = read_pack(report.path).table("X_train_index")
    assert index[:, 1].tolist() == [file.stat().st_size for file in files]
    assert index[:, 0].tolist() == [0, *np.cumsum(index[:, 1]).tolist()[:-1]]
    for image, file in zip(opened(report.path), files, strict=True):
        assert distance(image, by_pillow(file.read_bytes())) <= AGREEMENT


def test_a_source_pack_with_one_channel_is_converted_when_it_is_read(tmp_path, tree):
    path = packed(tree, tmp_path / "p.h5", encoding="source", channels=1)
    assert stored(path) == [file.read_bytes() for file in files_of(tree)]
    assert {image.shape for image in opened(path)} == {(24, 32, 1)}


@pytest.mark.parametrize(("size", "channels", "quality"), [(None, 3, 90), (16, 3, 55), ((20, 12), 1, 100)])
def test_jpeg_re_encodes_the_decoded_image(tmp_path, mixed, size, channels, quality):
    path = packed(mixed, tmp_path / "p.h5", encoding="jpeg", size=size, channels=channels, quality=quality)
    wanted = (size, size) if isinstance(size, int) else size
    expected = [encode_jpeg(decode_image(file.read_bytes(), channels, wanted), quality) for file in files_of(mixed)]
    assert stored(path) == expected
    assert [image.shape for image in opened(path)] == [decode_image(data, channels).shape for data in expected]
    options = read_pack(path).meta["options"]
    assert (options["quality"], read_pack(path).meta["encoding"]) == (quality, "jpeg")


def test_a_lower_quality_takes_less_space(tmp_path, tree):
    sizes = [packed(tree, tmp_path / f"{quality}.h5", encoding="jpeg", quality=quality) for quality in (10, 50, 95)]
    lengths = [sum(map(len, stored(path))) for path in sizes]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2]


@pytest.mark.parametrize("options", ENCODINGS, ids=lambda options: "-".join(map(str, options.values())))
def test_all_workers_write_the_same_bytes(tmp_path, tree, monkeypatch, options):
    with zipfile.ZipFile(tmp_path / "tree.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in reversed(files_of(tree)):
            archive.write(file, file.relative_to(tree))
    made_by = {}
    fork(monkeypatch)
    for source in (tree, tmp_path / "tree.zip"):
        whole = set()
        for way, threads in WAYS.items():
            out = tmp_path / f"{source.name}-{way}.h5"
            made_by[way] = pack(source, out, progress=False, **threads, **options).made_by
            whole.add(out.read_bytes())
        assert len(whole) == 1
    assert made_by == {"inline": "one thread", "threads": "3 threads", "processes": "2 processes"}


def test_local_files_are_read_ahead_in_the_order_of_the_samples(tmp_path, tree, monkeypatch):
    ahead: list[str] = []
    monkeypatch.setattr(FolderSource, "read_ahead", lambda _, items: ahead.extend(item.path for item in items))
    monkeypatch.setattr(sample_writer, "_MEASURED_S", 0.0)
    pack(tree, tmp_path / "p.h5", progress=False)
    assert ahead == [str(file.relative_to(tree)) for file in files_of(tree)]


def test_auto_is_raw_for_images_of_one_size(tmp_path, tree, mixed):
    report = pack(tree, tmp_path / "p.h5", progress=False)
    assert (report.encoding, report.sample_shape, report.note) == ("raw", (24, 32, 3), "")
    report = pack(mixed, tmp_path / "sized.h5", size=10, progress=False)
    assert (report.encoding, report.sample_shape) == ("raw", (10, 10, 3))


def test_auto_stores_files_of_several_sizes_unchanged_and_reports_the_benefit_of_raw(tmp_path, mixed):
    report = pack(mixed, tmp_path / "p.h5", progress=False)
    assert report.encoding == "source"
    assert stored(report.path) == [file.read_bytes() for file in files_of(mixed)]
    assert "several sizes" in report.note
    assert "raw pixels at an image size of 256 would take 3.2 MiB" in report.note
    assert "in every epoch" in report.note
    assert report.note in repr(report)
    assert pack(mixed, tmp_path / "p.h5", progress=False).note == report.note


@pytest.mark.parametrize("way", WAYS)
def test_auto_falls_back_to_source_if_another_size_is_found_late(tmp_path, tree, monkeypatch, way):
    monkeypatch.setattr(file_plan, "_PROBED", 2)
    odd = tree / "bees" / "001.jpg"
    odd.write_bytes(saved(photo(10, 11), "JPEG"))
    fork(monkeypatch)
    report = pack(tree, tmp_path / "p.h5", progress=False, **WAYS[way])
    assert (report.encoding, report.bad) == ("source", ())
    assert "several sizes" in report.note
    assert stored(report.path) == [file.read_bytes() for file in files_of(tree)]
    assert leftovers(tmp_path) == []
    assert pack(tree, tmp_path / "p.h5", progress=False, **WAYS[way]).reused


@pytest.mark.parametrize("short_of", ["disk", "memory"])
def test_auto_does_not_store_pixels_that_would_not_fit(tmp_path, tree, monkeypatch, short_of):
    fitting = 12 * 24 * 32 * 3 - 1
    if short_of == "memory":
        monkeypatch.setattr(file_plan, "memory_limits", lambda read: SimpleNamespace(available_bytes=fitting))
    else:
        monkeypatch.setattr(file_plan.file_changes, "free_bytes", lambda path: fitting)
    report = pack(tree, tmp_path / "whole.h5", progress=False)
    assert report.encoding == "source"
    assert "fit on the disk and in RAM; files are stored unchanged" in report.note
    monkeypatch.setattr(file_plan, "memory_limits", lambda read: SimpleNamespace(available_bytes=20_000))
    report = pack(tree, tmp_path / "sized.h5", size=24, quality=60, progress=False)
    assert (report.encoding, report.sample_shape) == ("jpeg", (24, 24, 3))
    assert "fit on the disk and in RAM" in report.note
    assert stored(report.path) == [
        encode_jpeg(decode_image(file.read_bytes(), 3, (24, 24)), 60) for file in files_of(tree)
    ]


@pytest.mark.parametrize("encoding", ["raw", "source", "jpeg"])
def test_the_same_pack_is_reused_without_any_change_of_files(tmp_path, tree, file_hook, encoding):
    path = packed(tree, tmp_path / "p.h5", encoding=encoding)
    before, listed = path.stat(), names_in(tmp_path)
    changes = ChangeHook(0, fill_disk)
    file_hook(changes)
    report = pack(tree, path, encoding=encoding, progress=False)
    assert "Already packed" in repr(report)
    after = path.stat()
    assert (report.reused, changes.count, names_in(tmp_path)) == (True, 0, listed)
    assert (after.st_ino, after.st_mtime_ns, after.st_atime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        after.st_atime_ns,
    )
    assert pack(tree, path, encoding=encoding, seed=9, max_bad=7, threads=2, progress=False).reused


def test_another_encoding_or_quality_is_another_pack(tmp_path, tree):
    path = packed(tree, tmp_path / "p.h5", encoding="raw")
    before = path.read_bytes()
    others = ({"encoding": "source"}, {"encoding": "jpeg"}, {"quality": 80}, {"on_bad": "skip"}, {"fields": ["path"]})
    for options in others:
        assert_refused(TargetExists, "other samples or options", tree, path, **{"encoding": "raw", **options})
    assert path.read_bytes() == before


REFUSED = {
    "encoding": ["png", None],
    "quality": [0, 101, 90.5],
    "channels": [2, 4],
    "on_bad": ["ignore"],
    "max_bad": [-1, float("nan"), float("inf"), True],
    "size": [True, "224", 22.5, 0],
    "threads": ["4", 0],
    "seed": [1.5],
}


def test_invalid_options_are_errors_before_anything_is_written(tmp_path, tree):
    for name, values in REFUSED.items():
        for value in values:
            match = f"^Cannot pack .*{name}={value!r}"
            assert_refused(InvalidOption, match, tree, tmp_path / "p.h5", **{name: value})
    for options, match in (
        ({"encoding": "source", "size": 8}, "encoding='source' stores files unchanged, but size= is given"),
        ({"size": (1, 2, 3)}, r"size=\(1, 2, 3\)"),
        ({"size": (4, -1)}, r"size=\(4, -1\)"),
        ({"fields": {"X": "path"}}, "a field is named 'X'"),
        ({"fields": {"a/b": "path"}}, "a field is named 'a/b'"),
        ({"fields": {"Z": 3}}, "the source of the field 'Z' is 3"),
        ({"fields": ["age"]}, "no column 'age'"),
    ):
        assert_refused(InvalidOption, f"^Cannot pack .*{match}", tree, tmp_path / "p.h5", **options)
    for splits in ({"train": 0.5}, {"train": 1.2, "val": -0.2}, {"train": 0.5, "eval": 0.5}):
        assert_refused(InvalidOption, "^Cannot split", tree, tmp_path / "p.h5", splits=splits)


def test_an_image_too_large_for_jpeg_is_a_bad_file(tmp_path, tree):
    Image.new("L", (65_501, 1)).save(tree / "bees" / "long.png")
    with pytest.raises(BadImage, match=r"Cannot pack 'bees/long.png' .*65501x1 pixels, but a JPEG"):
        pack(tree, tmp_path / "p.h5", encoding="jpeg", progress=False)
    assert names_in(tmp_path) == ["tree"]


def arrays(folder: Path, values: list[np.ndarray]) -> Path:
    for number, value in enumerate(values):
        path = folder / ("even", "odd")[number % 2] / f"{number:03d}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, value)
    return folder


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "|u1", "<i2", "|b1", "<c8", "<f2"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 2), (2, 0)])
def test_npy_arrays_are_stored_unchanged(tmp_path, dtype, shape):
    values = [np.random.default_rng(number).integers(0, 200, shape).astype(dtype) for number in range(6)]
    source = arrays(tmp_path / "tree", values)
    report = pack(source, tmp_path / "p.h5", progress=False)
    found = read_pack(report.path).map("X_train")
    assert (found.dtype, found.shape) == (np.dtype(dtype), (6, *shape))
    assert np.array_equal(found, np.stack([values[number] for number in (0, 2, 4, 1, 3, 5)]))
    assert verify(report.path, progress=False).is_good
    assert labels_of(report.path) == [0, 0, 0, 1, 1, 1]


def test_npy_arrays_in_fortran_order_are_stored_in_c_order(tmp_path):
    values = [np.asfortranarray(np.arange(12).reshape(3, 4) + number) for number in range(2)]
    path = packed(arrays(tmp_path / "tree", values), tmp_path / "p.h5")
    assert np.array_equal(np.stack(stored(path)), np.stack(values))


@pytest.mark.parametrize("odd", [np.zeros((3, 5), "<f4"), np.zeros((3, 4), "<f8")], ids=["shape", "dtype"])
def test_an_npy_array_that_differs_is_an_error_without_advice_about_images(tmp_path, monkeypatch, odd):
    values = [np.zeros((3, 4), "<f4"), np.ones((3, 4), "<f4"), odd]
    written: list[PackPlan] = []
    write_plan = pack_call.write_plan

    def noted(plan: PackPlan, *others: Any) -> WrittenPack:
        written.append(plan)
        return write_plan(plan, *others)

    monkeypatch.setattr(pack_call, "write_plan", noted)
    with pytest.raises(BadImage, match=r"Cannot pack 'even/002.npy' of .* in the first sample.*arrays") as caught:
        pack(arrays(tmp_path / "tree", values), tmp_path / "p.h5", progress=False)
    assert "size=" not in str(caught.value)
    assert len(written) == 1, "writing again cannot help"
    assert names_in(tmp_path) == ["tree"]


def test_image_options_are_errors_for_npy_arrays(tmp_path):
    source = arrays(tmp_path / "tree", [np.zeros(3)] * 2)
    for options in ({"encoding": "source"}, {"encoding": "jpeg"}, {"size": 4}):
        assert_refused(InvalidOption, r"all samples are \.npy arrays", source, tmp_path / "p.h5", **options)


def test_npy_arrays_without_numbers_are_errors(tmp_path):
    for value in (np.array(["a"]), np.zeros(2, "M8[s]"), np.zeros(2, [("a", "i4"), ("b", "f4")])):
        source = arrays(tmp_path / "tree", [value] * 2)
        assert_refused(
            BadSource,
            r"Cannot pack .* the first array has dtype .*; expected a numeric dtype",
            source,
            tmp_path / "p.h5",
        )


def test_probed_images_are_not_kept_in_memory(tmp_path, tree, monkeypatch):
    images: list[weakref.ref[np.ndarray]] = []
    most = 0

    def decoded(data: bytes, channels: Any) -> np.ndarray:
        nonlocal most
        image = decode_image(data, channels)
        images.append(weakref.ref(image))
        most = max(most, sum(one() is not None for one in images))
        return image

    monkeypatch.setattr(file_plan, "decode_image", decoded)
    packed(tree, tmp_path / "p.h5")
    assert len(images) == 12
    assert most <= 2
