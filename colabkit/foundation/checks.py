"""Argument checks that raise `InvalidOption`, the import of optional packages, and interrupts by the user.

In all checks, `act` is the verb and object of the message, for example `"load 'birds.h5'"`, `name` is the name of the
argument, and `value` its value.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import math
import numbers
import operator
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, ParamSpec, TypeAlias, TypeGuard, TypeVar

from colabkit.foundation.errors import Interrupted, InvalidOption, MissingPackage
from colabkit.foundation.messages import Code, Message, Text, cannot, option
from colabkit.foundation.units import format_things, parse_bytes, parse_duration

P = ParamSpec("P")
R = TypeVar("R")
Handler: TypeAlias = Callable[[int, FrameType | None], Any] | signal.Handlers | int | None

# Similarity above which a name is probably a misspelling of another.
_SIMILAR = 0.75
# Public modules that contain the classes whose calls are checked.
_NAMESPACES = ("augment", "sampler")
_FLAG_TYPES = ("bool", "bool_", "int")
# Names of arguments that are common elsewhere, with the names that the user may mean, in order of preference.
_SYNONYMS = {
    "class_mode": ("task",),
    "color_mode": ("channels",),
    "directory": ("root",),
    "image_size": ("size",),
    "target_size": ("size",),
    "validation_split": ("splits",),
    "x_col": ("path_column",),
    "y_col": ("labels",),
    "overwrite": ("refresh",),
    "refresh": ("overwrite",),
    "force": ("overwrite", "refresh"),
    "replace": ("overwrite", "refresh"),
    **dict.fromkeys(("checkpoint_dir", "dest", "destination", "dst", "out", "output", "save_to", "target"), ("to",)),
    **dict.fromkeys(("jobs", "n_jobs", "num_threads", "num_workers", "workers"), ("threads", "num_workers")),
}


def check_one_of(act: Text, name: str, value: object, choices: Iterable[object], next_step: Text = "") -> None:
    """Raise `InvalidOption` unless a value equals one of the choices and has the same type."""
    allowed = list(choices)
    if any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
        return
    *first, last = map(repr, allowed)
    expected = f"{', '.join(first)} or {last}" if first else last
    closest = difflib.get_close_matches(str(value), [one for one in allowed if isinstance(one, str)], n=1)
    next_step = next_step or ("Use ", option(name, (closest or allowed)[0]))
    raise InvalidOption(cannot(act, option(name, value), expected, next_step))


def check_callable(
    act: Text,
    name: str,
    value: object,
    next_step: Text,
    *,
    optional: bool = True,
    takes: str | None = None,
    count: int = 1,
    or_else: str = "",
) -> None:
    """Raise `InvalidOption` unless a value is a callable other than a class, or None if `optional`.

    If `takes` is given, it describes the `count` arguments that the callable must accept; if it is empty, the callable
    must accept a call without arguments. A callable whose parameters are unknown is accepted. The message starts the
    expected values with `or_else`.
    """
    expected = f"{or_else}a callable{' or None' if optional else ''}"
    if isinstance(value, type):
        is_class = (option(name, Code(value.__name__)), " is a class")
        create = ("Create an instance: ", option(name, Code(f"{value.__name__}(...)")))
        raise InvalidOption(cannot(act, is_class, expected, create))
    if not callable(value) and not (optional and value is None):
        is_short = value is None or isinstance(value, str | int | float)
        found: Text = option(name, value) if is_short else f"{name} is {kind_of(value)}"
        raise InvalidOption(cannot(act, found, expected, next_step))
    if callable(value) and takes is not None:
        try:
            signature = inspect.signature(value)
        except (TypeError, ValueError):
            # Accept functions written in C that do not describe their parameters.
            return
        try:
            signature.bind(*[None] * (count if takes else 0))
        except TypeError:
            found = f"{name} takes {signature.replace(return_annotation=signature.empty)}"
            expected = f"{'one argument' if count == 1 else f'{count} arguments'}, {takes}" if takes else "no arguments"
            raise InvalidOption(cannot(act, found, expected, next_step)) from None


def check_type(
    act: Text, name: str, value: object, kinds: type | tuple[type, ...], expected: Text, next_step: Text
) -> None:
    """Raise `InvalidOption` unless a value is an instance of one of the classes `kinds`."""
    if not isinstance(value, kinds):
        raise InvalidOption(cannot(act, f"{name} is {kind_of(value)}", expected, next_step))


def check_whole_number(
    act: Text, name: str, value: object, least: int, most: int | None = None, *, or_text: str = ""
) -> int:
    """Return a value as an `int` if it is an integer of at least `least` and, if `most` is given, at most `most`.

    NumPy integers are converted, since they overflow and are not JSON serializable.

    Raises:
        InvalidOption: if the value is not an integer, is a boolean, or is out of bounds.
    """
    is_whole = _is_whole(value)
    if is_whole and least <= operator.index(value) <= (math.inf if most is None else most):  # type: ignore[arg-type]
        return operator.index(value)  # type: ignore[arg-type]
    example: Text = ("For example, use ", option(name, max(least, 1)))
    meant = _whole(value) if isinstance(value, float | str) else None
    if meant is not None and least <= meant <= (1 << 53 if most is None else most):
        example = ("Use ", option(name, meant))
    elif most is not None and is_whole and value > most:  # type: ignore[operator]
        example = ("Use ", option(name, most), " or less")
    bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
    expected = f"{f'{or_text!r} or ' if or_text else ''}a whole number {bounds}"
    raise InvalidOption(cannot(act, option(name, value), expected, example))


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


def check_bytes(act: Text, name: str, value: object, example: str) -> int:
    """Return a number of bytes, given as a positive whole number or as text such as `"20GiB"`.

    Raises:
        InvalidOption: if the value is neither; the message suggests `example`.
    """
    if isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ValueError:
            next_step = ("For example, use ", option(name, example))
            expected = "a number of bytes, or text with a unit"
            raise InvalidOption(cannot(act, option(name, value), expected, next_step)) from None
    return check_whole_number(act, name, value, 1)


def check_duration(
    act: Text,
    name: str,
    value: object,
    *,
    needs_unit: bool = False,
    least: float = 0.0,
    example: float | str = "30min",
    or_else: str = "",
) -> float:
    """Convert a number of seconds, a `timedelta`, or text such as `"5min"` or `"1h 30min"` to seconds.

    Raises:
        InvalidOption: if the value is none of these, is not finite, not above 0 or below `least`, or if it is a number
            and `needs_unit` is true; the message suggests `example`, and starts the expected values with `or_else`.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else None if needs_unit else value
    if isinstance(value, str):
        try:
            seconds = parse_duration(value)
        except ValueError:
            seconds = None
    if not is_finite_number(seconds) or seconds <= 0 or seconds < least:
        next_step = ("For example, use ", option(name, example))
        limit = f"of {least:g} or more" if least else "above 0"
        expected = f"a duration {limit} in seconds, or with a unit (s, min, h or d)"
        if needs_unit:
            expected = f"a duration {limit} with a unit (s, min, h or d)"
        raise InvalidOption(cannot(act, option(name, value), f"{or_else}{expected}", next_step))
    return float(seconds)


