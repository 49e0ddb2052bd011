"""The docstrings of public functions and classes have one example each, and all examples run as written."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import IPython
import pytest
import trustme
from fake_drive import DriveFile, fake_drive, installed
from far_mounts import has_fuse
from far_side import hosted_colab
from magic_shells import loaded_shell
from trees import needs

import colabkit
from colabkit.foundation import Report

NAMESPACES = (colabkit, colabkit.augment, colabkit.sampler)
SHARED_ID = "1AbCdEfGhIjKlMnOpQrStUvWxYz012345"
LONGEST = 8
"""Maximum number of lines of an example."""


def needs_example(thing: object) -> bool:
    """Return whether a public name needs an example: reports and errors do not, because users only receive them."""
    is_received = inspect.isclass(thing) and issubclass(thing, (Report, BaseException))
    return not isinstance(thing, ModuleType) and callable(thing) and not is_received


PUBLIC = {
    f"{namespace.__name__}.{name}": thing
    for namespace in NAMESPACES
    for name in namespace.__all__
    if needs_example(thing := getattr(namespace, name))
}


def documentation(name: str) -> str:
    return inspect.cleandoc(PUBLIC[name].__doc__ or "")


@pytest.fixture
def hosted_drive(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    needs("FUSE", has_fuse())
    with hosted_colab(tmp_path_factory.mktemp("colab"), monkeypatch):
        yield


@pytest.fixture
def shared_file(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Share `birds.zip` on a fake Drive, which gdown uses instead of the real one."""
    gdown = installed("gdown>=6", pytestconfig)
    with fake_drive(trustme.CA(), gdown, tmp_path_factory.mktemp("home"), monkeypatch) as drive:
        drive.files[SHARED_ID] = DriveFile("birds.zip", b"birds" * 1000)
        yield


@pytest.fixture
def shell() -> Iterator[None]:
    with loaded_shell() as shell:
        shell.extension_manager.unload_extension("colabkit")
        yield
        colabkit.unload_ipython_extension(shell)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object(), execution_count=1))
    monkeypatch.setattr(IPython.display, "display", lambda *_, **__: None)


FIXTURES = {
    "colabkit.clear_cache": "hosted_drive",
    "colabkit.Launcher": "notebook",
    "colabkit.fetch": "shared_file",
    "colabkit.flush": "hosted_drive",
    "colabkit.load_ipython_extension": "shell",
    "colabkit.mount": "hosted_drive",
    "colabkit.launch": "notebook",
    "colabkit.unload_ipython_extension": "shell",
    "colabkit.unmount": "hosted_drive",
}
"""Fixtures that provide the services needed by examples."""


def test_every_public_function_and_class_ends_with_one_short_example() -> None:
    wrong = {}
    for name in PUBLIC:
        sections = re.findall(r"^([A-Z]\w+):$", documentation(name), re.MULTILINE)
        lines = documentation(name).partition("\nExample:\n")[2].splitlines()
        if sections.count("Example") != 1 or sections[-1] != "Example":
            wrong[name] = f"expected one section Example, as the last; found {sections}"
        elif not 2 <= len(lines) <= LONGEST or not lines[0].startswith("    >>> "):
            wrong[name] = f"expected 2 to {LONGEST} lines that start with a prompt; found {lines}"
    assert wrong == {}
    assert set(FIXTURES) <= set(PUBLIC)


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", PUBLIC)
def test_example_runs_as_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name in FIXTURES:
        request.getfixturevalue(FIXTURES[name])
    monkeypatch.chdir(tmp_path)
    # Functions in `__main__` are pickled by value, as in a notebook.
    variables = {"__name__": "__main__"}
    example = doctest.DocTestParser().get_doctest(documentation(name), variables, name, None, None)
    output: list[str] = []
    assert example.examples
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=output.append)
    assert not output, "".join(output)
