"""Batches of any structure: tuples, lists and dicts of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor


def mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch of the same structure with the function's result for every tensor in it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, function) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(mapped(value, function) for value in batch)
    if isinstance(batch, MutableMapping):  # a copy keeps what else a class of mappings holds
        clone = copy.copy(batch)
        clone.update({name: mapped(value, function) for name, value in batch.items()})
        return clone
    if isinstance(batch, Mapping):
        return {name: mapped(value, function) for name, value in batch.items()}
    return batch


def fields_of(batch: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the fields of a batch, and what makes a batch of fields again."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return list(batch), lambda values: type(batch)(*values)
    if isinstance(batch, tuple | list):
        return list(batch), type(batch)
    if isinstance(batch, Mapping):
        return list(batch.values()), lambda values: dict(zip(batch, values, strict=True))
    return [batch], lambda values: values[0]


def tensors_in(batch: Any) -> list[Tensor]:
    """Return all tensors of a batch, in its order."""
    if isinstance(batch, Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


def bytes_of(batch: Any) -> int:
    """Return how large all tensors of a batch are; sparse ones as if they were dense, since they do not tell."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))
