"""Loading: from the order of an epoch to batches on the device.

- `sampler`: orders of an epoch as pure functions of seed, epoch and position.
- `augment`: transforms of whole batches, random by seed, epoch and position.
- `loader`, `inspection`: `Loader` yields batches on the device, in an order that can be resumed, and describes itself.
- `engine`: what builds them: plans of an epoch, gather, decoding, threads, worker processes, copies to a GPU.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
