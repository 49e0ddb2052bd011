"""The README's table of magics and commands, generated from the table of options.

    python tests/doubles/readme_tables.py

prints the table to insert between the marks in the README.
"""

from __future__ import annotations

from colabkit.notebook.verb_types import Verb
from colabkit.notebook.verbs import CELLS, VERBS

__all__ = ["verbs_table"]


def verbs_table() -> str:
    """Return the table as Markdown: calls, descriptions and options."""
    lines = ["| | does | options |", "|---|---|---|"]
    lines += [_row("%" if verb.is_magic else "colabkit ", verb) for verb in VERBS]
    lines += [_row("%%", verb) for verb in CELLS]
    return "\n".join(lines)


def _usage(verb: Verb) -> str:
    words = [
        option.name.upper() if option.is_required else f"[{option.name.upper()}]"
        for option in verb.options
        if not option.flag
    ]
    return " ".join([verb.name, *words])


def _row(mark: str, verb: Verb) -> str:
    flags = " ".join(f"`{option.flag}`" for option in verb.options if option.flag)
    return f"| `{mark}{_usage(verb)}` | {verb.help} | {flags} |"


if __name__ == "__main__":
    print(verbs_table())
