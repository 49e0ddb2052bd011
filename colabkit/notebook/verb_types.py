"""The rows of the table of verbs: a verb, which is a magic and a command, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of a verb.

    Attributes:
        name: name of the function's parameter.
        help: one line for `--help` and `?`.
        default: default of the function; an option without one is required.
        kind: `text`, `path`, `number`, `number_or_auto`, `amount`, `bytes`, `seconds`, `flag` (also `--no-...`),
            `switch`, `steps`, `size`, `size_or_auto`, `folder`, `labels`, `splits`, `fields`, `object`, `objects`,
            `data` (a path or a variable) or `subject` (a variable, or the path of a saved report).
        is_positional: whether it is positional although it has a default; required options always are.
        words: special values, which completion offers.
        is_closed: whether `words` are the only valid values.
        is_method: whether the switch calls the method of this name of the function's report, and shows its result.
    """

    name: str
    help: str
    default: Any = ...
    kind: str = "text"
    is_positional: bool = False
    words: tuple[str, ...] = ()
    is_closed: bool = False
    is_method: bool = False

    @property
    def is_required(self) -> bool:
        """Whether the option has no default."""
        return self.default is ...

    @property
    def flag(self) -> str:
        """The option in a line, such as `--batch-size`; empty for a positional one."""
        return "" if self.is_required or self.is_positional else "--" + self.name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb, which is a magic, a command, or both.

    Attributes:
        name: name of the public function, the magic and the command.
        help: description of at most 62 characters, so that it fits on one line of the help.
        options: its options, positional ones first.
        is_magic: whether it is a magic.
        is_command: whether it is a command.
        more: help text below the options.
    """

    name: str
    help: str
    options: tuple[Option, ...] = ()
    is_magic: bool = True
    is_command: bool = True
    more: str = ""
