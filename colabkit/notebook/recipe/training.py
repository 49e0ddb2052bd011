"""The steps of `train_on()` after the source is described: pack, network, training, predictions and the model file."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from colabkit.foundation import (
    CallRef,
    Code,
    Interrupted,
    ScreenName,
    SourceChanged,
    call,
    caller_words,
    can_hang,
    cannot,
    file_changes,
    format_things,
    local_root,
    mounts,
    option,
    write_atomically,
)
from colabkit.loading import Loader, Normalize
from colabkit.monitoring import dashboard, is_any_open
from colabkit.notebook.options import without_secrets
from colabkit.notebook.recipe import plan
from colabkit.notebook.recipe.predictions import compare
from colabkit.notebook.recipe.report import TrainOnReport, with_calls
from colabkit.packs import BackgroundPack, SourceSummary, identify_files, prepare
from colabkit.storage import answer_of, local_target, publish
from colabkit.training import (
    ChosenNetwork,
    TrainingInterrupted,
    TrainReport,
    choose_network,
    load_weights,
    predict,
    supervised_step,
    train,
)

_HELD_OUT_BATCH = 256
_NAME_CHARS = 40
_RUN = re.compile(r"run-(\d+)")


@dataclass(frozen=True)
class Recipe:
    """The validated arguments of `train_on()`, with the same names."""

    source: Any
    to: str | os.PathLike[str]
    size: tuple[int, int] | Literal["auto"]
    labels: Any
    splits: Any
    path_column: str | None
    root: str | os.PathLike[str] | None
    epochs: int | Literal["auto"]
    batch_size: int | Literal["auto"]
    model: Literal["auto", "small", "resnet18"]
    on_bad: Literal["raise", "skip", "blank"]
    max_bad: float
    restart: bool
    log: str | os.PathLike[str] | None
    progress: bool
    screen: ScreenName

    def again(self, **options: Any) -> CallRef:
        """Return a call that resumes this run, with further options."""
        path = os.fspath(self.source) if isinstance(self.source, str | os.PathLike) else None
        # Tables cannot be written in a line, and an address with a secret must not be.
        source = Code("source") if path is None or without_secrets(path) != path else path
        defaults: dict[str, Any] = {"to": "colabkit-work", "on_bad": "skip", "max_bad": 0.1}
        defaults |= dict.fromkeys(("splits", "path_column", "root", "log"))
        given: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("source", "restart", "progress", "screen") or value == defaults.get(field.name, "auto"):
                continue
            is_path = isinstance(value, os.PathLike)
            given[field.name] = Code("function") if callable(value) else os.fspath(value) if is_path else value
        return call("train_on", source, **{**given, **options})

    def run(self, summary: SourceSummary, say: Callable[[str], object]) -> TrainOnReport:
        """Train on the described source, and return the report; `say` is called with each choice."""
        run = _Run(self, summary, say)
        try:
            return run.report()
        except Interrupted:
            raise
        except KeyboardInterrupt as error:
            # Without restart=True, a call before the start of the new run would resume the former one.
            again = self.again(restart=True) if self.restart and not run.has_begun else self.again()
            raise Interrupted(("Training was interrupted. Run ", again, " to resume.")) from error


class _Run:
    """One call of `train_on()`, from the summary of the source to the report."""

    def __init__(self, recipe: Recipe, summary: SourceSummary, say: Callable[[str], object]) -> None:
        self.recipe = recipe
        self.summary = summary
        self.say = say
        self.act = f"train on {summary.source!r}"
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.chosen: dict[str, plan.Choice] = {}
        self.has_begun = False
        self.began = time.monotonic()

    def report(self) -> TrainOnReport:
        with ExitStack() as running:
            return self._report(running)

    def _report(self, running: ExitStack) -> TrainOnReport:
        recipe, summary, act = self.recipe, self.summary, self.act
        size = self.choose("size", plan.choose_size(recipe.size, summary, self.device))
        splits = self.choose("splits", plan.choose_splits(act, recipe.splits, summary))
        known = summary.splits or {}
        samples = known["train"] if len(known) > 1 else round(plan.HELD_OUT["train"] * sum(known.values()))
        network = choose_network(act, recipe.model, len(summary.classes), size, samples, self.device)
        self.choose("model", plan.Choice(network.name, f"a {network.title}, because {network.reason}"))
        batch_size = self.choose("batch_size", plan.choose_batch_size(recipe.batch_size, samples, self.device))
        epochs = self.choose("epochs", plan.choose_epochs(recipe.epochs, samples, network.name, self.device))
        target = local_target(recipe.to, act).absolute()
        is_remote = can_hang(str(target), mounts())
        with self.panel():
            pack = running.enter_context(
                prepare(
                    recipe.source,
                    size=size,
                    labels=recipe.labels,
                    splits=splits,
                    path_column=recipe.path_column,
                    root=recipe.root,
                    on_bad=recipe.on_bad,
                    max_bad=recipe.max_bad,
                    to=target / "packs" if is_remote else None,
                    start="now",
                    progress=recipe.progress,
                )
            )
            if is_remote and pack.report.saved_path is None and isinstance(pack, BackgroundPack):
                self.say(f"Saving the pack in {str(target / 'packs')!r} in the background")
            if pack.classes != summary.classes:
                raise SourceChanged(cannot(act, "the source changed while it was read", "", "Run the same call again"))
            data = pack["train"]
            # The test split, if there is one, is not used to choose the best epoch.
            validation = next(pack[name] for name in ("val", "test") if name in pack)
            tested = pack.get("test", validation)
            transform = self.choose("", plan.choose_augmentation(data, size, network.mean, network.std))
            # A pack that is still being packed has the same key as the complete one.
            prints = [identify_files(one.fingerprint) for one in (data, validation)]
            key = f"{' '.join(prints)} {network.name} {size}"
            folder = _run_folder(target / _folder_name(summary.source, key), recipe.restart, is_remote)
            # Channels-last batches need no copy, and the convolutions of these networks are faster with them.
            options: dict[str, Any] = {"size": size, "device": self.device, "channels_last": True}
            plain = Normalize(network.mean, network.std)
            drop_last = len(data) >= batch_size
            loader = Loader(data, batch_size, shuffle=True, drop_last=drop_last, transform=transform, **options)
            # Advice about any other option could not be followed.
            counts = loader.meters
            if counts.facts is not None:
                counts.facts = replace(counts.facts, settable=("batch_size",))
            optimizer, scheduler = network.optimizer(epochs * len(loader))
            step = supervised_step(network.model, optimizer, scheduler=scheduler)
            trained = self.train(
                step,
                loader,
                epochs=epochs,
                to=folder / "checkpoints",
                validate=Loader(validation, _HELD_OUT_BATCH, transform=plain, **options),
                monitor="accuracy",
                log=recipe.log,
            )
        self.say(f"Evaluating the best epoch on {format_things(len(tested), 'held-out image')}")
        if trained.best is not None:
            load_weights(act, network.model, trained.best)
        scores = predict(step, Loader(tested, _HELD_OUT_BATCH, transform=plain, **options)).softmax(1)
        compared = compare(tested, scores)
        model_path = _save_model(act, folder / "model.pt", is_remote, network, pack.classes, size)
        prepared = pack.finish().report
        report = TrainOnReport(
            source=summary.source,
            found=repr(summary),
            splits=dict(pack.splits),
            classes=pack.classes,
            size=size,
            network=network.name,
            epochs=len(trained.epochs),
            best_epoch=_best_epoch(trained),
            accuracy=compared.accuracy,
            accuracy_on=tested.split_name,
            chosen_on=validation.split_name,
            baseline=compared.baseline,
            confusion=compared.confusion,
            predictions=compared.predictions,
            mistakes=compared.mistakes,
            chosen={name or "augmentation": choice.text for name, choice in self.chosen.items()},
            warnings=tuple(choice.warning for choice in self.chosen.values() if choice.warning),
            skipped=prepared.bad,
            model_path=model_path,
            pack_path=pack.path,
            saved_pack_path=prepared.saved_path,
            unsaved=prepared.unsaved if is_remote else "",
            training=trained,
            seconds=time.monotonic() - self.began,
        )
        return with_calls(report, recipe.again(epochs=2 * len(trained.epochs)), recipe.again(restart=True))

    def choose(self, name: str, choice: plan.Choice) -> Any:
        """Record and show a choice, and return its value."""
        self.chosen[name] = choice
        overridden_by = f" ({caller_words().render(option(name))})" if name else ""
        self.say(f"{choice.text[:1].upper()}{choice.text[1:]}{overridden_by}")
        if choice.warning:
            self.say(f"Warning: {choice.warning}")
        return choice.value

    def panel(self) -> AbstractContextManager[Any]:
        screen = self.recipe.screen
        return nullcontext() if screen == "auto" and is_any_open() else dashboard(screen=screen)

    def train(self, *arguments: Any, **options: Any) -> TrainReport:
        self.has_begun = True
        try:
            return train(*arguments, **options)
        except TrainingInterrupted as error:
            report = error.report
            if report.checkpoint is not None and not report.failed_saves:
                saved = (
                    f"Training stopped after step {report.steps}: checkpoint {str(report.checkpoint)!r} is saved. Run "
                )
                error.args = ((saved, self.recipe.again(), " to resume."),)
            raise


def _best_epoch(trained: TrainReport) -> int:
    """Return the number of the epoch, from 1, with the highest accuracy on the validation split; 0 if there is none."""
    scores = [record.validation.get("accuracy", -1.0) for record in trained.epochs]
    return 1 + scores.index(max(scores)) if scores else 0


def _folder_name(source: str, key: str) -> str:
    stem = source.rstrip("/").rpartition("/")[2].rpartition(":")[2].partition(".")[0].partition("?")[0]
    name = re.sub(r"[^\w-]+", "-", stem).strip("-")[:_NAME_CHARS] or "data"
    return f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def _run_folder(folder: Path, restart: bool, is_remote: bool) -> Path:
    """Return the folder of the newest run or, with `restart` or without earlier runs, of a new run."""

    def names() -> list[str]:
        return os.listdir(folder) if folder.is_dir() else []

    with file_changes.translated(f"list {str(folder)!r}"):
        found = answer_of(names, is_remote)
    newest = max((int(match[1]) for name in found if (match := _RUN.fullmatch(name))), default=0)
    return folder / f"run-{newest + 1 if restart or not newest else newest}"


def _save_model(
    act: str, path: Path, is_remote: bool, network: ChosenNetwork, classes: tuple[str, ...], size: tuple[int, int]
) -> Path:
    """Write the weights of a network, and everything needed to use it, to a file, atomically."""
    written = io.BytesIO()
    values = {
        "network": network.name,
        "state": {name: value.cpu() for name, value in network.model.state_dict().items()},
        "classes": list(classes),
        "size": list(size),
        "mean": list(network.mean),
        "std": list(network.std),
    }
    torch.save(values, written)
    with file_changes.translated(act):
        if not is_remote:
            write_atomically(path, written.getbuffer(), durable=True)
            return path
        file_changes.make_folder(local_root(os.environ))
        with tempfile.TemporaryDirectory(dir=local_root(os.environ)) as folder:
            local = Path(folder, path.name)
            file_changes.write_file(local, written.getbuffer())
            return publish(local, path, progress=False).path
