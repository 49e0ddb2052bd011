"""Load batches onto the device, in a resumable order.

- `sampler`: the sample order of an epoch, a pure function of seed, epoch and position.
- `augment`: transforms of whole batches, whose randomness depends only on seed, epoch and position.
- `loader`: the public class `Loader`, which yields batches.
- `dataloader`: a torch `DataLoader` over a `Loader`, for frameworks that require a `DataLoader`.
- `keras_batches`: a Keras `PyDataset` over a `Loader`.
- `simulation`: `simulate()`, which predicts the epochs over a remote pack.
- `inspection`: names, paths, sample counts and sizes of any dataset, loader or batch.
- `engine`: the implementation: batch plans, row gathering, image decoding, threads, worker processes and GPU copies.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
