"""Progress, panels, reports and errors in each front end: every cell of the table in docs/reference/hosts.md is tested.

A notebook is run by nbclient, as papermill and Kaggle do, in a kernel without ipywidgets. Colab's command line is
simulated by its protocol: it prints each update of an output again, and does not answer `input()`.
"""

from __future__ import annotations

import os
import pty
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import warm_python
from jupyter_client.manager import start_new_kernel
from kernels import KINDS, ROOT, kernel_at, kernel_of, python_of
from nbclient import NotebookClient
from sampling import sampled

import colabkit

pytestmark = pytest.mark.full

# Show the progress of short operations too, and print a line at each frame.
SETUP = """
import sys
sys.modules["ipywidgets"] = None
import numpy as np
import colabkit
from colabkit.foundation import progress, screens
progress._SHOWN_AFTER_S = progress._REDRAWN_S = screens._LINE_EVERY_S = 0.0
loader = colabkit.Loader((np.zeros((64, 2), np.float32), np.zeros(64, np.int64)), 1)
"""
CELLS = {
    "setup": "%load_ext colabkit" + SETUP,
    "progress": "staged = colabkit.stage('samples:digits', to='digits', refresh=True)",
    "panel": "report = colabkit.train(lambda batch: 0.5, loader, epochs=3, state={})",
    "report": "staged",
    "error": "%stage nothing",
}
PROGRESS = re.compile(r"extract: [\d.]+%, ")
STAGED, TRAINED = "extract: 217 of 217 KiB in ", "Finished"
ERROR = r"SourceMissing: Cannot read 'nothing': .*\n?"


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.fixture(scope="module", params=sampled(KINDS, 1))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the outputs in the saved notebook, by cell."""
    folder = tmp_path_factory.mktemp("saved")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    with kernel_of(request.param, folder, is_warm=True) as kernel:
        resources = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=120, kernel_name=kernel, allow_errors=True, resources=resources).execute()
    return dict(zip(CELLS, [cell.outputs for cell in notebook.cells], strict=True))


def test_a_saved_notebook_keeps_one_line_per_operation_one_panel_the_report_and_a_one_line_error(
    saved: dict[str, list[Any]],
) -> None:
    everything = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=saved["progress"])]))
    assert "widget" not in everything
    assert [output.output_type for output in saved["progress"]] == ["display_data"] * len(saved["progress"])
    assert any(STAGED in output.data["text/plain"] for output in saved["progress"])
    assert all("<progress" not in output.data["text/html"] for output in saved["progress"])
    (panel,) = saved["panel"]
    assert "Training panel" in panel.data["text/html"]
    assert TRAINED in panel.data["text/plain"]
    (report,) = saved["report"]
    assert report.data["text/html"].startswith("<div")
    assert report.data["text/plain"].startswith("Staged 1,797 files")
    (error,) = saved["error"]
    assert re.fullmatch(ERROR, plain("\n".join(error.traceback)))


class CommandLine:
    """The client of Colab's command line 0.7.5: `colab exec`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.printed: list[str] = []

    def run(self, code: str) -> str:
        """Run code and return the output of the command line."""
        self.printed.clear()
        self._client.execute_interactive(code, allow_stdin=False, output_hook=self._show, timeout=120)
        return plain("".join(self.printed))

    def _show(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if "data" in content:
            self.printed.append(content["data"].get("text/html", content["data"].get("text/plain", "")) + "\n")
        elif "traceback" in content:
            self.printed.append("".join(content["traceback"]) + "\n")
        else:
            self.printed.append(content.get("text", ""))


@pytest.fixture(scope="module", params=sampled(KINDS, 1))
def command_line(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    folder = tmp_path_factory.mktemp("exec")
    doubles = ROOT / "tests" / "doubles"
    command = [python_of(request.param), str(doubles / "colab_kernel.py")]
    with kernel_at(folder, command, [doubles / "colab_double", doubles, ROOT], is_warm=True) as name:
        manager, client = start_new_kernel(kernel_name=name, cwd=str(folder))
        try:
            yield CommandLine(client)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def test_colabs_command_line_prints_few_lines(command_line: CommandLine) -> None:
    assert command_line.run(CELLS["setup"]) == ""
    progress = command_line.run(CELLS["progress"])
    assert PROGRESS.search(progress)
    assert len(progress.encode()) <= 2000
    panel = command_line.run(CELLS["panel"])
    assert TRAINED in panel.splitlines()[-1]
    assert "loss 0.5" in panel.splitlines()[-1]
    assert len(panel.encode()) <= 2000
    assert "<div" not in progress + panel
    assert "Staged 1,797 files" in command_line.run(CELLS["report"])
    assert re.fullmatch(ERROR, command_line.run(CELLS["error"]))


SCRIPT = f"""{SETUP}
{CELLS["progress"]}
with colabkit.dashboard():
    {CELLS["panel"]}
print(report)
colabkit.stage("nothing")
"""


def piped(folder: Path, command: list[str], environ: dict[str, str]) -> tuple[str, str]:
    done = warm_python.run(command, cwd=folder, text=True, env=environ)
    return done.stdout, done.stderr


def in_terminal(folder: Path, command: list[str], environ: dict[str, str]) -> tuple[str, str]:
    mine, theirs = pty.openpty()
    child = warm_python.Program(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    shown = b""
    # Reading fails with EIO after the child has closed the terminal.
    try:
        while read := os.read(mine, 65536):
            shown += read
    except OSError:
        pass
    os.close(mine)
    child.wait()
    text = shown.decode().replace("\r\n", "\n")
    return text, text


def run_script(
    run: Callable[[Path, list[str], dict[str, str]], tuple[str, str]], folder: Path, shell: list[str], **environ: str
) -> tuple[str, str]:
    (folder / "script.py").write_text(SCRIPT)
    root = Path(colabkit.__file__).parent.parent
    own = {"PYTHONPATH": str(root), "TERM": "xterm", "IPYTHONDIR": str(folder), **environ}
    return run(folder, [sys.executable, *shell, "script.py"], {**os.environ, **own})


@pytest.mark.parametrize("shell", [[], ["-m", "IPython", "--no-banner"]], ids=["python", "ipython"])
def test_a_terminal_redraws_bar_and_panel(tmp_path: Path, shell: list[str]) -> None:
    shown, _ = run_script(in_terminal, tmp_path, shell)
    assert PROGRESS.search(shown)
    assert re.search(r"█+  .*epoch 3/3", shown)
    assert "\x1b[1F\x1b[J" in shown
    assert "Finished" in shown
    error = shown[shown.index("Trained 3 epochs") :]
    assert "Cannot read 'nothing'" in error
    assert ("Traceback" in error) != bool(shell), "IPython shows one line"


@pytest.mark.parametrize("run", [piped, in_terminal], ids=["pipe", "dumb terminal"])
def test_the_shell_of_an_agent_a_pipe_or_a_log_gets_few_lines(
    tmp_path: Path, run: Callable[[Path, list[str], dict[str, str]], tuple[str, str]]
) -> None:
    out, err = run_script(run, tmp_path, [], TERM="dumb")
    assert "\x1b" not in plain(out + err)
    assert PROGRESS.search(err)
    (last,) = [line for line in out.splitlines() if line.startswith("Finished")]
    assert "epoch 3/3" in last
    assert "loss 0.5" in last
    assert "Trained 3 epochs" in out
    # The output of a terminal contains the progress too.
    most_bytes = 2000 if run is piped else 4000
    assert len(out[: out.index("Trained 3 epochs")].encode()) <= most_bytes
    assert "Cannot read 'nothing'" in plain(err).splitlines()[-1]


NOTEBOOK = """
import marimo
app = marimo.App()

@app.cell
def setup():
    {setup}
    data = colabkit.prepare("samples:digits", to=None)
    return colabkit, data, loader

@app.cell
def panel(colabkit, loader):
    with colabkit.dashboard():
        colabkit.train(lambda batch: 0.5, loader, epochs=3, state={{}})

@app.cell
def progress(colabkit):
    near = colabkit.stage("samples:digits", to="digits", refresh=True)

@app.cell
def picture(data):
    data.show(n=4)

@app.cell
def report(colabkit):
    colabkit.runtime()

@app.cell
def error(colabkit):
    colabkit.stage("nothing")
"""


def test_marimo_shows_panel_progress_pictures_reports_and_errors(tmp_path: Path) -> None:
    pytest.importorskip("marimo", reason="the extra integrations is not installed")
    (tmp_path / "notebook.py").write_text(NOTEBOOK.format(setup=SETUP.strip().replace("\n", "\n    ")))
    command = [sys.executable, "-m", "marimo", "export", "ipynb", "notebook.py", "--include-outputs", "-o", "out.ipynb"]
    environ = {**os.environ, "PYTHONPATH": str(Path(colabkit.__file__).parent.parent), "COLABKIT_LOCAL": str(tmp_path)}
    done = warm_python.run(command, cwd=tmp_path, text=True, env=environ)
    assert "some cells failed" in done.stderr, "one cell raises an error"
    _, panel, progress, picture, report, error = [
        cell.outputs for cell in nbformat.read(tmp_path / "out.ipynb", 4).cells if cell.cell_type == "code"
    ]
    assert "Training panel" in panel[0].data["text/html"]
    assert STAGED in progress[0].data["text/html"]
    assert '<img src="data:image/png;base64,' in picture[0].data["text/html"]
    assert "available" in report[0].data["text/html"]
    assert error[-1].evalue.startswith("Cannot read 'nothing'")
