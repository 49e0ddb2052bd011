"""Where the time of a typical step goes, whatever a few steps did."""

from __future__ import annotations

from collections.abc import Sequence

from colabkit.foundation import StepTimes

ENOUGH_STEPS = 50
_FEW_STEPS, _LONG_S = 8, 5.0  # slow steps are judged sooner
_WARM_UP_STEPS, _WARM_UP_SHARE = 20, 0.2  # SPDL drops 20 steps: caches, cuDNN's trials, compilation
_BLOCKS = 24
_BURST = 32  # batches that a loader gives together at most
_LATE = 3.0
_QUICK = 0.01


def settled_steps(steps: Sequence[StepTimes], warm: int = _WARM_UP_STEPS) -> list[StepTimes]:
    """Return the steps to judge by: without the first ones of a run and of each pass, whose waiting is a start.

    Args:
        steps: oldest first.
        warm: steps at the run's beginning to leave out, though no more than a fifth of all.
    """
    skipped = min(warm, int(_WARM_UP_SHARE * len(steps)))
    settled = [step for step in steps[skipped:] if not step.is_first]
    return settled or [*steps[skipped:]]  # passes of one step each


def enough(steps: Sequence[StepTimes]) -> bool:
    """Return whether so many steps tell anything: 50, or fewer that took several seconds."""
    return len(steps) >= ENOUGH_STEPS or (len(steps) >= _FEW_STEPS and sum(step.seconds for step in steps) >= _LONG_S)


def typical(steps: Sequence[StepTimes]) -> StepTimes:
    """Return the mean step of the middle half of blocks of steps, by their length, so that stragglers do not count.

    Blocks, since a loader gives several batches at once: of single steps the median would wait for nothing. The mean,
    since it adds up.
    """
    size = max(1, -(-len(steps) // _BLOCKS), min(_BURST, len(steps) // 8))
    blocks = [steps[start : start + size] for start in range(0, len(steps) - size + 1, size)]
    blocks.sort(key=lambda block: sum(step.seconds for step in block))
    quarter = len(blocks) // 4
    middle = [step for block in blocks[quarter : len(blocks) - quarter] for step in block]
    count = max(1, len(middle))
    return StepTimes(
        sum(step.wait_s for step in middle) / count,
        sum(step.copy_s for step in middle) / count,
        sum(step.compute_s for step in middle) / count,
        sum(step.other_s for step in middle) / count,
        round(sum(step.samples for step in middle) / count),
    )


def quick_compute_s(steps: Sequence[StepTimes]) -> float:
    """Return the seconds that the step itself takes among its quickest hundredth, for a batch of the usual size.

    On a CPU that loader and step share, a step now and then goes through undisturbed: measured beside decoding, which
    made the usual step two to six times as long, the quickest took what steps take alone, within a tenth.
    """
    sized = sorted(step.compute_s / step.samples for step in steps if step.samples)
    return sized[int(_QUICK * len(sized))] * typical(steps).samples if sized else 0.0


def late_share(steps: Sequence[StepTimes]) -> float:
    """Return the share of all time that waiting took in steps that waited for more than three usual steps."""
    usual_s = typical(steps).seconds
    total_s = sum(step.seconds for step in steps)
    late_s = sum(step.wait_s for step in steps if step.wait_s > _LATE * usual_s)
    return late_s / total_s if total_s else 0.0
