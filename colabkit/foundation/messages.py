"""Messages as data: text with references to options and calls, which each front end renders in its syntax.

A message is written once and contains references such as `option("refresh", True)` and `call("mount")`. In Python,
these two appear as `refresh=True` and `colabkit.mount()`. The subclasses of `Words` in `colabkit.notebook` render them
as `--refresh` and `%mount`; in the launcher, options appear as the labels of fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

_LONGEST = 80


class Code(str):
    """An option value that is shown without quotes, such as the name of a variable."""

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True, slots=True)
class OptionRef:
    """A reference to an option.

    Attributes:
        name: name of the parameter in Python.
        value: its value; `...` to name only the option.
        is_omitted: whether the reference is advice to omit the option.
    """

    name: str
    value: Any = ...
    is_omitted: bool = False


@dataclass(frozen=True, slots=True)
class CallRef:
    """A reference to a call of a public function.

    Attributes:
        name: name of the function in `colabkit`.
        arguments: positional arguments.
        options: keyword arguments.
        result: name of the variable that holds the result; empty if none does.
    """

    name: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    result: str = ""


@dataclass(frozen=True, slots=True)
class PythonText:
    """A part of a message that is shown only in Python, because it does not apply elsewhere.

    Attributes:
        text: the part, with its separators, such as `", or pass a function"`.
    """

    text: Text


class Phrase(str):
    """A text with references that is shown in Python syntax wherever no front end renders it.

    Attributes:
        text: the text with its references.
    """

    __slots__ = ("text",)
    text: Text

    def __new__(cls, text: Text) -> Self:
        """Render the text as the string's value, and keep the references."""
        made = super().__new__(cls, PYTHON.render(text))
        made.text = text
        return made

    def __reduce__(self) -> tuple[type[Phrase], tuple[Text]]:
        """Pickle the text with its references."""
        return Phrase, (self.text,)


Text: TypeAlias = "str | OptionRef | CallRef | PythonText | Message | tuple[Text, ...]"
"""Text that may contain references; the parts of a tuple are joined without spaces."""


def option(name: str, value: Any = ...) -> OptionRef:
    """Return a reference to an option, by its parameter name, optionally with a value."""
    return OptionRef(name, value)


def omit(name: str) -> OptionRef:
    """Return a reference that renders as advice to omit an option, in lower case, such as `omit size=`."""
    return OptionRef(name, is_omitted=True)


def call(name: str, *arguments: Any, **options: Any) -> CallRef:
    """Return a reference to a call of `colabkit.name()`; the argument `...` stands for any value."""
    return CallRef(name, arguments, options)


def in_python(text: Text) -> PythonText:
    """Mark a part of a message, with its separators, that is shown only in Python."""
    return PythonText(text)


def shown(value: object) -> str:
    """Return the `repr` of a value for a message, as one line of at most 80 characters; of arrays, only the shape."""
    if shape := getattr(value, "shape", ()):
        return f"<{type(value).__name__} {list(shape)}>"
    return shortened(" ".join(_repr(value).split()), _LONGEST)


