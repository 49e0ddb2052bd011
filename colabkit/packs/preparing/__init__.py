"""`prepare()` is the shortest way to a near pack: the one that is near, else the one on Drive, else a new one."""
