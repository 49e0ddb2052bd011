"""What the panel shows at one instant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from colabkit.foundation import GpuSnapshot, HostSnapshot
from colabkit.monitoring.doctor.diagnosis import Diagnosis

Phase: TypeAlias = Literal["starting", "running", "waiting", "finished", "stopped"]


@dataclass(frozen=True, slots=True)
class PanelState:
    """Everything that `render` draws; what is not known is None, and a curve without points is empty.

    Curves run from the oldest point to the newest: over the last minute while a run goes on, over all of it afterwards.
    That of the losses is always over all of it.

    Attributes:
        phase: where the run stands; `"waiting"` is for a batch.
        stopped_by: name of the error that stopped the run.
        epoch: number of the epoch, from 1.
        epochs: how many there will be.
        step: steps done in this epoch.
        steps_per_epoch: steps of an epoch.
        elapsed_s: seconds since the start.
        remaining_s: seconds that are left at the pace so far.
        waiting_s: for how long the loop has been waiting for a batch.
        diagnosis: what the doctor says.
        samples_per_s: samples a second, of the last seconds while running, else of all; the next ones likewise.
        data_bytes_per_s: bytes a second that the loader read or, where it counts no reads, gathered.
        queue_rate: how full the queue of ready batches was, in [0, 1].
        values: what a step returned lately.
        host: the machine.
        gpu_number: which of the machine's GPUs the batches go to.
        load_curve: utilisation of that GPU or, without one, of the CPUs, in [0, 1].
        speed_curve: samples a second.
        data_curve: bytes a second.
        queue_curve: how full the queue was.
        loss_curve: the losses.
        cost_share: share of the time that the panel itself takes, its measuring included.
    """

    phase: Phase
    stopped_by: str | None = None
    epoch: int | None = None
    epochs: int | None = None
    step: int = 0
    steps_per_epoch: int | None = None
    elapsed_s: float = 0.0
    remaining_s: float | None = None
    waiting_s: float = 0.0
    diagnosis: Diagnosis | None = None
    samples_per_s: float | None = None
    data_bytes_per_s: float | None = None
    queue_rate: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    host: HostSnapshot | None = None
    gpu_number: int = 0
    load_curve: tuple[float, ...] = ()
    speed_curve: tuple[float, ...] = ()
    data_curve: tuple[float, ...] = ()
    queue_curve: tuple[float, ...] = ()
    loss_curve: tuple[float, ...] = ()
    cost_share: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.phase in ("finished", "stopped")

    @property
    def gpu(self) -> GpuSnapshot | None:
        """The GPU that the batches go to; None where there is none."""
        gpus = self.host.gpus if self.host else ()
        return gpus[self.gpu_number if self.gpu_number < len(gpus) else 0] if gpus else None
