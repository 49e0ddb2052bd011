"""The launcher's widgets: a form, buttons, a progress bar, and areas for messages, the live panel, reports and code.

Uses only core widgets with the features that ipywidgets 7.7 and 8 share. The logic is in `panel` and `pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

from colabkit.foundation import Frame, Progress, Report
from colabkit.notebook.launcher import html
from colabkit.notebook.launcher.pipeline import Action
from colabkit.notebook.launcher.settings import FIELDS, PACK_OPTIONS, Settings

_ACTIONS: dict[Action, tuple[str, str]] = {
    "probe": ("Probe", "Measure for a few seconds how fast the source can be read"),
    "stage": ("Stage", "Copy the source to local storage"),
    "pack": ("Pack", "Stage the source, then pack it into one file"),
    "train": ("Stage and train", "Stage the source, pack it, then train a small network on it"),
}
_LABEL_PX, _SHORT_LABEL_PX = 104, 48
_HINT = "a path, such as birds or drive:birds; the address or share link of an archive; or samples:digits"
_OPTIONS, _CODE = "Pack options", "Show the code"
_OPEN, _SHUT = "▾", "▸"
_SHORT_WIDTH = "280px"
_MOST = 1_000_000


class View:
    """The widgets of the launcher.

    It is also a screen for the live panel: frames appear below the buttons, and the last one stays until the next
    click.

    Args:
        widgets: the package ipywidgets.
        destinations: choices for the destination of local copies, from `places`.
        clicked: called with the action of a clicked button.
        code: returns the code for the settings, or a comment that states the error in them.
        kept: CSS class of the elements that are hidden while the panel is alive.

    Attributes:
        root: the widget that contains all others.
        fields: the form's widgets, by the names of `Settings`.
        buttons: the row of buttons that is visible now, by action.
        options_switch: toggles the pack options.
        code_switch: toggles the code.
        reports: the reports shown.
    """

    def __init__(
        self,
        widgets: Any,
        destinations: list[tuple[str, str]],
        clicked: Callable[[Action], None],
        code: Callable[[Settings], str],
        kept: str,
    ) -> None:
        self._widgets = widgets
        self._clicked = clicked
        self._code_of = code
        self._is_error = False
        self._said = self._noted = ""
        self.reports: list[Report] = []
        self.fields = self._form(destinations)
        self._rows = [self._buttons() for _ in range(2)]
        self._turn = 0
        self.buttons = self._rows[0]
        self.options_switch, self.code_switch = self._switch(_OPTIONS), self._switch(_CODE)
        self._message, self._numbers, self._panel, self._table, self._code = (self._html("") for _ in range(5))
        self._bar = widgets.FloatProgress(max=1.0, layout=self._layout(width="auto", height="16px", margin="0"))
        self._bar.style.bar_color = html.ACCENT
        self._work = self._column(self._bar, self._numbers)
        self._options = self._column(*(self.fields[name] for name in PACK_OPTIONS))
        self._lines = [self._line(*row.values()) for row in self._rows]
        for hidden in (self._work, self._options, self._lines[1]):
            hidden.layout.display = "none"
        self.root = self._built(kept)
        self.options_switch.observe(self._switch_options, "value")
        for widget in (*self.fields.values(), self.code_switch):
            widget.observe(self._update_code, "value")

    @property
    def settings(self) -> Settings:
        """The values of the form."""
        return Settings(**{field.name: self.fields[field.name].value for field in fields(Settings)})

    @property
    def said(self) -> str:
        """The visible message and note."""
        return "\n".join(filter(None, [self._said, self._noted]))

    @property
    def shown(self) -> str:
        """The results of the last run as HTML."""
        return f"{self._message.value}{self._panel.value}{self._table.value}"

    def begin(self) -> None:
        """Disable the buttons and clear the results of the previous run."""
        for button in self.buttons.values():
            button.disabled = True
        self.reports, self._noted = [], ""
        self.point_to(())
        _put(self._table, "")
        _put(self._panel, "")

    def end(self) -> None:
        """Enable the buttons again.

        Two rows of buttons alternate, so that clicks queued during the run arrive at the hidden row and are ignored.
        """
        self.progress(None)
        self._show_reports(self.reports, is_over=True)
        for button in self.buttons.values():
            button.disabled = False
        self._lines[self._turn].layout.display = "none"
        self._turn = 1 - self._turn
        self.buttons = self._rows[self._turn]
        self._lines[self._turn].layout.display = None

    def offer(self, destinations: list[tuple[str, str]]) -> None:
        """Update the choices for the destination of local copies, and keep the selected one."""
        choice = self.fields["to"]
        chosen = choice.value
        if list(choice.options) != destinations:
            choice.options = destinations
            choice.value = chosen

    def say(self, text: str, *, is_error: bool = False) -> None:
        """Replace the message, but keep the note."""
        self._said, self._is_error = text, is_error
        _put(self._message, html.message(self.said, is_error=is_error))

    def point_to(self, names: Iterable[str]) -> None:
        """Mark only these fields, and unfold the pack options if they include a marked field."""
        names = set(names)
        for name, field in self.fields.items():
            (field.add_class if name in names else field.remove_class)(html.POINTED)
        if not names.isdisjoint(PACK_OPTIONS):
            self.options_switch.value = True

    def note(self, text: str) -> None:
        """Show a note below the messages until the next click."""
        self._noted = text
        self.say(self._said, is_error=self._is_error)

    def progress(self, progress: Progress | None) -> None:
        """Update the progress bar, or hide it for None."""
        if progress is None:
            self._work.layout.display = "none"
            self._bar.value = 0.0
            return
        self._bar.value = min(1.0, progress.done / progress.total) if progress.total else 0.0
        _put(self._numbers, html.numbers(progress))
        self._work.layout.display = None

    def report(self, report: Report) -> None:
        """Show a report below the earlier ones of the same run."""
        self._show_reports([*self.reports, report], is_over=False)

    def _show_reports(self, reports: list[Report], *, is_over: bool) -> None:
        """Show a line for each report; once the run is over, unfold the table of the last report."""
        _put(self._table, "".join(html.report(one, is_open=is_over and one is reports[-1]) for one in reports))
        self.reports = reports

    def paint(self, frame: Frame, final: bool) -> None:
        """Show a frame of the live panel."""
        _put(self._panel, frame.html)

    def close(self) -> None:
        """Do nothing: the last frame of the live panel stays."""

    def remove(self) -> None:
        """Close every widget."""
        for widget in list(_tree(self.root)):
            widget.close()

    def _built(self, kept: str) -> Any:
        style = self._widgets.HTML(html.sheet(kept), layout=self._layout(display="none"))
        numbers = self._line(self.fields["batch_size"], self.fields["epochs"], gap="6px 28px")
        form = [self.fields["to"], numbers, self.fields["work"]]
        hint = self._html(html.hint(_HINT, _LABEL_PX + 8))
        frame = self._layout(
            padding="16px 18px", border=f"1px solid {html.LINE}", max_width="760px", grid_gap="12px", margin="0"
        )
        parts = [
            style,
            self._html(html.heading()),
            self._column(self.fields["source"], hint, *form, self.options_switch, self._options),
            self._column(*self._lines),
            self._message,
            self._work,
            self._panel,
            self._table,
            self.code_switch,
            self._code,
        ]
        root = self._widgets.VBox(parts, layout=frame)
        root.add_class(html.ROOT)
        return root

    def _form(self, destinations: list[tuple[str, str]]) -> dict[str, Any]:
        widgets, default = self._widgets, Settings()
        encodings = [("auto", "auto"), ("raw: pixels", "raw"), ("source: the original file bytes", "source")]
        bad = [("raise an error", "raise"), ("skip the file", "skip"), ("store a black image", "blank")]
        choices: dict[str, list[tuple[str, str]]] = {
            "encoding": [*encodings, ("jpeg: re-encoded", "jpeg")],
            "channels": [("3: RGB", "3"), ("1: luminance", "1")],
            "on_bad": bad,
        }
        lines = {
            "source": "a path, drive:birds, an address, or samples:digits",
            "work": "for packs and checkpoints",
            "size": "unchanged, or for example 224 or 240x320",
            "labels": "auto, a column, or none",
            "splits": "from the source's folders, or for example train=0.8,test=0.2",
        }
        return {
            **{
                name: self._field(widgets.Text, name, value=getattr(default, name), placeholder=hint)
                for name, hint in lines.items()
            },
            **{
                name: self._field(widgets.Dropdown, name, _SHORT_WIDTH, options=options, value=getattr(default, name))
                for name, options in choices.items()
            },
            **{
                name: self._field(
                    widgets.BoundedIntText, name, f"{px + 80}px", px, min=1, max=_MOST, value=getattr(default, name)
                )
                for name, px in {"batch_size": _LABEL_PX, "epochs": _SHORT_LABEL_PX}.items()
            },
            "to": self._field(widgets.RadioButtons, "to", options=destinations, value=default.to),
        }

    def _field(self, kind: Any, name: str, width: str = "auto", label_px: int = _LABEL_PX, **traits: Any) -> Any:
        layout = self._layout(width=width, max_width="100%", margin="0")
        field = kind(description=FIELDS[name], layout=layout, style={"description_width": f"{label_px}px"}, **traits)
        field.add_class("colabkit-field")
        return field

    def _buttons(self) -> dict[Action, Any]:
        row: dict[Action, Any] = {}
        for action, (label, hint) in _ACTIONS.items():
            row[action] = self._widgets.Button(description=label, tooltip=hint, layout=self._layout(width="auto"))
            row[action].on_click(self._on_click(action))
        row["train"].add_class("colabkit-main")
        return row

    def _on_click(self, action: Action) -> Callable[[Any], None]:
        def on_click(button: Any) -> None:
            if self.buttons[action] is button:
                self._clicked(action)

        return on_click

    def _switch(self, label: str) -> Any:
        switch = self._widgets.ToggleButton(
            description=f"{_SHUT} {label}", layout=self._layout(width="auto", align_self="flex-start")
        )
        switch.add_class("colabkit-switch")
        return switch

    def _switch_options(self, change: Any) -> None:
        self.options_switch.description = f"{_OPEN if change['new'] else _SHUT} {_OPTIONS}"
        self._options.layout.display = None if change["new"] else "none"

    def _update_code(self, change: Any) -> None:
        is_shown = self.code_switch.value
        self.code_switch.description = f"{_OPEN if is_shown else _SHUT} {_CODE}"
        _put(self._code, html.code(self._code_of(self.settings)) if is_shown else "")

    def _html(self, text: str) -> Any:
        return self._widgets.HTML(text, layout=self._layout(margin="0", **({} if text else {"display": "none"})))

    def _line(self, *children: Any, gap: str = "8px") -> Any:
        line = self._widgets.HBox(children, layout=self._layout(flex_flow="row wrap", grid_gap=gap))
        line.add_class("colabkit-line")
        return line

    def _column(self, *children: Any) -> Any:
        return self._widgets.VBox(children, layout=self._layout(grid_gap="6px", margin="0"))

    def _layout(self, **traits: str) -> Any:
        return self._widgets.Layout(**traits)


def _put(widget: Any, text: str) -> None:
    widget.value = text
    widget.layout.display = None if text else "none"


def _tree(widget: Any) -> Iterator[Any]:
    yield widget
    for name in widget.keys:
        value = getattr(widget, name)
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(part, "model_id") and part is not widget:
                yield from _tree(part)
