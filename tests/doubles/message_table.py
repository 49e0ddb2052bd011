"""The table of all error messages, as shown in Python, by a magic, in a terminal and in the launcher.

`python tests/doubles/message_table.py` writes the table to `docs/reference/messages.md`. The messages are read from the
source: each call of `cannot()` gives one or more entries, in which `{...}` stands for a value known only at run time.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from colabkit.foundation import Code, Message, Text, call, cannot, in_python, omit, option
from colabkit.notebook.launcher.settings import FieldWords
from colabkit.notebook.options import LineWords
from colabkit.notebook.verbs import VERBS

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "reference" / "messages.md"
MOST = 4
"""Maximum number of alternatives to show for a text, such as those of a conditional expression."""


@dataclass(frozen=True)
class Site:
    module: str
    line: int
    error: str
    message: Message

    def rendered(self) -> dict[str, str]:
        """Return the message in Python, magic, terminal and launcher syntax."""
        # Most messages are about a flag, so prefer a verb that has flags for all options of the message.
        known = [verb for verb in VERBS if set(self.message.options) <= {one.name for one in verb.options}]
        flagged = [verb for verb in known if all(one.flag for one in verb.options if one.name in self.message.options)]
        verb = next(iter([*flagged, *known]), None)
        action = self.message.action if isinstance(self.message.action, str) else ""
        by_action = next((verb for verb in VERBS if action.split(" ")[0] == verb.name), verb)
        verb = by_action or VERBS[0]
        return {
            "Python": self.message.render(),
            "magic": self.message.render(LineWords(verb, "%")),
            "terminal": self.message.render(LineWords(verb, "colabkit ")),
            "launcher": self.message.render(FieldWords()),
        }


class SourceReader:
    """A reader of the message texts in a module's syntax tree."""

    def __init__(self, path: Path) -> None:
        self.module = path.relative_to(ROOT / "colabkit").as_posix()
        self.tree = ast.parse(path.read_text())
        self.constants = dict(_assigned(self.tree.body))
        leaving = [one for one in ast.walk(self.tree) if isinstance(one, ast.Raise | ast.Return)]
        self.exits = [one.end_lineno or one.lineno for one in leaving]

    def sites(self) -> Iterator[Site]:
        """Return the module's messages in source order."""
        for function, node, error in _calls(self.tree, None, ""):
            scope = dict(self.constants)
            if function is not None:
                scope.update(_assigned(_statements(function)))
            parts = [list(itertools.islice(self._texts(one, scope, 0), MOST)) for one in node.args[:4]]
            if len(parts) == 4:
                count = max(map(len, parts))
                for number in range(count):
                    texts = [one[min(number, len(one) - 1)] for one in parts]
                    yield Site(self.module, node.lineno, error, cannot(*texts))

    def _values_at(self, name: ast.Name, scope: dict[str, list[ast.expr]]) -> list[ast.expr]:
        """Return a name's possible values.

        These are the values assigned since the last `return` or `raise`, else the latest one, else all.
        """
        earlier = [one for one in scope.get(name.id, []) if one.lineno <= name.lineno]
        left_at = max((line for line in self.exits if line < name.lineno), default=0)
        return [one for one in earlier if one.lineno > left_at] or earlier[-1:] or scope.get(name.id, [])

    def _texts(self, node: ast.expr, scope: dict[str, list[ast.expr]], depth: int) -> Iterator[Text]:
        """Return the possible texts of an expression; an unknown part becomes a name in braces."""
        unknown = "{" + _short(node) + "}"
        if depth > 6:
            yield unknown
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(_joined(one) for one in node.values)
        elif isinstance(node, ast.Tuple):
            parts = [list(self._texts(one, scope, depth + 1)) for one in node.elts]
            for number in range(max((len(one) for one in parts), default=0)):
                yield tuple(one[min(number, len(one) - 1)] for one in parts)
        elif isinstance(node, ast.IfExp):
            yield from self._texts(node.body, scope, depth + 1)
            yield from self._texts(node.orelse, scope, depth + 1)
        elif isinstance(node, ast.BoolOp):
            for one in node.values:
                yield from self._texts(one, scope, depth + 1)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            for left in self._texts(node.left, scope, depth + 1):
                for right in self._texts(node.right, scope, depth + 1):
                    yield (left, right) if not isinstance(left, str) or not isinstance(right, str) else left + right
        elif isinstance(node, ast.Name) and (values := self._values_at(node, scope)):
            for one in values:
                yield from self._texts(one, {**scope, node.id: []}, depth + 1)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "in_python":
            yield from map(in_python, self._texts(node.args[0], scope, depth))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _REFERENCES:
            yield _reference(node)
        else:
            yield unknown


_REFERENCES = {"option": option, "omit": omit, "call": call}


