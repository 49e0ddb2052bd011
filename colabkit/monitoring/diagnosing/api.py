"""`doctor()` analyzes a training report or a loader; `watch()` times the steps of any loader."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

import torch

from colabkit.foundation import (
    Code,
    HostSnapshot,
    InvalidOption,
    LoaderFacts,
    LongPass,
    MetersSnapshot,
    Telemetry,
    cannot,
    check_duration,
    check_type,
    checked_call,
    format_rate,
    format_seconds,
    kind_of,
    meters,
    omit,
    option,
    sampled,
    seen,
)
from colabkit.loading import (
    Loader,
    batch_image_size,
    bytes_in,
    files_of,
    is_remote,
    may_be_loader,
    path_of,
    samples_in,
    set_mark,
)
from colabkit.monitoring.diagnosing.diagnosis import Diagnosis, Shares, set_subject
from colabkit.monitoring.diagnosing.machine_profile import SNAPSHOT_S
from colabkit.monitoring.diagnosing.run_profile import WINDOW_S, RunProfile, profile_run
from colabkit.monitoring.diagnosing.trial import LoaderOnTrial
from colabkit.monitoring.diagnosing.verdict import judge
from colabkit.training import HeadspaceReport, TrainReport, read_run, restored_training

T_co = TypeVar("T_co", covariant=True)

_RECENT_S = 60.0
# Number of snapshots of a run above which the first one is left out.
_MANY_SNAPSHOTS = 5
_WARM_UP = 3
# Number of batches after which the steps that the GPU has finished are counted.
_SETTLED_EVERY = 16
# Rules about training steps, which do not apply when a loader is timed without training.
_OF_A_STEP = ("wrong_device",)


@checked_call()
def doctor(
    of: TrainReport | Iterable[Any] | str | os.PathLike[str] | None = None,
    *,
    seconds: float | str = 5.0,
    headspace: HeadspaceReport | None = None,
) -> Diagnosis:
    """Find the bottleneck of a training run, break down the step time, and suggest up to three fixes.

    Args:
        of: a `TrainReport`; the path of a saved one, or of the `status.json` of a run; a `Loader`, or another loader
            wrapped by `watch()`, that a training loop has used; or any unused loader, such as torch's `DataLoader`,
            which is then iterated without training to measure its speed. None for the most recent training run or loop
            in this process; if that loop alternated between loaders, as with training and validation, the first one
            used.
        seconds: how long to iterate a loader that has not been used, in seconds or as text such as `"1min"`.
        headspace: the result of `headspace()` for the same step, which must do everything that the watched loop does
            with a batch. The speeds after each fix are then predicted from the step's time without a loader. Otherwise,
            that time is estimated from the run itself, which is less accurate if the loader and the step share a CPU.

    Returns:
        The diagnosis: the verdict, the shares of the step time, and the advice.

    Raises:
        InvalidOption: if `of` is none of these, the loader yields no batches, or nothing has been trained yet; if
            `seconds` is not a duration above 0; if `headspace` has another type, or is given for a loader that has not
            been used.
        SourceMissing: if nothing is at the path of the report.
        FileFailed: if the report cannot be read.
        BadSource: if the file at the path is not a saved report.

    Example:
        >>> import colabkit
        >>> data = colabkit.prepare("samples:digits", to=None)["train"]
        >>> loader = colabkit.Loader(data, batch_size=64)
        >>> diagnosis = colabkit.doctor(loader, seconds=0.5)
        >>> diagnosis.verdict in ("data", "copy", "compute", "other", "host", "unknown")
        True
    """
    act, kinds = "diagnose", (HeadspaceReport, type(None))
    measure = ("Use ", option("headspace", Code("colabkit.headspace(step, loader)")))
    check_type(act, "headspace", headspace, kinds, "a HeadspaceReport or None", measure)
    subject: Any = meters.latest() if of is None else of
    if subject is None:
        nothing = "neither training nor a loop over a Loader has run in this process"
        raise InvalidOption(cannot(act, nothing, "", "Train first, or pass a loader or the status.json of a run"))
    if isinstance(subject, meters.LoaderMeters):
        return judge(_of_meters(subject, headspace))
    if isinstance(subject, TrainReport):
        epochs = [(record.epoch + 1, record.shown) for record in subject.epochs]
        return judge(_profile(subject.spent, subject.facts, subject.hosts, subject.precision, epochs, headspace))
    if isinstance(of, str | os.PathLike):
        return judge(_profile(*read_run(of), headspace))
    if not isinstance(subject, Loader | WatchedLoader) and not may_be_loader(subject):
        found, expected = f"the argument is {kind_of(subject)}", "a TrainReport or an iterable of batches"
        raise InvalidOption(
            cannot(act, found, expected, "Pass a TrainReport, or a loader such as PyTorch's DataLoader")
        )
    if isinstance(subject, WatchedLoader) and isinstance(subject.watched, Loader):
        # A `Loader` times its own steps, and knows its parts.
        subject = subject.watched
    loader = subject if isinstance(subject, Loader) else watch(subject)
    watched = getattr(loader, "watched", loader)
    if loader.meters.snapshot().steps:
        run = _of_meters(loader.meters, headspace)
        return set_subject(judge(run), LoaderOnTrial(watched, run, is_alone=False))
    if headspace is not None:
        next_step = ("Pass the loader that you trained with, or ", omit("headspace"))
        unused = (option("headspace"), " is given, but the loader has not been used for training")
        raise InvalidOption(cannot(act, unused, "", next_step))
    run, alone = _by_itself(loader if isinstance(loader, Loader) else WatchedLoader(watched), seconds)
    return set_subject(alone, LoaderOnTrial(watched, run, is_alone=True))


def _of_meters(counts: meters.LoaderMeters, headspace: HeadspaceReport | None) -> RunProfile:
    spent = counts.snapshot()
    recent_s = max(min(WINDOW_S, spent.seconds), min(_RECENT_S, sum(step.seconds for step in spent.recent)))
    first_s, last_s = counts.timed_s - recent_s, counts.timed_s + SNAPSHOT_S
    # A snapshot covers the time before it, so the first one of a run also shows what ran before.
    margin_s = SNAPSHOT_S if recent_s > _MANY_SNAPSHOTS * SNAPSHOT_S else 0.0
    hosts = (
        seen(first_s + margin_s, last_s)
        or seen(first_s - SNAPSHOT_S, last_s)
        # In a long run, the newest snapshot may be older than the newest steps.
        or seen(first_s - spent.seconds, last_s)[-1:]
        or (_host_now(),)
    )
    return _profile(spent, counts.facts, hosts, headspace=headspace)


def _profile(
    spent: MetersSnapshot,
    facts: LoaderFacts | None,
    hosts: Iterable[HostSnapshot],
    precision: str | None = None,
    epochs: Sequence[tuple[int, Mapping[str, float]]] = (),
    headspace: HeadspaceReport | None = None,
) -> RunProfile:
    run = replace(profile_run(spent, facts, [*hosts], precision=precision), epochs=epochs)
    return run if headspace is None else replace(run, measured_alone_s=1 / headspace.samples_per_s)


def _host_now() -> HostSnapshot:
    with closing(Telemetry()) as telemetry:
        return telemetry.snapshot()


def _by_itself(loader: Loader | WatchedLoader[Any], seconds: float | str) -> tuple[RunProfile, Diagnosis]:
    duration_s = check_duration("diagnose the loader", "seconds", seconds, example=5)
    before = loader.meters.snapshot()
    aside = loader.aside() if isinstance(loader, Loader) else nullcontext(loader.meters)
    # Iterating a `DataLoader` draws seeds from the global generator of torch.
    with restored_training("diagnose the loader", None, None), sampled() as sampler, aside as counts:
        until = time.monotonic() + duration_s
        for passes in count():
            given = 0
            batches: Any = iter(loader)
            with closing(batches):
                for _ in batches:
                    given += 1
                    if time.monotonic() > until and given + passes > _WARM_UP:
                        break
            if not given and not passes:
                next_step = "Check that its dataset is not empty"
                raise InvalidOption(cannot("diagnose the loader", "it yields no batches", "", next_step))
            if not given or time.monotonic() > until:
                break
        hosts = sampler.recent(duration_s)
    parts = (loader.meters.snapshot() - before).parts
    spent = replace(counts.snapshot(), parts=parts, first_pass=None)
    run = replace(_profile(spent, loader.meters.facts, hosts), is_enough=True)
    found = judge(run, "unknown")
    rate = format_rate(run.samples_per_s, "images")
    per_batch = f"{format_seconds(run.step.seconds)} per batch of {run.step.samples} on average"
    return run, replace(
        found,
        sentence=f"The loader alone: {rate}, {per_batch}; faster steps wait for it",
        shares=Shares(),
        ceiling_samples_per_s=None,
        advice=tuple(
            replace(advice, samples_per_s=None, low_samples_per_s=None, high_samples_per_s=None, saved_s=None)
            for advice in found.advice
            if advice.rule not in _OF_A_STEP
        ),
    )


@checked_call()
def watch(loader: Iterable[T_co]) -> WatchedLoader[T_co]:
    """Wrap a loader so that `doctor()` and `dashboard()` can time its steps.

    The wrapper yields the same batches. Attributes that it does not define are those of `loader`.

    Args:
        loader: torch's `DataLoader` or any other iterable of batches; each iteration is one pass.

    Returns:
        The wrapped loader.

    Raises:
        InvalidOption: if `loader` is not an iterable of batches, for example a model or a tensor.

    Example:
        >>> import colabkit, torch
        >>> loader = colabkit.watch(torch.utils.data.DataLoader(range(6400), batch_size=64))
        >>> for batch in loader:
        ...     mean = batch.float().mean()
        >>> diagnosis = colabkit.doctor(loader)
        >>> diagnosis.samples_per_s > 0
        True
    """
    if isinstance(loader, WatchedLoader):
        return loader
    if not may_be_loader(loader):
        found = f"the argument is {kind_of(loader)}"
        raise InvalidOption(
            cannot("watch", found, "an iterable of batches", "Pass a loader such as PyTorch's DataLoader")
        )
    return WatchedLoader(loader)


class WatchedLoader(Generic[T_co]):
    """A loader whose steps are timed.

    The panel is not updated while `loader` produces a batch, since `loader` blocks the thread that paints.

    Args:
        loader: an iterable of batches.

    Attributes:
        watched: the wrapped loader.
        meters: counts and step times. They have no parts, since the stages inside `loader` are unknown.

    Example:
        >>> import colabkit, torch
        >>> watched = colabkit.watch(torch.utils.data.DataLoader(range(6400), batch_size=64))
        >>> batches = [batch for batch in watched]
        >>> watched.meters.snapshot().batches
        100
    """

    def __init__(self, loader: Iterable[T_co]) -> None:
        self.watched = loader
        self._passes = count()
        self.meters = meters.LoaderMeters()
        self._facts = self.meters.facts = _facts_of(loader)

    def __len__(self) -> int:
        return len(self.watched)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "watched":
            raise AttributeError(name)
        return getattr(self.watched, name)

    def __repr__(self) -> str:
        return f"watch({self.watched!r})"

    def __iter__(self) -> Iterator[T_co]:
        """Yield the batches of one pass and time each step."""
        counts, now = self.meters, time.perf_counter
        gpu = _gpu()
        self._facts = counts.facts = replace(self._facts, device="cpu" if gpu is None else str(gpu))
        meters.used(counts)
        meters.publish(meters.EpochStarted(counts, next(self._passes), _length(self.watched), self._facts.samples))
        clock = _clock(counts.spent, gpu)
        # A panel counts the passes since the event, so begin this one after it.
        counts.begin_pass(clock)
        asked = now()
        long = LongPass(earlier_s=counts.spent.seconds, earlier=counts.passes - 1)
        try:
            for batch in self.watched:
                samples = samples_in(batch, self._facts.batch_size or 1)
                if not counts.batches and samples and (size := bytes_in(batch)):
                    height, width = batch_image_size(batch) or (None, None)
                    self._facts = counts.facts = replace(
                        self._facts,
                        image_height=height,
                        image_width=width,
                        has_mappings=isinstance(batch, Mapping),
                        sample_bytes=size / samples,
                    )
                counts.batches += 1
                counts.samples += samples
                clock.given(None)
                given = now()
                if given >= long.due_s:
                    long.observe()
                if meters.listeners:
                    meters.publish(meters.BatchTaken(counts))
                yield batch
                del batch
                left = now()
                clock.stepped(asked, given, left, samples)
                asked = left
                if not counts.batches % _SETTLED_EVERY:
                    counts.settle(clock)
        finally:
            long.end()
            counts.settle(clock)


def _clock(totals: meters.StepTotals, gpu: torch.device | None) -> meters.Clock:
    """Return a clock for the steps on a GPU; without one, a host clock that adds its steps to `totals`."""
    return meters.HostClock(totals) if gpu is None else meters.DeviceClock(partial(set_mark, gpu))


def _gpu() -> torch.device | None:
    """Return the GPU with most of this process's tensors; None if it has none.

    It may differ from the current GPU, on which recording an event would take hundreds of MiB.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    number = max(range(torch.cuda.device_count()), key=torch.cuda.memory_allocated)
    return torch.device("cuda", number) if torch.cuda.memory_allocated(number) else None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except Exception:
        # torch raises several exception types for datasets and samplers without a length.
        return None


