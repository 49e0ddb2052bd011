"""Sharded models and optimizers: gather their tensors from all processes for a checkpoint, and shard them again."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from colabkit.foundation import InvalidOption, cannot
from colabkit.loading import map_tensors

_DTENSOR = "torch.distributed.tensor", "DTensor"
_FSDP1 = "torch.distributed.fsdp", "FullyShardedDataParallel"
_FSDP2 = "torch.distributed.fsdp", "FSDPModule"
_EXPECTED = "complete parameters, or those of fully_shard"


def _class_of(module: str, name: str) -> tuple[type, ...]:
    # If the module is not imported, no instances of the class exist.
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def is_dtensor(value: object) -> bool:
    """Return whether a value is a `DTensor`, of which this process may hold only a shard."""
    return isinstance(value, _class_of(*_DTENSOR))


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` (FSDP2) was applied to a module."""
    return isinstance(module, _class_of(*_FSDP2))


def unsharded_class(part: object) -> type:
    """Return the class of an object; for a module, the class that it had before `fully_shard` replaced it."""
    return next(one for one in type(part).__mro__ if not issubclass(one, _class_of(*_FSDP2)))


def parameters_of(part: object) -> Iterable[Tensor]:
    """Yield the parameters of a model or an optimizer; nothing for other objects."""
    if isinstance(part, nn.Module):
        yield from part.parameters()
    elif isinstance(part, Optimizer):
        for group in part.param_groups:
            yield from group["params"]


def has_shards(part: object) -> bool:
    """Return whether any parameter of a model or an optimizer is a `DTensor`."""
    return any(map(is_dtensor, parameters_of(part)))


def check_no_fsdp1(act: str, part: object) -> None:
    """Raise `InvalidOption` for a model or an optimizer with the shards of FSDP1, which have no common format."""
    modules = part.modules() if isinstance(part, nn.Module) else ()
    is_wrapped = any(isinstance(module, _class_of(*_FSDP1)) for module in modules)
    # FSDP1 sets this attribute on parameters, which are otherwise plain with `use_orig_params=True`.
    if is_wrapped or any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters_of(part)):
        found = "the parameters are sharded by FullyShardedDataParallel"
        next_step = "Use torch.distributed.fsdp.fully_shard(model) instead"
        raise InvalidOption(cannot(act, found, _EXPECTED, next_step))


def check_data_parallel(act: str, model: nn.Module) -> None:
    """Raise `InvalidOption` for a model whose parameters are sharded other than by `fully_shard` of the whole model."""
    check_no_fsdp1(act, model)
    if not has_shards(model):
        return
    named = dict(model.named_parameters())
    if not any(map(is_fully_sharded, model.modules())):
        found = f"{next(name for name, parameter in named.items() if is_dtensor(parameter))!r} of the model is sharded"
        raise InvalidOption(cannot(act, found, _EXPECTED, "Use fully_shard(model), or write a custom step"))
    if complete := [name for name, parameter in named.items() if not is_dtensor(parameter)]:
        # `fully_shard` averages only the gradients of the parameters that it shards.
        found = f"fully_shard was applied to parts of the model, but not to {complete[0]!r}"
        raise InvalidOption(cannot(act, found, "", "Apply it to the model, too, after its parts: fully_shard(model)"))


def gathered_state(part: Any, is_kept: bool) -> Any:
    """Return the `state_dict()` of an object, with complete tensors on the CPU in place of the shards of a model.

    All processes must call this together. Without `is_kept`, the tensors of sharded parts are missing.
    """
    state = part.state_dict()
    if not has_shards(part):
        return state

    def gather(tensor: Tensor) -> Any:
        if not is_dtensor(tensor):
            return tensor
        whole = tensor.detach().full_tensor()  # type: ignore[attr-defined]
        return whole.cpu() if is_kept else None

    return map_tensors(state, gather)


def sharded_state(part: Any, state: Any) -> Any:
    """Return a state of complete tensors, with those sharded that belong to sharded parameters of the object."""
    if not has_shards(part):
        return state
    if isinstance(part, nn.Module):
        now = part.state_dict()
        return {name: _sharded_like(value, now.get(name)) for name, value in state.items()}
    # The state of an optimizer numbers the parameters of all groups.
    owned = dict(enumerate(parameters_of(part)))
    states = {
        number: {name: _sharded_like(value, owned.get(number)) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": states}


def _sharded_like(value: Any, like: Any) -> Any:
    # An optimizer also has numbers for a parameter, such as its step; only tensors of the same shape are sharded.
    if not is_dtensor(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    # The first DTensor has imported this module.
    from torch.distributed.tensor import distribute_tensor

    # Each process has the complete tensor, so none needs to send it.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
