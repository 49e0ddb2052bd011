"""A mode of torch that records the kernels that it calls; `roll` makes its result contiguous, as on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class RecordedKernels(TorchDispatchMode):
    """Record the name and the result of each kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "roll":
            result = result.contiguous()
        self.calls.append((name, result))
        return result

    def largest(self, dtype: torch.dtype) -> int:
        """Return the largest number of elements among the results of the given dtype."""
        sizes = [found.numel() for _, found in self.calls if isinstance(found, Tensor) and found.dtype == dtype]
        return max(sizes, default=0)
