"""`launch()` opens a form that leads from a folder of images to a trained network without code.

The main button does what the shown line of Python does: `colabkit.train_on(...)`.
"""

from __future__ import annotations

import os
import shlex
import time
import uuid
from collections.abc import Callable
from signal import default_int_handler
from typing import Any

import colabkit
from colabkit.foundation import (
    ColabkitError,
    NoNotebook,
    Report,
    RuntimeReport,
    cannot,
    format_things,
    import_optional,
    local_root,
    on_interrupt,
    running_shell,
    speaking,
)
from colabkit.notebook.launcher import html
from colabkit.notebook.launcher.actions import Action, ActionCall, call_of, cell_of
from colabkit.notebook.launcher.browsing import DRIVE, is_place, list_place
from colabkit.notebook.launcher.settings import FieldWords, Settings, in_form, places
from colabkit.notebook.launcher.view import ONLY, View
from colabkit.notebook.launcher.work import ClickWorker, Outcome
from colabkit.notebook.recipe.api import is_drive_missing, is_on_drive, load_torch, needs_mount
from colabkit.notebook.recipe.plan import choose_size
from colabkit.packs import SourceSummary, describe_source, height_and_width

_FALLBACK = "colabkit's launcher: run this cell again to open it."
_KEPT_EVERY_S = 10.0
_ON_DRIVE = "drive:colabkit"
_CONNECTING = "Connecting Google Drive"
# The options, besides the source, on which the description of the source depends.
_DESCRIBED = ("labels", "splits", "path_column", "root")
_DOING: dict[Action, str] = {
    "train": "Preparing the images",
    "restart": "Preparing the images",
    "probe": "Measuring the source",
    "stage": "Copying the source",
    "prepare": "Packing the source",
}

_open: list[Launcher] = []


def launch() -> Launcher:
    """Open a form below this cell in which you choose a source and train on it.

    "Train" does what the line of Python below the buttons does. The work runs in the kernel's main thread, so other
    cells wait for it. Progress, errors, the live panel and the report appear in the form. "Stop", or interrupting the
    kernel, stops the work; the next click resumes it. "Only measure, copy or pack" does that without training. Opening
    another launcher closes the previous one.

    Returns:
        The launcher. `close()` removes it, and `results` holds the reports of the last run.

    Raises:
        NoNotebook: if this is not a notebook.
        MissingPackage: if ipywidgets is not installed.

    Example:
        >>> import colabkit
        >>> launcher = colabkit.launch()
        >>> launcher.is_open
        True
        >>> launcher.close()
    """
    act = "open the launcher"
    shell = running_shell()
    if not hasattr(shell, "kernel"):
        next_step = "Run it in Colab or Jupyter, or see python -m colabkit --help"
        raise NoNotebook(cannot(act, "this is not a notebook", "", next_step))
    widgets = import_optional("ipywidgets", act, "for fields and buttons", next_step="Run %pip install ipywidgets")
    close_launchers()
    launcher = Launcher(widgets, shell.kernel)
    _open.append(launcher)
    launcher.show()
    return launcher


def close_launchers() -> None:
    """Close the open launcher, if any."""
    while _open:
        _open.pop().close()


