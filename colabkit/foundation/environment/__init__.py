"""The runtime environment: platform, CPUs, RAM under cgroup limits, tmpfs, disks, mounts, GPUs and versions."""
