"""What a run records: its epochs and validations, and the values that steps return, kept on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from colabkit.foundation import InvalidOption, MetersSnapshot, TrainingDiverged, cannot, kind_of, meters

_SPENT = ("wait_s", "copy_s", "compute_s", "other_s")


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch of training.

    Attributes:
        epoch: its number, from 0.
        steps: calls of the step.
        samples: samples seen, by all processes together.
        seconds: its duration without validation.
        wait_s: seconds of its steps spent waiting for data.
        values: means over samples of what the step returned.
        validation: what `validate` returned last in it.
        copy_s: seconds of its steps spent waiting for copies to the device, which nothing hid.
        compute_s: seconds of its steps that the steps themselves took.
        other_s: seconds of its steps that went to other work of the host.
    """

    epoch: int
    steps: int
    samples: int
    seconds: float
    wait_s: float
    values: Mapping[str, float]
    validation: Mapping[str, float] = field(default_factory=dict)
    copy_s: float = 0.0
    compute_s: float = 0.0
    other_s: float = 0.0

    @property
    def shown(self) -> dict[str, float]:
        """All numbers by label: those of a validation as `val_loss`, where training has a number of that name too."""
        return {**self.values, **meters.label_validation(self.validation, self.values)}


@dataclass(frozen=True, slots=True)
class Validation:
    """What `validate` returned after a step, whose number counts from 1 over all epochs."""

    step: int
    values: Mapping[str, float]


@dataclass
class EpochProgress:
    """The epoch that is under way: as in its record, so far, with the samples of this process.

    Attributes:
        loader_epoch: its number in the loader, which may have been used before.
        is_validation_due: whether a validation comes before its next step.
    """

    epoch: int
    loader_epoch: int
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    copy_s: float = 0.0
    compute_s: float = 0.0
    other_s: float = 0.0
    validation: dict[str, float] = field(default_factory=dict)
    is_validation_due: bool = False

    def spend(self, before: EpochProgress, spent: MetersSnapshot) -> None:
        """Take in where the time went since `before`, by the loader's meters."""
        for name in _SPENT:
            setattr(self, name, getattr(before, name) + getattr(spent, name))

    def record(self, samples: int, values: Mapping[str, float]) -> EpochRecord:
        """Return the epoch's record, with the samples of all processes and the means over them."""
        kept = {name: getattr(self, name) for name in ("epoch", "steps", "seconds", "validation", *_SPENT)}
        return EpochRecord(samples=samples, values=values, **kept)


Values: TypeAlias = Mapping[str, object]

_STACKED = 1_000
_POINTS = 1_000


def values_of(result: object) -> Values:
    """Return what a step gave, by name.

    Raises:
        InvalidOption: if it is no loss, no dict of numbers, and not None.
    """
    if result is None:
        return {}
    if is_number(result):
        return {"loss": _kept(result)}
    return _checked(result, "the step", "a loss, a dict of numbers, or None")


def numbers_of(result: object) -> dict[str, float]:
    """Return what `validate` gave as numbers.

    Raises:
        InvalidOption: if it is no dict of numbers.
    """
    values = _checked(result, "validate", "a dict of numbers")
    return {name: float(cast(Any, value)) for name, value in values.items()}


def _checked(result: object, giver: str, needed: str) -> Values:
    if not isinstance(result, Mapping):
        found = f"{giver} returned {kind_of(result)}"
        raise InvalidOption(cannot("train", found, f"it may return {needed}", "Return one of these"))
    for name, value in result.items():
        if not is_number(value):
            found = f"{giver} returned {name!r} as {kind_of(value)}"
            next_step = "Return its mean, say" if hasattr(value, "mean") else "Return a number, or leave it out"
            raise InvalidOption(cannot("train", found, f"it may return {needed}, each a single number", next_step))
    return {name: _kept(value) for name, value in result.items()}


def _kept(value: object) -> object:
    """Return a value as it is now: a tensor is read later, and may be one that a step adds to."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def is_number(value: object) -> bool:
    """Return whether a value is a single number, on whatever device."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return hasattr(value, "__float__") and not getattr(value, "shape", ())


