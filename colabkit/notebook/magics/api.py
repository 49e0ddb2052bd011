"""Magics: each makes one public call and returns its report; `%%train` and `%%dashboard` run the cell below them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from colabkit.notebook.magics.completion import complete_lines
from colabkit.notebook.magics.lines import cell_magics, line_magics
from colabkit.notebook.magics.panels import Panels

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_unloaders: dict[InteractiveShell, list[Callable[[], object]]] = {}


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics and show the panel beside `train()`; IPython calls it for `%load_ext colabkit`.

    Loading twice changes nothing. A magic of the same name that another extension registered is left alone.

    Args:
        shell: the running IPython shell.
    """
    if shell in _unloaders:
        return
    from colabkit.monitoring import show_beside_training

    panels = Panels(shell)
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
        print(f"colabkit leaves {', '.join(taken)} to others; use colabkit's functions instead")  # noqa: T201

    def forget() -> None:
        for kind, name, magic in ours:
            if known[kind].get(name) is magic:
                del known[kind][name]

    lines = {("%%" if kind == "cell" else "%") + name for kind, name, _ in ours}
    _unloaders[shell] = [forget, panels.hide, complete_lines(shell, lines), show_beside_training()]


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics, the panel and the launchers; IPython calls it for `%unload_ext colabkit`.

    Args:
        shell: the running IPython shell.
    """
    from colabkit.notebook.launcher.api import close_launchers

    for undo in _unloaders.pop(shell, []):
        undo()
    close_launchers()
