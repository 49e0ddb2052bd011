"""The action of a button: a sequence of public calls, their execution, and a cell that makes the same calls.

The button for packing also stages; the button for training also stages and packs. Existing results are reused.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import colabkit
from colabkit.foundation import BadImage, BadSource, ColabkitError, InvalidOption, Report, cannot, option
from colabkit.notebook.launcher.settings import PACK_OPTIONS, Settings
from colabkit.notebook.options import parse_value
from colabkit.notebook.verb_types import Option, Verb
from colabkit.notebook.verbs import VERBS
from colabkit.packs import label_samples
from colabkit.storage import FSSPEC, WEB, Listing, address_of, looked_at_by

if TYPE_CHECKING:
    from colabkit.foundation import Screen

Action: TypeAlias = Literal["probe", "stage", "pack", "train"]

_READ_BY_PACK = re.compile(
    r"\.(csv|tsv|parquet)$|\.(tfrecords?|tfrec|lmdb|mdb)(-\d+-of-\d+)?/?$|\*|\{(\d+\.\.\d+|[^{},]*,[^{}]*)\}",
    re.IGNORECASE,
)
"""Names of tables, record files and shard patterns. `pack()` reads these itself, without a separate `stage()`."""

_VERBS = {verb.name: verb for verb in VERBS}
_DRIVE = "drive:"
_NAME_CHARS = 40
_ADDRESS = "ADDRESS"
_HELD_OUT_BATCH = 256


@dataclass(frozen=True, slots=True)
class ResultPath:
    """A placeholder for the path in the report of an earlier call, named by that call's variable."""

    name: str

    def __repr__(self) -> str:
        return f"{self.name}.path"


@dataclass(frozen=True, slots=True)
class PipelineCall:
    """One public call.

    Attributes:
        name: variable for its report.
        verb: the verb to call.
        arguments: arguments by name, without defaults.
        doing: description of the call for the panel, such as `"Staging"`.
    """

    name: str
    verb: Verb
    arguments: Mapping[str, Any]
    doing: str

    def make(self, results: Mapping[str, Any]) -> Any:
        """Make the call and return its report; `results` are the reports of earlier calls by name."""
        arguments = {
            name: results[value.name].path if isinstance(value, ResultPath) else value
            for name, value in self.arguments.items()
        }
        return getattr(colabkit, self.verb.name)(**arguments)


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The settings for training a small network on the pack, with checkpoints in `to`."""

    batch_size: int
    epochs: int
    channels: int
    to: str


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The action of a button.

    Attributes:
        source: the source that the user entered, without secrets.
        calls: the calls, in order.
        training: settings of the training after the calls; None for no training.
        secret: the complete source if it is an address that may contain a secret, otherwise empty.
    """

    source: str
    calls: tuple[PipelineCall, ...]
    training: TrainingSettings | None = None
    secret: str = ""


def make_pipeline(settings: Settings, action: Action, *, needs_mount: bool = True) -> Pipeline:
    """Return the pipeline of a button, without running it.

    Args:
        settings: values of the form.
        action: action of the button.
        needs_mount: whether `drive:` requires a mount; False if another folder replaces it.

    Raises:
        InvalidOption: if a value is invalid.
    """
    act = f"{action} the source" if action != "train" else "train on the source"
    source = _checked(act, "source", settings.source)
    work = _checked(act, "work", settings.work)
    shown = _shown(source)
    secret = source if shown != source else ""
    calls: list[PipelineCall] = []
    remote = (source,) if action in ("probe", "stage") else (source, work)
    if needs_mount and any(path.startswith(_DRIVE) for path in remote):
        calls.append(PipelineCall("mounted", _VERBS["mount"], {}, "Mounting Drive"))
    if action == "probe":
        if source.startswith("samples:") or "://" in source:
            expected = "the path of a folder or a file"
            raise InvalidOption(cannot(f"probe {shown!r}", "this source has no path", expected, "Stage it instead"))
        calls.append(PipelineCall("probed", _VERBS["probe"], {"path": source}, "Probing"))
        return Pipeline(source, tuple(calls))
    local: Any = source
    if action == "stage" or not is_read_by_pack(source):
        calls.append(PipelineCall("staged", _VERBS["stage"], {"source": local, "to": settings.to}, "Staging"))
        local = ResultPath("staged")
    if action == "stage":
        return Pipeline(shown, tuple(calls), secret=secret)
    options = _pack_options(act, settings)
    folder = f"{work.rstrip('/') or '/'}/{_folder_name(source, options)}"
    packing = {"source": local, "to": f"{folder}/pack.h5", **options}
    calls.append(PipelineCall("packed", _VERBS["pack"], packing, "Packing"))
    if action == "pack":
        return Pipeline(shown, tuple(calls), secret=secret)
    training = TrainingSettings(settings.batch_size, settings.epochs, int(settings.channels), f"{folder}/checkpoints")
    return Pipeline(shown, tuple(calls), training, secret)


