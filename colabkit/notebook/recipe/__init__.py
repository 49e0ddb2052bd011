"""`train_on()`, which trains on a source with one call, and its report."""
