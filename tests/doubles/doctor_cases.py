"""Test cases for the doctor: each sets only the relevant values; all others are normal or unknown."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

import colabkit
from colabkit.foundation import (
    GpuSnapshot,
    HostSnapshot,
    LoaderFacts,
    LoopSpot,
    MetersSnapshot,
    PartSnapshot,
    StepTimes,
    Stretch,
    ThreadsSnapshot,
)
from colabkit.monitoring.diagnosing.diagnosis import Advice
from colabkit.monitoring.diagnosing.run_profile import RunProfile, profile_run

GIB = 1 << 30
GATHERED = LoaderFacts("gathered", samples=50_000, batch_size=64, workers=1, encoding="raw", tier="ram")
DECODED = LoaderFacts(
    "decoded",
    samples=50_000,
    batch_size=64,
    workers=2,
    sample_bytes=20_000.0,
    path="/data/birds",
    is_remote=False,
    files=50_000,
    encoding="encoded",
    tier="source",
)
DRIVE = replace(DECODED, path="/content/drive/MyDrive/birds", is_remote=True)
PROCESSES = LoaderFacts(
    "processes", samples=50_000, batch_size=64, workers=2, encoding="python", tier="source", keeps_workers=False
)
FOREIGN = LoaderFacts("foreign", samples=50_000, batch_size=64, workers=2, encoding="python", keeps_workers=True)
ON_GPU = replace(GATHERED, device="cuda:0", is_pinned=True)

_CALLS = (colabkit.Loader, DataLoader, colabkit.supervised_step, colabkit.train, colabkit.dashboard)
_OWN = {"loader", "data", "model"}
_ASSIGNED = _OWN | {name for one in _CALLS for name in inspect.signature(one).parameters}

QUIET = HostSnapshot(
    at_s=1.0,
    cpus=4.0,
    cpu_rate=0.3,
    own_cpu_rate=0.28,
    busiest_core_rate=0.4,
    ram_used_bytes=4 * GIB,
    ram_total_bytes=12 * GIB,
    tmpfs_bytes=0,
    storage_read_bytes_per_s=0.0,
    disk_read_bytes_per_s=0.0,
    network_bytes_per_s=0.0,
    disk_free_bytes=60 * GIB,
    disk_total_bytes=100 * GIB,
    shm_free_bytes=6 * GIB,
    shm_total_bytes=6 * GIB,
    io_stall_rate=0.0,
    memory_stall_rate=0.0,
)
FULL = replace(QUIET, cpu_rate=0.98, own_cpu_rate=0.97, busiest_core_rate=1.0)
T4 = GpuSnapshot(
    uuid="GPU-1",
    name="Tesla T4",
    utilization_rate=0.95,
    used_bytes=12 * GIB,
    total_bytes=16 * GIB,
    torch_bytes=10 * GIB,
    torch_reserved_bytes=11 * GIB,
)


COMPUTES = LoopSpot("train.py:10 in step", "loss.backward()", "compute", 20, 0)
SLEEPS = LoopSpot("train.py:20 in step", "time.sleep(0.02)", "call", 30, 30)
LOGS = LoopSpot("train.py:30 in log_images", "figure.savefig(path)", "aside", 30, 0)
THREADS = ThreadsSnapshot(
    training_cpu_rate=0.95,
    training_held_rate=0.01,
    held_rate=0.02,
    compute_cpus=0.9,
    busiest_thread="colabkit-telemetry",
    busiest_thread_rate=0.005,
    gil_wait_s=1e-5,
)
# The training thread sleeps most of the time, and no other thread computes meanwhile.
ASLEEP = replace(THREADS, training_cpu_rate=0.2, compute_cpus=0.05, spots=(SLEEPS, COMPUTES))
HELD_BY_THREAD = replace(ASLEEP, busiest_thread="refresher", busiest_thread_rate=0.9, gil_wait_s=0.005)


def with_threads(threads: ThreadsSnapshot = THREADS, host: HostSnapshot = QUIET, **changes: Any) -> HostSnapshot:
    """Return a snapshot of the host with the given threads; `changes` replace their fields."""
    return replace(host, threads=replace(threads, **changes))


def stretches_of(*paces: float, samples: int = 64, seconds: float = 10.0) -> tuple[Stretch, ...]:
    """Return stretches of a run in which a step took the given seconds."""
    return tuple(Stretch(round(seconds / pace), round(seconds / pace) * samples, seconds, 0.0) for pace in paces)


def with_gpu(host: HostSnapshot = QUIET, **changes: Any) -> HostSnapshot:
    """Return a snapshot of the host with a T4; `changes` replace fields of the T4's snapshot."""
    return replace(host, gpus=(replace(T4, **changes),))


