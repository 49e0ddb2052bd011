"""`open_pack()` opens a sealed pack or any other HDF5 file; its splits are map-style PyTorch datasets.

Opening reads a few kilobytes, regardless of the file's size. Samples are read from a memory map of the file, without
HDF5, so any number of threads and of forked or spawned workers may read one pack.
"""
