"""Pure, seeded functions that assign samples to splits and folds, with the same result on every machine."""

from __future__ import annotations

import difflib
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from colabkit.foundation import (
    BadSource,
    Code,
    InvalidOption,
    MissingSplit,
    Text,
    cannot,
    check_number,
    check_whole_number,
    epoch_order,
    format_things,
    in_python,
    omit,
    option,
)
from colabkit.packs.format.layout import SPLITS, Indices, split_named, stored_splits
from colabkit.packs.labels.label_values import LabelKind
from colabkit.storage import Item

_MOST_BINS = 10
_EXAMPLE = "train=0.8,test=0.2"
_OMIT = omit("splits")


def parse_splits(text: str) -> dict[str, float] | str:
    """Convert shares such as `"train=0.8,val=0.2"` to a mapping; return the name of a column unchanged.

    Raises:
        ValueError: if a share is not a number, or a split is named twice.
    """
    if "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    shares = {name.strip(): float(share) for name, _, share in pairs}
    if len(shares) < len(pairs):
        raise ValueError(text)
    return shares


def checked_splits(act: str, splits: Any) -> Any:
    """Convert shares given as text to a mapping; return any other way to split unchanged.

    Raises:
        InvalidOption: if the text is invalid.
    """
    try:
        return parse_splits(splits) if isinstance(splits, str) else splits
    except ValueError:
        next_step = ("For example, use ", option("splits", _EXAMPLE))
        found = option("splits", splits)
        raise InvalidOption(cannot(act, found, "a number for each split, named once", next_step)) from None


def missing_split(act: str, name: str, known: Iterable[str]) -> MissingSplit:
    """Return the error for a split that does not exist."""
    names = list(known)
    closest = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    expected = " or ".join(map(repr, names))
    next_step = ("Use ", option("split", (closest or names)[0]))
    return MissingSplit(cannot(act, f"there is no split {name!r}", expected, next_step))


def shares_of(act: str, splits: object) -> dict[str, float]:
    """Return shares in the order of `SPLITS`, by the names under which a pack stores the splits.

    Args:
        act: verb and object for messages.
        splits: a mapping from any accepted name of a split to its share.

    Raises:
        InvalidOption: if a share or a name is invalid, a split is named twice, or the shares do not add up to 1.
    """
    if not isinstance(splits, Mapping):
        next_step = ("For example, use ", option("splits", _EXAMPLE))
        raise InvalidOption(cannot(act, option("splits", splits), "a share for each split", next_step))
    named = [(split_named(name), name) for name in splits]
    if unknown := [name for split, name in named if split is None]:
        found = f"{unknown[0]!r} is not the name of a split"
        raise InvalidOption(cannot(act, found, f"one of {', '.join(SPLITS)}", "Rename it"))
    names = stored_splits(splits)
    found_shares = {names[split]: splits[name] for split, name in named if split}
    if len(found_shares) < len(named):
        message = (option("splits", dict(splits)), " has several shares for one split")
        raise InvalidOption(cannot(act, message, "one share for each split", "Add up the shares of this split"))
    _check_shares(act, "splits", found_shares)
    return {split: float(found_shares[split]) for split in names.values()}


@dataclass(frozen=True, slots=True)
class SplitPlaces:
    """The split of each sample, as an index into `SPLITS`, and the source's names of the splits."""

    places: Indices
    names: Mapping[str, str]


def split_places(
    act: str, what: Text, cells: Sequence[Any], items: Sequence[Item], unsplit: Text = _OMIT
) -> SplitPlaces:
    """Return the splits that cells name.

    Args:
        act: verb and object for messages.
        what: the cells, for messages.
        cells: the name of the split of each sample.
        items: the samples, for messages.
        unsplit: advice that makes no splits, for messages.

    Raises:
        BadSource: if a cell is not the name of a split.
    """
    splits = [split_named(cell) for cell in cells]
    if None in splits:
        others = [cell for cell in cells if split_named(cell) is None]
        unknown = list(dict.fromkeys(map(repr, others)))
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        names = f"{', '.join(unknown[:5])}{more} (first for {items[splits.index(None)].path!r})"
        next_step: Text = (
            "Rename them",
            in_python((", or pass a function of the path: ", option("splits", Code("function")))),
        )
        if all(str(cell).isdecimal() for cell in others):
            views = " and use dataset.subset(table['fold'] != k) for each fold k, or colabkit.k_fold()"
            next_step = ("Rename them or, for cross-validation, ", unsplit, in_python(views))
        raise BadSource(cannot(act, (what, f" contains {names}"), "train, val or test", next_step))
    places = np.fromiter((SPLITS.index(split) for split in splits if split), np.int64, len(splits))
    return SplitPlaces(places, stored_splits(cells))


