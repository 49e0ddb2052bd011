"""What a pack will hold, decided before a byte of it is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from colabkit.packs.format.layout import CRC, LABELS, SAMPLES, DataSet, Field
from colabkit.packs.packing.makers import MadeField, SampleMaker

OnBad: TypeAlias = Literal["raise", "skip", "blank"]
Lengths: TypeAlias = Mapping[str, npt.NDArray[np.int64]]
"""The bytes of each sample of a ragged field, by the name of its data set."""


@dataclass(frozen=True)
class FieldTable:
    """A field that is known before samples are made.

    Attributes:
        field: name and content.
        values: one for each of the maker's samples, by number; of a ragged field bytes.
    """

    field: Field
    values: npt.NDArray[Any] | tuple[bytes, ...]

    def chosen(self, numbers: npt.NDArray[np.int64]) -> FieldTable:
        """Return the values of these samples."""
        if isinstance(self.values, tuple):
            return FieldTable(self.field, tuple(self.values[number] for number in numbers.tolist()))
        return FieldTable(self.field, self.values[numbers])


@dataclass(frozen=True)
class PackPlan:
    """All that a pack, or a shard of one, will hold. It is pickled for other processes.

    Attributes:
        name: of the source.
        maker: makes its samples.
        splits: numbers of the maker's samples for each split, in the pack's order.
        tables: what is known of them before.
        about: what the pack says of itself: source, encoding, classes, options.
        on_bad: what becomes of samples that cannot be decoded.
        most_bad: how many there may be.
    """

    name: str
    maker: SampleMaker
    splits: Mapping[str, npt.NDArray[np.int64]]
    tables: tuple[FieldTable, ...]
    about: Mapping[str, Any]
    on_bad: OnBad
    most_bad: int

    @property
    def act(self) -> str:
        """Verb and object for messages."""
        return f"pack {self.name!r}"

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return sum(map(len, self.splits.values()))

    @property
    def is_part(self) -> bool:
        """Whether it is the plan of a shard."""
        return "shard" in self.about

    @property
    def counts(self) -> dict[str, int]:
        """How many samples each split has."""
        return {split: len(numbers) for split, numbers in self.splits.items()}

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        """All fields: samples, labels, others."""
        made = [one.field for one in self.maker.fields]
        found = {field.name: field for field in [*made, *(table.field for table in self.tables)]}
        return {name: found[name] for name in sorted(found, key=lambda name: (name != SAMPLES, name != LABELS))}

    @cached_property
    def spooled(self) -> tuple[MadeField, ...]:
        """Fields whose samples have lengths that only their making tells."""
        if self.lengths() is not None:
            return tuple(made for made in self.maker.fields if made.field.is_ragged and made.field.name != SAMPLES)
        return tuple(made for made in self.maker.fields if made.field.is_ragged)

    def lengths(self) -> Lengths | None:
        """Return the bytes of each sample's `X` where they are known before, by data set; None where they are not."""
        name = self.maker.fields[0].field
        found = {split: self.maker.lengths(numbers) for split, numbers in self.splits.items()}
        known = {name.data_set(split): lengths for split, lengths in found.items() if lengths is not None}
        return known if len(known) == len(found) else None

    def data_sets(self, kept: Mapping[str, npt.NDArray[np.int64]], lengths: Lengths) -> list[DataSet]:
        """Return the layout of a pack.

        Args:
            kept: for each split which of its samples are in the pack.
            lengths: of the kept samples of ragged fields that are made; one that is not told of has no bytes yet.
        """
        laid = []
        made = {one.field.name: one for one in self.maker.fields}
        tables = {table.field.name: table for table in self.tables}
        for split, rows in kept.items():
            for field in self.fields.values():
                name = field.data_set(split)
                if field.name in tables:
                    values = tables[field.name].chosen(self.splits[split][rows]).values
                    size = sum(map(len, values)) if isinstance(values, tuple) else 0
                    shape, dtype = ((), "") if isinstance(values, tuple) else (values.shape[1:], values.dtype.str)
                else:
                    size = int(lengths[name].sum()) if name in lengths else 0
                    shape, dtype = made[field.name].shape, made[field.name].dtype
                if field.is_ragged:
                    laid += [DataSet(name, (size,), "|u1"), DataSet(field.index(split), (len(rows), 2), "<i8")]
                else:
                    laid.append(DataSet(name, (len(rows), *shape), dtype))
            laid.append(DataSet(f"{CRC}_{split}", (len(rows),), "<u4"))
        return laid

    def all_kept(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return every sample of each split."""
        return {split: np.arange(len(numbers)) for split, numbers in self.splits.items()}

    def meta(self, counts: Mapping[str, int], bad: Sequence[Sequence[Any]] = ()) -> dict[str, Any]:
        """Return what the pack says of itself: `bad` are split, index (None where left out), path and reason."""
        fields = {name: [field.content, field.is_ragged] for name, field in self.fields.items()}
        return {**self.about, "fields": fields, "splits": dict(counts), "bad": list(bad)}

    def part(self, start: int, stop: int) -> PackPlan:
        """Return the plan of a shard: samples `start` to `stop`, counted through all splits."""
        splits: dict[str, npt.NDArray[np.int64]] = {}
        begin = 0
        for split, numbers in self.splits.items():
            mine = numbers[max(0, start - begin) : max(0, stop - begin)]
            if len(mine):
                splits[split] = mine
            begin += len(numbers)
        chosen = np.concatenate(list(splits.values()))
        ends = np.cumsum([len(numbers) for numbers in splits.values()])
        renumbered = {
            split: np.arange(end - len(numbers), end)
            for (split, numbers), end in zip(splits.items(), ends.tolist(), strict=True)
        }
        tables = tuple(table.chosen(chosen) for table in self.tables)
        return replace(self, maker=self.maker.part(chosen), splits=renumbered, tables=tables)


def digest_of(*values: object) -> str:
    """Return the SHA-256 of plain values in hex."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
