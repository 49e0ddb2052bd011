"""Decide between two steps of a run whether to save a checkpoint, to validate or to stop.

Ctrl-C, SIGTERM, SIGHUP and a deadline end training early, but only a second Ctrl-C interrupts a step.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import FrameType, TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar

from colabkit.foundation import (
    Code,
    InvalidOption,
    Text,
    cannot,
    check_duration,
    check_whole_number,
    format_seconds,
    meters,
    option,
)
from colabkit.training.ranks import Ranks
from colabkit.training.records import CALLBACK_STOPS, Values, numbers_of

T = TypeVar("T")

Moment: TypeAlias = str | timedelta | datetime
Reason: TypeAlias = Literal["Ctrl-C", "SIGHUP", "SIGTERM", "deadline", "on_checkpoint", "on_step", "patience"]

_REASONS: tuple[Reason, ...] = ("patience", "on_step", "on_checkpoint", "deadline", "Ctrl-C", "SIGHUP", "SIGTERM")
_URGENT = _REASONS.index("deadline") + 1

RESERVE_S = 5.0
"""Seconds reserved before a deadline, in addition to the time that a checkpoint takes."""

BOUNCE_S = 0.3
"""Seconds after a Ctrl-C during which a second one is ignored, because the key may have bounced."""

# Words in the names of numbers of which the lowest or the highest value is best.
_WORDS: dict[Literal["min", "max"], re.Pattern[str]] = {
    "min": re.compile(r"\b(bce|ce|cer|cost|divergence|err|error|fid|kl|loss|mae|mape|mse|nll|perplexity|rmse|wer)\b"),
    "max": re.compile(
        r"\b(acc|accuracy|ap|auc|auprc|auroc|bleu|dice|f1|fscore|iou|jaccard|kappa|map|mcc|miou|precision|psnr|r2|recall|"
        r"reward|rouge|score|sensitivity|specificity|ssim|top1|top5)\b"
    ),
}

# The attributes of a `Validator` that checkpoints hold.
_RATINGS = ("best", "score", "reference", "waited")

_OR_ELSE = "a number of steps, 'epoch', or "

logger = logging.getLogger("colabkit")


def moment(act: str, value: Moment) -> float:
    """Return the `time.monotonic()` value of a deadline: a `datetime`, or a duration that has a unit.

    Raises:
        InvalidOption: if `value` is neither of these, lies in the past, or is outside the range of the clock.
    """
    if not isinstance(value, datetime):
        return time.monotonic() + check_duration(act, "deadline", value, needs_unit=True)
    try:
        left_s = value.timestamp() - time.time()
    except (ValueError, OverflowError, OSError):
        # Datetimes close to `datetime.min` or `datetime.max` have no timestamp.
        left_s = math.nan
    if not left_s > 0:
        next_step = ("For example, use ", option("deadline", "11h"))
        raise InvalidOption(cannot(act, option("deadline", Code(str(value))), "a time in the future", next_step))
    return time.monotonic() + left_s


def check_time_left(left_s: float, reserve_s: float) -> None:
    """Raise `InvalidOption` unless the deadline leaves more seconds than are reserved for the final checkpoint."""
    if left_s <= reserve_s:
        found = (option("deadline"), f" leaves {format_seconds(max(0.0, left_s))}")
        needed = f"more than {format_seconds(reserve_s)}, which are reserved for the final checkpoint"
        raise InvalidOption(cannot("train", found, needed, "Use a later deadline"))


class SaveSchedule:
    """A schedule of checkpoints: `every` n steps, every duration such as `"5min"`, or every `"epoch"`.

    Attributes:
        is_by_epoch: whether a checkpoint is due at the end of each epoch.
        is_timed: whether checkpoints are due by the clock.
        next_step: number of the step after which the next checkpoint is due; infinite unless they are due by steps.
    """

    def __init__(self, every: int | str) -> None:
        self._steps: int | None = None
        self._seconds: float | None = None
        if isinstance(every, str) and every != "epoch":
            self._seconds = check_duration("train", "save_every", every, needs_unit=True, or_else=_OR_ELSE)
        elif not isinstance(every, str):
            self._steps = check_whole_number("train", "save_every", every, 1)
        self.is_by_epoch = every == "epoch"
        self.is_timed = self._seconds is not None
        self.saved(0)

    def saved(self, step: int) -> None:
        """Record that the state after a step is being saved."""
        self.next_step = math.inf if self._steps is None else (step // self._steps + 1) * self._steps
        self._saved_at = time.monotonic()

    def is_late(self) -> bool:
        """Return whether a checkpoint is due by the clock; processes may disagree."""
        return self._seconds is not None and time.monotonic() - self._saved_at >= self._seconds

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due by the step number; all processes agree."""
        return step >= self.next_step


