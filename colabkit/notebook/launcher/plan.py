"""From the form's values to a plan: which public calls, with which arguments. Nothing is done here, nothing looked at.

Each button does what those before it do, and what is there already is used as it is. A plan's steps are lines of
magics, so what is shown as code and what is called cannot differ.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Literal, NoReturn, TypeAlias

from colabkit.foundation import InvalidOption, cannot
from colabkit.notebook.launcher.settings import FIELDS, PACK_OPTIONS, Settings
from colabkit.notebook.options.parsing import arguments_of, look_up_in, parser_of
from colabkit.notebook.options.verb import Verb
from colabkit.notebook.options.verbs import VERBS
from colabkit.storage import FSSPEC, WEB, address_of

Action: TypeAlias = Literal["probe", "stage", "pack", "train"]

_READ_BY_PACK = re.compile(
    r"\.(csv|tsv|parquet)$|\.(tfrecords?|tfrec|lmdb|mdb)(-\d+-of-\d+)?/?$|\*|\{(\d+\.\.\d+|[^{},]*,[^{}]*)\}",
    re.IGNORECASE,
)
"""How the names of tables and records end, or hold a pattern of shards: `pack()` reads those itself, a table's labels
with its files, and stages records that are far."""

_VERBS = {verb.name: verb for verb in VERBS}
_DRIVE = "drive:"
_NAME_CHARS = 40


class _FormParser(argparse.ArgumentParser):
    """A parser that names the field whose text cannot be meant."""

    def error(self, message: str) -> NoReturn:
        flag, _, said = message.removeprefix("argument --").partition(": ")
        given, _, needed = said.partition(" is not ")
        label = FIELDS.get(flag.replace("-", "_"), flag)
        raise InvalidOption(cannot(self.prog, f"{given} as {label}", needed, f"Check {label}"))


@dataclass(frozen=True, slots=True)
class Result:
    """A word of a line that stands for what an earlier step returned: the variable, and its attribute."""

    name: str
    attribute: str


@dataclass(frozen=True, slots=True)
class Step:
    """One public call.

    Attributes:
        name: the variable that its report gets.
        verb: of the magic.
        words: its line.
        doing: what is done, for the panel.
    """

    name: str
    verb: Verb
    words: tuple[str | Result, ...]
    doing: str

    def arguments(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the call.

        Args:
            results: what the steps before returned, by name.

        Raises:
            InvalidOption: if the words cannot be meant.
        """
        words = [
            str(getattr(results[word.name], word.attribute)) if isinstance(word, Result) else word
            for word in self.words
        ]
        parsed = parser_of(self.verb, f"{self.verb.name} it", _FormParser).parse_args(words)
        return arguments_of(self.verb, parsed, partial(look_up_in, results))


