"""The implementation of `Loader`: plan batches, build them in threads, processes or on a GPU, and copy them to GPUs."""
