"""The cell magics: `%%train` uses the cell as the training step; `%%dashboard` runs the cell with the live panel.

The code of the cell is compiled once, keeps its line numbers, and runs in the user's namespace.
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
from colabkit.foundation import Code, InvalidOption, OneLineError, SourceMissing, Text, cannot, kind_of, omit, option
from colabkit.notebook.lines import line_parser, split_line
from colabkit.notebook.options import arguments_of, given_in, look_up_in
from colabkit.notebook.verb_options import LOADING
from colabkit.notebook.verbs import CELLS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from colabkit.training import TrainReport


_UNSEEN = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
NAMES = ("x", "y", "batch", "step", "epoch")
"""Variables that exist only while the cell body runs as a step."""

_VERB = CELLS[0]
_ABSENT = object()
NOTHING_SEEN = (
    "No panel: nothing was trained, and no Loader was iterated. Wrap any other loader in colabkit.watch(loader)"
)


def run_beside_panel(shell: InteractiveShell, cell: str, **options: Any) -> None:
    """Run a cell's body inside `colabkit.dashboard()`; its last expression is displayed as in any cell."""
    body = CellCode(shell, cell, is_shown=True)
    with body.traced(), colabkit.dashboard(**options) as panel:
        body.run()
    if not panel.has_heard:
        print(NOTHING_SEEN)  # noqa: T201 - explains why no panel appeared


def train_on_cell(shell: InteractiveShell, line: str, cell: str) -> TrainReport:
    """Run a cell's body once for each batch, in one call to `colabkit.train()`, and return its report.

    In the body, `batch` is the loader's batch, `x` its first field and `y` its second, or None. If the batch is a dict
    with fields X and Y, `x` and `y` are these fields. `step` and `epoch` count from 0 over the whole run, including the
    part before a resume. If the body sets `loss` to a number or a dict of numbers, the step returns it. Between two
    steps, for example during validation, all these variables except `loss` have the values from before training.
    """
    namespace = shell.user_ns
    words = split_line(line, namespace)
    arguments = arguments_of(_VERB, _parser().parse_args(words), partial(look_up_in, namespace))
    body = CellCode(shell, cell)
    if arguments["to"] is not None and arguments["state"] is None:
        raise _unnamed_state(body, namespace)
    loading = {option.name: arguments.pop(option.name) for option in LOADING}
    pack = arguments.pop("pack")
    loader = _loader_of(namespace, pack, loading, given_in(_parser(), words))
    step = _CellStep(body, namespace, loader, is_own_loader=loader is not _named(namespace, pack))
    with body.traced():
        return colabkit.train(step, loader, **arguments)


class _CellStep:
    """A step that runs the body of a cell.

    Args:
        body: code of the cell.
        namespace: variables of the user.
        loader: loader of the batches.
        is_own_loader: whether the magic created the loader, so that the options of its line apply to it.
    """

    def __init__(
        self, body: CellCode, namespace: dict[str, Any], loader: colabkit.Loader, *, is_own_loader: bool
    ) -> None:
        self._is_own_loader = is_own_loader
        self._body = body
        self._namespace = namespace
        self._loader = loader
        self._steps = 0
        # The loader's epoch number at the first step, which is not 0 if the loader was used before.
        self._first_epoch: int | None = None

    def __call__(self, batch: Any) -> Any:
        epoch, samples = self._loader.received
        # After the last batch of an epoch, the loader is at the start of the next one.
        epoch -= not samples
        if self._first_epoch is None:
            self._first_epoch = epoch
        x, y = _pair_of(batch)
        values = (x, y, batch, self._steps, epoch - self._first_epoch)
        names = _LossNamespace(self._namespace)
        try:
            with _given(self._namespace, dict(zip(NAMES, values, strict=True))):
                self._body.run(names)
        except RuntimeError as error:
            if self._is_own_loader and (clear := _unscaled_images(error, x)) is not None:
                raise clear from error
            raise
        self._steps += 1
        return _checked(self._namespace["loss"]) if names.has_loss() else None

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "first_epoch": self._first_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._steps, self._first_epoch = state_dict["steps"], state_dict["first_epoch"]


