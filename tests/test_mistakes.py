"""Messages about user mistakes name the cause and the next step, in the caller's notation."""

from __future__ import annotations

import re

import pytest
from mistake_page import CAUSES, PAGE, page, shown
from mistakes import LAUNCHER, MAGIC, MISTAKES, PYTHON, TERMINAL, Mistake

ALL = [mistake for mistakes in MISTAKES.values() for mistake in mistakes]
# Shares such as `--splits train=0.8,val=0.2` contain equals signs in magics and commands, too.
_PYTHON_ONLY = re.compile(
    r"(?<!--splits )(?<!\d,)\b[a-z_]+=(True|False|None|['{(\[]|\d)|\bcolabkit\.[a-z_]+\(|function of the path"
)
_NEVER = (
    "Traceback",
    "NoneType",
    "positional argument",
    "unexpected keyword",
    "object at 0x",
    "no error",
    " .,",
    "..:",
)


def _flaws(mistake: Mistake, text: str) -> list[str]:
    names_class = mistake.surface in (PYTHON, MAGIC)
    flaws = [f"never {word!r}" for word in (mistake.never, *_NEVER) if word in text]
    flaws += [] if mistake.must in text else [f"must contain {mistake.must!r}"]
    flaws += [] if not names_class or text.startswith(f"{mistake.error}: ") else [f"must be a {mistake.error}"]
    if mistake.surface != PYTHON and mistake.error != "AttributeError" and (found := _PYTHON_ONLY.search(text)):
        flaws.append(f"{found[0]!r} is Python")
    if mistake.surface != MAGIC and mistake.surface != LAUNCHER and re.search(r"(?<!\w)%[a-z]", text):
        flaws.append("it names a magic")
    return flaws


@pytest.mark.full
def test_every_mistake_gets_a_message_that_names_its_cause_in_the_words_of_its_surface() -> None:
    wrong = [
        f"{mistake.typed}\n    {text}\n    {'; '.join(flaws)}"
        for mistake, text in shown().items()
        if (flaws := _flaws(mistake, text))
    ]
    assert not wrong, "\n".join(["", *wrong])


@pytest.mark.full
def test_a_traceback_in_python_shows_an_earlier_error_only_where_it_may_come_from_the_users_code() -> None:
    shown()
    assert {mistake.typed: mistake.cause for mistake in ALL if mistake.cause} == CAUSES


@pytest.mark.full
def test_the_page_of_mistakes_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python tests/doubles/mistake_page.py"


def test_the_table_covers_all_surfaces() -> None:
    assert len(ALL) >= 80
    assert {mistake.surface for mistake in ALL} == {PYTHON, MAGIC, TERMINAL, LAUNCHER}