def check_size(act: Text, name: str, value: object) -> tuple[int, int]:
    """Convert a positive integer or a pair of positive integers to (height, width), else raise `InvalidOption`."""
    sides = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2 or not all(_is_whole(side) and side >= 1 for side in sides):
        meant = _whole(value) if isinstance(value, float | str) else None
        next_step: Text = ("For example, use ", option(name, 224), " or ", option(name, (240, 320)))
        next_step = ("Use ", option(name, meant)) if meant and meant > 0 else next_step
        expected = "a whole number of pixels, or height and width"
        raise InvalidOption(cannot(act, option(name, value), expected, next_step))
    return operator.index(sides[0]), operator.index(sides[1])


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number that is finite as a float; booleans are excluded."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        # An integer may be too large for a float.
        return False


def kind_of(value: object) -> str:
    """Describe the type of a value for a message: `"an int"`, `"a list"`, `"the class Linear"` or `"None"`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if re.match('[AEIOaeio]|[FHLMNRSX][A-Z]|nd', name) else 'a'} {name}"


def checked_call(**instead: Text) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a public function that turns a call with wrong arguments into an `InvalidOption`.

    Python itself compares the arguments with the parameters; the decorator replaces the resulting `TypeError`. For
    flags passed by name, it accepts only booleans and integers, since `overwrite="no"` would count as true.

    Args:
        instead: advice for unknown arguments, such as those of other libraries, by argument name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        flags = frozenset(name for name, kind in function.__annotations__.items() if kind == "bool")

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in flags & kwargs.keys():
                if type(kwargs[name]).__name__ not in _FLAG_TYPES:
                    act = f"call {_call_of(function, args)}"
                    next_step = ("For example, use ", option(name, True))
                    raise InvalidOption(cannot(act, option(name, kwargs[name]), "True or False", next_step))
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    # The call was valid; the function itself, or code that it called, raised the error.
                    raise
            raise InvalidOption(_wrong_call(function, args, kwargs, instead))

        return checked

    return decorate


def interruptible(work: str, then: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that turns `KeyboardInterrupt` into `Interrupted`, which a notebook shows as one line.

    Args:
        work: name of the function's activity, such as `"Staging"`.
        then: sentences about what is kept and how to continue.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except KeyboardInterrupt as error:
                raise Interrupted(f"{work} was interrupted. {then}") from error

        return run

    return decorate


@contextlib.contextmanager
def on_interrupt(handler: Handler) -> Iterator[None]:
    """Set the handler of SIGINT (Ctrl-C or the kernel's interrupt) in the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


@contextlib.contextmanager
def interrupted_later() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at the end of the block, instead of where an interrupt arrives in it."""
    arrived: list[int] = []
    with on_interrupt(lambda number, _: arrived.append(number)):
        yield
    if arrived:
        raise KeyboardInterrupt


def _call_of(function: Callable[..., Any], given: Sequence[Any], arguments: str = "") -> str:
    """Return a call as text; for an `__init__`, a call of the first colabkit class in the object's MRO."""
    called: Any = function
    if function.__name__ == "__init__":
        called = next(one for one in type(given[0]).__mro__ if one.__module__.startswith("colabkit."))
    space = next((f"{name}." for name in _NAMESPACES if f".{name}" in called.__module__), "")
    return f"colabkit.{space}{called.__qualname__}({arguments})"


def _wrong_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], instead: Mapping[str, Text]
) -> Message:
    parameters = dict(inspect.signature(function).parameters)
    given = args[1:] if parameters.pop("self", None) is not None else args
    by_place = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    open_ended = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    required = [name for name, one in parameters.items() if one.default is one.empty and one.kind not in open_ended]
    usage = ("Use ", _call_of(function, args, ", ".join(required)))
    act = f"call {_call_of(function, args)}"
    for name in [name for name in kwargs if name not in parameters]:
        synonyms = [one for one in _SYNONYMS.get(name, ()) if one in parameters]
        closest = synonyms or difflib.get_close_matches(name, parameters, n=1, cutoff=_SIMILAR)
        advice: Text = f"See help({_call_of(function, args).removesuffix('()')})"
        if name in instead:
            advice = instead[name]
        elif closest:
            similar = closest[0]
            advice = ("Use ", option(similar))
        return cannot(act, f"it has no argument {name}=", "", advice)
    if len(given) > len(by_place):
        named = next((name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY), "")
        value = given[len(by_place)]
        is_short = isinstance(value, bool | int | float | str) or value is None
        example = ("For example, use ", option(named, value) if is_short else option(named)) if named else usage
        found = f"{format_things(len(given), 'argument')} without a name {'is' if len(given) == 1 else 'are'} given"
        if len(by_place) == 1 and "Sequence" in str(parameters[by_place[0]].annotation):
            # Numbers such as shares were given one by one.
            example = ("Use ", option(by_place[0], tuple(given)))
        most = f"at most {len(by_place)} ({', '.join(by_place)})" if by_place else "none"
        return cannot(act, found, most, example)
    missing = [name for name in required[len(given) :] if name not in kwargs]
    if not missing:
        twice = next(name for name in by_place[: len(given)] if name in kwargs)
        return cannot(act, f"{twice} is given twice", "", usage)
    one = len(missing) == 1
    found = f"the argument{'' if one else 's'} {' and '.join(missing)} {'is' if one else 'are'} missing"
    return cannot(act, found, "", usage)


def import_optional(name: str, act: Text, purpose: str, package: str = "", next_step: Text = "") -> Any:
    """Import and return the module of an optional package.

    Args:
        name: name of the module.
        act: verb and object for the message.
        purpose: purpose of the package, for example `"to draw"`.
        package: name of the package for pip; by default, the name of the top-level module.
        next_step: advice for the message; by default, to install the package.

    Raises:
        MissingPackage: if the module cannot be imported.
    """
    package = package or name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            found = f"the package {package}, which is needed {purpose}, is not installed"
            raise MissingPackage(cannot(act, found, "", next_step or f"Run pip install {package}")) from None
        reason = str(error).strip().partition("\n")[0]
        found = f"the package {package}, which is needed {purpose}, is installed but cannot be imported ({reason})"
        repair = f"Restart the kernel or the program; if the error persists, run pip install --upgrade {package}"
        raise MissingPackage(cannot(act, found, "", repair)) from error


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _whole(value: float | str) -> int | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None
