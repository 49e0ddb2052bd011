"""Snapshots of the machine, with every field of a GPU allowed to be missing."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from colabkit.telemetry import Telemetry


class NvmlError(Exception):
    pass


def fake_nvml(**broken: bool) -> SimpleNamespace:
    """Return a binding with one GPU; functions named in `broken` raise as for an unsupported field."""
    calls: list[str] = []

    def answer(name: str, value: object):
        def function(*_: object) -> object:
            calls.append(name)
            if broken.get(name):
                raise NvmlError
            return value

        return function

    values = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetName": b"Tesla T4",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40, memory=10),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3, total=16, free=13),
    }
    return SimpleNamespace(NVMLError=NvmlError, calls=calls, **{name: answer(name, v) for name, v in values.items()})


def test_the_first_snapshot_knows_no_rates_and_later_ones_do() -> None:
    telemetry = Telemetry(fake_nvml())
    first, second = telemetry.snapshot(), telemetry.snapshot()
    assert first.cpu_rate is None
    assert second.cpu_rate is not None
    assert 0 <= second.cpu_rate <= 1
    assert 0 < second.ram_used_bytes < second.ram_total_bytes


def test_a_gpu_is_told_in_rates_and_bytes() -> None:
    (gpu,) = Telemetry(fake_nvml()).snapshot().gpus
    assert (gpu.name, gpu.utilization_rate, gpu.used_bytes, gpu.total_bytes) == ("Tesla T4", 0.4, 3, 16)


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetName", "name"),
        ("nvmlDeviceGetUtilizationRates", "utilization_rate"),
        ("nvmlDeviceGetMemoryInfo", "used_bytes"),
    ],
)
def test_a_field_that_is_not_supported_is_none_and_the_others_stay(function: str, field: str) -> None:
    (gpu,) = Telemetry(fake_nvml(**{function: True})).snapshot().gpus
    assert getattr(gpu, field) is None
    assert [gpu.name, gpu.utilization_rate, gpu.used_bytes].count(None) == 1


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
def test_without_a_driver_there_are_no_gpus(function: str) -> None:
    telemetry = Telemetry(fake_nvml(**{function: True}))
    assert telemetry.snapshot().gpus == ()
    telemetry.close()


def test_closing_twice_lets_the_driver_go_once() -> None:
    nvml = fake_nvml()
    telemetry = Telemetry(nvml)
    telemetry.close()
    telemetry.close()
    assert nvml.calls.count("nvmlShutdown") == 1
    assert telemetry.snapshot().gpus == ()


def test_missing_io_counters_are_unknown_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: psutil.Process) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "io_counters", refuse)
    telemetry = Telemetry(fake_nvml())
    telemetry.snapshot()
    assert telemetry.snapshot().storage_read_bytes_per_s is None
