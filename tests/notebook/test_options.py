"""Magics and commands have the options of the functions, with the same values and defaults."""

from __future__ import annotations

import typing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from verb_words import stand_in

import colabkit
from colabkit.errors import InvalidOption
from colabkit.notebook.options import GROUPS, arguments_of, given_in, list_verbs, look_up_in, parser_of, run_verb
from colabkit.notebook.verb_options import LOADING
from colabkit.notebook.verb_types import Verb
from colabkit.notebook.verbs import CELLS, DASHBOARD, VERBS

OPTIONS = [(verb, option) for verb in (*VERBS, *CELLS) for option in verb.options]
LOADER = DataLoader(TensorDataset(torch.zeros(4, 2)))


def test_offered_words_are_the_values_that_the_function_accepts() -> None:
    for verb, option in OPTIONS:
        if verb is DASHBOARD:
            continue
        function = colabkit.Loader.__init__ if option in LOADING else getattr(colabkit, verb.name)
        hints = typing.get_type_hints(function)
        allowed = {str(word) for word in literals(hints.get(option.name))}
        if allowed and option.kind != "flag":
            assert set(option.words) == allowed
            assert option.is_closed == (typing.get_origin(hints[option.name]) is typing.Literal), option.name


def test_functions_accept_every_duration_that_a_line_accepts() -> None:
    for verb, option in OPTIONS:
        if option.kind == "seconds":
            hint = typing.get_type_hints(getattr(colabkit, verb.name))[option.name]
            assert str in typing.get_args(hint), f"{verb.name}: {option.name}"


def literals(hint: object) -> set[object]:
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return {value for one in typing.get_args(hint) for value in literals(one)}


def test_given_options_are_distinguished_from_defaults() -> None:
    def given(*words: str) -> set[str]:
        return given_in(parser_of(CELLS[0], "%%train"), words)

    assert given("p.h5") == {"pack"}
    assert given("p.h5", "--batch-size", "64", "--no-shuffle") == {"pack", "batch_size", "shuffle"}
    assert given("p.h5", "--state", "a", "b") == {"pack", "state"}


def test_omitted_options_have_the_defaults_of_the_function() -> None:
    for verb in VERBS:
        required = {
            option.name: 7 if option.kind in ("amount", "bytes") else option.name
            for option in verb.options
            if option.is_required
        }
        parsed = parser_of(verb, verb.name).parse_args([str(value) for value in required.values()])
        values = arguments_of(verb, parsed, lambda name, kind: name)
        assert values == {option.name: required.get(option.name, option.default) for option in verb.options}


def test_a_switch_for_a_method_calls_it_on_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colabkit, "doctor", lambda **options: SimpleNamespace(apply=lambda: "tried", options=options))
    line = parse("doctor", "--seconds", "2", "--apply")
    assert run_verb(named("doctor"), line) == "tried"
    found = run_verb(named("doctor"), {**line, "apply": False})
    assert found.options == {"of": None, "seconds": 2.0, "headspace": None}


def test_every_option_is_explained_in_the_help() -> None:
    for verb, option in OPTIONS:
        assert option.help.split(",")[0] in " ".join(parser_of(verb, verb.name).format_help().split())


def test_a_wrong_choice_lists_the_valid_ones_and_the_nearest() -> None:
    message = r"Cannot run pack: --encoding 'rwa' is not one of raw, source, jpeg, auto \(did you mean raw\?\)\."
    with pytest.raises(InvalidOption, match=message):
        parse("pack", "a", "b.h5", "--encoding", "rwa")
    assert "--encoding {raw,source,jpeg,auto}" in parser_of(named("pack"), "pack").format_help()
    assert parse("pack", "a", "b.h5", "--channels", "1")["channels"] == 1


def named(name: str) -> Verb:
    return next(verb for verb in VERBS if verb.name == name)


def test_every_verb_stands_on_one_line_below_a_heading() -> None:
    lines = list_verbs(VERBS).splitlines()
    assert max(map(len, lines)) < 80
    headings = [line for line in lines if line and line[0] != " "]
    assert headings == [f"{heading}:" for heading in GROUPS.values()]
    assert [line.split()[0] for line in lines if line.startswith(" ")] == [verb.name for verb in VERBS]


