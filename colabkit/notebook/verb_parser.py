"""The parser of the words of a line, whose errors say what an invalid word may stand for."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn

from colabkit.foundation import InvalidOption, cannot

_PATH_FLAGS = ("--to", "--data", "--attach")
"""The options that a path without an option stands for, if they are the first ones of a verb."""


class VerbParser(argparse.ArgumentParser):
    """A parser that raises `InvalidOption`, and suggests options similar to an unknown one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as `argparse` does, but report unknown arguments as an error."""
        words = list(args)
        options = words[: words.index("--")] if "--" in words else words
        known = self._option_string_actions
        for name in (word.partition("=")[0] for word in options if word.startswith("--") and " " not in word):
            if name not in known:
                similar = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
                hint = f" (did you mean {similar[0]}?)" if similar else ""
                places = [action.dest for action in self._actions if not action.option_strings]
                if name[2:].replace("-", "_") in places:
                    hint = f" (write its value without {name})"
                self.error(f"unknown option {name}{hint}")
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint_for(unknown, words)}")
        return parsed, unknown

    def _hint_for(self, unknown: Sequence[str], words: Sequence[str]) -> str:
        """Return what unknown words of a line may stand for, such as `--size 64` for `size=64`; empty if unclear."""
        name, equals, value = unknown[0].partition("=")
        known = self._option_string_actions
        flag = f"--{name.lstrip('-').replace('_', '-')}"
        likely = flag if flag in known else ""
        if likely and known[flag].nargs == 0:
            likely = flag.replace("--", "--no-", 1) if value == "False" else flag
        elif likely and equals:
            likely = f"{flag} {shlex.quote(value)}"
        elif not likely and len(unknown) == 1 and re.match(r"[\w./~]", name):
            before = words[words.index(unknown[0]) - 1]
            if before in known and known[before].nargs == 0:
                return f" ({before} takes no value)"
            # In Python, such a path can be the second argument, as in `stage(source, to)`.
            first = next((one.option_strings[0] for one in self._actions if _takes_value(one)), "")
            likely = f"{first} {shlex.quote(unknown[0])}" if first in _PATH_FLAGS else ""
        return f" (did you mean {likely}?)" if likely else ""

    def error(self, message: str) -> NoReturn:
        """Raise `InvalidOption`."""
        # Remove the argument's name, with which argparse begins: "argument --size: 'big' is not a number".
        found = message.removeprefix("argument ").replace(": ", " ", 1) if message.startswith("argument ") else message
        # IPython refuses a cell magic without a cell, so the line magic shows the help.
        raise InvalidOption(cannot(f"run {self.prog}", found, "", f"See {self.prog.replace('%%', '%')} --help"))


def _takes_value(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.nargs is None
