"""What was trained or looped over last in this process, for who asks without naming it."""

from __future__ import annotations

import weakref

from colabkit.meters.counts import LoaderMeters

__all__ = ["finished", "latest", "used"]

_reports: list[object] = []  # the last one
_loaders: list[weakref.ref[LoaderMeters]] = []  # used since then, oldest first


def used(counts: LoaderMeters) -> None:
    """Note that a loop over a loader begins; its meters are forgotten when the loader is gone."""
    _loaders[:] = [known for known in _loaders if known() not in (None, counts)]
    _loaders.append(weakref.ref(counts))


def finished(report: object) -> None:
    """Note the report of a training."""
    _reports[:] = [report]
    _loaders.clear()


def latest() -> object | None:
    """Return what was noted last and is still there: a training's report or a loader's meters; None without either."""
    for known in reversed(_loaders):
        if (counts := known()) is not None:
            return counts
    return _reports[0] if _reports else None
