"""Errors in the launcher appear before data is copied, name the source that was entered, and use the form's labels."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import ipywidgets
import pytest
from launchers import click, fill, pointed
from PIL import Image

from colabkit.errors import BadImage, BadSource, ColabkitError, InvalidOption, SourceMissing, TargetExists
from colabkit.foundation import Code, Text, call, cannot, omit, option
from colabkit.notebook.launcher.panel import Launcher
from colabkit.notebook.launcher.pipeline import Action
from colabkit.notebook.launcher.settings import FIELDS, PACK_OPTIONS, FieldWords, Settings, in_form
from colabkit.notebook.verbs import VERBS
from colabkit.storage.sources.folder import FolderSource


@pytest.fixture
def panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Return a launcher with one epoch, small batches and a separate folder for local copies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    panel = Launcher(ipywidgets)
    fill(panel, to="disk", epochs=1, batch_size=8)
    yield panel
    panel.close()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(10):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    return folder


def archived(folder: Path) -> Path:
    return Path(shutil.make_archive(str(folder), "zip", folder))


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_images_without_classes_are_rejected_before_they_are_copied_under_the_name_that_you_entered(
    panel: Launcher, photos: Path, kind: str
) -> None:
    source = photos if kind == "folder" else archived(photos)
    fill(panel, source=source.name)
    message = click(panel, "pack")
    assert message.startswith(f"Cannot label {source.name!r}: '")
    assert message.endswith("Labels: none.")
    assert pointed(panel) == ["labels"]
    assert panel.view.options_switch.value
    assert panel.results == {}
    assert not any(path.is_file() for path in Path("local").rglob("*"))
    fill(panel, labels="none")
    assert click(panel, "pack").startswith("Done")
    assert pointed(panel) == []


def test_data_that_cannot_be_trained_on_is_rejected_before_it_is_copied(panel: Launcher, photos: Path) -> None:
    fill(panel, source="photos")
    assert click(panel, "train").endswith("Labels: none when you pack.")
    fill(panel, labels="none")
    message = click(panel, "train")
    assert "on 'photos': the images have no labels; expected one class per image. " in message
    assert "Labels" in message
    assert pointed(panel) == ["labels"]
    assert panel.results == {}


def test_a_folder_without_images_is_rejected_before_it_is_copied(panel: Launcher, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    fill(panel, source="notes")
    assert click(panel, "pack").startswith("Cannot label 'notes': ")
    assert pointed(panel) == ["source"]
    assert panel.results == {}
    assert click(panel, "stage").startswith("Done")


def test_existing_splits_of_the_source_are_reported_before_it_is_copied(panel: Launcher, tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/1.png", "test/a/1.png", "test/b/1.png"):
        (tmp_path / "birds" / name).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "birds" / name)
    fill(panel, source="birds")
    assert "'birds'" in click(panel, "train")
    assert "eave Splits empty" in panel.view.said
    assert pointed(panel) == ["splits"]
    assert panel.results == {}
    fill(panel, splits="")
    assert click(panel, "train").startswith("Done")


@pytest.mark.parametrize("values", [{"size": "wide"}, {"splits": "train=x"}])
def test_an_invalid_text_in_a_field_is_reported_before_anything_is_copied(
    panel: Launcher, image_tree: Path, values: dict[str, str]
) -> None:
    fill(panel, source=str(image_tree), **values)
    ((name, text),) = values.items()
    assert click(panel, "pack").startswith(f"Cannot pack the source: {FIELDS[name]} is {text!r}; expected ")
    assert pointed(panel) == [name]
    assert panel.results == {}


def test_the_early_check_lists_the_source_only_once(
    panel: Launcher, image_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, listing = [], FolderSource.list

    def counted(source: FolderSource, *given: object) -> object:
        listed.append(source.name)
        return listing(source, *given)

    monkeypatch.setattr(FolderSource, "list", counted)
    fill(panel, source=str(image_tree))
    assert click(panel, "pack").startswith("Done")
    assert listed.count(str(image_tree)) == 1


def test_the_names_of_shards_in_a_folder_are_not_taken_for_labels(panel: Launcher, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.tfrecord").write_bytes(b"")
    fill(panel, source="shards")
    click(panel, "pack")
    assert list(panel.results) == ["staged"]


def test_a_table_is_labelled_by_its_column(panel: Launcher, photos: Path) -> None:
    rows = [f"photos/{number}.png,{'ab'[number % 2]}" for number in range(10)]
    Path("table.csv").write_text("\n".join(["path,label", *rows]))
    fill(panel, source="table.csv", splits="train=0.5,test=0.5")
    assert click(panel, "train").startswith("Done")
    assert panel.results["packed"].classes == ("a", "b")


def test_an_error_about_a_bad_image_names_the_source_that_you_entered(panel: Launcher, image_tree: Path) -> None:
    broken = min(image_tree.rglob("*.png"))
    broken.write_bytes(b"no image")
    fill(panel, source=str(image_tree))
    assert f"of {str(image_tree)!r}" in click(panel, "pack")
    assert "Bad files: skip" in panel.view.said
    assert pointed(panel) == ["on_bad"]


@pytest.mark.parametrize(
    ("error", "next_step", "action", "shown", "fields"),
    [
        (InvalidOption, ("Use ", option("size", (240, 320))), "pack", "Use Image size: 240x320.", ["size"]),
        (
            InvalidOption,
            (omit("size"), ", or use ", option("encoding", "jpeg")),
            "pack",
            "Leave Image size empty, or use Encoding: jpeg.",
            ["size", "encoding"],
        ),
        (
            InvalidOption,
            ("Use ", option("splits", {"train": 0.8, "test": 0.2})),
            "pack",
            "Use Splits: train=0.8,test=0.2.",
            ["splits"],
        ),
        (InvalidOption, ("Check ", option("size")), "pack", "Check Image size.", ["size"]),
        (InvalidOption, ("Use ", option("labels", ["a", "b"])), "pack", "Use Labels: a,b.", ["labels"]),
        (BadImage, ("Or use ", option("on_bad", "skip")), "pack", "Or use Bad files: skip.", ["on_bad"]),
        (BadSource, ("Use ", option("labels", None)), "pack", "Use Labels: none.", ["labels"]),
        (BadSource, ("Use ", option("labels", None)), "train", "Use Labels: none when you pack.", ["labels"]),
        # Advice that names no field stays unchanged, and the form marks the field that caused the error.
        (BadSource, "Rename 'a size=3.png'", "pack", "Rename 'a size=3.png'.", ["source"]),
        (SourceMissing, "Check the path", "stage", "Check the path.", ["source"]),
        (TargetExists, ("Or use ", option("overwrite", True)), "pack", "Or use --overwrite.", ["work"]),
        # Advice that no field can express is written as a magic or as Python.
        (InvalidOption, ("Run ", call("mount")), "stage", "Run %mount.", []),
        (InvalidOption, ("Use ", option("refresh", True)), "stage", "Use refresh=True.", []),
        (InvalidOption, ("Use ", option("labels", Code("label_of"))), "pack", "Use labels=label_of.", ["labels"]),
        (InvalidOption, ("Use ", option("size", None)), "pack", "Use size=None.", ["size"]),
    ],
)
def test_a_message_names_fields_and_marks_them(
    error: type[ColabkitError], next_step: Text, action: Action, shown: str, fields: list[str]
) -> None:
    found = "'a. labels=None' is a file"
    text, names = in_form(error(cannot("pack 'size=3'", found, "", next_step)), action)
    assert text == f"Cannot pack 'size=3': {found}. {shown}"
    assert list(names) == fields


def test_a_message_marks_the_fields_of_all_its_parts() -> None:
    found = (option("size", 0), " with ", option("encoding", "source"))
    text, names = in_form(InvalidOption(cannot("pack", found, "", ("Check ", option("channels")))), "pack")
    assert text == "Cannot pack: Image size: 0 with Encoding: source. Check Channels."
    assert names == ("channels", "size", "encoding")


def test_an_error_without_parts_is_shown_unchanged() -> None:
    assert in_form(BadImage("'a labels=None' is not an image"), "pack") == ("'a labels=None' is not an image", ())


def test_a_field_with_choices_is_not_left_empty() -> None:
    for name in PACK_OPTIONS:
        default = getattr(Settings(), name)
        advice = f"use {FIELDS[name]}: {default}" if name in ("encoding", "channels", "on_bad") else "leave"
        assert FieldWords("pack").omit(name).startswith(advice)


def test_an_error_that_names_no_field_marks_the_field_that_it_is_about(panel: Launcher, image_tree: Path) -> None:
    fill(panel, source=str(image_tree), labels="species")
    assert "'species'" in click(panel, "pack")
    assert pointed(panel) == ["labels"]
    fill(panel, labels="auto", splits="foo=1")
    assert "'foo'" in click(panel, "pack")
    assert pointed(panel) == ["splits"]


def test_every_field_is_a_setting_and_every_pack_option_exists_in_pack() -> None:
    assert set(FIELDS) == {*Settings.__dataclass_fields__}
    options = {option.name for verb in VERBS if verb.name == "pack" for option in verb.options}
    assert set(PACK_OPTIONS) <= options
