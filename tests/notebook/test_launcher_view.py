"""The launcher, driven by clicks without a browser: its actions, its output and its cleanup.

`test_launcher_kernels.py` also drives the launcher in a kernel with ipywidgets 7.7.1.
"""

from __future__ import annotations

import asyncio
import html
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
from launchers import click, fill

import colabkit
from colabkit.errors import MissingPackage, NoNotebook
from colabkit.foundation import meters
from colabkit.foundation.progress import ProgressBar
from colabkit.notebook.launcher import panel as launcher_module
from colabkit.notebook.launcher.panel import Launcher

STOPPED = "Stopped. Click again to resume."


def widgets_there() -> int:
    return len(widget_module._instances)


@pytest.fixture
def panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image_tree: Path) -> Iterator[Launcher]:
    monkeypatch.chdir(tmp_path)
    before = widgets_there()
    panel = Launcher(ipywidgets)
    fill(panel, source=str(image_tree), to="disk", epochs=1, batch_size=8)
    yield panel
    panel.close()
    assert widgets_there() == before


@pytest.mark.parametrize(
    ("action", "results"),
    [("probe", ["probed"]), ("stage", ["staged"]), ("pack", ["staged", "packed"])],
)
def test_a_click_runs_its_action_and_shows_the_reports(panel: Launcher, action: str, results: list[str]) -> None:
    click(panel, action)
    assert panel.view.said.startswith("Done in ")
    assert list(panel.results) == results
    tables = [report._repr_html_().partition("</div>") for report in panel.results.values()]
    assert all(f"{line}</div></summary>{table}</details>" in panel.view.shown for line, _, table in tables)
    assert panel.view.shown.count("<details open") == 1


