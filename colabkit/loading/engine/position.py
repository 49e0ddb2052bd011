"""The loader's position in the stream of epochs, and its state in a checkpoint."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from typing import Any

from torch.utils.data import Subset

from colabkit.foundation import InvalidOption, Text, cannot, check_whole_number, format_things, kind_of, option, shown
from colabkit.loading.engine.shard_ahead import shard_counts_of
from colabkit.loading.engine.user_code import seed_of, stored_digest
from colabkit.loading.sampler.mixed import MixedOrder
from colabkit.loading.sampler.orders import BlockShuffledOrder, Order, SequentialOrder, ShuffledOrder
from colabkit.loading.sampler.shard_order import ShardShuffledOrder
from colabkit.packs import PackedDataset, is_same_data

logger = logging.getLogger("colabkit")

_VERSION = 3
_RESTART = "Call loader.set_epoch(epoch) to start that epoch again"
_SAME_SPLIT = (
    "Split the same dataset in the same way, as dataset.split() does, and random_split() with a seeded generator="
)
_SHARDS = re.compile("shards ([1-9][0-9]*)x([1-9][0-9]*)(?:x([1-9][0-9]*))?")
_BLOCKS = re.compile("block ([1-9][0-9]*)x([1-9][0-9]*)")


class LoaderPosition:
    """The next position in a stream of epochs.

    Samples are counted when the user receives them, not when they are built. The end of an epoch is represented as the
    start of the next epoch.

    Attributes:
        order: order or custom sampler of the epochs.
        pure_order: the order, if it implements `colabkit.sampler.Order`; None for a custom sampler.
        seed: seed of the loader.
        decode: the option `decode` of the loader.
        next: epoch, and number of samples in the epoch, at which the next iteration starts.
        received: epoch, and number of its samples that the user has received.
    """

    def __init__(
        self,
        order: Order | Iterable[Any],
        seed: int,
        fingerprint: str,
        decoder: str = "cpu",
        decode: str = "cpu",
        dataset: Any = None,
    ) -> None:
        self._set_order(order)
        self.seed = seed
        self.decode = decode
        self._decoder = decoder
        self._given_fingerprint = fingerprint
        self._dataset = dataset
        self._is_part = isinstance(dataset, Subset) or getattr(dataset, "numbers", None) is not None
        self._shards = shard_counts_of(dataset)
        self.next = (0, 0)
        self.received = (0, 0)

    def _set_order(self, order: Order | Iterable[Any]) -> None:
        self.order = order
        # Cache the result, because `isinstance` is slow for a protocol.
        self.pure_order = order if isinstance(order, Order) else None
        self._sampler_digest = stored_digest(order) if self.pure_order is None else ""

    @property
    def _fingerprint(self) -> str:
        # That of a pack changes when the pack is complete.
        return self._dataset.fingerprint if isinstance(self._dataset, PackedDataset) else self._given_fingerprint

    @property
    def policy(self) -> str:
        """Name and options of this order."""
        if self.pure_order is not None:
            return self.pure_order.policy
        return f"sampler {type(self.order).__qualname__} {self._sampler_digest}".rstrip()

    @property
    def _order_seed(self) -> int:
        return self.pure_order.seed if self.pure_order is not None else seed_of(self.order)

    @property
    def shuffle(self) -> bool | str:
        """The value of `shuffle=` that gives this order; False for a custom sampler."""
        order = self.order.parts[0] if isinstance(self.order, MixedOrder) else self.order
        return (
            "block" if isinstance(order, BlockShuffledOrder | ShardShuffledOrder) else isinstance(order, ShuffledOrder)
        )

    @property
    def order_text(self) -> str:
        """Description of the order for the loader's `repr`."""
        if isinstance(self.order, SequentialOrder):
            return "in order"
        if isinstance(self.order, ShuffledOrder | BlockShuffledOrder | ShardShuffledOrder):
            kinds = {
                ShuffledOrder: "shuffled",
                BlockShuffledOrder: "shuffled by blocks",
                ShardShuffledOrder: "shuffled by shards",
            }
            what = kinds[type(self.order)]
            streams = self.order.streams if isinstance(self.order, ShardShuffledOrder) else 1
            return f"{what}{f' in {streams} streams' if streams > 1 else ''} with seed {self.order.seed}"
        if isinstance(self.order, MixedOrder):
            shuffled = f", shuffled with seed {self.order.seed}" if self.shuffle else ""
            return f"mixed {':'.join(map(str, self.order.weights))}{shuffled}"
        return f"by {self.policy.partition(' ')[0]}"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; a loaded position inside this epoch is preserved."""
        epoch = check_whole_number("set the epoch", "epoch", epoch, 0)
        if epoch != self.next[0]:
            self.next = (epoch, 0)
        self.received = self.next

    def begin(self) -> tuple[int, int]:
        """Start an iteration: return its epoch and start position, and advance `next` to the following epoch."""
        begun = self.next
        self.next = (begun[0] + 1, 0)
        self.received = begun
        return begun

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Start iterations in the `with` block after the received samples, and restore the position afterwards."""
        before = self.next, self.received
        self.next = self.received
        try:
            yield
        finally:
            self.next, self.received = before

    def receive(self, epoch: int, samples: int, *, is_over: bool) -> None:
        """Record that the user has received `samples` samples of an epoch."""
        self.received = (epoch + 1, 0) if is_over else (epoch, samples)

    def state_dict(self, batch_size: int = 0, world_size: int = 1) -> dict[str, Any]:
        """Return the position as plain values.

        Args:
            batch_size: samples per batch; resuming does not need this value.
            world_size: number of processes; needed for custom samplers, whose samples each process counts separately.
        """
        epoch, samples = self.received
        return {
            "version": _VERSION,
            "fingerprint": self._fingerprint,
            "decoder": self._decoder,
            "order": self.policy,
            "order_seed": self._order_seed,
            "seed": self.seed,
            "epoch": epoch,
            "samples": samples,
            "global_batch": batch_size * world_size,
            "world_size": world_size,
        }

    def load(self, state: dict[str, Any], is_end: Callable[[int], bool], world_size: int = 1) -> None:
        """Restore the position and the order of a state.

        Args:
            state: result of `state_dict`.
            is_end: function that returns whether an epoch is known to have no batch left after a number of samples.
            world_size: current number of processes.

        Raises:
            InvalidOption: if the state belongs to other data, to another order or (with a custom sampler) to a
                different number of processes, or if the state is incomplete or of another version.
        """
        act = "resume the Loader"
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != _VERSION:
            if not isinstance(state, Mapping):
                raise InvalidOption(cannot(act, f"the state is {kind_of(state)}", "a result of state_dict()", _RESTART))
            other = f"the state has version {shown(version)}"
            raise InvalidOption(cannot(act, other, f"version {_VERSION}", _RESTART))
        if missing := [name for name in self.state_dict() if name not in state]:
            raise InvalidOption(
                cannot(act, f"the state lacks {', '.join(missing)}", "all keys of state_dict()", _RESTART)
            )
        if not is_same_data(str(state["fingerprint"]), self._fingerprint):
            kind = self._fingerprint.partition("/")[0]
            next_step = (
                "Use the same files, labels and splits as when the state was saved"
                if kind == "files"
                else "Pass the same arrays as when the state was saved"
                if kind == "arrays"
                else _SAME_SPLIT
                if self._is_part
                else "Open the same pack or dataset as when the state was saved"
            )
            raise InvalidOption(cannot(act, "the state belongs to another dataset", "", next_step))
        names = ("order_seed", "seed", "epoch", "samples", "world_size")
        numbers = [state[name] for name in names]
        are_whole = all(isinstance(number, Integral) and not isinstance(number, bool) for number in numbers)
        if not are_whole or min(numbers[1:]) < 0:
            pairs = ", ".join(f"{name}={shown(number)}" for name, number in zip(names, numbers, strict=True))
            raise InvalidOption(cannot(act, f"the state has {pairs}", "whole numbers of 0 or more", _RESTART))
        order_seed, seed, epoch, samples, processes = map(operator.index, numbers)
        order = self._order_of(act, str(state["order"]), order_seed)
        if not isinstance(order, Order) and samples and processes != world_size:
            saved_by = format_things(processes, "process")
            found = f"{saved_by} saved this state of a custom sampler in the middle of an epoch"
            restart = f"Start {saved_by}, or start the epoch again with loader.set_epoch({epoch})"
            raise InvalidOption(cannot(act, found, f"the same number of processes, not {world_size}", restart))
        position = (epoch + 1, 0) if is_end(samples) else (epoch, samples)
        self._check_decoder(act, state["decoder"], epoch)
        self._set_order(order)
        self.seed = seed
        self.next = self.received = position

    def _check_decoder(self, act: str, decoder: object, epoch: int) -> None:
        if decoder == self._decoder:
            return
        if self.decode == "auto" and decoder in ("cpu", "gpu"):
            names = self._decoder.upper(), str(decoder).upper()
            logger.warning("images are decoded on the %s now, so their pixels differ slightly from the %s's", *names)
            return
        found = f"the state belongs to images decoded with decode={shown(decoder)}"
        restart = f", or start the epoch again with loader.set_epoch({epoch})"
        next_step: Text = ("Create the Loader with ", option("decode", decoder), restart)
        raise InvalidOption(cannot(act, found, f"decode={self._decoder!r}", next_step))

    def _order_of(self, act: str, policy: str, seed: int) -> Order | Iterable[Any]:
        """Return the order of a state: the current one, or a new one if policy, seed and dataset size determine it."""
        if policy == self.policy and seed == self._order_seed:
            return self.order
        if isinstance(self.order, MixedOrder) and policy == self.policy:
            return replace(self.order, seed=seed)
        if isinstance(self.order, SequentialOrder | ShuffledOrder | BlockShuffledOrder | ShardShuffledOrder):
            n = len(self.order)
            if policy == "sequential":
                return SequentialOrder(n)
            if policy == "shuffle":
                return ShuffledOrder(n, seed)
            if found := _BLOCKS.fullmatch(policy):
                block, window = map(int, found.groups())
                return BlockShuffledOrder(n, seed, block_samples=block, window_blocks=window)
            if self._shards and (found := _SHARDS.fullmatch(policy)) and int(found[1]) == len(self._shards):
                return ShardShuffledOrder(tuple(self._shards.values()), seed, int(found[2]), int(found[3] or 1))
        other = f"the state has the order {shown(policy)} with seed {seed}"
        own = shown(self.policy)
        expected = f"this loader's order {own} with seed {self._order_seed}"
        next_step = "Create the Loader with the same sampler and seed as when the state was saved"
        raise InvalidOption(cannot(act, other, expected, next_step))
