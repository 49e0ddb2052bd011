"""Rules about the input: bottlenecks in reading and decoding, and better storage for the data."""

from __future__ import annotations

from colabkit.foundation import format_bytes, format_count, format_seconds, format_share, format_things
from colabkit.monitoring.diagnosing.diagnosis import HIGH, Advice
from colabkit.monitoring.diagnosing.forecast import forecast_run
from colabkit.monitoring.diagnosing.run_profile import RunProfile

_SMALL_READ = 256 << 10
# CPUs count as idle if less than this share of them is used.
_IDLE = 0.6
# Maximum share of the RAM that may be in use after data is copied into it.
_ROOMY_RAM = 0.85
_SLOW_START = 0.1
_BURSTY = 0.1
_THROTTLED = 2.0
_READ_TWICE = 2.0
# Minimum share of the time that is assumed to remain after a fix.
_LEAST_LEFT = 0.1
# Transforms that shrink samples.
_SIZING = ("ResizedCrop", "CenterCrop", "Resize")
_HDF5 = (".h5", ".hdf5")
# Name of a source that is a list or table in memory.
_NAMELESS = "a table of paths"
_LOAD_PACK = "colabkit.Loader(colabkit.open_pack('pack.h5')['train'], batch_size, shuffle=True)"


def remote_files(run: RunProfile) -> Advice | None:
    """Advise staging if reading files, or rows of a pack, from a mount or a network is the bottleneck."""
    path = _quoted(run.facts.path)
    if not (run.is_starved and run.facts.is_remote and run.bottleneck in ("read", "gather")):
        return None
    is_known, is_cold = run.cpu_s is not None, run.facts.kind in ("foreign", "processes")
    faster = "; the run may be even faster, since workers that wait for each file take more CPU time" if is_cold else ""
    return Advice(
        f"each epoch reads from {_place(run)}",
        f"Stage the {'file' if _is_hdf5(run) else 'files'} to the local disk once",
        f"colabkit.stage({path})",
        _speed_when_local(run),
        confidence="medium" if is_known else "low",
        check=f"colabkit.probe({path}) measures the speed of the mount; {_check(run)}{faster}",
    )


def remote_files_to_pack(run: RunProfile) -> Advice | None:
    """Advise packing if every epoch opens and decodes many remote files."""
    files, encoding = run.facts.files, run.facts.encoding
    if not (run.is_starved and run.facts.is_remote) or encoding in (None, "raw") or _is_hdf5(run) or files == 1:
        return None
    return Advice(
        f"each epoch opens {format_count(files) if files else 'many'} remote files",
        "Pack the decoded images into one local file, which is also saved on Drive, if mounted, for later runs",
        f"colabkit.prepare({_quoted(run.facts.path)}, size=..., encoding='raw')",
        forecast_run(run).from_rows(_row_bytes(run)),
        confidence="high" if run.cpu_s is not None else "medium",
        check=_check(run),
    )


def small_files(run: RunProfile) -> Advice | None:
    """Advise packing if opening many small local files takes much of the loading time."""
    read, decode = run.part("read"), run.part("decode")
    if not run.is_starved or run.facts.is_remote or not read.samples or run.facts.files is None:
        return None
    mean_bytes = read.handled_bytes / read.samples
    if mean_bytes >= _SMALL_READ or read.busy_s < 0.3 * (read.busy_s + decode.busy_s):
        return None
    return Advice(
        f"reading a file of {format_bytes(mean_bytes)} takes {format_seconds(read.busy_s / read.samples)}",
        "Pack the decoded images into one file",
        _packing(run),
        forecast_run(run).from_rows(_row_bytes(run)),
        check=_check(run),
    )


def slow_disk(run: RunProfile) -> Advice | None:
    """Advise tmpfs or smaller samples if a local disk is too slow and the data is not cached in RAM."""
    if not run.is_starved or run.facts.is_remote or run.is_cpu_full:
        return None
    stalled = run.machine.io_stall_rate
    is_reading = (run.machine.read_bytes_per_s or 0.0) > 0.3 * _needed_bytes_per_s(run) > 0
    if not is_reading or (stalled is not None and stalled < HIGH):
        return None
    found = f"the disk delivers {format_bytes(run.machine.read_bytes_per_s or 0.0)}/s"
    if _fits_in_ram(run):
        return Advice(
            found,
            "Keep the data in RAM, since it fits there",
            f"colabkit.stage({_quoted(run.facts.path)}, to='tmpfs')",
            forecast_run(run).without_loader(),
            check=_check(run),
        )
    return Advice(
        found,
        "Store smaller samples, as uint8 and at the size used for training",
        _packing(run),
        check="the bytes read per sample decrease",
    )


