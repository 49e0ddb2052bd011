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


def test_python_blocks_run_one_after_the_other(inside: Path) -> None:
    code = "\n".join(blocks("python"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def test_notebook_blocks_run_one_after_the_other(inside: Path, shell: InteractiveShell) -> None:
    for code in blocks("ipython"):
        shell.run_cell(code).raise_error()
    shell.run_cell("%unload_ext colabkit").raise_error()


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
