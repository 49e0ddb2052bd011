"""Errors in the launcher appear before data is copied, name the source that was entered, and use the form's labels."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import ipywidgets
import pytest
from launchers import click, described, fill, pointed
from PIL import Image

import colabkit
from colabkit.errors import BadImage, BadSource, ColabkitError, InvalidOption, SourceMissing
from colabkit.foundation import Code, Text, call, cannot, omit, option
from colabkit.notebook.launcher.panel import Launcher
from colabkit.notebook.launcher.settings import FIELDS, FieldWords, Settings, in_form


@pytest.fixture
def panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Return a launcher with one epoch, small batches and a separate folder for local copies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    panel = Launcher(ipywidgets)
    fill(panel, epochs="1", batch_size="8")
    yield panel
    panel.close()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(10):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    return folder


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_images_without_classes_are_reported_at_once_and_rejected_before_they_are_copied(
    panel: Launcher, photos: Path, kind: str
) -> None:
    source = photos if kind == "folder" else Path(shutil.make_archive(str(photos), "zip", photos))
    fill(panel, source=source.name)
    assert f"Cannot label {source.name!r}: " in described(panel)
    assert pointed(panel) == ["labels"]
    assert panel.view.more_switch.value
    message = click(panel, "prepare")
    assert message.startswith(f"Cannot label {source.name!r}: ")
    assert message.endswith("Labels: none if you need none.")
    assert pointed(panel) == ["labels"]
    assert panel.results == {}
    assert not any(path.suffix in (".png", ".h5") for path in Path("local").rglob("*"))
    fill(panel, labels="none")
    assert "10 images, no labels" in described(panel)
    assert click(panel, "prepare").startswith("Done")
    assert pointed(panel) == []


def test_data_that_cannot_be_trained_on_is_rejected_before_it_is_copied(panel: Launcher, photos: Path) -> None:
    fill(panel, source=photos.name, labels="none")
    message = click(panel, "train")
    assert "on 'photos': the images have no labels; expected one class per image. Check Labels, or train" in message
    assert pointed(panel) == ["labels"]
    assert panel.results == {}


def test_a_table_is_described_and_packed_once_its_column_of_paths_and_their_folder_are_filled_in(
    panel: Launcher, photos: Path
) -> None:
    rows = [f"{number}.png,{'ab'[number % 2]}" for number in range(10)]
    Path("table.csv").write_text("\n".join(["where_is_it,label", *rows]))
    fill(panel, source="table.csv")
    assert "Name the column that holds the paths with Path column." in described(panel)
    fill(panel, path_column="where_is_it")
    assert "set the folder of relative paths with Folder of paths" in described(panel)
    assert pointed(panel) == ["root"]
    fill(panel, root=photos.name)
    assert "10 images, 2 classes" in described(panel)
    assert pointed(panel) == []
    for action in ("stage", "prepare"):
        assert click(panel, action).startswith("Done")
    fill(panel, source=photos.name)
    assert "Path column: where_is_it applies only to a table of paths. Leave Path column empty." in described(panel)
    assert pointed(panel) == ["path_column"]


def test_a_folder_without_images_is_rejected_before_it_is_copied(panel: Launcher, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    fill(panel, source="notes")
    assert click(panel, "prepare").startswith("Cannot label 'notes': ")
    assert pointed(panel) == ["source"]
    assert panel.results == {}
    assert click(panel, "stage").startswith("Done")


def test_existing_splits_of_the_source_are_reported_before_it_is_copied(panel: Launcher, tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/1.png", "test/a/1.png", "test/b/1.png"):
        (tmp_path / "birds" / name).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "birds" / name)
    fill(panel, source="birds", splits="train=0.5,test=0.5")
    assert "'birds'" in click(panel, "train")
    assert "eave Splits empty" in panel.view.said
    assert pointed(panel) == ["splits"]
    assert panel.results == {}
    fill(panel, splits="")
    assert "train/test folders found" in described(panel)


@pytest.mark.parametrize("values", [{"size": "wide"}, {"splits": "train=x"}])
def test_an_invalid_text_in_a_field_is_reported_before_anything_is_copied(
    panel: Launcher, image_tree: Path, values: dict[str, str]
) -> None:
    fill(panel, source=str(image_tree), **values)
    ((name, text),) = values.items()
    assert click(panel, "train").startswith(f"Cannot use the form: {FIELDS[name]} is {text!r}; expected ")
    assert pointed(panel) == [name]
    assert panel.results == {}


def test_images_shrunk_far_below_their_median_are_warned_about(panel: Launcher, image_tree: Path) -> None:
    for path in image_tree.rglob("*.png"):
        Image.new("RGB", (400, 300)).save(path)
    fill(panel, source=str(image_tree))
    assert "⚠" not in described(panel)
    fill(panel, size="16")
    assert "Images are shrunk to 16x16, far below their median of 300x400 pixels (height x width)" in described(panel)
    fill(panel, size="auto")
    assert "⚠" not in described(panel)


def test_an_error_about_a_bad_image_names_the_source_that_you_entered(panel: Launcher, image_tree: Path) -> None:
    broken = min(image_tree.rglob("*.png"))
    broken.write_bytes(b"no image")
    fill(panel, source=str(image_tree), on_bad="raise")
    assert f"of {str(image_tree)!r}" in click(panel, "prepare")
    assert "Unreadable files: skip" in panel.view.said
    assert pointed(panel) == ["on_bad"]


@pytest.mark.parametrize(
    ("error", "next_step", "shown", "fields"),
    [
        (InvalidOption, ("Use ", option("size", (240, 320))), "Use Image size: 240x320.", ["size"]),
        (
            InvalidOption,
            (omit("size"), ", or use ", option("batch_size", 8)),
            "Use Image size: auto, or use Batch size: 8.",
            ["size", "batch_size"],
        ),
        (
            InvalidOption,
            ("Use ", option("splits", {"train": 0.8, "test": 0.2})),
            "Use Splits: train=0.8,test=0.2.",
            ["splits"],
        ),
        (InvalidOption, (omit("splits"),), "Leave Splits empty.", ["splits"]),
        (InvalidOption, ("Check ", option("size")), "Check Image size.", ["size"]),
        (InvalidOption, ("Use ", option("labels", ["a", "b"])), "Use Labels: a,b.", ["labels"]),
        (BadImage, ("Or use ", option("on_bad", "skip")), "Or use Unreadable files: skip.", ["on_bad"]),
        (BadImage, ("Or increase ", option("max_bad")), "Or increase Unreadable limit.", ["max_bad"]),
        (BadSource, ("Use ", option("labels", None)), "Use Labels: none.", ["labels"]),
        # Advice that names no field stays unchanged, and the form marks the field that caused the error.
        (BadSource, "Rename 'a size=3.png'", "Rename 'a size=3.png'.", ["source"]),
        (SourceMissing, "Check the path", "Check the path.", ["source"]),
        # Advice that no field can express is written as a magic or as Python.
        (InvalidOption, ("Run ", call("mount")), "Run %mount.", []),
        (InvalidOption, ("Use ", option("refresh", True)), "Use refresh=True.", []),
        (InvalidOption, ("Use ", option("labels", Code("label_of"))), "Use labels=label_of.", ["labels"]),
    ],
)
def test_a_message_names_fields_and_marks_them(
    error: type[ColabkitError], next_step: Text, shown: str, fields: list[str]
) -> None:
    found = "'a. labels=None' is a file"
    text, names = in_form(error(cannot("pack 'size=3'", found, "", next_step)))
    assert text == f"Cannot pack 'size=3': {found}. {shown}"
    assert list(names) == fields


@pytest.mark.parametrize(
    ("action", "next_step", "shown"),
    [
        ("stage", ("Use ", option("to", "disk")), "Use Copy to: disk."),
        ("stage", ("Use ", option("to", "tmpfs")), "Use Copy to: RAM disk."),
        ("stage", ("Check ", option("to")), "Check the menu beside Copy."),
        ("stage", omit("to"), "Omit to=."),
        ("prepare", ("Use ", option("to", "packs")), "Use to='packs'."),
        ("train", ("Use ", option("to", "work")), "Use Save to: work."),
    ],
)
def test_only_a_message_of_training_names_the_folder_to_save_to(
    panel: Launcher, monkeypatch: pytest.MonkeyPatch, action: str, next_step: Text, shown: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise InvalidOption(cannot("do it", "it is a test", "", next_step))

    monkeypatch.setattr(colabkit, "train_on" if action == "train" else action, fails)
    assert click(panel, action) == f"Cannot do it: it is a test. {shown}"
    assert pointed(panel) == (["to"] if action == "train" else [])


def test_a_message_marks_the_fields_of_all_its_parts() -> None:
    found = (option("size", 0), " with ", option("model", "small"))
    text, names = in_form(InvalidOption(cannot("pack", found, "", ("Check ", option("epochs")))))
    assert text == "Cannot pack: Image size: 0 with Network: small. Check Epochs."
    assert names == ("epochs", "size", "model")


def test_an_error_without_parts_is_shown_unchanged() -> None:
    assert in_form(BadImage("'a labels=None' is not an image")) == ("'a labels=None' is not an image", ())


def test_a_field_with_a_default_is_not_left_empty() -> None:
    for name in FIELDS:
        default = getattr(Settings(), name)
        assert FieldWords().omit(name) == (
            f"use {FIELDS[name]}: {default}" if default else f"leave {FIELDS[name]} empty"
        )


def test_an_error_that_names_no_field_marks_the_field_that_it_is_about(panel: Launcher, image_tree: Path) -> None:
    fill(panel, source=str(image_tree), labels="species")
    assert "'species'" in described(panel)
    assert pointed(panel) == ["labels"]
    fill(panel, labels="auto", splits="foo=1")
    assert "'foo'" in described(panel)
    assert pointed(panel) == ["splits"]
