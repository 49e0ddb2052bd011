"""Mount, find, repair, flush and unmount Google Drive, and clear its cache, for all supported mount types."""
