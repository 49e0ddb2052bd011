"""Loading into the newest IPython and Colab's: quiet, light, twice, beside names that are taken, and away again."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import Any

import pytest
from kernels import KINDS, ROOT, python_of

HEAVY = ("torch", "h5py", "numpy", "ipywidgets", "google.colab", "gdown", "fsspec", "pynvml", "tqdm")
CODE = f"""
import contextlib, io, json, sys
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
told = {{}}

def state():
    completers = shell.strdispatchers["complete_command"]
    kinds = shell.magics_manager.magics
    return [
        {{kind: sorted(kinds[kind]) for kind in ("line", "cell")}},
        {{event: len(found) for event, found in shell.events.callbacks.items()}},
        [sorted(completers.strs), sorted(pattern.pattern for pattern in completers.regexs)],
    ]

@contextlib.contextmanager
def noted(name):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        yield
    told[name] = shown.getvalue()

before = state()
already = set(sys.modules)
with noted("load"):
    shell.run_line_magic("load_ext", "colabkit")
told["heavy"] = [name for name in {HEAVY!r} if name in sys.modules and name not in already]
loaded = state()
told["lines"] = sorted(set(loaded[0]["line"]) - set(before[0]["line"]))
told["cells"] = sorted(set(loaded[0]["cell"]) - set(before[0]["cell"]))
import colabkit
with noted("again"):
    colabkit.load_ipython_extension(shell)
told["same"] = state() == loaded
with noted("help"):
    shell.run_cell("%%train?")
with noted("line help"):
    shell.run_cell("%train --help")
shell.run_line_magic("unload_ext", "colabkit")
told["clean"] = state() == before
theirs = lambda line, cell=None: "theirs"
shell.magics_manager.register_function(theirs, "line", "stage")
shell.magics_manager.register_function(theirs, "cell", "train")
with noted("taken"):
    colabkit.load_ipython_extension(shell)
told["left"] = [shell.run_line_magic("stage", ""), shell.run_cell_magic("train", "", "body")]
told["beside"] = "usage: %train" in shell.find_line_magic("train").__doc__
colabkit.unload_ipython_extension(shell)
told["theirs"] = [shell.run_line_magic("stage", ""), shell.run_cell_magic("train", "", "body")]
del shell.magics_manager.magics["line"]["stage"], shell.magics_manager.magics["cell"]["train"]

shell.run_line_magic("load_ext", "colabkit")
shell.run_cell("import numpy as np; data = np.zeros((8, 2), np.float32), np.zeros(8, np.int64)")
with noted("run"):
    done = shell.run_cell("%%train data --batch-size 4\\nloss = x.mean() + step\\nlast = !echo $step")
told["run error"] = repr(done.error_in_exec)
told["report"] = str(done.result).splitlines()
with noted("error"):
    shell.run_cell("%%train data --on cpu\\nscale = 2\\nbroken = scale / 0\\n", store_history=True)
with noted("syntax"):
    shell.run_cell("%%train data\\nscale = = 2")
with noted("beside"):
    done = shell.run_cell("%%dashboard\\nimport colabkit\\nfor x, y in colabkit.Loader(data, 4): pass\\n6 * 7")
told["beside error"] = repr(done.error_in_exec)
completed = {{}}
for line in ("%stage a --to tm", "%%train data --batch", "%colabkit st", "x = %pack a b --encoding j"):
    for jedi in (False, True):
        shell.Completer.use_jedi = jedi
        with provisionalcompleter():
            found = [*shell.Completer.completions(line, len(line))]
        completed[line + str(jedi)] = [line[: match.start] + match.text for match in found]
told["completed"] = completed
print("\\n" + json.dumps(told))
"""


@pytest.fixture(scope="module", params=KINDS)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what happened in a shell of its own."""
    python = python_of(request.param)
    folder = tmp_path_factory.mktemp("shell")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder), "COLABKIT_NEAR": str(folder)}
    done = subprocess.run(
        [python, "-c", CODE], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_loading_prints_nothing_and_imports_nothing_heavy(told: dict[str, Any]) -> None:
    assert told["load"] == told["again"] == ""
    assert told["heavy"] == []


def test_lines_and_cells_are_known_once(told: dict[str, Any]) -> None:
    assert {"stage", "train", "dashboard", "doctor", "colabkit"} <= set(told["lines"])
    assert told["cells"] == ["dashboard", "train"]
    assert told["same"]


def test_unloading_leaves_nothing(told: dict[str, Any]) -> None:
    assert told["clean"]


def test_names_that_are_taken_stay_their_owners_line_and_cell_apart(told: dict[str, Any]) -> None:
    assert told["taken"].splitlines() == ["colabkit leaves %stage, %%train to others; use colabkit's functions instead"]
    assert told["left"] == told["theirs"] == ["theirs", "theirs"]
    assert told["beside"]


def test_help_is_there_for_cells(told: dict[str, Any]) -> None:
    assert "usage: %%train" in told["line help"]
    assert "--batch-size" in told["line help"]
    assert "usage: %%train" in told["help"]


def test_a_cell_trains_and_returns_its_report(told: dict[str, Any]) -> None:
    assert told["run error"] == "None"
    assert told["report"][0].startswith("Trained 1 epoch in ")
    assert "loss 0.5" in told["report"][0]


def test_an_error_is_shown_from_the_cells_line_on(told: dict[str, Any]) -> None:
    error = re.sub(r"\x1b\[[\d;]*m", "", told["error"])
    shown = error[error.rindex("Traceback") :]
    assert "3 broken = scale / 0" in shown
    assert "colabkit/" not in shown
    assert "run_cell_magic" not in shown


def test_bad_syntax_is_one_line(told: dict[str, Any]) -> None:
    (line,) = told["syntax"].strip().splitlines()
    assert "invalid syntax in line 2, 'scale = = 2'" in line


def test_a_cell_runs_beside_the_panel(told: dict[str, Any]) -> None:
    assert told["beside error"] == "None"
    assert "step 2/2" in told["beside"]
    assert "42" in told["beside"]


def test_lines_are_completed_with_jedi_and_without(told: dict[str, Any]) -> None:
    for jedi in ("False", "True"):
        completed = {line: matches for line, matches in told["completed"].items() if line.endswith(jedi)}
        expected = (
            "%stage a --to tmpfs",
            "%%train data --batch-size",
            "%colabkit stage",
            "x = %pack a b --encoding jpeg",
        )
        assert all(line in found for line, found in zip(expected, completed.values(), strict=True))
