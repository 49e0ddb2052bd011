"""Words in a magic's line reach the function unchanged, without a shell or expansion. Errors are one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from magic_shells import loaded_shell
from verb_words import stand_in

import colabkit
from colabkit.errors import ColabkitError, InvalidOption
from colabkit.notebook.lines import quote_word, split_line, split_typed_line
from colabkit.notebook.verb_types import Option, Verb
from colabkit.notebook.verbs import LINES

TAKING_PATHS = [
    (verb, option)
    for verb in LINES
    for option in verb.options
    if option.kind in ("text", "path") and not option.is_closed
]
by_path = pytest.mark.parametrize(
    ("verb", "option"), TAKING_PATHS, ids=[f"{verb.name}-{option.name}" for verb, option in TAKING_PATHS]
)
characters = st.characters(blacklist_categories=["Cs", "Cc"])
SPECIAL = ["$HOME", "${HOME}", "{x}", "$x", "`id`", "$(id)", "; id", "a b", "a\\ b", "%pwd", "!id", *"'\"\\~*#"]
words = st.text(characters, min_size=1) | st.sampled_from(SPECIAL)
once = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    with loaded_shell() as shell:
        shell.user_ns["x"] = "WRONG"
        yield shell


def in_quotes(word: str, is_double: bool) -> str:
    if is_double:
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return "'" + word.replace("'", "'\"'\"'") + "'"


def call_of(shell: InteractiveShell, verb: Verb, line: str) -> dict[str, Any]:
    with mock.patch.object(colabkit, verb.name, create=True) as function:
        shell.run_line_magic(verb.name, line)
    shell.run_line_magic("dashboard", "--off")
    assert function.call_count == 1
    assert function.call_args.args == ()
    return function.call_args.kwargs


@by_path
@once
@given(word=words, is_double=st.booleans())
def test_a_quoted_path_reaches_the_function_unchanged(
    shell: InteractiveShell, verb: Verb, option: Option, word: str, is_double: bool
) -> None:
    if word.startswith("-"):
        # Without this prefix, the word would be an option, as for any program.
        word = f"./{word}"
    line = " ".join(stand_in(other) for other in verb.options if other.is_required and other is not option)
    places = [other for other in verb.options if not other.flag]
    value = in_quotes(word, is_double)
    if option.flag:
        line += f" {option.flag} {value}"
    else:
        given = [value if other is option else stand_in(other) for other in places[: places.index(option) + 1]]
        line = " ".join([*given, *(stand_in(other) for other in places[len(given) :] if other.is_required)])
    assert call_of(shell, verb, line)[option.name] == word


@once
@given(word=words, is_double=st.booleans())
def test_a_cell_magic_takes_paths_unchanged(shell: InteractiveShell, word: str, is_double: bool) -> None:
    if word.startswith("-"):
        word = f"./{word}"
    with (
        mock.patch.object(colabkit, "open_pack", side_effect=ColabkitError("enough")) as function,
        pytest.raises(ColabkitError),
    ):
        shell.run_cell_magic("train", f"{in_quotes(word, is_double)} --epochs 3", "pass")
    assert function.call_args.args == (shell.user_ns.get(word, word),)


@pytest.mark.parametrize("value", ["--dry-run", "-h", "--help", "--", "--nothing", "--to=x", "-hx", "a --b", "-1"])
@pytest.mark.parametrize("word", ["{p}", "$p", "{place.name}"])
def test_the_value_of_a_variable_is_never_parsed_as_an_option(
    shell: InteractiveShell, value: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns["p"], shell.user_ns["place"] = value, SimpleNamespace(name=value)
    options = call_of(shell, next(verb for verb in LINES if verb.name == "stage"), f"{word} --to {word}")
    assert (options["source"], options["to"], options["dry_run"]) == (value, value, False)
    assert type(options["source"]) is str
    with (
        mock.patch.object(colabkit, "open_pack", side_effect=ColabkitError("enough")) as function,
        pytest.raises(ColabkitError, match="enough"),
    ):
        shell.run_cell_magic("train", f"{word} --epochs 3", "pass")
    assert function.call_args.args == (value,)
    assert "usage" not in capsys.readouterr().out


def test_an_extra_word_is_reported_with_its_value(shell: InteractiveShell) -> None:
    shell.user_ns["p"] = "-h"
    with pytest.raises(InvalidOption, match=r"unrecognized arguments: -h\. See %stage --help"):
        shell.run_line_magic("stage", "a {p}")


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_a_typed_help_option_prints_the_help(
    shell: InteractiveShell, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(colabkit, "stage") as function:
        shell.run_line_magic("stage", f"a {word}")
    assert not function.called
    assert "usage: %stage" in capsys.readouterr().out


def test_a_path_after_two_dashes_may_look_like_a_help_option(shell: InteractiveShell) -> None:
    with mock.patch.object(colabkit, "stage") as function:
        shell.run_line_magic("stage", "-- -h")
    assert function.call_args.args == ("-h",) or function.call_args.kwargs["source"] == "-h"


@pytest.mark.parametrize("word", ["-hh", "-hx"])
def test_no_line_ends_the_kernel(shell: InteractiveShell, word: str) -> None:
    with mock.patch.object(colabkit, "stage") as function, pytest.raises(InvalidOption, match=r"^Cannot run %stage: "):
        shell.run_line_magic("stage", f"a {word}")
    assert not function.called


@given(st.lists(words, min_size=1, max_size=4), st.booleans())
def test_any_quoted_words_arrive_unchanged(texts: list[str], is_double: bool) -> None:
    line = " ".join(in_quotes(word, is_double) for word in texts)
    assert split_line(line, {"x": 1, "HOME": 2}) == texts


@given(st.text(characters, min_size=1), st.sampled_from(["", '"', "'"]))
def test_completed_words_are_parsed_as_the_path_that_was_completed(word: str, quote: str) -> None:
    typed = quote_word(word, quote)
    if typed is None:
        assert "'" in word
        return
    assert split_line(typed + quote, dict.fromkeys(("x", word.strip("${}")), "WRONG")) == [word]


@given(st.text(characters))
def test_completing_a_partial_line_never_fails(line: str) -> None:
    finished, last = split_typed_line(line)
    assert line.endswith(last)
    assert all(isinstance(word, str) for word in finished)


def test_spaces_may_be_escaped() -> None:
    assert split_line(r"a\ b \$x \{x} '\ '", {"x": 1}) == ["a b", "$x", "{x}", r"\ "]


@pytest.mark.parametrize("verb", [verb for verb in LINES if verb.options], ids=lambda verb: verb.name)
def test_every_parsing_error_is_one_line(
    shell: InteractiveShell, verb: Verb, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shell.user_ns["broken"] = "two\nlines \x1b[31m"
    for line in ("--nothing-like-this", "'open", "{broken} {broken} {broken} {broken}", "$broken --nothing"):
        with mock.patch.object(colabkit, verb.name, side_effect=InvalidOption("refused {broken}\nfor good")):
            result = shell.run_cell(f"%{verb.name} {line}")
        assert isinstance(result.error_in_exec, ColabkitError)
        shown = capsys.readouterr()
        assert len((shown.out + shown.err).rstrip("\n").splitlines()) == 1
        assert "\x1b[31m" not in shown.out + shown.err


def test_no_magic_passes_its_line_to_a_shell(shell: InteractiveShell, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for text in (f"$(touch {canary})", f"`touch {canary}`", f"; touch {canary}", f"{{open('{canary}','w')}}"):
        for verb in LINES:
            with mock.patch.object(colabkit, verb.name, create=True):
                shell.run_cell(f"%{verb.name} {text}")
        shell.run_line_magic("dashboard", "--off")
        shell.run_cell(f"%%train {text}\npass")
        shell.run_cell(f"%colabkit stage {text}")
    assert not canary.exists()


def test_a_cell_magic_without_arguments_names_the_line_that_shows_its_help(
    shell: InteractiveShell, capsys: Any
) -> None:
    shell.run_cell("%%train\npass")
    assert "See %train --help." in capsys.readouterr().out
