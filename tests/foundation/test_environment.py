"""Platforms and resources of simulated machines: GPUs, disks, tmpfs, remote mounts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from far_mounts import FuseMount, has_fuse
from trees import needs

from colabkit.foundation.environment import limits, places
from colabkit.foundation.environment.limits import is_tmpfs
from colabkit.foundation.environment.places import Place, local_root, place_of
from colabkit.foundation.environment.runtime_report import runtime
from colabkit.foundation.mount_table import Mount

GIB = 1 << 30
TERMINAL = "IPython.terminal.interactiveshell.TerminalInteractiveShell"
KERNEL = "ipykernel.zmqshell.ZMQInteractiveShell"
COLAB = "google.colab._shell.Shell"
HOSTED = "/var/colab/hostname"
TAG = {"COLAB_RELEASE_TAG": "release-colab_20260819"}
ENTERPRISE = {"VERTEX_PRODUCT": "COLAB_ENTERPRISE"}
LIGHTNING, STUDIO_LAB = "/teamspace/studios/this_studio", "/home/studio-lab-user"


# Columns: environment variables, shell, names in the notebook, existing paths; then the expected name, kind of shell,
# and whether Drive can be mounted.
PLACES = (
    ({}, None, (), (), "Python", "script", False),
    ({}, TERMINAL, (), (), "IPython", "IPython", False),
    ({}, KERNEL, (), (), "Jupyter", "kernel", False),
    ({}, KERNEL, ("__vsc_ipynb_file__",), (), "Jupyter", "kernel", False),
    (TAG, COLAB, (), (HOSTED,), "Colab", "kernel", True),
    (TAG, COLAB, ("__vsc_ipynb_file__",), (HOSTED,), "Colab in VS Code", "kernel", True),
    ({}, COLAB, (), (), "Colab, local runtime", "kernel", False),
    (ENTERPRISE, COLAB, (), (HOSTED,), "Colab Enterprise", "kernel", False),
    (ENTERPRISE, KERNEL, (), (), "Colab Enterprise", "kernel", False),
    (ENTERPRISE, None, (), (), "Colab Enterprise", "script", False),
    ({"VERTEX_PRODUCT": "WORKBENCH_INSTANCE"}, COLAB, (), (HOSTED,), "Colab", "kernel", True),
    ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, KERNEL, (), (), "Kaggle", "kernel", False),
    ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, None, (), (), "Kaggle", "script", False),
    ({"DATABRICKS_RUNTIME_VERSION": "15.4"}, KERNEL, (), (), "Databricks", "kernel", False),
    ({}, KERNEL, (), (LIGHTNING,), "Lightning Studio", "kernel", False),
    ({}, None, (), (LIGHTNING,), "Lightning Studio", "script", False),
    ({}, KERNEL, (), (STUDIO_LAB,), "SageMaker Studio Lab", "kernel", False),
    ({"PAPERSPACE_FQDN": "x.paperspacegradient.com"}, KERNEL, (), (), "Paperspace", "kernel", False),
    ({"PAPERSPACE_METRIC_WORKLOAD_ID": "x"}, TERMINAL, (), (), "Paperspace", "IPython", False),
    ({"JUPYTERHUB_SERVICE_PREFIX": "/user/me/"}, KERNEL, (), (), "JupyterHub", "kernel", False),
    ({"JUPYTERHUB_API_TOKEN": "x"}, None, (), (), "JupyterHub", "script", False),
    # Machines that also have features of other platforms.
    ({**TAG, "KAGGLE_KERNEL_RUN_TYPE": "Batch"}, COLAB, (), (HOSTED,), "Kaggle", "kernel", False),
    ({**TAG, "JUPYTERHUB_API_TOKEN": "x"}, COLAB, (), (HOSTED, LIGHTNING), "Colab", "kernel", True),
    ({**TAG, "PAPERSPACE_FQDN": "x"}, COLAB, (), (HOSTED, STUDIO_LAB), "Colab", "kernel", True),
    (TAG, None, (), (HOSTED,), "Colab", "script", False),
    (TAG, TERMINAL, (), (HOSTED,), "Colab", "IPython", False),
    (TAG, None, (), (), "Python", "script", False),
    ({}, None, (), (HOSTED,), "Python", "script", False),
    ({"PAPERSPACE_API_KEY": "mine"}, KERNEL, (), ("/notebooks",), "Jupyter", "kernel", False),
    ({"JUPYTERHUB_API_TOKEN": "x"}, KERNEL, (), (LIGHTNING,), "Lightning Studio", "kernel", False),
    ({**TAG, **ENTERPRISE, "JUPYTERHUB_API_TOKEN": "x"}, COLAB, (), (HOSTED,), "Colab Enterprise", "kernel", False),
    ({**TAG, **ENTERPRISE}, COLAB, ("__vsc_ipynb_file__",), (HOSTED,), "Colab Enterprise", "kernel", False),
    ({**ENTERPRISE, "KAGGLE_KERNEL_RUN_TYPE": "Batch"}, KERNEL, (), (), "Kaggle", "kernel", False),
    ({"KAGGLE_USERNAME": "me", "KAGGLE_KEY": "x"}, KERNEL, (), (), "Jupyter", "kernel", False),
)


def test_each_platform_is_recognized_by_its_own_features():
    for environ, shell, variables, paths, *expected in PLACES:
        assert place_of(environ, shell, variables, paths.__contains__) == Place(*expected)


def test_the_place_of_this_process_is_a_script_and_loads_no_ipython():
    code = "import sys; from colabkit.foundation import current_place as p; print(p().shell, 'IPython' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == (
        "script False\n"
    )


def on_disk(fstype: str, point: str, options: str = "rw") -> Mount:
    return Mount(point, fstype, "x", tuple(options.split(",")))


def test_the_innermost_mount_determines_the_file_system(tmp_path):
    inner = tmp_path / "in"
    inner.mkdir()
    table = [on_disk("overlay", "/"), on_disk("older", str(inner)), on_disk("xfs", str(inner))]
    assert limits.disk(str(inner), table, GIB).fstype == "xfs"
    assert limits.disk(str(tmp_path), table, GIB).fstype == "overlay"
    assert limits.disk(str(tmp_path), [], GIB).fstype == "unknown"
    assert limits.disk(str(tmp_path / "missing"), table, GIB) is None


def test_the_budget_of_tmpfs_is_at_most_the_available_ram(tmp_path):
    table = [on_disk("tmpfs", str(tmp_path))]
    report = limits.disk(str(tmp_path), table, 5)
    assert report.budget_bytes == 5 < report.free_bytes
    assert "5 B of it within the RAM available" in repr(report)
    assert limits.disk(str(tmp_path), table, 1 << 60).budget_bytes == report.free_bytes
    assert limits.disk(str(tmp_path), [on_disk("ext4", str(tmp_path))], 5).budget_bytes > 5


def test_every_tmpfs_for_data_is_listed_and_those_of_the_system_are_not(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    shown = [on_disk("tmpfs", str(mine)), on_disk("tmpfs", "/dev/shm")]
    hidden = [on_disk("tmpfs", point) for point in ("/run", "/run/lock", "/sys/fs/cgroup", "/dev", "/proc/acpi")]
    found = limits.tmpfs([*hidden, *shown, on_disk("tmpfs", str(tmp_path), "ro")], GIB)
    assert {report.folder for report in found} <= {str(mine), "/dev/shm"}
    assert str(mine) in {report.folder for report in found}


def record_touches(monkeypatch) -> list[str]:
    touched: list[str] = []

    def recorded(real):
        def ask(path, *arguments, **options):
            touched.append(os.fspath(path) if isinstance(path, str | os.PathLike) else "")
            return real(path, *arguments, **options)

        return ask

    for name in ("statvfs", "stat", "lstat", "access"):
        monkeypatch.setattr(os, name, recorded(getattr(os, name)))
    return touched


def test_nothing_on_or_behind_a_remote_mount_is_accessed(tmp_path, monkeypatch):
    inside = tmp_path / "ram"
    inside.mkdir()
    monkeypatch.chdir(tmp_path)
    far = on_disk("fuse.drive", str(tmp_path))
    for table in (
        [on_disk("ext4", "/"), far, on_disk("tmpfs", str(inside))],
        [on_disk("ext4", "/"), on_disk("tmpfs", str(tmp_path)), on_disk("tmpfs", str(inside)), far],
    ):
        monkeypatch.setattr(limits, "mounts", lambda table=table: table)
        with monkeypatch.context() as patch:
            touched = record_touches(patch)
            assert limits.disk(str(tmp_path), table, GIB) is None
            assert limits.tmpfs(table, GIB) == ()
            assert not is_tmpfs(tmp_path / "x")
            limits.disks(table, GIB)
        assert not any(path.startswith(str(tmp_path)) for path in touched)
        assert touched != []


def test_a_remote_root_counts_as_a_local_disk_since_python_runs_from_it(monkeypatch):
    monkeypatch.chdir("/")
    found = limits.disks([on_disk("9p", "/")], GIB)
    assert ("/", "9p") in {(disk.folder, disk.fstype) for disk in found}


def test_the_folder_of_a_platform_on_a_remote_mount_is_recognized_by_its_path(tmp_path, monkeypatch):
    table = [on_disk("nfs4", "/home")]
    monkeypatch.setattr(places, "mounts", lambda: table)
    touched = record_touches(monkeypatch)
    monkeypatch.setenv("HOME", "/home/other")
    assert not places._exists(STUDIO_LAB)
    monkeypatch.setenv("HOME", STUDIO_LAB)
    assert places._exists(STUDIO_LAB)
    assert not any(path.startswith("/home") for path in touched)
    assert places._exists(str(tmp_path))


def test_a_report_in_a_folder_on_a_hung_mount_does_not_wait_for_it(tmp_path):
    needs("FUSE", has_fuse())
    with FuseMount(tmp_path / "point", tmp_path) as mounted:
        code = """
