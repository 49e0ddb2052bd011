"""Convert between the words of a line and the arguments of a function, according to the table of verbs.

`parser_of` and `arguments_of` convert words to arguments. `words_of` rewrites Python arguments and calls in errors and
reports as options of a magic or a command. A value of kind `object` is a Python object, given as the name of a variable
in a notebook and as `FILE.py:NAME` in a terminal.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import GenericAlias, ModuleType
from typing import Any, NoReturn

from colabkit.foundation import InvalidOption, Report, cannot, parse_bytes
from colabkit.notebook.verbs import VERBS, Option, Verb

_MOST_NAMED = 3
"""Maximum number of loaders that a message suggests."""


class VerbParser(argparse.ArgumentParser):
    """A parser that rejects unknown options and suggests similar ones."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as `argparse` does, but report unknown arguments as an error."""
        words = list(sys.argv[1:] if args is None else args)
        options = words[: words.index("--")] if "--" in words else words
        known = self._option_string_actions
        for name in (word.partition("=")[0] for word in options if word.startswith("--") and " " not in word):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                self.error(f"unknown option {name}{f' (did you mean {near[0]}?)' if near else ''}")
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


class RaisingParser(VerbParser):
    """A parser that raises `InvalidOption` instead of exiting the process."""

    def error(self, message: str) -> NoReturn:
        """Raise `InvalidOption`."""
        known = [action.option_strings[0] if action.option_strings else action.dest for action in self._actions]
        needed = f"valid arguments are {', '.join(known)}"
        raise InvalidOption(cannot(f"run {self.prog}", message, needed, f"See {self.prog} --help"))


def parser_of(
    verb: Verb, prog: str, make: Callable[..., argparse.ArgumentParser] = RaisingParser
) -> argparse.ArgumentParser:
    """Return the parser of a verb's options.

    Args:
        verb: The verb.
        prog: Name in usage lines, such as `"%stage"` or `"colabkit stage"`.
        make: Function that creates an empty parser.
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
            how.update(nargs="+", metavar="NAME")
        elif not option.flag:
            optional = {} if option.is_required else {"nargs": "?", "default": option.default}
            how = {"type": partial(parse_value, option.kind), **optional}
        else:
            how.update(type=partial(parse_value, option.kind), metavar=option.name.upper())
            text += "" if option.default is None else f" (default: {option.default})"
        parser.add_argument(option.flag or option.name, help=text, **how)
    return parser


def parse_value(kind: str, text: str) -> Any:
    """Convert the text of an option to its value.

    Raises:
        argparse.ArgumentTypeError: If the text is invalid, with a message of the form `'TEXT' is not EXPECTED`.
    """
    parse, expected = _KINDS[kind]
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from error


def arguments_of(verb: Verb, parsed: argparse.Namespace, look_up: Callable[[str, str], Any]) -> dict[str, Any]:
    """Return the keyword arguments for the verb's function.

    Args:
        verb: The verb.
        parsed: Result of its parser.
        look_up: Function that returns the object for the text and the kind (`object` or `subject`) of an option.
    """
    values = {option.name: getattr(parsed, option.name) for option in verb.options}
    for option in verb.options:
        given = values[option.name]
        if given is not None and (option.kind == "object" or (option.kind == "subject" and not _is_report(given))):
            values[option.name] = look_up(given, option.kind)
        elif option.kind == "objects" and given is not None:
            values[option.name] = {name.rpartition(":")[2]: look_up(name, "object") for name in given}
    return values


def given_in(parser: argparse.ArgumentParser, words: Sequence[str]) -> set[str]:
    """Return the names of the options that a line contains, even with their default values; modifies the parser."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public API for this
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(words)))


def look_up_in(namespace: Mapping[str, Any], name: str, kind: str = "object") -> Any:
    """Return a variable by name.

    Args:
        namespace: Variables by name.
        name: Name of the variable.
        kind: `object`, or `subject` for something that the doctor can diagnose.

    Raises:
        InvalidOption: If there is no such variable; the message suggests similar names, or loaders.
    """
    if name in namespace:
        return namespace[name]
    could_be = _could_be_judged if kind == "subject" else _is_no_module
    known = [key for key, value in namespace.items() if not key.startswith("_") and could_be(value)]
    near = difflib.get_close_matches(name, known, n=2)
    hint = f"Did you mean {' or '.join(near)}" if near else "Define it first"
    if kind == "subject" and known and not near:
        hint = f"Name a loader, such as {' or '.join(known[:_MOST_NAMED])}"
    raise InvalidOption(cannot(f"use {name!r}", "no variable has this name", "expected an existing variable", hint))


def _is_no_module(value: Any) -> bool:
    return not isinstance(value, ModuleType)


def _could_be_judged(value: Any) -> bool:
    from colabkit.loading import may_be_loader
    from colabkit.training import TrainReport

    try:
        return isinstance(value, TrainReport) or (not isinstance(value, type | GenericAlias) and may_be_loader(value))
    except Exception:
        # Some objects raise when their attributes are read, such as a closed HDF5 dataset.
        return False


def _is_report(text: str) -> bool:
    return not text.isidentifier() and ".py:" not in text


def _size(text: str) -> int | tuple[int, int]:
    height, cross, width = text.partition("x")
    return (int(height), int(width)) if cross else int(text)


def _labels(text: str) -> str | list[str] | None:
    if text.lower() == "none":
        return None
    return [name.strip() for name in text.split(",")] if "," in text else text


def _fields(text: str) -> dict[str, str] | None:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return {name.strip(): (column or name).strip() for name, _, column in pairs} or None


