"""The table of verbs: each is a magic and a command that calls one public function.

To add one, write the public function, which returns a `Report`, export it in its subpackage's `__init__.pyi` and in
`colabkit/__init__.pyi`, and add a row to `VERBS`. The magic, the command, their help and their completion are derived
from the row. Names, order and defaults of the options must match the function; a test compares them. Another test
compares the table in README, which `python tests/doubles/readme_tables.py` prints. Cell magics are in `CELLS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of a verb.

    Attributes:
        name: Name of the function's parameter.
        help: One line for `--help` and `?`.
        default: Default of the function; an option without one is required.
        kind: `text`, `path`, `number`, `amount`, `bytes`, `seconds`, `flag` (also `--no-...`), `switch`, `threads`,
            `steps`, `size`, `folder`, `labels`, `splits`, `fields`, `object`, `objects`, `data` (a path or a variable)
            or `subject` (a variable, or the path of a saved report).
        is_positional: Whether it is positional although it has a default; required options always are.
        words: Special values, which completion offers.
    """

    name: str
    help: str
    default: Any = ...
    kind: str = "text"
    is_positional: bool = False
    words: tuple[str, ...] = ()

    @property
    def is_required(self) -> bool:
        """Whether the option has no default."""
        return self.default is ...

    @property
    def flag(self) -> str:
        """The option in a line, such as `--batch-size`; empty for a positional one."""
        return "" if self.is_required or self.is_positional else "--" + self.name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Verb:
    """A magic and a command.

    Attributes:
        name: Name of both.
        help: One-line description.
        options: Its options, positional ones first.
        is_magic: Whether it is also a magic.
        function: Name of the public function, if it differs from `name`.
        more: Help text below the options.
    """

    name: str
    help: str
    options: tuple[Option, ...] = ()
    is_magic: bool = True
    function: str = ""
    more: str = ""

    @property
    def call(self) -> str:
        """The name of the public function."""
        return self.function or self.name


_SAMPLES = ("samples:digits",)
_PROGRESS = Option("progress", "show a progress bar", True, "flag")
_THREADS = Option(
    "threads", "files read at once; auto measures what the source rewards", "auto", "threads", words=("auto",)
)
_ON_MOUNT = Option("path", "anything on the mount; by default the Drive mount", None, "path", is_positional=True)
_SECONDS_SHOWN = Option("progress", "show the seconds that pass", True, "flag")
_PACKED = (
    Option("size", "height and width to bring images to, as in 224 or 240x320", None, "size"),
    Option(
        "encoding",
        "raw pixels, the source's own bytes, jpeg encoded anew, or auto",
        "auto",
        words=("raw", "source", "jpeg", "auto"),
    ),
    Option("quality", "of jpeg, 1 to 100", 90, "number"),
    Option("channels", "3 for RGB, 1 for luminance", 3, "number", words=("1", "3")),
    Option(
        "labels",
        "a column, several as in a,b,c, none, or auto: such a column, else folders",
        "auto",
        "labels",
        words=("auto", "none"),
    ),
    Option("splits", "shares, as in train=0.8,test=0.2, or the column that names the splits", None, "splits"),
    Option("fields", "further columns to keep, as in age,caption or Z=age", None, "fields"),
    Option("seed", "decides which sample goes to which split", 0, "number"),
    Option("on_bad", "raise, skip or blank a file that cannot be decoded", "raise", words=("raise", "skip", "blank")),
    Option(
        "max_bad",
        "more bad files are an error: a share, which allows at least one unless it is 0, or a number of them",
        0.1,
        "amount",
    ),
)

TRAINING = (
    Option("epochs", "how many in all", 1, "number"),
    Option(
        "state",
        "what checkpoints hold, as in: model optimizer; else what the usual step trains",
        None,
        "objects",
    ),
    Option("save_to", "folder of the checkpoints, on Drive as well", None, "path"),
    Option(
        "save_every",
        "steps between two checkpoints, a duration as 5min, or epoch",
        "epoch",
        "steps",
        words=("epoch", "5min"),
    ),
    Option("keep_last", "how many of the newest checkpoints stay, beside the best", 2, "number"),
    Option("resume", "go on after the newest checkpoint", True, "flag"),
    Option("validate", "returns a dict of numbers, or a Loader that the usual step evaluates", None, "object"),
    Option("validate_every", "steps between two validations, or epoch", "epoch", "steps", words=("epoch",)),
    Option("monitor", "which number says what checkpoint is best; else the loss", None),
    Option("mode", "whether the lowest or the highest is best: min or max", "min", words=("min", "max")),
    Option("deadline", "when the runtime ends, from now, as in 11h30min", None),
    Option(
        "on_nonfinite",
        "raise or continue when a step returns NaN or infinity",
        "raise",
        words=("raise", "continue"),
    ),
    Option("timeout", "how long the file system may leave one operation of a checkpoint unanswered, as 5min", None),
)
"""The options of training, shared by `train` and `%%train`."""

