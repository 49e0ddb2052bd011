"""The one table of verbs and options that magics and commands are made from.

Names, defaults and meanings are those of the public functions; a test compares the table with their signatures. A value
of the kind `object` is a Python object: in a notebook the name of a variable, in a terminal `FILE.py:NAME`.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from colabkit._units import parse_bytes
from colabkit.errors import InvalidOption, cannot

__all__ = ["VERBS", "Option", "Verb", "arguments_of", "parser_of"]


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of a verb.

    Attributes:
        name: the function's parameter.
        help: one line, for `--help` and `?`.
        default: the function's default; without one it has to be given.
        kind: `text`, `number`, `amount`, `bytes`, `seconds`, `flag`, `threads`, `steps`, `size`, `folder`, `labels`,
            `splits`, `fields`, `object` or `objects`.
        is_positional: whether it is given by its place instead of its name; what has to be given always is.
    """

    name: str
    help: str
    default: Any = ...
    kind: str = "text"
    is_positional: bool = False

    @property
    def is_required(self) -> bool:
        """Whether it has to be given."""
        return self.default is ...


@dataclass(frozen=True, slots=True)
class Verb:
    """A magic and a command.

    Attributes:
        name: of both.
        help: one line.
        options: positional ones first.
        is_magic: whether there is a magic of it.
        function: the public function, where its name is another.
    """

    name: str
    help: str
    options: tuple[Option, ...] = ()
    is_magic: bool = True
    function: str = ""

    @property
    def call(self) -> str:
        """Name of the public function."""
        return self.function or self.name


_PROGRESS = Option("progress", "show a progress bar", True, "flag")
_THREADS = Option("threads", "files read at once; auto measures what the source rewards", "auto", "threads")
_ON_MOUNT = Option("path", "anything on the mount; by default the Drive mount", None, is_positional=True)
_SECONDS_SHOWN = Option("progress", "show the seconds that pass", True, "flag")
_PACKED = (
    Option("size", "height and width to bring images to, as in 224 or 240x320", None, "size"),
    Option("encoding", "raw pixels, the source's own bytes, jpeg encoded anew, or auto", "auto"),
    Option("quality", "of jpeg, 1 to 100", 90, "number"),
    Option("channels", "3 for RGB, 1 for luminance", 3, "number"),
    Option("labels", "a column, several as in a,b,c, none, or auto: such a column, else folders", "auto", "labels"),
    Option("splits", "shares, as in train=0.8,test=0.2, or the column that names the splits", None, "splits"),
    Option("fields", "further columns to keep, as in age,caption or Z=age", None, "fields"),
    Option("seed", "decides which sample goes to which split", 0, "number"),
    Option("on_bad", "raise, skip or blank a file that cannot be decoded", "raise"),
    Option("max_bad", "more bad files are an error: a share, or a number of them", 0.1, "amount"),
)

