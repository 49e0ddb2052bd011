"""Convert the words of a line to function arguments and back, according to the table of verbs.

`parser_of` and `arguments_of` convert words to arguments. `LineWords` writes the options and calls in messages in the
syntax of a line, such as `--refresh`. A value of kind `object` is a Python object, given as the name of a variable in a
notebook and as `FILE.py:NAME` in a terminal.
"""

from __future__ import annotations

import argparse
import builtins
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Number
from types import GenericAlias, ModuleType, NoneType
from typing import Any

import colabkit
from colabkit.foundation import (
    CallRef,
    Code,
    InvalidOption,
    Report,
    Text,
    Words,
    cannot,
    kind_of,
    parse_bytes,
    parse_duration,
)
from colabkit.notebook.verb_parser import VerbParser
from colabkit.notebook.verb_types import Option, Verb
from colabkit.notebook.verbs import VERBS
from colabkit.storage import FSSPEC, WEB, address_of

GROUPS = {
    "runtime": "Machine and Google Drive",
    "fetch": "Copies of data",
    "pack": "Packs",
    "train_on": "Training",
    "demo": "Start",
}
"""Headings of the help, by the first verb below each heading."""

_MOST_NAMED = 3
"""Maximum number of loaders that a message suggests."""

_PATH_KINDS = ("path", "folder", "data", "subject")
"""The kinds of options that take a path."""

_HISTORY = ("In", "Out")
"""Variables of IPython that the user did not define."""


def verb_named(name: str, verbs: Iterable[Verb], prog: str) -> Verb:
    """Return a verb by name.

    Args:
        name: name of the verb.
        verbs: verbs to choose from.
        prog: word before the verb in a line, `"%colabkit"` or `"colabkit"`.

    Raises:
        InvalidOption: if there is no such verb; the message suggests a similar one.
    """
    known = {verb.name: verb for verb in verbs}
    if name in known:
        return known[name]
    similar = difflib.get_close_matches(name, known, n=1)
    next_step = f"Run {prog} {similar[0]}, or see {prog} --help" if similar else f"See {prog} --help"
    if name in dir(colabkit):
        is_magic = any(verb.name == name for verb in VERBS)
        next_step = f"Run %{name} in a notebook" if is_magic else f"In Python, use colabkit.{name}"
    act, expected = f"run {prog} {name}", f"one of {', '.join(known)}"
    raise InvalidOption(cannot(act, f"{name!r} is not a verb", expected, next_step))


def list_verbs(verbs: Iterable[Verb]) -> str:
    """Return one line for each verb, and a heading for each group of verbs."""
    lines = []
    for verb in verbs:
        if verb.name in GROUPS:
            lines += ["", f"{GROUPS[verb.name]}:"]
        lines.append(f"  {verb.name:14} {verb.help}")
    return "\n".join(lines[1:])


def parser_of(
    verb: Verb, prog: str, make: Callable[..., argparse.ArgumentParser] = VerbParser
) -> argparse.ArgumentParser:
    """Return the parser of a verb's options.

    Args:
        verb: the verb.
        prog: name in usage lines, such as `"%stage"` or `"colabkit stage"`.
        make: function that creates an empty parser.
    """
    about = f"{verb.help[:1].upper()}{verb.help[1:]}."
    parser = make(prog=prog, description=about, epilog=verb.more or None, allow_abbrev=False)
    for option in verb.options:
        text = option.help.replace("%", "%%")
        how: dict[str, Any] = {"dest": option.name, "default": option.default}
        if option.kind == "flag":
            how["action"] = argparse.BooleanOptionalAction
            text += f" (default: {'yes' if option.default else 'no'})"
        elif option.kind == "switch":
            how["action"] = "store_true"
        elif option.kind == "objects":
            how.update(action="extend", nargs="+", metavar="NAME")
        elif not option.flag:
            optional = {} if option.is_required else {"nargs": "?", "default": option.default}
            how = {"type": partial(_parse, option), **optional}
            if option.is_closed:
                how["metavar"] = _one_of(option)
        else:
            how.update(
                type=partial(_parse, option), metavar=_one_of(option) if option.is_closed else option.name.upper()
            )
            text += "" if option.default is None else f" (default: {option.default})"
        parser.add_argument(option.flag or option.name, help=text, **how)
    return parser