def slow_decoding(run: RunProfile) -> Advice | None:
    """Advise storing decoded images if decoding is the bottleneck."""
    if not run.is_starved or run.bottleneck != "decode":
        return None
    part, is_kept = run.part("decode"), run.passes < 2 and run.facts.tier in ("gpu", "ram", "disk")
    later = "; later epochs reuse the images that this one caches" if is_kept else ""
    return Advice(
        f"decoding a sample takes {format_seconds(part.busy_s / max(1, part.samples))}{_if_full(run)}{later}",
        "Store decoded images at the size used for training",
        _packing(run),
        forecast_run(run).from_rows(_row_bytes(run)),
        confidence="medium" if is_kept else "high",
        check=_check(run),
    )


def slow_transform(run: RunProfile) -> Advice | None:
    """Advise packing, a GPU transform or smaller samples if loading in Python, or the transform, is the bottleneck."""
    waits = run.bottleneck == "read" and run.facts.kind == "processes" and not run.facts.is_remote
    if not run.is_starved or not (waits or run.bottleneck in ("samples", "augment")):
        return None
    name = "augment" if run.bottleneck == "augment" else "samples"
    part, gpu = run.part(name), run.machine.gpu
    each = format_seconds(part.busy_s / max(1, part.samples))
    speed: float | None = None
    if name == "samples":
        found = f"loading a sample in Python takes {each}{', most of it waiting for storage' * waits}"
        action = "Pack the samples, and transform whole batches with colabkit.augment"
        call = f"{_packing(run)}; {_LOAD_PACK}"
        speed = forecast_run(run).from_rows(run.facts.sample_bytes)
    elif gpu is not None and not gpu.is_lost and not run.is_on_gpu:
        found, action = f"transforming a sample takes {each}", "Transform on the GPU"
        call, speed = "colabkit.Loader(..., device='cuda')", forecast_run(run).without_loader()
    elif any(word in (run.facts.transform or "") for word in _SIZING):
        found, action = f"transforming a sample takes {each}", "Store the samples at the size used for training"
        call = _packing(run)
    else:
        return None
    return Advice(found + _if_full(run), action, call, speed, check=_check(run))


def slow_foreign(run: RunProfile) -> Advice | None:
    """Advise `colabkit.Loader` if a third-party loader, whose stages are unknown, is too slow."""
    facts = run.facts
    if not run.is_starved or facts.kind != "foreign" or facts.is_remote:
        return None
    found = "the loader is slow, and the time of its stages is unknown"
    if facts.workers == 0:
        found = "batches are loaded one at a time in the process that runs the step"
    elif run.is_cpu_full:
        found = "the loader is slow, and all CPUs are busy"
    elif run.machine.cpu_rate is not None and facts.workers:
        found = "the loader is slow although CPUs are idle, so its workers wait for the disk or for each other"
    if _is_hdf5(run):
        action = "Load the file with colabkit.Loader"
        call = f"colabkit.Loader(colabkit.open_pack({_quoted(facts.path)})['train'], batch_size, shuffle=True)"
    else:
        action = "Pack the decoded samples once, and load them with colabkit.Loader"
        call = f"{_packing(run)}; {_LOAD_PACK}"
    return Advice(
        found,
        action,
        call,
        forecast_run(run).from_rows(facts.sample_bytes),
        confidence="medium" if facts.workers else "low",
        check=_check(run),
    )


def more_workers(run: RunProfile) -> Advice | None:
    """Advise more workers if CPUs are idle and there are fewer workers than CPUs."""
    facts, rate = run.facts, run.machine.cpu_rate
    if not run.is_starved or facts.workers is None or rate is None or rate >= _IDLE or facts.is_remote:
        return None
    most = round(run.machine.cpus)
    # The final transform runs in the single thread that delivers batches, so more workers do not speed it up.
    one_transforms = facts.kind == "processes" and run.bottleneck == "augment"
    if facts.workers >= most or facts.kind in ("gathered", "device") or one_transforms:
        return None
    # Each worker makes one batch per `workers` steps. Without workers, making a batch takes as long as the wait.
    a_batch_s = run.step.seconds * facts.workers if facts.workers else run.step.wait_s
    speed = min(forecast_run(run).samples_per_s(workers=most), run.step.samples * most / max(a_batch_s, 1e-9))
    workers, cpus = format_things(facts.workers, "worker"), format_things(most, "CPU")
    return Advice(
        f"{workers} on {cpus}, which are busy {format_share(rate)} of the time",
        f"Use {format_things(most, 'worker')}",
        f"num_workers={most}",
        speed,
        check="the CPU utilization rises",
    )


