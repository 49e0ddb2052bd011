"""Packs: datasets of images or arrays in sealed HDF5 files.

- `decode`: decoding and encoding of image files.
- `labels`: labels and splits from folders, columns and functions.
- `format`: layout, seal and checks of a pack file.
- `packing`: `pack()` and `verify()`.
- `dataset`: `open_pack()`, `PackedDataset`, `FileDataset`, and HDF5 files not written by colabkit.
- `preparing`: `prepare()`, which stages, packs and saves in one call.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
