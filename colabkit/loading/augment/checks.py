"""Checks of the arguments of transforms."""

from __future__ import annotations

import math
import numbers
from typing import Any

from colabkit.foundation import InvalidOption, cannot, check_whole_number, is_finite_number


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


def checked_number(
    act: str, name: str, value: Any, example: float, least: float = -math.inf, most: float = math.inf
) -> float:
    """Return a finite number between two bounds, whole if it was given as a whole number.

    Args:
        act: verb and object for the message.
        name: of the argument.
        value: what was given.
        example: a value to propose.
        least: the smallest allowed value.
        most: the largest allowed value.

    Raises:
        InvalidOption: if it is no such number.
    """
    if not is_finite_number(value) or not least <= value <= most:
        bounds = f" of {least:g} or more" if math.isfinite(least) else ""
        bounds = f" from {least:g} to {most:g}" if math.isfinite(most) else bounds
        raise InvalidOption(cannot(act, f"{name}={value!r}", f"a finite number{bounds}", f"Use {name}={example}, say"))
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def checked_range(act: str, name: str, value: Any, example: tuple[float, float], most: float) -> tuple[float, float]:
    """Return two numbers above 0, the second not below the first.

    Args:
        act: verb and object for the message.
        name: of the argument.
        value: what was given.
        example: a value to propose.
        most: the largest allowed value.

    Raises:
        InvalidOption: if they are no such numbers.
    """
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_finite_number, value))
    if not is_pair or not 0 < value[0] <= value[1] <= most:
        needed = "two numbers above 0 in rising order" + (f", at most {most:g}" if math.isfinite(most) else "")
        raise InvalidOption(cannot(act, f"{name}={value!r}", needed, f"Use {name}={example}, say"))
    return float(value[0]), float(value[1])