def held_by_python(run: RunProfile) -> Advice | None:
    """Advise processes if only one core is busy, since threads then wait for the GIL."""
    machine = run.machine
    if not run.is_starved or machine.cpus < 2 or machine.busiest_core_rate is None or machine.cpu_rate is None:
        return None
    is_alone = machine.busiest_core_rate > 0.9 and machine.cpu_rate < 0.7
    if not is_alone or (run.facts.workers or 1) < 2 or run.facts.kind != "decoded":
        # Only loaders that decode images run Python code in several threads.
        return None
    return Advice(
        "one core is busy and the others are not, so threads wait for Python's global interpreter lock",
        "Load samples in processes, or with code that releases the lock",
        "",
        confidence="low",
    )


def too_many_workers(run: RunProfile) -> Advice | None:
    """Advise fewer workers if there are more than two per CPU and all CPUs are busy."""
    facts = run.facts
    if not run.is_starved or facts.workers is None or not run.is_cpu_full or facts.is_remote:
        return None
    most = max(1, round(run.machine.cpus))
    if facts.workers <= 2 * most:
        return None
    return Advice(
        f"{facts.workers} workers share {format_things(most, 'CPU')}",
        "Use as many workers as CPUs; more workers will not help",
        f"num_workers={most}",
        confidence="low",
    )


def slow_start(run: RunProfile) -> Advice | None:
    """Advise persistent workers if each epoch starts with a long wait."""
    spent, facts = run.spent, run.facts
    if run.passes < 2 or not spent.seconds or facts.keeps_workers is not False:
        return None
    each_s = spent.first_s / max(1, spent.passes)
    if spent.first_s < _SLOW_START * spent.seconds or each_s < 10 * run.step.seconds:
        return None
    return Advice(
        f"the first batch of each epoch takes {format_seconds(each_s)}",
        "Keep the workers between epochs",
        "persistent_workers=True",
        run.samples_per_s / max(_LEAST_LEFT, 1 - spent.first_s / spent.seconds),
    )


def bursts(run: RunProfile) -> Advice | None:
    """Advise more prefetching if data is usually ready but a few steps wait long."""
    facts = run.facts
    if run.shares.wait >= HIGH or run.late < _BURSTY or facts.is_remote or facts.kind == "device":
        return None
    call = "prefetch_batches=64"
    if facts.kind == "foreign":
        call = "prefetch_factor=8" if facts.workers else ""
    return Advice(
        f"a few long waits take {format_share(run.late)} of the time, although data is usually ready",
        "Prefetch more batches; check for single large files, garbage collection and checkpoints",
        call,
        run.samples_per_s / max(_LEAST_LEFT, 1 - run.late),
        confidence="low",
        check="loader.meters.snapshot().recent contains the longest waits",
    )


def chunks_do_not_fit(run: RunProfile) -> Advice | None:
    """Advise repacking a third-party HDF5 file that reads slowly, or block shuffling if far more is read than used."""
    facts, gathered, read = run.facts, run.part("gather"), run.part("read")
    if not run.is_starved or facts.kind != "gathered" or not _is_hdf5(run) or facts.tier not in ("disk", "source"):
        return None
    if facts.tier == "source":
        if run.bottleneck != "read" or not gathered.samples:
            return None
        return Advice(
            f"reading a sample through HDF5 takes {format_seconds(read.busy_s / gathered.samples)}",
            "Pack the data again, one sample per row",
            f"colabkit.pack(colabkit.open_pack({_quoted(facts.path)})['train'], 'pack.h5')",
            forecast_run(run).from_rows(_row_bytes(run)),
            check=_check(run),
        )
    needed, stored = _needed_bytes_per_s(run), run.machine.read_bytes_per_s
    if not needed or stored is None or stored < _READ_TWICE * needed:
        return None
    return Advice(
        f"{stored / needed:.1f} times as many bytes are read as are used",
        "Shuffle by blocks, which are read completely",
        "shuffle='block'",
        min(run.samples_per_s * stored / needed, forecast_run(run).without_loader()),
        check=_check(run),
    )