class _LossNamespace(UserDict[str, Any]):
    """A view of a namespace that detects whether `loss` is assigned."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.data = namespace
        self._before = namespace.get("loss", _ABSENT)
        self._is_set = False

    def __setitem__(self, name: str, value: Any) -> None:
        self._is_set |= name == "loss"
        self.data[name] = value

    def has_loss(self) -> bool:
        """Return whether `loss` was assigned here, or replaced by a function with `global loss`."""
        now = self.data.get("loss", _ABSENT)
        return now is not _ABSENT and (self._is_set or now is not self._before)


def _pair_of(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        if "X" in batch and "Y" in batch:
            return batch["X"], batch["Y"]
        batch = tuple(batch.values())
    if not isinstance(batch, tuple | list):
        return batch, None
    first, second = [*batch, None, None][:2]
    return first, second


def _unscaled_images(error: RuntimeError, images: Any) -> InvalidOption | None:
    """Return a clear error if the cell failed because its model got `uint8` images; None for other errors."""
    from colabkit.training import is_of_bytes

    if not is_of_bytes(error) or str(getattr(images, "dtype", "")) != "torch.uint8":
        return None
    found = f"the images are uint8 ({str(error).partition(chr(10))[0].rstrip('.')})"
    next_step = (
        "Assign colabkit.augment.Normalize() to a variable, for example normalize, and use --transform normalize"
    )
    return InvalidOption(cannot("use a batch", found, "floating-point images", next_step))


def _checked(loss: Any) -> Any:
    from colabkit.training import is_number

    if isinstance(loss, Mapping) or is_number(loss):
        return loss
    shape = f" of shape {list(loss.shape)}" if hasattr(loss, "shape") else ""
    found = f"the cell sets loss to {kind_of(loss)}{shape}"
    has_mean = hasattr(loss, "mean")
    other = "Use another name for this variable"
    next_step = "Assign its mean to loss, or use another name for this variable" if has_mean else other
    raise InvalidOption(cannot("train", found, "a single number or a dict of numbers", next_step))


@contextmanager
def _given(namespace: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Set variables within a block, and restore their previous values afterwards."""
    before = {name: namespace[name] for name in values if name in namespace}
    namespace.update(values)
    try:
        yield
    finally:
        for name in values:
            namespace.pop(name, None)
        namespace.update(before)


def _loader_of(namespace: Mapping[str, Any], name: Any, loading: Mapping[str, Any], given: set[str]) -> colabkit.Loader:
    """Return the `Loader` with the given name, or a new `Loader` for the pack or dataset with that name or path."""
    found = _named(namespace, name)
    label = repr(name) if isinstance(name, str) else kind_of(name)
    flags = [one.flag for one in LOADING if one.name in given]
    if isinstance(found, colabkit.Loader):
        if flags:
            taken = f"{label} is a Loader, to which {', '.join(flags)} cannot be applied"
            raise InvalidOption(
                cannot("train", taken, "", f"Omit {', '.join(flags)}, or pass the dataset of the Loader")
            )
        return found
    if isinstance(found, colabkit.PackReport):
        found = found.path
    if isinstance(found, str | os.PathLike):
        found = _opened(namespace, os.fspath(found))
    if isinstance(found, colabkit.Pack):
        found = found[loading["split"]]
    elif "split" in given:
        other = (option("split"), f" is given, but {label} is {kind_of(found)}")
        raise InvalidOption(cannot("train", other, "a pack", omit("split")))
    return colabkit.Loader(
        found,
        loading["batch_size"],
        shuffle=loading["shuffle"],
        seed=loading["seed"],
        device=loading["device"] or _device(),
        transform=loading["transform"],
    )


def _named(namespace: Mapping[str, Any], name: Any) -> Any:
    """Return the variable named `name`; if there is none, or only a function, class or module, the name as a path.

    An object that is not a name, such as the value of `{name}`, is returned unchanged.
    """
    found = namespace.get(name, name) if isinstance(name, str) else name
    return name if isinstance(found, ModuleType | FunctionType | type) else found


