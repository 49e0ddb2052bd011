"""`open_launcher()` opens a panel with buttons: from far files to a trained network without a line of code.

Settings become a plan, a plan becomes calls of colabkit's public functions; the panel shows what they tell. The same
plan is shown as a cell, so that the panel is a beginning and not an end.
"""

from __future__ import annotations

import sys

from colabkit.foundation import NoNotebook, cannot, import_optional
from colabkit.notebook.launcher.launching import Launcher

_open: list[Launcher] = []


def open_launcher() -> Launcher:
    """Open a panel with buttons below this cell: probe a source, stage it, pack it, train on it.

    Work is done in the kernel's main thread while its button is disabled, so cells wait for it. Progress, errors,
    reports and the live panel of the training appear inside. Interrupting the kernel stops the work; a click goes on
    where it was. "Show the code" shows the cell that does the same. Opening another panel closes the one before.

    Returns:
        The panel: `close()` takes it away, `results` holds the reports of the last run.

    Raises:
        NoNotebook: outside of a notebook.
        MissingPackage: if ipywidgets is not installed.
    """
    act = "open the launcher"
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):
        next_step = "Run it in Colab or Jupyter, or see python -m colabkit --help"
        raise NoNotebook(cannot(act, "this is no notebook", "a cell, below which it is shown", next_step))
    widgets = import_optional("ipywidgets", act, "for fields and buttons", next_step="Run %pip install ipywidgets")
    close_launchers()
    launcher = Launcher(widgets)
    _open.append(launcher)
    launcher.show()
    return launcher


def close_launchers() -> None:
    """Close the panel that is open, if there is one."""
    while _open:
        _open.pop().close()