def _facts_of(loader: Any) -> meters.LoaderFacts:
    dataset = getattr(loader, "dataset", None)
    batch_size, workers = getattr(loader, "batch_size", None), getattr(loader, "num_workers", None)
    pins, keeps = getattr(loader, "pin_memory", None), getattr(loader, "persistent_workers", None)
    path, prefetch = path_of(dataset), getattr(loader, "prefetch_factor", None)
    return meters.LoaderFacts(
        kind="foreign",
        samples=_length(dataset) if dataset is not None else None,
        batch_size=batch_size if isinstance(batch_size, int) else None,
        workers=workers if isinstance(workers, int) else None,
        path=path,
        source=files_of(dataset),
        is_remote=is_remote(path),
        encoding="python",
        is_pinned=pins if isinstance(pins, bool) else None,
        keeps_workers=True if workers == 0 else keeps if isinstance(keeps, bool) else None,
        split=getattr(dataset, "split_name", None),
        shuffle=_is_shuffled(_sampler_of(loader)),
        prefetch=prefetch if isinstance(prefetch, int) else None,
        is_stream=isinstance(dataset, torch.utils.data.IterableDataset),
    )


def _sampler_of(loader: Any) -> Any:
    # With a custom `batch_sampler`, `DataLoader.sampler` is sequential and unused.
    batches = getattr(loader, "batch_sampler", None)
    return getattr(loader if batches is None else batches, "sampler", None)


def _is_shuffled(sampler: Any) -> bool | None:
    if isinstance(sampler, torch.utils.data.RandomSampler):
        return True
    return False if isinstance(sampler, torch.utils.data.SequentialSampler) else None