def shortened(text: str, most: int) -> str:
    """Return text of at most `most` characters; if it is cut, the last one is an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError:
        # By default, Python refuses to convert integers of thousands of digits to text.
        return f"{type(value).__name__} of thousands of digits"


class Words:
    """The syntax of options and calls in a front end; this base class uses Python syntax."""

    def option(self, name: str, value: Any) -> str:
        """Return an option and its value as text, or only the option if `value` is `...`."""
        return f"{name}=" if value is ... else f"{name}={shown(value)}"

    def omit(self, name: str) -> str:
        """Return the advice to omit an option, in lower case."""
        return f"omit {self.option(name, ...)}"

    def call(self, call: CallRef) -> str:
        """Return a call as text, with complete arguments."""
        arguments = [_argument(value) for value in call.arguments]
        arguments += [f"{name}={_argument(value)}" for name, value in call.options.items()]
        result = f"{call.result} = " if call.result else ""
        return f"{result}colabkit.{call.name}({', '.join(arguments)})"

    def python_only(self, text: Text) -> str:
        """Return a part of a message that only Python shows; other front ends return an empty text."""
        return self.render(text)

    def render(self, text: Text) -> str:
        """Return text with its references rendered for this front end."""
        if isinstance(text, Phrase):
            return self.render(text.text)
        if isinstance(text, str):
            return text
        if isinstance(text, tuple):
            return "".join(map(self.render, text))
        if isinstance(text, CallRef):
            return self.call(text)
        if isinstance(text, PythonText):
            return self.python_only(text.text)
        if isinstance(text, Message):
            return text.render(self)
        return self.omit(text.name) if text.is_omitted else self.option(text.name, text.value)


def _argument(value: Any) -> str:
    # Never shorten an argument, so that the call can be copied and run.
    return "..." if value is ... else _repr(value)


PYTHON = Words()

_caller: ContextVar[Words] = ContextVar("caller", default=PYTHON)


@contextmanager
def speaking(words: Words) -> Iterator[None]:
    """Make `caller_words()` return the syntax of a front end in the block."""
    token = _caller.set(words)
    try:
        yield
    finally:
        _caller.reset(token)


def caller_words() -> Words:
    """Return the syntax of the front end that makes the running call, for lines that it prints before it returns."""
    return _caller.get()


@dataclass(frozen=True, slots=True)
class Message:
    """The message of an error; `str()` shows its options and calls in Python syntax.

    Attributes:
        action: the attempted action, a verb and its object, such as `"stage 'birds'"`.
        found: the problem that was found, with numbers and units.
        expected: the expected value or state; empty if `found` implies it.
        next_step: advice on how to continue, one sentence without the final period.
    """

    action: Text
    found: Text
    expected: Text
    next_step: Text

    def render(self, words: Words = PYTHON) -> str:
        """Return the message with options and calls in the syntax of a front end."""
        expected, next_step = words.render(self.expected), words.render(self.next_step)
        if _starts_with_omitted(self.next_step):
            next_step = f"{next_step[:1].upper()}{next_step[1:]}"
        expectation = f"; expected {expected}" if expected else ""
        return f"Cannot {words.render(self.action)}: {words.render(self.found)}{expectation}. {next_step}."

    __str__ = render

    def replaced(self, old: str, new: str) -> Message:
        """Return the message with a string, such as a path, replaced everywhere except in options and calls."""
        parts = (self.action, self.found, self.expected, self.next_step)
        return Message(*(_replaced(part, old, new) for part in parts))

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options that the message refers to; those of the next step come first."""
        parts = parts_of((self.next_step, self.found, self.expected, self.action))
        return tuple(dict.fromkeys(part.name for part in parts if isinstance(part, OptionRef)))


def has_references(value: object) -> bool:
    """Return whether a value is a reference or a `Message`, or a tuple that contains a reference or a `Message`."""
    if isinstance(value, tuple):
        return any(map(has_references, value))
    return isinstance(value, OptionRef | CallRef | PythonText | Message)


def _replaced(text: Text, old: str, new: str) -> Text:
    if isinstance(text, tuple):
        return tuple(_replaced(part, old, new) for part in text)
    if isinstance(text, PythonText):
        return PythonText(_replaced(text.text, old, new))
    if isinstance(text, Message):
        return text.replaced(old, new)
    return text.replace(old, new) if isinstance(text, str) else text


def parts_of(text: Text) -> Iterator[str | OptionRef | CallRef]:
    """Yield the strings and the references of a text, in order."""
    if isinstance(text, Phrase | PythonText):
        yield from parts_of(text.text)
    elif isinstance(text, tuple):
        for part in text:
            yield from parts_of(part)
    elif isinstance(text, Message):
        yield from parts_of((text.action, text.found, text.expected, text.next_step))
    else:
        yield text


def _starts_with_omitted(text: Text) -> bool:
    while isinstance(text, tuple) and text:
        text = text[0]
    return isinstance(text, OptionRef) and text.is_omitted


def cannot(action: Text, found: Text, expected: Text, next_step: Text) -> Message:
    """Return the message `Cannot {action}: {found}; expected {expected}. {Next step}.`; see `Message`."""
    return Message(action, found, expected, next_step)
