"""The exception classes. `colabkit.errors` shows them as a tree; `messages` defines the form of their messages."""

from __future__ import annotations

import os
import traceback
from typing import Any

from colabkit.foundation.messages import PYTHON, Message, Words, has_references
from colabkit.foundation.reports import printable

_PARTS = ("action", "found", "expected", "next_step")


class _MessageOfError:
    """Descriptor of the attribute `message` of an error.

    On the class, the attribute is None: if it were truthy, torch's DataLoader would re-raise an error from a worker
    process with the keyword argument `message=`.
    """

    def __get__(self, error: OneLineError | None, kind: type) -> Message | None:
        parts = error.args[:1] if error is not None else ()
        return parts[0] if parts and isinstance(parts[0], Message) else None


class OneLineError(BaseException):
    """An error that IPython shows as one line, with options and calls as the caller would write them.

    Attributes:
        words: the syntax of options and calls in the message, Python by default.
        message: the parts of the message: action, found, expected and next step; None if the error was not raised with
            a `Message`.
    """

    words: Words = PYTHON
    message = _MessageOfError()

    def __str__(self) -> str:
        if self.args and has_references(self.args[0]):
            return self.words.render(self.args[0])
        # KeyError would show a single argument in quotes.
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()

    def to_dict(self) -> dict[str, Any]:
        """Return the error as values for `json.dumps`: its type, its text, and the parts of its `Message`, if any."""
        values = {"type": type(self).__name__, "message": str(self)}
        if (message := self.message) is None:
            return values
        parts = {name: self.words.render(getattr(message, name)) for name in _PARTS}
        return {**values, **parts, "options": list(message.options)}

    def _render_traceback_(self) -> list[str]:
        if os.environ.get("COLABKIT_DEBUG") == "1":
            return traceback.format_exception(self)
        return [f"{type(self).__name__}: {printable(self)}"]


class ColabkitError(OneLineError, Exception):
    """Base class of colabkit's errors; each message ends with the next step to take."""


class Interrupted(OneLineError, KeyboardInterrupt):
    """Ctrl-C or a notebook's stop button ended a call; the message lists the data that is kept."""

    def __init__(self, message: object) -> None:
        super().__init__(message)


class InvalidOption(ColabkitError, ValueError):
    """An argument is invalid, missing or unknown."""


class SourceMissing(ColabkitError, FileNotFoundError):
    """The source, or another file to be read, does not exist."""


class BadSource(ColabkitError, ValueError):
    """The source exists but cannot be used, for example because it is empty or of an unsupported kind."""


class BadArchive(ColabkitError, ValueError):
    """An archive is corrupt, unsafe to extract, or of an unsupported kind, for example encrypted."""


class BadImage(ColabkitError, ValueError):
    """A file cannot be decoded as an image, or its image does not have the required shape."""


class SourceChanged(ColabkitError, OSError):
    """The source changed after it was opened or its files were listed."""


class TargetExists(ColabkitError, FileExistsError):
    """The target already exists and is not overwritten."""


class NotEnoughSpace(ColabkitError, OSError):
    """The target has too little free space."""


class FileFailed(ColabkitError, OSError):
    """A file operation failed, for example because of permissions, a lost mount or a broken disk."""


class NotSealed(ColabkitError, ValueError):
    """A pack or local copy has no seal (the record of checksums, written last), or has another format version."""


class Corrupt(ColabkitError, ValueError):
    """A file is damaged: its bytes differ from its checksum, its recorded size or a second read."""


class MissingSample(ColabkitError, IndexError):
    """A dataset has no sample at this index."""


class MissingSplit(ColabkitError, KeyError):
    """A pack or a source has no split with the requested name."""


class NotMounted(ColabkitError, FileNotFoundError):
    """Google Drive, or another requested mount, is not mounted."""


class MountFailed(ColabkitError, OSError):
    """Google Drive cannot be mounted, used or unmounted.

    Attributes:
        cause: reason for the failure: `"place"`, `"thread"`, `"consent"`, `"policy"`, `"root folder"`, `"quota"`,
            `"folder"`, `"timeout"`, `"in use"`, `"failing"`, `"dead"`, `"hung"` or `"unknown"`.
    """

    def __init__(self, *arguments: object, cause: str = "unknown") -> None:
        super().__init__(*arguments)
        self.cause = cause


class UnsentWrites(ColabkitError, RuntimeError):
    """The operation could lose writes that have not been uploaded yet."""


class TimedOut(ColabkitError, TimeoutError):
    """An operation did not finish before its timeout."""


class FetchFailed(ColabkitError, OSError):
    """A download failed; the message states the cause."""


class MissingPackage(ColabkitError, ImportError):
    """An optional package is missing or too old; the message states how to install it."""


class NoNotebook(ColabkitError, RuntimeError):
    """An operation that requires a notebook was called outside of one."""


class PackingFailed(ColabkitError, RuntimeError):
    """A packing process or task, on this machine or on a cluster, died or cannot continue."""


class LoaderFailed(ColabkitError, RuntimeError):
    """The loader cannot make batches; the message states the cause."""


class TrainingDiverged(ColabkitError, FloatingPointError):
    """A training step returned NaN or infinity."""


class LaunchFailed(ColabkitError, RuntimeError):
    """One of several processes failed; the output of that process contains the details."""
