"""Forked workers share the work. They may die, hang or fail, and leave nothing behind if any process is killed."""

from __future__ import annotations

import errno
import functools
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packed_files import files_of, fork, names_in, packed, photos, stored
from strikes import fill_disk
from trees import leftovers
from waiting import wait_until

from colabkit.errors import BadSource, NotEnoughSpace, PackingFailed, TimedOut
from colabkit.packs.packing import pack_writer, sample_writer
from colabkit.packs.packing.api import pack
from colabkit.packs.packing.forked_workers import ForkedWorkers
from colabkit.packs.packing.verification import verify

ENCODINGS = ["raw", "source", "jpeg"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder with 24 photos of one size in three classes."""
    return photos(tmp_path / "tree", per_class=8)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Check that no process, zombie, descriptor or thread remains after the test."""
    # Earlier tests may have left objects with open files to the garbage collector.
    gc.collect()
    before = descriptors(), set(children()), threading.active_count()
    yield
    assert (descriptors(), set(children()), threading.active_count()) == before


def children(pid: int | None = None) -> list[int]:
    """Return the IDs of the child processes that a process has not waited for."""
    found = []
    for entry in os.scandir("/proc"):
        try:
            stat = (Path(entry.path) / "stat").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        if stat and int(stat.rpartition(")")[2].split()[1]) == (pid or os.getpid()):
            found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def at_each(monkeypatch: pytest.MonkeyPatch, act: Callable[[Any, str], object]) -> None:
    """In workers, call `act(samples, "before")` and `act(samples, "after")` around the writing of each range."""
    write = sample_writer.FileSampleWriter.write_range

    def written(self: Any, samples: Any) -> Any:
        act(samples, "before")
        done = write(self, samples)
        act(samples, "after")
        return done

    monkeypatch.setattr(sample_writer.FileSampleWriter, "write_range", written)


def at_range(monkeypatch: pytest.MonkeyPatch, start: int, act: Callable[[], None], when: str = "before") -> None:
    """Call `act` in the worker that makes the range of samples from `start`."""
    at_each(monkeypatch, lambda samples, at: act() if (samples.start, at) == (start, when) else None)


def once(marker: Path, act: Callable[[], None]) -> Callable[[], None]:
    """Return a function that acts only on the first call in any process."""

    def acted() -> None:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return
        act()

    return acted


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    threading.Event().wait()


def stop_me() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stalls_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(sample_writer, "ForkedWorkers", functools.partial(ForkedWorkers, stalled_s=seconds))


@pytest.mark.parametrize("cpus", [2, 3])
def test_samples_are_made_by_as_many_processes_as_there_are_cpus(tmp_path, tree, monkeypatch, cpus):
    fork(monkeypatch, chunk_samples=1, cpus=cpus)
    fields = {"pid": lambda path: os.getpid(), "parent": lambda path: os.getppid()}
    report = pack(tree, tmp_path / "p.h5", fields=fields, progress=False)
    pids = {value.item() for value in stored(report.path, field="pid")}
    assert {value.item() for value in stored(report.path, field="parent")} == {os.getpid()}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= cpus
    assert report.made_by == f"{cpus} processes"


def test_samples_that_are_slow_or_few_are_made_without_processes(tmp_path, tree, monkeypatch):
    monkeypatch.setattr(sample_writer, "usable_cpus", lambda: 2.0)
    assert pack(tree, tmp_path / "few.h5", progress=False).made_by == "one thread"
    monkeypatch.setattr(sample_writer, "_MEASURED_S", 0.0)
    monkeypatch.setattr(sample_writer, "_TINY_S", 0.0)
    assert pack(tree, tmp_path / "slow.h5", progress=False).made_by == "2 threads"
    fork(monkeypatch, cpus=1)
    assert pack(tree, tmp_path / "one.h5", progress=False).made_by == "one thread"
    fork(monkeypatch)
    assert pack(tree, tmp_path / "asked.h5", threads=2, progress=False).made_by == "2 threads"


def test_samples_are_measured_before_processes_are_started(tmp_path, tree, monkeypatch):
    fork(monkeypatch, chunk_samples=100)
    monkeypatch.setattr(sample_writer, "_MEASURED_S", 1e-9)
    pids = packed(tree, tmp_path / "p.h5", fields={"pid": lambda path: os.getpid()})
    mine = [value.item() == os.getpid() for value in stored(pids, field="pid")]
    assert mine == [True] * 2 + [False] * 22


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("start", [0, 10, 22])
def test_a_worker_that_is_killed_once_is_replaced(tmp_path, tree, monkeypatch, encoding, when, start):
    whole = packed(tree, tmp_path / "whole.h5", encoding=encoding, threads=1).read_bytes()
    fork(monkeypatch)
    at_range(monkeypatch, start, once(tmp_path / "killed", kill_me), when)
    path = packed(tree, tmp_path / "p.h5", encoding=encoding)
    assert (tmp_path / "killed").exists()
    assert path.read_bytes() == whole
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("act", "how"), [(kill_me, "SIGKILL"), (lambda: os._exit(3), "exit code 3")], ids=["kill", "exit"]
)
def test_files_that_always_kill_their_worker_are_named_in_the_error(tmp_path, tree, monkeypatch, encoding, act, how):
    fork(monkeypatch)
    at_range(monkeypatch, 10, act)
    with pytest.raises(
        PackingFailed, match=rf"two .* died while they packed 'bees/002.jpg' to 'bees/003.jpg' \({how}\)"
    ):
        pack(tree, tmp_path / "p.h5", encoding=encoding, progress=False)
    assert names_in(tmp_path) == ["tree"]


