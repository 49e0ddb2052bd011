"""The mounts that other tests rely on do what they say."""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from far_mounts import FuseMount, RcloneMount, has_fuse, has_rclone, in_child, mounted_at, wait_for
from trees import needs

READ = "import sys; print(open(sys.argv[1]).read())"
LIST = "import os, sys; print(sorted(os.listdir(sys.argv[1])))"
LOCK = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH); print('locked')"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "a.txt").write_text("ants")
    (folder / "b.txt").write_text("bees")
    return folder


@pytest.fixture
def mount(tmp_path: Path, root: Path) -> Iterator[FuseMount]:
    needs("FUSE", has_fuse())
    with FuseMount(tmp_path / "far", root) as mount:
        yield mount


@pytest.mark.parametrize("fstype", ["fuse.drive", "fuse.google-drive-ocamlfuse"])
def test_a_mount_has_the_type_that_was_asked_for_until_the_block_ends(tmp_path: Path, root: Path, fstype: str) -> None:
    needs("FUSE", has_fuse())
    with FuseMount(tmp_path / "far side", root, fstype) as mount:
        assert mounted_at(mount.point) == [fstype]
        pid = mount.pid
    assert mounted_at(mount.point) == []
    assert not Path(f"/proc/{pid}").exists()


def test_what_is_written_read_renamed_and_removed_is_so_in_the_root(mount: FuseMount, root: Path) -> None:
    (mount.point / "new").mkdir()
    (mount.point / "new/c.txt").write_text("cats")
    os.replace(mount.point / "new/c.txt", mount.point / "a.txt")
    (mount.point / "b.txt").unlink()
    (mount.point / "link").symlink_to("a.txt")
    assert (root / "a.txt").read_text() == (mount.point / "link").read_text() == "cats"
    assert sorted(os.listdir(root)) == ["a.txt", "link", "new"]
    assert os.listdir(mount.point / "new") == []


def test_every_open_reaches_the_mount_and_nothing_is_cached(mount: FuseMount, root: Path) -> None:
    for text in ("ants", "antlion"):
        (root / "a.txt").write_text(text)
        assert (mount.point / "a.txt").read_text() == text
    assert mount.opened_paths == ["/a.txt", "/a.txt"]
    assert mount.opened == 2


def test_opening_reading_and_listing_take_the_latency_each(tmp_path: Path, root: Path) -> None:
    needs("FUSE", has_fuse())
    with FuseMount(tmp_path / "far", root, latency_s=0.1) as mount:
        times = [time.monotonic()]
        descriptor = os.open(mount.point / "a.txt", os.O_RDONLY)
        times.append(time.monotonic())
        os.read(descriptor, 100)
        times.append(time.monotonic())
        os.listdir(mount.point)
        times.append(time.monotonic())
        os.close(descriptor)
    assert all(0.1 <= end - start < 1 for start, end in itertools.pairwise(times))


def test_a_hung_mount_answers_nothing_and_then_goes_on(mount: FuseMount) -> None:
    mount.hang()
    assert in_child(READ, mount.point / "a.txt", seconds=0.7) == "hung"
    mount.go_on()
    assert in_child(READ, mount.point / "a.txt") == "ants"


def test_one_kind_of_operation_hangs_after_the_number_that_was_asked_for(mount: FuseMount) -> None:
    mount.hang("read", after=1)
    assert in_child(LIST, mount.point) == "['a.txt', 'b.txt']"
    assert in_child("import os, sys; print(os.read(os.open(sys.argv[1], 0), 9))", mount.point / "a.txt") == "b'ants'"
    assert in_child(READ, mount.point / "b.txt", seconds=0.7) == "hung"
    mount.go_on()
    assert in_child(READ, mount.point / "b.txt") == "bees"


def test_a_hung_mount_goes_away_with_its_block(tmp_path: Path, root: Path) -> None:
    needs("FUSE", has_fuse())
    for operation in (None, "open"):
        with FuseMount(tmp_path / "far", root) as mount:
            mount.hang(operation)
            assert in_child(READ, mount.point / "a.txt", seconds=0.5) == "hung"
        assert mounted_at(mount.point) == []
        assert os.listdir(mount.point) == []


def test_reads_and_listings_fail_with_the_given_errno(mount: FuseMount) -> None:
    mount.fail(errno.EIO)
    for touch in (Path.read_text, os.listdir):
        with pytest.raises(OSError, match="Input/output") as failed:
            touch(mount.point / "a.txt" if touch is Path.read_text else mount.point)  # type: ignore[operator]
        assert failed.value.errno == errno.EIO
    mount.fail(0)
    assert (mount.point / "a.txt").read_text() == "ants"


def test_a_killed_mount_stays_dead(mount: FuseMount) -> None:
    mount.kill()
    assert "Errno 107" in in_child(LIST, mount.point)
    assert mounted_at(mount.point) == ["fuse.drive"]


@pytest.mark.parametrize("locks", [True, False])
def test_locks_work_or_fail_as_asked(tmp_path: Path, root: Path, locks: bool) -> None:
    needs("FUSE", has_fuse())
    with FuseMount(tmp_path / "far", root, locks=locks) as mount:
        said = in_child(LOCK, mount.point / "a.txt")
    assert said == "locked" if locks else f"Errno {errno.ENOLCK}" in said


@pytest.mark.parametrize("mode", ["full", "writes", "off"])
def test_rclone_serves_a_folder_and_goes_away(tmp_path: Path, root: Path, mode: str) -> None:
    needs("rclone", has_rclone())
    with RcloneMount(tmp_path / "far", root, tmp_path / "cache", mode) as mount:
        assert mounted_at(mount.point) == ["fuse.rclone"]
        assert in_child(READ, mount.point / "b.txt") == "bees"
        mount.kill()
        assert "Errno 107" in in_child(LIST, mount.point)
    assert mounted_at(mount.point) == []


def test_rclone_answers_over_http_those_who_may_ask(tmp_path: Path, root: Path) -> None:
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
