"""The report of `train_on()`: the accuracy on held-out images, sample predictions, and how to use the model.

This module does not import torch; see `api`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from colabkit.foundation import (
    CallRef,
    Report,
    Text,
    format_count,
    format_seconds,
    format_things,
    in_python,
    option,
)
from colabkit.notebook.recipe.predictions import SamplePrediction, confused_pairs, percent
from colabkit.notebook.recipe.report_html import (
    draw_choices,
    draw_confusion,
    draw_next,
    draw_notes,
    draw_predictions,
    framed,
)

if TYPE_CHECKING:
    from colabkit.training import TrainReport

_MOST_PAIRS = 10
_SIGNS_NOTE = "✓ right, ✗ wrong; below a wrong prediction, the true class"
_LARGEST_MATRIX = 100
_NETWORKS = {"small": "small network", "resnet18": "ResNet-18"}


@dataclass(frozen=True, repr=False)
class TrainOnReport(Report):
    """The report of `train_on()`.

    Attributes:
        source: name of the source, without secrets.
        found: description of the source.
        splits: number of images in each split.
        classes: names of the classes.
        size: height and width of the images.
        network: `"small"` or `"resnet18"`.
        epochs: number of epochs, including those of earlier calls.
        best_epoch: number of the epoch, from 1, whose weights are in the model file.
        accuracy: fraction of held-out images that are classified correctly, in [0, 1].
        accuracy_on: name of the held-out split.
        chosen_on: name of the split on which the best epoch was chosen.
        baseline: fraction of the held-out images that belong to their most frequent class, in [0, 1].
        confusion: for each class, the number of its held-out images by predicted class.
        predictions: randomly chosen held-out images with their predictions.
        mistakes: the wrong predictions with the highest probabilities.
        chosen: choices and inferred values, by the option that overrides each.
        warnings: points that you should consider.
        skipped: files that could not be decoded, with the reason.
        model_path: file with the weights of the best epoch; `code` shows how to load it.
        pack_path: path of the local pack.
        saved_pack_path: path of the pack that is saved in `to`, if that is on a remote mount; otherwise None.
        unsaved: reason why the pack could not be saved there; otherwise empty.
        training: the report of `train()`.
        seconds: duration of the call in seconds, after the source was described.
    """

    source: str
    found: str
    splits: Mapping[str, int]
    classes: tuple[str, ...]
    size: tuple[int, int]
    network: Literal["small", "resnet18"]
    epochs: int
    best_epoch: int
    accuracy: float
    accuracy_on: str
    chosen_on: str
    baseline: float
    confusion: tuple[tuple[int, ...], ...]
    predictions: tuple[SamplePrediction, ...]
    mistakes: tuple[SamplePrediction, ...]
    chosen: Mapping[str, str]
    warnings: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    model_path: Path
    pack_path: Path
    saved_pack_path: Path | None
    unsaved: str
    training: TrainReport
    seconds: float
    _longer: ClassVar[Text] = ""
    _restart: ClassVar[Text] = ""

    @property
    def is_good(self) -> bool:
        """Whether all epochs are complete, and every checkpoint and, if `to` is remote, the pack are saved."""
        return self.training.is_good and not self.unsaved

    @property
    def code(self) -> str:
        """Python code that loads the model file and predicts the classes of the images in a folder."""
        build = (
            'colabkit.small_network(len(saved["classes"]), (*saved["size"], 3))'
            if self.network == "small"
            else 'torchvision.models.resnet18(num_classes=len(saved["classes"]))'
        )
        return (
            f"import colabkit, torch{'' if self.network == 'small' else ', torchvision'}\n"
            f"saved = torch.load({str(self.model_path)!r})\n"
            f"model = {build}\n"
            'model.load_state_dict(saved["state"])\n'
            'images = colabkit.FileDataset("new_images", labels=None)\n'
            'normalize = colabkit.augment.Normalize(saved["mean"], saved["std"])\n'
            'loader = colabkit.Loader(images, 32, size=tuple(saved["size"]), transform=normalize)\n'
            'names = [saved["classes"][best] for best in colabkit.predict(model, loader).argmax(1)]\n'
        )

    @property
    def next_steps(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a purpose and the line to run for it."""
        return (
            ("Train longer", self._words.render(self._longer)),
            ("Train again from scratch", self._words.render(self._restart)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`, without pictures, and with at most 10,000 counts in `confusion`."""
        values = {**super().to_dict(), "training": self.training.to_dict()}
        for name in ("predictions", "mistakes"):
            for prediction in values[name]:
                del prediction["picture"]
        if len(self.classes) > _LARGEST_MATRIX:
            values["confusion"] = None
        return {**values, "confused": [list(pair) for pair in self.confused(_MOST_PAIRS)], "code": self.code}

    def confused(self, most: int) -> list[tuple[str, str, int, int]]:
        """Return the most frequent mistakes: label, predicted class, and numbers of mistakes and of images."""
        return confused_pairs(self.confusion, self.classes, most)

    @property
    def headline(self) -> str:
        """The accuracy, as a sentence."""
        count = format_things(self.splits[self.accuracy_on], "held-out image")
        return f"{percent(self.accuracy)} of {count} ({self.accuracy_on}) are classified correctly"

    @property
    def circumstances(self) -> str:
        """The network, epoch and duration behind the accuracy, and the accuracy of the most frequent class."""
        judged = "these images" if self.chosen_on == self.accuracy_on else f"the split {self.chosen_on!r}"
        epoch = f"epoch {self.best_epoch} of {self.epochs}, the best on {judged}"
        worked = f"trained in {format_seconds(self.seconds)}"
        if not self.training.trained:
            worked = "complete since an earlier call, so nothing was trained"
        share = percent(self.baseline, 0)
        return f"{_NETWORKS[self.network]}, {epoch}; {worked}; always answering the most frequent class: {share}"

    @property
    def choices(self) -> list[tuple[str, str]]:
        """The choices, each with the option that overrides it; empty if there is none."""
        options = ("size", "splits", "model", "batch_size", "epochs")
        chosen = self.chosen.items()
        return [(text, self._words.render(option(name)) if name in options else "") for name, text in chosen]

    @property
    def notes(self) -> list[str]:
        """The warnings, the skipped files and the incidents during training."""
        notes = list(self.warnings)
        if self.accuracy <= self.baseline:
            notes.append("the model is no better than always answering the most frequent class")
        if self.skipped:
            first, reason = self.skipped[0]
            notes.append(f"{format_things(len(self.skipped), 'file')} skipped, starting with {first!r}: {reason}")
        if self.unsaved:
            notes.append(f"the pack is not saved, so the next session packs the images again: {self.unsaved}")
        if self.training.stopped:
            notes.append(f"training stopped by {self.training.stopped}")
        notes += [
            f"the checkpoint of step {step} is not saved: {reason}" for step, reason in self.training.failed_saves
        ]
        return notes

    def _summary(self) -> str:
        chosen = "; ".join(f"{text} ({name})" if name else text for text, name in self.choices)
        (_, longer), (_, restart) = self.next_steps
        usage = self._words.render(in_python("; print(report.code) shows how to use it"))
        return "\n".join(
            [
                f"{self.headline}: {self.circumstances}",
                f"Found: {self.found}",
                f"Chosen: {chosen}",
                *(f"Note: {note}" for note in self.notes),
                f"Model: {str(self.model_path)!r}{usage}",
                f"Next: {longer} trains longer, {restart} from scratch",
            ]
        )

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [("classes", ", ".join(self.classes))]
        rows += [("images", ", ".join(f"{name} {format_count(count)}" for name, count in self.splits.items()))]
        rows += [
            ("confused", f"{label} as {predicted}: {count} of {whole}")
            for label, predicted, count, whole in self.confused(_MOST_PAIRS)
        ]
        rows.append(("pack", str(self.pack_path)))
        return [*rows, *([("saved pack", str(self.saved_pack_path))] if self.saved_pack_path else [])]

    def _repr_html_(self) -> str:
        from colabkit.monitoring import draw_curves

        return framed(
            self.headline,
            self.circumstances,
            draw_notes(self.notes),
            draw_curves([(record.epoch + 1, record.shown) for record in self.training.epochs]),
            draw_predictions("Held-out images, chosen at random", self.predictions, _SIGNS_NOTE),
            draw_predictions("Mistakes with the highest probability", self.mistakes),
            draw_confusion(self.confusion, self.classes),
            draw_next(self.model_path, self.next_steps, self.code),
            draw_choices(self.found, self.choices),
        )


def with_calls(report: TrainOnReport, longer: CallRef, restart: CallRef) -> TrainOnReport:
    """Set the calls that train longer and from scratch, and return the report."""
    object.__setattr__(report, "_longer", longer)
    object.__setattr__(report, "_restart", restart)
    return report
