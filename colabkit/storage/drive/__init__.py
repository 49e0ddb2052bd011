"""Mount, find, repair, flush and unmount Google Drive and clear its cache, by the exact type of the mount."""
