"""`train_on()`: from a source of labeled images to a trained model, with one call.

It makes the public calls `mount()`, `prepare()` and `train()`, and chooses the options left at `"auto"`. This module
does not import torch, so what was found in the source is shown before torch loads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from colabkit.foundation import (
    BadSource,
    InvalidOption,
    call,
    caller_words,
    cannot,
    check_one_of,
    check_whole_number,
    checked_call,
    drive_mounts,
    in_python,
    interrupted_later,
    interruptible,
    mounts,
    option,
)
from colabkit.notebook.recipe.report import TrainOnReport
from colabkit.packs import SourceSummary, describe_source, height_and_width
from colabkit.storage import PathTable, Source, local_target, mount


@checked_call(
    lr="Call colabkit.train() with your own optimizer instead",
    optimizer="Call colabkit.train() with your own optimizer instead",
    device="Omit it: a GPU is used if there is one",
    resume="Omit it: an earlier run is resumed, unless restart=True",
)
def train_on(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | PathTable | Source,
    *,
    to: str | os.PathLike[str] = "colabkit-work",
    size: int | tuple[int, int] | Literal["auto"] = "auto",
    labels: str | Sequence[str] | Callable[[str], Any] = "auto",
    splits: str | Mapping[str, float] | Callable[[str], str] | None = None,
    path_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    epochs: int | Literal["auto"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
    model: Literal["auto", "small", "resnet18"] = "auto",
    on_bad: Literal["raise", "skip", "blank"] = "skip",
    max_bad: float = 0.1,
    restart: bool = False,
    log: str | os.PathLike[str] | None = None,
    progress: bool = True,
    screen: Literal["auto", "notebook", "text", "lines", "final", "none"] = "auto",
) -> TrainOnReport:
    """Train an image classifier on a source, and return a report with its accuracy on held-out images.

    This mounts Drive if necessary, describes the source, prepares a pack with `prepare()`, and trains with `train()`,
    with validation after each epoch, checkpoints, and the live panel. The weights of the best epoch are saved as a
    model file. The report lists everything that was chosen or inferred, and the option that overrides it.

    If you make the same call again, an interrupted run resumes. A complete run is not repeated: pass more `epochs`
    to train longer, or `restart=True` to train again from scratch.

    Args:
        source: any source of `prepare()` with one class per image, such as a folder with one folder per class.
        to: folder for checkpoints and model, such as `"drive:colabkit"`. On a remote mount, the pack is saved there,
            too, so that the next session needs to stage only one file. Training begins meanwhile; the call returns when
            the pack is saved, and the report contains its path, or the reason why it could not be saved.
        size: height and width to resize images to; one number means both. `"auto"` keeps small images of one size.
            Other images are resized to 224 pixels with a GPU and to 128 without, but not enlarged; images that
            share an aspect ratio keep it.
        labels: as in `prepare()`.
        splits: as in `prepare()`; None uses the splits of the source, or holds out a fifth of each class.
        path_column: as in `prepare()`.
        root: as in `prepare()`.
        epochs: total number of epochs, including those of earlier calls; `"auto"` depends on the number of images.
        batch_size: number of images per batch; `"auto"` depends on the number of images.
        model: `"small"` for `small_network()`; `"resnet18"` for a ResNet-18 with ImageNet weights, which needs
            torchvision and either a download of 45 MiB or the weights in torch's cache; `"auto"` is ResNet-18 where it
            is available and suits the images and the device.
        on_bad: as in `prepare()`, for files that cannot be decoded; by default, they are skipped and reported.
        max_bad: as in `prepare()`.
        restart: whether to train from scratch even if there is an earlier run, which is kept.
        log: as in `train()`, a file to which a line of JSON is appended after each epoch.
        progress: print the findings and the choices, and show progress bars.
        screen: where to show the panel, as in `dashboard()`. `"auto"` also uses a panel that is already open.

    Returns:
        The report, which notebooks show with sample predictions, a confusion matrix and the curves.

    Raises:
        TrainingInterrupted: after Ctrl-C during training and the final checkpoint.
        Interrupted: after Ctrl-C before or after training.
        InvalidOption: if an argument is invalid, the labels are not classes, or no images are held out.
        BadSource: if the source has no images, or fewer than two classes.
        MissingPackage, FetchFailed, TimedOut: if `model="resnet18"` and torchvision or the weights are not available.
        ColabkitError: any error that `mount()`, `prepare()` and `train()` raise.

    Example:
        >>> import colabkit
        >>> report = colabkit.train_on("samples:digits", epochs=2, progress=False, screen="none")
        >>> report.splits, report.network, report.accuracy > 0.7
        ({'train': 1438, 'val': 359}, 'small', True)
        >>> report.model_path.exists()
        True
    """
    act = "train on the source"
    check_one_of(act, "model", model, ("auto", "small", "resnet18"))
    if epochs != "auto":
        epochs = check_whole_number(act, "epochs", epochs, 1, or_text="auto")
    if batch_size != "auto":
        batch_size = check_whole_number(act, "batch_size", batch_size, 1, or_text="auto")
    if size != "auto":
        size = height_and_width(act, size) or "auto"
    say: Callable[[str], object] = print if progress else str
    as_table = {"path_column": path_column, "root": root}
    summary = _summary_of(act, source, to, labels, splits, as_table, say, progress)
    load_torch(say)
    from colabkit.notebook.recipe.training import Recipe

    chosen = (epochs, batch_size, model, on_bad, max_bad)
    recipe = Recipe(source, to, size, labels, splits, path_column, root, *chosen, restart, log, progress, screen)
    return recipe.run(summary, say)


@interruptible("Loading PyTorch", "Run the same call again.")
def load_torch(say: Callable[[str], object]) -> None:
    """Load PyTorch and what `train_on()` needs with it; call `say` first if this takes seconds."""
    if "torch" not in sys.modules:
        say("Loading PyTorch")
    # An interrupted import would leave modules that cannot be imported again.
    with interrupted_later():
        import colabkit.notebook.recipe.training  # noqa: F401


@interruptible("Looking at the source", "Run the same call again.")
def _summary_of(
    act: str,
    source: Any,
    to: str | os.PathLike[str],
    labels: Any,
    splits: Any,
    as_table: Mapping[str, Any],
    say: Callable[[str], object],
    progress: bool,
) -> SourceSummary:
    """Mount Drive if necessary, and return a summary of the source; raise an error if it has no classes to learn."""
    if needs_mount(source) or needs_mount(to):
        say("Mounting Google Drive")
        mounted = mount()
        mounted.speak(caller_words())
        say(repr(mounted))
    local_target(to, act)
    summary = describe_source(source, labels=labels, splits=splits, copies=True, progress=progress, **as_table)
    say(f"Found {summary!r}")
    act = f"train on {summary.source!r}"
    if summary.kind != "class":
        found = "the images have no labels" if summary.kind == "none" else f"the labels are of kind {summary.kind!r}"
        loss = "loss=torch.nn.MSELoss()" if summary.kind == "regression" else ""
        step = in_python(f", supervised_step({loss})")
        next_step = ("Check ", option("labels"), ", or train with ", call("prepare"), step, " and ", call("train"))
        raise InvalidOption(cannot(act, found, "one class per image", next_step))
    if len(summary.classes) < 2:
        found = f"there is only one class, {summary.classes[0]!r}"
        in_folders = "Put the images of each class into a separate folder"
        raise BadSource(cannot(act, found, "at least two classes", in_folders))
    return summary


def needs_mount(path: object) -> bool:
    """Return whether a path is on a Google Drive that is not mounted."""
    return isinstance(path, str) and is_on_drive(path) and is_drive_missing()


def is_on_drive(path: str) -> bool:
    """Return whether a path is on Google Drive, mounted or not."""
    return path.startswith(("drive:", "/content/drive/"))


def is_drive_missing() -> bool:
    """Return whether `drive:` cannot be resolved because Drive is not mounted."""
    return not os.environ.get("COLABKIT_DRIVE") and not drive_mounts(mounts())