VERBS: tuple[Verb, ...] = (
    Verb("runtime", "show what this machine allows: CPUs, RAM, tmpfs, disks, GPUs, versions"),
    Verb(
        "mount",
        "mount Google Drive, or find and repair the mount that is there",
        (
            Option("path", "where; by default where it is, else /content/drive", None, "path", is_positional=True),
            Option("readonly", "refuse writes", False, "flag"),
            Option("timeout", "seconds for consent, and again for Drive", 120.0, "seconds"),
            Option("force", "mount anew what is alive, and what hangs, losing what is not sent", False, "flag"),
        ),
    ),
    Verb(
        "unmount",
        "send all writes and take the Drive mount away",
        (
            _ON_MOUNT,
            Option("timeout", "seconds for sending writes", 600.0, "seconds"),
            Option("force", "at once, also if it is dead, hangs or has not sent everything", False, "flag"),
            _SECONDS_SHOWN,
        ),
    ),
    Verb(
        "flush",
        "send all writes of the Drive mount",
        (_ON_MOUNT, Option("timeout", "seconds for sending writes", 600.0, "seconds"), _SECONDS_SHOWN),
    ),
    Verb(
        "clear_cache",
        "clear what the Drive mount keeps near, by its exact type",
        (
            _ON_MOUNT,
            Option("dry_run", "change nothing; show what would be freed and lost", False, "flag"),
            Option("timeout", "seconds for sending writes, and for each further step", 600.0, "seconds"),
            Option("force", "clear also what has not been sent, which is then lost", False, "flag"),
            _SECONDS_SHOWN,
        ),
    ),
    Verb(
        "fetch",
        "download a Drive file or folder, an https address or a bucket's files",
        (
            Option("source", "a Drive id or share link, https://, or gs:// s3:// hf:// through fsspec"),
            Option("to", "a folder, or the path of the file", ".", "path", is_positional=True),
            Option("digest", "what it has to be, as in sha256:9f86d0...", None),
            Option("timeout", "seconds without progress before a try counts as failed", 60.0, "seconds"),
            Option("cookies", "use the cookies that gdown keeps", False, "flag"),
            Option("overwrite", "replace what is at the path", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "probe",
        "measure what a folder's mount can do: opening, listing, small files, large files",
        (
            Option("path", "a folder or a file", kind="path"),
            Option("seconds", "how long it may take", 8.0, "seconds"),
            _PROGRESS,
        ),
        function="read_probe",
    ),
    Verb(
        "stage",
        "bring a folder, an archive, a file, a table's files, an address or a bucket's folder near",
        (
            Option("source", "any of these, also drive:PATH, or samples:digits", kind="path", words=_SAMPLES),
            Option("to", "auto, tmpfs, disk, or the path of the copy", "auto", "path", words=("auto", "tmpfs", "disk")),
            _THREADS,
            Option("verify", "size compares byte counts, full reads the source twice", "size", words=("size", "full")),
            Option("extract", "extract an archive", True, "flag"),
            Option("refresh", "look for changes although a near copy is there, and copy them", False, "flag"),
            Option("dry_run", "only plan, and show the plan", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "unstage",
        "remove a near copy, or what an interrupted stage left, and give its space back",
        (Option("path", "what stage returned, or the source that was staged", kind="path"),),
    ),
    Verb(
        "publish",
        "bring a finished file or folder to a slow mount, whole or not at all",
        (
            Option("path", "a file, as a pack, or a folder", kind="path"),
            Option("to", "an existing folder, or the final path, as in drive:packs/", kind="path"),
            Option(
                "verify",
                "full reads back what was written, size compares byte counts",
                "full",
                words=("full", "size"),
            ),
            _PROGRESS,
        ),
    ),
    Verb(
        "pack",
        "pack files or records into one sealed HDF5 file",
        (
            Option(
                "source",
                "a folder, an archive, a table, a bucket's folder, an LMDB, WebDataset or TFRecord shards, also "
                "drive:PATH, or samples:digits",
                kind="path",
                words=_SAMPLES,
            ),
            Option("out", "the pack's path, as in birds.h5", kind="path"),
            *_PACKED,
            Option("shard_bytes", "write several files of about this size, as in 256MiB", None, "bytes"),
            Option("executor", "packs one shard a task: a variable, in a terminal FILE.py:NAME", None, "object"),
            _THREADS,
            Option("resume", "take over whole shards that an interrupted run left", True, "flag"),
            Option("overwrite", "replace what is at the pack's path", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "prepare",
        "get a near pack by the shortest way: the one that is near, the one saved on Drive, or a new one",
        (
            Option("source", "as of pack, also an address", kind="path", words=_SAMPLES),
            *_PACKED,
            Option("save_to", "the folder that keeps packs, or none", "drive:colabkit", "folder", words=("none",)),
            _THREADS,
            Option("refresh", "pack anew, whatever is there", False, "flag"),
            _PROGRESS,
        ),
    ),
    Verb(
        "verify",
        "check every byte of a pack or a near copy against its digests",
        (Option("path", "the pack, or what stage returned", kind="path"), _PROGRESS),
    ),
    Verb(
        "train",
        "train with prefetching, checkpoints and resume",
        (
            Option("step", "takes a batch, returns a loss: a variable, in a terminal FILE.py:NAME", kind="object"),
            Option("loader", "the Loader: a variable, in a terminal FILE.py:NAME", kind="object"),
            *TRAINING,
            Option("on_step", "called after each step with its record", None, "object"),
        ),
    ),
    Verb(
        "headspace",
        "measure how fast the step is on batches that are there already: what no loader can raise",
        (
            Option("step", "as of train", kind="object"),
            Option("loader", "as of train, or another loader", kind="object"),
            Option("state", "what the step changes; else what the usual step trains", None, "objects"),
            Option("batches", "how many are cached", 4, "number"),
            Option("seconds", "how long to measure", 3.0, "seconds"),
        ),
    ),
    Verb(
        "doctor",
        "say what training waits for, and what would fix it",
        (
            Option(
                "of",
                "a report or a loader: a variable, in a terminal FILE.py:NAME, or a saved report's file; else what was "
                "trained or looped over last",
                None,
                "subject",
                is_positional=True,
            ),
            Option("seconds", "how long to iterate a loader that was not used before", 5.0, "seconds"),
            Option(
                "headspace",
                "what headspace returned, to predict from what the step takes alone; in a terminal FILE.py:NAME",
                None,
                "object",
            ),
        ),
        function="diagnose",
    ),
    Verb(
        "demo",
        "show the whole way on real images, from a slow drive to a trained network, with figures measured on the spot",
        (
            Option("data", "a folder or zip archive with one folder a class; else handwritten digits", None, "path"),
            Option("epochs", "how many", 3, "number"),
            Option("size", "height and width to bring images to, as in 32; else the images' own, or 64", None, "size"),
            Option("latency", "seconds that the simulated slow drive takes to open a file", 0.02, "seconds"),
            Option("keep", "folder for near copy, pack and checkpoints; else they are removed", None, "path"),
            Option("progress", "tell what is done, with a live panel", True, "flag"),
        ),
        is_magic=False,
    ),
)

LOADING = (
    Option("split", "of the pack", "train", words=("train", "dev", "test")),
    Option("batch_size", "samples of a batch", 64, "number"),
    Option("shuffle", "mix the samples anew in every epoch", True, "flag"),
    Option("seed", "of the orders and of the transform", 0, "number"),
    Option("on", "the device: cuda, cpu; else a GPU if there is one", None, words=("cuda", "cpu")),
    Option("transform", "applied to the images of each batch: a variable", None, "object"),
)
"""The options of the `Loader` that `%%train` creates, unless it is given one."""

_HERE = {
    "state": "what checkpoints hold, as in: model optimizer; needed with --save-to",
    "validate": "a function that returns a dict of numbers",
}

_SHOWN = (
    Option("refresh_s", "seconds between frames, at least 0.5", 0.5, "seconds"),
    Option(
        "screen",
        "auto, notebook, widgets, text or none",
        "auto",
        words=("auto", "notebook", "widgets", "text", "none"),
    ),
)

CELLS = (
    Verb(
        "train",
        "run the cell once for each batch, with x, y, batch, step and epoch in scope; it may set loss",
        (
            Option("pack", "a pack's path, or a variable that holds a pack, a data set or a Loader", kind="data"),
            *LOADING,
            *(replace(option, help=_HERE.get(option.name, option.help)) for option in TRAINING),
        ),
        more="x is a batch's first field and y its second, None without one; batch is the whole of it, for further "
        "fields. step and epoch count from 0 over the whole run, also after a resume. What the cell sets loss to, a "
        "number or a dict of numbers, is the step's value. Afterwards these names but loss are what they were before. "
        "A Loader has its own options.",
    ),
    Verb("dashboard", "run the cell beside the live panel", _SHOWN),
)
"""The cell magics."""

DASHBOARD = Verb(
    "dashboard",
    "show the live panel beside every loop over a Loader in the cells that follow",
    (*_SHOWN, Option("off", "show it no more", False, "switch")),
)

LINES = (*(verb for verb in VERBS if verb.is_magic), DASHBOARD)
"""The line magics, except `%colabkit`."""
