"""The cell magics: `%%train` takes the cell as the step of a training, `%%dashboard` runs it beside the panel.

The code below the magic's line is compiled once, with the line numbers of the cell, and runs in the user's namespace.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import tokenize
from collections import UserDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import colabkit
from colabkit.foundation import InvalidOption, OneLineError, SourceMissing, cannot, kind_of
from colabkit.notebook.lines import line_parser, split_line
from colabkit.notebook.options import arguments_of, given_in, look_up_in
from colabkit.notebook.verbs import CELLS, LOADING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from colabkit.training import TrainReport


_UNSEEN = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
NAMES = ("x", "y", "batch", "step", "epoch")
"""What the body finds in its namespace, and nobody afterwards."""

_VERB = CELLS[0]
_ABSENT = object()
NOTHING_SEEN = (
    "No panel: nothing was trained, and no Loader was iterated. Another loader is seen through colabkit.watch(loader)"
)


def run_beside_panel(shell: InteractiveShell, cell: str, **options: Any) -> None:
    """Run a cell's body beside `colabkit.dashboard()`; its last expression is displayed as in any cell."""
    body = CellCode(shell, cell, is_shown=True)
    with body.traced(), colabkit.dashboard(**options) as panel:
        body.run()
    if not panel.has_heard:
        print(NOTHING_SEEN)  # noqa: T201 - nothing else tells why


def train_on_cell(shell: InteractiveShell, line: str, cell: str) -> TrainReport:
    """Run a cell's body once for each batch, by one call of `colabkit.train()`, and return its report.

    `batch` is a batch as the loader gives it, `x` its first field and `y` its second; of a dict those named X and Y, if
    there are such. `y` is None where there is one field; further ones are in `batch`. `step` and `epoch` count from 0
    over the whole run, the part before a resume included. A `loss` that the body sets is the step's value: a number, or
    a dict of numbers. Between two steps, as while validating, these names but `loss` are what they were before.
    """
    namespace = shell.user_ns
    words = split_line(line, namespace)
    arguments = arguments_of(_VERB, _parser().parse_args(words), partial(look_up_in, namespace))
    body = CellCode(shell, cell)
    if arguments["save_to"] is not None and arguments["state"] is None:
        raise _unnamed_state(body, namespace)
    loading = {option.name: arguments.pop(option.name) for option in LOADING}
    loader = _loader_of(namespace, arguments.pop("pack"), loading, given_in(_parser(), words))
    with body.traced():
        return colabkit.train(_CellStep(body, namespace, loader), loader, **arguments)


