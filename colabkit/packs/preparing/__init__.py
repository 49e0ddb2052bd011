"""`prepare()`: return the local pack of a source, fetching a saved pack or packing the source if there is none."""
