"""What a machine allows, read from made-up machines: places, CPU quotas, memory limits, GPUs, mounts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import needs
from far_mounts import FuseMount, has_fuse

from colabkit.environment import (
    Place,
    allowed_cpus,
    gpus,
    is_tmpfs,
    memory_limits,
    near_folder,
    place_of,
    runtime,
    storage,
)
from colabkit.mounts import Mount

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: {4 << 20} kB\nMemAvailable: {32 << 20} kB\nHugePages_Total: 0\n"
SANDBOX_MEMINFO = f"""\
MemTotal:        {13 << 20} kB
MemFree:         {10 << 20} kB
MemAvailable:    {12 << 20} kB
Buffers:                0 kB
Cached:            524288 kB
SwapTotal:              0 kB
Active(anon):      262144 kB
Shmem:               4096 kB
"""
V2 = "/sys/fs/cgroup"
V1_MEMORY = f"{V2}/memory"


def reader(files: dict[str, str]):
    """Return a reader of made-up files; anything else is missing."""

    def read(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        return files[path]

    return read


def v2_memory(folder: str, limit: int | str, used: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    """Return the files of a cgroup of version 2."""
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file {active}\nshmem {used}\n",
    }


def v1_memory(folder: str, limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    """Return the files of a memory cgroup of version 1."""
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


TERMINAL = "IPython.terminal.interactiveshell.TerminalInteractiveShell"
KERNEL = "ipykernel.zmqshell.ZMQInteractiveShell"
COLAB = "google.colab._shell.Shell"
HOSTED = "/var/colab/hostname"
TAG = {"COLAB_RELEASE_TAG": "release-colab_20260819"}
LIGHTNING, STUDIO_LAB = "/teamspace/studios/this_studio", "/home/studio-lab-user"


@pytest.mark.parametrize(
    ("environ", "shell", "variables", "paths", "name", "kind", "can_mount"),
    [
        ({}, None, (), (), "Python", "script", False),
        ({}, TERMINAL, (), (), "IPython", "IPython", False),
        ({}, KERNEL, (), (), "Jupyter", "kernel", False),
        ({}, KERNEL, ("__vsc_ipynb_file__",), (), "Jupyter", "kernel", False),
        (TAG, COLAB, (), (HOSTED,), "Colab", "kernel", True),
        (TAG, COLAB, ("__vsc_ipynb_file__",), (HOSTED,), "Colab in VS Code", "kernel", True),
        ({}, COLAB, (), (), "Colab, local runtime", "kernel", False),
        ({"VERTEX_PRODUCT": "COLAB_ENTERPRISE"}, COLAB, (), (HOSTED,), "Colab Enterprise", "kernel", False),
        ({"VERTEX_PRODUCT": "WORKBENCH_INSTANCE"}, COLAB, (), (HOSTED,), "Colab", "kernel", True),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, KERNEL, (), (), "Kaggle", "kernel", False),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, None, (), (), "Kaggle", "script", False),
        ({}, KERNEL, (), (LIGHTNING,), "Lightning Studio", "kernel", False),
        ({}, None, (), (LIGHTNING,), "Lightning Studio", "script", False),
        ({}, KERNEL, (), (STUDIO_LAB,), "SageMaker Studio Lab", "kernel", False),
        ({"PAPERSPACE_FQDN": "x.paperspacegradient.com"}, KERNEL, (), (), "Paperspace", "kernel", False),
        ({"PAPERSPACE_METRIC_WORKLOAD_ID": "x"}, TERMINAL, (), (), "Paperspace", "IPython", False),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/me/"}, KERNEL, (), (), "JupyterHub", "kernel", False),
        ({"JUPYTERHUB_API_TOKEN": "x"}, None, (), (), "JupyterHub", "script", False),
        # Attempts to fool it.
        ({**TAG, "KAGGLE_KERNEL_RUN_TYPE": "Batch"}, COLAB, (), (HOSTED,), "Kaggle", "kernel", False),
        ({**TAG, "JUPYTERHUB_API_TOKEN": "x"}, COLAB, (), (HOSTED, LIGHTNING), "Colab", "kernel", True),
        ({**TAG, "PAPERSPACE_FQDN": "x"}, COLAB, (), (HOSTED, STUDIO_LAB), "Colab", "kernel", True),
        (TAG, None, (), (HOSTED,), "Colab", "script", False),
        (TAG, TERMINAL, (), (HOSTED,), "Colab", "IPython", False),
        (TAG, None, (), (), "Python", "script", False),
        ({}, None, (), (HOSTED,), "Python", "script", False),
        ({"PAPERSPACE_API_KEY": "mine"}, KERNEL, (), ("/notebooks",), "Jupyter", "kernel", False),
        ({"JUPYTERHUB_API_TOKEN": "x"}, KERNEL, (), (LIGHTNING,), "Lightning Studio", "kernel", False),
        ({"VERTEX_PRODUCT": "COLAB_ENTERPRISE"}, KERNEL, (), (), "Jupyter", "kernel", False),
    ],
)
def test_the_place_is_told_from_what_only_it_has(environ, shell, variables, paths, name, kind, can_mount):
    assert place_of(environ, shell, variables, paths.__contains__) == Place(name, kind, can_mount)


def test_the_place_of_this_process_is_a_script_and_loads_no_ipython():
    code = "import sys; from colabkit.environment import current_place as p; print(p().shell, 'IPython' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == (
        "script False\n"
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"/proc/self/cgroup": "0::/\n"}, 8),
        ({"/proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, 8),
        ({"/proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "200000 100000\n"}, 2),
        ({"/proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "50000 100000\n"}, 0.5),
        ({"/proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "1600000 100000\n"}, 8),
        ({"/proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "garbage\n"}, 8),
        ({"/proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "100000 0\n"}, 8),
        (
            {
                "/proc/self/cgroup": "0::/p/leaf\n",
                f"{V2}/p/leaf/cpu.max": "400000 100000\n",
                f"{V2}/p/cpu.max": "150000 100000\n",
                f"{V2}/cpu.max": "max 100000\n",
            },
            1.5,
        ),
        ({"/proc/self/cgroup": "0::/gone/here\n", f"{V2}/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "/proc/self/cgroup": "5:cpuacct,cpu:/docker/x\n4:memory:/docker/x\n",
                f"{V2}/cpuacct,cpu/cpu.cfs_quota_us": "250000\n",
                f"{V2}/cpuacct,cpu/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "/proc/self/cgroup": "5:cpu,cpuacct:/x\n",
                f"{V2}/cpu/x/cpu.cfs_quota_us": "-1\n",
                f"{V2}/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        (
            {
                "/proc/self/cgroup": "5:cpu:/x\n0::/x\n",
                f"{V2}/cpu/x/cpu.cfs_quota_us": "600000\n",
                f"{V2}/cpu/x/cpu.cfs_period_us": "100000\n",
                f"{V2}/unified/x/cpu.max": "400000 100000\n",
            },
            4,
        ),
    ],
)
def test_cpus_are_the_least_of_affinity_and_every_quota_above(files, expected):
    assert allowed_cpus(reader(files), 8) == expected


def test_memory_without_cgroups_is_the_machines():
    report = memory_limits(reader({"/proc/meminfo": MEMINFO}))
    assert (report.total_bytes, report.available_bytes, report.limited_by) == (64 * GIB, 32 * GIB, "machine")


def test_memory_of_a_sandbox_is_what_its_meminfo_says():
    files = {
        "/proc/meminfo": SANDBOX_MEMINFO,
        "/proc/self/cgroup": "2:memory:/\n1:cpu:/\n",
        f"{V1_MEMORY}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{V1_MEMORY}/memory.usage_in_bytes": f"{GIB}\n",
    }
    report = memory_limits(reader(files))
    assert (report.total_bytes, report.available_bytes, report.limited_by) == (13 * GIB, 12 * GIB, "machine")


def test_memory_without_an_estimate_of_the_kernel_is_what_is_free():
    report = memory_limits(reader({"/proc/meminfo": f"MemTotal: {8 << 20} kB\nMemFree: {3 << 20} kB\n"}))
    assert report.available_bytes == 3 * GIB


def test_memory_comes_from_psutil_where_there_is_no_meminfo(monkeypatch):
    fake = ModuleType("psutil")
    fake.virtual_memory = lambda: SimpleNamespace(total=5 * GIB, available=2 * GIB)
    monkeypatch.setitem(sys.modules, "psutil", fake)
    report = memory_limits(reader({}))
    assert (report.total_bytes, report.available_bytes) == (5 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("cgroup", "files", "total", "available", "limited_by"),
    [
        ("0::/a\n", v2_memory(f"{V2}/a", 12 * GIB, 5 * GIB), 12, 7, f"{V2}/a"),
        ("0::/a\n", v2_memory(f"{V2}/a", 12 * GIB, 5 * GIB, inactive=2 * GIB), 12, 9, f"{V2}/a"),
        ("0::/a\n", v2_memory(f"{V2}/a", 12 * GIB, 9 * GIB, 2 * GIB, 4 * GIB), 12, 9, f"{V2}/a"),
        ("0::/a\n", v2_memory(f"{V2}/a", 12 * GIB, 5 * GIB, 4 * GIB, 4 * GIB), 12, 12, f"{V2}/a"),
        ("0::/a\n", v2_memory(f"{V2}/a", "max", 5 * GIB), 64, 32, "machine"),
        ("0::/a\n", v2_memory(f"{V2}/a", 40 * GIB, GIB), 40, 32, f"{V2}/a"),
        ("0::/a\n", v2_memory(f"{V2}/a", 100 * GIB, 90 * GIB), 64, 10, "machine"),
        ("0::/a\n", v2_memory(f"{V2}/a", 2 * GIB, 3 * GIB), 2, 0, f"{V2}/a"),
        ("0::/gone\n", v2_memory(V2, 6 * GIB, GIB), 6, 5, V2),
        ("4:memory:/docker/x\n", v1_memory(V1_MEMORY, 6 * GIB, 2 * GIB, inactive=GIB), 6, 5, V1_MEMORY),
        ("4:memory:/x\n", v1_memory(f"{V1_MEMORY}/x", 2**63 - 4096, GIB), 64, 32, "machine"),
    ],
)
def test_memory_is_the_least_of_machine_and_cgroup(cgroup, files, total, available, limited_by):
    report = memory_limits(reader({"/proc/meminfo": MEMINFO, "/proc/self/cgroup": cgroup, **files}))
    assert (report.total_bytes / GIB, report.available_bytes / GIB) == (total, available)
    assert report.limited_by == limited_by


def test_a_tighter_parent_counts_more_than_the_leaf():
    files = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "0::/pod/leaf\n",
        **v2_memory(f"{V2}/pod/leaf", 20 * GIB, GIB),
        **v2_memory(f"{V2}/pod", 10 * GIB, 8 * GIB),
        **v2_memory(V2, "max", 30 * GIB),
    }
    report = memory_limits(reader(files))
    assert (report.total_bytes, report.available_bytes) == (10 * GIB, 2 * GIB)
    assert report.limited_by == f"{V2}/pod"


def test_a_parents_neighbours_take_from_what_the_leaf_may_use():
    files = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "0::/pod/leaf\n",
        **v2_memory(f"{V2}/pod/leaf", 8 * GIB, GIB),
        **v2_memory(f"{V2}/pod", 10 * GIB, 9 * GIB),
    }
    report = memory_limits(reader(files))
    assert (report.total_bytes, report.available_bytes, report.limited_by) == (8 * GIB, GIB, f"{V2}/pod/leaf")


@pytest.mark.parametrize("missing", ["memory.stat", "memory.current"])
def test_a_limit_counts_even_where_its_other_files_are_missing(missing):
    files = v2_memory(f"{V2}/a", 12 * GIB, 5 * GIB, inactive=GIB)
    del files[f"{V2}/a/{missing}"]
    report = memory_limits(reader({"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/a\n", **files}))
    assert report.total_bytes == 12 * GIB
    assert report.available_bytes == {"memory.stat": 7 * GIB, "memory.current": 12 * GIB}[missing]


class NVMLError(Exception):
    """The error of the made-up driver."""


def fake_nvml(count: int = 1, broken: tuple[str, ...] = ()) -> ModuleType:
    """Return a made-up binding whose named calls raise."""
    module = ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.shut_down = 0

    def call(name, result):
        def run(*arguments):
            if name in broken:
                raise NVMLError(name)
            return result(*arguments)

        setattr(module, name, run)

    def shut_down():
        module.shut_down += 1

    call("nvmlInit", lambda: None)
    call("nvmlShutdown", shut_down)
    call("nvmlDeviceGetCount", lambda: count)
    call("nvmlDeviceGetHandleByIndex", lambda index: index)
    call("nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(total=16 * GIB, free=15 * GIB))
    call("nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
    call("nvmlDeviceGetName", lambda handle: b"Tesla T4")
    call("nvmlSystemGetDriverVersion", lambda: "580.65.06")
    return module


def test_gpus_are_as_the_driver_tells():
    module = fake_nvml(2)
    found = gpus(module)
    assert [(gpu.uuid, gpu.name, gpu.total_bytes, gpu.free_bytes) for gpu in found] == [
        (f"GPU-{index}", "Tesla T4", 16 * GIB, 15 * GIB) for index in range(2)
    ]
    assert module.shut_down == 1
    assert repr(found[0]) == "Tesla T4, 16.0 GiB"


@pytest.mark.parametrize(
    ("broken", "unknown"),
    [
        ("nvmlDeviceGetUUID", ["uuid"]),
        ("nvmlDeviceGetName", ["name"]),
        ("nvmlDeviceGetMemoryInfo", ["total_bytes", "free_bytes"]),
        ("nvmlSystemGetDriverVersion", ["driver"]),
    ],
)
def test_a_value_the_driver_does_not_tell_is_none_and_the_rest_stays(broken, unknown):
    module = fake_nvml(broken=(broken,))
    (gpu,) = gpus(module)
    assert [name for name, value in gpu.to_dict().items() if value is None] == unknown
    assert "None" not in repr(gpu) + gpu._repr_html_() + gpu.details()
    assert module.shut_down == 1


def test_what_an_old_binding_cannot_ask_is_missing_like_any_other_value():
    module = fake_nvml()
    del module.nvmlSystemGetDriverVersion, module.nvmlDeviceGetUUID
    (gpu,) = gpus(module)
    assert (gpu.uuid, gpu.driver, gpu.name) == (None, None, "Tesla T4")


def test_a_gpu_without_a_handle_is_listed_with_nothing_known():
    (gpu,) = gpus(fake_nvml(broken=("nvmlDeviceGetHandleByIndex",)))
    assert (gpu.uuid, gpu.name, gpu.total_bytes, gpu.free_bytes) == (None, None, None, None)


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_driver_that_refuses_means_no_gpu(broken):
    assert gpus(fake_nvml(broken=(broken,))) == ()


def test_no_binding_means_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == ()


def test_another_package_of_the_bindings_name_means_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    assert gpus() == ()


def test_the_binding_is_found_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(3))
    assert len(gpus()) == 3


def on_disk(fstype: str, point: str, options: str = "rw") -> Mount:
    return Mount(point, fstype, "x", tuple(options.split(",")))


def test_the_innermost_mount_names_the_file_system(tmp_path):
    inner = tmp_path / "in"
    inner.mkdir()
    table = [on_disk("overlay", "/"), on_disk("older", str(inner)), on_disk("xfs", str(inner))]
    assert storage.disk(str(inner), table, GIB).fstype == "xfs"
    assert storage.disk(str(tmp_path), table, GIB).fstype == "overlay"
    assert storage.disk(str(tmp_path), [], GIB).fstype == "unknown"
    assert storage.disk(str(tmp_path / "missing"), table, GIB) is None


def test_tmpfs_is_no_more_than_the_ram_that_is_available(tmp_path):
    table = [on_disk("tmpfs", str(tmp_path))]
    report = storage.disk(str(tmp_path), table, 5)
    assert report.budget_bytes == 5 < report.free_bytes
    assert "5 B of it within the RAM available" in repr(report)
    assert storage.disk(str(tmp_path), table, 1 << 60).budget_bytes == report.free_bytes
    assert storage.disk(str(tmp_path), [on_disk("ext4", str(tmp_path))], 5).budget_bytes > 5


def test_each_tmpfs_for_data_is_listed_and_the_systems_own_are_not(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    shown = [on_disk("tmpfs", str(mine)), on_disk("tmpfs", "/dev/shm")]
    hidden = [on_disk("tmpfs", point) for point in ("/run", "/run/lock", "/sys/fs/cgroup", "/dev", "/proc/acpi")]
    found = storage.tmpfs([*hidden, *shown, on_disk("tmpfs", str(tmp_path), "ro")], GIB)
    assert {report.folder for report in found} <= {str(mine), "/dev/shm"}
    assert str(mine) in {report.folder for report in found}


def test_a_folder_on_a_remote_mount_is_never_touched(tmp_path, monkeypatch):
    touched: list[str] = []
    real = os.statvfs

    def statvfs(path):
        touched.append(str(path))
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.chdir(tmp_path)
    table = [on_disk("ext4", "/"), on_disk("fuse.drive", str(tmp_path))]
    assert storage.disk(str(tmp_path), table, GIB) is None
    storage.disks(table, GIB)
    assert not any(path.startswith(str(tmp_path)) for path in touched)
    assert touched != []


def test_a_report_made_on_a_hanging_mount_does_not_wait_for_it(tmp_path):
    needs("FUSE", has_fuse())
    with FuseMount(tmp_path / "point", tmp_path) as mounted:
        code = """
