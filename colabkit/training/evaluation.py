"""`evaluate()` and `predict()`: the mean loss and accuracy of a model over a loader, and its outputs in order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colabkit.foundation import (
    Code,
    InvalidOption,
    Report,
    call,
    cannot,
    check_callable,
    check_type,
    checked_call,
    format_rate,
    format_seconds,
    format_things,
    kind_of,
    omit,
    option,
    user_path,
)
from colabkit.loading import Loader, check_loader, may_be_loader, samples_in
from colabkit.training.batch_values import loss_example
from colabkit.training.models import StepOptions
from colabkit.training.state_loading import load_weights
from colabkit.training.steps import SupervisedStep

_STORED_ORDERS = ("sequential", "shuffle", "block", "shards")


@dataclass(frozen=True, repr=False)
class EvaluateReport(Report):
    """The report of `evaluate()`.

    Attributes:
        values: mean over all samples of the `"loss"`, and of the `"accuracy"` if it is defined.
        samples: number of samples that this process evaluated.
        seconds: duration in seconds.
    """

    values: Mapping[str, float]
    samples: int
    seconds: float

    def _summary(self) -> str:
        listed = ", ".join(f"{name} {value:.4g}" for name, value in self.values.items())
        count = format_things(self.samples, "sample")
        return f"Evaluated {count} in {format_seconds(self.seconds)}: {listed}"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [(name, f"{value:.4g}") for name, value in self.values.items()]
        return [*rows, ("speed", format_rate(self.samples / max(self.seconds, 1e-9), "samples"))]


@checked_call()
def evaluate(
    model: nn.Module | SupervisedStep,
    loader: Iterable[Any],
    loss: Callable[[Any, Tensor], Tensor] | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
) -> EvaluateReport:
    """Return the mean loss of a model over all samples of a loader, and its accuracy if defined.

    For a mean cross entropy, the mean uses the class weights and leaves out labels that equal `ignore_index`. The value
    of any other loss counts as a mean over the samples of its batch.

    Batches are treated as in `supervised_step()`: `uint8` images are scaled to [0, 1], and GPUs use mixed precision as
    with `amp="auto"`. The model is in evaluation mode, without gradients, and its mode is restored afterwards. The
    position of a `Loader` is restored, too; the evaluation starts at the first sample of its current epoch.

    Under `torch.distributed`, call this in every process, each with its share of the samples; all get the same values.

    Args:
        model: model on the device of the batches, or a `supervised_step`, which also sets the loss and the precision.
        loader: `Loader` of images and labels, or any other iterable of such batches.
        loss: function of the model's output and the labels that returns the mean loss; None means cross entropy for a
            model, and the loss of the step for a step.
        checkpoint: path of a checkpoint of `train()`, such as `report.best`. The weights of the object `"model"` in it
            are loaded into the model first, and stay there.

    Returns:
        The means, and the number of samples.

    Raises:
        InvalidOption: if an argument is invalid, there are no batches, or a batch or the checkpoint does not fit the
            model.
        SourceMissing, Corrupt: if there is no such checkpoint, or it is damaged.
        TimedOut, NotMounted, FileFailed: if the checkpoint cannot be read.

    Example:
        >>> import colabkit
        >>> data = colabkit.prepare("samples:digits", to=None)["train"]
        >>> model = colabkit.small_network(10, (8, 8, 3))
        >>> report = colabkit.evaluate(model, colabkit.Loader(data, batch_size=64))
        >>> sorted(report.values), report.samples == len(data)
        (['accuracy', 'loss'], True)
    """
    act = "evaluate the model"
    step = _step_of(act, "evaluate", model, loss)
    if not may_be_loader(loader):
        usage = ("Use ", call("evaluate", Code("model"), Code("loader")))
        check_loader(act, loader, "an iterable of batches", usage)
    _load_checkpoint(act, step, checkpoint)
    samples = 0

    def counted(batches: Iterable[Any]) -> Iterator[Any]:
        nonlocal samples
        for batch in batches:
            samples += samples_in(batch, 1)
            yield batch

    began = time.perf_counter()
    with _full_pass(loader):
        values = step.evaluate(counted(loader))
    return EvaluateReport(values, samples, time.perf_counter() - began)


@checked_call()
def predict(
    model: nn.Module | SupervisedStep, loader: Loader, *, checkpoint: str | os.PathLike[str] | None = None
) -> Any:
    """Return the outputs of a model for all samples of a loader, on the CPU, in the order of the dataset.

    Shuffling by the loader does not affect this order. The model gets the first field of each batch (in a dict, the one
    named like `"X"` or `"image"`); labels are ignored. As in `supervised_step()`, `uint8` images are scaled to [0, 1].
    The model is in evaluation mode, without gradients. Its mode and the loader's position are restored afterwards.

    Args:
        model: model on the device of the batches, or a `supervised_step`, which also sets the precision.
        loader: `Loader` of the samples. Its transform is applied, so it should not be random.
        checkpoint: path of a checkpoint whose weights are loaded into the model first, as in `evaluate()`.

    Returns:
        A tensor `[N, ...]` with one row per sample, in float32 if the model computes in half precision. If the model
        returns a tuple, list or dict of tensors, the result has the same structure.

    Raises:
        InvalidOption: if an argument is invalid, the model does not return tensors with one row per sample, or the
            loader does not yield all samples: with `drop_last`, a custom sampler, several processes, or skipped bad
            samples.
        SourceMissing, Corrupt: if there is no such checkpoint, or it is damaged.
        TimedOut, NotMounted, FileFailed: if the checkpoint cannot be read.

    Example:
        >>> import colabkit
        >>> data = colabkit.prepare("samples:digits", to=None)["train"]
        >>> model = colabkit.small_network(10, (8, 8, 3))
        >>> scores = colabkit.predict(model, colabkit.Loader(data, batch_size=64))
        >>> scores.shape == (len(data), 10), scores.argmax(1).shape == (len(data),)
        (True, True)
    """
    act = "predict"
    step = _step_of(act, "predict", model, None)
    usage = ("Use ", call("predict", Code("model"), Code("loader")))
    check_loader(act, loader, "a colabkit.Loader, whose order is known", usage)
    state = loader.state_dict()
    count = loader.meters.facts.samples if loader.meters.facts is not None else None
    order = state["order"].split(" ")[0]
    if order not in _STORED_ORDERS:
        shown = "the Loader mixes packs" if order == "mixed" else f"the Loader has the order {order!r}"
        advice = ("Create the Loader again and ", omit("sampler"))
        next_step = "Pass a Loader for each pack" if order == "mixed" else advice
        raise InvalidOption(cannot(act, shown, "each sample once", next_step))
    if (world_size := state["world_size"]) > 1:
        share = f"the Loader has the samples of 1 of {world_size} processes"
        whole = ("Create the Loader with ", option("rank", 0), " and ", option("world_size", 1))
        raise InvalidOption(cannot(act, share, "all samples", whole))
    if loader.on_bad == "skip":
        blank = ("Create the Loader with ", option("on_bad", "blank"))
        raise InvalidOption(cannot(act, ("the Loader has ", option("on_bad", "skip")), "an output per sample", blank))
    if loader.drop_last:
        full = ("Create the Loader with ", option("drop_last", False))
        raise InvalidOption(cannot(act, ("the Loader has ", option("drop_last", True)), "all samples", full))
    _load_checkpoint(act, step, checkpoint)
    with _full_pass(loader, in_order=True):
        found = step.outputs(loader)
    outputs = _joined(found)
    received = _rows_in(outputs)
    if count is not None and received != count:
        found_rows = f"the model returned {format_things(received, 'row')} for {format_things(count, 'sample')}"
        raise InvalidOption(cannot(act, found_rows, "one row per sample", "Return one row per sample from the model"))
    return outputs


def _load_checkpoint(act: str, step: SupervisedStep, checkpoint: str | os.PathLike[str] | None) -> None:
    if checkpoint is not None:
        load_weights(act, step.parts["model"], user_path(checkpoint, act).absolute())


def _step_of(act: str, function: str, model: Any, loss: Any) -> SupervisedStep:
    usage = ("Use ", call(function, Code("model"), Code("loader")))
    if isinstance(model, SupervisedStep):
        if loss is not None:
            next_step = ("Pass the model of the step, or ", omit("loss"))
            raise InvalidOption(
                cannot(act, ("the step has its own loss, and ", option("loss"), " is given"), "", next_step)
            )
        return model
    check_type(act, "model", model, nn.Module, "a torch.nn.Module or a supervised_step", usage)
    check_callable(act, "loss", loss, loss_example(loss))
    parameters = list(model.parameters())
    if not parameters:
        found = f"{kind_of(model)} has no parameters"
        advice = "Call the model in a loop over the Loader instead"
        raise InvalidOption(cannot(act, found, "a model with parameters", advice))
    options = StepOptions(None, "auto", False, 1, None, False)
    # This optimizer never takes a step.
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    return SupervisedStep(model, optimizer, loss or nn.functional.cross_entropy, options, is_trained=False)


@contextmanager
def _full_pass(loader: Iterable[Any], *, in_order: bool = False) -> Iterator[None]:
    """Move a `Loader` to the start of its epoch, with `in_order` in stored order; restore it after the block."""
    if not isinstance(loader, Loader):
        yield
        return
    before = loader.state_dict()
    order = {"order": "sequential", "order_seed": 0} if in_order else {}
    with loader.aside():
        try:
            loader.load_state_dict({**before, **order, "samples": 0})
            yield
        finally:
            loader.load_state_dict(before)


def _rows_in(outputs: Any) -> int:
    while not isinstance(outputs, Tensor):
        outputs = next(iter(outputs.values() if isinstance(outputs, Mapping) else outputs))
    return len(outputs)


def _joined(outputs: list[Any]) -> Any:
    first = outputs[0] if outputs else None
    if isinstance(first, Tensor):
        # Restore the batch dimension, which `squeeze()` in a model removes from a last batch of one sample.
        return torch.cat([output if output.dim() else output[None] for output in outputs])
    if isinstance(first, Mapping):
        return {name: _joined([output[name] for output in outputs]) for name in first}
    if isinstance(first, tuple | list):
        columns = [_joined(list(column)) for column in zip(*outputs, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    found = f"the model returned {kind_of(first)}"
    raise InvalidOption(cannot("predict", found, "tensors", "Call the model in a loop over the Loader instead"))
