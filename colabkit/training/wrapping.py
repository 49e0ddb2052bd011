"""What is put around a model for training: other processes, a compiler, a layout in memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from colabkit.foundation import InvalidOption, MissingPackage, cannot
from colabkit.training.saving import plain

Forward: TypeAlias = Callable[[Tensor], Any]

_LANES = 16
_NO_COMPILER = re.compile(r"No working C\+\+ compiler|Failed to find C compiler")


def convolutions(model: nn.Module) -> Iterable[Tensor]:
    """Yield the weights of all two-dimensional convolutions."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            yield module.weight


def to_channels_last(model: nn.Module, optimizer: Optimizer) -> None:
    """Lay out weights of convolutions by channels last, and what the optimizer knows of each likewise."""
    for weight in convolutions(model):
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        known = optimizer.state.get(weight, {})
        for name, value in known.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                known[name] = value.contiguous(memory_format=torch.channels_last)


def fails_in_channels_last(model: nn.Module) -> bool:
    """Return whether the backward pass of a model crashes on a CPU, or is wrong, with images in channels-last memory.

    That of strided 1x1 convolutions over fewer channels than a vector has lanes, 16 with AVX-512, writes past its
    memory.
    Source: https://github.com/uxlfoundation/oneDNN/issues/6035, open in November 2026.
    """
    return any(
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and module.stride != (1, 1)
        and module.in_channels // module.groups < _LANES
        for module in model.modules()
    )


def is_one_of_several() -> bool:
    """Return whether this process trains together with others."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def ddp_in(model: nn.Module) -> DistributedDataParallel | None:
    """Return what exchanges the gradients of a model, None if nothing does."""
    return next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)


def average(ddp: DistributedDataParallel, parameters: list[Tensor]) -> None:
    """Bring gradients that were kept from the exchange to their mean over all processes.

    A parameter that no process has a gradient of keeps none, as after the exchange itself.
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
    """Return a compiled model, which shares all with the model itself; its names in checkpoints stay the model's."""
    act = f"compile {type(plain(module)).__name__}"
    try:
        run = torch.compile(module, mode=mode)
    except RuntimeError as error:
        raise InvalidOption(cannot(act, f"compile={mode!r}", "a mode of torch.compile", "Use compile=True")) from error

    def forward(images: Tensor) -> Any:
        try:
            return run(images)
        except Exception as error:
            if _NO_COMPILER.search(str(error)):
                needed, next_step = "one for torch.compile", "Install it (apt-get install g++), or use compile=False"
                raise MissingPackage(cannot(act, "no C++ compiler", needed, next_step)) from error
            raise

    return forward
