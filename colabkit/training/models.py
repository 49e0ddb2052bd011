"""Options of a supervised step; precision, memory format, DDP and compilation of models; a small example network."""

from __future__ import annotations

import inspect
import numbers
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colabkit.foundation import (
    Code,
    InvalidOption,
    MissingPackage,
    call,
    cannot,
    check_callable,
    check_number,
    check_one_of,
    check_type,
    check_whole_number,
    checked_call,
    kind_of,
    omit,
    option,
)
from colabkit.training.batch_values import loss_example
from colabkit.training.shards import check_data_parallel, has_shards, parameters_of


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored, such as a model, optimizer or scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state."""


def plain(part: Any) -> Any:
    """Return a model without the wrappers of DDP, `DataParallel` and `torch.compile`; they change state dict names."""
    while isinstance(part, nn.Module):
        inner = getattr(part, "_orig_mod", None)
        if isinstance(part, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = part.module
        if inner is None:
            break
        part = inner
    return part


Amp: TypeAlias = Literal["auto", "bf16", "fp16", False]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MAKE = "create a supervised step"
_COMPILE = option("compile", True)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The options of `supervised_step()`, with the same names."""

    scheduler: LRScheduler | None
    amp: Amp
    channels_last: bool | None
    accumulate: int
    clip: float | None
    compile: bool | str

    def check(self, model: nn.Module) -> None:
        """Raise `InvalidOption` if a value is invalid, also for this model; `check_training` checks the scheduler."""
        check_one_of(_MAKE, "amp", self.amp, ("auto", "bf16", "fp16", False))
        check_one_of(_MAKE, "channels_last", self.channels_last, (None, True, False))
        check_whole_number(_MAKE, "accumulate", self.accumulate, 1)
        if self.clip is not None:
            check_number(_MAKE, "clip", self.clip, above=0, example=1.0)
        if not isinstance(self.compile, bool | str) or self.compile == "":
            expected = "True, False or a mode of torch.compile"
            raise InvalidOption(cannot(_MAKE, option("compile", self.compile), expected, ("Use ", _COMPILE)))
        if has_shards(model):
            self._check_sharded()

    def _check_sharded(self) -> None:
        """Raise `InvalidOption` if a value does not work with the shards of `fully_shard`."""
        if self.amp == "fp16":
            next_step = ("Use ", option("amp", "bf16"), ", or fully_shard(model, mp_policy=...)")
            raise InvalidOption(cannot(_MAKE, (option("amp", "fp16"), " with a sharded model"), "", next_step))
        if self.channels_last:
            found = (option("channels_last", True), " with a sharded model, whose weights must remain contiguous")
            raise InvalidOption(cannot(_MAKE, found, "", omit("channels_last")))


def check_training(model: Any, optimizer: Any, loss: Any, scheduler: Any) -> None:
    """Raise `InvalidOption` unless model, optimizer, loss and scheduler are valid and belong together."""
    usage = ("Use ", call("supervised_step", Code("model"), Code("optimizer")))
    check_type(_MAKE, "model", model, nn.Module, "a torch.nn.Module", usage)
    check_type(_MAKE, "optimizer", optimizer, Optimizer, "a torch.optim.Optimizer", usage)
    check_callable(_MAKE, "loss", loss, loss_example(loss), optional=False)
    check_data_parallel(_MAKE, model)
    owned = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in owned for parameter in parameters_of(optimizer)):
        mismatch = "the optimizer has none of the model's parameters"
        raise InvalidOption(cannot(_MAKE, mismatch, "", "Create the optimizer from model.parameters() of this model"))
    # Inspect the class, since a scheduler replaces the instance's `step` with a wrapper.
    if _is_any_needed(list(inspect.signature(type(optimizer).step).parameters.values())[1:]):
        with_closure = f"optimizer is {kind_of(optimizer)}, whose step() requires a closure"
        next_step = "Use another optimizer, such as torch.optim.AdamW, or write a custom step"
        raise InvalidOption(cannot(_MAKE, with_closure, "a step() without required arguments", next_step))
    if scheduler is None:
        return
    step = getattr(scheduler, "step", None)
    if not callable(step) or not isinstance(scheduler, Stateful) or isinstance(scheduler, Optimizer):
        expected = "a scheduler from torch.optim.lr_scheduler, or None"
        example = ("For example, use ", option("scheduler", Code("StepLR(optimizer, 30)")))
        raise InvalidOption(cannot(_MAKE, f"scheduler is {kind_of(scheduler)}", expected, example))
    if _is_any_needed(inspect.signature(step).parameters.values()):
        with_metric = f"scheduler is {kind_of(scheduler)}, whose step() requires a metric"
        names = {"model": Code("model"), "optimizer": Code("optimizer"), "scheduler": Code("scheduler")}
        call_it = ", call scheduler.step(metric) in the function for "
        advice = (omit("scheduler"), call_it, option("validate"), ", and use ", option("state", names))
        raise InvalidOption(cannot(_MAKE, with_metric, "a step() without required arguments", advice))
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        foreign = "the scheduler belongs to another optimizer"
        raise InvalidOption(cannot(_MAKE, foreign, "", "Create the scheduler with the optimizer that you pass"))


