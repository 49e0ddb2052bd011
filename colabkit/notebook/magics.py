"""The IPython magics: each parses its line and calls one public function.

They are generated from the table in `verbs`. `load_ipython_extension()` registers them.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from numbers import Number
from traceback import walk_tb
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import colabkit
from colabkit.foundation import InvalidOption, OneLineError, SourceMissing, cannot, speaking
from colabkit.monitoring import is_any_open
from colabkit.notebook.cells import NOTHING_SEEN, run_beside_panel, train_on_cell
from colabkit.notebook.hints import hint_after_errors
from colabkit.notebook.lines import complete_lines, line_parser, split_line
from colabkit.notebook.options import (
    LineWords,
    arguments_of,
    list_verbs,
    look_up_in,
    parser_of,
    run_verb,
    speak,
    verb_named,
)
from colabkit.notebook.verb_types import Verb
from colabkit.notebook.verbs import CELLS, DASHBOARD, LINES

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from colabkit.monitoring import Dashboard


Namespace: TypeAlias = Mapping[str, Any]
LineMagic: TypeAlias = Callable[..., Any]
CellMagic: TypeAlias = Callable[[str, str], Any]

_EXPRESSION = re.compile(r"[A-Za-z_][\w.]*[(\[]")
_HELP = ("--help", "-h")
_ON_PANEL = ("fetch", "pack", "prepare", "publish", "stage")
_VARIABLES = (
    "\nA word {NAME} or $NAME is replaced by the variable's value, which may be any object; in a longer word, such as"
    " {NAME}/run, by its text. Quotes prevent this.\n"
)
_SHOWN = "The panel appears below each cell that loops over a Loader; %dashboard --off turns it off"
_unloaders: dict[InteractiveShell, list[Callable[[], object]]] = {}


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics and show the live panel during `train()`; IPython calls this for `%load_ext colabkit`.

    Loading the extension again has no effect. Magics of the same name from other extensions are not replaced.

    Args:
        shell: the running IPython shell.

    Example:
        >>> import colabkit
        >>> from IPython import get_ipython
        >>> colabkit.load_ipython_extension(get_ipython())
        >>> get_ipython().find_line_magic("stage") is None
        False
    """
    if shell in _unloaders:
        return
    from colabkit.monitoring import show_beside_training

    panels = CellPanels(shell)
    known: dict[str, dict[str, Any]] = shell.magics_manager.magics
    taken = []
    ours: list[tuple[str, str, Callable[..., Any]]] = []
    for kind, magics in (("line", line_magics(shell, panels)), ("cell", cell_magics(shell))):
        for name, magic in magics.items():
            if name in known[kind]:
                taken.append(f"{'%%' if kind == 'cell' else '%'}{name}")
            else:
                shell.magics_manager.register_function(magic, kind, name)
                ours.append((kind, name, magic))
    if taken:
        print(f"colabkit does not replace the existing {', '.join(taken)}; use colabkit's functions instead")  # noqa: T201

    def forget() -> None:
        for kind, name, magic in ours:
            if known[kind].get(name) is magic:
                del known[kind][name]

    lines = {("%%" if kind == "cell" else "%") + name for kind, name, _ in ours}
    others = complete_lines(shell, lines), hint_after_errors(shell), show_beside_training()
    _unloaders[shell] = [forget, panels.hide, *others]


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics, the live panel and the launcher; IPython calls this for `%unload_ext colabkit`.

    Args:
        shell: the running IPython shell.

    Example:
        >>> import colabkit
        >>> from IPython import get_ipython
        >>> colabkit.load_ipython_extension(get_ipython())
        >>> colabkit.unload_ipython_extension(get_ipython())
        >>> get_ipython().find_line_magic("stage") is None
        True
    """
    from colabkit.notebook.launcher.panel import close_launchers

    for undo in _unloaders.pop(shell, []):
        undo()
    close_launchers()


def line_magics(shell: InteractiveShell, panels: CellPanels) -> dict[str, LineMagic]:
    """Return the line magics by name."""
    found = {verb.name: _of_verb(shell, verb) for verb in LINES}
    found[DASHBOARD.name] = _dashboard(shell, panels)
    return {**found, "colabkit": _colabkit(found)}


def cell_magics(shell: InteractiveShell) -> dict[str, CellMagic]:
    """Return the cell magics by name."""
    train, dashboard = CELLS

    def run_dashboard(namespace: Namespace, line: str, cell: str) -> None:
        run_beside_panel(shell, cell, **_arguments(namespace, dashboard, line, f"%%{dashboard.name}"))

    def run_train(_: Namespace, line: str, cell: str) -> Any:
        return train_on_cell(shell, line, cell)

    return {verb.name: _wrapped(shell, verb, run) for verb, run in ((train, run_train), (dashboard, run_dashboard))}


def _of_verb(shell: InteractiveShell, verb: Verb) -> LineMagic:
    def run(namespace: Namespace, line: str) -> Any:
        arguments = _arguments(namespace, verb, line, f"%{verb.name}")
        # In a notebook, the panel shows long operations with the rates of disks and network.
        is_shown = verb.name in _ON_PANEL and hasattr(shell, "kernel") and arguments["progress"] and not is_any_open()
        try:
            with speaking(LineWords(verb, "%")), colabkit.dashboard() if is_shown else nullcontext():
                return run_verb(verb, arguments)
        except SourceMissing as error:
            if (name := _variable_for_path(verb, arguments, namespace, str(error))) and error.message:
                error.args = (replace(error.message, next_step=f"To pass the variable, write {{{name}}}"),)
            raise

    return _wrapped(shell, verb, run)


def _dashboard(shell: InteractiveShell, panels: CellPanels) -> LineMagic:
    def run(namespace: Namespace, line: str) -> Any:
        options = _arguments(namespace, DASHBOARD, line, f"%{DASHBOARD.name}")
        if options.get("attach") is not None:
            del options["off"]
            return colabkit.dashboard(**options)
        if options.pop("off"):
            if panels.hide():
                print(NOTHING_SEEN)  # noqa: T201 - explains why no panel appeared
        else:
            panels.show(**options)
            print(_SHOWN)  # noqa: T201 - no panel is visible yet
        return None

    return _wrapped(shell, DASHBOARD, run)


def _colabkit(magics: dict[str, LineMagic]) -> LineMagic:
    text = (
        "usage: %colabkit [VERB ...]\n\nThe same as %launch, or run a magic: %colabkit stage is the same as %stage.\n\n"
        f"{list_verbs(LINES)}\n"
    )

    def magic(line: str, local_ns: Mapping[str, Any] | None = None) -> Any:
        name, rest = [*line.split(maxsplit=1), "", ""][:2]
        name = name.lstrip("%")
        if not name:
            return magics["launch"]("")
        if name in _HELP:
            print(text)  # noqa: T201 - the user asked for help
            return None
        return magics[verb_named(name, LINES, "%colabkit").name](rest, local_ns=local_ns)

    return _known_to_ipython(magic, "colabkit", text)


def _wrapped(shell: InteractiveShell, verb: Verb, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a magic with `--help`, whose errors and reports name options instead of Python arguments."""
    is_cell = verb in CELLS
    text = parser_of(verb, f"{'%%' if is_cell else '%'}{verb.name}").format_help()
    if not is_cell:
        # IPython refuses a cell magic without a cell, so the line magic also shows the help of the cell magic.
        cells = (parser_of(cell, f"%%{cell.name}") for cell in CELLS if cell.name == verb.name)
        text += "".join(f"\n{parser.format_help()}" for parser in cells)
    text += _VARIABLES if verb.options else ""

    words = LineWords(verb, "%")

    def magic(line: str, *cell: str, local_ns: dict[str, Any] | None = None) -> Any:
        words_of_line = split_line(line, {})
        if any(word in _HELP for word in itertools.takewhile(lambda word: word != "--", words_of_line)):
            print(text)  # noqa: T201 - the user asked for help
            return None
        try:
            # A line in a function sees the variables of the function first.
            found = run(ChainMap(local_ns or {}, shell.user_ns), line, *cell)
        except OneLineError as error:
            if not _is_of(shell.user_ns, error.__traceback__):
                error.words = words
            raise
        speak(found, words)
        return found

    return _known_to_ipython(magic, verb.name, text)


