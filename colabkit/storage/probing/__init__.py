"""`probe()` measures how fast a folder, file or mount can be listed and read."""
