"""One call of `pack()` or `prepare()`: it plans a pack, writes it or reuses an identical one, and reports."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from colabkit.foundation import (
    BadImage,
    ColabkitError,
    ProgressBar,
    SilentBar,
    TargetExists,
    Text,
    cannot,
    option,
)
from colabkit.packs.format.arrival import Arrival
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing.bucket_shards import write_to_bucket
from colabkit.packs.packing.file_plan import FileCollection
from colabkit.packs.packing.file_samples import FileSampleMaker, UnequalArray
from colabkit.packs.packing.options import PackOptions
from colabkit.packs.packing.pack_plan import PackPlan, UnequalSample
from colabkit.packs.packing.pack_report import PackReport
from colabkit.packs.packing.pack_writer import WrittenPack, why_complete_first
from colabkit.packs.packing.shards import WriteOptions, write_plan
from colabkit.packs.packing.targets import BucketTarget, LocalTarget
from colabkit.storage import FolderSource, Listing, Source

_REPLACE: Text = ("Use ", option("overwrite", True), " to replace it, or choose another path")


@contextmanager
def bad_images() -> Iterator[None]:
    """Raise a `BadImage` instead of an `UnequalSample`, which is only for internal use."""
    try:
        yield
    except UnequalSample as error:
        raise BadImage(*error.args) from None


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

    def planned(self, opened: Source, listing: Listing | None = None) -> PlannedFiles:
        """List the files of a source, unless a `listing` is given, and plan their pack; an error closes the source."""
        with ExitStack() as on_error:
            on_error.callback(opened.close)
            self.target.check_outside(opened)
            with bad_images():
                if listing is not None and isinstance(opened, FolderSource):
                    listing = opened.completed(listing)
                files = FileCollection(opened, listing or opened.list(), self.options)
                reused = self.reused(files.key)
                plan = files.plan(self.write_options.final) if reused is None else None
            on_error.pop_all()
        return PlannedFiles(self, opened, files, plan, reused)

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
                raise TargetExists(cannot(act, exists, "", "Choose another path")) from None
            damaged = f"{target.name!r} already exists and is a damaged pack"
            raise TargetExists(cannot(act, damaged, "", _REPLACE)) from error
        if key is None:
            unknown = f"{target.name!r} already exists and cannot be compared with a dataset"
            next_step = ("To use this pack, leave out the call; to replace it, use ", option("overwrite", True))
            raise TargetExists(cannot(act, unknown, "", next_step))
        if info.meta["plan"] != key:
            other = f"{target.name!r} already contains a pack of {info.meta['source']!r} with other samples or options"
            raise TargetExists(cannot(act, other, "", _REPLACE))
        if self.write_options.shard_bytes and self.write_options.executor is None and not info.shards:
            single = f"{target.name!r} already contains these samples in a single file"
            raise TargetExists(cannot(act, single, "a pack of shards", _REPLACE))
        self.options.check_bad(info, target.name, ("Repair the samples and pack with ", option("overwrite", True)))
        target.reclaim()
        return self._report(info, None)

    def run(self, plan: PackPlan, arrival: Arrival | None = None) -> PackReport:
        """Write the planned pack, or reuse an identical one; readers of the incomplete pack use `arrival`."""
        if (reused := self.reused(plan.about["plan"])) is not None:
            return reused
        if self.request is not None:
            plan = replace(plan, about={**plan.about, "request": self.request})
        try:
            with self._bar(plan, arrival) as bar:
                if self.bucket is None:
                    written = write_plan(plan, self.write_options, bar, arrival)
                else:
                    written = write_to_bucket(plan, self.bucket, self.write_options, bar)
        except TargetExists:
            # Another process may have written the same pack in the meantime.
            if (reused := self.reused(plan.about["plan"])) is None:
                raise
            return reused
        info = read_pack(self.write_options.final) if self.bucket is None else self.bucket.read()
        return self._report(info, written)

    def _bar(self, plan: PackPlan, arrival: Arrival | None) -> ProgressBar:
        if arrival is not None:
            # No bar is shown, since the caller continues. Packing stops once nobody needs the pack.
            return SilentBar(arrival.check_needed)
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


@dataclass(frozen=True)
class PlannedFiles:
    """The files of a source and the plan of their pack, or the report of an identical pack that exists already."""

    call: PackCall
    opened: Source
    files: FileCollection
    plan: PackPlan | None
    reused: PackReport | None

    @property
    def why_late(self) -> Text:
        """Reason why the pack can be read only when it is complete; empty if it can be read earlier."""
        if self.plan is None:
            return "it is complete"
        options, maker = self.call.options, self.plan.maker
        is_guessed = options.encoding == "auto" and options.size is None
        if is_guessed and isinstance(maker, FileSampleMaker) and maker.is_image and maker.encoding == "raw":
            return ("images may differ in size; use ", option("size"))
        return why_complete_first(self.plan)

    def write(self, arrival: Arrival | None = None) -> PackReport:
        """Write the pack and close the source; readers of the incomplete pack use `arrival`."""
        call = self.call
        with closing(self.opened), bad_images():
            if self.plan is None:
                assert self.reused is not None
                return self.reused
            try:
                return call.run(self.plan, arrival)
            except UnequalArray:
                raise
            except UnequalSample:
                if call.options.encoding != "auto" or call.options.size is not None:
                    raise
            return call.run(self.files.plan(call.write_options.final, is_unequal=True))
