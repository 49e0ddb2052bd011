"""Save the state of a run in checkpoints, and resume a run from a checkpoint."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from colabkit.foundation import (
    FileFailed,
    InvalidOption,
    NotEnoughSpace,
    TargetExists,
    TimedOut,
    TrainingDiverged,
    cannot,
    format_things,
    option,
    shown,
)
from colabkit.loading import Loader
from colabkit.training.checkpoints.files import LoadedCheckpoint
from colabkit.training.checkpoints.folder import CheckpointFolder
from colabkit.training.checkpoints.seals import SealedCheckpoint
from colabkit.training.checkpoints.snapshots import random_state, restore_random_state
from colabkit.training.models import Stateful, plain
from colabkit.training.ranks import Ranks
from colabkit.training.records import SavedCheckpoint
from colabkit.training.shards import gathered_state, unsharded_class
from colabkit.training.state_loading import load_into

logger = logging.getLogger("colabkit")

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What schedulers of torch change, and functions, which their states hold only in part.
_PROGRESS = ("base_lrs", "best", "cooldown_counter", "last_epoch", "lr_lambdas", "num_bad_epochs", "T_cur", "T_i")
_REBUILD = ("Create the same object as before, or save to another folder with ", option("to"))


class RunCheckpoints:
    """The checkpoints of a run, each with the complete state.

    Args:
        folder: path of the checkpoint folder, or None to save nothing.
        checkpoints: the opened checkpoint folder on rank 0, which reads and writes for all ranks; None on other ranks.
        state: objects to save, by name.
        step: the step function; saved, too, if it has a state.
        loader: loader whose position is saved.
        processes: the ranks of the run.
        on_checkpoint: function that all ranks call after each checkpoint but the first one, or None.

    Attributes:
        resumed_from: the checkpoint that was loaded, or None.
        skipped_checkpoints: names of checkpoints that were skipped because they were damaged or had NaN or infinite
            weights, each with the reason.
        changed_settings: descriptions of the settings that differ from those of the checkpoint; each states whether
            the new value is ignored.
    """

    def __init__(
        self,
        folder: Path | None,
        checkpoints: CheckpointFolder | None,
        state: Mapping[str, Stateful],
        step: Any,
        loader: Loader,
        processes: Ranks,
        on_checkpoint: Callable[[SavedCheckpoint], object] | None = None,
    ) -> None:
        self.folder = folder
        self.checkpoints = checkpoints
        self.on_checkpoint = on_checkpoint
        self._reported: SealedCheckpoint | None = None
        self.resumed_from: Path | None = None
        self.skipped_checkpoints: tuple[tuple[str, str], ...] = ()
        self.changed_settings: tuple[str, ...] = ()
        self._state = {name: plain(part) for name, part in state.items()}
        self._step = step if isinstance(step, Stateful) else None
        self._loader = loader
        self._processes = processes
        # Some models contain infinities on purpose, for example in a mask, so remember the initial non-finite values.
        self._infinite: set[tuple[str, str]] = set()
        if checkpoints is not None:
            for name, part in self._state.items():
                if isinstance(part, torch.nn.Module):
                    values = itertools.chain(part.named_parameters(), part.named_buffers())
                    self._infinite |= {(name, key) for key, value in values if not _is_finite(value)}

    @property
    def is_busy(self) -> bool:
        """Whether an earlier checkpoint is still being written, so that a new one would have to wait."""
        return self.checkpoints is not None and not self.checkpoints.is_free

    @property
    def unreported(self) -> SealedCheckpoint | None:
        """The newest trained checkpoint if `on_checkpoint` was not called with it yet; always None above rank 0."""
        if self.on_checkpoint is None or self.checkpoints is None:
            return None
        found = self.checkpoints.written
        # The first checkpoint is untrained.
        return None if found is None or found.step == 0 or found == self._reported else found

    @property
    def save_s(self) -> float:
        """The longest time in seconds that a save has taken so far, as in `CheckpointFolder`; 0 on other ranks."""
        return 0.0 if self.checkpoints is None else self.checkpoints.save_s

    def resume(self, resume: bool) -> Mapping[str, Any] | None:
        """Restore the newest good checkpoint and return the saved state of the run, or None without a checkpoint.

        Raises:
            TargetExists: if there are checkpoints and `resume` is False.
            InvalidOption: if the checkpoint belongs to different data or a different state.
            Corrupt: if all checkpoints are damaged.
        """
        found: LoadedCheckpoint | None = None
        trouble: BaseException | None = None
        if self.checkpoints is not None:
            try:
                found = self._found(self.checkpoints, resume)
            except Exception as error:
                # All processes must raise the error; if only this one did, the others would wait forever.
                trouble = error
        found, trouble = self._processes.from_first((found, trouble))
        if trouble is not None:
            raise trouble
        if found is None:
            return None
        content = found.content
        rates, settings = _rates_of(self._state), self._scheduler_settings()
        order = self._loader.state_dict()
        changed_settings = self._load_parts(found)
        world_size = len(content["random"])
        if self._processes.rank < world_size:
            restore_random_state(content["random"][self._processes.rank])
        if world_size != self._processes.count:
            processes = format_things(world_size, "process")
            changed_settings.append(f"the checkpoint is from a run of {processes}, now {self._processes.count}")
        loaded, now_rates = self._loader.state_dict(), _rates_of(self._state)
        before, now = content["loader"]["global_batch"], loaded["global_batch"]
        if before != now:
            changed_settings.append(f"batches had {format_things(before, 'sample')}, now {now}")
        changed_settings += [
            f"{name}={now!r} of the Loader is ignored because the checkpoint has {loaded[name]!r}"
            for name, now in order.items()
            if name in ("order", "order_seed", "seed") and loaded[name] != now
        ]
        changed_settings += [
            f"learning rates {_listed(new)} of {name!r} are ignored because the checkpoint has "
            f"{_listed(now_rates[name])}"
            for name, new in rates.items()
            if new != now_rates[name]
        ]
        loaded_settings = self._scheduler_settings()
        changed_settings += [
            f"{name}={now} of the scheduler is ignored because the checkpoint has {loaded_settings.get(name)}"
            for name, now in settings.items()
            if loaded_settings.get(name) != now
        ]
        self.changed_settings = tuple(changed_settings)
        if self.checkpoints is not None:
            # Publish what an earlier run could not publish because the mount failed.
            self.checkpoints.publish_soon()
        self.resumed_from = found.path
        self.skipped_checkpoints = tuple((path.name, reason) for path, reason in found.skipped_checkpoints)
        run: Mapping[str, Any] = content["run"]
        return run

    def _scheduler_settings(self) -> dict[str, str]:
        """Return the settings of the learning rate schedulers, which a checkpoint replaces, as text."""
        parts = [*self._state.values(), self._step]
        schedulers = (part if isinstance(part, LRScheduler) else getattr(part, "scheduler", None) for part in parts)
        found: dict[str, str] = {}
        for scheduler in schedulers:
            if isinstance(scheduler, LRScheduler):
                found |= _settings_of(scheduler.state_dict())
        return found

    def _found(self, checkpoints: CheckpointFolder, resume: bool) -> LoadedCheckpoint | None:
        if not resume and (step := checkpoints.newest_step()) is not None:
            local = checkpoints.local_folder
            place = "" if local == self.folder else f" there or in {str(local)!r}"
            found = f"a checkpoint of step {step} exists{place}"
            expected = ("no checkpoints with ", option("resume", False))
            next_step = ("Use ", option("resume", True), " or another folder")
            raise TargetExists(cannot(f"start a new run in {str(self.folder)!r}", found, expected, next_step))
        return checkpoints.newest(self._flaw_of)

    def _flaw_of(self, content: Mapping[str, Any]) -> str:
        """Describe the first weight that is NaN or infinite but was initially finite; return "" if none is."""
        for name, part in self._state.items():
            saved = content["state"].get(name)
            if isinstance(part, torch.nn.Module) and isinstance(saved, Mapping):
                for key, value in saved.items():
                    is_new = (name, key) not in self._infinite
                    if is_new and isinstance(value, torch.Tensor) and not _is_finite(value):
                        return f"{key!r} of {name!r} has NaN or infinite values"
        return ""

    def add_newest_to(self, error: TrainingDiverged) -> None:
        """Add the path of the newest checkpoint with finite weights, if any, to the message of an error."""
        found: LoadedCheckpoint | None = None
        if self.checkpoints is not None:
            with suppress(Exception):
                found = self.checkpoints.newest(self._flaw_of)
        if found is None or error.message is None or self._flaw_of(found.content):
            return
        advice = error.message.next_step
        resume = f". To resume at the newest good checkpoint, {str(found.path)!r}, start the same training again"
        keeps = ". It keeps its learning rate, so for a new one, use another folder "
        error.args = (replace(error.message, next_step=(advice, resume, keeps, option("to"))),)

    def _load_parts(self, found: LoadedCheckpoint) -> list[str]:
        """Restore the loader and all objects; return descriptions of the differences from the checkpoint."""
        changed_settings: list[str] = []
        saved, saved_step = found.content["state"], found.content["step"]
        act = f"resume from {str(found.path)!r}"
        if set(saved) != set(self._state):
            names, given = ", ".join(saved) or "nothing", ", ".join(self._state) or "nothing"
            names_differ = f"the checkpoint contains {names}, but this run has {given}"
            raise InvalidOption(cannot(act, names_differ, "", ("Pass the same names in ", option("state"))))
        try:
            self._loader.load_state_dict(dict(found.content["loader"]))
        except InvalidOption as error:
            if (inner := error.message) is None:
                raise
            if found.step:
                next_step = (inner.next_step, ", or save to another folder with ", option("to"))
                raise InvalidOption(cannot(act, inner.found, inner.expected, next_step)) from None
            # Nothing had been trained yet, so the rest of the state fits any data.
            self._loader.set_epoch(self._loader.next_epoch)
            changed_settings.append("the data or the order of the Loader, before the first step")
        for name, part in self._state.items():
            if (kind := found.content["kinds"].get(name)) != _kind_of(part):
                kinds_differ = f"it was saved as {kind} and is now {_kind_of(part)}"
                raise InvalidOption(cannot(f"resume {name!r} from {str(found.path)!r}", kinds_differ, "", _REBUILD))
        parts: list[tuple[str, Any, Any]] = [(name, part, saved[name]) for name, part in self._state.items()]
        if self._step is not None and saved_step is not None:
            parts.append(("step", self._step, saved_step))
        elif saved_step is not None:
            changed_settings.append("the saved state of the step is ignored because the step of this run has no state")
        for name, part, values in parts:
            load_into(f"resume {name!r} from {str(found.path)!r}", part, values, _REBUILD)
        return changed_settings

    def save(
        self,
        step: int,
        position: Mapping[str, Any],
        run: Mapping[str, Any],
        *,
        score: float | None = None,
        random: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> None:
        """Start saving the state after a step, after reporting an earlier checkpoint; all processes call this together.

        Args:
            step: number of the step.
            position: state of the loader after the step.
            run: progress of the run, such as the records of its epochs.
            score: value that ranks the checkpoint, or None.
            random: state of the random generators; None for their current state.
            wait: whether to wait until the checkpoint is written.

        Raises:
            NotEnoughSpace, FileFailed, TimedOut: with `wait`, if the checkpoint cannot be written.
            LaunchFailed: if `on_checkpoint` fails in another process or, with `wait`, if another process cannot save.
            InvalidOption: if the state holds objects that cannot be loaded with `weights_only=True`.
        """
        if self.folder is None:
            return
        # This save may remove the previous checkpoint.
        self.report(wait=True)
        generators = self._processes.from_all(dict(random or random_state()))

        def begin() -> None:
            # A state_dict() may communicate with the other processes, so all of them call it.
            is_kept = self.checkpoints is not None
            state = {name: gathered_state(part, is_kept) for name, part in self._state.items()}
            step_state = None if self._step is None else self._step.state_dict()
            if self.checkpoints is None:
                return
            content = {
                "state": state,
                "kinds": {name: _kind_of(part) for name, part in self._state.items()},
                "step": step_state,
                "loader": dict(position),
                "random": generators,
                "run": dict(run),
            }
            self.checkpoints.save(step, content, score=score, wait=wait)

        if wait:
            self._processes.together("save a checkpoint", begin)
        else:
            begin()

    def finish(self) -> str | None:
        """Wait until no checkpoint is being written or published, then call `on_checkpoint` for the last one.

        If the last one could not be written, rank 0 logs a warning and returns the name of the error. Other ranks
        return None.

        Raises:
            LaunchFailed: if `on_checkpoint` fails in another process.
        """

        def finish() -> str | None:
            if self.checkpoints is None:
                return None
            try:
                self.checkpoints.finish()
            except (NotEnoughSpace, FileFailed, TimedOut) as error:
                # Do not raise, because that would lose the report of a complete run; `failures` lists the reason.
                newest = self.checkpoints.latest
                rest = "there is no earlier one" if newest is None else f"the newest one is {str(newest)!r}"
                logger.warning("the last checkpoint is not saved, and %s: %s", rest, str(error).splitlines()[0])
                return type(error).__name__
            return None

        failed = self._processes.together("end training", finish)
        self.report()
        return failed

    def report(self, wait: bool = False) -> None:
        """Call `on_checkpoint` if there is an `unreported` checkpoint; all processes must call this together.

        Args:
            wait: whether to wait until the checkpoint that is being written, if any, is complete.

        Raises:
            LaunchFailed: if `on_checkpoint` fails in another process.
        """
        function = self.on_checkpoint
        if function is None:
            return
        if wait and self.checkpoints is not None:
            # The save that follows reports a write that hangs.
            with suppress(TimedOut):
                self.checkpoints.await_writer("report a checkpoint")
        found = self.unreported
        step = self._processes.from_first(None if found is None else found.step)
        if step is not None:
            self._reported = found
            saved = SavedCheckpoint(step, () if found is None else (found.path, found.seal))
            self._processes.together("report a checkpoint", lambda: function(saved))


def _is_finite(tensor: torch.Tensor) -> bool:
    # A tensor subclass, such as a DTensor, counts as finite: reading it may require communication between processes.
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.dtype not in _FLOATS or not tensor.numel():
        return True
    # If any value is NaN, both bounds are NaN. Unlike `isfinite`, `aminmax` allocates no tensor of the same size.
    return all(math.isfinite(bound) for bound in tensor.detach().aminmax())


def _kind_of(part: Any) -> str:
    return unsharded_class(part).__qualname__


def _rates_of(state: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the initial learning rates of each optimizer, before any scheduler changed them.

    Parameter groups without a learning rate are omitted; some optimizers set the rate themselves.
    """
    return {
        name: [
            float(rate) for group in part.param_groups if (rate := group.get("initial_lr", group.get("lr"))) is not None
        ]
        for name, part in state.items()
        if isinstance(part, torch.optim.Optimizer)
    }


def _settings_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the values in the state of a scheduler, and of schedulers in it, that do not change while it runs."""
    found = {
        name.lstrip("_"): shown(value)
        for name, value in state.items()
        if name not in _PROGRESS and (not name.startswith("_") or name == "_milestones")
    }
    for inner in state.get("_schedulers", ()):
        found |= _settings_of(inner)
    return found


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates) or "none"
