"""Words for the required options of a verb in a line."""

from __future__ import annotations

from colabkit.notebook.verb_types import Option

_WORDS = {"amount": "7", "bytes": "7", "object": "x", "objects": "x"}


def stand_in(option: Option) -> str:
    """Return a word that a required option accepts: a number, the variable `x`, or a path with the option's name."""
    return _WORDS.get(option.kind, f"./{option.name}")
