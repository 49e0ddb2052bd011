"""Measure one loader in a separate process: `python loader_systems.py ACTION SYSTEM SOURCE [MORE]`.

- `epochs SYSTEM SOURCE BATCH`: samples and seconds of full epochs, for at least three seconds after a warm-up epoch.
- `turns SYSTEM SOURCE BATCH`: for each number on stdin, the seconds of that many full epochs.
- `first SYSTEM SOURCE BATCH`: seconds from making the loader to its first batch, in a new process.
- `checks`, `worker`, `order` or `meters`, then `colabkit SOURCE BATCH`: other costs of colabkit's loader.

The script prints one line of JSON, except for `turns`. Imports and opening the data are not timed. The consumer only
takes batches and counts their samples. This file also runs without colabkit, which is one of the systems.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from loader_peers import CROP, PEERS, EpochIterable, Make, own_temporary_folder

LEAST_S = float(os.environ.get("BENCH_LEAST_S", "3"))
PACE = 1000
"""Images per second that the consumer takes in the action `worker`."""

CHECK_TURNS = 7
"""First epochs with and without checks in a process."""

HELD: list[Any] = []
"""Objects that must live until the process ends."""

ORDER_SAMPLES = 10**9
ORDER_ROW_BYTES = 8


def main() -> None:
    action, system, source, *more = sys.argv[1:]
    with own_temporary_folder(Path(source).absolute().parent):
        try:
            found = ACTIONS[action](system, source, *more)
        except ModuleNotFoundError as error:
            found = {"missing": f"not installed: {type(error).__name__}: {error}"}
        print("\n" + json.dumps(found), flush=True)
    if HELD:
        os._exit(0)


def epochs(system: str, source: str, batch_size: str) -> dict[str, float]:
    loader = SYSTEMS[system](source)(int(batch_size))
    one_epoch(loader)
    return timed(loader)


def turns(system: str, source: str, batch_size: str) -> dict[str, float]:
    loader = SYSTEMS[system](source)(int(batch_size))
    samples = one_epoch(loader)
    for line in sys.stdin:
        started = time.perf_counter()
        for _ in range(int(line)):
            one_epoch(loader)
        print(time.perf_counter() - started, flush=True)
    return {"samples": samples}


def timed(loader: Iterable[Any]) -> dict[str, float]:
    """Iterate over complete epochs for at least `LEAST_S` seconds; return the number of samples, seconds and epochs."""
    samples = rounds = 0
    started = time.perf_counter()
    while (seconds := time.perf_counter() - started) < LEAST_S:
        samples += one_epoch(loader)
        rounds += 1
    return {"samples": samples, "seconds": seconds, "epochs": rounds}


def one_epoch(loader: Iterable[Any]) -> int:
    return sum(len(batch[-1]) for batch in loader)


def first(system: str, source: str, batch_size: str) -> dict[str, float]:
    make = SYSTEMS[system](source)
    started = time.perf_counter()
    batches = iter(make(int(batch_size)))
    samples = len(next(batches)[-1])
    seconds = time.perf_counter() - started
    # Keep the batches alive, since FFCV aborts the process if it is stopped in the middle of an epoch.
    HELD.append(batches)
    return {"seconds": seconds, "samples": samples}


def checks(_: str, source: str, batch_size: str) -> dict[str, float]:
    """Measure first epochs over a newly opened pack, alternately with and without samples that are already checked."""
    import numpy as np

    import colabkit

    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * CHECK_TURNS):
        dataset = colabkit.open_pack(source)["train"]
        if is_checked := bool(number % 2):
            dataset.check(np.arange(len(dataset)))
        loader = colabkit.Loader(dataset, int(batch_size), shuffle=True, channels_last=True)
        started = time.perf_counter()
        one_epoch(loader)
        seconds[is_checked].append(time.perf_counter() - started)
    first_s, later_s = (statistics.median(seconds[is_checked]) for is_checked in (False, True))
    return {
        "samples": len(dataset),
        "first_s": first_s,
        "later_s": later_s,
        "more_s": (first_s - later_s) / len(dataset),
    }


def worker(_: str, source: str, batch_size: str) -> dict[str, float]:
    """Measure the CPU use of threads other than the consumer, which takes batches at `PACE`, after a warm-up epoch."""
    loader = colabkit_pack(source)(int(batch_size))
    at_pace(loader)
    cpu_s, own_s, started = time.process_time(), time.thread_time(), time.perf_counter()
    taken = at_pace(chain(loader, loader))
    seconds = time.perf_counter() - started
    own_s, cpu_s = time.thread_time() - own_s, time.process_time() - cpu_s
    return {"samples": taken, "seconds": seconds, "cpu_share": (cpu_s - own_s) / seconds, "own_share": own_s / seconds}


def at_pace(batches: Iterable[Any]) -> int:
    taken, started = 0, time.perf_counter()
    for _, labels in batches:
        taken += len(labels)
        time.sleep(max(0.0, started + taken / PACE - time.perf_counter()))
    return taken


def order(_: str, __: str, batch_size: str) -> dict[str, float]:
    """Measure the time to the first batch of a loader of 10^9 samples, at the start and when resuming in the middle."""
    import numpy as np

    import colabkit

    # This array is never written to, so it uses no memory.
    rows = np.zeros((ORDER_SAMPLES, ORDER_ROW_BYTES), np.uint8)
    # Trigger all imports before timing.
    next(iter(colabkit.Loader(rows[:1000], 10)))
    size, middle = int(batch_size), ORDER_SAMPLES // 2
    started = time.perf_counter()
    loader = colabkit.Loader(rows, size, shuffle=True)
    batches = iter(loader)
    next(batches)
    first_s = time.perf_counter() - started
    state = loader.state_dict() | {"samples": middle}
    del batches
    resumed = colabkit.Loader(rows, size, shuffle=True)
    started = time.perf_counter()
    resumed.load_state_dict(state)
    batches = iter(resumed)
    next(batches)
    middle_s = time.perf_counter() - started
    assert resumed.state_dict()["samples"] == middle + size, "the loader did not resume in the middle"
    return {"first_s": first_s, "middle_s": middle_s}


def meters(_: str, source: str, batch_size: str) -> dict[str, float]:
    """Measure the share of an epoch that the meters take: each meter's number of calls times the cost of one call."""
    from colabkit.foundation import meters as watched

    loader = colabkit_pack(source)(int(batch_size))
    one_epoch(loader)
    found = timed(loader)
    calls: dict[str, int] = {}

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return call(*args, **kwargs)

        return run

    kind, publish = watched.LoaderMeters, watched.publish
    originals = {name: getattr(kind, name) for name in ("busy", "add")}
    try:
        watched.publish = counted("publish", publish)
        for name, call in originals.items():
            setattr(kind, name, counted(name, call))
        batches = sum(1 for _ in loader)
    finally:
        watched.publish = publish
        for name, call in originals.items():
            setattr(kind, name, call)
    mine = kind()

    def busy() -> None:
        with mine.busy("gather", 1, 1):
            pass

    costs = {
        "busy": cost_s(busy),
        "add": cost_s(lambda: mine.add("gather", 1, 1, 0.0)),
        "publish": cost_s(lambda: publish(watched.BatchTaken(mine))),
    }
    # Do not count calls inside `busy` separately, because they are part of its cost.
    calls["add"] = calls.get("add", 0) - calls.get("busy", 0)
    total_s = sum(calls.get(name, 0) * cost for name, cost in costs.items())
    mine.clock = watched.HostClock(mine.spent)
    total_s += batches * cost_s(lambda: counted_batch(mine))
    epoch_s = found["seconds"] / found["epochs"]
    return {"share": total_s / epoch_s, "epoch_s": epoch_s, "calls": sum(calls.values()), "batches": batches}


