"""`prepare(start="now")` saves the pack in the background: errors are only reported, and Ctrl-C stops saving."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from preparations import left_over, ready
from trees import leftovers
from waiting import wait_until

from colabkit.packs import BackgroundPack, prepare, verify

Hook = Callable[[str, Path], None]


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path: Path, near_storage: Path) -> Iterator[None]:
    """Check after each test that no threads and no incomplete files are left."""
    yield
    names = [thread.name for thread in threading.enumerate() if thread.name == "colabkit-prepare"]
    assert names + left_over(near_storage) + leftovers(tmp_path) == []


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "saved"


def begun(source: Path, to: Path) -> BackgroundPack:
    pack = prepare(source, to=to, start="now", progress=False)
    assert isinstance(pack, BackgroundPack)
    return pack


class Hold:
    """A hook that makes the first sync below a folder wait."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.is_reached = threading.Event()
        self.may_continue = threading.Event()

    def __call__(self, operation: str, path: Path) -> None:
        if operation == "sync" and path.is_relative_to(self._folder):
            self.is_reached.set()
            assert self.may_continue.wait(20)


def interrupt(hold: Hold) -> None:
    assert hold.is_reached.wait(20)
    raise KeyboardInterrupt


def test_the_pack_is_usable_while_it_is_saved_and_the_final_report_has_the_saved_path(
    image_tree: Path, saved: Path, file_hook: Callable[[Hook | None], None]
) -> None:
    hold = Hold(saved)
    file_hook(hold)
    with begun(image_tree, saved) as pack:
        assert hold.is_reached.wait(20)
        assert (len(pack["train"]), pack.is_complete) == (24, True)
        assert "\nNot saved: it is still being saved in the background" in repr(pack.report)
        assert list(saved.glob("*.h5")) == []
        assert ready(image_tree, to=saved).report.unsaved == "another process is saving it"
        hold.may_continue.set()
        report = pack.finish().report
    assert (report.way, report.unsaved) == ("packed", "")
    assert report.saved_path is not None
    assert verify(report.saved_path, progress=False).is_good
    again = prepare(image_tree, to=saved, start="now", progress=False).report
    assert (again.way, again.saved_path) == ("local", report.saved_path)


def test_an_error_of_the_caller_does_not_stop_saving(image_tree: Path, saved: Path) -> None:
    with pytest.raises(ZeroDivisionError), begun(image_tree, saved):
        _ = 1 / 0
    assert [verify(path, progress=False).is_good for path in saved.glob("*.h5")] == [True]


def test_ctrl_c_stops_saving_leaves_nothing_and_the_next_call_saves_the_pack(
    image_tree: Path, saved: Path, file_hook: Callable[[Hook | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colabkit.storage.sources.concurrency._GRACE_S", 0.1)
    hold = Hold(saved)
    file_hook(hold)
    with pytest.raises(KeyboardInterrupt), begun(image_tree, saved) as pack:
        interrupt(hold)
    assert pack.finish().report.unsaved == "saving was interrupted"
    file_hook(None)
    hold.may_continue.set()
    # The abandoned thread removes the unfinished file once the target answers.
    wait_until(lambda: os.listdir(saved) == [])
    assert ready(image_tree, to=saved).report.saved_path is not None


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("broken")])
def test_an_error_while_saving_is_reported_and_the_next_call_saves_the_pack(
    image_tree: Path, saved: Path, file_hook: Callable[[Hook | None], None], error: Exception
) -> None:
    def refuse(operation: str, path: Path) -> None:
        if operation == "write" and path.is_relative_to(saved):
            raise error

    file_hook(refuse)
    report = begun(image_tree, saved).finish().report
    assert (report.way, report.saved_path) == ("packed", None)
    assert str(error.args[-1]) in report.unsaved
    file_hook(None)
    assert ready(image_tree, to=saved).report.saved_path is not None


def test_without_a_thread_the_pack_is_packed_and_saved_at_once(
    image_tree: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colabkit.packs.preparing.background_pack.has_started", lambda _: False)
    assert begun(image_tree, saved).report.saved_path is not None


def test_the_pack_is_saved_by_prepare_and_in_the_background_under_the_same_name(image_tree: Path, saved: Path) -> None:
    path = begun(image_tree, saved).finish().path
    again = ready(image_tree, to=saved)
    assert (again.report.way, again.path) == ("local", path)
