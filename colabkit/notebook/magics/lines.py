"""Magics as IPython calls them: each parses its line by the table of options and makes one public call."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from functools import partial
from traceback import walk_tb
from types import TracebackType
from typing import TYPE_CHECKING, Any

import colabkit
from colabkit.foundation import InvalidOption, ShownInOneLine, cannot, reword
from colabkit.notebook.magics.panels import NOTHING_SEEN, Panels, run_beside_panel
from colabkit.notebook.magics.parsers import line_parser
from colabkit.notebook.magics.training import train_on_cell
from colabkit.notebook.magics.words import split_line
from colabkit.notebook.options.cells import CELLS, DASHBOARD
from colabkit.notebook.options.parsing import arguments_of, look_up_in, parser_of
from colabkit.notebook.options.verb import Verb
from colabkit.notebook.options.verbs import VERBS
from colabkit.notebook.options.wording import tell_in, words_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


LineMagic = Callable[[str], Any]
CellMagic = Callable[[str, str], Any]

LINES = (*(verb for verb in VERBS if verb.is_magic), DASHBOARD)
"""What there are line magics of, `%colabkit` apart."""

_EXPRESSION = re.compile(r"[A-Za-z_][\w.]*[(\[]")
_HELP = ("--help", "-h")
_VARIABLES = "\nA word {NAME} or $NAME is the variable's value; within a longer word these stay as they are written.\n"
_SHOWN = "The panel is shown beside each cell that loops over a Loader; %dashboard --off ends that"


def line_magics(shell: InteractiveShell, panels: Panels) -> dict[str, LineMagic]:
    """Return the line magics by name."""
    found = {verb.name: _of_verb(shell, verb) for verb in LINES if verb is not DASHBOARD}
    found[DASHBOARD.name] = _dashboard(shell, panels)
    return {**found, "colabkit": _colabkit(found)}


def cell_magics(shell: InteractiveShell) -> dict[str, CellMagic]:
    """Return the cell magics by name."""
    train, dashboard = CELLS

    def run_dashboard(line: str, cell: str) -> None:
        run_beside_panel(shell, cell, **_arguments(shell, dashboard, line, f"%%{dashboard.name}"))

    def run_train(line: str, cell: str) -> Any:
        return train_on_cell(shell, line, cell)

    return {verb.name: _told(shell, verb, run) for verb, run in ((train, run_train), (dashboard, run_dashboard))}


def _of_verb(shell: InteractiveShell, verb: Verb) -> LineMagic:
    def run(line: str) -> Any:
        return getattr(colabkit, verb.call)(**_arguments(shell, verb, line, f"%{verb.name}"))

    return _told(shell, verb, run)


def _dashboard(shell: InteractiveShell, panels: Panels) -> LineMagic:
    def run(line: str) -> None:
        options = _arguments(shell, DASHBOARD, line, f"%{DASHBOARD.name}")
        if options.pop("off"):
            if panels.hide():
                print(NOTHING_SEEN)  # noqa: T201 - nothing else tells why
        else:
            panels.show(**options)
            print(_SHOWN)  # noqa: T201 - nothing else is to be seen of it yet

    return _told(shell, DASHBOARD, run)


def _colabkit(magics: dict[str, LineMagic]) -> LineMagic:
    text = (
        "usage: %colabkit [VERB ...]\n\nOpen the launcher, or do what a magic does: %colabkit stage is %stage.\n\n"
        + "\n".join(f"  {verb.name:12} {verb.help}" for verb in LINES)
        + "\n"
    )

    def magic(line: str) -> Any:
        name, rest = [*line.split(maxsplit=1), "", ""][:2]
        name = name.lstrip("%")
        if not name:
            return colabkit.open_launcher()
        if name in _HELP:
            print(text)  # noqa: T201 - help is what is asked for
            return None
        if name not in magics:
            near = difflib.get_close_matches(name, magics, n=1)
            next_step = f"Did you mean {near[0]}" if near else "See %colabkit --help"
            needed = f"there are {', '.join(magics)}"
            raise InvalidOption(cannot(f"run %colabkit {name}", "no such verb", needed, next_step))
        return magics[name](rest)

    return _known_to_ipython(magic, "colabkit", text)


def _told(shell: InteractiveShell, verb: Verb, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a magic that tells its options, those of the cell magic of its name among them.

    What it returns or raises speaks in the words of its line.
    """
    is_cell = verb in CELLS
    text = parser_of(verb, f"{'%%' if is_cell else '%'}{verb.name}").format_help()
    if not is_cell:  # IPython takes no cell magic without a cell, so this is where its options can be asked for
        cells = (parser_of(cell, f"%%{cell.name}") for cell in CELLS if cell.name == verb.name)
        text += "".join(f"\n{parser.format_help()}" for parser in cells)
    text += _VARIABLES if verb.options else ""

    def magic(line: str, *cell: str) -> Any:
        if any(word in _HELP for word in split_line(line, {})):
            print(text)  # noqa: T201 - help is what is asked for
            return None
        try:
            found = run(line, *cell)
        except ShownInOneLine as error:
            if not _is_of(shell.user_ns, error.__traceback__):
                reword(error, words_of(verb, "%"))
            raise
        tell_in(found, verb, "%")
        return found

    return _known_to_ipython(magic, verb.name, text)


def _is_of(namespace: dict[str, Any], trace: TracebackType | None) -> bool:
    """Return whether an error came through code of the notebook, whose calls are in Python."""
    return any(frame.f_globals is namespace for frame, _ in walk_tb(trace))


def _known_to_ipython(magic: Callable[..., Any], name: str, text: str) -> Callable[..., Any]:
    """Return a magic with its help, whose line IPython leaves as it is."""
    magic.__name__ = name
    magic.__doc__ = text
    magic._ipython_magic_no_var_expand = True  # type: ignore[attr-defined]  # noqa: SLF001 - IPython asks for it
    return magic


def _arguments(shell: InteractiveShell, verb: Verb, line: str, prog: str) -> dict[str, Any]:
    namespace = shell.user_ns
    words = split_line(line, namespace)
    if any(option.kind == "subject" for option in verb.options):
        _check_is_named(verb, line, words)
    parsed = line_parser(verb, prog).parse_args(words)
    return arguments_of(verb, parsed, partial(look_up_in, namespace))


def _check_is_named(verb: Verb, line: str, words: list[str]) -> None:
    """Refuse an expression, whose words would pass for the path of a report and more arguments."""
    if any(_EXPRESSION.match(word) and not os.path.exists(word) for word in words):
        found, needed = "this is an expression", f"and %{verb.name} takes the name of a variable"
        next_step = f"Assign it first, as in loader = ..., and run %{verb.name} loader"
        raise InvalidOption(cannot(f"use {line.strip()!r}", found, needed, next_step))
