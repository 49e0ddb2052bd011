"""Snapshots of the machine while something runs: CPU, RAM, storage, network, GPUs; and a thread that takes them."""
