"""The README's code blocks run, its links exist, and the changelog's newest entry is the package's version."""

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


def test_every_code_block_has_a_known_language() -> None:
    assert {name for name, _ in BLOCKS} <= {"bash", "ipython", "python", "console", "text", "diff"}


def test_the_first_block_is_the_quickstart() -> None:
    assert BLOCKS[0] == ("bash", 'pip install . && colabkit demo\npip install ".[test]" && pytest\n')


@pytest.mark.full
def test_python_blocks_run_in_order(inside: Path) -> None:
    code = "\n".join(blocks("python"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


PROMPT = re.compile(r"^In \[\d+\]: (.*)\n(?:Out\[\d+\]: ((?:(?!In \[).*\n)+))?", re.MULTILINE)
# The output of these magics differs between machines, so only the type of the result is compared.
OF_THE_MACHINE = {"%runtime": "RuntimeReport", "%doctor": "Diagnosis"}
AMOUNT = re.compile(r"<?\d[\d,.]*( (ms|s|µs|KiB|MiB|GiB)\b)?")
QUOTED = re.compile(r"'[^']*'")


def shape(output: str) -> str:
    """Return an output with placeholders for numbers and quoted text, which differ between runs."""
    return AMOUNT.sub("#", QUOTED.sub("'...'", output.strip()))


@pytest.mark.full
def test_notebook_blocks_run_and_have_the_printed_output(inside: Path, shell: InteractiveShell) -> None:
    shell.run_cell(blocks("python")[0]).raise_error()
    for block in blocks("ipython"):
        for code, output in PROMPT.findall(block) or [(block, "")]:
            done = shell.run_cell(code)
            done.raise_error()
            if output and code in OF_THE_MACHINE:
                assert type(done.result).__name__ == OF_THE_MACHINE[code.split()[0]]
                assert len(repr(done.result).splitlines()[0]) > 20
            elif output:
                assert shape(repr(done.result)) == shape(output), code
    shell.run_cell("%unload_ext colabkit").raise_error()


def test_six_magics_are_printed_with_their_output() -> None:
    lines = PROMPT.findall(blocks("ipython")[0])
    magics = [code.split()[0] for code, output in lines if output]
    assert magics == ["%runtime", "%stage", "%pack", "%verify", "%train", "%doctor"]


def test_the_table_of_magics_is_up_to_date() -> None:
    written = re.search(r"<!-- begin verbs -->\n(.*)\n<!-- end verbs -->", README, re.DOTALL)[1]
    assert written == verbs_table(), "run python tests/doubles/readme_tables.py and copy its output"


@pytest.mark.parametrize("session", blocks("console"))
def test_commands_run(session: str, inside: Path) -> None:
    lines = [line.removeprefix("$ ") for line in session.splitlines() if line.startswith("$ ")]
    assert lines
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "colabkit"
        subprocess.run([sys.executable, "-m", "colabkit", *words], capture_output=True, check=True)


def test_linked_files_and_pictures_exist() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)|(?:src|srcset)=\"([^\":]+)\"", README)
    for target in filter(None, (path for pair in targets for path in pair)):
        assert (ROOT / target).exists(), target


def test_the_newest_changelog_entry_is_the_version() -> None:
    changes = README.partition("## Changes")[2]
    assert re.search(r"### (\S+)", changes)[1] == colabkit.__version__


def test_no_placeholder_is_left() -> None:
    assert not re.search(r"\b(NUMBER|RATIO|OUTPUT|DEMO|BENCH|TODO)\b", README)
