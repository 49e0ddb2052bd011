"""Source listings, made from file paths or from the columns of a table."""

from __future__ import annotations

from typing import Any

from colabkit.storage import Item, Listing


def listing_of(*paths: str) -> Listing:
    return Listing(tuple(Item(path, 1) for path in sorted(paths)), ())


def table_of(paths: list[str] | None = None, **columns: Any) -> Listing:
    """Return the listing of a table with the given columns; items are named like records if no paths are given."""
    names = paths or [f"shard/{row:08d}" for row in range(max(map(len, columns.values())))]
    return Listing(tuple(Item(name, 1) for name in names), (), 0, {n: tuple(cells) for n, cells in columns.items()})
