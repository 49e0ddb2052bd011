"""`CheckpointFolder`: snapshots content in the caller's thread; writes, seals and publishes it in the background."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from colabkit.foundation import (
    Corrupt,
    InvalidOption,
    NotEnoughSpace,
    TimedOut,
    can_hang,
    cannot,
    file_changes,
    format_seconds,
    has_started,
    local_root,
    mounts,
)
from colabkit.storage import SLOWEST_BYTES_S
from colabkit.training.checkpoints.files import (
    CHECKPOINT_STALLED_S,
    THREAD_NAME,
    TICK_S,
    LoadedCheckpoint,
    RemoteFolder,
    SaveJob,
    WriteAborted,
    load,
    load_first,
    write,
)
from colabkit.training.checkpoints.seals import (
    Mode,
    SealedCheckpoint,
    best_of,
    prune,
    put,
    remove_step,
    sealed_in,
    steps_in,
)
from colabkit.training.checkpoints.snapshots import ContentCopier

logger = logging.getLogger("colabkit")

# Approximate size in bytes of a checkpoint file without its tensors.
_HEADER_BYTES = 1 << 20


class CheckpointFolder:
    """A checkpoint folder that writes, seals and publishes checkpoints in the background.

    If `to` is on a local disk, checkpoints are written there. If it is on a mount that can hang, such as Drive,
    they are written to a local folder, and a second thread copies them to the mount, verifies them and seals them
    there. If the mount hangs or dies, training continues: `failures` lists the error, and the next save starts another
    attempt. If checkpoints are saved faster than the mount accepts them, only the newest and the best are copied.

    Both folders keep the newest `keep_last` checkpoints and the best one; sealing a checkpoint removes older ones. Use
    a `CheckpointFolder` from one thread only. As a context manager, it is closed on exit.

    If the file system does not answer a write in time, the write is abandoned, and undone when the file system answers.
    Until then, nothing else can be saved.

    Args:
        to: path of the folder; created when needed.
        keep_last: number of the newest checkpoints to keep.
        mode: whether the lowest or the highest score is best.
        monitor: name of the score; scores with another name are not compared.
        timeout_s: seconds that one operation may take, plus one second for every 10 MB of a checkpoint. None means 120.

    Attributes:
        local_folder: folder where checkpoints are written first; `to` itself if it is local.
        save_s: longest time in seconds from a call of `save()` until its checkpoint was sealed (on a mount: published).
    """

    def __init__(
        self,
        to: str | os.PathLike[str],
        keep_last: int = 2,
        mode: Mode = "min",
        monitor: str = "",
        timeout_s: float | None = None,
    ) -> None:
        self.folder = self.local_folder = Path(os.path.abspath(to))
        self._remote: RemoteFolder | None = None
        if can_hang(str(self.folder), mounts()):
            name = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:16]
            self.local_folder = Path(os.path.abspath(local_root(os.environ))) / "checkpoints" / name
            self._remote = RemoteFolder(self.folder, timeout_s)
        self.timeout_s = timeout_s or CHECKPOINT_STALLED_S
        self._keep_last = keep_last
        self._metric = f"{mode} {monitor}".rstrip()
        self._copies = ContentCopier()
        self._damaged: set[Path] = set()
        self._threads: list[threading.Thread] = []
        # This condition protects the attributes below.
        self._changed = threading.Condition()
        self._job: SaveJob | None = None
        self._publisher: threading.Thread | None = None
        self._publishing: SealedCheckpoint | None = None
        # Digests of the checkpoints whose publication has been attempted since the last save.
        self._tried: set[str] = set()
        self._local_sealed: list[SealedCheckpoint] = []
        self._remote_sealed: list[SealedCheckpoint] = []
        # The step last saved or loaded, or -1, and the time of the call that saved it; infinite if it was loaded.
        self._last_step, self._began = -1, math.inf
        self._last_error: BaseException | None = None
        self._failures: list[tuple[int, str]] = []
        self.save_s = 0.0
        self._is_over = False

    @property
    def is_free(self) -> bool:
        """Whether `save()` would not wait: nothing is being written, or the time limit of the write has passed."""
        job = self._job
        return job is None or job.left_s <= 0

    @property
    def written(self) -> SealedCheckpoint | None:
        """The newest checkpoint in the local folder; None before a save or load."""
        with self._changed:
            return next(iter(self._counting(self._local_sealed)), None)

    @property
    def latest(self) -> Path | None:
        """The path of the newest checkpoint, in `to` if published, else local; None before a save or load."""
        with self._changed:
            return self._place_of(self.written)

    @property
    def best(self) -> Path | None:
        """The path of the checkpoint with the best finite score; None without scores, or before a save or load."""
        with self._changed:
            return self._place_of(self._best())

    @property
    def failures(self) -> tuple[tuple[int, str], ...]:
        """The step and the reason of each failed save or publication."""
        with self._changed:
            return tuple(self._failures)

    def newest_step(self) -> int | None:
        """Return the step of the newest sealed checkpoint, or None without any; files are not checked for damage.

        Raises:
            TimedOut, NotMounted, FileFailed: if the mount of `to` does not answer, or a folder cannot be read.
        """
        act = f"look for checkpoints in {str(self.folder)!r}"
        with file_changes.translated(act):
            steps = steps_in(self.local_folder)
        if self._remote is not None:
            steps += self._remote.ask(act, lambda _: steps_in(self.folder))
        return max(steps, default=None)

    def newest(self, flaw_of: Callable[[Mapping[str, Any]], str] | None = None) -> LoadedCheckpoint | None:
        """Load the newest good checkpoint of `to` and the local folder, or return None without checkpoints.

        Digests are checked, and damaged checkpoints are skipped, as are those with a flaw, such as NaN, unless all
        undamaged ones have a flaw. A remote checkpoint is copied to the local folder first. Files are loaded with
        `weights_only=True`, so no code in them is executed. The random generators are not changed.

        Raises:
            Corrupt: if all checkpoints are damaged.
            TimedOut, NotMounted: if the mount of `to` does not answer or no longer exists.
            NotEnoughSpace, FileFailed: if a remote checkpoint cannot be copied, or a folder cannot be read.
        """
        act = f"resume from {str(self.folder)!r}"
        with file_changes.translated(act):
            local = sealed_in(self.local_folder)
        remote = [] if self._remote is None else self._remote.ask(act, lambda _: sealed_in(self.folder))
        remote_seals = {sealed.seal for sealed in remote}

        def read(sealed: SealedCheckpoint) -> Mapping[str, Any]:
            with file_changes.translated(act):
                if self._remote is not None and sealed.seal in remote_seals:
                    sealed = self._remote.fetch(sealed, self.local_folder, act)
                return load(sealed)

        candidates = sorted([*local, *remote], key=lambda one: (-one.step, one.seal in remote_seals))
        found, skipped, flawed = load_first(candidates, read, flaw_of)
        if found is not None:
            with self._changed, file_changes.translated(act):
                self._local_sealed, self._remote_sealed = sealed_in(self.local_folder), remote
                self._last_step, self._began = found.step, math.inf
                # Unlike damage, a flaw is in each copy of a checkpoint, also in one that was just fetched.
                copies = [one.path for one in (*self._local_sealed, *remote) if one.digest in flawed]
                self._damaged |= {*skipped, *copies}
        elif skipped:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped.items())
            next_step = "Choose another folder to start a new run"
            raise Corrupt(cannot(act, f"all checkpoints are damaged ({reasons})", "", next_step))
        return found

    def save(self, step: int, content: Mapping[str, Any], *, score: float | None = None, wait: bool = False) -> None:
        """Copy `content` and write it in the background as the checkpoint of `step`.

        The call blocks while an earlier write finishes and while `content` is copied. If there is not enough memory for
        a copy, or with `wait`, it also blocks until this checkpoint is written. The file holds detached tensors on the
        CPU. `failures` lists failed saves.

        Args:
            step: step after which the checkpoint is taken.
            content: nested dicts, lists and tuples of tensors, numbers and text.
            score: value that ranks the checkpoint.
            wait: whether to return only when the checkpoint is sealed locally, and to raise if that fails.

        Raises:
            InvalidOption: if the folder is closed, or `content` cannot be loaded with `weights_only=True`.
            NotEnoughSpace, FileFailed, TimedOut: with `wait`, if the checkpoint cannot be written; older ones stay.
        """
        act = f"save the checkpoint of step {step}"
        started = time.monotonic()
        with self._changed:
            try:
                self.await_writer(act)
            except TimedOut as error:
                self._note_failure(step, str(error), is_raised=wait)
                if wait:
                    raise
                return
            if self._is_over:
                raise InvalidOption(cannot(act, "the folder is closed", "", "Create a new CheckpointFolder"))
        copied = self._copies.copy(act, content)
        number = None if score is None or not math.isfinite(score) else float(score)
        limit_s = self.timeout_s + copied.size / SLOWEST_BYTES_S
        job = SaveJob(int(step), copied, number, started, wait or not copied.is_apart, wait, limit_s)
        self._start(job)
        try:
            if job.is_awaited:
                self.await_writer(act)
        except BaseException as error:
            # The caller may change the tensors after this call, so stop a write that uses them without a copy.
            if not copied.is_apart:
                job.stop.set()
            if wait or not isinstance(error, TimedOut):
                raise
        # Without another thread, Ctrl-C ends the write itself.
        if job.error is not None and (wait or isinstance(job.error, KeyboardInterrupt)):
            raise job.error

    def await_writer(self, act: str) -> None:
        """Wait until no checkpoint is being written, or raise `TimedOut`."""
        with self._changed:
            while (job := self._job) is not None:
                if (left_s := job.left_s) > 0:
                    self._changed.wait(min(left_s, TICK_S))
                    continue
                job.stop.set()
                found = f"{str(self.local_folder)!r} has not responded for {format_seconds(job.limit_s)}"
                advice = "Check the disk, or save to another one"
                if not job.is_given_up:
                    job.is_given_up = True
                    # Name the job in the error, because an earlier call may have started it.
                    own = TimedOut(cannot(f"save the checkpoint of step {job.step}", found, "", advice))
                    self._last_error = own
                    self._note_failure(job.step, str(own), is_raised=job.is_raised)
                raise TimedOut(cannot(act, found, "", advice))

    def _start(self, job: SaveJob) -> None:
        writer = threading.Thread(target=self._write, args=(job,), name=THREAD_NAME, daemon=True)
        with self._changed:
            self._threads = [*(thread for thread in self._threads if thread.is_alive()), writer]
            self._job = job
            try:
                if not has_started(writer):
                    self._write(job)
            except BaseException:
                self._job = None
                job.stop.set()
                raise

    def _write(self, job: SaveJob) -> None:
        """Write and seal a checkpoint and start its publication; runs in the writer thread if the system allows one."""
        try:
            left = self._sealed(job)
        except BaseException as error:
            job.copied = None
            with self._changed:
                job.error = error
                if not isinstance(error, WriteAborted) and not job.is_given_up:
                    self._last_error = error
                    self._note_failure(job.step, str(error) or type(error).__name__, is_raised=job.is_raised)
                self._job = None
                self._changed.notify_all()
            return
        job.copied = None
        with self._changed:
            self._local_sealed = left
            self._last_step, self._began = job.step, job.started
            self._last_error = None
            self.save_s = max(self.save_s, time.monotonic() - job.started)
            self._job = None
            self._changed.notify_all()
            self.publish_soon()

    def _sealed(self, job: SaveJob) -> list[SealedCheckpoint]:
        act = f"save {str(self.local_folder / f'checkpoint-{job.step:08d}.pt')!r}"
        copied = job.copied
        assert copied is not None

        def sealed() -> Path:
            fill, size = partial(write, copied.content, act=act, job=job), copied.size + _HEADER_BYTES
            return put(self.local_folder, job.step, (job.score, self._metric), size, fill, act).path

        def pruned(keep_last: int) -> list[SealedCheckpoint]:
            needed = [one.step] if (one := self._publishing) else []
            return prune(self.local_folder, job.step, keep_last, self._metric, self._damaged, needed)

        with file_changes.translated(act):
            try:
                with file_changes.translated(act):
                    path = sealed()
            except NotEnoughSpace:
                if len(sealed_in(self.local_folder)) == len(pruned(1)):
                    raise
                # Retry, since removing older checkpoints has freed space; at least one checkpoint still exists.
                path = sealed()
            self._damaged.discard(path)
            return pruned(self._keep_last)

    def publish_soon(self) -> None:
        """Publish the newest and the best local checkpoint in the background if `to` lacks them."""
        with self._changed:
            self._tried.clear()
            if self._remote is not None and self._publisher is None and not self._is_over:
                publisher = threading.Thread(target=self._publish, name="colabkit-publish", daemon=True)
                if has_started(publisher):
                    self._publisher = publisher
                    self._threads.append(publisher)
                elif sealed := self._next_to_publish():
                    refused = "the system allows no thread that publishes the checkpoint"
                    self._note_failure(sealed.step, f"{refused}; it remains at {str(sealed.path)!r}")

    def _publish(self) -> None:
        assert self._remote is not None
        while True:
            with self._changed:
                sealed = self._publishing = None if self._is_over else self._next_to_publish()
                step, began = self._last_step, self._began
                if sealed is None:
                    self._publisher = None
                    self._changed.notify_all()
                    return
                self._tried.add(sealed.digest)
            try:
                left = self._remote.publish(sealed, step, self._keep_last, self._metric, {*self._damaged}, self._go_on)
            except WriteAborted:
                continue
            except BaseException as error:
                # A newer save may have removed this checkpoint before its publication started.
                if not sealed.path.exists():
                    continue
                reason = str(error).rstrip(".") or type(error).__name__
                with self._changed:
                    self._note_failure(sealed.step, f"{reason}. The checkpoint remains at {str(sealed.path)!r}.")
                continue
            with self._changed:
                self._remote_sealed = left
                # The best checkpoint may be published long after it was saved.
                if sealed.step == step:
                    self.save_s = max(self.save_s, time.monotonic() - began)

    def _next_to_publish(self) -> SealedCheckpoint | None:
        done = self._tried | {sealed.digest for sealed in self._remote_sealed}
        return next((one for one in (self.written, self._best()) if one is not None and one.digest not in done), None)

    def _best(self) -> SealedCheckpoint | None:
        return best_of(self._counting([*self._remote_sealed, *self._local_sealed]), self._metric)

    def _go_on(self) -> None:
        if self._is_over:
            raise WriteAborted

    def _note_failure(self, step: int, reason: str, is_raised: bool = False) -> None:
        reason = reason.splitlines()[0]
        if not self._failures and not is_raised:
            logger.warning("could not save a checkpoint; the report lists all failures: %s", reason)
        self._failures.append((step, reason))

    def _counting(self, found: Iterable[SealedCheckpoint]) -> list[SealedCheckpoint]:
        """Return the checkpoints up to the last saved or loaded step, without those known to be damaged."""
        last = self._last_step
        return [one for one in found if one.step <= last and one.path not in self._damaged and not one.trouble]

    def _place_of(self, sealed: SealedCheckpoint | None) -> Path | None:
        remote = (one.path for one in self._remote_sealed if sealed is not None and one.digest == sealed.digest)
        return next(remote, None if sealed is None else sealed.path)

    def discard_untrained(self) -> None:
        """Remove the checkpoint of step 0, here and in `to`, if it is the last one that was saved."""
        if self._last_step == 0 and self._job is None:
            remove_step(self.local_folder, 0)
            if self._remote is not None and self._remote_sealed:
                self._remote.ask(f"clear {str(self.folder)!r}", lambda _: remove_step(self.folder, 0))

    def finish(self) -> None:
        """Wait until no checkpoint is being written or published; Ctrl-C ends the wait.

        Failed publications do not raise; `failures` lists them with the path of the local file.

        Raises:
            NotEnoughSpace, FileFailed, TimedOut: if the last checkpoint could not be written.
        """
        with self._changed:
            self.await_writer("finish saving checkpoints")
            self._changed.wait_for(lambda: self._publisher is None)
            if self._last_error is not None:
                raise self._last_error

    def close(self) -> None:
        """Stop the threads, drop unsealed checkpoints, and raise `TimedOut` for an unreported hanging write."""
        with self._changed:
            self._is_over = True
            if (job := self._job) is not None:
                job.stop.set()
            is_reported = job is not None and job.is_given_up
            self._changed.wait_for(lambda: self._publisher is None)
            try:
                self.await_writer("close the checkpoints")
            except TimedOut:
                if is_reported:
                    return
                raise
        for thread in [one for one in self._threads if one.ident is not None]:
            thread.join()
        self._copies.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TimedOut:
            # An earlier error takes precedence; this one is listed in `failures`.
            if kind is None:
                raise