def counted_batch(mine: Any) -> None:
    """Count a batch as the loader does for every batch."""
    given = time.perf_counter()
    mine.batches += 1
    mine.samples += 1
    mine.ready += True
    mine.clock.stepped(given, given, time.perf_counter(), 1)
    if not mine.batches % 64:
        mine.settle(mine.clock)


def cost_s(call: Callable[[], object], times: int = 20_000) -> float:
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def colabkit_pack(source: str) -> Make:
    import colabkit

    dataset = colabkit.open_pack(source)["train"]
    # Importing the loader here excludes the import from the timing, as for the other packages.
    loader = colabkit.Loader
    return lambda size: loader(dataset, size, shuffle=True, channels_last=True)


def colabkit_crops(source: str) -> Make:
    return colabkit_cropping(source)


def colabkit_decoded(source: str) -> Make:
    return colabkit_cropping(source, size=256)


def colabkit_cropping(source: str, **options: Any) -> Make:
    import colabkit
    from colabkit.augment import Compose, RandomHorizontalFlip, RandomResizedCrop

    dataset = colabkit.open_pack(source)["train"]
    transform = Compose([RandomResizedCrop(CROP), RandomHorizontalFlip()])
    return lambda size: colabkit.Loader(dataset, size, shuffle=True, transform=transform, channels_last=True, **options)


def bare(source: str) -> Make:
    """Gather random rows with `index_select` into one reused buffer, without threads or labels: the upper limit."""
    import torch

    import colabkit

    rows = colabkit.open_pack(source)["train"].rows
    flat = rows.view(len(rows), -1)
    wide = flat.view(torch.int64) if flat.shape[1] % 8 == 0 else flat

    def make(size: int) -> Iterable[Any]:
        buffer = torch.empty(size, wide.shape[1], dtype=wide.dtype)

        def epoch() -> Iterator[Any]:
            for some in torch.randperm(len(wide)).split(size):
                yield (torch.index_select(wide, 0, some, out=buffer[: len(some)]),)

        return EpochIterable(epoch)

    return make


def plain_copy(source: str, buffers: int = 1) -> Make:
    """Copy blocks of rows in stored order into `buffers` reused buffers in turn."""
    import torch

    import colabkit

    rows = colabkit.open_pack(source)["train"].rows

    def make(size: int) -> Iterable[Any]:
        turns = cycle([torch.empty(size, *rows.shape[1:], dtype=rows.dtype) for _ in range(buffers)])
        return EpochIterable(lambda: ((next(turns)[: len(some)].copy_(some),) for some in rows.split(size)))

    return make


ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "epochs": epochs,
    "turns": turns,
    "first": first,
    "checks": checks,
    "worker": worker,
    "order": order,
    "meters": meters,
}

SYSTEMS: dict[str, Callable[[str], Make]] = {
    "colabkit": colabkit_pack,
    "colabkit crops": colabkit_crops,
    "colabkit decoded": colabkit_decoded,
    "bare": bare,
    "copy": plain_copy,
    "copy, alternating buffers": partial(plain_copy, buffers=2),
    **PEERS,
}

if __name__ == "__main__":
    main()
