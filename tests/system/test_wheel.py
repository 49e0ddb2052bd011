"""The wheel contains every module and the samples, and `samples:digits` contains all digits."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from colabkit.packs import decode_image
from colabkit.storage import sample_archive

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__")
    # Build in a copy, because building in place would leave files behind.
    shutil.copytree(ROOT / "colabkit", folder / "colabkit", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("colabkit-*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.full
def test_the_wheel_contains_every_module_and_the_samples(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT)) for path in (ROOT / "colabkit").rglob("*.py*") if path.suffix in (".py", ".pyi")
    }
    assert names == sources | {
        "colabkit/py.typed",
        "colabkit/notebook/template.ipynb",
        "colabkit/storage/samples/digits.zip",
    }


@pytest.mark.full
def test_the_wheel_has_the_command_and_only_lower_bounds(wheel: zipfile.ZipFile) -> None:
    info = {name.rpartition("/")[2]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "colabkit = colabkit.notebook.command_line:main" in info["entry_points.txt"]
    lines = info["METADATA"].splitlines()
    required = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert required
    assert not [line for line in required if re.search("<|==|~=|!=", line)]


def test_the_samples_are_the_digits_with_one_folder_for_each_class() -> None:
    with zipfile.ZipFile(sample_archive("digits")) as archive:
        names = archive.namelist()
        counts = Counter(name.split("/")[1] for name in names)
        assert counts == dict(zip("0123456789", [178, 182, 177, 183, 181, 182, 181, 179, 174, 180], strict=True))
        shapes = {decode_image(archive.read(name), channels=1).shape for name in names}
    assert shapes == {(8, 8, 1)}