def split_labelled(
    kind: LabelKind, values: npt.NDArray[Any] | None, n: int, shares: Mapping[str, float], seed: int
) -> dict[str, Indices]:
    """Divide `n` samples with these labels as `split_shares` does, stratified as in `strata_of`."""
    return split_shares(strata_of(kind, values, shares), n, shares, seed, are_bins=kind == "regression")


def split_shares(
    strata: npt.NDArray[Any] | None, n: int, shares: Mapping[str, float], seed: int, *, are_bins: bool = False
) -> dict[str, Indices]:
    """Return the sorted `int64` sample numbers of each split; each of the `n` samples is in exactly one split.

    Each stratum is shuffled and divided separately, with split sizes rounded to whole samples. Every split thus gets
    its share of each stratum to within one sample, and adding a stratum does not change how the others are split.
    Strata too small to give each split a sample are an exception: if there are several, they are divided together,
    because their rounding errors would add up. Bins of a target are divided so that the remainders do not add
    up either: every split gets its share of all samples to within one sample, and of each bin to within two.
    Strata are `[n]`, for example classes; None treats all samples as one stratum. Splits may have any names. The same
    seed gives the same splits.

    Raises:
        InvalidOption: if the shares do not add up to 1, `strata` does not have `n` values, or a split would be empty.
    """
    act = "split the samples"
    check_whole_number(act, "seed", seed, 0)
    total = _check_shares(act, "shares", shares)
    ends = [*itertools.accumulate(share / total for share in shares.values())]
    parts: dict[str, list[Indices]] = {name: [] for name in shares}
    members_of, before = _members(act, strata, n), 0
    for stratum, members in members_of if are_bins else _join_rare(members_of, ends):
        random.Random(f"{seed}/{stratum}").shuffle(members)
        dealt = np.array(members, np.int64)
        for part, some in zip(parts.values(), np.split(dealt, _stops(ends, len(dealt), before)), strict=False):
            part.append(some)
        before += len(members) if are_bins else 0
    found = {name: np.sort(np.concatenate([np.empty(0, np.int64), *part])) for name, part in parts.items()}
    if empty := next((name for name, part in found.items() if not len(part)), None):
        message = f"{empty!r} would get none of {format_things(n, 'sample')}"
        raise InvalidOption(cannot(act, message, "at least one sample", "Use a larger share, or more samples"))
    return found


