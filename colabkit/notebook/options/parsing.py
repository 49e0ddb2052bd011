"""Lines of words to arguments of functions, by the table of options."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import GenericAlias, ModuleType
from typing import Any, NoReturn

from colabkit.foundation import InvalidOption, cannot, parse_bytes
from colabkit.notebook.options.verbs import Verb

_MOST_NAMED = 3  # loaders in a message


class VerbParser(argparse.ArgumentParser):
    """A parser that refuses what it does not know itself, with the option that may be meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return what `argparse` does, where everything is known."""
        words = list(sys.argv[1:] if args is None else args)
        options = words[: words.index("--")] if "--" in words else words
        known = self._option_string_actions
        for name in (word.partition("=")[0] for word in options if word.startswith("--") and " " not in word):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                self.error(f"there is no option {name}{f' (did you mean {near[0]}?)' if near else ''}")
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


class RaisingParser(VerbParser):
    """A parser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        """Raise `InvalidOption` for what is wrong with the arguments."""
        known = [action.option_strings[0] if action.option_strings else action.dest for action in self._actions]
        needed = f"its arguments are {', '.join(known)}"
        raise InvalidOption(cannot(f"run {self.prog}", message, needed, f"See {self.prog} --help"))


def parser_of(
    verb: Verb, prog: str, make: Callable[..., argparse.ArgumentParser] = RaisingParser
) -> argparse.ArgumentParser:
    """Return the parser of a verb's options; unsuited arguments raise `InvalidOption`.

    Args:
        verb: whose options.
        prog: the name in usage lines, as in `"%stage"` or `"colabkit stage"`.
        make: makes an empty parser.
    """
    parser = make(
        prog=prog, description=f"{verb.help[:1].upper()}{verb.help[1:]}.", epilog=verb.more or None, allow_abbrev=False
    )
    for kind in _KINDS:
        parser.register("type", kind, partial(parse_value, kind))
    for option in verb.options:
        text = option.help.replace("%", "%%")
        if option.is_required:
            parser.add_argument(option.name, type=option.kind, help=text)
        elif option.is_positional:
            parser.add_argument(option.name, type=option.kind, nargs="?", default=option.default, help=text)
        elif option.kind == "flag":
            parser.add_argument(
                option.flag,
                dest=option.name,
                action=argparse.BooleanOptionalAction,
                default=option.default,
                help=f"{text} (default: {'yes' if option.default else 'no'})",
            )
        elif option.kind == "switch":
            parser.add_argument(option.flag, dest=option.name, action="store_true", help=text)
        elif option.kind == "objects":
            parser.add_argument(
                option.flag, dest=option.name, nargs="+", default=option.default, metavar="NAME", help=text
            )
        else:
            shown = "" if option.default is None else f" (default: {option.default})"
            parser.add_argument(
                option.flag,
                dest=option.name,
                type=option.kind,
                default=option.default,
                metavar=option.name.upper(),
                help=text + shown,
            )
    return parser


def parse_value(kind: str, text: str) -> Any:
    """Return the value of an option's text.

    Raises:
        argparse.ArgumentTypeError: if it is no text of this kind; its message reads `'TEXT' is not WHAT IT HAS TO BE`.
    """
    parse, expected = _KINDS[kind]
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from error


def arguments_of(verb: Verb, parsed: argparse.Namespace, look_up: Callable[[str, str], Any]) -> dict[str, Any]:
    """Return the keyword arguments for the verb's function.

    Args:
        verb: whose function.
        parsed: what its parser returned.
        look_up: turns the text of an `object` or `subject` and that kind into the object.
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
    """Return the names of the options that a line gives, whether or not they are the defaults; the parser is used up.

    Args:
        parser: of a verb.
        words: of the line.
    """
    for action in parser._actions:  # noqa: SLF001 - there is no other way to tell what is given
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(words)))


def look_up_in(namespace: Mapping[str, Any], name: str, kind: str = "object") -> Any:
    """Return a variable by name.

    Args:
        namespace: of the variables.
        name: of one of them.
        kind: `object`, or `subject` for what the doctor judges.

    Raises:
        InvalidOption: if there is none; near names of what may be meant are suggested, or else what can be judged.
    """
    if name in namespace:
        return namespace[name]
    could_be = _could_be_judged if kind == "subject" else _is_no_module
    known = [key for key, value in namespace.items() if not key.startswith("_") and could_be(value)]
    near = difflib.get_close_matches(name, known, n=2)
    hint = f"Did you mean {' or '.join(near)}" if near else "Define it first"
    if kind == "subject" and known and not near:
        hint = f"Name a loader, as {' or '.join(known[:_MOST_NAMED])}"
    raise InvalidOption(cannot(f"use {name!r}", "there is no variable of this name", "and one is needed", hint))


def _is_no_module(value: Any) -> bool:
    return not isinstance(value, ModuleType)


def _could_be_judged(value: Any) -> bool:
    from colabkit.loading import may_be_loader
    from colabkit.training import TrainReport

    try:
        return isinstance(value, TrainReport) or (not isinstance(value, type | GenericAlias) and may_be_loader(value))
    except Exception:  # somebody's object that cannot even be looked at, as what is left of a closed HDF5 file
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
    if not text:
        return None
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    return {name.strip(): float(share) for name, _, share in pairs}


def _steps(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


_KINDS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    **dict.fromkeys(("text", "path", "object", "data", "subject"), (str, "text")),
    "number": (int, "a whole number"),
    "seconds": (float, "a number of seconds"),
    "threads": (lambda text: text if text == "auto" else int(text), "auto or a whole number"),
    "steps": (_steps, "a whole number, or text"),
    "size": (_size, "one number, or height x width as in 240x320"),
    "folder": (lambda text: None if text.lower() == "none" else text, "a folder or none"),
    "labels": (_labels, "a column, or several as in a,b,c"),
    "splits": (_splits, "shares, as in train=0.8,test=0.2, or a column"),
    "fields": (_fields, "columns, as in age,caption or Z=age"),
    "amount": (lambda text: int(text) if text.isdecimal() else float(text), "a number"),
    "bytes": (parse_bytes, "a number of bytes, as in 256MiB"),
}
"""How the text of each kind of option is parsed, and what it has to be."""