def _is_of(namespace: dict[str, Any], trace: TracebackType | None) -> bool:
    """Return whether an error passed through Python code of the notebook, so that it should name Python arguments."""
    return any(frame.f_globals is namespace for frame, _ in walk_tb(trace))


def _known_to_ipython(magic: Callable[..., Any], name: str, text: str) -> Callable[..., Any]:
    magic.__name__ = name
    magic.__doc__ = text
    magic._ipython_magic_no_var_expand = True  # type: ignore[attr-defined]  # noqa: SLF001 - IPython's own API
    magic.needs_local_scope = True  # type: ignore[attr-defined]
    return magic


def _arguments(namespace: Namespace, verb: Verb, line: str, prog: str) -> dict[str, Any]:
    words = split_line(line, namespace)
    if any(option.kind == "subject" for option in verb.options):
        _check_is_named(verb, line, words)
    parsed = line_parser(verb, prog).parse_args(words)
    return arguments_of(verb, parsed, partial(look_up_in, namespace))


def _variable_for_path(verb: Verb, arguments: Mapping[str, Any], namespace: Namespace, message: str) -> str:
    """Return the missing path of a message if it is the name of a variable that can be meant; otherwise empty."""
    for option in verb.options:
        path = arguments[option.name]
        if option.kind != "path" or not isinstance(path, str) or path not in namespace:
            continue
        value = namespace[path]
        # Sources may be objects, such as a table; other paths are text.
        is_object = option.name == "source" and not (callable(value) or isinstance(value, ModuleType | Number | None))
        if (is_object or isinstance(value, str | os.PathLike)) and repr(path) in message and not os.path.lexists(path):
            return path
    return ""


