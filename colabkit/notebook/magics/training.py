"""`%%train`: the body of a cell as the step of a training."""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import colabkit
from colabkit.foundation import InvalidOption, SourceMissing, cannot, kind_of
from colabkit.notebook.magics.bodies import Body
from colabkit.notebook.magics.parsers import line_parser
from colabkit.notebook.magics.words import split_line
from colabkit.notebook.options.cells import CELLS, LOADING
from colabkit.notebook.options.parsing import arguments_of, given_in, look_up_in

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from colabkit.training import TrainReport


NAMES = ("x", "y", "batch", "step", "epoch")
"""What the body finds in its namespace, and nobody afterwards."""

_VERB = CELLS[0]
_ABSENT = object()


def train_on_cell(shell: InteractiveShell, line: str, cell: str) -> TrainReport:
    """Run a cell's body once for each batch, by one call of `colabkit.train()`, and return its report.

    `batch` is a batch as the loader gives it, `x` its first field and `y` its second; of a dict those named X and Y, if
    there are such. `y` is None where there is one field; further ones are in `batch`. `step` and `epoch` count from 0
    over the whole run, the part before a resume included. A `loss` that the body sets is the step's value: a number, or
    a dict of numbers. Between two steps, as while validating, these names but `loss` are what they were before.

    Args:
        shell: whose namespace it runs in.
        line: of the magic.
        cell: the body.
    """
    namespace = shell.user_ns
    words = split_line(line, namespace)
    arguments = arguments_of(_VERB, _parser().parse_args(words), partial(look_up_in, namespace))
    body = Body(shell, cell)
    if arguments["save_to"] is not None and arguments["state"] is None:
        raise _unnamed_state(body, namespace)
    loading = {option.name: arguments.pop(option.name) for option in LOADING}
    loader = _loader_of(namespace, arguments.pop("pack"), loading, given_in(_parser(), words))
    with body.traced():
        return colabkit.train(_BodyStep(body, namespace, loader), loader, **arguments)


class _BodyStep:
    """The body of a cell as a step; checkpoints hold what it counts."""

    def __init__(self, body: Body, namespace: dict[str, Any], loader: colabkit.Loader) -> None:
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
        names = _Assigned(self._namespace)
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


class _Assigned(UserDict[str, Any]):
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
    """Return the first field of a batch and its second, None without one; of a dict those named X and Y."""
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


def _unnamed_state(body: Body, namespace: Mapping[str, Any]) -> InvalidOption:
    """Return the error that names what of the body's variables has a state."""
    used = sorted(body.names() & namespace.keys())
    have = [name for name in used if hasattr(type(namespace[name]), "load_state_dict")]
    next_step = f"Add --state {' '.join(have)}" if have else "Add --state model optimizer, say"
    return InvalidOption(cannot("train", "--save-to without --state", "which names what checkpoints hold", next_step))


def _parser() -> Any:
    return line_parser(_VERB, "%%train")
