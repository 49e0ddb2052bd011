"""`supervised_step()`: checks its arguments and returns a `SupervisedStep`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colabkit.foundation import checked_call
from colabkit.training.models import StepOptions, check_training
from colabkit.training.steps import SupervisedStep


@checked_call()
def supervised_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[Any, Tensor], Tensor] = nn.functional.cross_entropy,
    *,
    scheduler: LRScheduler | None = None,
    amp: Literal["auto", "bf16", "fp16", False] = "auto",
    channels_last: bool | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    compile: bool | str = False,  # noqa: A002 - the same name as torch.compile
) -> SupervisedStep:
    """Return a supervised training step for `train()`: forward, loss, backward and update.

    A batch is `(images, labels)`, or a dict with both, such as `"X"` and `"Y"`, or `"image"` and `"label"`. `uint8`
    images are first scaled to [0, 1], and other `uint8` samples are refused. Samples and labels in float64 are
    converted to float32 if the model is in float32. Labels are class indices `[B]`, class probabilities `[B, C]`,
    regression targets `[B]` for outputs `[B]` or (with losses of torch) `[B, 1]`, or anything else that `loss` takes.
    The step returns the loss. It also returns the accuracy if the model outputs scores `[B, C]` for two or more classes
    and the labels are class indices, or class probabilities with a cross-entropy loss.

    Under `torch.distributed`, gradients are averaged over all processes. The step wraps the model in
    `DistributedDataParallel`, unless the model is already wrapped or `fully_shard` (FSDP2) was applied to it.

    Args:
        model: model that takes images. It must be on its training device before the first step.
        optimizer: optimizer of the model's parameters.
        loss: function of the model's output (in float32) and the labels that returns a tensor with one number.
        scheduler: learning rate scheduler, stepped after each optimizer update, or None.
        amp: mixed precision: `"bf16"`, `"fp16"` with gradient scaling, or False. For float32 weights,
            `"auto"` uses bf16 on CUDA GPUs of compute capability 8.0 or higher, and fp16 on those of 7.0 or higher;
            otherwise, and for models sharded by `fully_shard`, it uses no mixed precision. With fp16, an optimizer with
            `fused=True` is faster, because the host does not wait for the GPU at each update.
        channels_last: whether to keep images and convolution weights in channels-last memory format. None does so on a
            CUDA GPU in half precision, or of compute capability 8.0 or higher, unless you have wrapped the model in
            DDP. On a CPU, it leaves the weights unchanged; images become channels-last for a model whose convolution
            weights are, and contiguous for models that fail with channels-last images.
        accumulate: number of batches whose gradients are averaged for one update.
        clip: maximum norm of all gradients together, or None for no clipping.
        compile: whether to compile the model with `torch.compile`; a string is its mode, such as `"reduce-overhead"`.

    Returns:
        A callable that trains on one batch and returns a dict of tensors on the device.

    Raises:
        InvalidOption: if an argument is invalid, or contradicts another one.

    Example:
        >>> import colabkit, torch
        >>> model = colabkit.small_network(10, (8, 8, 3))
        >>> step = colabkit.supervised_step(model, torch.optim.Adam(model.parameters()))
        >>> images, labels = torch.rand(4, 3, 8, 8), torch.tensor([3, 1, 4, 1])
        >>> sorted(step((images, labels)))
        ['accuracy', 'loss']
    """
    options = StepOptions(scheduler, amp, channels_last, accumulate, clip, compile)
    check_training(model, optimizer, loss, scheduler)
    options.check(model)
    return SupervisedStep(model, optimizer, loss, options)
