"""Rules about what may end the run: memory, shared memory, disk; and the panel's own cost."""

from __future__ import annotations

from colabkit.foundation import format_bytes, format_fill, format_share
from colabkit.monitoring.doctor.case import Case
from colabkit.monitoring.doctor.diagnosis import Advice
from colabkit.monitoring.doctor.rules.rule import Rule

_RAM = 0.85
_SHM = 0.1
_DISK_BYTES = 2 << 30
_PANEL = 0.01
_PANEL_SETTLED_S = 20.0  # its first frames are the nearest; a costly one doubles the time to the next, up to 8 s


def full_ram(case: Case) -> Advice | None:
    """RAM is nearly full: the kernel kills without a message."""
    machine = case.machine
    if machine.ram_used is None or machine.ram_used <= _RAM or machine.ram_total_bytes is None:
        return None
    used = machine.ram_used * machine.ram_total_bytes
    found = f"{format_fill(used, machine.ram_total_bytes)} of RAM is in use"
    staged = (machine.tmpfs_bytes or 0) > 0.1 * machine.ram_total_bytes
    if staged:
        found += f", {format_bytes(machine.tmpfs_bytes or 0)} of it by files in tmpfs"
    action = "Give staged data back" if staged else "Free memory or use fewer workers"
    call = "colabkit.unstage(...)" if staged else ""
    return Advice("full_ram", found, f"{action}, since at the limit the kernel is killed without a message", call)


def full_shm(case: Case) -> Advice | None:
    """Shared memory, through which worker processes send batches, is nearly full."""
    free, workers = case.machine.shm_free, case.facts.workers or 0
    if free is None or free >= _SHM or not workers:
        return None
    if case.facts.kind not in ("processes", "foreign"):
        return None
    return Advice(
        "full_shm",
        f"{format_share(free)} of /dev/shm is left, through which workers send batches",
        "Use fewer workers or smaller batches, or give back what is staged there",
        f"num_workers={workers // 2}",
    )


def full_disk(case: Case) -> Advice | None:
    """Hardly any room is left for checkpoints and staged data."""
    free = case.machine.disk_free_bytes
    if free is None or free >= _DISK_BYTES:
        return None
    return Advice(
        "full_disk",
        f"{format_bytes(free)} is left on the local disk",
        "Give staged data back, or keep fewer checkpoints",
        "colabkit.unstage(...)",
    )


def costly_panel(case: Case) -> Advice | None:
    """Watching takes more than a hundredth of the time, also after the panel has slowed down by itself."""
    if case.cost_share is None or case.cost_share <= _PANEL or case.spent.seconds < _PANEL_SETTLED_S:
        return None
    return Advice(
        "costly_panel",
        f"the panel takes {format_share(case.cost_share)} of the time",
        "Let it paint less often",
        "colabkit.dashboard(refresh_s=30)",
    )


SAFETY_RULES: tuple[Rule, ...] = (full_ram, full_shm, full_disk, costly_panel)
