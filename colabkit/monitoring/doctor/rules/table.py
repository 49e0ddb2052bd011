"""The table of the doctor's rules.

To add a rule, write a function in `data` or `machine` and list it here. It looks at a run and returns advice, or None
where it has nothing to say; what is unknown is no reason to speak. The advice carries the function's name as `rule`.
`verdict` sorts the advice, and lists which rules contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from colabkit.monitoring.doctor.diagnosis import Advice
from colabkit.monitoring.doctor.rules import data, machine
from colabkit.monitoring.doctor.run_profile import RunProfile

Rule: TypeAlias = Callable[[RunProfile], Advice | None]

RULES: tuple[Rule, ...] = (
    machine.full_ram,
    machine.full_shm,
    machine.full_disk,
    machine.costly_panel,
    data.far_files,
    data.far_files_to_pack,
    data.small_files,
    data.slow_disk,
    data.slow_decoding,
    data.slow_transform,
    data.slow_foreign,
    data.more_workers,
    data.held_by_python,
    data.too_many_workers,
    data.slow_start,
    data.bursts,
    data.chunks_do_not_fit,
    data.cache_too_small,
    data.throttled,
    machine.pageable_copies,
    machine.slow_copies,
    machine.host_work,
    machine.wrong_device,
    machine.lost_gpu,
    machine.others_on_the_cpu,
    machine.tiny_batches,
    machine.launches,
    machine.no_mixed_precision,
    machine.room_on_the_gpu,
    machine.full_gpu,
    machine.slowed_gpu,
    machine.others_on_the_gpu,
)
