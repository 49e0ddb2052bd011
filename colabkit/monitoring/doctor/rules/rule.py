"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from colabkit.monitoring.doctor.case import Case
from colabkit.monitoring.doctor.diagnosis import Advice

_HDF5 = (".h5", ".hdf5")
_NAMELESS = "a table of paths"  # what a source is called that was made of a list or a table in memory

Rule: TypeAlias = Callable[[Case], Advice | None]
"""Looks at a case and returns advice, or None if there is nothing to say. What is unknown is no reason to speak."""


def quoted(path: str | None) -> str:
    """Return a path as Python text; dots where it is not known."""
    return "..." if path in (None, _NAMELESS) else repr(path)


def is_hdf5(case: Case) -> bool:
    """Return whether samples lie in a pack, or in somebody else's HDF5 file."""
    return (case.facts.path or "").endswith(_HDF5)


def packing(case: Case) -> str:
    """Return the call that packs the samples decoded: of their files, also where these are in a pack as they were."""
    facts = case.facts
    if facts.source is None and facts.encoding == "python":
        return "colabkit.pack(dataset, 'pack.h5')"
    files = quoted(facts.source if is_hdf5(case) or facts.encoding == "python" else facts.path)
    return f"colabkit.pack({files}, 'pack.h5', size=..., encoding='raw')"
