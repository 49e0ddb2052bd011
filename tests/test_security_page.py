"""The security page names only existing tests, and SECURITY.md and the README link to it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/explanation/security.md").read_text(encoding="utf-8")


def _tests_in(path: str) -> set[str]:
    file = ROOT / path
    tree = ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 30
    assert len(named) == PAGE.count("::"), "a test is not named as `path::name`"
    assert [f"{path}::{name}" for path, name in named if name not in _tests_in(path)] == []


def test_the_page_is_linked() -> None:
    assert "](docs/explanation/security.md)" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "](docs/explanation/security.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "`SECURITY.md`" in PAGE
