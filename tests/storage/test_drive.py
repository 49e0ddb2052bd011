"""Tests of `drive` without a mount: errors, and parsing of programs' arguments and configuration."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from far_mounts import wait_for
from far_side import be_at

import colabkit
from colabkit.errors import InvalidOption, MountFailed, NotMounted
from colabkit.foundation import Place
from colabkit.foundation.mount_table import Mount
from colabkit.storage.drive import drivefs, mountpoints
from colabkit.storage.drive.mountpoints import Daemon
from colabkit.storage.drive.ocamlfuse import folders
from colabkit.storage.drive.rclone import Control, control_of


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--features=opendir_timeout_ms:90000,read_only_mode:true",), (True, 90.0)),
        (("--features=opendir_timeout_ms:90000,read_only_mode:false",), (False, 90.0)),
        (("--features=max_read_qps:1000",), (False, None)),
    ],
)
def test_options_of_a_drivefs_started_by_another_process_are_read_from_its_command_line(words, expected, monkeypatch):
    monkeypatch.setattr(drivefs, "_options", {})
    monkeypatch.setattr(drivefs, "daemons", lambda name: iter([Daemon(1, "drive", words, {})]))
    assert drivefs.options_of(Mount("/content/drive", "fuse.drive", "drive", ("rw",))) == expected


def test_errors_outside_a_hosted_notebook_name_an_alternative_for_that_environment(monkeypatch):
    monkeypatch.setattr(mountpoints, "mounts", list)
    for name, words in {
        "Kaggle": "/kaggle/input",
        "Colab Enterprise": "gs://",
        "Colab, local runtime": "Drive for desktop",
        "Jupyter": "rclone mount",
        "Python": "rclone mount",
        "Colab": "%mount in a cell",
    }.items():
        be_at(Place(name, "script", False), monkeypatch)
        with pytest.raises(MountFailed) as caught:
            colabkit.mount()
        assert caught.value.cause == "place"
        assert words in str(caught.value)


def test_invalid_timeouts_raise():
    for timeout in (0, -1, float("nan"), float("inf"), "60", True, None):
        for call in (colabkit.mount, colabkit.unmount, colabkit.flush, colabkit.clear_cache):
            with pytest.raises(InvalidOption, match="timeout="):
                call(timeout=timeout)


def test_errors_without_a_mount_say_so_and_suggest_mount(tmp_path, monkeypatch):
    monkeypatch.setattr(mountpoints, "mounts", list)
    for call in (colabkit.unmount, colabkit.flush, colabkit.clear_cache):
        with pytest.raises(NotMounted, match=r"colabkit\.mount\(\)"):
            call()
        with pytest.raises(NotMounted, match="not on a Drive mount"):
            call(tmp_path)


def test_a_timer_of_the_user_keeps_running():
    has_fired = threading.Event()
    former = signal.signal(signal.SIGALRM, lambda *_: has_fired.set())
    former_timer = signal.setitimer(signal.ITIMER_REAL, 5.0)
    try:
        with drivefs.alarm(100.0):
            pass
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        assert 0 < left <= 5.0
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        wait_for(has_fired.is_set, "the alarm")
    finally:
        signal.setitimer(signal.ITIMER_REAL, *former_timer)
        signal.signal(signal.SIGALRM, former)


def test_an_unknown_error_becomes_one_line():
    error = drivefs.explain(RuntimeError("several\nlines\nof text"), 1.0, frozenset())
    assert error.cause == "unknown"
    assert "several lines of text" in str(error)


def daemon(*arguments: str, **environ: str) -> Daemon:
    return Daemon(1, "program", arguments, {"HOME": "/home/me", **environ})


@pytest.mark.parametrize(
    ("arguments", "environ", "config", "cache"),
    [
        (("/m",), {}, "/home/me/.gdfuse/default/config", "/home/me/.gdfuse/default/cache"),
        (("-label", "a", "/m"), {}, "/home/me/.gdfuse/a/config", "/home/me/.gdfuse/a/cache"),
        (("-xdgbd", "/m"), {}, "/home/me/.config/gdfuse/default/config", "/home/me/.cache/gdfuse/default"),
        (
            ("-xdgbd", "-label", "a", "/m"),
            {"XDG_CONFIG_HOME": "/c", "XDG_CACHE_HOME": "/k"},
            "/c/gdfuse/a/config",
            "/k/gdfuse/a",
        ),
        (("/m", "-o", "ro,gdfroot=/srv/gd"), {}, "/srv/gd/default/config", "/srv/gd/default/cache"),
        (("-config", "/etc/gd", "/m"), {}, "/etc/gd", "/home/me/.gdfuse/default/cache"),
    ],
)
def test_the_folders_of_ocamlfuse_are_derived_from_its_arguments(arguments, environ, config, cache):
    assert folders(daemon(*arguments, **environ)) == (Path(config), Path(cache))


def test_cache_directory_in_the_configuration_has_priority(tmp_path):
    config = tmp_path / "gdfuse" / "default" / "config"
    config.parent.mkdir(parents=True)
    config.write_text("max_cache_size_mb=512\ncache_directory=/big/disk\n")
    assert folders(daemon("/m", XDG_CONFIG_HOME=str(tmp_path))) == (config, Path("/big/disk"))
    config.write_text("cache_directory=\n")
    assert folders(daemon("-xdgbd", "/m", XDG_CONFIG_HOME=str(tmp_path), XDG_CACHE_HOME="/k"))[1] == Path(
        "/k/gdfuse/default"
    )


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (("mount", "r:", "/m"), {}, None),
        (("mount", "--rc", "r:", "/m"), {}, ("localhost", 5572, "")),
        (("mount", "--rc", "--rc-addr", "127.0.0.1:99"), {}, ("127.0.0.1", 99, "")),
        (("mount", "--rc=true", "--rc-addr=:99"), {}, ("localhost", 99, "")),
        (("mount", "--rc=false", "r:"), {}, None),
        (("mount",), {"RCLONE_RC": "true", "RCLONE_RC_ADDR": "h:1"}, ("h", 1, "")),
        (("mount", "--rc", "--rc-user", "u", "--rc-pass", "p"), {}, ("localhost", 5572, "Basic dTpw")),
        (("mount", "--rc", "--rc-addr", "unix:///tmp/x.sock"), {}, None),
        (("mount", "--rc", "--rc-cert", "/c.pem"), {}, None),
        (("mount", "--rc", "--rc-addr", "[::1]:99"), {}, ("::1", 99, "")),
    ],
)
def test_the_remote_control_is_found_from_rclones_arguments_and_environment(arguments, environ, expected):
    assert control_of(daemon(*arguments, **environ)) == (None if expected is None else Control(*expected))


def test_an_unreachable_remote_control_is_not_used():
    mount = Mount("/m", "fuse.rclone", "r:", ("rw",))
    assert not Control("127.0.0.1", 1, "").answers(mount)
    with pytest.raises(MountFailed, match="does not answer"):
        Control("127.0.0.1", 1, "").ask("vfs/list", {})
