"""A pack displays a picture of samples, and a small table as text and HTML."""

from __future__ import annotations

import base64
import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from contract import make_pack, make_shards, seal_fields
from pictures import png
from PIL import Image

from colabkit.errors import Corrupt, InvalidOption, MissingPackage, MissingSplit
from colabkit.packs.dataset.opened_pack import Pack, open_pack
from colabkit.packs.dataset.sample_grid import _grid

RANDOM = np.random.default_rng(2)
# Left edge, top edge and side length of the first tile, in pixels.
LEFT, TOP, SMALL = 2 * 16, 2 * (16 + 13 + 12), 2 * 112


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """Return a pack of single-color images; the color identifies the sample."""
    images = np.full((50, 8, 8, 3), 40, "|u1") + np.arange(50, dtype="|u1")[:, None, None, None] * 4
    fields = {"X": {"train": images}, "Y": {"train": np.arange(50) % 3}}
    return open_pack(seal_fields(tmp_path / "p.h5", fields, {"X": "image"}, "class"))


def shown(path: Path, fields: dict, content: str, kind: str, **meta: object) -> Image.Image:
    return open_pack(seal_fields(path, fields, {"X": content}, kind, **meta)).show(n=1).image


def ink(image: Image.Image, box: tuple[int, int, int, int]) -> int:
    return int((np.asarray(image.crop(box).convert("L")) < 120).sum())


def test_a_notebook_displays_the_picture_at_half_its_pixel_size(pack):
    picture = pack.show(n=9)
    data, size = picture._repr_png_()
    read = Image.open(io.BytesIO(data))
    assert read.size == picture.image.size == (2 * size["width"], 2 * size["height"])
    assert picture._repr_jpeg_() is None
    assert repr(picture) == "Picture of 9 samples"


def test_pictures_of_large_photos_are_jpeg_to_keep_notebooks_small(tmp_path):
    picture = open_pack(make_pack(tmp_path / "p.h5", (400, 400, 3), train=4)).show(n=4)
    assert picture._repr_png_() is None
    data, size = picture._repr_jpeg_()
    assert Image.open(io.BytesIO(data)).size == (2 * size["width"], 2 * size["height"])


def test_marimo_displays_the_picture_at_half_its_pixel_size(pack, tmp_path):
    photos = open_pack(make_pack(tmp_path / "photos.h5", (400, 400, 3), train=4))
    for kind, picture in (("png", pack.show(n=9)), ("jpeg", photos.show(n=4))):
        mime, html = picture._mime_()
        assert mime == "text/html"
        (data,) = re.findall(rf'^<img src="data:image/{kind};base64,([^"]+)"', html)
        assert Image.open(io.BytesIO(base64.b64decode(data))).size == picture.image.size
        width, height = (side // 2 for side in picture.image.size)
        assert f'width="{width}" height="{height}"' in html


def test_each_tile_shows_its_sample(pack):
    picture = pack.show(n=16, seed=3)
    assert len(set(picture.indices)) == 16
    assert list(picture.indices) == sorted(picture.indices)
    step, down = SMALL + 2 * 12, SMALL + 2 * (13 + 10 + 12)
    for place, number in enumerate(picture.indices):
        at = (LEFT + place % 4 * step + SMALL // 2, TOP + place // 4 * down + SMALL // 2)
        assert picture.image.getpixel(at) == (40 + 4 * number,) * 3


@pytest.mark.full
def test_the_seed_determines_the_samples(pack):
    assert pack.show(n=4, seed=1).indices == pack.show(n=4, seed=1).indices != pack.show(n=4, seed=2).indices
    assert len(pack.show().indices) == 16
    assert pack.show(n=99).indices == tuple(range(50))


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 11, 16, 24, 40, 50])
def test_the_grid_fits_a_page_for_any_number_of_samples(pack, n):
    width, height = pack.show(n=n).image.size
    assert width <= 2 * 920
    assert 0.15 < height / width < 1.4


