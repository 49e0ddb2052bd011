"""Validation: when it is due, what it returns in every rank, and which state is the best so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from colabkit.foundation import InvalidOption, LaunchFailed, cannot
from colabkit.training.ranks import Ranks
from colabkit.training.records import Values, numbers_of


class Validator:
    """Tells how good a state is.

    Args:
        validate: returns numbers, told how many validations came before; None to judge by what the step returns.
        every: steps between two validations, None for the ends of epochs.
        monitor: the number that judges, None for the loss.
        mode: whether the lowest or the highest is best.
        processes: those that train together; the first one's numbers count.

    Attributes:
        best: the best number so far, None before the first.
        score: the number of the state as it is, None if it was not judged.
        is_best: whether the state as it is is the best so far, and not saved yet.
    """

    def __init__(
        self,
        validate: Callable[[int], Values] | None,
        every: int | None,
        monitor: str | None,
        mode: Literal["min", "max"],
        processes: Ranks,
    ) -> None:
        self.best: float | None = None
        self.score: float | None = None
        self.is_best = False
        self._validate = validate
        self._every = every
        self._monitor = monitor
        self._mode = mode
        self._processes = processes

    @property
    def validates(self) -> bool:
        """Whether there is anything to call."""
        return self._validate is not None

    @property
    def is_by_epoch(self) -> bool:
        """Whether states are judged at the ends of epochs."""
        return self._validate is None or self._every is None

    @property
    def rule(self) -> tuple[Literal["min", "max"], str]:
        """Mode and name of the number: what two scores need in common to be compared."""
        return self._mode, self._monitor or "loss"

    def is_due(self, step: int) -> bool:
        """Return whether a validation follows a step, not counting the end of an epoch."""
        return self._validate is not None and self._every is not None and step % self._every == 0

    def moved(self) -> None:
        """Note that the state is another."""
        self.score, self.is_best = None, False

    def validate(self, number: int) -> dict[str, float]:
        """Validate in all processes, and return what the first one found.

        Args:
            number: of validations before this one.

        Raises:
            InvalidOption: if that is no dict of numbers.
            LaunchFailed: if it failed in another process.
        """
        assert self._validate is not None
        found: dict[str, float] = {}
        trouble: Exception | None = None
        try:
            returned = self._validate(number)
            if self._processes.is_first:
                found = numbers_of(returned)
        except Exception as error:  # the others have to hear of it before it is raised
            if self._processes.count == 1:
                raise
            trouble = error
        troubles = self._processes.from_all(None if trouble is None else f"{type(trouble).__name__}: {trouble}")
        if trouble is not None:
            raise trouble
        for rank, told in enumerate(troubles):
            if told is not None:
                raise LaunchFailed(cannot("validate", f"process {rank}: {told}", "all to end well", "See its output"))
        return self._processes.from_first(found)

    def judge(self, values: Mapping[str, float]) -> None:
        """Note how good the state is.

        Raises:
            InvalidOption: if the number that was asked for is not among the values.
        """
        name = self._monitor or "loss"
        if name not in values and name.startswith("val_"):
            name = name.removeprefix("val_")  # as reports label the numbers of a validation
        if self._monitor is not None and name not in values:
            found = f"monitor={self._monitor!r} beside {', '.join(map(repr, values)) or 'no values'}"
            raise InvalidOption(cannot("tell the best checkpoint", found, "one of these", "Correct it and go on"))
        value = values.get(name, math.nan)
        if not math.isfinite(value):
            return
        self.score = value
        if self.best is None or (value < self.best if self._mode == "min" else value > self.best):
            self.best = value
            self.is_best = True
