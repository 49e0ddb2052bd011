"""The report of `probe()`: measured rates, as text and as bar charts, and a recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from colabkit.foundation import (
    DRIVEFS,
    PYTHON,
    MissingPackage,
    Report,
    Text,
    call,
    escape,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    format_share,
    format_things,
    html_table,
    option,
    plotting,
)

_NEAR_BEST = 0.9
_EIGHTHS = " ▏▎▍▌▋▊▉"
_TEXT_BAR = 24
_THOUSAND = 1000
_QUICK_S = 2.0
"""Seconds. A local folder that delivers 1,000 files in less time can be packed directly, without a local copy."""
_LONG_S = 600.0
_CACHED_SHARE = 0.2
_CACHED_BYTES_PER_S = float(2 << 30)
"""Rate in bytes/s above that of networks and disks of hosted machines, so faster data probably comes from memory."""
_BEST = f"the fewest threads or ranges that reach {format_share(_NEAR_BEST)} of the highest rate"


@dataclass(frozen=True)
class ReadRate:
    """The read rate at one level of concurrency; rates are None if there were too few files or too little time.

    Attributes:
        concurrency: number of threads that read small files, or of concurrent ranges of one large file.
        reads: number of small files read, or of reads of up to 1 MiB from a large file.
        read_bytes: number of bytes read.
        reads_per_s: reads per second while all threads were busy.
        bytes_per_s: bytes per second while all threads were busy.
        quick_reads: number of reads that took less than a millisecond.
    """

    concurrency: int
    reads: int = 0
    read_bytes: int = 0
    reads_per_s: float | None = None
    bytes_per_s: float | None = None
    quick_reads: int = 0


def best_rate(rates: Sequence[ReadRate], *, of_bytes: bool) -> ReadRate | None:
    """Return the rate at the lowest concurrency that reaches 90% of the best rate; None if nothing was measured."""
    known = [(rate, (rate.bytes_per_s if of_bytes else rate.reads_per_s) or 0.0) for rate in rates]
    best = max((value for _, value in known), default=0.0)
    return next((rate for rate, value in known if best and value >= _NEAR_BEST * best), None)


class RateBar(NamedTuple):
    """A bar: concurrency, its unit (such as `"threads"`), height, value as text, and whether to mark it as the best."""

    concurrency: int
    axis: str
    height: float
    text: str
    is_best: bool


class RatePanel:
    """A bar chart of read rates, for small files or for one large file."""

    def __init__(self, rates: Sequence[ReadRate], *, of_bytes: bool) -> None:
        self.title = "One large file, per second" if of_bytes else "Small files, files/s"
        self.axis = "ranges" if of_bytes else "threads"
        self.color = plotting.GREEN if of_bytes else plotting.BLUE
        self.bars = []
        best = best_rate(rates, of_bytes=of_bytes)
        for rate in rates:
            value = rate.bytes_per_s if of_bytes else rate.reads_per_s
            if value is None:
                continue
            text = _bytes(value) if of_bytes else _count(value)
            axis = self.axis.removesuffix("s") if rate.concurrency == 1 else self.axis
            self.bars.append(RateBar(rate.concurrency, axis, value, text, rate is best))


@dataclass(frozen=True, repr=False)
class ProbeReport(Report):
    """The report of `probe()`: measured rates and a recommendation.

    Attributes:
        path: the path as the caller wrote it.
        type: `"folder"`, `"file"`, or `"unknown"` if the path never answered.
        fstype: file system type of the mount, as in the mount table; empty if unknown.
        mount_source: the device or remote behind the mount.
        is_remote: whether another program or machine serves the mount.
        open_s: median seconds to open a file, one at a time; None if no file was opened.
        open_p95_s: 95th percentile of the seconds to open a file.
        listed_entries: number of files, folders and links listed.
        listing_rate: entries per second, with one folder listed at a time and without reading sizes.
        is_complete: whether the whole tree was listed.
        files: number of files found.
        sized_files: number of files whose size was read.
        sized_bytes: total size of these files.
        small_files: number of sized files of up to 1 MiB, or of under 16 MiB if fewer than five have up to 1 MiB.
        small_bytes: total size of the small files.
        largest_bytes: size of the largest file whose size was read.
        small: rates for small files with 1, 4, 16 and 32 threads.
        large: rates for the largest file in 1, 2, 4 and 8 concurrent ranges, if it has at least 16 MiB.
        errors: pairs of an error's name and the number of operations that failed with this error.
        stalled: whether an operation hung.
        stall: the hanging operation, and the time waited for it.
        seconds: duration of the probe.
        caveat: reason why the figures may be too optimistic; usually empty.
    """

    path: str
    type: str
    fstype: str = ""
    mount_source: str = ""
    is_remote: bool = False
    open_s: float | None = None
    open_p95_s: float | None = None
    listed_entries: int = 0
    listing_rate: float | None = None
    is_complete: bool = False
    files: int = 0
    sized_files: int = 0
    sized_bytes: int = 0
    small_files: int = 0
    small_bytes: int = 0
    largest_bytes: int = 0
    small: tuple[ReadRate, ...] = ()
    large: tuple[ReadRate, ...] = ()
    errors: tuple[tuple[str, int], ...] = ()
    stalled: bool = False
    stall: str = ""
    seconds: float = 0.0
    caveat: str = ""

    @property
    def recommendation(self) -> str:
        """Advice on how to use the path, in a few sentences."""
        return self._words.render(advise(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary of JSON-serializable values, with the recommendation in Python syntax."""
        return {**super().to_dict(), "recommendation": PYTHON.render(advise(self))}

    @property
    def is_good(self) -> bool:
        """Whether all operations succeeded and finished."""
        return not self.stalled and not self.errors

    @property
    def error_text(self) -> str:
        """The errors as text, for example `"EIO 3 times"`."""
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
        rows: list[tuple[str, ...]] = []
        if mount := ", from ".join(filter(None, (self.fstype, self.mount_source))):
            rows.append(("mount", mount))
        if self.open_s is not None and self.open_p95_s is not None:
            rows.append(("opening", f"{format_seconds(self.open_s)}; 95% within {format_seconds(self.open_p95_s)}"))
        if self.type == "folder":
            rate = "" if self.listing_rate is None else f"{format_rate(self.listing_rate, 'entries')}; "
            part = "the whole tree" if self.is_complete else "a part of the tree"
            rows.append(("listing", f"{rate}{format_things(self.listed_entries, 'entry')}, {part}"))
        sized = "" if self.sized_files == self.files else f" in {format_count(self.sized_files)} of them"
        largest = f", the largest {format_bytes(self.largest_bytes)}" if self.sized_files > 1 else ""
        rows.append(("files", f"{format_count(self.files)}; {format_bytes(self.sized_bytes)}{sized}{largest}"))
        if self.errors:
            rows.append(("errors", self.error_text))
        if self.stalled:
            rows.append(("stalled", self.stall))
        return [*rows, ("probed in", format_seconds(self.seconds))]

    def _panels(self) -> list[RatePanel]:
        measured = [(self.small, False), (self.large, True)]
        return [
            RatePanel(rates, of_bytes=is_large) for rates, is_large in measured if best_rate(rates, of_bytes=is_large)
        ]

    def __str__(self) -> str:
        panels = self._panels()
        note = f"  best: {_BEST}" if panels else ""
        return "\n".join(filter(None, (self.text_table(), text_bars(panels), note)))

    def _repr_html_(self) -> str:
        first = [("advice", self.recommendation), *([("caveat", self.caveat)] if self.caveat else [])]
        panels = self._panels()
        last = [("solid bar", _BEST)] if panels else []
        table = html_table(self._summary().splitlines()[0], [*first, *self._rows(), *last])
        return table + draw_rates(panels)


