"""The exception classes, the form of their messages, and rules for the source code of the package."""

from __future__ import annotations

import ast
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import colabkit
from colabkit import errors
from colabkit.foundation import ColabkitError, cannot, kind_of

PACKAGE = Path(colabkit.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
FAMILY = {name for name in errors.__all__ if name != "ColabkitError"}
BUILTINS = {
    "InvalidOption": ValueError,
    "SourceMissing": FileNotFoundError,
    "BadSource": ValueError,
    "BadArchive": ValueError,
    "BadImage": ValueError,
    "SourceChanged": OSError,
    "TargetExists": FileExistsError,
    "NotEnoughSpace": OSError,
    "FileFailed": OSError,
    "NotSealed": ValueError,
    "Corrupt": ValueError,
    "MissingSample": IndexError,
    "MissingSplit": KeyError,
    "NotMounted": FileNotFoundError,
    "MountFailed": OSError,
    "UnsentWrites": RuntimeError,
    "TimedOut": TimeoutError,
    "FetchFailed": OSError,
    "MissingPackage": ImportError,
    "NoNotebook": RuntimeError,
    "PackingFailed": RuntimeError,
    "LoaderFailed": RuntimeError,
    "LaunchFailed": RuntimeError,
    "TrainingDiverged": FloatingPointError,
}
OTHERWISE_WORDED = {
    # These modules do not know the file's name, so their callers add it to the error's text.
    *((path.name, "BadImage") for path in (PACKAGE / "packs" / "decode").iterdir()),
    ("dataset_samples.py", "BadImage"),
    ("image_decoders.py", "BadImage"),
    ("device_decoder.py", "BadImage"),
    # These repeat the message of another error.
    ("bucket.py", "FetchFailed"),
    ("pack_call.py", "BadImage"),
}

MESSAGE = cannot("read 'x'", "the file has 3 bytes", "at least 4", "Download it again")


def test_the_list_of_errors_is_complete():
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and name not in BUILTINS}
    assert set(BUILTINS) == FAMILY
    assert {name for name in defined if issubclass(vars(errors)[name], ColabkitError)} == {"ColabkitError"}
    assert colabkit.errors is errors
    assert "errors" in colabkit.__all__


def test_each_error_is_also_the_matching_builtin_and_is_listed_in_the_docstring():
    assert str(MESSAGE) == "Cannot read 'x': the file has 3 bytes; expected at least 4. Download it again."
    for name, builtin in BUILTINS.items():
        error = getattr(errors, name)(MESSAGE)
        assert isinstance(error, ColabkitError)
        assert isinstance(error, builtin)
        assert str(error) == str(MESSAGE)
        assert error.message is MESSAGE
        assert re.search(rf"── {name} \({builtin.__name__}\) +\S", errors.__doc__), name


def raised(error: Exception) -> Exception:
    try:
        try:
            raise OSError(errno.EIO, "deep cause")
        except OSError as cause:
            raise error from cause
    except Exception as caught:
        return caught


def test_a_notebook_shows_one_line_and_colabkit_debug_shows_the_full_traceback_with_its_cause(monkeypatch):
    for name in BUILTINS:
        error = raised(getattr(errors, name)(MESSAGE))
        monkeypatch.delenv("COLABKIT_DEBUG", raising=False)
        assert error._render_traceback_() == [f"{name}: {MESSAGE}"]
        monkeypatch.setenv("COLABKIT_DEBUG", "1")
        text = "".join(error._render_traceback_())
        for part in ("Traceback (most recent call last)", "deep cause", str(MESSAGE), os.path.basename(__file__)):
            assert part in text


# The following tests read the source code of all modules.


