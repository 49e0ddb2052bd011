"""`pack()` writes many files, arrays or records into one sealed, memory-mapped HDF5 file, or into several shards.

Files are read concurrently and decoded on all available cores. Space is reserved first, so each worker writes its rows
directly at their final position. The seal is written last and then the file is renamed, so an unfinished file never
opens as a pack.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from colabkit.foundation import (
    TargetExists,
    cannot,
    check_bytes,
    check_whole_number,
    checked_call,
    file_changes,
    interruptible,
    shown,
    user_path,
)
from colabkit.packs.packing.executors import as_executor
from colabkit.packs.packing.memory_plan import MapDataset, is_arrays, is_dataset, plan_arrays, plan_dataset
from colabkit.packs.packing.options import PackOptions
from colabkit.packs.packing.pack_call import PackCall, bad_images
from colabkit.packs.packing.pack_report import PackReport
from colabkit.packs.packing.shards import SHARD_BYTES, WriteOptions
from colabkit.packs.packing.source_opening import exchanged, opened_source
from colabkit.packs.packing.targets import bucket_target
from colabkit.storage import PathTable, Source, check_threads, identity_of


@interruptible("Packing", "Existing packs are unchanged. Run the same call again.")
@checked_call()
def pack(
    source: str
    | os.PathLike[str]
    | Sequence[str | os.PathLike[str]]
    | PathTable
    | Source
    | Mapping[str, Any]
    | tuple[Any, ...]
    | MapDataset,
    to: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    encoding: Literal["auto", "raw", "source", "jpeg"] = "auto",
    quality: int = 90,
    channels: Literal[1, 3] = 3,
    labels: str | Sequence[str] | Callable[[str], Any] | None = "auto",
    task: Literal["auto", "classes", "multilabel", "regression"] = "auto",
    renumber: bool = False,
    splits: str | Mapping[str, float] | Callable[[str], str] | None = None,
    fields: Sequence[str] | Mapping[str, str | Callable[[str], Any]] | None = None,
    path_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    layout: Literal["auto", "nhwc", "nchw", "nhw", "array"] = "auto",
    on_bad: Literal["raise", "skip", "blank"] = "raise",
    max_bad: float = 0.1,
    shard_bytes: int | str | None = None,
    executor: Any = None,
    retries: int = 2,
    threads: int | Literal["auto"] = "auto",
    resume: bool = True,
    overwrite: bool = False,
    progress: bool = True,
) -> PackReport:
    """Pack a source into a sealed HDF5 file and return a report.

    Samples become `X_<split>`, labels `Y_<split>`, and additional fields `<name>_<split>`. An existing pack of the same
    source and options is reused, except that of a dataset, which cannot be compared.

    Args:
        source: a folder; a zip or tar archive; a table of paths (DataFrame, CSV, Parquet, list); a folder in a bucket;
            `samples:digits`; an LMDB; WebDataset shards; TFRecord files; Parquet files with images, also on Hugging
            Face, such as `hf://datasets/OWNER/NAME`; an https URL or Drive link, which is staged first; arrays as
            `(images, labels)` or `{"X": images, "Y": labels}`, optionally by split; a map-style PyTorch dataset, or one
            for each split.
        to: path of the pack, usually ending in `.h5`, or a URL that fsspec can write, such as
            `"s3://bucket/birds.h5"`. At a URL, the pack consists of shards and their index, and a call does not resume
            an interrupted one.
        size: height and width, or one number for both. Images are scaled to cover it (bilinear with antialiasing) and
            cropped around the center. None keeps each image's size.
        encoding: `"raw"` stores `uint8 [N, H, W, C]`, which requires images of one size; `"source"` stores the original
            file bytes; `"jpeg"` stores re-encoded images. `"auto"` chooses raw if all images have one size and fit on
            disk and in RAM, otherwise jpeg if `size` is given, otherwise source.
        quality: JPEG quality for `"jpeg"`, 1 to 100.
        channels: 3 for RGB, 1 for luminance.
        labels: `"auto"` uses a column with a common label name, otherwise the folder names. Or pass a column, several
            columns, a function of a sample's path, or None for no labels. Text categories of a pandas Categorical, also
            those that do not occur, are the classes in their order; other text is sorted.
        task: `"classes"`, `"multilabel"` or `"regression"`. `"auto"` infers it from the type of the labels: text and
            whole numbers are classes, floating-point numbers are regression targets, lists and several columns of 0 and
            1 are multi-label.
        renumber: number the occurring classes from 0. By default, whole numbers from 0 to 99,999 keep their value, so
            that `[0, 5, 7]` are 8 classes.
        splits: shares of `train`, `val` and `test`, such as `"train=0.8,val=0.2"` or `{"train": 0.8, "val": 0.2}`,
            stratified by class, by combination of labels, or by up to ten bins of a single regression target; a column;
            or a function of a sample's path. None uses a split column or split folders if the source has them;
            otherwise all samples are `train`. `val`, `valid` and `dev` are names of the same split. Shares of a
            map-style dataset are stratified only by class, and only if it lists its classes, as `targets`, `labels` or
            a `TensorDataset` do.
        fields: columns to store as additional fields, or a mapping of field names to columns or functions of a sample's
            path.
        path_column: the column of a table that holds the paths; None searches for a common name, such as `path`, `file`
            or `image`. In Parquet files with several columns of images, the column to pack.
        root: the folder of the relative paths in a table; None uses the folder of the table file, or the working folder
            for a DataFrame or list.
        seed: seed for assigning samples to splits.
        layout: order of the dimensions of images in an array: `"nhwc"`, `"nchw"`, or `"nhw"` for images of one channel;
            `"array"` for samples that are not images. `"auto"` treats `uint8` arrays with 1 or 3 channels, last or
            first, as images, and those `[N, H, W]` from a height and width of 8.
        on_bad: action for a file that cannot be decoded: `"raise"` raises an error, `"skip"` leaves out the file, and
            `"blank"` stores a black image instead. The pack and the report list all bad files. `"skip"` also skips
            table rows without a path, and those whose files are missing.
        max_bad: maximum number of bad files, as a share such as 0.1 or a whole number; more bad files are an error. A
            share above 0 allows at least one bad file.
        shard_bytes: write several files of about this size, for example `"256MiB"`, and `to` as their index. An
            interrupted call resumes after the last complete shard.
        executor: a `concurrent.futures` executor, a Dask `Client`, or the module `ray` after `ray.init()`; it packs one
            shard per task. All machines must see the source and a local target at the same paths. A broken process pool
            is replaced by a new one with the same settings.
        retries: number of times that `executor` repeats a shard whose worker died or whose task failed. Errors in the
            source, such as a damaged image, are raised at once.
        threads: number of files read concurrently; `"auto"` adapts it to the source.
        resume: reuse complete shards that an interrupted call left.
        overwrite: replace an existing pack at `to`.
        progress: show a progress bar.

    Returns:
        A report, which can be passed wherever a path is expected.

    Raises:
        InvalidOption: if an option is invalid, or does not apply to this source.
        SourceMissing, BadSource, BadArchive: if the source does not exist, has no classes, or is damaged.
        BadImage: if a file is not an image or differs in size from the others, or if too many files are bad.
        TargetExists: if `to` exists and is not a pack, or is a pack that cannot be reused and `overwrite` is false.
        NotEnoughSpace: if a file does not fit; raised before it is written if its size is known.
        NotMounted: if a path begins with `drive:` and Drive is not mounted.
        SourceChanged: if a file changed after it was listed, or if all listings of a folder differ.
        FetchFailed: if an address cannot be fetched, or a bucket cannot be read.
        FileFailed: if a file cannot be read, or the pack cannot be written.
        TimedOut: if the source does not respond.
        PackingFailed: if worker processes die, or the executor fails more than `retries` times at one shard.

    Example:
        >>> import colabkit
        >>> shares = {"train": 0.8, "test": 0.2}
        >>> packed = colabkit.pack("samples:digits", "digits.h5", size=16, splits=shares)
        >>> packed.sample_shape, packed.encoding
        ((16, 16, 3), 'raw')
        >>> sum(packed.splits.values())
        1797
    """
    started = time.monotonic()
    # Check all options before the source is opened, because it may be fetched for that.
    in_memory = "arrays" if is_arrays(source) else type(source).__name__ if is_dataset(source) else ""
    act = f"pack {in_memory or identity_of(source, extract=False)[0]!r}"
    labelled, table = (labels, task, renumber, splits, fields), (path_column, root)
    options = PackOptions(act, size, encoding, quality, channels, *labelled, seed, on_bad, max_bad, layout, *table)
    check_threads(act, threads)
    check_whole_number(act, "retries", retries, 0)
    if executor is not None:
        executor = as_executor(act, executor)
    if shard_bytes is not None:
        shard_bytes = check_bytes(act, "shard_bytes", shard_bytes, "256MiB")
    elif executor is not None:
        shard_bytes = SHARD_BYTES
    target = bucket_target(act, to) if isinstance(to, str) and "://" in to else None
    if target is not None:
        shard_bytes = shard_bytes or SHARD_BYTES
    final = user_path(to, f"pack to {shown(to)}") if target is None else target.place
    write_options = WriteOptions(final, threads, shard_bytes, executor, resume, overwrite, retries)
    with file_changes.translated(act):
        if target is None and final.is_dir():
            inside = f"Pack to a file in it, such as {str(final / 'birds.h5')!r}"
            is_folder = TargetExists(cannot(act, f"{str(final)!r} is a folder", "", inside))
            raise exchanged(source, to) or is_folder
    if not in_memory:
        as_table = {"path_column": path_column, "root": root, "skips_missing": on_bad == "skip"}
        opened = opened_source(source, to, as_table, overwrite=overwrite, progress=progress)
        act = f"pack {opened.name!r}"
        options, target = replace(options, act=act), target and replace(target, act=act)
    pack_call = PackCall(options, write_options, started, progress, bucket=target)
    with file_changes.translated(act):
        if not in_memory:
            return pack_call.planned(opened).write()
        with bad_images():
            return pack_call.run((plan_arrays if in_memory == "arrays" else plan_dataset)(source, options))
