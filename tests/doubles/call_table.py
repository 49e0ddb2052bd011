"""The table of all public calls: in Python, as a magic and as a command, with their arguments and defaults.

`python tests/doubles/call_table.py` writes the table to `docs/reference/calls.md`. Python's arguments are read from the
signatures, those of magics and commands from their parsers. Intended differences between them are listed here with
reasons; a test checks that there are no others.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import colabkit
from colabkit.notebook.lines import line_parser
from colabkit.notebook.options import parser_of
from colabkit.notebook.verbs import CELLS, COMMANDS, LINES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "calls.md"
REQUIRED = "required"

ONLY_PYTHON = {
    "FileDataset": "Code uses the object.",
    "Loader": "Code uses the object. `%%train` creates one, and `colabkit train` takes one from your file.",
    "Mixture": "Code uses the object.",
    "load_ipython_extension": "IPython calls it for `%load_ext colabkit`.",
    "log_to": "It is a `with` block around code.",
    "notebook_launch": "It calls a function of your code in several processes. In a terminal, use `torchrun`.",
    "open_pack": "Code uses the object.",
    "predict": "It returns a tensor for code.",
    "small_network": "It returns a model for code.",
    "supervised_step": "It returns a training step for code.",
    "unload_ipython_extension": "IPython calls it for `%unload_ext colabkit`.",
    "watch": "It wraps the loader in the `for` statement of your loop.",
}
"""The calls outside of `NAMESPACES` that are neither a magic nor a command."""

NO_COMMAND = {
    "launch": "The form has buttons, so it needs a notebook.",
}
"""The magics that are not commands."""

OTHER_ARGUMENTS = {
    **{(form, "layout"): "It applies to arrays, which a line cannot contain." for form in ("%pack", "colabkit pack")},
    **{(form, "apply"): "In Python, it is a method of the diagnosis." for form in ("%doctor", "colabkit doctor")},
    **{
        (form, "start"): "Only code can use a pack that is still being packed."
        for form in ("%prepare", "colabkit prepare")
    },
    ("%dashboard", "off"): "A magic has no `with` block that ends.",
    ("%%dashboard", "attach"): "The cell is the loop that is shown.",
    ("%%train", "step"): "The cell is the step.",
    ("%%train", "loader"): "The magic takes a pack or a dataset, and creates the Loader; it also takes a Loader.",
    ("%%train", "on_step"): "The cell runs at each step.",
    ("%%train", "on_checkpoint"): "A cell cannot contain this function; call `colabkit.train` instead.",
    ("%%train", "pack"): "It replaces `loader`.",
    ("%%train", "split"): "The split of the pack.",
    ("%%train", "batch_size"): "For the Loader, where it is required.",
    ("%%train", "shuffle"): "For the Loader, where it is `False`, since it also serves evaluation.",
    **dict.fromkeys((("%%train", name) for name in ("seed", "device", "transform")), "For the Loader."),
}
"""The arguments that only some forms of a call have."""

NAMESPACES = ("augment", "sampler")


def calls() -> dict[str, Callable[..., object]]:
    """Return the public functions and the classes that users instantiate, by name."""
    found = {name: getattr(colabkit, name) for name in colabkit.__all__}
    found = {name: one for name, one in found.items() if inspect.isfunction(one) or name in ONLY_PYTHON}
    for space in NAMESPACES:
        module = getattr(colabkit, space)
        found |= {f"{space}.{name}": getattr(module, name) for name in module.__all__}
    return {name: one for name, one in found.items() if not _is_interface(one)}


def _is_interface(one: object) -> bool:
    """Return whether a call is a protocol or an abstract class."""
    return inspect.isabstract(one) or bool(getattr(one, "_is_protocol", False))


def in_python(function: Callable[..., object]) -> dict[str, object]:
    """Return the default of each argument of a call, or `REQUIRED`, by name."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: REQUIRED if one.default is inspect.Parameter.empty else one.default for one in parameters}


def in_line(parser: argparse.ArgumentParser) -> dict[str, tuple[str, object]]:
    """Return the flag or placeholder and the default of each argument of a line, by name, without `--help`."""
    return {
        one.dest: (
            one.option_strings[0] if one.option_strings else one.dest.upper(),
            one.default if one.option_strings or one.nargs == "?" else REQUIRED,
        )
        for one in parser._actions
        if one.dest != "help"
    }


