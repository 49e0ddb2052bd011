"""Known failures of Drive mounts and of hosted notebooks, with colabkit's actions and messages.

`pytest tests/system/test_drive_failures.py -n 0 --report` prints the table.
"""

from __future__ import annotations

import errno
import os
import time

import pytest
from contract import make_pack
from far_mounts import FuseMount, RcloneMount, has_rclone
from far_side import Colab
from http_servers import served
from trees import make_tree, needs

import colabkit
from colabkit.errors import Corrupt, FileFailed, MountFailed, NotEnoughSpace
from colabkit.foundation import file_changes
from colabkit.foundation.environment.limits import allowed_cpus
from colabkit.foundation.mount_table import DRIVEFS_FOLDER, DRIVEFS_LOG

pytestmark = pytest.mark.usefixtures("fuse")


def log(colab: Colab, text: str) -> None:
    path = colab.home / DRIVEFS_LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_temporary_input_output_error_is_retried(colab, report_row):
    make_tree(colab.root / "MyDrive" / "birds", 4)
    colabkit.mount()
    colab.served.fail(errno.EIO, one_in=5)
    staged = colabkit.stage("drive:birds", to="disk", threads=2)
    colab.served.fail(0)
    assert staged.files == 12
    assert staged.retries > 0
    report_row("occasional Errno 5", "reads again at the offset reached, counts retries", staged)


@pytest.mark.full
def test_a_permanent_input_output_error_names_the_cause(colab, report_row, monkeypatch):
    make_tree(colab.root / "MyDrive" / "birds", 1)
    colabkit.mount()
    colab.served.fail(errno.EIO)
    with pytest.raises(FileFailed, match="split folders of more than a few thousand files") as caught:
        colabkit.stage("drive:birds", to="disk")
    colab.served.fail(0)
    report_row("permanent Errno 5 (huge folder)", "one error with cause and remedy", caught.value)


@pytest.mark.full
def test_an_exceeded_quota_is_named_when_reading_fails(colab, report_row):
    make_tree(colab.root / "MyDrive" / "birds", 1)
    colabkit.mount()
    log(colab, "E QUOTA_EXCEEDED\n")
    colab.served.fail(errno.EIO)
    with pytest.raises(FileFailed, match="QUOTA_EXCEEDED") as caught:
        colabkit.stage("drive:birds", to="disk")
    colab.served.fail(0)
    report_row("a Drive quota is exceeded", "reads DriveFS's log, names quota and remedy", caught.value)


def test_too_many_items_in_the_root_folder_are_named(colab, report_row):
    colab.plan(mount="root folder")
    with pytest.raises(MountFailed) as caught:
        colabkit.mount()
    assert caught.value.cause == "root folder"
    report_row("mounting times out (crowded My Drive)", "one error with cause and remedy", caught.value)


def test_a_dead_mount_is_repaired_at_the_same_path(colab, report_row):
    make_tree(colab.root / "MyDrive" / "birds", 2)
    colabkit.mount()
    colab.served.kill()
    with pytest.raises(FileFailed, match=r"is dead\. Run colabkit\.mount\(\) to repair it"):
        colabkit.stage("drive:birds", to="disk")
    repaired = colabkit.mount()
    assert colabkit.stage("drive:birds", to="disk").files == 6
    report_row("Errno 107, the mount died", "mount() removes it and mounts again", repaired)


@pytest.mark.full
def test_a_probe_of_a_hanging_mount_ends_in_time(colab, report_row):
    for number in range(40):
        (colab.root / "MyDrive" / f"{number}.png").write_bytes(b"x")
    colabkit.mount()
    colab.served.hang("open", after=20)
    began = time.monotonic()
    probed = colabkit.probe("drive:", seconds=3)
    assert time.monotonic() - began < 8
    assert probed.stalled
    colab.served.go_on()
    report_row("reading hangs at file 20 of thousands", "a child process reads; the deadline holds", probed)


def test_a_hanging_mount_is_replaced_only_with_force(colab, report_row):
    colabkit.mount()
    colab.served.hang()
    with pytest.raises(MountFailed) as caught:
        colabkit.mount(timeout=1)
    assert caught.value.cause == "hung"
    report_row("the whole mount hangs", "replaces it only with force=True", caught.value)


def test_flush_sends_writes_and_does_not_claim_that_they_reached_drive(colab, report_row):
    colabkit.mount()
    report = colabkit.flush()
    assert "cannot be checked from here" in repr(report)
    report_row("files written are absent from Drive", "flush() sends them, with a deadline", report)


