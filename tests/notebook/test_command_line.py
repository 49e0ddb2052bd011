"""The `colabkit` command has the verbs of the magics, one-line errors, exit statuses and JSON output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm_python

import colabkit
from colabkit.foundation import meters
from colabkit.notebook.command_line import main
from colabkit.notebook.verbs import COMMANDS
from colabkit.packs.format.pack_file import read_pack


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_the_help_lists_the_verbs_and_the_exit_status(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{verb.name} {verb.help}" in shown for verb in COMMANDS)
    assert all(status in shown for status in ("0 on success", "1 after an error", "2 for invalid", "130 after Ctrl-C"))


def test_the_help_of_a_verb_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["clear-cache", "--help"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("usage: colabkit clear_cache [-h] [--dry-run")


def test_a_report_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runtime"]) == 0
    assert capsys.readouterr().out.startswith(f"Python {sys.version.split()[0]}: ")


def test_json_output_is_only_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stage", "samples:digits", "--to", str(tmp_path / "local"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == 1797
    assert report["path"] == str(tmp_path / "local")


def test_an_error_is_one_line_and_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(tmp_path / "nothing"), str(tmp_path / "out.h5")]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith("colabkit: Cannot read ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stage", "--treads", "4"], "unknown option --treads (did you mean --threads?). See colabkit stage --help."),
        (["stage", "a", "--jsn"], "unknown option --jsn (did you mean --json?). See colabkit stage --help."),
        (["stage", "a", "b"], "unrecognized arguments: b (did you mean --to b?). See colabkit stage --help."),
        (["stage", "a", "--verify", "ful"], "--verify 'ful' is not one of size, full (did you mean full?)."),
        (["stage", "a", "--threads", "0"], "--threads 0; expected 'auto' or a whole number of 1 or more"),
        (["trian"], "Run colabkit train, or see colabkit --help."),
        (["predict", "model", "loader"], "In Python, use colabkit.predict."),
        (["launch"], "Run %launch in a notebook."),
        (["prepare", "a", "--to", ""], "--to is empty. Pass a folder, or use --to none."),
        (["train", "step", "x.py:loader"], "for example train.py:step."),
        (["train", "x.py", "x.py:loader"], "for example x.py:loader."),
        (["train", "x.py:", "x.py:loader"], "the name of the variable is missing; expected FILE.py:NAME."),
        (["train", ":step", "x.py:loader"], "the name of the file is missing; expected FILE.py:NAME."),
        (["--threads", "stage"], "'--threads' comes before the verb. Write --threads after the verb"),
    ],
)
@pytest.mark.every_case
def test_invalid_arguments_are_one_line_with_a_hint_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("colabkit: Cannot ")
    assert said in line


@pytest.mark.parametrize(
    ("words", "status", "kind", "options"),
    [
        (["pack", "no such folder", "out.h5"], 1, "SourceMissing", []),
        (["pack", "samples:digits", "out.h5", "--size", "0"], 2, "InvalidOption", ["size"]),
        (["pack", "samples:digits", "out.h5", "--size", "big"], 2, "InvalidOption", []),
        (["trian"], 2, "InvalidOption", []),
        (["--json", "runtime"], 2, "InvalidOption", []),
    ],
)
@pytest.mark.every_case
def test_json_output_also_contains_errors(
    experiment: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    kind: str,
    options: list[str],
) -> None:
    monkeypatch.chdir(experiment)
    assert main([*words, "--json"]) == status
    shown = capsys.readouterr()
    (error,) = json.loads(shown.out).values()
    assert error["type"] == kind
    assert error["options"] == options
    assert shown.err == f"colabkit: {error['message']}\n"
    assert error["message"].startswith(f"Cannot {error['action']}: {error['found']}")
    assert error["message"].endswith(f"{error['next_step']}.")
    assert error["expected"] in error["message"]


@pytest.mark.parametrize(("ending", "status"), [("", 0), ("import sys; sys.exit('bye')\n", 1)])
def test_json_output_does_not_contain_what_a_users_file_prints(
    experiment: Path, capsys: pytest.CaptureFixture[str], ending: str, status: int
) -> None:
    file = experiment / "experiment.py"
    file.write_text(f"print('printed')\n{EXPERIMENT}{ending}")
    assert main(["train", f"{file}:step", f"{file}:loader", "--json"]) == status
    shown = capsys.readouterr()
    assert ("error" in json.loads(shown.out)) == bool(status)
    assert shown.err.startswith("printed\n")


def test_ctrl_c_is_exit_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(colabkit, "runtime", interrupted)
    assert main(["runtime"]) == 130
    assert capsys.readouterr().err == "colabkit: interrupted\n"
    assert main(["runtime", "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {"error": {"type": "KeyboardInterrupt", "message": "interrupted"}}


def test_a_damaged_pack_is_exit_status_1(image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = colabkit.pack(image_tree, tmp_path / "p.h5", progress=False).path
    assert main(["verify", str(path), "--no-progress"]) == 0
    data = bytearray(path.read_bytes())
    data[read_pack(path).data_sets["X_train"].offset] ^= 1
    path.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", str(path), "--no-progress"]) == 1
    assert "is damaged: 1 of 24 samples, starting with train[0]" in capsys.readouterr().out


@pytest.mark.full
def test_train_takes_objects_from_a_file(image_tree: Path, tmp_path: Path) -> None:
    colabkit.pack(image_tree, tmp_path / "p.h5", progress=False)
    (tmp_path / "experiment.py").write_text(
        "import colabkit\n"
        "loader = colabkit.Loader(colabkit.open_pack('p.h5')['train'], 4)\n"
        "def step(batch):\n"
        "    return {'loss': 0.5}\n"
    )
    command = [sys.executable, "-m", "colabkit", "train", "experiment.py:step", "experiment.py:loader", "--json"]
    done = warm_python.run(command, cwd=tmp_path, text=True, check=True, env=_environment())
    report = json.loads(done.stdout)
    assert report["epochs"][0]["samples"] == 24
    assert report["epochs"][0]["values"] == {"loss": 0.5}


EXPERIMENT = """
import colabkit, neighbour
loader = colabkit.Loader((neighbour.images, neighbour.labels), 4)
def step(batch):
    return neighbour.loss
