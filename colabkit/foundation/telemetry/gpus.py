"""The GPUs that this process may use. Each figure may be missing by itself, and is not asked for again then.

Bytes over PCIe are left out: the driver measures them for 20 ms at a time, while the caller waits.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from colabkit.foundation.telemetry import nvml as binding
from colabkit.foundation.telemetry.snapshots import GpuSnapshot

# Of nvml.h: what an error says about the next time.
_NEVER = frozenset({2, 3, 4, 13, 25, 26})  # bad argument, not supported, no permission, no such function, bad version
_SLOWED = {
    "power": 0x04 | 0x80,  # nvmlClocksEventReasonSwPowerCap, ...HwPowerBrakeSlowdown
    "heat": 0x20 | 0x40,  # ...SwThermalSlowdown, ...HwThermalSlowdown
}


class Gpus:
    """Asks the driver, by handles that are kept.

    Args:
        nvml: the NVML binding; by default `pynvml` as `nvidia-ml-py` installs it, if it is there.
        environ: the process's environment.
        modules: the imported modules, among which torch may be.
    """

    def __init__(
        self,
        nvml: ModuleType | None = None,
        environ: Mapping[str, str] = os.environ,
        modules: Mapping[str, Any] = sys.modules,
    ) -> None:
        self._modules = modules
        self._follows_torch = False
        self._known: list[binding.Device] = []
        self._cards: dict[_Card, int] = {}  # with the number that CUDA has for it
        self._nvml = binding.load(nvml)
        if self._nvml is not None:
            self._known = binding.devices(self._nvml)
            visible = binding.visible(self._known, environ)
            self._cards = {_Card(self._nvml, device): number for number, device in enumerate(visible)}

    def snapshot(self) -> tuple[GpuSnapshot, ...]:
        """Return the state of each GPU at this instant, none where there is no driver."""
        if not self._cards:
            return ()
        cuda = self._cuda()
        return tuple(card.snapshot(cuda, number) for card, number in self._cards.items())

    def close(self) -> None:
        """Let the driver go; may be called twice."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._nvml, self._known, self._cards = None, [], {}

    def _cuda(self) -> Any:
        """Return `torch.cuda` if something else has initialised it; this never does."""
        cuda = getattr(self._modules.get("torch"), "cuda", None)
        try:
            if cuda is None or not cuda.is_initialized():
                return None
            if not self._follows_torch:
                self._follows_torch = True
                self._follow(cuda)
        except Exception:  # torch is half imported, or breaks in a way of its own
            return None
        return cuda

    def _follow(self, cuda: Any) -> None:
        """Order the cards as torch does: CUDA numbers unlike cards by their speed, NVML by their PCI address."""
        named = [device for device in self._known if device.names]
        numbers: dict[binding.Device, int] = {}
        for number in range(cuda.device_count()):
            uuid = str(cuda.get_device_properties(number).uuid)
            found = [device for device in named if device.names[0].endswith(uuid)]
            if len(found) != 1:
                return
            numbers.setdefault(found[0], number)  # a card can be listed twice
        if numbers:
            kept = {card.device: card for card in self._cards}
            self._cards = {kept.get(device) or _Card(self._nvml, device): number for device, number in numbers.items()}


class _LostError(Exception):
    """The card has fallen off the bus."""


class _Card:
    """One device, with the ways to ask for each of its figures that have not been refused."""

    def __init__(self, nvml: Any, device: binding.Device) -> None:
        self.device = device
        self._nvml = nvml
        self._is_lost = device.is_lost
        self._seen_us = 0
        self._uuid = device.names[0] if device.names else None
        handle, card = device.handle, device.card
        self._ways: dict[str, list[Callable[[], Any]]] = {
            "name": [lambda: nvml.nvmlDeviceGetName(handle)],
            "utilization": [self._from_samples, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100],
            "memory": [
                lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2),  # without the driver's part
                lambda: nvml.nvmlDeviceGetMemoryInfo(handle),
            ],
            "power": [lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000],
            "slowed": [  # the clocks are those of the whole card
                lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(card),
                lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card),
            ],
        }
        if handle is None:
            self._ways = {figure: [] for figure in self._ways}
        self._name: str | None = None
        with contextlib.suppress(_LostError):
            self._name = binding.text(self._asked("name"))

    def snapshot(self, cuda: Any, number: int) -> GpuSnapshot:
        """Return the state of this instant.

        Args:
            cuda: `torch.cuda` if it is initialised, else None.
            number: this card's number in it.
        """
        if self._is_lost:
            return GpuSnapshot(self._uuid, self._name, is_lost=True)
        try:
            memory = self._asked("memory")
            reasons = self._asked("slowed") or 0
            utilization_rate, power_w = self._asked("utilization"), self._asked("power")
        except _LostError:
            return GpuSnapshot(self._uuid, self._name, is_lost=True)
        torch_bytes, torch_reserved_bytes = _torch_memory(cuda, number)
        return GpuSnapshot(
            uuid=self._uuid,
            name=self._name,
            utilization_rate=utilization_rate,
            used_bytes=None if memory is None else int(memory.used),
            total_bytes=None if memory is None else int(memory.total),
            torch_bytes=torch_bytes,
            torch_reserved_bytes=torch_reserved_bytes,
            power_w=power_w,
            slowed_by=tuple(why for why, bits in _SLOWED.items() if reasons & bits),
        )

    def _asked(self, figure: str) -> Any:
        """Return a figure by the first way that tells it; ways that never will are forgotten."""
        for way in tuple(self._ways[figure]):
            try:
                if (found := way()) is not None:
                    return found
            except (AttributeError, TypeError):  # the binding is older than the way
                self._ways[figure].remove(way)
            except self._nvml.NVMLError as error:
                value = getattr(error, "value", None)
                if value == binding.IS_LOST:
                    self._is_lost = True
                    raise _LostError from error
                if value in _NEVER:
                    self._ways[figure].remove(way)
        return None

    def _from_samples(self) -> float | None:
        """Return the mean of what the driver has sampled since the last look, some six times a second."""
        kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
        _, samples = self._nvml.nvmlDeviceGetSamples(self.device.handle, kind, self._seen_us)
        fresh = [sample for sample in samples if sample.timeStamp > self._seen_us and sample.sampleValue.uiVal <= 100]
        if not fresh:
            return None
        if not self._seen_us:  # the buffer holds what was before this began
            fresh = [max(fresh, key=lambda sample: sample.timeStamp)]
        self._seen_us = max(sample.timeStamp for sample in fresh)
        return float(sum(sample.sampleValue.uiVal for sample in fresh)) / (100 * len(fresh))


def _torch_memory(cuda: Any, number: int) -> tuple[int | None, int | None]:
    """Return what tensors occupy and what torch holds for them; None where it has taken nothing of this card."""
    if cuda is not None:
        with contextlib.suppress(Exception):  # another allocator, another torch, or fewer devices than cards
            told = cuda.memory_stats_as_nested_dict(number)
            reserved = told["reserved_bytes"]["all"]
            if reserved["peak"]:
                return int(told["allocated_bytes"]["all"]["current"]), int(reserved["current"])
    return None, None
