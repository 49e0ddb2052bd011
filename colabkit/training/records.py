"""Records of a run: epochs, validations, and the values that steps return, which stay on the device until `read()`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from colabkit.foundation import (
    InvalidOption,
    MetersSnapshot,
    TrainingDiverged,
    cannot,
    file_changes,
    finite,
    kind_of,
    meters,
    option,
)

logger = logging.getLogger("colabkit")

_SPENT = ("wait_s", "copy_s", "compute_s", "other_s")


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch of training.

    Attributes:
        epoch: number of the epoch, from 0.
        steps: number of step calls.
        samples: samples of the batches, in all processes together, also those that `collate_fn` dropped.
        seconds: duration in seconds, without validation.
        wait_s: seconds spent waiting for data.
        values: mean over samples of each value that the step returned.
        validation: values of the last validation in the epoch.
        copy_s: seconds spent waiting for copies to the device that did not overlap with computation.
        compute_s: seconds spent in the step.
        other_s: seconds of other work on the host.
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
        """All values by label; a validation value whose name training also uses gets a prefix, as in `val_loss`."""
        return {**self.values, **meters.label_validation(self.validation, self.values)}


class EpochLog:
    """A file to which a line of JSON is appended at the end of each epoch.

    Raises:
        InvalidOption: if the path is a folder.
        FileFailed, NotEnoughSpace: if the file cannot be opened or created.
    """

    def __init__(self, act: str, path: Path) -> None:
        self.path = path
        self._has_failed = False
        with file_changes.translated(act):
            if path.is_dir():
                found = (option("log"), f" is the folder {str(path)!r}")
                next_step = ("Name a file in it, for example ", option("log", str(path / "run.jsonl")))
                raise InvalidOption(cannot(act, found, "a file", next_step))
            file_changes.make_folder(path.parent)
            file_changes.append(path, b"")

    def append(self, record: EpochRecord) -> None:
        """Append a line for an epoch; if that fails, log a warning, and append nothing from then on."""
        if self._has_failed:
            return
        counts = {name: getattr(record, name) for name in ("epoch", "samples", "seconds", "wait_s")}
        line = json.dumps(finite({**counts, **record.shown, **counts}), allow_nan=False)
        try:
            file_changes.append(self.path, f"{line}\n".encode())
        except OSError as error:
            self._has_failed = True
            logger.warning("cannot write the log %r; training continues without it: %s", str(self.path), error)


CALLBACK_STOPS = ("on_step", "on_checkpoint")
"""The functions of the user that can end a run with `StopIteration`."""

INTENDED_STOPS = (None, "patience", *CALLBACK_STOPS)
"""The values of `TrainReport.stopped` for a run that ended as intended."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint of a run.

    Attributes:
        step: number of the step after which it was taken, counted from 1 over all epochs.
        files: the paths of its content and of its seal, on rank 0; empty on other ranks. If the folder is on a mount
            such as Drive, these are the local files. Copies of both in another folder are a checkpoint, too.
    """

    step: int
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of one validation.

    Attributes:
        step: number of the step before the validation, counted from 1 over all epochs.
        values: the numbers from `validate`, by name.
    """

    step: int
    values: Mapping[str, float]


