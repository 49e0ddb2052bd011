"""The arguments of `Loader`, checked: what cannot be meant is one line of error at once."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import torch

from colabkit.errors import InvalidOption, cannot, check_whole_number
from colabkit.loader.portions import Share
from colabkit.loader.tiers import KEEPS
from colabkit.sampler import BlockShuffled, Order, Sequential, Shuffled

__all__ = ["check_callable", "check_choice", "checked_size", "order_of", "share_of", "usable_device"]

_BLOCK_BYTES = 4 << 20
_WINDOW_BYTES = 256 << 20
_MOST_BLOCK = 1024


def check_choice(act: str, keep: Any, on_bad: Any) -> None:
    """Raise `InvalidOption` for words that are no choice."""
    for name, value, known in (("keep", keep, KEEPS), ("on_bad", on_bad, ("raise", "skip", "blank"))):
        if value not in known:
            needed = f"one of {', '.join(map(repr, known))}"
            raise InvalidOption(cannot(act, f"{name}={value!r}", needed, "Use one of these"))


def check_callable(act: str, name: str, value: Any, what: str) -> None:
    """Raise `InvalidOption` unless a value is None or can be called."""
    if value is not None and (not callable(value) or isinstance(value, type)):
        raise InvalidOption(cannot(act, f"{name}={value!r}", "a callable or None", f"Pass a function of {what}"))


def checked_size(act: str, size: Any) -> tuple[int, int] | None:
    """Return height and width: one number for both, or two."""
    if size is None:
        return None
    sides = (size, size) if not isinstance(size, tuple | list) else tuple(size)
    if len(sides) != 2:
        raise InvalidOption(cannot(act, f"size={size!r}", "one side, or height and width", "Use size=256, say"))
    for side in sides:
        check_whole_number(act, "size", side, 1)
    return int(sides[0]), int(sides[1])


def order_of(act: str, shuffle: Any, seed: int, n: int, sampler: Any, row_bytes: int | None) -> Order | Iterable[Any]:
    """Return the order of epochs that is asked for.

    Args:
        act: for messages.
        shuffle: True, False or `"block"`.
        seed: of the shuffles.
        n: samples.
        sampler: the user's own, or None.
        row_bytes: of a sample, for the size of blocks; None if they differ.
    """
    if not (isinstance(shuffle, bool) or shuffle == "block"):
        needed = "True, False or 'block'"
        raise InvalidOption(cannot(act, f"shuffle={shuffle!r}", needed, "Use one of these"))
    if sampler is not None:
        if shuffle:
            found = f"shuffle={shuffle!r} beside a sampler"
            raise InvalidOption(cannot(act, found, "one of the two", "Leave shuffle out: the sampler says the order"))
        if not isinstance(sampler, Iterable | Order) or not isinstance(sampler, Sized):
            needed = "an order of colabkit.sampler, or an iterable of numbers with a length"
            raise InvalidOption(cannot(act, f"sampler={sampler!r:.80}", needed, "Use colabkit.sampler.Balanced, say"))
        if isinstance(sampler, Order) and sampler.n != n:
            found = f"an order of {sampler.n} samples"
            raise InvalidOption(cannot(act, found, f"one of the data set's {n}", "Make it for this data set"))
        return sampler
    if shuffle == "block":
        block = max(1, min(_MOST_BLOCK, _BLOCK_BYTES // max(1, row_bytes or _BLOCK_BYTES // 64)))
        window = max(2, _WINDOW_BYTES // _BLOCK_BYTES)
        return BlockShuffled(n, seed, block_samples=block, window_blocks=window)
    return Shuffled(n, seed) if shuffle else Sequential(n)


def share_of(act: str, rank: int | None, world_size: int | None) -> Share:
    """Return which process of several this is: as said, else as `torch.distributed` says, else the only one.

    Raises:
        InvalidOption: if only one of the two is said, or they do not fit together.
    """
    if (rank is None) != (world_size is None):
        found = f"rank={rank} and world_size={world_size}"
        raise InvalidOption(cannot(act, found, "both or neither", "Give both"))
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return Share(torch.distributed.get_rank(), torch.distributed.get_world_size())
        return Share()
    check_whole_number(act, "world_size", world_size, 1)
    check_whole_number(act, "rank", rank, 0)
    if rank >= world_size:
        raise InvalidOption(cannot(act, f"rank={rank}", f"one from 0 to {world_size - 1}", "Count ranks from 0"))
    return Share(rank, world_size)


def usable_device(act: str, device: Any) -> torch.device:
    """Return a device that is there; None means the CPU.

    Raises:
        InvalidOption: if there is no such device.
    """
    try:
        chosen = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise InvalidOption(cannot(act, f"device={device!r}", "'cpu' or 'cuda'", "Use one of these")) from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        found = f"{torch.cuda.device_count() or 'no'} usable GPUs here"
        raise InvalidOption(cannot(act, found, f"one for device={device!r}", "Choose a GPU runtime or device='cpu'"))
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidOption(cannot(act, f"device={device!r}", "'cpu' or 'cuda'", "Move batches yourself"))
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen
