"""Checkpoints on disk: written whole or not at all, sealed, and loaded from the newest that is still good.

A checkpoint is two files: `checkpoint-00000120.pt`, which is what `torch.save` writes, and `checkpoint-00000120.json`,
its seal, with the length and SHA-256 of the first, written last. Without a matching seal a checkpoint counts as absent.
The number is the step after which it was taken.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from colabkit import _files, _partials
from colabkit.errors import Corrupt, InvalidOption, cannot

__all__ = ["Checkpoint", "newest_checkpoint", "newest_step", "save_checkpoint"]

_FORMAT = 1
_KEEP = 2  # one may turn out to be damaged
_RANDOM_STATES = {"python", "numpy", "torch", "cuda"}
_NAME = re.compile(r"checkpoint-\d{8,}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was loaded.

    Attributes:
        path: its file.
        step: after which it was taken.
        content: what was saved.
        passed_over: newer checkpoints that are damaged, with the reason.
    """

    path: Path
    step: int
    content: Mapping[str, Any]
    passed_over: tuple[tuple[Path, str], ...]

    def restore_random_state(self) -> None:
        """Set the random generators of Python, NumPy and torch to where they were."""
        _restore_random_state(self.content["random"])


def save_checkpoint(folder: Path, step: int, content: Mapping[str, Any]) -> Path:
    """Save `content` with the state of all random generators as the checkpoint of `step`, and return its path.

    On the medium when it returns. The newest two checkpoints are kept. What will be written is first loaded once, in
    memory: a checkpoint that cannot be loaded is found now, not when it is needed.

    Raises:
        InvalidOption: if `content` holds objects that only an unsafe load would bring back.
        NotEnoughSpace: if it does not fit; the older checkpoints stay.
        FileFailed: if the file system refuses.
    """
    path = folder / f"checkpoint-{step:08d}.pt"
    act = f"save {str(path)!r}"
    buffer = io.BytesIO()
    try:
        torch.save({**content, "random": _random_state()}, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:  # pickling runs the objects' own code
        found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        needed = "a state of tensors, numbers, text, lists and dicts, which alone can be loaded safely"
        raise InvalidOption(cannot(act, found, needed, "Keep only these in what state= names")) from error
    data = buffer.getbuffer()
    seal = {"format": _FORMAT, "step": step, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    with _files.translated(act):
        for final, content_bytes in ((path, data), (path.with_suffix(".json"), json.dumps(seal).encode())):
            with _partials.Partial(final) as partial:
                _files.write_file(partial.path, content_bytes, durable=True)
                partial.publish(replace=True)
        # A checkpoint of a later step is a damaged one that was passed over; it must not drive out good ones.
        for old in [sealed for sealed in _sealed(folder) if _step_of(sealed) <= step][_KEEP:]:
            _files.remove(old.with_suffix(".json"))
            _files.remove(old)
    return path


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest sealed checkpoint of a folder, good or not, without reading it."""
    sealed = _sealed(folder)
    return _step_of(sealed[0]) if sealed else None


def newest_checkpoint(folder: Path, device: torch.device | str = "cpu") -> Checkpoint | None:
    """Return the newest good checkpoint of a folder, or None where there is none at all.

    Files are read with `weights_only=True`: nothing in them is executed. The random generators are left alone.

    Raises:
        Corrupt: if there are checkpoints and all of them are damaged.
    """
    passed_over: list[tuple[Path, str]] = []
    for path in _sealed(folder):
        reason, content = _load(path, device)
        if content is not None:
            return Checkpoint(path, _step_of(path), content, tuple(passed_over))
        passed_over.append((path, reason))
    if passed_over:
        found = "; ".join(f"{path.name}: {reason}" for path, reason in passed_over)
        raise Corrupt(
            cannot(f"resume from {str(folder)!r}", found, "one whole checkpoint", "Choose another folder to start anew")
        )
    return None


def _sealed(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints that have a seal, newest first."""
    with _files.translated(f"look for checkpoints in {str(folder)!r}"):
        if not folder.exists():
            return []
        seals = [path for path in folder.iterdir() if path.suffix == ".json" and _NAME.fullmatch(path.stem)]
    return [seal.with_suffix(".pt") for seal in sorted(seals, key=_step_of, reverse=True)]


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _load(path: Path, device: torch.device | str) -> tuple[str, Mapping[str, Any] | None]:
    """Return ("", content), or the reason why the checkpoint is not good and None."""
    try:
        seal = json.loads(path.with_suffix(".json").read_bytes())
        length, digest, version = seal["bytes"], seal["sha256"], seal["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return "its seal cannot be read", None
    if version != _FORMAT:
        return f"checkpoint format {version}, not {_FORMAT}", None
    try:
        found = path.stat().st_size
        if found != length:
            return f"{found} of {length} bytes", None
        if _files.sha256(path) != digest:
            return "its bytes are not the sealed ones", None
        content: Mapping[str, Any] = torch.load(path, map_location=device, weights_only=True)
        if not set(content["random"]) >= _RANDOM_STATES:
            return "it holds no state of the random generators", None
        return "", content
    except OSError as error:
        return str(error.strerror or error), None
    except Exception as error:  # torch raises several kinds for files that it did not write
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", None


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def _restore_random_state(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda"]])
