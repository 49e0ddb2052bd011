"""Magics in a real IPython shell make one public call, return its report, and show errors as one line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from magic_shells import loaded_shell, run, shown_by

import colabkit
from colabkit.errors import BadSource, InvalidOption, SourceMissing
from colabkit.foundation import meters
from colabkit.notebook.lines import split_line
from colabkit.notebook.verbs import VERBS

MAGICS = [*(verb.name for verb in VERBS if verb.is_magic), "colabkit"]


@pytest.fixture
# Request `tmp_path`, so that the folder outlives the shell.
def shell(tmp_path: Path) -> Iterator[InteractiveShell]:
    with loaded_shell() as shell:
        yield shell
    assert not meters.listeners


def test_the_magics_run_the_full_pipeline_and_return_reports(shell: InteractiveShell, tmp_path: Path) -> None:
    shell.user_ns["folder"] = tmp_path
    result = shell.run_cell(f"staged = %stage samples:digits --to '{tmp_path}/a folder/near' --no-progress")
    result.raise_error()
    staged = shell.user_ns["staged"]
    assert isinstance(staged, colabkit.StageReport)
    packed = shell.run_line_magic("pack", "{staged.path} $folder/x.h5 --no-progress --splits train=0.5,test=0.5")
    assert isinstance(packed, colabkit.PackReport)
    assert packed.path == tmp_path / "x.h5"


def test_training_shows_a_panel_whose_last_frame_stays(
    shell: InteractiveShell, image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = colabkit.open_pack(colabkit.pack(image_tree, tmp_path / "p.h5", progress=False).path)
    seen = []
    shell.user_ns |= {"step": seen.append, "loader": colabkit.Loader(pack["train"], 5)}
    report = shell.run_line_magic("train", "step loader --epochs 2")
    assert isinstance(report, colabkit.TrainReport)
    assert len(seen) == 10
    assert "epoch 2/2" in capsys.readouterr().out


@pytest.mark.parametrize("magic", MAGICS)
def test_help_is_printed_and_is_the_docstring(
    shell: InteractiveShell, magic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.run_line_magic(magic, "--help") is None
    text = capsys.readouterr().out
    assert f"usage: %{magic}" in text
    assert ("in a longer word, such as {NAME}/run," in text) == (magic not in ("colabkit", "launch", "runtime"))
    assert shell.find_line_magic(magic).__doc__.split() == text.split()


def test_colabkit_opens_the_launcher(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colabkit, "launch", lambda: "opened", raising=False)
    assert shell.run_line_magic("colabkit", " ") == "opened"


def test_colabkit_with_a_verb_runs_its_magic(
    shell: InteractiveShell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns["folder"] = tmp_path / "a folder"
    plan = shell.run_line_magic("colabkit", "stage samples:digits --to $folder --dry-run")
    assert isinstance(plan, colabkit.StageReport)
    assert plan.path == tmp_path / "a folder"
    shell.run_line_magic("colabkit", "stage --help")
    assert "usage: %stage" in capsys.readouterr().out


def test_an_unknown_verb_is_a_one_line_error_with_a_similar_verb(shell: InteractiveShell) -> None:
    similar = r"Cannot run %colabkit stge: 'stge' is not a verb; expected one of .*\. Run %colabkit stage, or see "
    with pytest.raises(InvalidOption, match=similar):
        shell.run_line_magic("colabkit", "stge birds")
    with pytest.raises(InvalidOption, match=r"See %colabkit --help\."):
        shell.run_line_magic("colabkit", "xyzzy")


def test_the_doctor_diagnoses_the_named_or_the_latest_run(shell: InteractiveShell, tmp_path: Path) -> None:
    loader = colabkit.Loader((np.zeros((600, 2), np.float32), np.zeros(600, np.int64)), 4)
    shell.user_ns |= {"step": lambda batch: 0.5, "loader": loader}
    report = shell.run_line_magic("train", "step loader")
    last = shell.run_line_magic("doctor", "")
    assert isinstance(last, colabkit.Diagnosis)
    shell.user_ns["report"] = report
    assert shell.run_line_magic("doctor", "report") == last
    report.save(tmp_path / "run.json")
    assert shell.run_line_magic("doctor", f"'{tmp_path}/run.json'").verdict == last.verdict


@pytest.mark.parametrize("line", ["DataLoader(data)", "DataLoader(data, batch_size=4) --seconds 1", "loaders['train']"])
def test_the_doctor_requires_a_name_instead_of_an_expression(shell: InteractiveShell, line: str) -> None:
    with pytest.raises(InvalidOption, match=r"is an expression; expected the name of a variable\. Assign it"):
        shell.run_line_magic("doctor", line)


def test_the_file_of_a_saved_report_may_be_named_like_an_expression(
    shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run(1).json").write_text("{}")
    with pytest.raises(BadSource, match=r"TrainReport\.save"):
        shell.run_line_magic("doctor", "run(1).json")


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        ("/no/such/place", SourceMissing, "Cannot read '/no/such/place': no such file or folder"),
        ("a --treads 4", InvalidOption, "Cannot run %stage: unknown option --treads (did you mean --threads?)"),
    ],
)
def test_an_error_is_one_line_without_a_traceback(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], line: str, error: type, said: str
) -> None:
    assert isinstance(shell.run_cell(f"%stage {line}").error_in_exec, error)
    (shown,) = shown_by(capsys)
    assert shown.startswith(f"{error.__name__}: {said}")


@pytest.mark.parametrize("verb", ["stage", "pack", "prepare", "probe", "verify", "publish", "mount"])
def test_an_interrupted_call_is_one_line_that_says_what_is_kept(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    class Path:
        def __fspath__(self) -> NoReturn:
            raise KeyboardInterrupt

    shell.user_ns |= {"call": getattr(colabkit, verb), "path": Path()}
    out = ", 'out'" * (verb in ("pack", "publish"))
    result = shell.run_cell(f"call(path{out})")
    assert isinstance(result.error_in_exec, colabkit.Interrupted)
    (shown,) = shown_by(capsys)
    assert re.fullmatch(r"Interrupted: [A-Z][\w ]+ was interrupted\. .*\.", shown)


def test_variables_are_replaced_by_values_that_are_not_parsed_again() -> None:
    namespace = {"folder": "a b; --to x $HOME 'q", "report": type("R", (), {"path": Path("p q")})()}
    assert split_line("{folder} $folder {report.path}", namespace) == [*[namespace["folder"]] * 2, "p q"]
    assert split_line("'$folder' \"{folder}\" 'a{folder}'", namespace) == ["$folder", "{folder}", "a{folder}"]
    with pytest.raises(InvalidOption, match="Cannot use 'unknown': no variable has this name"):
        split_line("{unknown}", namespace)


def test_a_part_of_a_word_may_be_a_variable() -> None:
    namespace = {"drive": Path("My Drive"), "run": 7, "rates": [1, 2], "kept": "x"}
    line = "{drive}/a$run --to={drive}/b p/{run:03} $5/c"
    assert split_line(line, namespace) == ["My Drive/a7", "--to", "My Drive/b", "p/{run:03}", "$5/c"]
    assert split_line("a{kept} 'a{kept}' a\\{kept}", namespace) == ["ax", "a{kept}", "a{kept}"]
    found = r"Cannot use '\{folder\}/run': no variable is named 'folder'\. Check its name, or quote the word"
    with pytest.raises(InvalidOption, match=found):
        split_line("{folder}/run", namespace)
    found = r"Cannot use 'a\{rates\}': \{rates\} is a list; expected text, a number or a path\. Quote the word"
    with pytest.raises(InvalidOption, match=found):
        split_line("a{rates}", namespace)


def test_a_line_in_a_function_sees_the_variables_of_the_function(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["def go(source, out):", "    %pack {source} {out}.h5", "", "go('samples:digits', 'inner')"]
    with loaded_shell() as shell:
        shell.user_ns |= {"source": "missing", "out": "outer"}
        run(shell, "\n".join(lines))
    assert [path.name for path in tmp_path.glob("*.h5")] == ["inner.h5"]


def test_the_value_after_an_equals_sign_may_be_a_variable() -> None:
    namespace = {"folder": "a b"}
    assert split_line("--to={folder} --to=$folder --to=x{folder} --to='{folder}'", namespace) == [
        *["--to", "a b"] * 2,
        *["--to", "xa b"],
        "--to={folder}",
    ]
    with pytest.raises(InvalidOption, match="Cannot use 'unknown': no variable has this name"):
        split_line("--to={unknown}", namespace)


def test_a_variable_may_hold_any_object_that_the_function_takes(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    images, sizes = np.zeros((8, 8, 8, 3), np.uint8), {"train": 0.5, "test": 0.5}
    with loaded_shell() as shell:
        shell.user_ns |= {"images": images, "arrays": (images, np.arange(8) % 2), "sizes": sizes}
        assert run(shell, "%pack {images} images.h5").result.splits == {"train": 8}
        assert run(shell, "%pack {arrays} arrays.h5 --splits={sizes}").result.splits == {"train": 4, "test": 4}
        capsys.readouterr()
        run(shell, "%pack {arrays} again.h5 --seed $images")
        assert "--seed is an ndarray; expected a whole number" in shown_by(capsys)[0]


def test_the_name_of_a_variable_in_place_of_its_value_gets_its_form_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"folder": "a", "place": tmp_path, "images": np.zeros((8, 8, 8, 3), np.uint8), "count": 3, "function": run}
    with loaded_shell() as shell:
        shell.user_ns |= values
        braced = {}
        for verb, name in itertools.product(("pack", "verify"), (*values, "nothing")):
            error = run(shell, f"%{verb} {name} {'x.h5' * (verb == 'pack')}").error_in_exec
            assert isinstance(error, SourceMissing)
            assert isinstance(error, FileNotFoundError)
            braced[verb, name] = str(error).endswith(f". To pass the variable, write {{{name}}}.")
        assert [name for (verb, name), is_braced in braced.items() if verb == "pack" and is_braced] == [
            *("folder", "place", "images")
        ]
        # Only sources may be objects.
        assert [name for (verb, name), is_braced in braced.items() if verb == "verify" and is_braced] == [
            *("folder", "place")
        ]


@pytest.mark.parametrize("word", ["{count+1}", '{table["path"]}', "{table['path']}", "{count()}"])
def test_an_expression_in_braces_is_refused(word: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        split_line(f"a {word}", {"count": 1, "table": {}})
    assert "braces contain an expression; expected the name of a variable." in str(caught.value)
    assert split_line(f"a {word}", {"other": 1})[0] == "a"
    assert split_line("'{count+1}'", {"count": 1}) == ["{count+1}"]


def test_an_open_quote_or_escape_is_reported() -> None:
    with pytest.raises(InvalidOption, match=r"a quote is not closed\. Add the closing quote\."):
        split_line("stage 'half", {})
    with pytest.raises(InvalidOption, match="a backslash ends the line"):
        split_line("stage half\\", {})
