"""Faults 45 to 52: clusters that pack and train, and packs in buckets."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from contract import whole_content
from http_servers import Handler, Plan, status
from remote_packs import SHAPE, PackServer, pack_server
from repeating import RepeatingExecutor
from trees import leftovers

from colabkit.errors import ColabkitError, InvalidOption, LaunchFailed
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.packing.api import pack

from .board import Outcome, Result, attempt, fault, spread
from .copies import make_quick, new_folder
from .packers import VARIANTS, write_images

_ZOMBIE_S = 0.3
_REPAIR = "/repair"


class _KilledWorkers(ProcessPoolExecutor):
    """A pool in which the worker of one task is killed before, during or after the task."""

    def __init__(self, task: int, when: str) -> None:
        super().__init__(2)
        self._numbers = itertools.count()
        self._task = task
        self._when = when

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        when = self._when if next(self._numbers) == self._task else ""
        return super().submit(_run_and_die, when, fn, args, kwargs)


def _run_and_die(when: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kill = partial(os.kill, os.getpid(), signal.SIGKILL)
    if when == "before":
        kill()
    if when == "during":
        threading.Timer(0.002, kill).start()
    result = function(*args, **kwargs)
    if when:
        kill()
    return result


class _LostWorkers(ThreadPoolExecutor):
    """Threads that lose the result of one task: it fails at once, but runs later, while its shard is packed again."""

    def __init__(self, task: int, delay_s: float) -> None:
        super().__init__(2)
        self._numbers = itertools.count()
        self._task = task
        self._delay_s = delay_s
        self.zombies: list[threading.Thread] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if next(self._numbers) != self._task:
            return super().submit(fn, *args, **kwargs)

        def run_late() -> None:
            time.sleep(self._delay_s)
            # The call that submitted the task may have ended and removed its folder.
            with suppress(ColabkitError):
                fn(*args, **kwargs)

        self.zombies.append(threading.Thread(target=run_late))
        self.zombies[-1].start()
        lost: Future[Any] = Future()
        lost.set_exception(ConnectionError("the worker is lost"))
        return lost


def _packed_on(
    folder: Path, cases: list[tuple[str, Callable[[], Any]]], after: Callable[[Any], object] = lambda executor: None
) -> Iterator[Result]:
    """Pack images in shards on each executor; the pack must be that of one process, and no files may be left."""
    source = write_images(folder / "images")
    pack(source, folder / "expected" / "pack.h5", progress=False, **VARIANTS["shards"])
    expected = _content(folder / "expected")
    for case, make in cases:
        with new_folder(folder / "case") as made:

            def work(make: Callable[[], Any] = make, target: Path = made / "pack.h5") -> None:
                with make() as executor:
                    pack(source, target, executor=executor, progress=False, **VARIANTS["shards"])
                    after(executor)
                assert _content(target.parent) == expected, "the pack differs"
                assert not leftovers(target.parent), f"unfinished files are left: {leftovers(target.parent)}"

            yield attempt(case, work)


def _content(folder: Path) -> dict[str, object]:
    return {path.name: whole_content(path)[4:] for path in sorted(folder.glob("*.h5"))}


@fault(45, "a worker is killed while it packs a shard")
def a_killed_worker(_: None, folder: Path, limit: int) -> Iterator[Result]:
    cases = spread([*itertools.product(range(3), ("before", "during", "after"))], min(limit, 9))
    yield from _packed_on(
        folder, [(f"{when} task {task}", partial(_KilledWorkers, task, when)) for task, when in cases]
    )


@fault(46, "a lost worker writes its shard later")
def a_zombie_writer(_: None, folder: Path, limit: int) -> Iterator[Result]:
    def join(executor: _LostWorkers) -> None:
        for zombie in executor.zombies:
            zombie.join()

    cases = spread([*itertools.product(range(3), (0.0, 0.005, _ZOMBIE_S))], limit)
    made = [(f"task {task}, after {delay_s:g} s", partial(_LostWorkers, task, delay_s)) for task, delay_s in cases]
    yield from _packed_on(folder, made, join)


@fault(47, "every shard is packed twice at once")
def a_duplicate_execution(_: None, folder: Path, limit: int) -> Iterator[Result]:
    cases = spread([*itertools.product(("first", "last"), range(10))], limit)
    yield from _packed_on(
        folder, [(f"the {one} result, run {run}", partial(RepeatingExecutor, 4, one)) for one, run in cases]
    )


def _rows(server: PackServer, cache: int | str = "10MB", **options: Any) -> list[bytes]:
    """Return the pixels of the samples of an epoch, read through a new cache."""
    from colabkit.loading.loader import Loader

    data = open_pack(server.url, cache=cache)["train"]
    return [image.numpy().tobytes() for images, _ in Loader(data, 4, **options) for image in images]


def _expected(folder: Path) -> list[bytes]:
    data = open_pack(folder / "birds.h5")["train"]
    return [data[number][0].numpy().tobytes() for number in range(len(data))]


def _remote(folder: Path, cases: list[tuple[str, Callable[[PackServer], Plan]]]) -> Iterator[Result]:
    """Read a pack from a server with a fault, and again after the repair; all rows that are read must be right."""
    make_quick()
    with pack_server(folder / "remote") as server:
        expected = _expected(folder / "remote")
        for number, (case, harm) in enumerate(cases):
            near, plan = folder / f"near-{number}", harm(server)

            def answer(handler: Handler, plan: Plan = plan) -> None:
                if handler.path != _REPAIR:
                    plan(handler)
                    return
                server.damage.clear()
                server.plans[:] = [server._serve]
                handler.answer(200, {}, b"")

            server.plans[:] = [answer]

            def work(near: Path = near) -> None:
                os.environ["COLABKIT_LOCAL"] = str(near)
                assert _rows(server) == expected, "the rows are not those of the pack"

            def repaired() -> None:
                urlopen(server.url.replace("/packs/birds.h5", _REPAIR)).close()
                assert _rows(server) == expected, "after the repair, the rows are not those of the pack"

            yield attempt(case, work, repaired)


def _changes() -> list[tuple[str, Callable[[bytes], bytes]]]:
    return [
        *((f"the last {count:,} bytes are missing", partial(_shortened, count)) for count in (1, 100, 4096)),
        ("only half is there", lambda data: data[: len(data) // 2]),
        ("it is empty", lambda _: b""),
        ("zeros follow the first half", lambda data: data[: len(data) // 2].ljust(len(data), b"\0")),
    ]


def _shortened(count: int, data: bytes) -> bytes:
    return data[:-count]


def _damaged(name: str, change: Callable[[bytes], bytes], server: PackServer) -> Plan:
    server.damage[name] = change
    return server._serve


@fault(48, "the index of a pack in a bucket is missing or incomplete")
def a_lost_index(_: None, folder: Path, limit: int) -> Iterator[Result]:
    def refuse(code: int, server: PackServer) -> Plan:
        return status(code)

    cases = [(f"status {code}", partial(refuse, code)) for code in (404, 403, 410)]
    cases += [(f"the index: {name}", partial(_damaged, "birds.h5", change)) for name, change in _changes()]
    yield from _remote(folder, spread(cases, limit))


@fault(49, "a shard in a bucket is only half uploaded")
def a_half_upload(_: None, folder: Path, limit: int) -> Iterator[Result]:
    cases = [
        (f"shard {shard}: {name}", partial(_damaged, f"birds-{shard:05}.h5", change))
        for shard, (name, change) in itertools.product((0, 2, 5), _changes())
    ]
    yield from _remote(folder, spread(cases, limit))


@fault(50, "credentials expire during an epoch")
def expired_credentials(_: None, folder: Path, limit: int) -> Iterator[Result]:
    def expire(code: int, after: int, server: PackServer) -> Plan:
        served, refused = itertools.count(), status(code)

        def answer(handler: Handler) -> None:
            plan = server._serve if next(served) < after else refused
            plan(handler)

        return answer

    cases = [
        (f"status {code} from request {after + 1} on", partial(expire, code, after))
        for code, after in itertools.product((401, 403), (1, 2, 4))
    ]
    yield from _remote(folder, spread(cases, limit))


@fault(51, "a cache is smaller than a shard")
def a_small_cache(_: None, folder: Path, limit: int) -> Iterator[Result]:
    with pack_server(folder / "remote") as server:
        for size, shuffle in spread([*itertools.product((1, 1000, 4096, 12_000), (False, "block", True))], limit):
            began = time.monotonic()
            work = partial(_rows, server, size, shuffle=shuffle)
            result = attempt(
                f"{size:,} bytes, shuffle={shuffle!r}", lambda work=work: _none(work()), refusals=InvalidOption
            )
            is_slow = time.monotonic() - began > 5.0
            yield Result(result.case, Outcome.WRONG, "the refusal took over 5 s") if is_slow else result


def _none(rows: list[bytes]) -> None:
    raise AssertionError(f"a cache that is too small is accepted, and gives {len(rows)} rows of {SHAPE}")


@fault(52, "a rank is killed while several train")
def a_killed_rank(_: None, folder: Path, limit: int) -> Iterator[Result]:
    import numpy as np
    from contract import seal_fields

    from colabkit.training.ranks import notebook_launch

    # Launch once here, because the first launch opens a pipe for later ones, which would count as a leak of its case.
    notebook_launch(int, (), 1)
    rows = np.arange(41, dtype=np.int64).reshape(-1, 1)
    path = seal_fields(folder / "numbers.h5", {"X": {"train": rows}}, {"X": "array"}, None)
    cases = [*itertools.product((2, 3), (1, 5, 8), (1, 3))]
    for before, step, after in spread(cases, max(1, limit // 20)):
        with new_folder(folder / "case") as made:

            def work(before: int = before, step: int = step, after: int = after, made: Path = made) -> None:
                import training_rank

                arguments = (str(path), str(made), "4", "2", "-1")
                os.environ["KILLED_RANK"] = f"{before - 1} {step} {made / 'killed'}"
                try:
                    notebook_launch(training_rank.main, arguments, before)
                except LaunchFailed:
                    assert (made / "killed").exists(), "no rank was killed"
                notebook_launch(training_rank.main, arguments, after)
                (record,) = made.glob("0-*.json")
                counts = json.loads(record.read_text())["history"]
                assert counts == [[1] * len(rows)] * 2, f"samples are missing or repeated: {counts}"

            case = f"one of {before} ranks after step {step}, resumed on {after}"
            yield attempt(case, work, refusals=ColabkitError, seconds=300.0)