def test_packing_succeeds_if_every_worker_dies_once(tmp_path, tree, monkeypatch):
    whole = packed(tree, tmp_path / "whole.h5", threads=1).read_bytes()
    fork(monkeypatch)
    at_each(monkeypatch, lambda samples, _: once(tmp_path / f"killed-{samples.start}", kill_me)())
    assert packed(tree, tmp_path / "p.h5").read_bytes() == whole
    assert len(list(tmp_path.glob("killed-*"))) == 12


@pytest.mark.full
@pytest.mark.parametrize("act", [hang, stop_me], ids=["hangs", "is stopped"])
def test_a_worker_that_hangs_is_replaced_once_and_then_an_error_is_raised(tmp_path, tree, monkeypatch, act):
    whole = packed(tree, tmp_path / "whole.h5", threads=1).read_bytes()
    fork(monkeypatch)
    stalls_after(monkeypatch, 0.4)
    with monkeypatch.context() as patch:
        at_range(patch, 10, once(tmp_path / "hung", act))
        assert packed(tree, tmp_path / "p.h5").read_bytes() == whole
        assert (tmp_path / "hung").exists()
    at_range(monkeypatch, 10, act)
    with pytest.raises(TimedOut, match=r"two .* spent more than 0.4 s on 'bees/002.jpg' to 'bees/003.jpg'"):
        pack(tree, tmp_path / "hangs.h5", progress=False)
    assert not (tmp_path / "hangs.h5").exists()
    assert leftovers(tmp_path) == []


def test_a_slow_worker_is_not_treated_as_hung(monkeypatch):
    begun = time.monotonic()
    with ForkedWorkers("count", lambda task: time.sleep(0.1) or task, 2, str, stalled_s=0.35) as workers:
        assert sorted(workers.results(range(12))) == list(range(12))
    assert time.monotonic() - begun > 0.35


class _OddError(Exception):
    """An error that can be pickled but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"odd {one} {two}")


class _StickyError(Exception):
    """An error that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("sticky")
        self.held = lambda: None


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ZeroDivisionError("no"), ZeroDivisionError, "no"),
        (KeyError("a"), KeyError, "'a'"),
        (MemoryError("much"), MemoryError, "much"),
        # Some other packages change pickle so that it can restore this error.
        (_OddError(1, 2), (RuntimeError, _OddError), "odd 1 2"),
        (_StickyError(), RuntimeError, "_StickyError in a worker process: sticky"),
        (OSError(errno.ENOSPC, "full"), NotEnoughSpace, "Cannot pack .*full"),
        (PermissionError(errno.EACCES, "closed", "a"), Exception, "Cannot pack .*permission denied for the file 'a'"),
        (BadSource("Cannot pack"), BadSource, "Cannot pack"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else "",
)
def test_a_worker_error_is_raised_unchanged_if_possible(tmp_path, tree, monkeypatch, error, kind, message):
    fork(monkeypatch)

    def fail() -> None:
        raise error

    at_range(monkeypatch, 10, fail)
    with pytest.raises(kind, match=message) as caught:
        pack(tree, tmp_path / "p.h5", progress=False)
    cause = caught.value.__cause__ or caught.value
    assert isinstance(cause, BadSource) or "in fail" in str(cause) + "".join(getattr(cause, "__notes__", []))
    assert names_in(tmp_path) == ["tree"]


def test_a_full_disk_in_a_worker_leaves_no_files(tmp_path, tree, monkeypatch, file_hook):
    fork(monkeypatch)

    def full(operation: str, path: Path) -> None:
        if operation == "write" and multiprocessing.parent_process() is not None:
            fill_disk()

    file_hook(full)
    with pytest.raises(NotEnoughSpace, match="No space left"):
        pack(tree, tmp_path / "p.h5", encoding="raw", progress=False)
    assert names_in(tmp_path) == ["tree"]


