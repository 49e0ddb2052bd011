"""Carrying out a plan: one public call after another, its progress and its panel shown wherever the caller shows them.

What `_train` does and what `code_of` shows are the same calls; a test compares them.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import colabkit
from colabkit._reports import Report, printable
from colabkit.errors import InvalidOption, cannot
from colabkit.launcher.plan import Plan, Training

if TYPE_CHECKING:
    from colabkit.panel.screens import Screen

__all__ = ["carry_out", "noted", "on_interrupt"]

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | signal.Handlers | int | None


def carry_out(plan: Plan, screen: Screen, begin: Callable[[str], None], done: Callable[[str, Report], None]) -> None:
    """Make the calls of a plan.

    Args:
        plan: what to do.
        screen: where the live panel of the training is shown.
        begin: called before each call with what it does.
        done: called after each call with its variable and its report.

    Raises:
        ColabkitError: what the calls raise; `KeyboardInterrupt` as well.
    """
    results: dict[str, Any] = {}
    for step in plan.steps:
        begin(step.doing)
        results[step.name] = getattr(colabkit, step.verb.call)(**step.arguments(results))
        done(step.name, results[step.name])
    if plan.training is not None:
        begin(plan.training.doing)
        done("report", _train(plan.training, results["packed"], screen))


def _train(training: Training, packed: Any, screen: Screen) -> Report:
    """Train a small network on a pack and return the report."""
    import torch

    from colabkit.panel import Dashboard

    data = colabkit.open_pack(packed.path)
    if (kind := data.info.meta["label_kind"]) != "class":
        found = "no labels" if kind == "none" else f"{kind} labels"
        needed, next_step = "a class for each image", "Check its labels, or train on it with a loss of your own"
        raise InvalidOption(cannot(f"train a small network on {data.source!r}", found, needed, next_step))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = packed.sample_shape or (64, 64, training.channels)
    options: dict[str, Any] = {"size": shape[:2], "device": device, "transform": colabkit.augment.Normalize()}
    loader = colabkit.Loader(data["train"], training.batch_size, shuffle=True, **options)
    held_out = next((data[split] for split in ("test", "dev") if split in data), None)
    validate = None if held_out is None else colabkit.Loader(held_out, 256, **options)
    model = colabkit.small_network(len(data.classes), shape).to(device)
    step = colabkit.supervised_step(model, torch.optim.AdamW(model.parameters(), lr=0.003))
    with Dashboard(screen):
        return colabkit.train(step, loader, epochs=training.epochs, save_to=training.save_to, validate=validate)


@contextlib.contextmanager
def on_interrupt(handler: Handler) -> Iterator[None]:
    """Have Ctrl-C, or the kernel's interrupt, handled so in the block; only the main thread hears it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


@contextlib.contextmanager
def noted(note: Callable[[str], None]) -> Iterator[None]:
    """Give the warnings that colabkit logs in the block to a function, one line each, in place of the error stream."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(printable(record.getMessage()))

    logger, notes = logging.getLogger("colabkit"), Notes(logging.WARNING)
    logger.addHandler(notes)
    try:
        yield
    finally:
        logger.removeHandler(notes)
