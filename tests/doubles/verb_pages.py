"""The reference of the verbs, from their table and their docstrings: a page for each, and a table of all.

mkdocs uses this file as a hook, which adds the pages, and lists them in the navigation in the groups of
`colabkit --help`. Every page has the forms of the verb, a table of its options, and the documentation of the function.

    python tests/doubles/verb_pages.py

This prints the table of all verbs, to insert between the marks in docs/reference/index.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Set the path, because mkdocs may load this file without colabkit installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

from colabkit.notebook.options import GROUPS
from colabkit.notebook.verb_types import Option, Verb
from colabkit.notebook.verbs import CELLS, VERBS

FOLDER = "reference/verbs"
SECTION = "Magics, commands and functions"


def verb_pages() -> dict[str, str]:
    """Return the Markdown of the page of each verb, by name."""
    names = dict.fromkeys(verb.name for verb in VERBS)
    return {name: _page([verb for verb in VERBS if verb.name == name], _cell(name)) for name in names}


def verbs_table() -> str:
    """Return the table of all verbs as Markdown: calls, descriptions and options."""
    lines = ["| | does | options |", "|---|---|---|"]
    lines += [_row("%" if verb.is_magic else "colabkit ", verb) for verb in VERBS]
    lines += [_row("%%", verb) for verb in CELLS]
    return "\n".join(lines)


def _row(mark: str, verb: Verb) -> str:
    words = [_word(option) for option in verb.options if not option.flag]
    flags = " ".join(f"`{option.flag}`" for option in verb.options if option.flag)
    return f"| `{mark}{' '.join([verb.name, *words])}` | {verb.help} | {flags} |"


def verb_groups() -> dict[str, list[str]]:
    """Return the names of the verbs by heading, as `colabkit --help` groups them."""
    groups: dict[str, list[str]] = {}
    heading = ""
    for name in verb_pages():
        heading = GROUPS.get(name, heading)
        groups.setdefault(heading, []).append(name)
    return groups


def _cell(name: str) -> Verb | None:
    return next((verb for verb in CELLS if verb.name == name), None)


def _page(verbs: list[Verb], cell: Verb | None) -> str:
    first = verbs[0]
    lines = [f"# {first.name}", "", f"{first.help[:1].upper()}{first.help[1:]}.", ""]
    for verb in verbs:
        words = " ".join([verb.name, *(_word(option) for option in verb.options if not option.flag)])
        words += " [OPTIONS]" if any(option.flag for option in verb.options) else ""
        forms = [mark for mark, exists in (("%", verb.is_magic), ("colabkit ", verb.is_command)) if exists]
        lines += ["```text", *(f"{mark}{words}" for mark in forms), "```", ""]
        lines += _options(verb)
        lines += [f"{verb.more}\n"] if verb.more else []
    lines += ["## In Python", "", f"::: colabkit.{first.name}", "    options: {heading_level: 3}", ""]
    if cell is not None:
        lines += [f"## The cell magic `%%{cell.name}`", "", f"{cell.help[:1].upper()}{cell.help[1:]}.", ""]
        lines += [*_options(cell), *([cell.more, ""] if cell.more else [])]
    return "\n".join(lines)


def _word(option: Option) -> str:
    return option.name.upper() if option.is_required else f"[{option.name.upper()}]"


def _options(verb: Verb) -> list[str]:
    if not verb.options:
        return []
    rows = [
        f"| `{option.flag or option.name.upper()}` | {_text(option)} | {_default(option)} |" for option in verb.options
    ]
    return ["| option | meaning | default |", "|---|---|---|", *rows, ""]


def _text(option: Option) -> str:
    negative = f" (`{option.flag.replace('--', '--no-', 1)}` turns it off)" if option.default is True else ""
    return option.help.replace("|", "\\|") + negative


def _default(option: Option) -> str:
    if option.is_required:
        return "required"
    if isinstance(option.default, bool):
        return "yes" if option.default else "no"
    return "" if option.default is None else f"`{option.default}`"


def on_config(config: Any) -> None:
    """Add the pages to the navigation (called by mkdocs)."""
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    verbs = next(section[SECTION] for section in reference if isinstance(section, dict) and SECTION in section)
    verbs += [{heading: [{name: f"{FOLDER}/{name}.md"} for name in names]} for heading, names in verb_groups().items()]


def on_files(files: Any, config: Any) -> None:
    """Add the pages (called by mkdocs)."""
    from mkdocs.structure.files import File

    for name, text in verb_pages().items():
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=text))


if __name__ == "__main__":
    print(verbs_table())
