"""`stage()` copies a remote source to local storage with concurrent reads, verifies it and publishes it atomically."""
