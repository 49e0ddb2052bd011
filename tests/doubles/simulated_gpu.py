"""A simulated GPU: streams, events and a caching allocator, with virtual time and a check for data races.

Tensors of the simulated GPU are CPU tensors in blocks of memory that the allocator reuses as torch's does: a block is
free for new work on its stream as soon as its last tensor is freed; if `record_stream` named other streams, only once
these have passed the events that are recorded at that moment. Operations take effect immediately, so values are always
correct. Each operation is also checked with vector clocks: `DataRace` is raised if two operations use the same memory,
at least one of them writes, and nothing orders them. The order is the one that CUDA guarantees: within a stream,
through events, and through waits of the host. A missing order is found even if no race happens in the run.

Each thread of the host has its own virtual time. A stream starts an operation when its previous one, the events that it
waits for and the host's time allow, so durations and idle times are exact.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from colabkit.loading.engine import device, device_decoder

DEVICE = torch.device("cuda", 0)
_Clock = dict[int, int]
# For copies of more pageable memory than this, in bytes, the host waits for the stream.
_PAGEABLE_BYTES = 64 << 10
# In-place functions that start work on the GPU, each with the index of the argument that is written.
_IN_PLACE = {torch.Tensor.copy_: 0, torch.Tensor.__setitem__: 0, torch.Tensor.fill_: 0}


class DataRace(AssertionError):
    """Two operations use the same memory, and nothing orders them."""


class Host:
    """A thread of the host: its virtual time, and the operations that it knows to have ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self.known: _Clock = {}

    def wait_for(self, other: Host) -> None:
        """Order this thread after all operations that another thread has done so far."""
        self.now = max(self.now, other.now)
        _merge(self.known, other.known)