def _is_any_needed(parameters: Iterable[inspect.Parameter]) -> bool:
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return any(one.default is one.empty and one.kind in positional for one in parameters)


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision in which a model computes.

    Attributes:
        name: `"bf16"` or `"fp16"` for mixed precision, False for the dtype of the weights.
        reason: reason for the choice, as text.
    """

    name: Literal["bf16", "fp16", False]
    reason: str

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype for autocast, or None without autocast."""
        return _DTYPES[self.name] if self.name else None


def precision_on(device: torch.device, amp: Amp, weights: torch.dtype = torch.float32) -> Precision:
    """Return the precision for a device.

    NVIDIA GPUs have fast bfloat16 from compute capability 8.0, and fast float16 from 7.0. This does not use
    `torch.cuda.is_bf16_supported()`, which also returns True for GPUs that emulate bfloat16 slowly.

    Args:
        device: device of the model.
        amp: the requested precision.
        weights: dtype of the model's weights.
    """
    if amp != "auto":
        return Precision(amp, "as requested")
    if weights != torch.float32:
        return Precision(False, f"the weights are {str(weights).removeprefix('torch.')}")
    if device.type != "cuda":
        return Precision(False, "mixed precision is automatic only on CUDA GPUs")
    capability = torch.cuda.get_device_capability(device)
    reason = f"the GPU has compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        return Precision("bf16", reason)
    return Precision("fp16" if capability >= (7, 0) else False, reason)


