"""The bytes of samples, or why there are none: a broken member of an archive is a bad file like any other."""

from __future__ import annotations

from collections.abc import Callable

from colabkit.foundation import BadArchive, BadImage
from colabkit.storage import Block, Item, Reading, Retries, Source, Threads, Wanted, read_item


class BrokenMember(BadImage):
    """An archive that can be read holds this member broken; the message is the reason alone."""


def read_if_whole(source: Source, item: Item, retries: Retries) -> bytes | BrokenMember:
    """Return all bytes of an item, or why its archive cannot give them; other errors as of `read_item`."""
    try:
        return read_item(source, item, retries)
    except BadArchive as error:
        return _broken(error)


class SampleReading(Reading):
    """Reads whole items as `Reading` does, but can go on where a member of an archive is broken.

    An archive that can only be read from its front ends where it is broken: that is an error whatever was asked for.

    Args:
        source: where the items are.
        threads: reads in flight, or `"auto"`.
        retries: counts them.
        on_wait: called some times a second while nothing comes.
        is_strict: whether a broken member is an error.
    """

    def __init__(
        self,
        source: Source,
        threads: Threads,
        retries: Retries,
        on_wait: Callable[[], None] | None = None,
        *,
        is_strict: bool,
    ) -> None:
        super().__init__(source, threads, retries, on_wait)
        self._is_strict = is_strict
        self._broken: dict[Item, BrokenMember] = {}

    def data(self, block: Block) -> bytes | BrokenMember:
        """Return the bytes of an item that came, or what is wrong with them."""
        return self._broken.get(block.item) or bytes(block.data or b"")

    def _read(self, one: Wanted) -> Block:
        try:
            return super()._read(one)
        except BadArchive as error:
            if self._is_strict:
                raise
            self._broken[one.item] = _broken(error)
            return Block(one.item, one.offset, one.size, 0, None)


def _broken(error: BadArchive) -> BrokenMember:
    return BrokenMember(str(error.__cause__ or error))
