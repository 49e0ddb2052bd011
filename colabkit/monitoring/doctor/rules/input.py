"""Rules about the input: what data waits for, and where it should be instead."""

from __future__ import annotations

from colabkit.foundation import format_bytes, format_count, format_seconds, format_share, format_things
from colabkit.monitoring.doctor.case import Case
from colabkit.monitoring.doctor.diagnosis import HIGH, Advice
from colabkit.monitoring.doctor.rules.rule import Rule, is_hdf5, packing, quoted
from colabkit.monitoring.doctor.what_if import forecast_of

_SMALL_READ = 256 << 10
_IDLE = 0.6  # of the CPUs
_ROOMY_RAM = 0.85  # of the RAM may be in use after data was put there
_SLOW_START = 0.1
_BURSTY = 0.1
_THROTTLED = 2.0
_READ_TWICE = 2.0
_LEAST_LEFT = 0.1  # of the time, whatever is saved
_SIZING = ("ResizedCrop", "CenterCrop", "Resize")  # transforms that make large samples small
_LOAD_PACK = "colabkit.Loader(colabkit.open_pack('pack.h5')['train'], batch_size, shuffle=True)"


def far_files(case: Case) -> Advice | None:
    """Files are read from a mount or a network, one by one, in every epoch; or rows of a pack there."""
    path = quoted(case.facts.path)
    if not (case.is_starved and case.facts.is_far and case.bottleneck in ("read", "gather")):
        return None
    is_known = case.cpu_s is not None
    return Advice(
        "far_files",
        f"each epoch reads from {_place(case)}",
        f"Stage the {'file' if is_hdf5(case) else 'files'} to the local disk once",
        f"colabkit.stage({path})",
        _speed_near(case),
        confidence="medium" if is_known else "low",
        check=f"colabkit.read_probe({path}) tells what the mount can do; {_check(case)}",
    )


def far_files_to_pack(case: Case) -> Advice | None:
    """Files are far and many: one packed file saves opening them, and decoding them."""
    files, encoding = case.facts.files, case.facts.encoding
    if not (case.is_starved and case.facts.is_far) or encoding in (None, "raw") or is_hdf5(case) or files == 1:
        return None
    return Advice(
        "far_files_to_pack",
        f"each epoch opens {format_count(files) if files else 'many'} files far away",
        "Pack them into one file near, decoded, and keep that on Drive for the next time",
        f"colabkit.prepare({quoted(case.facts.path)}, size=..., encoding='raw')",
        forecast_of(case).from_rows(_row_bytes(case)),
        confidence="high" if case.cpu_s is not None else "medium",
        check=_check(case),
    )


def small_files(case: Case) -> Advice | None:
    """Many small files of a local disk cost a seek and an open each."""
    read, decode = case.part("read"), case.part("decode")
    if not case.is_starved or case.facts.is_far or not read.samples or case.facts.files is None:
        return None
    mean_bytes = read.handled_bytes / read.samples
    if mean_bytes >= _SMALL_READ or read.busy_s < 0.3 * (read.busy_s + decode.busy_s):
        return None
    return Advice(
        "small_files",
        f"reading a file of {format_bytes(mean_bytes)} takes {format_seconds(read.busy_s / read.samples)}",
        "Pack the files into one, decoded",
        packing(case),
        forecast_of(case).from_rows(_row_bytes(case)),
        check=_check(case),
    )


def slow_disk(case: Case) -> Advice | None:
    """Rows or files come from a disk that is not fast enough, and do not stay in memory."""
    if not case.is_starved or case.facts.is_far or case.is_cpu_full:
        return None
    stalled = case.machine.io_stall_rate
    is_reading = (case.machine.read_bytes_per_s or 0.0) > 0.3 * _needed_bytes_per_s(case) > 0
    if not is_reading or (stalled is not None and stalled < HIGH):
        return None
    found = f"the disk gives {format_bytes(case.machine.read_bytes_per_s or 0.0)}/s"
    if _fits_in_ram(case):
        return Advice(
            "slow_disk",
            found,
            "Keep the data in RAM, where it fits",
            f"colabkit.stage({quoted(case.facts.path)}, to='tmpfs')",
            forecast_of(case).without_loader(),
            check=_check(case),
        )
    return Advice(
        "slow_disk",
        found,
        "Store smaller samples, as uint8 and of the size that is trained on",
        packing(case),
        check="fewer bytes are read for each sample",
    )