class Stream:
    """A stream; operations run in order."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu
        self.device = gpu.device
        self.number = len(gpu.streams)
        self.ends = 0.0
        self.idle = 0.0
        self.known: _Clock = {}
        gpu.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.gpu.calls["wait_event"] += 1
        if event.is_recorded:
            self.ends = max(self.ends, event.at)
            _merge(self.known, event.known)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def run(self, seconds: float, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        """Queue an operation."""
        host = self.gpu.host
        start = max(self.ends, host.now)
        self.ends = start + seconds
        _merge(self.known, host.known)
        self.known[self.number] = self.known.get(self.number, 0) + 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self.gpu.uses_of(tensor).add(self.number, self.known, is_write)


class Event:
    """An event. As in CUDA, `elapsed_time` fails unless both events have been reached."""

    gpu: SimulatedGpu

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.is_recorded = False
        self.at = 0.0
        self.known: _Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpu.current
        self.gpu.calls["record"] += 1
        host = self.gpu.host
        _merge(stream.known, host.known)
        self.is_recorded, self.at, self.known = True, max(stream.ends, host.now), dict(stream.known)
        stream.ends = self.at

    def query(self) -> bool:
        host = self.gpu.host
        is_reached = not self.is_recorded or self.at <= host.now
        if is_reached:
            _merge(host.known, self.known)
        return is_reached

    def synchronize(self) -> None:
        host = self.gpu.host
        self.gpu.contexts.add(self.gpu.current_device())
        host.now = max(host.now, self.at)
        _merge(host.known, self.known)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.current).wait_event(self)

    def elapsed_time(self, later: Event) -> float:
        for event in (self, later):
            if not event.is_recorded or event.at > self.gpu.host.now:
                raise RuntimeError("CUDA error: device not ready")
        return 1000 * (later.at - self.at)


class Uses:
    """The uses of a block of memory."""

    def __init__(self) -> None:
        # The newest operation of each stream that reads or writes the block.
        self._newest: dict[tuple[int, bool], int] = {}

    def add(self, number: int, known: _Clock, is_write: bool) -> None:
        """Add the newest operation of stream `number`; `known` has the newest operations that precede it, by stream."""
        self.check(f"stream {number}", known, is_write)
        if is_write:
            self._newest.clear()
        self._newest[number, is_write] = known[number]

    def check(self, who: str, known: _Clock, is_write: bool) -> None:
        for (other, was_write), step in self._newest.items():
            if (is_write or was_write) and known.get(other, 0) < step:
                doing = "writes" if is_write else "reads"
                raise DataRace(f"{who} {doing} memory that stream {other} may still use")


class Memory:
    """A block of device memory."""

    def __init__(self, size: int, stream: Stream) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.stream = stream
        self.recorded: set[Stream] = set()
        self.pending: list[Event] = []
        self.uses = Uses()


class SimulatedGpu(TorchFunctionMode):
    """The simulated GPU. As a context manager, it runs the operations of this thread on tensors that it owns.

    Args:
        copy_bytes_per_s: speed of copies from the host.
        total_bytes: size of the memory.
        device: the GPU; the current one of every thread is the first GPU until the thread chooses another one.

    Attributes:
        contexts: the GPUs on which CUDA has created a context because a thread left a stream or waited for an event.
    """

    def __init__(
        self, copy_bytes_per_s: float = float("inf"), total_bytes: int = 16 << 30, device: torch.device = DEVICE
    ) -> None:
        super().__init__()
        self.device = device
        self.contexts: set[int] = set()
        self.copy_bytes_per_s = copy_bytes_per_s
        self.total_bytes = total_bytes
        self.allocated = self.reserved = self.shortages = 0
        self.streams: list[Stream] = []
        # Number of calls of the functions that take time on the host.
        self.calls: Counter[str] = Counter()
        self.default = Stream(self)
        self._hosts: dict[int, Host] = {}
        self._override: Host | None = None
        self._current: dict[int, Stream] = {}
        self._current_device: dict[int, int] = {}
        self._free: list[Memory] = []
        self._owners: dict[int, tuple[weakref.ref[Any], Memory]] = {}
        # First addresses of page-locked memory.
        self._pinned: set[int] = set()
        # The uses of host memory, by its first address and the address after it.
        self._host_uses: dict[tuple[int, int], Uses] = {}

    @property
    def host(self) -> Host:
        """The calling thread."""
        return self._override or self._hosts.setdefault(threading.get_ident(), Host())

    @contextmanager
    def acting_as(self, host: Host) -> Iterator[None]:
        """Run the block as another thread of the host."""
        before, self._override = self._override, host
        try:
            yield
        finally:
            self._override = before

    @property
    def current(self) -> Stream:
        """The current stream of the calling thread."""
        return self._current.get(threading.get_ident(), self.default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one in the block."""
        self.calls["stream"] += 1
        before = self.current
        self._current[threading.get_ident()] = stream
        try:
            yield
        finally:
            self._current[threading.get_ident()] = before
            # As in torch, leaving a stream sets the thread's device, for which CUDA then creates a context.
            self.contexts.add(self.current_device())

    def current_device(self) -> int:
        """Return the number of the current GPU of the calling thread."""
        return self._current_device.get(threading.get_ident(), 0)

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """Make a GPU the current one in the block."""
        before = self.current_device()
        self._current_device[threading.get_ident()] = device.index
        try:
            yield
        finally:
            self._current_device[threading.get_ident()] = before

    def synchronize(self) -> None:
        """Wait until all streams have finished."""
        for stream in self.streams:
            stream.record_event().synchronize()

    def compute(self, seconds: float, *tensors: Tensor) -> None:
        """Queue a kernel in the current stream; it reads the tensors."""
        self.current.run(seconds, reads=tensors)

    def allocate(self, size: int) -> Tensor:
        """Allocate `uint8 [size]` on the current stream, as torch's caching allocator does."""
        stream = self.current
        self.calls["allocate"] += 1
        for memory in self._free:
            memory.pending = [event for event in memory.pending if not event.query()]
        fitting = [m for m in self._free if m.stream is stream and not m.pending and len(m.bytes) >= size]
        if fitting:
            memory = min(fitting, key=lambda one: len(one.bytes))
            self._free.remove(memory)
        elif self.reserved + size > self.total_bytes:
            self.shortages += 1
            raise torch.OutOfMemoryError("CUDA out of memory. planned")
        else:
            memory = Memory(size, stream)
            self.reserved += size
        self.allocated += len(memory.bytes)
        view = memory.bytes[:size]
        self._owners[view.ctypes.data] = weakref.ref(view, lambda _, at=view.ctypes.data: self._release(at)), memory
        return torch.from_numpy(view)

    def write_to_free_memory(self) -> None:
        """Queue a write to all memory that the allocator would return to its stream now."""
        for memory in self._free:
            if all(event.query() for event in memory.pending):
                memory.stream.run(0.0)
                memory.uses.add(memory.stream.number, memory.stream.known, is_write=True)

    def _release(self, address: int) -> None:
        _, memory = self._owners.pop(address)
        self.allocated -= len(memory.bytes)
        memory.pending = [stream.record_event() for stream in memory.recorded]
        memory.recorded = set()
        self._free.append(memory)

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """Return the block that holds a tensor, or None for a tensor on the host."""
        if tensor.layout is not torch.strided:
            return None
        found = self._owners.get(tensor.untyped_storage().data_ptr())
        return found[1] if found else None

    def uses_of(self, tensor: Tensor) -> Uses:
        """Return the uses of the memory of a tensor, on the GPU or on the host."""
        memory = self.memory_of(tensor)
        if memory is not None:
            return memory.uses
        return self._host_uses.setdefault((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes), Uses())

    def write_on_host(self, tensor: Tensor) -> None:
        """Check that the calling thread may write to a host tensor without a race."""
        first, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for (other_first, other_stop), uses in self._host_uses.items():
            if first < other_stop and other_first < stop:
                uses.check("the host", self.host.known, is_write=True)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in args if isinstance(value, Tensor)]
        on_device = [tensor for tensor in tensors if self.memory_of(tensor) is not None]
        target = kwargs.get("device")
        if function is torch.Tensor.to:
            target = args[1] if len(args) > 1 and isinstance(args[1], torch.device | str) else target
            if on_device and (target is None or torch.device(target).type == "cuda"):
                return args[0] if target else function(*args, **kwargs)
        if target is not None and torch.device(target).type == "cuda":
            return self._made(function, args, kwargs)
        if on_device and function == torch.Tensor.device.__get__:
            return self.device
        if on_device and function == torch.Tensor.is_cuda.__get__:
            return True
        if function in (torch.Tensor.cpu, torch.Tensor.to) and on_device:
            self.current.run(0.0, reads=on_device)
            if not kwargs.get("non_blocking"):
                self.current.synchronize()
            return args[0].clone()
        if function in (torch.Tensor.clone, torch.Tensor.__deepcopy__) and on_device:
            result = self._like(args[0])
            self.current.run(0.0, reads=[args[0]], writes=[result])
            return result.copy_(args[0])
        if function in _IN_PLACE and on_device:
            self._copied(args[0], tensors[1:], kwargs.get("non_blocking", False))
        if function is torch.index_select and "out" in kwargs and on_device:
            self.current.run(0.0, reads=on_device, writes=[kwargs["out"]])
        return function(*args, **kwargs)

    def _copied(self, to: Tensor, sources: list[Tensor], non_blocking: bool) -> None:
        self.calls["copy"] += 1
        on_host = [one for one in sources if self.memory_of(one) is None]
        pageable = sum(one.nbytes for one in on_host if one.untyped_storage().data_ptr() not in self._pinned)
        if pageable > _PAGEABLE_BYTES:
            self.current.synchronize()
        self.current.run(sum(one.nbytes for one in on_host) / self.copy_bytes_per_s, reads=sources, writes=[to])
        if on_host and not non_blocking:
            self.current.synchronize()

    def _made(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return a new tensor on the simulated GPU."""
        if function is torch.Tensor.to:
            source = args[0]
            if source.layout is not torch.strided:
                return source.clone()
            result = self._like(torch.empty_like(source))
            result.copy_(source)
            self._copied(result, [source], kwargs.get("non_blocking", False))
            return result
        return self._like(function(*args, **{**kwargs, "device": "cpu"}))

    def _like(self, shape: Tensor) -> Tensor:
        size = shape.untyped_storage().nbytes()
        flat = self.allocate(max(size, 1))[:size].view(shape.dtype)
        return flat.as_strided(shape.shape, shape.stride())

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the parts of `torch.cuda` that colabkit uses."""
        # Lightning sets this variable, with which torch would count the simulated GPU as a real one.
        monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)

        class BoundEvent(Event):
            gpu = self

        Event.gpu = self
        cuda = torch.cuda
        for name, value in {
            "Event": BoundEvent,
            "Stream": lambda *_, **__: Stream(self),
            "stream": self.stream,
            "current_stream": lambda *_: self.current,
            "current_device": self.current_device,
            "device_count": lambda: self.device.index + 1,
            "device": self.on_device,
            "synchronize": lambda *_: self.synchronize(),
            "mem_get_info": lambda *_: (self.total_bytes - self.reserved, self.total_bytes),
            "memory_stats": lambda *_: {"num_ooms": self.shortages},
            "memory_reserved": lambda *_: self.reserved,
            "memory_allocated": lambda *_: self.allocated,
        }.items():
            monkeypatch.setattr(cuda, name, value)
        # Replace the cached streams of the process, which would outlive this GPU.
        monkeypatch.setattr(device, "_copy_stream", functools.cache(torch.cuda.Stream))
        idle_streams = device_decoder._idle_streams.__wrapped__
        monkeypatch.setattr(device_decoder, "_idle_streams", functools.cache(idle_streams))
        empty = torch.empty

        def pinned(tensor: Tensor) -> Tensor:
            self._pinned.add(tensor.untyped_storage().data_ptr())
            return tensor

        def without_pinning(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            made = empty(*args, **options)
            return pinned(made) if pin_memory else made

        def record(tensor: Tensor, stream: Stream) -> None:
            self._owners[tensor.untyped_storage().data_ptr()][1].recorded.add(stream)

        monkeypatch.setattr(torch, "empty", without_pinning)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned(tensor.clone()))
        monkeypatch.setattr(torch.Tensor, "record_stream", record)


def _merge(known: _Clock, other: _Clock) -> None:
    for number, step in other.items():
        known[number] = max(known.get(number, 0), step)
