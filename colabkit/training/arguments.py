"""The arguments of `train()`, checked: what cannot be meant is one line of error at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from colabkit.foundation import InvalidOption, cannot, check_whole_number, kind_of
from colabkit.loading import Loader
from colabkit.training.foreign_loaders import may_be_loader
from colabkit.training.saving import Stateful
from colabkit.training.steps import SupervisedStep

_ACT = "train"
_JUDGES = "a function that returns a dict of numbers"


def check_step(act: str, call: str, step: Any, loader: Any, is_any_loader: bool = False) -> None:
    """Raise `InvalidOption` unless a step can be called and a loader is one.

    Args:
        act: what is done with them.
        call: the function that takes them.
        step: to check.
        loader: to check.
        is_any_loader: whether a loader of others does.
    """
    if not callable(step) or not (isinstance(loader, Loader) or (is_any_loader and may_be_loader(loader))):
        found = f"step is {kind_of(step)} and loader is {kind_of(loader)}"
        needed = f"they have to be a function and {'what gives batches' if is_any_loader else 'a colabkit.Loader'}"
        raise InvalidOption(cannot(act, found, needed, f"Pass {call}(step, loader)"))
    if isinstance(step, nn.Module):
        needed, hint = (
            "it has to be a function of a batch that updates the model",
            "Use supervised_step(model, optimizer)",
        )
        raise InvalidOption(cannot(act, "the step is a model", needed, hint))


def state_of(act: str, state: Any, step: Any, is_saved: bool) -> dict[str, Stateful]:
    """Return the objects whose state counts, by name: those given, else what the usual step trains.

    Raises:
        InvalidOption: if they are to be saved and it is not known what they are.
    """
    if state is None:
        if is_saved and not isinstance(step, Stateful):
            found, needed = "a step of your own without state=", "which names what it changes"
            next_step = "Pass state={'model': model, 'optimizer': optimizer}, or state={} if it changes nothing"
            raise InvalidOption(cannot(act, found, needed, next_step))
        return dict(step.parts) if isinstance(step, SupervisedStep) else {}
    if not isinstance(state, Mapping):
        found = f"state is {kind_of(state)}"
        raise InvalidOption(
            cannot(act, found, "it has to be a dict of names and objects", "Use state={'model': model}")
        )
    for name, part in state.items():
        if not isinstance(part, Stateful):
            found = f"state has {name!r}, {kind_of(part)}"
            raise InvalidOption(cannot(act, found, "without state_dict and load_state_dict", "Leave it out"))
    return dict(state)


def validate_of(validate: Any, step: Any, loader: Loader) -> Any:
    """Return what to call with the number of a validation; None for no validation.

    It calls a function, or has the usual step evaluate the pass of that number over a loader: after a resume, too.
    """
    if validate is loader:
        found = "validate is the training's Loader"
        raise InvalidOption(cannot(_ACT, found, "it has to be another one", "Make one of held-out samples"))
    if isinstance(validate, Loader):
        if not isinstance(step, SupervisedStep):
            found = "validate is a Loader beside a step of your own"
            raise InvalidOption(cannot(_ACT, found, f"it has to be {_JUDGES}", "Evaluate the model in a function"))

        def evaluated(number: int) -> dict[str, float]:
            validate.load_state_dict({**validate.state_dict(), "epoch": number, "samples": 0})
            return step.evaluate(validate)

        return evaluated
    if validate is None:
        return None
    if not callable(validate):
        found = f"validate is {kind_of(validate)}"
        raise InvalidOption(cannot(_ACT, found, f"it has to be a Loader or {_JUDGES}", "Pass one of these"))
    return lambda _: validate()


def validation_steps(validate_every: Any) -> int | None:
    """Return after how many steps a validation is due; None for the ends of epochs."""
    if validate_every == "epoch":
        return None
    check_whole_number(_ACT, "validate_every", validate_every, 1)
    return int(validate_every)
