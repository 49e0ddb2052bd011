"""The pages of the documentation: their code runs, their links lead somewhere, and the reference is complete."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm_python
from doc_pages import DOCS, NEVER_RUN, ROOT, RUN, Block, blocks_of, commands_of, pages

import colabkit

PAGES = pages()
TEXTS = {page: page.read_text(encoding="utf-8") for page in [*PAGES, *ROOT.glob("*.md")]}
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
RUNNABLE = [page for page in PAGES if any(block.runs for block in blocks_of(page))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _blocks() -> list[tuple[str, Block]]:
    return [(f"{name_of(page)}:{block.line}", block) for page in PAGES for block in blocks_of(page)]


def test_every_code_block_has_a_known_language() -> None:
    assert {place: block.language for place, block in _blocks() if block.language not in (*RUN, *NEVER_RUN)} == {}


def test_every_hidden_setup_is_found_as_a_block() -> None:
    for page in PAGES:
        lines = TEXTS[page].splitlines()
        setups = [number for number, line in enumerate(lines, 1) if line.startswith("<!-- setup")]
        assert {block.line for block in blocks_of(page)} >= set(setups), f"{name_of(page)}: put --> on its own line"


def test_python_blocks_are_valid_and_other_blocks_hold_only_commands_of_their_kind() -> None:
    wrong = []
    for place, block in _blocks():
        if block.language == "python":
            ast.parse(block.text, place)
        elif block.language == "console":
            commands = commands_of(block)
            wrong += [] if commands and {words[0] for words in commands} <= {"colabkit", "python"} else [place]
        elif block.language == "bash":
            first = {line.split()[0] for line in block.text.splitlines() if line.strip() and line[0] not in "# "}
            wrong += [] if first <= {"pip", "git", "apt-get", "pre-commit", "pytest", "mkdocs"} else [place]
    assert wrong == []


@pytest.mark.every_case
@pytest.mark.full
@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_code_blocks_of_a_page_run_in_order(page: Path) -> None:
    runner = ROOT / "tests" / "doubles" / "doc_pages.py"
    done = warm_python.run([sys.executable, runner, page], text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, explicit IDs, and the objects whose documentation it shows."""
    text = re.sub(
        r"^```.*?^```$", "", TEXTS.get(page) or page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^::: (\S+)", text, re.MULTILINE)) | set(re.findall(r"{ ?#([\w-]+) ?}", text))


@pytest.mark.parametrize(
    "layer", [torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(8, 4), torch.nn.Conv2d(3, 4, 3, bias=False)], ids=repr
)
def test_troubleshooting_quotes_the_error_of_a_layer_that_gets_a_default_batch(layer: torch.nn.Module) -> None:
    images = next(iter(colabkit.Loader(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), 4)))
    with pytest.raises(RuntimeError) as caught:
        layer(images)
    assert f"- `{caught.value}`" in TEXTS[DOCS / "troubleshooting.md"]


def test_links_lead_to_existing_files_and_headings() -> None:
    dead = []
    for page, text in TEXTS.items():
        text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)  # noqa: PLW2901
        for link in filter(None, (one for pair in LINK.findall(text) for one in pair)):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if re.match(r"[a-z]+:", link):
                continue
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                dead.append(f"{name_of(page)}: {link}")
    assert dead == []


def test_pages_do_not_link_out_of_the_documentation() -> None:
    # Files outside docs/ are not part of the built site.
    outside = [
        f"{name_of(page)}: {path}"
        for page in PAGES[1:]
        for path in (one.partition("#")[0] for pair in LINK.findall(TEXTS[page]) for one in pair)
        if path and ":" not in path and not (page.parent / path).resolve().is_relative_to(DOCS)
    ]
    assert outside == []


def test_no_text_leads_to_the_other_project_on_pypi() -> None:
    texts = {**TEXTS, **{path: path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*.ipynb")}}
    leading = [
        name_of(path) for path, text in texts.items() if re.search(r"pip install (-\S+ )*[\"']?colabkit\b", text)
    ]
    assert leading == []


def test_every_public_name_is_in_the_reference_once() -> None:
    from verb_pages import verb_pages

    texts = [*(TEXTS[page] for page in PAGES), *verb_pages().values()]
    shown = [name for text in texts for name in re.findall(r"^::: (colabkit\S*)", text, re.MULTILINE)]
    spaces = {"augment": colabkit.augment, "sampler": colabkit.sampler, "types": colabkit.types}
    public = [f"colabkit.{name}" for name in colabkit.__all__ if name not in (*spaces, "errors")]
    public += [f"colabkit.{space}.{name}" for space, module in spaces.items() for name in module.__all__]
    assert sorted(shown) == sorted([*public, "colabkit.errors"])


def test_the_table_of_errors_lists_all_classes_with_their_builtins() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", TEXTS[DOCS / "reference" / "errors.md"], re.MULTILINE))
    classes = {name: getattr(colabkit.errors, name) for name in colabkit.errors.__all__ if name != "ColabkitError"}
    assert listed == {name: one.__bases__[-1].__name__ for name, one in classes.items()}


def test_the_table_of_environment_variables_is_complete() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "colabkit").rglob("*.py"))
    listed = re.findall(r"^\| `(COLABKIT_\w+)` \|", TEXTS[DOCS / "reference" / "environment.md"], re.MULTILINE)
    assert set(listed) == set(re.findall(r"COLABKIT_[A-Z]+", sources))


def test_the_tree_of_the_architecture_page_lists_the_rooms() -> None:
    rooms = re.findall(r"^  (\w+)/ ", TEXTS[DOCS / "explanation" / "architecture.md"], re.MULTILINE)
    assert set(rooms) == {path.parent.name for path in (ROOT / "colabkit").glob("*/__init__.py")}


def test_the_number_of_rules_on_the_page_of_the_doctor_is_right() -> None:
    from colabkit.monitoring.diagnosing.rules import RULES

    assert len(RULES) == 48
    assert "Forty-eight rules" in TEXTS[DOCS / "explanation" / "doctor.md"]


@pytest.mark.full
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "verbs" / "stage.html").exists()
