"""The trace of a run for Perfetto and `chrome://tracing`: how the time of its steps was spent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from colabkit.foundation import MetersSnapshot
from colabkit.training.records import EpochRecord

_SHARES = {"wait_s": "data wait", "copy_s": "copy", "compute_s": "compute", "other_s": "other"}


def trace_of(epochs: Sequence[EpochRecord], steps: int, spent: MetersSnapshot) -> dict[str, Any]:
    """Return the times of the steps of one `train()` call as a trace in Chrome's JSON format.

    The most recent steps are shown one by one, and earlier steps as one block per epoch. Within a block, the shares are
    drawn one after the other. The shares add up to the totals of `spent`.

    Args:
        epochs: the epochs that the call completed.
        steps: number of the most recent step.
        spent: times of all steps of the call.
    """
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "colabkit.train()"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "steps"}},
    ]
    now_ns = 0
    for name, shares in _blocks(epochs, steps, spent):
        ends_ns = [now_ns + round(seconds * 1e9) for seconds in accumulate(shares)]
        events.append(_slice(name, now_ns, ends_ns[-1]))
        for label, end_ns in zip(_SHARES.values(), ends_ns, strict=True):
            if end_ns > now_ns:
                events.append(_slice(label, now_ns, end_ns))
                now_ns = end_ns
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(name: str, start_ns: int, end_ns: int) -> dict[str, Any]:
    spans = {"ts": _microseconds(start_ns), "dur": _microseconds(end_ns - start_ns)}
    return {"name": name, "cat": "step", "ph": "X", "pid": 1, "tid": 1, **spans}


def _microseconds(ns: int) -> float:
    """Return microseconds that Perfetto, which cuts off fractions of a nanosecond, reads as exactly `ns`.

    Perfetto drops a slice that ends even one nanosecond after the slice around it.
    """
    us = ns / 1000
    return us if int(us * 1000) == ns else math.nextafter(us, math.inf)


def _blocks(epochs: Sequence[EpochRecord], steps: int, spent: MetersSnapshot) -> Iterator[tuple[str, list[float]]]:
    """Yield the name and the shares in seconds of each epoch, without the recent steps, then of each recent step."""
    names = [f"epoch {record.epoch + 1}" for record in epochs] + ["unfinished epoch"]
    blocks = [[getattr(record, share) for share in _SHARES] for record in epochs] + [[0.0] * len(_SHARES)]
    for at, share in enumerate(_SHARES):
        rest_s = getattr(spent, share) - sum(block[at] for block in blocks)
        blocks[-1][at] = max(0.0, rest_s)
        # Exclude the time before a resume from the first epochs, and that of the newest steps from the last epochs.
        _take(blocks, at, max(0.0, -rest_s))
        _take(blocks[::-1], at, sum(getattr(step, share) for step in spent.recent))
    yield from ((name, block) for name, block in zip(names, blocks, strict=True) if sum(block))
    for number, step in enumerate(spent.recent, steps - len(spent.recent) + 1):
        yield f"step {number}", [getattr(step, share) for share in _SHARES]


def _take(blocks: list[list[float]], at: int, seconds: float) -> None:
    """Subtract seconds from the share `at` of the blocks, starting with the first blocks."""
    for block in blocks:
        taken_s = min(block[at], seconds)
        block[at] -= taken_s
        seconds -= taken_s
