"""The template is written with a wheel inside, which its own cells verify and pip can install."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from notebook_files import FOLDER, PACKAGED
from trees import leftovers

import colabkit
from colabkit.errors import InvalidOption, MissingPackage, TargetExists

PACKAGE = Path(colabkit.__file__).parent
INFO = f"colabkit-{colabkit.__version__}.dist-info"


class CannotInstall(Exception):
    """A stand-in for the error class that the cell after the wheel's cell defines."""


def run_wheel_cell(notebook: Path, *replaced: str) -> dict[str, Any]:
    """Run the cell that holds the wheel, after replacing some text in it; return its variables."""
    (cell,) = [cell for cell in nbformat.read(notebook, 4).cells if cell.id == "wheel"]
    variables: dict[str, Any] = {"CannotInstall": CannotInstall}
    exec(cell.source.replace(*replaced) if replaced else cell.source, variables)
    return variables


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> colabkit.TemplateReport:
    return colabkit.write_template(to=tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module")
def wheel(written: colabkit.TemplateReport) -> zipfile.ZipFile:
    return zipfile.ZipFile(run_wheel_cell(written.path)["unpack_wheel"]())


def test_the_notebook_is_the_template_with_one_more_cell(written: colabkit.TemplateReport) -> None:
    notebook = nbformat.read(written.path, 4)
    nbformat.validate(notebook)
    names = [cell.id for cell in notebook.cells]
    assert names.index("wheel") + 1 == names.index("install")
    notebook.cells = [cell for cell in notebook.cells if cell.id != "wheel"]
    assert notebook == nbformat.read(FOLDER / "colabkit_template.ipynb", 4)


def test_the_report_states_size_wheel_and_checksum(written: colabkit.TemplateReport) -> None:
    cell = run_wheel_cell(written.path)
    wheel = Path(cell["unpack_wheel"]())
    assert written.file_bytes == written.path.stat().st_size < 1 << 20
    assert written.wheel == wheel.name == f"colabkit-{colabkit.__version__}-py3-none-any.whl"
    assert written.sha256 == cell["WHEEL_SHA256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert written.wheel in repr(written)
    assert written.sha256 in written._repr_html_()


def test_the_wheel_in_the_notebook_is_preferred_to_a_wheel_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1, stderr="ERROR: it is a test")

    (tmp_path / "colabkit-0.0.1-py3-none-any.whl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", run)
    (cell,) = [cell for cell in nbformat.read(PACKAGED, 4).cells if cell.id == "install"]
    code = cell.source.replace("%load_ext colabkit", "")
    with pytest.raises(Exception, match="it is a test"):
        exec(code, {"INSTALL_FROM": "", "unpack_wheel": lambda: "inside.whl"})
    assert [command[-1] for command in commands] == ["inside.whl"]


@pytest.mark.parametrize(
    "damage",
    [("WHEEL = '''\n", "WHEEL = '''\nAAAA"), ("WHEEL = '''\n/T", "WHEEL = '''\n"), ('_SHA256 = "', '_SHA256 = "0')],
)
def test_a_damaged_wheel_is_not_installed(written: colabkit.TemplateReport, damage: tuple[str, str]) -> None:
    cell = run_wheel_cell(written.path, *damage)
    with pytest.raises(CannotInstall, match=r"the wheel in this notebook is damaged\. Upload the notebook again\."):
        cell["unpack_wheel"]()


def test_the_wheel_contains_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {f"colabkit/{path.relative_to(PACKAGE)}": path.read_bytes() for path in files}
    assert {name: wheel.read(name) for name in wheel.namelist() if not name.startswith(INFO)} == expected


def test_the_wheel_has_the_requirements_command_and_license_of_the_installed_package(wheel: zipfile.ZipFile) -> None:
    installed = distribution("colabkit")
    metadata = wheel.read(f"{INFO}/METADATA").decode()
    assert [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")] == [
        f"Requires-Dist: {one}" for one in installed.requires or ()
    ]
    assert "colabkit = colabkit.notebook.command_line:main" in wheel.read(f"{INFO}/entry_points.txt").decode()
    assert b"MIT License" in wheel.read(f"{INFO}/licenses/LICENSE")


def test_the_record_has_size_and_digest_of_each_file(wheel: zipfile.ZipFile) -> None:
    rows = {
        name: (digest, size) for name, digest, size in csv.reader(io.StringIO(wheel.read(f"{INFO}/RECORD").decode()))
    }
    assert rows.pop(f"{INFO}/RECORD") == ("", "")
    for name, (digest, size) in rows.items():
        data = wheel.read(name)
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={expected}", len(data))
    assert {*rows, f"{INFO}/RECORD"} == {*wheel.namelist()}


@pytest.mark.full
def test_the_same_package_gives_the_same_bytes(written: colabkit.TemplateReport, tmp_path: Path) -> None:
    again = colabkit.write_template(to=tmp_path / "again.ipynb")
    assert again.path.read_bytes() == written.path.read_bytes()


@pytest.mark.full
def test_pip_installs_the_wheel_without_a_network(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    done = subprocess.run([*command, str(wheel.filename)], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "colabkit" / "__init__.py").read_bytes() == (PACKAGE / "__init__.py").read_bytes()
    assert (tmp_path / "bin" / "colabkit").exists()


@pytest.mark.full
def test_an_existing_file_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "mine.ipynb"
    path.write_text("mine")
    with pytest.raises(TargetExists, match=r"'.*mine\.ipynb' already exists\. Use overwrite=True to replace it"):
        colabkit.write_template(path)
    assert path.read_text() == "mine"
    assert colabkit.write_template(path, overwrite=True).path == path
    nbformat.validate(nbformat.read(path, 4))
    assert leftovers(tmp_path) == []


@pytest.mark.full
def test_a_folder_gets_a_notebook_and_other_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOption, match=r"expected the path of a notebook or an existing folder"):
        colabkit.write_template(tmp_path / "template.py")
    monkeypatch.chdir(tmp_path)
    assert colabkit.write_template().path == Path("colabkit_template.ipynb")
    assert [path.name for path in tmp_path.iterdir()] == ["colabkit_template.ipynb"]


def test_another_installed_version_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colabkit, "__version__", "99.0")
    with pytest.raises(MissingPackage, match=r"the installed version is .*, but the imported one is 99\.0"):
        colabkit.write_template(tmp_path)
    assert list(tmp_path.iterdir()) == []
