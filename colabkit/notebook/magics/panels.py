"""`%%dashboard` and `%dashboard`: the panel beside one cell, and beside all that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import colabkit
from colabkit.notebook.magics.bodies import Body

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from colabkit.monitoring import Dashboard


NOTHING_SEEN = (
    "No panel: nothing was trained, and no Loader was iterated. Another loader is seen through colabkit.watch(loader)"
)


def run_beside_panel(shell: InteractiveShell, cell: str, **options: Any) -> None:
    """Run a cell's body beside `colabkit.dashboard()`; its last expression is displayed as in any cell."""
    body = Body(shell, cell, is_shown=True)
    with body.traced(), colabkit.dashboard(**options) as panel:
        body.run()
    if not panel.has_heard:
        print(NOTHING_SEEN)  # noqa: T201 - nothing else tells why


class Panels:
    """The panel beside each cell: entered before a cell runs, left after it, seen once there is something to show.

    Args:
        shell: whose cells.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._options: dict[str, Any] = {}
        self._open: list[Dashboard] = []
        self._is_on = False
        self._has_heard: bool | None = None  # in the cells so far; None before the first

    def show(self, **options: Any) -> None:
        """Show it from the next cell on, with the options of `dashboard()`."""
        colabkit.dashboard(**options)  # what cannot be meant is said here
        self._options = options
        if not self._is_on:
            self._is_on, self._has_heard = True, None
            self._shell.events.register("pre_run_cell", self._enter)
            self._shell.events.register("post_run_cell", self._leave)

    def hide(self) -> bool:
        """Show it no more, and return whether cells ran beside it in vain. May be called twice."""
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
        panel.__enter__()
        self._open.append(panel)  # a cell may run others

    def _leave(self, result: Any) -> None:
        if self._open:
            error, panel = result.error_in_exec, self._open.pop()
            panel.__exit__(None if error is None else type(error), error, None)
            self._has_heard = panel.has_heard or bool(self._has_heard)
