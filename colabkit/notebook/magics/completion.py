"""What may follow in a magic's line: options, values with a meaning of their own, variables, paths."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from colabkit.foundation import ColabkitError, processes, user_path
from colabkit.notebook.magics.lines import begun_word, quoted
from colabkit.notebook.options.verbs import CELLS, LINES, Option, Verb

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_LIST_S = 2.0
_MOST = "200"  # no front end shows more
_SHORT_NAME = "drive:"
_PATHS = ("path", "folder", "data", "subject")
_VARIABLES = ("object", "objects", "data", "subject")
# A child asks: a mount whose program hangs keeps every process that touches it.
_LISTED = """
import itertools, json, os, sys
folder, start, most = sys.argv[1:]
with os.scandir(folder) as entries:
    found = (entry for entry in entries if entry.name.startswith(start) and (start or entry.name[0] != "."))
    names = [entry.name + "/" * entry.is_dir() for entry in itertools.islice(found, int(most))]
print(json.dumps(sorted(names)))
"""


def complete_lines(shell: InteractiveShell, magics: Iterable[str]) -> Callable[[], None]:
    """Complete the lines of some magics, as in `%stage`, from now on; return the function that ends this.

    They are completed at the start of a line and behind `name =`.
    """
    names = "|".join(sorted(map(re.escape, magics), key=len, reverse=True))
    begin = re.compile(rf"\s*(?:[\w.]+\s*=\s*)?(?P<magic>{names})\s+(?P<rest>.*)", re.DOTALL)

    def complete(shell: InteractiveShell, event: Any) -> list[str]:
        found = begin.fullmatch(event.text_until_cursor)
        return following(shell, found["magic"], found["rest"], event.symbol) if found else []

    shell.set_hook("complete_command", complete, re_key=begin.pattern)
    # IPython compiles the pattern anew, and has no way to take a hook back.
    dispatcher = shell.strdispatchers["complete_command"]
    key = re.compile(begin.pattern)

    def forget() -> None:
        dispatcher.regexs.pop(key, None)

    return forget


def following(shell: InteractiveShell, magic: str, rest: str, symbol: str) -> list[str]:
    """Return what may stand for the end of a line that has been typed so far.

    Args:
        shell: whose variables are offered.
        magic: with its per cent signs.
        rest: of the line up to the cursor.
        symbol: the end of it that is replaced; IPython parts words at more characters than spaces.
    """
    words, begun = begun_word(rest)
    verb: Verb | None
    if magic == "%colabkit":
        if not words:
            return _fitting([verb.name for verb in LINES], begun, symbol)
        verb = next((verb for verb in LINES if verb.name == words[0]), None)
        del words[0]
    else:
        of = CELLS if magic.startswith("%%") else LINES
        verb = next(verb for verb in of if verb.name == magic.lstrip("%"))
    if verb is None:
        return []
    option, typed = _option_at(verb, words, begun)
    if option is None:
        return _fitting(_flags(verb), begun, symbol) if begun.startswith("-") else []
    found = [*option.words, *(_variables(shell.user_ns, shell) if option.kind in _VARIABLES else ())]
    offered = _fitting(found, typed, symbol)
    if option.kind in _PATHS:
        offered += _fitting(_listed(_plain(typed)), typed, symbol)
        # With nothing to offer IPython would look for files itself, in this process, which a dead mount would keep.
        return offered or [symbol]
    return offered


def _option_at(verb: Verb, words: list[str], begun: str) -> tuple[Option | None, str]:
    """Return the option whose value stands at the end of a line, None for the name of one; and what there is of it."""
    places = [option for option in verb.options if not option.flag]
    by_flag = {option.flag: option for option in verb.options if option.flag}
    valued: Option | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            option = by_flag.get(name)
            valued = option if option and not equals and option.kind not in ("flag", "switch") else None
        elif valued is None:
            del places[:1]
        elif valued.kind != "objects":
            valued = None
    if begun.startswith("-") and (valued is None or valued.kind == "objects"):
        name, equals, value = begun.partition("=")
        return (by_flag.get(name), value) if equals else (None, begun)
    if valued is None:
        valued = places[0] if places else None
    return valued, begun


def _flags(verb: Verb) -> Iterator[str]:
    yield "--help"
    for option in verb.options:
        if option.flag:
            yield option.flag
        if option.kind == "flag":
            yield option.flag.replace("--", "--no-", 1)


def _variables(namespace: Mapping[str, Any], shell: InteractiveShell) -> list[str]:
    """Return the names that the user has given."""
    own = namespace.keys() - shell.user_ns_hidden.keys()
    return sorted(name for name in own if name[0] != "_" and not isinstance(namespace[name], ModuleType))


def _plain(typed: str) -> str:
    """Return what has been typed of a word without its quotes."""
    if typed.startswith('"'):
        return re.sub(r"\\(.)", r"\1", typed[1:])
    return typed[1:] if typed.startswith("'") else re.sub(r"\\(.)", r"\1", typed)


def _listed(path: str) -> list[str]:
    """Return what lies in a path's folder and begins as its name does; nothing where that cannot be told in time."""
    folder, slash, start = path.rpartition("/")
    shown = folder + slash
    if not slash and path.startswith(_SHORT_NAME):
        shown, start = _SHORT_NAME, path.removeprefix(_SHORT_NAME)
    try:
        place = os.path.abspath(user_path(shown or ".", "list a folder"))
        told = processes.run(processes.python(_LISTED, place, start, _MOST), "list a folder", _LIST_S)
        names: list[str] = json.loads(told.output) if told.status == 0 else []
    except (ColabkitError, OSError, ValueError):
        return []
    return [shown + name for name in names]


def _fitting(found: Iterable[str], typed: str, symbol: str) -> list[str]:
    """Return of the words that go on from what has been typed the ends that take the place of `symbol`."""
    whole = (quoted(word, typed) for word in found)
    return [word[len(typed) - len(symbol) :] for word in whole if word is not None and word.startswith(typed)]