def test_new_files_are_visible_after_clearing_the_cache(tmp_path, report_row):
    needs("rclone", has_rclone())
    root, point = tmp_path / "root", tmp_path / "point"
    root.mkdir()
    with RcloneMount(point, root, tmp_path / "cache", rc=True):
        assert os.listdir(point) == []
        (root / "new.txt").write_text("new")
        assert os.listdir(point) == []
        report = colabkit.clear_cache(point)
        assert os.listdir(point) == ["new.txt"]
    report_row("new files stay invisible", "clear_cache() works for each type of mount", report)


def test_a_download_with_another_digest_raises(tmp_path, report_row):
    with served(b"not what was there") as server, pytest.raises(Corrupt) as caught:
        colabkit.fetch(server.url, f"{tmp_path}/", digest=f"sha256:{'0' * 64}")
    assert list(tmp_path.iterdir()) == []
    report_row("large files arrive corrupt", "always checks sizes, and digests if given", caught.value)


def test_shortcuts_and_shared_drives_are_read(colab, report_row):
    target = colab.root / ".shortcut-targets-by-id" / "1abc" / "birds"
    make_tree(target, 2)
    data = colab.root / "MyDrive" / "data"
    data.mkdir()
    (data / "birds").symlink_to(f"{colab.point}/.shortcut-targets-by-id/1abc/birds")
    (target / "ants" / "loop").symlink_to(f"{colab.point}/.shortcut-targets-by-id/1abc/birds")
    (data / "one.png").symlink_to(f"{colab.point}/.shortcut-targets-by-id/1abc/birds/ants/000.png")
    (data / "gone.png").symlink_to(f"{colab.point}/.shortcut-targets-by-id/2def/gone.png")
    (data / "local").symlink_to("/etc")
    make_tree(colab.root / "Shareddrives" / "Team" / "fish", 1)
    colabkit.mount()
    staged = colabkit.stage("drive:data", to="disk")
    assert staged.files == 7
    assert (staged.path / "one.png").read_bytes() == (target / "ants" / "000.png").read_bytes()
    assert staged.skipped == (
        ("birds/ants/loop", "shortcut to a folder that contains it, or nested too deeply"),
        ("gone.png", "shortcut to a missing file or folder"),
        ("local", "link"),
    )
    assert colabkit.stage("drive:Shareddrives/Team/fish", to="disk").files == 3
    report_row("shortcuts and shared drives", "follows shortcuts, not loops; drive:Shareddrives/...", staged)


def test_a_full_cache_disk_is_distinguished_from_a_full_drive(colab, report_row):
    cached = colab.home / DRIVEFS_FOLDER / "123" / "content_cache"
    cached.mkdir(parents=True)
    (cached / "d0").write_bytes(bytes(300_000))
    colabkit.mount()
    with (
        pytest.raises(NotEnoughSpace, match="regardless of the free space on Drive"),
        file_changes.translated("write 'x'"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", f"{colab.point}/MyDrive/x")
    report = colabkit.clear_cache(dry_run=True)
    assert report.freed_bytes >= 300_000
    report_row("no space left, though Drive has room", "names the full disk, counts what clearing frees", report)


def test_the_usable_size_of_shared_memory_is_shown(report_row):
    report = colabkit.runtime()
    shared = [disk for disk in report.tmpfs if disk.folder == "/dev/shm"]
    assert bool(shared) is os.access("/dev/shm", os.W_OK)
    assert all(disk.budget_bytes <= min(disk.free_bytes, report.memory.available_bytes) for disk in shared)
    report_row(
        "Bus error: /dev/shm is full", "shows its usable size; loads by threads", shared[0] if shared else report
    )


def test_workers_are_limited_by_the_allowed_cpus(report_row):
    def read(path: str) -> str:
        files = {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "200000 100000\n"}
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    assert allowed_cpus(read, 8) == 2
    report_row("too many workers for 2 CPUs", "counts CPUs by affinity and quota", f"{colabkit.runtime().cpus:g} CPUs")


def test_a_pack_opens_on_a_file_system_without_locks(tmp_path, report_row):
    (tmp_path / "root").mkdir()
    make_pack(tmp_path / "root" / "birds.h5", train=6)
    with FuseMount(tmp_path / "point", tmp_path / "root", locks=False):
        pack = colabkit.open_pack(tmp_path / "point" / "birds.h5")
        assert len(pack["train"]) == 6
        assert colabkit.verify(tmp_path / "point" / "birds.h5").is_good
        del pack
    report_row("h5py: unable to lock file", "opens packs without HDF5's locks", "6 samples read")