class SampleMeans:
    """Means over samples, summed one by one, so that a sum taken up again comes to the same bits."""

    def __init__(self, sums: Mapping[str, tuple[float, int]] | None = None) -> None:
        self.sums: dict[str, tuple[float, int]] = {
            name: (total, count) for name, (total, count) in (sums or {}).items()
        }

    def add(self, name: str, value: float, samples: int) -> None:
        """Count a value of so many samples."""
        total, count = self.sums.get(name, (0.0, 0))
        self.sums[name] = total + value * samples, count + samples

    @classmethod
    def of_all(cls, all_sums: list[dict[str, tuple[float, int]]]) -> SampleMeans:
        """Return the means over the sums of several processes."""
        whole = cls()
        for sums in all_sums:
            for name, (total, count) in sums.items():
                before = whole.sums.get(name, (0.0, 0))
                whole.sums[name] = before[0] + total, before[1] + count
        return whole

    def read(self) -> dict[str, float]:
        """Return the means."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}


class ValueCurve:
    """Means of every value over bins of steps; bins grow so that a run of any length has at most 1,000 of them.

    Attributes:
        width: steps of a bin.
        bins: for each name, sum and count of each bin, by its number.
    """

    def __init__(self, width: int = 1, bins: Mapping[str, Mapping[int, tuple[float, int]]] | None = None) -> None:
        self.width = width
        self.bins = {name: dict(points) for name, points in (bins or {}).items()}

    def add(self, name: str, step: int, value: float) -> None:
        """Count the value of a step, whose number is from 1."""
        points = self.bins.setdefault(name, {})
        number = (step - 1) // self.width
        total, count = points.get(number, (0.0, 0))
        points[number] = total + value, count + 1
        if number >= _POINTS:
            self._widen()

    def _widen(self) -> None:
        self.width *= 2
        for name, points in self.bins.items():
            wider: dict[int, tuple[float, int]] = {}
            for number, (total, count) in points.items():
                before = wider.get(number // 2, (0.0, 0))
                wider[number // 2] = before[0] + total, before[1] + count
            self.bins[name] = wider

    def points(self) -> dict[str, list[tuple[int, float]]]:
        """Return for each name the last step of each bin and the mean over it."""
        return {
            name: [((number + 1) * self.width, total / count) for number, (total, count) in sorted(points.items())]
            for name, points in self.bins.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the bins as plain values."""
        bins = {name: [(number, *sums) for number, sums in points.items()] for name, points in self.bins.items()}
        return {"width": self.width, "bins": bins}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> ValueCurve:
        """Return the curve of a state."""
        bins = {name: {point[0]: (point[1], point[2]) for point in points} for name, points in state["bins"].items()}
        return cls(state["width"], bins)


class ValueRecorder:
    """Keeps what steps return where it is, on the device, until `read` brings it to means and curve.

    Args:
        curve: of the run.
        means: of an epoch that was begun before.
        must_be_finite: whether a NaN or an infinity is an error. Numbers on the CPU are checked at once, those on
            another device when they are read, since each check there would wait for the device.
    """

    def __init__(self, curve: ValueCurve, means: SampleMeans, must_be_finite: bool = False) -> None:
        self.means = means
        self._must_be_finite = must_be_finite
        self._curve = curve
        self._steps: list[tuple[int, int, Values]] = []
        self._stacked: list[tuple[str, list[int], list[int], Tensor]] = []

    def add(self, step: int, samples: int, values: Values) -> None:
        """Note what a step of so many samples returned.

        Raises:
            TrainingDiverged: if a number is not finite and has to be.
        """
        if self._must_be_finite:
            for name, value in values.items():
                if not isinstance(value, Tensor) or value.device.type == "cpu":
                    _check_finite(step, name, float(cast(Any, value)))
        self._steps.append((step, samples, values))
        if len(self._steps) == _STACKED:  # thousands of small tensors on a device would be thousands of allocations
            self._stack()

    def _stack(self) -> None:
        by_name: dict[str, list[tuple[int, int, object]]] = {}
        for step, samples, values in self._steps:
            for name, value in values.items():
                by_name.setdefault(name, []).append((step, samples, value))
        self._steps.clear()
        for name, noted in by_name.items():
            steps, samples_of, found = zip(*noted, strict=True)
            self._stacked.append((name, list(steps), list(samples_of), _joined(found)))

    def read(self) -> None:
        """Bring all to means and curve, which waits for the device."""
        self._stack()
        for name, steps, samples_of, values in self._stacked:
            for step, samples, value in zip(steps, samples_of, values.tolist(), strict=True):
                if self._must_be_finite:
                    _check_finite(step, name, value)
                self.means.add(name, value, samples)
                self._curve.add(name, step, value)
        self._stacked.clear()


def _check_finite(step: int, name: str, value: float) -> None:
    if not math.isfinite(value):
        next_step = "Lower the learning rate or clip gradients, or pass on_nonfinite='continue'"
        raise TrainingDiverged(cannot("train", f"step {step} returned {name}={value}", "a finite number", next_step))


def _joined(values: tuple[object, ...]) -> Tensor:
    """Return single values as one tensor, on the device of the first tensor among them."""
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor([float(cast(Any, value)) for value in values], dtype=torch.float64)
    tensors = [value if isinstance(value, Tensor) else torch.tensor(float(cast(Any, value))) for value in values]
    if len({(tensor.dtype, tensor.device, tensor.shape) for tensor in tensors}) > 1:
        device = next(value.device for value in values if isinstance(value, Tensor))
        tensors = [tensor.to(device, torch.float64).reshape(()) for tensor in tensors]
    return torch.stack(tensors).flatten().double()
