"""The table of verbs: each is a magic, a command or both, and calls one public function.

To add one, write the public function, which returns a `Report`, export it in its subpackage's `__init__.pyi` and in
`colabkit/__init__.pyi`, and add a row to `VERBS`. The magic, the command, their help and their completion are derived
from the row. Names, order and defaults of the options must match the function; tests compare them. Tests also check the
page `docs/reference/calls.md`, which `python tests/doubles/call_table.py` writes, and the table in
`docs/reference/index.md`, which `python tests/doubles/verb_pages.py` prints. Cell magics are in `CELLS`.
"""

from __future__ import annotations

from dataclasses import replace

from colabkit.notebook.verb_options import LOADING, LOG, PACKING, TABLE, TRAINING
from colabkit.notebook.verb_types import Option, Verb

_SAMPLES = ("samples:digits",)
_PROGRESS = Option("progress", "show a progress bar", True, "flag")
_UPLOAD_TIMEOUT = Option("timeout", "seconds, or a duration such as 5min, to wait for the upload", 600.0, "seconds")
_THREADS = Option("threads", "number of files read concurrently, or auto", "auto", "number_or_auto", words=("auto",))
_ON_MOUNT = Option("path", "any path on the mount; by default the Drive mount", None, "path", is_positional=True)
_SECONDS_SHOWN = Option("progress", "show the elapsed seconds", True, "flag")
_SHOWN = (
    Option("refresh_s", "time between frames: seconds, at least 0.5, or a duration such as 1min", 1.0, "seconds"),
    Option(
        "screen",
        "where to show the panel: auto, notebook, text, lines, final or none",
        "auto",
        words=("auto", "notebook", "text", "lines", "final", "none"),
        is_closed=True,
    ),
)

_ATTACH = Option("attach", "show a run of another process or machine: folder of its checkpoints", None, "path")

DASHBOARD = Verb(
    "dashboard",
    "show the live panel for loops over a Loader in later cells",
    (_ATTACH, *_SHOWN, Option("off", "stop showing the panel", False, "switch")),
    is_command=False,
)

