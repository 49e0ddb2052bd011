"""`stage()` copies a remote source to local storage: read concurrently, checked, published atomically."""