def test_a_worker_that_cannot_be_started_raises_one_error(tmp_path, tree, monkeypatch):
    fork(monkeypatch)
    start, started = multiprocessing.context.ForkProcess._Popen, []

    def few(process: Any) -> Any:
        if started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(process)
        return start(process)

    monkeypatch.setattr(multiprocessing.context.ForkProcess, "_Popen", staticmethod(few))
    with pytest.raises(PackingFailed, match=r"a worker process cannot be started .*threads=1"):
        pack(tree, tmp_path / "p.h5", progress=False)
    assert names_in(tmp_path) == ["tree"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("number", [1, 4, 12])
def test_ctrl_c_during_packing_leaves_no_files_and_processes(tmp_path, tree, monkeypatch, encoding, number):
    fork(monkeypatch)
    add, calls = pack_writer.Compaction.add, []

    def added(self: Any, done: Any) -> None:
        calls.append(done)
        if len(calls) == number:
            raise KeyboardInterrupt
        add(self, done)

    monkeypatch.setattr(pack_writer.Compaction, "add", added)
    with pytest.raises(KeyboardInterrupt):
        pack(tree, tmp_path / "p.h5", encoding=encoding, progress=False)
    assert names_in(tmp_path) == ["tree"]


class PackingProcess:
    """A packing process in a new process group; one worker calls `act` before it makes the range from sample 10."""

    def __init__(self, tree: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
        folder = tree.parent
        with monkeypatch.context() as patch:
            fork(patch)
            at_range(patch, 10, lambda: (folder / "reached").touch() or act())
            self.errors = folder / "errors"
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    os.setsid()
                    os.dup2(os.open(self.errors, os.O_WRONLY | os.O_CREAT), 2)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    pack(tree, folder / "p.h5", progress=False)
                except KeyboardInterrupt:
                    os._exit(7)
                finally:
                    os._exit(1)
        wait_until((folder / "reached").exists)
        self.workers = children(self.pid)

    def ended(self) -> int:
        """Wait for the process and return its exit code, negative after a signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_ctrl_c_in_the_process_group_ends_all_processes_and_prints_nothing(tmp_path, tree, monkeypatch):
    packing = PackingProcess(tree, monkeypatch, hang)
    assert len(packing.workers) == 2
    os.killpg(packing.pid, signal.SIGINT)
    assert packing.ended() == 7
    assert not any(map(is_running, packing.workers))
    assert packing.errors.read_text() == ""
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "p.h5").exists()


@pytest.mark.parametrize("with_group", [False, True])
def test_workers_end_when_their_parent_is_killed_and_the_next_call_cleans_up(tmp_path, tree, monkeypatch, with_group):
    packing = PackingProcess(tree, monkeypatch, hang)
    assert len(packing.workers) == 2
    (os.killpg if with_group else os.kill)(packing.pid, signal.SIGKILL)
    assert packing.ended() == -signal.SIGKILL
    wait_until(lambda: not any(map(is_running, packing.workers)), 5.0)
    assert not (tmp_path / "p.h5").exists()
    assert leftovers(tmp_path) != []
    packed(tree, tmp_path / "p.h5")
    assert leftovers(tmp_path) == []


def test_a_process_that_must_not_have_children_packs_without_workers(tmp_path, tree, monkeypatch):
    fork(monkeypatch)
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        made_by = pool.apply(_made_by, (tree, tmp_path / "p.h5"))
        pool.close()
        pool.join()
    assert made_by in ("one thread", "2 threads")
    assert verify(tmp_path / "p.h5", progress=False).is_good


def _made_by(tree: Path, out: Path) -> str:
    return pack(tree, out, progress=False).made_by


def test_no_task_exceeds_its_bound_except_for_single_files(tmp_path, tree, monkeypatch):
    sizes = [file.stat().st_size for file in files_of(tree)]
    seen: list[tuple[int, int]] = []
    at_each(monkeypatch, lambda samples, at: seen.append((samples.start, samples.stop)) if at == "before" else None)
    monkeypatch.setattr(sample_writer, "_MEASURED_S", 0.0)
    for bound in (1, 2 * max(sizes) + 1, 10**9):
        for encoding in ENCODINGS:
            seen.clear()
            monkeypatch.setattr(sample_writer, "_CHUNK_BYTES", bound)
            packed(tree, tmp_path / f"{bound}-{encoding}.h5", encoding=encoding, threads=1)
            assert [start for start, _ in seen] == [0, *(stop for _, stop in seen[:-1])]
            assert seen[-1][1] == len(sizes)
            row = 24 * 32 * 3 if encoding == "raw" else 0
            for start, stop in seen:
                assert stop == start + 1 or max(sum(sizes[start:stop]), row * (stop - start)) <= bound
    assert len({path.read_bytes() for path in tmp_path.glob("*-raw.h5")}) == 1