def slow_decoding(case: Case) -> Advice | None:
    """The CPU decodes the same images in every epoch."""
    if not case.is_starved or case.bottleneck != "decode":
        return None
    part, is_kept = case.part("decode"), case.passes < 2 and case.facts.tier in ("gpu", "ram", "disk")
    later = "; later epochs take what this one keeps" if is_kept else ""
    return Advice(
        "slow_decoding",
        f"decoding a sample takes {format_seconds(part.busy_s / max(1, part.samples))}{_if_full(case)}{later}",
        "Store the images decoded, and of the size that is trained on",
        packing(case),
        forecast_of(case).from_rows(_row_bytes(case)),
        confidence="medium" if is_kept else "high",
        check=_check(case),
    )


def slow_transform(case: Case) -> Advice | None:
    """A transform or a data set in Python makes samples one by one."""
    waits = case.bottleneck == "read" and case.facts.kind == "processes" and not case.facts.is_far
    if not case.is_starved or not (waits or case.bottleneck in ("samples", "augment")):
        return None
    name = "augment" if case.bottleneck == "augment" else "samples"
    part, gpu = case.part(name), case.machine.gpu
    each = format_seconds(part.busy_s / max(1, part.samples))
    speed: float | None = None
    if name == "samples":
        found = f"making a sample in Python takes {each}{', most of it waiting for storage' * waits}"
        action = "Pack the samples, and transform whole batches with colabkit.augment"
        call = f"{packing(case)}; {_LOAD_PACK}"
        speed = forecast_of(case).from_rows(case.facts.sample_bytes)
    elif gpu is not None and not gpu.is_lost and not case.is_on_gpu:
        found, action = f"transforming a sample takes {each}", "Transform on the GPU"
        call, speed = "colabkit.Loader(..., device='cuda')", forecast_of(case).without_loader()
    elif any(word in (case.facts.transform or "") for word in _SIZING):
        found, action = f"transforming a sample takes {each}", "Store the samples at the size that is trained on"
        call = packing(case)
    else:
        return None
    return Advice("slow_transform", found + _if_full(case), action, call, speed, check=_check(case))


def slow_foreign(case: Case) -> Advice | None:
    """Another loader keeps the step waiting, and what it does inside is not known."""
    facts = case.facts
    if not case.is_starved or facts.kind != "foreign" or facts.is_far:
        return None
    found = "what the loader does inside is not known"
    if facts.workers == 0:
        found = "batches are made where the step runs, one after the other"
    elif case.is_cpu_full:
        found = "the loader is slow, and the CPU is full"
    elif case.machine.cpu_rate is not None and facts.workers:
        found = "the loader is slow although the CPU is not full, so its workers wait for the disk or for each other"
    if is_hdf5(case):
        action = "Load the file with colabkit.Loader"
        call = f"colabkit.Loader(colabkit.open_pack({quoted(facts.path)})['train'], batch_size, shuffle=True)"
    else:
        action = "Pack the samples once, decoded, and load them with colabkit.Loader"
        call = f"{packing(case)}; {_LOAD_PACK}"
    return Advice(
        "slow_foreign",
        found,
        action,
        call,
        forecast_of(case).from_rows(facts.sample_bytes),
        confidence="medium" if facts.workers else "low",
        check=_check(case),
    )


def more_workers(case: Case) -> Advice | None:
    """CPUs are idle while too few workers make batches."""
    facts, rate = case.facts, case.machine.cpu_rate
    if not case.is_starved or facts.workers is None or rate is None or rate >= _IDLE or facts.is_far:
        return None
    most = round(case.machine.cpus)
    one_transforms = facts.kind == "processes" and case.bottleneck == "augment"  # where batches are handed over
    if facts.workers >= most or facts.kind in ("gathered", "device") or one_transforms:
        return None
    # One worker's pace is known where it is all that is waited for, or the wait itself is the work.
    a_batch_s = case.step.seconds * facts.workers if facts.workers else case.step.wait_s
    speed = min(forecast_of(case).samples_per_s(workers=most), case.step.samples * most / max(a_batch_s, 1e-9))
    workers, cpus = format_things(facts.workers, "worker"), format_things(most, "CPU")
    return Advice(
        "more_workers",
        f"{workers} on {cpus}, of which {format_share(rate)} is busy",
        f"Use {format_things(most, 'worker')}",
        f"num_workers={most}",
        speed,
        check="the CPU's share rises",
    )


