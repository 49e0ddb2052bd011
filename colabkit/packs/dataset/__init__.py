"""`open_pack()` returns the splits of a pack, or of any other HDF5 file, as map-style PyTorch datasets.

Opening a pack reads a few kilobytes, regardless of its size. Samples of a pack are read from a memory map, without
HDF5, so any number of threads and of forked or spawned workers may read one pack.
"""
