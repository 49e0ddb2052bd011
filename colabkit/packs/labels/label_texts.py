"""Texts that hold several labels, such as `"haze water"`, and the advice to split them."""

from __future__ import annotations

from collections.abc import Sequence

from colabkit.foundation import Text, in_python

SEVERAL = "text (for several labels per sample, split them first)"
"""Description of text labels that seem to hold several labels each."""

# Those with a blank come first, because the blank is not part of a label.
_SEPARATORS = ("|", "; ", ";", ", ", ",", " ")
# Largest number of labels that splitting may give, as a share of the number of distinct texts.
_FEWER = 2 / 3


def hold_several(texts: Sequence[str]) -> bool:
    """Return whether distinct texts seem to hold several labels each: splitting them gives clearly fewer labels."""
    splits = ({label for text in texts for label in text.split(separator)} for separator in _SEPARATORS)
    return any(len(labels) <= _FEWER * len(texts) for labels in splits)


def split_advice(what: Text, texts: Sequence[str]) -> Text:
    """Return advice to split texts of several labels; `what` names their column, or is the result of a function."""
    separator = next((one for one in _SEPARATORS if any(one in text for text in texts)), " ")
    call = f"split({'' if separator == ' ' else repr(separator)})"
    example = f"text.{call}"
    if isinstance(what, str):
        column = f"table[{what.removeprefix('the column ')}]"
        example = f"{column} = {column}.str.{call}"
    return ("Split the text into lists of labels", in_python(f", for example with {example}"))
