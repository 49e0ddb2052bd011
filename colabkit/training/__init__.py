"""Training: the loop around a loader that survives a disconnect.

- `api`, `run`, `report`: `train()`, one run, and the report it returns.
- `steps`: `supervised_step()`, the usual step of a model.
- `ceiling`: `headspace()`, what a step could reach without waiting for data.
- `folds`, `launch`: `k_fold()` and `notebook_launch()`.
- `checkpoints`: snapshots written in the background, sealed, published and loaded again.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
