"""The page of all error messages is up to date, and every message follows the writing rules."""

from __future__ import annotations

import re

import pytest
from message_table import TABLE, sites, table


@pytest.mark.full
def test_the_page_of_messages_is_up_to_date() -> None:
    assert TABLE.read_text() == table(), "run python tests/doubles/message_table.py"


_UNWANTED = {
    r"\banew\b": "again",
    r",? say\b(?!s)": "for example",
    r"\b(near|far) (copy|copies|pack|packs|folder|side|place)\b": "local, remote",
    r"\b(told|tells)\b": "returns, reports",
    r"\bas (it|they) (is|are)\b": "unchanged",
    r"expected (expected|but|so|then|which)\b|\b(needed|required) *[.;]": "the expected thing as a noun",
    r"; expected [^.]*\b(is|are|has|have|it may|it has|must) (needed|required|be|to)\b": "the expected thing as a noun",
    r"(?<!\.)[.;:,] *[;:,]|[.;:,] +\.(?!\.)|(?<![.'])\.\.(?![.'])": "one punctuation mark",
    r": (no|not|none) (?!\w+ (is|are|was|were|has|have|exists?)\b)\w+[;.]": "a clause with a verb",
    r"\} bytes\b": "format_things(count, 'byte'), which separates thousands",
    r"pip install colabkit": "the repository: that package is another project",
}
"""Words and forms that messages must not contain, with what to write instead."""


def test_every_message_follows_the_writing_rules() -> None:
    broken = [
        f"colabkit/{site.module}:{site.line}: {text}\n    write: {instead}"
        for site in sites()
        for text in [site.message.render()]
        for pattern, instead in _UNWANTED.items()
        if re.search(pattern, text)
    ]
    assert not broken, "\n".join(broken)
