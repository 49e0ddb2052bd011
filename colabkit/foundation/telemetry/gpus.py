"""GPUs through NVIDIA's NVML library: reports of all cards, and snapshots of the devices that this process may use.

NVML lists all cards and ignores `CUDA_VISIBLE_DEVICES`. CUDA obeys that variable, and in MIG mode it sees one instance
of a card, not the whole card. The rules are described in CUDA's C++ Programming Guide, "CUDA Environment Variables",
and in NVIDIA's MIG User Guide, "Device Enumeration".

Any query may be unsupported; snapshots then do not repeat it. PCIe throughput is not read, since each query blocks for
20 ms.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from colabkit.foundation.reports import Report
from colabkit.foundation.units import format_bytes

logger = logging.getLogger("colabkit")

_NEEDED = ("NVMLError", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlInit", "nvmlShutdown")
# Error codes of nvml.h: lost cards, and errors that every later query would return too.
_IS_LOST = 15
# Error codes: invalid argument, not supported, no permission, function not found, version mismatch, deprecated.
_NEVER = frozenset({2, 3, 4, 13, 25, 26})
# Bits of NVML's clock event reasons: SwPowerCap and HwPowerBrakeSlowdown for power, SwThermalSlowdown and
# HwThermalSlowdown for heat.
_SLOWED = {
    "power": 0x04 | 0x80,
    "heat": 0x20 | 0x40,
}


@dataclass(frozen=True, repr=False)
class GpuReport(Report):
    """A GPU as reported by the driver. Unknown values are None.

    Attributes:
        uuid: unique identifier of the card, `"GPU-..."`.
        name: name of the card, for example `"Tesla T4"`.
        total_bytes: memory of the card.
        free_bytes: free memory of the card.
        driver: version of the driver.
        cuda: newest CUDA version that the driver supports, for example `"13.0"`.
        is_sliced: whether the card is in MIG mode, which splits it into instances with separate memory.
    """

    uuid: str | None
    name: str | None
    total_bytes: int | None
    free_bytes: int | None
    driver: str | None = None
    cuda: str | None = None
    is_sliced: bool | None = None

    def _summary(self) -> str:
        memory = "" if self.total_bytes is None else f", {format_bytes(self.total_bytes)}"
        return f"{self.name or 'GPU'}{memory}"

    def details(self) -> str:
        """Return all known values as one line."""
        free = "" if self.free_bytes is None else f", {format_bytes(self.free_bytes)} free"
        sliced = ", in MIG slices" if self.is_sliced else ""
        driver = "" if self.driver is None else f", driver {self.driver}"
        cuda = "" if self.cuda is None else f", CUDA up to {self.cuda}"
        uuid = "" if self.uuid is None else f", {self.uuid}"
        return f"{self._summary()}{free}{sliced}{driver}{cuda}{uuid}"

    def _rows(self) -> list[tuple[str, ...]]:
        free = None if self.free_bytes is None else format_bytes(self.free_bytes)
        found = {"uuid": self.uuid, "free": free, "driver": self.driver, "CUDA": self.cuda}
        return [(name, value) for name, value in found.items() if value]


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """A snapshot of one GPU. Unknown values are None, never 0.

    Attributes:
        uuid: unique identifier of the card or the MIG instance.
        name: name reported by the driver.
        utilization_rate: share of the time since the previous snapshot, or of the driver's last sample period, in which
            a kernel ran, in [0, 1]; a duty cycle, not a measure of load. None in MIG mode.
        used_bytes: memory used by all processes.
        total_bytes: memory of the card or the MIG instance.
        torch_bytes: memory of this process's tensors; None if torch has not used the device.
        torch_reserved_bytes: memory reserved by torch's allocator.
        power_w: power draw in watts.
        slowed_by: reasons for throttled clocks: `"power"`, `"heat"`; empty if clocks are not throttled, or if unknown.
        is_lost: whether the card has fallen off the bus and no longer responds.
    """

    uuid: str | None = None
    name: str | None = None
    utilization_rate: float | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    torch_bytes: int | None = None
    torch_reserved_bytes: int | None = None
    power_w: float | None = None
    slowed_by: tuple[str, ...] = ()
    is_lost: bool = False


@dataclass(frozen=True, eq=False)
class _Device:
    """A CUDA device: a card or a MIG instance.

    Attributes:
        handle: NVML handle; None for a card that the driver cannot open.
        card: NVML handle of the card; differs from `handle` for a MIG instance.
        names: identifiers valid in `CUDA_VISIBLE_DEVICES`, the UUID first.
        is_lost: whether the card has fallen off the bus.
        is_sliced: whether the card is in MIG mode; None if unknown.
    """

    handle: Any
    card: Any
    names: tuple[str, ...] = ()
    is_lost: bool = False
    is_sliced: bool | None = None

    @property
    def is_instance(self) -> bool:
        return self.handle is not self.card


def gpu_reports(nvml: ModuleType | None = None, paths: Sequence[str] | None = None) -> tuple[GpuReport, ...]:
    """Return the GPUs that NVML lists, without creating a CUDA context; empty if the driver or pynvml is missing.

    Args:
        nvml: the NVML module; by default `pynvml` from the package `nvidia-ml-py`.
        paths: folders to search if the module is not imported yet; by default Python's search path.
    """
    opened = _open_driver(nvml, paths)
    if opened is None:
        return ()
    try:
        driver = _text(_ask(opened, "nvmlSystemGetDriverVersion"))
        # The version is encoded as 1000 * major + 10 * minor.
        version = _ask(opened, "nvmlSystemGetCudaDriverVersion")
        cuda = None if version is None else f"{version // 1000}.{version % 1000 // 10}"
        found = []
        for device in _devices(opened):
            if device.is_instance:
                continue
            is_open = device.handle is not None
            memory = _ask(opened, "nvmlDeviceGetMemoryInfo", device.handle) if is_open else None
            found.append(
                GpuReport(
                    uuid=device.names[0] if device.names else None,
                    name=_text(_ask(opened, "nvmlDeviceGetName", device.handle)) if is_open else None,
                    total_bytes=None if memory is None else int(memory.total),
                    free_bytes=None if memory is None else int(memory.free),
                    driver=driver,
                    cuda=cuda,
                    is_sliced=device.is_sliced,
                )
            )
        return tuple(found)
    finally:
        _ask(opened, "nvmlShutdown")


def _open_driver(nvml: ModuleType | None, paths: Sequence[str] | None = None) -> ModuleType | None:
    """Return the initialized NVML module; None without a driver, or if `pynvml` is missing or an unrelated package."""
    if nvml is None:
        try:
            if paths is not None and "pynvml" not in sys.modules and PathFinder.find_spec("pynvml", paths) is None:
                return None
            nvml = importlib.import_module("pynvml")
        except Exception:
            # An unrelated package of that name can raise any exception.
            return None
    if not all(hasattr(nvml, name) for name in _NEEDED):
        _say_shadowed(getattr(nvml, "__file__", None) or repr(nvml))
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


@functools.cache
def _say_shadowed(file: str) -> None:
    logger.warning("GPU statistics are missing, since %s hides the module pynvml of the package nvidia-ml-py", file)


def _devices(nvml: ModuleType) -> list[_Device]:
    found = []
    for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0):
        try:
            card = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            found.append(_Device(None, None, is_lost=getattr(error, "value", None) == _IS_LOST))
            continue
        uuid = _text(_ask(nvml, "nvmlDeviceGetUUID", card))
        # The query returns the current mode, and the mode after the next reset.
        mode = _ask(nvml, "nvmlDeviceGetMigMode", card)
        is_sliced = None if mode is None else bool(mode[0])
        found.append(_Device(card, card, () if uuid is None else (uuid,), is_sliced=is_sliced))
        if is_sliced:
            found += _instances(nvml, card, uuid)
    return found


def _instances(nvml: ModuleType, card: Any, card_uuid: str | None) -> list[_Device]:
    found = []
    for index in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", card) or 0):
        instance = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", card, index)
        # The query fails for an index without an instance.
        if instance is not None:
            uuid = _text(_ask(nvml, "nvmlDeviceGetUUID", instance))
            numbers = [_ask(nvml, f"nvmlDeviceGet{kind}InstanceId", instance) for kind in ("Gpu", "Compute")]
            # Drivers before version 470 use this identifier.
            older = f"MIG-{card_uuid}/{numbers[0]}/{numbers[1]}"
            found.append(_Device(instance, card, tuple(filter(None, (uuid, older)))))
    return found


def _visible(known: list[_Device], environ: Mapping[str, str]) -> list[_Device]:
    """Return the devices visible to CUDA; an invalid entry of CUDA_VISIBLE_DEVICES hides the entries after it."""
    instances = [device for device in known if device.is_instance]
    sliced = [instance.card for instance in instances]
    numbered = instances[:1] or [device for device in known if not device.is_instance]
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return numbered
    found: list[_Device] = []
    for word in map(str.strip, wanted.split(",")):
        if word.isdecimal():
            named = numbered[int(word) : int(word) + 1]
        elif word.startswith(("GPU-", "MIG-")):
            # CUDA accepts the prefix of a UUID if it is unique.
            named = [device for device in known if any(name.startswith(word) for name in device.names)]
            if len(named) == 1 and named[0].handle in sliced:
                named = [device for device in instances if device.card is named[0].card][:1]
        else:
            named = []
        if len(named) != 1:
            break
        found += [device for device in named if device not in found]
    return found


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _ask(nvml: ModuleType, query: str, *arguments: Any) -> Any:
    """Query the driver; return None if the query fails or this version of pynvml does not support it."""
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        return getattr(nvml, query)(*arguments)
    return None


class Gpus:
    """A source of GPU snapshots, which caches the driver's handles.

    Args:
        nvml: the NVML module; by default `pynvml` from the package `nvidia-ml-py`, if installed.
        environ: the process's environment.
        modules: the imported modules, which may include torch.
    """

    def __init__(
        self,
        nvml: ModuleType | None = None,
        environ: Mapping[str, str] = os.environ,
        modules: Mapping[str, Any] = sys.modules,
    ) -> None:
        self._modules = modules
        self._follows_torch = False
        self._known: list[_Device] = []
        # Values are CUDA device indices.
        self._cards: dict[_Card, int] = {}
        self._nvml = _open_driver(nvml)
        if self._nvml is not None:
            self._known = _devices(self._nvml)
            visible = _visible(self._known, environ)
            self._cards = {_Card(self._nvml, device): number for number, device in enumerate(visible)}

    def snapshot(self) -> tuple[GpuSnapshot, ...]:
        """Return a snapshot of each device that this process may use; empty without a driver."""
        if not self._cards:
            return ()
        cuda = self._cuda()
        return tuple(card.snapshot(cuda, number) for card, number in self._cards.items())

    def close(self) -> None:
        """Release the driver; may be called twice."""
        if self._nvml is not None:
            _ask(self._nvml, "nvmlShutdown")
        self._nvml, self._known, self._cards = None, [], {}

    def _cuda(self) -> Any:
        """Return `torch.cuda` if it is already initialized, else None."""
        cuda = getattr(self._modules.get("torch"), "cuda", None)
        try:
            if cuda is None or not cuda.is_initialized():
                return None
            if not self._follows_torch:
                self._follows_torch = True
                self._follow(cuda)
        except Exception:
            # torch may be partially imported, or raise another error.
            return None
        return cuda

    def _follow(self, cuda: Any) -> None:
        """Order the cards as torch does: CUDA orders different cards by speed, NVML by PCI address."""
        # Skip cards in MIG mode, whose order is already correct: CUDA shows only one slice, possibly with the card's
        # UUID.
        named = [device for device in self._known if device.names and not device.is_sliced]
        numbers: dict[_Device, int] = {}
        for number in range(cuda.device_count()):
            uuid = str(cuda.get_device_properties(number).uuid)
            found = [device for device in named if device.names[0].endswith(uuid)]
            if len(found) != 1:
                return
            # CUDA can list a card twice; keep its first number.
            numbers.setdefault(found[0], number)
        if numbers:
            kept = {card.device: card for card in self._cards}
            self._cards = {kept.get(device) or _Card(self._nvml, device): number for device, number in numbers.items()}


class _LostError(Exception):
    """The card has fallen off the bus."""


class _Card:
    def __init__(self, nvml: Any, device: _Device) -> None:
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
                # Use version 2 of the query, which excludes memory reserved by the driver.
                lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2),
                lambda: nvml.nvmlDeviceGetMemoryInfo(handle),
            ],
            "power": [lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000],
            # Clocks belong to the whole card, not to a MIG instance.
            "slowed": [
                lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(card),
                lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card),
            ],
        }
        if handle is None:
            self._ways = {figure: [] for figure in self._ways}
        self._name: str | None = None
        with contextlib.suppress(_LostError):
            self._name = _text(self._asked("name"))

    def snapshot(self, cuda: Any, number: int) -> GpuSnapshot:
        """Return a snapshot of the device.

        Args:
            cuda: `torch.cuda` if it is initialized, else None.
            number: CUDA device index.
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
        """Return the result of the first query that succeeds, and drop queries that failed permanently."""
        for way in tuple(self._ways[figure]):
            try:
                if (found := way()) is not None:
                    return found
            except (AttributeError, TypeError):
                # This version of pynvml does not support the query.
                self._ways[figure].remove(way)
            except self._nvml.NVMLError as error:
                value = getattr(error, "value", None)
                if value == _IS_LOST:
                    self._is_lost = True
                    raise _LostError from error
                if value in _NEVER:
                    self._ways[figure].remove(way)
        return None

    def _from_samples(self) -> float | None:
        """Return the mean of the driver's samples since the last call, about six per second; None without new ones."""
        kind = self._nvml.NVML_GPU_UTILIZATION_SAMPLES
        _, samples = self._nvml.nvmlDeviceGetSamples(self.device.handle, kind, self._seen_us)
        fresh = [sample for sample in samples if sample.timeStamp > self._seen_us and sample.sampleValue.uiVal <= 100]
        if not fresh:
            return None
        # At the first call, use only the newest sample, since the driver's buffer also contains older ones.
        if not self._seen_us:
            fresh = [max(fresh, key=lambda sample: sample.timeStamp)]
        self._seen_us = max(sample.timeStamp for sample in fresh)
        return float(sum(sample.sampleValue.uiVal for sample in fresh)) / (100 * len(fresh))


def _torch_memory(cuda: Any, number: int) -> tuple[int | None, int | None]:
    """Return the bytes allocated and reserved by torch on a card; None if torch has not used it."""
    if cuda is not None:
        with contextlib.suppress(Exception):
            # The call fails with some custom allocators and torch versions, and if there are fewer devices than cards.
            stats = cuda.memory_stats_as_nested_dict(number)
            reserved = stats["reserved_bytes"]["all"]
            if reserved["peak"]:
                return int(stats["allocated_bytes"]["all"]["current"]), int(reserved["current"])
    return None, None
