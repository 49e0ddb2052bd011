"""Panel states, and fakes of the panel's inputs and screen, for the tests and pictures of the panel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from colabkit.foundation import GpuSnapshot, HostSnapshot, LoaderMeters, StepTimes
from colabkit.monitoring.diagnosing.diagnosis import Advice, Diagnosis, Shares
from colabkit.monitoring.panel.content import PanelState
from colabkit.monitoring.panel.html import as_html
from colabkit.monitoring.panel.text import as_text

GIB = 1 << 30
GPU = GpuSnapshot(uuid="GPU-1", name="Tesla T4", utilization_rate=0.47, used_bytes=10 * GIB, total_bytes=15 * GIB)
HOST = HostSnapshot(
    at_s=1.0,
    cpus=2,
    cpu_rate=0.93,
    ram_used_bytes=6 * GIB,
    ram_total_bytes=12 * GIB,
    tmpfs_bytes=2 * GIB,
    disk_free_bytes=70 * GIB,
    disk_total_bytes=108 * GIB,
    shm_free_bytes=4 * GIB,
    shm_total_bytes=6 * GIB,
    gpus=(GPU,),
)
ADVICE = Advice(
    rule="decode",
    found="decoding takes 61% of the step",
    action="Store the images decoded and resized once, then read them without decoding.",
    call="colabkit.pack('drive:birds', 'birds.h5', encoding='raw', size=224)",
    samples_per_s=1490.0,
)
DIAGNOSIS = Diagnosis(
    verdict="data",
    sentence="Training waits for data 61% of the time: decoding is the limit",
    shares=Shares(0.61, 0.03, 0.33, 0.03),
    step_s=0.2,
    samples_per_s=480.0,
    ceiling_samples_per_s=1490.0,
    bottleneck="decode",
    advice=(ADVICE,),
    steps=300,
)


def wave(points: int, middle: float, height: float) -> tuple[float, ...]:
    """Return a deterministic curve without equal neighbors."""
    return tuple(middle + height * math.sin(number / 3) + height / 3 * math.sin(2 * number) for number in range(points))


RUNNING = PanelState(
    phase="running",
    epoch=2,
    epochs=10,
    step=814,
    steps_per_epoch=1250,
    elapsed_s=412.0,
    remaining_s=1863.0,
    diagnosis=DIAGNOSIS,
    samples_per_s=482.0,
    data_bytes_per_s=54e6,
    queue_rate=0.04,
    values={"loss": 0.8431, "accuracy": 0.7244},
    host=HOST,
    load_curve=wave(60, 0.5, 0.3),
    speed_curve=wave(60, 480, 90),
    data_curve=wave(60, 54e6, 9e6),
    queue_curve=wave(60, 0.3, 0.2),
    loss_curve=wave(240, 2, 0.5),
    cost_share=0.0018,
)
EMPTY = PanelState("starting")
FINISHED = replace(RUNNING, phase="finished", epoch=10, step=1250, elapsed_s=2311.0, load_curve=wave(600, 0.5, 0.3))
STATES = {
    "running": RUNNING,
    "empty": EMPTY,
    "waiting": replace(RUNNING, phase="waiting", waiting_s=3.21),
    "finished": FINISHED,
    "stopped": replace(FINISHED, phase="stopped", stopped_by="KeyboardInterrupt", epoch=4),
    "no GPU": replace(RUNNING, host=replace(HOST, gpus=())),
    "no machine": replace(RUNNING, host=None, load_curve=()),
    "no advice": replace(RUNNING, diagnosis=replace(DIAGNOSIS, advice=(), verdict="compute")),
    "full RAM": replace(RUNNING, host=replace(HOST, ram_used_bytes=12 * GIB)),
    "no end": replace(RUNNING, epochs=None, steps_per_epoch=None, remaining_s=None),
}


def render(state: PanelState) -> tuple[str, str]:
    return as_html(state), as_text(state)


class Frames:
    def __init__(self) -> None:
        self.frames: list[tuple[str, str, bool]] = []
        self.is_closed = False

    def paint(self, html: str, text: str, final: bool) -> None:
        self.frames.append((html, text, final))

    def close(self) -> None:
        self.is_closed = True


class Machine:
    """A fake sampler that returns a fixed state of the machine."""

    cost_share = 0.001

    def __init__(self, hosts: Sequence[HostSnapshot] = (HOST,)) -> None:
        self.hosts = tuple(hosts)

    @property
    def latest(self) -> HostSnapshot | None:
        return self.hosts[-1] if self.hosts else None

    def recent(self, seconds: float) -> tuple[HostSnapshot, ...]:
        return self.hosts[-3:]

    def curve(self) -> tuple[HostSnapshot, ...]:
        return self.hosts


@contextmanager
def machine() -> Iterator[Machine]:
    yield Machine()


class ToldClock:
    """A clock that reports steps that never happened."""

    def __init__(self, steps: Sequence[StepTimes]) -> None:
        self.steps = list(steps)
        self.left_s = 0.0

    def settled(self) -> list[StepTimes]:
        steps, self.steps = self.steps, []
        return steps


def took(counts: LoaderMeters, steps: int, wait_s: float, compute_s: float, samples: int = 4) -> None:
    """Count steps that each waited and computed for this many seconds."""
    counts.batches += steps
    counts.samples += steps * samples
    counts.settle(ToldClock([StepTimes(wait_s, 0.0, compute_s, 0.0, samples)] * steps))


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