def is_read_by_pack(source: str) -> bool:
    """Return whether `pack()` reads a source with this name directly, without staging."""
    return _READ_BY_PACK.search(source) is not None


def _checked(act: str, name: str, text: str) -> str:
    text = text.strip()
    if not text:
        expected = "a path or an address" if name == "source" else "a path"
        raise InvalidOption(cannot(act, (option(name), " is empty"), expected, ("Fill in ", option(name))))
    if len(text.splitlines()) > 1 or "\0" in text:
        found = (option(name), " contains a line break or a null character")
        raise InvalidOption(cannot(act, found, "one line of text", ("Check ", option(name))))
    return text


def _pack_options(act: str, settings: Settings) -> dict[str, Any]:
    options = {}
    for one in _VERBS["pack"].options:
        if one.name in PACK_OPTIONS and (text := getattr(settings, one.name).strip()):
            value = _value(act, one, _checked(act, one.name, text))
            if value != one.default:
                options[one.name] = value
    return options


def _value(act: str, entered: Option, text: str) -> Any:
    try:
        return parse_value(entered.kind, text)
    except argparse.ArgumentTypeError as error:
        given, _, expected = str(error).partition(" is not ")
        found = (option(entered.name), f" is {given}")
        raise InvalidOption(cannot(act, found, expected, ("Check ", option(entered.name)))) from error


def _folder_name(source: str, options: Mapping[str, Any]) -> str:
    bare = re.split(r"[?#]", source, maxsplit=1)[0].rstrip("/") if "://" in source else source
    path = bare.partition("://")[2].partition("/")[2] if "://" in source else bare.rpartition(":")[2]
    stem = PurePosixPath(path).name.partition(".")[0]
    name = re.sub(r"[^\w-]+", "-", stem).strip("-")[:_NAME_CHARS] or "data"
    digest = hashlib.sha256(f"{source}\0{options}".encode("utf-8", "surrogateescape"))
    return f"{name}-{digest.hexdigest()[:8]}"


def _shown(source: str) -> str:
    if "://" not in source:
        return source
    address = address_of(source)
    return address.shown if address.kind in (WEB, FSSPEC) else source


def code_of(pipeline: Pipeline) -> str:
    """Return a cell that makes the same calls; it prompts for an address that may contain a secret."""
    asking = ["from getpass import getpass"] if pipeline.secret else []
    torch = ["import torch"] if pipeline.training else []
    lines = ["%load_ext colabkit", *asking, "import colabkit", *torch, ""]
    if pipeline.secret:
        lines += [f'{_ADDRESS} = getpass("Address of the data: ")', ""]
    lines += [_code_of_call(call, pipeline.secret) for call in pipeline.calls]
    lines += _training_lines(pipeline.training) if pipeline.training else [pipeline.calls[-1].name]
    return "\n".join(lines) + "\n"


def _code_of_call(call: PipelineCall, secret: str) -> str:
    given = []
    for one in call.verb.options:
        if one.name in call.arguments:
            value = call.arguments[one.name]
            text = _ADDRESS if secret and value == secret else repr(value)
            given.append(f"{one.name}={text}" if one.flag else text)
    return f"{call.name} = colabkit.{call.verb.name}({', '.join(given)})"


