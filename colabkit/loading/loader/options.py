"""The arguments of `Loader`, checked: what cannot be meant is one line of error at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any

import torch

from colabkit.foundation import InvalidOption, cannot, check_whole_number, format_things
from colabkit.loading.augment.checks import shown
from colabkit.loading.augment.per_sample import PerSample, is_per_sample
from colabkit.loading.loader.portions import Pass, Share
from colabkit.loading.loader.tiers import KEEPS
from colabkit.loading.sampler.blocks import BlockShuffled
from colabkit.loading.sampler.orders import Order, Sequential, Shuffled

_BLOCK_BYTES = 4 << 20
_WINDOW_BYTES = 256 << 20
_MOST_BLOCK = 1024


def check_choice(act: str, keep: Any, on_bad: Any, device: torch.device) -> None:
    """Raise `InvalidOption` for words that are no choice, or not for this device."""
    for name, value, known in (("keep", keep, KEEPS), ("on_bad", on_bad, ("raise", "skip", "blank"))):
        if value not in known:
            needed = f"one of {', '.join(map(repr, known))}"
            raise InvalidOption(cannot(act, f"{name}={value!r}", needed, "Use one of these"))
    if keep == "gpu" and device.type != "cuda":
        found, next_step = "keep='gpu' with batches on the CPU", "Pass device='cuda' too"
        if not torch.cuda.device_count():
            found = "keep='gpu', and no usable GPU here"
            next_step = "Choose a GPU runtime and pass device='cuda', or leave keep out"
        raise InvalidOption(cannot(act, found, "a GPU to which batches go", next_step))


def check_callable(act: str, name: str, value: Any, next_step: str) -> None:
    """Raise `InvalidOption` unless a value is None or can be called."""
    if isinstance(value, type):
        found, next_step = f"{name}={value.__name__}, a class", f"Make one of it: {name}={value.__name__}(...)"
        raise InvalidOption(cannot(act, found, "a callable or None", next_step))
    if value is not None and not callable(value):
        raise InvalidOption(cannot(act, f"{name}={shown(value)}", "a callable or None", next_step))


def check_transform(act: str, transform: Any) -> None:
    """Raise `InvalidOption` unless a transform is None or can be called."""
    next_step = "Pass a function of a batch of images"
    if isinstance(transform, list | tuple):
        whose = "torchvision's v2" if any(map(is_per_sample, transform)) else "colabkit.augment"
        next_step = f"Put them into one, by Compose([...]) of {whose}"
    check_callable(act, "transform", transform, next_step)


def why_one_by_one(transform: Any, collate_fn: Any) -> tuple[str, str] | None:
    """Return which argument asks for samples one by one, and what to do without it; None if none does."""
    if collate_fn is not None:
        return "collate_fn=", "leave collate_fn= out"
    if isinstance(transform, PerSample):
        return "PerSample", "use a transform of batches"
    if is_per_sample(transform):
        return "a transform of torchvision", "use those of colabkit.augment"
    return None


def check_beside(act: str, given: Mapping[str, bool], why: tuple[str, str]) -> None:
    """Raise `InvalidOption` for arguments that have no meaning for samples that are made one by one.

    Args:
        act: for messages.
        given: whether each of these arguments is given, by name.
        why: what asks for samples one by one, and what to do without it.
    """
    if names := ", ".join(f"{name}=" for name, is_given in given.items() if is_given):
        found = f"{names} beside {why[0]}, for which samples are made one by one"
        raise InvalidOption(cannot(act, found, "one of the two", f"Leave {names} out, or {why[1]}"))


def check_without_processes(act: str, persistent_workers: bool, why: tuple[str, str]) -> None:
    """Raise `InvalidOption` if processes that there are not shall live on.

    Args:
        act: for messages.
        persistent_workers: what was asked for.
        why: what makes samples instead, and what to do.
    """
    if persistent_workers:
        found, needed = f"persistent_workers=True with {why[0]}", "worker processes to keep"
        raise InvalidOption(cannot(act, found, needed, why[1]))


def check_skipping(act: str, on_bad: str, share: Share) -> None:
    """Raise `InvalidOption` for several processes that leave out samples: one may lose a whole batch of bad ones."""
    if on_bad == "skip" and share.world_size > 1:
        found, needed = f"on_bad='skip' in {share.world_size} processes", "equally many batches in each"
        raise InvalidOption(cannot(act, found, needed, "Use on_bad='blank', which leaves none out"))


def check_counts(act: str, order: Order, batch_size: int, drop_last: bool, share: Share) -> None:
    """Raise `InvalidOption` for an order that gives no batch.

    Args:
        act: for messages.
        order: of the samples.
        batch_size: of one process.
        drop_last: whether a last batch that is not full is left out.
        share: which process this is.
    """
    if len(Pass.of(len(order), 0, batch_size, share, drop_last)):
        return
    world = share.world_size
    among = "" if world == 1 else f" for {world} processes"
    if drop_last and len(order) >= world:
        found = f"batch_size={batch_size} with drop_last, and {format_things(len(order), 'sample')}{among}"
        needed = "at least one full batch" if world == 1 else f"a full batch for each, {batch_size * world} samples"
        next_step = f"Use batch_size={len(order) // world} or less, or drop_last=False"
        raise InvalidOption(cannot(act, found, needed, next_step))
    needed = "at least one sample" if world == 1 else f"one for each of {world} processes"
    next_step = "Check the data set" if world == 1 or not len(order) else "Use fewer processes"
    raise InvalidOption(cannot(act, format_things(len(order), "sample"), needed, next_step))


def check_drop_last(act: str, drop_last: bool, gives_batches: bool) -> None:
    """Raise `InvalidOption` for a last batch that shall be left out, of a sampler that gives whole batches."""
    if drop_last and gives_batches:
        next_step = "Leave drop_last out: the sampler says which batches there are"
        raise InvalidOption(cannot(act, "drop_last=True beside a sampler of batches", "one of the two", next_step))


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
            raise InvalidOption(cannot(act, f"sampler={shown(sampler)}", needed, "Use colabkit.sampler.Balanced, say"))
        if isinstance(sampler, Order) and sampler.n != n:
            found = f"an order of {sampler.n} samples"
            raise InvalidOption(cannot(act, found, f"one of the data set's {n}", "Make it for this data set"))
        if not isinstance(sampler, Order) and not len(sampler):
            raise InvalidOption(cannot(act, "an empty sampler", "at least one sample", "Check the sampler"))
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
    world_size = check_whole_number(act, "world_size", world_size, 1)
    rank = check_whole_number(act, "rank", rank, 0)
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