def cache_too_small(run: RunProfile) -> Advice | None:
    """Advise freeing RAM, or block shuffling, if later epochs read the data from storage again."""
    size, free, read = _data_bytes(run), run.machine.ram_free_bytes, run.machine.read_bytes_per_s
    if run.passes < 2 or not run.is_starved or size is None or free is None or read is None:
        return None
    needed = _needed_bytes_per_s(run)
    if run.facts.is_remote or run.facts.path is None or not needed or read < 0.5 * needed:
        # Samples without a path are generated or in memory, so something else is reading.
        return None
    if _fits_in_ram(run):
        action = "Free RAM, or keep the data in tmpfs"
        call = f"colabkit.stage({_quoted(run.facts.path)}, to='tmpfs')"
        found = f"{format_bytes(size)} of data are read again in each epoch although they fit in RAM"
    else:
        action, call = "Shuffle by blocks, so that cached data is reused for a while", "shuffle='block'"
        found = f"{format_bytes(size)} of data do not fit in {format_bytes(free)} of free RAM, so tmpfs will not help"
    return Advice(found, action, call, confidence="low")


def throttled(run: RunProfile) -> Advice | None:
    """Advise staging if a remote source becomes slower or reads fail and are retried."""
    if not (run.is_starved and run.facts.is_remote):
        return None
    is_slower, retries = run.slowdown >= _THROTTLED, run.spent.retries
    if not is_slower and not retries:
        return None
    found = [f"steps take {run.slowdown:.1f} times as long as at the start"] if is_slower else []
    found += [f"{format_things(retries, 'read')} of the source had to be retried"] if retries else []
    return Advice(
        ", and ".join(found),
        "Stage the data before training, since remote storage such as Drive limits frequent requests",
        f"colabkit.stage({_quoted(run.facts.path)})",
        _speed_when_local(run),
        confidence="low",
    )


def _speed_when_local(run: RunProfile) -> float:
    forecast = forecast_run(run)
    if run.facts.encoding == "raw":
        return forecast.from_rows(_row_bytes(run))
    return forecast.without_loader() if run.cpu_s is None else forecast.from_local_files()


def _check(run: RunProfile) -> str:
    if run.measured_alone_s is not None:
        return "compare the new speed with this prediction"
    return "doctor(..., headspace=headspace(step, loader)) predicts more accurately"


def _if_full(run: RunProfile) -> str:
    return "; all CPUs are busy, so more workers will not help" if run.is_cpu_full else ""


def _place(run: RunProfile) -> str:
    path = _quoted(run.facts.path)
    return "remote files" if path == "..." else f"{path}, which is remote"


def _fits_in_ram(run: RunProfile) -> bool:
    size, used, total = _data_bytes(run), run.machine.ram_used, run.machine.ram_total_bytes
    return size is not None and used is not None and total is not None and used * total + size <= _ROOMY_RAM * total


def _row_bytes(run: RunProfile) -> float | None:
    for name in ("decode", "augment"):
        part = run.part(name)
        if part.samples:
            return part.handled_bytes / part.samples
    return run.facts.sample_bytes


def _data_bytes(run: RunProfile) -> float | None:
    facts = run.facts
    return None if facts.samples is None or facts.sample_bytes is None else facts.samples * facts.sample_bytes


def _needed_bytes_per_s(run: RunProfile) -> float:
    return run.samples_per_s * (run.facts.sample_bytes or 0.0)


def _quoted(path: str | None) -> str:
    return "..." if path in (None, _NAMELESS) else repr(path)


def _is_hdf5(run: RunProfile) -> bool:
    """Return whether samples are in a pack or in a third-party HDF5 file."""
    return (run.facts.path or "").endswith(_HDF5)


def _packing(run: RunProfile) -> str:
    """Return the call that packs decoded samples, from the original files even if the loader reads an encoded pack."""
    facts = run.facts
    if facts.source is None and facts.encoding == "python":
        return "colabkit.pack(dataset, 'pack.h5')"
    files = _quoted(facts.source if _is_hdf5(run) or facts.encoding == "python" else facts.path)
    return f"colabkit.pack({files}, 'pack.h5', size=..., encoding='raw')"
