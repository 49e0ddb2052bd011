"""The launcher in a notebook of JupyterLab, used as a person uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_lab import Lab

if TYPE_CHECKING:
    from playwright.sync_api import Locator

LAUNCHER = ".colabkit-launcher"
_STATUS = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status"
_OPEN_S = 60.0
_LOOK_MS = 100
# Clicks right after the list has changed count as the second half of a double click.
_DOUBLE_CLICK_MS = 800


class LauncherPage:
    """The launcher of a notebook: its fields, its buttons and its messages.

    Args:
        lab: the page of JupyterLab.
    """

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def open(self, name: str = "launcher.ipynb", first_cell: str = "import colabkit") -> None:
        """Write a notebook that opens the launcher, and run it."""
        self.lab.write(name, [first_cell, "%load_ext colabkit\n%colabkit"])
        self.lab.open(name)
        self.lab.run_all()
        self.lab.page.wait_for_selector(LAUNCHER, timeout=1000 * _OPEN_S)

    def fill(self, label: str, text: str) -> None:
        field = self.lab.page.get_by_label(label, exact=True)
        field.fill(text)
        field.press("Enter")

    def button(self, label: str) -> Locator:
        """Return the visible button with the given label."""
        return self.lab.page.locator(f"{LAUNCHER} button:visible", has_text=label).first

    def choose(self, entry: str) -> None:
        """Click an entry of the list of places."""
        found = self.lab.page.locator(f"{LAUNCHER} option", has_text=entry).first
        found.wait_for()
        self.lab.page.wait_for_timeout(_DOUBLE_CLICK_MS)
        found.click()

    def waits_for_epoch(self, number: int, seconds: float) -> None:
        """Wait until the run is in this epoch or a later one, since short epochs may begin and end unseen."""
        reached = f"Number(document.querySelector('{LAUNCHER}')?.innerText.match(/epoch (\\d+)\\//)?.[1]) >= {number}"
        self.lab.page.wait_for_function(reached, timeout=1000 * seconds, polling=_LOOK_MS)

    @property
    def is_kernel_busy(self) -> bool:
        """Whether JupyterLab shows the kernel as busy."""
        return bool(self.lab.page.evaluate(f"{_STATUS} === 'busy'"))

    def waits_for_message(self, words: str, seconds: float) -> None:
        """Wait until the message of the last action contains the given text."""
        said = self.lab.page.locator(f"{LAUNCHER} [role=status], {LAUNCHER} [role=alert]").filter(has_text=words)
        # The launcher hides the same error below the source, which comes first.
        said.locator("visible=true").first.wait_for(timeout=1000 * seconds)
