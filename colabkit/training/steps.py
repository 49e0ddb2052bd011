"""The usual training step: forward, loss, backward, update, in the way that suits the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colabkit.foundation import InvalidOption, cannot, kind_of
from colabkit.training.models import (
    Amp,
    Forward,
    Precision,
    Stateful,
    StepOptions,
    average,
    check_precision,
    check_training,
    compiled,
    convolutions,
    ddp_in,
    fails_in_channels_last,
    plain,
    precision_on,
    to_channels_last,
)
from colabkit.training.ranks import is_one_of_several

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]

_TAKE = "train on a batch"
_HALVES = (torch.bfloat16, torch.float16)


def supervised_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss = nn.functional.cross_entropy,
    *,
    scheduler: LRScheduler | None = None,
    amp: Amp = "auto",
    channels_last: bool | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    compile: bool | str = False,  # noqa: A002 - the name that torch gives it
) -> SupervisedStep:
    """Return the usual step for `train()`: forward, loss, backward, update; it gives the loss, and mostly accuracy.

    A batch is `(images, labels)`, or a dict of both. Images that are still `uint8` are brought to [0, 1] first. Labels
    are class numbers `[B]`, shares of classes `[B, C]`, or whatever else `loss` takes. There is an accuracy where the
    model gives scores `[B, C]` of two classes or more, and labels are class numbers, or shares beside cross-entropy.

    Under `torch.distributed` the gradients are means over all processes: a model that is not in a
    `DistributedDataParallel` is put into one.

    Args:
        model: takes images; on the device where it is to be trained by the first step.
        optimizer: of the model's parameters.
        loss: of what the model returns, in float32, and labels; a single number.
        scheduler: moved on after each update that was made, or None.
        amp: mixed precision: `"bf16"`, `"fp16"` with scaled gradients, or False; `"auto"` takes bf16 on GPUs of compute
            capability 8.0 and more, fp16 on those of 7.0 and more, none elsewhere.
        channels_last: keep images and the weights of convolutions in channels-last memory; None does so on a GPU, and
            leaves both as they are on a CPU, but for images of models on which torch fails there.
        accumulate: batches whose gradients are averaged to one update.
        clip: the largest norm that all gradients together may have; None leaves them alone.
        compile: compile the model with `torch.compile`; text is its mode, as `"reduce-overhead"`.

    Raises:
        InvalidOption: if an argument cannot be meant, or not with another.
    """
    options = StepOptions(scheduler, amp, channels_last, accumulate, clip, compile)
    check_training(model, optimizer, loss, scheduler)
    options.check()
    return SupervisedStep(model, optimizer, loss, options)


class SupervisedStep:
    """The usual training step, as `supervised_step()` makes it; its arguments are told there.

    What depends on the device is decided at the first batch, and anew if the model has been moved since. A part of the
    model that is in evaluation mode stays so while the model itself is in training mode; once the model is not, the
    next step calls `model.train()`.

    Attributes:
        parts: model and optimizer, by these names: what checkpoints hold unless told otherwise.
        updates: how many updates were made.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Loss, options: StepOptions) -> None:
        self._given = model
        self._model: nn.Module = plain(model)
        self._parameter = next(model.parameters())
        self._optimizer = optimizer
        self._loss = loss
        self._scheduler = options.scheduler
        self._accumulate = options.accumulate
        self._clip = options.clip
        self._options = options
        self._takes_shares = _is_cross_entropy(loss)
        self.parts: dict[str, Stateful] = {"model": self._model, "optimizer": cast(Stateful, optimizer)}
        self.updates = 0
        self._accumulated = 0
        self._device: torch.device | None = None
        self._autocast: AbstractContextManager[Any] = nullcontext()
        self._scaler: torch.amp.GradScaler | None = None
        self._scaler_state: dict[str, Any] = {}
        self._layout: torch.memory_format | None = None
        self._ddp: DistributedDataParallel | None = None
        self._forward: Forward = model
        self._evaluated: Forward = model

    def __call__(self, batch: Any) -> Mapping[str, Tensor]:
        """Train on a batch and return its loss, and the accuracy where there is one, where they are: on the device.

        Raises:
            InvalidOption: if the batch is none of images and labels, is on another device than the model, or the loss
                is not a single number.
            MissingPackage: if compiling needs a compiler that is not there.
        """
        images, labels = self._taken(batch)
        if not self._model.training:
            self._model.train()
        if self._accumulated == 0:
            self._optimizer.zero_grad(set_to_none=True)
        is_last = self._accumulated + 1 == self._accumulate
        with nullcontext() if is_last or self._ddp is None else self._ddp.no_sync():
            scores, value = self._scored(self._forward, images, labels)
            share = value if self._accumulate == 1 else value / self._accumulate
            (share if self._scaler is None else self._scaler.scale(share)).backward()
        self._accumulated += 1
        if is_last:
            self._update()
        values = {"loss": value.detach()}
        if self._has_accuracy(scores, labels):
            values["accuracy"] = _right(scores, labels).mean(dtype=torch.float32)
        return values

    @property
    def amp(self) -> str | bool:
        """The precision on the device where the model is: `"bf16"`, `"fp16"` or False."""
        return self._precision.name

    @property
    def is_whole(self) -> bool:
        """Whether no gradients are accumulated that have not been applied."""
        return self._accumulated == 0

    def flush(self) -> None:
        """Apply the gradients that are accumulated, as their mean, if there are any."""
        if self._accumulated == 0:
            return
        if self._ddp is not None:
            average(self._ddp, self._parameters())
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self._accumulate / self._accumulated)
        self._update()

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return the means over all samples of loss, and accuracy where there is one, of the model in evaluation mode.

        Under `torch.distributed` all processes call it together, each with its share of the batches, and get the same.

        Raises:
            InvalidOption: as for a step, or if there are no batches.
        """
        self._settle()
        modes = [(module, module.training) for module in self._model.modules()]
        iterator = iter(batches)
        exact = torch.float32 if self._parameter.device.type == "mps" else torch.float64
        sums = torch.zeros(4, dtype=exact, device=self._parameter.device)  # loss, of samples; right, of samples
        try:
            self._model.eval()
            with torch.no_grad():
                if self._ddp is not None and self._ddp.broadcast_buffers:  # those that a checkpoint of the first holds
                    for buffer in self._model.buffers():
                        distributed.broadcast(buffer, 0, group=self._ddp.process_group)
                for batch in iterator:
                    images, labels = self._taken(batch)
                    scores, value = self._scored(self._evaluated, images, labels)
                    samples = len(labels)
                    sums[0].add_(value.reshape(()), alpha=samples)
                    sums[1].add_(samples)
                    if self._has_accuracy(scores, labels):
                        sums[2].add_(_right(scores, labels).sum())
                        sums[3].add_(samples)
        finally:
            for module, is_training in modes:
                module.training = is_training
            if callable(close := getattr(iterator, "close", None)):
                close()
        if self._ddp is not None:
            distributed.all_reduce(sums, group=self._ddp.process_group)
        loss, samples, right, judged = sums.tolist()
        if not samples:
            found, needed = "no batches", "at least one"
            raise InvalidOption(cannot("evaluate the model", found, needed, "Pass a loader that can begin anew"))
        return {"loss": loss / samples, **({"accuracy": right / judged} if judged else {})}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, and what scaler and scheduler know; model and optimizer are in `parts`."""
        return {
            "updates": self.updates,
            "scaler": dict(self._scaler_state) if self._scaler is None else self._scaler.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "scheduler_kind": self._scheduler_kind,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; gradients that are accumulated are dropped, since they are of other weights.

        Raises:
            InvalidOption: if there was a scheduler and now is none, or the other way round, or it was of another kind.
        """
        if (state_dict["scheduler"] is None) != (self._scheduler is None):
            found = "the state is of a step " + ("without a scheduler" if self._scheduler is not None else "with one")
            needed = "one with a scheduler" if self._scheduler is not None else "one without"
            raise InvalidOption(cannot("load the state of a step", found, needed, "Make the step as before"))
        kind = state_dict.get("scheduler_kind", self._scheduler_kind)  # older states do not tell
        if kind != self._scheduler_kind:
            found, needed = f"the state is of a {kind}", f"one of a {self._scheduler_kind}, the scheduler of this step"
            raise InvalidOption(cannot("load the state of a step", found, needed, "Make the step as before"))
        self._accumulated = 0
        self.updates = state_dict["updates"]
        self._scaler_state = dict(state_dict["scaler"])
        if self._scaler is not None:
            self._scaler = self._new_scaler()
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state_dict["scheduler"])

    def __repr__(self) -> str:
        precision = self._precision
        told = [f"amp={precision.name!r} ({precision.reason})"]
        if self._wants_channels_last():
            told.append("channels_last=True")
        if self._accumulate > 1:
            told.append(f"accumulate={self._accumulate}")
        told += [f"{name}={value!r}" for name in ("clip", "compile") if (value := getattr(self._options, name))]
        return f"supervised_step({type(self._model).__name__}, {type(self._optimizer).__name__}, {', '.join(told)})"

    @property
    def _scheduler_kind(self) -> str | None:
        return None if self._scheduler is None else type(self._scheduler).__qualname__

    @property
    def _precision(self) -> Precision:
        return precision_on(self._parameter.device, self._options.amp, self._parameter.dtype)

    def _settle(self) -> None:
        """Decide what depends on the device, unless it is decided for the one where the model is."""
        device = self._parameter.device
        if device == self._device:
            return
        precision = self._precision
        check_precision(_TAKE, precision, device)
        self._autocast = torch.autocast(device.type, precision.dtype) if precision.dtype else nullcontext()
        if self._scaler is not None:
            self._scaler_state = self._scaler.state_dict()
        self._scaler = None
        if precision.name == "fp16":
            self._scaler = self._new_scaler()
        self._layout = None
        if self._wants_channels_last():
            self._layout = torch.channels_last
            to_channels_last(self._model, self._optimizer)
        elif device.type == "cpu" and fails_in_channels_last(self._model):
            self._layout = torch.contiguous_format
        self._ddp = ddp_in(self._given)
        self._forward = self._given
        self._evaluated = self._given if self._ddp is None else self._model  # no exchange: ranks may differ in batches
        if self._ddp is None and is_one_of_several():
            ids = [device.index] if device.type == "cuda" else None
            self._ddp = DistributedDataParallel(self._given, device_ids=ids)
            self._forward = self._ddp
        if self._options.compile:
            mode = self._options.compile if isinstance(self._options.compile, str) else None
            is_same = self._evaluated is self._forward
            self._forward = compiled(self._forward, mode)
            self._evaluated = self._forward if is_same else compiled(self._evaluated, mode)
        self._device = device

    def _wants_channels_last(self) -> bool:
        if self._options.channels_last is not None:
            return self._options.channels_last
        # On a CPU it is the images' memory that counts, and those of a Loader are in channels-last already. Around a
        # model there may be a DDP, whose buckets have the strides that the weights had.
        if self._parameter.device.type != "cuda" or ddp_in(self._given) is not None:
            return False
        return any(True for _ in convolutions(self._model))

    def _new_scaler(self) -> torch.amp.GradScaler:
        scaler = torch.amp.GradScaler(self._parameter.device.type)
        if self._scaler_state:
            scaler.load_state_dict(self._scaler_state)
        return scaler

    def _taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return images and labels of a batch, as the model takes them."""
        images, labels = _pair_of(batch)
        device = self._parameter.device
        if device != self._device:
            self._settle()
        if images.device != device or labels.device != device:
            raise self._elsewhere(images if images.device != device else labels)
        if images.dtype is torch.uint8:
            images = images.to(torch.float32).div_(255)
        if self._layout is not None and images.dim() == 4:
            images = images.contiguous(memory_format=self._layout)
        return images, labels

    def _elsewhere(self, tensor: Tensor) -> InvalidOption:
        """Return what is wrong if a batch is not where the model is."""
        if next(self._model.parameters()) is not self._parameter:  # as `to` does where memory is of another kind
            found, needed = "a model whose parameters are no longer those of the optimizer", "the same ones"
            return InvalidOption(cannot(_TAKE, found, needed, "Move the model before you make optimizer and step"))
        device = self._parameter.device
        next_step = f"Pass device={tensor.device.type!r} to model.to(), or device={device.type!r} to the Loader"
        return InvalidOption(cannot(_TAKE, f"data on {tensor.device}", f"all on {device} as the model is", next_step))

    def _scored(self, forward: Forward, images: Tensor, labels: Tensor) -> tuple[Any, Tensor]:
        """Return what the model gives, and the loss, which is computed in float32."""
        with self._autocast:
            scores = forward(images)
            if not isinstance(scores, Tensor):  # torch's own list of what needs float32 has to do
                return scores, _single(self._loss(scores, labels))
        if scores.dtype in _HALVES:
            scores = scores.float()
        return scores, _single(self._loss(scores, labels))

    def _has_accuracy(self, scores: Any, labels: Tensor) -> bool:
        """Return whether labels say which score should be the highest; values are not looked at: they are far away."""
        if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[1] < 2:
            return False
        if labels.is_floating_point():
            return self._takes_shares and labels.shape == scores.shape
        return labels.shape == scores.shape[:1]

    def _update(self) -> None:
        """Apply the gradients."""
        self._accumulated = 0
        if self._scaler is not None:
            if not self._scaled_update(self._scaler):
                return
        else:
            if self._clip is not None:
                nn.utils.clip_grad_norm_(self._parameters(), self._clip)
            self._optimizer.step()
        self.updates += 1
        if self._scheduler is not None:
            self._scheduler.step()

    def _scaled_update(self, scaler: torch.amp.GradScaler) -> bool:
        """Apply scaled gradients; return false if they were not finite and the optimizer was not called.

        A fused optimizer is called always and looks at the gradients on the device, where to ask would mean to wait.
        """
        made: list[bool] = []
        hook = self._optimizer.register_step_post_hook(lambda *_: made.append(True))
        try:
            if self._clip is not None:
                scaler.unscale_(self._optimizer)
                nn.utils.clip_grad_norm_(self._parameters(), self._clip)
            scaler.step(self._optimizer)
            scaler.update()
        finally:
            hook.remove()
        return bool(made)

    def _parameters(self) -> list[Tensor]:
        """Return what the optimizer updates, as of now: groups may have been added."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


def _pair_of(batch: Any) -> tuple[Tensor, Tensor]:
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
    raise InvalidOption(cannot(_TAKE, found, "it has to be two tensors, images and labels", next_step))


def _is_cross_entropy(loss: Any) -> bool:
    while isinstance(loss, partial):
        loss = loss.func
    return loss is nn.functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)


def _single(value: Any) -> Tensor:
    """Return a loss if it is a single number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    is_tensor = isinstance(value, Tensor)
    found = f"the loss is {f'a tensor of shape {list(value.shape)}' if is_tensor else kind_of(value)}"
    next_step = "Return its mean" if is_tensor else "Return what torch computes, not its value"
    raise InvalidOption(cannot(_TAKE, found, "it has to be a single number in a tensor", next_step))


def _right(scores: Tensor, labels: Tensor) -> Tensor:
    """Return which samples have their highest score where their label is, or where its share is highest."""
    return scores.detach().argmax(1) == (labels.argmax(1) if labels.is_floating_point() else labels)
