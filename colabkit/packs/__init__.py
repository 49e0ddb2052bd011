"""Packs: datasets stored in sealed HDF5 files.

- `decode`: image decoding and encoding.
- `labels`: labels and splits, taken from folders, columns or functions.
- `format`: the pack file format: its layout, seal and integrity checks.
- `packing`: `pack()` and `verify()`.
- `dataset`: `open_pack()`, `PackedDataset`, `Mixture`, `FileDataset`, and HDF5 files not written by colabkit.
- `preparing`: `prepare()`, which stages, packs and saves in one call, and `describe_source()`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
