"""`pip install .` in Colab replaces no installed packages and adds only the necessary ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from colab_image import CPU, GPU, make_image
from trees import needs

ROOT = Path(__file__).parents[2]
# Packages that Colab's images do not include.
ALWAYS_NEW = {"colabkit", "simplejpeg"}
DEADLINE_S = 200


def pip(python: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", str(python), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def would_install(python: Path, tree: Path) -> dict[str, str]:
    """Return the names and versions of the packages that pip would install in an environment for a source tree."""
    report = tree.parent / "report.json"
    done = pip(python, "install", "--quiet", "--dry-run", "--report", report, tree)
    assert done.returncode == 0, done.stderr
    found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {item["name"].lower().replace("_", "-"): item["version"] for item in found}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return interpreters of environments with the versions of Colab's images."""
    folder = tmp_path_factory.mktemp("images")
    made = {"cpu": make_image(folder / "cpu", CPU), "gpu": make_image(folder / "gpu", GPU)}
    done = pip(made["cpu"], "install", "--quiet", "--dry-run", "--no-deps", "simplejpeg")
    needs("PyPI", done.returncode == 0)
    return made


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the files that pip needs to build the package."""
    copy = tmp_path / "tree"
    shutil.copytree(ROOT / "colabkit", copy / "colabkit", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.mark.full
@pytest.mark.parametrize(("image", "versions"), [("cpu", CPU), ("gpu", GPU)])
def test_pip_sees_colabs_versions_without_conflicts(
    images: dict[str, Path], image: str, versions: Mapping[str, str]
) -> None:
    found = {item["name"]: item["version"] for item in json.loads(pip(images[image], "list", "--format=json").stdout)}
    assert found == versions
    assert pip(images[image], "check").returncode == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("image", "new"),
    [("cpu", {*ALWAYS_NEW, "nvidia-ml-py"}), pytest.param("gpu", ALWAYS_NEW, marks=pytest.mark.full)],
)
def test_installing_in_colab_changes_none_of_its_packages(
    images: dict[str, Path], tree: Path, image: str, new: set[str]
) -> None:
    assert set(would_install(images[image], tree)) == new


@pytest.mark.full
@pytest.mark.parametrize(
    ("bound", "raised"),
    [("psutil>=5.9", "psutil>=5.9.6"), ("numpy>=1.26", "numpy>=2.2"), ("pillow>=10.1", "pillow<11.3")],
)
def test_a_bound_above_colabs_version_is_detected(images: dict[str, Path], tree: Path, bound: str, raised: str) -> None:
    setup = (tree / "setup.py").read_text()
    assert f'"{bound}"' in setup
    (tree / "setup.py").write_text(setup.replace(f'"{bound}"', f'"{raised}"'))
    name = raised.partition(">")[0].partition("<")[0]
    found = would_install(images["gpu"], tree)
    assert set(found) == {*ALWAYS_NEW, name}
    assert found[name] != GPU[name]
