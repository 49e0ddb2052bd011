"""What errors and reports say of options and calls, in the words of a terminal's line or a magic's."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from typing import Any

from colabkit.foundation import Report
from colabkit.notebook.options.verbs import VERBS, Option, Verb

_QUOTED = r"""(?:'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")"""
_TOLD = re.compile(
    rf"""
    \bcolabkit\.(?P<verb>\w+)(?P<call>\((?:{_QUOTED}|[^()'"])*\))
    | (?<![\w.?&/=-]) (?P<name>[a-z_]+)=
      (?P<value>{_QUOTED} | \([^()]*\) | \[[^][]*\] | \{{[^{{}}]*\}} | (?:[\w.+-]*\w)?) (?![\w=(])
    | (?<!\w){_QUOTED}
    """,
    re.VERBOSE,
)
_OF_PYTHON = ("labels", "splits", "fields")
"""Kinds that messages name without a value where a function is meant, which a line cannot give."""


def in_other_words(text: str, option: Callable[[str, str], str], call: Callable[[str, str], str] | None = None) -> str:
    """Return a text with the options and calls of Python that it names in other words; what is in quotes stays.

    Args:
        text: of an error or a report.
        option: returns other words for `name=value`, of which the value may be missing; empty to leave it as it is.
        call: likewise for `colabkit.name(...)`, with its parentheses and what is in them; None to leave each as it is.
    """

    def told(match: re.Match[str]) -> str:
        other = ""
        if match["name"]:
            other = option(match["name"], match["value"])
        elif match["verb"] and call:
            other = call(match["verb"], match["call"])
        return other or match[0]

    return _TOLD.sub(told, text)


def words_of(verb: Verb, prefix: str) -> Callable[[str], str]:
    """Return what brings a text from Python's words to those of a line.

    `refresh=True` becomes `--refresh`, by the options of the verb that was run, and `colabkit.mount()` becomes `%mount`
    or `colabkit mount`. What is in quotes, as paths are, stays; so do names that are no options, and values that a line
    cannot give.

    Args:
        verb: that was run.
        prefix: of a verb in a line, `"%"` or `"colabkit "`.
    """
    options = {option.name: option for option in verb.options}
    verbs = {known.call: known for known in VERBS if known.is_magic or prefix != "%"}

    def told_option(name: str, value: str) -> str:
        return _told_option(options[name], value) if name in options else ""

    def told_call(name: str, given: str) -> str:
        return _told_call(verbs[name], given, prefix) if name in verbs else ""

    return lambda text: in_other_words(text, told_option, told_call)


def tell_in(found: Any, verb: Verb, prefix: str) -> None:
    """Let what a verb returned, a report or a pack with one, speak in the words of a line; see `words_of`.

    What the doctor advises stays Python: it is code that stands beside a `Loader`.
    """
    report = getattr(found, "report", found)
    if isinstance(report, Report) and verb.name != "doctor":
        report.tell_in(words_of(verb, prefix))


def _told_option(option: Option, text: str) -> str:
    """Return `name=text` as a line gives it; empty if it cannot."""
    if not text:
        return "" if option.kind in _OF_PYTHON else option.flag
    if option.kind == "objects":  # in Python names and variables, in a line the variables' names
        names = re.findall(rf"{_QUOTED}(?=:)", text)
        return " ".join([option.flag, *(name[1:-1] for name in names)]) if names else ""
    try:
        return _given(option, ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError):
        return ""


def _told_call(verb: Verb, text: str, prefix: str) -> str:
    """Return the line that makes a call with such arguments; empty if none does."""
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
    """Return an option and its value as the words of a line, without quotes; none if a line cannot give it."""
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
