"""Split, parse and complete the line of a magic.

IPython's variable expansion is off, so values are never split, nor taken for options, and an unknown variable is an
error. `{name}`, `{name.attribute}` and `$name` are replaced by the variable's value: as a whole word by any object, as
a part of a word by text, a number or a path. A word with quotes or a backslash is left unchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from numbers import Number
from pathlib import PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from colabkit.foundation import ColabkitError, InvalidOption, cannot, kind_of, processes, user_path
from colabkit.notebook.options import missing_variable, parser_of
from colabkit.notebook.verb_parser import VerbParser
from colabkit.notebook.verb_types import Option, Verb
from colabkit.notebook.verbs import CELLS, LINES

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_RAW_TOKEN = re.compile(r"""(?:\\.|[^\s"'\\]|"(?:\\.|[^"\\])*"|'[^']*')+|["'\\].*""", re.DOTALL)
_VARIABLE = re.compile(r"\{([\w.]+)\}|\$(\w+)")
_EXPRESSION = re.compile(r"\{([A-Za-z_]\w*)[^\w{}][^{}]*\}")
_FLAG = re.compile(r"(--[\w-]+)=(.+)", re.DOTALL)
_SPECIAL = re.compile(r"""([\s"'\\])""")

_LIST_S = 2.0
# Maximum number of paths that completion lists.
_MOST = 200
_SHORT_NAME = "drive:"
_PATHS = ("path", "folder", "data", "subject")
_VARIABLES = ("object", "objects", "data", "subject")
# Folders are listed in a child process, since a hung mount blocks every process that accesses it.
_LISTED = """
import itertools, json, os, re, sys
folder, start, files, most = sys.argv[1:]
def fits(entry):
    is_shown = entry.name.startswith(start) and (start or entry.name[0] != ".")
    return is_shown and (entry.is_dir() or re.search(files, entry.name, re.IGNORECASE))
with os.scandir(folder) as entries:
    found = filter(fits, entries)
    names = [entry.name + "/" * entry.is_dir() for entry in itertools.islice(found, int(most))]
print(json.dumps(sorted(names)))
"""


class DataWord(str):  # noqa: SLOT000 - it has an attribute
    """The value of a variable in a line; it is never parsed as an option.

    Attributes:
        value: the text of a value that a line can contain; otherwise the object itself.
    """

    value: Any

    def __new__(cls, value: Any) -> Self:
        """Return the word for a value; the text of an object is its kind, for messages."""
        is_text = isinstance(value, str | Number | PurePath)
        word = super().__new__(cls, value if is_text else kind_of(value))
        word.value = str(word) if is_text else value
        return word


def split_line(line: str, namespace: Mapping[str, Any]) -> list[str]:
    """Split a magic's line into words as a shell does, and replace `{name}` and `$name` by the variable's value.

    If `namespace` is empty, words that name variables are kept.

    Raises:
        InvalidOption: if a quote is open, a backslash ends the line, a variable or its attribute does not exist, or
            a part of a word names an object that has no text.
    """
    return [_word_of(raw, line, namespace) for raw in _raw_words(line)]


def split_typed_line(line: str) -> tuple[list[str], str]:
    """Return the complete words of a line, and the unfinished last one as typed (empty after a space)."""
    tokens = [match.group() for match in _RAW_TOKEN.finditer(line)]
    is_open = bool(tokens) and line.endswith(tokens[-1])
    last = tokens.pop() if is_open else ""
    return [_word_of(token, line, {}) for token in tokens], last


def quote_word(word: str, begun: str) -> str | None:
    """Quote a word like its typed start `begun`; return None if that kind of quote cannot represent the word."""
    if begun.startswith('"'):
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"')
    if begun.startswith("'"):
        return None if "'" in word else f"'{word}"
    escaped = _SPECIAL.sub(r"\\\1", word)
    return re.sub(r"[{$]", r"\\\g<0>", escaped, count=1) if _VARIABLE.search(word) else escaped


def _raw_words(line: str) -> Iterator[str]:
    """Yield the words of a line as typed; the option and the value of `--to={name}/run` are two words."""
    for raw in (match.group() for match in _RAW_TOKEN.finditer(line)):
        flag = _FLAG.fullmatch(raw)
        yield from flag.groups() if flag and _VARIABLE.search(flag[2]) and not _SPECIAL.search(flag[2]) else (raw,)


def _word_of(raw: str, line: str, namespace: Mapping[str, Any]) -> str:
    expression = _EXPRESSION.fullmatch(raw)
    if expression and expression[1] in namespace and not (_VARIABLE.fullmatch(raw) or os.path.lexists(raw)):
        found, expected = "braces contain an expression", "the name of a variable"
        next_step = "Assign the expression to a variable, for example value, and write {value}"
        raise InvalidOption(cannot(f"use {raw!r}", found, expected, next_step))
    if namespace and not _SPECIAL.search(raw):
        variable = _VARIABLE.fullmatch(raw)
        if variable and (variable[1] or variable[2]).partition(".")[0] in namespace:
            return DataWord(_value_of(variable, namespace))
        if _VARIABLE.search(raw) and not (variable and os.path.lexists(raw)):
            return DataWord(_VARIABLE.sub(partial(_text_of, raw, namespace), raw))
    try:
        return "".join(shlex.split(raw))
    except ValueError as error:
        found, next_step = "a quote is not closed", "Add the closing quote"
        if "escape" in str(error):
            found, next_step = "a backslash ends the line", "Remove the backslash, or write it twice"
        raise InvalidOption(cannot(f"read {line.strip()!r}", found, "", next_step)) from None


def _text_of(raw: str, namespace: Mapping[str, Any], variable: re.Match[str]) -> str:
    """Return a variable's value as text; text that cannot be a variable's name is returned as typed."""
    name = (variable[1] or variable[2]).partition(".")[0]
    if not name.isidentifier():
        return variable[0]
    if name not in namespace and variable[0] != raw:
        next_step = "Check its name, or quote the word if no variable is meant"
        raise InvalidOption(cannot(f"use {raw!r}", f"no variable is named {name!r}", "", next_step))
    word = DataWord(_value_of(variable, namespace))
    if not isinstance(word.value, str):
        found, next_step = f"{variable[0]} is {kind_of(word.value)}", "Quote the word if no variable is meant"
        raise InvalidOption(cannot(f"use {raw!r}", found, "text, a number or a path", next_step))
    return word


def _value_of(variable: re.Match[str], namespace: Mapping[str, Any]) -> Any:
    name, *attributes = (variable[1] or variable[2]).split(".")
    if name not in namespace:
        raise missing_variable(namespace, name)
    try:
        return reduce(getattr, attributes, namespace[name])
    except AttributeError as error:
        raise InvalidOption(cannot(f"use {variable[0]!r}", str(error), "", "Check the name of the attribute")) from None


class _LineParser(VerbParser):
    """A parser that never treats the value of a variable as an option, and never exits the kernel.

    A `DataWord` is parsed as a placeholder that is replaced where the value is read.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._data: dict[str, DataWord] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._data = {f"\0{at}\0": word for at, word in enumerate(args) if isinstance(word, DataWord)}
        words = [f"\0{at}\0" if isinstance(word, DataWord) else word for at, word in enumerate(args)]
        return super().parse_known_args(words, namespace)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        word = self._data.get(arg_string)
        value = arg_string if word is None else word.value
        return super()._get_value(action, value) if isinstance(value, str) else value

    def error(self, message: str) -> NoReturn:
        for stand_in, word in self._data.items():
            message = message.replace(stand_in, word)
        super().error(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Raise an error: argparse takes `-h` followed by other letters as a request for help and would exit."""
        self.error(message or "-h cannot be combined with other letters")


def line_parser(verb: Verb, prog: str) -> argparse.ArgumentParser:
    """Return the parser for a magic's line; `prog` is the name in usage lines, such as `"%stage"`."""
    return parser_of(verb, prog, _LineParser)


def complete_lines(shell: InteractiveShell, magics: Iterable[str]) -> Callable[[], None]:
    """Register completion for lines such as `%stage` or `name = %stage`; return a function that unregisters it."""
    names = "|".join(sorted(map(re.escape, magics), key=len, reverse=True))
    begin = re.compile(rf"\s*(?:[\w.]+\s*=\s*)?(?P<magic>{names})\s+(?P<rest>.*)", re.DOTALL)

    def complete(shell: InteractiveShell, event: Any) -> list[str]:
        found = begin.fullmatch(event.text_until_cursor)
        return complete_line(shell, found["magic"], found["rest"], event.symbol) if found else []

    shell.set_hook("complete_command", complete, re_key=begin.pattern)
    # IPython has no API to remove a hook, and stores it under the pattern that it compiles itself.
    dispatcher = shell.strdispatchers["complete_command"]
    key = re.compile(begin.pattern)
    completer: Any = shell.Completer
    matches_in_python = completer._jedi_matches  # noqa: SLF001 - IPython has no API to leave a line to a hook

    def matches_unless_ours(cursor_column: int, cursor_line: int, text: str) -> Iterable[Any]:
        """Return jedi's completions, which IPython would add to ours, for lines of Python only."""
        line = [*text.split("\n"), ""][cursor_line]
        return () if begin.match(line[:cursor_column]) else matches_in_python(cursor_column, cursor_line, text)

    completer._jedi_matches = matches_unless_ours  # noqa: SLF001

    def forget() -> None:
        dispatcher.regexs.pop(key, None)
        completer.__dict__.pop("_jedi_matches", None)

    return forget


def complete_line(shell: InteractiveShell, magic: str, rest: str, symbol: str) -> list[str]:
    """Return the completions of a line.

    Args:
        shell: IPython shell whose variables are offered.
        magic: name of the magic with its percent signs.
        rest: text between the magic and the cursor.
        symbol: end of that text, which the completion replaces; IPython splits words not only at spaces.
    """
    words, begun = split_typed_line(rest)
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
        offered += _fitting(list_paths(_plain(typed)), typed, symbol)
        # Return a completion in any case: without one, IPython would list files in this process, and could hang on a
        # dead mount.
        return offered or [symbol]
    return offered


def _option_at(verb: Verb, words: list[str], begun: str) -> tuple[Option | None, str]:
    """Return the option whose value is being typed (None for a flag or an excess word), and the part typed so far."""
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
    own = namespace.keys() - shell.user_ns_hidden.keys()
    return sorted(name for name in own if name[0] != "_" and not isinstance(namespace[name], ModuleType))


def _plain(typed: str) -> str:
    if typed.startswith('"'):
        return re.sub(r"\\(.)", r"\1", typed[1:])
    return typed[1:] if typed.startswith("'") else re.sub(r"\\(.)", r"\1", typed)


def list_paths(path: str, files: str = "", most: int = _MOST) -> list[str]:
    """Return paths that start with `path`; none if the folder cannot be listed in time.

    Args:
        path: start of the paths.
        files: pattern of the names of the files to list; folders, which end in a slash, are always listed.
        most: maximum number of paths.
    """
    folder, slash, start = path.rpartition("/")
    shown = folder + slash
    if not slash and path.startswith(_SHORT_NAME):
        shown, start = _SHORT_NAME, path.removeprefix(_SHORT_NAME)
    try:
        place = os.path.abspath(user_path(shown or ".", "list a folder"))
        listing = processes.run(processes.python(_LISTED, place, start, files, str(most)), "list a folder", _LIST_S)
        names: list[str] = json.loads(listing.output) if listing.status == 0 else []
    except (ColabkitError, OSError, ValueError):
        return []
    return [shown + name for name in names]


def _fitting(found: Iterable[str], typed: str, symbol: str) -> list[str]:
    whole = (quote_word(word, typed) for word in found)
    return [word[len(typed) - len(symbol) :] for word in whole if word is not None and word.startswith(typed)]
