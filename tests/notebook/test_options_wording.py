"""Messages use the notation of the caller: options in a magic or command, Python in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from magic_shells import loaded_shell, shown_by
from verb_words import stand_in

import colabkit
from colabkit import errors
from colabkit.errors import ColabkitError
from colabkit.foundation import Code, Text, call, cannot, in_python, omit, option
from colabkit.notebook.command_line import main
from colabkit.notebook.launcher.settings import FIELDS, FieldWords
from colabkit.notebook.lines import split_line
from colabkit.notebook.options import LineWords, arguments_of, parse_value, parser_of
from colabkit.notebook.verbs import CELLS, VERBS

ALL = [*VERBS, *CELLS]
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
    "number_or_auto": [4, "auto"],
    "steps": [100, "5min"],
    "size": [224, (240, 320)],
    "size_or_auto": ["auto", 224, (240, 320)],
    "folder": [None, "drive:x"],
    "labels": [None, "name", ["a", "b"]],
    "splits": [{"train": 0.8, "test": 0.2}, "a column"],
    "fields": [{"Z": "age"}],
}


def in_a_line(verb: str, text: Text, prefix: str = "%") -> str:
    return LineWords(BY_NAME[verb], prefix).render(text)


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    with loaded_shell() as shell:
        yield shell


def test_a_line_accepts_every_option_that_it_is_advised_with_the_same_value() -> None:
    options = [(verb, one) for verb in ALL for one in verb.options if one.flag]
    for verb, one in options:
        for value in one.words if one.is_closed and one.kind == "text" else GIVEN.get(one.kind, []):
            line = LineWords(verb, "%").option(one.name, value)
            assert line.startswith(f"--{'no-' if value is False else ''}{one.name.replace('_', '-')}")
            required = [stand_in(other) for other in verb.options if other.is_required]
            parsed = parser_of(verb, "%it").parse_args([*required, *split_line(line, {})])
            assert arguments_of(verb, parsed, lambda name, kind: name)[one.name] == value
    assert {one.kind for _, one in options} - GIVEN.keys() == {"object", "objects"}


def test_variables_to_save_are_named_without_their_dict() -> None:
    for verb in (BY_NAME["train"], CELLS[0]):
        text = option("state", {"model": Code("model"), "optimizer": Code("optimizer")})
        line = LineWords(verb, "%").render(text)
        assert line == "--state model optimizer"
        required = [other.name for other in verb.options if other.is_required]
        parsed = parser_of(verb, "%it").parse_args([*required, *split_line(line, {})])
        assert [*arguments_of(verb, parsed, lambda name, kind: name)["state"]] == ["model", "optimizer"]


def test_a_call_with_a_variable_is_a_line_of_a_notebook_and_otherwise_python() -> None:
    of_variable, of_code = (call("pack", Code(text), "d.h5", size=64) for text in ("dataset", "pack['train']"))
    assigned = replace(call("prepare", "birds", size=64), result="data")
    assert in_a_line("doctor", of_variable) == "%pack {dataset} d.h5 --size 64"
    assert in_a_line("doctor", of_code) == "colabkit.pack(pack['train'], 'd.h5', size=64)"
    assert in_a_line("doctor", of_variable, "colabkit ") == "colabkit.pack(dataset, 'd.h5', size=64)"
    assert in_a_line("doctor", call("doctor", Code("loader"))) == "%doctor loader"
    assert in_a_line("doctor", assigned) == "data = %prepare birds --size 64"
    assert in_a_line("doctor", assigned, "colabkit ") == "data = colabkit.prepare('birds', size=64)"


def test_a_field_accepts_every_value_that_it_is_advised() -> None:
    for one in BY_NAME["train_on"].options:
        if one.name in FIELDS and one.flag:
            values = [word for word in one.words if word != "none"] if one.words else GIVEN[one.kind]
            for text in values:
                value = parse_value(one.kind, text) if isinstance(text, str) else text
                label, _, entered = FieldWords().option(one.name, value).partition(": ")
                assert (label, parse_value(one.kind, entered)) == (FIELDS[one.name], value)


@pytest.mark.parametrize(
    ("verb", "text", "line"),
    [
        ("stage", (option("refresh", True), " checks the source again"), "--refresh checks the source again"),
        (
            "pack",
            ("Choose another path, or use ", option("overwrite", True)),
            "Choose another path, or use --overwrite",
        ),
        ("pack", option("labels", None), "--labels none"),
        ("pack", option("on_bad", "skip"), "--on-bad skip"),
        (
            "pack",
            ("Use ", option("max_bad", 0.01), " or ", option("max_bad", 50)),
            "Use --max-bad 0.01 or --max-bad 50",
        ),
        ("pack", ("increase ", option("max_bad")), "increase --max-bad"),
        ("pack", omit("size"), "omit --size"),
        ("mount", omit("path"), "omit path"),
        ("pack", (option("labels"), " and ", option("splits")), "--labels and --splits"),
        ("pack", ("Rename it", in_python((", or use ", option("labels", Code("function"))))), "Rename it"),
        ("pack", (option("size", ...), " and ", option("to")), "--size and to"),
    ],
)
def test_an_option_of_the_verb_is_written_as_in_its_line(verb: str, text: Text, line: str) -> None:
    assert in_a_line(verb, text) == line
    assert in_a_line(verb, text, "colabkit ") == line


@pytest.mark.parametrize(
    ("text", "python"),
    [
        # `pack` does not have these options.
        ((option("keep", "gpu"), " and ", option("num_workers", 0)), "keep='gpu' and num_workers=0"),
        (omit("num_workers"), "omit num_workers="),
        # A line cannot contain these expressions.
        (option("labels", Code("path.parent.name")), "labels=path.parent.name"),
        (option("executor", Code("Client()")), "executor=Client()"),
        # A line cannot express these values.
        (option("size", None), "size=None"),
        (option("overwrite", "yes"), "overwrite='yes'"),
        # No magic or command makes this call with these arguments.
        (call("Loader", Code("data"), 4), "colabkit.Loader(data, 4)"),
        (call("pack", "a", "b.h5", labels=Code("label_of")), "colabkit.pack('a', 'b.h5', labels=label_of)"),
        (call("stage", "a", refresh=True, keep=1), "colabkit.stage('a', refresh=True, keep=1)"),
    ],
)
def test_what_a_line_cannot_contain_stays_python(text: Text, python: str) -> None:
    assert in_a_line("pack", text) == python


def test_an_object_that_a_line_cannot_contain_is_named_by_its_kind() -> None:
    assert in_a_line("train", (option("epochs", torch.tensor(2)), "; expected 1")) == "--epochs is a Tensor; expected 1"
    assert in_a_line("doctor", option("epochs", torch.tensor(2))) == "epochs=tensor(2)"


def test_calls_become_the_lines_that_make_them() -> None:
    stage = call("stage", "/a b/c", threads=4)
    text = ("Run ", call("mount"), " or ", call("mount", force=True), ", then ", stage, " or ", call("stage", ...))
    magic = "Run %mount or %mount --force, then %stage '/a b/c' --threads 4 or %stage ..."
    assert in_a_line("pack", text) == magic
    assert in_a_line("pack", text, "colabkit ") == magic.replace("%", "colabkit ")
    assert in_a_line("pack", call("probe", "drive:x")) == "%probe drive:x"
    assert in_a_line("pack", call("demo", epochs=3), "colabkit ") == "colabkit demo --epochs 3"


@given(st.text(), st.sampled_from(["{}", "refresh=True {}", "{} colabkit.mount()", "it's {}/refresh=True"]))
def test_paths_and_other_values_are_never_altered(text: str, form: str) -> None:
    path = form.format(text)
    for words in (LineWords(BY_NAME["stage"], "%"), LineWords(BY_NAME["stage"], "colabkit "), FieldWords()):
        shown = words.render((f"Already staged at {path!r}: ", path, "; ", option("refresh", True)))
        assert shown.startswith(f"Already staged at {path!r}: {path}; ")
    quoted = LineWords(BY_NAME["stage"], "%").render(call("stage", path))
    assert split_line(quoted.removeprefix("%stage "), {}) == [path]


def test_a_terminal_shows_its_own_options(image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = str(tmp_path / "local refresh=True")
    for _ in range(2):
        assert main(["stage", str(image_tree), "--to", to, "--no-progress"]) == 0
    report = capsys.readouterr().out.splitlines()[-1]
    assert "--refresh" in report
    assert repr(to) in report
    colabkit.pack(image_tree, tmp_path / "p.h5", size=4, progress=False)
    assert main(["pack", to, str(tmp_path / "p.h5")]) == 1
    message = capsys.readouterr().err
    assert "--overwrite" in message
    assert "overwrite=True" not in message
    assert main(["pack", str(tmp_path / "none"), "x.h5"]) == 1
    assert "colabkit mount if it is on Drive" in capsys.readouterr().err


def test_json_stays_python(image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    colabkit.pack(image_tree, tmp_path / "p.h5", progress=False)
    assert main(["prepare", str(image_tree), "--to", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unsaved"] == "to=None"


def test_a_magic_shows_its_own_options_and_python_shows_python(
    shell: InteractiveShell, image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns.update(source=str(image_tree), to=str(tmp_path / "local"))
    shell.run_line_magic("stage", "$source --to $to --no-progress")
    report = shell.run_line_magic("stage", "$source --to $to --no-progress")
    assert "--refresh" in repr(report)
    assert "--refresh" in report._repr_html_()
    assert "refresh=True" in repr(colabkit.stage(image_tree, tmp_path / "local", progress=False))
    capsys.readouterr()
    shell.run_cell("%pack /no/such/place x.h5")
    assert "%mount if it is on Drive" in shown_by(capsys)[0]
    shell.user_ns["packed"] = colabkit.pack(image_tree, tmp_path / "p.h5", progress=False)
    shell.run_cell("%%train packed --save-every 5min\npass")
    message = shown_by(capsys)[0]
    assert "Cannot train: " in message
    assert "--save-every 5min" in message
    assert "--to" in message


def test_a_magic_that_cannot_save_on_drive_offers_to_save_nothing(
    shell: InteractiveShell, image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
    monkeypatch.setattr("colabkit.foundation.mount_table.mounts", list)
    pack = shell.run_line_magic("prepare", f"'{image_tree}' --no-progress")
    assert "Run %mount first" in repr(pack)
    assert "--to none" in repr(pack)


def test_an_error_of_a_call_in_the_cell_below_a_magic_stays_python(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("import colabkit")
    shell.run_cell("%%dashboard --screen none\ncolabkit.stage('/no/such/place')")
    assert "colabkit.mount() if it is on Drive" in shown_by(capsys)[0]


def test_an_error_of_a_call_in_a_users_file_stays_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("import colabkit\ncolabkit.stage('/no/such/place')\n")
    assert main(["train", f"{tmp_path}/mine.py:step", f"{tmp_path}/mine.py:loader"]) == 1
    assert "colabkit.mount() if it is on Drive" in capsys.readouterr().err


@pytest.mark.parametrize("name", errors.__all__)
def test_every_kind_of_error_uses_the_words_of_a_line(
    name: str, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: type[ColabkitError] = getattr(errors, name)

    def refuse(**options: object) -> None:
        raise kind(cannot("stage 'x'", "it is empty", "", ("Use ", option("refresh", True))))

    monkeypatch.setattr(colabkit, "stage", refuse)
    error = shell.run_cell("%stage x").error_in_exec
    assert type(error) is kind
    assert str(error) == "Cannot stage 'x': it is empty. Use --refresh."
