"""The pages of the documentation, their code blocks, and a program that runs the blocks of one page.

    python tests/doubles/doc_pages.py docs/reference/packs.md

This runs the blocks in order, in one namespace, in a new folder with some data. The language of a block determines how:

- `python` and `ipython` run in IPython. With prompts (`In [1]: `), the printed outputs must have the shape of the real
  ones: numbers and quoted texts may differ.
- `console` holds commands after `$ `, and perhaps their output, which is not compared.
- `text`, `diff` and `bash` never run. `bash` is for installing and for working on the repository.

A block with a title that begins with "Needs", as in ```` ```python title="Needs a GPU" ````, does not run; readers
see the title. `<!-- setup`, some Python, and `-->`, on separate lines, run code that readers do not see.

The folder contains `birds/` (48 images in 3 class folders), `birds.zip`, `birds.csv` (columns `path` and `label`), and
a folder that stands in for Google Drive, with a copy of `birds/`.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from pathlib import Path

import warm_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUN = ("python", "ipython", "console")
NEVER_RUN = ("text", "diff", "bash")
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
_TITLE = re.compile(r'title="Needs [^"]+"')
PROMPT = re.compile(r"^In \[\d+\]: (.*)\n(?:Out\[\d+\]: ((?:(?!In \[).*\n)+))?", re.MULTILINE)
# The outputs of these magics differ between machines, so only the type of the result is compared.
OF_THE_MACHINE = {"%runtime": "RuntimeReport", "%doctor": "Diagnosis"}
_AMOUNT = re.compile(r"<?\d[\d,.]*( (ms|s|µs|KiB|MiB|GiB)\b)?")
_QUOTED = re.compile(r"'[^']*'")
CLASSES = ("heron", "owl", "robin")


@dataclass(frozen=True)
class Block:
    """A code block: its language, its text, the line at which it starts, and whether it runs."""

    language: str
    text: str
    line: int
    runs: bool


def pages() -> list[Path]:
    """Return README and all pages of the documentation, without those that a hook generates."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match["setup"] is not None:
            found.append(Block("python", match["setup"], line, runs=True))
            continue
        runs = match["language"] in RUN and not _TITLE.search(match["info"])
        found.append(Block(match["language"], textwrap.dedent(match["text"]), line, runs))
    return found


def commands_of(block: Block) -> list[list[str]]:
    """Return the commands of a `console` block, as words."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def shape(output: str) -> str:
    """Return an output with placeholders for numbers and quoted text, which differ between runs."""
    return _AMOUNT.sub("#", _QUOTED.sub("'...'", output.strip()))


def make_data(folder: Path) -> None:
    """Write the images as a folder, an archive and a table, and into the folder that stands in for Drive."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    rows = []
    for number in range(48):
        label = CLASSES[number % len(CLASSES)]
        path = folder / "birds" / label / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 90, (72, 96, 3)) + np.array([60, 90, 120]) * (number % len(CLASSES)) // 2
        Image.fromarray(pixels.astype(np.uint8)).save(path, quality=90)
        rows.append((path.relative_to(folder).as_posix(), label))
    with (folder / "birds.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    shutil.make_archive(str(folder / "birds"), "zip", folder / "birds")
    shutil.copytree(folder / "birds", folder / "drive" / "birds")


def run_page(page: Path) -> None:
    """Run the blocks of a page in the current folder; raise the first error, with the line of its block."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    for block in blocks_of(page):
        if not block.runs:
            continue
        try:
            if block.language == "console":
                for words in commands_of(block):
                    program = [sys.executable, *(["-m", "colabkit"] if words[0] == "colabkit" else [])]
                    warm_python.run([*program, *words[1:]], check=True, stdout=None, stderr=None)
            else:
                for code, output in _cells(block):
                    done = shell.run_cell(code)
                    done.raise_error()
                    _compare(code, output, done.result)
        except BaseException:
            print(f"{page}:{block.line}: this block failed:\n{block.text}", file=sys.stderr)
            raise


def _cells(block: Block) -> Iterator[tuple[str, str]]:
    yield from (PROMPT.findall(block.text) if block.language == "ipython" else []) or [(block.text, "")]


def _compare(code: str, output: str, result: object) -> None:
    if output and (name := OF_THE_MACHINE.get(code.split(maxsplit=1)[0])):
        assert type(result).__name__ == name
        assert len(repr(result).splitlines()[0]) > 20
    elif output:
        assert shape(repr(result)) == shape(output), code


def main() -> None:
    page = Path(sys.argv[1]).resolve()
    launches = "notebook_launch(" in page.read_text(encoding="utf-8")
    if launches or any(block.language == "console" and block.runs for block in blocks_of(page)):
        # A fork of this process must not remove the folder below.
        warm_python.start_server()
    with tempfile.TemporaryDirectory(prefix="page-") as name:
        folder = Path(name)
        make_data(folder)
        os.environ |= {
            "COLABKIT_DRIVE": str(folder / "drive"),
            "COLABKIT_LOCAL": str(folder / "cache"),
            "MPLBACKEND": "agg",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        sys.path.insert(0, str(ROOT))
        with chdir(folder), warm_python.warm_launches() if launches else nullcontext():
            run_page(page)


if __name__ == "__main__":
    main()
