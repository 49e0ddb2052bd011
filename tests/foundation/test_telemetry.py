"""`Telemetry`: snapshots of the machine that runs the tests."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict

import psutil
from fake_nvml import Chip, FakeNvml, fake_torch

from colabkit.foundation.telemetry.host import Host, Telemetry


def test_a_snapshot_of_this_machine_has_plausible_values():
    telemetry = Telemetry()
    telemetry.snapshot()
    began, cpu_before = time.monotonic(), time.process_time()
    while time.process_time() < cpu_before + 0.1:
        pass
    found = telemetry.snapshot()
    used_rate = (time.process_time() - cpu_before) / (time.monotonic() - began)
    telemetry.close()
    for name, value in asdict(found).items():
        if name.endswith(("_rate", "_per_s")):
            assert value is None or 0 <= value <= (1 if name.endswith("_rate") else float("inf")), name
    assert 0 < found.cpus <= os.cpu_count()
    assert 0 < found.ram_used_bytes < found.ram_total_bytes <= psutil.virtual_memory().total
    assert 0 < found.own_ram_bytes < found.ram_total_bytes
    # Compare with the CPU time of this loop alone, which does not depend on other processes.
    assert found.own_cpu_rate > 0.3 * used_rate / found.cpus


def test_a_snapshot_contains_host_and_gpus():
    nvml, torch = FakeNvml(Chip("GPU-b"), Chip("GPU-a")), fake_torch(["a"], {0: (1, 2)})
    telemetry = Telemetry(nvml, environ={"CUDA_VISIBLE_DEVICES": "1"}, modules={"torch": torch})
    (gpu,) = telemetry.snapshot().gpus
    assert (gpu.uuid, gpu.torch_reserved_bytes) == ("GPU-a", 2)
    telemetry.close()
    telemetry.close()
    # A sampler that is started again continues with the same telemetry.
    assert [one.uuid for one in telemetry.snapshot().gpus] == ["GPU-a"]
    telemetry.close()


def test_a_snapshot_takes_a_few_milliseconds_and_no_descriptor_stays_open():
    telemetry = Telemetry(FakeNvml(Chip("GPU-a")))
    telemetry.snapshot()
    before = psutil.Process().num_fds()
    taken_s = []
    for _ in range(20):
        began = time.thread_time()
        telemetry.snapshot()
        taken_s.append(time.thread_time() - began)
    # The limit is generous, because the machine may be busy.
    assert statistics.median(taken_s) < 0.02
    telemetry.close()
    assert psutil.Process().num_fds() <= before


def test_importing_telemetry_imports_no_torch_and_starts_no_thread():
    code = (
        "import sys, threading, colabkit.foundation.telemetry; print('torch' in sys.modules, threading.active_count())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "False 1\n"


def test_the_cpu_time_of_a_child_process_counts_as_own(tmp_path):
    host = Host()
    busy = (
        "import time\nprint('ready', flush=True)\nuntil = time.monotonic() + 60\nwhile time.monotonic() < until: pass"
    )
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            # Take a snapshot first, so that the next one can measure the child since this moment.
            host.snapshot()
            began, used_s = time.monotonic(), child_cpu_s(child.pid)
            deadline = began + 30
            while child_cpu_s(child.pid) - used_s < 0.2 and time.monotonic() < deadline:
                time.sleep(0.02)
            found = host.snapshot()
        finally:
            child.kill()
    assert found.own_cpu_rate * found.cpus > 0.1


def child_cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