def test_the_grid_has_no_empty_cells_if_possible():
    for n, columns, rows in [(3, 3, 1), (6, 3, 2), (8, 4, 2), (12, 4, 3), (16, 4, 4), (40, 8, 5)]:
        found, wide, high = _grid([(32, 32)] * n)
        assert (found, -(-n // found), wide) == (columns, rows, high)


def test_invalid_options_damage_and_missing_matplotlib_raise(pack, monkeypatch):
    with pytest.raises(InvalidOption, match="n=0"):
        pack.show(n=0)
    with pytest.raises(MissingSplit):
        pack.show("dev")
    found = pack.info.data_sets["X_train"]
    with pack.path.open("r+b") as file:
        file.seek(found.offset)
        file.write(b"\1")
    with pytest.raises(Corrupt, match=r"train\[0\]"):
        open_pack(pack.path).show(n=50)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackage, match=r"Cannot draw the samples.*Run pip install matplotlib"):
        pack.show(n=1)


@pytest.mark.parametrize(
    ("content", "samples"),
    [
        ("image", np.zeros((3, 8, 8, 1), "|u1")),
        ("image", [b"", b""]),
        ("array", RANDOM.normal(size=(3, 9, 9))),
        ("array", RANDOM.normal(size=(3, 3, 9, 9)).astype("<f4")),
        ("array", np.full((3, 4, 4), np.nan)),
        ("array", np.full((3, 4, 4), 2.0)),
        ("array", RANDOM.normal(size=(3, 5, 6, 7, 8)).astype("<f2")),
        ("array", RANDOM.normal(size=(3, 40)).astype("<c8")),
        ("array", np.arange(3)),
        ("array", RANDOM.integers(0, 2, (3, 4, 4)).astype(bool)),
        ("text", [b"some text", b"more"]),
    ],
)
def test_samples_of_every_kind_are_drawn(tmp_path, content, samples):
    image = shown(tmp_path / "p.h5", {"X": {"train": samples}}, content, "none")
    assert image.width >= 2 * 112


def test_floats_are_scaled_from_minimum_to_maximum(tmp_path):
    image = shown(tmp_path / "p.h5", {"X": {"train": np.array([[[-7.0, 3.0], [3.0, np.nan]]])}}, "array", "none")
    quarter = SMALL // 4
    assert [image.getpixel((LEFT + x * quarter, TOP + quarter))[0] for x in (1, 3)] == [0, 255]


def test_large_images_keep_their_proportions(tmp_path):
    wide = np.zeros((300, 600, 3), "|u1")
    wide[:, :, 0] = 200
    image = shown(tmp_path / "p.h5", {"X": {"train": [png(wide)]}}, "image", "none")
    red = np.asarray(image)[:, :, 0].astype(int) - np.asarray(image)[:, :, 1] > 100
    rows, columns = np.flatnonzero(red.any(1)), np.flatnonzero(red.any(0))
    assert (np.ptp(columns) + 1) / (np.ptp(rows) + 1) == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "label"), [("class", 1), ("multilabel", [0, 1, 1]), ("multilabel", [0, 0, 0]), ("regression", 0.25)]
)
def test_labels_are_drawn_below_the_samples(tmp_path, kind, label):
    dtype = {"class": "<i8", "multilabel": "|u1", "regression": "<f4"}[kind]
    fields = {"X": {"train": np.full((1, 8, 8, 3), 255, "|u1")}, "Y": {"train": np.array([label], dtype)}}
    image = shown(tmp_path / "p.h5", fields, "image", kind)
    assert ink(image, (LEFT, TOP + SMALL + 4, LEFT + SMALL, image.height)) > 20


@pytest.mark.parametrize(
    "name", ["a" * 300, "ein sehr langer Name einer Klasse", "очень длинное имя класса", "\n\0", ""]
)
def test_long_class_names_are_shortened_to_the_tile(tmp_path, name):
    fields = {"X": {"train": np.full((1, 8, 8, 3), 255, "|u1")}, "Y": {"train": np.zeros(1, "<i8")}}
    image = shown(tmp_path / "p.h5", fields, "image", "class", classes=[name])
    assert ink(image, (LEFT + SMALL + 2, TOP + SMALL + 4, image.width, image.height)) == 0
    assert ink(image, (LEFT, TOP + SMALL + 4, LEFT + SMALL, image.height)) > (20 if name else -1)


def test_the_table_shows_splits_layout_bytes_encoding_source_and_seal(tmp_path):
    fields = {"X": {"train": [b"abc"] * 5}, "Y": {"train": np.arange(5) % 2}, "Z": {"train": np.arange(5)}}
    about = {"bad": [["train", 2, "a.jpg", "cut"]], "left_out": [["b", "hidden"], ["c", "hidden"]]}
    contents = {"X": "image", "Z": "array"}
    pack = open_pack(seal_fields(tmp_path / "p.h5", fields, contents, "class", source="gs://birds", **about))
    for text in (repr(pack), pack._repr_html_()):
        for part in ("train", "5", "image files", "15 B", "source", "gs://birds", pack.info.seal[:16], "X, Y, Z"):
            assert part in text
    assert "bad 1 sample (first 'a.jpg'), left out 2 files (first 'b')" in repr(pack)
    assert (pack.encoding, pack.splits) == ("source", {"train": 5})


def test_the_table_shows_shapes_of_raw_packs_and_the_number_of_shards(tmp_path):
    text = repr(open_pack(make_pack(tmp_path / "raw.h5", (6, 5, 3), train=20, test=7)))
    assert "uint8 20 x 6 x 5 x 3" in text
    assert "630 B" in text
    text = repr(open_pack(make_shards(tmp_path / "p.h5", {"train": 20}, {"train": 3})))
    assert "in 2 shards" in text
    assert "raw 23 x 4 x 3 x 3" in text
    header, row = text.splitlines()[1:3]
    assert header.index("bytes") == row.index("828")


def test_names_are_escaped_in_html(tmp_path):
    fields = {"X": {"train": np.zeros((1, 2, 2, 3), "|u1")}}
    pack = open_pack(seal_fields(tmp_path / "p.h5", fields, {"X": "image"}, "none", source="<script>x</script>"))
    assert "<script>" not in pack._repr_html_()
