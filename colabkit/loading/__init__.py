"""Loading: from the order of an epoch to batches on the device.

- `sampler`: orders of an epoch as pure functions of seed, epoch and position.
- `augment`: transforms of whole batches, random by seed, epoch and position.
- `loader`: `Loader` splits an order into batches, gathers or decodes them, and moves them to the device.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
