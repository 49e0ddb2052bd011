"""The panel's picture: one pure function from a state to HTML and plain text."""

from __future__ import annotations

from colabkit.monitoring.panel.html import as_html
from colabkit.monitoring.panel.state import PanelState
from colabkit.monitoring.panel.text import as_text


def render(state: PanelState) -> tuple[str, str]:
    """Return the panel as HTML and as plain text."""
    return as_html(state), as_text(state)
