"""The implementation of `Loader`: plan, build and transfer batches."""