def steps_of(
    wait: float = 0.0,
    copy: float = 0.0,
    compute: float = 0.1,
    other: float = 0.0,
    samples: int = 64,
    count: int = 100,
    cpu: float | None = None,
) -> list[StepTimes]:
    """Return equal steps with the given times in seconds; the first one begins a pass over the data."""
    return [StepTimes(wait, copy, compute, other, samples, number == 0, cpu) for number in range(count)]


def part(
    name: str, busy_s: float, cpu_s: float = 0.0, wait_s: float = 0.0, size: int = 0, samples: int = 6400
) -> PartSnapshot:
    """Return the snapshot of a loader part with the given seconds and bytes per sample."""
    return PartSnapshot(
        name, samples, size * samples, busy_s * samples, wait_s * samples, samples // 64, busy_s, cpu_s * samples
    )


def spent_of(steps: Sequence[StepTimes], **more: Any) -> MetersSnapshot:
    """Return the snapshot of meters that have timed the given steps."""
    counted: dict[str, Any] = {
        "batches": len(steps),
        "samples": sum(step.samples for step in steps),
        "wait_s": sum(step.wait_s for step in steps),
        "copy_s": sum(step.copy_s for step in steps),
        "compute_s": sum(step.compute_s for step in steps),
        "other_s": sum(step.other_s for step in steps),
        "first_s": sum(step.wait_s for step in steps if step.is_first),
        "passes": 1,
        "steps": len(steps),
        "recent": tuple(steps[-512:]),
    }
    return MetersSnapshot(**{**counted, **more})


def made(
    *,
    steps: Sequence[StepTimes] | None = None,
    facts: LoaderFacts | None = GATHERED,
    parts: Sequence[PartSnapshot] = (),
    host: HostSnapshot | None = QUIET,
    precision: str | None = None,
    cost_share: float | None = None,
    wait: float = 0.0,
    copy: float = 0.0,
    compute: float = 0.1,
    other: float = 0.0,
    samples: int = 64,
    cpu: float | None = None,
    epochs: Sequence[tuple[int, Mapping[str, float]]] = (),
    values: Mapping[str, float] | None = None,
    **more: Any,
) -> RunProfile:
    """Return the profile of a run with `steps`, or with equal steps of the given times; `more` sets other meters."""
    taken = steps_of(wait, copy, compute, other, samples, cpu=cpu) if steps is None else steps
    spent = spent_of(taken, **{"parts": tuple(parts), **more})
    hosts = [] if host is None else [host] * 3
    run = profile_run(spent, facts, hosts, cost_share=cost_share, precision=precision)
    return replace(run, epochs=epochs, values=values or {})


def epochs_of(**curves: Sequence[float]) -> list[tuple[int, dict[str, float]]]:
    """Return epochs with the given values, such as `loss=[...], val_loss=[...]`."""
    return [
        (number, dict(zip(curves, values, strict=True)))
        for number, values in enumerate(zip(*curves.values(), strict=True), 1)
    ]


def check_advice(advice: Advice) -> None:
    """Check the text of advice, and that its call is valid Python."""
    for text in (advice.found, advice.action):
        assert not re.search(r"None|nan|inf\b|\.\.\.|  |\b1 (workers|CPUs|files|samples|reads)\b| by $", text), text
        assert not text.endswith("."), text
        # A message joins `found` and `action` with a colon, so neither may contain one.
        assert ": " not in text, text
    assert advice.action[0].isupper(), advice
    assert "..." not in advice.call, advice
    assert advice.samples_per_s is None or 0 <= advice.samples_per_s < float("inf"), advice
    if advice.samples_per_s is not None:
        assert advice.low_samples_per_s <= advice.samples_per_s <= advice.high_samples_per_s < float("inf"), advice
    check_call(advice.call)


_CALLED = (
    "model.to",
    "model.parameters",
    "torch.compile",
    "torch.nn.utils.clip_grad_norm_",
    "torch.set_num_threads",
)


def check_call(text: str) -> None:
    """Check that calls of colabkit exist and accept their arguments; assigned names are options or the user's names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name not in _CALLED:
                _check_arguments(name, node)
        if isinstance(node, ast.Assign):
            assert {ast.unparse(target) for target in node.targets} <= _ASSIGNED, text


def _check_arguments(name: str, call: ast.Call) -> None:
    assert name.startswith("colabkit."), name
    thing: Any = colabkit
    for word in name.split(".")[1:]:
        thing = getattr(thing, word)
    values = {keyword.arg or "": keyword.value for keyword in call.keywords}
    inspect.signature(thing).bind(*call.args, **values)
