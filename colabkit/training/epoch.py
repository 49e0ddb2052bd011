"""The epoch that is under way: what checkpoints hold of it, and its record in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from colabkit.foundation import MetersSnapshot
from colabkit.training.report import EpochRecord


@dataclass
class Begun:
    """The epoch that is under way.

    Attributes:
        epoch: its number in the training.
        loader_epoch: its number in the loader, which may have been used before.
        steps: steps in it so far.
        samples: of this process in it so far.
        seconds: spent in it, validation apart.
        wait_s: of the time of its whole steps, waiting for data.
        copy_s: waiting for copies to the device, which nothing hid.
        compute_s: the steps themselves.
        other_s: other work of the host.
        validation: what was returned last in it.
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

    def spend(self, before: Begun, spent: MetersSnapshot) -> None:
        """Take in where the time went since `before`, by the loader's meters."""
        self.wait_s = before.wait_s + spent.wait_s
        self.copy_s = before.copy_s + spent.copy_s
        self.compute_s = before.compute_s + spent.compute_s
        self.other_s = before.other_s + spent.other_s

    def record(self, samples: int, means: Mapping[str, float]) -> EpochRecord:
        """Return the epoch's record.

        Args:
            samples: of all processes.
            means: over samples of what the step returned.
        """
        return EpochRecord(
            self.epoch,
            self.steps,
            samples,
            self.seconds,
            self.wait_s,
            means,
            self.validation,
            self.copy_s,
            self.compute_s,
            self.other_s,
        )
