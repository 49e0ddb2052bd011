"""`read_probe()`: what a folder, a file or a mount can do, measured before anybody waits for it."""