@dataclass(frozen=True, slots=True)
class Training:
    """Training a small network on what was packed.

    Attributes:
        batch_size: samples of a batch.
        epochs: how many in all.
        channels: of images.
        save_to: folder of the checkpoints.
        doing: what is done, for the panel.
    """

    batch_size: int
    epochs: int
    channels: int
    save_to: str
    doing: str = "Training"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a button does: calls in their order, and training at the end or None.

    Attributes:
        source: what the user named, as it may be shown.
        steps: the calls.
        training: what is trained with what they made.
        secret: the source where it is an address that holds more than may be shown, else empty.
    """

    source: str
    steps: tuple[Step, ...]
    training: Training | None = None
    secret: str = ""


def plan_of(settings: Settings, action: Action, *, needs_mount: bool = True) -> Plan:
    """Return what a button does.

    Args:
        settings: the form's values.
        action: the button.
        needs_mount: whether paths that begin with `drive:` need Drive to be mounted; not where another folder stands
            for it.

    Raises:
        InvalidOption: if a value cannot be meant.
    """
    act = f"{action} it" if action != "train" else "train on it"
    source = _checked(act, "source", settings.source)
    work = _checked(act, "work", settings.work)
    steps: list[Step] = []
    far = (source,) if action in ("probe", "stage") else (source, work)
    if needs_mount and any(path.startswith(_DRIVE) for path in far):
        steps.append(Step("mounted", _VERBS["mount"], (), "Mounting Drive"))
    if action == "probe":
        if source.startswith("samples:") or "://" in source:
            needed = "a folder or a file, on this machine or a mount"
            raise InvalidOption(cannot(f"probe {_shown(source)!r}", "nothing on a mount", needed, "Stage it instead"))
        return Plan(source, (*steps, Step("probed", _VERBS["probe"], (_path(source),), "Probing")))
    is_staged = action == "stage" or not is_read_by_pack(source)
    if is_staged:
        steps.append(Step("staged", _VERBS["stage"], (_path(source), *_option("to", settings.to)), "Staging"))
    shown = _shown(source)
    secret = source if shown != source else ""
    if action == "stage":
        return Plan(shown, tuple(steps), secret=secret)
    options = _pack_options(act, settings)
    folder = f"{_path(work).rstrip('/') or '/'}/{_folder_name(source, options)}"
    near = Result("staged", "path") if is_staged else _path(source)
    steps.append(Step("packed", _VERBS["pack"], (near, f"{folder}/pack.h5", *options), "Packing"))
    if action == "pack":
        return Plan(shown, tuple(steps), secret=secret)
    training = Training(settings.batch_size, settings.epochs, int(settings.channels), f"{folder}/checkpoints")
    return Plan(shown, tuple(steps), training, secret)


def is_read_by_pack(source: str) -> bool:
    """Return whether `pack()` reads a source itself, by its name."""
    return _READ_BY_PACK.search(source) is not None


def _checked(act: str, name: str, text: str) -> str:
    """Return a field's text without the space around it, if there is any, and it is one line."""
    text, label = text.strip(), FIELDS[name]
    if not text:
        found = f"an empty {label.lower()}"
        raise InvalidOption(cannot(act, found, "a path or an address", f"Fill in {label}"))
    if len(text.splitlines()) > 1 or "\0" in text:
        found = f"a line break in the {label.lower()}"
        raise InvalidOption(cannot(act, found, "one line of text", f"Check {label}"))
    return text


def _path(text: str) -> str:
    """Return a path that is not taken for an option."""
    return f"./{text}" if text.startswith("-") else text


def _option(name: str, value: str) -> tuple[str, ...]:
    return (f"--{name}={value}",) if value.startswith("-") else (f"--{name}", value)


def _pack_options(act: str, settings: Settings) -> tuple[str, ...]:
    """Return the words for what differs from the defaults of `pack()`."""
    defaults = {option.name: option.default for option in _VERBS["pack"].options}
    words: list[str] = []
    for name in PACK_OPTIONS:
        value = getattr(settings, name).strip()
        if value and value != str(defaults[name]):
            words += _option(name.replace("_", "-"), _checked(act, name, value))
    return tuple(words)


def _folder_name(source: str, options: tuple[str, ...]) -> str:
    """Return the name of the folder of a pack and its checkpoints: other options make another pack."""
    bare = re.split(r"[?#]", source, maxsplit=1)[0].rstrip("/") if "://" in source else source
    path = bare.partition("://")[2].partition("/")[2] if "://" in source else bare.rpartition(":")[2]
    stem = PurePosixPath(path).name.partition(".")[0]
    name = re.sub(r"[^\w-]+", "-", stem).strip("-")[:_NAME_CHARS] or "data"
    digest = hashlib.sha256("\0".join((source, *options)).encode("utf-8", "surrogateescape"))
    return f"{name}-{digest.hexdigest()[:8]}"


def _shown(source: str) -> str:
    """Return a source as it may be shown: of an address without what can be a secret."""
    if "://" not in source:
        return source
    address = address_of(source)
    return address.shown if address.kind in (WEB, FSSPEC) else source
