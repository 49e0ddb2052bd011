"""Packs: images in and out of sealed HDF5 files.

- `decode`: image files to uint8 arrays and back.
- `labels`: labels and splits from folders, columns and functions.
- `format`: layout, seal and checks of a pack.
- `packing`: `pack()` and `verify()`.
- `dataset`: `open_pack()`, `PackedDataset`, `FileDataset` and HDF5 files of other tools.
- `preparing`: `prepare()` stages, packs and saves in one call.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
