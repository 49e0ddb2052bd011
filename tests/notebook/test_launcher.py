"""The launcher turns its form into one call, shows code that makes the same call, and lists places to choose from."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell
from sampling import sampled

import colabkit
from colabkit.errors import InvalidOption
from colabkit.foundation import DiskReport
from colabkit.notebook.launcher.actions import Action, call_of, cell_of
from colabkit.notebook.launcher.browsing import is_place, list_place
from colabkit.notebook.launcher.settings import FIELDS, MORE_OPTIONS, Settings, in_form, places

GIB = 1 << 30
ACTIONS: dict[Action, str] = {
    "train": "train_on",
    "restart": "train_on",
    "probe": "probe",
    "stage": "stage",
    "prepare": "prepare",
}


def test_every_field_is_an_argument_of_train_on_with_its_default() -> None:
    parameters = inspect.signature(colabkit.train_on).parameters
    # The form has buttons, curves and a panel of its own.
    others = {"restart", "log", "progress", "screen"}
    assert set(FIELDS) == set(Settings.__dataclass_fields__) == set(parameters) - others
    assert Settings().options == {}
    for name in set(FIELDS) - {"source", "splits", "path_column", "root"}:
        assert getattr(Settings(), name) == str(parameters[name].default)
    assert set(MORE_OPTIONS) < set(FIELDS)


def test_the_call_has_the_values_of_the_form() -> None:
    texts = ("240x320", "7", "work", "9", "small", "species", "train=0.5,dev=0.5", "file", "pics", "raise", "0.2")
    form = Settings(" birds ", *texts)
    options = {
        "size": (240, 320),
        "epochs": 7,
        "to": "work",
        "batch_size": 9,
        "model": "small",
        "labels": "species",
        "splits": {"train": 0.5, "dev": 0.5},
        "path_column": "file",
        "root": "pics",
        "on_bad": "raise",
        "max_bad": 0.2,
    }
    assert (call_of(form, "train").source, call_of(form, "train").options) == ("birds", options)
    assert call_of(form, "restart").options == {**options, "restart": True}
    prepared = ("size", "labels", "splits", "path_column", "root", "on_bad", "max_bad")
    shared = {name: options[name] for name in prepared}
    assert call_of(form, "prepare").options == shared
    assert call_of(form, "stage", "tmpfs").options == {"to": "tmpfs", "path_column": "file", "root": "pics"}
    assert call_of(form, "probe").options == {}


def test_empty_and_default_fields_are_left_out_of_the_code() -> None:
    form = Settings("drive:birds", size="", epochs=" auto ", splits=" ")
    assert cell_of(call_of(form, "train")) == "import colabkit\ncolabkit.train_on('drive:birds')"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (Settings(" "), "Source is empty"),
        (Settings("a\nb"), "Source contains a line break"),
        (Settings("a\u2028b"), "Source contains a line break"),
        (Settings("birds", size="6\n4"), "Image size contains a line break"),
        (Settings("birds", size="wide"), "Image size is 'wide'; expected auto, a number, or height and width"),
        (Settings("birds", epochs="many"), "Epochs is 'many'; expected auto or a whole number"),
    ],
)
def test_an_invalid_text_is_one_line_that_names_and_marks_the_field(form: Settings, said: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        call_of(form, "train")
    message, fields = in_form(caught.value)
    assert message.startswith(f"Cannot use the form: {said}")
    assert [FIELDS[name] for name in fields] == [said.partition(" is ")[0].partition(" contains ")[0]]


@pytest.mark.parametrize("source", ["samples:digits", "https://example.org/a.zip"])
def test_a_source_without_a_path_is_not_measured(source: str) -> None:
    with pytest.raises(InvalidOption, match="this source has no path; expected the path of a folder or a file"):
        call_of(Settings(source), "probe")


ADDRESS = "https://user:secret1@example.org/a/birds.zip?token=secret2"


@pytest.mark.parametrize("action", ACTIONS)
def test_an_address_with_secrets_is_asked_for_and_not_shown(action: Action) -> None:
    if action == "probe":
        with pytest.raises(InvalidOption) as caught:
            call_of(Settings(ADDRESS), action)
        assert "secret" not in str(caught.value)
        return
    call = call_of(Settings(ADDRESS), action)
    assert call.source == ADDRESS
    assert "secret" not in f"{call!r} {call.code} {cell_of(call)}"
    assert "address = getpass(" in cell_of(call)
    assert f"colabkit.{ACTIONS[action]}(address" in cell_of(call)


def test_plain_addresses_are_shown() -> None:
    assert cell_of(call_of(Settings("https://example.org/a.zip"), "stage")).endswith("('https://example.org/a.zip')")


LINE_ENDS = "\0\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
ONE_LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=LINE_ENDS), max_size=30)
# Replacing text is faster than filtering, which would make Hypothesis draw again.
PATHS = ONE_LINE.map(lambda text: text.replace("://", ":/") if text.strip() else f"{text}a")


# Hypothesis limits the time of each example, which a busy machine may exceed.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PATHS, PATHS)
def test_any_path_is_unchanged_in_the_code(source: str, to: str) -> None:
    check_code(source, to)


@pytest.mark.parametrize(
    "word", ["{x}", "$x", "a b", "it's", 'say "x"', "back\\", "\\'\"", "?", "x?", "%x", "!x", "~", "-x", "--to"]
)
def test_quotes_braces_and_dollar_signs_are_unchanged_in_the_code(word: str) -> None:
    check_code(word, word)


def check_code(source: str, to: str) -> None:
    for action, name in ACTIONS.items():
        call = call_of(Settings(source, to=to), action)
        node = ast.parse(cell_of(call)).body[-1]
        assert isinstance(node, ast.Expr)
        assert isinstance(node.value, ast.Call)
        assert ast.unparse(node.value.func) == f"colabkit.{name}"
        assert [ast.literal_eval(one) for one in node.value.args] == [call.source]
        assert {one.arg: ast.literal_eval(one.value) for one in node.value.keywords} == call.options


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    colabkit.unload_ipython_extension(InteractiveShell.instance())
    InteractiveShell.clear_instance()


@pytest.mark.parametrize("action", sampled(ACTIONS, 2))
def test_the_shown_code_makes_the_same_call_with_the_same_arguments(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, action: Action
) -> None:
    calls: list[tuple[object, ...]] = []

    def recorded(*given: object, **named: object) -> None:
        calls.append((given, named))

    monkeypatch.setattr(colabkit, ACTIONS[action], recorded)
    call = call_of(Settings('it\'s {x} $x "tree"', "8", "2", "my {work}", splits="train=0.5,test=0.5"), action)
    call.make()
    shell.user_ns["x"] = "wrong"
    shell.run_cell(cell_of(call)).raise_error()
    assert calls[0] == calls[1]
    assert len(calls) == 2


def test_free_space_is_shown_in_plain_words_beside_each_choice_that_exists() -> None:
    disks = (DiskReport("/tmp", "ext4", 9 * GIB, 2 * GIB, 2 * GIB), DiskReport("/data", "ext4", 9, 3 * GIB, 3 * GIB))
    tmpfs = (DiskReport("/dev/shm", "tmpfs", 8 * GIB, 6 * GIB, 5 * GIB),)
    found = SimpleNamespace(disks=disks, tmpfs=tmpfs)
    assert places(found, "/data/near") == [
        ("auto", "auto"),
        ("RAM disk (5.0 GiB free)", "tmpfs"),
        ("disk (3.0 GiB free)", "disk"),
    ]
    assert places(SimpleNamespace(disks=(), tmpfs=()), "/data/near") == [("auto", "auto")]


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that stands for Drive, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLABKIT_DRIVE", str(tmp_path / "drive"))
    folder = tmp_path / "drive" / "birds" / "red"
    folder.mkdir(parents=True)
    return tmp_path / "drive"


@pytest.mark.usefixtures("drive")
def test_a_source_on_drive_is_found_by_going_down_and_up() -> None:
    assert ("Google Drive", "drive:") in list_place("")
    assert list_place("drive:") == [("↑ up from drive:", ""), ("birds/", "drive:birds/")]
    inside = [("↑ up from drive:birds/", "drive:"), ("✓ use drive:birds", "drive:birds"), ("red/", "drive:birds/red/")]
    assert list_place("drive:birds/") == inside
    assert list_place("drive:birds/red/")[:2] == [
        ("↑ up from drive:birds/red/", "drive:birds/"),
        ("✓ use drive:birds/red", "drive:birds/red"),
    ]


def test_a_place_with_too_many_entries_says_so(tmp_path: Path) -> None:
    for number in range(1001):
        (tmp_path / f"{number:04}").mkdir()
    assert list_place(f"{tmp_path}/")[-1] == ("… and more: type the path in Source", f"{tmp_path}/")


def test_a_place_lists_folders_before_archives_and_tables_and_no_images(drive: Path) -> None:
    for name in ("a.zip", "b.TAR.GZ", "c.csv", "d.jpg", "e.txt", ".hidden.zip"):
        (drive / name).touch()
    assert [label for label, _ in list_place("drive:")] == ["↑ up from drive:", "birds/", "a.zip", "b.TAR.GZ", "c.csv"]
    for number in range(300):
        (drive / f"{number}.jpg").touch()
    assert ("birds/", "drive:birds/") in list_place("drive:")


@pytest.mark.usefixtures("drive")
def test_local_folders_are_listed_up_to_the_root() -> None:
    here = list_place("./")
    assert ("drive/", "drive/") in here
    assert list_place("drive/")[0] == ("↑ up from drive/", "./")
    assert list_place("drive/birds/")[0] == ("↑ up from drive/birds/", "drive/")
    above = here[0][1]
    assert above == f"{os.path.dirname(os.getcwd())}/"
    while above:
        place, above = above, list_place(above)[0][1]
        assert is_place(place)
    assert place == "/"


def test_the_first_list_offers_to_connect_drive_if_it_is_not_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLABKIT_DRIVE", raising=False)
    monkeypatch.setattr("colabkit.notebook.recipe.api.drive_mounts", lambda table: [])
    assert ("Google Drive (connect)", "drive:") in list_place("")
    assert not is_place(list_place("")[0][1])
