"""The values of a batch: its images and labels, the loss, and which predictions are right."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from colabkit.foundation import InvalidOption, cannot, kind_of

TRAIN_ON = "train on a batch"


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    """Return the images and labels of a batch.

    Raises:
        InvalidOption: if the batch is neither a pair of tensors, nor a dict with `"X"` and `"Y"`, nor one of two
            tensors.
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
        found += f" of {', '.join(type(one).__name__ for one in batch)}" if batch else " without elements"
    elif isinstance(batch, Mapping):
        found += f" of {', '.join(map(repr, batch))}" if batch else " without elements"
    next_step = "Train with a custom step that calls this one with (images, labels)"
    raise InvalidOption(cannot(TRAIN_ON, found, "two tensors, images and labels", next_step))


def is_cross_entropy(loss: Any) -> bool:
    """Return whether a loss function is cross entropy, possibly with bound arguments."""
    while isinstance(loss, partial):
        loss = loss.func
    return loss is nn.functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def single_number(value: Any) -> Tensor:
    """Return the loss; raise `InvalidOption` unless it is a tensor with one element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    is_tensor = isinstance(value, Tensor)
    found = f"the loss is {f'a tensor of shape {list(value.shape)}' if is_tensor else kind_of(value)}"
    next_step = "Return the mean of the losses" if is_tensor else "Return the tensor that torch computes"
    raise InvalidOption(cannot(TRAIN_ON, found, "a tensor with a single number", next_step))


def is_right(scores: Tensor, labels: Tensor) -> Tensor:
    """Return whether each sample's highest score belongs to its label, or to its most probable class, `bool [B]`."""
    return scores.detach().argmax(1) == (labels.argmax(1) if labels.is_floating_point() else labels)


def inputs_of(batch: Any) -> Tensor:
    """Return the inputs of a batch: the batch itself, its `"X"`, or its first field.

    Raises:
        InvalidOption: if the inputs are not a tensor.
    """
    inputs = batch
    if isinstance(batch, tuple | list) and batch:
        inputs = batch[0]
    elif isinstance(batch, Mapping) and batch:
        inputs = batch["X"] if "X" in batch else next(iter(batch.values()))
    if isinstance(inputs, Tensor):
        return inputs
    found = f"the inputs of a batch are {kind_of(inputs)}"
    next_step = "Put the tensor of inputs first in each batch, or call the model in a loop over the Loader"
    raise InvalidOption(cannot("predict", found, "a tensor", next_step))
