"""Argument checks that raise `InvalidOption`, and the import of optional packages.

In all checks, `act` is the verb and object of the message, for example `"load 'birds.h5'"`, `name` is the name of the
argument, and `value` its value.
"""

from __future__ import annotations

import importlib
import math
import numbers
import operator
import re
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeGuard

from colabkit.foundation.errors import InvalidOption, MissingPackage
from colabkit.foundation.messages import Code, Text, cannot, option
from colabkit.foundation.units import parse_duration


def check_one_of(act: Text, name: str, value: object, choices: Iterable[object], next_step: Text = "") -> None:
    """Raise `InvalidOption` unless a value equals one of the choices and has the same type."""
    allowed = list(choices)
    if any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
        return
    *first, last = map(repr, allowed)
    expected = f"{', '.join(first)} or {last}" if first else last
    raise InvalidOption(cannot(act, option(name, value), expected, next_step or ("Use ", option(name, allowed[0]))))


def check_callable(act: Text, name: str, value: object, next_step: Text, *, optional: bool = True) -> None:
    """Raise `InvalidOption` unless a value is a callable other than a class, or None if `optional`."""
    expected = "a callable or None" if optional else "a callable"
    if isinstance(value, type):
        found = (option(name, Code(value.__name__)), " is a class")
        create = ("Create an instance: ", option(name, Code(f"{value.__name__}(...)")))
        raise InvalidOption(cannot(act, found, expected, create))
    if not callable(value) and not (optional and value is None):
        raise InvalidOption(cannot(act, option(name, value), expected, next_step))


def check_type(
    act: Text, name: str, value: object, kinds: type | tuple[type, ...], expected: Text, next_step: Text
) -> None:
    """Raise `InvalidOption` unless a value is an instance of one of the classes `kinds`."""
    if not isinstance(value, kinds):
        raise InvalidOption(cannot(act, f"{name} is {kind_of(value)}", expected, next_step))


def check_whole_number(act: Text, name: str, value: object, least: int, most: int | None = None) -> int:
    """Return an integer between two inclusive bounds as an `int`.

    NumPy integers are converted, since they overflow and are not JSON serializable.

    Raises:
        InvalidOption: if the value is not an integer, is a boolean, or is out of bounds.
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if is_whole and least <= operator.index(value) <= (math.inf if most is None else most):  # type: ignore[arg-type]
        return operator.index(value)  # type: ignore[arg-type]
    example: Text = ("For example, use ", option(name, max(least, 1)))
    meant = _whole(value) if isinstance(value, float | str) else None
    if meant is not None and least <= meant <= (1 << 53 if most is None else most):
        example = ("Use ", option(name, meant))
    elif most is not None and is_whole and value > most:  # type: ignore[operator]
        example = ("Use ", option(name, most), " or less")
    bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
    raise InvalidOption(cannot(act, option(name, value), f"a whole number {bounds}", example))


def check_number(
    act: Text,
    name: str,
    value: object,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    example: float,
    above: float = -math.inf,
) -> float:
    """Return a finite number between two inclusive bounds and greater than `above`.

    Raises:
        InvalidOption: if the value is not such a number; the message suggests `example`.
    """
    if is_finite_number(value) and least <= value <= most and value > above:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    bounds = f" of {least:g} or more" if math.isfinite(least) else f" above {above:g}" if math.isfinite(above) else ""
    if math.isfinite(most):
        bounds = f" from {least:g} to {most:g}" if math.isfinite(least) else f"{bounds}, at most {most:g}"
    next_step = ("For example, use ", option(name, example))
    raise InvalidOption(cannot(act, option(name, value), f"a finite number{bounds}", next_step))


def check_duration(
    act: Text, name: str, value: object, *, needs_unit: bool = False, example: float | str = "30min"
) -> float:
    """Convert a number of seconds, a `timedelta`, or text such as `"5min"` or `"1h 30min"` to seconds above 0.

    Raises:
        InvalidOption: if the value is none of these or not above 0, or if it is a number and `needs_unit` is true; the
            message suggests `example`.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else None if needs_unit else value
    if isinstance(value, str):
        try:
            seconds = parse_duration(value)
        except ValueError:
            seconds = None
    if not is_finite_number(seconds) or seconds <= 0:
        next_step = ("For example, use ", option(name, example))
        expected = "a duration above 0 in seconds, or with a unit (s, min, h or d)"
        if needs_unit:
            expected = "a duration above 0 with a unit (s, min, h or d)"
        raise InvalidOption(cannot(act, option(name, value), expected, next_step))
    return float(seconds)


def check_size(act: Text, name: str, value: object) -> tuple[int, int]:
    """Convert an integer or a pair of integers to (height, width); raise `InvalidOption` for other values."""
    sides = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2:
        next_step = ("For example, use ", option(name, 224), " or ", option(name, (240, 320)))
        raise InvalidOption(cannot(act, option(name, value), "a whole number, or height and width", next_step))
    return check_whole_number(act, name, sides[0], 1), check_whole_number(act, name, sides[1], 1)


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number; booleans do not count."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        # The integer is too large for a float.
        return False


def kind_of(value: object) -> str:
    """Describe the type of a value for a message: `"an int"`, `"a list"`, `"the class Linear"` or `"None"`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if re.match('[AEIOaeio]|[FHLMNRSX][A-Z]|nd', name) else 'a'} {name}"


def import_optional(name: str, act: Text, purpose: str, package: str = "", next_step: Text = "") -> Any:
    """Import and return the module of an optional package.

    Args:
        name: name of the module.
        act: verb and object for the message.
        purpose: purpose of the package, for example `"to draw"`.
        package: name of the package for pip; by default, the name of the top-level module.
        next_step: advice for the message; by default, to install the package.

    Raises:
        MissingPackage: if the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = package or name.partition(".")[0]
        found = f"the package {package}, which is needed {purpose}, is not installed"
        raise MissingPackage(cannot(act, found, "", next_step or f"Run pip install {package}")) from error


def _whole(value: float | str) -> int | None:
    """Convert a number or text to an integer; return None if its value is not a whole number."""
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None
