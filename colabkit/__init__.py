"""colabkit: data near, packed and prefetched, for training in hosted notebooks.

The shortest way from far files to a training loop:

```python
import colabkit

near = colabkit.stage("/content/drive/MyDrive/birds")
packed = colabkit.pack(near.path, "birds.h5", size=128)
loader = colabkit.Loader(colabkit.open_pack(packed.path)["train"], batch_size=64, shuffle=True)
for images, labels in loader: ...
```

Names are loaded on first use: importing colabkit imports nothing heavy and has no effect.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from colabkit import augment, errors, sampler
    from colabkit.dataset import FileDataset, Pack, PackedDataset, open_pack
    from colabkit.demonstration import DemoReport, demo
    from colabkit.doctor import Advice, Diagnosis
    from colabkit.doctor.asking import diagnose
    from colabkit.doctor.watching import watch
    from colabkit.drive import (
        CacheReport,
        FlushReport,
        MountReport,
        UnmountReport,
        clear_cache,
        flush,
        mount,
        unmount,
    )
    from colabkit.environment import RuntimeReport, runtime
    from colabkit.fetching import FetchReport, fetch
    from colabkit.launcher import open_launcher
    from colabkit.loader import Loader
    from colabkit.packing import PackReport, VerifyReport, pack, verify
    from colabkit.panel import dashboard
    from colabkit.preparing import PreparedPack, PrepareReport, prepare
    from colabkit.probing import ProbeReport, read_probe
    from colabkit.staging import PublishReport, StagePlan, StageReport, UnstageReport, publish, stage, unstage
    from colabkit.training import (
        HeadspaceReport,
        KFoldReport,
        TrainingInterrupted,
        TrainReport,
        headspace,
        k_fold,
        notebook_launch,
        small_network,
        supervised_step,
        train,
    )

__version__ = "0.1.0"

_HOMES = {
    "Advice": "doctor",
    "CacheReport": "drive",
    "DemoReport": "demonstration",
    "Diagnosis": "doctor",
    "FetchReport": "fetching",
    "FileDataset": "dataset",
    "FlushReport": "drive",
    "HeadspaceReport": "training",
    "KFoldReport": "training",
    "Loader": "loader",
    "MountReport": "drive",
    "Pack": "dataset",
    "PackReport": "packing",
    "PackedDataset": "dataset",
    "PrepareReport": "preparing",
    "PreparedPack": "preparing",
    "ProbeReport": "probing",
    "PublishReport": "staging",
    "RuntimeReport": "environment",
    "StagePlan": "staging",
    "StageReport": "staging",
    "TrainReport": "training",
    "TrainingInterrupted": "training",
    "UnmountReport": "drive",
    "UnstageReport": "staging",
    "VerifyReport": "packing",
    "clear_cache": "drive",
    "dashboard": "panel",
    "demo": "demonstration",
    "diagnose": "doctor.asking",
    "fetch": "fetching",
    "flush": "drive",
    "headspace": "training",
    "k_fold": "training",
    "mount": "drive",
    "notebook_launch": "training",
    "open_launcher": "launcher",
    "open_pack": "dataset",
    "pack": "packing",
    "prepare": "preparing",
    "publish": "staging",
    "read_probe": "probing",
    "runtime": "environment",
    "small_network": "training",
    "stage": "staging",
    "supervised_step": "training",
    "train": "training",
    "unmount": "drive",
    "unstage": "staging",
    "verify": "packing",
    "watch": "doctor.watching",
}

__all__ = [
    "Advice",
    "CacheReport",
    "DemoReport",
    "Diagnosis",
    "FetchReport",
    "FileDataset",
    "FlushReport",
    "HeadspaceReport",
    "KFoldReport",
    "Loader",
    "MountReport",
    "Pack",
    "PackReport",
    "PackedDataset",
    "PrepareReport",
    "PreparedPack",
    "ProbeReport",
    "PublishReport",
    "RuntimeReport",
    "StagePlan",
    "StageReport",
    "TrainReport",
    "TrainingInterrupted",
    "UnmountReport",
    "UnstageReport",
    "VerifyReport",
    "augment",
    "clear_cache",
    "dashboard",
    "demo",
    "diagnose",
    "errors",
    "fetch",
    "flush",
    "headspace",
    "k_fold",
    "mount",
    "notebook_launch",
    "open_launcher",
    "open_pack",
    "pack",
    "prepare",
    "publish",
    "read_probe",
    "runtime",
    "sampler",
    "small_network",
    "stage",
    "supervised_step",
    "train",
    "unmount",
    "unstage",
    "verify",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"colabkit.{_HOMES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"colabkit.{name}")
    raise AttributeError(f"module 'colabkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Make the magics known to IPython, and show the panel beside `train()`; called by `%load_ext colabkit`."""
    from colabkit.magics import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the magics and the launcher away again; called by `%unload_ext colabkit`."""
    from colabkit.magics import unload

    unload(shell)
    if (launcher := sys.modules.get("colabkit.launcher")) is not None:
        launcher.close_launchers()
