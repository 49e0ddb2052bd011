"""The exceptions, one family, and the one form of their messages; `colabkit.errors` lists them as a tree."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

from colabkit.foundation.reports import printable


class OneLineError(BaseException):
    """An error that IPython shows in one line."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints for this error: one line, or all of it under COLABKIT_DEBUG=1."""
        if os.environ.get("COLABKIT_DEBUG") == "1":
            return traceback.format_exception(self)
        return [f"{type(self).__name__}: {printable(self)}"]


class ColabkitError(OneLineError, Exception):
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


class TrainingDiverged(ColabkitError, FloatingPointError):
    """A step of training returned a number that is not finite."""


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


def reword(error: OneLineError, worded: Callable[[str], str]) -> None:
    """Bring the message of an error to other words, in place.

    Args:
        error: with one message.
        worded: brings a text to these words.
    """
    error.args = (worded(str(error)),)
    if isinstance(error, ImportError):  # which shows this instead
        error.msg = error.args[0]
