"""What the launcher says of what it cannot do: early, of what the user named, in the words of its form."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import ipywidgets
import pytest
from launchers import click, fill, pointed
from PIL import Image

import colabkit
from colabkit.foundation.errors import BadImage, BadSource, InvalidOption, SourceMissing, TargetExists, cannot
from colabkit.notebook.launcher.panel import Launcher
from colabkit.notebook.launcher.pipeline import Action
from colabkit.notebook.launcher.settings import FIELDS, PACK_OPTIONS, Settings, reword_for_form
from colabkit.notebook.verbs import VERBS
from colabkit.storage.sources.folder import FolderSource


@pytest.fixture
def panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Return a launcher with small numbers, and near copies of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLABKIT_NEAR", str(tmp_path / "near"))
    panel = Launcher(ipywidgets)
    fill(panel, to="disk", epochs=1, batch_size=8)
    yield panel
    panel.close()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder of images that lie in no class folders."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(10):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    return folder


def archived(folder: Path) -> Path:
    return Path(shutil.make_archive(str(folder), "zip", folder))


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_images_without_classes_are_refused_before_they_are_copied_by_the_name_that_was_given(
    panel: Launcher, photos: Path, kind: str
) -> None:
    source = photos if kind == "folder" else archived(photos)
    fill(panel, source=source.name)
    said = click(panel, "pack")
    assert said.startswith(f"Cannot label {source.name!r}: '")
    assert said.endswith("Sort the files into folders, or use a function of the path in code, or Labels: none.")
    assert pointed(panel) == ["labels"]
    assert panel.view.options_switch.value
    assert panel.results == {}
    assert not any(path.is_file() for path in Path("near").rglob("*"))
    fill(panel, labels="none")
    assert click(panel, "pack").startswith("Done")
    assert pointed(panel) == []


def test_what_cannot_be_trained_on_is_refused_before_it_is_copied_with_a_cure_that_trains(
    panel: Launcher, photos: Path
) -> None:
    fill(panel, source="photos")
    assert click(panel, "train").endswith("or Pack with Labels: none.")
    fill(panel, labels="none")
    assert "on 'photos': no labels, expected one class per image. Check Labels" in click(panel, "train")
    assert pointed(panel) == ["labels"]
    assert panel.results == {}


def test_a_folder_without_images_is_refused_before_it_is_copied(panel: Launcher, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    fill(panel, source="notes")
    assert "'notes': no image among 1 file" in click(panel, "pack")
    assert panel.view.said.endswith("Check Source.")
    assert pointed(panel) == ["source"]
    assert panel.results == {}
    assert click(panel, "stage").startswith("Done")


def test_splits_that_the_source_has_are_told_before_it_is_copied(panel: Launcher, tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/1.png", "test/a/1.png", "test/b/1.png"):
        (tmp_path / "birds" / name).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "birds" / name)
    fill(panel, source="birds")
    assert "already has the splits train, test" in click(panel, "train")
    assert "Leave Splits empty" in panel.view.said
    assert pointed(panel) == ["splits"]
    assert panel.results == {}
    fill(panel, splits="")
    assert click(panel, "train").startswith("Done")


@pytest.mark.parametrize("values", [{"size": "wide"}, {"splits": "train=x"}])
def test_a_text_that_cannot_be_meant_is_told_before_anything_is_copied(
    panel: Launcher, image_tree: Path, values: dict[str, str]
) -> None:
    fill(panel, source=str(image_tree), **values)
    ((name, text),) = values.items()
    assert click(panel, "pack").startswith(f"Cannot pack it: {FIELDS[name]} is {text!r}, expected ")
    assert pointed(panel) == [name]
    assert panel.results == {}


def test_the_early_look_lists_a_source_once(panel: Launcher, image_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, listing = [], FolderSource.list

    def counted(source: FolderSource, *given: object) -> object:
        listed.append(source.name)
        return listing(source, *given)

    monkeypatch.setattr(FolderSource, "list", counted)
    fill(panel, source=str(image_tree))
    assert click(panel, "pack").startswith("Done")
    assert listed.count(str(image_tree)) == 1


def test_a_folder_of_shards_is_not_judged_by_their_names(panel: Launcher, tmp_path: Path) -> None:
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


def test_a_bad_image_is_told_of_the_users_source(panel: Launcher, image_tree: Path) -> None:
    broken = min(image_tree.rglob("*.png"))
    broken.write_bytes(b"no image")
    fill(panel, source=str(image_tree))
    assert f"of {str(image_tree)!r}" in click(panel, "pack")
    assert panel.view.said.endswith("or use Bad files: skip.")
    assert pointed(panel) == ["on_bad"]


@pytest.mark.parametrize(
    ("error", "step", "action", "said", "fields"),
    [
        (InvalidOption, "Use size=(240, 320), say", "pack", "Use Image size: 240x320, say.", ["size"]),
        (InvalidOption, "Leave size out, or use encoding='jpeg'", "pack", None, ["size", "encoding"]),
        (
            InvalidOption,
            "Use {'train': 0.8, 'test': 0.2}, say",
            "pack",
            "Use Splits: train=0.8,test=0.2, say.",
            ["splits"],
        ),
        (InvalidOption, "Use splits={'train': 0.8}", "pack", "Use Splits: train=0.8.", ["splits"]),
        (BadSource, "Rename 'a size=3.png'", "pack", "Rename 'a size=3.png'.", []),
        (InvalidOption, "Give size=, or nothing", "pack", "Give Image size, or nothing.", ["size"]),
        (BadImage, "Repair it, or use on_bad='skip'", "pack", "Repair it, or use Bad files: skip.", ["on_bad"]),
        (BadSource, "Use labels=None", "train", "Use Pack with Labels: none.", ["labels"]),
        (SourceMissing, "Check the path", "stage", "Check Source.", ["source"]),
        (TargetExists, "Choose another path or overwrite=True", "pack", None, ["work"]),
        (InvalidOption, "Use refresh=True or max_bad=50", "pack", "Use refresh=True or max_bad=50.", []),
    ],
)
def test_a_next_step_names_fields_where_there_are_such_and_stays_where_not(
    error: type[colabkit.errors.ColabkitError], step: str, action: Action, said: str | None, fields: list[str]
) -> None:
    found = "labels=3 in 'a. labels=None'"
    text, names = reword_for_form(error(cannot("pack 'a'", found, "none", step)), action)
    assert text.startswith(f"Cannot pack 'a': {found}, none. ")
    assert said is None or text.endswith(said)
    assert list(names) == fields


def test_where_the_next_step_names_no_field_the_one_that_it_is_about_is_marked(
    panel: Launcher, image_tree: Path
) -> None:
    fill(panel, source=str(image_tree), labels="species")
    assert "no column 'species'" in click(panel, "pack")
    assert pointed(panel) == ["labels"]
    fill(panel, labels="auto", splits="foo=1")
    assert "'foo' is no split" in click(panel, "pack")
    assert pointed(panel) == ["splits"]


def test_the_fields_are_options_of_the_calls_and_the_forms_values() -> None:
    assert set(FIELDS) == {*Settings.__dataclass_fields__}
    options = {option.name for verb in VERBS if verb.name == "pack" for option in verb.options}
    assert set(PACK_OPTIONS) <= options