import os, sys
from colabkit.environment import is_tmpfs, runtime
from pathlib import Path
os.chdir(sys.argv[1])
runtime()
print("there", sys.path[0], flush=True)
sys.stdin.readline()
report = runtime()
print((sys.argv[1], "DriveFS") in report.mounts, report.drive, is_tmpfs(Path(sys.argv[1]) / "x"))
"""
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(mounted.point)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "there \n"
        mounted.hang()
        assert child.communicate("go on\n", timeout=60)[0] == f"True {mounted.point} False\n"


def test_only_files_in_tmpfs_are_ram(tmp_path, monkeypatch):
    table = [on_disk("ext4", "/"), on_disk("tmpfs", str(tmp_path / "ram"))]
    monkeypatch.setattr(storage, "mounts", lambda: table)
    (tmp_path / "ram").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "ram")
    assert is_tmpfs(tmp_path / "ram" / "not" / "there" / "yet")
    assert is_tmpfs(tmp_path / "link" / "x")
    assert not is_tmpfs(tmp_path / "x")


def test_the_near_folder_is_the_chosen_one_else_the_hosts_else_the_cache(monkeypatch, tmp_path):
    present: set[str] = set()
    monkeypatch.setattr(Path, "is_dir", lambda path: str(path) in present)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert near_folder({}) == tmp_path / ".cache" / "colabkit"
    assert near_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/colabkit")
    present.add("/kaggle/temp")
    assert near_folder({"XDG_CACHE_HOME": "/c"}) == Path("/kaggle/temp/colabkit")
    present.add("/content")
    assert near_folder({}) == Path("/content/colabkit")
    assert near_folder({"COLABKIT_NEAR": "/chosen"}) == Path("/chosen")


def test_the_report_of_this_machine_is_whole_and_consistent():
    report = runtime()
    assert report.python == ".".join(map(str, sys.version_info[:3]))
    assert 0 < report.cpus <= (os.cpu_count() or 1)
    assert report.memory.available_bytes > 0
    assert report.memory.total_bytes > 0
    assert report.versions["numpy"]
    assert all(0 <= disk.free_bytes <= disk.total_bytes for disk in (*report.disks, *report.tmpfs))
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert report.place in repr(report)


def test_the_report_is_one_line_and_on_paper_one_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    report = runtime()
    assert len(repr(report).splitlines()) == 1
    lines = str(report).splitlines()
    assert lines[0] == repr(report)
    assert max(map(len, lines[1:])) <= 80
    for name in ("place", "CPUs", "RAM", "GPU", "Drive", "disk", "versions"):
        assert sum(line.startswith(f"  {name} ") for line in lines) >= 1


def test_the_report_needs_no_working_folder(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert runtime().python