def parse(verb_name: str, *words: str, **objects: object) -> dict[str, object]:
    verb = named(verb_name)
    return arguments_of(verb, parser_of(verb, verb_name).parse_args(words), partial(look_up_in, objects))


def test_values_are_converted_to_their_types() -> None:
    values = parse("pack", "a", "b.h5", "--size", "240x320", "--splits", "train=0.9,test=0.1", "--seed", "3")
    assert (values["size"], values["splits"], values["seed"]) == ((240, 320), {"train": 0.9, "test": 0.1}, 3)
    assert parse("pack", "a", "b", "--size", "240×320")["size"] == (240, 320)
    assert parse("pack", "a", "b", "--size", "64", "--splits", "")["size"] == 64
    assert parse("pack", "a", "b", "--splits", "")["splits"] is None
    assert parse("stage", "a", "--threads", "4", "--no-progress", "--refresh")["threads"] == 4
    assert parse("stage", "a", "--no-progress")["progress"] is False
    assert [parse("flush", "--timeout", text)["timeout"] for text in ("90", "1.5", "1h 30min")] == [90, 1.5, 5400]
    for text, amount in (("12", 12), ("0.5", 0.5), ("1e-3", 0.001)):
        given = parse("pack", "a", "b", "--max-bad", text)["max_bad"]
        assert (type(given), given) == (type(amount), amount)


def test_objects_are_looked_up_by_name() -> None:
    step, model = object(), object()
    values = parse("train", "step", "loader", "--state", "model", step=step, model=model, loader=1)
    assert values["step"] is step
    assert values["state"] == {"model": model}


def test_repeated_state_options_add_up_and_a_name_given_twice_is_an_error() -> None:
    known = {"step": 1, "loader": 2, "model": 3, "optimizer": 4, "a.py:net": 5, "b.py:net": 6}
    values = parse("train", "step", "loader", "--state", "model", "--state", "optimizer", **known)
    assert values["state"] == {"model": 3, "optimizer": 4}
    with pytest.raises(InvalidOption, match="--state names 'net' twice"):
        parse("train", "step", "loader", "--state", "a.py:net", "b.py:net", **known)


def test_the_doctor_takes_a_variable_or_a_saved_report() -> None:
    report = object()
    assert parse("doctor", "report", report=report)["of"] is report
    assert parse("doctor", "runs/run.json")["of"] == "runs/run.json"
    assert parse("doctor") == {"of": None, "seconds": 5.0, "headspace": None, "apply": False}


def test_similar_names_are_suggested_for_a_misspelled_variable() -> None:
    message = r"Cannot use 'modle': no variable has this name\. Check its name, or use model\."
    with pytest.raises(InvalidOption, match=message):
        parse("train", "step", "loader", "--state", "modle", step=1, model=2, loader=3)


@pytest.mark.parametrize(
    ("objects", "step"),
    [
        ({}, "Define it first"),
        ({"loader": LOADER}, "Name a loader, for example loader"),
        ({"nopes": LOADER, "loader": LOADER}, "Check its name, or use nopes"),
        ({"_nope": LOADER, "Nope": list[int], "noper": "a text", "node": 3}, "Define it first"),
    ],
)
def test_only_possible_loaders_are_suggested_to_the_doctor(objects: dict[str, object], step: str) -> None:
    class ClosedDataset:
        @property
        def shape(self) -> tuple[int, ...]:
            raise ValueError("its file is closed")

    with pytest.raises(InvalidOption) as caught:
        parse("doctor", "nope", np=np, nope_=ClosedDataset(), **objects)
    assert str(caught.value).endswith(f"no variable has this name. {step}.")


def test_modules_are_not_suggested_as_objects() -> None:
    with pytest.raises(InvalidOption, match=r"no variable has this name\. Define it first\.$"):
        parse("train", "npp", "loader", np=np)


def test_functions_of_python_and_the_history_of_ipython_are_not_suggested() -> None:
    def open_cells() -> None: ...

    with pytest.raises(InvalidOption, match=r"no variable has this name\. Define it first\.$"):
        parse("train", "nope", "loader", open=open_cells)
    with pytest.raises(InvalidOption, match=r"or use outs\.$"):
        parse("train", "out", "loader", Out={}, outs=3)
    with pytest.raises(InvalidOption, match=r"or use input\.$"):
        parse("train", "inputt", "loader", input=3)


