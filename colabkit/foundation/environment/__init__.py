"""Where this runs and what it allows: CPUs, RAM under cgroup limits, tmpfs, disks, mounts, GPUs, versions."""