def held_by_python(case: Case) -> Advice | None:
    """One core is busy and others are not: threads wait for Python's lock."""
    machine = case.machine
    if not case.is_starved or machine.cpus < 2 or machine.busiest_core_rate is None or machine.cpu_rate is None:
        return None
    is_alone = machine.busiest_core_rate > 0.9 and machine.cpu_rate < 0.7
    if not is_alone or (case.facts.workers or 1) < 2 or case.facts.kind != "decoded":  # others work in processes
        return None
    return Advice(
        "held_by_python",
        "one core is busy and the others are not, so threads wait for Python's lock",
        "Make samples in processes, or with code that releases the lock",
        "",
        confidence="low",
    )


def too_many_workers(case: Case) -> Advice | None:
    """More workers than CPUs take each other's time."""
    facts = case.facts
    if not case.is_starved or facts.workers is None or not case.is_cpu_full or facts.is_far:
        return None
    most = max(1, round(case.machine.cpus))
    if facts.workers <= 2 * most:
        return None
    return Advice(
        "too_many_workers",
        f"{facts.workers} workers share {format_things(most, 'CPU')}",
        "Use as many workers as CPUs; more workers will not help",
        f"num_workers={most}",
        confidence="low",
    )


def slow_start(case: Case) -> Advice | None:
    """Each epoch begins with a long wait."""
    spent, facts = case.spent, case.facts
    if case.passes < 2 or not spent.seconds or facts.keeps_workers is not False:
        return None
    each_s = spent.first_s / max(1, spent.passes)
    if spent.first_s < _SLOW_START * spent.seconds or each_s < 10 * case.step.seconds:
        return None
    return Advice(
        "slow_start",
        f"the first batch of each epoch takes {format_seconds(each_s)}",
        "Keep the workers between epochs",
        "persistent_workers=True",
        case.samples_per_s / max(_LEAST_LEFT, 1 - spent.first_s / spent.seconds),
    )


def bursts(case: Case) -> Advice | None:
    """Data is there as a rule, but a few steps wait long."""
    facts = case.facts
    if case.shares.wait >= HIGH or case.late < _BURSTY or facts.is_far or facts.kind == "device":
        return None
    call = "prefetch_batches=64"
    if facts.kind == "foreign":
        call = "prefetch_factor=8" if facts.workers else ""
    return Advice(
        "bursts",
        f"a few long waits take {format_share(case.late)} of the time, though data is there as a rule",
        "Make more batches ahead; look for single large files, garbage collection, checkpoints",
        call,
        case.samples_per_s / max(_LEAST_LEFT, 1 - case.late),
        confidence="low",
        check="the longest waits in loader.meters.snapshot().recent",
    )


def chunks_do_not_fit(case: Case) -> Advice | None:
    """Far more is read than used: chunks of somebody else's HDF5 file, or pages of a pack that RAM cannot hold."""
    facts, gathered, read = case.facts, case.part("gather"), case.part("read")
    if not case.is_starved or facts.kind != "gathered" or not is_hdf5(case) or facts.tier not in ("disk", "source"):
        return None
    if facts.tier == "source":
        if case.bottleneck != "read" or not gathered.samples:
            return None
        return Advice(
            "chunks_do_not_fit",
            f"reading a sample through HDF5 takes {format_seconds(read.busy_s / gathered.samples)}",
            "Pack the data anew, row by row",
            f"colabkit.pack(colabkit.open_pack({quoted(facts.path)})['train'], 'pack.h5')",
            forecast_of(case).from_rows(_row_bytes(case)),
            check=_check(case),
        )
    needed, stored = _needed_bytes_per_s(case), case.machine.read_bytes_per_s
    if not needed or stored is None or stored < _READ_TWICE * needed:
        return None
    return Advice(
        "chunks_do_not_fit",
        f"{stored / needed:.1f} times as many bytes are read as are used",
        "Mix by blocks, which are read whole",
        "shuffle='block'",
        min(case.samples_per_s * stored / needed, forecast_of(case).without_loader()),
        check=_check(case),
    )


