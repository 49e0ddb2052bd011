"""The launcher, driven by clicks without a browser: its actions, its output and its cleanup.

`test_launcher_kernels.py` also drives the launcher in a kernel with ipywidgets 7.7.1.
"""

from __future__ import annotations

import asyncio
import errno
import html
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import IPython.display
import ipywidgets
import pytest
from ipywidgets.widgets import widget as widget_module
from launchers import click, described, fill, pointed

import colabkit
from colabkit.errors import BadSource, MissingPackage, NoNotebook
from colabkit.foundation import cannot, meters
from colabkit.foundation.progress import ProgressBar
from colabkit.notebook.launcher import panel as launcher_module
from colabkit.notebook.launcher.panel import Launcher
from colabkit.notebook.launcher.view import tree_of
from colabkit.notebook.launcher.work import _QUIET_S
from colabkit.training.checkpoints import folder as checkpoint_folder

CONTINUE = "Stopped. Click Continue to resume."


def widgets_there() -> int:
    return len(widget_module._instances)


@pytest.fixture
def panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image_tree: Path) -> Iterator[Launcher]:
    monkeypatch.chdir(tmp_path)
    before = widgets_there()
    panel = Launcher(ipywidgets)
    fill(panel, source=str(image_tree), epochs="1", batch_size="8")
    yield panel
    panel.close()
    assert widgets_there() == before


def offered(panel: Launcher) -> list[str]:
    """Return the labels of the visible buttons for training."""
    buttons = (panel.view.buttons["train"], panel.view.stop, panel.view.buttons["restart"])
    return [button.description for button in buttons if button.layout.display is None]


def test_a_source_is_answered_at_once_with_what_it_contains(panel: Launcher) -> None:
    assert "24 images, 3 classes, " in described(panel)
    fill(panel, source="samples:digits")
    assert "1,797 images, 10 classes, 8×8, not split yet" in described(panel)
    assert "All images keep their 8×8 pixels" in described(panel)
    assert offered(panel) == ["Train"]


@pytest.mark.parametrize("action", ["probe", "stage", "prepare"])
def test_a_click_runs_its_action_and_shows_the_report(panel: Launcher, action: str) -> None:
    assert click(panel, action).startswith("Done in ")
    ((name, report),) = panel.results.items()
    assert name == action
    assert "<details open" in panel.view.shown
    assert html.escape(repr(report).splitlines()[0], quote=True) in panel.view.shown
    assert "Training panel" not in panel.view.shown
    assert offered(panel) == ["Train"]