def _training_lines(training: TrainingSettings) -> list[str]:
    """Return code equivalent to `_train`; a test compares the calls of both."""
    how = f"epochs={training.epochs}, to={training.to!r}, validate=validate"
    return [
        "",
        "data = colabkit.open_pack(packed.path)",
        'device = "cuda" if torch.cuda.is_available() else "cpu"',
        f"shape = packed.sample_shape or (64, 64, {training.channels})",
        'options = {"size": shape[:2], "device": device, "transform": colabkit.augment.Normalize()}',
        f'loader = colabkit.Loader(data["train"], {training.batch_size}, shuffle=True, **options)',
        'held_out = next((data[split] for split in ("test", "val") if split in data), None)',
        f"validate = None if held_out is None else colabkit.Loader(held_out, {_HELD_OUT_BATCH}, **options)",
        "",
        "model = colabkit.small_network(len(data.classes), shape).to(device)",
        "step = colabkit.supervised_step(model, torch.optim.AdamW(model.parameters(), lr=0.003))",
        f"report = colabkit.train(step, loader, {how})",
        "report",
    ]


def run_pipeline(
    pipeline: Pipeline, screen: Screen, begin: Callable[[str], None], done: Callable[[str, Report], None]
) -> None:
    """Make the calls of a pipeline. Errors and `KeyboardInterrupt` are not caught.

    Args:
        pipeline: the pipeline to run.
        screen: screen for the live panel of the training.
        begin: called before each call with its description.
        done: called after each call with its variable name and its report.
    """
    results: dict[str, Any] = {}
    for call in pipeline.calls:
        begin(call.doing)
        with _naming(pipeline.source, results), looked_at_by(functools.partial(_check_labels, pipeline)):
            results[call.name] = call.make(results)
        done(call.name, results[call.name])
    if pipeline.training is not None:
        begin("Training")
        done("report", _train(pipeline.source, pipeline.training, results["packed"], screen))


@contextlib.contextmanager
def _naming(source: str, results: Mapping[str, Any]) -> Iterator[None]:
    """In errors about the data, replace the path of the local copy by the source that the user entered."""
    try:
        yield
    except (BadSource, BadImage, InvalidOption) as error:
        message = error.message
        if message is None or "staged" not in results:
            raise
        raise type(error)(message.replaced(repr(str(results["staged"].path)), repr(source))) from error


def _check_labels(pipeline: Pipeline, listing: Listing) -> None:
    """Before any copying, raise an error if file names show that the labels cannot be packed or trained on."""
    packing = next((call.arguments for call in pipeline.calls if call.name == "packed"), None)
    if packing is None:
        return
    labels, splits = packing.get("labels", "auto"), packing.get("splits")
    try:
        labelled = label_samples(listing, pipeline.source, labels=labels, splits=splits)
    except ColabkitError:
        if any(is_read_by_pack(item.path) or item.path.endswith(".tar") for item in listing.items):
            # The labels of a folder of records are known only once the records are read.
            return
        raise
    if pipeline.training is not None:
        _check_kind(pipeline.source, labelled.kind)


def _check_kind(source: str, kind: str) -> None:
    """Raise `InvalidOption` unless there is one class per image, as the small network requires."""
    if kind != "class":
        found = "the images have no labels" if kind == "none" else f"the labels are of kind {kind!r}"
        next_step = ("Check ", option("labels"), ", or train with a custom loss in code")
        raise InvalidOption(cannot(f"train a small network on {source!r}", found, "one class per image", next_step))


def _train(source: str, training: TrainingSettings, packed: Any, screen: Screen) -> Report:
    import torch

    from colabkit.monitoring import Dashboard

    data = colabkit.open_pack(packed.path)
    _check_kind(source, data.info.meta["label_kind"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = packed.sample_shape or (64, 64, training.channels)
    options: dict[str, Any] = {"size": shape[:2], "device": device, "transform": colabkit.augment.Normalize()}
    loader = colabkit.Loader(data["train"], training.batch_size, shuffle=True, **options)
    held_out = next((data[split] for split in ("test", "val") if split in data), None)
    validate = None if held_out is None else colabkit.Loader(held_out, _HELD_OUT_BATCH, **options)
    model = colabkit.small_network(len(data.classes), shape).to(device)
    step = colabkit.supervised_step(model, torch.optim.AdamW(model.parameters(), lr=0.003))
    with Dashboard(screen):
        return colabkit.train(step, loader, epochs=training.epochs, to=training.to, validate=validate)
