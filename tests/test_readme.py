"""README is short and begins with the two commands; its translation has the same code, figures and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import PROMPT, ROOT, Block, blocks_of
from verb_pages import verb_pages, verbs_table

import colabkit
from colabkit.notebook.verbs import VERBS

README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
TEXT = README.read_text(encoding="utf-8")
MOST_WORDS = 1200


def words_in(text: str) -> int:
    """Return the number of words that a reader reads.

    Code blocks, HTML comments, tags and the addresses of links are excluded. Everything else counts, including tables,
    headings and inline code; a word is a run of characters between spaces that contains a letter or a digit.
    """
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>]*>|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def test_readme_is_short() -> None:
    assert words_in(TEXT) <= MOST_WORDS


@pytest.mark.parametrize("page", [README, CHINESE], ids=["README", "translation"])
def test_the_first_block_is_the_quickstart(page: Path) -> None:
    first = blocks_of(page)[0]
    text = 'pip install . && colabkit demo\npip install ".[test]" && pytest\n'
    assert (first.language, first.text) == ("bash", text)


def test_the_folder_of_the_reader_takes_eight_lines() -> None:
    first = next(block for block in blocks_of(README) if block.language == "python")
    assert sum(map(bool, first.text.splitlines())) == 8


def _code(blocks: list[Block]) -> list[tuple[str, str]]:
    return [(block.language, block.text) for block in blocks]


def _figures(text: str) -> list[list[str]]:
    """Return the numbers of each row of the tables."""
    return [sorted(re.findall(r"\d+(?:[.,]\d+)*", row)) for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]


def _links(text: str) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    return sorted(one for pair in found for one in pair if one and not one.startswith("README"))


def test_the_translation_has_the_same_code_figures_and_links() -> None:
    chinese = CHINESE.read_text(encoding="utf-8")
    assert _code(blocks_of(CHINESE)) == _code(blocks_of(README))
    assert _figures(chinese) == _figures(TEXT)
    assert _links(chinese) == _links(TEXT)
    assert chinese.count("\n## ") == TEXT.count("\n## ")
    assert "](README.md)" in chinese
    assert "](README.zh-CN.md)" in TEXT


def test_the_six_magics_are_shown_with_their_outputs() -> None:
    (block,) = [block for block in blocks_of(ROOT / "docs" / "index.md") if block.language == "ipython"]
    magics = [code.split()[0] for code, output in PROMPT.findall(block.text) if output]
    assert magics == ["%runtime", "%stage", "%pack", "%verify", "%train", "%doctor"]


def test_the_table_of_magics_is_up_to_date() -> None:
    index = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    written = re.search(r"<!-- begin verbs -->\n(.*)\n<!-- end verbs -->", index, re.DOTALL)
    assert written is not None
    assert written[1] == verbs_table(), "run python tests/doubles/verb_pages.py and copy its output"


def test_every_verb_has_a_page_with_all_its_options() -> None:
    pages = verb_pages()
    assert pages.keys() == {verb.name for verb in VERBS}
    missing = [
        f"{verb.name}: {option.name}"
        for verb in VERBS
        for option in verb.options
        if f"| `{option.flag or option.name.upper()}` |" not in pages[verb.name]
    ]
    assert missing == []


def test_the_newest_entry_of_the_changelog_is_not_older_than_the_version() -> None:
    newest = re.search(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] in ("Unreleased", colabkit.__version__)


def test_no_placeholder_is_left() -> None:
    assert not re.search(r"\b(NUMBER|RATIO|OUTPUT|DEMO|BENCH|RESULT|CLICK|TODO)\b", TEXT)