import os, sys
from colabkit.foundation import mounts, runtime
from colabkit.foundation.environment import places, runtime_report as environment
from colabkit.foundation.environment.limits import is_tmpfs
from pathlib import Path
environment.mounts = lambda: [one for one in mounts() if one.point == sys.argv[1] or not one.is_remote]
os.chdir(sys.argv[1])
runtime()
print("there", sys.path[0], flush=True)
sys.stdin.readline()
sys.path += [sys.argv[1], sys.argv[1] + "/packages"]
environment._PACKAGES += ("not-installed",)  # so that all of the search path is looked through
report = runtime()
print((sys.argv[1], "DriveFS") in report.mounts, is_tmpfs(Path(sys.argv[1]) / "x"))
"""
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(mounted.point)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "there \n"
        mounted.hang()
        assert child.communicate("go on\n", timeout=60)[0] == "True False\n"


def test_only_files_on_tmpfs_count_as_ram(tmp_path, monkeypatch):
    table = [on_disk("ext4", "/"), on_disk("tmpfs", str(tmp_path / "ram"))]
    monkeypatch.setattr(limits, "mounts", lambda: table)
    (tmp_path / "ram").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "ram")
    assert is_tmpfs(tmp_path / "ram" / "not" / "there" / "yet")
    assert is_tmpfs(tmp_path / "link" / "x")
    assert not is_tmpfs(tmp_path / "x")


def test_the_local_folder_is_the_chosen_one_else_on_the_platforms_disk_else_the_cache(monkeypatch, tmp_path):
    writable: set[str] = set()
    monkeypatch.setattr(os.path, "isdir", lambda path: str(path) in writable)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) in writable)
    monkeypatch.setattr(places, "_exists", lambda path: path == LIGHTNING)
    kaggle, databricks = {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, {"DATABRICKS_RUNTIME_VERSION": "15.4"}
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_root({}) == tmp_path / ".cache" / "colabkit"
    assert local_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/colabkit")
    assert local_root(databricks) == tmp_path / ".cache" / "colabkit", "the disk is missing"
    writable |= {"/content", "/cache", "/local_disk0"}
    assert local_root({}) == Path("/cache/colabkit"), "Lightning Studio"
    assert local_root(databricks) == Path("/local_disk0/colabkit")
    monkeypatch.setattr(places, "_exists", lambda path: False)
    assert local_root({}) == Path("/content/colabkit"), "not a disk of a platform that this is not"
    assert local_root(kaggle) == Path("/content/colabkit"), "neither is Kaggle's folder"
    writable.add("/kaggle")
    assert local_root(kaggle) == Path("/kaggle/temp/colabkit"), "it can be created"
    assert local_root({"COLABKIT_LOCAL": "/chosen"}) == Path("/chosen")
    assert local_root({"COLABKIT_LOCAL": "chosen"}) == Path.cwd() / "chosen"


def test_the_report_of_this_machine_is_complete_and_consistent():
    report = runtime()
    assert report.python == ".".join(map(str, sys.version_info[:3]))
    assert 0 < report.cpus <= (os.cpu_count() or 1)
    assert report.memory.available_bytes > 0
    assert report.memory.total_bytes > 0
    assert report.versions["numpy"]
    assert all(0 <= disk.free_bytes <= disk.total_bytes for disk in (*report.disks, *report.tmpfs))
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert report.place in repr(report)


def test_the_report_is_one_line_and_printed_as_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    report = runtime()
    assert len(repr(report).splitlines()) == 1
    lines = str(report).splitlines()
    assert lines[0] == repr(report)
    assert max(map(len, lines[1:])) <= 80
    for name in ("place", "CPUs", "RAM", "GPU", "Drive", "disk", "versions"):
        assert sum(line.startswith(f"  {name} ") for line in lines) >= 1


@pytest.mark.parametrize("search_path", [[], ["relative", ""]])
def test_the_report_works_without_a_working_folder(tmp_path, monkeypatch, search_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys, "path", [*search_path, *sys.path])
    gone.rmdir()
    assert runtime().versions["numpy"]
