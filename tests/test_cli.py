"""The command: the same verbs, one line of error, exit status, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import colabkit
from colabkit.cli import main
from colabkit.options import VERBS
from colabkit.pack_format import read_pack


def test_the_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert all(verb.name in shown for verb in VERBS)


def test_a_report_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runtime"]) == 0
    assert capsys.readouterr().out.startswith(f"Python {sys.version.split()[0]}: ")


def test_json_is_the_report_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stage", "samples:digits", "--to", str(tmp_path / "near"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == 1797
    assert report["path"] == str(tmp_path / "near")


def test_an_error_is_one_line_and_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(tmp_path / "nothing"), str(tmp_path / "out.h5")]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert shown.err.startswith("colabkit: Cannot read ")
    assert list(tmp_path.iterdir()) == []


def test_unknown_options_are_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["stage", "somewhere", "--treads", "4"])
    assert done.value.code == 2


def test_ctrl_c_is_exit_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("colabkit.environment.runtime", interrupted)
    assert main(["runtime"]) == 130
    assert capsys.readouterr().err == "colabkit: interrupted\n"


def test_a_damaged_pack_is_exit_status_1(image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = colabkit.pack(image_tree, tmp_path / "p.h5", progress=False).path
    assert main(["verify", str(path), "--no-progress"]) == 0
    data = bytearray(path.read_bytes())
    data[read_pack(path).data_sets["X_train"].offset] ^= 1
    path.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", str(path), "--no-progress"]) == 1
    assert "is damaged: 1 of 24 samples, first train[0]" in capsys.readouterr().out


def test_train_takes_objects_from_a_file(image_tree: Path, tmp_path: Path) -> None:
    colabkit.pack(image_tree, tmp_path / "p.h5", progress=False)
    (tmp_path / "experiment.py").write_text(
        "import colabkit\n"
        "loader = colabkit.Loader(colabkit.open_pack('p.h5')['train'], 4)\n"
        "def step(batch):\n"
        "    return {'loss': 0.5}\n"
    )
    command = [sys.executable, "-m", "colabkit", "train", "experiment.py:step", "experiment.py:loader", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=_environment())
    report = json.loads(done.stdout)
    assert report["epochs"][0]["samples"] == 24
    assert report["epochs"][0]["values"] == {"loss": 0.5}


@pytest.mark.parametrize("reference", ["step", "missing.py:step"])
def test_a_wrong_reference_is_one_line(reference: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", reference, "x.py:loader"]) == 1
    assert capsys.readouterr().err.startswith(f"colabkit: Cannot use '{reference.partition(':')[0]}")


def test_the_command_is_installed() -> None:
    script = Path(sys.executable).with_name("colabkit")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"colabkit {colabkit.__version__}"


def _environment() -> dict[str, str]:
    root = str(Path(colabkit.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