def _bytes(value: float) -> str:
    number, unit = format_bytes(value).split(" ")
    return f"{float(number):.0f} {unit}" if float(number) >= 9.95 else f"{number} {unit}"


def _count(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else format_count(value)


def draw_rates(panels: Sequence[RatePanel]) -> str:
    """Return the panels as HTML: side by side in an SVG image, or as text without matplotlib; empty without panels."""
    if not panels:
        return ""
    try:
        figure = plotting.new_figure("draw the rates", 2.7 * len(panels), 1.8)
    except MissingPackage:
        return f"<pre>{escape(text_bars(panels))}</pre>"
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        places = range(len(panel.bars))
        drawn = axes.bar(places, [bar.height for bar in panel.bars], 0.7, edgecolor=panel.color)
        texts = axes.bar_label(drawn, [bar.text for bar in panel.bars], padding=2, fontsize=8)
        for bar, shape, text in zip(panel.bars, drawn, texts, strict=True):
            # The best bar is solid and its value bold, so that color is not the only cue.
            shape.set_facecolor(panel.color if bar.is_best else f"{panel.color}40")
            text.set_fontweight("bold" if bar.is_best else "normal")
        plotting.style_axes(axes, panel.title, "")
        axes.set_xticks(places, [str(bar.concurrency) for bar in panel.bars])
        axes.set_xlabel(panel.axis, fontsize=8)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.margins(y=0.15)
    description = "; ".join(
        f"{panel.title}: " + ", ".join(f"{bar.text} with {bar.concurrency} {bar.axis}" for bar in panel.bars)
        for panel in panels
    )
    return plotting.svg_of(figure, "Rates against concurrency", description)


def text_bars(panels: Sequence[RatePanel]) -> str:
    """Return the panels as text, one line per bar."""
    lines = []
    for panel in panels:
        top = max(bar.height for bar in panel.bars)
        wide = max(len(bar.text) for bar in panel.bars)
        for number, bar in enumerate(panel.bars):
            eighths = round(8 * _TEXT_BAR * bar.height / top)
            drawn = "█" * (eighths // 8) + _EIGHTHS[eighths % 8] + (" best" if bar.is_best else "")
            name = panel.title if number == 0 else ""
            lines.append(f"  {name:<26}  {bar.concurrency:>2} {bar.axis:<9}{bar.text:>{wide}}  {drawn}".rstrip())
    return "\n".join(lines)


def advise(report: ProbeReport) -> Text:
    """Return the recommendation, a few sentences with references to options and calls."""
    if report.stalled:
        return (f"The path did not respond in time: {report.stall}. ", _remedy(report))
    small, large = best_rate(report.small, of_bytes=False), best_rate(report.large, of_bytes=True)
    if small is not None and report.type == "folder":
        return _of_small_files(report, small)
    return _of_nothing(report) if large is None else _of_large_file(report, large)


def doubt(report: ProbeReport) -> str:
    """Return a warning if part of the measured data probably came from a cache, otherwise an empty string.

    A small file that a FUSE mount delivers to a single thread in under a millisecond did not come over a network, and
    rates over 2 GiB/s are usually those of memory.
    """
    alone = report.small[0]
    if report.is_remote and report.fstype.startswith("fuse") and alone.quick_reads > _CACHED_SHARE * alone.reads:
        share = f"{format_count(alone.quick_reads)} of {format_count(alone.reads)} small files"
        return f"{share} took less than 1 ms, as if read from a cache: files that were never read may be slower."
    is_in_memory = report.fstype in ("tmpfs", "ramfs")
    if not is_in_memory and any((rate.bytes_per_s or 0.0) > _CACHED_BYTES_PER_S for rate in report.large):
        return "Over 2 GiB/s is usually the speed of memory, so parts of the large file probably came from a cache."
    return ""


def _remedy(report: ProbeReport) -> Text:
    again: Text = "mount it again"
    if report.fstype == DRIVEFS:
        again = ("run ", call("mount", force=True), ", which loses unsent writes")
    if report.stall.startswith("listing"):
        slow = "Folders with very many files are slow to list, so store their files as one archive."
        return (f"{slow} If the mount does not respond at all, ", again, ".")
    return ("Try again; if it hangs again, ", again, ".") if report.is_remote else "Check the disk."


def _of_nothing(report: ProbeReport) -> Text:
    more_time = (" Allow more time with ", option("seconds"), ".")
    if report.errors:
        return f"No file could be read ({report.error_text}). Fix these errors first."
    if not report.files:
        return "The folder has no files." if report.is_complete else ("No file was found in time.", more_time)
    could_be_read = report.type == "folder" and report.small_files > 1
    if could_be_read or not report.is_complete:
        return ("Too few files were read in time for a recommendation.", more_time)
    return "There are too few files for a recommendation."


def _of_small_files(report: ProbeReport, best: ReadRate) -> Text:
    alone = report.small[0]
    known = [rate for rate in report.small if rate.reads_per_s]
    assert best.reads_per_s
    if len(known) < 2 or not alone.reads_per_s:
        rest = " There are too few files to find the best number of threads." if report.is_complete else ""
        return f"1,000 small files take {format_seconds(_THOUSAND / best.reads_per_s)}{_with(best)}.{rest}"
    cost_s, best_s = _THOUSAND / alone.reads_per_s, _THOUSAND / best.reads_per_s
    tree_s, best_tree_s = _tree_seconds(report, alone), _tree_seconds(report, best)
    if best is alone:
        first = f"1,000 small files take {format_seconds(cost_s)}, and more threads do not help"
        files = format_things(report.files, "file")
        whole = f"; the {files} here take {format_seconds(best_tree_s)}" if best_tree_s else ""
    else:
        first = f"1,000 small files take {format_seconds(cost_s)} one by one and {format_seconds(best_s)}{_with(best)}"
        whole = ""
        if tree_s and best_tree_s:
            files = format_things(report.files, "file")
            whole = f"; the {files} here take {format_seconds(tree_s)} and {format_seconds(best_tree_s)}"
    return (f"{first}{whole}. ", _next_step(report, best, best_s, best_tree_s))


def _next_step(report: ProbeReport, best: ReadRate, best_s: float, best_tree_s: float | None) -> Text:
    if not report.is_remote and best_s < _QUICK_S:
        return "The folder is fast enough to pack from it directly."
    stage = ("Stage it with ", call("stage", report.path, threads=best.concurrency))
    if best_tree_s is not None and best_tree_s > _LONG_S:
        return (stage, " once, pack the local copy, and save the pack: one large file is read much faster.")
    return (stage, ".")


def _of_large_file(report: ProbeReport, best: ReadRate) -> Text:
    alone = report.large[0]
    assert best.bytes_per_s
    is_file = report.type == "file"
    size = report.largest_bytes if is_file else 1 << 30
    name = f"The file of {format_bytes(size)}" if is_file else "1 GiB of a large file"
    duration = format_seconds(size / best.bytes_per_s)
    if best is not alone:
        before = f" and {format_seconds(size / alone.bytes_per_s)} in one" if alone.bytes_per_s else ""
        text = f"{name} takes {duration} in {best.concurrency} concurrent ranges{before}."
    elif sum(rate.bytes_per_s is not None for rate in report.large) > 1:
        text = f"{name} takes {duration}, and more ranges do not help."
    else:
        text = f"{name} takes {duration}."
    if report.is_remote and report.path.lower().endswith(".zip"):
        return (text, " Stage it with ", call("stage", report.path), ", which reads several ranges concurrently.")
    return text


def _tree_seconds(report: ProbeReport, rate: ReadRate) -> float | None:
    """Estimate the seconds to read all files, small ones at the given rate, others at the best one; None if unknown."""
    if not report.is_complete or not report.sized_files or not rate.reads_per_s:
        return None
    large = best_rate(report.large, of_bytes=True)
    fast = (large or best_rate(report.small, of_bytes=True) or rate).bytes_per_s
    rest = report.sized_bytes - report.small_bytes
    if rest and not fast:
        return None
    seconds = report.small_files / rate.reads_per_s + (rest / fast if fast else 0.0)
    return seconds * report.files / report.sized_files


def _with(rate: ReadRate) -> str:
    return " one by one" if rate.concurrency == 1 else f" with {rate.concurrency} threads"
