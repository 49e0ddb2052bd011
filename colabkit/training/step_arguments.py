"""What `supervised_step()` and its step are given, checked: what cannot be meant is one line of error at once."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from colabkit.foundation import InvalidOption, cannot, check_whole_number, is_finite_number, kind_of
from colabkit.training.models import Stateful

_MAKE = "make a supervised step"


def check_objects(model: Any, optimizer: Any, loss: Any) -> None:
    """Raise `InvalidOption` unless these are a model, an optimizer of its parameters, and a function."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        found = f"model is {kind_of(model)} and optimizer is {kind_of(optimizer)}"
        next_step = "Pass supervised_step(model, optimizer)"
        raise InvalidOption(cannot(_MAKE, found, "they have to be a torch model and a torch optimizer", next_step))
    if isinstance(loss, type) or not callable(loss):
        found = f"loss is {kind_of(loss)}"
        next_step = f"Use loss={loss.__name__}()" if isinstance(loss, type) else "Use loss=nn.CrossEntropyLoss()"
        raise InvalidOption(cannot(_MAKE, found, "it has to be a function of scores and labels", next_step))
    owned = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in owned for group in optimizer.param_groups for parameter in group["params"]):
        found, needed = "the optimizer has none of the model's parameters", "which it is to update"
        raise InvalidOption(cannot(_MAKE, found, needed, "Make the optimizer of model.parameters() of this very model"))
    # Of the class, since a scheduler puts a function in place of the instance's own.
    if _is_any_needed(list(inspect.signature(type(optimizer).step).parameters.values())[1:]):
        found = f"optimizer is {kind_of(optimizer)}, whose step() takes a closure"
        next_step = "Use an optimizer that needs no closure, such as torch.optim.AdamW, or a step of your own"
        raise InvalidOption(cannot(_MAKE, found, "its step() has to need nothing", next_step))


def check_scheduler(scheduler: Any, optimizer: Optimizer) -> None:
    """Raise `InvalidOption` unless a scheduler is None, or counts the updates of this optimizer."""
    if scheduler is None:
        return
    step = getattr(scheduler, "step", None)
    if not callable(step) or not isinstance(scheduler, Stateful):
        found, needed = f"scheduler is {kind_of(scheduler)}", "it has to be one of torch.optim.lr_scheduler"
        raise InvalidOption(cannot(_MAKE, found, needed, "Leave it out, or make it of the optimizer"))
    if _is_any_needed(inspect.signature(step).parameters.values()):
        found = f"scheduler is {kind_of(scheduler)}, whose step() takes a metric"
        next_step = "Leave it out and call its step(metric) in the function that you pass as validate="
        raise InvalidOption(cannot(_MAKE, found, "it has to count updates", next_step))
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        found, needed = "the scheduler is of another optimizer", "it has to be of this one"
        raise InvalidOption(cannot(_MAKE, found, needed, "Make it of the optimizer that you pass"))


def _is_any_needed(parameters: Iterable[inspect.Parameter]) -> bool:
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return any(one.default is one.empty and one.kind in positional for one in parameters)


def check_options(amp: Any, channels_last: Any, accumulate: Any, clip: Any, compile_: Any) -> None:
    """Raise `InvalidOption` unless the options of these names can be meant."""
    for name, value, allowed in (
        ("amp", amp, ("auto", "bf16", "fp16", False)),
        ("channels_last", channels_last, (None, True, False)),
    ):
        if not any(value is one or (isinstance(one, str) and value == one) for one in allowed):
            *most, last = map(repr, allowed)
            needed = f"{', '.join(most)} or {last}"
            raise InvalidOption(cannot(_MAKE, f"{name}={value!r}", needed, f"Use {name}={allowed[0]!r}"))
    check_whole_number(_MAKE, "accumulate", accumulate, 1)
    if clip is not None and not (is_finite_number(clip) and clip > 0):
        raise InvalidOption(cannot(_MAKE, f"clip={clip!r}", "a norm above 0", "Use clip=1.0, say, or None"))
    if not isinstance(compile_, bool | str) or compile_ == "":
        next_step = "Use compile=True"
        raise InvalidOption(cannot(_MAKE, f"compile={compile_!r}", "True, False or a mode of torch.compile", next_step))


def pair_of(act: str, batch: Any) -> tuple[Tensor, Tensor]:
    """Return images and labels of a batch.

    Raises:
        InvalidOption: if it is no pair of tensors, and no dict with `"X"` and `"Y"` or of two tensors.
    """
    images = labels = None
    if isinstance(batch, tuple | list):
        if len(batch) == 2:
            images, labels = batch
    elif isinstance(batch, Mapping):
        if "X" in batch and "Y" in batch:
            images, labels = batch["X"], batch["Y"]
        elif len(batch) == 2:
            images, labels = batch.values()
    if isinstance(images, Tensor) and isinstance(labels, Tensor):
        return images, labels
    found = f"the batch is {kind_of(batch)}"
    if isinstance(batch, tuple | list):
        found += f" of {', '.join(type(one).__name__ for one in batch) or 'nothing'}"
    elif isinstance(batch, Mapping):
        found += f" of {', '.join(map(repr, batch)) or 'nothing'}"
    next_step = "Pass train() a function of the batch that calls this step with (images, labels)"
    raise InvalidOption(cannot(act, found, "it has to be two tensors, images and labels", next_step))