def _splits(text: str) -> dict[str, float] | str | None:
    if "=" not in text:
        return text or None
    pairs = [part.partition("=") for part in text.split(",")]
    return {name.strip(): float(share) for name, _, share in pairs}


_KINDS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    **dict.fromkeys(("text", "path", "object", "data", "subject"), (str, "text")),
    "number": (int, "a whole number"),
    "seconds": (float, "a number of seconds"),
    "threads": (lambda text: text if text == "auto" else int(text), "auto or a whole number"),
    "steps": (lambda text: int(text) if text.lstrip("-").isdecimal() else text, "a whole number, or text"),
    "size": (_size, "a number, or height and width such as 240x320"),
    "folder": (lambda text: None if text.lower() == "none" else text, "a folder or none"),
    "labels": (_labels, "a column, or several such as a,b,c"),
    "splits": (_splits, "shares such as train=0.8,test=0.2, or a column"),
    "fields": (_fields, "columns such as age,caption or Z=age"),
    "amount": (lambda text: int(text) if text.isdecimal() else float(text), "a number"),
    "bytes": (parse_bytes, "a number of bytes, such as 256MiB"),
}
"""The parser of each kind of option, and a description of valid text."""


_QUOTED = r"""(?:'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")"""
_IN_PYTHON = re.compile(
    rf"""
    \bcolabkit\.(?P<verb>\w+)(?P<call>\((?:{_QUOTED}|[^()'"])*\))
    | (?<![\w.?&/=-]) (?P<name>[a-z_]+)=
      (?P<value>{_QUOTED} | \([^()]*\) | \[[^][]*\] | \{{[^{{}}]*\}} | (?:[\w.+-]*\w)?) (?![\w=(])
    | (?<!\w){_QUOTED}
    """,
    re.VERBOSE,
)
_FUNCTION_KINDS = ("labels", "splits", "fields")
"""Kinds of options that also accept a function in Python; messages then name them without a value."""


def in_other_words(text: str, option: Callable[[str, str], str], call: Callable[[str, str], str] | None = None) -> str:
    """Rewrite the keyword arguments and calls in a text; quoted parts stay unchanged.

    Args:
        text: Text of an error or a report.
        option: Function that returns the replacement for a name and a value (which may be empty), or `""` to leave them
            unchanged.
        call: The same for a call `colabkit.name(...)`, given the name and the arguments with parentheses; None leaves
            calls unchanged.
    """

    def reword(match: re.Match[str]) -> str:
        if match["name"]:
            return option(match["name"], match["value"]) or match[0]
        return (match["verb"] and call and call(match["verb"], match["call"])) or match[0]

    return _IN_PYTHON.sub(reword, text)


def words_of(verb: Verb, prefix: str) -> Callable[[str], str]:
    """Return a function that rewrites Python arguments and calls in a text as options and commands.

    `refresh=True` becomes `--refresh` if `verb` has that option, and `colabkit.mount()` becomes `%mount` or
    `colabkit mount`. Quoted text such as a path, other names, and values that a line cannot contain stay unchanged.

    Args:
        verb: The verb that was run.
        prefix: Prefix of a verb in a line, `"%"` or `"colabkit "`.
    """
    options = {option.name: option for option in verb.options}
    verbs = {known.call: known for known in VERBS if known.is_magic or prefix != "%"}

    def option_text(name: str, value: str) -> str:
        return _option_text(options[name], value) if name in options else ""

    def call_text(name: str, given: str) -> str:
        return _call_text(verbs[name], given, prefix) if name in verbs else ""

    return lambda text: in_other_words(text, option_text, call_text)


def tell_in(found: Any, verb: Verb, prefix: str) -> None:
    """Make a report, or the report of a pack, name options instead of Python arguments; see `words_of`.

    The doctor's advice stays in Python, since it is about the code that creates the `Loader`.
    """
    report = getattr(found, "report", found)
    if isinstance(report, Report) and verb.name != "doctor":
        report.tell_in(words_of(verb, prefix))


def _option_text(option: Option, text: str) -> str:
    """Return `name=text` as an option of a line; empty if a line cannot contain it."""
    if not text:
        return "" if option.kind in _FUNCTION_KINDS else option.flag
    if option.kind == "objects":
        # A dict of names and variables in Python, only the names of the variables in a line.
        names = re.findall(rf"{_QUOTED}(?=:)", text)
        return " ".join([option.flag, *(name[1:-1] for name in names)]) if names else ""
    try:
        return _given(option, ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError):
        return ""


def _call_text(verb: Verb, text: str, prefix: str) -> str:
    """Return the line equivalent to a call with such arguments; empty if there is none."""
    options = {option.name: option for option in verb.options}
    try:
        call = ast.parse(f"call{text}", mode="eval").body
        assert isinstance(call, ast.Call)
        places = [_word(ast.literal_eval(argument)) for argument in call.args]
        flags = [_given(options[argument.arg or ""], ast.literal_eval(argument.value)) for argument in call.keywords]
    except (ValueError, TypeError, SyntaxError, KeyError):
        return ""
    return " ".join([f"{prefix}{verb.name}", *places, *flags]) if all(flags) else ""


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
        value = ("x" if option.kind == "size" else ",").join(map(str, value))
        return [option.flag, value] if value else []
    return [option.flag, "..." if value is ... else str(value)]


def _given(option: Option, value: Any) -> str:
    return " ".join(map(_word, option_words(option, value)))


def _word(value: Any) -> str:
    return "..." if value in (..., "...") else shlex.quote(str(value))
