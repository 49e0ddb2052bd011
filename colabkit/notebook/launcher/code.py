"""A plan as the cell that does the same: magics, and the training in plain Python, to be copied and changed."""

from __future__ import annotations

import re

from colabkit.notebook.launcher.plan import Plan, Result, Step, Training

_PLAIN = re.compile(r"[\w./:=,@%+-]+", re.ASCII)
_ASKED = "ADDRESS"


def code_of(plan: Plan) -> str:
    """Return the cell that does what a plan does.

    An address that holds more than may be shown is asked for when the cell runs.
    """
    imports = ["import colabkit", "import torch"] if plan.training else []
    asking = ["from getpass import getpass"] if plan.secret else []
    lines = ["%load_ext colabkit", *asking, *imports, ""]
    if plan.secret:
        lines += [f'{_ASKED} = getpass("Address of the data: ")', ""]
    lines += [_line(step, plan.secret) for step in plan.steps]
    lines += _training(plan.training) if plan.training else [plan.steps[-1].name]
    return "\n".join(lines) + "\n"


def quoted(word: str) -> str:
    """Return a word of a magic's line so that it stays as it is: quotes, braces and dollar signs in it mean nothing."""
    if _PLAIN.fullmatch(word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _line(step: Step, secret: str) -> str:
    words = [
        f"{{{word.name}.{word.attribute}}}"
        if isinstance(word, Result)
        else f"${_ASKED}"
        if secret and word == secret
        else quoted(word)
        for word in step.words
    ]
    return f"{step.name} = " + " ".join([f"%{step.verb.name}", *words])


def _training(training: Training) -> list[str]:
    how = f"--epochs {training.epochs} --save-to {quoted(training.save_to)} --validate validate"
    return [
        "",
        "data = colabkit.open_pack(packed.path)",
        'device = "cuda" if torch.cuda.is_available() else "cpu"',
        f"shape = packed.sample_shape or (64, 64, {training.channels})",
        'options = {"size": shape[:2], "device": device, "transform": colabkit.augment.Normalize()}',
        f'loader = colabkit.Loader(data["train"], {training.batch_size}, shuffle=True, **options)',
        'held_out = next((data[split] for split in ("test", "dev") if split in data), None)',
        "validate = None if held_out is None else colabkit.Loader(held_out, 256, **options)",
        "",
        "model = colabkit.small_network(len(data.classes), shape).to(device)",
        "step = colabkit.supervised_step(model, torch.optim.AdamW(model.parameters(), lr=0.003))",
        f"report = %train step loader {how}",
        "report",
    ]