def _opened(namespace: Mapping[str, Any], path: str) -> colabkit.Pack:
    try:
        return colabkit.open_pack(path)
    except SourceMissing:
        if not path.isidentifier():
            raise
        # An identifier is probably a misspelled variable, so raise the error that suggests similar names.
        look_up_in(namespace, path)
        raise


def _device() -> str | None:
    # Import torch here, so that the magics load without it.
    import torch

    return "cuda" if torch.cuda.is_available() else None


def _unnamed_state(body: CellCode, namespace: Mapping[str, Any]) -> InvalidOption:
    """Return the error for `--to` without `--state`, naming the variables of the body that have a state."""
    used = sorted(body.names() & namespace.keys())
    have = [name for name in used if hasattr(type(namespace[name]), "load_state_dict")]
    example = option("state", {name: Code(name) for name in have or ("model", "optimizer")})
    next_step: Text = ("Add ", example) if have else ("For example, add ", example)
    found = (option("to"), " is given without ", option("state"))
    return InvalidOption(cannot("train", found, "the names of the variables to save", next_step))


def _parser() -> Any:
    return line_parser(_VERB, "%%train")


class CellCode:
    """The compiled code of a cell, which can run repeatedly.

    Magics and `!` lines in it work as usual.

    Args:
        shell: IPython shell in whose namespace the code runs.
        cell: text below the magic's line.
        is_shown: whether to display the value of the last expression, as in any cell.

    Raises:
        InvalidOption: if the cell is not valid Python; the message quotes the line.
    """

    def __init__(self, shell: InteractiveShell, cell: str, *, is_shown: bool = False) -> None:
        self._shell = shell
        lines = cell.splitlines(keepends=True)
        first = next((number for number, line in enumerate(lines) if line.strip()), len(lines))
        try:
            # IPython removes leading empty lines. Add them and the magic's line again to keep the line numbers right.
            source = "\n" * (first + 1) + shell.transform_cell("".join(lines[first:]))
            self._name: str = shell.compile.cache(source, shell.execution_count)
            tree = shell.transform_ast(shell.compile.ast_parse(source, filename=self._name))
            shown = _shown_of(tree.body, shell.ast_node_interactivity, source) if is_shown else []
            tree.body = tree.body[: len(tree.body) - len(shown)]
            self._codes: list[CodeType] = [self._compiled(tree), self._compiled(ast.Interactive(shown), "single")]
        except SyntaxError as error:
            raise _bad_line(error) from None

    def names(self) -> set[str]:
        """Return the names of variables and attributes that the code uses outside its functions."""
        return {name for code in self._codes for name in code.co_names}

    def run(self, names: MutableMapping[str, Any] | None = None) -> None:
        """Run the code; assignments go to `names` if given, otherwise to the user's namespace."""
        namespace = self._shell.user_ns
        for code in self._codes:
            exec(code, namespace, namespace if names is None else names)  # noqa: S102 - the user's own code

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Start the tracebacks of errors in the block at the cell's line, without the frames of colabkit."""
        try:
            yield
        except BaseException as error:
            trace = self._own(error.__traceback__)
            is_one_line = isinstance(error, OneLineError | SyntaxError) or os.environ.get("COLABKIT_DEBUG") == "1"
            if trace is not None and not is_one_line:
                # Exceptions with `__slots__` accept no new attributes, so they are shown with all frames.
                with contextlib.suppress(AttributeError):
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
    if not statements or interactivity == "none" or _is_quiet(source):
        return []
    if interactivity == "all":
        return statements
    return statements[-1:] if interactivity == "last" or isinstance(statements[-1], ast.Expr) else []


def _is_quiet(source: str) -> bool:
    """Return whether the code ends with a semicolon, which suppresses the display of the value."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in _UNSEEN]
    return bool(tokens) and tokens[-1].string == ";"


def _bad_line(error: SyntaxError) -> InvalidOption:
    text = error.text or linecache.getline(error.filename or "", error.lineno or 0)
    found = f"{error.msg} on line {error.lineno or 1}{f', {text.strip()!r}' if text.strip() else ''}"
    return InvalidOption(cannot("run the cell", found, "valid Python", "Fix that line"))
