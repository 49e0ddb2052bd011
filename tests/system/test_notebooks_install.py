"""Notebooks install colabkit from the nearest place that has it; the self-contained template needs no other file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import nbformat
import pytest
from kernels import KINDS, link_packages, make_environment, python_of
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from notebook_files import FOLDER, TEMPLATE, cell_named, read
from notebook_runs import kernel, with_parameters

import colabkit

ROOT = FOLDER.parent
BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
WHERE = "import colabkit\n\ncolabkit.__file__"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_packages(sysconfig.get_path("purelib"), tmp_path_factory.mktemp("packages") / "own")


@pytest.fixture
def python(tmp_path: Path, packages: Path) -> Path:
    """Return the interpreter of an environment like this one, but without colabkit."""
    return make_environment(tmp_path / "environment", packages)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("repository") / "tree"
    shutil.copytree(ROOT / "colabkit", copy / "colabkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(FOLDER, copy / "notebooks")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colabkit.write_template(tmp_path_factory.mktemp("alone")).path


@pytest.fixture(scope="module")
def wheel(alone: Path) -> Path:
    variables: dict[str, object] = {}
    exec(cell_named(read(alone), "wheel").source, variables)
    unpack = variables["unpack_wheel"]
    assert callable(unpack)
    return Path(unpack())


def first_cells(notebook: NotebookNode, content: Path) -> NotebookNode:
    """Return the cells up to the install cell, with `content` in place of `/content`, and one that shows the result."""
    last = [cell.id for cell in notebook.cells].index("install")
    notebook.cells = [*notebook.cells[: last + 1], nbformat.v4.new_code_cell(WHERE, id="where")]
    notebook.cells[last].source = notebook.cells[last].source.replace('"/content', f'"{content}')
    return notebook


def add_unrelated_colabkit(python: Path) -> None:
    (site,) = python.parent.parent.glob("lib/*/site-packages")
    (site / "colabkit").mkdir()
    (site / "colabkit" / "__init__.py").write_text("raise RuntimeError('the unrelated package was imported')\n")
    info = site / "colabkit-9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: colabkit\nVersion: 9.0\n")
    (info / "INSTALLER").write_text("pip\n")
    names = ["colabkit/__init__.py", *(f"{info.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD"))]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))


@pytest.mark.full
@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["beside", "content", "drive", "unrelated", "path", "address", "repository"])
def test_notebooks_install_colabkit(kind: str, python: Path, wheel: Path, tree: Path, tmp_path: Path) -> None:
    content = tmp_path / "content"
    folders = {"beside": "work", "unrelated": "work", "content": "content", "drive": "content/drive/MyDrive/colabkit"}
    if kind in folders:
        (tmp_path / folders[kind]).mkdir(parents=True)
        shutil.copy(wheel, tmp_path / folders[kind])
    if kind == "unrelated":
        add_unrelated_colabkit(python)
    notebook = with_parameters(
        "colabkit_template", INSTALL_FROM={"path": str(wheel), "address": wheel.as_uri()}.get(kind, "")
    )
    work = tree / "notebooks" if kind == "repository" else tmp_path / "work"
    with kernel(tmp_path / "kernel", str(python), search=(), work=work) as started:
        ran = started.run(first_cells(notebook, content))
    assert ran.text("install").startswith("Installing colabkit from ")
    assert str(python.parent.parent) in ran.text("where")
    names = {path.name for path in python.parent.parent.glob("lib/*/site-packages/*")}
    (info,) = [name for name in names if name.endswith(".dist-info")]
    assert info == f"colabkit-{colabkit.__version__}.dist-info", "nothing else was installed"


@pytest.mark.full
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("install_from", "message"),
    [
        (
            "",
            r"there is no wheel in this folder, .+\. Upload colabkit-\*\.whl .+ in INSTALL_FROM, then run all cells\.",
        ),
        ("no-such-folder/a-1-py3-none-any.whl", r"pip failed \(.*a-1-py3.*\)\. Check the internet .+"),
    ],
)
def test_a_notebook_without_colabkit_says_in_one_line_what_to_do(
    install_from: str, message: str, python: Path, tmp_path: Path
) -> None:
    notebook = with_parameters("colabkit_template", INSTALL_FROM=install_from)
    with kernel(tmp_path / "kernel", str(python), search=()) as started, pytest.raises(CellExecutionError):
        started.run(first_cells(notebook, tmp_path / "content"))
    (error,) = [one for one in cell_named(notebook, "install").outputs if one.output_type == "error"]
    (line,) = error.traceback
    assert re.fullmatch(f"Cannot install colabkit: {message}", line)


@pytest.mark.full
@pytest.mark.every_case
@pytest.mark.parametrize("kind", KINDS)
def test_the_self_contained_template_alone_trains_in_an_environment_without_colabkit(
    kind: str, alone: Path, packages: Path, tmp_path: Path
) -> None:
    first = []
    if kind == "colab":
        path_of = "import sysconfig; print(sysconfig.get_path('purelib'))"
        purelib = subprocess.run([python_of(kind), "-c", path_of], capture_output=True, text=True, check=True).stdout
        first = [link_packages(purelib.strip(), tmp_path / "colabs")]
    python = make_environment(tmp_path / "environment", *first, packages)
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(alone, work)
    notebook = read(work / alone.name)
    settings = cell_named(notebook, "settings")
    settings.source = settings.source.replace('EPOCHS = "auto"', 'EPOCHS = "5"')
    with kernel(tmp_path / "kernel", str(python), search=(), work=work) as started:
        ran = started.run(notebook)
    assert ran.text("install") == f"Installing colabkit from {re.search(r'/.*whl', ran.text('install'))[0]}\n"
    found = re.search(r"([\d.]+)% of 359 held-out images", ran.text("train"))
    assert found
    assert float(found[1]) >= 95
    report = ran.data("train", "text/html")[-1]
    assert report.count("src='data:image/png;base64,") >= 8
    assert "Confusion matrix" in report
    assert ran.data("launcher", "application/vnd.jupyter.widget-view+json")
    assert [path.name for path in work.rglob("model.pt")] == ["model.pt"]
    assert not re.search(r"Traceback|Warning|failed", ran.text())


@pytest.mark.full
def test_an_installed_colabkit_writes_the_same_template(python: Path, alone: Path, wheel: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": ""}
    for command in (["-m", "pip", "install", "--quiet", str(wheel)], ["-m", "colabkit", "write_template"]):
        done = subprocess.run(
            [str(python), *command], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / TEMPLATE.name).read_bytes() == alone.read_bytes()
