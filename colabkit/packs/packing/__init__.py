"""`pack()` writes files, arrays or records into one sealed, memory-mapped HDF5 file, or into several shards."""
