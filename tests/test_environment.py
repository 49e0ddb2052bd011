"""What a machine allows, read from made-up machines: places, CPU quotas, memory limits, GPUs, mounts."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from colabkit import environment
from colabkit.environment import allowed_cpus, gpus, memory_limits, near_folder, place, runtime

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


def v2_memory(folder: str, limit: int | str, used: int, inactive: int = 0) -> dict[str, str]:
    """Return the files of a cgroup of version 2."""
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 1\ninactive_file {inactive}\n",
    }


def v1_memory(folder: str, limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    """Return the files of a memory cgroup of version 1."""
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


@pytest.mark.parametrize(
    ("environ", "shell", "hostname", "expected"),
    [
        ({}, None, False, "Python"),
        ({}, None, True, "Python"),
        ({}, "IPython.terminal.interactiveshell.TerminalInteractiveShell", False, "IPython"),
        ({}, "ipykernel.zmqshell.ZMQInteractiveShell", False, "Jupyter"),
        ({}, "google.colab._shell.Shell", True, "Colab"),
        ({}, "google.colab._shell.Shell", False, "Colab, local runtime"),
        ({"VERTEX_PRODUCT": "COLAB_ENTERPRISE"}, "google.colab._shell.Shell", True, "Colab Enterprise"),
        ({"VERTEX_PRODUCT": "WORKBENCH_INSTANCE"}, "google.colab._shell.Shell", True, "Colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "google.colab._shell.Shell", True, "Kaggle"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, None, False, "Kaggle"),
    ],
)
def test_the_place_is_told_from_shell_environment_and_host(environ, shell, hostname, expected):
    assert place(environ, shell, hostname) == expected


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
    ],
)
def test_a_value_the_driver_does_not_tell_is_none_and_the_rest_stays(broken, unknown):
    module = fake_nvml(broken=(broken,))
    (gpu,) = gpus(module)
    assert [name for name, value in gpu.to_dict().items() if value is None] == unknown
    assert "None" not in repr(gpu) + gpu._repr_html_()
    assert module.shut_down == 1


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


def test_mount_points_with_spaces_and_tabs_are_unescaped():
    text = "drive /content/drive/My\\040Drive fuse.drive rw 0 0\nx /a\\011b\\134c tmpfs rw 0 0\n"
    assert list(environment._mounts(reader({"/proc/mounts": text}))) == [
        ("/content/drive/My Drive", "fuse.drive"),
        ("/a\tb\\c", "tmpfs"),
    ]


def test_no_list_of_mounts_is_an_empty_one():
    assert list(environment._mounts(reader({}))) == []


def test_the_innermost_mount_names_the_file_system(tmp_path):
    inner = tmp_path / "in"
    inner.mkdir()
    mounts = [("/", "overlay"), (str(inner), "older"), (str(inner), "tmpfs"), (str(tmp_path), "ext4"), ("/x", "no")]
    assert environment._disk(str(inner), mounts).fstype == "tmpfs"
    assert environment._disk(str(tmp_path), mounts).fstype == "ext4"
    assert environment._disk(str(tmp_path), []).fstype == "unknown"
    assert environment._disk(str(tmp_path / "missing"), mounts) is None


def test_read_file_takes_undecodable_bytes(tmp_path):
    (tmp_path / "mounts").write_bytes(b"x /caf\xe9 tmpfs rw 0 0\n")
    text = environment.read_file(str(tmp_path / "mounts"))
    ((point, fstype),) = environment._mounts(lambda path: text)
    assert (os.fsencode(point), fstype) == (b"/caf\xe9", "tmpfs")


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


def test_the_report_needs_no_working_folder(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert runtime().python
