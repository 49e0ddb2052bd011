"""Carrying out a plan: one public call after another, its progress and its panel shown wherever the caller shows them.

What `_train` does and what `code_of` shows are the same calls; a test compares them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import colabkit
from colabkit.foundation import BadImage, BadSource, ColabkitError, InvalidOption, Report, cannot, printable
from colabkit.notebook.launcher.plan import Plan, Training, is_read_by_pack
from colabkit.notebook.launcher.settings import FIELDS
from colabkit.packs import label_samples
from colabkit.storage import Listing, looked_at_by

if TYPE_CHECKING:
    from colabkit.monitoring import Screen


_TO_COME = {"staged": SimpleNamespace(path=Path("near"))}  # for a look at the arguments before anything is done

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
        step.arguments(_TO_COME)
    for step in plan.steps:
        begin(step.doing)
        with _naming(plan.source, results), looked_at_by(functools.partial(_check_labels, plan)):
            results[step.name] = getattr(colabkit, step.verb.call)(**step.arguments(results))
        done(step.name, results[step.name])
    if plan.training is not None:
        begin(plan.training.doing)
        done("report", _train(plan.source, plan.training, results["packed"], screen))


@contextlib.contextmanager
def _naming(source: str, results: Mapping[str, Any]) -> Iterator[None]:
    """Have errors of the block that judge the data name what the user named, and not its near copy."""
    try:
        yield
    except (BadSource, BadImage, InvalidOption) as error:
        if "staged" not in results:
            raise
        raise type(error)(str(error).replace(repr(str(results["staged"].path)), repr(source))) from error


def _check_labels(plan: Plan, listing: Listing) -> None:
    """Refuse files that the plan cannot pack or train on, by their names, before they are copied.

    Raises:
        ColabkitError: as `pack()` raises it once they are near, and the training.
    """
    packing = next((step for step in plan.steps if step.name == "packed"), None)
    if packing is None:
        return
    given = packing.arguments(_TO_COME)
    try:
        labelled = label_samples(listing, plan.source, labels=given["labels"], splits=given["splits"])
    except ColabkitError:
        if any(is_read_by_pack(item.path) or item.path.endswith(".tar") for item in listing.items):
            return  # a folder of records: what is in them is not known yet
        raise
    if plan.training is not None:
        _check_kind(plan.source, labelled.kind)


def _check_kind(source: str, kind: str) -> None:
    """Refuse labels that a small network is not trained on."""
    if kind != "class":
        found = "no labels" if kind == "none" else f"{kind} labels"
        needed, next_step = (
            "a class for each image",
            f"Check {FIELDS['labels']}, or train on it with a loss of your own",
        )
        raise InvalidOption(cannot(f"train a small network on {source!r}", found, needed, next_step))


def _train(source: str, training: Training, packed: Any, screen: Screen) -> Report:
    """Train a small network on a pack and return the report."""
    import torch

    from colabkit.monitoring import Dashboard

    data = colabkit.open_pack(packed.path)
    _check_kind(source, data.info.meta["label_kind"])
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
