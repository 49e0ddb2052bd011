"""The demo runs the full pipeline, and reports only figures from this run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trees import leftovers, make_tree

import colabkit
from colabkit.errors import BadImage, BadSource, InvalidOption, SourceMissing, TargetExists
from colabkit.foundation import usable_cpus
from colabkit.notebook.command_line import main


@pytest.fixture(scope="module")
def digits() -> colabkit.DemoReport:
    return colabkit.demo(latency_s=0.002, progress=False)


def test_the_demo_learns_the_digits(digits: colabkit.DemoReport) -> None:
    assert (digits.samples, digits.classes, digits.sample_shape) == (1797, 10, (8, 8, 3))
    assert digits.accuracy >= 0.97


def test_the_table_shows_rates_waiting_parts_and_accuracy(digits: colabkit.DemoReport) -> None:
    text = repr(digits)
    for name in ("training, images/s", "waiting for data", "stage", "pack", "train", "gather", "test accuracy"):
        assert any(line.strip().startswith(name) for line in text.splitlines()), name
    assert f"{digits.packed_images_per_s:,.0f}" in text
    assert 0 <= digits.packed_wait_share <= 1
    assert 0 < digits.naive_wait_share <= 1
    assert json.dumps(digits.to_dict())


def test_every_figure_comes_from_the_run(digits: colabkit.DemoReport) -> None:
    # At most this many threads are busy at the same time.
    threads = max(1, round(usable_cpus()))
    busy_s = sum(digits.part_s[name] for name in ("gather", "augment"))
    assert digits.packed_images_per_s <= threads * 3 * 1437 / busy_s
    assert digits.part_s["train"] > 0
    assert 0 <= digits.packed_wait_share <= 1


@pytest.mark.full
@pytest.mark.parametrize("prefixes", [("",), ("train", "val")])
def test_folders_with_and_without_split_folders_are_accepted(tmp_path: Path, prefixes: tuple[str, ...]) -> None:
    for prefix in prefixes:
        make_tree(tmp_path / "tree", 6, prefix=prefix)
    report = colabkit.demo(tmp_path / "tree", epochs=1, latency_s=0, to=tmp_path / "kept", progress=False)
    assert report.samples == 18 * len(prefixes)
    assert report.path == tmp_path / "kept"
    assert colabkit.verify(tmp_path / "kept" / "pack.h5", progress=False).damaged == ()


@pytest.mark.full
def test_images_of_several_sizes_are_resized_to_one_size(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree" / "train", 4, (12, 20))
    make_tree(tmp_path / "tree" / "test", 4, (30, 10))
    assert colabkit.demo(tmp_path / "tree", epochs=1, latency_s=0, progress=False).sample_shape == (64, 64, 3)
    report = colabkit.demo(tmp_path / "tree", epochs=1, latency_s=0, size=(9, 7), progress=False)
    assert report.sample_shape == (9, 7, 3)


def _nothing(folder: Path) -> Path:
    return folder / "nothing"


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def _flat(folder: Path) -> Path:
    make_tree(folder / "made", 2)
    (folder / "made" / "ants").rename(folder / "flat")
    return folder / "flat"


def _no_image(folder: Path) -> Path:
    tree = make_tree(folder / "tree", 6)
    for number in range(6):
        (tree / "bees" / f"{number:03d}.png").write_text("<html>quota exceeded</html>")
    return tree


def _one_bad_file(folder: Path) -> Path:
    tree = make_tree(folder / "tree", 40)
    # The demo reads the sizes of only some files in advance, and this broken file is not among them.
    broken = tree / "bees" / "021.png"
    broken.write_bytes(broken.read_bytes()[:60])
    return tree


def _cut_short(folder: Path) -> Path:
    import colabkit.storage.sources.registry

    whole = colabkit.storage.sample_archive("digits").read_bytes()
    (folder / "cut.zip").write_bytes(whole[: len(whole) // 2])
    return folder / "cut.zip"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (_nothing, SourceMissing, "nothing"),
        (_empty, BadSource, "empty"),
        (_flat, BadSource, "class"),
        (_no_image, BadImage, "web page"),
        (_one_bad_file, BadImage, "021.png"),
        (_cut_short, colabkit.errors.BadArchive, "cut.zip"),
    ],
)
def test_bad_input_is_a_one_line_error_and_leaves_no_files(
    make, error, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=words):
        colabkit.demo(data, latency_s=0, to=tmp_path / "kept", progress=False)
    assert leftovers(tmp_path) == []
    assert main(["demo", "--data", str(data), "--latency-s", "0", "--no-progress"]) == 1
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1
    assert words in shown.err
    assert sorted(path for path in tmp_path.rglob("*") if "kept" not in path.parts) == before


@pytest.mark.parametrize("options", [{"epochs": 0}, {"epochs": 1.5}, {"size": 0}, {"latency_s": -1}])
def test_invalid_options_are_rejected(options: dict) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        colabkit.demo(**options)


def test_a_folder_that_is_not_empty_is_rejected_as_destination(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(TargetExists, match="not empty"):
        colabkit.demo(to=tmp_path, progress=False)


def test_a_folder_without_training_images_is_a_one_line_error(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree" / "val", 2)
    make_tree(tmp_path / "tree" / "test", 2)
    with pytest.raises(BadSource, match="the only splits are val, test"):
        colabkit.demo(tmp_path / "tree", latency_s=0, progress=False)
