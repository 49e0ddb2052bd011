"""The cell magics, and the switch of the panel: what they take beside the verbs."""

from __future__ import annotations

from dataclasses import replace

from colabkit.notebook.options.verb import Option, Verb
from colabkit.notebook.options.verbs import TRAINING

LOADING = (
    Option("split", "of the pack", "train", words=("train", "dev", "test")),
    Option("batch_size", "samples of a batch", 64, "number"),
    Option("shuffle", "mix the samples anew in every epoch", True, "flag"),
    Option("seed", "of the orders and of the transform", 0, "number"),
    Option("on", "the device: cuda, cpu; else a GPU if there is one", None, words=("cuda", "cpu")),
    Option("transform", "applied to the images of each batch: a variable", None, "object"),
)
"""How batches are made, where no `Loader` is named."""

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
"""Below the first line of a cell magic stands the code that it runs."""

DASHBOARD = Verb(
    "dashboard",
    "show the live panel beside every loop over a Loader in the cells that follow",
    (*_SHOWN, Option("off", "show it no more", False, "switch")),
)
