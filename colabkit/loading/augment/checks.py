"""Checks of the arguments of transforms."""

from __future__ import annotations

from typing import Any

from colabkit.foundation import InvalidOption, cannot, check_whole_number


def shown(value: Any) -> str:
    """Return the text of what was given, for a message: one line of 80 characters at most."""
    return f"{' '.join(repr(value).split()):.80}"


def checked_size(act: str, size: Any) -> tuple[int, int]:
    """Return height and width; one whole number stands for both.

    Args:
        act: verb and object for the message.
        size: what was given.

    Raises:
        InvalidOption: if it is not one or two whole numbers of at least 1.
    """
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(sides) != 2:
        needed = "one whole number or height and width"
        raise InvalidOption(cannot(act, f"size={size!r}", needed, "Use size=(224, 224), say"))
    for side in sides:
        check_whole_number(act, "size", side, 1)
    return int(sides[0]), int(sides[1])
