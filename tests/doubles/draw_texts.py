"""Print docstrings, comments, error messages and notebook texts drawn at random, for an editor to read.

    python tests/doubles/draw_texts.py [--count 100] [--seed N]

Each text of `colabkit/`, `tests/` and `notebooks/` is equally likely. To repeat a draw, pass the printed seed.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import random
import secrets
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("folders", nargs="*", default=["colabkit", "tests", "notebooks"])
    options = parser.parse_args()
    texts = list(texts_in(options.folders))
    print(f"{options.count} of {len(texts)} texts in {', '.join(options.folders)}, seed {options.seed}")
    for number, (place, text) in enumerate(random.Random(options.seed).sample(texts, options.count), 1):
        print(f"\n{number}. {place}\n{text}")


def texts_in(folders: list[str]) -> Iterator[tuple[str, str]]:
    """Return all docstrings, comments, messages and notebook texts, each with its location."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            yield from _docstrings(name, path.read_text())
            yield from _comments(name, path.read_text())
        for path in sorted((ROOT / folder).rglob("*.ipynb")):
            for number, cell in enumerate(json.loads(path.read_text())["cells"]):
                if cell["cell_type"] == "markdown":
                    yield f"{path.relative_to(ROOT).as_posix()} cell {number}", "".join(cell["source"])
    if "colabkit" in folders:
        sys.path[:0] = [str(ROOT)]
        from message_table import sites

        yield from {
            site.message.render(): (f"colabkit/{site.module}:{site.line}", site.message.render()) for site in sites()
        }.values()


def _docstrings(name: str, source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                line = node.lineno if not isinstance(node, ast.Module) else 1
                yield f"{name}:{line} {getattr(node, 'name', 'module')}", text


def _comments(name: str, source: str) -> Iterator[tuple[str, str]]:
    """Return comments except instructions to tools; comments on consecutive lines are one text."""
    tokens = [one for one in tokenize.generate_tokens(io.StringIO(source).readline) if one.type == tokenize.COMMENT]
    numbered = [(one.start[0] - index, one) for index, one in enumerate(tokens)]
    for _, group in itertools.groupby(numbered, lambda pair: pair[0]):
        block = [one for _, one in group]
        text = "\n".join(one.string for one in block)
        if not text.startswith(("# noqa", "# type:", "# fmt:", "# ruff:", "# isort:", "#!")):
            yield f"{name}:{block[0].start[0]}", f"{text}\n    {block[-1].line.strip()}" if len(block) == 1 else text


if __name__ == "__main__":
    main()
