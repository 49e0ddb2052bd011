"""Rules about learning: a loss that is not finite, rises or no longer falls, and overfitting."""

from __future__ import annotations

import math
from itertools import pairwise

from colabkit.foundation import Phrase, in_python, option
from colabkit.monitoring.diagnosing.diagnosis import Advice
from colabkit.monitoring.diagnosing.remedies import options
from colabkit.monitoring.diagnosing.run_profile import RunProfile

# For overfitting, the validation loss must exceed its lowest value by this factor in each of this many newest epochs.
_WORSE, _WORSE_EPOCHS = 1.25, 3
# The loss counts as falling if its lowest value in the newest epochs is at most this share of its lowest earlier value.
_BETTER, _STILL_EPOCHS = 0.99, 10
# A loss diverges if it rises in each of the newest epochs, to this multiple of its lowest value.
_DIVERGED, _RISING_EPOCHS = 3.0, 3
_PATIENCE = (option("patience"), in_python(" of train()"))


def not_finite(run: RunProfile) -> Advice | None:
    """Advise a lower learning rate if the newest training loss or validation loss is NaN or infinite."""
    newest = {**(run.epochs[-1][1] if run.epochs else {}), **run.values}
    if all(math.isfinite(newest.get(name, 0.0)) for name in ("loss", "val_loss")):
        return None
    return Advice(
        "the loss is not a finite number",
        "Lower the learning rate, or clip gradients",
        options(clip=1.0) if run.precision is not None else "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        confidence="high",
    )


def divergence(run: RunProfile) -> Advice | None:
    """Advise a lower learning rate if the training loss has risen in three epochs, to three times its lowest value."""
    losses = _losses(run, "loss")
    newest = [value for _, value in losses[-_RISING_EPOCHS - 1 :]]
    if len(newest) <= _RISING_EPOCHS or any(later <= before for before, later in pairwise(newest)):
        return None
    best_epoch, best = min(losses, key=lambda known: known[1])
    if best <= 0 or newest[-1] < _DIVERGED * best:
        return None
    return Advice(
        f"the training loss has risen from {best:.4g} after epoch {best_epoch} to {newest[-1]:.4g}",
        "Lower the learning rate, and train again from the start with another folder for the checkpoints",
        confidence="high",
    )


def overfitting(run: RunProfile) -> Advice | None:
    """Advise stopping early if the validation loss rises while the training loss falls."""
    losses = _losses(run, "val_loss")
    if not losses:
        return None
    best_epoch, best = min(losses, key=lambda known: known[1])
    later = [value for epoch, value in losses if epoch > best_epoch][-_WORSE_EPOCHS:]
    training = dict(_losses(run, "loss"))
    if len(later) < _WORSE_EPOCHS or min(later) - best <= (_WORSE - 1) * abs(best):
        return None
    # After a start with huge losses, the training loss falls too, but the model does not fit its samples.
    if not training.get(losses[-1][0], math.inf) < min(training.get(best_epoch, -math.inf), best):
        return None
    return Advice(
        f"the validation loss has risen from {best:.4g} after epoch {best_epoch} to {losses[-1][1]:.4g}, while the"
        " training loss falls",
        Phrase(("Stop when the validation loss no longer falls, with ", *_PATIENCE, ", or augment the images")),
        options(patience=3),
        confidence="high",
    )


def plateau(run: RunProfile) -> Advice | None:
    """Advise stopping if neither the training loss nor the validation loss has fallen by 1% for ten epochs."""
    named = [losses for name in ("loss", "val_loss") if (losses := _losses(run, name))]
    if not named or not all(_is_still([value for _, value in losses]) for losses in named):
        return None
    return Advice(
        f"the loss has fallen by less than {100 * (1 - _BETTER):.0f}% in the last {_STILL_EPOCHS} epochs",
        Phrase(("Stop training, with ", *_PATIENCE, ", or lower the learning rate")),
        options(patience=3),
    )


def _losses(run: RunProfile, name: str) -> list[tuple[int, float]]:
    found = [(epoch, values[name]) for epoch, values in run.epochs if name in values]
    return found if all(math.isfinite(value) for _, value in found) else []


def _is_still(losses: list[float]) -> bool:
    before, newest = losses[:-_STILL_EPOCHS], losses[-_STILL_EPOCHS:]
    return bool(before) and min(newest) > min(before) - (1 - _BETTER) * abs(min(before))