@functools.cache
def lines() -> dict[str, dict[str, tuple[str, object]]]:
    """Return the arguments of all magics and commands, by call, such as `%stage` and `colabkit stage`."""
    return {
        **{f"%{verb.name}": in_line(line_parser(verb, verb.name)) for verb in LINES},
        **{f"%%{verb.name}": in_line(line_parser(verb, verb.name)) for verb in CELLS},
        **{f"colabkit {verb.name}": in_line(parser_of(verb, verb.name)) for verb in COMMANDS},
    }


def forms_of(name: str) -> list[str]:
    """Return the magics and commands that are forms of a public call."""
    return [form for form in (f"%{name}", f"%%{name}", f"colabkit {name}") if form in lines()]


def _signature(name: str, arguments: Mapping[str, object], function: Callable[..., object]) -> str:
    kinds = inspect.signature(function).parameters
    words = []
    for one, default in arguments.items():
        kind = kinds[one].kind
        if kind is inspect.Parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        star = "*" * (kind is inspect.Parameter.VAR_POSITIONAL)
        words.append(f"{star}{one}" if default is REQUIRED else f"{one}={_shown(default)}")
    return f"`{name}({', '.join(words)})`"


def _shown(default: object) -> str:
    return getattr(default, "__name__", None) or repr(default)


def _in_cell(argument: tuple[str, object] | None) -> str:
    if argument is None:
        return "-"
    words, default = argument
    shown = f"`{words}`"
    return shown if default is REQUIRED or default is None else f"{shown}, default `{_shown(default)}`"


def _sections() -> Iterator[str]:
    found, by_form = calls(), lines()
    for verb in dict.fromkeys(verb.name for verb in (*LINES, *COMMANDS)):
        forms = forms_of(verb)
        arguments = in_python(found[verb])
        names = dict.fromkeys([*arguments, *(name for form in forms for name in by_form[form])])
        yield f"\n### {verb}\n"
        if not names:
            yield f"`colabkit.{verb}()`, {', '.join(f'`{form}`' for form in forms)}: no arguments."
            continue
        yield f"| argument | `colabkit.{verb}()` | {' | '.join(f'`{form}`' for form in forms)} |"
        yield "|---" * (2 + len(forms)) + "|"
        for name in names:
            default = "-" if name not in arguments else "required" if arguments[name] is REQUIRED else ""
            python = default or f"`{name}={_shown(arguments[name])}`"
            yield f"| {name} | {python} | {' | '.join(_in_cell(by_form[form].get(name)) for form in forms)} |"


def table() -> str:
    found = calls()
    rows = [_HEAD, *_sections(), _DIFFERENCES]
    rows += [f"| `{form}` | {name} | {reason} |" for (form, name), reason in OTHER_ARGUMENTS.items()]
    rows += [f"| no `colabkit {name}` | | {reason} |" for name, reason in NO_COMMAND.items()]
    rows.append(_PYTHON)
    for name, function in found.items():
        if not forms_of(name):
            reason = ONLY_PYTHON.get(name, "Code uses the object.")
            rows.append(f"| {_signature(name, in_python(function), function)} | {reason} |")
    return "\n".join(rows) + "\n"


_HEAD = """# Public calls

A verb has the same name, the same arguments and the same defaults as a Python function, as a magic in a notebook and as
a command in a terminal. An argument of a function is an option of a line: `batch_size=64` is `--batch-size 64`, and
`resume=False` is `--no-resume`. Arguments without a flag are given by position. Every command but
`completion` also has `--json`. `%colabkit` is the only short form; it stands for `%launch`.

`python tests/doubles/call_table.py` writes this page from the source, and a test compares it.

## Verbs"""

_DIFFERENCES = """
## Differences between the forms

| form | argument | reason |
|---|---|---|"""

_PYTHON = """
## Only in Python

Names are those in `colabkit`. The classes of reports and data, which functions return, are not listed.

| call | why it is only in Python |
|---|---|"""


if __name__ == "__main__":
    PAGE.write_text(table())
    sys.stdout.write(f"{len(calls())} calls in {PAGE}\n")
