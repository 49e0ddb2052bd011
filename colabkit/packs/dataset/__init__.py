"""`open_pack()` returns the splits of a pack, or of any other HDF5 file, as map-style PyTorch datasets.

Opening a pack and its splits reads a few kilobytes and tables such as the labels, but no samples. Samples of a pack are
read from a memory map, without HDF5, so any number of threads and of forked or spawned workers may read one pack.
"""
