"""The installed shells run the completion scripts of the `colabkit` command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from colabkit.notebook.command_line import main
from colabkit.notebook.verbs import COMMANDS


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", request.param]) == 0
    path = tmp_path / f"colabkit.{request.param}"
    path.write_text(capsys.readouterr().out)
    return path


def completed_by_bash(script: Path, *words: str) -> set[str]:
    code = f'source {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _colabkit; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code, "bash", *words], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_completes_verbs_options_and_choices(script: Path) -> None:
    verbs = {*(verb.name for verb in COMMANDS), "completion", "--help", "--version"}
    assert completed_by_bash(script, "colabkit", "") == verbs
    assert completed_by_bash(script, "colabkit", "st") == {"stage", "status"}
    assert completed_by_bash(script, "colabkit", "stage", "--t") == {"--to", "--threads"}
    assert completed_by_bash(script, "colabkit", "pack", "--no-res") == {"--no-resume"}
    assert completed_by_bash(script, "colabkit", "pack", "a", "--encoding", "") == {"raw", "source", "jpeg", "auto"}
    assert completed_by_bash(script, "colabkit", "pack", "a", "--encoding", "=", "j") == {"jpeg"}
    assert completed_by_bash(script, "colabkit", "pack", "a", "--encoding", "=") == {"raw", "source", "jpeg", "auto"}
    assert completed_by_bash(script, "colabkit", "completion", "") == {"bash", "zsh", "fish"}
    assert completed_by_bash(script, "colabkit", "stage", "fol") == set(), (
        "the script completes file names, which bash completes itself"
    )


@pytest.mark.parametrize("script", ["bash", "zsh", "fish"], indirect=True)
@pytest.mark.every_case
def test_the_scripts_are_valid_and_complete_every_option(script: Path) -> None:
    text = script.read_text()
    flags = {option.flag for verb in COMMANDS for option in verb.options if option.flag}
    prefix = "-l " if script.suffix == ".fish" else "--"
    assert all(f"{prefix}{flag[2:]}" in text for flag in flags)
    if shell := shutil.which(script.suffix[1:]):
        subprocess.run([shell, "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_completes_only_the_options_of_the_first_word(script: Path) -> None:
    for words, expected in (("stage verify --th", "--threads"), ("verify stage --th", "")):
        code = f"source {script}; complete -C 'colabkit {words}'"
        done = subprocess.run(["fish", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.partition("\t")[0] == expected


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_the_verb_that_prints_a_script_has_no_json(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash", "--json"]) == 2
    assert "unknown option --json" in capsys.readouterr().err
    assert completed_by_bash(script, "colabkit", "completion", "bash", "--j") == set()
    assert completed_by_bash(script, "colabkit", "stage", "--j") == {"--json"}


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "'tcsh' is not one of bash, zsh, fish" in capsys.readouterr().err
