"""Rules about the step and the machine: GPU copies, batch size, other host work, and risks that may end the run."""

from __future__ import annotations

from colabkit.foundation import (
    Code,
    Phrase,
    Text,
    call,
    current_place,
    format_bytes,
    format_fill,
    format_seconds,
    format_share,
    format_things,
    in_python,
    option,
)
from colabkit.monitoring.diagnosing.diagnosis import HIGH, Advice
from colabkit.monitoring.diagnosing.forecast import predict_speed
from colabkit.monitoring.diagnosing.remedies import options
from colabkit.monitoring.diagnosing.run_profile import RunProfile

_EXPOSED_COPY = 0.05
# Copies below this speed, in bytes/s, count as slow; a T4 copies about 12 GB/s from pinned memory.
_SLOW_LINK = 4e9
_IDLE_GPU, _BUSY_GPU = 0.5, 0.9
# NVML reports how busy a GPU was during the last second or less, so a shorter run may be over before it is seen.
_SEEN_S = 2.0
_OTHER_WORK = 0.10
_TINY_STEP_S, _TINY_BATCH = 0.005, 16
_ROOMY, _FULL = 0.5, 0.9
_TENSOR_CORES = frozenset(
    ("T4", "V100", "RTX", "A10", "A10G", "A30", "A40", "A100", "L4", "L40", "L40S", "H100", "H200", "GH200", "B200")
)
_SLOWED = 0.2
_SLOWED_BY = {"power": "its power limit"}
# Minimum GPU memory of other processes that is reported; CUDA itself takes a few hundred MiB per process.
_OTHERS_BYTES = 2 << 30
# The advice is to do host work, such as logging, only once in this number of steps.
_LOGGED = 100
# Advice on hosted machines, where other processes belong to this notebook or to the host.
_STOP_OWN = "Stop programs that this notebook started"
_RAM = 0.85
_SHM = 0.1
_DISK_BYTES = 2 << 30
_PANEL = 0.01
# In the first seconds, the panel's cost is ignored, since the panel is still adapting its frame rate.
_PANEL_SETTLED_S = 20.0


def pageable_copies(run: RunProfile) -> Advice | None:
    """Advise pinned memory for a third-party loader, which leaves the copies to the step."""
    if run.facts.kind != "foreign" or run.facts.is_pinned is not False or not run.is_on_gpu or run.is_starved:
        return None
    return Advice(
        "batches are in memory that is not pinned, so the step waits for their copies",
        "Let the loader pin its memory, and copy with non_blocking=True",
        options(pin_memory=True),
        confidence="low",
    )


def slow_copies(run: RunProfile) -> Advice | None:
    """Advise copying fewer bytes if the step waits for copies that are slow, or that already use pinned memory."""
    part = run.part("transfer")
    if run.shares.copy < _EXPOSED_COPY or not part.busy_s:
        return None
    rate = part.handled_bytes / part.busy_s
    if rate >= _SLOW_LINK and not run.facts.is_pinned:
        return None
    found = f"copies run at {format_bytes(rate)}/s and take {format_share(run.shares.copy)} of each step"
    fast = predict_speed(run, lambda costs: costs.samples_per_s(saved_s=run.step.copy_s))
    if run.facts.transform is not None:
        return Advice(found, "Copy fewer bytes, for example smaller images")
    normalize = Code("colabkit.augment.Normalize()")
    return Advice(found, "Copy uint8, and normalize on the GPU", options(transform=normalize), *fast)


def tiny_batches(run: RunProfile) -> Advice | None:
    """Advise larger batches if steps are so short that launch overhead dominates."""
    samples, seconds = run.step.samples, run.step.seconds
    if run.shares.wait >= HIGH or not 0 < samples <= _TINY_BATCH or not 0 < seconds <= _TINY_STEP_S:
        return None
    larger = _most_samples(run, 8 * samples)
    if larger <= samples:
        return None
    return Advice(
        f"a step of {format_things(samples, 'sample')} takes {format_seconds(seconds)}, much of it overhead that larger"
        " batches do not increase",
        "Use larger batches",
        options(batch_size=larger),
        check="images per second rise with the batch size",
    )


def _most_samples(run: RunProfile, samples: int) -> int:
    """Return a number of samples for a batch, limited to the number of samples of the dataset."""
    return samples if run.facts.samples is None else min(samples, run.facts.samples)


