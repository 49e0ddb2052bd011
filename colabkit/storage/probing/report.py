"""What `read_probe()` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from colabkit.foundation import (
    Report,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    format_share,
    format_things,
    html_table,
    plotting,
)
from colabkit.storage.probing.plot import RateBar, RatePanel, draw_rates, text_bars

_NEAR_BEST = 0.9
_BEST = f"the fewest threads or ranges that reach {format_share(_NEAR_BEST)} of the highest rate"


@dataclass(frozen=True)
class ReadRate:
    """What so many reads at once achieve; the rates are None where there were too few files or too little time.

    Attributes:
        concurrency: threads that read a file each, or ranges of one file.
        reads: small files that were read, or reads of up to 1 MiB of a large one.
        read_bytes: their bytes.
        reads_per_s: while all threads were busy.
        bytes_per_s: while all threads were busy.
        quick_reads: those of less than a millisecond.
    """

    concurrency: int
    reads: int = 0
    read_bytes: int = 0
    reads_per_s: float | None = None
    bytes_per_s: float | None = None
    quick_reads: int = 0


def best_rate(rates: Sequence[ReadRate], *, of_bytes: bool) -> ReadRate | None:
    """Return the smallest concurrency that reaches 90% of the best rate, or None if nothing was measured."""
    known = [(rate, (rate.bytes_per_s if of_bytes else rate.reads_per_s) or 0.0) for rate in rates]
    best = max((value for _, value in known), default=0.0)
    return next((rate for rate, value in known if best and value >= _NEAR_BEST * best), None)


@dataclass(frozen=True, repr=False)
class ProbeReport(Report):
    """What `read_probe()` measured, and what follows from it.

    Attributes:
        path: as it was given.
        type: `"folder"`, `"file"`, or `"unknown"` where the path never answered.
        fstype: type of the mount that holds it, as the kernel names it; empty where unknown.
        mount_source: the device or remote behind the mount.
        is_remote: whether another program or machine answers for it.
        open_s: median of the time that opening a file takes, one at a time; None where no file was opened.
        open_p95_s: the 95th percentile.
        listed_entries: files, folders and links seen.
        listing_rate: entries per second, listed one folder after the other, without asking for sizes.
        is_complete: whether the whole tree was listed.
        files: files seen.
        sized_files: those of them whose size was asked for.
        sized_bytes: the bytes of these.
        small_files: those of the sized files that count as small: up to 1 MiB; where there are hardly any of these,
            under 16 MiB.
        small_bytes: the bytes of these.
        largest_bytes: size of the largest sized file.
        small: whole small files with 1, 4, 16 and 32 threads.
        large: the largest file in 1, 2, 4 and 8 ranges at once, if it has 16 MiB or more.
        errors: names of errors and how many operations failed so.
        stalled: whether an operation did not end.
        stall: which, and how long it was waited for.
        seconds: how long the probe took.
        recommendation: what follows, in one or two sentences.
        caveat: why the figures may not hold; mostly empty.
    """

    path: str
    type: str
    fstype: str
    mount_source: str
    is_remote: bool
    open_s: float | None
    open_p95_s: float | None
    listed_entries: int
    listing_rate: float | None
    is_complete: bool
    files: int
    sized_files: int
    sized_bytes: int
    small_files: int
    small_bytes: int
    largest_bytes: int
    small: tuple[ReadRate, ...]
    large: tuple[ReadRate, ...]
    errors: tuple[tuple[str, int], ...]
    stalled: bool
    stall: str
    seconds: float
    recommendation: str = ""
    caveat: str = ""

    @property
    def is_good(self) -> bool:
        """Whether everything that was tried worked and ended."""
        return not self.stalled and not self.errors

    @property
    def error_text(self) -> str:
        """The errors as text, as in `"EIO 3 times"`."""
        times = {name: "once" if count == 1 else f"{format_count(count)} times" for name, count in self.errors}
        return ", ".join(f"{name} {count}" for name, count in times.items())

    def _summary(self) -> str:
        where = f"{self.path!r} ({self.fstype})" if self.fstype else repr(self.path)
        facts = [] if self.open_s is None else [f"a file opens in {format_seconds(self.open_s)}"]
        if best := best_rate(self.small, of_bytes=False):
            facts.append(
                f"{format_rate(best.reads_per_s or 0, 'files')} with {format_things(best.concurrency, 'thread')}"
            )
        if best := best_rate(self.large, of_bytes=True):
            rate = f"{format_bytes(best.bytes_per_s or 0)}/s"
            facts.append(f"{rate} of one file in {format_things(best.concurrency, 'range')}")
        if self.errors:
            facts.append(self.error_text)
        first = f"Probed {where}: {', '.join(facts) or 'nothing could be measured'}"
        return "\n".join(filter(None, (first, self.recommendation, self.caveat)))

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("mount", ", from ".join(filter(None, (self.fstype, self.mount_source))) or "n/a"),
        ]
        if self.open_s is None or self.open_p95_s is None:
            rows.append(("opening", "n/a"))
        else:
            rows.append(("opening", f"{format_seconds(self.open_s)}; 95% within {format_seconds(self.open_p95_s)}"))
        if self.type == "folder":
            rate = "n/a" if self.listing_rate is None else format_rate(self.listing_rate, "entries")
            part = "the whole tree" if self.is_complete else "a part of the tree"
            rows.append(("listing", f"{rate}; {format_things(self.listed_entries, 'entry')}, {part}"))
        sized = "" if self.sized_files == self.files else f" in {format_count(self.sized_files)} of them"
        largest = f", the largest {format_bytes(self.largest_bytes)}" if self.sized_files > 1 else ""
        rows.append(("files", f"{format_count(self.files)}; {format_bytes(self.sized_bytes)}{sized}{largest}"))
        if self.errors:
            rows.append(("errors", self.error_text))
        if self.stalled:
            rows.append(("stalled", self.stall))
        return [*rows, ("probed in", format_seconds(self.seconds))]

    def _panels(self) -> list[RatePanel]:
        small, large = best_rate(self.small, of_bytes=False), best_rate(self.large, of_bytes=True)
        panels = []
        if small:
            bars = [_bar(rate, rate.reads_per_s, _count, rate is small) for rate in self.small]
            panels.append(RatePanel(plotting.BLUE, "Small files", "files/s", "threads", bars))
        if large:
            bars = [_bar(rate, rate.bytes_per_s, _bytes, rate is large) for rate in self.large]
            panels.append(RatePanel(plotting.GREEN, "One large file", "per second", "ranges", bars))
        return panels

    def __str__(self) -> str:
        panels = self._panels()
        note = f"  best: {_BEST}" if panels else ""
        return "\n".join(filter(None, (self.text_table(), text_bars(panels), note)))

    def _repr_html_(self) -> str:
        first = [("advice", self.recommendation), *([("caveat", self.caveat)] if self.caveat else [])]
        panels = self._panels()
        last = [("solid bar", _BEST)] if panels else []
        told = [(name, self._worded(text)) for name, text in first]
        return html_table(self._worded(self._summary()).splitlines()[0], [*told, *self._rows(), *last]) + draw_rates(
            panels
        )


def _bar(rate: ReadRate, value: float | None, text: Callable[[float], str], is_best: bool) -> RateBar:
    return RateBar(str(rate.concurrency), value, "n/a" if value is None else text(value), is_best)


def _bytes(value: float) -> str:
    number, unit = format_bytes(value).split(" ")
    return f"{float(number):.0f} {unit}" if float(number) >= 9.95 else f"{number} {unit}"


def _count(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else format_count(value)
