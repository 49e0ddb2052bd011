"""`stage()` copies a remote source to local storage: concurrent reads, verification, atomic publishing."""
