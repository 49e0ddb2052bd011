"""The implementation of `Loader`: plan batches, build them in threads, processes or on a GPU, and move them there."""
