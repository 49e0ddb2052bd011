"""`open_pack()` opens a sealed pack, or somebody else's HDF5; its splits are map-style torch data sets.

Opening reads a few kilobytes, whatever the size. Samples are read from a memory map of the file, without HDF5, so any
number of threads and of forked or spawned workers may read one pack.
"""