class Launcher:
    """The launcher: a form with buttons; `close()` removes it.

    The results of a run are also displayed in a separate output, which is hidden while the launcher is open. In a saved
    notebook, and in a page that was reloaded during a run, only this output is readable.

    Args:
        widgets: the package ipywidgets.
        kernel: the kernel of the notebook.

    Attributes:
        view: the widgets.
        is_open: whether the launcher is open.

    Example:
        >>> import colabkit
        >>> launcher = colabkit.launch()
        >>> launcher.is_busy
        False
        >>> launcher.close()
    """

    def __init__(self, widgets: Any, kernel: Any = None) -> None:
        self.is_open = True
        self._id = f"colabkit-{uuid.uuid4().hex}"
        self.view = View(widgets, self._clicked, self._changed, self._browsed, self._id)
        self.view.painted = self._keep_sometimes
        self._worker = ClickWorker(self.view, kernel)
        self._shown_in: int | None = None
        self._kept_at = 0.0
        self._is_training = False
        # The folder for results that the launcher chose last; None once the user has chosen one.
        self._suggested: str | None = Settings().to
        self._summary: SourceSummary | None = None
        # Whether the form shows that the source cannot be described because Drive is not connected.
        self._lacks_drive = False
        # Number of epochs of the completed run with these settings; 0 if there is none.
        self._epochs = 0
        found = colabkit.runtime()
        self._device = "cuda" if found.gpus else "cpu"
        self.view.offer_places(_places(found))
        self._show_code()

    @property
    def results(self) -> dict[str, Report]:
        """Reports of the last run, by the names of the functions that returned them."""
        return self._worker.results

    @property
    def is_busy(self) -> bool:
        """Whether the launcher ignores clicks: during the work, and briefly after it, to discard queued clicks."""
        return self._worker.is_busy

    def show(self) -> None:
        """Show the launcher below the running cell, and describe the source."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.view.root.model_id}
        self._display(self._id, {"application/vnd.jupyter.widget-view+json": view, "text/plain": _FALLBACK})
        self._display(f"{self._id}-kept", self._kept())
        self._shown_in = getattr(running_shell(), "execution_count", None)
        self._describe()

    def close(self) -> None:
        """Close all widgets; the results of the last run stay as HTML and text. May be called twice."""
        if not self.is_open:
            return
        self.is_open = False
        if self._shown_in is not None:
            self._display(self._id, {"text/html": "", "text/plain": ""}, update=True)
        self.view.remove()

    def __repr__(self) -> str:
        return f"colabkit's launcher, {'open' if self.is_open else 'closed'}"

    def _ipython_display_(self) -> None:
        """Show an open launcher again, except in the cell that opened it; show a closed one as text."""
        if not self.is_open:
            self._display(None, {"text/plain": repr(self)})
        elif self._shown_in != getattr(running_shell(), "execution_count", None):
            self.show()

    def _display(self, display_id: str | None, bundle: dict[str, Any], *, update: bool = False) -> None:
        from IPython.display import display

        display(bundle, raw=True, display_id=display_id, update=update)

    # The output in the saved notebook.

    def _kept(self) -> dict[str, Any]:
        """Return the results of the last run for the saved notebook; they are hidden while the launcher is open."""
        stale = ""
        if self._worker.doing:
            at = time.strftime("%-d %b %H:%M:%S UTC", time.gmtime())
            stale = f"State at {at}, not live: the work may continue or have ended."
            if self._is_training:
                folder = shlex.quote(self.view.settings.to)
                more = f"use %load_ext colabkit and %dashboard --attach {folder} in another notebook"
                stale += f" To follow the run live, {more}."
        text = "\n".join(filter(None, [stale, self.view.said, *map(repr, self.view.reports)]))
        shown = self.view.shown or html.message(_FALLBACK)
        return {"text/html": html.keep(html.message(stale) + shown, self._id), "text/plain": text or _FALLBACK}

    def _keep(self) -> None:
        self._kept_at = time.monotonic()
        if self._shown_in is not None:
            self._display(f"{self._id}-kept", self._kept(), update=True)

    def _keep_sometimes(self) -> None:
        if self._worker.doing and time.monotonic() - self._kept_at > _KEPT_EVERY_S:
            self._keep()

    # Reactions to changes in the form.

    def _changed(self, name: str) -> None:
        if self._worker.is_busy:
            # The message was sent before the form was disabled for the running work.
            return
        self._epochs = 0
        self.view.offer("Train", False)
        self.view.forget_error()
        if name == "source":
            self._suggest_folder()
        elif name == "to" and self.view.fields["to"].value != self._suggested:
            self._suggested = None
        self._show_code()
        if name == "source" or name in _DESCRIBED:
            self._worker.in_main_thread(self._describe)
        elif name == "size":
            self._describe_size()

    def _suggest_folder(self) -> None:
        """Suggest a folder on Drive for the results of a source on Drive, unless you have chosen another one."""
        if self._suggested is not None:
            self._suggested = _ON_DRIVE if is_on_drive(self.view.settings.source.strip()) else Settings().to
            self.view.fields["to"].value = self._suggested

    def _show_code(self, running: ActionCall | None = None) -> None:
        """Show the cell that does the same as the main button, or as the running work."""
        settings, near = self.view.settings, self.view.near.value
        try:
            lines = {action: _line(settings, action, near) for action in ONLY}
            self.view.show_code(cell_of(running or call_of(settings, "train")), lines)
        except ColabkitError as error:
            text, fields = in_form(error)
            self.view.show_code("", {})
            self.view.say(text, is_error=True)
            self.view.point_to(fields)

    def _browsed(self, path: str) -> None:
        """Go to a place in the list, or use a path as the source."""
        if path == DRIVE and is_drive_missing():
            self._run(_CONNECTING, self._connect)
        elif is_place(path):
            self.view.list_entries(list_place(path))
        else:
            self.view.browse_switch.value = False
            self.view.fields["source"].value = path

    def _connect(self) -> None:
        self._mount()
        self.view.list_entries(list_place(DRIVE))

    def _mount(self) -> None:
        self._worker.enter(_CONNECTING)
        self._worker.add("mount", colabkit.mount())

    def _describe(self) -> None:
        """Show the contents of the source."""
        self._summary, self._lacks_drive = None, False
        self.view.describe("")
        self.view.describe_size("", "")
        try:
            settings = self.view.settings
            source, options = settings.path, settings.options
        except ColabkitError:
            # `_show_code` shows errors of the fields.
            return
        self.view.describe("Looking at the source …")
        try:
            if needs_mount(source):
                self._lacks_drive = True
                self.view.describe("Google Drive is not connected. Click Browse, then Google Drive, or click Train.")
                return
            given = {name: options[name] for name in _DESCRIBED if name in options}
            with on_interrupt(default_int_handler):
                self._summary = describe_source(source, progress=False, **given)
        except ColabkitError as error:
            text, fields = in_form(error)
            self.view.describe(text, is_error=True)
            self.view.point_to(fields)
        except KeyboardInterrupt:
            self.view.describe("Stopped looking at the source.")
        else:
            self.view.describe(repr(self._summary))
            if not self.view.has_error:
                self.view.point_to(())
            self._describe_size()

    def _describe_size(self) -> None:
        """Show the size of the images to train on, and a warning if they are shrunk far below their median."""
        if self._summary is None or self._summary.median_size is None:
            return
        try:
            options = self.view.settings.options
        except ColabkitError:
            # `_show_code` shows errors of the fields.
            self.view.describe_size("", "")
            return
        try:
            size = height_and_width("use the form", options.get("size"))
            found = choose_size(size or "auto", self._summary, self._device)
        except ColabkitError as error:
            self.view.describe_size("", in_form(error)[0])
        else:
            self.view.describe_size(f"{found.text[:1].upper()}{found.text[1:]}", found.warning)

    def _clicked(self, action: Action) -> None:
        if action == "train" and self._epochs:
            # The run with these settings is complete, so train for longer.
            self.view.fields["epochs"].value = str(2 * self._epochs)
        self._run(_DOING[action], lambda: self._make(action), action)

    def _run(self, doing: str, work: Callable[[], None], action: Action | None = None) -> None:
        """Do work in the main thread, and then offer to train, resume, train longer, or train again."""
        is_training = action in ("train", "restart")

        def begun() -> None:
            self._is_training = is_training
            self._keep()
            work()

        def ended(outcome: Outcome) -> None:
            # Before the first step of a new run, there is only the former one, which was to be left.
            has_begun = action == "train" or bool(self._worker.results)
            self._offer("Continue" if outcome == "stopped" and is_training and has_begun else "Train")
            self.view.offer_places(_places(colabkit.runtime()))
            self._show_code()
            if self._summary is None and (outcome == "done" or self._lacks_drive):
                # The source could not be described before, probably because Drive was not mounted.
                self._describe()
            self._keep()

        self._worker.in_main_thread(lambda: self._worker.run(doing, begun, ended))

    def _offer(self, label: str) -> None:
        label = f"Train {format_things(self._epochs, 'more epoch', 'more epochs')}" if self._epochs else label
        if label == "Continue" and not self.view.has_error:
            self.view.say("Stopped. Click Continue to resume.")
        self.view.end(label, can_restart=label != "Train")

    def _make(self, action: Action) -> None:
        """Make the call of an action, with the live panel."""
        from colabkit.monitoring import Dashboard

        found = call_of(self.view.settings, action, self.view.near.value)
        self._show_code(found)
        is_training = found.name == "train_on"
        if is_training or action == "prepare":
            load_torch(self._worker.enter)
        if is_training:
            self._epochs = 0
        elif needs_mount(found.source):
            self._mount()
        self._worker.enter(_DOING[action])
        has_curves, words = False, FieldWords(found.name)
        try:
            with speaking(words), Dashboard(self.view, work_after_s=0.0), self._worker.following():
                result = found.make()
        except ColabkitError as error:
            error.words = words
            raise
        except KeyboardInterrupt as stop:
            # A stopped run has no result yet, so keep its last frame visible.
            has_curves = hasattr(stop, "report")
            raise
        finally:
            if not has_curves:
                self.view.fold(is_training)
        report = getattr(result, "report", result)
        if is_training:
            self._epochs = report.epochs
        report.speak(words)
        self._worker.add(found.name, report)


def _line(settings: Settings, action: Action, near: str) -> str:
    try:
        found = call_of(settings, action, near)
        return f"colabkit.mount()\n{found.code}" if needs_mount(found.source) else found.code
    except ColabkitError as error:
        return f"# {in_form(error)[0]}"


def _places(found: RuntimeReport) -> list[tuple[str, str]]:
    return places(found, os.path.abspath(local_root(os.environ)))
