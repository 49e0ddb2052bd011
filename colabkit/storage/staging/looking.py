"""A look at what `stage()` lists, before it copies: for who wants more of the files than to have them near."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from colabkit.storage.sources.items import Listing

_look: ContextVar[Callable[[Listing], None] | None] = ContextVar("_look", default=None)


@contextmanager
def looked_at_by(look: Callable[[Listing], None]) -> Iterator[None]:
    """Have `look` called with what `stage()` lists in the block; what it raises ends the call, and nothing is copied.

    So a far source is listed once. It is not called where a near copy is there already, and not for a far tar, which
    cannot be listed before it is near.
    """
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


def look_at(listing: Listing) -> None:
    """Show a listing to who asked for it."""
    if listing.items and (look := _look.get()) is not None:
        look(listing)
