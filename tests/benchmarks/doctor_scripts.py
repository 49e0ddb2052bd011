"""The ten training scripts of the folder slow_scripts, each with a known cause of its slowness, for bench_doctor.py.

Each script has a function `slow`, and a function `fixed` that follows the doctor's advice. Both return the loader or
the report of the run.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "doubles"))
sys.path.insert(0, str(Path(__file__).parent / "slow_scripts"))

from far_mounts import FuseMount, has_fuse
from pictures import photo, saved

import colabkit

__all__ = ["SCRIPTS", "Script", "run_script"]

PHOTOS, CLASSES, SIDE, OPEN_S = 240, 10, 400, 0.03


@dataclass(frozen=True)
class Script:
    """A slow training script.

    Attributes:
        name: name of its module.
        verdicts: the correct verdicts.
        rules: rules, at least one of which must give advice.
        words: pattern of words in this advice, without which a user could not follow it.
    """

    name: str
    verdicts: tuple[str, ...]
    rules: tuple[str, ...]
    words: str


OTHER_WORK = ("code_beside_torch", "blocked_step", "host_work", "long_pauses")
REMOTE = ("remote_files", "remote_files_to_pack", "throttled")
SCRIPTS = (
    Script("python_transform", ("data",), ("slow_foreign",), r"colabkit\.pack\("),
    Script("values_one_by_one", ("compute", "other"), ("reading_values",), r"values_one_by_one\.py:\d+"),
    Script("jpeg_in_the_loop", ("data",), ("slow_foreign", "more_workers"), r"colabkit\.pack\(|num_workers="),
    Script("tiny_batches", ("compute",), ("tiny_batches",), r"batch_size="),
    Script("logging_each_step", ("other", "host"), OTHER_WORK, r"logging_each_step\.py:\d+"),
    Script("long_validation", ("host",), ("slow_validation",), r"validate_every="),
    Script("photos_on_a_drive", ("data",), REMOTE, r"colabkit\.(stage|prepare)\("),
    Script("checkpoint_each_step", ("other", "host"), OTHER_WORK, r"checkpoint_each_step\.py:\d+"),
    Script("too_many_threads", ("compute", "host"), ("too_many_threads",), r"torch\.set_num_threads\("),
    Script("new_workers_each_epoch", ("data", "compute"), ("slow_start",), r"persistent_workers=True"),
)


def run_script(name: str, variant: str, folder: Path) -> dict[str, Any]:
    """Run a script, and return its speed and diagnosis.

    Args:
        name: name of its module.
        variant: `"slow"` or `"fixed"`.
        folder: folder of the photos and for the script's files.
    """
    if name == "photos_on_a_drive" and not has_fuse():
        return {"missing": "FUSE"}
    write_photos(folder / "photos")
    own = folder / name
    # Files of an earlier round, such as a pack, would change or stop this one.
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    module = importlib.import_module(name)
    took_s: list[float] = []
    if hasattr(module, "train"):
        # The fix itself may take time, for example to pack the files, which does not count as training time.
        module.train = timing(module.train, took_s)
    with mounted(folder, own) if name == "photos_on_a_drive" else contextlib.nullcontext():
        if name == "jpeg_in_the_loop" and not (own / "photos").exists():
            (own / "photos").symlink_to(folder / "photos")
        trained = timing(getattr(module, variant), took_s)(own)
        found = colabkit.doctor(trained)
    spent = trained.spent if isinstance(trained, colabkit.TrainReport) else trained.meters.snapshot()
    return {
        "speed": spent.samples / took_s[0],
        "verdict": found.verdict,
        "sentence": found.sentence,
        "advice": [
            {"rule": one.rule, "text": f"{one.found}\n{one.action}\n{one.call}\n{one.check}"} for one in found.advice
        ],
    }


def is_right(script: Script, found: dict[str, Any]) -> bool:
    """Return whether the doctor names the cause, and advice that a user can follow."""
    advice = [one["text"] for one in found["advice"] if one["rule"] in script.rules]
    return found["verdict"] in script.verdicts and any(re.search(script.words, text, re.DOTALL) for text in advice)


def timing(work: Callable[..., Any], took_s: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return work(*arguments, **options)
        finally:
            took_s.append(time.perf_counter() - began_s)

    return timed


@contextlib.contextmanager
def mounted(folder: Path, own: Path) -> Any:
    with FuseMount(own / "drive", folder, open_s=OPEN_S):
        yield


def write_photos(folder: Path) -> None:
    if folder.exists():
        return
    different = [saved(photo(SIDE, SIDE, seed=seed), "JPEG") for seed in range(16)]
    for number in range(PHOTOS):
        path = folder / f"class{number % CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(different[number % len(different)])
