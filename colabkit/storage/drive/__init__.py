"""Google Drive's mount: made, found again, repaired, flushed, its cache cleared, by the exact type of the mount."""
