"""The table of mounts, `drive:` paths, and errors of remote mounts, all without accessing a mount."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from contract import make_pack

import colabkit
from colabkit.errors import FileFailed, InvalidOption, NotEnoughSpace, NotMounted
from colabkit.foundation import PYTHON, file_changes
from colabkit.foundation.mount_table import (
    DRIVEFS,
    DRIVEFS_LOG,
    Mount,
    drive_mount,
    log_causes,
    log_size,
    mount_holding,
    mounts,
    read_file,
    trouble,
    user_path,
)

COLAB = Mount("/content/drive", DRIVEFS, "drive", ("rw",))
OCAML = Mount("/mnt/gd", "fuse.google-drive-ocamlfuse", "google-drive-ocamlfuse", ("rw",))
RCLONE = Mount("/mnt/rc", "fuse.rclone", "gdrive:", ("ro", "nosuid"))
ROOT = Mount("/", "overlay", "overlay", ("rw",))


def table(text: str) -> list[Mount]:
    return mounts(lambda path: text)


def test_mount_points_and_sources_are_unescaped_and_types_are_exact():
    found = table(
        "drive /content/my\\040drive fuse.drive rw,nosuid 0 0\nx\\011y /a\\011b\\134c tmpfs ro 0 0\n"
        "other /o fuse.driver rw 0 0\n"
    )
    assert found[0] == Mount("/content/my drive", "fuse.drive", "drive", ("rw", "nosuid"))
    assert (found[1].point, found[1].source, found[1].readonly) == ("/a\tb\\c", "x\ty", True)
    assert drive_mount(found[2:]) is None


def test_unusual_characters_in_a_mount_point_do_not_break_the_table(tmp_path):
    odd = "x /a\u2028b\x0cc\rd tmpfs rw 0 0\ny /y ext4 rw 0 0\n".encode()
    (tmp_path / "mounts").write_bytes(odd + b"x /caf\xe9 tmpfs rw 0 0\n")
    found = mounts(lambda path: read_file(str(tmp_path / "mounts")))
    assert [os.fsencode(mount.point) for mount in found] == ["/a\u2028b\x0cc\rd".encode(), b"/y", b"/caf\xe9"]


def test_a_missing_table_means_no_mounts(tmp_path):
    assert mounts(lambda path: read_file(str(tmp_path / "missing"))) == []


def test_odd_lines_of_the_table_are_ignored():
    assert mounts(lambda path: "odd\n\none /two three\n/dev/x /y ext4 rw 0 0\n") == [
        Mount("/y", "ext4", "/dev/x", ("rw",))
    ]


def test_mounts_served_by_another_program_are_remote():
    for fstype in ("fuse.drive", "fuse.rclone", "fuse", "nfs4", "9p"):
        assert Mount("/m", fstype, "x", ("rw",)).is_remote
    for fstype in ("fuseblk", "fusectl", "fuse.lxcfs", "tmpfs", "ext4", "overlay"):
        assert not Mount("/m", fstype, "x", ("rw",)).is_remote


def test_a_path_belongs_to_the_innermost_and_last_mount():
    for path, point in {
        "/content/drive": "/content/drive",
        "/content/drive/MyDrive/a": "/content/drive",
        "/content/drives": "/",
        "/mnt/rc/x": "/mnt/rc",
        "/": "/",
    }.items():
        assert mount_holding(path, [COLAB, ROOT, RCLONE]).point == point
    assert mount_holding("/m/x", [ROOT, Mount("/m", "tmpfs", "a", ()), Mount("/m", "ext4", "b", ())]).fstype == "ext4"
    assert mount_holding("/m/x", []) is None


def test_drivefs_is_preferred_and_two_mounts_of_a_type_are_ambiguous():
    other = Mount("/mnt/other", RCLONE.fstype, "s3:", ("rw",))
    assert drive_mount([RCLONE, OCAML, COLAB]) == COLAB
    assert drive_mount([RCLONE, OCAML]) == OCAML
    assert drive_mount([ROOT, RCLONE]) == RCLONE
    assert drive_mount([ROOT]) is drive_mount([RCLONE, other]) is None
    with pytest.raises(NotMounted, match="COLABKIT_DRIVE"):
        user_path("drive:x", "stage 'x'", [RCLONE, other])


SHORT_NAMES = (
    ("drive:datasets/birds", COLAB, "/content/drive/MyDrive/datasets/birds"),
    ("drive:/datasets/birds", COLAB, "/content/drive/MyDrive/datasets/birds"),
    ("drive:", COLAB, "/content/drive/MyDrive"),
    ("drive:Shareddrives/Team/x", COLAB, "/content/drive/Shareddrives/Team/x"),
    ("drive:Shareddrives-old/x", COLAB, "/content/drive/MyDrive/Shareddrives-old/x"),
    ("drive:my birds/x", OCAML, "/mnt/gd/my birds/x"),
    ("drive:Shareddrives/x", RCLONE, "/mnt/rc/Shareddrives/x"),
    ("/plain/drive:x", COLAB, "/plain/drive:x"),
    ("drives:x", COLAB, "drives:x"),
)


def test_drive_stands_for_my_drive_and_shared_drives():
    for path, mount, expected in SHORT_NAMES:
        assert user_path(path, "stage", [ROOT, mount]) == Path(expected)


def test_drive_can_be_set_to_an_existing_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path))
    assert user_path("drive:birds", "stage", []) == tmp_path / "birds"
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.setenv("COLABKIT_DRIVE", f"~/{tmp_path.name}")
    assert user_path("drive:birds", "stage", []) == tmp_path / "birds"
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path / "gone"))
    with pytest.raises(NotMounted, match="which is not a folder"):
        user_path("drive:birds", "stage", [])


def test_home_is_expanded_and_invalid_paths_are_rejected(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/x", "stage", []) == Path("/home/me/x")
    assert user_path(Path("~/x"), "stage", []) == Path("/home/me/x")
    for wrong in ("", None, 3, b"/bytes", "~no-such-user-anywhere/x"):
        with pytest.raises(InvalidOption, match="Cannot stage"):
            user_path(wrong, "stage", [])


CALLS = (
    colabkit.stage,
    lambda path: colabkit.stage("samples:digits", to=path),
    colabkit.unstage,
    lambda path: colabkit.pack(path, "x.h5"),
    lambda path: colabkit.pack("samples:digits", path),
    colabkit.open_pack,
    colabkit.verify,
    colabkit.probe,
    lambda path: colabkit.fetch("https://localhost:1/x", path),
    colabkit.clear_cache,
    colabkit.flush,
    colabkit.unmount,
)


@pytest.mark.full
def test_every_function_accepts_drive_paths_and_reports_a_missing_mount(monkeypatch):
    for call in CALLS:
        monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
        monkeypatch.setattr("colabkit.foundation.mount_table.drive_mount", lambda table: None)
        with pytest.raises(NotMounted, match=r"colabkit\.mount\(\)"):
            call("drive:birds")


def test_checkpoints_accept_drive_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path))
    loader = colabkit.Loader(colabkit.open_pack(make_pack(tmp_path / "x.h5", train=8))["train"], batch_size=4)
    colabkit.train(lambda batch: 0.0, loader, state={}, to="drive:checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) != []


def write_log(home: Path, text: str) -> Path:
    log = home / DRIVEFS_LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(text)
    return log


def test_causes_are_read_from_the_new_part_of_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (log_causes(), log_size()) == (frozenset(), 0)
    log = write_log(tmp_path, "E QUOTA_EXCEEDED for item\n")
    assert log_causes() == {"quota"}
    start = log_size()
    assert log_causes(start) == frozenset()
    with log.open("a") as file:
        file.write("W QueryManager timed out after 60 s\n")
    assert log_causes(start) == {"root folder"}
    write_log(tmp_path, "QUOTA_EXCEEDED")
    assert log_causes(start) == {"quota"}


def test_an_old_log_is_ignored_and_only_the_end_of_a_huge_log_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    os.utime(write_log(tmp_path, "E QUOTA_EXCEEDED\n"), (0, 0))
    assert log_causes() == frozenset()
    write_log(tmp_path, "QUOTA_EXCEEDED" + "x" * (2 << 20))
    assert log_causes() == frozenset()


def failing(number: int, path: str = "/content/drive/MyDrive/x.jpg") -> OSError:
    return OSError(number, os.strerror(number), path)


ERRORS = (
    (errno.ENOTCONN, "dead", "colabkit.mount()"),
    (errno.EIO, "returned an input/output error", "one archive"),
    (errno.ETIMEDOUT, "timed out", "Try again"),
    (errno.ENOSPC, "the local disk that holds the cache", "colabkit.clear_cache()"),
)


def test_errors_of_drive_are_explained(monkeypatch, tmp_path):
    for number, found, cure in ERRORS:
        monkeypatch.setenv("HOME", str(tmp_path))
        cause, advice = trouble(failing(number), [ROOT, COLAB])
        assert found in PYTHON.render(cause)
        assert cure in PYTHON.render(advice)


def test_a_quota_error_in_the_drivefs_log_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_log(tmp_path, "QUOTA_EXCEEDED")
    cause, advice = trouble(failing(errno.EIO), [ROOT, COLAB])
    assert "QUOTA_EXCEEDED" in PYTHON.render(cause)
    assert "your own Drive" in PYTHON.render(advice)


@pytest.mark.parametrize("failing_call", ["fsync", "pwrite"])
def test_a_failed_write_to_drive_is_not_blamed_on_large_folders(monkeypatch, tmp_path, failing_call):
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, failing_call, fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        file_changes.write_file(tmp_path / "x", b"data", durable=True)
    assert caught.value.filename == str(tmp_path / "x")
    cause, advice = trouble(caught.value, [ROOT, Mount(str(tmp_path), COLAB.fstype, COLAB.source, COLAB.options)])
    assert "did not store the written data" in PYTHON.render(cause)
    assert "thousand" not in PYTHON.render(advice)


OTHER_ERRORS = (
    failing(errno.EIO, "/local/x"),
    failing(errno.ENOENT),
    failing(errno.EACCES),
    OSError(errno.EIO, "no file"),
    OSError(errno.EIO, "a descriptor", 7),
)


def test_an_error_in_a_removed_working_folder_is_not_explained(monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert trouble(failing(errno.EIO, "x"), [ROOT, COLAB]) is None


def test_other_errors_are_not_explained():
    for error in OTHER_ERRORS:
        assert trouble(error, [ROOT, COLAB]) is None


def test_translated_errors_contain_the_explanation(monkeypatch):
    monkeypatch.setattr("colabkit.foundation.mount_table.mounts", lambda read=None: [ROOT, COLAB])
    dead = r"Cannot read 'x': the DriveFS mount at '/content/drive' is dead"
    with pytest.raises(FileFailed, match=dead), file_changes.translated("read 'x'"):
        raise failing(errno.ENOTCONN)
    with pytest.raises(NotEnoughSpace, match="clear_cache"), file_changes.translated("write 'x'"):
        raise failing(errno.ENOSPC)
