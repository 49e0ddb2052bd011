"""`SupervisedStep`: a training step with forward, loss, backward and update, adapted to the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from colabkit.foundation import InvalidOption, cannot
from colabkit.loading import map_tensors
from colabkit.training.batch_values import (
    USE_BATCH,
    AccuracyGroup,
    checked_loss,
    evaluation_sums,
    inputs_of,
    is_cross_entropy,
    misfit_features,
    misfit_images,
    misfit_numbers,
    pair_of,
    step_values,
    unclear_bytes,
)
from colabkit.training.models import (
    Forward,
    Precision,
    Stateful,
    StepOptions,
    advance,
    average,
    check_precision,
    compiled,
    convolutions,
    ddp_in,
    fails_in_channels_last,
    has_channels_last_weights,
    plain,
    precision_on,
    prefers_channels_last,
    to_channels_last,
)
from colabkit.training.ranks import is_one_of_several
from colabkit.training.shards import has_shards

_LOAD = "load the state of a step"
_NO_CONTEXT = nullcontext()
_HALVES = (torch.bfloat16, torch.float16)


class SupervisedStep:
    """The training step that `supervised_step()` returns; see that function for the arguments.

    Precision, memory format and `DistributedDataParallel` are set up at the first batch, and again if the model has
    moved to another device. If the model is in evaluation mode, the next step calls `model.train()`; submodules in
    evaluation mode, such as frozen ones, remain in this mode while the model itself is in training mode. A step that
    only evaluates a model is created with `is_trained=False`.

    Attributes:
        parts: the model and the optimizer, by these names; checkpoints hold them by default.
        scheduler: the learning rate scheduler, or None.
        updates: number of optimizer updates so far.
        accuracies: the batches whose accuracies `grouped()` computes together.

    Example:
        >>> import colabkit, torch
        >>> model = torch.nn.Linear(4, 2)
        >>> step = colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loss = step((torch.rand(8, 4), torch.zeros(8, dtype=torch.int64)))["loss"]
        >>> step.updates
        1
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[Any, Tensor], Tensor],
        options: StepOptions,
        is_trained: bool = True,
    ) -> None:
        self._given = model
        self._model: nn.Module = plain(model)
        self._parameter = next(model.parameters())
        # `fully_shard` distributes the gradients itself, and in evaluation mode needs every process, too.
        self._is_sharded = has_shards(model)
        self._optimizer = optimizer
        self._given_loss = loss
        self._loss = checked_loss(loss)
        self.scheduler = options.scheduler
        self._accumulate = options.accumulate
        self._clip = options.clip
        self._options = options
        self.accuracies = AccuracyGroup(is_cross_entropy(loss))
        self.parts: dict[str, Stateful] = {"model": self._model, "optimizer": cast(Stateful, optimizer)}
        self.updates = 0
        self._is_trained = is_trained
        self._accumulated = 0
        self._device: torch.device | None = None
        self._autocast: AbstractContextManager[Any] | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._scaler_state: dict[str, Any] = {}
        self._layout: torch.memory_format | None = None
        self._ddp: DistributedDataParallel | None = None
        self._forward: Forward = model
        self._evaluated: Forward = model

    def __call__(self, batch: Any) -> Mapping[str, Tensor]:
        """Train on a batch and return its loss, and its accuracy if defined, as tensors on the device.

        Raises:
            InvalidOption: if the batch does not consist of images and labels, or is on a different device from the
                model, or if the loss is not a single number.
            MissingPackage: if `torch.compile` finds no C++ compiler.
        """
        return step_values(*self._train_on(batch), self.accuracies.takes_shares)

    def grouped(self, batch: Any) -> Mapping[str, object]:
        """Train on a batch as `__call__` does, but return the result of `AccuracyGroup.add`."""
        return self.accuracies.add(*self._train_on(batch))

    def _train_on(self, batch: Any) -> tuple[Any, Tensor, Tensor]:
        images, labels = self._taken(batch)
        if not self._model.training:
            self._model.train()
        if self._accumulated == 0:
            self._optimizer.zero_grad(set_to_none=True)
        is_last = self._accumulated + 1 == self._accumulate
        with _NO_CONTEXT if is_last or self._ddp is None else self._ddp.no_sync():
            scores, value = self._scored(self._forward, images, labels)
            share = value if self._accumulate == 1 else value / self._accumulate
            (share if self._scaler is None else self._scaler.scale(share)).backward()
        self._accumulated += 1
        if is_last:
            self._update()
        return scores, labels, value

    @property
    def amp(self) -> str | bool:
        """The mixed precision on the model's current device: `"bf16"`, `"fp16"` or False."""
        return self._precision.name

    @property
    def is_whole(self) -> bool:
        """Whether no accumulated gradients are pending."""
        return self._accumulated == 0

    def flush(self) -> None:
        """Apply the mean of the accumulated gradients, if there are any."""
        if self._accumulated == 0:
            return
        if self._ddp is not None:
            average(self._ddp, self._parameters())
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self._accumulate / self._accumulated)
        self._update()

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Evaluate the model on `batches` and return the mean `"loss"`, and `"accuracy"` if defined, over all samples.

        For cross entropy, the mean has the class weights, and leaves out labels that are `ignore_index`.

        Under `torch.distributed`, call this in every process, each with its own batches; all get the same result.

        Raises:
            InvalidOption: as for a step, or if there are no batches.
        """
        exact = torch.float32 if self._parameter.device.type == "mps" else torch.float64
        sums = torch.zeros(5, dtype=exact, device=self._parameter.device)
        with self._evaluating(batches) as iterator:
            for batch in iterator:
                images, labels = self._taken(batch)
                scores, value = self._scored(self._evaluated, images, labels)
                sums += evaluation_sums(self._given_loss, scores, labels, value).to(sums)
        if is_one_of_several():
            distributed.all_reduce(sums, group=self._group)
        total, weights, right, judged, samples = sums.tolist()
        if not samples:
            next_step = "Pass a loader that has at least one batch and can be iterated repeatedly"
            raise InvalidOption(cannot("evaluate the model", "the loader returned no batches", "", next_step))
        return {"loss": total / weights if weights else math.nan, **({"accuracy": right / judged} if judged else {})}

    def outputs(self, batches: Iterable[Any]) -> list[Any]:
        """Return the model's outputs for the inputs of each batch, on the CPU, in evaluation mode.

        Raises:
            InvalidOption: if a batch has no tensor as inputs, or is on a different device from the model.
        """
        found = []
        # Other processes may not make the same call, so do not communicate with them.
        with self._evaluating(batches, is_collective=False) as iterator:
            for batch in iterator:
                inputs = inputs_of(batch)
                images, _ = self._taken((inputs, inputs))
                with self._autocast or _NO_CONTEXT:
                    scores = self._evaluated(images)
                found.append(map_tensors(scores, _as_result))
        return found

    @contextmanager
    def _evaluating(self, batches: Iterable[Any], *, is_collective: bool = True) -> Iterator[Iterator[Any]]:
        """Yield an iterator over the batches; in the block, the model is in evaluation mode, without gradients."""
        self._settle(is_collective)
        modes = [(module, module.training) for module in self._model.modules()]
        iterator = iter(batches)
        try:
            self._model.eval()
            with torch.no_grad():
                # Checkpoints hold rank 0's buffers, such as batch norm statistics, so every rank evaluates with these.
                if is_collective and self._has_own_buffers:
                    for buffer in self._model.buffers():
                        distributed.broadcast(buffer, 0, group=self._group)
                yield iterator
        finally:
            for module, is_training in modes:
                module.training = is_training
            if self._ddp is None and not self._is_sharded and is_one_of_several():
                # The next step or evaluation of all processes wraps the model.
                self._device = None
            if callable(close := getattr(iterator, "close", None)):
                close()

    @property
    def _group(self) -> distributed.ProcessGroup | None:
        return None if self._ddp is None else self._ddp.process_group

    @property
    def _has_own_buffers(self) -> bool:
        """Whether the buffers of the model may differ between processes."""
        return self._ddp.broadcast_buffers if self._ddp is not None else self._is_sharded and is_one_of_several()

    def state_dict(self) -> dict[str, Any]:
        """Return the update count and the states of scaler and scheduler; model and optimizer are in `parts`."""
        return {
            "updates": self.updates,
            "scaler": dict(self._scaler_state) if self._scaler is None else self._scaler.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scheduler_kind": self._scheduler_kind,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state. Accumulated gradients are dropped, since they belong to other weights.

        Raises:
            InvalidOption: if the state has a scheduler and this step has none, or vice versa, or their classes differ.
        """
        if (state_dict["scheduler"] is None) != (self.scheduler is None):
            found = "the state has a scheduler, but the step has none"
            if self.scheduler is not None:
                found = "the step has a scheduler, but the state has none"
            raise InvalidOption(cannot(_LOAD, found, "", "Create the step with the same scheduler as before"))
        # A state may lack the scheduler's class.
        kind = state_dict.get("scheduler_kind", self._scheduler_kind)
        if kind != self._scheduler_kind:
            kinds = f"the step has the scheduler {self._scheduler_kind}, but the state is from {kind}"
            raise InvalidOption(cannot(_LOAD, kinds, "", "Create the step with the same scheduler as before"))
        self._accumulated = 0
        self.updates = state_dict["updates"]
        self._scaler_state = dict(state_dict["scaler"])
        if self._scaler is not None:
            self._scaler = self._new_scaler()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])

    def __repr__(self) -> str:
        precision = self._precision
        options = [f"amp={precision.name!r} ({precision.reason})"]
        if self._wants_channels_last():
            options.append("channels_last=True")
        if self._accumulate > 1:
            options.append(f"accumulate={self._accumulate}")
        options += [f"{name}={value!r}" for name in ("clip", "compile") if (value := getattr(self._options, name))]
        return f"supervised_step({type(self._model).__name__}, {type(self._optimizer).__name__}, {', '.join(options)})"

    @property
    def _scheduler_kind(self) -> str | None:
        return None if self.scheduler is None else type(self.scheduler).__qualname__

    @property
    def _precision(self) -> Precision:
        if self._is_sharded and self._options.amp == "auto":
            return Precision(False, "the policy of fully_shard sets the precision")
        return precision_on(self._parameter.device, self._options.amp, self._parameter.dtype)

    def _settle(self, is_collective: bool = True) -> None:
        """Set up everything that depends on the device, unless it is already set up for the model's current device.

        Only a call that all processes make may wrap the model in DDP, since its constructor waits for the others.
        """
        device = self._parameter.device
        if device == self._device:
            return
        precision = self._precision
        check_precision(USE_BATCH, precision, device)
        self._autocast = torch.autocast(device.type, precision.dtype) if precision.dtype else None
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
        elif device.type == "cpu" and self._options.channels_last is None and has_channels_last_weights(self._model):
            self._layout = torch.channels_last
        self._ddp = ddp_in(self._given)
        self._forward = self._given
        # Ranks may evaluate different numbers of batches, so evaluate without DDP's synchronization.
        self._evaluated = self._given if self._ddp is None else self._model
        needs_ddp = self._ddp is None and not self._is_sharded
        if needs_ddp and self._is_trained and is_collective and is_one_of_several():
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
        # If the model is in a DDP, the weights must keep their strides: DDP's gradient buckets have the same strides.
        weight = self._parameter
        if not prefers_channels_last(weight.device, self._precision.dtype or weight.dtype):
            return False
        if ddp_in(self._given) is not None or self._is_sharded:
            return False
        return any(True for _ in convolutions(self._model))

    def _new_scaler(self) -> torch.amp.GradScaler:
        scaler = torch.amp.GradScaler(self._parameter.device.type)
        if self._scaler_state:
            scaler.load_state_dict(self._scaler_state)
        return scaler

    def _taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, labels = pair_of(batch)
        device = self._parameter.device
        if device != self._device:
            self._settle()
        if images.device != device or labels.device != device:
            raise self._elsewhere(images if images.device != device else labels)
        if images.dtype is torch.uint8:
            if images.dim() < 3:
                raise unclear_bytes(images)
            dtype = self._parameter.dtype
            if self._autocast is not None or not dtype.is_floating_point:
                # Autocast casts the images itself.
                dtype = torch.float32
            images = images.to(dtype).div_(255)
        elif images.dtype is torch.float64 and self._parameter.dtype is torch.float32:
            # NumPy's floats are float64 by default, which the model's layers would not accept.
            images = images.to(torch.float32)
        # Some losses, such as HuberLoss, would fail in the backward pass.
        if labels.dtype is torch.float64 and self._parameter.dtype is torch.float32:
            labels = labels.to(torch.float32)
        if self._layout is not None and images.dim() == 4:
            images = images.contiguous(memory_format=self._layout)
        return images, labels

    def _elsewhere(self, tensor: Tensor) -> InvalidOption:
        # `Module.to` replaces parameters instead of moving them in place if the tensor types are incompatible.
        if next(self._model.parameters()) is not self._parameter:
            replaced = "the model's parameters are no longer those of the optimizer"
            advice = "Move the model to its device before you create the optimizer and the step"
            return InvalidOption(cannot(USE_BATCH, replaced, "", advice))
        of_batch, of_model = tensor.device, self._parameter.device
        found = f"the batch is on {of_batch}, but the model is on {of_model}"
        batch_type, model_type = of_batch.type, of_model.type
        next_step = f"Call model.to({batch_type!r}), or pass device={model_type!r} to the Loader"
        return InvalidOption(cannot(USE_BATCH, found, "the same device", next_step))

    def _scored(self, forward: Forward, images: Tensor, labels: Tensor) -> tuple[Any, Tensor]:
        try:
            return self._scored_in_precision(forward, images, labels)
        except RuntimeError as error:
            takes = (layer.in_channels for layer in self._model.modules() if isinstance(layer, nn.Conv2d))
            if "channels" in str(error) and (clear := misfit_images(images, next(takes, None))) is not None:
                raise clear from None
            if "dtype" in str(error) and (clear := misfit_numbers(images, self._parameter.dtype)) is not None:
                raise clear from None
            if (clear := misfit_features(error, images, self._model)) is not None:
                raise clear from None
            raise

    def _scored_in_precision(self, forward: Forward, images: Tensor, labels: Tensor) -> tuple[Any, Tensor]:
        if self._autocast is None:
            scores = forward(images)
        else:
            with self._autocast:
                scores = forward(images)
                # Outputs that are not a tensor cannot be cast here, so autocast chooses the precision of the loss.
                if not isinstance(scores, Tensor):
                    return scores, self._loss(scores, labels)
        if isinstance(scores, Tensor) and scores.dtype in _HALVES:
            scores = scores.float()
        return scores, self._loss(scores, labels)

    def _update(self) -> None:
        self._accumulated = 0
        if self._scaler is not None:
            if not self._scaled_update(self._scaler):
                return
        else:
            if self._clip is not None:
                nn.utils.clip_grad_norm_(self._parameters(), self._clip)
            self._optimizer.step()
        self.updates += 1
        if self.scheduler is not None:
            advance(self.scheduler)

    def _scaled_update(self, scaler: torch.amp.GradScaler) -> bool:
        """Apply scaled gradients; return False if they were not finite and the update was skipped.

        A fused optimizer is always called. It checks the gradients on the device, and reading the result would wait for
        the GPU, so the update always counts. For other optimizers, `GradScaler` itself waits for the GPU. Avoiding
        that wait would require changing the user's optimizer, and the copy of the next batch is already under way.
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
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


def _as_result(output: Tensor) -> Tensor:
    return (output.float() if output.dtype in _HALVES else output).cpu()
