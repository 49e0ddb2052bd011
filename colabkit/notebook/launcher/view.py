"""The launcher's widgets: a form, buttons, and areas for messages, the live panel, reports and code.

The form uses only core widgets, with features that ipywidgets 7.7 and 8 share. The logic is in `panel` and `actions`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

from colabkit.foundation import Frame, Report
from colabkit.notebook.launcher import html
from colabkit.notebook.launcher.actions import Action
from colabkit.notebook.launcher.browsing import Entry
from colabkit.notebook.launcher.settings import FIELDS, MORE_OPTIONS, Settings, choices_of

ONLY: dict[Action, tuple[str, str]] = {
    "probe": ("Measure", "Measure for a few seconds how fast the source can be read."),
    "stage": ("Copy", "Copy the source to this machine."),
    "prepare": ("Pack", "Copy the source, and pack it into one file, for your own code."),
}
_ONLY_LABEL = "Only measure, copy or pack"
_STOP_HINT = "The ■ in the toolbar, or Runtime › Interrupt, stops too"
_DOUBLE_CLICK_S = 0.4
_MOST_ROWS = 10
_SHORT_PX = 240
_OPEN, _SHUT = "▾", "▸"
_PLACEHOLDERS = {
    "source": "a folder, an archive, an address, or drive:birds",
    "size": "auto, 224, or height x width such as 96x128",
    "epochs": "auto, or a number",
    "batch_size": "auto, or a number",
    "to": "a folder for the model and the checkpoints, such as drive:colabkit",
    "labels": "auto, or a column",
    "splits": "from folders, or train=0.8,val=0.2",
    "path_column": "only for tables: the column, if not path, file or image",
    "root": "only for tables: the folder, if not the table's own",
    "max_bad": "a share such as 0.1, or a number",
}
_SHORT = ("size", "epochs", "batch_size", "model", "on_bad", "max_bad")


class View:
    """The widgets of the launcher.

    It is also a screen for the live panel: frames appear below the buttons, and the last one stays until the next
    click.

    Args:
        widgets: the package ipywidgets.
        clicked: called with the action of a clicked button.
        changed: called with the name of a changed field.
        browsed: called with the path of a chosen entry; with `""` when the list is opened.
        kept: CSS class of the elements that are hidden while the launcher is open.

    Attributes:
        root: the widget that contains all others.
        fields: the form's widgets, by the names of `Settings`.
        buttons: the buttons by action.
        stop: the button that stops the work.
        browser: the list of places.
        reports: the reports shown.
        painted: called after each frame of the live panel.
    """

    def __init__(
        self,
        widgets: Any,
        clicked: Callable[[Action], None],
        changed: Callable[[str], None],
        browsed: Callable[[str], None],
        kept: str,
    ) -> None:
        self._widgets = widgets
        self._browsed = browsed
        self._said: tuple[str, str, bool] = ("", "", False)
        self._noted = ""
        self._has_frame = False
        self._is_bad_source = False
        self._listed_at = 0.0
        self.painted: Callable[[], None] = lambda: None
        self.reports: list[Report] = []
        self.fields = {name: self._field(name) for name in FIELDS}
        self.near = widgets.Dropdown(
            description="to",
            options=[("auto", "auto")],
            style={"description_width": "20px"},
            layout=self._layout(width="auto", margin="0"),
        )
        self.browser = widgets.Select(
            description="Places",
            style={"description_width": f"{html.LABEL_PX}px"},
            layout=self._layout(width="auto", margin="0"),
        )
        self.browser.add_class("colabkit-field")
        self.browse_switch, self.more_switch, self.only_switch = map(
            self._switch, ("Browse", "More options", _ONLY_LABEL)
        )
        self.buttons: dict[Action, Any] = {
            "train": self._button("Train", "Train on the source; the line below does the same"),
            "restart": self._button("Train again from scratch", "Train a new network on the source"),
            **{action: self._button(label, hint) for action, (label, hint) in ONLY.items()},
        }
        self.buttons["train"].add_class("colabkit-main")
        self.stop = self._button("Stop", _STOP_HINT)
        self._source_line, self._size_line, self._message, self._panel, self._table, self._code = (
            self._html("") for _ in range(6)
        )
        self._only_lines = {action: self._html("") for action in ONLY}
        self._more = self._column(*(self.fields[name] for name in MORE_OPTIONS))
        self._only = self._only_section()
        self.root = self._built(kept)
        for hidden in (self.browser, self._more, self._only, self.stop, self.buttons["restart"]):
            hidden.layout.display = "none"
        self._observe(clicked, changed)

    @property
    def settings(self) -> Settings:
        """The values of the form."""
        return Settings(**{field.name: self.fields[field.name].value for field in fields(Settings)})

    @property
    def said(self) -> str:
        """The visible message, and the note below it."""
        return "\n".join(filter(None, [self._said[0], self._noted]))

    @property
    def has_error(self) -> bool:
        """Whether the visible message is an error."""
        return self._said[2]

    @property
    def shown(self) -> str:
        """The results of the last run as HTML."""
        return f"{self._message.value}{self._panel.value}{self._table.value}"

    def begin(self, can_stop: bool) -> None:
        """Disable the form, offer only to stop, and clear the results of the previous run."""
        self.enable(False)
        for action in ("train", "restart"):
            self.buttons[action].layout.display = "none"
        self.stop.description = "Stop"
        self.stop.layout.display = None if can_stop else "none"
        self.reports, self._noted = [], ""
        self.point_to(())
        _put(self._table, "")
        self._has_frame = False
        _put(self._panel, "")
        if self._is_bad_source:
            # If the source is still bad, the message below the buttons says so.
            self._source_line.layout.display = "none"

    def end(self, train: str, can_restart: bool) -> None:
        """Show the buttons again, still disabled, with a label for the main one.

        Args:
            train: label of the main button.
            can_restart: whether to offer to train from scratch.
        """
        self._show_reports(self.reports, is_over=True)
        self.stop.layout.display = "none"
        self.offer(train, can_restart)

    def offer(self, train: str, can_restart: bool) -> None:
        """Set the label of the main button, and whether the one to train from scratch is shown."""
        self.buttons["train"].description = train
        self.buttons["train"].layout.display = None
        self.buttons["restart"].layout.display = None if can_restart else "none"

    def enable(self, enabled: bool) -> None:
        """Enable or disable the form and every button."""
        # Disable the section switches too, because the busy kernel would handle their clicks only after the work.
        switches = (self.browse_switch, self.more_switch, self.only_switch)
        for widget in (*self.fields.values(), *self.buttons.values(), self.near, self.browser, *switches):
            widget.disabled = not enabled

    def offer_places(self, destinations: list[tuple[str, str]]) -> None:
        """Update the choices for the destination of local copies, and keep the selected one."""
        if list(self.near.options) != destinations:
            chosen = self.near.value
            self.near.options = destinations
            self.near.value = chosen if chosen in [value for _, value in destinations] else "auto"

    def list_entries(self, entries: list[Entry]) -> None:
        """Show the entries of a place, none of them selected."""
        # Setting the options selects the first one.
        self._listed_at = math.inf
        self.browser.options = entries
        self.browser.rows = max(2, min(len(entries), _MOST_ROWS))
        self.browser.index = None
        self._listed_at = time.monotonic()

    def describe(self, text: str, *, is_error: bool = False) -> None:
        """Show the contents of the source, or the reason why it cannot be used."""
        self._is_bad_source = is_error
        _put(self._source_line, html.hint(text, is_error=is_error) if text else "")
        if is_error and self.has_error:
            # The message below the buttons names the reason.
            self._source_line.layout.display = "none"

    def describe_size(self, text: str, warning: str) -> None:
        """Show the size of the images to train on."""
        _put(self._size_line, html.hint(text, warning=warning) if text or warning else "")

    def say(self, text: str, *, more: str = "", is_error: bool = False) -> None:
        """Replace the message and the smaller text below it, but keep the note."""
        self._said = text, more, is_error
        _put(self._message, html.message(self.said, is_error=is_error, more=more))

    def forget_error(self) -> None:
        """Remove the message if it is an error, and the marks of fields."""
        if self.has_error:
            self._noted = ""
            self.say("")
        self.point_to(())
        if self._is_bad_source:
            self._source_line.layout.display = None

    def note(self, text: str) -> None:
        """Show a note below the messages until the next click."""
        self._noted = text
        text, more, is_error = self._said
        self.say(text, more=more, is_error=is_error)

    def point_to(self, names: Iterable[str]) -> None:
        """Mark only the given fields, and expand the section that holds one of them."""
        names = set(names)
        for name, field in self.fields.items():
            (field.add_class if name in names else field.remove_class)(html.POINTED)
        if not names.isdisjoint(MORE_OPTIONS):
            self.more_switch.value = True

    def report(self, report: Report) -> None:
        """Show a report below the earlier ones of the same run."""
        self._show_reports([*self.reports, report], is_over=False)

    def _show_reports(self, reports: list[Report], *, is_over: bool) -> None:
        """Show a line for each report; once the run is over, expand the last one if no panel is shown."""
        expanded = reports[-1] if reports and is_over and not self._has_frame else None
        _put(self._table, "".join(html.report(one, is_open=one is expanded) for one in reports))
        self.reports = reports

    def show_code(self, cell: str, lines: dict[Action, str]) -> None:
        """Show the cell that does the same as the main button, if any, and the lines of the other actions."""
        _put(self._code, html.code(cell) if cell else "")
        for action, line in lines.items():
            _put(self._only_lines[action], html.line(line, ONLY[action][1]))

    def paint(self, frame: Frame, final: bool) -> None:
        """Show a frame of the live panel."""
        self._has_frame = True
        _put(self._panel, frame.html)
        self.painted()

    def fold(self, is_kept: bool) -> None:
        """Collapse the last frame of the live panel, which no longer changes, or remove it."""
        self._has_frame = False
        _put(self._panel, html.folded(self._panel.value) if is_kept and self._panel.value else "")

    def close(self) -> None:
        """Do nothing: the last frame of the live panel stays."""

    def remove(self) -> None:
        """Close every widget."""
        for widget in list(tree_of(self.root)):
            widget.close()

    def _built(self, kept: str) -> Any:
        style = self._widgets.HTML(html.sheet(kept), layout=self._layout(display="none"))
        source = self._widgets.HBox(
            [self.fields["source"], self.browse_switch], layout=self._layout(grid_gap="8px", margin="0")
        )
        source.add_class("colabkit-source")
        frame = self._layout(
            padding="16px 18px", border=f"1px solid {html.LINE}", max_width="760px", grid_gap="14px", margin="0"
        )
        buttons = [self.buttons["train"], self.stop, self.buttons["restart"]]
        parts = [
            style,
            self._html(html.heading()),
            self._column(
                source,
                self._source_line,
                self.browser,
                self.fields["size"],
                self._size_line,
                self.fields["epochs"],
                self.more_switch,
                self._more,
            ),
            self._line(*buttons),
            self._message,
            self._panel,
            self._table,
            self._code,
            self.only_switch,
            self._only,
        ]
        root = self._widgets.VBox(parts, layout=frame)
        root.add_class(html.ROOT)
        return root

    def _only_section(self) -> Any:
        rows: list[Any] = []
        for action, text in self._only_lines.items():
            buttons = [self.buttons[action], *([self.near] if action == "stage" else [])]
            rows += [self._column(*buttons), text]
        section = self._widgets.Box(rows, layout=self._layout(margin="0"))
        section.add_class("colabkit-only")
        return section

    def _field(self, name: str) -> Any:
        layout = self._layout(
            width=f"{html.LABEL_PX + _SHORT_PX}px" if name in _SHORT else "auto", max_width="100%", margin="0"
        )
        if name == "source":
            layout.flex = "1 1 220px"
        traits = {
            "description": FIELDS[name],
            "layout": layout,
            "style": {"description_width": f"{html.LABEL_PX}px"},
            "value": getattr(Settings(), name),
        }
        if choices := choices_of(name):
            field = self._widgets.Dropdown(options=choices, **traits)
        else:
            field = self._widgets.Text(placeholder=_PLACEHOLDERS.get(name, ""), continuous_update=False, **traits)
        field.add_class("colabkit-field")
        return field

    def _button(self, label: str, hint: str) -> Any:
        return self._widgets.Button(description=label, tooltip=hint, layout=self._layout(width="auto"))

    def _switch(self, label: str) -> Any:
        switch = self._widgets.ToggleButton(
            description=f"{_SHUT} {label}", layout=self._layout(width="auto", align_self="flex-start")
        )
        switch.add_class("colabkit-switch")
        return switch

    def _observe(self, clicked: Callable[[Action], None], changed: Callable[[str], None]) -> None:
        for action, button in self.buttons.items():
            button.on_click(lambda one, action=action: None if one.disabled else clicked(action))
        for name, field in self.fields.items():
            field.observe(lambda _, name=name: changed(name), "value")
        self.near.observe(lambda _: changed("near"), "value")
        sections = {self.more_switch: self._more, self.only_switch: self._only, self.browse_switch: self.browser}
        for switch, section in sections.items():
            switch.observe(lambda change, section=section: _toggle(change, section), "value")
        self.browse_switch.observe(lambda change: change["new"] and self._browsed(""), "value")
        self.browser.observe(self._chosen, "value")

    def _chosen(self, change: Any) -> None:
        path = change["new"]
        if path is None or self._listed_at == math.inf:
            return
        if time.monotonic() - self._listed_at < _DOUBLE_CLICK_S:
            # The second click of a double click hits an entry of the list that the first one opened.
            self.browser.index = None
        else:
            self._browsed(path)

    def _html(self, text: str) -> Any:
        return self._widgets.HTML(text, layout=self._layout(margin="0", **({} if text else {"display": "none"})))

    def _line(self, *children: Any) -> Any:
        return self._widgets.HBox(children, layout=self._layout(flex_flow="row wrap", grid_gap="8px", margin="0"))

    def _column(self, *children: Any) -> Any:
        return self._widgets.VBox(children, layout=self._layout(grid_gap="6px", margin="0"))

    def _layout(self, **traits: str) -> Any:
        return self._widgets.Layout(**traits)


def _toggle(change: Any, section: Any) -> None:
    switch = change["owner"]
    switch.description = (_OPEN if change["new"] else _SHUT) + switch.description[1:]
    section.layout.display = None if change["new"] else "none"


def _put(widget: Any, text: str) -> None:
    widget.value = text
    widget.layout.display = None if text else "none"


def tree_of(widget: Any) -> Iterator[Any]:
    """Return a widget and all widgets that it contains."""
    yield widget
    for name in widget.keys:
        value = getattr(widget, name)
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(part, "model_id") and part is not widget:
                yield from tree_of(part)
