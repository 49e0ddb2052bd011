"""The options of `Loader`, validated when a loader is created, so that invalid arguments fail early."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeAlias

import torch

from colabkit.foundation import (
    Code,
    InvalidOption,
    LoaderMeters,
    Text,
    call,
    cannot,
    check_callable,
    check_one_of,
    check_whole_number,
    checked_call,
    format_things,
    kind_of,
    option,
    shown,
    usable_cpus,
)
from colabkit.loading.augment.joint import moves_boxes
from colabkit.loading.augment.transform import PerSample, is_per_sample
from colabkit.loading.engine.batches import EpochRange
from colabkit.loading.engine.image_decoders import BadSamples
from colabkit.loading.engine.shard_ahead import check_cache_for, is_remote_pack, shard_counts_of
from colabkit.loading.engine.share import Share
from colabkit.loading.engine.tiers import KEEPS, Keep
from colabkit.loading.sampler.mixed import MixedOrder
from colabkit.loading.sampler.orders import BlockShuffledOrder, Order, SequentialOrder, ShuffledOrder
from colabkit.loading.sampler.shard_order import ShardShuffledOrder, streams_for
from colabkit.packs import Mixture, OnBad

P = ParamSpec("P")

_BLOCK_BYTES = 4 << 20
_WINDOW_BYTES = 256 << 20
_MOST_BLOCK = 1024

Decode: TypeAlias = Literal["cpu", "gpu", "auto"]

_CHECKED = checked_call(
    batch_sampler=("Use ", option("sampler"), ", which also takes a sampler that yields lists of indices"),
    dataloader="Pass its dataset",
    directory=("Use ", option("root"), " of colabkit.pack() or colabkit.FileDataset()"),
    generator=("Use ", option("seed")),
    in_order="Omit it: the batches always come in order",
    multiprocessing_context="Omit it: the Loader chooses how to start its workers",
    num_threads=("Use ", option("num_workers")),
    pin_memory="Omit it: batches for a GPU are always pinned",
    pin_memory_device=("Use ", option("device")),
    prefetch_factor=("Use ", option("prefetch_batches"), ", the number of batches to make ahead"),
    target_transform="Change the labels before you pack them, or in your training step",
    timeout="Omit it: a worker that dies raises an error",
    transforms=("Use ", option("transform")),
    worker_init_fn="Omit it: every worker is seeded by the positions of its samples",
)


def loader_call(init: Callable[P, None]) -> Callable[P, None]:
    """Return the constructor of `Loader`, which explains wrong calls, above all those with arguments of `DataLoader`.

    It keeps its arguments as `_arguments` of the loader, from which a similar loader can be made.
    """
    checked = _CHECKED(init)

    @functools.wraps(init)
    def kept(*args: P.args, **kwargs: P.kwargs) -> None:
        loader: Any = args[0]
        loader._arguments = {**dict(zip(("dataset", "batch_size"), args[1:], strict=False)), **kwargs}  # noqa: SLF001
        checked(*args, **kwargs)

    return kept


MOST_THREADS = 8
"""Maximum number of worker threads chosen automatically.

