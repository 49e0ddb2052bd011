"""Mount, find, repair, flush and unmount Google Drive, and clear its cache, for all supported types of mounts."""