def _one_of(option: Option) -> str:
    return f"{{{','.join(option.words)}}}"


def _parse(option: Option, text: str) -> Any:
    if option.is_closed and text not in option.words:
        similar = difflib.get_close_matches(text, option.words, n=1)
        hint = f" (did you mean {similar[0]}?)" if similar else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(option.words)}{hint}")
    name, equals, value = text.partition("=")
    if not option.flag and equals and name == option.name and not os.path.lexists(text):
        raise argparse.ArgumentTypeError(f"{text!r} is written as in Python (write {shlex.quote(value)})")
    return parse_value(option.kind, text)


def parse_value(kind: str, text: str) -> Any:
    """Convert the text of an option to its value.

    Raises:
        argparse.ArgumentTypeError: if the text is invalid, with a message of the form `'TEXT' is not EXPECTED`.
    """
    parse, expected = _KINDS[kind]
    try:
        return parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from None


def arguments_of(verb: Verb, parsed: argparse.Namespace, look_up: Callable[[str, str], Any]) -> dict[str, Any]:
    """Return the keyword arguments for the verb's function.

    Args:
        verb: the verb.
        parsed: result of its parser.
        look_up: function that returns the object for the text and the kind (`object` or `subject`) of an option.
    """
    values = {option.name: getattr(parsed, option.name) for option in verb.options}
    for option in verb.options:
        given = values[option.name]
        # The function itself describes the sources that it takes.
        if isinstance(given, str) and not given and option.kind in _PATH_KINDS and option.name != "source":
            raise _empty_path(option)
        if isinstance(given, str) and (option.kind == "object" or (option.kind == "subject" and not _is_report(given))):
            values[option.name] = look_up(given, option.kind)
        elif option.kind == "objects" and given is not None:
            if unnamed := [one for one in given if not isinstance(one, str)]:
                found = f"{option.flag} contains {kind_of(unnamed[0])}"
                raise InvalidOption(cannot("read the line", found, "names of variables", "Write them without braces"))
            names = [name.rpartition(":")[2] for name in given]
            if twice := next((name for name in names if names.count(name) > 1), ""):
                found, expected = f"{option.flag} names {twice!r} twice", "a different name for each object"
                next_step = "Checkpoints store each object under its name, so give one of the variables another name"
                raise InvalidOption(cannot("read the line", found, expected, next_step))
            values[option.name] = {key: look_up(name, "object") for key, name in zip(names, given, strict=True)}
    return values


def _empty_path(option: Option) -> InvalidOption:
    kind = "folder" if option.kind == "folder" else "path"
    other = f", or omit {option.flag or option.name}" if not option.is_required else ""
    if "none" in option.words:
        other = f", or use {option.flag} none"
    found = f"{option.flag or option.name} is empty"
    return InvalidOption(cannot("read the line", found, "", f"Pass a {kind}{other}"))


def run_verb(verb: Verb, arguments: Mapping[str, Any]) -> Any:
    """Call the verb's function, then the methods of its report that are switched on, and return the last result."""
    methods = [option.name for option in verb.options if option.is_method]
    found = getattr(colabkit, verb.name)(**{name: one for name, one in arguments.items() if name not in methods})
    for name in methods:
        if arguments[name]:
            found = getattr(found, name)()
    return found


