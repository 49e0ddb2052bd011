"""The launcher's actions: each is one function call, which the launcher shows as a line of Python and runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import colabkit
from colabkit.foundation import PYTHON, Code, InvalidOption, call, cannot
from colabkit.notebook.launcher.settings import Settings
from colabkit.notebook.options import without_secrets

Action: TypeAlias = Literal["train", "restart", "probe", "stage", "prepare"]

_ADDRESS = Code("address")
# The options that `prepare()` shares with `train_on()`.
_PREPARED = ("size", "labels", "splits", "path_column", "root", "on_bad", "max_bad")
# The options of tables of paths that `stage()` shares with `train_on()`.
_STAGED = ("path_column", "root")


@dataclass(frozen=True, slots=True)
class ActionCall:
    """A call of a public function with a source.

    Attributes:
        name: name of the function.
        source: the source.
        options: the keyword arguments.
        shown: the source as it may be shown; it differs from `source` if that may contain a secret.
    """

    name: str
    source: str = field(repr=False)
    options: Mapping[str, Any]
    shown: str

    def make(self) -> Any:
        """Make the call, and return its result."""
        return getattr(colabkit, self.name)(self.source, **self.options)

    @property
    def code(self) -> str:
        """The call as a line of Python, with a variable for a source that may contain a secret."""
        source = _ADDRESS if self.is_secret else self.source
        return PYTHON.call(call(self.name, source, **self.options))

    @property
    def is_secret(self) -> bool:
        """Whether the source may contain a secret."""
        return self.shown != self.source


def call_of(settings: Settings, action: Action, near: str = "auto") -> ActionCall:
    """Return the call of an action.

    Args:
        settings: values of the form.
        action: the action.
        near: destination of the local copy of `stage()`.

    Raises:
        InvalidOption: if a value of the form is invalid.
    """
    source, options = settings.path, settings.options
    shown = without_secrets(source)
    match action:
        case "probe":
            if source.startswith("samples:") or "://" in source:
                act, expected = f"measure {shown!r}", "the path of a folder or a file"
                raise InvalidOption(cannot(act, "this source has no path", expected, "Copy it instead"))
            return ActionCall("probe", source, {}, shown)
        case "stage":
            table = {name: value for name, value in options.items() if name in _STAGED}
            return ActionCall("stage", source, table if near == "auto" else {"to": near, **table}, shown)
        case "prepare":
            shared = {name: value for name, value in options.items() if name in _PREPARED}
            return ActionCall("prepare", source, {"on_bad": "skip", **shared}, shown)
        case "restart":
            return ActionCall("train_on", source, {**options, "restart": True}, shown)
    return ActionCall("train_on", source, options, shown)


def cell_of(made: ActionCall) -> str:
    """Return a cell that makes a call; it asks for an address that may contain a secret."""
    asked = ["from getpass import getpass", f'{_ADDRESS} = getpass("Address of the data: ")']
    return "\n".join(["import colabkit", *(asked if made.is_secret else ()), made.code])
