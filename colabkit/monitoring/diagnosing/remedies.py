"""The calls that advice suggests, with the run's paths, sizes and options, and the one-time cost of each call."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import replace
from pathlib import PurePath

from colabkit.foundation import Code, Phrase, Text, call, option
from colabkit.monitoring.diagnosing.forecast import forecast_run
from colabkit.monitoring.diagnosing.run_profile import RunProfile

_HDF5 = (".h5", ".hdf5")
# Name of a source that is a list or table in memory.
_NAMELESS = "a table of paths"
# Ratio of the size of stored images to that of random crops; 256 pixels are common for crops of 224.
_MARGIN = 8 / 7
_MOST_OF_A_NAME = 40
# Minimum number of bytes per pixel of floats in three channels; they are at least of two bytes each.
_LEAST_FLOATS = 6


def options(**values: object) -> Phrase:
    """Return new values of options, one per line."""
    lines = [option(name, value) for name, value in values.items()]
    return Phrase(tuple(part for line in lines for part in ("\n", line))[1:])


def headspace_hint(run: RunProfile) -> str:
    """Return a hint for making a prediction more accurate, or for checking it if the step was measured alone."""
    if run.measured_alone_s is not None:
        return "compare the new speed with this prediction"
    more = call("doctor", Code("loader"), headspace=Code("colabkit.headspace(step, loader)"))
    return Phrase((more, " predicts more accurately"))


def path_of_data(run: RunProfile) -> str | None:
    """Return the path of the samples; None if it is unknown."""
    return None if run.facts.path == _NAMELESS else run.facts.path


def is_hdf5(run: RunProfile) -> bool:
    """Return whether samples are in a pack or in a third-party HDF5 file."""
    facts = run.facts
    # A pack may have any name, but unlike a folder of files, it does not count its files.
    is_pack = facts.path is not None and facts.split is not None and facts.files is None
    return (is_pack and facts.encoding != "python") or (facts.path or "").endswith(_HDF5)


def are_floats(run: RunProfile) -> bool:
    """Return whether a third-party dataset converts image files, which packs store as `uint8`, to floats."""
    facts = run.facts
    if facts.kind != "foreign" or facts.sample_bytes is None or not _packs_files(run):
        return False
    pixels = (facts.image_height or 0) * (facts.image_width or 0)
    return 0 < _LEAST_FLOATS * pixels <= facts.sample_bytes


def size_of(run: RunProfile) -> int | tuple[int, int] | None:
    """Return the size at which to store images: that of the batches, or more for random crops; None if unknown."""
    height, width = run.facts.image_height, run.facts.image_width
    if not height or not width:
        return None
    if "Crop" in (run.facts.transform or "") and "Random" in (run.facts.transform or ""):
        height, width = round(_MARGIN * height), round(_MARGIN * width)
    return height if height == width else (height, width)


def staging(run: RunProfile, to: str | None = None) -> str:
    """Return the call that copies the samples to local storage; empty if their path is unknown.

    Args:
        run: profile of the run.
        to: `"tmpfs"`; None for a folder in the working folder.
    """
    path = path_of_data(run)
    return "" if path is None else Phrase(call("stage", path, to=to or local_copy(run)))


def local_copy(run: RunProfile) -> str:
    """Return a path for a local copy of the samples."""
    return f"local/{_name(path_of_data(run))}"


def staging_s(run: RunProfile) -> float | None:
    """Return an upper limit of the seconds for copying the samples, the duration of an epoch; None if unknown."""
    samples = run.facts.samples
    return samples / run.samples_per_s if samples and run.samples_per_s else None


def packing(run: RunProfile) -> str:
    """Return the calls that pack decoded samples and load them; empty for a stream or without a dataset.

    Samples come from the original files if a third-party dataset reads all of them, otherwise from the dataset.
    """
    target, size = packed_to(run), size_of(run)
    facts = run.facts
    if _packs_files(run):
        sized = {} if size is None else {"size": size, "encoding": "raw"}
        pack = call("pack", facts.source, target, **sized)
    elif facts.kind == "foreign" and (facts.samples is None or facts.is_stream):
        return ""
    else:
        # The dataset may have labels or splits of its own, or be a part of its files or of its pack.
        dataset = Code("dataset" if facts.encoding == "python" and not _reads_pack(run) else "loader.dataset")
        sized = {} if size is None or facts.encoding != "encoded" else {"size": size}
        pack = call("pack", dataset, target, **sized, **({"encoding": "raw"} if sized and facts.files else {}))
    return Phrase((pack, "\n", loading(run, Code(f"colabkit.open_pack({target!r})['train']"))))


def preparing(run: RunProfile) -> str:
    """Return the calls that stage and pack remote files, and load them; empty if their path is unknown."""
    path, size = path_of_data(run), size_of(run)
    if path is None:
        return ""
    sized = {} if size is None else {"size": size, "encoding": "raw"}
    split = run.facts.split or "train"
    data = replace(call("prepare", path, **sized), result="data")
    return Phrase((data, "\n", loading(run, Code(f"data[{split!r}]"))))


def loading(run: RunProfile, dataset: Code) -> Text:
    """Return the statement that creates a loader of another dataset in place of the current one."""
    facts = run.facts
    more: dict[str, object] = {} if facts.shuffle is False else {"shuffle": facts.shuffle or True}
    if run.is_on_gpu:
        more["device"] = "cuda"
    if facts.transform is not None and facts.kind != "foreign":
        more["transform"] = Code("loader.transform")
    elif are_floats(run):
        more["transform"] = Code("colabkit.augment.Normalize()")
    return replace(call("Loader", dataset, facts.batch_size or run.step.samples or 1, **more), result="loader")


def packed_to(run: RunProfile) -> str:
    """Return the name of a new pack; for a dataset without a name, no file has this name yet."""
    size = size_of(run)
    pixels = "" if size is None else f"-{size}" if isinstance(size, int) else f"-{size[0]}x{size[1]}"
    path = run.facts.source or path_of_data(run)
    target = f"{_name(path)}{pixels or '-packed'}.h5"
    if path is None:
        numbered = (f"{target[:-3]}-{number}.h5" for number in itertools.count(2))
        return next(one for one in itertools.chain([target], numbered) if not os.path.lexists(one))
    # The pack that the loader reads may have this name.
    return f"{target[:-3]}-packed.h5" if PurePath(run.facts.path or "").name == target else target


def packing_s(run: RunProfile) -> float | None:
    """Return the predicted duration of the call of `packing()` in seconds; None if unknown."""
    samples, forecast = run.facts.samples, forecast_run(run)
    if not samples or not run.samples_per_s:
        return None
    # All CPUs decode files, but a single thread reads the samples of a dataset.
    workers, cpus = (max(1, run.facts.workers or 1), forecast.cpus) if _packs_files(run) else (1, 1.0)
    a_sample_s = max(forecast.wall_s / workers, forecast.cpu_s / cpus)
    # The work of a third-party loader is not measured, and more CPUs do not speed up reading remote files.
    if run.facts.kind == "foreign" or run.facts.is_remote or not a_sample_s:
        at_once = 1 if _packs_files(run) else run.facts.workers or 1
        a_sample_s = max(a_sample_s, at_once / run.samples_per_s)
    return samples * a_sample_s


def _packs_files(run: RunProfile) -> bool:
    """Return whether `packing()` packs files that a third-party dataset reads, instead of the dataset."""
    facts = run.facts
    return facts.encoding == "python" and facts.source is not None and not _reads_pack(run)


def _reads_pack(run: RunProfile) -> bool:
    """Return whether samples are in a pack, a split of a pack, or a third-party HDF5 file."""
    return is_hdf5(run) or run.facts.split is not None


def _name(path: str | None) -> str:
    """Return a file name without special characters."""
    stem = PurePath(path.rstrip("/")).stem if path else "dataset"
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-")[:_MOST_OF_A_NAME] or "dataset"