def _check_is_named(verb: Verb, line: str, words: list[str]) -> None:
    """Raise `InvalidOption` for an expression, whose words would be parsed as a report's path and arguments."""
    if any(_EXPRESSION.match(word) and not os.path.exists(word) for word in words):
        next_step = f"Assign it to a variable, for example loader, and run %{verb.name} loader"
        found, expected = "it is an expression", "the name of a variable"
        raise InvalidOption(cannot(f"use {line.strip()!r}", found, expected, next_step))


class CellPanels:
    """Runs each cell inside `dashboard()`, whose panel appears once there is something to show.

    Args:
        shell: the IPython shell that runs the cells.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._options: dict[str, Any] = {}
        self._open: list[Dashboard] = []
        self._is_on = False
        # Whether any cell has published events; None before the first cell.
        self._has_heard: bool | None = None

    def show(self, **options: Any) -> None:
        """Show the panel from the next cell on, with the options of `dashboard()`."""
        # Raise errors for invalid options now, not when the next cell runs.
        colabkit.dashboard(**options)
        self._options = options
        if not self._is_on:
            self._is_on, self._has_heard = True, None
            self._shell.events.register("pre_run_cell", self._enter)
            self._shell.events.register("post_run_cell", self._leave)

    def hide(self) -> bool:
        """Stop showing the panel, and return whether cells ran but published no events. May be called twice."""
        is_vain = self._is_on and self._has_heard is False and not any(panel.has_heard for panel in self._open)
        if self._is_on:
            self._is_on = False
            self._shell.events.unregister("pre_run_cell", self._enter)
            self._shell.events.unregister("post_run_cell", self._leave)
        while self._open:
            self._open.pop().__exit__(None, None, None)
        return is_vain

    def _enter(self, info: Any) -> None:
        panel = colabkit.dashboard(**self._options)
        panel.ignores_peeks = True
        panel.__enter__()
        # Keep a stack of panels, because a cell may run other cells.
        self._open.append(panel)

    def _leave(self, result: Any) -> None:
        if self._open:
            error, panel = result.error_in_exec, self._open.pop()
            panel.__exit__(None if error is None else type(error), error, None)
            self._has_heard = panel.has_heard or bool(self._has_heard)
