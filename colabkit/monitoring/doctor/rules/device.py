"""Rules about copies to the device, the step on it, and the host's other work."""

from __future__ import annotations

from colabkit.foundation import format_bytes, format_seconds, format_share, format_things
from colabkit.monitoring.doctor.case import Case
from colabkit.monitoring.doctor.diagnosis import HIGH, Advice
from colabkit.monitoring.doctor.rules.rule import Rule
from colabkit.monitoring.doctor.what_if import forecast_of

_EXPOSED_COPY = 0.05
_SLOW_LINK = 4e9  # bytes a second; a T4 copies about 12 GB/s from page-locked memory
_IDLE_GPU, _BUSY_GPU = 0.5, 0.9
_OTHER_WORK = 0.10
_TINY_STEP_S, _TINY_BATCH = 0.005, 16
_ROOMY, _FULL = 0.5, 0.9
_TENSOR_CORES = frozenset(
    ("T4", "V100", "RTX", "A10", "A10G", "A30", "A40", "A100", "L4", "L40", "L40S", "H100", "H200", "GH200", "B200")
)
_SLOWED = 0.2
_SLOWED_BY = {"power": "its power limit"}
_OTHERS_BYTES = 2 << 30  # what CUDA itself takes is a few hundred MiB for each process
_ON_GPU = "model.to('cuda'); colabkit.Loader(..., device='cuda')"
_FOREIGN_CPUS = 0.25  # of those that may be used


def pageable_copies(case: Case) -> Advice | None:
    """Batches are copied out of memory that is not page-locked, where the step waits for them."""
    is_foreign = case.facts.kind == "foreign"  # which copies within the step
    if case.facts.is_pinned is not False or not case.is_on_gpu:
        return None
    if is_foreign and not case.is_starved:
        return Advice(
            "pageable_copies",
            "batches come from memory that is not page-locked, so the step waits for their copies",
            "Let the loader lock its pages, and copy with non_blocking=True",
            "pin_memory=True",
            confidence="low",
        )
    if case.shares.copy < _EXPOSED_COPY:
        return None
    return Advice(
        "pageable_copies",
        f"copies to the GPU take {format_share(case.shares.copy)} of each step, and nothing hides them",
        "Copy ahead, from page-locked memory, on a stream of its own",
        "colabkit.Loader(..., device='cuda')",
        forecast_of(case).samples_per_s(saved_s=case.step.copy_s),
    )


def slow_copies(case: Case) -> Advice | None:
    """Copies take long: too many bytes, or too many small ones."""
    part = case.part("transfer")
    if case.shares.copy < _EXPOSED_COPY or not part.busy_s:
        return None
    rate = part.handled_bytes / part.busy_s
    if rate >= _SLOW_LINK and not case.facts.is_pinned:
        return None
    action, keep = "Send uint8 and normalise on the GPU", ""
    if case.machine.gpu is not None and case.machine.gpu.used is not None and case.machine.gpu.used < _ROOMY:
        action, keep = f"{action}, or keep the data there", "keep='gpu', "
    return Advice(
        "slow_copies",
        f"copies run at {format_bytes(rate)}/s and take {format_share(case.shares.copy)} of each step",
        action,
        f"colabkit.Loader(..., device='cuda', {keep}transform=colabkit.augment.Normalize())",
        forecast_of(case).samples_per_s(saved_s=case.step.copy_s),
    )


def tiny_batches(case: Case) -> Advice | None:
    """Steps are so short that what comes around them counts most."""
    samples, seconds = case.step.samples, case.step.seconds
    if case.shares.wait >= HIGH or not 0 < samples <= _TINY_BATCH or not 0 < seconds <= _TINY_STEP_S:
        return None
    return Advice(
        "tiny_batches",
        f"a step of {format_things(samples, 'sample')} takes {format_seconds(seconds)}, much of it to launch it",
        "Use larger batches",
        f"batch_size={8 * samples}",
        check="images a second rise with the batch size",
    )


def launches(case: Case) -> Advice | None:
    """The GPU is idle though its stream always has work: kernels are too short."""
    gpu = case.machine.gpu
    if not case.is_on_gpu or case.shares.wait >= HIGH or gpu is None or gpu.utilization_rate is None:
        return None
    if gpu.utilization_rate >= _IDLE_GPU or case.shares.compute < HIGH:
        return None
    return Advice(
        "launches",
        f"the GPU works {format_share(gpu.utilization_rate)} of the time although data is there",
        "Use larger batches, torch.compile, channels_last, a fused optimizer",
        "colabkit.supervised_step(..., compile=True, channels_last=True)",
        check="a larger batch_size takes hardly longer",
    )


def host_work(case: Case) -> Advice | None:
    """Logging, `.item()`, checkpoints or the like hold the loop up between steps."""
    if case.shares.other < _OTHER_WORK:
        return None
    seconds = format_seconds(case.step.other_s)
    return Advice(
        "host_work",
        f"work between steps takes {seconds} each time, {format_share(case.shares.other)} in all",
        "Log, read values and save less often",
        "colabkit.train(..., save_to=..., save_every='5min')",
        forecast_of(case).samples_per_s(saved_s=case.step.other_s),
        check="torch.cuda.set_sync_debug_mode('warn') names lines that wait for the GPU" if case.is_on_gpu else "",
    )


