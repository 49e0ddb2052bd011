"""The command `colabkit`, which runs the verbs of the magics in a terminal.

The exit status is 0 on success. It is 1 after an error of colabkit or in the user's file, if the report is not good (a
damaged pack, an interrupted training run, a loader that `doctor` finds too slow), or if standard output is closed or
its disk is full. It is 2 for invalid arguments, and 130 after Ctrl-C. An error is one line on standard error, after the
traceback if the user's file failed. With `--json`, standard output is one JSON object: the report, or
`{"error": {...}}`; what the user's file prints goes to standard error.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO

import colabkit
from colabkit.foundation import (
    ColabkitError,
    InvalidOption,
    OneLineError,
    SourceMissing,
    cannot,
    finite,
    option,
    printable,
    speaking,
)
from colabkit.notebook.options import (
    LineWords,
    arguments_of,
    list_verbs,
    look_up_in,
    parser_of,
    run_verb,
    speak,
    verb_named,
)
from colabkit.notebook.shell_completion import COMPLETION, completion_script
from colabkit.notebook.verb_types import Verb
from colabkit.notebook.verbs import COMMANDS

_HELP = """usage: colabkit VERB [OPTIONS]

Stage training data to local storage, pack it into one file, and train on it.

{verbs}

See colabkit VERB --help for the options of a verb. colabkit --version prints
the version.

Exit status: 0 on success, 1 after an error or if the report is not good,
2 for invalid arguments, 130 after Ctrl-C."""

_VERBS = (*COMMANDS, COMPLETION)
_PREFIX = "colabkit "
"""The text before a verb in a command."""

_loaded: set[str] = set()
"""Paths of the user's files that were executed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    name, *words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        return _printed(_HELP.format(verbs=list_verbs(_VERBS)))
    if name == "--version":
        return _printed(f"colabkit {colabkit.__version__}")
    is_json = "--json" in (name, *(words[: words.index("--")] if "--" in words else words))
    verb: Verb | None = None
    try:
        if name.startswith("-"):
            similar = difflib.get_close_matches(name, ("--help", "--version"), n=1, cutoff=0.75)
            found = f"there is no option {name}" if similar else f"{name!r} comes before the verb"
            next_step = f"Use {similar[0]}" if similar else f"Write {name} after the verb, or see colabkit --help"
            raise InvalidOption(cannot("run colabkit", found, "", next_step))
        verb = verb_named(name.replace("-", "_"), _VERBS, "colabkit")
        parsed = _parser_of(verb).parse_args(words)
        if verb is COMPLETION:
            return _printed(completion_script(parsed.shell, _VERBS))
        if verb.name == "dashboard" and parsed.attach is None:
            next_step = "Name the folder of a run, for example --attach runs/digits"
            raise InvalidOption(cannot("show the panel", (option("attach"), " is missing"), "", next_step))
        if is_json and hasattr(parsed, "progress"):
            parsed.progress = False
        to_stderr = redirect_stdout(sys.stderr) if is_json else nullcontext()
        with to_stderr, speaking(LineWords(verb, _PREFIX)), _panel_shown(verb):
            report = run_verb(verb, arguments_of(verb, parsed, _look_up))
    except ColabkitError as error:
        is_of_line = isinstance(error, InvalidOption) and _of_the_user(error.__traceback__) is None
        return _failed(error, verb, is_json, status=2 if is_of_line else 1)
    except KeyboardInterrupt as error:
        return _failed(error, verb, is_json, status=130)
    except SystemExit as error:
        if _of_the_user(error.__traceback__) is None:
            raise
        return _failed(error, verb, is_json, status=_status_of(error))
    except Exception as error:
        trace = _of_the_user(error.__traceback__)
        is_unread = isinstance(error, SyntaxError) and error.filename in _loaded
        if trace is None and not is_unread:
            _print_error({"type": type(error).__name__, "message": str(error)}, is_json)
            raise
        _print("".join(traceback.format_exception(type(error), error, trace)).rstrip(), sys.stderr)
        return _failed(error, verb, is_json, status=1)
    speak(report, LineWords(verb, _PREFIX))
    is_read = not _printed(json.dumps(finite(report.to_dict()), indent=2) if is_json else str(report))
    return 0 if report.is_good and is_read else 1


