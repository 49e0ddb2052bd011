"""What follows from the figures of a probe: pure functions with stated rules."""

from __future__ import annotations

from colabkit.foundation import DRIVEFS, format_bytes, format_count, format_seconds, format_things
from colabkit.storage.probing.report import ProbeReport, ReadRate, best_rate

_THOUSAND = 1000
_QUICK_S = 2.0
"""A local folder whose 1,000 files take less than this is quick enough to be packed without a copy."""
_LONG_S = 600.0
_CACHED_SHARE = 0.2
_CACHED_BYTES_PER_S = float(2 << 30)
"""More than networks and disks of hosted machines deliver; memory does."""


def advise(report: ProbeReport) -> str:
    """Return what to do, in one or two sentences.

    The rules, in this order: a stall is named, with its cure; where nothing could be read, why; else what 1,000 small
    files and the whole tree cost with one thread and with the best number of threads, or what a large file costs; then
    whether to pack directly (a local folder of which 1,000 files take less than 2 s), or to stage first with how many
    threads, and to keep one pack where even that takes over ten minutes.
    """
    if report.stalled:
        return f"It did not answer in time: {report.stall}. {_cure(report)}"
    small, large = best_rate(report.small, of_bytes=False), best_rate(report.large, of_bytes=True)
    if small is not None and report.type == "folder":
        return _of_small_files(report, small)
    return _of_nothing(report) if large is None else _of_large_file(report, large)


def doubt(report: ProbeReport) -> str:
    """Return why the figures may be better than those of files that were never read, or nothing.

    A small file that comes through a FUSE mount, alone, in under a millisecond, was not asked for over a network; over
    2 GiB/s is the speed of memory.
    """
    alone = report.small[0]
    if report.is_remote and report.fstype.startswith("fuse") and alone.quick_reads > _CACHED_SHARE * alone.reads:
        share = f"{format_count(alone.quick_reads)} of {format_count(alone.reads)} small files"
        return f"{share} took under 1 ms, as from a cache: files that were never read may be slower."
    is_in_memory = report.fstype in ("tmpfs", "ramfs")
    if not is_in_memory and any((rate.bytes_per_s or 0.0) > _CACHED_BYTES_PER_S for rate in report.large):
        return "Over 2 GiB/s is the speed of memory: parts of the large file came from a cache."
    return ""


def _cure(report: ProbeReport) -> str:
    again = "mount it again"
    if report.fstype == DRIVEFS:
        again = "run colabkit.mount(force=True), which loses what Drive has not been sent"
    if report.stall.startswith("listing"):
        return f"Folders of very many files list so slowly: keep those as one archive. If nothing answers, {again}."
    return f"Try again; if it stays so, {again}." if report.is_remote else "Look at the disk."


def _of_nothing(report: ProbeReport) -> str:
    if report.errors:
        return f"Nothing could be read ({report.error_text}): mend that first."
    if not report.files:
        return "There is no file in it." if report.is_complete else "No file was found in the time: allow more seconds."
    could_be_read = report.type == "folder" and report.small_files > 1
    if could_be_read or not report.is_complete:
        return "Too little was read in the time to tell: allow more seconds."
    return "Too few files to tell."


def _of_small_files(report: ProbeReport, best: ReadRate) -> str:
    alone = report.small[0]
    known = [rate for rate in report.small if rate.reads_per_s]
    assert best.reads_per_s
    if len(known) < 2 or not alone.reads_per_s:
        rest = " Too few files to tell how many threads help." if report.is_complete else ""
        return f"1,000 small files take {format_seconds(_THOUSAND / best.reads_per_s)}{_with(best)}.{rest}"
    cost_s, best_s = _THOUSAND / alone.reads_per_s, _THOUSAND / best.reads_per_s
    tree_s, best_tree_s = _tree_seconds(report, alone), _tree_seconds(report, best)
    if best is alone:
        first = f"1,000 small files take {format_seconds(cost_s)}, and more threads do not help"
        whole = f"; the {format_things(report.files, 'file')} here {format_seconds(best_tree_s)}" if best_tree_s else ""
    else:
        first = f"1,000 small files take {format_seconds(cost_s)} one by one and {format_seconds(best_s)}{_with(best)}"
        whole = ""
        if tree_s and best_tree_s:
            files = format_things(report.files, "file")
            whole = f"; the {files} here {format_seconds(tree_s)} and {format_seconds(best_tree_s)}"
    return f"{first}{whole}. {_next_step(report, best, best_s, best_tree_s)}"


def _next_step(report: ProbeReport, best: ReadRate, best_s: float, best_tree_s: float | None) -> str:
    if not report.is_remote and best_s < _QUICK_S:
        return "Quick enough to pack from directly."
    stage = f"Stage it with colabkit.stage({report.path!r}, threads={best.concurrency})"
    if best_tree_s is not None and best_tree_s > _LONG_S:
        return f"{stage} once, pack that, and keep the pack: one large file is read far quicker."
    return f"{stage}."


def _of_large_file(report: ProbeReport, best: ReadRate) -> str:
    alone = report.large[0]
    assert best.bytes_per_s
    here = report.type == "file"
    size = report.largest_bytes if here else 1 << 30
    name = f"Its {format_bytes(size)}" if here else "1 GiB of a large file"
    takes = format_seconds(size / best.bytes_per_s)
    verb = "take" if here else "takes"
    if best is not alone:
        before = f", {format_seconds(size / alone.bytes_per_s)} in one" if alone.bytes_per_s else ""
        text = f"{name} {verb} {takes} in {best.concurrency} ranges at once{before}."
    elif sum(rate.bytes_per_s is not None for rate in report.large) > 1:
        text = f"{name} {verb} {takes}, and more ranges do not help."
    else:
        text = f"{name} {verb} {takes}."
    if report.is_remote and report.path.lower().endswith(".zip"):
        text += f" Stage it with colabkit.stage({report.path!r}), which reads several ranges at once."
    return text


def _tree_seconds(report: ProbeReport, rate: ReadRate) -> float | None:
    """Return what reading all files takes: the small ones at this rate, the others by their bytes."""
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