def launches(run: RunProfile) -> Advice | None:
    """Advise larger batches or `torch.compile` if the GPU is often idle although data is ready."""
    gpu = run.machine.gpu
    if not run.is_on_gpu or run.shares.wait >= HIGH or gpu is None or gpu.utilization_rate is None:
        return None
    if gpu.utilization_rate >= _IDLE_GPU or run.shares.compute < HIGH or run.spent.seconds < _SEEN_S:
        return None
    return Advice(
        f"the GPU is busy only {format_share(gpu.utilization_rate)} of the time although data is ready",
        "Use larger batches, or torch.compile and a fused optimizer if the step does not use them yet",
        options(compile=True) if _is_supervised(run) else "model = torch.compile(model)",
        check="a step with a larger batch_size takes only slightly longer",
    )


def _is_supervised(run: RunProfile) -> bool:
    """Return whether the step is a `supervised_step()`, whose precision is known."""
    return run.precision is not None


def host_work(run: RunProfile) -> Advice | None:
    """Advise less frequent logging if host work between steps, such as `on_step`, takes too long."""
    if run.shares.other < max(_OTHER_WORK, run.lost_to_thread):
        return None
    seconds = format_seconds(run.step.other_s)
    return Advice(
        f"work between steps takes {seconds} per step, {format_share(run.shares.other)} of the time",
        f"Do this work, such as logging or reading values in on_step, only in every {_LOGGED}th step",
        "",
        *predict_speed(run, lambda costs: costs.samples_per_s(saved_s=run.step.other_s * (1 - 1 / _LOGGED))),
        check="torch.cuda.set_sync_debug_mode('warn') reports lines that wait for the GPU" if run.is_on_gpu else "",
    )


def no_mixed_precision(run: RunProfile) -> Advice | None:
    """Advise mixed precision if a GPU with tensor cores computes in float32."""
    gpu = run.machine.gpu
    if not run.is_on_gpu or run.precision != "fp32" or gpu is None or run.shares.compute < HIGH:
        return None
    if gpu.name is None or not _TENSOR_CORES.intersection(gpu.name.replace("-", " ").split()):
        return None
    return Advice(
        f"{gpu.name} has tensor cores, which float32 does not use fully",
        "Use mixed precision, with amp= of supervised_step()",
        options(amp="auto"),
        check="compare headspace() with and without it",
    )


def room_on_the_gpu(run: RunProfile) -> Advice | None:
    """Advise larger batches if over half of the GPU's memory is free and the GPU is not fully used."""
    gpu = run.machine.gpu
    if not run.is_on_gpu or gpu is None or gpu.used is None or run.is_starved or gpu.used >= _ROOMY:
        return None
    if gpu.utilization_rate is None or gpu.utilization_rate >= _BUSY_GPU or not run.step.samples:
        return None
    larger = _most_samples(run, 2 * run.step.samples)
    if larger <= run.step.samples:
        return None
    return Advice(
        f"{format_share(1 - gpu.used)} of the GPU's memory is free",
        "Use larger batches",
        options(batch_size=larger),
        confidence="low",
        check="images per second rise with the batch size",
    )