def given_in(parser: argparse.ArgumentParser, words: Sequence[str]) -> set[str]:
    """Return the names of the options in a line, including those set to their defaults; modifies the parser."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public API for this
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(words)))


def look_up_in(namespace: Mapping[str, Any], name: str, kind: str = "object") -> Any:
    """Return a variable by name.

    Args:
        namespace: variables by name.
        name: name of the variable.
        kind: `object`, or `subject` for something that the doctor can diagnose.

    Raises:
        InvalidOption: if there is no such variable; the message suggests similar names, or loaders.
    """
    if name in namespace:
        return namespace[name]
    raise missing_variable(namespace, name, kind)


def without_secrets(source: str) -> str:
    """Return a source for display, without possible secrets; it is unchanged if it cannot contain any."""
    if "://" not in source:
        return source
    address = address_of(source)
    return address.shown if address.kind in (WEB, FSSPEC) else source


def missing_variable(namespace: Mapping[str, Any], name: str, kind: str = "object") -> InvalidOption:
    """Return the error for a variable that does not exist; it suggests similar names, or loaders."""
    could_be = _can_be_diagnosed if kind == "subject" else _is_no_module
    known = [key for key, value in namespace.items() if _is_own(key, value) and could_be(value)]
    similar = difflib.get_close_matches(name, known, n=2)
    if not (name.isidentifier() or similar):
        is_expression = re.search(r"[(\[]", name) or name.partition(".")[0] in namespace
        act = "Assign it to" if is_expression else "Load it into"
        advice = f"{act} a variable, and write the variable's name"
        return InvalidOption(cannot(f"use {name!r}", "it is not a name", "the name of a variable", advice))
    next_step = f"Check its name, or use {' or '.join(similar)}" if similar else "Define it first"
    if kind == "subject" and known and not similar:
        next_step = f"Name a loader, for example {' or '.join(known[:_MOST_NAMED])}"
    return InvalidOption(cannot(f"use {name!r}", "no variable has this name", "", next_step))


def _is_own(name: str, value: Any) -> bool:
    """Return whether a variable may be one of the user, not of Python or IPython, such as `open` or `Out`."""
    is_builtin = hasattr(builtins, name) and callable(value)
    return not (name.startswith("_") or name in _HISTORY or is_builtin)


def _is_no_module(value: Any) -> bool:
    return not isinstance(value, ModuleType)


def _can_be_diagnosed(value: Any) -> bool:
    from colabkit.loading import may_be_loader
    from colabkit.training import TrainReport

    try:
        return isinstance(value, TrainReport) or (not isinstance(value, type | GenericAlias) and may_be_loader(value))
    except Exception:
        # Reading attributes of some objects raises, for example of a closed HDF5 dataset.
        return False


def _is_report(text: str) -> bool:
    return not text.isidentifier() and ".py:" not in text


def _size(text: str) -> int | tuple[int, int]:
    height, cross, width = text.replace("×", "x").partition("x")
    return (int(height), int(width)) if cross else int(text)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return parse_duration(text)


def _labels(text: str) -> str | list[str] | None:
    if text.lower() == "none":
        return None
    return [name.strip() for name in text.split(",")] if "," in text else text


def _fields(text: str) -> dict[str, str] | None:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return {name.strip(): (column or name).strip() for name, _, column in pairs} or None


def _splits(text: str) -> dict[str, float] | str | None:
    from colabkit.packs import parse_splits

    return parse_splits(text) or None


_KINDS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    **dict.fromkeys(("text", "path", "object", "data", "subject"), (str, "text")),
    "number": (int, "a whole number"),
    "seconds": (_seconds, "a duration in seconds, or with a unit (s, min, h or d)"),
    "number_or_auto": (lambda text: text if text == "auto" else int(text), "auto or a whole number"),
    "steps": (lambda text: int(text) if text.lstrip("-").isdecimal() else text, "a whole number, or text"),
    "size": (_size, "a number, or height and width such as 240x320"),
    "size_or_auto": (
        lambda text: text if text == "auto" else _size(text),
        "auto, a number, or height and width such as 240x320",
    ),
    "folder": (lambda text: None if text.lower() == "none" else text, "a folder or none"),
    "labels": (_labels, "a column, or several such as a,b,c"),
    "splits": (_splits, "shares such as train=0.8,test=0.2, or a column"),
    "fields": (_fields, "columns such as age,caption or Z=age"),
    "amount": (lambda text: int(text) if text.isdecimal() else float(text), "a number"),
    "bytes": (parse_bytes, "a number of bytes, such as 256MiB"),
}
"""Parser for each kind of option, and a description of the text that the parser accepts."""


_WRITTEN = (str, Number, NoneType, os.PathLike, tuple, list, set, Mapping)
"""Types of values that a message shows in Python if a line cannot contain them."""


class LineWords(Words):
    """The wording of messages for a line in a notebook or a terminal: `--refresh` and `%mount`, or `colabkit mount`.

    Values that a line cannot contain, such as functions, and options of other verbs are written in Python.

    Args:
        verb: the verb that was run.
        prefix: prefix of a verb in a line, `"%"` or `"colabkit "`.
    """

    def __init__(self, verb: Verb, prefix: str) -> None:
        self._options = {option.name: option for option in verb.options}
        self._verbs = {known.name: known for known in VERBS if (known.is_magic if prefix == "%" else known.is_command)}
        self._prefix = prefix

    def option(self, name: str, value: Any) -> str:
        """Return an option in the syntax of a line, with its value if one is given."""
        option = self._options.get(name)
        text = _option_text(option, value) if option else ""
        if option and option.flag and not text and not (isinstance(value, _WRITTEN) or callable(value)):
            # A line cannot contain an object such as a tensor, but `{name}` can stand for one.
            text = f"{option.flag} is {kind_of(value)}"
        return text or super().option(name, value)

    def omit(self, name: str) -> str:
        """Return the advice to omit an option, in lower case."""
        option = self._options.get(name)
        return f"omit {(option and (option.flag or option.name)) or super().option(name, ...)}"

    def python_only(self, text: Text) -> str:
        """Return an empty string, because advice about Python code does not apply to a line."""
        return ""

    def call(self, call: CallRef) -> str:
        """Return the line that is equivalent to a call."""
        verb = self._verbs.get(call.name)
        return (_call_text(verb, call, self._prefix) if verb else "") or super().call(call)


def speak(found: Any, words: LineWords) -> None:
    """Use the syntax of a line for options and calls in a report, or in the report of a pack."""
    report = getattr(found, "report", found)
    if isinstance(report, Report):
        report.speak(words)


def _option_text(option: Option, value: Any) -> str:
    if value is ...:
        return option.flag or option.name
    if option.kind == "objects":
        # Python takes a dict of names and variables; a line takes only the names of the variables.
        return " ".join([option.flag, *value]) if isinstance(value, Mapping) else ""
    return "" if isinstance(value, Code) else _given(option, value)


def _call_text(verb: Verb, call: CallRef, prefix: str) -> str:
    """Return a call as a line; empty if a line cannot contain it."""
    places = [option for option in verb.options if not option.flag]
    if len(call.arguments) > len(places) or (call.result and prefix != "%"):
        return ""
    words = [_argument_text(option, value, prefix) for option, value in zip(places, call.arguments, strict=False)]
    options = {option.name: option for option in verb.options}
    words += [_option_text(options[name], value) if name in options else "" for name, value in call.options.items()]
    if not all(words):
        return ""
    return " ".join([f"{call.result} = " * bool(call.result) + f"{prefix}{verb.name}", *words])


def _argument_text(option: Option, value: Any, prefix: str) -> str:
    if not isinstance(value, Code) or value == "...":
        return _word(value)
    # A line in a notebook names a variable; a line in a terminal cannot.
    if prefix != "%" or not value.isidentifier():
        return ""
    return str(value) if option.kind in ("object", "subject") else f"{{{value}}}"


def option_words(option: Option, value: Any) -> list[str]:
    """Return an option and its value as the words of a line, unquoted; empty if a line cannot contain them."""
    if not option.flag:
        return []
    if option.kind in ("flag", "switch"):
        return [option.flag] if value is True else [f"--no-{option.flag[2:]}"] if value is False else []
    if value is None:
        return [option.flag, "none"] if "none" in option.words else []
    if isinstance(value, dict):
        value = [f"{name}={one}" for name, one in value.items()]
    if isinstance(value, tuple | list):
        value = ("x" if option.kind.startswith("size") else ",").join(map(str, value))
        return [option.flag, value] if value else []
    if value is not ... and not isinstance(value, str | Number | os.PathLike):
        return []
    return [option.flag, "..." if value is ... else str(value)]


def _given(option: Option, value: Any) -> str:
    return " ".join(map(_word, option_words(option, value)))


def _word(value: Any) -> str:
    return "..." if value in (..., "...") else str(value) if isinstance(value, Code) else shlex.quote(str(value))
