"""The command `colabkit`, which runs the verbs of the magics in a terminal.

The exit status is 0 on success. It is 1 after an error of colabkit or in the user's file, if the report is not good (a
damaged pack, an interrupted training run, a loader that `doctor` finds too slow), or if standard output is closed. It
is 2 for invalid arguments, and 130 after Ctrl-C. An error is one line on standard error, after the traceback if the
user's file failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import colabkit
from colabkit.foundation import ColabkitError, InvalidOption, OneLineError, SourceMissing, cannot, printable
from colabkit.notebook.options import LineWords, VerbParser, arguments_of, look_up_in, parser_of, speak
from colabkit.notebook.verbs import VERBS, Verb

_STATUS = (
    "Exit status: 0 on success, 1 after an error or if the report is not good, 2 for invalid arguments, 130 after "
    "Ctrl-C."
)

_PREFIX = "colabkit "
"""The words before a verb in a command."""

_loaded: set[str] = set()
"""Paths of the user's files that were executed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    about = "Stage training data to local storage, pack it into one file, and train on it."
    parser = argparse.ArgumentParser(prog="colabkit", description=about, epilog=_STATUS)
    parser.add_argument("--version", action="version", version=f"colabkit {colabkit.__version__}")
    commands = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=VerbParser)
    for verb in VERBS:

        def make(**options: Any) -> argparse.ArgumentParser:
            aliases = [verb.name.replace("_", "-")] if "_" in verb.name else []  # noqa: B023 - called in this iteration
            return commands.add_parser(verb.name, help=verb.help, aliases=aliases, **options)  # noqa: B023

        command = parser_of(verb, f"colabkit {verb.name}", make)
        command.add_argument("--json", action="store_true", help="print the report as JSON")
    parsed = parser.parse_args(arguments)
    verb = next(verb for verb in VERBS if verb.name == parsed.verb.replace("-", "_"))
    try:
        if parsed.json and hasattr(parsed, "progress"):
            parsed.progress = False
        with _panel() if verb.name == "train" and sys.stdout.isatty() and not parsed.json else nullcontext():
            report = getattr(colabkit, verb.call)(**arguments_of(verb, parsed, _look_up))
    except ColabkitError as error:
        return _failed(_message(error, verb))
    except KeyboardInterrupt as interrupt:
        _failed(_message(interrupt, verb) if isinstance(interrupt, OneLineError) else "interrupted")
        return 130
    except Exception as error:
        trace = _of_the_user(error.__traceback__)
        is_unread = isinstance(error, SyntaxError) and error.filename in _loaded
        if trace is None and not is_unread:
            raise
        print("".join(traceback.format_exception(type(error), error, trace)), end="", file=sys.stderr)
        return _failed(f"your file failed: {type(error).__name__}: {printable(error)}")
    speak(report, verb, LineWords(verb, _PREFIX))
    is_read = _printed(json.dumps(report.to_dict(), indent=2) if parsed.json else str(report))
    return 0 if report.is_good and is_read else 1


def _printed(text: str) -> bool:
    """Print a report in the terminal's encoding; return False if the reading program, such as `head`, has ended."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # Python flushes standard output again at exit, and would print an error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return False
    return True


def _message(error: OneLineError, verb: Verb) -> str:
    """Return the message of an error; it names Python arguments only if the user's file made the call."""
    if _of_the_user(error.__traceback__) is None:
        error.words = LineWords(verb, _PREFIX)
    return printable(error)


def _failed(message: str) -> int:
    print(f"colabkit: {message}", file=sys.stderr)
    return 1


@contextmanager
def _panel() -> Iterator[None]:
    """Show the live panel during training in the block."""
    from colabkit.monitoring import show_beside_training

    end = show_beside_training()
    try:
        yield
    finally:
        end()


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback, starting at the first frame in one of the user's files, or None without such a frame."""
    while trace is not None and trace.tb_frame.f_code.co_filename not in _loaded:
        trace = trace.tb_next
    return trace


def _look_up(reference: str, kind: str) -> Any:
    """Return the object that `FILE.py:NAME` names."""
    file, colon, name = reference.rpartition(":")
    if not colon:
        next_step = "Name the file and the variable, for example train.py:loader"
        raise InvalidOption(cannot(f"use {reference!r}", "it contains no ':'", "FILE.py:NAME", next_step))
    return look_up_in(vars(_module(os.path.abspath(file))), name, kind)


@cache
def _module(file: str) -> ModuleType:
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"colabkit_file_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise SourceMissing(cannot(f"use {file!r}", "there is no such Python file", "", "Check the path"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _loaded.add(file)
    if (folder := str(path.parent)) not in sys.path:
        # Like `python FILE.py`, so that the file can import modules next to it.
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