@dataclass
class EpochProgress:
    """Progress of the current epoch; fields as in `EpochRecord`, but `samples` counts this process only.

    Attributes:
        loader_epoch: number of the epoch in the loader, which differs if the loader was used before this run.
        is_validation_due: whether a validation comes before the next step.
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
        """Set the four parts of the time to those of `before` plus those in `spent`, measured since `before`."""
        for name in _SPENT:
            setattr(self, name, getattr(before, name) + getattr(spent, name))

    def record(self, samples: int, values: Mapping[str, float]) -> EpochRecord:
        """Return the record of the epoch, with the `samples` of all processes and the mean of each value over them."""
        fields = {name: getattr(self, name) for name in ("epoch", "steps", "seconds", "validation", *_SPENT)}
        return EpochRecord(samples=samples, values=values, **fields)


Values: TypeAlias = Mapping[str, object]

_STACKED = 1_000
_POINTS = 1_000


def values_of(result: object, is_copied: bool = True) -> Values:
    """Return the values that a step returned, by name: as numbers, or as tensors if they are not on the CPU.

    Args:
        result: result of the step.
        is_copied: whether to copy tensors on other devices, since the step may modify them before they are read.

    Raises:
        InvalidOption: if the result is not a loss, a dict of numbers, or None.
    """
    # Handle the usual result first, because the other checks take several microseconds.
    if isinstance(result, Tensor) and result.is_cpu:
        try:
            return {"loss": result.item()}
        except RuntimeError:
            # It has several elements, or none; the error below describes it.
            pass
    if result is None:
        return {}
    named = (
        {"loss": result} if is_number(result) else _checked(result, "the step", "a loss, a dict of numbers, or None")
    )
    return {name: _read(value, is_copied) for name, value in named.items()}


def listened(values: Values, result: Any) -> Values:
    """Return `values` for listeners, with a copy of each CPU tensor of `result` in place of its number."""
    named = result if isinstance(result, Mapping) else {"loss": result}
    return {
        name: named[name].detach().clone() if isinstance(named[name], Tensor) and named[name].is_cpu else value
        for name, value in values.items()
    }


def numbers_of(result: object) -> dict[str, float]:
    """Return the result of `validate` as a dict of floats.

    Raises:
        InvalidOption: if the result is not a dict of numbers.
    """
    # An `EvaluateReport` has such a dict.
    inner = getattr(result, "values", None)
    values = _checked(inner if isinstance(inner, Mapping) else result, "validate", "a dict of numbers")
    return {name: float(cast(Any, value)) for name, value in values.items()}


def _checked(result: object, function: str, expected: str) -> Values:
    if not isinstance(result, Mapping):
        found = f"{function} returned {_described(result)}"
        raise InvalidOption(cannot("train", found, expected, "Change what it returns"))
    for name, value in result.items():
        if not is_number(value):
            part = f"{function} returned {name!r} as {_described(value)}"
            next_step = "For example, return its mean" if hasattr(value, "mean") else "Return a number, or remove it"
            raise InvalidOption(cannot("train", part, "a single number for each name", next_step))
    return result


def _described(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"{kind_of(value)} of shape {tuple(shape)}" if isinstance(shape, tuple) else kind_of(value)


def _read(value: Any, is_copied: bool) -> object:
    """Return a value as a number, or as a tensor if it is not on the CPU, where reading would wait for the device."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu else value.detach().clone() if is_copied else value
    return float(value)


def is_number(value: object) -> bool:
    """Return whether a value is a single number or a tensor with one element, on any device."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return hasattr(value, "__float__") and not getattr(value, "shape", ())


class SampleMeans:
    """Means over samples, summed in step order, so that a resumed run gets bit-identical results."""

    def __init__(self, sums: Mapping[str, tuple[float, int]] | None = None) -> None:
        self.sums: dict[str, tuple[float, int]] = {
            name: (total, count) for name, (total, count) in (sums or {}).items()
        }

    def add(self, name: str, value: float, samples: int) -> None:
        """Add a value that is the mean of `samples` samples."""
        total, count = self.sums.get(name, (0.0, 0))
        self.sums[name] = total + value * samples, count + samples

    @classmethod
    def of_all(cls, all_sums: list[dict[str, tuple[float, int]]]) -> SampleMeans:
        """Combine the sums of several processes."""
        whole = cls()
        for sums in all_sums:
            for name, (total, count) in sums.items():
                before = whole.sums.get(name, (0.0, 0))
                whole.sums[name] = before[0] + total, before[1] + count
        return whole

    @classmethod
    def of_rank(cls, all_sums: list[dict[str, tuple[float, int]]], rank: int, count: int) -> SampleMeans:
        """Return the means with which a rank of `count` ranks resumes, given the saved sums of each rank.

        If the number of ranks has changed, rank 0 resumes with the sums of all ranks, and the others without sums.
        """
        if len(all_sums) == count:
            return cls(all_sums[rank])
        return cls.of_all(all_sums) if rank == 0 else cls()

    def read(self) -> dict[str, float]:
        """Return the means."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}


