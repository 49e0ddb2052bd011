"""`train_on()`: one line from a source to a tested model file, even if repeated, interrupted, or given bad sources."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from magic_shells import loaded_shell
from PIL import Image

import colabkit
from colabkit.augment import RandomHorizontalFlip
from colabkit.errors import BadSource, InvalidOption, PackingFailed
from colabkit.foundation import PYTHON, meters
from colabkit.notebook.command_line import main
from colabkit.notebook.recipe.plan import choose_augmentation, choose_size
from colabkit.notebook.recipe.training import Recipe
from colabkit.packs import SourceSummary

TrainOnReport = colabkit.TrainOnReport


def make_classes(folder: Path, classes: tuple[str, ...] = ("blue", "red"), count: int = 20, side: int = 16) -> Path:
    """Make noisy images; the mean colors of the classes are easy to distinguish."""
    draws = np.random.default_rng(0)
    for place, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = draws.integers(0, 90, (side, side, 3))
            pixels[:, :, place % 3] += 60 + 100 * (place // 3)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:03}.png")
    return folder


@pytest.fixture
def colors(tmp_path: Path) -> Path:
    return make_classes(tmp_path / "colors")


@pytest.fixture(autouse=True)
def own_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLABKIT_LOCAL", str(tmp_path / "local"))
    monkeypatch.chdir(tmp_path)


def train_on(source: Any, **options: Any) -> TrainOnReport:
    return colabkit.train_on(source, **{"epochs": 3, "progress": False, "screen": "none", **options})


def test_one_line_trains_tests_and_saves_a_model_that_its_code_loads(colors: Path, tmp_path: Path) -> None:
    report = train_on(colors)
    assert dict(report.splits) == {"train": 32, "val": 8}
    assert report.accuracy == 1.0
    assert report.model_path.is_relative_to(tmp_path / "colabkit-work")
    names: dict[str, Any] = {}
    exec(report.code.replace("new_images", str(colors)), names)
    assert names["names"] == ["blue"] * 20 + ["red"] * 20
    text = repr(report)
    assert text.startswith("100% of 8 held-out images (val) are classified correctly: small network, epoch ")
    for told in ("16×16", "(size=)", "a fifth of each class", "(splits=)", "(model=)", "(epochs=)", "augmentation"):
        assert told in text


def test_the_same_line_again_trains_nothing_and_shows_how_to_go_on(colors: Path) -> None:
    first = train_on(colors)
    again = train_on(colors)
    assert (first.training.trained, again.training.trained) == (3, 0)
    assert again.confusion == first.confusion
    assert "complete since an earlier call, so nothing was trained" in repr(again)
    longer, restart = (line for _, line in again.next_steps)
    assert longer == f"colabkit.train_on({str(colors)!r}, epochs=6)"
    assert restart == f"colabkit.train_on({str(colors)!r}, epochs=3, restart=True)"


def test_more_epochs_continue_and_restart_keeps_the_earlier_run(colors: Path) -> None:
    first = train_on(colors)
    longer = train_on(colors, epochs=4)
    assert (longer.training.trained, longer.epochs, longer.model_path) == (1, 4, first.model_path)
    other = train_on(colors, restart=True)
    assert (other.training.trained, other.model_path.parent.name) == (3, "run-2")
    assert first.model_path.exists()


def test_an_interrupted_training_resumes_with_the_line_that_it_shows(colors: Path) -> None:
    def interrupt(event: object) -> None:
        if isinstance(event, meters.EpochDone):
            os.kill(os.getpid(), signal.SIGINT)

    undo = meters.subscribe(interrupt)
    try:
        with pytest.raises(
            colabkit.TrainingInterrupted, match=r"is saved. Run colabkit.train_on\(.*epochs=3\) to resume"
        ):
            train_on(colors, restart=True)
    finally:
        undo()
    report = train_on(colors)
    assert (report.epochs, report.training.trained) == (3, 2)
    assert report.training.resumed_from is not None


def test_a_restart_that_is_interrupted_before_its_run_is_to_be_repeated_as_a_restart(
    colors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("colabkit.notebook.recipe.training.choose_network", interrupted)
    with pytest.raises(colabkit.Interrupted, match=r"Run colabkit.train_on\(.*restart=True\) to resume"):
        train_on(colors, restart=True)


def test_the_test_split_is_used_only_for_the_test(tmp_path: Path) -> None:
    for split, count in (("train", 12), ("val", 4), ("test", 6)):
        make_classes(tmp_path / "colors" / split, count=count)
    report = train_on(tmp_path / "colors")
    assert (report.chosen_on, report.accuracy_on) == ("val", "test")
    assert sum(map(sum, report.confusion)) == 12
    assert "the best on the split 'val'" in repr(report)


def test_unreadable_images_are_skipped_and_reported(colors: Path) -> None:
    (colors / "red" / "003.png").write_bytes(b"nothing")
    report = train_on(colors)
    assert [name for name, _ in report.skipped] == ["red/003.png"]
    assert "1 file skipped, starting with 'red/003.png'" in repr(report)
    with pytest.raises(colabkit.errors.BadImage, match=r"red/003\.png"):
        train_on(colors, on_bad="raise")


def test_more_unreadable_images_are_an_error_that_names_the_option_that_allows_them(
    colors: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(6):
        (colors / "red" / f"{number:03}.png").write_bytes(b"nothing")
    with pytest.raises(colabkit.errors.BadImage, match=r"at most 4\. Check the source, or increase max_bad=\."):
        train_on(colors)
    assert main(["train_on", str(colors), "--no-progress", "--screen", "none"]) == 1
    assert "or increase --max-bad." in capsys.readouterr().err
    report = train_on(colors, epochs=1, max_bad=6)
    assert len(report.skipped) == 6
    assert report.next_steps[0][1] == f"colabkit.train_on({str(colors)!r}, epochs=2, max_bad=6)"


def test_a_source_without_classes_to_learn_is_refused_with_a_next_step(tmp_path: Path) -> None:
    make_classes(tmp_path / "one", ("cats",))
    with pytest.raises(BadSource, match="only one class, 'cats'; expected at least two classes"):
        train_on(tmp_path / "one")
    make_classes(tmp_path / "few", count=2)
    with pytest.raises(InvalidOption, match="only 4 images; expected at least 10"):
        train_on(tmp_path / "few")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadSource, match="the source has no files"):
        train_on(tmp_path / "empty")
    with pytest.raises(InvalidOption, match="the images have no labels; expected one class per image"):
        train_on(tmp_path / "few", labels=None)


def test_a_folder_of_unreadable_images_is_refused(tmp_path: Path) -> None:
    for name in ("cats", "dogs"):
        (tmp_path / "all" / name).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "all" / name / f"{number}.jpg").write_bytes(b"nothing")
    with pytest.raises((BadSource, PackingFailed, colabkit.errors.BadImage), match="cats/"):
        train_on(tmp_path / "all")


def test_the_steps_are_shown_before_they_begin(colors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_on(colors, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Found 40 images, 2 classes, 16×16, not split yet"
    assert lines[1] == "All images keep their 16×16 pixels (size=)"


def test_a_line_prints_choices_and_advice_as_options_and_lines(
    colors: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(colors), "--epochs", "1", "--screen", "none"]
    with loaded_shell() as shell:
        report = shell.run_line_magic("train_on", " ".join(words))
    in_notebook = capsys.readouterr().out + repr(report)
    assert main(["train_on", *words]) == 0
    in_terminal = capsys.readouterr().out
    for prefix, text in (("%", in_notebook), ("colabkit ", in_terminal)):
        assert text.count("(--size)") == text.count("(--epochs)") == 2
        assert f"Next: {prefix}train_on {colors} --epochs 2 trains longer" in text
        assert not re.search(r"\w=\)|colabkit\.|print\(", text)


def test_drive_is_mounted_for_a_source_on_it(
    colors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mount() -> colabkit.MountReport:
        monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path))
        return colabkit.MountReport(tmp_path, tmp_path, "DriveFS", "mounted", False, 0.0)

    monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
    monkeypatch.setattr("colabkit.notebook.recipe.api.drive_mounts", lambda table: [])
    monkeypatch.setattr("colabkit.notebook.recipe.api.mount", mount)
    report = train_on("drive:colors", to="drive:work", progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Mounting Google Drive"
    assert lines[1].startswith("Drive mounted at ")
    assert lines[2].startswith("Found 40 images")
    assert report.model_path.is_relative_to(tmp_path / "work")


def test_the_pack_is_saved_during_the_training_and_the_report_has_its_path(
    colors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("colabkit.notebook.recipe.training.can_hang", lambda *_: True)
    report = train_on(colors, epochs=1, to="work", progress=True)
    assert report.unsaved == ""
    assert report.saved_pack_path is not None
    assert report.saved_pack_path.read_bytes() == report.pack_path.read_bytes()
    assert report.saved_pack_path.parent == tmp_path / "work" / "packs"
    assert ("saved pack", str(report.saved_pack_path)) in report._rows()
    assert "Saving the pack in " in capsys.readouterr().out


def test_a_full_drive_does_not_lose_the_training_and_the_report_says_so(
    colors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_hook: Any
) -> None:
    def refuse(operation: str, path: Path) -> None:
        if operation == "write" and path.is_relative_to(tmp_path / "work" / "packs"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("colabkit.notebook.recipe.training.can_hang", lambda *_: True)
    file_hook(refuse)
    report = train_on(colors, epochs=1, to="work")
    assert report.model_path.exists()
    assert (report.saved_pack_path, len(report.training.epochs)) == (None, 1)
    assert "No space left" in report.unsaved
    assert not report.is_good
    assert "Note: the pack is not saved, so the next session packs the images again: " in repr(report)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("https://example.com/birds.zip", "'https://example.com/birds.zip'"),
        ("https://example.com/birds.zip?token=secret", "source"),
    ],
)
def test_an_address_is_shown_unless_it_may_contain_a_secret(source: str, shown: str) -> None:
    recipe = Recipe(
        source,
        "work",
        "auto",
        "auto",
        None,
        None,
        None,
        3,
        "auto",
        "auto",
        "skip",
        0.1,
        False,
        None,
        False,
        "none",
    )
    assert PYTHON.render(recipe.again(epochs=6)) == f"colabkit.train_on({shown}, to='work', epochs=6)"


def test_a_table_with_any_column_of_paths_is_trained_on(colors: Path, tmp_path: Path) -> None:
    rows = [f"{path.relative_to(colors)},{path.parent.name}" for path in sorted(colors.rglob("*.png"))]
    table = tmp_path / "rows.csv"
    table.write_text("\n".join(["photo,kind", *rows]))
    options = {"path_column": "photo", "root": colors, "labels": "kind"}
    report = train_on(table, epochs=1, **options)
    assert report.classes == ("blue", "red")
    calls = repr(report)
    assert "path_column='photo'" in calls
    assert f"root={str(colors)!r}" in calls


def test_a_regression_is_refused_with_the_calls_to_use_instead(colors: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    rows = [f"{path},{number / 2}" for number, path in enumerate(sorted(colors.rglob("*.png")))]
    table.write_text("\n".join(["path,price", *rows]))
    with pytest.raises(InvalidOption, match=r"supervised_step\(loss=torch\.nn\.MSELoss\(\)\) and colabkit\.train\(\)"):
        train_on(table, labels="price")


def test_the_report_is_html_without_scripts_and_with_escaped_names(tmp_path: Path) -> None:
    report = train_on(make_classes(tmp_path / "colors", ("<script>", "a&b' onload='x")), epochs=2)
    html = report._repr_html_()
    assert "<script>" not in html
    assert "onload='x" not in html
    assert html.count("<img") >= 8
    assert "Confusion matrix" in html
    assert len(html) < 150_000
    values = json.loads(json.dumps(report.to_dict()))
    assert values["accuracy"] == report.accuracy
    assert "picture" not in values["predictions"][0]


def test_with_many_classes_the_report_lists_the_most_frequent_mistakes(colors: Path) -> None:
    confusion = tuple(tuple(3 * (row == column) + (row + 1 == column) for column in range(30)) for row in range(30))
    report = replace(train_on(colors, epochs=1), classes=tuple(f"class {n}" for n in range(30)), confusion=confusion)
    html = report._repr_html_()
    assert "Confusion matrix" not in html
    assert "class 0 taken for class 1: <b>1</b> of 4" in html


def test_a_report_with_warnings_is_good(colors: Path) -> None:
    assert replace(train_on(colors, epochs=1), warnings=("small details are lost",)).is_good


def test_a_model_no_better_than_guessing_is_said_to_be(colors: Path) -> None:
    report = replace(train_on(colors, epochs=1), accuracy=0.5, baseline=0.5)
    assert "no better than always answering the most frequent class" in repr(report)


def summary(*sizes: tuple[int, int]) -> SourceSummary:
    heights, widths = zip(*sizes, strict=True)
    median = (int(np.median(heights)), int(np.median(widths)))
    return SourceSummary("birds", 100, "class", ("a", "b"), {"train": 100}, median, tuple(sorted(sizes)))


@pytest.mark.parametrize(
    ("sizes", "device", "size"),
    [
        ([(8, 8)] * 9, "cpu", (8, 8)),
        ([(28, 40)] * 9, "cuda", (28, 40)),
        ([(375, 500), (500, 375)] * 9, "cpu", (128, 128)),
        ([(375, 500), (500, 375)] * 9, "cuda", (224, 224)),
        ([(100, 120), (110, 90)] * 9, "cuda", (104, 104)),
        ([(1080, 1920)] * 9, "cuda", (168, 296)),
        ([(7, 9), (8, 7)] * 9, "cpu", (7, 7)),
    ],
)
def test_the_image_size_suits_the_data_and_the_device(
    sizes: list[tuple[int, int]], device: str, size: tuple[int, int]
) -> None:
    found = choose_size("auto", summary(*sizes), device)
    assert found.value == size
    assert not found.warning


@pytest.mark.parametrize(
    ("shape", "device", "expected"),
    [
        ((28, 40), "cpu", "keep their 28x40 pixels (height x width)"),
        ((1080, 1920), "cuda", "from a median of 1080x1920 to 168x296 pixels (height x width)"),
        ((500, 500), "cuda", "from a median of 500×500 to 224×224 pixels"),
    ],
)
def test_sizes_that_are_not_square_are_shown_as_the_option_takes_them(
    shape: tuple[int, int], device: str, expected: str
) -> None:
    assert expected in choose_size("auto", summary(shape), device).text


def test_images_shrunk_far_below_their_median_are_warned_about() -> None:
    found = choose_size((8, 8), summary((375, 500)), "cpu")
    assert "8x8, far below their median of 375x500 pixels (height x width)" in found.warning


@pytest.mark.parametrize(
    ("classes", "is_gray", "told"),
    [
        (("cats", "dogs"), False, "horizontal flips"),
        (("cats", "dogs"), True, "no flips, since the images are gray"),
        (("0", "1"), False, "no flips, since the classes seem to be numbers or letters"),
        (("turn_left", "turn_right"), False, "no flips, since the class 'turn_left' has a side"),
    ],
)
def test_images_are_flipped_only_if_that_keeps_their_class(
    classes: tuple[str, ...], is_gray: bool, told: str, tmp_path: Path
) -> None:
    make_classes(tmp_path / "images", classes, count=5)
    for file in (tmp_path / "images").rglob("*.png") if is_gray else ():
        Image.open(file).convert("L").save(file)
    data = colabkit.prepare(tmp_path / "images", to=None, progress=False)["train"]
    found = choose_augmentation(data, (16, 16), (0.0,), (1.0,))
    flips = [one for one in found.value.transforms if isinstance(one, RandomHorizontalFlip)]
    assert told in found.text
    assert bool(flips) == (told == "horizontal flips")
