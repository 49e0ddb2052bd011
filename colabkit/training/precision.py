"""Which numbers a model computes with: what each device is good at, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from colabkit.foundation import InvalidOption, cannot

Amp: TypeAlias = Literal["auto", "bf16", "fp16", False]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """The numbers that a model computes with.

    Attributes:
        name: `"bf16"` or `"fp16"` for mixed precision, False for the model's own.
        reason: why.
    """

    name: Literal["bf16", "fp16", False]
    reason: str

    @property
    def dtype(self) -> torch.dtype | None:
        """The type that autocast computes in, None without autocast."""
        return _DTYPES[self.name] if self.name else None


def precision_on(device: torch.device, amp: Amp, weights: torch.dtype = torch.float32) -> Precision:
    """Return the precision for a device.

    NVIDIA GPUs compute in bfloat16 from compute capability 8.0 on, and in float16 from 7.0 on. What
    `torch.cuda.is_bf16_supported()` says is not asked: it is true also where bfloat16 is emulated, and slow.

    Args:
        device: where the model is.
        amp: what the user asks for.
        weights: type of the model's weights.
    """
    if amp != "auto":
        return Precision(amp, "as asked for")
    if weights != torch.float32:
        return Precision(False, f"its weights are {str(weights).removeprefix('torch.')}")
    if device.type != "cuda":
        return Precision(False, "only a CUDA GPU is sure to gain by it")
    capability = torch.cuda.get_device_capability(device)
    reason = f"the GPU is of compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        return Precision("bf16", reason)
    return Precision("fp16" if capability >= (7, 0) else False, reason)


def check_precision(act: str, precision: Precision, device: torch.device) -> None:
    """Raise `InvalidOption` if a device cannot train with a precision."""
    if precision.name == "fp16" and device.type != "cuda":
        next_step = "Use amp='auto', or move the model to a GPU"
        raise InvalidOption(cannot(act, f"amp='fp16' and a model on {device}", "a CUDA GPU for fp16", next_step))
