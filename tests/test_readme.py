"""README's code blocks run, its links lead somewhere, and its version is the package's."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from readme_tables import verbs_table

import colabkit

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    found = [text for name, text in BLOCKS if name == language]
    assert found, f"README has no {language} block"
    return found


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {name for name, _ in BLOCKS} <= {"bash", "ipython", "python", "console", "text", "diff"}


def test_the_first_block_is_the_two_commands_of_a_newcomer() -> None:
    assert BLOCKS[0] == ("bash", 'pip install . && colabkit demo\npip install ".[test]" && pytest\n')


@pytest.mark.full
def test_python_blocks_run_one_after_the_other(inside: Path) -> None:
    code = "\n".join(blocks("python"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


PROMPT = re.compile(r"^In \[\d+\]: (.*)\n(?:Out\[\d+\]: ((?:(?!In \[).*\n)+))?", re.MULTILINE)
OF_THE_MACHINE = {"%runtime": "RuntimeReport", "%doctor": "Diagnosis"}  # they say another thing on each machine
AMOUNT = re.compile(r"<?\d[\d,.]*( (ms|s|µs|KiB|MiB|GiB)\b)?")
QUOTED = re.compile(r"'[^']*'")


def shape(said: str) -> str:
    """Return what is said without its numbers and paths, which differ from run to run."""
    return AMOUNT.sub("#", QUOTED.sub("'...'", said.strip()))


def test_notebook_blocks_run_and_say_what_is_printed(inside: Path, shell: InteractiveShell) -> None:
    shell.run_cell(blocks("python")[0]).raise_error()
    for block in blocks("ipython"):
        for code, said in PROMPT.findall(block) or [(block, "")]:
            done = shell.run_cell(code)
            done.raise_error()
            if said and code in OF_THE_MACHINE:
                assert type(done.result).__name__ == OF_THE_MACHINE[code.split()[0]]
                assert len(repr(done.result).splitlines()[0]) > 20
            elif said:
                assert shape(repr(done.result)) == shape(said), code
    shell.run_cell("%unload_ext colabkit").raise_error()


def test_the_six_magics_are_printed_with_what_they_say() -> None:
    lines = PROMPT.findall(blocks("ipython")[0])
    magics = [code.split()[0] for code, said in lines if said]
    assert magics == ["%runtime", "%stage", "%pack", "%verify", "%train", "%doctor"]


def test_the_table_of_magics_is_that_of_the_options() -> None:
    written = re.search(r"<!-- begin verbs -->\n(.*)\n<!-- end verbs -->", README, re.DOTALL)[1]
    assert written == verbs_table(), "python tests/doubles/readme_tables.py prints it"


@pytest.mark.parametrize("session", blocks("console"))
def test_commands_run(session: str, inside: Path) -> None:
    lines = [line.removeprefix("$ ") for line in session.splitlines() if line.startswith("$ ")]
    assert lines
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "colabkit"
        subprocess.run([sys.executable, "-m", "colabkit", *words], capture_output=True, check=True)


def test_links_and_pictures_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)|(?:src|srcset)=\"([^\":]+)\"", README)
    for target in filter(None, (path for pair in targets for path in pair)):
        assert (ROOT / target).exists(), target


def test_the_newest_change_is_the_version() -> None:
    changes = README.partition("## Changes")[2]
    assert re.search(r"### (\S+)", changes)[1] == colabkit.__version__


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.search(r"\b(NUMBER|RATIO|OUTPUT|DEMO|BENCH|TODO)\b", README)