def full_gpu(run: RunProfile) -> Advice | None:
    """Advise smaller batches if the GPU's memory is almost full."""
    gpu = run.machine.gpu
    if not run.is_on_gpu or gpu is None or gpu.used is None or gpu.used <= _FULL:
        return None
    return Advice(
        f"{format_share(gpu.used)} of the GPU's memory is in use",
        "Use smaller batches with accumulate= of supervised_step, or use mixed precision or activation checkpointing",
        options(batch_size=run.step.samples // 2) if run.step.samples > 1 else "",
    )


def slowed_gpu(run: RunProfile) -> Advice | None:
    """Advise better cooling, more power or another GPU if the GPU throttles its clocks."""
    gpu = run.machine.gpu
    if gpu is None or gpu.slowed <= _SLOWED or not gpu.slowed_by:
        return None
    why = " and ".join(_SLOWED_BY.get(name, name) for name in gpu.slowed_by)
    return Advice(
        f"the GPU lowered its clocks {format_share(gpu.slowed)} of the time because of {why}",
        "Restart the runtime to get another GPU"
        if current_place().is_for_one_notebook
        else "Raise the power limit with nvidia-smi --power-limit"
        if gpu.slowed_by == ("power",)
        else "Improve the cooling of the GPU",
    )


def lost_gpu(run: RunProfile) -> Advice | None:
    """Advise a restart if the GPU no longer responds."""
    gpu = run.machine.gpu
    if gpu is None or not gpu.is_lost:
        return None
    restarted = "runtime" if current_place().is_for_one_notebook else "machine"
    return Advice("the GPU no longer responds", f"Restart the {restarted}, and resume from the checkpoint")


def wrong_device(run: RunProfile) -> Advice | None:
    """Advise using the GPU if there is one but everything runs on the CPU."""
    gpu = run.machine.gpu
    if gpu is None or run.is_on_gpu or gpu.is_lost or (gpu.torch_bytes or 0) > 0 or (gpu.utilization_rate or 0) > 0.05:
        return None
    if not _can_torch_use_gpus():
        return Advice(
            "there is a GPU, but this build of torch cannot use it",
            "Install a build of torch with CUDA, see https://pytorch.org/get-started/locally, and restart Python",
            confidence="high",
        )
    if run.facts.kind == "foreign":
        found, batches = "there is a GPU without any tensor on it", "; then copy each batch in the loop"
        moving = "model.to('cuda')"
    else:
        found, batches = "there is a GPU, but batches stay on the CPU", ""
        moving = Phrase(("model.to('cuda')\n", options(device="cuda")))
    return Advice(found, f"Put the model and the batches on the GPU{batches}", moving, confidence="high")


def _can_torch_use_gpus() -> bool:
    import torch

    # `torch.cuda.is_available()` may initialize CUDA, which then fails in forked workers.
    return bool(torch.backends.cuda.is_built())


def others_on_the_gpu(run: RunProfile) -> Advice | None:
    """Report that other processes occupy the GPU's memory."""
    gpu = run.machine.gpu
    if not run.is_on_gpu or gpu is None or gpu.torch_bytes is None or (gpu.other_bytes or 0) < _OTHERS_BYTES:
        return None
    return Advice(
        f"other processes use {format_bytes(gpu.other_bytes or 0)} of the GPU's memory",
        _STOP_OWN if current_place().is_for_one_notebook else "Shut down other notebooks and kernels that use the GPU",
        confidence="low",
    )


def others_on_the_cpu(run: RunProfile) -> Advice | None:
    """Report that other processes use many of the CPUs while all CPUs are busy."""
    foreign, cpus = run.machine.foreign_cpus, run.machine.cpus
    if foreign is None or not run.has_foreign_load or not run.is_cpu_full or run.is_on_gpu:
        return None
    busiest = run.host.other_process
    name = "" if busiest is None else f", most of all {busiest.name}"
    found = f"other processes use {foreign:.1f} of {format_things(cpus, 'CPU')}{name}"
    if current_place().is_for_one_notebook:
        action = f"{_STOP_OWN}, and wait until files are sent to Drive"
        return Advice(found, action, confidence="high", check="!top -bn1 lists them")
    action = "Shut down other notebooks and programs on this machine"
    return Advice(found, action, confidence="high", check="the command top lists them")


def full_ram(run: RunProfile) -> Advice | None:
    """Warn if RAM is nearly full, since a process that runs out of RAM is killed without a message."""
    machine = run.machine
    if machine.ram_used is None or machine.ram_used <= _RAM or machine.ram_total_bytes is None:
        return None
    used = machine.ram_used * machine.ram_total_bytes
    found = f"{format_fill(used, machine.ram_total_bytes)} of RAM is in use"
    staged = (machine.tmpfs_bytes or 0) > 0.1 * machine.ram_total_bytes
    if staged:
        found += f", {format_bytes(machine.tmpfs_bytes or 0)} of it by tmpfs and shared memory"
    action: Text = "Free memory or use fewer workers"
    if staged:
        action = ("Remove staged data that is not in use with ", call("unstage"))
    return Advice(found, Phrase((action, ", since the process is killed without a message when RAM runs out")))


def full_shm(run: RunProfile) -> Advice | None:
    """Warn if `/dev/shm`, through which worker processes send batches, is nearly full."""
    free, workers = run.machine.shm_free, run.facts.workers or 0
    if free is None or free >= _SHM or not workers:
        return None
    if run.facts.kind not in ("processes", "foreign"):
        return None
    return Advice(
        f"{format_share(free)} of /dev/shm, which workers use to send batches, is free",
        "Use fewer workers or smaller batches, or remove data that is staged there",
        options(num_workers=workers // 2),
    )


def full_disk(run: RunProfile) -> Advice | None:
    """Warn if the local disk has little space left for checkpoints and staged data."""
    free = run.machine.disk_free_bytes
    if free is None or free >= _DISK_BYTES:
        return None
    return Advice(
        f"the local disk has {format_bytes(free)} free",
        Phrase(("Remove staged data that is not in use with ", call("unstage"), ", or keep fewer checkpoints")),
    )


def costly_panel(run: RunProfile) -> Advice | None:
    """Advise fewer frames if the panel takes over 1% of the time even after reducing its own frame rate."""
    if run.cost_share is None or run.cost_share <= _PANEL or run.spent.seconds < _PANEL_SETTLED_S:
        return None
    return Advice(
        f"the panel takes {format_share(run.cost_share)} of the time",
        Phrase(("Refresh the panel less often, with ", option("refresh_s"), in_python(" of dashboard()"))),
        options(refresh_s=30),
    )
