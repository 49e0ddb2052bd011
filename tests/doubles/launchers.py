"""Helpers that fill in the launcher's form and click its buttons without a browser."""

from __future__ import annotations

import html

from colabkit.notebook.launcher.html import POINTED
from colabkit.notebook.launcher.panel import Launcher


def fill(panel: Launcher, **values: object) -> None:
    """Set form fields by their names in `Settings`."""
    for name, value in values.items():
        panel.view.fields[name].value = value


def click(panel: Launcher, action: str) -> str:
    panel.view.buttons[action].click()
    return panel.view.said


def pointed(panel: Launcher) -> list[str]:
    return [name for name, field in panel.view.fields.items() if POINTED in field._dom_classes]


def described(panel: Launcher) -> str:
    """Return the texts that the form shows below the source and the image size."""
    return html.unescape(panel.view._source_line.value + panel.view._size_line.value)
