"""The options that several verbs share."""

from __future__ import annotations

from colabkit.notebook.verb_types import Option

LOG = Option("log", "file to which a line of JSON is appended after each epoch, such as run.jsonl", None, "path")
"""The option of everything that trains."""

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
    LOG,
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

TABLE = (
    Option(
        "path_column",
        "column of paths in a table, by default path, file, image or similar, or of images in Parquet",
        None,
    ),
    Option("root", "folder of the relative paths in a table; by default its own folder", None, "path"),
)

PACKING = (
    Option("size", "height and width to resize images to, such as 224 or 240x320", None, "size"),
    Option(
        "encoding",
        "raw (pixels), source (the original file bytes), jpeg (re-encoded), or auto",
        "auto",
        words=("raw", "source", "jpeg", "auto"),
        is_closed=True,
    ),
    Option("quality", "JPEG quality, 1 to 100", 90, "number"),
    Option("channels", "3 for RGB, 1 for luminance", 3, "number", words=("1", "3"), is_closed=True),
    Option(
        "labels",
        "a column, several such as a,b,c, none, or auto (a label column if there is one, otherwise folder names)",
        "auto",
        "labels",
        words=("auto", "none"),
    ),
    Option(
        "task",
        "classes, multilabel, regression, or auto (from the type of the labels)",
        "auto",
        words=("auto", "classes", "multilabel", "regression"),
        is_closed=True,
    ),
    Option("renumber", "number the occurring classes from 0, instead of keeping whole numbers", False, "flag"),
    Option("splits", "shares such as train=0.8,val=0.2, or the column that names the split", None, "splits"),
    Option("fields", "additional columns to store, such as age,caption or Z=age", None, "fields"),
    *TABLE,
    Option("seed", "seed for assigning samples to splits", 0, "number"),
    Option(
        "on_bad",
        "how to handle a file that cannot be decoded: raise an error, skip it, or blank (store a black image)",
        "raise",
        words=("raise", "skip", "blank"),
        is_closed=True,
    ),
    Option("max_bad", "maximum number of bad files: a share (above 0, at least one), or a count", 0.1, "amount"),
)
