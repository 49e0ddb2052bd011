"""The exceptions of colabkit: one family, each also the matching builtin.

```
ColabkitError
├── InvalidOption (ValueError)          an argument that cannot be meant
├── SourceMissing (FileNotFoundError)   nothing is at the source's path
├── BadSource (ValueError)              the source is there, but is not what is needed
├── BadArchive (ValueError)             an archive that is cut short, broken or hostile
├── BadImage (ValueError)               a file that cannot be decoded as an image
├── SourceChanged (OSError)             the source changed while it was read
├── TargetExists (FileExistsError)      the target holds something else
├── NotEnoughSpace (OSError)            the bytes do not fit where they should go
├── FileFailed (OSError)                the file system refused an operation
├── NotSealed (ValueError)              a file without the mark that proves it whole
├── Corrupt (ValueError)                a sealed file whose content is no longer what was sealed
├── MissingSplit (KeyError)             a pack has no split of this name
├── NotMounted (FileNotFoundError)      Drive, or the mount that is meant, is not there
├── MountFailed (OSError)               Drive cannot be mounted, with the cause
├── UnsentWrites (RuntimeError)         what was asked would lose writes that are not sent yet
├── TimedOut (TimeoutError)             no answer before the deadline
├── FetchFailed (OSError)               a download that failed, with the cause
├── MissingPackage (ImportError)        an optional package is not installed
├── NoNotebook (RuntimeError)           what needs a notebook is asked for outside of one
├── PackingFailed (RuntimeError)        a process that packs died, here or on a cluster
├── LoaderFailed (RuntimeError)         the loader's background work failed
└── LaunchFailed (RuntimeError)         one of several training processes failed
```

Every message has one form, made by `cannot`: *Cannot <verb> <object>: <found>, <needed>. <Next step>.*
In a notebook an error is that one line; with the environment variable `COLABKIT_DEBUG=1` it is the full traceback.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
import re
import traceback
from collections.abc import Callable
from typing import TypeGuard

from colabkit._reports import printable

__all__ = [
    "BadArchive",
    "BadImage",
    "BadSource",
    "ColabkitError",
    "Corrupt",
    "FetchFailed",
    "FileFailed",
    "InvalidOption",
    "LaunchFailed",
    "LoaderFailed",
    "MissingPackage",
    "MissingSplit",
    "MountFailed",
    "NoNotebook",
    "NotEnoughSpace",
    "NotMounted",
    "NotSealed",
    "PackingFailed",
    "SourceChanged",
    "SourceMissing",
    "TargetExists",
    "TimedOut",
    "UnsentWrites",
]


class ShownInOneLine(BaseException):
    """What IPython shows in one line."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints for this error: one line, or all of it under COLABKIT_DEBUG=1."""
        if os.environ.get("COLABKIT_DEBUG") == "1":
            return traceback.format_exception(self)
        return [f"{type(self).__name__}: {printable(self)}"]


class ColabkitError(ShownInOneLine, Exception):
    """Anything that colabkit refuses or fails to do; the message names the next step."""


class InvalidOption(ColabkitError, ValueError):
    """An argument has a value that cannot be meant."""


class SourceMissing(ColabkitError, FileNotFoundError):
    """Nothing is at the source's path."""


class BadSource(ColabkitError, ValueError):
    """The source is there, but is not what is needed: empty, without classes, of another kind."""


class BadArchive(ColabkitError, ValueError):
    """An archive is cut short, broken, or would write outside its folder."""


class BadImage(ColabkitError, ValueError):
    """A file cannot be decoded as an image, or not to the wanted shape."""


class SourceChanged(ColabkitError, OSError):
    """The source changed while it was read."""


class TargetExists(ColabkitError, FileExistsError):
    """The target holds something else, which is left alone."""


class NotEnoughSpace(ColabkitError, OSError):
    """The bytes do not fit where they should go."""


class FileFailed(ColabkitError, OSError):
    """The file system refused an operation: permissions, a lost mount, a broken disk."""


class NotSealed(ColabkitError, ValueError):
    """A file lacks the mark, written last, that proves it whole."""


class Corrupt(ColabkitError, ValueError):
    """A sealed file no longer holds what was sealed."""


class MissingSplit(ColabkitError, KeyError):
    """A pack has no split of this name."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class NotMounted(ColabkitError, FileNotFoundError):
    """Drive, or the mount that is meant, is not there."""


class MountFailed(ColabkitError, OSError):
    """Drive cannot be mounted.

    Attributes:
        cause: `"place"`, `"thread"`, `"consent"`, `"policy"`, `"top folder"`, `"quota"`, `"folder"`, `"timeout"`,
            `"in use"`, `"failing"`, `"dead"`, `"hung"` or `"unknown"`.
    """

    cause = "unknown"


class UnsentWrites(ColabkitError, RuntimeError):
    """What was asked would lose writes that have not been sent yet."""


class TimedOut(ColabkitError, TimeoutError):
    """There was no answer before the deadline."""


class FetchFailed(ColabkitError, OSError):
    """A download failed; the message names the cause."""


class MissingPackage(ColabkitError, ImportError):
    """An optional package is not installed; the message holds the line that installs it."""


class NoNotebook(ColabkitError, RuntimeError):
    """What needs a notebook is asked for outside of one."""


class PackingFailed(ColabkitError, RuntimeError):
    """A process that packs, here or on a cluster, died or lost its work."""


class LoaderFailed(ColabkitError, RuntimeError):
    """The loader's background work failed; the cause is in the message."""


class LaunchFailed(ColabkitError, RuntimeError):
    """One of several training processes failed; its own output says more."""


def cannot(act: str, found: str, needed: str, next_step: str) -> str:
    """Return the one form of every error message.

    Args:
        act: verb and object, as in `"stage 'birds'"`.
        found: what is there, with numbers and units.
        needed: what has to be there.
        next_step: a sentence that says what to do, without its full stop.
    """
    return f"Cannot {act}: {found}, {needed}. {next_step}."


def kind_of(value: object) -> str:
    """Return what a value is, with its article, as in `"an int"`, `"a list"`, `"the class Linear"` or `"None"`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if re.match('[AEIOaeio]|[FHLMNRSX][A-Z]|nd', name) else 'a'} {name}"


def reword(error: ShownInOneLine, worded: Callable[[str], str]) -> None:
    """Bring the message of an error to other words, in place.

    Args:
        error: with one message.
        worded: brings a text to these words.
    """
    error.args = (worded(str(error)),)
    if isinstance(error, ImportError):  # which shows this instead
        error.msg = error.args[0]


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