def no_mixed_precision(case: Case) -> Advice | None:
    """A card with tensor cores computes in float32."""
    gpu = case.machine.gpu
    if not case.is_on_gpu or case.precision != "fp32" or gpu is None or case.shares.compute < HIGH:
        return None
    if gpu.name is None or not _TENSOR_CORES.intersection(gpu.name.replace("-", " ").split()):
        return None
    return Advice(
        "no_mixed_precision",
        f"{gpu.name} has tensor cores, and the step computes in float32",
        "Use mixed precision",
        "colabkit.supervised_step(..., amp='auto')",
        check="headspace() with and without it",
    )


def room_on_the_gpu(case: Case) -> Advice | None:
    """Half of the GPU's memory is free, and it is not always busy."""
    gpu = case.machine.gpu
    if not case.is_on_gpu or gpu is None or gpu.used is None or case.is_starved or gpu.used >= _ROOMY:
        return None
    if gpu.utilization_rate is None or gpu.utilization_rate >= _BUSY_GPU or not case.step.samples:
        return None
    return Advice(
        "room_on_the_gpu",
        f"{format_share(1 - gpu.used)} of the GPU's memory is free",
        "Use larger batches",
        f"batch_size={2 * case.step.samples}",
        confidence="low",
        check="images a second rise with the batch size",
    )


def full_gpu(case: Case) -> Advice | None:
    """Hardly any memory is left on the GPU."""
    gpu = case.machine.gpu
    if not case.is_on_gpu or gpu is None or gpu.used is None or gpu.used <= _FULL:
        return None
    return Advice(
        "full_gpu",
        f"{format_share(gpu.used)} of the GPU's memory is in use",
        "Use smaller batches with accumulate=, mixed precision or activation checkpointing",
        "colabkit.supervised_step(..., accumulate=2)",
    )


def slowed_gpu(case: Case) -> Advice | None:
    """The card itself holds its clocks down."""
    gpu = case.machine.gpu
    if gpu is None or gpu.slowed <= _SLOWED or not gpu.slowed_by:
        return None
    why = " and ".join(_SLOWED_BY.get(name, name) for name in gpu.slowed_by)
    return Advice(
        "slowed_gpu",
        f"the GPU's clocks were held down {format_share(gpu.slowed)} of the time by {why}",
        "Leave the code as it is, since the card itself holds back",
    )


def lost_gpu(case: Case) -> Advice | None:
    """The card does not answer any more."""
    gpu = case.machine.gpu
    if gpu is None or not gpu.is_lost:
        return None
    return Advice("lost_gpu", "the GPU does not answer any more", "Restart the runtime, and resume from the checkpoint")


def wrong_device(case: Case) -> Advice | None:
    """There is a GPU, and everything runs on the CPU."""
    gpu = case.machine.gpu
    if gpu is None or case.is_on_gpu or gpu.is_lost or (gpu.torch_bytes or 0) > 0 or (gpu.utilization_rate or 0) > 0.05:
        return None
    if case.facts.kind == "foreign":
        found, call = "there is a GPU that holds no tensor", "model.to('cuda'); batch.to('cuda')"
    else:
        found, call = "there is a GPU, and batches stay on the CPU", _ON_GPU
    return Advice(
        "wrong_device",
        found,
        "Put the model and the batches on the GPU",
        call,
        confidence="high",
    )


def others_on_the_gpu(case: Case) -> Advice | None:
    """Somebody else holds memory of the GPU."""
    gpu = case.machine.gpu
    if not case.is_on_gpu or gpu is None or gpu.torch_bytes is None or (gpu.other_bytes or 0) < _OTHERS_BYTES:
        return None
    return Advice(
        "others_on_the_gpu",
        f"{format_bytes(gpu.other_bytes or 0)} of the GPU's memory is held by others",
        "Restart other notebooks and kernels that use it",
        confidence="low",
    )


def others_on_the_cpu(case: Case) -> Advice | None:
    """Other processes take the CPU's time."""
    foreign, cpus = case.machine.foreign_cpus, case.machine.cpus
    if foreign is None or foreign < _FOREIGN_CPUS * cpus or not case.is_cpu_full or case.is_on_gpu:
        return None
    return Advice(
        "others_on_the_cpu",
        f"other processes use {foreign:.1f} of {format_things(cpus, 'CPU')}",
        "End other processes",
        "",
        confidence="high",
        check="top shows who they are",
    )


DEVICE_RULES: tuple[Rule, ...] = (
    pageable_copies,
    slow_copies,
    host_work,
    wrong_device,
    lost_gpu,
    others_on_the_cpu,
    tiny_batches,
    launches,
    no_mixed_precision,
    room_on_the_gpu,
    full_gpu,
    slowed_gpu,
    others_on_the_gpu,
)
