"""Panel states, and fakes of the panel's inputs and screen, for the tests and pictures of the panel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from colabkit.foundation import Frame, GpuSnapshot, HostSnapshot, LoaderMeters, Progress, StepTimes
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


def hosts_of(count: int, gpus: int = 1) -> tuple[HostSnapshot, ...]:
    """Return snapshots of a machine that reads and writes, one per second."""
    gpu_curve, cpu_curve = wave(count, 0.5, 0.3), wave(count, 0.8, 0.15)
    return tuple(
        replace(
            HOST,
            at_s=float(second),
            cpu_rate=cpu_curve[second],
            disk_read_bytes_per_s=54e6 + 9e6 * gpu_curve[second],
            disk_written_bytes_per_s=2e6 * cpu_curve[second],
            network_bytes_per_s=12e6 * cpu_curve[second],
            network_sent_bytes_per_s=3e5,
            gpus=tuple(replace(GPU, utilization_rate=(gpu_curve[second] + 0.2 * gpu) % 1) for gpu in range(gpus)),
        )
        for second in range(count)
    )


def epochs_of(count: int, overfits: bool = False) -> tuple[tuple[int, dict[str, float]], ...]:
    """Return the values of epochs whose losses fall, or whose validation loss rises again after a third of them."""
    found = []
    for epoch in range(1, count + 1):
        loss = 2.3 * math.exp(-3 * epoch / count)
        rise = 1.2 * max(0.0, epoch / count - 1 / 3) if overfits else 0.0
        accuracy = 1 - loss / 2.6
        found.append(
            (
                epoch,
                {
                    "loss": loss,
                    "accuracy": accuracy,
                    "val_loss": 0.2 + loss * 0.95 + rise,
                    "val_accuracy": accuracy - 0.05 - rise / 8,
                },
            )
        )
    return tuple(found)


RUNNING = PanelState(
    phase="running",
    epoch=8,
    epochs=30,
    step=814,
    steps_per_epoch=1250,
    elapsed_s=412.0,
    remaining_s=1863.0,
    diagnosis=DIAGNOSIS,
    samples_per_s=482.0,
    data_bytes_per_s=54e6,
    queue_rate=0.04,
    values={"loss": 0.8431, "accuracy": 0.7244, "lr": 0.001},
    validation={"val_loss": 1.02, "val_accuracy": 0.69},
    epoch_values=epochs_of(7),
    host=hosts_of(60)[-1],
    hosts=hosts_of(60),
    speed_curve=wave(60, 480, 90),
    data_curve=wave(60, 54e6, 9e6),
    loss_curve=wave(240, 2, 0.5),
    cost_share=0.0018,
    at_s=1.8e9,
)
EMPTY = PanelState("starting")
STARTING = replace(EMPTY, host=HOST, at_s=1.8e9)
FINISHED = replace(
    RUNNING,
    phase="finished",
    epoch=30,
    step=1250,
    elapsed_s=2311.0,
    remaining_s=None,
    epoch_values=epochs_of(30),
    hosts=hosts_of(600),
    speed_curve=wave(240, 480, 90),
)
OVERFITTING = Advice(
    rule="overfitting",
    found="the validation loss has risen from 0.8 after epoch 10 to 1.7, while the training loss falls",
    action="Stop when the validation loss no longer falls, or augment the images",
    call="colabkit.train(..., to=..., patience=3)",
)
GOOD = replace(
    DIAGNOSIS,
    verdict="compute",
    sentence="Data keeps up: the step itself takes 97% of the time",
    shares=Shares(0.01, 0.01, 0.97, 0.01),
    advice=(),
)
STAGING = replace(
    EMPTY,
    phase="running",
    work=Progress("stage", 1_400_000_000, 3_700_000_000, "B", "812/2,000 files, 3 retries", 61.0),
    work_per_s=23e6,
    work_curve=wave(60, 23e6, 6e6),
    elapsed_s=61.0,
    remaining_s=104.0,
    host=hosts_of(60, 0)[-1],
    hosts=hosts_of(60, 0),
    cost_share=0.001,
    at_s=1.8e9,
)
PACKING = replace(
    STAGING,
    work=Progress("pack", 812, 2000, " samples", "", 31.0),
    work_per_s=212.0,
    work_curve=wave(60, 212, 40),
    remaining_s=None,
)
NO_GPU = replace(HOST, gpus=())
STATES = {
    "running": RUNNING,
    "empty": EMPTY,
    "starting": STARTING,
    "measuring": replace(
        STARTING,
        phase="running",
        epoch=1,
        epochs=30,
        step=12,
        steps_per_epoch=1250,
        elapsed_s=3.0,
        samples_per_s=310.0,
        values={"loss": 2.31},
        loss_curve=(2.4, 2.31),
        diagnosis=replace(
            DIAGNOSIS, verdict="unknown", sentence="Measuring the first steps: 8 of 50", advice=(), steps=8
        ),
    ),
    "first epoch": replace(RUNNING, epoch=1, epoch_values=(), validation={}, remaining_s=None, epoch_remaining_s=95.0),
    "staging": STAGING,
    "packing": PACKING,
    "staged": replace(STAGING, phase="finished"),
    "waiting": replace(RUNNING, phase="waiting", waiting_s=3.21),
    "finished": FINISHED,
    "stopped": replace(FINISHED, phase="stopped", stopped_by="KeyboardInterrupt", epoch=4),
    "failed": replace(FINISHED, phase="stopped", stopped_by="TrainingDiverged", epoch=4),
    "no GPU": replace(RUNNING, host=hosts_of(60, 0)[-1], hosts=hosts_of(60, 0)),
    "2 GPUs": replace(RUNNING, host=hosts_of(60, 2)[-1], hosts=hosts_of(60, 2), is_remote=True),
    "8 GPUs": replace(RUNNING, host=hosts_of(60, 8)[-1], hosts=hosts_of(60, 8)),
    "no machine": replace(RUNNING, host=None, hosts=()),
    "no advice": replace(RUNNING, diagnosis=GOOD),
    "overfitting": replace(
        RUNNING,
        epoch=30,
        epoch_values=epochs_of(29, True),
        diagnosis=replace(GOOD, sentence=f"The model overfits. {GOOD.sentence}", advice=(OVERFITTING,)),
    ),
    "full RAM": replace(RUNNING, host=replace(HOST, ram_used_bytes=12 * GIB)),
    "no end": replace(RUNNING, epochs=None, steps_per_epoch=None, remaining_s=None),
    "dead": replace(RUNNING, headline="No news for 3 min: the process has ended. Train again to resume."),
}


def render(state: PanelState) -> tuple[str, str]:
    return as_html(state), as_text(state)


class Frames:
    def __init__(self) -> None:
        self.frames: list[tuple[str, str, bool]] = []
        self.is_closed = False

    def paint(self, frame: Frame, final: bool) -> None:
        self.frames.append((frame.html, frame.text, final))

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


class ScriptedClock:
    """A clock that reports simulated steps."""

    def __init__(self, steps: Sequence[StepTimes]) -> None:
        self.steps = list(steps)
        self.left_s = 0.0

    def settled(self) -> list[StepTimes]:
        steps, self.steps = self.steps, []
        return steps


def took(counts: LoaderMeters, steps: int, wait_s: float, compute_s: float, samples: int = 4) -> None:
    """Record steps that each waited and computed for the given number of seconds."""
    counts.batches += steps
    counts.samples += steps * samples
    counts.settle(ScriptedClock([StepTimes(wait_s, 0.0, compute_s, 0.0, samples)] * steps))


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
