"""Image files become uint8 arrays, by the fastest decoder that gives Pillow's result."""
