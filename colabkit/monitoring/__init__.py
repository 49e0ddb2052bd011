"""Monitoring: what training is waiting for, and what would fix it.

- `doctor`: `diagnose()` and `watch()` turn meters and telemetry into a verdict and advice.
  A new rule goes into `doctor.rules`.
- `panel`: `dashboard()` records, renders and shows the live panel.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
