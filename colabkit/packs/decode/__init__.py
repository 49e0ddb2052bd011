"""Image decoding to uint8 arrays with the fastest decoder that matches Pillow's result."""