@pytest.mark.parametrize(
    ("word", "step"),
    [
        ("birds.h5", "Load it into a variable"),
        ("Loader(data)", "Assign it to a variable"),
        ("step.loader", "Assign it to a variable"),
    ],
)
def test_a_path_or_an_expression_for_an_object_asks_for_a_variable(word: str, step: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse("train", "step", word, step=1)
    expected = f"it is not a name; expected the name of a variable. {step}, and write the variable's name."
    assert str(caught.value) == f"Cannot use {word!r}: {expected}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("stage a b", "unrecognized arguments: b (did you mean --to b?)"),
        ("stage a b c", "unrecognized arguments: b c."),
        ("stage a -to b", "unrecognized arguments: -to b (did you mean --to?)"),
        ("stage a --refresh yes", "unrecognized arguments: yes (--refresh takes no value)"),
        ("stage a refresh=True", "unrecognized arguments: refresh=True (did you mean --refresh?)"),
        ("stage a progress=False", "unrecognized arguments: progress=False (did you mean --no-progress?)"),
        ("pack a b c", "unrecognized arguments: c."),
        ("pack a b size=64", "unrecognized arguments: size=64 (did you mean --size 64?)"),
        ("pack a --to b", "unknown option --to (write its value without --to)"),
        ("pack source=a to=b", "source 'source=a' is written as in Python (write a)"),
        ("dashboard off", "unrecognized arguments: off (did you mean --off?)"),
    ],
)
@pytest.mark.every_case
def test_an_argument_in_another_form_is_reported_with_its_form_in_a_line(line: str, said: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse(*line.split())
    assert said in str(caught.value)


def test_a_path_may_begin_with_the_name_of_its_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source=a").mkdir()
    assert parse("stage", "source=a")["source"] == "source=a"


def test_an_empty_path_is_refused_with_the_name_of_its_option() -> None:
    for verb, option in OPTIONS:
        if option.kind in ("path", "folder", "data", "subject") and option.name != "source":
            words = [stand_in(other) for other in verb.options if other.is_required and other is not option]
            before = [other for other in verb.options if other.is_required].index(option) if option.is_required else 99
            words[before:before] = [option.flag, ""] if option.flag else [""]
            with pytest.raises(InvalidOption) as caught:
                arguments_of(verb, parser_of(verb, "%it").parse_args(words), lambda name, kind: name)
            assert f"Cannot read the line: {option.flag or option.name} is empty. Pass a " in str(caught.value)
    with pytest.raises(InvalidOption, match=r"--to is empty\. Pass a folder, or use --to none\.$"):
        parse("prepare", "a", "--to", "")
    with pytest.raises(InvalidOption, match=r"--log is empty\. Pass a path, or omit --log\.$"):
        parse("train", "step", "loader", "--log", "", step=1, loader=2)


def test_invalid_arguments_are_one_line_errors() -> None:
    for line in ("stage", "stage a --treads 4", "stage a --threads x", "pack a b --size big"):
        with pytest.raises(InvalidOption, match=r"^Cannot run .*--help\.$"):
            parse(*line.split())


def test_an_unknown_option_is_reported_first_with_a_similar_option() -> None:
    for verb, option in OPTIONS:
        misspelt = option.flag[:-2] + option.flag[-1:]
        if option.flag:
            with pytest.raises(InvalidOption) as caught:
                parser_of(verb, "%it").parse_args([misspelt, "1"])
            assert f"Cannot run %it: unknown option {misspelt} (did you mean {option.flag}?)" in str(caught.value)


def test_words_after_two_dashes_are_not_options() -> None:
    assert parse("stage", "--", "--a-folder")["source"] == "--a-folder"


def test_none_may_be_written_as_in_python() -> None:
    assert all(parse("pack", "a", "b", "--labels", word)["labels"] is None for word in ("none", "None"))
    assert all(parse("prepare", "a", "--to", word)["to"] is None for word in ("none", "None"))
    assert parse("pack", "a", "b", "--splits", "none")["splits"] == "none", (
        "the word none is not taken as the name of a column"
    )


def test_a_positional_option_with_a_default_may_be_omitted() -> None:
    assert parse("mount")["path"] is None
    assert parse("mount", "/content/gdrive", "--readonly")["path"] == "/content/gdrive"
    assert parse("fetch", "https://example.org/a.zip", "data")["to"] == "data"
