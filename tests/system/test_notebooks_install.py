"""The first cells of a notebook install colabkit from a wheel, an address, or the repository around the notebook."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import nbformat
import pytest
from notebook_files import FOLDER
from notebook_runs import kernel, with_parameters
from trees import needs

ROOT = FOLDER.parent
BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
WHERE = "import colabkit\n\ncolabkit.__file__"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all packages of this environment except colabkit."""
    folder = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("colabkit", "__editable__")) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def python(tmp_path: Path, packages: Path) -> Path:
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "beside.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("repository") / "tree"
    shutil.copytree(ROOT / "colabkit", copy / "colabkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(FOLDER, copy / "notebooks")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    needs("setuptools from PyPI", done.returncode == 0)
    (found,) = folder.glob("colabkit-*.whl")
    return found


def installed(python: Path, folder: Path, work: Path, install_from: str) -> tuple[str, str]:
    """Run the first cells; return the installation's output and the path of the installed colabkit."""
    notebook = with_parameters("colabkit_template", INSTALL_FROM=install_from)
    last = [cell.id for cell in notebook.cells].index("install")
    notebook.cells = [*notebook.cells[: last + 1], nbformat.v4.new_code_cell(WHERE, id="where")]
    with kernel(folder, str(python), search=(), work=work) as started:
        ran = started.run(notebook)
    return ran.text("install"), ran.text("where")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["wheel", "address", "repository"])
def test_notebooks_install_colabkit(kind: str, python: Path, wheel: Path, tree: Path, tmp_path: Path) -> None:
    given = {"wheel": str(wheel), "address": wheel.as_uri(), "repository": ""}[kind]
    work = tree / "notebooks" if kind == "repository" else tmp_path
    output, where = installed(python, tmp_path / "kernel", work, given)
    assert "ERROR" not in output
    assert str(python.parent.parent) in where
    names = {path.name for path in python.parent.parent.glob("lib/*/site-packages/*")}
    (info,) = [name for name in names if name.endswith(".dist-info")]
    assert info.startswith("colabkit-"), "nothing else was installed"
