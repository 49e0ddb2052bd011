"""Line magics: each parses its line by the table of options, makes one public call and returns its report.

Nothing is expanded by IPython: braces, quotes and dollar signs in paths survive. A bare `{name}`, `{name.attribute}` or
`$name` whose variable exists stands for its value, as data, never parsed again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import colabkit
from colabkit.errors import InvalidOption, cannot
from colabkit.options import VERBS, Verb, arguments_of, look_up_in, parser_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load", "split_line", "unload"]

_RAW_TOKEN = re.compile(r"""(?:[^\s"']|"(?:\\.|[^"\\])*"|'[^']*')+|["'].*""")
_VARIABLE = re.compile(r"\{([\w.]+)\}|\$(\w+)")

_unloaders: dict[int, list[Callable[[], None]]] = {}


def load(shell: InteractiveShell) -> None:
    """Make the magics known to a shell, and show the panel beside `train()`. Loading twice changes nothing."""
    if id(shell) in _unloaders:
        return
    from colabkit.panel import show_beside_training

    manager = shell.magics_manager
    taken = [verb.name for verb in VERBS if verb.is_magic and verb.name in manager.magics["line"]]
    for verb in VERBS:
        if verb.is_magic and verb.name not in taken:
            manager.register_function(_magic(shell, verb), "line", verb.name)
    if taken:
        print(f"colabkit leaves {', '.join(f'%{name}' for name in taken)} to others; use colabkit's functions instead")  # noqa: T201
    names = [verb.name for verb in VERBS if verb.is_magic and verb.name not in taken]

    def forget() -> None:
        for name in names:
            manager.magics["line"].pop(name, None)

    _unloaders[id(shell)] = [forget, show_beside_training()]


def unload(shell: InteractiveShell) -> None:
    """Take the magics and the panel away again."""
    for undo in _unloaders.pop(id(shell), []):
        undo()


def _magic(shell: InteractiveShell, verb: Verb) -> Callable[[str], Any]:
    def look_up(name: str) -> Any:
        return look_up_in(shell.user_ns, name)

    def run(line: str) -> Any:
        words = split_line(line, shell.user_ns)
        parser = parser_of(verb, f"%{verb.name}")
        if "--help" in words or "-h" in words:
            print(parser.format_help())  # noqa: T201 - the only thing a magic prints
            return None
        return getattr(colabkit, verb.call)(**arguments_of(verb, parser.parse_args(words), look_up))

    run.__name__ = verb.name
    run.__doc__ = parser_of(verb, f"%{verb.name}").format_help()
    run._ipython_magic_no_var_expand = True  # type: ignore[attr-defined]  # noqa: SLF001 - IPython asks for it
    return run


def split_line(line: str, namespace: dict[str, Any]) -> list[str]:
    """Return the words of a magic's line; quotes hold words together, bare `{name}` and `$name` are variables.

    Raises:
        InvalidOption: if a quote is not closed.
    """
    words = []
    for match in _RAW_TOKEN.finditer(line):
        raw = match.group()
        variable = _VARIABLE.fullmatch(raw)
        name, *attributes = (variable[1] or variable[2]).split(".") if variable else [""]
        if name in namespace:
            try:
                words.append(str(reduce(getattr, attributes, namespace[name])))
            except AttributeError as error:
                needed = "an attribute that is there"
                raise InvalidOption(cannot(f"use {raw!r}", str(error), needed, "Check its name")) from error
            continue
        try:
            words.append("".join(shlex.split(raw)))
        except ValueError as error:
            raise InvalidOption(
                cannot(f"read {line.strip()!r}", str(error).lower(), "closed quotes", "Close the quote")
            ) from error
    return words