def unformed(source: str, module: str) -> list[str]:
    """Return the statements that create or raise a colabkit error without a message from `cannot`, unless exempted."""
    tree = ast.parse(source)
    makers = {"cannot"} | {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and (
            (function.returns is not None and "Message" in ast.unparse(function.returns))
            or any(is_call_of(one.value, {"cannot"}) for one in ast.walk(function) if isinstance(one, ast.Return))
        )
    }
    messages = message_names(tree, makers)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and named(node.exc) in FAMILY:
            found.append(f"{module}:{node.lineno} raises {named(node.exc)} without a message")
        if (
            isinstance(node, ast.Call)
            and named(node.func) in FAMILY
            and (module, named(node.func)) not in OTHERWISE_WORDED
        ):
            is_alone = len(node.args) == 1 and {one.arg for one in node.keywords} <= {"cause"}
            message = node.args[0] if is_alone else None
            is_name = isinstance(message, ast.Name) and message.id in messages
            if not is_name and not is_call_of(message, makers):
                found.append(f"{module}:{node.lineno} makes {named(node.func)} without cannot(...)")
    return found


def message_names(tree: ast.AST, makers: set[str]) -> set[str]:
    good, bad = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            names = {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
            (good if is_call_of(node.value, makers) else bad).update(names)
        elif isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) == "Message":
            good.add(node.arg)
    return good - bad


def named(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_call_of(node: ast.AST | None, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and named(node.func) in names


def test_every_error_gets_its_message_from_cannot():
    assert [found for path in MODULES for found in unformed(path.read_text(), path.name)] == []


def test_calls_with_wrong_arguments_name_the_public_class_or_function():
    class Crop(colabkit.augment.RandomCrop):
        pass

    calls = {
        "colabkit.augment.MixUp(): the argument num_classes is missing": colabkit.augment.MixUp,
        "colabkit.augment.RandomCrop(): the argument size is missing": Crop,
        "colabkit.augment.Compose(): the argument transforms is missing": colabkit.augment.Compose,
        "colabkit.sampler.WeightedOrder(): the argument weights is missing": colabkit.sampler.WeightedOrder,
        "colabkit.runtime(): 1 argument without a name is given; expected none. Use": lambda: colabkit.runtime(3),
    }
    for found, wrong in calls.items():
        with pytest.raises(errors.InvalidOption) as caught:
            wrong()
        assert str(caught.value).startswith(f"Cannot call {found}")


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("raise BadSource('it broke')", 1),
        ("raise BadSource(f'it {broke}') from error", 1),
        ("raise errors.BadSource()", 1),
        ("raise BadSource", 1),
        ("raise BadSource(cannot(a, b, c, d), extra)", 1),
        ("def f():\n    return BadArchive('it broke')", 1),
        ("def f():\n    return 'it broke'\nraise BadArchive(f())", 1),
        ("message = 'it broke'\nraise BadSource(message)", 1),
        ("message = cannot(a, b, c, d)\nmessage = 'it broke'\nraise BadSource(message)", 1),
        ("raise BadSource(cannot(a, b, c, d)) from error", 0),
        ("message = cannot(a, b, c, d)\nraise BadSource(message)", 0),
        ("def f() -> tuple[str, Message]:\n    ...\ncause, message = f()\nraise BadSource(message)", 0),
        ("def f(message: Message) -> None:\n    raise BadSource(message)", 0),
        ("def f():\n    return cannot(a, b, c, d)\nraise BadArchive(f())", 0),
        ("raise ValueError('a builtin may have any message')", 0),
        ("except BadSource: pass", None),
    ],
)
def test_an_error_without_cannot_is_found(source, count):
    source = source if count is not None else f"try:\n    pass\n{source}"
    assert len(unformed(source, "any.py")) == (count or 0)


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OS_CHANGES = words(
    "chmod chown fchmod fchown ftruncate link makedirs mkdir mkfifo mknod posix_fallocate pwrite remove removedirs "
    "rename renames replace rmdir symlink truncate unlink utime write writev"
)
PATH_CHANGES = words(
    "extract extractall hardlink_to mkdir rename rmdir symlink_to tofile touch unlink write_bytes write_text"
)
READING_SHUTIL = frozenset({"disk_usage", "get_terminal_size", "which"})
SCRATCH = {
    "demonstration.py": "tempfile.TemporaryDirectory",
    "ranks.py": "tempfile.TemporaryFile",
    "training.py": "tempfile.TemporaryDirectory",
    "template.py": "zipfile.ZipFile(file, 'w')",
}
"""Temporary files that exist during one call only, whose path no user sees, and an archive in memory."""
CREATING_FLAGS = frozenset({"O_APPEND", "O_CREAT", "O_TRUNC"})


