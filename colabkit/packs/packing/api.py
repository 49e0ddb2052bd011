"""`pack()` writes many files, arrays or records into one sealed, memory-mapped HDF5 file, or into several shards.

Files are read concurrently and decoded on all available cores. Space is reserved first, so each worker writes its rows
directly at their final position. The seal is written last and then the file is renamed, so an unfinished file never
opens as a pack.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from colabkit.foundation import (
    BadImage,
    ColabkitError,
    ProgressBar,
    Report,
    TargetExists,
    Text,
    cannot,
    check_bytes,
    check_whole_number,
    checked_call,
    file_changes,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    format_things,
    interruptible,
    option,
    user_path,
)
from colabkit.packs.format.arrival import Arrival
from colabkit.packs.format.layout import PackInfo, count_omitted, name_inferred
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing.bucket_shards import write_to_bucket
from colabkit.packs.packing.executors import as_executor
from colabkit.packs.packing.file_plan import FileCollection
from colabkit.packs.packing.memory_plan import MapDataset, is_arrays, is_dataset, plan_arrays, plan_dataset
from colabkit.packs.packing.options import PackOptions
from colabkit.packs.packing.pack_plan import PackPlan, UnequalSample
from colabkit.packs.packing.pack_writer import WrittenPack, is_readable_early
from colabkit.packs.packing.shards import SHARD_BYTES, WriteOptions, write_plan
from colabkit.packs.packing.source_opening import opened_source
from colabkit.packs.packing.targets import BucketTarget, LocalTarget, bucket_target
from colabkit.storage import PathTable, Source, check_threads

_LISTED = 5
_REPLACE: Text = ("Use ", option("overwrite", True), " to replace it, or choose another path")


@dataclass(frozen=True, repr=False)
class PackReport(Report):
    """Result of `pack()`.

    Attributes:
        path: path of the pack, or of the index if there are several shards; text for an address.
        source: name of the source.
        splits: number of samples in each split.
        classes: names of the classes, or of several labels or targets; may be empty.
        encoding: `raw` for pixels and `.npy` files, `source`, `jpeg`, or `array` for other samples.
        sample_shape: height, width and channels of every image, or the shape of every array; () if unequal or unknown.
        pack_bytes: size of the pack in bytes, including all shards.
        shards: number of files that hold the samples.
        seconds: duration of the call in seconds.
        made_by: workers that made the samples: processes, threads or executor tasks; empty if the pack was reused.
        retries: number of reads that failed and were retried.
        attempts: number of times that the executor began to write a shard; 0 without an executor.
        duplicates: attempts that were complete after another attempt at the same shard; their files were removed.
        lost: attempts that did not end, because their worker died or no longer responded.
        left_out: files that are missing or are not samples, with the reason.
        bad: samples that could not be decoded, with the reason.
        note: reason for the chosen encoding; empty if it needs none.
        inferred: inferred values, such as the task, the splits and the layout, by the option that overrides each.
        reused: whether the same pack already existed and was reused.
    """

    path: Path | str
    source: str
    splits: Mapping[str, int]
    classes: tuple[str, ...]
    encoding: str
    sample_shape: tuple[int, ...]
    pack_bytes: int
    shards: int
    seconds: float
    made_by: str
    retries: int
    attempts: int
    duplicates: int
    lost: int
    left_out: tuple[tuple[str, str], ...]
    bad: tuple[tuple[str, str], ...]
    note: str
    inferred: Mapping[str, str]
    reused: bool

    def __fspath__(self) -> str:
        """Return the path, so the report can be passed wherever a path is expected."""
        return str(self.path)

    def _summary(self) -> str:
        samples = sum(self.splits.values())
        shape = f" {'x'.join(map(str, self.sample_shape))}" if self.sample_shape else ""
        kind = "sample" if self.encoding == "array" else "image"
        size = f"{format_things(samples, kind)}{shape}, {format_bytes(self.pack_bytes)}"
        size += f" in {self.shards} shards" if self.shards > 1 else ""
        if self.reused:
            found = f"Already packed at {str(self.path)!r}: {size}"
            again = (found, "; use ", option("overwrite", True), " to pack the source again")
            return "\n".join([self._words.render(again), *self._inferred_lines()])
        rate = format_rate(samples / max(self.seconds, 1e-9), f"{kind}s")
        notes = f", {format_things(self.retries, 'retry')}" if self.retries else ""
        notes += f", {format_things(self.lost, 'lost attempt')}" if self.lost else ""
        text = f"Packed {size} to {str(self.path)!r} in {format_seconds(self.seconds)} ({rate}{notes})"
        lines = [text, *count_omitted(self.left_out, self.bad)]
        lines += [f"Encoding {self.encoding}: {self.note}"] if self.note else []
        return "\n".join([*lines, *self._inferred_lines()])

    def _inferred_lines(self) -> list[str]:
        return [f"Inferred: {self._words.render(name_inferred(self.inferred))}"] if self.inferred else []

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            ("path", str(self.path)),
            ("source", self.source),
            ("splits", ", ".join(f"{split} {format_count(count)}" for split, count in self.splits.items())),
            ("classes", f"{len(self.classes)}: {', '.join(self.classes[:12])}" if self.classes else "none"),
            ("encoding", self.encoding),
            ("inferred", self._words.render(name_inferred(self.inferred)) or "nothing"),
            ("made by", self.made_by or "an earlier call"),
            *self._attempt_rows(),
            ("left out", _listed(self.left_out)),
            ("bad", _listed(self.bad)),
        ]

    def _attempt_rows(self) -> list[tuple[str, ...]]:
        if not self.attempts:
            return []
        others = f"{format_count(self.lost)} lost, {format_things(self.duplicates, 'duplicate')}"
        return [("attempts", f"{format_count(self.attempts)}: {others}")]


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
    layout: Literal["auto", "nhwc", "nchw", "array"] = "auto",
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
            columns, a function of a sample's path, or None for no labels.
        task: `"classes"`, `"multilabel"` or `"regression"`. `"auto"` infers it from the type of the labels: text and
            whole numbers are classes, floating-point numbers are regression targets, lists and several columns of 0 and
            1 are multi-label.
        renumber: number the occurring classes from 0. By default, whole numbers from 0 to 99,999 keep their value, so
            that `[0, 5, 7]` are 8 classes.
        splits: shares of `train`, `val` and `test`, stratified by class, such as `"train=0.8,val=0.2"` or
            `{"train": 0.8, "val": 0.2}`; a column; or a function of a sample's path. None uses a split column or split
            folders if the source has them; otherwise all samples are `train`. `val`, `valid` and `dev` are names of the
            same split.
        fields: columns to store as additional fields, or a mapping of field names to columns or functions of a sample's
            path.
        path_column: the column of a table that holds the paths; None searches for a common name, such as `path`, `file`
            or `image`. In Parquet files with several columns of images, the column to pack.
        root: the folder of the relative paths in a table; None uses the folder of the table file, or the working folder
            for a DataFrame or list.
        seed: seed for assigning samples to splits.
        layout: order of the dimensions of images in an array, `"nhwc"` or `"nchw"`, or `"array"` for samples that are
            not images. `"auto"` treats `uint8` arrays with 1 or 3 channels, last or first, as images.
        on_bad: action for a file that cannot be decoded: `"raise"` raises an error, `"skip"` leaves out the file, and
            `"blank"` stores a black image instead. The pack and the report list all bad files. `"skip"` also skips
            table rows whose files are missing.
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
    in_memory = "arrays" if is_arrays(source) else type(source).__name__ if is_dataset(source) else ""
    as_table: dict[str, Any] = {"path_column": path_column, "root": root, "skips_missing": on_bad == "skip"}
    opened = None if in_memory else opened_source(source, to, as_table, overwrite=overwrite, progress=progress)
    act = f"pack {in_memory if opened is None else opened.name!r}"
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
    final = user_path(to, f"pack to {to!r}") if target is None else target.place
    write_options = WriteOptions(final, threads, shard_bytes, executor, resume, overwrite, retries)
    pack_call = PackCall(options, write_options, started, progress, bucket=target)
    with file_changes.translated(act):
        if target is None and final.is_dir():
            inside = f"Pack to a file in it, such as {str(final / 'birds.h5')!r}"
            raise TargetExists(cannot(act, f"{str(final)!r} is a folder", "", inside))
        if opened is not None:
            return pack_call.run_files(opened)
        with _bad_images():
            return pack_call.run((plan_arrays if in_memory == "arrays" else plan_dataset)(source, options))


@contextmanager
def _bad_images() -> Iterator[None]:
    try:
        yield
    except UnequalSample as error:
        raise BadImage(*error.args) from error.__cause__


@dataclass(frozen=True)
class PackCall:
    """One call of `pack()`, or of `prepare()`, which passes a `request` that is stored in the pack's metadata.

    A pack in a bucket is written to `bucket`; the path in `write_options` then only determines the disk for the work.
    """

    options: PackOptions
    write_options: WriteOptions
    started: float
    progress: bool
    request: Mapping[str, str] | None = None
    bucket: BucketTarget | None = None

    @property
    def target(self) -> LocalTarget | BucketTarget:
        """The target of the pack."""
        return self.bucket or LocalTarget(self.options.act, self.write_options.final)

    def run_files(self, opened: Source) -> PackReport:
        """Pack the files of a source, and close it."""
        self.target.check_outside(opened)
        with closing(opened), _bad_images():
            files = FileCollection(opened, opened.list(), self.options)
            if (reused := self.reused(files.key)) is not None:
                return reused
            try:
                return self.run(files.plan(self.write_options.final))
            except UnequalSample:
                is_read = self.write_options.arrival is not None and self.write_options.arrival.info is not None
                if is_read or self.options.encoding != "auto" or self.options.size is not None:
                    raise
            return self.run(files.plan(self.write_options.final, is_unequal=True))

    def reused(self, key: str | None) -> PackReport | None:
        """Return the report of the existing pack if it is identical to the one that would be written.

        Raises:
            TargetExists: if something else exists at the path and must not be replaced.
        """
        act, target = self.options.act, self.target
        if not target.exists():
            return None
        if self.write_options.overwrite:
            if not target.is_pack():
                found = (f"{target.name!r} is not a pack, and ", option("overwrite", True), " replaces only packs")
                raise TargetExists(cannot(act, found, "", "Remove it, or choose another path"))
            return None
        try:
            info = target.read()
        except ColabkitError as error:
            if not target.is_pack():
                exists = f"{target.name!r} already exists and is not a pack"
                raise TargetExists(cannot(act, exists, "", "Choose another path")) from error
            damaged = f"{target.name!r} already exists and is a damaged pack"
            raise TargetExists(cannot(act, damaged, "", _REPLACE)) from error
        if key is None:
            unknown = f"{target.name!r} already exists and cannot be compared with a dataset"
            raise TargetExists(cannot(act, unknown, "", _REPLACE))
        if info.meta["plan"] != key:
            other = f"{target.name!r} already contains a pack of {info.meta['source']!r} with other samples or options"
            raise TargetExists(cannot(act, other, "", _REPLACE))
        target.reclaim()
        return self._report(info, None)

    def run(self, plan: PackPlan) -> PackReport:
        """Write the planned pack, or reuse an identical one."""
        if (reused := self.reused(plan.about["plan"])) is not None:
            return reused
        if self.request is not None:
            plan = replace(plan, about={**plan.about, "request": self.request})
        try:
            with self._bar(plan) as bar:
                if self.bucket is None:
                    written = write_plan(plan, self.write_options, bar)
                else:
                    written = write_to_bucket(plan, self.bucket, self.write_options, bar)
        except TargetExists:
            # Another process may have written the same pack in the meantime.
            if (reused := self.reused(plan.about["plan"])) is None:
                raise
            return reused
        info = read_pack(self.write_options.final) if self.bucket is None else self.bucket.read()
        return self._report(info, written)

    def _bar(self, plan: PackPlan) -> ProgressBar:
        if (arrival := self.write_options.arrival) is not None and is_readable_early(plan):
            return _CheckingBar(arrival)
        return ProgressBar("pack", plan.samples, " samples", self.progress)

    def _report(self, info: PackInfo, written: WrittenPack | None) -> PackReport:
        meta: Mapping[str, Any] = info.meta
        return PackReport(
            path=self.target.path,
            source=meta["source"],
            splits=meta["splits"],
            classes=tuple(meta["classes"]),
            encoding=meta["encoding"],
            sample_shape=tuple(meta["sample_shape"] or ()),
            pack_bytes=self.target.size_bytes(info),
            shards=len(info.shards) or 1,
            seconds=time.monotonic() - self.started,
            made_by=written.made_by if written else "",
            retries=written.retries if written else 0,
            attempts=written.attempts.total if written else 0,
            duplicates=written.attempts.duplicates if written else 0,
            lost=written.attempts.lost if written else 0,
            left_out=info.left_out,
            bad=info.bad,
            note=meta["options"].get("note") or "",
            inferred=info.inferred,
            reused=written is None,
        )


class _CheckingBar(ProgressBar):
    """A progress bar without a display, since the caller continues; it stops packing once nobody needs the pack."""

    def __init__(self, arrival: Arrival) -> None:
        super().__init__("pack", None, " samples", enabled=False)
        self._arrival = arrival

    def advance(self, count: int, files: int = 0) -> None:
        self._arrival.check_needed()

    def wait(self) -> None:
        self._arrival.check_needed()


def _listed(files: tuple[tuple[str, str], ...]) -> str:
    more = f"; and {len(files) - _LISTED} more" if len(files) > _LISTED else ""
    return "; ".join(f"{name!r} ({why})" for name, why in files[:_LISTED]) + more or "none"
