"""The implementation of `Loader`: plan batches, build them in threads, in processes or on a GPU, and move them."""