"""
NEIGHBOUR = """
import numpy as np
images, labels, loss = np.zeros((600, 2), np.float32), np.zeros(600, np.int64), 0.5
"""


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR)
    (tmp_path / "experiment.py").write_text(EXPERIMENT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("neighbour", "own_step", "experiment", "colabkit_file_experiment", "colabkit_file_this"):
        sys.modules.pop(name, None)


def test_the_doctor_diagnoses_a_loader_in_a_file_or_a_saved_report(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = experiment / "experiment.py"
    assert main(["doctor", f"{file}:loader", "--seconds", "0.2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sentence"].startswith("The loader alone")
    assert main(["train", f"{file}:step", f"{file}:loader"]) == 0
    saved = meters.latest().save(experiment / "run.json")
    capsys.readouterr()
    expected = colabkit.doctor(saved)
    assert main(["doctor", str(saved)]) == int(not expected.is_good)
    assert capsys.readouterr().out == f"{expected}\n"
    assert main(["doctor", str(experiment / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_headspace_is_a_command(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = experiment / "experiment.py"
    (experiment / "experiment.py").write_text(EXPERIMENT + "import torch\nmodel = torch.nn.Linear(2, 2)\n")
    words = [f"{file}:step", f"{file}:loader", "--state", f"{file}:model", "--seconds", "0.05", "--json"]
    assert main(["headspace", *words]) == 0
    assert json.loads(capsys.readouterr().out)["batch_size"] == 4


def test_a_file_is_run_once_regardless_of_how_its_path_is_written(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (experiment / "experiment.py").write_text("print('run')\n" + EXPERIMENT)
    monkeypatch.chdir(experiment)
    assert main(["train", "./experiment.py:step", f"{experiment}/experiment.py:loader"]) == 0
    assert capsys.readouterr().out.count("run\n") == 1


def test_worker_processes_can_import_the_functions_of_a_file(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import pathlib, pickle", "def step(batch):", "    pathlib.Path('step').write_bytes(pickle.dumps(step))"]
    (experiment / "own_step.py").write_text("\n".join([*lines, "    return 0.5"]))
    monkeypatch.chdir(experiment)
    assert main(["train", "own_step.py:step", "experiment.py:loader"]) == 0
    # The start methods spawn and forkserver pass `sys.path` to worker processes.
    load = f"import pickle, sys; sys.path = {sys.path!r}; print(pickle.load(open('step', 'rb')))"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("<function step"), done.stderr


def test_a_file_named_like_an_installed_module_does_not_replace_it(experiment: Path) -> None:
    (experiment / "this.py").write_text(EXPERIMENT)
    assert main(["train", f"{experiment}/this.py:step", f"{experiment}/this.py:loader"]) == 0
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("code", "said", "lines"),
    [
        ("def step(batch):\n    return 1 / 0  # here", "ZeroDivisionError: division by zero", ["return 1 / 0  # here"]),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", ["import no_such_module"]),
        ("def step(batch)\n    pass", "SyntaxError: expected ':'", ["def step(batch)", "^"]),
    ],
)
def test_an_error_in_a_users_file_shows_only_the_lines_of_that_file(
    experiment: Path, capsys: pytest.CaptureFixture[str], code: str, said: str, lines: list[str]
) -> None:
    file = experiment / "experiment.py"
    file.write_text(EXPERIMENT + code + "\n")
    assert main(["train", f"{file}:step", f"{file}:loader"]) == 1
    shown = capsys.readouterr().err
    assert all(line in shown for line in lines)
    assert str(file) in shown
    assert f"colabkit: your file failed: {said}" in shown.splitlines()[-1]
    for hidden in ("/colabkit/", "importlib"):
        assert hidden not in shown


@pytest.mark.parametrize(("code", "status"), [("", 1), ("0", 1), ("3", 3), ("'bye'", 1)])
def test_a_file_that_ends_the_program_is_an_error(
    experiment: Path, capsys: pytest.CaptureFixture[str], code: str, status: int
) -> None:
    file = experiment / "experiment.py"
    file.write_text(f"{EXPERIMENT}import sys; sys.exit({code})\n")
    assert main(["train", f"{file}:step", f"{file}:loader"]) == status
    assert "colabkit: your file ended the program" in capsys.readouterr().err


def test_json_output_has_null_in_place_of_values_that_are_not_finite(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = experiment / "experiment.py"
    file.write_text(f"{EXPERIMENT}neighbour.loss = float('nan')\n")
    words = [f"{file}:step", f"{file}:loader", "--on-nonfinite", "continue", "--json"]
    assert main(["train", *words]) == 0
    shown = capsys.readouterr().out
    assert "NaN" not in shown
    assert "null" in shown


def test_an_internal_error_of_colabkit_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(colabkit, "runtime", broken)
    with pytest.raises(ZeroDivisionError):
        main(["runtime"])
    with pytest.raises(ZeroDivisionError):
        main(["runtime", "--json"])
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ZeroDivisionError"


@pytest.mark.parametrize(
    ("is_terminal", "words", "is_shown"), [(True, [], True), (True, ["--json"], False), (False, [], False)]
)
def test_a_terminal_shows_the_panel_during_training(
    experiment: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
    words: list[str],
    is_shown: bool,
) -> None:
    file = experiment / "experiment.py"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert main(["train", f"{file}:step", f"{file}:loader", *words]) == 0
    assert ("█" in capsys.readouterr().out) == is_shown
    assert not meters.listeners


def test_without_a_terminal_training_prints_one_line_besides_its_report(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = experiment / "experiment.py"
    words = ["train", f"{file}:step", f"{file}:loader", "--epochs", "2"]
    assert main(words) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    line = r"Finished\. .*epoch 2/2, step 150/150, .* in total, [\d,]+ images/s, loss 0\.5(\. .*)?"
    assert re.fullmatch(line, first)
    assert second.startswith("Trained 2 epochs")
    assert main([*words, "--json"]) == 0
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)["epochs"]) == 2
    assert re.fullmatch(line, shown.err.strip())


def test_a_model_is_evaluated_and_cross_validated(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(experiment)
    file = experiment / "experiment.py"
    file.write_text(
        EXPERIMENT
        + "import torch\nmodel = torch.nn.Linear(2, 2)\n"
        + "data = colabkit.open_pack(colabkit.pack('samples:digits', 'p.h5').path)['train']\n"
        + "def run(training, validation, fold):\n    return {'samples': len(validation)}\n"
    )
    assert main(["evaluate", f"{file}:model", f"{file}:loader", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 600
    assert main(["k_fold", f"{file}:run", f"{file}:data", "--folds", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == {"samples": 599.0}


@pytest.mark.parametrize(("reference", "status"), [("step", 2), ("missing.py:step", 1)])
def test_an_invalid_reference_is_a_one_line_error(
    reference: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", reference, "x.py:loader"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("colabkit: Cannot use '")
    assert reference.partition(":")[0] in line


def test_a_file_without_its_suffix_is_suggested_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text("")
    assert main(["train", "steps:step", "steps:loader"]) == 1
    assert capsys.readouterr().err.endswith(f"there is no such Python file. Use {tmp_path}/steps.py.\n")


def test_a_name_that_the_terminal_cannot_show_is_shown_as_escapes(tmp_path: Path) -> None:
    folder = tmp_path / "vögel"
    command = [sys.executable, "-m", "colabkit", "stage", "samples:digits", "--to", str(folder), "--no-progress"]
    environment = {**_environment(), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"v\xf6gel" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("output", "said"),
    [("| true", ""), (">&-", ""), ("> /dev/full", "Cannot write the output: No space left on device.")],
)
def test_output_that_nobody_can_read_gives_exit_status_1_and_no_traceback(
    experiment: Path, output: str, said: str
) -> None:
    command = f"{sys.executable} -m colabkit train experiment.py:step experiment.py:loader {output}"
    script = f"{command}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=experiment, capture_output=True, text=True, check=False, env=_environment()
    )
    assert (done.returncode, done.stderr) == (1, f"colabkit: {said}\n" if said else "")


def test_errors_do_not_go_to_standard_output_if_standard_error_is_closed() -> None:
    command = ["bash", "-c", f"{sys.executable} -m colabkit nothing 2>&-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.full
def test_the_line_of_a_run_shows_any_name_in_the_encoding_of_the_terminal(experiment: Path) -> None:
    code = "def step(batch):\n    return {'loss': 1.0, 'précision\\x1b': 0.5}\n"
    (experiment / "experiment.py").write_text(EXPERIMENT + code)
    command = [sys.executable, "-m", "colabkit", "train", "experiment.py:step", "experiment.py:loader"]
    environment = {**_environment(), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=experiment, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"loss 1, pr?cision\x1b 0.5" in done.stdout.splitlines()[0]


def test_the_command_is_installed() -> None:
    script = Path(sys.executable).with_name("colabkit")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"colabkit {colabkit.__version__}"


def _environment() -> dict[str, str]:
    root = str(Path(colabkit.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
