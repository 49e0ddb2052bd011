"""Package metadata. Requirements are lower bounds only, so that installing replaces no package of a hosted notebook."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "colabkit/__init__.py").read_text(encoding="utf-8"), re.MULTILINE
)

# The owner sets these here and in CITATION.cff; no other file contains them.
AUTHOR = "The colabkit authors"
AUTHOR_EMAIL = None
PROJECT_URLS: dict[str, str] = {}

setup(
    name="colabkit",
    author=AUTHOR,
    author_email=AUTHOR_EMAIL,
    project_urls=PROJECT_URLS,
    version=VERSION[1] if VERSION else None,
    description="Local, packed and prefetched data for training in Colab and Jupyter notebooks",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["colabkit", "colabkit.*"]),
    package_data={"colabkit": ["py.typed", "**/*.pyi", "notebook/template.ipynb", "storage/samples/*.zip"]},
    python_requires=">=3.11",
    install_requires=[
        "cloudpickle>=2.2",
        "gdown>=5.2",
        "h5py>=3.8",
        "ipywidgets>=7.7",
        "lazy-loader>=0.3",
        "numpy>=1.26",
        "nvidia-ml-py>=12.535.108",
        "pillow>=10.1",
        "psutil>=5.9",
        "simplejpeg>=1.7",
        "torch>=2.6",
        "torchvision>=0.21",
    ],
    extras_require={
        "test": [
            "fsspec>=2024.2",
            "google-crc32c>=1.5",
            "hypothesis>=6.100",
            "ipykernel>=6.17",
            "ipython>=7.34",
            "lmdb>=1.4",
            "matplotlib>=3.7",
            "mfusepy>=3.1",
            "nbclient>=0.7",
            "nbformat>=5.4",
            "pandas>=2.1",
            "protobuf>=4.25",
            "pyarrow>=14",
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "scikit-learn>=1.3",
            "tfrecord>=1.14",
            "torchcodec>=0.16",
            "trustme>=1.1",
            "types-psutil==7.2.2.20261111",
            "webdataset>=0.2.86",
            "zstandard>=0.22",
            'backports.zstd>=1.0; python_version < "3.14"',
        ],
        # Pinned: a new version of a linter reports new problems.
        "dev": [
            "mypy==2.4.1",
            "pre-commit>=4.0",
            "ruff==0.17.5",
            "types-psutil==7.2.2.20261111",
        ],
        # Only `pytest --full` and the pictures in README need a browser.
        "browser": ["jupyterlab>=4", "playwright>=1.40"],
        "cluster": ["distributed>=2024.1"],
        # The documentation: `mkdocs serve`.
        "docs": ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.29"],
        "fetch": ["fsspec>=2024.2"],
        # Only `pytest --full` tests the loader and packing with these packages.
        "integrations": [
            "accelerate>=1.0",
            "distributed>=2024.1",
            "flask>=3.0",
            "flask-cors>=4.0",
            "ipyparallel>=8.6",
            "keras>=3.3",
            "kornia>=0.7",
            "lightning>=2.4",
            "marimo>=0.20",
            "moto>=5.0",
            "polars>=1.0",
            "pytorch-ignite>=0.5",
            "ray>=2.9",
            "s3fs>=2024.2",
            "skorch>=1.1",
            "transformers>=4.46",
        ],
        "manifest": ["pandas>=2.1", "pyarrow>=14"],
        # The packages that benchmarks compare with, pinned for comparable results; tests/benchmarks/install_peers.sh
        # installs them, and FFCV.
        "peers": [
            "datasets==5.0.1",
            "huggingface-hub==0.36.2",
            "litdata==0.2.76",
            "mosaicml-streaming==0.13.0",
            "numba==0.68.1",
            "nvidia-dali-cuda120==2.4.0",
            "opencv-python-headless==5.0.0.93",
            "spdl==0.8.0",
            "torch==2.15.0",
            "torchvision==0.29.2",
            "webdataset==1.0.2",
        ],
        "plot": ["matplotlib>=3.7"],
        "ray": ["ray>=2.9"],
        "records": ["google-crc32c>=1.5", "lmdb>=1.4", "protobuf>=4.25"],
    },
    entry_points={"console_scripts": ["colabkit = colabkit.notebook.command_line:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Framework :: IPython",
        "Framework :: Jupyter",
        "License :: OSI Approved :: MIT License",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
