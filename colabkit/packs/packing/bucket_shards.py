"""Writes the shards of a pack to a bucket, without a file system that workers share.

Each attempt at a shard writes a local file, and uploads it under a name that contains its seal. The index lists one
attempt at each shard and is uploaded last, so all other files are never read; they are removed at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path

from colabkit.foundation import ColabkitError, PackingFailed, ProgressBar, TargetExists, cannot, file_changes
from colabkit.packs.format.layout import Shard
from colabkit.packs.format.pack_file import read_pack
from colabkit.packs.packing.pack_plan import PackPlan
from colabkit.packs.packing.pack_writer import Attempts, WrittenPack
from colabkit.packs.packing.shard_tasks import ShardResult, ShardTask, ShardTasks
from colabkit.packs.packing.shards import (
    ListedShard,
    WriteOptions,
    describe_shard,
    divide_samples,
    estimate_bytes,
    threads_of_tasks,
    write_index,
)
from colabkit.packs.packing.targets import BucketTarget, work_folder

logger = logging.getLogger("colabkit")


@dataclass(frozen=True, slots=True)
class UploadedShard(WrittenPack):
    """Result of an attempt that uploaded a shard.

    Attributes:
        listed: entry of the index; None if all samples of the shard were skipped.
    """

    listed: ListedShard | None = None

    @classmethod
    def of(cls, written: WrittenPack, listed: ListedShard | None) -> UploadedShard:
        """Return a result with the entry of the index."""
        return cls(**{one.name: getattr(written, one.name) for one in fields(WrittenPack)}, listed=listed)


@dataclass(frozen=True)
class UploadTask(ShardTask):
    """Writes one shard to a local file and uploads it.

    Attributes:
        target: the pack in the bucket.
    """

    target: BucketTarget

    def run(self) -> ShardResult:
        """Write and upload the shard; return the result, or the traceback if user code raised an error."""
        if self.attempts.is_dir():
            return super().run()
        # This worker is not on the machine of the caller, whose folders do not exist here.
        with work_folder() as folder:
            here = replace(self, attempts=folder / "attempts", sign=folder / "sign")
            file_changes.make_folder(here.attempts)
            file_changes.write_file(here.sign, b"")
            return here.run()

    def keep(self, path: Path, written: WrittenPack) -> tuple[WrittenPack, bool]:
        """Upload a complete file."""
        info = read_pack(path)
        name = self.target.shard_name(self.plan.about["shard"][0], info.seal)
        self.target.folder.put(path, name)
        return UploadedShard.of(written, ListedShard.of(info, name)), True


def write_to_bucket(plan: PackPlan, target: BucketTarget, options: WriteOptions, bar: ProgressBar) -> WrittenPack:
    """Write a plan to shards in a bucket, then their index, and remove all shards that it does not list.

    Raises:
        TargetExists: if another call has created the index in the meantime, and it must not be replaced.
        PackingFailed: if the executor fails, or another call removed a shard.
        FileFailed, FetchFailed, TimedOut: if the bucket cannot be read or written.
        BadImage, BadSource, NotEnoughSpace: as for a local pack.
    """
    assert options.shard_bytes is not None
    ranges = divide_samples(estimate_bytes(plan), options.shard_bytes)
    with work_folder() as folder:
        tasks = {
            number: UploadTask(
                plan.shard(*ranges[number], describe_shard(plan, ranges, number)),
                folder / "attempts" / target.file_name,
                folder / "attempts",
                folder / "sign",
                options.threads if options.executor is None else threads_of_tasks(plan, options.threads),
                target,
            )
            for number in range(len(ranges))
        }
        try:
            ordered, attempts, made_by = _run(tasks, plan, options, bar)
            listed = [one.listed for one in ordered if one.listed is not None]
            seal, counts = write_index(plan, folder / target.file_name, listed, ordered, replace=False)
            _publish(target, folder / target.file_name, seal, [one.shard for one in listed], replace=options.overwrite)
        finally:
            _clean(target)
    bad = tuple(bad for one in ordered for bad in one.bad)
    return WrittenPack(seal, counts, bad, sum(one.retries for one in ordered), made_by, attempts)


def _run(
    tasks: Mapping[int, UploadTask], plan: PackPlan, options: WriteOptions, bar: ProgressBar
) -> tuple[list[UploadedShard], Attempts, str]:
    """Return the first successful attempt at each shard, in order, the counts of all attempts, and who packed."""
    found: dict[int, UploadedShard] = {}
    running = None
    if options.executor is None:
        file_changes.make_folder(tasks[0].attempts)
        results = ((number, task.attempt(bar)) for number, task in tasks.items())
    else:
        first = tasks[0]
        running = ShardTasks(plan.act, tasks, options.executor, options.retries, first.sign, first.attempts, bar.wait)
        results = running.results()
    with closing(results):
        for number, written in results:
            found[number] = written if isinstance(written, UploadedShard) else UploadedShard.of(written, None)
            if running is not None:
                bar.advance(tasks[number].plan.samples)
            plan.check_bad([bad for _, one in sorted(found.items()) for bad in one.bad])
    ordered = [found[number] for number in tasks]
    if running is None:
        return ordered, Attempts(), ordered[0].made_by
    return ordered, running.count_attempts(), running.made_by


def _publish(target: BucketTarget, index: Path, seal: str, shards: list[Shard], *, replace: bool) -> None:
    folder = target.folder
    sizes = folder.sizes()
    if missing := [shard.name for shard in shards if sizes.get(shard.name) != shard.length]:
        found = f"another call removed the shard {missing[0]!r}"
        raise PackingFailed(cannot(target.act, found, "", "Run one call at a time for an address, and pack again"))
    if replace:
        folder.put(index, target.file_name)
    # If a request is repeated, it finds the index that this call has created.
    elif not folder.create(index, target.file_name) and target.read().seal != seal:
        created = f"another process created {target.name!r} in the meantime"
        raise TargetExists(cannot(target.act, created, "", "Pack again, or choose another path"))


def _clean(target: BucketTarget) -> None:
    try:
        target.remove_unlisted()
    except ColabkitError as error:
        logger.warning("shards that no index lists may remain next to %r: %s", target.name, error)
