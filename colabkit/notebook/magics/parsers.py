"""The parsers of the magics' lines, to which the words that variables stand for are data."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from colabkit.notebook.magics.words import Data
from colabkit.notebook.options.parsing import RaisingParser, parser_of
from colabkit.notebook.options.verb import Verb


class _LineParser(RaisingParser):
    """A parser that raises instead of leaving the kernel, and never takes the value of a variable for an option.

    A word of data is parsed as a stand-in that looks like nothing, and put back where a value is read.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._data: dict[str, str] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return what `argparse` does, where everything is known."""
        self._data = {f"\0{at}\0": str(word) for at, word in enumerate(args) if isinstance(word, Data)}
        words = [f"\0{at}\0" if isinstance(word, Data) else word for at, word in enumerate(args)]
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