def cache_too_small(case: Case) -> Advice | None:
    """Later epochs read from storage what the first one has read."""
    size, free, read = _data_bytes(case), case.machine.ram_free_bytes, case.machine.read_bytes_per_s
    if case.passes < 2 or not case.is_starved or size is None or free is None or read is None:
        return None
    needed = _needed_bytes_per_s(case)
    if case.facts.is_far or case.facts.path is None or not needed or read < 0.5 * needed:
        return None  # samples without a path are made or in memory, and it is something else that reads
    if _fits_in_ram(case):
        action = "Let go of what fills the RAM, or keep the data in tmpfs"
        call = f"colabkit.stage({quoted(case.facts.path)}, to='tmpfs')"
        found = f"{format_bytes(size)} of data are read again in each epoch though they fit in the RAM"
    else:
        action, call = "Mix by blocks, so that a part of the data serves for a while", "shuffle='block'"
        found = f"{format_bytes(size)} of data do not fit in {format_bytes(free)} of free RAM, so tmpfs will not help"
    return Advice("cache_too_small", found, action, call, confidence="low")


def throttled(case: Case) -> Advice | None:
    """A far source gets slower and slower."""
    if not (case.is_starved and case.facts.is_far):
        return None
    is_slower, retries = case.slowdown >= _THROTTLED, case.spent.retries
    if not is_slower and not retries:
        return None
    found = [f"steps take {case.slowdown:.1f} times as long as at first"] if is_slower else []
    found += [f"{format_things(retries, 'read')} of the source had to be tried again"] if retries else []
    return Advice(
        "throttled",
        ", and ".join(found),
        "Stage the data before training, since Drive slows down who asks often",
        f"colabkit.stage({quoted(case.facts.path)})",
        _speed_near(case),
        confidence="low",
    )


def _speed_near(case: Case) -> float:
    """Return the speed when what is far lies on the local disk."""
    forecast = forecast_of(case)
    if case.facts.encoding == "raw":
        return forecast.from_rows(_row_bytes(case))
    return forecast.without_loader() if case.cpu_s is None else forecast.from_near_files()


def _check(case: Case) -> str:
    if case.measured_alone_s is not None:
        return "the speed then, beside the one foretold here"
    return "diagnose(..., headspace=headspace(step, loader)) foretells by the speed of the step alone"


def _if_full(case: Case) -> str:
    return "; the CPU is full, so more workers will not help" if case.is_cpu_full else ""


def _place(case: Case) -> str:
    path = quoted(case.facts.path)
    return "files far away" if path == "..." else f"{path}, far away"


def _fits_in_ram(case: Case) -> bool:
    """Return whether the data is known to fit, and leaves some room."""
    size, used, total = _data_bytes(case), case.machine.ram_used, case.machine.ram_total_bytes
    return size is not None and used is not None and total is not None and used * total + size <= _ROOMY_RAM * total


def _row_bytes(case: Case) -> float | None:
    """Return the bytes of a decoded sample."""
    for name in ("decode", "augment"):
        part = case.part(name)
        if part.samples:
            return part.handled_bytes / part.samples
    return case.facts.sample_bytes


def _data_bytes(case: Case) -> float | None:
    facts = case.facts
    return None if facts.samples is None or facts.sample_bytes is None else facts.samples * facts.sample_bytes


def _needed_bytes_per_s(case: Case) -> float:
    """Return the stored bytes a second that the samples come to."""
    return case.samples_per_s * (case.facts.sample_bytes or 0.0)


INPUT_RULES: tuple[Rule, ...] = (
    far_files,
    far_files_to_pack,
    small_files,
    slow_disk,
    slow_decoding,
    slow_transform,
    slow_foreign,
    more_workers,
    held_by_python,
    too_many_workers,
    slow_start,
    bursts,
    chunks_do_not_fit,
    cache_too_small,
    throttled,
)
