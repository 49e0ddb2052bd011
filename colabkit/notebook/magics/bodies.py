"""The code below a cell magic's first line: compiled once, its line numbers those of the cell, run in its namespace."""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import tokenize
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from colabkit.foundation import InvalidOption, ShownInOneLine, cannot

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


_UNSEEN = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Body:
    """The code of a cell, ready to be run again and again.

    Magics and `!` lines in it work as anywhere. An error that comes out of it is shown from the cell's own line on.

    Args:
        shell: whose namespace it runs in.
        cell: the text below the magic's line.
        is_shown: whether its last expression is displayed, as in any cell.

    Raises:
        InvalidOption: if it is no valid Python; the message holds the line.
    """

    def __init__(self, shell: InteractiveShell, cell: str, *, is_shown: bool = False) -> None:
        self._shell = shell
        lines = cell.splitlines(keepends=True)
        first = next((number for number, line in enumerate(lines) if line.strip()), len(lines))
        try:
            # IPython drops empty lines at the start; they and the magic's own line are put there again.
            source = "\n" * (first + 1) + shell.transform_cell("".join(lines[first:]))
            self._name: str = shell.compile.cache(source, shell.execution_count)
            tree = shell.transform_ast(shell.compile.ast_parse(source, filename=self._name))
            shown = _shown_of(tree.body, shell.ast_node_interactivity, source) if is_shown else []
            tree.body = tree.body[: len(tree.body) - len(shown)]
            self._codes: list[CodeType] = [self._compiled(tree), self._compiled(ast.Interactive(shown), "single")]
        except SyntaxError as error:
            raise _bad_line(error) from error

    def names(self) -> set[str]:
        """Return the names that the code uses outside of its functions."""
        return {name for code in self._codes for name in code.co_names}

    def run(self, names: MutableMapping[str, Any] | None = None) -> None:
        """Run it; `names` takes what it assigns, in place of the namespace itself."""
        namespace = self._shell.user_ns
        for code in self._codes:
            exec(code, namespace, namespace if names is None else names)  # noqa: S102 - it is the user's own cell

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Return a block whose errors are shown from the cell's own line on, without the frames that run it."""
        try:
            yield
        except BaseException as error:
            trace = self._own(error.__traceback__)
            is_told = isinstance(error, ShownInOneLine | SyntaxError) or os.environ.get("COLABKIT_DEBUG") == "1"
            if trace is not None and not is_told:
                with contextlib.suppress(AttributeError):  # an error with slots is shown with all frames
                    error._render_traceback_ = partial(self._rendered, error, trace)  # type: ignore[attr-defined]
            raise

    def _rendered(self, error: BaseException, trace: TracebackType) -> list[str]:
        shown: list[str] = self._shell.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0)
        return shown

    def _own(self, trace: TracebackType | None) -> TracebackType | None:
        while trace is not None and trace.tb_frame.f_code.co_filename != self._name:
            trace = trace.tb_next
        return trace

    def _compiled(self, tree: ast.AST, mode: str = "exec") -> CodeType:
        code: CodeType = self._shell.compile(tree, self._name, mode)
        return code


def _shown_of(statements: list[ast.stmt], interactivity: str, source: str) -> list[ast.stmt]:
    """Return the statements whose values IPython displays."""
    if not statements or interactivity == "none" or _is_quiet(source):
        return []
    if interactivity == "all":
        return statements
    return statements[-1:] if interactivity == "last" or isinstance(statements[-1], ast.Expr) else []


def _is_quiet(source: str) -> bool:
    """Return whether a semicolon at the end keeps the value from being displayed."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in _UNSEEN]
    return bool(tokens) and tokens[-1].string == ";"


def _bad_line(error: SyntaxError) -> InvalidOption:
    text = error.text or linecache.getline(error.filename or "", error.lineno or 0)
    found = f"{error.msg} in line {error.lineno or 1}{f', {text.strip()!r}' if text.strip() else ''}"
    return InvalidOption(cannot("run the cell", found, "which is no valid Python", "Mend that line"))
