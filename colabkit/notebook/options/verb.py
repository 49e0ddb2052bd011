"""A verb, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of a verb.

    Attributes:
        name: the function's parameter.
        help: one line, for `--help` and `?`.
        default: the function's default; without one it has to be given.
        kind: `text`, `path`, `number`, `amount`, `bytes`, `seconds`, `flag` (also `--no-...`), `switch`, `threads`,
            `steps`, `size`, `folder`, `labels`, `splits`, `fields`, `object`, `objects`, `data` (a path or a variable)
            or `subject` (a variable, or the path of a saved report).
        is_positional: whether it is given by its place instead of its name; what has to be given always is.
        words: values with a meaning of their own, which are offered where a line is completed.
    """

    name: str
    help: str
    default: Any = ...
    kind: str = "text"
    is_positional: bool = False
    words: tuple[str, ...] = ()

    @property
    def is_required(self) -> bool:
        """Whether it has to be given."""
        return self.default is ...

    @property
    def flag(self) -> str:
        """How it is named in a line, as in `--batch-size`; empty for what is given by its place."""
        return "" if self.is_required or self.is_positional else "--" + self.name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Verb:
    """A magic and a command.

    Attributes:
        name: of both.
        help: one line.
        options: positional ones first.
        is_magic: whether there is a magic of it.
        function: the public function, where its name is another.
        more: what its help says below the options.
    """

    name: str
    help: str
    options: tuple[Option, ...] = ()
    is_magic: bool = True
    function: str = ""
    more: str = ""

    @property
    def call(self) -> str:
        """Name of the public function."""
        return self.function or self.name
