"""Snapshots: the state of the random generators, and copies of tensors that training cannot change."""

from __future__ import annotations

import io
import random
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from colabkit.foundation import FileFailed, InvalidOption, cannot, memory_limits, option, read_file
from colabkit.training.shards import is_dtensor

_Key: TypeAlias = tuple[torch.device, int, int, torch.dtype]

# Immutable types that `torch.load(weights_only=True)` restores. Subclasses, such as an IntEnum, are not included.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_CONTAINERS = (dict, OrderedDict, list, tuple)
# Total size in bytes up to which new buffers are allocated without checking the available memory.
_UNCHECKED_BYTES = 64 << 20
_RESERVE_BYTES = 256 << 20
# Maximum ratio of allocated to requested pinned memory, since torch rounds the size up to a power of two.
_PINNED_TIMES = 2


@dataclass(frozen=True, slots=True)
class ContentCopy:
    """The content of a checkpoint that is to be written.

    Attributes:
        content: new containers; their tensors are CPU copies if `is_apart`, otherwise they share the originals' memory.
        size: size of the tensors in bytes.
        is_apart: whether the tensors are copies, so that training cannot change them.
    """

    content: dict[str, Any]
    size: int
    is_apart: bool


class _StorageRange:
    """The range of elements of a storage that tensors use, and a copy of this range."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.first, self.end = _bounds(tensor)
        self.only: Tensor | None = tensor if tensor.is_contiguous() else None
        self.copy: Tensor

    def widen(self, tensor: Tensor) -> None:
        self.only = None
        first, end = _bounds(tensor)
        self.first, self.end = min(self.first, first), max(self.end, end)

    @property
    def size(self) -> int:
        return (self.end - self.first) * self.dtype.itemsize

    def fill(self) -> None:
        """Copy the range into `copy`; copies from a GPU are asynchronous."""
        if self.only is not None:
            self.view_for(self.only).copy_(self.only, non_blocking=True)
            return
        source = torch.empty(0, dtype=torch.uint8, device=self.device)
        source.set_(self.storage, self.first * self.dtype.itemsize, (self.size,), (1,))
        self.copy.copy_(source, non_blocking=True)

    def view_for(self, tensor: Tensor) -> Tensor:
        start = tensor.storage_offset() - self.first
        apart = torch.empty(0, dtype=self.dtype, device="cpu")
        return apart.set_(self.copy.untyped_storage(), start, tensor.size(), tensor.stride())

    @property
    def kind(self) -> tuple[int, bool]:
        """The kind of buffer needed: its size in bytes, and whether a GPU copies into it."""
        return self.size, self.device.type != "cpu"


class ContentCopier:
    """A copier of checkpoint content.

    It reuses its CPU buffers, because allocating new pages takes longer than copying. Shared storages are copied once,
    and strides are preserved, so tied weights stay tied. Sparse and quantized tensors, tensors on devices other than
    CPU and CUDA, and objects of other types are copied with `torch.save` and `torch.load` in memory. A copy is valid
    until the next call of `copy`.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, bool], list[Tensor]] = {}
        self._pins = True

    def copy(self, act: str, content: Mapping[str, Any]) -> ContentCopy:
        """Return a copy of the content, or the original tensors if there is not enough memory.

        Raises:
            InvalidOption: if the content holds objects that cannot be loaded with `weights_only=True`.
        """
        # Tensors are identified by their IDs, so keep references to them.
        content = dict(content)
        extents: dict[_Key, _StorageRange] = {}
        of_tensors: dict[int, _StorageRange] = {}
        for tensor in _plain_tensors(content):
            key = _key(tensor)
            extent = extents.get(key)
            if extent is None:
                extent = extents[key] = _StorageRange(tensor)
            elif id(tensor) not in of_tensors:
                extent.widen(tensor)
            of_tensors[id(tensor)] = extent
        size = sum(extent.size for extent in extents.values())
        if not self._has_buffers(extents):
            return ContentCopy(_ContentBuilder(act, None).mapping(content), size, is_apart=False)
        with torch.no_grad():
            devices = set()
            for extent in extents.values():
                extent.fill()
                if extent.device.type == "cuda":
                    devices.add(extent.device)
            for device in devices:
                torch.cuda.current_stream(device).synchronize()
            return ContentCopy(_ContentBuilder(act, of_tensors).mapping(content), size, is_apart=True)

    def clear(self) -> None:
        """Free the buffers, and with them the page-locked memory that torch otherwise keeps until the process ends."""
        kept, self._kept = self._kept, {}
        # Freeing page-locked memory makes the host wait for the GPU.
        are_locked = any(for_gpu for _, for_gpu in kept)
        del kept
        if are_locked and torch.cuda.is_initialized() and hasattr(torch._C, "_host_emptyCache"):  # noqa: SLF001 - not public
            torch._C._host_emptyCache()  # noqa: SLF001

    def _has_buffers(self, extents: Mapping[_Key, _StorageRange]) -> bool:
        """Assign a new or reused buffer to every range; without enough memory, free all buffers and return False."""
        kept, self._kept = self._kept, {}
        wanting = []
        for extent in extents.values():
            if fitting := kept.get(extent.kind):
                extent.copy = fitting.pop()
                self._kept.setdefault(extent.kind, []).append(extent.copy)
            else:
                wanting.append(extent)
        # Free unused buffers before allocating new ones.
        del kept
        needed = sum(extent.size * (_PINNED_TIMES if extent.kind[1] else 1) for extent in wanting)
        if needed > _UNCHECKED_BYTES and needed + _RESERVE_BYTES > memory_limits(read_file).available_bytes:
            self._kept = {}
            return False
        for extent in wanting:
            extent.copy = self._new_buffer(*extent.kind)
            self._kept.setdefault(extent.kind, []).append(extent.copy)
        return True

    def _new_buffer(self, size: int, is_for_gpu: bool) -> Tensor:
        if is_for_gpu and self._pins:
            try:
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError:
                # Copies to pageable memory also work, but are slower.
                self._pins = False
        return torch.empty(size, dtype=torch.uint8, device="cpu")