def test_stage_and_train_trains_with_the_live_panel_and_checkpoints(
    panel: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    click(panel, "train")
    report = panel.results["report"]
    assert report.trained == 1
    assert report.checkpoint.is_relative_to(Path("colabkit-work").absolute())
    assert "aria-label='Training panel'" in panel.view.shown
    assert "epoch 1/1" in panel.view.shown
    assert capsys.readouterr() == ("", "")
    fill(panel, epochs=2)
    click(panel, "train")
    assert panel.results["report"].trained == 1
    assert len(panel.results["report"].epochs) == 2


@pytest.mark.full
def test_images_of_several_sizes_are_resized_to_train(panel: Launcher, image_tree: Path) -> None:
    from PIL import Image

    Image.new("RGB", (20, 30)).save(image_tree / "ants" / "large.png")
    click(panel, "train")
    assert panel.results["packed"].sample_shape == ()
    assert panel.results["report"].trained == 1


def test_labels_that_are_not_classes_are_reported(panel: Launcher) -> None:
    fill(panel, labels="none")
    click(panel, "train")
    assert "the images have no labels; expected one class per image" in panel.view.said


HOSTILE = "<script>alert(1)</script>"


def test_an_error_is_shown_in_the_panel_as_one_escaped_line(
    panel: Launcher, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    fill(panel, source=f"/no/such/{HOSTILE}")
    click(panel, "pack")
    assert panel.view.said.startswith(f"Cannot read '/no/such/{HOSTILE}'")
    assert "role='alert'" in panel.view.shown
    panel.view.code_switch.value = True
    shown = panel.view.shown + panel.view._code.value
    assert "<script" not in shown
    assert "&lt;script&gt;" in panel.view._code.value
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


def test_names_of_classes_are_escaped(panel: Launcher, image_tree: Path) -> None:
    (image_tree / "ants").rename(image_tree / "<b>ants")
    click(panel, "train")
    assert panel.results["packed"].classes[0] == "<b>ants"
    assert "<b>ants" not in panel.view.shown


def test_any_other_exception_is_shown_as_one_line(
    panel: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_: object) -> None:
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


def test_an_interrupt_is_shown_and_the_next_click_resumes(panel: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGINT)
    stage = colabkit.stage
    monkeypatch.setattr(colabkit, "stage", lambda **_: signal.raise_signal(signal.SIGINT))
    assert click(panel, "stage") == STOPPED
    monkeypatch.setattr(colabkit, "stage", stage)
    assert click(panel, "stage").startswith("Done")
    assert signal.getsignal(signal.SIGINT) == handler


def test_an_interrupted_training_resumes(panel: Launcher) -> None:
    def interrupt(event: meters.Event) -> None:
        if isinstance(event, meters.StepDone):
            signal.raise_signal(signal.SIGINT)

    fill(panel, splits="")
    unsubscribe = meters.subscribe(interrupt)
    click(panel, "train")
    unsubscribe()
    assert panel.view.said == STOPPED
    assert panel.results["report"].steps == 1
    assert "stopped by KeyboardInterrupt" in panel.view.shown
    assert click(panel, "train").startswith("Done")
    assert panel.results["report"].steps == 3
    assert panel.results["report"].resumed_from is not None


def test_a_second_click_during_the_run_or_queued_for_later_starts_nothing(
    panel: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, calls = colabkit.stage, []
    row = dict(panel.view.buttons)

    def counted(**arguments: Any) -> Any:
        calls.append([button.disabled for button in row.values()])
        row["pack"].click()
        return stage(**arguments)

    monkeypatch.setattr(colabkit, "stage", counted)
    row["stage"].click()
    # Simulate a second click that was queued during the run.
    row["stage"].click()
    assert calls == [[True] * 4]
    assert not any(button.disabled for button in panel.view.buttons.values())
    click(panel, "stage")
    assert len(calls) == 2


def test_progress_updates_the_bar_of_the_panel(panel: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def slow(**_: object) -> None:
        with ProgressBar("copy", 8, " files") as bar:
            for _ in range(2):
                bar.advance(2)
                bar._bar.refresh()
                seen.append((panel.view._bar.value, panel.view._numbers.value, panel.view._work.layout.display))
        raise KeyboardInterrupt

    monkeypatch.setattr(colabkit, "stage", slow)
    click(panel, "stage")
    assert [value for value, _, _ in seen] == [0.25, 0.5]
    assert "copy: 4 of 8 files · 50%" in seen[1][1]
    assert seen[1][2] is None
    assert panel.view._work.layout.display == "none"


def test_warnings_of_the_run_are_shown_in_the_panel(
    panel: Launcher, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warns(**_: object) -> None:
        meters.events.logger.warning("slow %s", HOSTILE)
        raise RuntimeError("over")

    monkeypatch.setattr(colabkit, "stage", warns)
    click(panel, "stage")
    assert panel.view.said.endswith(f"slow {HOSTILE}")
    assert "<script" not in panel.view.shown
    assert HOSTILE not in click(panel, "probe")


def test_the_code_is_updated_with_the_form(panel: Launcher) -> None:
    panel.view.code_switch.value = True
    fill(panel, source="other", epochs=5)
    assert "colabkit.stage('other', to='disk')" in html.unescape(panel.view._code.value)
    assert "epochs=5" in panel.view._code.value
    fill(panel, source="")
    assert "# Cannot train on the source: Source is empty" in panel.view._code.value
    panel.view.code_switch.value = False
    assert panel.view._code.value == ""


def test_pack_options_are_shown_on_request(panel: Launcher) -> None:
    assert panel.view._options.layout.display == "none"
    panel.view.options_switch.value = True
    assert panel.view._options.layout.display is None


def test_free_space_is_updated_and_the_choice_stays(panel: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "colabkit.notebook.launcher.panel.places", lambda *_: [("a", "auto"), ("b", "tmpfs"), ("c", "disk")]
    )
    click(panel, "stage")
    assert panel.view.fields["to"].label == "c"
    assert panel.view.settings.to == "disk"


def test_a_click_handled_in_another_thread_runs_in_the_main_thread(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = []
    monkeypatch.setattr(colabkit, "stage", lambda **_: threads.append(threading.current_thread()))

    async def cell() -> None:
        panel = Launcher(ipywidgets)
        fill(panel, source=str(image_tree))
        over = asyncio.Event()
        monkeypatch.setattr(panel.view, "offer", lambda near: over.set())
        await asyncio.get_running_loop().run_in_executor(None, panel.view.buttons["stage"].click)
        await asyncio.wait_for(over.wait(), 30)
        panel.close()

    asyncio.run(cell())
    assert threads == [threading.main_thread()]


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
    fill(panel, source=str(image_tree), to="disk")
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
