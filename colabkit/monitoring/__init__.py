"""Monitoring: find the bottleneck of a training run and suggest fixes.

- `attaching`: `status()` shows runs in other processes and on other machines.
- `diagnosing`: `doctor()` and `watch()` turn meters and telemetry into a verdict and advice.
- `panel`: `dashboard()` records a run and shows it live, as HTML or text.
- `trackers`: `log_to()` logs a run to TensorBoard, W&B or MLflow.

To add a doctor rule, write a function in the module of `diagnosing` whose name ends in `_rules` and fits best, and list
it in `diagnosing/rules.py`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
