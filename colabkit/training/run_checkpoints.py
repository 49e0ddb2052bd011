"""What the checkpoints of a run hold, and how a run resumes from one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from colabkit.foundation import InvalidOption, TargetExists, cannot, format_things
from colabkit.loading import Loader
from colabkit.training.checkpoints.files import LoadedCheckpoint
from colabkit.training.checkpoints.folder import CheckpointFolder
from colabkit.training.checkpoints.snapshots import random_state, restore_random_state
from colabkit.training.models import Stateful, plain
from colabkit.training.ranks import Ranks


class RunCheckpoints:
    """The checkpoints of a training, of which one process takes care for all.

    Args:
        save_to: folder of the checkpoints, or None to save nothing.
        keep_last: how many of the newest stay.
        rule: whether the lowest or the highest score is best, and of what.
        state: what is saved by the user's wish.
        step: saved as well if it has a state.
        loader: whose position is saved.
        processes: those that train together.
        timeout_s: seconds that the file system may leave an operation unanswered; None for the usual time.
    """

    def __init__(
        self,
        save_to: Path | None,
        keep_last: int,
        rule: tuple[Literal["min", "max"], str],
        state: Mapping[str, Stateful],
        step: Any,
        loader: Loader,
        processes: Ranks,
        timeout_s: float | None = None,
    ) -> None:
        self.folder = save_to
        self.resumed_from: Path | None = None
        self.passed_over: tuple[tuple[str, str], ...] = ()
        self.not_kept: tuple[str, ...] = ()
        self._state = {name: plain(part) for name, part in state.items()}
        self._step = step if isinstance(step, Stateful) else None
        self._loader = loader
        self._processes = processes
        self._checkpoints: CheckpointFolder | None = None
        if save_to is not None and processes.is_first:
            mode, monitor = rule
            self._checkpoints = CheckpointFolder(
                save_to, keep_last=keep_last, mode=mode, monitor=monitor, timeout_s=timeout_s
            )

    @property
    def is_free(self) -> bool:
        """Whether a checkpoint would be begun at once."""
        return self._checkpoints is not None and self._checkpoints.is_free

    @property
    def save_s(self) -> float:
        """The longest seconds that a checkpoint took to its place so far."""
        return 0.0 if self._checkpoints is None else self._checkpoints.save_s

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint."""
        return None if self._checkpoints is None else self._checkpoints.latest

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best score."""
        return None if self._checkpoints is None else self._checkpoints.best

    @property
    def failures(self) -> tuple[tuple[int, str], ...]:
        """CheckpointFolder that could not be written or published, with the reason."""
        return () if self._checkpoints is None else self._checkpoints.failures

    def resume(self, resume: bool) -> Mapping[str, Any] | None:
        """Bring all to where the newest good checkpoint was taken, and return what the run had saved; None at a start.

        Raises:
            TargetExists: if there are checkpoints and `resume` is false.
            InvalidOption: if a checkpoint is of other data or of another state.
            Corrupt: if all checkpoints are damaged.
        """
        found: LoadedCheckpoint | None = None
        trouble: BaseException | None = None
        if self._checkpoints is not None:
            try:
                found = self._found(self._checkpoints, resume)
            except Exception as error:  # the other processes have to hear of it before it is raised
                trouble = error
        found, trouble = self._processes.from_first((found, trouble))
        if trouble is not None:
            raise trouble
        if found is None:
            return None
        content = found.content
        rates = _rates_of(self._state)
        order = self._loader.state_dict()
        self._load_parts(found)
        world_size = len(content["random"])
        if self._processes.rank < world_size:
            restore_random_state(content["random"][self._processes.rank])
        not_kept = []
        if world_size != self._processes.count:
            not_kept.append(f"random generators of {format_things(world_size, 'process')}, now {self._processes.count}")
        loaded, now_rates = self._loader.state_dict(), _rates_of(self._state)
        before, now = content["loader"]["global_batch"], loaded["global_batch"]
        if before != now:
            not_kept.append(f"batches of {format_things(before, 'sample')}, now {now}")
        not_kept += [
            f"{name}={now!r} of the Loader: {loaded[name]!r} goes on"
            for name, now in order.items()
            if name in ("order", "order_seed", "seed") and loaded[name] != now
        ]
        not_kept += [
            f"learning rates {_listed(rates[name])} of {name!r}: {_listed(now_rates[name])} of before go on"
            for name in rates
            if rates[name] != now_rates[name]
        ]
        self.not_kept = tuple(not_kept)
        self.resumed_from = found.path
        self.passed_over = tuple((path.name, reason) for path, reason in found.passed_over)
        run: Mapping[str, Any] = content["run"]
        return run

    def _found(self, checkpoints: CheckpointFolder, resume: bool) -> LoadedCheckpoint | None:
        if not resume and (step := checkpoints.newest_step()) is not None:
            near = checkpoints.near_folder
            place = "" if near == self.folder else f" there or near, in {str(near)!r}"
            found = f"a checkpoint of step {step}{place}"
            act = f"begin anew in {str(self.folder)!r}"
            raise TargetExists(cannot(act, found, "no checkpoints", "Use resume=True or another folder"))
        return checkpoints.newest()

    def _load_parts(self, found: LoadedCheckpoint) -> None:
        saved = found.content["state"]
        if set(saved) != set(self._state):
            names = ", ".join(saved) or "nothing"
            given = ", ".join(self._state) or "nothing"
            act = f"resume from {str(found.path)!r}"
            raise InvalidOption(cannot(act, f"it holds {names}", f"state= of {given}", "Pass the same names as before"))
        self._loader.load_state_dict(dict(found.content["loader"]))
        for name, part in self._state.items():
            if (kind := found.content["kinds"].get(name)) != _kind_of(part):
                act = f"resume {name!r} from {str(found.path)!r}"
                needed = f"an object of the kind that was saved, {kind}"
                raise InvalidOption(cannot(act, f"a {_kind_of(part)}", needed, "Build it as before or save elsewhere"))
        parts: list[tuple[str, Any, Any]] = [(name, part, saved[name]) for name, part in self._state.items()]
        if self._step is not None and found.content["step"] is not None:
            parts.append(("step", self._step, found.content["step"]))
        for name, part, values in parts:
            try:
                part.load_state_dict(values)
            except Exception as error:  # each kind of object says in its own way that a state is not its own
                act = f"resume {name!r} from {str(found.path)!r}"
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                reason = f"{type(error).__name__}: {' '.join(lines[:2])[:300].rstrip('.:')}"
                needed, next_step = "the state of an object like this one", "Build it as before or save elsewhere"
                raise InvalidOption(cannot(act, reason, needed, next_step)) from error

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
        """Begin to save the state after a step; all processes call it together.

        Args:
            step: its number.
            position: of the loader after it.
            run: what the training itself remembers.
            score: what tells how good this state is, or None.
            random: the generators, if they have moved on since; None for where they are.
            wait: return when the checkpoint is written.

        Raises:
            NotEnoughSpace, FileFailed, TimedOut, InvalidOption: with `wait`, if it cannot be written.
        """
        if self.folder is None:
            return
        generators = self._processes.from_all(dict(random or random_state()))
        if wait:
            begin = partial(self._begin, step, position, run, generators, score, wait)
            self._processes.together("save a checkpoint", begin)
        else:
            self._begin(step, position, run, generators, score, wait)

    def _begin(
        self,
        step: int,
        position: Mapping[str, Any],
        run: Mapping[str, Any],
        generators: list[dict[str, Any]],
        score: float | None,
        wait: bool,
    ) -> None:
        if self._checkpoints is None:
            return
        content = {
            "state": {name: part.state_dict() for name, part in self._state.items()},
            "kinds": {name: _kind_of(part) for name, part in self._state.items()},
            "step": None if self._step is None else self._step.state_dict(),
            "loader": dict(position),
            "random": generators,
            "run": dict(run),
        }
        self._checkpoints.save(step, content, score=score, wait=wait)

    def finish(self) -> None:
        """Wait until all checkpoints are where they should be.

        Raises:
            NotEnoughSpace, FileFailed, TimedOut: if the last one could not be written.
        """
        finish = (lambda: None) if self._checkpoints is None else self._checkpoints.finish
        self._processes.together("end the training", finish)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._checkpoints is not None:
            self._checkpoints.__exit__(kind, error, trace)


def _kind_of(part: Any) -> str:
    return type(part).__qualname__


def _rates_of(state: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the learning rates that optimizers were made with, before any scheduler changed them.

    Groups without one, as of optimizers that find theirs themselves, are left out.
    """
    return {
        name: [
            float(rate) for group in part.param_groups if (rate := group.get("initial_lr", group.get("lr"))) is not None
        ]
        for name, part in state.items()
        if isinstance(part, torch.optim.Optimizer)
    }


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates) or "none"