def test_train_makes_a_model_and_then_offers_to_train_longer_or_again(
    panel: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert click(panel, "train").startswith("Done in ")
    report = panel.results["train_on"]
    assert (report.epochs, report.training.trained) == (1, 1)
    assert report.model_path.is_relative_to(Path("colabkit-work").absolute())
    shown = panel.view.shown
    assert "Training result" in shown
    assert "(Image size)" in shown
    assert "(size=)" not in shown
    assert "colabkit.train_on(" in shown
    assert "Training panel" in shown.partition("<details")[2]
    assert capsys.readouterr() == ("", "")
    assert offered(panel) == ["Train 1 more epoch", "Train again from scratch"]
    click(panel, "train")
    assert (panel.results["train_on"].epochs, panel.results["train_on"].training.trained) == (2, 1)
    assert panel.view.settings.epochs == "2"
    click(panel, "restart")
    assert (panel.results["train_on"].epochs, panel.results["train_on"].training.trained) == (2, 2)
    fill(panel, batch_size="4")
    assert offered(panel) == ["Train"]


def test_a_complete_run_is_shown_again_with_offers_to_train_longer(panel: Launcher) -> None:
    click(panel, "train")
    again = Launcher(ipywidgets)
    fill(again, **{name: field.value for name, field in panel.view.fields.items()})
    assert click(again, "train").startswith("Done in ")
    assert again.results["train_on"].training.trained == 0
    assert "Training result" in again.view.shown
    assert offered(again) == ["Train 1 more epoch", "Train again from scratch"]
    again.close()


HOSTILE = "<script>alert(1)</script>"


def test_an_error_is_shown_in_the_panel_as_one_escaped_line(
    panel: Launcher, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fill(panel, source=f"/no/such/{HOSTILE}")
    assert f"Cannot read '/no/such/{HOSTILE}'" in described(panel)
    click(panel, "train")
    assert panel.view.said.startswith(f"Cannot read '/no/such/{HOSTILE}'")
    assert "role='alert'" in panel.view.shown
    texts = [one.value for one in tree_of(panel.view.root) if isinstance(one, ipywidgets.HTML)]
    assert "<script" not in "".join(texts)
    assert "&lt;script&gt;" in panel.view._code.value
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


def test_names_of_classes_are_escaped(panel: Launcher, image_tree: Path) -> None:
    (image_tree / "ants").rename(image_tree / "<b>ants")
    click(panel, "train")
    assert panel.results["train_on"].classes[0] == "<b>ants"
    assert "<b>ants" not in panel.view.shown


def test_any_other_exception_is_shown_as_one_line(
    panel: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("<i>no</i>")

    monkeypatch.setattr(colabkit, "stage", broken)
    click(panel, "stage")
    assert panel.view.said.startswith("ZeroDivisionError: <i>no</i>")
    assert "Traceback" not in panel.view.said
    assert "<i>no" not in panel.view.shown
    monkeypatch.setenv("COLABKIT_DEBUG", "1")
    click(panel, "stage")
    assert "Traceback" in panel.view.said
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_is_shown_and_the_next_click_works(panel: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGINT)
    stage = colabkit.stage
    monkeypatch.setattr(colabkit, "stage", lambda *_: signal.raise_signal(signal.SIGINT))
    assert click(panel, "stage") == "Stopped."
    monkeypatch.setattr(colabkit, "stage", stage)
    assert click(panel, "stage").startswith("Done")
    assert signal.getsignal(signal.SIGINT) == handler


def test_an_interrupted_training_continues(panel: Launcher) -> None:
    def interrupt(event: meters.Event) -> None:
        if isinstance(event, meters.StepDone):
            signal.raise_signal(signal.SIGINT)

    unsubscribe = meters.subscribe(interrupt)
    click(panel, "train")
    unsubscribe()
    assert panel.view.said == CONTINUE
    assert panel.results["train"].steps == 1
    # The last frame, with its curves, stays visible, and the report is collapsed below it.
    frame, table = panel.view.shown.split("<details ", 1)
    assert "Training panel" in frame
    assert "checkpoint-00000001" in table
    assert offered(panel) == ["Continue", "Train again from scratch"]
    assert click(panel, "train").startswith("Done")
    assert panel.results["train_on"].training.resumed_from is not None


def test_a_stopped_run_whose_last_state_is_not_saved_shows_an_error(
    panel: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def interrupt(event: meters.Event) -> None:
        if isinstance(event, meters.StepDone):
            monkeypatch.setattr(checkpoint_folder, "write", full)
            signal.raise_signal(signal.SIGINT)

    unsubscribe = meters.subscribe(interrupt)
    said = click(panel, "train")
    unsubscribe()
    assert "the state after step 1 is not saved, and the newest checkpoint is" in said
    assert "role='alert'" in panel.view.shown
    assert offered(panel) == ["Continue", "Train again from scratch"]


def test_every_second_of_the_work_says_what_it_does(panel: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    arrived = threading.Event()

    def silent(*_: object, **__: object) -> None:
        print("Found 2 images")
        assert arrived.wait(30)
        said.append(html.unescape(panel.view.shown))
        print("Evaluating the best epoch")
        said.append(panel.view.said)
        raise KeyboardInterrupt

    monkeypatch.setattr(colabkit, "stage", silent)
    panel.view._message.observe(lambda change: "… 1 s" in change["new"] and arrived.set(), "value")
    click(panel, "stage")
    assert "Copying the source … 1 s" in said[0]
    assert "Found 2 images" in said[0]
    assert said[1].startswith("Evaluating the best epoch … ")


def test_a_second_click_during_the_run_starts_nothing_and_the_form_is_disabled(
    panel: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, calls = colabkit.stage, []

    def counted(*given: Any, **named: Any) -> Any:
        view = panel.view
        switches = (view.browse_switch, view.more_switch, view.only_switch)
        calls.append([one.disabled for one in (*view.buttons.values(), *view.fields.values(), *switches)])
        assert offered(panel) == []
        for button in panel.view.buttons.values():
            button.click()
        return stage(*given, **named)

    monkeypatch.setattr(colabkit, "stage", counted)
    click(panel, "stage")
    assert len(calls) == 1
    assert all(calls[0])
    assert not panel.view.buttons["train"].disabled
    assert not panel.view.more_switch.disabled
    click(panel, "stage")
    assert len(calls) == 2


def test_progress_is_shown_in_the_live_panel(panel: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def slow(*_: object, **__: object) -> None:
        with ProgressBar("stage", 8, " files") as bar:
            bar.advance(2)
            seen.append(panel.view.shown)
        raise KeyboardInterrupt

    monkeypatch.setattr(colabkit, "stage", slow)
    click(panel, "stage")
    assert "Copying files to this machine" in seen[0]
    assert "Copying files" not in panel.view.shown


def test_warnings_of_the_run_are_shown_in_the_panel(
    panel: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warns(*_: object, **__: object) -> None:
        meters.events.logger.warning("slow %s", HOSTILE)
        raise RuntimeError("over")

    monkeypatch.setattr(colabkit, "stage", warns)
    click(panel, "stage")
    assert panel.view.said.endswith(f"slow {HOSTILE}")
    assert "<script" not in panel.view.shown
    assert HOSTILE not in click(panel, "probe")


def test_the_code_is_updated_with_the_form(panel: Launcher) -> None:
    fill(panel, source="other", epochs="5", batch_size="auto")
    code = html.unescape(panel.view._code.value)
    assert "import colabkit\ncolabkit.train_on('other', epochs=5)<" in code
    assert "colabkit.stage('other')<" in html.unescape(panel.view._only_lines["stage"].value)
    panel.view.near.value = "disk"
    assert "colabkit.stage('other', to='disk')<" in html.unescape(panel.view._only_lines["stage"].value)


def test_an_invalid_field_is_reported_at_once_without_code_until_it_is_valid(panel: Launcher) -> None:
    fill(panel, epochs="many")
    assert panel.view.said.startswith("Cannot use the form: Epochs is 'many'")
    assert pointed(panel) == ["epochs"]
    assert panel.view._code.layout.display == "none"
    fill(panel, epochs="5")
    assert panel.view.said == ""
    assert pointed(panel) == []
    assert "epochs=5" in panel.view._code.value


@pytest.mark.parametrize("switch", ["more_switch", "only_switch", "browse_switch"])
def test_sections_are_shown_on_request(panel: Launcher, switch: str) -> None:
    def visible() -> int:
        return sum(
            getattr(one, "layout", None) is None or one.layout.display is None for one in tree_of(panel.view.root)
        )

    before = visible()
    getattr(panel.view, switch).value = True
    assert visible() > before
    getattr(panel.view, switch).value = False
    assert visible() == before


def test_a_source_is_chosen_from_the_list(panel: Launcher, image_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLABKIT_DRIVE", str(image_tree.parent))
    monkeypatch.setattr("colabkit.notebook.launcher.view._DOUBLE_CLICK_S", 0.0)
    panel.view.browse_switch.value = True
    assert panel.view.browser.value is None
    for label in ("Google Drive", f"{image_tree.name}/", f"✓ use drive:{image_tree.name}"):
        panel.view.browser.label = label
    assert panel.view.settings.source == f"drive:{image_tree.name}"
    assert "24 images, 3 classes, " in described(panel)
    assert not panel.view.browse_switch.value


def test_the_second_click_of_a_double_click_goes_no_further(panel: Launcher, image_tree: Path) -> None:
    panel.view.browse_switch.value = True
    entries = panel.view.browser.options
    panel.view.browser.label = "this folder"
    assert panel.view.browser.options == entries
    assert panel.view.browser.value is None


def test_drive_is_connected_from_the_list(panel: Launcher, monkeypatch: pytest.MonkeyPatch, image_tree: Path) -> None:
    def mount() -> colabkit.foundation.Report:
        monkeypatch.setenv("COLABKIT_DRIVE", str(image_tree.parent))
        return colabkit.runtime()

    monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
    monkeypatch.setattr("colabkit.notebook.recipe.api.drive_mounts", lambda table: [])
    monkeypatch.setattr("colabkit.notebook.launcher.view._DOUBLE_CLICK_S", 0.0)
    monkeypatch.setattr(colabkit, "mount", mount)
    fill(panel, source=f"drive:{image_tree.name}")
    assert "Google Drive is not connected" in described(panel)
    assert "colabkit.mount()" in panel.view._only_lines["stage"].value
    panel.view.browse_switch.value = True
    panel.view.browser.label = "Google Drive (connect)"
    assert (f"{image_tree.name}/", f"drive:{image_tree.name}/") in panel.view.browser.options
    assert "24 images, 3 classes, " in described(panel)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_source_on_drive_is_described_once_a_run_has_connected_drive_even_if_the_run_fails(
    panel: Launcher, monkeypatch: pytest.MonkeyPatch, image_tree: Path, error: type[BaseException]
) -> None:
    def mount() -> colabkit.foundation.Report:
        monkeypatch.setenv("COLABKIT_DRIVE", str(image_tree.parent))
        return colabkit.runtime()

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
    monkeypatch.setattr("colabkit.notebook.recipe.api.drive_mounts", lambda table: [])
    monkeypatch.setattr(colabkit, "mount", mount)
    monkeypatch.setattr(colabkit, "stage", fails)
    fill(panel, source=f"drive:{image_tree.name}")
    assert "Google Drive is not connected" in described(panel)
    click(panel, "stage")
    assert "24 images, 3 classes, " in described(panel)


def test_a_click_handled_in_another_thread_runs_in_the_main_thread(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = []
    monkeypatch.setattr(colabkit, "stage", lambda *_: threads.append(threading.current_thread()))

    async def cell() -> None:
        panel = Launcher(ipywidgets)
        fill(panel, source=str(image_tree))
        over = asyncio.Event()
        monkeypatch.setattr(panel.view, "end", lambda *_, **__: over.set())
        await asyncio.get_running_loop().run_in_executor(None, panel.view.buttons["stage"].click)
        await asyncio.wait_for(over.wait(), 30)
        panel.close()

    asyncio.run(cell())
    assert threads == [threading.main_thread()]


def test_a_click_that_waited_for_the_end_of_the_work_is_ignored(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(colabkit, "stage", lambda *_: calls.append(1) or colabkit.runtime())

    async def cell() -> None:
        panel = Launcher(ipywidgets)
        fill(panel, source=str(image_tree))
        panel.view.buttons["stage"].click()
        panel.view.buttons["stage"].click()
        assert len(calls) == 1
        ready = asyncio.Event()
        asyncio.get_running_loop().call_later(_QUIET_S + 0.1, ready.set)
        await ready.wait()
        assert not panel.is_busy
        panel.view.buttons["stage"].click()
        assert len(calls) == 2
        panel.close()

    asyncio.run(cell())


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    shell = SimpleNamespace(kernel=object(), execution_count=1, shown=[])

    def display(bundle: dict[str, Any], *, raw: bool, display_id: str, update: bool) -> None:
        shell.shown.append((sorted(bundle), update))
        shell.last = bundle

    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setattr(IPython.display, "display", display)
    yield shell
    launcher_module.close_launchers()


VIEW = "application/vnd.jupyter.widget-view+json"


def test_the_launcher_opens_once_in_its_cell_and_again_in_another(notebook: SimpleNamespace) -> None:
    panel = colabkit.launch()
    panel._ipython_display_()
    assert notebook.shown == [([VIEW, "text/plain"], False), (["text/html", "text/plain"], False)]
    assert "launcher" in notebook.last["text/plain"]
    notebook.execution_count = 2
    panel._ipython_display_()
    assert len(notebook.shown) == 4


def test_opening_another_launcher_closes_the_previous_one_and_unloading_closes_all(notebook: SimpleNamespace) -> None:
    before = widgets_there()
    first = colabkit.launch()
    there = widgets_there()
    second = colabkit.launch()
    assert not first.is_open
    assert widgets_there() == there
    colabkit.unload_ipython_extension(notebook)
    assert not second.is_open
    assert widgets_there() == before


def test_results_stay_in_the_saved_notebook_and_are_hidden_by_the_live_panel(
    notebook: SimpleNamespace, image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    panel = colabkit.launch()
    fill(panel, source=str(image_tree))
    click(panel, "stage")
    assert notebook.shown[-1] == (["text/html", "text/plain"], True)
    assert "Staged 24 files" in notebook.last["text/plain"]
    assert "Staged 24 files" in notebook.last["text/html"]
    hidden = notebook.last["text/html"].partition("class='")[2].partition("'")[0]
    assert f"<style>.{hidden}{{display:none}}" in "".join(child.value for child in panel.view.root.children[:1])
    panel.close()
    panel.close()
    assert notebook.last == {"text/html": "", "text/plain": ""}
    panel._ipython_display_()
    assert notebook.last == {"text/plain": "colabkit's launcher, closed"}


@pytest.mark.parametrize(
    ("action", "function", "doing", "advice"),
    [
        ("stage", "stage", "Copying the source …", ""),
        (
            "train",
            "train_on",
            "…",
            " To follow the run live, use .*%dashboard --attach colabkit-work in another notebook.",
        ),
    ],
)
def test_the_saved_state_of_a_run_is_marked_as_not_live(
    notebook: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, action: str, function: str, doing: str, advice: str
) -> None:
    during = []

    def work(*_: object, **options: object) -> Any:
        during.append(notebook.last)
        raise BadSource(cannot("work", "it is a test", "", "Stop"))

    monkeypatch.setattr(colabkit, function, work)
    panel = colabkit.launch()
    click(panel, action)
    for kind in ("text/plain", "text/html"):
        state = r"State at \d+ \w+ [\d:]+ UTC, not live: the work may continue or have ended\."
        assert re.search(f"{state}{advice}\n" if kind == "text/plain" else f"{state}{advice}<", during[0][kind])
        assert doing in during[0][kind]
        assert "not live" not in notebook.last[kind]


@pytest.mark.parametrize("changed", [{"epochs": "2"}, {"source": "/no/other"}])
def test_an_error_of_the_source_is_shown_once(notebook: SimpleNamespace, changed: dict[str, str]) -> None:
    panel = colabkit.launch()
    fill(panel, source="/no/such")
    line = panel.view._source_line
    assert "no such file or folder" in line.value
    click(panel, "train")
    assert "no such file or folder" in panel.view.said
    assert line.layout.display == "none"
    fill(panel, **changed)
    assert (line.layout.display, panel.view.said) == (None, "")


def test_a_size_that_is_not_possible_is_shown_below_its_field(notebook: SimpleNamespace) -> None:
    panel = colabkit.launch()
    fill(panel, source="samples:digits")
    fill(panel, size="0")
    assert "a whole number of pixels" in panel.view._size_line.value
    fill(panel, size="wide")
    assert panel.view._size_line.value == ""
    assert "wide" in panel.view.said


def test_outside_of_a_notebook_the_error_names_where_it_works() -> None:
    with pytest.raises(NoNotebook, match=r"this is not a notebook\..*python -m colabkit"):
        colabkit.launch()


def test_without_ipywidgets_the_error_names_the_command_that_installs_it(
    notebook: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(MissingPackage, match="pip install ipywidgets"):
        colabkit.launch()


def test_importing_the_launcher_imports_neither_torch_nor_ipywidgets() -> None:
    import subprocess

    code = "import sys, colabkit.notebook.launcher.panel; print({'torch', 'ipywidgets', 'IPython'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