def changes(source: str) -> Iterator[str]:
    """Yield the code that changes files without `file_changes`, and the imports that hide such changes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in CREATING_FLAGS:
            yield f"{node.lineno}: {node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "tempfile"):
            yield f"{node.lineno}: from {node.module} import hides what is called"
        if not isinstance(node, ast.Call):
            continue
        owner = named(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        name = named(node.func)
        if owner == "file_changes":
            continue
        # Distinguish `str.replace`, which takes two arguments, from `Path.replace`, which takes one.
        alone = len(node.args) == 1 and not node.keywords
        if (
            (owner == "os" and name in OS_CHANGES)
            or (owner == "shutil" and name not in READING_SHUTIL)
            or owner == "tempfile"
            or (isinstance(node.func, ast.Attribute) and name in PATH_CHANGES)
            or (owner != "dataclasses" and name == "replace" and alone)
            or (name in ("open", "File", "ZipFile", "fdopen") and opens_for_writing(node, owner, name))
            or (name == "memmap" and any(mode in modes(node) for mode in ("r+", "w+")))
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"


def modes(call: ast.Call) -> list[str]:
    """Return the string literals among the arguments, since any of them may be the mode."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def opens_for_writing(call: ast.Call, owner: str, name: str) -> bool:
    """Return whether a call opens a file for writing; `h5py.File` without the mode "r" does."""
    if owner == "os" and name == "open":
        # Ignore the flags here: those that create files are found separately, and writing requires `os.write`.
        return False
    if name == "File" and not any(mode == "r" for mode in modes(call)):
        return True
    return any(re.fullmatch(r"[rwaxbt+]{1,3}", mode) and set(mode) & set("wax+") for mode in modes(call))


def test_only_one_module_changes_files():
    """A test with `strace` in tests/system checks the same for all verbs as they run."""
    assert len(list(changes((PACKAGE / "foundation" / "file_changes.py").read_text()))) >= 8
    for path in MODULES:
        if path != PACKAGE / "foundation" / "file_changes.py":
            scratch = SCRATCH.get(path.name, "\n")
            assert [place for place in changes(path.read_text()) if scratch not in place] == [], path


WRITING = (
    "open(path, 'w')",
    "open(path, mode='ab')",
    "path.open('x')",
    "io.open(path, 'r+b')",
    "os.fdopen(fd, 'wb')",
    "os.open(path, os.O_RDWR | os.O_CREAT)",
    "os.write(fd, data)",
    "os.replace(a, b)",
    "shutil.copyfile(a, b)",
    "from shutil import copyfile",
    "path.write_text('x')",
    "path.rename(other)",
    "path.replace(other)",
    "path.unlink()",
    "h5py.File(path, 'r+')",
    "h5py.File(path, mode)",
    "zipfile.ZipFile(path, 'w')",
    "archive.extractall(path)",
    "np.memmap(path, 'u1', 'r+')",
    "tempfile.mkdtemp()",
)
READING = (
    "open(path)",
    "open(fd, 'rb', buffering=0)",
    "path.open('rb')",
    "os.open(path, os.O_RDONLY | os.O_CLOEXEC)",
    "text.replace('a', 'b')",
    "dataclasses.replace(record)",
    "dataclasses.replace(record, name=1)",
    "file_changes.remove(path)",
    "h5py.File(path, 'r', locking=False)",
    "np.memmap(path, 'u1', 'r')",
    "zipfile.ZipFile(path)",
    "source.open(item)",
    "shutil.get_terminal_size()",
)


def test_changes_of_files_are_found_and_reading_is_allowed():
    assert [source for source in WRITING if not list(changes(source))] == []
    assert [source for source in READING if list(changes(source))] == []


class MLP:
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "an int"),
        ([], "a list"),
        (None, "None"),
        (np.zeros(2), "an ndarray"),
        (np.uint8(2), "a uint8"),
        (int, "the class int"),
        (MLP(), "an MLP"),
        (pytest, "a module"),
    ],
)
def test_the_type_of_a_value_has_its_article(value: object, text: str) -> None:
    assert kind_of(value) == text
