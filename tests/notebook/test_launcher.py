"""The launcher turns its settings into calls, and shows code that makes the same calls."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from sampling import sampled

import colabkit
from colabkit.errors import InvalidOption
from colabkit.foundation import DiskReport, Frame
from colabkit.notebook.launcher.pipeline import Pipeline, ResultPath, code_of, make_pipeline, run_pipeline
from colabkit.notebook.launcher.settings import FIELDS, Settings, in_form, places

GIB = 1 << 30


def verbs(plan: Pipeline) -> list[str]:
    return [step.verb.name for step in plan.calls]


def test_each_button_includes_the_calls_of_the_buttons_before_it() -> None:
    assert verbs(make_pipeline(Settings("birds"), "probe")) == ["probe"]
    assert verbs(make_pipeline(Settings("birds"), "stage")) == ["stage"]
    assert verbs(make_pipeline(Settings("birds"), "pack")) == ["stage", "pack"]
    whole = make_pipeline(Settings("birds", epochs=7, batch_size=9), "train")
    assert verbs(whole) == ["stage", "pack"]
    assert (whole.training.epochs, whole.training.batch_size) == (7, 9)
    assert make_pipeline(Settings("birds"), "pack").training is None


def test_drive_is_mounted_first_unless_another_folder_replaces_it() -> None:
    assert verbs(make_pipeline(Settings("drive:birds"), "probe")) == ["mount", "probe"]
    assert verbs(make_pipeline(Settings("birds", work="drive:work"), "pack")) == ["mount", "stage", "pack"]
    assert verbs(make_pipeline(Settings("birds", work="drive:work"), "stage")) == ["stage"]
    assert verbs(make_pipeline(Settings("drive:birds"), "stage", needs_mount=False)) == ["stage"]


@pytest.mark.parametrize(
    "source", ["data.tfrecord", "part.tfrecord-00000-of-00010", "data.lmdb", "s-{000..012}.tar", "birds.CSV"]
)
def test_records_and_tables_are_packed_without_staging(source: str) -> None:
    assert verbs(make_pipeline(Settings(source), "train")) == ["pack"]


def test_the_calls_have_the_values_of_the_form() -> None:
    form = Settings("birds", "disk", "240x320", "jpeg", "a,b", "train=0.5,dev=0.5", "1", "skip", work="w")
    staging, packing = make_pipeline(form, "pack").calls
    assert staging.arguments == {"source": "birds", "to": "disk"}
    assert packing.arguments == {
        "source": ResultPath("staged"),
        "to": packing.arguments["to"],
        "size": (240, 320),
        "encoding": "jpeg",
        "channels": 1,
        "labels": ["a", "b"],
        "splits": {"train": 0.5, "dev": 0.5},
        "on_bad": "skip",
    }
    assert packing.arguments["to"].startswith("w/birds-")


def test_empty_options_use_the_defaults_of_the_public_function() -> None:
    assert list(make_pipeline(Settings("birds", splits=""), "pack").calls[-1].arguments) == ["source", "to"]


def test_other_pack_options_create_another_pack_and_other_epochs_do_not() -> None:
    def folder(form: Settings) -> str:
        return make_pipeline(form, "train").training.to

    assert folder(Settings("birds")) == folder(Settings(" birds ", epochs=9, batch_size=1, to="disk"))
    assert len({folder(form) for form in (Settings("birds"), Settings("b/birds"), Settings("birds", size="64"))}) == 3


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (Settings(" "), "Source is empty"),
        (Settings("birds", work=""), "Work folder is empty; expected a path."),
        (Settings("a\nb"), "Source contains a line break"),
        (Settings("a\u2028b"), "Source contains a line break"),
        (Settings("birds", size="6\n4"), "Image size contains a line break"),
    ],
)
def test_an_invalid_text_is_one_line_that_names_the_field(form: Settings, said: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        make_pipeline(form, "pack")
    message, fields = in_form(caught.value, "pack")
    assert said in message
    assert [FIELDS[name] for name in fields] == [said.partition(" is ")[0].partition(" contains ")[0]]


@pytest.mark.parametrize("source", ["samples:digits", "https://example.org/a.zip"])
def test_a_source_without_a_path_is_not_probed(source: str) -> None:
    with pytest.raises(InvalidOption, match="this source has no path; expected the path of a folder or a file"):
        make_pipeline(Settings(source), "probe")


def test_an_invalid_size_names_and_marks_its_field() -> None:
    with pytest.raises(InvalidOption) as caught:
        make_pipeline(Settings("birds", size="wide"), "pack")
    expected = "expected a number, or height and width such as 240x320"
    message = f"Cannot pack the source: Image size is 'wide'; {expected}. Check Image size."
    assert in_form(caught.value, "pack") == (message, ("size",))


def test_a_path_that_looks_like_an_option_is_a_path() -> None:
    pipeline = make_pipeline(Settings("--to", work="-w", size="-3", labels="-x"), "pack")
    staging, packing = pipeline.calls
    assert staging.arguments["source"] == "--to"
    assert packing.arguments["to"].startswith("-w/")
    assert (packing.arguments["size"], packing.arguments["labels"]) == (-3, "-x")


ADDRESS = "https://user:secret1@example.org/a/birds.zip?token=secret2"


def test_an_address_with_secrets_is_prompted_for_and_not_shown() -> None:
    plan = make_pipeline(Settings(ADDRESS), "train")
    code = code_of(plan)
    assert "secret" not in code
    assert 'ADDRESS = getpass("' in code
    assert "staged = colabkit.stage(ADDRESS, to='auto')" in code
    assert plan.calls[0].arguments["source"] == ADDRESS
    assert plan.training.to.startswith("colabkit-work/birds-")
    assert "secret" not in make_pipeline(Settings("https://user:secret@example.org"), "train").training.to


def test_plain_addresses_are_shown() -> None:
    code = code_of(make_pipeline(Settings("https://example.org/a.zip"), "stage"))
    assert "colabkit.stage('https://example.org/a.zip', " in code


def calls_in(code: str) -> dict[str, dict[str, object]]:
    """Return the arguments of each colabkit call in a cell; an argument that is an expression is returned as text."""
    found = {}
    for node in ast.walk(ast.parse(TransformerManager().transform_cell(code))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("colabkit.") in CALLED:
            function = getattr(colabkit, ast.unparse(node.func).removeprefix("colabkit."))
            named = {one.arg: value_of(one.value) for one in node.keywords if one.arg}
            bound = inspect.signature(function).bind_partial(*map(value_of, node.args), **named)
            found[function.__name__] = dict(bound.arguments)
    return found


def value_of(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


LINE_ENDS = "\0\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
ONE_LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=LINE_ENDS), max_size=30)
# Replacing text is faster than filtering, which would make Hypothesis draw again.
PATHS = ONE_LINE.map(lambda text: text.replace("://", ":/") if text.strip() else f"{text}a")


# Hypothesis limits the time of each example, which a busy machine may exceed.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PATHS, PATHS)
def test_any_path_is_unchanged_in_the_code(source: str, work: str) -> None:
    check_code(source, work)


@pytest.mark.parametrize(
    "word", ["{x}", "$x", "a b", "it's", 'say "x"', "back\\", "\\'\"", "?", "x?", "%x", "!x", "~", "-x", "--to"]
)
def test_quotes_braces_and_dollar_signs_are_unchanged_in_the_code(word: str) -> None:
    check_code(word, word)


def check_code(source: str, work: str) -> None:
    pipeline = make_pipeline(Settings(source, work=work), "train")
    found = calls_in(code_of(pipeline))
    for call in pipeline.calls:
        shown = {
            name: repr(value) if isinstance(value, ResultPath) else value for name, value in call.arguments.items()
        }
        assert found[call.verb.name] == shown
    assert found["train"]["to"] == pipeline.training.to


CALLED = ("stage", "pack", "open_pack", "Loader", "small_network", "supervised_step", "train")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[str, dict[str, object]]]]:
    """Record public calls.

    The returned function lists the calls made since it was last called, with all their arguments.
    """
    found: list[tuple[str, dict[str, object]]] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(*given: Any, **named: Any) -> Any:
            bound = signature.bind(*given, **named)
            bound.apply_defaults()
            found.append((name, {key: plain(value) for key, value in bound.arguments.items()}))
            return function(*given, **named)

        return call

    for name in CALLED:
        monkeypatch.setattr(colabkit, name, recorded(name, getattr(colabkit, name)))

    def since() -> list[tuple[str, dict[str, object]]]:
        taken, found[:] = found[:], []
        return taken

    return since


def plain(value: Any) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str | int | float | tuple | dict | None):
        return value
    return repr(value) if isinstance(value, colabkit.augment.Normalize) else type(value).__name__


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    colabkit.unload_ipython_extension(InteractiveShell.instance())
    InteractiveShell.clear_instance()


class Screen:
    def paint(self, frame: Frame, final: bool) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("splits", sampled(["train=0.5,test=0.5", "train=1"], 1))
def test_the_shown_code_makes_the_same_calls_with_the_same_arguments(
    shell: InteractiveShell,
    calls: Callable[[], list[tuple[str, dict[str, object]]]],
    image_tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    splits: str,
) -> None:
    source = tmp_path / 'it\'s {x} $x "tree"'
    image_tree.rename(source)
    form = Settings(str(source), "disk", "8", splits=splits, batch_size=5, epochs=2, work="my {work}")
    plan = make_pipeline(form, "train")
    for folder in ("panel", "cell"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "panel")
    reports: dict[str, object] = {}
    run_pipeline(plan, Screen(), lambda doing: None, reports.__setitem__)
    by_panel = calls()
    monkeypatch.chdir(tmp_path / "cell")
    shell.user_ns["x"] = "wrong"
    shell.run_cell(code_of(plan)).raise_error()
    by_cell = calls()
    assert by_cell == by_panel
    assert {name for name, _ in by_cell} == set(CALLED)
    assert repr(shell.user_ns["report"].epochs[-1].values) == repr(reports["report"].epochs[-1].values)


def test_free_space_is_shown_beside_each_choice() -> None:
    disks = (DiskReport("/tmp", "ext4", 9 * GIB, 2 * GIB, 2 * GIB), DiskReport("/data", "ext4", 9, 3 * GIB, 3 * GIB))
    tmpfs = (DiskReport("/dev/shm", "tmpfs", 8 * GIB, 6 * GIB, 5 * GIB),)
    found = SimpleNamespace(disks=disks, tmpfs=tmpfs)
    labels = {value: label for label, value in places(found, "/data/near")}
    assert list(labels) == ["auto", "tmpfs", "disk"]
    assert labels["tmpfs"] == "tmpfs: 5.0 GiB free"
    assert labels["disk"] == "disk: 3.0 GiB free"
    none = SimpleNamespace(disks=(), tmpfs=())
    assert [label for label, _ in places(none, "/data/near")][1:] == ["tmpfs: none found", "disk: none found"]