Threads run Python one at a time. On 16 CPUs, random crops of JPEGs of 448x448 pixels were decoded at 2,300 to 2,600
images/s by 4 threads, 3,000 to 3,600 by 8, and 2,400 to 2,700 by 16.
"""


@dataclass
class LoaderOptions:
    """The options of a `Loader`, validated on creation.

    Attributes:
        act: verb and object of error messages.
        size: height and width of decoded image files.
        num_workers: number of worker threads or processes; None for one per usable CPU, but at most 8 threads.
        prefetch_batches: number of batches to build ahead; None chooses by their size.
        channels_last: whether images keep channels-last memory format; None becomes True on a GPU, else False.
        counts: the loader's meters.
        bad: the bad image files.
    """

    act: str
    batch_size: int
    seed: int
    device: torch.device
    transform: Callable[..., Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    size: tuple[int, int] | None
    keep: Keep
    on_bad: OnBad
    num_workers: int | None
    prefetch_batches: int | None
    persistent_workers: bool
    channels_last: bool | None = None
    counts: LoaderMeters = field(default_factory=LoaderMeters)
    decode: Decode = "cpu"
    bad: BadSamples = field(init=False)

    def __post_init__(self) -> None:
        act, transform = self.act, self.transform
        if isinstance(self.batch_size, list | tuple) or getattr(self.batch_size, "shape", None):
            found = f"batch_size is {kind_of(self.batch_size)}"
            several = ("Pass several arrays as a tuple: ", call("Loader", Code("(images, labels)"), batch_size=64))
            raise InvalidOption(cannot(act, found, "a whole number of 1 or more", several))
        self.batch_size = check_whole_number(act, "batch_size", self.batch_size, 1)
        self.seed = check_whole_number(act, "seed", self.seed, 0)
        if self.prefetch_batches is not None:
            self.prefetch_batches = check_whole_number(act, "prefetch_batches", self.prefetch_batches, 1)
        if self.num_workers is not None:
            self.num_workers = check_whole_number(act, "num_workers", self.num_workers, 0)
        next_step = "Pass a function that takes a batch of images"
        if isinstance(transform, list | tuple):
            package = "torchvision.transforms.v2" if any(map(is_per_sample, transform)) else "colabkit.augment"
            next_step = f"Combine the transforms with {package}.Compose([...])"
        check_callable(act, "transform", transform, next_step)
        check_callable(act, "collate_fn", self.collate_fn, "Pass a function that takes a list of samples")
        check_one_of(act, "keep", self.keep, KEEPS)
        check_one_of(act, "decode", self.decode, ("cpu", "gpu", "auto"))
        check_one_of(act, "on_bad", self.on_bad, ("raise", "skip", "blank"))
        check_one_of(act, "channels_last", self.channels_last, (None, True, False))
        if self.channels_last is None:
            self.channels_last = self.is_on_gpu
        if self.keep == "gpu" and not self.is_on_gpu:
            if not torch.cuda.device_count():
                runtime = "Choose a GPU runtime and pass device='cuda', or omit keep="
                raise InvalidOption(cannot(act, "keep='gpu', but PyTorch finds no usable GPU", "", runtime))
            found = "keep='gpu', but the batches are on the CPU"
            raise InvalidOption(cannot(act, found, "batches on a GPU", "Pass device='cuda' as well"))
        self.bad = BadSamples(self.on_bad, has_boxes=moves_boxes(transform))

    @property
    def is_on_gpu(self) -> bool:
        """Whether batches go to a GPU."""
        return self.device.type == "cuda"

    @property
    def workers(self) -> int:
        """Number of worker processes to use."""
        return max(1, round(usable_cpus())) if self.num_workers is None else self.num_workers

    @property
    def threads(self) -> int:
        """Number of worker threads to use."""
        return min(self.workers, MOST_THREADS) if self.num_workers is None else self.workers


def sample_argument(options: LoaderOptions) -> tuple[str, str] | None:
    """Return the reason for loading samples one by one, and a way to avoid that; None if no argument requires it."""
    if options.collate_fn is not None:
        return "collate_fn= takes samples one by one", "omit collate_fn="
    if isinstance(options.transform, PerSample):
        return "PerSample transforms samples one by one", "use a transform of batches"
    if is_per_sample(options.transform):
        return "torchvision transforms samples one by one", "use the transforms of colabkit.augment"
    return None


def check_beside(act: str, given: Mapping[str, bool], why: tuple[str, str]) -> None:
    """Raise `InvalidOption` for arguments that do not apply to samples loaded one by one.

    Args:
        given: whether each such argument is given, by name.
        why: reason for loading samples one by one, as a clause, and a way to avoid that.
    """
    if names := ", ".join(f"{name}=" for name, is_given in given.items() if is_given):
        reason, remedy = why
        found = f"{reason}, so the Loader does not support {names}"
        raise InvalidOption(cannot(act, found, "", f"Omit {names}, or {remedy}"))


def check_without_processes(options: LoaderOptions, why: str, next_step: str) -> None:
    """Raise `InvalidOption` for `persistent_workers` without worker processes; `why` is a clause."""
    if options.persistent_workers:
        found = f"persistent_workers=True requires worker processes, but {why}"
        raise InvalidOption(cannot(options.act, found, "", next_step))


def check_skipping(act: str, on_bad: str, share: Share) -> None:
    """Raise `InvalidOption` if several ranks skip bad samples, because a rank may then yield fewer batches."""
    if on_bad == "skip" and share.world_size > 1:
        found = f"on_bad='skip' may give the {share.world_size} processes different numbers of batches"
        next_step = "Use on_bad='blank', which skips no samples"
        raise InvalidOption(cannot(act, found, "the same number in each", next_step))


def check_counts(act: str, order: Order, batch_size: int, drop_last: bool, share: Share, start: int = 0) -> None:
    """Raise `InvalidOption` if an epoch yields no batch, or if the ranks cannot share its samples after `start`."""
    count, world = len(order), share.world_size
    left = EpochRange.of(count, start, batch_size, share, drop_last)
    if left.indivisible and (start or len(left)):
        samples = f"{format_things(left.stop - start, 'remaining sample' if start else 'sample')}"
        found = f"{samples} cannot be divided among {world} processes as equal numbers of batches of {batch_size}"
        # Larger batches can be divided, because the last two global batches then have the same number of samples.
        fewer = ("to leave out the last ", format_things(left.indivisible, "sample"))
        next_step: Text = ("Use ", option("batch_size", 2), " or more, or ", option("drop_last", True), " ", *fewer)
        if not len(left):
            processes = format_things(left.stop - start, "process")
            next_step = f"Start at most {processes}, or start the next epoch with loader.set_epoch()"
        raise InvalidOption(cannot(act, found, "", next_step))
    if len(left) or start:
        return
    if not count:
        raise InvalidOption(cannot(act, "there are no samples", "at least one", "Check the dataset and the sampler"))
    if count < world:
        too_few = f"there are only {format_things(count, 'sample')} for {world} processes"
        raise InvalidOption(cannot(act, too_few, "at least one sample per process", "Use fewer processes"))
    among = format_things(count, "sample") if world == 1 else f"{format_things(count, 'sample')} in {world} processes"
    found = f"batch_size={batch_size} and drop_last=True yield no batch from {among}"
    next_step = f"Use batch_size={count // world} or less, or drop_last=False"
    raise InvalidOption(cannot(act, found, f"at least {batch_size * world} samples", next_step))


def check_drop_last(act: str, drop_last: bool, yields_batches: bool) -> None:
    """Raise `InvalidOption` for `drop_last` together with a sampler that yields batches."""
    if drop_last and yields_batches:
        found = "drop_last=True is used with a sampler that yields batches"
        raise InvalidOption(cannot(act, found, "", "Omit drop_last=, because the sampler determines the batches"))


def order_of(
    act: str,
    shuffle: Any,
    seed: int,
    n: int,
    sampler: Any,
    row_bytes: int | None,
    dataset: Any,
    share: Share,
) -> Order | Iterable[Any]:
    """Return the sample order: `sampler` if given, else an order of `n` samples for `shuffle`.

    Args:
        act: verb and object of error messages.
        shuffle: True, False or `"block"`.
        seed: seed of the order.
        n: number of samples.
        sampler: the user's sampler; None if there is none.
        row_bytes: size of a sample in bytes, if known; it determines the blocks of `shuffle="block"`.
        dataset: the dataset; for a remote pack, these blocks are its shards, and its cache must hold what the order
            needs.
        share: share of this process; each machine needs shards of its own.

    Raises:
        InvalidOption: if an argument is invalid or contradicts another one.
    """
    order = _order_of(act, shuffle, seed, n, sampler, row_bytes, dataset, share.machines)
    check_cache_for(act, dataset, order if isinstance(order, Order) else None, share)
    return order


def _order_of(
    act: str, shuffle: Any, seed: int, n: int, sampler: Any, row_bytes: int | None, dataset: Any, machines: int
) -> Order | Iterable[Any]:
    check_one_of(act, "shuffle", shuffle, (True, False, "block"))
    if sampler is not None:
        if shuffle:
            both = f"shuffle={shuffle!r} is used with a sampler"
            raise InvalidOption(cannot(act, both, "", "Omit shuffle=, because the sampler determines the order"))
        if not isinstance(sampler, Iterable | Order) or not isinstance(sampler, Sized):
            expected = "an order from colabkit.sampler, or an iterable of sample indices with a length"
            next_step = "For example, use sampler=colabkit.sampler.BalancedOrder(labels)"
            raise InvalidOption(cannot(act, f"sampler={shown(sampler)}", expected, next_step))
        if isinstance(sampler, Order) and sampler.n != n:
            samples = format_things(sampler.n, "sample")
            found = f"the sampler is for {samples}, but the dataset has {n}"
            raise InvalidOption(cannot(act, found, "", "Create the sampler for this dataset"))
        if not isinstance(sampler, Order) and not len(sampler):
            raise InvalidOption(cannot(act, "the sampler is empty", "at least one sample index", "Check the sampler"))
        return sampler
    if isinstance(dataset, Mixture):
        # Positions of a mixture are not those of a part's stream, so that each machine needs all shards.
        parts = tuple([_order_by_shuffle(shuffle, 0, len(part), row_bytes, part, machines=1) for part in dataset.packs])
        return MixedOrder(parts, tuple(dataset.packs.values()), dataset.num_samples, seed)
    return _order_by_shuffle(shuffle, seed, n, row_bytes, dataset, machines)


def _order_by_shuffle(
    shuffle: Any, seed: int, n: int, row_bytes: int | None, dataset: Any, machines: int
) -> SequentialOrder | ShuffledOrder | BlockShuffledOrder | ShardShuffledOrder:
    if shuffle == "block" and is_remote_pack(dataset) and (shards := shard_counts_of(dataset)) is not None:
        return ShardShuffledOrder(tuple(shards.values()), seed, streams=streams_for(machines, len(shards)))
    if shuffle == "block":
        block = max(1, min(_MOST_BLOCK, _BLOCK_BYTES // max(1, row_bytes or _BLOCK_BYTES // 64)))
        window = max(2, _WINDOW_BYTES // _BLOCK_BYTES)
        return BlockShuffledOrder(n, seed, block_samples=block, window_blocks=window)
    return ShuffledOrder(n, seed) if shuffle else SequentialOrder(n)


def usable_device(act: str, device: Any) -> torch.device:
    """Return a device after checking that it exists; None means the CPU.

    Raises:
        InvalidOption: if the device does not exist, or is neither a CPU nor a CUDA GPU.
    """
    try:
        chosen = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        example = "For example, use device='cuda'"
        raise InvalidOption(cannot(act, f"device={shown(device)}", "'cpu' or 'cuda'", example)) from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        gpus = format_things(torch.cuda.device_count(), "usable GPU")
        next_step = "Use device='cuda'" if torch.cuda.device_count() else "Choose a GPU runtime, or use device='cpu'"
        raise InvalidOption(cannot(act, f"device={str(device)!r}, but PyTorch finds {gpus}", "", next_step))
    if chosen.type not in ("cpu", "cuda"):
        move = "Use device='cpu', and move the batches with batch.to(...)"
        raise InvalidOption(cannot(act, f"device={str(device)!r}", "'cpu' or 'cuda'", move))
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def transform_name(transform: Callable[..., Any]) -> str:
    """Return the name of a function, or the one-line `repr` of a transform."""
    return str(getattr(transform, "__name__", None) or shown(transform))
