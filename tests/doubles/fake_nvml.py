"""A fake NVML: GPUs, MIG instances, and the errors that the driver returns."""

# The fake keeps the camel-case names of the binding.
# ruff: noqa: N802, N815

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, NO_FUNCTION, IS_LOST, UNKNOWN = 3, 4, 6, 13, 15, 999


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


@dataclass(eq=False)
class Chip:
    """A GPU or a MIG instance; the object itself is its NVML handle."""

    uuid: str
    name: str = "Tesla T4"
    busy: int = 40
    samples: list[tuple[int, int]] = field(default_factory=list)
    used: int = 3 * GIB
    total: int = 16 * GIB
    milliwatts: int = 33_500
    reasons: int = 0
    instances: list[Chip | None] = field(default_factory=list)
    numbers: tuple[int, int] = (0, 0)
    failing: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    """A fake of the binding; `failing` maps functions to the errors they raise, and `absent` functions do not exist.

    `calls` lists the called functions.
    """

    NVMLError = NvmlError
    NVML_GPU_UTILIZATION_SAMPLES = 1
    nvmlMemory_v2 = 2

    def __init__(self, *cards: Chip, failing: dict[str, int] | None = None, absent: tuple[str, ...] = ()) -> None:
        self.cards = list(cards)
        self.failing = failing or {}
        self.absent = absent
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return object.__getattribute__(self, name)
        if name in self.absent:
            raise AttributeError(name)
        found = object.__getattribute__(self, name)
        return self._call(name, found) if callable(found) else found

    def _call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            chip = next((one for one in arguments if isinstance(one, Chip)), None)
            error = self.failing.get(name) or (chip.failing.get(name) if chip else None)
            if error:
                raise NvmlError(error)
            return function(*arguments, **options)

        return call

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Chip:
        card = self.cards[index]
        if "open" in card.failing:
            raise NvmlError(card.failing["open"])
        return card

    def nvmlDeviceGetUUID(self, chip: Chip) -> str:
        return chip.uuid

    def nvmlDeviceGetName(self, chip: Chip) -> str:
        return chip.name

    def nvmlDeviceGetMigMode(self, chip: Chip) -> tuple[int, int]:
        return (int(bool(chip.instances)),) * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, chip: Chip) -> int:
        return len(chip.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, chip: Chip, index: int) -> Chip:
        found = chip.instances[index]
        if found is None:
            raise NvmlError(NOT_FOUND)
        return found

    def nvmlDeviceGetGpuInstanceId(self, chip: Chip) -> int:
        return chip.numbers[0]

    def nvmlDeviceGetComputeInstanceId(self, chip: Chip) -> int:
        return chip.numbers[1]

    def nvmlDeviceGetSamples(self, chip: Chip, kind: int, since: int) -> tuple[int, list[SimpleNamespace]]:
        assert kind == self.NVML_GPU_UTILIZATION_SAMPLES
        found = [
            SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=busy))
            for at, busy in chip.samples
            if at > since
        ]
        if not found:
            raise NvmlError(NOT_FOUND)
        return 1, found

    def nvmlDeviceGetUtilizationRates(self, chip: Chip) -> SimpleNamespace:
        return SimpleNamespace(gpu=chip.busy, memory=1)

    def nvmlDeviceGetMemoryInfo(self, chip: Chip, version: int | None = None) -> SimpleNamespace:
        used = chip.used + (0 if version else GIB)
        return SimpleNamespace(used=used, total=chip.total, free=chip.total - used)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12090

    def nvmlDeviceGetPowerUsage(self, chip: Chip) -> int:
        return chip.milliwatts

    def nvmlDeviceGetCurrentClocksEventReasons(self, chip: Chip) -> int:
        return chip.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, chip: Chip) -> int:
        return chip.reasons


def fake_torch(devices: list[str], memory: dict[int, tuple[int, int]] | None = None, initialized: bool = True) -> Any:
    """Return a fake torch with devices of the given UUIDs; `memory` maps device numbers to (tensor, reserved) bytes."""

    def stats(index: int) -> dict[str, Any]:
        held, reserved = (memory or {}).get(index, (0, 0))
        return {
            "allocated_bytes": {"all": {"current": held, "peak": held}},
            "reserved_bytes": {"all": {"current": reserved, "peak": reserved}},
        }

    cuda = SimpleNamespace(
        is_initialized=lambda: initialized,
        device_count=lambda: len(devices),
        get_device_properties=lambda index: SimpleNamespace(uuid=devices[index]),
        memory_stats_as_nested_dict=stats,
    )
    return SimpleNamespace(cuda=cuda)