def strata_of(kind: LabelKind, values: npt.NDArray[Any] | None, shares: Mapping[str, float]) -> Indices | None:
    """Return the strata for splitting samples with these labels, `int64 [n]`; None for no strata.

    Each class is a stratum, and so is each combination of several labels; combinations too rare to give the smallest
    share a sample form one common stratum. A regression target is divided into up to ten bins of equal count. With
    several targets, there are no strata.
    """
    if values is None or kind == "none" or (kind == "regression" and values.ndim > 1):
        return None
    if kind == "class":
        return values.astype(np.int64)
    fewest = math.ceil(1 / min(shares.values()))
    if kind == "regression":
        bins = max(1, min(_MOST_BINS, len(values) // fewest))
        ranks = np.empty(len(values), np.int64)
        ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
        return ranks * bins // max(1, len(values))
    rows = np.ascontiguousarray(values)
    packed = np.packbits(rows, axis=1) if rows.shape[1] else np.zeros((len(rows), 1), np.uint8)
    _, numbers, counts = np.unique(packed, axis=0, return_inverse=True, return_counts=True)
    strata = numbers.reshape(-1).astype(np.int64)
    strata[counts[strata] < fewest] = -1
    return strata


def fold_numbers(
    n: int,
    k: int,
    *,
    strata: Sequence[Any] | npt.NDArray[Any] | None = None,
    groups: Sequence[Any] | npt.NDArray[Any] | None = None,
    seed: int = 0,
) -> Indices:
    """Return the fold of each sample, `int64 [n]`, from 0 to `k - 1`; no fold is empty.

    Without groups, the folds' sizes differ by at most one sample, and so do their counts of each stratum. With groups,
    all samples of a group are in one fold. Groups with large shares of the strata are assigned first, each to the fold
    with the smallest share of the group's strata so far; ties go to the smallest fold. This keeps the sum of squares of
    the folds' shares of all strata low. scikit-learn's `StratifiedGroupKFold` minimizes their standard deviation.

    Args:
        n: number of samples.
        k: number of folds, at least 2.
        strata: `[n]`, for example classes; each fold keeps their proportions.
        groups: `[n]`, for example patients; samples of one group stay together.
        seed: the same seed gives the same folds.

    Raises:
        InvalidOption: if there are fewer samples or groups than folds, or `strata` or `groups` does not have `n`
            values.
    """
    act = f"make {k} folds"
    check_whole_number(act, "k", k, 2)
    check_whole_number(act, "n", n, 0)
    check_whole_number(act, "seed", seed, 0)
    if n < k:
        message = f"the dataset has only {format_things(n, 'sample')}"
        raise InvalidOption(cannot(act, message, "at least one for each fold", "Use fewer folds"))
    stratum_of = np.zeros(n, np.int64) if strata is None else _codes(act, "strata", strata, n)
    if groups is not None:
        group_of = _codes(act, "groups", groups, n)
        return _folds_of_groups(act, k, stratum_of, group_of, seed)[group_of]
    order = epoch_order(n, seed, 0, 0, n)
    order = order[np.argsort(stratum_of[order], kind="stable")]
    folds = np.empty(n, np.int64)
    folds[order] = np.arange(n) % k
    return folds


def _folds_of_groups(act: str, k: int, stratum_of: Indices, group_of: Indices, seed: int) -> Indices:
    count = int(group_of.max()) + 1
    if count < k:
        message = f"the dataset has only {format_things(count, 'group')}"
        raise InvalidOption(cannot(act, message, "at least one for each fold", "Use fewer folds"))
    totals = np.bincount(stratum_of)
    pairs, sizes = np.unique(group_of * len(totals) + stratum_of, return_counts=True)
    owner, stratum = np.divmod(pairs, len(totals))
    share = sizes / totals[stratum]
    start = np.searchsorted(owner, np.arange(count + 1)).tolist()
    group_sizes = np.bincount(group_of).tolist()
    weight = np.bincount(owner, share**2)
    order = epoch_order(count, seed, 0, 0, count)
    order = order[np.argsort(-weight[order], kind="stable")]
    held = np.zeros((k, len(totals)))
    fold_sizes = np.zeros(k, np.int64)
    folds = np.empty(count, np.int64)
    for group in order.tolist():
        its = slice(start[group], start[group + 1])
        # Increase of each fold's sum of squares, without the term that is equal for all folds; an empty fold costs 0.
        costs = held[:, stratum[its]] @ share[its]
        fold = np.lexsort((fold_sizes, costs))[0]
        held[fold, stratum[its]] += share[its]
        fold_sizes[fold] += group_sizes[group]
        folds[group] = fold
    return folds


def _check_shares(act: str, parameter: str, shares: Mapping[Any, Any]) -> float:
    """Return the sum of shares; raise `InvalidOption` unless all are above 0 and add up to 1."""
    checked = [
        check_number(act, f"{parameter}[{name!r}]", share, above=0, example=0.2) for name, share in shares.items()
    ]
    total = float(sum(checked))
    if abs(total - 1) > 1e-6:
        found = f"the shares add up to {total:g}"
        raise InvalidOption(cannot(act, found, "a sum of 1", "For example, use shares of 0.8 and 0.2"))
    return total


def _members(act: str, strata: npt.NDArray[Any] | None, n: int) -> list[tuple[Any, list[int]]]:
    if strata is None:
        return [(0, list(range(n)))]
    codes = _codes(act, "strata", strata, n)
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(np.bincount(codes)) if n else np.empty(0, np.int64)
    values = np.asarray(strata)[order[ends - 1]].tolist()
    return [(value, part.tolist()) for value, part in zip(values, np.split(order, ends[:-1]), strict=False)]


def _stops(ends: Sequence[float], count: int, before: int = 0) -> list[int]:
    """Return the number of a stratum's samples after each split, given the sum of the shares up to it.

    The remainders of the `before` samples that were divided earlier are continued, so that they do not add up.
    """
    stops = (round(end * (before + count)) - round(end * before) for end in ends)
    # Ties of the rounding could put a stop before the previous one.
    return [*itertools.accumulate(stops, max)]


def _join_rare(strata: list[tuple[Any, list[int]]], ends: Sequence[float]) -> list[tuple[Any, list[int]]]:
    """Join the strata that are too small to give each split a sample, if there are several."""
    is_rare = [len({0, *_stops(ends, len(members))}) <= len(ends) for _, members in strata]
    if sum(is_rare) < 2:
        return strata
    rare = itertools.chain.from_iterable(members for _, members in itertools.compress(strata, is_rare))
    frequent = [one for one, joined in zip(strata, is_rare, strict=True) if not joined]
    return [*frequent, ("rare", sorted(rare))]


def _codes(act: str, name: str, values: Sequence[Any] | npt.NDArray[Any], n: int) -> Indices:
    array = np.asarray(values)
    if array.shape != (n,):
        expected = f"one value for each of {format_things(n, 'sample')}"
        next_step = "Pass as many values as samples"
        raise InvalidOption(cannot(act, f"{name} has shape {array.shape}", expected, next_step))
    try:
        codes = np.unique(array, return_inverse=True)[1]
    except TypeError:
        kinds = ", ".join(sorted({type(value).__name__ for value in array.tolist()}))
        found = f"{name} contains values of the types {kinds}"
        raise InvalidOption(cannot(act, found, "values of one type", "Convert them to numbers or text")) from None
    return codes.reshape(n).astype(np.int64)
