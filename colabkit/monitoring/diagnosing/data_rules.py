"""Rules about the input: bottlenecks in reading and decoding, and better storage for the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

from colabkit.foundation import Phrase, format_bytes, format_count, format_seconds, format_things
from colabkit.monitoring.diagnosing.diagnosis import HIGH, MODERATE, Advice
from colabkit.monitoring.diagnosing.forecast import Prediction, predict_speed
from colabkit.monitoring.diagnosing.remedies import (
    are_floats,
    headspace_hint,
    is_hdf5,
    local_copy,
    options,
    packing,
    packing_s,
    path_of_data,
    preparing,
    staging,
    staging_s,
)
from colabkit.monitoring.diagnosing.run_profile import RunProfile

_SMALL_READ = 256 << 10
# Maximum share of the RAM that may be in use after data is copied into it.
_ROOMY_RAM = 0.85
_THROTTLED = 2.0
# Workers that wait for each file run with cold CPU caches. In `bench_doctor.py`, runs with local files were 1.3 to 1.9
# times as fast as predicted from this CPU time; the factor leaves room for other machines.
_COLD = 2.5
_READ_TWICE = 2.0
# Parts of the names of transforms that shrink samples.
_SIZING = ("ResizedCrop", "CenterCrop", "Resize")


def still_packing(run: RunProfile) -> Advice | None:
    """Say that training waited for samples that were still being packed, which later epochs do not."""
    read = run.part("read")
    if not run.facts.is_arriving or read.busy_s < MODERATE * run.spent.seconds:
        return None
    source = "the source" if run.facts.source is None else repr(run.facts.source)
    rate = f"{format_count(round(read.samples_per_s))} samples/s" if read.samples_per_s >= 1 else "less than 1 sample/s"
    return Advice(
        f"samples of {source} were still being packed while training ran, and arrived at {rate}",
        "Continue, since later epochs and later runs read the local pack",
        "",
        confidence="high",
    )


def remote_files(run: RunProfile) -> Advice | None:
    """Advise staging if reading files, or rows of a pack, from a mount or a network is the bottleneck."""
    path = path_of_data(run)
    if not (run.is_starved and run.facts.is_remote and run.bottleneck in ("read", "gather")):
        return None
    is_known, is_cold = run.cpu_s is not None, run.facts.kind in ("foreign", "processes")
    faster = "; the run may be even faster, since workers that wait for each file take more CPU time" if is_cold else ""
    measuring = "" if path is None else f"colabkit.probe({path!r}) measures the speed of the mount; "
    return Advice(
        "each epoch reads from " + ("remote files" if path is None else f"{path!r}, which is remote"),
        f"Stage the {'file' if is_hdf5(run) else 'files'} to the local disk once, and load {_from_copy(run)}",
        staging(run),
        *_speed_when_local(run),
        staging_s(run),
        confidence="medium" if is_known else "low",
        check=Phrase((measuring, headspace_hint(run), faster)),
    )


def remote_files_to_pack(run: RunProfile) -> Advice | None:
    """Advise packing if every epoch opens and decodes many remote files."""
    files, encoding = run.facts.files, run.facts.encoding
    if not (run.is_starved and run.facts.is_remote) or encoding in (None, "raw") or is_hdf5(run) or files == 1:
        return None
    if encoding == "python" and run.facts.source is None:
        # A third-party dataset reads the files with its own code.
        return None
    return Advice(
        f"each epoch opens {format_count(files) if files else 'many'} remote files",
        "Pack the decoded images into one local file, with a copy on Drive if it is mounted; keep your own labels and"
        " splits",
        preparing(run),
        *predict_speed(run, lambda costs: costs.from_rows(_row_bytes(run))),
        staging_s(run),
        confidence="high" if run.cpu_s is not None else "medium",
        check=headspace_hint(run),
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
        packing(run),
        *predict_speed(run, lambda costs: costs.from_rows(_row_bytes(run))),
        packing_s(run),
        check=headspace_hint(run),
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
            "Keep the data in RAM, since it fits there, and load it from the path that the call returns",
            staging(run, "tmpfs"),
            *predict_speed(run, lambda costs: costs.without_loader()),
            staging_s(run),
            check=headspace_hint(run),
        )
    if run.facts.encoding == "raw":
        if not _can_shuffle_by_blocks(run):
            return None
        return Advice(found, "Shuffle by blocks, which the disk reads as large pieces", options(shuffle="block"))
    return Advice(
        found,
        "Store smaller samples, as uint8 and at the size used for training",
        packing(run),
        cost_s=packing_s(run),
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
        packing(run),
        *predict_speed(run, lambda costs: costs.from_rows(_row_bytes(run))),
        packing_s(run),
        confidence="medium" if is_kept else "high",
        check=headspace_hint(run),
    )


def slow_transform(run: RunProfile) -> Advice | None:
    """Advise packing, a GPU transform or smaller samples if loading in Python, or the transform, is the bottleneck."""
    waits = run.bottleneck == "read" and run.facts.kind == "processes" and not run.facts.is_remote
    if not run.is_starved or not (waits or run.bottleneck in ("samples", "augment")):
        return None
    if run.bottleneck == "augment":
        return _slow_augment(run)
    part, transform = run.part("samples"), run.facts.transform or ""
    each = format_seconds(part.busy_s / max(1, part.samples))
    found = f"loading a sample in Python takes {each}{', most of it waiting for storage' * waits}{_if_full(run)}"
    if transform.startswith("PerSample"):
        action = (
            "Rewrite the transform for tensors of a whole batch, and pass it as colabkit.augment.PerBatch, which calls"
            " it once per batch"
        )
        return Advice(found, action, confidence="low", check=headspace_hint(run))
    return Advice(
        found,
        "Pack the samples without random transforms, and apply these to whole batches with colabkit.augment",
        packing(run),
        *predict_speed(run, lambda costs: costs.from_rows(run.facts.sample_bytes)),
        packing_s(run),
        check=headspace_hint(run),
    )


def _slow_augment(run: RunProfile) -> Advice:
    part, gpu, transform = run.part("augment"), run.machine.gpu, run.facts.transform or ""
    found = f"transforming a sample takes {format_seconds(part.busy_s / max(1, part.samples))}{_if_full(run)}"
    if gpu is not None and not gpu.is_lost and not run.is_on_gpu:
        fast = predict_speed(run, lambda costs: costs.without_loader())
        return Advice(found, "Transform on the GPU", options(device="cuda"), *fast, check=headspace_hint(run))
    if any(word in transform for word in _SIZING) and run.facts.encoding != "raw":
        action = "Store the samples at the size used for training"
        return Advice(found, action, packing(run), cost_s=packing_s(run), check=headspace_hint(run))
    # On a GPU, launching the transforms takes as long for a large batch as for a small one.
    otherwise = "larger batches" if run.is_on_gpu else "a machine with a GPU, which transforms whole batches there"
    action = f"Use fewer or cheaper transforms, or {otherwise}"
    if transform.isidentifier():
        action = (
            "Write the transform with operations on the whole batch of tensors; in colabkit.augment.PerBatch, it also"
            " runs in worker threads"
        )
    return Advice(found, action, confidence="low", check=headspace_hint(run))


def slow_foreign(run: RunProfile) -> Advice | None:
    """Advise `colabkit.Loader` if a third-party loader, whose stages are unknown, is too slow."""
    facts = run.facts
    if not run.is_starved or facts.kind != "foreign" or facts.is_remote or run.input_share < run.lost_to_thread:
        return None
    found = "the loader is slow, and the time of its stages is unknown"
    if facts.workers == 0:
        found = "batches are loaded one at a time in the process that runs the step"
    elif run.is_cpu_full:
        found = "the loader is slow, and all CPUs are busy"
    elif run.machine.cpu_rate is not None and facts.workers:
        found = "the loader is slow although CPUs are idle, so its workers wait for the disk or for each other"
    if facts.is_stream:
        action = "Make the IterableDataset faster, or split its samples among workers with torch's get_worker_info()"
        return Advice(found, action, check=headspace_hint(run))
    action = "Pack the decoded samples once, without random transforms, and load them with colabkit.Loader"
    if facts.has_mappings:
        action = "Pack the samples once, without random transforms, for colabkit.Loader, which yields tuples"
    if are_floats(run):
        # The call shows the loader; the panel shows at most 130 characters.
        action = (
            "Pack the images once, cropped to one size, and give your random transforms, mean and std to the Loader's"
            " transform="
        )
    elif facts.shuffle is None and facts.batch_size is not None:
        action += ", with your sampler= if you use one"
    if is_hdf5(run):
        action = "Pack the samples once, one per row, and load them with colabkit.Loader"
        action += ", which yields tuples" * facts.has_mappings
    return Advice(
        found,
        action,
        packing(run),
        *predict_speed(run, lambda costs: costs.from_rows(facts.sample_bytes)),
        packing_s(run),
        confidence="medium" if facts.workers else "low",
        check=headspace_hint(run),
    )


def chunks_do_not_fit(run: RunProfile) -> Advice | None:
    """Advise repacking a third-party HDF5 file that reads slowly, or block shuffling if far more is read than used."""
    facts, gathered, read = run.facts, run.part("gather"), run.part("read")
    if not run.is_starved or facts.kind != "gathered" or not is_hdf5(run) or facts.tier not in ("disk", "source"):
        return None
    if facts.tier == "source":
        if run.bottleneck != "read" or not gathered.samples:
            return None
        return Advice(
            f"reading a sample through HDF5 takes {format_seconds(read.busy_s / gathered.samples)}",
            "Pack the data again, one sample per row",
            packing(run),
            *predict_speed(run, lambda costs: costs.from_rows(_row_bytes(run))),
            packing_s(run),
            check=headspace_hint(run),
        )
    needed, stored = _needed_bytes_per_s(run), run.machine.read_bytes_per_s
    if not needed or stored is None or stored < _READ_TWICE * needed or not _can_shuffle_by_blocks(run):
        return None
    return Advice(
        f"{stored / needed:.1f} times as many bytes are read as are used",
        "Shuffle by blocks, which are read completely",
        options(shuffle="block"),
        *predict_speed(run, lambda costs: min(run.samples_per_s * stored / needed, costs.without_loader())),
        check=headspace_hint(run),
    )


def cache_too_small(run: RunProfile) -> Advice | None:
    """Advise freeing RAM, or block shuffling, if later epochs read the data from storage again."""
    size, free, read = _data_bytes(run), run.machine.ram_free_bytes, run.machine.read_bytes_per_s
    if run.passes < 2 or not run.is_starved or size is None or free is None or read is None:
        return None
    needed = _needed_bytes_per_s(run)
    if run.facts.is_remote or run.facts.path is None or not needed or read < 0.5 * needed:
        # Samples without a path are generated or in memory, so the reads have another cause.
        return None
    if _fits_in_ram(run):
        found = f"{format_bytes(size)} of data are read again in each epoch although they fit in RAM"
        action = "Free RAM, or keep the data in tmpfs, and load it from the path that the call returns"
        return Advice(found, action, staging(run, "tmpfs"), cost_s=staging_s(run), confidence="low")
    if not _can_shuffle_by_blocks(run) or run.facts.kind == "foreign":
        return None
    return Advice(
        f"{format_bytes(size)} of data do not fit in {format_bytes(free)} of free RAM, so tmpfs will not help",
        "Shuffle by blocks, so that cached data is reused for a while",
        options(shuffle="block"),
        confidence="low",
    )


def throttled(run: RunProfile) -> Advice | None:
    """Advise staging if a remote source becomes slower or reads fail and are retried."""
    if not (run.is_starved and run.facts.is_remote):
        return None
    slowdown, retries = run.host.slowdown, run.spent.retries
    times = max(run.slowdown, slowdown.times)
    if times < _THROTTLED and not retries:
        return None
    before = "at the start" if run.slowdown == times else f"until step {format_count(slowdown.since_step)}"
    found = [f"steps take {times:.1f} times as long as {before}, since reads became slower"] * (times >= _THROTTLED)
    found += [f"{format_things(retries, 'read')} of the source had to be retried"] if retries else []
    return Advice(
        ", and ".join(found),
        "Stage the data before training, since remote storage such as Drive limits frequent requests, and load "
        f"{_from_copy(run)}",
        staging(run),
        *_speed_when_local(run),
        staging_s(run),
        confidence="low",
    )


def _speed_when_local(run: RunProfile) -> Prediction:
    if run.facts.encoding == "raw":
        return predict_speed(run, lambda costs: costs.from_rows(_row_bytes(run)))
    if run.cpu_s is None:
        return predict_speed(run, lambda costs: costs.without_loader())
    expected, low, high = predict_speed(run, lambda costs: costs.from_local_files())
    if run.facts.kind in ("foreign", "processes"):
        high = max(
            high, predict_speed(run, lambda costs: replace(costs, cpu_s=costs.cpu_s / _COLD).from_local_files())[0]
        )
    return expected, low, high


def _from_copy(run: RunProfile) -> str:
    path = path_of_data(run)
    if path is None:
        return "the local copy"
    # A single file is copied into the folder.
    return repr(f"{local_copy(run)}/{PurePath(path).name}" if is_hdf5(run) else local_copy(run))


def _can_shuffle_by_blocks(run: RunProfile) -> bool:
    # An order that is sequential or the user's own is left alone.
    return run.facts.shuffle not in (False, "block")


def _if_full(run: RunProfile) -> str:
    return "; all CPUs are busy, so more workers will not help" if run.is_cpu_full else ""


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
