"""Fixtures, options and collection rules shared by all tests."""

from __future__ import annotations

import builtins
import ctypes
import gc
import itertools
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

# Let torch's threads sleep while they wait, because test workers share the cores and spinning threads slow them down
# tenfold. libgomp reads the variable when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Do not compile what pip installs: tests import few of these modules, and Python compiles them on import.
os.environ.setdefault("PIP_COMPILE", "0")
os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
# Otherwise, Ray replaces the function `print` of the process.
os.environ.setdefault("RAY_TQDM_PATCH_PRINT", "0")
# This package compiles 38 grammars when jsonschema, and so nbformat, imports it, and no schema of notebooks needs them.
sys.modules.setdefault("rfc3987_syntax", None)

import pytest
import torch
from contract import make_pack
from hypothesis import settings
from killing import ForkServer
from trees import make_tree

from colabkit.foundation import Report, file_changes, meters
from colabkit.packs import PackedDataset, open_pack
from colabkit.storage.sources.items import STAGE_SEAL
from colabkit.storage.staging import places

MAIN = sys.modules["__main__"]
settings.register_profile("full", deadline=None)
settings.register_profile("fast", max_examples=15, deadline=None)

MOST_CASES = 2
"""Number of cases of a parametrized test that run without `--full`: the first and the last."""

NUMBERS = itertools.count()
ROWS: pytest.StashKey[list[tuple[str, str, str]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--report", action="store_true", help="print a table of known failures and how colabkit handles them"
    )
    parser.addoption("--full", action="store_true", help="run all tests, including those marked `full`")
    parser.addoption("--pictures", type=Path, metavar="FOLDER", help="save what the tests see in a browser")


def pytest_xdist_auto_num_workers() -> int:
    """Start one worker more than there are CPUs, because many tests wait for processes, kernels and timeouts."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and os.geteuid() == 0:
        see_own_mounts_only()
    # A shell starts background jobs with SIGINT ignored, and their child processes ignore it too. With a handler set
    # here, programs that tests start get the default action.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.load_profile("full" if config.getoption("--full") else "fast")


def see_own_mounts_only() -> None:
    """Enter a new mount namespace if permitted, so that test workers do not see each other's mounts.

    The numbers are `CLONE_NEWNS` of `<linux/sched.h>`, and `MS_REC` and `MS_PRIVATE` of `<linux/mount.h>`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) == 0:
        libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None)


@pytest.fixture
def report_row(pytestconfig: pytest.Config) -> Callable[[str, str, object], None]:
    """Return a function that adds a row to the `--report` table: symptom, reaction, and message or report."""
    rows = pytestconfig.stash.setdefault(ROWS, [])
    return lambda symptom, act, text: rows.append((symptom, act, repr(text) if isinstance(text, Report) else str(text)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--report"):
        return
    terminalreporter.section("known failures, and how colabkit handles and reports them")
    for symptom, act, text in config.stash.get(ROWS, []):
        terminalreporter.line(f"{symptom:42}{act}")
        for line in text.splitlines():
            terminalreporter.line(f"{'':42}{line}", yellow=True)


@pytest.fixture(autouse=True)
def process_stays() -> Iterator[None]:
    """Restore the main module and the handler of Ctrl-C after each test.

    IPython's shells replace the module, which spawned processes import, and Ray Train leaves a handler of its own.
    """
    handler = signal.getsignal(signal.SIGINT)
    yield
    sys.modules["__main__"] = MAIN
    # Examples that display a value set this name, and IPython would then not set its own.
    vars(builtins).pop("_", None)
    if handler is not None:
        signal.signal(signal.SIGINT, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select which tests run without `--full`.

    These are the tests not marked `full`, each with at most `MOST_CASES` cases unless marked `every_case`.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("full") and not item.get_closest_marker("every_case"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        kept = {round(number * (len(found) - 1) / (MOST_CASES - 1)) for number in range(MOST_CASES)}
        for number, item in enumerate(found):
            if len(found) > MOST_CASES and number not in kept:
                item.add_marker(pytest.mark.full)
    if not config.getoption("--full"):
        full = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    # Start with the slowest files, those in `tests` and `tests/system`, so that all workers stay busy until the end.
    items.sort(key=lambda item: item.path.parent.name not in ("tests", "system"))


def pytest_collection_finish() -> None:
    freeze()


def freeze() -> None:
    """Exclude what has been imported from garbage collection, which saves time, and memory after forks."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def earlier_imports_are_not_collected() -> None:
    freeze()


@pytest.fixture(autouse=True)
def near_storage(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set `COLABKIT_LOCAL` to a new folder; delete it and the test's copies in tmpfs after the test."""
    # Do not use mktemp(), which would list the folders of all previous tests.
    folder = tmp_path_factory.getbasetemp() / f"near-{next(NUMBERS)}"
    folder.mkdir()
    monkeypatch.setenv("COLABKIT_LOCAL", str(folder))
    yield folder
    try:
        folder.rmdir()
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
    # The next run of pytest may give a test the same folder, for which these copies would count as staged.
    own = os.fsencode(tmp_path_factory.getbasetemp())
    # Patches of the test are still in place, and some make listings fail.
    with suppress(OSError):
        for seal in places.TMPFS.glob(f"colabkit-{os.getuid()}/*/{STAGE_SEAL}"):
            if own in seal.read_bytes():
                shutil.rmtree(seal.parent, ignore_errors=True)


@pytest.fixture(autouse=True)
def new_files_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for a clock tick before reading files that were just changed, as most files in tests are."""
    monkeypatch.setattr("colabkit.storage.sources.reads._TICK_NS", 0)


@pytest.fixture
def image_tree(tmp_path: Path) -> Path:
    """Return a folder of 24 small PNG images in the classes ants, bees and cats."""
    return make_tree(tmp_path / "tree", 8)


@pytest.fixture
def file_hook() -> Iterator[Callable[[Callable[[str, Path], None] | None], None]]:
    def set_hook(hook: Callable[[str, Path], None] | None) -> None:
        file_changes.hook = hook

    yield set_hook
    file_changes.hook = None


@pytest.fixture
def allow_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the number of additional threads that the system allows."""

    def allow(count: int) -> None:
        start, started = threading.Thread.start, itertools.count()

        def limited(thread: threading.Thread) -> None:
            if next(started) >= count:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)

    return allow


@pytest.fixture(scope="module")
def killed_at() -> Iterator[Callable[[int, partial[object]], bool]]:
    with ForkServer() as killing:
        yield killing.at


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    """Return 22 samples of shape 4x3x3 in 3 classes. In batches of 4, the last batch has 2 samples."""
    return open_pack(make_pack(tmp_path_factory.mktemp("packs") / "data.h5", train=22))["train"]


@pytest.fixture
def heard() -> Iterator[list[meters.Event]]:
    events: list[meters.Event] = []
    unsubscribe = meters.subscribe(events.append)
    yield events
    unsubscribe()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one CPU thread, so that results equal those of forked processes bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
