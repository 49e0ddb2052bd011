"""The options of `train` and `%%train`."""

from __future__ import annotations

from colabkit.notebook.verb_types import Option

TRAINING = (
    Option("epochs", "total number of epochs", 1, "number"),
    Option(
        "state",
        "objects to save in checkpoints, such as: model optimizer; by default those of supervised_step",
        None,
        "objects",
    ),
    Option("to", "folder for the checkpoints; it may be on Drive", None, "path"),
    Option(
        "save_every",
        "steps between two checkpoints, a duration such as 5min, or epoch",
        "epoch",
        "steps",
        words=("epoch", "5min"),
    ),
    Option("keep_last", "how many of the newest checkpoints to keep, besides the best one", 2, "number"),
    Option("resume", "resume from the newest checkpoint", True, "flag"),
    Option(
        "validate",
        "function that returns a dict of numbers, or a Loader that supervised_step evaluates",
        None,
        "object",
    ),
    Option("validate_every", "steps between two validations, or epoch", "epoch", "steps", words=("epoch",)),
    Option("monitor", "name of the number that selects the best checkpoint; by default the loss", None),
    Option(
        "mode",
        "whether the lowest (min) or the highest (max) value is best, or auto (max for accuracy, otherwise min)",
        "auto",
        words=("auto", "min", "max"),
        is_closed=True,
    ),
    Option("patience", "stop after this many validations or epochs without improvement of monitor", None, "number"),
    Option("min_delta", "how much monitor must change to count as an improvement", 0.0, "amount"),
    Option("deadline", "time until the runtime ends, such as 11h30min", None),
    Option(
        "on_nonfinite",
        "raise an error or continue if a step returns NaN or infinity",
        "raise",
        words=("raise", "continue"),
        is_closed=True,
    ),
    Option("timeout", "time limit for one file system operation of a checkpoint, such as 5min", None, "seconds"),
)
"""The options of training, shared by `train` and `%%train`."""

LOADING = (
    Option("split", "split of the pack", "train", words=("train", "val", "test")),
    Option("batch_size", "samples per batch", 64, "number"),
    Option("shuffle", "shuffle the samples in every epoch", True, "flag"),
    Option("seed", "seed for the order and the transform", 0, "number"),
    Option(
        "device",
        "device of the batches, such as cuda or cpu; by default a GPU if there is one",
        None,
        words=("cuda", "cpu"),
    ),
    Option("transform", "transform for the images of each batch: a variable", None, "object"),
)
"""The options of the `Loader` that `%%train` creates, unless it is given one."""
