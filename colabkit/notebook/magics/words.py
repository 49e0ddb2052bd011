"""The words of a magic's line.

Nothing is expanded by IPython: braces, quotes and dollar signs in paths survive. A bare `{name}`, `{name.attribute}` or
`$name` whose variable exists stands for its value, as data, never parsed again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import reduce
from typing import Any

from colabkit.foundation import InvalidOption, cannot

_RAW_TOKEN = re.compile(r"""(?:\\.|[^\s"'\\]|"(?:\\.|[^"\\])*"|'[^']*')+|["'\\].*""", re.DOTALL)
_VARIABLE = re.compile(r"\{([\w.]+)\}|\$(\w+)")
_SPECIAL = re.compile(r"""([\s"'\\])""")


class Data(str):
    """A word that a variable stands for, which is no option whatever it looks like."""

    __slots__ = ()


def split_line(line: str, namespace: Mapping[str, Any]) -> list[str]:
    """Return the words of a magic's line; quotes hold words together, bare `{name}` and `$name` are variables.

    The values of variables are `Data`.

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
            return Data(reduce(getattr, attributes, namespace[name]))
        except AttributeError as error:
            needed = "and one that is there is needed"
            raise InvalidOption(cannot(f"use {raw!r}", str(error), needed, "Check its name")) from error
    try:
        return "".join(shlex.split(raw))
    except ValueError as error:
        raise InvalidOption(
            cannot(f"read {line.strip()!r}", str(error).lower(), "each that is opened needs one", "Close the quote")
        ) from error