class Validator:
    """A validator that rates the states of a run and tracks the best one.

    Args:
        function: function that takes the number of earlier validations and returns a dict of numbers, which is empty
            if it does not rate the state; None to rate states by the values of the step.
        every: steps between two validations, or None for one at the end of each epoch.
        monitor: name of the number that rates states; None for the loss.
        mode: whether the lowest or the highest value is best; `"auto"` decides by the words in the name.
        patience: number of consecutive ratings without improvement after which training stops, or None.
        min_delta: how much better a value must be to count as an improvement for `patience`.
        ranks: the ranks of the run; the values of rank 0 are used.
        known: names of the numbers, if they are known before the first step.

    Raises:
        InvalidOption: if `monitor` is not among `known`, or its name does not tell the mode.

    Attributes:
        rule: mode and name of the monitored number, with the prefix `val_` if it comes from the function; only scores
            with the same rule are comparable.
        can_validate: whether there is a validation function.
        is_by_epoch: whether states are rated at the end of epochs.
        best: the best value so far, or None.
        score: the value of the current state, or None if it has not been rated.
        is_best: whether the current state is the best so far and not saved yet.
        reference: the value that later values must improve on by `min_delta`, or None.
        waited: number of ratings since the last improvement.
    """

    def __init__(
        self,
        function: Callable[[int], Values] | None,
        every: int | None,
        monitor: str | None,
        mode: Literal["auto", "min", "max"],
        patience: int | None,
        min_delta: float,
        ranks: Ranks,
        known: Collection[str] | None = None,
    ) -> None:
        self._monitor = monitor or "loss"
        self._is_required = monitor is not None or patience is not None
        self.can_validate = function is not None
        if known is not None:
            self.check_monitor(known)
        name = f"val_{self._monitor.removeprefix('val_')}" if self.can_validate else self._monitor
        self.rule = _mode_of(self._monitor) if mode == "auto" else mode, name
        self.is_by_epoch = function is None or every is None
        self.best: float | None = None
        self.score: float | None = None
        self.is_best = False
        self.reference: float | None = None
        self.waited = 0
        self._function = function
        self._every = every
        self._patience = patience
        self._min_delta = min_delta
        self._ranks = ranks

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the last `patience` ratings found no improvement."""
        return self._patience is not None and self.waited >= self._patience

    def is_due(self, step: int) -> bool:
        """Return whether a validation is due after a step; a validation at the end of an epoch is ignored."""
        return self._function is not None and self._every is not None and step % self._every == 0

    def moved(self) -> None:
        """Record that the state has changed."""
        self.score, self.is_best = None, False

    def validate(self, number: int) -> dict[str, float]:
        """Run validation `number`, from 0, in all processes, and return the values of rank 0.

        Raises:
            InvalidOption: if the result of the function is not a dict of numbers.
            LaunchFailed: if validation failed in another process.
        """

        def numbers() -> dict[str, float]:
            assert self._function is not None
            found = self._function(number)
            return numbers_of(found) if self._ranks.is_first else {}

        return self._ranks.from_first(self._ranks.together("validate", numbers))

    def check_monitor(self, names: Collection[str]) -> str:
        """Return the name of the number that rates states.

        Raises:
            InvalidOption: if `monitor` or `patience` was given and the number is not among `names`.
        """
        monitor = self._monitor
        # Reports show validation values with the prefix "val_", so accept names with this prefix, too.
        name = monitor if monitor in names or not self.can_validate else monitor.removeprefix("val_")
        if self._is_required and name not in names:
            found: Text = (option("monitor", monitor), " is not among the returned numbers")
            expected = " or ".join(map(repr, names)) or "at least one number"
            correct = ("Correct ", option("monitor"))
            next_step: Text = (correct, ", or return this number from a function in ", option("validate"))
            if not self.can_validate and (value := monitor.removeprefix("val_")) in names:
                found, expected = (option("monitor", monitor), " is given without ", option("validate")), ""
                next_step = ("Pass held-out samples in ", option("validate"), ", or use ", option("monitor", value))
            elif not names:
                next_step = "Return a loss or a dict of numbers from the step"
                if self.can_validate:
                    next_step = "Return a dict of numbers from validate"
            raise InvalidOption(cannot("find the best checkpoint", found, expected, next_step))
        return name

    def judge(self, values: Mapping[str, float]) -> None:
        """Rate the current state by its values.

        Raises:
            InvalidOption: if `monitor` or `patience` was given and the number is not among the values.
        """
        mode, _ = self.rule
        value = values.get(self.check_monitor(values), math.nan)
        # Count the rating as one without improvement; this stands if the value is NaN or infinite.
        self.waited += 1
        if not math.isfinite(value):
            return
        self.score = value
        sign = 1 if mode == "min" else -1
        if self.best is None or sign * value < sign * self.best:
            self.best = value
            self.is_best = True
        if self.reference is None or sign * value < sign * self.reference - self._min_delta:
            self.reference, self.waited = value, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the rule, the best value so far and the ratings since then."""
        return {"rule": [*self.rule], **{name: getattr(self, name) for name in _RATINGS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Restore a state, or keep the current one and describe the difference if the state has another rule."""
        if tuple(state["rule"]) == self.rule:
            for name in _RATINGS:
                setattr(self, name, state[name])
        elif state["best"] is not None:
            return f"the best checkpoint was selected by {' '.join(state['rule'])}, now by {' '.join(self.rule)}"
        return ""


def _mode_of(monitor: str) -> Literal["min", "max"]:
    """Return whether the lowest or the highest value of a number is best, by the words in its name.

    Raises:
        InvalidOption: if the name has no known word, or words for both.
    """
    # A name may be written like val_loss, val/loss or valLoss.
    words = re.sub(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z][a-z])", " ", monitor).lower()
    modes = [mode for mode, known in _WORDS.items() if known.search(words)]
    if len(modes) != 1:
        found = (option("monitor", monitor), " does not tell whether lower or higher is better")
        next_step = ("Use ", option("mode", "min"), " or ", option("mode", "max"))
        raise InvalidOption(cannot("find the best checkpoint", found, "", next_step))
    return modes[0]


class WaitInterrupt(KeyboardInterrupt):
    """Raised when a signal or the deadline interrupts a wait between two steps of the run that `owner` can stop."""

    def __init__(self, owner: StopRequests) -> None:
        super().__init__()
        self.owner = owner


class StopRequests:
    """Requests to stop training after the current step.

    While a step runs, Ctrl-C, SIGTERM and SIGHUP are recorded; a second Ctrl-C raises `KeyboardInterrupt` as usual.
    While training waits for data or validates, these signals interrupt the wait or the validation. Signals are handled
    in the main thread only, and custom handlers stay in place.

    Args:
        deadline: a `time.monotonic()` value, or None.
        waits_for_others: whether other processes also train. If so, waits are not interrupted, since all processes must
            agree to stop first.
        saves: whether a final checkpoint follows, for the message after Ctrl-C.

    Attributes:
        deadline: the deadline, or None.
        may_end: whether a signal or the deadline interrupts the current wait.
        strength: the strongest request so far as a number, 0 for none; ranks use their maximum.
        reserve_s: seconds before the deadline at which training must stop.
        is_finishing: whether no more steps follow, so that Ctrl-C raises `KeyboardInterrupt` unless the key bounced.
    """

    def __init__(self, deadline: float | None, waits_for_others: bool, saves: bool) -> None:
        self.reserve_s = RESERVE_S
        self.strength = 0
        self.deadline = deadline
        self._waits_for_others = waits_for_others
        self._saves = saves
        self.may_end = False
        self.is_finishing = False
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._pressed_at: float | None = None
        self._former: dict[int, Any] = {}

    @property
    def reason(self) -> Reason | None:
        """The strongest request so far, or None; SIGTERM is the strongest of all."""
        return _REASONS[self.strength - 1] if self.strength else None

    def note(self, strength: int) -> None:
        """Record a request of the given strength, for example from another process."""
        self.strength = max(self.strength, strength)

    def request(self, reason: Reason) -> None:
        """Record a request to stop for the given reason."""
        self.note(_REASONS.index(reason) + 1)

    @property
    def is_by_callback(self) -> bool:
        """Whether a function of the user requested the stop."""
        return self.reason in CALLBACK_STOPS

    def call(self, name: Literal["on_checkpoint", "on_step"], function: Callable[[T], object], record: T) -> None:
        """Call a user's function with a record; `StopIteration` from it is a request to stop."""
        try:
            function(record)
        except StopIteration:
            self.request(name)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                if signal.getsignal(number) == default:
                    self._former[number] = signal.signal(number, self._note)
        if self.deadline is not None:
            self._unsubscribe = meters.subscribe(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.deadline is not None:
            self._unsubscribe()
        self.let_go()

    def let_go(self) -> None:
        """Restore the previous handlers of all signals."""
        for number in tuple(self._former):
            signal.signal(number, self._former.pop(number))

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Let a signal or the deadline interrupt the block."""
        self.begin_wait(may_end=True)
        try:
            yield
        finally:
            self.may_end = False

    def begin_wait(self, may_end: bool) -> None:
        """Let a signal or the deadline raise `WaitInterrupt` until the attribute `may_end` is reset.

        A recorded signal, or a deadline less than `reserve_s` away, raises it immediately. If the argument `may_end` is
        False, or other processes also train, this does nothing.
        """
        if not may_end or self._waits_for_others:
            return
        self.may_end = True
        if (self.strength if self.deadline is None else self.look()) >= _URGENT:
            self.may_end = False
            raise WaitInterrupt(self)

    def look(self) -> int:
        """Check the deadline and return the strength of the strongest request, or 0 without requests."""
        if self._is_late():
            self.request("deadline")
        return self.strength

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; infinite without one."""
        return math.inf if self.deadline is None else self.deadline - time.monotonic()

    def _is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline - self.reserve_s

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked process inherits this handler, but does not train.
            signal.signal(number, self._former[number])
            signal.raise_signal(number)
            return
        if number != signal.SIGINT:
            self.request("SIGHUP" if number == signal.SIGHUP else "SIGTERM")
        elif self._pressed_at is None and not self.is_finishing:
            self._pressed_at = time.monotonic()
            end = " with a final checkpoint" if self._saves else " without saving"
            logger.warning("stopping after this step%s; press Ctrl-C again to stop immediately", end)
            self.request("Ctrl-C")
        elif self._pressed_at is None or time.monotonic() - self._pressed_at >= BOUNCE_S:
            raise KeyboardInterrupt
        else:
            # The key may have bounced.
            return
        if self.may_end:
            self.may_end = False
            raise WaitInterrupt(self)

    def _listen(self, event: meters.Event) -> None:
        is_ours = self.may_end and threading.get_ident() == self._thread
        if isinstance(event, meters.DataWait) and is_ours and self.look() >= _URGENT:
            self.may_end = False
            raise WaitInterrupt(self)
