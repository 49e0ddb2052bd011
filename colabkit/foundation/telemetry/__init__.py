"""Snapshots of CPU, RAM, storage, network and GPUs during a run, and a thread that takes them."""
