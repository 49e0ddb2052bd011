"""`stage()` copies a remote source to local storage with concurrent reads, and verifies the copy."""
