"""Mixtures: the samples of several packs, which a `Loader` mixes in given proportions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from numbers import Rational
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colabkit.foundation import (
    Code,
    InvalidOption,
    Text,
    call,
    cannot,
    check_type,
    check_whole_number,
    checked_call,
    format_count,
    format_things,
    is_finite_number,
    kind_of,
    option,
    shown,
)
from colabkit.packs.dataset.datasets import PackedDataset
from colabkit.packs.dataset.open_split import OpenSplit
from colabkit.packs.dataset.remote_pack import RemotePart
from colabkit.packs.dataset.samples import MixedSamples
from colabkit.packs.format.layout import SAMPLES, Indices

_ACT = "mix packs"
_KIND, _CLASSES = "the kind of labels", "the list of classes"
# Largest sum of the weights as whole numbers, so that products of two of them fit in 64 bits.
_MOST_WEIGHT = 1 << 30


class Mixture(PackedDataset):
    """Several packs, mixed in given proportions: `Mixture({birds: 3, insects: 1})` takes 3 of 4 samples from `birds`.

    `Loader` spreads the samples of each pack evenly. With two or three packs, the first n samples of an epoch contain,
    for every n, the exact proportion of each pack, rounded to a whole sample. With more packs, they differ from it by
    less than two samples. With `shuffle`, a pack is shuffled again each time that all of its samples have been used,
    and no sample repeats before that, not even in a later epoch. The order is a function of seed, epoch and position,
    as for one pack, so you can resume from a state of the loader with a different batch size or number of processes.

    As a dataset, a mixture holds the samples of all packs, one pack after the other: `len(mixture)` counts them, and
    `subset`, `split` and `fold` return views of them without proportions. Splits of a pack keep their views, so you may
    also mix `data.subset(...)`.

    Args:
        packs: weight above 0 of each pack's split, or of a view of one; proportions are weights divided by their sum.
            All must have the same fields, the same shape and dtype of samples, and the same classes.
        num_samples: number of samples of an epoch; None ends the epoch when the first pack is used up, so each epoch
            has as many samples of that pack as it holds.

    Attributes:
        packs: the weights, as whole numbers, by dataset.
        num_samples: number of samples of an epoch; None if it follows from the weights.

    Raises:
        InvalidOption: if the packs differ, or a weight is not a number above 0.

    Example:
        >>> import colabkit
        >>> packed = colabkit.pack("samples:digits", "digits.h5")
        >>> real, rare = colabkit.open_pack("digits.h5")["train"].split((0.9, 0.1))
        >>> mixture = colabkit.Mixture({real: 0.75, rare: 0.25})
        >>> loader = colabkit.Loader(mixture, batch_size=64, shuffle=True)
        >>> images, labels = next(iter(loader))
        >>> images.shape
        torch.Size([64, 3, 8, 8])
    """

    packs: Mapping[PackedDataset, int]
    num_samples: int | None

    @checked_call()
    def __init__(self, packs: Mapping[PackedDataset, float], *, num_samples: int | None = None) -> None:
        example = "For example, use colabkit.Mixture({first['train']: 3, second['train']: 1})"
        check_type(_ACT, "packs", packs, Mapping, "a weight for each pack", example)
        if not packs:
            raise InvalidOption(cannot(_ACT, "there are none", "at least one", example))
        for part in packs:
            _check_part(part)
        # A reader of a remote pack closes the shards that its order does not need, so each part needs its own.
        parts = [part.completed() if part.remote is None else part.reopened() for part in packs]
        for part, weight in packs.items():
            if not is_finite_number(weight) or weight <= 0:
                found = f"the weight of {part!r} is {shown(weight)}"
                raise InvalidOption(cannot(_ACT, found, "a number above 0", "Leave out packs that you do not want"))
        if num_samples is not None:
            num_samples = check_whole_number(_ACT, "num_samples", num_samples, 1)
        for part in parts[1:]:
            _check_same(parts[0], part)
        # The samples include those that are not in the views; the rows leave them out.
        super().__init__(_joined([part._opened for part in parts]), _rows(parts))  # noqa: SLF001
        self.packs = dict(zip(parts, _whole_numbers([*packs.values()]), strict=True))
        self.num_samples = num_samples

    def _view(self, numbers: Indices) -> PackedDataset:  # type: ignore[override]
        return PackedDataset(self._opened, self._rows_of(numbers))

    @property
    def remote_parts(self) -> list[RemotePart]:
        """The packs that are downloaded into a cache when they are needed."""
        counts = [part.shard_counts() for part in self.packs]
        return [one._replace(counts=counts[one.number]) for one in super().remote_parts]

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Mixture, num_samples=self.num_samples), (self.packs,)

    def __repr__(self) -> str:
        total = sum(self.packs.values())
        shares = [f"{weight / total:.3g} of {format_count(len(part))}" for part, weight in self.packs.items()]
        what = "images" if self.info.fields[SAMPLES].content == "image" else "samples"
        classes = f", {format_things(len(self.classes), 'class')}" if self.classes else ""
        return f"Mixture of {len(self.packs)} packs: {' + '.join(shares)} {what}{classes}"


def _check_part(part: Any) -> None:
    if isinstance(part, Mapping):
        first = next(iter(part), "train")
        raise InvalidOption(cannot(_ACT, "one is a whole pack", "splits of packs", f"Use pack[{first!r}]"))
    if isinstance(part, Mixture) or not isinstance(part, PackedDataset):
        mix = "Name all packs in one Mixture" if isinstance(part, Mixture) else ("Pack it with ", call("pack"))
        raise InvalidOption(cannot(_ACT, f"one is {kind_of(part)}", "splits of packs", mix))
    if not len(part):
        raise InvalidOption(cannot(_ACT, f"{part!r} is empty", "at least one sample", "Leave it out"))


def _check_same(first: PackedDataset, other: PackedDataset) -> None:
    mine, others = _traits(first), _traits(other)
    for name, trait in mine.items():
        if trait != (found := others.get(name)):
            differ = f"{name} is {trait} in {_name(first)!r} and {found} in {_name(other)!r}"
            next_step: Text = ("Pack them with the same ", option("size"), ", ", option("encoding"), " and classes")
            if name == _CLASSES and mine[_KIND] == "class":
                table = "Pack each from a table whose label column is a pandas Categorical with all classes, or use "
                numbers = " to return class numbers, the largest of which must occur in each pack"
                next_step = (table, option("labels", Code("function")), numbers)
            raise InvalidOption(cannot(_ACT, differ, "the same in all packs", next_step))


def _name(part: PackedDataset) -> str:
    """Return the path or address from which a pack was opened."""
    return str(part.info.path) if part.remote is None else part.remote.cache.address.shown


def _traits(part: PackedDataset) -> dict[str, Any]:
    """Return the properties that all packs of a mixture must share, by name."""
    sample, fields = part[0], part.info.fields
    values = dict(zip(part.fields, sample if len(fields) > 1 else [sample], strict=True))
    kinds = {}
    for name, field in fields.items():
        value = values[name]
        has_shape = isinstance(value, Tensor) and not field.is_ragged
        kind = f"encoded {field.content}" if field.is_ragged else field.content
        kinds[f"{name!r}"] = f"{kind} {value.dtype} {list(value.shape)}" if has_shape else kind
    meta, shape = part.info.meta, part.info.meta["sample_shape"]
    return {
        "the list of fields": ", ".join(fields),
        _KIND: meta["label_kind"],
        _CLASSES: ", ".join(map(str, part.classes)) or None,
        "the size of samples": shape and "x".join(map(str, shape)),
        "the number of channels": meta.get("channels"),
        **kinds,
    }


def _joined(opened: list[OpenSplit]) -> OpenSplit:
    first, counts = opened[0], [one.info.count(one.split) for one in opened]
    digest = hashlib.sha256("\n".join(f"{one.info.fingerprint}/{one.split}" for one in opened).encode())
    # Without a plan, the seal identifies the samples.
    kept = {name: value for name, value in first.info.meta.items() if name not in ("plan", "shards")}
    info = replace(first.info, meta={**kept, "splits": {first.split: sum(counts)}}, seal=digest.hexdigest())
    labels = [one.labels for one in opened if one.labels is not None]
    reopen = partial(_reopen_joined, [one.reopen for one in opened])
    return OpenSplit(
        info,
        first.split,
        MixedSamples([one.samples for one in opened], counts),
        torch.cat(labels) if labels else None,
        reopen,
    )


def _reopen_joined(reopen: list[partial[OpenSplit]]) -> OpenSplit:
    return _joined([one() for one in reopen])


def _rows(parts: list[PackedDataset]) -> Indices | None:
    """Return the rows of the views among all samples; None if no part is a view."""
    if all(part.numbers is None for part in parts):
        return None
    rows, start = [], 0
    for part in parts:
        count = part.info.count(part.split_name)
        rows.append(start + (np.arange(count) if part.numbers is None else part.numbers.numpy()))
        start += count
    return np.concatenate(rows)


def _whole_numbers(weights: list[float]) -> list[int]:
    """Return whole numbers in the proportion of the weights, which are exact unless their sum is too large."""
    # The shortest text of a float is the number that the user wrote: 0.7 becomes 7/10.
    exact = [Fraction(weight if isinstance(weight, Rational) else repr(float(weight))) for weight in weights]
    scale = Fraction(np.lcm.reduce([one.denominator for one in exact], dtype=object))
    numbers = [int(one * scale) for one in exact]
    divisor = int(np.gcd.reduce(numbers, dtype=object))
    if (total := sum(numbers)) // divisor <= _MOST_WEIGHT:
        return [number // divisor for number in numbers]
    return [max(1, round(Fraction(number * _MOST_WEIGHT, total))) for number in numbers]
