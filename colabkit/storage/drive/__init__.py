"""Google Drive's mount, by its exact type: mount, find, repair, flush, unmount, clear its cache."""
