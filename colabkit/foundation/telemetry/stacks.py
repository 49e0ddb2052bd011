"""Samples of the training thread's stack: the line of code in which a loop spends its time.

A sample takes up to 0.2 ms of CPU time. It is taken only while no GPU is busy; see `Sampler`.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import opcode
import os
import random
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple, TypeAlias

from colabkit.foundation.messages import shortened
from colabkit.foundation.mount_table import Reader
from colabkit.foundation.reports import printable

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_STDLIB = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
_MOST_SPOTS, _LONGEST_LINE = 8, 50
# Seconds after which a thread that holds the GIL is asked to release it, in `prompt_gil()`, and mean seconds for which
# a sample is awaited.
_PROMPT_S, _AWAITED_S = 5e-4, 5e-3
# Drawing from Python's global generator would change the results of a run that uses it.
_random = random.Random()
# Bytecode operations that may call a function that is not written in Python.
_CALLS = ("CALL", "BINARY", "BEFORE_WITH", "LOAD_SPECIAL", "LOAD_ATTR", "PRECALL")
# The function in which `train()` validates, which is not part of a step.
_VALIDATING = ("colabkit.training.run", "_validate")
# Parts of colabkit and torch that wait for data or produce it.
_LOADING = ("colabkit.loading", "colabkit.monitoring.diagnosing.api", "torch.utils.data")
# Parts of torch that do not compute.
_ASIDE_IN_TORCH = ("torch.serialization", "torch.utils.tensorboard", "torch._tensor_str")
_COMPUTING = frozenset(
    ("torch", "torch_xla", "tensorflow", "keras", "jax", "jaxlib", "flax", "triton", "numpy", "scipy")
)

SpotKind: TypeAlias = Literal["data", "compute", "aside", "python", "call"]


class LoopSpot(NamedTuple):
    """A line of user code, and the number of samples that found the training thread there.

    Attributes:
        place: file, line and function, for example `"train.py:42 in log_images"`.
        text: the line itself, possibly shortened; empty if unknown.
        kind: what the line does: it waits for a batch (`"data"`), calls torch or a similar library (`"compute"`), calls
            another library, for example to log or to save (`"aside"`), runs Python code (`"python"`), or calls a
            function that is not written in Python (`"call"`).
        samples: number of samples.
        asleep: number of those in which the thread did not run and was not ready to run.
    """

    place: str
    text: str
    kind: SpotKind
    samples: int
    asleep: int


class StackSampler:
    """Samples the stack of one thread.

    Args:
        read: returns the text of a file.
        frames: returns the newest frame of each thread.
    """

    def __init__(
        self,
        read: Reader,
        frames: Callable[[], dict[int, FrameType]] = sys._current_frames,  # noqa: SLF001
    ) -> None:
        self._read = read
        self._frames = frames
        self._found: Counter[tuple[str, int, str, SpotKind, bool]] = Counter()

    def sample(self, ident: int, native_id: int) -> None:
        """Sample the stack of the thread with Python's identifier `ident` and the kernel's identifier `native_id`."""
        _wait_for_any_line()
        frame = self._frames().get(ident)
        if frame is not None and (spot := _spot_of(frame)) is not None:
            # Reading a file releases the GIL, so a thread that could run then runs.
            self._found[*spot, self._is_asleep(native_id)] += 1

    def take(self) -> tuple[LoopSpot, ...]:
        """Return and forget the places found since the last call, the most frequent first, at most eight."""
        found, self._found = self._found, Counter()
        spots: dict[tuple[str, int, str, SpotKind], list[int]] = {}
        for (*spot, is_asleep), count in found.items():
            counts = spots.setdefault((*spot,), [0, 0])  # type: ignore[arg-type]
            counts[0] += count
            counts[1] += count * is_asleep
        ordered = sorted(spots.items(), key=lambda item: -item[1][0])[:_MOST_SPOTS]
        return tuple(
            LoopSpot(_place_of(file, line, function), _line_of(file, line), kind, samples, asleep)
            for (file, line, function, kind), (samples, asleep) in ordered
        )

    def _is_asleep(self, native_id: int) -> bool:
        try:
            return self._read(f"/proc/self/task/{native_id}/stat").rpartition(")")[2].split()[0] in ("S", "D")
        except (OSError, ValueError, IndexError):
            return False


class _PromptBlocks:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.usual_s = self.short_s = sys.getswitchinterval()


_blocks = _PromptBlocks()


@contextlib.contextmanager
def prompt_gil() -> Iterator[None]:
    """Return a context manager in which a thread that waits for the GIL gets it soon.

    Each read of a small file releases the GIL. While another thread runs Python code, a snapshot of the machine thus
    takes 30 ms instead of 300 ms, and half as much CPU time.
    """
    blocks = _blocks
    with blocks.lock:
        blocks.count += 1
        if blocks.count == 1:
            blocks.usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(blocks.usual_s, _PROMPT_S))
            blocks.short_s = sys.getswitchinterval()
    try:
        yield
    finally:
        with blocks.lock:
            blocks.count -= 1
            # Keep an interval that the user has set meanwhile.
            if not blocks.count and sys.getswitchinterval() == blocks.short_s:
                sys.setswitchinterval(blocks.usual_s)


def _forget_blocks() -> None:
    global _blocks
    # The other threads, of which one may have held the lock, do not exist in a forked process.
    former, _blocks = _blocks, _PromptBlocks()
    if former.count:
        sys.setswitchinterval(former.usual_s)


os.register_at_fork(after_in_child=_forget_blocks)


def _wait_for_any_line() -> None:
    """Wait for some milliseconds, then acquire the GIL wherever its holder is.

    A thread that acquires the GIL usually waits until its holder releases it, for example to write a file. So most
    samples would find the lines that release it.
    """
    with prompt_gil():
        time.sleep(_random.uniform(0.5, 1.5) * _AWAITED_S)


def _spot_of(frame: FrameType) -> tuple[str, int, str, SpotKind] | None:
    """Return the file, line, function and kind of the innermost user code in a stack.

    Returns None without user code, or while `train()` validates.
    """
    stack = [(one, module_of(one.f_code.co_filename)) for one in _outwards(frame)]
    depth = next((depth for depth, (_, module) in enumerate(stack) if not module), None)
    if depth is None or any((module, one.f_code.co_name) == _VALIDATING for one, module in stack):
        return None
    user = stack[depth][0]
    # The user code may be a dataset or a transform that a loader has called.
    is_loading = any(module.startswith(_LOADING) for _, module in stack)
    kind: SpotKind = "data" if is_loading else _kind_of([module for _, module in stack[:depth]], user)
    return user.f_code.co_filename, user.f_lineno or user.f_code.co_firstlineno, user.f_code.co_name, kind


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _kind_of(inner: list[str], user: FrameType) -> SpotKind:
    if any(module.startswith("colabkit.") for module in inner):
        # This is `train()` itself, for example while it saves a checkpoint, which its meters measure.
        return "compute"
    if any(module.startswith(_ASIDE_IN_TORCH) for module in inner):
        return "aside"
    if any(module.partition(".")[0] in _COMPUTING for module in inner):
        return "compute"
    if inner:
        return "aside"
    return "call" if _is_at_call(user) else "python"


def _is_at_call(frame: FrameType) -> bool:
    code, at = frame.f_code.co_code, frame.f_lasti
    # After a call, the thread may be at the inline caches of its operation.
    while at > 0 and code[at] == 0:
        at -= 2
    return 0 <= at < len(code) and opcode.opname[code[at]].startswith(_CALLS)


@functools.lru_cache(maxsize=1024)
def module_of(file: str) -> str:
    """Return the module of a library or of the standard library that a file belongs to; empty for user code."""
    if file.startswith(_PACKAGE):
        return "colabkit." + _dotted(file.removeprefix(_PACKAGE))
    for folder in ("site-packages", "dist-packages"):
        _, found, rest = file.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return _dotted(rest)
    if file.startswith(_STDLIB):
        return _dotted(file.removeprefix(next(one for one in _STDLIB if file.startswith(one))))
    return "frozen" if file.startswith("<frozen") else ""


def _dotted(path: str) -> str:
    return path.removesuffix(".py").replace(os.sep, ".")


def _place_of(file: str, line: int, function: str) -> str:
    # IPython names the code of a cell after a temporary file or its number.
    is_cell = "ipykernel_" in file or file.startswith("<ipython-input")
    where = f"line {line} of a cell" if is_cell else f"{printable(os.path.basename(file))}:{line}"
    return where if function == "<module>" else f"{where} in {function}"


def _line_of(file: str, line: int) -> str:
    return shortened(printable(" ".join(linecache.getline(file, line).split())), _LONGEST_LINE)
