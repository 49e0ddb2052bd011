"""Load a saved state into an object, or the weights of a checkpoint into a model, and say why a state does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from colabkit.foundation import (
    Corrupt,
    InvalidOption,
    SourceMissing,
    Text,
    can_hang,
    cannot,
    file_changes,
    format_things,
    in_python,
    mounts,
)
from colabkit.training.checkpoints.files import RemoteFolder, load
from colabkit.training.checkpoints.seals import DamagedCheckpoint, SealedCheckpoint, sealed_in
from colabkit.training.models import Stateful, plain
from colabkit.training.shards import sharded_state


def load_weights(act: str, model: Stateful, path: Path) -> None:
    """Load the weights of the object `"model"` of a checkpoint into a model.

    Raises:
        SourceMissing: if `path` is not the file of a checkpoint.
        Corrupt: if the checkpoint is damaged.
        InvalidOption: if the checkpoint has no object of this name, or its weights do not fit.
        TimedOut, NotMounted, FileFailed: if the file cannot be read.
    """

    def find(_: object = None) -> tuple[SealedCheckpoint, int] | None:
        sealed = next((one for one in sealed_in(path.parent) if one.path == path), None)
        return None if sealed is None else (sealed, path.stat().st_size)

    remote = RemoteFolder(path.parent, None) if can_hang(str(path), mounts()) else None
    content = None
    try:
        with file_changes.translated(act):
            if (found := find() if remote is None else remote.ask(act, find)) is not None:
                sealed, size = found
                content = load(sealed) if remote is None else remote.ask(act, lambda _: load(sealed), size)
    except DamagedCheckpoint as error:
        raise Corrupt(cannot(act, str(error), "an undamaged checkpoint", "Use another checkpoint")) from error
    if content is None:
        missing = f"{str(path)!r} is not the file of a checkpoint"
        next_step: Text = (
            "Pass the path of a file such as 'run/checkpoint-00000100.pt'",
            in_python(", or report.best"),
        )
        if remote is None and path.is_dir() and (inside := [one.path for one in sealed_in(path)]):
            missing, next_step = f"{str(path)!r} is a folder", f"Pass a checkpoint in it, such as {str(inside[0])!r}"
        raise SourceMissing(cannot(act, missing, "", next_step))
    if "model" not in content["state"]:
        names = ", ".join(map(repr, content["state"])) or "nothing"
        next_step = "Load the weights yourself: torch.load(path, weights_only=True)['content']['state']"
        raise InvalidOption(cannot(act, f"the checkpoint contains {names}", "an object named 'model'", next_step))
    load_into(act, plain(model), content["state"]["model"], "Create the same model as for training")


def load_into(act: str, part: Any, values: Any, next_step: Text) -> None:
    """Load a state into an object; raise `InvalidOption` with the reason if it does not fit."""
    try:
        part.load_state_dict(sharded_state(part, values))
    # Each class raises a different type of error if a state does not fit.
    except Exception as error:
        if difference := _architectures_differ(part, values):
            message = f"the checkpoint belongs to another architecture: {difference}"
            raise InvalidOption(cannot(act, message, "", next_step)) from None
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {' '.join(lines[:2])[:300].rstrip('.:')}"
        raise InvalidOption(cannot(act, f"its saved state does not fit ({reason})", "", next_step)) from error


def _architectures_differ(part: Any, saved: Any) -> str:
    """Describe the first difference between the weights of a model and a checkpoint, and count the others, if any."""
    if not isinstance(part, torch.nn.Module) or not isinstance(saved, Mapping):
        return ""
    shapes, now = (
        {name: list(getattr(value, "shape", ())) for name, value in one.items()} for one in (saved, part.state_dict())
    )
    found = [
        f"{name!r} has the shape {shape}, but {now[name]} in this model"
        for name, shape in shapes.items()
        if now.get(name, shape) != shape
    ]
    found += [f"it has {name!r}, which this model lacks" for name in shapes if name not in now]
    found += [f"it lacks {name!r}" for name in now if name not in shapes]
    more = format_things(len(found) - 1, "further difference") if len(found) > 1 else ""
    return f"{found[0]}{f' ({more})' if more else ''}" if found else ""