class _ContentBuilder:
    """A builder of new nested containers that hold copies of the tensors, or the original tensors."""

    def __init__(self, act: str, extents: Mapping[int, _StorageRange] | None) -> None:
        self._act = act
        # Ranges by the ID of the tensor.
        self._extents = extents
        # New containers by the ID of the original one, so that shared containers stay shared.
        self._made: dict[int, Any] = {}

    def mapping(self, content: Mapping[str, Any]) -> dict[str, Any]:
        return {str(name): self._of(value) for name, value in content.items()}

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _CONSTANTS:
            return value
        if self._extents is not None and id(value) in self._extents:
            return self._extents[id(value)].view_for(value)
        if _is_plain(value):
            return self._tensor(value)
        if isinstance(value, np.generic) and type(number := value.item()) in _CONSTANTS:
            return number
        if kind not in _CONTAINERS:
            return self._through_memory(value)
        if id(value) in self._made:
            return self._made[id(value)]
        if kind is tuple:
            return tuple(map(self._of, value))
        made = self._made[id(value)] = kind()
        if kind is list:
            made += map(self._of, value)
            return made
        made.update((self._of(key), self._of(one)) for key, one in value.items())
        # The attributes of a `Module.state_dict()` hold the versions of its modules.
        if kind is OrderedDict and vars(value):
            vars(made).update((key, self._of(one)) for key, one in vars(value).items())
        return made

    def _tensor(self, tensor: Tensor) -> Tensor:
        if self._extents is None:
            return tensor.detach()
        # Tensors without elements have no range.
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")

    def _through_memory(self, value: Any) -> Any:
        if is_dtensor(value):
            found = "the state has a tensor that is sharded over processes (DTensor)"
            expected = "complete tensors, since one process writes the checkpoint"
            next_step = ("Pass the sharded model and its optimizer themselves in ", option("state"))
            raise InvalidOption(cannot(self._act, found, expected, next_step))
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            return torch.load(buffer, map_location="cpu", weights_only=True)
        # Pickling runs code of the objects, which may raise any exception.
        except Exception as error:
            kind = type(value)
            raise unsafe(
                self._act, f"the state has an object of the type {kind.__module__}.{kind.__qualname__}"
            ) from error


def unsafe(act: str, found: str) -> InvalidOption:
    """Return the error for content that cannot be loaded safely; `found` is the reason."""
    expected = "only tensors, numbers, text, lists and dicts, which can be loaded safely"
    return InvalidOption(cannot(act, found, expected, "Convert other objects to these, or remove them from the state"))


def unsavable(act: str, error: Exception) -> FileFailed | InvalidOption:
    """Return an error with the cause of a torch error, because torch's message has several lines and color codes."""
    if lacks_memory(error):
        return FileFailed(cannot(act, "there is not enough memory", "", "Free some memory"))
    if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return unsafe(act, f"the state has an object of the type {match[1]}")
    line = (str(error).splitlines() or [""])[0][:200]
    return unsafe(act, f"the state cannot be saved ({type(error).__name__}: {line})")


def lacks_memory(error: Exception) -> bool:
    """Return whether a torch error means that there is not enough memory."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


def _plain_tensors(content: Mapping[str, Any]) -> Iterator[Tensor]:
    waiting: list[Any] = list(content.values())
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind in _CONSTANTS:
            continue
        if kind in _CONTAINERS:
            if id(value) not in seen:
                seen.add(id(value))
                waiting += value if kind in (list, tuple) else value.values()
                if kind is OrderedDict:
                    waiting += vars(value).values()
        elif _is_plain(value) and value.numel():
            yield value


def _is_plain(value: Any) -> bool:
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.device.type in ("cpu", "cuda")
        and not (value.is_quantized or value.is_conj() or value.is_neg())
    )


def _key(tensor: Tensor) -> _Key:
    # Several storages of NumPy memory may start at one address with different lengths, so the key includes the length.
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes(), tensor.dtype


def _bounds(tensor: Tensor) -> tuple[int, int]:
    first = int(tensor.storage_offset())
    if tensor.is_contiguous():
        return first, first + tensor.numel()
    reach = sum((int(count) - 1) * int(stride) for count, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return first, first + reach + 1


def random_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, and of CUDA if it is initialized."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the global random generators; states of CUDA devices that this machine lacks are ignored.

    Args:
        state: result of `random_state()`.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available():
        for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator.cpu(), device)
