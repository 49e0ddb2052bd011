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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from colabkit import augment, errors
    from colabkit.dataset import Pack, PackedDataset, open_pack
    from colabkit.demonstration import DemoReport, demo
    from colabkit.environment import RuntimeReport, runtime
    from colabkit.loader import Loader
    from colabkit.packing import PackReport, VerifyReport, pack, verify
    from colabkit.panel import dashboard
    from colabkit.staging import StageReport, UnstageReport, stage, unstage
    from colabkit.training import TrainReport, supervised_step, train

__version__ = "0.1.0"

_HOMES = {
    "DemoReport": "demonstration",
    "Loader": "loader",
    "Pack": "dataset",
    "PackReport": "packing",
    "PackedDataset": "dataset",
    "RuntimeReport": "environment",
    "StageReport": "staging",
    "TrainReport": "training",
    "UnstageReport": "staging",
    "VerifyReport": "packing",
    "dashboard": "panel",
    "demo": "demonstration",
    "open_pack": "dataset",
    "pack": "packing",
    "runtime": "environment",
    "stage": "staging",
    "supervised_step": "training",
    "train": "training",
    "unstage": "staging",
    "verify": "packing",
}

__all__ = [
    "DemoReport",
    "Loader",
    "Pack",
    "PackReport",
    "PackedDataset",
    "RuntimeReport",
    "StageReport",
    "TrainReport",
    "UnstageReport",
    "VerifyReport",
    "augment",
    "dashboard",
    "demo",
    "errors",
    "open_pack",
    "pack",
    "runtime",
    "stage",
    "supervised_step",
    "train",
    "unstage",
    "verify",
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
    """Take the magics away again; called by `%unload_ext colabkit`."""
    from colabkit.magics import unload

    unload(shell)