def _parser_of(verb: Verb) -> argparse.ArgumentParser:
    parser = parser_of(verb, f"{_PREFIX}{verb.name}")
    if verb is not COMPLETION:
        parser.add_argument("--json", action="store_true", help="print the report, or the error, as JSON")
    return parser


def _printed(text: str) -> int:
    """Print text; return 0, or 1 if standard output is closed, its reader has ended, or its disk is full."""
    try:
        _print(text, sys.stdout)
    except OSError as error:
        # Without this, Python would flush standard output again at exit and print an error.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            _print(f"colabkit: Cannot write the output: {error.strerror}.", sys.stderr)
        return 1
    return int(sys.stdout is None)


def _print(text: str, stream: TextIO | None) -> None:
    if stream is not None:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def _failed(error: BaseException, verb: Verb | None, is_json: bool, status: int) -> int:
    fields: dict[str, Any]
    if isinstance(error, OneLineError):
        # Name Python arguments in the message only if the user's file made the call.
        if verb is not None and _of_the_user(error.__traceback__) is None:
            error.words = LineWords(verb, _PREFIX)
        fields = error.to_dict()
    else:
        fields = _fields_of(error)
    _print(f"colabkit: {printable(fields['message'])}", sys.stderr)
    _print_error(fields, is_json)
    return status


def _status_of(error: SystemExit) -> int:
    """Return the exit status for a file that ends the program, so that its verb did nothing: never 0."""
    return error.code if isinstance(error.code, int) and error.code else 1


def _print_error(fields: dict[str, Any], is_json: bool) -> None:
    if is_json:
        _printed(json.dumps({"error": fields}, indent=2))


def _fields_of(error: BaseException) -> dict[str, Any]:
    kind = type(error).__name__
    text = "interrupted" if isinstance(error, KeyboardInterrupt) else f"your file failed: {kind}: {error}"
    if isinstance(error, SystemExit):
        text = f"your file ended the program{f': {error}' if error.code else ''}"
    return {"type": kind, "message": text}


@contextmanager
def _panel_shown(verb: Verb) -> Iterator[None]:
    """Show the panel during training in the block, in one process of a distributed run."""
    if verb.name not in ("train", "k_fold") or os.environ.get("RANK", "0") != "0":
        yield
        return
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
    file, colon, name = reference.rpartition(":")
    if not (file and name):
        found = f"the name of the {'variable' if file else 'file'} is missing" if colon else "it contains no ':'"
        example = reference if reference.isidentifier() else "loader"
        example = f"{reference}:loader" if reference.endswith(".py") else f"train.py:{example}"
        next_step = f"Name the file and the variable, for example {example}"
        raise InvalidOption(cannot(f"use {reference!r}", found, "FILE.py:NAME", next_step))
    return look_up_in(vars(_module(os.path.abspath(file))), name, kind)


@cache
def _module(file: str) -> ModuleType:
    path = Path(file)
    spec = importlib.util.spec_from_file_location(_module_name(path), path)
    if not path.is_file() or spec is None or spec.loader is None:
        next_step = f"Use {file}.py" if os.path.isfile(f"{file}.py") else "Check the path"
        raise SourceMissing(cannot(f"use {file!r}", "there is no such Python file", "", next_step))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _loaded.add(file)
    if (folder := str(path.parent)) not in sys.path:
        # Let the file import modules next to it, as `python FILE.py` does.
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module


def _module_name(path: Path) -> str:
    """Return the module name for a file: its stem if worker processes would import the same file by that name."""
    if path.stem.isidentifier() and path.stem not in sys.modules:
        found = importlib.util.find_spec(path.stem)
        if found is None or found.origin == str(path):
            return path.stem
    return f"colabkit_file_{path.stem}"


if __name__ == "__main__":
    sys.exit(main())
