"""Errors in the words of the form: options by the labels of their fields, and which fields to look at.

Only the next step of a message is put so; what was found is told as it is.
"""

from __future__ import annotations

import re

from colabkit.foundation import BadSource, ColabkitError, SourceMissing, TargetExists
from colabkit.notebook.launcher.plan import Action
from colabkit.notebook.launcher.settings import FIELDS
from colabkit.notebook.options.wording import in_other_words

_SHARES = re.compile(r"(?<!=)\{('train'[^}]*)\}")
_AS_TYPED = str.maketrans({"'": "", " ": "", ":": "="})
_LEFT_OUT = re.compile(rf"\bLeave ({'|'.join(FIELDS)}) out\b")
_IN_CODE = re.compile(r"\b(a function|functions) of the path\b(?! in code)")
_MOUNT = "run colabkit.mount() if it is on Drive"
_ABOUT = {"label": "labels", "split": "splits", "read": "source", "fetch": "source"}
"""The field to look at where the next step names none, by the verb of what cannot be done."""
_PATH, _ANOTHER = "Check the path", "Choose another path"


def in_fields(error: ColabkitError, action: Action) -> tuple[str, tuple[str, ...]]:
    """Return an error's message, its next step in the words of the form, and the names of the fields that it names.

    Args:
        error: of any call that a button makes.
        action: the button: where it trains, doing without labels is for the one that packs.
    """
    before, dot, step = str(error).rpartition(". ")
    if isinstance(error, SourceMissing | BadSource):
        step = step.replace(_PATH, f"Check {FIELDS['source']}").replace(_MOUNT, "begin it with drive: if it is there")
    if isinstance(error, TargetExists):
        step = step.replace(_ANOTHER, f"Choose another {FIELDS['work']}")
    step = _LEFT_OUT.sub(lambda found: f"Leave {FIELDS[found[1]]} empty", step)
    step = _SHARES.sub(r"splits={\1}", step)
    step = in_other_words(step, lambda name, value: _labelled(name, value, action))
    step = _IN_CODE.sub(r"\1 of the path in code", step)
    named = tuple(name for name, label in FIELDS.items() if label in step)
    verb = before.removeprefix("Cannot ").partition(" ")[0]
    return f"{before}{dot}{step}", named or ((_ABOUT[verb],) if verb in _ABOUT else ())


def _labelled(name: str, value: str, action: Action) -> str:
    """Return a field and what to put into it, as in `"Labels: none"`; empty for an option without a field."""
    if not value or name not in FIELDS:
        return FIELDS.get(name, "")
    if value.startswith("{"):
        plain = value.strip("{}").translate(_AS_TYPED)
    else:
        plain = value.lower() if value == "None" else value.strip("'()").replace(", ", "x")
    text = f"{FIELDS[name]}: {plain}"
    return f"Pack with {text}" if (action, name, plain) == ("train", "labels", "none") else text
