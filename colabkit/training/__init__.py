"""Training: the loop around a loader that survives a disconnect.

- `trainer`, `run`, `report`, `plot`: `train()`, one run of it, the report that it returns, and its figure.
- `schedule`, `records`: what comes between two steps, and the numbers that are kept of them.
- `checkpoints`, `run_checkpoints`: snapshots written in the background, sealed, published, loaded; what a run saves.
- `steps`, `models`: `supervised_step()`, the usual step, and what it does to a model.
- `ceiling`, `folds`, `ranks`: `headspace()`, `k_fold()` and `notebook_launch()`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
