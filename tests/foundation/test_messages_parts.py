"""Messages are data: each front end renders the same parts in its syntax, and errors keep the parts unchanged."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colabkit import errors
from colabkit.errors import ColabkitError, InvalidOption
from colabkit.foundation import (
    PYTHON,
    CallRef,
    Code,
    Message,
    Report,
    Text,
    Words,
    call,
    cannot,
    in_python,
    omit,
    option,
)
from colabkit.foundation.messages import has_references, shown

KINDS = [getattr(errors, name) for name in errors.__all__]


class CapitalWords(Words):
    """The words of a front end that writes options and calls in capitals."""

    def option(self, name: str, value: object) -> str:
        return name.upper() if value is ... else f"{name.upper()} {value}"

    def omit(self, name: str) -> str:
        return f"without {self.option(name, ...)}"

    def call(self, call: CallRef) -> str:
        return call.name.upper()


def test_a_message_has_four_parts_of_which_the_third_may_be_empty() -> None:
    whole = cannot("read 'x'", "the file has 3 bytes", "at least 4", "Download it again")
    assert str(whole) == "Cannot read 'x': the file has 3 bytes; expected at least 4. Download it again."
    short = cannot("read 'x'", "the file has 3 bytes", "", "Download it again")
    assert str(short) == "Cannot read 'x': the file has 3 bytes. Download it again."
    assert (whole.action, whole.found, whole.expected) == ("read 'x'", "the file has 3 bytes", "at least 4")
    assert whole.next_step == "Download it again"


@pytest.mark.parametrize(
    ("text", "python", "shouted"),
    [
        ("plain", "plain", "plain"),
        (option("overwrite", True), "overwrite=True", "OVERWRITE True"),
        (option("on_bad", "skip"), "on_bad='skip'", "ON_BAD skip"),
        (option("labels"), "labels=", "LABELS"),
        (option("step", Code("step(batch)")), "step=step(batch)", "STEP step(batch)"),
        (option("state", {"model": Code("model")}), "state={'model': model}", "STATE {'model': model}"),
        (omit("size"), "omit size=", "without SIZE"),
        (call("mount"), "colabkit.mount()", "MOUNT"),
        (call("mount", force=True), "colabkit.mount(force=True)", "MOUNT"),
        (call("stage", ..., refresh=True), "colabkit.stage(..., refresh=True)", "STAGE"),
        (call("pack", "a'b", Code("out"), size=(8, 9)), 'colabkit.pack("a\'b", out, size=(8, 9))', "PACK"),
        (call("stage", "/a  b" * 30), f"colabkit.stage('{'/a  b' * 30}')", "STAGE"),
        (("Run ", call("mount"), (", or ", (omit("to"), "."))), "Run colabkit.mount(), or omit to=.", None),
        (("Rename it", in_python((" or use ", option("labels")))), "Rename it or use labels=", None),
        ((), "", ""),
    ],
)
def test_each_front_end_renders_options_and_calls_in_its_own_words(
    text: Text, python: str, shouted: str | None
) -> None:
    assert PYTHON.render(text) == python
    assert shouted is None or CapitalWords().render(text) == shouted


def test_a_message_is_rendered_in_python_unless_asked_otherwise() -> None:
    message = cannot(("pack ", option("out")), option("size", 0), ("no ", option("size")), ("Run ", call("mount")))
    assert str(message) == "Cannot pack out=: size=0; expected no size=. Run colabkit.mount()."
    assert message.render(CapitalWords()) == "Cannot pack OUT: SIZE 0; expected no SIZE. Run MOUNT."


@pytest.mark.parametrize("next_step", [omit("size"), (omit("size"),), ((omit("size"), " here"), "")])
def test_a_next_step_starts_with_a_capital_if_it_starts_with_omit(next_step: Text) -> None:
    message = cannot("pack", "a", "", next_step)
    assert ". Omit size=" in str(message)
    assert ". Without SIZE" in message.render(CapitalWords())


def test_omit_is_lower_case_elsewhere_and_other_next_steps_are_unchanged() -> None:
    assert str(cannot("a", "b", "", ("Check it, or ", omit("size")))).endswith(". Check it, or omit size=.")
    assert str(cannot("a", "b", omit("size"), (option("size"), " is odd"))).endswith("omit size=. size= is odd.")


def test_a_message_inside_a_message_uses_the_same_words() -> None:
    inner = cannot("save", "the folder is full", "", ("Use ", option("to", None)))
    outer = cannot("train", inner, "", ("Run ", call("mount")))
    assert "Use to=None." in str(outer)
    assert "Use TO None." in outer.render(CapitalWords())


def test_a_message_lists_the_options_of_its_next_step_first_and_each_once() -> None:
    inner = cannot("a", option("deep", 1), "", "Check it")
    found = (option("size", 0), " with ", (option("quality", 1), inner))
    message = cannot(option("out"), found, option("size"), (omit("encoding"), call("mount", force=True), option("out")))
    assert message.options == ("encoding", "out", "size", "quality", "deep")
    assert cannot("a", "size=3", "b", "c").options == ()


def test_a_path_can_be_replaced_in_all_texts_but_not_in_options() -> None:
    inner = cannot("read '/tmp/x'", "a", "", "Check '/tmp/x'")
    message = cannot("pack '/tmp/x'", ("of '/tmp/x' ", option("out", "/tmp/x"), inner), "'/tmp/x'", "Check '/tmp/x'")
    replaced = message.replaced("/tmp/x", "birds")
    assert replaced.action == "pack 'birds'"
    assert (replaced.expected, replaced.next_step) == ("'birds'", "Check 'birds'")
    assert PYTHON.render(replaced.found) == "of 'birds' out='/tmp/x'Cannot read 'birds': a. Check 'birds'."
    assert "/tmp/x" in str(message), "the original is unchanged"


def test_only_references_make_a_tuple_a_text() -> None:
    for text in (
        option("a"),
        omit("a"),
        call("a"),
        cannot("a", "b", "c", "d"),
        ("a", option("a")),
        (("a", call("b")),),
    ):
        assert has_references(text)
    for value in ("a", 3, None, (), ("a", "b"), (1, (2, 3)), [option("a")]):
        assert not has_references(value)


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), st.lists, max_leaves=30))
def test_a_value_is_shown_as_one_short_line(value: object) -> None:
    text = shown(value)
    assert len(text) <= 80
    assert len(text.splitlines()) <= 1


def test_a_number_of_thousands_of_digits_is_described() -> None:
    assert shown(10**5000) == "int of thousands of digits"
    assert shown(torch.zeros(200, 3)) == "<Tensor [200, 3]>"
    assert shown("a" * 200) == f"'{'a' * 78}…"
    assert PYTHON.render(option("size", 10**5000)) == "size=int of thousands of digits"


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_keeps_its_message_when_pickled_or_copied(kind: type[ColabkitError]) -> None:
    message = cannot("pack 'x'", option("size", 0), "a number", ("Run ", call("mount"), " or ", omit("size")))
    error = kind(message)
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is kind
        assert same.message == message
        assert str(same) == str(message)
        assert same.message.render(CapitalWords()) == message.render(CapitalWords())


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_shows_its_message_in_the_words_of_its_caller(kind: type[ColabkitError]) -> None:
    error = kind(cannot("stage", "it is empty", "", ("Run ", call("mount"))))
    assert str(error) == "Cannot stage: it is empty. Run colabkit.mount()."
    error.words = CapitalWords()
    assert str(error) == "Cannot stage: it is empty. Run MOUNT."
    assert error._render_traceback_() == [f"{kind.__name__}: Cannot stage: it is empty. Run MOUNT."]
    other = kind(cannot("stage", "it is empty", "", ("Run ", call("mount"))))
    assert str(other).endswith("Run colabkit.mount()."), "the words of one error are not those of another"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_with_a_text_instead_of_a_message_shows_it_unquoted(kind: type[ColabkitError]) -> None:
    error = kind("not an image file")
    assert error.message is None
    assert str(error) == "not an image file"
    assert str(kind()) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_several_arguments_is_shown_as_its_builtin_shows_it(kind: type[ColabkitError]) -> None:
    builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins" and base is not BaseException)
    error = kind(5, "input/output error")
    assert error.message is None
    assert error.args == (5, "input/output error")
    assert str(error) == str(builtin(5, "input/output error"))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@dataclasses.dataclass(frozen=True, repr=False)
class HintReport(Report):
    """A report with a hint that names options."""

    hint: Text

    def _summary(self) -> str:
        return self._words.render(("Done; ", self.hint))

    def _rows(self) -> list[tuple[str, ...]]:
        return [("hint", self._words.render(self.hint))]


@pytest.mark.parametrize(
    ("hint", "python"),
    [
        (("use ", option("refresh", True)), "use refresh=True"),
        (option("refresh", True), "refresh=True"),
        (call("mount"), "colabkit.mount()"),
        (cannot("a", "b", "", "Check it"), "Cannot a: b. Check it."),
        ("text", "text"),
    ],
)
def test_a_report_renders_hints_in_the_words_that_it_is_given(hint: Text, python: str) -> None:
    report = HintReport(hint)
    assert repr(report) == f"Done; {python}"
    report.speak(CapitalWords())
    assert repr(report) == f"Done; {CapitalWords().render(hint)}"
    assert repr(HintReport(hint)) == f"Done; {python}", "the words of one report are not those of another"


def test_messages_are_values() -> None:
    one, same = (cannot("a", ("b", option("c", 1)), "d", call("e")) for _ in range(2))
    assert one == same
    assert one != cannot("a", ("b", option("c", 2)), "d", call("e"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.action = "b"  # type: ignore[misc]
    assert isinstance(InvalidOption(one).args[0], Message)


class FailingDataset(torch.utils.data.Dataset[int]):
    """A dataset whose samples raise a colabkit error."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise InvalidOption(cannot("read a sample", "it is missing", "", "Check the dataset"))


def test_an_error_in_a_worker_process_of_torch_keeps_its_message():
    with pytest.raises(InvalidOption, match="Cannot read a sample: it is missing"):
        list(torch.utils.data.DataLoader(FailingDataset(), num_workers=1))