class ValueCurve:
    """Means of each value over bins of steps. Bins double in width so that there are never more than 1,000.

    Attributes:
        width: steps per bin.
        bins: for each name, the sum and count of each bin, by bin number.
    """

    def __init__(self, width: int = 1, bins: Mapping[str, Mapping[int, tuple[float, int]]] | None = None) -> None:
        self.width = width
        self.bins = {name: dict(points) for name, points in (bins or {}).items()}

    def add(self, name: str, step: int, value: float) -> None:
        """Add the value of a step; steps count from 1."""
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

    def points(self, steps: int) -> dict[str, list[tuple[int, float]]]:
        """Return, for each name, pairs of the last of at most `steps` steps of a bin and the mean over the bin."""
        return {
            name: [
                (min((number + 1) * self.width, steps), total / count)
                for number, (total, count) in sorted(points.items())
            ]
            for name, points in self.bins.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the width and the bins as plain values."""
        bins = {name: [(number, *sums) for number, sums in points.items()] for name, points in self.bins.items()}
        return {"width": self.width, "bins": bins}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> ValueCurve:
        """Return the curve for a state from `state_dict()`."""
        bins = {name: {point[0]: (point[1], point[2]) for point in points} for name, points in state["bins"].items()}
        return cls(state["width"], bins)


class ValueRecorder:
    """A recorder that keeps the values of steps on their device until `read()` adds them to the means and the curve.

    Args:
        curve: curve of the run.
        means: means of the epoch so far.
        must_be_finite: whether a NaN or infinity is an error. Numbers on the CPU are checked immediately; numbers on
            other devices are checked when they are read, since each check would wait for the device.
        complete: function that is called before values are stacked, and adds pending values to the mappings of earlier
            steps.
    """

    def __init__(
        self,
        curve: ValueCurve,
        means: SampleMeans,
        must_be_finite: bool = False,
        complete: Callable[[], None] = lambda: None,
    ) -> None:
        self.means = means
        self._must_be_finite = must_be_finite
        self._complete = complete
        self._curve = curve
        self._steps: list[tuple[int, int, Values]] = []
        self._stacked: list[tuple[str, list[int], list[int], Tensor]] = []

    def add(self, step: int, samples: int, values: Values) -> None:
        """Record the values that a step on `samples` samples returned.

        Raises:
            TrainingDiverged: if `must_be_finite` is set and a CPU value is not finite.
        """
        if self._must_be_finite:
            for name, value in values.items():
                if isinstance(value, float) and not math.isfinite(value):
                    raise _diverged(step, name, value)
        self._steps.append((step, samples, values))
        # Stacking replaces many small device allocations with one.
        if len(self._steps) == _STACKED:
            self._stack()

    def _stack(self) -> None:
        self._complete()
        by_name: dict[str, list[tuple[int, int, object]]] = {}
        for step, samples, values in self._steps:
            for name, value in values.items():
                by_name.setdefault(name, []).append((step, samples, value))
        self._steps.clear()
        for name, noted in by_name.items():
            steps, samples_of, found = zip(*noted, strict=True)
            self._stacked.append((name, list(steps), list(samples_of), _joined(found)))

    def read(self) -> None:
        """Add all recorded values to the means and the curve; this waits for the device."""
        self._stack()
        for name, steps, samples_of, values in self._stacked:
            for step, samples, value in zip(steps, samples_of, values.tolist(), strict=True):
                if self._must_be_finite and not math.isfinite(value):
                    raise _diverged(step, name, value)
                self.means.add(name, value, samples)
                self._curve.add(name, step, value)
        self._stacked.clear()


def _diverged(step: int, name: str, value: float) -> TrainingDiverged:
    next_step = ("Lower the learning rate, clip gradients, or use ", option("on_nonfinite", "continue"))
    return TrainingDiverged(cannot("train", f"step {step} returned {name}={value}", "a finite number", next_step))


def _joined(values: tuple[object, ...]) -> Tensor:
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor([float(cast(Any, value)) for value in values], dtype=torch.float64, device="cpu")
    tensors = [
        value if isinstance(value, Tensor) else torch.tensor(float(cast(Any, value)), device="cpu") for value in values
    ]
    if len({(tensor.dtype, tensor.device, tensor.shape) for tensor in tensors}) > 1:
        device = next(value.device for value in values if isinstance(value, Tensor))
        tensors = [tensor.to(device, torch.float64).reshape(()) for tensor in tensors]
    return torch.stack(tensors).flatten().double()
