"""The mounts that other tests use have the requested latency, bandwidth and faults, and are removed afterwards."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import slow_drive
from far_mounts import DEADLINE_S, FuseMount, RcloneMount, has_fuse, has_rclone, in_child, mounted_at, wait_for
from sampling import sampled
from trees import needs

READ = "import sys; print(open(sys.argv[1]).read())"
LIST = "import os, sys; print(len(os.listdir(sys.argv[1])))"
LOCK = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH); print('locked')"
BIG_BYTES = 2_000_000

Mounted = Callable[..., FuseMount]

# The fakes themselves are tested only with `--full`, because colabkit's tests use them in every run.
pytestmark = pytest.mark.full


@pytest.fixture
def root(tmp_path: Path) -> Path:
    needs("FUSE", has_fuse())
    folder = tmp_path / "root"
    (folder / "birds").mkdir(parents=True)
    for number in range(24):
        (folder / f"birds/{number:02d}.txt").write_text(f"bird {number:02d}")
    (folder / "big.bin").write_bytes(os.urandom(BIG_BYTES))
    return folder


@pytest.fixture
def mounted(tmp_path: Path, root: Path) -> Iterator[Mounted]:
    with ExitStack() as stack:
        points = iter(range(9))

        def mount(**options: object) -> FuseMount:
            return stack.enter_context(FuseMount(tmp_path / f"far{next(points)}", root, **options))  # type: ignore[arg-type]

        yield mount


def seconds(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start


def outcome(act: Callable[[], object]) -> object:
    try:
        return act()
    except OSError as error:
        return errno.errorcode[error.errno]


@pytest.mark.parametrize(
    ("options", "slow"),
    [
        ({"open_s": 0.5}, ["open"]),
        ({"list_s": 0.5}, ["list"]),
        ({"latency_s": 0.5, "list_s": 0.0}, ["open", "read"]),
        ({"read_s": 0.5}, ["read"]),
        ({"latency_s": 0.5}, ["open", "read", "list"]),
    ],
)
def test_opens_listings_and_reads_have_a_common_or_a_separate_latency(
    mounted: Mounted, options: dict[str, float], slow: list[str]
) -> None:
    folder = mounted(**options).point / "birds"
    opened: list[int] = []
    took_s = {
        "open": seconds(lambda: opened.append(os.open(folder / "00.txt", os.O_RDONLY))),
        "read": seconds(lambda: os.pread(opened[0], 9, 0)),
        "list": seconds(lambda: os.listdir(folder)),
        "stat": seconds(lambda: os.stat(folder / "01.txt")),
    }
    os.close(opened[0])
    assert [kind for kind, taken in took_s.items() if taken >= 0.5] == slow


def test_all_reads_share_one_bandwidth(mounted: Mounted, root: Path) -> None:
    mount = mounted(bandwidth=4 * BIG_BYTES)
    with ThreadPoolExecutor(4) as pool:
        paths = [mount.point / "big.bin"] * 4
        start = time.monotonic()
        read = list(pool.map(Path.read_bytes, paths))
        took_s = time.monotonic() - start
    assert set(read) == {(root / "big.bin").read_bytes()}
    assert mount.read_bytes == 4 * BIG_BYTES
    assert 0.98 <= took_s < 2


def test_idle_bandwidth_is_not_saved_for_later(mounted: Mounted) -> None:
    mount = mounted(bandwidth=4 * BIG_BYTES, read_s=0.15)
    file = os.open(mount.point / "big.bin", os.O_RDONLY)
    part = BIG_BYTES // 4
    times = [seconds(lambda: os.pread(file, part, 0)) for _ in range(3)]
    os.close(file)
    assert all(taken >= 0.15 + 1 / 16 for taken in times)


def test_requests_beyond_the_maximum_wait(mounted: Mounted) -> None:
    for kind in ("open", "read", "list"):
        mount = mounted(**{f"{kind}_s": 0.1}, at_once=3)
        folder = mount.point / "birds"
        file = os.open(folder / "00.txt", os.O_RDONLY)
        acts: dict[str, Callable[[int], object]] = {
            "open": lambda number, folder=folder: os.close(os.open(folder / f"{number:02d}.txt", os.O_RDONLY)),
            "read": lambda number, file=file: os.pread(file, 1, 0),
            "list": lambda number, folder=folder: os.listdir(folder),
        }
        with ThreadPoolExecutor(12) as pool:
            took_s = seconds(lambda act=acts[kind], pool=pool: list(pool.map(act, range(12))))
        os.close(file)
        assert took_s >= 0.4
        assert mount.busiest == 3


def test_requests_that_wait_for_bandwidth_keep_their_slot(mounted: Mounted) -> None:
    mount = mounted(bandwidth=BIG_BYTES, at_once=1)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit((mount.point / "big.bin").read_bytes)
        wait_for(lambda: mount.read_bytes >= BIG_BYTES // 8, "the first part")
        assert seconds((mount.point / "birds/01.txt").read_text) > 0.1
        reading.result()


def test_without_faults_bytes_names_and_times_equal_those_of_the_root(mounted: Mounted, root: Path) -> None:
    for options in ({}, {"direct_io": False, "attr_s": 60.0}, {"plan": {"faults": []}, "bandwidth": 1e9}):
        point = mounted(**options).point
        assert (point / "big.bin").read_bytes() == (root / "big.bin").read_bytes()
        assert sorted(os.listdir(point / "birds")) == sorted(os.listdir(root / "birds"))
        found, real = (os.stat(folder / "birds/03.txt") for folder in (point, root))
        for field in ("st_mode", "st_size", "st_uid", "st_gid", "st_nlink", "st_mtime_ns", "st_blocks"):
            assert getattr(found, field) == getattr(real, field)


def test_the_kernel_caches_attributes_and_contents_only_if_allowed(mounted: Mounted, root: Path) -> None:
    plan = {"faults": [{"on": "stat", "path": "/birds/00.txt", "do": "error", "first": 2}]}
    for options, saved in (({}, "EIO"), ({"attr_s": 60.0}, 7)):
        point = mounted(plan=plan, **options).point
        outcome((point / "birds/00.txt").stat)
        assert outcome(lambda at=point: (at / "birds/00.txt").stat().st_size) == saved
    for direct_io in (True, False):
        mount = mounted(attr_s=60.0, direct_io=direct_io)
        file = os.open(mount.point / "big.bin", os.O_RDONLY)
        for _ in range(4):
            os.pread(file, 1000, 0)
        os.close(file)
        assert (mount.read_bytes == 4000) is direct_io


def test_each_kind_of_request_fails_with_the_planned_errno(mounted: Mounted) -> None:
    acts: dict[str, Callable[[Path], object]] = {
        "open": lambda path: os.close(os.open(path, os.O_RDONLY)),
        "read": Path.read_text,
        "stat": Path.stat,
        "list": lambda path: os.listdir(path.parent),
    }
    for on, act in acts.items():
        path = "/birds" if on == "list" else "*/03.txt"
        mount = mounted(plan={"faults": [{"on": on, "path": path, "do": "error", "errno": "ENOBUFS"}]})
        assert outcome(lambda act=act, at=mount.point: act(at / "birds/03.txt")) == "ENOBUFS"
        assert (mount.point / "birds/04.txt").read_text() == "bird 04"
        assert mount.faults >= 1


def test_the_first_and_the_last_failing_request_can_be_chosen(mounted: Mounted) -> None:
    fault = {"on": "open", "path": "/birds/*", "first": 2, "count": 2, "do": "error"}
    mount = mounted(plan={"faults": [fault]})
    outcomes = [outcome((mount.point / f"birds/{number:02d}.txt").read_text) for number in range(5)]
    assert outcomes == ["bird 00", "EIO", "EIO", "bird 03", "bird 04"]
    assert mount.faults == 2
    mount = mounted(plan={"faults": [{**fault, "each": True}]})
    file = mount.point / "birds/00.txt"
    assert [outcome(file.read_text) for _ in range(4)] == ["bird 00", "EIO", "EIO", "bird 00"]
    assert outcome((mount.point / "birds/01.txt").read_text) == "bird 01"


def test_reads_fail_from_an_offset_on_and_short_reads_return_half_of_the_bytes(mounted: Mounted, root: Path) -> None:
    faults = [
        {"on": "read", "path": "/big.bin", "count": 1, "do": "short"},
        {"on": "read", "path": "/big.bin", "offset_from": 10_000, "do": "error", "errno": "ESTALE"},
    ]
    file = os.open(mounted(plan={"faults": faults}).point / "big.bin", os.O_RDONLY)
    first, second = (os.read(file, 1000) for _ in range(2))
    assert (len(first), len(second)) == (500, 1000)
    assert first + second == (root / "big.bin").read_bytes()[:1500]
    outcomes = [outcome(lambda at=offset: len(os.pread(file, 4, at))) for offset in (0, 9999, 10_000, 50_000, 10)]
    os.close(file)
    assert outcomes == [4, 4, "ESTALE", "ESTALE", 4]


def test_vanished_files_are_listed_but_not_found_and_hidden_files_the_reverse(mounted: Mounted, root: Path) -> None:
    faults = [
        {"on": "read", "path": "*/03.txt", "first": 2, "count": 1, "do": "vanish"},
        {"on": "list", "path": "*/04.txt", "first": 2, "count": 1, "do": "hide"},
    ]
    folder = mounted(plan={"faults": faults}).point / "birds"
    file = os.open(folder / "03.txt", os.O_RDONLY)
    assert os.pread(file, 4, 0) == b"bird"
    assert outcome(lambda: os.pread(file, 4, 0)) == "ENOENT"
    os.close(file)
    assert not (folder / "03.txt").exists()
    assert outcome((folder / "03.txt").read_text) == "ENOENT"
    names = set(os.listdir(root / "birds"))
    assert [names - set(os.listdir(folder)) for _ in range(3)] == [set(), {"04.txt"}, set()]
    assert (folder / "04.txt").read_text() == "bird 04"


def test_a_file_can_change_while_it_is_read(mounted: Mounted, root: Path) -> None:
    plan = {"faults": [{"on": "read", "path": "*/03.txt", "first": 2, "count": 2, "do": "change"}]}
    file = mounted(plan=plan).point / "birds/03.txt"
    before = file.stat()
    with open(file, "rb", buffering=0) as reading:
        assert [os.pread(reading.fileno(), 3, 2) for _ in range(3)] == [b"rd ", b"se!", b'tf"']
    after = file.stat()
    assert file.read_bytes() == b'dktf"25++'
    assert (before.st_size, after.st_size) == (7, 9)
    assert after.st_mtime_ns - before.st_mtime_ns == 120 * 10**9
    assert (root / "birds/03.txt").read_text() == "bird 03"


def test_planned_hangs_can_be_released_and_a_killed_drive_leaves_a_dead_mount(
    mounted: Mounted,
) -> None:
    mount = mounted(
        plan={
            "faults": [
                {"on": "open", "path": "*/03.txt", "do": "hang"},
                {"on": "read", "path": "*/05.txt", "first": 2, "do": "die"},
            ]
        }
    )
    assert in_child(READ, mount.point / "birds/03.txt", seconds=0.5) == "hung"
    assert in_child(READ, mount.point / "birds/04.txt") == "bird 04"
    mount.go_on()
    assert in_child(READ, mount.point / "birds/03.txt") == "bird 03"
    # The child's second read, which looks for the end of the file, ends the drive's process.
    assert "Errno" in in_child(READ, mount.point / "birds/05.txt")
    assert "Errno 107" in in_child(READ, mount.point / "birds/04.txt")
    assert mounted_at(mount.point) == ["fuse.drive"]


def test_modification_times_are_rounded_down_to_the_grain(mounted: Mounted, root: Path) -> None:
    os.utime(root / "birds/03.txt", ns=(0, 1_700_000_003_700_000_000))
    for grain_s, time_ns in ((2.0, 1_700_000_002_000_000_000), (0.5, 1_700_000_003_500_000_000)):
        file = mounted(plan={"mtime_grain_s": grain_s}).point / "birds/03.txt"
        assert file.stat().st_mtime_ns == time_ns
        with open(file) as opened:
            assert os.fstat(opened.fileno()).st_mtime_ns == time_ns


def test_a_plan_can_be_replayed_with_concurrent_reads(mounted: Mounted) -> None:
    def run(seed: int) -> list[object]:
        faults = [
            {"on": "open", "path": "*.txt", "one_in": 3, "each": True, "count": 1, "do": "error", "errno": "EAGAIN"},
            {"on": "read", "path": "*.txt", "one_in": 3, "each": True, "count": 1, "do": "error"},
        ]
        folder = mounted(plan={"seed": seed, "faults": faults}).point / "birds"
        paths = [folder / f"{number:02d}.txt" for number in range(24)]
        with ThreadPoolExecutor(8) as pool:
            return [tuple(pool.map(lambda path: outcome(path.read_text), paths)) for _ in range(3)]

    once = run(1)
    assert run(1) == once
    assert run(2) != once
    assert {"EAGAIN", "EIO"} < set(once[0])
    assert once[2] == tuple(f"bird {number:02d}" for number in range(24))


def test_an_invalid_plan_is_rejected(mounted: Mounted) -> None:
    for wrong in ({"do": "melt"}, {"on": "open", "do": "short"}, {"errno": "EBIRD"}, {"frist": 2}):
        with pytest.raises(RuntimeError, match=f"Cannot mount|invalid fault|{next(iter(wrong))}"):
            mounted(plan={"faults": [{"on": "read", "path": "*", "do": "error", **wrong}]})


@pytest.mark.parametrize("end", sampled(["unmounted", "interrupted", "interrupted while it hangs"], 2))
def test_the_command_line_mounts_until_it_is_unmounted_or_interrupted(tmp_path: Path, root: Path, end: str) -> None:
    point = tmp_path / "by hand"
    point.mkdir()
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"faults": [{"on": "open", "path": "*/03.txt", "do": "hang"}]}))
    options = ["--open-ms", "40", "--list-ms", "40", "--at-once", "16", "--bandwidth", "50M", "--plan", str(plan)]
    drive = subprocess.Popen(
        [sys.executable, slow_drive.__file__, str(root), str(point), *options, "--fstype", "fuse.slow"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: mounted_at(point) or drive.poll() is not None, "the mount")
        assert mounted_at(point) == ["fuse.slow"]
        assert in_child(READ, point / "birds/04.txt") == "bird 04"
        assert in_child(READ, point / "birds/03.txt", seconds=0.5) == "hung"
        if end != "interrupted while it hangs":
            drive.send_signal(signal.SIGUSR1)
            assert in_child(READ, point / "birds/03.txt") == "bird 03"
        if end == "unmounted":
            subprocess.run(["fusermount3", "-u", str(point)], check=True, timeout=DEADLINE_S)
        else:
            drive.send_signal(signal.SIGINT)
        output, _ = drive.communicate(timeout=DEADLINE_S)
        assert drive.returncode == 0
        assert mounted_at(point) == []
        assert output.count("\n") == 1
        assert all(part in output for part in ("40 ms per open", "16 requests", "50 MB/s", "1 planned fault"))
    finally:
        drive.kill()
        drive.communicate()
        slow_drive.detach(point)


@pytest.mark.parametrize("fstype", ["fuse.drive", "fuse.google-drive-ocamlfuse"])
def test_a_mount_has_the_requested_type_until_the_block_ends(tmp_path: Path, root: Path, fstype: str) -> None:
    with FuseMount(tmp_path / "remote", root, fstype) as mount:
        assert mounted_at(mount.point) == [fstype]
        pid = mount.pid
    assert mounted_at(mount.point) == []
    assert not Path(f"/proc/{pid}").exists()


def test_writes_renames_and_removals_reach_the_root_and_every_open_reaches_the_mount(
    mounted: Mounted, root: Path
) -> None:
    mount = mounted()
    old, new = mount.point / "birds/00.txt", mount.point / "new/c.txt"
    new.parent.mkdir()
    new.write_text("cats")
    os.replace(new, old)
    (mount.point / "big.bin").unlink()
    (mount.point / "link").symlink_to("birds/00.txt")
    assert sorted(os.listdir(root)) == ["birds", "link", "new"]
    assert os.listdir(mount.point / "new") == []
    before = mount.opened
    for text in ("ants", "antlion"):
        (root / "birds/00.txt").write_text(text)
        assert (mount.point / "link").read_text() == text
    assert mount.opened == before + 2
    assert mount.opened_paths[-2:] == ["/birds/00.txt"] * 2


def test_a_hanging_mount_can_be_released_and_is_removed_when_its_block_ends(mounted: Mounted, root: Path) -> None:
    mount = mounted()
    file = mount.point / "birds/01.txt"
    mount.hang()
    assert in_child(READ, file, seconds=0.7) == "hung"
    mount.go_on()
    mount.hang("read", after=1)
    assert in_child(LIST, mount.point) == "2"
    assert in_child("import os, sys; print(os.read(os.open(sys.argv[1], 0), 9))", file) == "b'bird 01'"
    assert in_child(READ, file, seconds=0.7) == "hung"
    mount.go_on()
    assert in_child(READ, file) == "bird 01"
    for operation in (None, "open"):
        with FuseMount(mount.point.with_name("hung"), root) as other:
            other.hang(operation)
            assert in_child(READ, other.point / "birds/01.txt", seconds=0.5) == "hung"
        assert mounted_at(other.point) == os.listdir(other.point) == []


def test_reads_and_listings_fail_with_the_given_errno_and_a_killed_mount_remains_dead(mounted: Mounted) -> None:
    mount = mounted()
    mount.fail(errno.EIO)
    assert outcome((mount.point / "birds/01.txt").read_text) == outcome(lambda: os.listdir(mount.point)) == "EIO"
    mount.fail(0)
    assert (mount.point / "birds/01.txt").read_text() == "bird 01"
    mount.kill()
    assert "Errno 107" in in_child(LIST, mount.point)
    assert mounted_at(mount.point) == ["fuse.drive"]


@pytest.mark.parametrize("locks", [True, False])
def test_locks_work_or_fail_as_requested(mounted: Mounted, locks: bool) -> None:
    output = in_child(LOCK, mounted(locks=locks).point / "birds/01.txt")
    assert output == "locked" if locks else f"Errno {errno.ENOLCK}" in output


@pytest.mark.parametrize("mode", ["full", "writes", "off"])
def test_rclone_serves_a_folder_and_is_unmounted(tmp_path: Path, root: Path, mode: str) -> None:
    needs("rclone", has_rclone())
    with RcloneMount(tmp_path / "far", root, tmp_path / "cache", mode) as mount:
        assert mounted_at(mount.point) == ["fuse.rclone"]
        assert in_child(READ, mount.point / "birds/01.txt") == "bird 01"
        mount.kill()
        assert "Errno 107" in in_child(LIST, mount.point)
    assert mounted_at(mount.point) == []


def test_rclone_answers_authorized_users_over_http(tmp_path: Path, root: Path) -> None:
    needs("rclone", has_rclone())
    with RcloneMount(tmp_path / "open", root, tmp_path / "cache", rc=True) as mount:
        assert ask(mount.url, "core/pid") == {"pid": mount.pid}
    with RcloneMount(tmp_path / "closed", root, tmp_path / "cache", rc=True, user="u", password="p") as mount:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(mount.url, "core/pid")
        assert ask(mount.url, "core/pid", "Basic dTpw") == {"pid": mount.pid}


def ask(url: str, command: str, access: str = "") -> object:
    def answers() -> bool:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    wait_for(answers, "rclone's answer")
    headers = {"Authorization": access, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/{command}", data=b"{}", headers=headers)
    with urllib.request.urlopen(request, timeout=5) as reply:
        return json.load(reply)


def test_another_plan_replaces_the_faults_and_releases_hanging_requests(mounted: Mounted, root: Path) -> None:
    hang = {"on": "open", "path": "*/03.txt", "do": "hang"}
    mount = mounted(plan={"faults": [hang]})
    file = mount.point / "birds/03.txt"
    reading = threading.Thread(target=file.read_bytes)
    reading.start()
    wait_for(lambda: mount.faults, "the request")
    mount.replan({"faults": [{"on": "read", "path": "*/03.txt", "do": "end"}]})
    reading.join(30)
    assert not reading.is_alive()
    assert file.read_bytes() == b""
    mount.replan()
    assert file.read_text() == "bird 03"
