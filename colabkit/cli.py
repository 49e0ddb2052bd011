"""The command `colabkit`: the verbs of the magics in a terminal.

Exit status 0 when done, 1 after an error of colabkit, which is one line on standard error, and after `verify` of a
damaged pack, 2 for arguments that cannot be meant, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import colabkit
from colabkit.errors import ColabkitError, InvalidOption, SourceMissing, cannot
from colabkit.options import VERBS, arguments_of, look_up_in, parser_of

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="colabkit", description="Data near, packed and prefetched, for training.")
    parser.add_argument("--version", action="version", version=f"colabkit {colabkit.__version__}")
    commands = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:

        def make(**options: Any) -> argparse.ArgumentParser:
            aliases = [verb.name.replace("_", "-")] if "_" in verb.name else []  # noqa: B023 - called before the next turn
            return commands.add_parser(verb.name, help=verb.help, aliases=aliases, **options)  # noqa: B023

        command = parser_of(verb, f"colabkit {verb.name}", make)
        command.add_argument("--json", action="store_true", help="print the report as JSON")
    try:
        parsed = parser.parse_args(arguments)
        verb = next(verb for verb in VERBS if verb.name == parsed.verb.replace("-", "_"))
        if parsed.json and hasattr(parsed, "progress"):
            parsed.progress = False
        report = getattr(colabkit, verb.call)(**arguments_of(verb, parsed, _look_up))
    except ColabkitError as error:
        print(f"colabkit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"colabkit: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    print(json.dumps(report.to_dict(), indent=2) if parsed.json else str(report))
    return 0 if report.is_good else 1


def _look_up(reference: str) -> Any:
    """Return the object that `FILE.py:NAME` names."""
    file, colon, name = reference.rpartition(":")
    if not colon:
        raise InvalidOption(cannot(f"use {reference!r}", "no ':' in it", "FILE.py:NAME", "Name file and variable"))
    return look_up_in(vars(_module(file)), name)


@cache
def _module(file: str) -> ModuleType:
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"colabkit_file_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise SourceMissing(cannot(f"use {file!r}", "no such Python file", "FILE.py:NAME", "Check the path"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
