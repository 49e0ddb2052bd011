"""Checks of arguments, each with one clear error."""

from __future__ import annotations

import math
import numbers
import operator
import re
from typing import TypeGuard, TypeVar

from colabkit.foundation.errors import InvalidOption, cannot

T = TypeVar("T")


def check_one_of(act: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `InvalidOption` unless a value is one of several.

    Args:
        act: verb and object for the message.
        name: of the argument.
        value: what was given.
        choices: the allowed values.
    """
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        *first, last = map(repr, choices)
        expected = f"{', '.join(first)} or {last}" if first else last
        raise InvalidOption(cannot(act, f"{name}={value!r}", expected, f"Use {name}={choices[0]!r}"))


def check_callable(act: str, name: str, value: object, next_step: str) -> None:
    """Raise `InvalidOption` unless a value is None or can be called; a class is refused too.

    Args:
        act: verb and object for the message.
        name: of the argument.
        value: what was given.
        next_step: what to pass instead.
    """
    if isinstance(value, type):
        found, next_step = f"{name}={value.__name__}, a class", f"Create an instance: {name}={value.__name__}(...)"
        raise InvalidOption(cannot(act, found, "a callable or None", next_step))
    if value is not None and not callable(value):
        raise InvalidOption(cannot(act, f"{name}={value!r:.60}", "a callable or None", next_step))


def kind_of(value: object) -> str:
    """Return what a value is, with its article, as in `"an int"`, `"a list"`, `"the class Linear"` or `"None"`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if re.match('[AEIOaeio]|[FHLMNRSX][A-Z]|nd', name) else 'a'} {name}"


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number; a truth value is none."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float holds
        return False


def check_whole_number(act: str, name: str, value: object, least: int) -> int:
    """Return a whole number of at least `least` as a plain one: those of NumPy overflow, and are no JSON.

    Args:
        act: verb and object for the message.
        name: of the argument.
        value: what was given; numbers of NumPy count.
        least: the smallest allowed value.

    Raises:
        InvalidOption: if it is none.
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or value < least:  # type: ignore[operator]
        next_step = f"Use {name}={max(least, 1)}, say"
        if isinstance(value, float | str) and (meant := _whole(value)) is not None and least <= meant < 1 << 53:
            next_step = f"Use {name}={meant}"
        raise InvalidOption(cannot(act, f"{name}={value!r}", f"a whole number of {least} or more", next_step))
    return operator.index(value)  # type: ignore[arg-type]


def _whole(value: float | str) -> int | None:
    """Return the whole number that a number or text is meant as, None if it is none."""
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def check_seconds(act: str, name: str, value: object) -> None:
    """Raise `InvalidOption` unless `value` is a finite number of seconds above 0.

    Args:
        act: verb and object for the message.
        name: of the argument.
        value: what was given.
    """
    if not is_finite_number(value) or value <= 0:
        raise InvalidOption(cannot(act, f"{name}={value!r}", "seconds above 0", f"Use {name}=60, say"))