def _reference(node: ast.Call) -> Text:
    assert isinstance(node.func, ast.Name)
    values = [_value(one) for one in node.args]
    return _REFERENCES[node.func.id](*values, **{one.arg: _value(one.value) for one in node.keywords if one.arg})


def _value(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        if isinstance(node, ast.DictComp):
            return {_value(node.key): _value(node.value)}
        if isinstance(node, ast.Dict):
            return {_value(key): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Code":
            return Code(_joined(node.args[0]) if isinstance(node.args[0], ast.JoinedStr) else _value(node.args[0]))
        return _Placeholder("{" + _short(node) + "}")


class _Placeholder(str):
    """A stand-in for a value that is known only at run time; its repr has no quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _joined(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_joined, node.values))
    assert isinstance(node, ast.FormattedValue)
    return ("'{}'" if node.conversion == ord("r") else "{}").replace("{}", "{" + _short(node.value) + "}")


def _short(node: ast.expr) -> str:
    """Return the name that best describes the value of an expression: that of a variable rather than of a function.

    A length, a minimum, a maximum and a sum with a number are written as in Python, since messages often contain the
    variable itself, too.
    """
    if _is_derived(node):
        return ast.unparse(node).replace("self.", "").lstrip("_")
    if isinstance(node, ast.IfExp) and isinstance(node.body, ast.Constant) and isinstance(node.orelse, ast.Constant):
        return "/".join(str(one.value) for one in (node.body, node.orelse) if one.value) or "value"
    if isinstance(node, ast.Call) and node.args:
        first = node.args[0]
        name = _short(first.args[0] if isinstance(first, ast.Call) and _is_derived(first) else first)
        if name != "value":
            return name
    if isinstance(node, ast.Attribute):
        return "type" if node.attr == "__name__" else node.attr
    called = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    names = [
        one.id if isinstance(one, ast.Name) else one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Name | ast.Attribute) and one not in called
    ]
    names += [one.attr for one in called if isinstance(one, ast.Attribute)]
    return next((name for name in names if name not in ("str", "repr", "self", "__name__", "join")), "value")


def _is_derived(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("len", "min", "max"):
        return len(node.args) == 1 and isinstance(node.args[0], ast.Name) and not node.keywords
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
    return is_sum and isinstance(node.left, ast.Name | ast.Attribute) and isinstance(node.right, ast.Constant)


def _assigned(statements: list[ast.stmt]) -> Iterator[tuple[str, list[ast.expr]]]:
    """Return the names that statements assign, each with all assigned values."""
    values: dict[str, list[ast.expr]] = {}
    for statement in statements:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        else:
            continue
        if isinstance(target, ast.Name):
            values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for name, one in zip(target.elts, value.elts, strict=True):
                if isinstance(name, ast.Name):
                    values.setdefault(name.id, []).append(one)
    yield from values.items()


def _statements(function: ast.AST) -> list[ast.stmt]:
    return [one for one in ast.walk(function) if isinstance(one, ast.stmt)]


def _calls(node: ast.AST, function: ast.AST | None, error: str) -> Iterator[tuple[ast.AST | None, ast.Call, str]]:
    """Return the calls of `cannot()`, each with its function and the name of the error that receives the message."""
    for child in ast.iter_child_nodes(node):
        inner = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == "cannot":
            yield inner, child, error
        name = child.func.id if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) else ""
        yield from _calls(child, inner, name if name[:1].isupper() else error if isinstance(child, ast.expr) else "")


@cache
def sites() -> tuple[Site, ...]:
    paths = sorted((ROOT / "colabkit").rglob("*.py"))
    return tuple(site for path in paths for site in SourceReader(path).sites())


def table() -> str:
    lines = [_HEAD]
    for module, group in itertools.groupby(sites(), lambda site: site.module):
        lines.append(f"\n## {module}\n")
        seen = set()
        for site in group:
            python, *others = (f"`{text}`" for text in site.rendered().values())
            row = (site.error, python, *(other if other != python else "same" for other in others))
            if row not in seen:
                lines.append(f"- {f'**{site.error}** ' if site.error else ''}{python}")
                names = ("magic", "terminal", "launcher")
                lines += [f"    - {name}: {text}" for name, text in zip(names, row[2:], strict=True) if text != "same"]
            seen.add(row)
    return "\n".join(lines) + "\n"


_HEAD = """# Error messages

Every error of colabkit is one sentence about what it cannot do, what it found and what it expected, and one about what
to do next. This page lists all of them; `{...}` stands for a value. A message names options and calls as you would
write them in Python, in a magic, in a terminal or in the launcher. Where these versions differ, the lines below the
message show them.

`python tests/doubles/message_table.py` writes this page from the source, and a test compares it."""


if __name__ == "__main__":
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(table())
    sys.stdout.write(f"{len(sites())} messages in {TABLE}\n")
