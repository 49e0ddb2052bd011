"""Advice is in the words of whoever reads it: what a terminal or a notebook's line takes, and Python's in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from magic_shells import loaded_shell, shown_by

import colabkit
from colabkit.errors import ColabkitError, MissingPackage
from colabkit.notebook.command_line import main
from colabkit.notebook.lines import split_line
from colabkit.notebook.options import arguments_of, parser_of, words_of
from colabkit.notebook.verbs import CELLS, DASHBOARD, VERBS

ALL = [*VERBS, *CELLS, DASHBOARD]
BY_NAME = {verb.name: verb for verb in VERBS}
GIVEN = {
    "text": ["loss", "it's"],
    "path": ["/a b/c", "drive:x"],
    "number": [3],
    "seconds": [2.5],
    "amount": [0.01, 50],
    "bytes": [1 << 20],
    "flag": [True, False],
    "switch": [True],
    "threads": [4, "auto"],
    "steps": [100, "5min"],
    "size": [224, (240, 320)],
    "folder": [None, "drive:x"],
    "labels": [None, "name", ["a", "b"]],
    "splits": [{"train": 0.8, "test": 0.2}, "a column"],
    "fields": [{"Z": "age"}],
}


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    with loaded_shell() as shell:
        yield shell


def test_a_line_takes_what_is_advised_to_it_as_the_value_that_python_is_advised() -> None:
    options = [(verb, option) for verb in ALL for option in verb.options if option.flag]
    for verb, option in options:
        for value in GIVEN.get(option.kind, []):
            line = words_of(verb, "%")(f"{option.name}={value!r}")
            assert line.startswith(f"--{'no-' if value is False else ''}{option.name.replace('_', '-')}")
            required = [other.name for other in verb.options if other.is_required]
            parsed = parser_of(verb, "%it").parse_args([*required, *split_line(line, {})])
            assert arguments_of(verb, parsed, lambda name, kind: name)[option.name] == value
    assert {option.kind for _, option in options} - GIVEN.keys() == {"object", "objects"}


def test_python_words_of_the_verbs_options_become_those_of_a_line() -> None:
    for name, told, line in (
        ("stage", "refresh=True looks for changes", "--refresh looks for changes"),
        ("pack", "Choose another path or overwrite=True.", "Choose another path or --overwrite."),
        ("pack", "a function of the path, or labels=None.", "a function of the path, or --labels none."),
        ("pack", "use on_bad='skip'.", "use --on-bad skip."),
        ("pack", "Use max_bad=0.01 or max_bad=50, say.", "Use --max-bad 0.01 or --max-bad 50, say."),
        ("pack", "or raise max_bad=.", "or raise --max-bad."),
        ("train", "Pass state={'model': model, 'optimizer': optimizer}", "Pass --state model optimizer"),
    ):
        assert words_of(BY_NAME[name], "%")(told) == line


def test_what_a_line_cannot_say_stays_python() -> None:
    for told in (
        "keep='gpu' and num_workers=0",  # no options of the verb
        "use labels= and splits= with functions of the path",
        "executor=Client()",
        "the address https://example.org/?size=3&seed=4 and x.size=3",
        "fetch(refresh=True), size==3",
        "colabkit.pack(dataset, 'pack.h5') colabkit.Loader(data, 4) colabkit.demo(epochs=3)",
    ):
        assert words_of(BY_NAME["pack"], "%")(told) == told


def test_calls_become_the_lines_that_make_them() -> None:
    told = "Run colabkit.mount() or colabkit.mount(force=True), then colabkit.stage('/a b/c', threads=4); .unstage(...)"
    magic = "Run %mount or %mount --force, then %stage '/a b/c' --threads 4; .unstage(...)"
    assert words_of(BY_NAME["pack"], "%")(told) == magic
    assert words_of(BY_NAME["pack"], "colabkit ")(told) == magic.replace("%", "colabkit ")


@given(st.text(), st.sampled_from(["{}", "refresh=True {}", "{} refresh=True", "it's {}/refresh=True"]))
def test_paths_are_never_touched(text: str, form: str) -> None:
    path = form.format(text)
    told = f"Already staged at {path!r}: Drive's files; refresh=True looks for changes"
    expected = f"Already staged at {path!r}: Drive's files; --refresh looks for changes"
    assert words_of(BY_NAME["stage"], "%")(told) == expected


def test_a_terminal_is_told_its_own_options(
    image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = str(tmp_path / "near refresh=True")
    for _ in range(2):
        assert main(["stage", str(image_tree), "--to", to, "--no-progress"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert "; --refresh looks for changes" in said
    assert repr(to) in said
    (tmp_path / "p.h5").write_text("other")
    assert main(["pack", to, str(tmp_path / "p.h5")]) == 1
    assert capsys.readouterr().err.endswith(". Choose another path or --overwrite.\n")
    assert main(["pack", str(tmp_path / "none"), "x.h5"]) == 1
    assert "or run colabkit mount if it is on Drive" in capsys.readouterr().err


def test_json_is_what_python_says(image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    colabkit.pack(image_tree, tmp_path / "p.h5", progress=False)
    assert main(["prepare", str(image_tree), "--save-to", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unsaved"] == "save_to=None"


def test_a_magic_is_told_its_own_options_and_python_its_own(
    shell: InteractiveShell, image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns.update(source=str(image_tree), to=str(tmp_path / "near"))
    shell.run_line_magic("stage", "$source --to $to --no-progress")
    report = shell.run_line_magic("stage", "$source --to $to --no-progress")
    assert repr(report).endswith("; --refresh looks for changes")
    assert "--refresh looks" in report._repr_html_()
    assert "refresh=True looks" in repr(colabkit.stage(image_tree, tmp_path / "near", progress=False))
    capsys.readouterr()
    shell.run_cell("%pack /no/such/place x.h5")
    assert "or run %mount if it is on Drive" in shown_by(capsys)[0]
    shell.user_ns["packed"] = colabkit.pack(image_tree, tmp_path / "p.h5", progress=False)
    shell.run_cell("%%train packed --save-every 5min\npass")
    assert "Cannot train: --save-every 5min without --save-to, both or none." in shown_by(capsys)[0]


def test_a_magic_that_cannot_save_on_drive_offers_to_save_nothing(
    shell: InteractiveShell, image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
    monkeypatch.setattr("colabkit.foundation.mount_table.mounts", list)
    pack = shell.run_line_magic("prepare", f"'{image_tree}' --no-progress")
    assert "Run %mount first" in repr(pack)
    assert "or use --save-to none to save nothing" in repr(pack)


def test_a_call_in_a_cell_below_a_magic_is_told_in_python(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("import colabkit")
    shell.run_cell("%%dashboard --screen none\ncolabkit.stage('/no/such/place')")
    assert "or run colabkit.mount() if it is on Drive" in shown_by(capsys)[0]


def test_a_call_in_a_users_file_is_told_in_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("import colabkit\ncolabkit.stage('/no/such/place')\n")
    assert main(["train", f"{tmp_path}/mine.py:step", f"{tmp_path}/mine.py:loader"]) == 1
    assert "or run colabkit.mount() if it is on Drive" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ColabkitError, MissingPackage])
def test_every_kind_of_error_is_told_in_the_words_of_a_line(
    kind: type[ColabkitError], shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: object) -> None:
        raise kind("Cannot stage 'x': nothing, something. Use refresh=True.")

    monkeypatch.setattr(colabkit, "stage", refuse)
    error = shell.run_cell("%stage x").error_in_exec
    assert isinstance(error, kind)
    assert str(error).endswith("Use --refresh.")
