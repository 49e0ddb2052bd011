"""What was trained or looped over last in this process, for who asks without naming it."""

from __future__ import annotations

import weakref

from colabkit.foundation.meters.counts import LoaderMeters

_reports: list[object] = []  # the last one
_loaders: list[weakref.ref[LoaderMeters]] = []  # used since then, by the first use of each
_leader: list[weakref.ref[LoaderMeters]] = []  # the first of those that are used in turn, if any are


def used(counts: LoaderMeters) -> None:
    """Note that a loop over a loader begins; its meters are forgotten when the loader is gone.

    One that is used again after others leads these, as the loader of a training does those of its validations.
    """
    _loaders[:] = [known for known in _loaders if known() is not None]
    if all(known() is not counts for known in _loaders):
        _loaders.append(weakref.ref(counts))
        _leader.clear()
        return
    either = (counts, _leader[0]() if _leader else None)
    _leader[:] = [next(known for known in _loaders if any(known() is one for one in either))]


def finished(report: object) -> None:
    """Note the report of a training."""
    _reports[:] = [report]
    _loaders.clear()
    _leader.clear()


def latest() -> object | None:
    """Return what was noted last and is still there: a training's report or a loader's meters; None without either.

    Of loaders that are used in turn it is the first.
    """
    for known in (*_leader, *reversed(_loaders)):
        if (counts := known()) is not None:
            return counts
    return _reports[0] if _reports else None
