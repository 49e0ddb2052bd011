"""`prepare()` returns a local pack of a source; if there is none, it stages a saved pack or packs the source."""