VERBS: tuple[Verb, ...] = (
    Verb("runtime", "show the CPUs, RAM, disks, GPUs and package versions"),
    Verb(
        "mount",
        "mount Google Drive, or find or repair its mount",
        (
            Option(
                "path",
                "mount point; by default the existing one, otherwise /content/drive",
                None,
                "path",
                is_positional=True,
            ),
            Option("readonly", "refuse writes", False, "flag"),
            Option(
                "timeout",
                "seconds, or a duration such as 5min, to wait for consent, and again for Drive",
                120.0,
                "seconds",
            ),
            Option("force", "also remount a working mount, or a hung one, which loses unsent writes", False, "flag"),
        ),
    ),
    Verb(
        "unmount",
        "send all pending writes and unmount Drive",
        (
            _ON_MOUNT,
            _UPLOAD_TIMEOUT,
            Option("force", "unmount at once, even if the mount is dead, hung or has unsent writes", False, "flag"),
            _SECONDS_SHOWN,
        ),
    ),
    Verb(
        "flush",
        "send all pending writes to Drive",
        (_ON_MOUNT, _UPLOAD_TIMEOUT, _SECONDS_SHOWN),
    ),
    Verb(
        "clear_cache",
        "clear the local cache of the Drive mount",
        (
            _ON_MOUNT,
            Option("dry_run", "change nothing; show what would be freed and lost", False, "flag"),
            Option(
                "timeout",
                "seconds, or a duration such as 5min, to wait for the upload, and for each further step",
                600.0,
                "seconds",
            ),
            Option("force", "clear the cache even if writes are unsent, which loses them", False, "flag"),
            _SECONDS_SHOWN,
        ),
        more="The mount may be of DriveFS, google-drive-ocamlfuse or rclone.",
    ),
    Verb(
        "fetch",
        "download from Drive, an https address or a bucket",
        (
            Option(
                "source", "a Drive ID or share link, an https address, or a gs://, s3:// or hf:// URL (through fsspec)"
            ),
            Option("to", "an existing folder, or the path of the file", ".", "path", is_positional=True),
            Option("digest", "expected digest, such as sha256:9f86d0...", None),
            Option(
                "timeout",
                "seconds, or a duration such as 2min, without progress before an attempt fails",
                60.0,
                "seconds",
            ),
            Option("cookies", "use gdown's cookie file", False, "flag"),
            Option("overwrite", "replace an existing file or folder", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "probe",
        "measure how fast a folder can be listed and its files read",
        (
            Option("path", "a folder or a file", kind="path"),
            Option("seconds", "time limit: seconds, or a duration such as 1min", 8.0, "seconds"),
            _PROGRESS,
        ),
    ),
    Verb(
        "stage",
        "copy files from a slow source to local storage",
        (
            Option(
                "source",
                "a folder, an archive, a file, a table of paths, an address, a bucket's folder, drive:PATH, or "
                "samples:digits",
                kind="path",
                words=_SAMPLES,
            ),
            Option("to", "auto, tmpfs, disk, or the path of the copy", "auto", "path", words=("auto", "tmpfs", "disk")),
            *TABLE,
            Option(
                "on_bad", "skip missing files of a table, or raise", "raise", words=("raise", "skip"), is_closed=True
            ),
            _THREADS,
            Option(
                "verify",
                "size compares file sizes; full reads the source again and compares all bytes",
                "size",
                words=("size", "full"),
                is_closed=True,
            ),
            Option("extract", "extract an archive", True, "flag"),
            Option("refresh", "check the source even if a local copy exists, and copy changed files", False, "flag"),
            Option("dry_run", "show the plan without copying", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "unstage",
        "remove a local copy, or what an interrupted run left",
        (Option("path", "the path of the copy, or the source that was staged", kind="path"),),
    ),
    Verb(
        "publish",
        "copy a finished file or folder to a slow mount, and verify it",
        (
            Option("path", "a file, such as a pack, or a folder", kind="path"),
            Option("to", "an existing folder, such as drive:packs/, or the final path", kind="path"),
            Option(
                "verify",
                "full reads the copy back and compares all bytes; size compares file sizes",
                "full",
                words=("full", "size"),
                is_closed=True,
            ),
            _PROGRESS,
        ),
        more="The copy gets its final name once it is verified.",
    ),
    Verb(
        "pack",
        "pack files or records into one sealed HDF5 file",
        (
            Option(
                "source",
                "a folder, an archive, a table, a bucket's folder, an LMDB, WebDataset or TFRecord shards, drive:PATH, "
                "or samples:digits",
                kind="path",
                words=_SAMPLES,
            ),
            Option("to", "path of the pack, such as birds.h5", kind="path"),
            *PACKING,
            Option("shard_bytes", "write several files of about this size, such as 256MiB", None, "bytes"),
            Option(
                "executor",
                "executor, Dask client or ray, for one shard per task: a variable, or FILE.py:NAME in a terminal",
                None,
                "object",
            ),
            Option("retries", "maximum number of times that a shard is packed again after a failure", 2, "number"),
            _THREADS,
            Option("resume", "reuse complete shards of an interrupted run", True, "flag"),
            Option("overwrite", "replace an existing pack", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "prepare",
        "get a local pack: an existing one, one saved on Drive, or new",
        (
            Option("source", "as for pack, or an address", kind="path", words=_SAMPLES),
            *PACKING,
            Option("to", "folder in which packs are saved, or none", "drive:colabkit", "folder", words=("none",)),
            _THREADS,
            Option("refresh", "pack the source again even if a pack exists", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "verify",
        "check a pack or a local copy against its checksums",
        (Option("path", "path of the pack or the local copy", kind="path"), _PROGRESS),
    ),
    Verb(
        "simulate",
        "predict epochs over a remote pack, before anything runs",
        (
            Option("pack", "path or address of the index of a pack of shards", kind="path"),
            Option("cache", "size of the cache on the local disk, such as 20GiB", kind="bytes"),
            Option("bandwidth", "bytes per second of the link, such as 50MB", kind="bytes"),
            Option("batch_rate", "batches per second that each process trains on without waiting", kind="amount"),
            Option("batch_size", "samples per batch", 64, "number"),
            Option("ranks", "number of processes of the machine that train together", 1, "number"),
            Option("machines", "number of machines that train together, each with its own link", 1, "number"),
            Option("epochs", "number of epochs; the first one begins with an empty cache", 2, "number"),
            Option("split", "split to train on", "train"),
            Option("window_shards", "number of shards that are shuffled together", 4, "number"),
            Option("latency_s", "seconds from the request of a shard to its first byte", 0.02, "amount"),
            Option("seed", "seed of the order of the shards", 0, "number"),
        ),
    ),
    Verb(
        "train_on",
        "train a classifier on a source with one call, and test it",
        (
            Option("source", "as for prepare, with one class per image", kind="path", words=_SAMPLES),
            Option("to", "folder for checkpoints and model, such as drive:colabkit", "colabkit-work", "path"),
            Option(
                "size",
                "height and width to resize images to, such as 224 or 240x320, or auto",
                "auto",
                "size_or_auto",
                words=("auto",),
            ),
            *(option for option in PACKING if option.name in ("labels", "splits")),
            *TABLE,
            Option("epochs", "total number of epochs, or auto", "auto", "number_or_auto", words=("auto",)),
            Option("batch_size", "images per batch, or auto", "auto", "number_or_auto", words=("auto",)),
            Option(
                "model",
                "small (small_network), resnet18 (with ImageNet weights), or auto",
                "auto",
                words=("auto", "small", "resnet18"),
                is_closed=True,
            ),
            *(replace(option, default="skip") for option in PACKING if option.name == "on_bad"),
            *(option for option in PACKING if option.name == "max_bad"),
            Option("restart", "train from scratch even if there is an earlier run, which is kept", False, "flag"),
            LOG,
            Option("progress", "print the findings and the choices, and show progress bars", True, "flag"),
            *(option for option in _SHOWN if option.name == "screen"),
        ),
        more="The same call again resumes an interrupted run; more epochs continue a complete one.",
    ),
    Verb(
        "train",
        "train with prefetching, checkpoints and resume",
        (
            Option(
                "step",
                "function that takes a batch and returns a loss: a variable, or FILE.py:NAME in a terminal",
                kind="object",
            ),
            Option("loader", "the Loader: a variable, or FILE.py:NAME in a terminal", kind="object"),
            *TRAINING,
            Option("on_step", "function called with a record of each step", None, "object"),
            Option("on_checkpoint", "function called with each complete checkpoint", None, "object"),
        ),
    ),
    Verb(
        "evaluate",
        "measure the loss and the accuracy of a model",
        (
            Option("model", "a model or a supervised_step: a variable, or FILE.py:NAME in a terminal", kind="object"),
            Option("loader", "as for train, or any other loader", kind="object"),
            Option("loss", "function of the output and the labels; by default the loss of the step", None, "object"),
            Option("checkpoint", "checkpoint of train() whose weights are loaded into the model first", None, "path"),
        ),
    ),
    Verb(
        "k_fold",
        "cross-validate a function that trains a model",
        (
            Option("run", "function that trains on one fold: a variable, or FILE.py:NAME in a terminal", kind="object"),
            Option("dataset", "split of a pack: a variable, or FILE.py:NAME in a terminal", kind="object"),
            Option("folds", "number of folds", 5, "number"),
            Option("stratify", "give each fold the same share of every class", True, "flag"),
            Option("groups", "field whose equal values stay in the same fold", None),
            Option("seed", "seed for assigning samples to folds", 0, "number"),
        ),
    ),
    Verb(
        "headspace",
        "measure the speed of the step alone, the limit for any loader",
        (
            Option("step", "as for train", kind="object"),
            Option("loader", "as for train, or any other loader", kind="object"),
            Option("state", "objects that the step changes; by default those of supervised_step", None, "objects"),
            Option("batches", "number of batches to cache", 4, "number"),
            Option("seconds", "how long to measure: seconds, or a duration such as 1min", 3.0, "seconds"),
        ),
    ),
    Verb(
        "doctor",
        "find the bottleneck of training, and show how to fix it",
        (
            Option(
                "of",
                "a report or a loader (a variable, or FILE.py:NAME in a terminal), or the path of a saved report; by "
                "default the latest training run or loop",
                None,
                "subject",
                is_positional=True,
            ),
            Option(
                "seconds",
                "how long to iterate a loader that has not been used: seconds, or a duration such as 1min",
                5.0,
                "seconds",
            ),
            Option(
                "headspace",
                "result of headspace, for more accurate predictions: a variable, or FILE.py:NAME in a terminal",
                None,
                "object",
            ),
            Option(
                "apply",
                "try the best advice on the loader for a few seconds, and show its measured gain",
                False,
                "switch",
                is_method=True,
            ),
        ),
    ),
    DASHBOARD,
    Verb(
        "dashboard",
        "show the live panel of a run of another process or machine",
        (replace(_ATTACH, help="folder of the checkpoints of the run; required"), *_SHOWN),
        is_magic=False,
    ),
    Verb(
        "status",
        "show runs of any process or machine, and how to resume them",
        (
            Option(
                "path",
                "folder of the checkpoints, or a folder of such folders",
                ".",
                "path",
                is_positional=True,
            ),
            Option(
                "seconds",
                "how long to wait for a sign of life from another machine: seconds, or a duration such as 2min",
                0.0,
                "seconds",
            ),
        ),
    ),
    Verb(
        "demo",
        "train from a simulated slow drive, and compare the speeds",
        (
            Option(
                "data", "folder or zip archive with one folder per class; by default handwritten digits", None, "path"
            ),
            Option("epochs", "number of epochs", 3, "number"),
            Option(
                "size",
                "height and width to resize images to, such as 32; by default 64, or unchanged if small and equal",
                None,
                "size",
            ),
            Option("latency_s", "seconds that the simulated slow drive takes to open a file", 0.02, "amount"),
            Option("to", "folder for local copy, pack and checkpoints; by default they are removed", None, "path"),
            Option("progress", "print each step and show the live panel", True, "flag"),
        ),
        more="The demo trains first from the files, then from a pack.",
    ),
    Verb(
        "write_template",
        "write the template notebook, with colabkit inside, for Colab",
        (
            Option(
                "to",
                "an existing folder, or the path of the notebook",
                "colabkit_template.ipynb",
                "path",
                is_positional=True,
            ),
            Option("overwrite", "replace an existing file", False, "flag"),
        ),
    ),
    Verb("launch", "open a form with buttons, from data to training", is_command=False),
)

_HERE = {
    "state": "variables to save in checkpoints, such as: model optimizer; required with --to",
    "validate": "function that returns a dict of numbers",
}

CELLS = (
    Verb(
        "train",
        "run the cell once for each batch, with x, y, batch, step and epoch in scope; it may set loss",
        (
            Option("pack", "path of a pack, or a variable with a pack, a dataset or a Loader", kind="data"),
            *LOADING,
            *(replace(option, help=_HERE.get(option.name, option.help)) for option in TRAINING),
        ),
        more="x is the first field of the batch and y the second, or None if there is only one; batch is the whole "
        "batch. step and epoch count from 0 over the whole run, including the part before a resume. If the cell sets "
        "loss to a number or a dict of numbers, the step returns it. Afterwards, these variables except loss have "
        "their previous values. If you pass a Loader, you cannot pass its options here.",
    ),
    Verb("dashboard", "run the cell with the live panel", _SHOWN),
)
"""The cell magics."""

COMMANDS = tuple(verb for verb in VERBS if verb.is_command)
"""The verbs of the command line."""

LINES = tuple(verb for verb in VERBS if verb.is_magic)
"""The line magics, except `%colabkit`."""
