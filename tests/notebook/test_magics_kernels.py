"""Magics in real kernels, this environment's and Colab's: loading, unloading, and cell outputs."""

from __future__ import annotations

import json
import re
from typing import Any

import nbformat
import pytest
from kernels import KINDS, kernel_of
from nbclient import NotebookClient
from nbformat import NotebookNode
from sampling import sampled

HEAVY = ("torch", "h5py", "numpy", "ipywidgets", "google.colab", "gdown", "fsspec", "pynvml", "tqdm")
LOADING = f"""
import contextlib, io, json, sys
from IPython.core.completer import provisionalcompleter

shell = get_ipython()
found = {{}}

def state():
    completers = shell.strdispatchers["complete_command"]
    kinds = shell.magics_manager.magics
    return [
        {{kind: sorted(kinds[kind]) for kind in ("line", "cell")}},
        {{event: len(callbacks) for event, callbacks in shell.events.callbacks.items()}},
        [sorted(completers.strs), sorted(pattern.pattern for pattern in completers.regexs)],
    ]

@contextlib.contextmanager
def noted(name):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        yield
    found[name] = shown.getvalue()

before, already = state(), set(sys.modules)
with noted("load"):
    shell.run_line_magic("load_ext", "colabkit")
found["heavy"] = [name for name in {HEAVY!r} if name in sys.modules and name not in already]
loaded = state()
found["lines"], found["cells"] = (sorted(set(loaded[0][kind]) - set(before[0][kind])) for kind in ("line", "cell"))
import colabkit
with noted("again"):
    colabkit.load_ipython_extension(shell)
found["same"] = state() == loaded
with noted("help"):
    shell.run_line_magic("train", "--help")
found["cell help"] = shell.object_inspect("%%train")["docstring"]
shell.run_line_magic("unload_ext", "colabkit")
found["clean"] = state() == before
theirs = lambda line, cell=None: "theirs"
shell.magics_manager.register_function(theirs, "line", "stage")
shell.magics_manager.register_function(theirs, "cell", "train")
with noted("taken"):
    colabkit.load_ipython_extension(shell)
found["left"] = [shell.run_line_magic("stage", ""), shell.run_cell_magic("train", "", "body")]
found["beside"] = "usage: %train" in shell.find_line_magic("train").__doc__
colabkit.unload_ipython_extension(shell)
found["theirs"] = [shell.run_line_magic("stage", ""), shell.run_cell_magic("train", "", "body")]
del shell.magics_manager.magics["line"]["stage"], shell.magics_manager.magics["cell"]["train"]

shell.run_line_magic("load_ext", "colabkit")
found["completed"] = []
for line in ("%stage a --to tm", "%%train data --batch", "%colabkit st", "x = %pack a b --encoding j", "%stage --"):
    for jedi in (False, True):
        shell.Completer.use_jedi = jedi
        with provisionalcompleter():
            matches = [*shell.Completer.completions(line, len(line))]
        found["completed"].append(sorted(line[: match.start] + match.text for match in matches))
shell.run_line_magic("unload_ext", "colabkit")
print(json.dumps(found))
"""
SETUP = """
%load_ext colabkit
import signal
import torch
import colabkit
data = torch.randn(64, 4), torch.randint(0, 2, (64,))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
BODY = """
loss = torch.nn.functional.cross_entropy(model(x), y)
optimizer.zero_grad()
loss.backward()
optimizer.step()
last = !echo $step
"""
CELLS = {
    "loading": LOADING,
    "setup": SETUP,
    "train": "%%train data --batch-size 16 --epochs 2 --device cpu" + BODY,
    "error": "%%train data --batch-size 16 --device cpu\nscale = 2\nmodel(x[:, :3])",
    "stop": "%%train data --batch-size 16 --device cpu\nsignal.raise_signal(signal.SIGINT)",
    "syntax": "%%train data\nmodel(x",
    "beside": "%%dashboard\nfor x, y in colabkit.Loader(data, 8): pass\n6 * 7",
    "beside error": "%%dashboard\nfor x, y in colabkit.Loader(data, 8):\n    broken = 1 / 0",
    "switch": "%dashboard",
    "idle": "a = 5",
    "loop": "for x, y in colabkit.Loader(data, 8): pass",
    "off": "%dashboard --off",
    "quiet": "last = colabkit.Loader(data, 8)\nfor x, y in last: pass",
    "names": "sorted({'x', 'y', 'batch', 'step', 'epoch'} & globals().keys() - {'x', 'y'})",
    "doctor": "%doctor",
}


@pytest.fixture(scope="module", params=sampled(KINDS, 1))
def outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[NotebookNode]]:
    folder = tmp_path_factory.mktemp("kernel")
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS.values()]
    with kernel_of(request.param, folder) as kernel:
        client = NotebookClient(
            nbformat.v4.new_notebook(cells=cells),
            timeout=120,
            kernel_name=kernel,
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
        )
        client.execute()
    return dict(zip(CELLS, [cell.outputs for cell in client.nb.cells], strict=True))


@pytest.fixture
def loading(outputs: dict[str, list[NotebookNode]]) -> dict[str, Any]:
    (printed,) = outputs["loading"]
    assert printed.output_type == "stream", printed
    return json.loads(printed.text)


def panels(found: list[NotebookNode]) -> list[str]:
    return [
        output.data["text/plain"] for output in found if "Training panel" in output.get("data", {}).get("text/html", "")
    ]


def error_of(found: list[NotebookNode]) -> NotebookNode:
    (error,) = [output for output in found if output.output_type == "error"]
    return error


def trace_of(found: list[NotebookNode]) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error_of(found).traceback))


def result_of(found: list[NotebookNode]) -> str:
    (result,) = [output.data["text/plain"] for output in found if output.output_type == "execute_result"]
    return result


def test_loading_prints_nothing_imports_nothing_heavy_and_is_undone(loading: dict[str, Any]) -> None:
    assert loading["load"] == loading["again"] == ""
    assert loading["heavy"] == []
    assert {"stage", "train", "dashboard", "doctor", "colabkit"} <= set(loading["lines"])
    assert loading["cells"] == ["dashboard", "train"]
    assert loading["same"]
    assert loading["clean"]


def test_existing_magics_of_the_same_name_are_not_replaced(loading: dict[str, Any]) -> None:
    said = "colabkit does not replace the existing %stage, %%train; use colabkit's functions instead"
    assert loading["taken"].splitlines() == [said]
    assert loading["left"] == loading["theirs"] == ["theirs", "theirs"]
    assert loading["beside"]


def test_lines_are_completed_with_jedi_and_without(loading: dict[str, Any]) -> None:
    expected = ("%stage a --to tmpfs", "%%train data --batch-size", "%colabkit stage", "x = %pack a b --encoding jpeg")
    lines = [line for line in (*expected, "%stage --to") for _ in range(2)]
    assert all(line in found for line, found in zip(lines, loading["completed"], strict=True))
    assert loading["completed"][::2] == loading["completed"][1::2], "jedi adds names of Python"


def test_cell_magics_have_help(loading: dict[str, Any]) -> None:
    for text in (loading["help"], loading["cell help"]):
        assert "usage: %%train" in text
        assert "--batch-size" in text


def test_a_cell_trains_with_one_panel_and_shows_its_report(outputs: dict[str, list[NotebookNode]]) -> None:
    assert outputs["setup"] == []
    (panel,) = panels(outputs["train"])
    assert "epoch 2/2 · step 4/4" in panel
    assert result_of(outputs["train"]).startswith("Trained 2 epochs in ")
    assert result_of(outputs["names"]) == "[]"


def test_an_error_shows_the_users_own_line(outputs: dict[str, list[NotebookNode]]) -> None:
    trace = trace_of(outputs["error"])
    assert error_of(outputs["error"]).ename == "RuntimeError"
    assert re.search(r"-> 3 model\(x\[:, :3\]\)|3 model\(x\[:, :3\]\)", trace)
    assert "colabkit/" not in trace
    assert "run_cell_magic" not in trace


def test_ctrl_c_and_bad_syntax_are_one_line(outputs: dict[str, list[NotebookNode]]) -> None:
    stopped, broken = trace_of(outputs["stop"]), trace_of(outputs["syntax"])
    assert stopped.startswith("TrainingInterrupted: Training stopped after step 1")
    assert "--to" in stopped
    assert "\n" not in stopped
    assert re.fullmatch(
        r"InvalidOption: Cannot run the cell: .* on line 2, 'model\(x'; expected valid Python\. Fix that line\.",
        broken,
    )


def test_a_cell_with_the_panel_shows_its_error(outputs: dict[str, list[NotebookNode]]) -> None:
    assert len(panels(outputs["beside"])) == 1
    assert result_of(outputs["beside"]) == "42"
    assert error_of(outputs["beside error"]).ename == "ZeroDivisionError"
    trace = trace_of(outputs["beside error"])
    assert "3     broken = 1 / 0" in trace
    assert "run_cell_magic" not in trace


def test_the_panel_appears_only_in_cells_that_loop(outputs: dict[str, list[NotebookNode]]) -> None:
    assert [len(panels(outputs[name])) for name in ("switch", "idle", "loop", "off", "quiet")] == [0, 0, 1, 0, 0]
    assert outputs["idle"] == outputs["off"] == outputs["quiet"] == []
    (said,) = outputs["switch"]
    assert said.text.startswith("The panel appears below each cell")


def test_the_doctor_finds_the_latest_run(outputs: dict[str, list[NotebookNode]]) -> None:
    assert "of 50" in result_of(outputs["doctor"])