def prefers_channels_last(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether convolutions that compute in `dtype` are usually faster in channels-last memory format.

    Tensor cores require this format. They compute in half precision, and from compute capability 8.0 also in float32.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and (is_half or torch.cuda.get_device_capability(device) >= (8, 0))


def check_precision(act: str, precision: Precision, device: torch.device) -> None:
    """Raise `InvalidOption` if a device cannot train with a precision."""
    if precision.name == "fp16" and device.type != "cuda":
        found = (option("amp", "fp16"), f" with a model on {device}")
        next_step = ("Use ", option("amp", "auto"), ", or move the model to a GPU")
        raise InvalidOption(cannot(act, found, "a model on a CUDA GPU", next_step))


Forward: TypeAlias = Callable[[Tensor], Any]

_LANES = 16
_NO_COMPILER = re.compile(r"No working C\+\+ compiler|Failed to find C compiler")


def convolutions(model: nn.Module) -> Iterable[Tensor]:
    """Yield the weights of all two-dimensional convolutions, except those that a lazy module has yet to create."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) and not nn.parameter.is_lazy(module.weight):
            yield module.weight


def to_channels_last(model: nn.Module, optimizer: Optimizer) -> None:
    """Convert convolution weights, and the optimizer's state tensors for them, to channels-last memory format."""
    for weight in convolutions(model):
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        known = optimizer.state.get(weight, {})
        for name, value in known.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                known[name] = value.contiguous(memory_format=torch.channels_last)


def has_channels_last_weights(model: nn.Module) -> bool:
    """Return whether any convolution weights are in channels-last memory format.

    Such a convolution converts contiguous images to channels-last, in the forward pass and again in the backward pass.
    """
    last = torch.channels_last
    return any(
        weight.is_contiguous(memory_format=last) and not weight.is_contiguous() for weight in convolutions(model)
    )


def fails_in_channels_last(model: nn.Module) -> bool:
    """Return whether the backward pass on a CPU may crash or return wrong gradients for channels-last images.

    The backward pass of strided 1x1 convolutions writes out of bounds if they have fewer input channels than a vector
    has lanes (16 with AVX-512).
    Source: https://github.com/uxlfoundation/oneDNN/issues/6035, open in November 2026.
    """
    return any(
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and module.stride != (1, 1)
        and module.in_channels // module.groups < _LANES
        for module in model.modules()
    )


def advance(scheduler: LRScheduler) -> None:
    """Step a scheduler; raise `InvalidOption` if it is at its end, which some schedulers have."""
    try:
        scheduler.step()
    except ValueError as error:
        found = f"{type(scheduler).__name__} fails with {str(error).rstrip('.')}"
        advice = "To train longer, use another folder for the checkpoints, or a scheduler without a fixed length"
        next_step = f"Create it with enough steps: one for each update, in all epochs. {advice}"
        raise InvalidOption(cannot("update the learning rate", found, "", next_step)) from error


def ddp_in(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` in a model, or None."""
    return next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)


def average(ddp: DistributedDataParallel, parameters: list[Tensor]) -> None:
    """Average over all processes the gradients that were accumulated under `no_sync()`.

    As with DDP itself, a parameter that has no gradient in any process gets none.
    """
    has = torch.tensor([parameter.grad is not None for parameter in parameters], device=parameters[0].device).int()
    distributed.all_reduce(has, group=ddp.process_group)
    for parameter, count in zip(parameters, has.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad, group=ddp.process_group)
            parameter.grad.div_(distributed.get_world_size(ddp.process_group))


def compiled(module: nn.Module, mode: str | None) -> Forward:
    """Return a function that runs the compiled model, and raises `MissingPackage` if there is no C++ compiler.

    Raises:
        InvalidOption: if `torch.compile` rejects the model or the mode.
    """
    act = f"compile {type(plain(module)).__name__}"
    try:
        # A last batch of another size must not replace the graph with a slower one for any batch size.
        run = torch.compile(module, mode=mode, dynamic=False)
    except RuntimeError as error:
        found = (option("compile", mode or True), f" fails with {type(error).__name__}: {str(error).rstrip('.')}")
        raise InvalidOption(cannot(act, found, "", ("Use ", option("compile", mode is not None)))) from error

    def forward(images: Tensor) -> Any:
        try:
            return run(images)
        except Exception as error:
            if _NO_COMPILER.search(str(error)):
                missing = "torch.compile found no C++ compiler"
                next_step = ("Install a compiler (apt-get install g++), or use ", option("compile", False))
                raise MissingPackage(cannot(act, missing, "", next_step)) from error
            raise

    return forward


_GRID = 8
"""Approximate size, in pixels, of the shorter side after the first layer of `small_network()`."""
_COLORS = range(1, 5)
_SHAPE = option("shape", (64, 64, 3))


@checked_call()
def small_network(classes: int, shape: Sequence[int], *, seed: int = 0) -> nn.Module:
    """Return a small convolutional network, as a first model or a baseline.

    It consists of three convolutions with batch normalization, 2x2 adaptive max pooling and a linear layer, in
    channels-last memory format, on the CPU. With 10 classes, it has about 230,000 parameters for images of 8x8 to 32x32
    pixels and 540,000 for 224x224. The first layer reduces the shorter side of larger images to about 8 pixels, so the
    network is fast but sees little detail of large images.

    Args:
        classes: number of scores that the network outputs.
        shape: height, width and channels of the images, such as `PackReport.sample_shape`.
        seed: seed of the weights. Torch's global generators are not changed.

    Returns:
        A network that takes float images `[B, C, H, W]` and returns scores `[B, classes]`.

    Raises:
        InvalidOption: if `classes` is less than 1, or `shape` is not an image shape.

    Example:
        >>> import colabkit, torch
        >>> model = colabkit.small_network(10, (8, 8, 3))
        >>> model(torch.rand(4, 3, 8, 8)).shape
        torch.Size([4, 10])
    """
    act = "create a small network"
    if isinstance(classes, list | tuple):
        names = f"classes is {kind_of(classes)}"
        count = len(classes)
        raise InvalidOption(cannot(act, names, "the number of classes", ("Use ", option("classes", count))))
    check_whole_number(act, "classes", classes, 1)
    sides = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else ()
    if len(sides) != 3 or not all(isinstance(side, numbers.Integral) and side >= 1 for side in sides):
        expected = "height, width and channels, each 1 or more"
        raise InvalidOption(cannot(act, option("shape", shape), expected, ("For example, use ", _SHAPE)))
    if sides[0] in _COLORS and sides[2] > max(_COLORS):
        # Images are at least five pixels high, so a first number of one to four is the number of channels of a tensor.
        channels_last = (*sides[1:], sides[0])
        ordered = ("Use ", option("shape", channels_last))
        found = (option("shape", sides), " has the channels first")
        raise InvalidOption(cannot(act, found, "height, width and channels", ordered))
    height, width, channels = shape
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        layers: list[nn.Module] = []
        for features, stride in ((32, max(1, min(height, width) // _GRID)), (64, 1), (128, 2)):
            convolution = nn.Conv2d(channels, features, 2 * stride + 1, stride, stride, bias=False)
            layers += [convolution, nn.BatchNorm2d(features), nn.ReLU()]
            channels = features
        head = [nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4 * channels, classes)]
        return nn.Sequential(*layers, *head).to(memory_format=torch.channels_last)