VERBS: tuple[Verb, ...] = (
    Verb("runtime", "show what this machine allows: CPUs, RAM, tmpfs, disks, GPUs, versions"),
    Verb(
        "mount",
        "mount Google Drive, or find and repair the mount that is there",
        (
            Option("path", "where; by default where it is, else /content/drive", None, is_positional=True),
            Option("readonly", "refuse writes", False, "flag"),
            Option("timeout", "seconds for consent, and again for Drive", 120.0, "seconds"),
            Option("force", "mount anew what is alive, and what hangs, losing what is not sent", False, "flag"),
        ),
    ),
    Verb(
        "unmount",
        "send all writes and take the Drive mount away",
        (
            _ON_MOUNT,
            Option("timeout", "seconds for sending writes", 600.0, "seconds"),
            Option("force", "at once, also if it is dead, hangs or has not sent everything", False, "flag"),
            _SECONDS_SHOWN,
        ),
    ),
    Verb(
        "flush",
        "send all writes of the Drive mount",
        (_ON_MOUNT, Option("timeout", "seconds for sending writes", 600.0, "seconds"), _SECONDS_SHOWN),
    ),
    Verb(
        "clear_cache",
        "clear what the Drive mount keeps near, by its exact type",
        (
            _ON_MOUNT,
            Option("dry_run", "change nothing; show what would be freed and lost", False, "flag"),
            Option("timeout", "seconds for sending writes, and for each further step", 600.0, "seconds"),
            Option("force", "clear also what has not been sent, which is then lost", False, "flag"),
            _SECONDS_SHOWN,
        ),
    ),
    Verb(
        "fetch",
        "download a Drive file or folder, an https address or a bucket's files",
        (
            Option("source", "a Drive id or share link, https://, or gs:// s3:// hf:// through fsspec"),
            Option("to", "a folder, or the path of the file", ".", is_positional=True),
            Option("digest", "what it has to be, as in sha256:9f86d0...", None),
            Option("timeout", "seconds without progress before a try counts as failed", 60.0, "seconds"),
            Option("cookies", "use the cookies that gdown keeps", False, "flag"),
            Option("overwrite", "replace what is at the path", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "probe",
        "measure what a folder's mount can do: opening, listing, small files, large files",
        (
            Option("path", "a folder or a file"),
            Option("seconds", "how long it may take", 8.0, "seconds"),
            _PROGRESS,
        ),
        function="read_probe",
    ),
    Verb(
        "stage",
        "bring a folder, an archive, a file, a table's files, an address or a bucket's folder near",
        (
            Option("source", "any of these, also drive:PATH, or samples:digits"),
            Option("to", "auto, tmpfs, disk, or the path of the copy", "auto"),
            _THREADS,
            Option("verify", "size compares byte counts, full reads the source twice", "size"),
            Option("extract", "extract an archive", True, "flag"),
            Option("refresh", "look for changes although a near copy is there, and copy them", False, "flag"),
            Option("dry_run", "only plan, and show the plan", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "unstage",
        "remove a near copy, or what an interrupted stage left, and give its space back",
        (Option("path", "what stage returned, or the source that was staged"),),
    ),
    Verb(
        "publish",
        "bring a finished file or folder to a slow mount, whole or not at all",
        (
            Option("path", "a file, as a pack, or a folder"),
            Option("to", "an existing folder, or the final path, as in drive:packs/"),
            Option("verify", "full reads back what was written, size compares byte counts", "full"),
            _PROGRESS,
        ),
    ),
    Verb(
        "pack",
        "pack files or records into one sealed HDF5 file",
        (
            Option(
                "source",
                "a folder, an archive, a table, a bucket's folder, an LMDB, WebDataset or TFRecord shards, also "
                "drive:PATH, or samples:digits",
            ),
            Option("out", "the pack's path, as in birds.h5"),
            *_PACKED,
            Option("shard_bytes", "write several files of about this size, as in 256MiB", None, "bytes"),
            Option("executor", "packs one shard a task: a variable, in a terminal FILE.py:NAME", None, "object"),
            _THREADS,
            Option("resume", "take over whole shards that an interrupted run left", True, "flag"),
            Option("overwrite", "replace what is at the pack's path", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "prepare",
        "get a near pack by the shortest way: the one that is near, the one saved on Drive, or a new one",
        (
            Option("source", "as of pack, also an address"),
            *_PACKED,
            Option("save_to", "the folder that keeps packs, or none", "drive:colabkit", "folder"),
            _THREADS,
            Option("refresh", "pack anew, whatever is there", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "verify",
        "check every byte of a pack or a near copy against its digests",
        (Option("path", "the pack, or what stage returned"), _PROGRESS),
    ),
    Verb(
        "train",
        "train with prefetching, checkpoints and resume",
        (
            Option("step", "takes a batch, returns a loss: a variable, in a terminal FILE.py:NAME", kind="object"),
            Option("loader", "the Loader: a variable, in a terminal FILE.py:NAME", kind="object"),
            Option("epochs", "how many in all", 1, "number"),
            Option(
                "state",
                "what checkpoints hold, as in: model optimizer; else what the usual step trains",
                None,
                "objects",
            ),
            Option("save_to", "folder of the checkpoints, on Drive as well", None),
            Option("save_every", "steps between two checkpoints, a duration as 5min, or epoch", "epoch", "steps"),
            Option("keep_last", "how many of the newest checkpoints stay, beside the best", 2, "number"),
            Option("resume", "go on after the newest checkpoint", True, "flag"),
            Option("validate", "returns a dict of numbers, or a Loader that the usual step evaluates", None, "object"),
            Option("validate_every", "steps between two validations, or epoch", "epoch", "steps"),
            Option("monitor", "which number says what checkpoint is best; else the loss", None),
            Option("mode", "whether the lowest or the highest is best: min or max", "min"),
            Option("deadline", "when the runtime ends, from now, as in 11h30min", None),
            Option("on_step", "called after each step with its record", None, "object"),
        ),
    ),
    Verb(
        "demo",
        "show the whole way on real images, from a slow drive to a trained network, with figures measured on the spot",
        (
            Option("data", "a folder or zip archive with one folder a class; else handwritten digits", None),
            Option("epochs", "how many", 3, "number"),
            Option("size", "height and width to bring images to, as in 32; else the images' own, or 64", None, "size"),
            Option("latency", "seconds that the simulated slow drive takes to open a file", 0.02, "seconds"),
            Option("keep", "folder for near copy, pack and checkpoints; else they are removed", None),
            Option("progress", "tell what is done, with a live panel", True, "flag"),
        ),
        is_magic=False,
    ),
)


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        known = [action.option_strings[0] if action.option_strings else action.dest for action in self._actions]
        needed = f"its arguments are {', '.join(known)}"
        raise InvalidOption(cannot(f"run {self.prog}", message, needed, f"See {self.prog} --help"))


def parser_of(verb: Verb, prog: str, make: Callable[..., argparse.ArgumentParser] = _Parser) -> argparse.ArgumentParser:
    """Return the parser of a verb's options; unsuited arguments raise `InvalidOption`.

    Args:
        verb: whose options.
        prog: the name in usage lines, as in `"%stage"` or `"colabkit stage"`.
        make: makes an empty parser.
    """
    parser = make(prog=prog, description=_sentence(verb.help), allow_abbrev=False)
    kinds: Mapping[str, Callable[[str], Any]] = {
        "text": str,
        "number": _kind(int, "a whole number"),
        "seconds": _kind(float, "a number of seconds"),
        "threads": _kind(lambda text: text if text == "auto" else int(text), "auto or a whole number"),
        "steps": lambda text: int(text) if text.lstrip("-").isdecimal() else text,
        "size": _kind(_size, "one number, or height x width as in 240x320"),
        "folder": _kind(lambda text: None if text.lower() == "none" else text, "a folder or none"),
        "labels": _kind(_labels, "a column, or several as in a,b,c"),
        "splits": _kind(_splits, "shares, as in train=0.8,test=0.2, or a column"),
        "fields": _kind(_fields, "columns, as in age,caption or Z=age"),
        "amount": _kind(lambda text: int(text) if text.isdecimal() else float(text), "a number"),
        "bytes": _kind(parse_bytes, "a number of bytes, as in 256MiB"),
        "object": str,
    }
    for kind, function in kinds.items():
        parser.register("type", kind, function)
    for option in verb.options:
        text = option.help.replace("%", "%%")
        flag = "--" + option.name.replace("_", "-")
        if option.is_required:
            parser.add_argument(option.name, type=option.kind, help=text)
        elif option.is_positional:
            parser.add_argument(option.name, type=option.kind, nargs="?", default=option.default, help=text)
        elif option.kind == "flag":
            parser.add_argument(
                flag,
                dest=option.name,
                action=argparse.BooleanOptionalAction,
                default=option.default,
                help=f"{text} (default: {'yes' if option.default else 'no'})",
            )
        elif option.kind == "objects":
            parser.add_argument(flag, dest=option.name, nargs="+", default=option.default, metavar="NAME", help=text)
        else:
            shown = "" if option.default is None else f" (default: {option.default})"
            parser.add_argument(
                flag,
                dest=option.name,
                type=option.kind,
                default=option.default,
                metavar=option.name.upper(),
                help=text + shown,
            )
    return parser


def arguments_of(verb: Verb, parsed: argparse.Namespace, look_up: Callable[[str], Any]) -> dict[str, Any]:
    """Return the keyword arguments for the verb's function.

    Args:
        verb: whose function.
        parsed: what its parser returned.
        look_up: turns the text of an `object` into the object.
    """
    values = {option.name: getattr(parsed, option.name) for option in verb.options}
    for option in verb.options:
        given = values[option.name]
        if option.kind == "object" and given is not None:
            values[option.name] = look_up(given)
        elif option.kind == "objects" and given is not None:
            values[option.name] = {name.rpartition(":")[2]: look_up(name) for name in given}
    return values


def look_up_in(namespace: Mapping[str, Any], name: str) -> Any:
    """Return a variable by name.

    Raises:
        InvalidOption: if there is none; near names are suggested.
    """
    if name in namespace:
        return namespace[name]
    near = difflib.get_close_matches(name, [key for key in namespace if not key.startswith("_")], n=2)
    hint = f"Did you mean {' or '.join(near)}" if near else "Define it first"
    raise InvalidOption(cannot(f"use {name!r}", "no variable of this name", "one that is defined", hint))


def _kind(parse: Callable[[str], Any], needed: str) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {needed}") from error

    return parsed


def _size(text: str) -> int | tuple[int, int]:
    height, cross, width = text.partition("x")
    return (int(height), int(width)) if cross else int(text)


def _labels(text: str) -> str | list[str] | None:
    if text == "none":
        return None
    return [name.strip() for name in text.split(",")] if "," in text else text


def _fields(text: str) -> dict[str, str] | None:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return {name.strip(): (column or name).strip() for name, _, column in pairs} or None


def _splits(text: str) -> dict[str, float] | str | None:
    if not text:
        return None
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    return {name.strip(): float(share) for name, _, share in pairs}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
