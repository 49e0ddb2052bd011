"""The words of a magic's line and their parser.

Nothing is expanded by IPython: braces, quotes and dollar signs in paths survive. As a whole word, `{name}`,
`{name.attribute}` or `$name` is replaced by that variable's value, as data that is never parsed again.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from functools import reduce
from typing import Any, NoReturn

from colabkit.foundation import InvalidOption, cannot
from colabkit.notebook.options.parsing import RaisingParser, parser_of
from colabkit.notebook.options.verbs import Verb

_RAW_TOKEN = re.compile(r"""(?:\\.|[^\s"'\\]|"(?:\\.|[^"\\])*"|'[^']*')+|["'\\].*""", re.DOTALL)
_VARIABLE = re.compile(r"\{([\w.]+)\}|\$(\w+)")
_SPECIAL = re.compile(r"""([\s"'\\])""")


class DataWord(str):
    """A word that a variable stands for, which is no option whatever it looks like."""

    __slots__ = ()


def split_line(line: str, namespace: Mapping[str, Any]) -> list[str]:
    """Return the words of a magic's line; quotes hold words together, bare `{name}` and `$name` are variables.

    The values of variables are `DataWord`.

    Raises:
        InvalidOption: if a quote is not closed.
    """
    return [_word_of(match.group(), line, namespace) for match in _RAW_TOKEN.finditer(line)]


def begun_word(line: str) -> tuple[list[str], str]:
    """Return the words of a line that has been typed so far, and the last one as it stands, with its quotes.

    That is empty where a new word begins; variables are left as they are.
    """
    tokens = [match.group() for match in _RAW_TOKEN.finditer(line)]
    is_open = bool(tokens) and line.endswith(tokens[-1])
    last = tokens.pop() if is_open else ""
    return [_word_of(token, line, {}) for token in tokens], last


def quoted(word: str, begun: str) -> str | None:
    """Return a word as it is typed after what has been typed of it; None if it cannot go on so.

    Args:
        word: the whole word.
        begun: what stands there, whose first character says how it is quoted.
    """
    if begun.startswith('"'):
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"')
    if begun.startswith("'"):
        return None if "'" in word else f"'{word}"
    escaped = _SPECIAL.sub(r"\\\1", word)
    return f"\\{escaped}" if _VARIABLE.fullmatch(word) else escaped


def _word_of(raw: str, line: str, namespace: Mapping[str, Any]) -> str:
    variable = _VARIABLE.fullmatch(raw)
    name, *attributes = (variable[1] or variable[2]).split(".") if variable else [""]
    if name and name in namespace:
        try:
            return DataWord(reduce(getattr, attributes, namespace[name]))
        except AttributeError as error:
            needed = "and one that is there is needed"
            raise InvalidOption(cannot(f"use {raw!r}", str(error), needed, "Check its name")) from error
    try:
        return "".join(shlex.split(raw))
    except ValueError as error:
        raise InvalidOption(
            cannot(f"read {line.strip()!r}", str(error).lower(), "each that is opened needs one", "Close the quote")
        ) from error


class _LineParser(RaisingParser):
    """A parser that raises instead of leaving the kernel, and never takes the value of a variable for an option.

    A word of data is parsed as a stand-in that looks like nothing, and put back where a value is read.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._data: dict[str, str] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return what `argparse` does, where everything is known."""
        self._data = {f"\0{at}\0": str(word) for at, word in enumerate(args) if isinstance(word, DataWord)}
        words = [f"\0{at}\0" if isinstance(word, DataWord) else word for at, word in enumerate(args)]
        return super().parse_known_args(words, namespace)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        return super()._get_value(action, self._data.get(arg_string, arg_string))

    def error(self, message: str) -> NoReturn:
        for stand_in, word in self._data.items():
            message = message.replace(stand_in, word)
        super().error(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raise, as `-h` with more letters asks for help too and nothing may be done then."""
        self.error(message or "-h has more letters beside it")


def line_parser(verb: Verb, prog: str) -> argparse.ArgumentParser:
    """Return the parser of a magic's line; unsuited words raise `InvalidOption`.

    Args:
        verb: whose options.
        prog: the name in usage lines, as in `"%stage"`.
    """
    return parser_of(verb, prog, _LineParser)
