"""Colab's image of 2026-08-19: versions and requirements of the packages that colabkit depends on.

Versions are from `googlecolab/backend-info` (`pip-freeze.txt`, `pip-freeze.gpu.txt`), requirements from the packages'
metadata. NVIDIA's CUDA wheels, which only torch requires, and the requirements of IPython and ipykernel are left out.
"""

from __future__ import annotations

import sys
import venv
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CPU", "GPU", "make_image"]

CPU: Mapping[str, str] = {
    "beautifulsoup4": "4.13.5",
    "certifi": "2026.7.22",
    "charset-normalizer": "3.4.9",
    "cloudpickle": "3.1.2",
    "filelock": "3.32.3",
    "fsspec": "2025.3.0",
    "gdown": "5.2.2",
    "h5py": "3.16.0",
    "idna": "3.18",
    "ipykernel": "6.17.1",
    "ipython": "7.34.0",
    "ipython-genutils": "0.2.0",
    "ipywidgets": "7.7.1",
    "jinja2": "3.1.6",
    "jupyterlab-widgets": "3.0.16",
    "lazy-loader": "0.5",
    "markupsafe": "3.0.3",
    "mpmath": "1.3.0",
    "networkx": "3.6.1",
    "numpy": "2.1.3",
    "packaging": "26.3",
    "pillow": "11.3.0",
    "psutil": "5.9.5",
    "pysocks": "1.7.1",
    "requests": "2.32.4",
    "setuptools": "75.2.0",
    "soupsieve": "2.9.2",
    "sympy": "1.14.0",
    "torch": "2.11.0+cpu",
    "torchvision": "0.26.0+cpu",
    "tqdm": "4.67.3",
    "traitlets": "5.7.1",
    "typing-extensions": "4.16.0",
    "urllib3": "2.5.0",
    "widgetsnbextension": "3.6.10",
}
GPU: Mapping[str, str] = {
    **CPU,
    "nvidia-ml-py": "13.610.43",
    "torch": "2.11.0+cu128",
    "torchvision": "0.26.0+cu128",
    "triton": "3.6.0",
}

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "beautifulsoup4": ("soupsieve>1.2", "typing-extensions>=4.0.0"),
    "gdown": ("beautifulsoup4", "filelock", "requests[socks]", "tqdm"),
    "h5py": ("numpy>=1.21.2",),
    "ipywidgets": (
        "ipykernel>=4.5.1",
        "ipython-genutils~=0.2.0",
        "traitlets>=4.3.1",
        "widgetsnbextension~=3.6.0",
        "ipython>=4.0.0",
        "jupyterlab-widgets>=1.0.0",
    ),
    "jinja2": ("MarkupSafe>=2.0",),
    "lazy-loader": ("packaging",),
    "requests": (
        "charset_normalizer<4,>=2",
        "idna<4,>=2.5",
        "urllib3<3,>=1.21.1",
        "certifi>=2017.4.17",
        'PySocks!=1.5.7,>=1.5.6; extra == "socks"',
    ),
    "sympy": ("mpmath<1.4,>=1.1.0",),
    "torch": (
        "filelock",
        "typing-extensions>=4.10.0",
        "setuptools<82",
        "sympy>=1.13.3",
        "networkx>=2.5.1",
        "jinja2",
        "fsspec>=0.8.5",
    ),
    "torchvision": ("numpy", "torch==2.11.0", "pillow!=8.3.*,>=5.3.0"),
}


def make_image(folder: Path, versions: Mapping[str, str]) -> Path:
    """Create a virtual environment in which pip sees the given packages, although only their metadata exists.

    Returns:
        Path of the environment's interpreter.
    """
    venv.create(folder, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name, number in versions.items():
        info = folder / "lib" / version / "site-packages" / f"{name.replace('-', '_')}-{number}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {need}\n" for need in _NEEDS.get(name, ()))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n{needs}")
        (info / "INSTALLER").write_text("pip\n")
        files = [f"{info.name}/{file},," for file in ("METADATA", "INSTALLER", "RECORD")]
        (info / "RECORD").write_text("\n".join(files) + "\n")
    return folder / "bin" / "python"