class _CellStep:
    """The body of a cell as a step, which counts its calls; checkpoints hold the counts."""

    def __init__(self, body: CellCode, namespace: dict[str, Any], loader: colabkit.Loader) -> None:
        self._body = body
        self._namespace = namespace
        self._loader = loader
        self._steps = 0
        self._first_epoch: int | None = None  # by the loader's count, which may have been used before

    def __call__(self, batch: Any) -> Any:
        epoch, samples = self._loader.received
        epoch -= not samples  # the last batch of an epoch leads to the next one
        if self._first_epoch is None:
            self._first_epoch = epoch
        x, y = _pair_of(batch)
        values = (x, y, batch, self._steps, epoch - self._first_epoch)
        names = _LossNamespace(self._namespace)
        with _given(self._namespace, dict(zip(NAMES, values, strict=True))):
            self._body.run(names)
        self._steps += 1
        return _checked(self._namespace["loss"]) if names.has_loss() else None

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps there were, and the loader's number of the first epoch."""
        return {"steps": self._steps, "first_epoch": self._first_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting where a state was taken."""
        self._steps, self._first_epoch = state_dict["steps"], state_dict["first_epoch"]


class _LossNamespace(UserDict[str, Any]):
    """A namespace that knows whether `loss` was assigned in it; all else goes through."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.data = namespace
        self._before = namespace.get("loss", _ABSENT)
        self._is_set = False

    def __setitem__(self, name: str, value: Any) -> None:
        self._is_set |= name == "loss"
        self.data[name] = value

    def has_loss(self) -> bool:
        """Return whether it was assigned here, or is another one since a function has `global loss`."""
        now = self.data.get("loss", _ABSENT)
        return now is not _ABSENT and (self._is_set or now is not self._before)


def _pair_of(batch: Any) -> tuple[Any, Any]:
    """Return the first two fields of a batch, None where there is one only; of a dict those named X and Y."""
    if isinstance(batch, Mapping):
        if "X" in batch and "Y" in batch:
            return batch["X"], batch["Y"]
        batch = tuple(batch.values())
    if not isinstance(batch, tuple | list):
        return batch, None
    first, second = [*batch, None, None][:2]
    return first, second


def _checked(loss: Any) -> Any:
    """Return what a step may return."""
    from colabkit.training import is_number

    if isinstance(loss, Mapping) or is_number(loss):
        return loss
    shape = f" of shape {list(loss.shape)}" if hasattr(loss, "shape") else ""
    found = f"the cell sets loss to {kind_of(loss)}{shape}"
    needed = "a single number or a dict of numbers is taken"
    next_step = "Use its mean, or another name" if hasattr(loss, "mean") else "Use another name for what is no loss"
    raise InvalidOption(cannot("train", found, needed, next_step))


@contextmanager
def _given(namespace: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Give names their values within a block; afterwards they are what they were before."""
    before = {name: namespace[name] for name in values if name in namespace}
    namespace.update(values)
    try:
        yield
    finally:
        for name in values:
            namespace.pop(name, None)
        namespace.update(before)


def _loader_of(namespace: Mapping[str, Any], name: str, loading: Mapping[str, Any], given: set[str]) -> colabkit.Loader:
    """Return the Loader that a word names, or one of the pack or data set that it names."""
    found = _named(namespace, name)
    flags = [option.flag for option in LOADING if option.name in given]
    if isinstance(found, colabkit.Loader):
        if flags:
            held = f"{', '.join(flags)} beside {name!r}, which is a Loader"
            raise InvalidOption(cannot("train", held, "and has its own", "Leave them out, or name its data set"))
        return found
    if isinstance(found, colabkit.PackReport):
        found = found.path
    if isinstance(found, str | os.PathLike):
        found = _opened(namespace, os.fspath(found))
    if isinstance(found, colabkit.Pack):
        found = found[loading["split"]]
    elif "split" in given:
        held = f"--split beside {name!r}, which is {kind_of(found)}"
        raise InvalidOption(cannot("train", held, "and packs alone have splits", "Leave it out"))
    return colabkit.Loader(
        found,
        loading["batch_size"],
        shuffle=loading["shuffle"],
        seed=loading["seed"],
        device=loading["on"] or _device(),
        transform=loading["transform"],
    )


def _named(namespace: Mapping[str, Any], name: str) -> Any:
    """Return the variable of a name, or the name itself as a path."""
    found = namespace.get(name, name)
    return name if isinstance(found, ModuleType | FunctionType | type) else found


def _opened(namespace: Mapping[str, Any], path: str) -> colabkit.Pack:
    try:
        return colabkit.open_pack(path)
    except SourceMissing:
        if not path.isidentifier():
            raise
        look_up_in(namespace, path)  # it is rather a variable that is meant
        raise


def _device() -> str | None:
    import torch  # the magics are loaded without it

    return "cuda" if torch.cuda.is_available() else None


def _unnamed_state(body: CellCode, namespace: Mapping[str, Any]) -> InvalidOption:
    """Return the error that names what of the body's variables has a state."""
    used = sorted(body.names() & namespace.keys())
    have = [name for name in used if hasattr(type(namespace[name]), "load_state_dict")]
    next_step = f"Add --state {' '.join(have)}" if have else "Add --state model optimizer, say"
    return InvalidOption(cannot("train", "--save-to without --state", "which names what checkpoints hold", next_step))


def _parser() -> Any:
    return line_parser(_VERB, "%%train")


class CellCode:
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
            is_told = isinstance(error, OneLineError | SyntaxError) or os.environ.get("COLABKIT_DEBUG") == "1"
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
