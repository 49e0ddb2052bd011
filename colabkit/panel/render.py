"""The panel's picture: one pure function from a state to HTML and plain text."""

from __future__ import annotations

from colabkit.panel.html import as_html
from colabkit.panel.state import PanelState
from colabkit.panel.text import as_text

__all__ = ["render"]


def render(state: PanelState) -> tuple[str, str]:
    """Return the panel as HTML and as plain text."""
    return as_html(state), as_text(state)
