"""The GPUs that this process may use, with drivers that report little, lose GPUs, or are missing."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_nvml import (
    GIB,
    IS_LOST,
    NO_FUNCTION,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    Chip,
    FakeNvml,
    fake_torch,
)

from colabkit.foundation.telemetry.gpus import Gpus, GpuSnapshot, gpu_reports


def gpus(nvml: Any, visible: str | None = None, torch: Any = None) -> Gpus:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return Gpus(nvml, environ, {} if torch is None else {"torch": torch})


def uuids(nvml: Any, visible: str | None = None, torch: Any = None) -> list[str | None]:
    return [gpu.uuid for gpu in gpus(nvml, visible, torch).snapshot()]


def test_a_gpu_is_described_in_rates_bytes_and_watts():
    # Older bindings return bytes.
    for chip in (Chip("GPU-a"), Chip(b"GPU-a", b"Tesla T4")):
        (found,) = gpus(FakeNvml(chip)).snapshot()
        assert found == GpuSnapshot("GPU-a", "Tesla T4", 0.4, 3 * GIB, 16 * GIB, power_w=33.5)


FIELDS = {
    "nvmlDeviceGetUUID": {"uuid"},
    "nvmlDeviceGetName": {"name"},
    "nvmlDeviceGetUtilizationRates": {"utilization_rate"},
    "nvmlDeviceGetMemoryInfo": {"used_bytes", "total_bytes"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetCurrentClocksEventReasons": set(),
    "nvmlDeviceGetMigMode": set(),
}


def test_an_unavailable_value_is_none_and_the_others_stay():
    (whole,) = gpus(FakeNvml(Chip("GPU-a"))).snapshot()
    for function, fields in FIELDS.items():
        broken = [{"failing": {function: how}} for how in (NOT_SUPPORTED, NO_PERMISSION, NO_FUNCTION, UNKNOWN)]
        for how in (*broken, {"absent": (function,)}):
            (gpu,) = gpus(FakeNvml(Chip("GPU-a"), **how)).snapshot()
            differing = {name for name in GpuSnapshot.__slots__ if getattr(gpu, name) != getattr(whole, name)}
            assert differing == fields
            assert all(getattr(gpu, name) is None for name in differing)


def test_unsupported_values_are_queried_once():
    names = ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetSamples", "nvmlDeviceGetPowerUsage"]
    nvml = FakeNvml(Chip("GPU-a"), failing=dict.fromkeys(names, NOT_SUPPORTED))
    asked = gpus(nvml)
    for _ in range(5):
        asked.snapshot()
    assert [nvml.calls.count(name) for name in names] == [1, 1, 1]
    assert nvml.calls.count("nvmlDeviceGetMemoryInfo") == 5


def test_values_that_failed_temporarily_are_queried_again():
    chip = Chip("GPU-a", failing={"nvmlDeviceGetPowerUsage": UNKNOWN})
    asked = gpus(FakeNvml(chip))
    assert asked.snapshot()[0].power_w is None
    chip.failing.clear()
    assert asked.snapshot()[0].power_w == 33.5


def test_bytes_over_pcie_are_never_queried():
    nvml = FakeNvml(Chip("GPU-a"))
    gpus(nvml).snapshot()
    assert not [name for name in nvml.calls if "Pcie" in name]


def test_utilization_is_the_mean_of_the_drivers_samples_since_the_last_snapshot():
    chip = Chip("GPU-a", samples=[(10, 100), (20, 30)])
    asked = gpus(FakeNvml(chip))
    # The first snapshot uses only the newest sample.
    assert asked.snapshot()[0].utilization_rate == 0.3
    chip.samples += [(30, 50), (40, 70), (50, 100_000)]
    assert asked.snapshot()[0].utilization_rate == pytest.approx(0.6)
    chip.samples.append((60, 0))
    assert asked.snapshot()[0].utilization_rate == 0.0


def test_without_new_samples_the_drivers_own_utilization_is_used():
    chip = Chip("GPU-a")
    asked = gpus(FakeNvml(chip))
    # For an empty buffer of samples, the fake driver raises NOT_FOUND, as NVML does.
    assert asked.snapshot()[0].utilization_rate == 0.4
    chip.samples.append((10, 90))
    assert [asked.snapshot()[0].utilization_rate for _ in range(2)] == [0.9, 0.4]


def test_memory_reported_by_old_bindings_includes_the_drivers_share():
    nvml = FakeNvml(Chip("GPU-a"))
    # Older bindings have no argument for the version.
    nvml.nvmlDeviceGetMemoryInfo = lambda chip: SimpleNamespace(used=5, total=9)
    assert gpus(nvml).snapshot()[0].used_bytes == 5


def test_reasons_for_lowered_clocks_are_read_from_new_and_old_drivers():
    reasons_of = {0: (), 0x1: (), 0x4: ("power",), 0x80: ("power",), 0x20: ("heat",), 0x44: ("power", "heat")}
    for absent in ((), ("nvmlDeviceGetCurrentClocksEventReasons",)):
        for reasons, expected in reasons_of.items():
            nvml = FakeNvml(Chip("GPU-a", reasons=reasons), absent=absent)
            assert gpus(nvml).snapshot()[0].slowed_by == expected


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
# The driver is not loaded, the library is not found, or the error is unknown.
@pytest.mark.parametrize("error", [9, 12, UNKNOWN])
def test_without_a_driver_there_are_no_gpus(function, error):
    nvml = FakeNvml(Chip("GPU-a"), failing={function: error})
    asked = gpus(nvml)
    assert asked.snapshot() == gpu_reports(nvml) == ()
    asked.close()


def test_without_a_binding_there_are_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus(None).snapshot() == gpu_reports() == ()


def test_another_package_named_like_the_bindings_is_reported_once(monkeypatch, caplog):
    other = ModuleType("pynvml")
    other.__file__ = "/somewhere/pynvml.py"
    monkeypatch.setitem(sys.modules, "pynvml", other)
    with caplog.at_level(logging.WARNING, "colabkit"):
        assert [gpus(None).snapshot(), gpu_reports(), gpu_reports()] == [(), (), ()]
    (record,) = caplog.records
    assert "/somewhere/pynvml.py" in record.getMessage()
    assert "nvidia-ml-py" in record.getMessage()


def test_a_lost_gpu_is_reported_and_no_longer_queried_and_the_others_continue():
    bad, good = Chip("GPU-bad"), Chip("GPU-good")
    nvml = FakeNvml(bad, good)
    asked = gpus(nvml)
    assert [gpu.is_lost for gpu in asked.snapshot()] == [False, False]
    bad.failing = dict.fromkeys([name for name in dir(FakeNvml) if name.startswith("nvmlDevice")], IS_LOST)
    lost, other = asked.snapshot()
    assert lost == GpuSnapshot("GPU-bad", "Tesla T4", is_lost=True)
    assert other.utilization_rate == 0.4
    bad.failing.clear()
    nvml.calls.clear()
    assert asked.snapshot() == (lost, other)
    assert nvml.calls.count("nvmlDeviceGetMemoryInfo") == 1


def test_a_gpu_that_was_lost_before_keeps_its_number():
    nvml = FakeNvml(Chip("GPU-a", failing={"open": IS_LOST}), Chip("GPU-b", failing={"open": UNKNOWN}), Chip("GPU-c"))
    first, second, third = gpus(nvml).snapshot()
    assert (first, second) == (GpuSnapshot(is_lost=True), GpuSnapshot())
    assert third.uuid == "GPU-c"
    assert uuids(nvml, "2") == ["GPU-c"]


VISIBLE = {
    None: ["GPU-aa1", "GPU-ab2", "GPU-b33"],
    "": [],
    "-1": [],
    "NoDevFiles": [],
    "1": ["GPU-ab2"],
    " 2 , 0 ": ["GPU-b33", "GPU-aa1"],
    "0,0,1": ["GPU-aa1", "GPU-ab2"],
    "1,-1,2": ["GPU-ab2"],
    "0,7,1": ["GPU-aa1"],
    "GPU-b33": ["GPU-b33"],
    "GPU-b,GPU-aa": ["GPU-b33", "GPU-aa1"],
    "GPU-a": [],
    "GPU-none,0": [],
    "2,GPU-ab2": ["GPU-b33", "GPU-ab2"],
    "MIG-x": [],
}


def test_only_gpus_that_this_process_may_use_are_listed_in_the_order_of_cuda():
    nvml = FakeNvml(Chip("GPU-aa1"), Chip("GPU-ab2"), Chip("GPU-b33"))
    for visible, expected in VISIBLE.items():
        assert uuids(nvml, visible) == expected


def sliced() -> FakeNvml:
    """Return the NVML of a machine with a whole GPU, and a GPU with two MIG instances at indices 0 and 2."""
    unsupported = {"nvmlDeviceGetUtilizationRates": NOT_SUPPORTED, "nvmlDeviceGetSamples": NOT_SUPPORTED}
    unsupported |= dict.fromkeys(("nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrentClocksEventReasons"), NOT_SUPPORTED)
    slices = [
        Chip("MIG-one", "A100 MIG 1g.5gb", used=GIB, total=5 * GIB, numbers=(7, 0), failing=unsupported),
        None,
        Chip("MIG-two", "A100 MIG 2g.10gb", total=10 * GIB, numbers=(3, 0), failing=unsupported),
    ]
    return FakeNvml(Chip("GPU-whole"), Chip("GPU-cut", instances=slices, reasons=0x4))


def test_cuda_shows_one_slice_of_a_sliced_gpu():
    for visible, expected in {
        None: ["MIG-one"],
        "0": ["MIG-one"],
        "1": [],
        "MIG-two": ["MIG-two"],
        "MIG-GPU-cut/3/0": ["MIG-two"],
        "MIG-GPU-cut/4/0": [],
        "GPU-cut": ["MIG-one"],
        "GPU-whole": ["GPU-whole"],
    }.items():
        assert uuids(sliced(), visible) == expected


@pytest.mark.parametrize("uuid", ["one", "cut"])
def test_a_slice_has_its_own_memory_and_no_utilization(uuid):
    (gpu,) = gpus(sliced(), None, fake_torch([uuid], {0: (1, 2)})).snapshot()
    # Some versions of CUDA report the UUID of the card instead of that of the slice.
    assert gpu == GpuSnapshot("MIG-one", "A100 MIG 1g.5gb", None, GIB, 5 * GIB, 1, 2, slowed_by=("power",))


def test_the_memory_of_torch_is_known_after_torch_has_allocated_some():
    nvml = FakeNvml(Chip("GPU-a"), Chip("GPU-b"))
    torch = fake_torch(["a", "b"], {1: (10, 30)})
    assert [(gpu.torch_bytes, gpu.torch_reserved_bytes) for gpu in gpus(nvml, None, torch).snapshot()] == [
        (None, None),
        (10, 30),
    ]


def test_torch_is_not_queried_before_it_uses_cuda():
    def forbidden(*_: object) -> None:
        pytest.fail("this can make a CUDA context")

    torch = fake_torch(["a"], {0: (1, 1)}, initialized=False)
    for name in ("device_count", "get_device_properties", "memory_stats_as_nested_dict"):
        setattr(torch.cuda, name, forbidden)
    (gpu,) = gpus(FakeNvml(Chip("GPU-a")), None, torch).snapshot()
    assert gpu.torch_bytes is None


@pytest.mark.parametrize("torch", [SimpleNamespace(), SimpleNamespace(cuda=SimpleNamespace())])
def test_a_partially_imported_or_unusual_torch_only_loses_its_own_values(torch):
    (gpu,) = gpus(FakeNvml(Chip("GPU-a")), None, torch).snapshot()
    assert (gpu.used_bytes, gpu.torch_bytes) == (3 * GIB, None)


def test_different_gpus_are_in_the_order_of_torch():
    nvml = FakeNvml(Chip("GPU-slow"), Chip("GPU-fast", used=7))
    # CUDA numbers the fastest GPU first.
    asked = gpus(nvml, "0", fake_torch(["fast"], {0: (1, 2)}))
    (gpu,) = asked.snapshot()
    assert (gpu.uuid, gpu.used_bytes, gpu.torch_bytes) == ("GPU-fast", 7, 1)


def test_a_gpu_that_is_listed_twice_appears_once():
    nvml = FakeNvml(Chip("GPU-a"), Chip("GPU-b"))
    found = gpus(nvml, "0,0,1", fake_torch(["a", "a", "b"], {0: (1, 2), 2: (3, 4)})).snapshot()
    assert [(gpu.uuid, gpu.torch_bytes) for gpu in found] == [("GPU-a", 1), ("GPU-b", 3)]


@pytest.mark.parametrize("devices", [[], ["elsewhere"]])
def test_torch_devices_unknown_to_the_driver_are_ignored(devices):
    assert uuids(FakeNvml(Chip("GPU-a"), Chip("GPU-b")), None, fake_torch(devices)) == ["GPU-a", "GPU-b"]


def test_closing_twice_releases_the_driver_once():
    nvml = FakeNvml(Chip("GPU-a"), failing={"nvmlShutdown": UNKNOWN})
    asked = gpus(nvml)
    asked.close()
    asked.close()
    assert nvml.calls.count("nvmlShutdown") == 1
    assert asked.snapshot() == ()


def test_reports_contain_the_drivers_values_and_release_the_driver():
    nvml = FakeNvml(Chip("GPU-0", b"Card \xff"), Chip("GPU-1", instances=[Chip("MIG-1")]))
    first, second = found = gpu_reports(nvml)
    assert [(gpu.uuid, gpu.total_bytes, gpu.free_bytes) for gpu in found] == [
        (f"GPU-{index}", 16 * GIB, 12 * GIB) for index in range(2)
    ]
    assert nvml.calls.count("nvmlShutdown") == 1
    assert repr(first) == "Card \ufffd, 16.0 GiB"
    assert second.details() == (
        "Tesla T4, 16.0 GiB, 12.0 GiB free, in MIG slices, driver 580.65.06, CUDA up to 12.9, GPU-1"
    )


def test_a_value_unknown_to_driver_or_binding_is_none_in_a_report_and_the_others_stay():
    for function, unknown in {
        "nvmlDeviceGetUUID": ["uuid"],
        "nvmlDeviceGetName": ["name"],
        "nvmlDeviceGetMemoryInfo": ["total_bytes", "free_bytes"],
        "nvmlSystemGetDriverVersion": ["driver"],
        "nvmlSystemGetCudaDriverVersion": ["cuda"],
        "nvmlDeviceGetMigMode": ["is_sliced"],
        "nvmlShutdown": [],
    }.items():
        for broken in ({"failing": {function: UNKNOWN}}, {"absent": (function,)}):
            if function == "nvmlShutdown" and "absent" in broken:
                continue
            (gpu,) = gpu_reports(FakeNvml(Chip("GPU-a"), **broken))
            assert [name for name, value in gpu.to_dict().items() if value is None] == unknown
            assert "None" not in repr(gpu) + gpu._repr_html_() + gpu.details()
    (gpu,) = gpu_reports(FakeNvml(Chip("GPU-a", failing={"open": UNKNOWN})))
    assert (gpu.uuid, gpu.name, gpu.total_bytes, gpu.free_bytes) == (None, None, None, None)


def test_the_binding_is_searched_by_name_in_the_given_folders_only(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(Chip("GPU-a")))
    assert len(gpu_reports()) == len(gpu_reports(paths=[])) == 1
    (tmp_path / "pynvml.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nraise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    del sys.modules["pynvml"]
    assert gpu_reports(paths=[]) == ()
    assert not (tmp_path / "imported").exists()
    assert gpu_reports(paths=[str(tmp_path)]) == ()
    assert (tmp_path / "imported").exists()
